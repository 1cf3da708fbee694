"""Checks a wheel of this package: `python tools/check_wheel.py WHEEL... [--torch 2.13]`.

Wheels are built in three ways (`pip wheel` on Linux and on a Mac, tools/cross.py for a Mac on Linux), and pip trusts
their names and metadata. So this checks the version and the torch that the wheel requires, that it contains exactly the
modules and libraries, the hashes, and for each library its format, the oldest supported system and its dependencies.
"""

import argparse
import base64
import csv
import hashlib
import re
import struct
import sys
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path, PurePosixPath

PACKAGE = "torch_moe_metal"
ROOT = Path(__file__).resolve().parents[1]
MACHINES = {"x86_64": 62, "aarch64": 183}  # ELF's numbers
CPU_LIBRARIES = {"x86_64": {"avx512", "avx2", "default"}, "aarch64": {"default"}, "arm64": {"default"}}
# The minor versions of glibc (2.x) with well-known distributions, and their libstdc++ (GLIBCXX_3.4.x).
LINUXES = [(28, 24), (31, 28), (34, 29), (35, 30), (39, 33)]
TORCH = {"libtorch.so", "libtorch_cpu.so", "libc10.so", "libtorch.dylib", "libtorch_cpu.dylib", "libc10.dylib"}
# Linux's own libraries; all others would have to be in the wheel. No libgomp: the OpenMP runtime is torch's.
SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d|ld-linux.*|/usr/lib/.*|/System/Library/.*")


def record_row(name: str, content: bytes) -> list[str]:
    """A file's row in RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return [name, f"sha256={digest}", str(len(content))]


def manylinux(libraries: list[bytes]) -> int | None:
    """The oldest glibc (the x of 2.x, out of LINUXES) whose systems satisfy all libraries, if there is one."""
    needs = {"GLIBC_2": 0, "GLIBCXX_3.4": 0}
    for content in libraries:
        for name, minor in re.findall(rb"\0(GLIBC_2|GLIBCXX_3\.4)\.(\d+)", content):
            needs[name.decode()] = max(needs[name.decode()], int(minor))
    return next((glibc for glibc, cxx in LINUXES if needs["GLIBC_2"] <= glibc and needs["GLIBCXX_3.4"] <= cxx), None)


def text_at(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def check_elf(data: bytes, machine: str) -> Iterator[str]:
    """Check a 64-bit little-endian library for Linux: its machine and dependencies."""
    if data[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", data, 18)[0] != MACHINES[machine]:
        yield f"is no ELF library for {machine}"
        return
    start, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<2H", data, 54)
    segments = [struct.unpack_from("<2I4Q", data, start + i * size) for i in range(count)]
    dynamic = next(s for s in segments if s[0] == 2)
    entries = list(struct.iter_unpack("<2Q", data[dynamic[2] : dynamic[2] + dynamic[5]]))
    address = next(value for tag, value in entries if tag == 5)  # DT_STRTAB, an address in memory
    strings = next(address - s[3] + s[2] for s in segments if s[0] == 1 and s[3] <= address < s[3] + s[5])
    yield from check_linked({text_at(data, strings + value) for tag, value in entries if tag == 1})
    if any(tag in (15, 29) for tag, _ in entries):
        yield "has a path of its own for libraries (RPATH), which is the building machine's"


def check_macho(data: bytes, macos: str) -> Iterator[str]:
    """Check a 64-bit arm64 library for macOS: its oldest system and dependencies."""
    if struct.unpack_from("<2I", data) != (0xFEEDFACF, 0x0100000C):
        yield "is no Mach-O library for arm64"
        return
    at, linked, oldest, signed = 32, set(), None, False
    for _ in range(struct.unpack_from("<I", data, 16)[0]):
        command, size = struct.unpack_from("<2I", data, at)
        if command == 0xC:  # LC_LOAD_DYLIB
            linked.add(text_at(data, at + struct.unpack_from("<I", data, at + 8)[0]).removeprefix("@rpath/"))
        elif command == 0x32:  # LC_BUILD_VERSION
            version = struct.unpack_from("<I", data, at + 12)[0]
            oldest = f"{version >> 16}.{version >> 8 & 0xFF}"
        signed |= command == 0x1D  # LC_CODE_SIGNATURE
        at += size
    if oldest != macos:
        yield f"is for macOS {oldest} and newer, the wheel's name says {macos}"
    if not signed:
        yield "is not signed, and macOS on Apple silicon loads signed code only"
    yield from check_linked(linked)


def check_linked(libraries: set[str]) -> Iterator[str]:
    if not any(name.startswith("libtorch_cpu.") for name in libraries):
        yield "is not linked to libtorch_cpu"
    for name in sorted(libraries):
        if name not in TORCH and not SYSTEM.fullmatch(name):
            yield f"is linked to {name}, which neither torch nor the system has in that place"


class Wheel:
    def __init__(self, path: Path):
        self.path = path
        self.name, self.version, self.tag = path.stem.split("-", 2)
        with zipfile.ZipFile(path) as archive:
            self.files = {info.filename: archive.read(info) for info in archive.infolist() if not info.is_dir()}
        self.info = f"{self.name}-{self.version}.dist-info"

    def problems(self, torch: str | None) -> Iterator[str]:
        """One line for each error; `torch` is the required minor version, if it is known."""
        missing = [name for name in ("METADATA", "WHEEL", "RECORD") if f"{self.info}/{name}" not in self.files]
        if missing:
            yield f"{self.info} has no {', '.join(missing)}"
            return
        yield from self.metadata(torch)
        yield from self.record()
        python_abi, _, platform = self.tag.rpartition("-")
        system = re.fullmatch(r"(macosx)_(\d+_\d+)_(arm64)|(?:many)?(linux)_(?:2_(\d+)_)?(x86_64|aarch64)", platform)
        if python_abi != "cp311-abi3" or not system:
            yield f"unexpected tag {self.tag}: expected cp311-abi3 for macosx_*_arm64, manylinux_2_* or linux_*"
            return
        mac, macos, arm64, _, glibc, machine = system.groups()
        yield from self.contents(CPU_LIBRARIES[arm64 or machine])
        libraries = {name: data for name, data in self.files.items() if name.endswith(".so")}
        for name, data in libraries.items():
            for problem in check_macho(data, macos.replace("_", ".")) if mac else check_elf(data, machine):
                yield f"{name} {problem}"
        needed = manylinux(list(libraries.values()))
        if glibc and (needed is None or needed > int(glibc)):
            yield f"its libraries need the systems of glibc 2.{needed}, its name says 2.{glibc}"

    def metadata(self, torch: str | None) -> Iterator[str]:
        metadata = message_from_bytes(self.files[f"{self.info}/METADATA"])
        about = message_from_bytes(self.files[f"{self.info}/WHEEL"])
        released = re.findall(rb'^__version__ = "(.+)"$', self.files.get(f"{PACKAGE}/__init__.py", b""), re.MULTILINE)
        minor = torch or self.version.partition("+torch")[2]
        expected = "".join(v.decode() for v in released) + f"+torch{minor}"
        found = [
            ("name", self.name, PACKAGE),
            ("version", self.version, expected),
            ("METADATA's Name", metadata["Name"].replace("-", "_"), PACKAGE),
            ("METADATA's Version", metadata["Version"], expected),
            ("METADATA's Requires-Python", metadata["Requires-Python"], ">=3.11"),
            ("WHEEL's Tag", about.get_all("Tag"), [self.tag]),
            ("WHEEL's Root-Is-Purelib", about["Root-Is-Purelib"], "false"),
        ]
        yield from (f"{what} is {value}, not {wanted}" for what, value, wanted in found if value != wanted)
        needs = [r for r in metadata.get_all("Requires-Dist", []) if "extra" not in r]
        if needs != [f"torch=={minor}.*"]:
            yield f"it requires {needs}, not torch=={minor}.*"

    def record(self) -> Iterator[str]:
        rows = {row[0]: row for row in csv.reader(self.files[f"{self.info}/RECORD"].decode().splitlines())}
        wanted = {name: record_row(name, data) for name, data in self.files.items()}
        wanted[f"{self.info}/RECORD"] = [f"{self.info}/RECORD", "", ""]
        for name in sorted(rows.keys() | wanted.keys()):
            if rows.get(name) != wanted.get(name):
                yield f"RECORD is wrong about {name}"

    def contents(self, cpu_isas: set[str]) -> Iterator[str]:
        """The wheel must contain the checkout's modules, this platform's libraries, and nothing else."""
        modules = [p for p in (ROOT / PACKAGE).rglob("*") if p.suffix in (".py", ".html") or p.name == "py.typed"]
        wanted = {str(PurePosixPath(p.relative_to(ROOT))) for p in modules}
        wanted |= {f"{PACKAGE}/{library}.so" for library in {"_C", *(f"_cpu_{isa}" for isa in cpu_isas)}}
        of_info = ("METADATA", "WHEEL", "RECORD", "top_level.txt", "licenses/LICENSE")
        wanted |= {f"{self.info}/{name}" for name in of_info}
        yield from (f"{name} is missing" for name in sorted(wanted - self.files.keys()))
        yield from (f"{name} does not belong there" for name in sorted(self.files.keys() - wanted))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    parser.add_argument(
        "--torch", metavar="MINOR", help="the torch that it must require, as in 2.13 (default: that of its version)"
    )
    parser.add_argument("--release", metavar="VERSION", help="the version they must all have, as in 0.1.0")
    options = parser.parse_args()
    failed = False
    for path in options.wheels:
        wheel = Wheel(path)
        problems = list(wheel.problems(options.torch))
        if options.release and wheel.version.partition("+")[0] != options.release:
            problems.append(f"it is not of release {options.release}")
        print(f"{path.name}: {'right' if not problems else 'WRONG'}", *problems, sep="\n  ")
        failed |= bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
