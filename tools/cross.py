"""Compiles and links the macOS extension on this machine, against the real macOS wheels of torch: `make cross`.

    python tools/cross.py                 # the torch versions that the project is checked against
    python tools/cross.py 2.15.0          # one of them
    MACOS_SDK=dir python tools/cross.py   # Apple's own headers instead of the simulator's

The `ziglang` package builds what setup.py would build on a Mac: every csrc/**/*.cpp and csrc/mps/*.mm, with the wheel's
headers. It fails if anything does not compile without warnings, if the extension needs a torch symbol that the wheel's
libraries do not export, or a system symbol that is neither in libSystem nor needed by torch itself, or if a CPU library
would run on one thread: without OpenMP, or with an OpenMP that torch does not load. No library may need a symbol of
Python, so that one build fits Python 3.11 and newer ones. A planted symbol that no torch has must be detected in the
same run. By-product: a wheel per version in dist/cross. The result cannot run here, only on a Mac.
"""

import argparse
import fcntl
import json
import os
import platform
import re
import runpy
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import setuptools
import torch as installed_torch
from torch.utils.cpp_extension import BuildExtension, CppExtension  # noqa: F401  both imported while this is Linux

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from check_wheel import Wheel, record_row  # noqa: E402
from metal_sim.device.build import HEADERS, BuildError, find_ninja  # noqa: E402

VERSIONS = ["2.14.1", "2.15.0"]
ZIG_VERSION = "0.17.0"
CACHE = ROOT / "build" / "cross"
TARGET = "aarch64-macos.14.0"
TAG = "cp311-abi3-macosx_14_0_arm64"
TORCH_LIBRARIES = ["libtorch_cpu.dylib", "libc10.dylib"]
OPENMP = "libomp.dylib"  # part of torch, and not linked to our libraries: see setup.py
PARALLEL = "___kmpc_fork_call"  # the start of an OpenMP loop: without it a CPU library would run on one thread

# What zig's libc++ has in its library. Apple's headers define it inline for macOS 14: by libc++'s availability.h the
# library has std::bad_function_call since macOS 15.4, and std::__hash_memory later.
OF_NEWER_HEADERS = {
    "__ZNSt3__113__hash_memoryEPKvm",
    "__ZNSt3__117bad_function_callD1Ev",
    "__ZTINSt3__117bad_function_callE",
    "__ZTVNSt3__117bad_function_callE",
}
# System symbols that our code needs although torch's libraries do not: classes of Metal, and the sized form of delete,
# which is in libc++ since macOS 10.12. The class of macOS 15 is a weak import.
METAL_CLASSES = {f"_OBJC_CLASS_$_MTL{name}" for name in ("ComputePipelineDescriptor", "ResidencySetDescriptor")}
SYSTEM_SYMBOLS = METAL_CLASSES | {"__ZdlPvm"}


class CrossError(RuntimeError):
    pass


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


# ---------------------------------------------------------------------------------------------- what is needed


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    # This machine's own constraints are for its installed packages; these versions are for another platform.
    if subprocess.run(command, env=os.environ | {"PIP_CONSTRAINT": os.devnull}).returncode:
        raise CrossError(f"pip failed: {' '.join(command)}")


def zig() -> str:
    folder = CACHE / f"zig-{ZIG_VERSION}"
    if not (folder / "ziglang").is_dir():
        say(f"Fetching zig {ZIG_VERSION}, the compiler (100 MB)")
        pip("install", "--no-deps", "--target", folder, f"ziglang=={ZIG_VERSION}")
    return str(folder / "ziglang" / "zig")


def fetch_torch(version: str) -> Path:
    """The headers and libraries in the macOS wheel of that version."""
    folder = CACHE / f"torch-{version}"
    wanted = [*TORCH_LIBRARIES, OPENMP]
    if all((folder / "lib" / name).exists() for name in wanted):
        return folder
    shutil.rmtree(folder, ignore_errors=True)  # left by an older version of this file
    say(f"Fetching torch {version} for macOS (80 to 140 MB)")
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        pip("download", "--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp",
            "--platform=macosx_14_0_arm64", "--dest", scratch, f"torch=={version}")  # fmt: skip
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            names = [n for n in wheel.namelist() if n.startswith("torch/include/") or Path(n).name in wanted]
            wheel.extractall(Path(scratch) / "unpacked", names)
        (Path(scratch) / "unpacked" / "torch").rename(folder)
    return folder


def mac_extensions() -> list[CppExtension]:
    """The extensions that setup.py builds on an Apple Silicon Mac, from setup.py itself, so that they cannot differ."""
    taken = {}
    with (
        mock.patch.object(sys, "platform", "darwin"),
        mock.patch.object(platform, "machine", lambda: "arm64"),
        mock.patch.object(installed_torch, "__version__", VERSIONS[0]),  # setup.py refuses older ones on a Mac
        mock.patch.object(setuptools, "setup", lambda **keywords: taken.update(keywords)),
    ):
        runpy.run_path(str(ROOT / "setup.py"))
    return taken["ext_modules"]


# ---------------------------------------------------------------------------------------------- compile and link


def sdk_flags(sdk: Path) -> list[str]:
    """Apple's own headers. zig's C headers come before them and are for another macOS, so this sets the version."""
    versions = {"MAX_ALLOWED": json.loads((sdk / "SDKSettings.json").read_text())["Version"]}
    versions["MIN_REQUIRED"] = TARGET.partition("macos.")[2]
    parts = {name: [int(part) for part in version.split(".")] for name, version in versions.items()}
    macros = [f"-D__MAC_OS_X_VERSION_{name}={major}{minor:02}00" for name, (major, minor, *_) in parts.items()]
    return [f"-isystem {sdk}/usr/include", f"-F {sdk}/System/Library/Frameworks", *macros]


def compile_flags(torch: Path) -> list[str]:
    flags = [f"-target {TARGET}", "-fblocks", "-fno-objc-arc", "-fno-sanitize=undefined", "-Werror"]
    if sdk := os.environ.get("MACOS_SDK"):
        flags += sdk_flags(Path(sdk))
    else:
        flags += [f"-I{HEADERS}"]
    return [*flags, f"-isystem {torch}/include", f"-isystem {torch}/include/torch/csrc/api/include"]


def ours(extension: CppExtension) -> list[str]:
    """The extension's include folders and flags, without those of the torch installed here."""
    includes = [f"-I{folder}" for folder in extension.include_dirs if "/torch/include" not in folder]
    macros = [f"-D{name}={value}" for name, value in extension.define_macros]
    return includes + macros + extension.extra_compile_args


def ninja_file(compiler: str, torch: Path, extensions: list[CppExtension]) -> str:
    libraries = " ".join(str(torch / "lib" / name) for name in TORCH_LIBRARIES)
    # zig c++ would link its own libc++ statically, and torch could not catch its exceptions. So zig cc links.
    link = f"{compiler} cc -target {TARGET} -shared $in -o $out {libraries} -Wl,-undefined,dynamic_lookup"
    link += " -Wl,-rpath,@loader_path/../torch/lib -Wl,-headerpad_max_install_names"
    compile_ = f"{compiler} c++ {' '.join(compile_flags(torch))} $flags -MMD -MF $out.d -c $in -o $out"
    lines = [
        f"rule compile\n  command = {compile_}\n  depfile = $out.d",
        f"rule link\n  command = {link}",
        f"build planted.o: compile {ROOT / 'tools' / 'planted.cpp'}\n  flags = -std=c++20",
    ]
    for extension in extensions:
        name, objects = extension.name.split(".")[-1], []
        for source in extension.sources:
            objects.append(f"{name}/{source.replace('/', '_')}.o")
            lines.append(f"build {objects[-1]}: compile {ROOT / source}\n  flags = {' '.join(ours(extension))}")
        lines.append(f"build {name}.so: link {' '.join(objects)}")
        if name == "_C":
            lines.append(f"build planted.so: link {' '.join(objects)} planted.o")
    return "\n".join(lines) + "\n"


def build(version: str, torch: Path, extensions: list[CppExtension]) -> dict[str, Path]:
    folder = CACHE / f"built-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text(ninja_file(zig(), torch, extensions))
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(CACHE / "zig"), "ZIG_LOCAL_CACHE_DIR": str(CACHE / "zig")}
    jobs = os.environ.get("MAX_JOBS", "2")
    if subprocess.run([find_ninja(), "-C", folder, "-j", jobs, "--quiet"], env=environment).returncode:
        raise CrossError(f"the extension does not compile for macOS against torch {version}; the output is above")
    return {path.stem: path for path in folder.glob("*.so")}


# ---------------------------------------------------------------------------------------------- symbols


@dataclass
class MachO:
    """The symbols of a 64-bit Mach-O library."""

    exports: set[str]
    imports: set[str]
    signed: bool


def read_macho(path: Path) -> MachO:
    data = path.read_bytes()
    magic, cpu, _, _, commands = struct.unpack_from("<5I", data)
    if magic != 0xFEEDFACF or cpu != 0x0100000C:
        raise CrossError(f"{path.name} is no 64-bit arm64 Mach-O library")
    macho, at = MachO(set(), set(), False), 32
    for _ in range(commands):
        command, size = struct.unpack_from("<2I", data, at)
        if command == 0x2:  # LC_SYMTAB
            macho.imports = undefined_symbols(data, *struct.unpack_from("<4I", data, at + 8))
        elif command == 0x80000033:  # LC_DYLD_EXPORTS_TRIE
            macho.exports = trie_names(data, *struct.unpack_from("<2I", data, at + 8))
        elif command in (0x22, 0x80000022):  # LC_DYLD_INFO
            macho.exports = trie_names(data, *struct.unpack_from("<2I", data, at + 40))
        elif command == 0x1D:  # LC_CODE_SIGNATURE
            macho.signed = True
        at += size
    return macho


def undefined_symbols(data: bytes, symbols: int, count: int, strings: int, _: int) -> set[str]:
    names = set()
    for name, kind, _, _, _ in struct.iter_unpack("<IBBHQ", data[symbols : symbols + 16 * count]):
        if kind & 0xE0 == 0 and kind & 0x0E == 0 and kind & 0x01:  # no debug entry, undefined, external
            names.add(data[strings + name : data.index(b"\0", strings + name)].decode())
    return names


def trie_names(data: bytes, start: int, size: int) -> set[str]:
    """All names in an export trie: each node has a terminal part, then edges with a text and the child's offset."""
    trie, names, todo = data[start : start + size], set(), [(0, b"")]
    while todo:
        node, prefix = todo.pop()
        length, at = uleb128(trie, node)
        if length:
            names.add(prefix.decode())
        at += length
        edges, at = trie[at], at + 1
        for _ in range(edges):
            end = trie.index(b"\0", at)
            child, after = uleb128(trie, end + 1)
            todo.append((child, prefix + trie[at:end]))
            at = after
    return names


def uleb128(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def is_torch_symbol(name: str) -> bool:
    """Names in, or templates over, torch's namespaces: at, c10, caffe2 and torch."""
    return bool(re.search(r"\d(?:at|c10|torch|caffe2)(?=\d|[A-Z])|N[KVO]*(?:2at|3c10|5torch|6caffe2)|aoti_torch", name))


def unresolved(extension: MachO, torch: list[MachO], system: set[str]) -> dict[str, str]:
    """The extension's imports that would not bind on a Mac, each with the reason."""
    exported = set.union(*(library.exports for library in torch))
    shared = set.union(*(library.imports for library in torch))  # Apple's linker has found these
    problems = {}
    for name in sorted(extension.imports - exported):
        if is_torch_symbol(name):
            problems[name] = "no library of this torch exports it"
        elif name not in system | shared | SYSTEM_SYMBOLS | OF_NEWER_HEADERS:
            problems[name] = "neither libSystem nor torch's own libraries know it"
    return problems


def libsystem_symbols() -> set[str]:
    """Every name in zig's text stub of macOS's libSystem."""
    stub = next(Path(zig()).parent.glob("lib/libc/darwin/libSystem.tbd"))
    return set(re.findall(r"[A-Za-z_$][\w$.]*", stub.read_text()))


def check(version: str, built: dict[str, Path], torch: Path) -> None:
    libraries = [read_macho(torch / "lib" / name) for name in [*TORCH_LIBRARIES, OPENMP]]
    system, found = libsystem_symbols(), {name: read_macho(path) for name, path in built.items()}
    for name, macho in found.items():
        problems = unresolved(macho, libraries, system)
        if name == "planted":
            if len(problems) != 1 or "planted" not in next(iter(problems)):
                raise CrossError(f"the planted symbol was not caught alone: {problems}")
            continue
        if problems:
            lines = "\n".join(f"  {symbol}: {reason}" for symbol, reason in problems.items())
            raise CrossError(f"{name}.so would not load into torch {version} on macOS:\n{lines}")
        if name.startswith("_cpu_") and PARALLEL not in macho.imports:
            raise CrossError(f"{name}.so would run on one thread: it does not need {PARALLEL}")
        if of_python := [symbol for symbol in macho.imports if symbol.startswith("_Py")]:
            raise CrossError(f"{name}.so needs {min(of_python)}, so it may not fit every Python that its wheel names")
        if not macho.signed:
            raise CrossError(f"{name}.so is not signed; macOS on Apple Silicon loads signed code only")
        count = sum(is_torch_symbol(symbol) for symbol in macho.imports)
        say(f"torch {version}: {name}.so, {len(macho.imports)} imports all found, {count} of them torch's")


# ---------------------------------------------------------------------------------------------- the wheel


def write_wheel(version: str, built: dict[str, Path]) -> Path:
    """The package with the macOS libraries, as pip on a Mac would build it."""
    minor = ".".join(version.split(".")[:2])
    folder = ROOT / "dist" / "cross" / f"torch-{minor}"
    shutil.rmtree(folder, ignore_errors=True)  # an older version's wheel
    folder.mkdir(parents=True)
    info = package_metadata(version)
    name = next(iter(info)).split("/")[0]
    package = [p for p in (ROOT / "torch_moe_metal").rglob("*") if p.suffix in (".py", ".html") or p.name == "py.typed"]
    files = {str(path.relative_to(ROOT)): path.read_bytes() for path in sorted(package)}
    files |= {f"torch_moe_metal/{lib}.so": path.read_bytes() for lib, path in built.items() if lib != "planted"}
    files |= info
    wheel = f"Wheel-Version: 1.0\nGenerator: torch_moe_metal cross.py\nRoot-Is-Purelib: false\nTag: {TAG}\n"
    files[f"{name}/WHEEL"] = wheel.encode()
    target = folder / f"{name.removesuffix('.dist-info')}-{TAG}.whl"
    rows = [record_row(path, content) for path, content in files.items()] + [[f"{name}/RECORD", "", ""]]
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{name}/RECORD", "".join(",".join(row) + "\n" for row in rows))
    if problems := list(Wheel(target).problems(minor)):
        raise CrossError("\n  ".join([f"{target.name} is wrong:", *problems]))
    return target


METADATA = """
import sys, torch
torch.__version__ = sys.argv.pop()
from setuptools import build_meta
build_meta.prepare_metadata_for_build_wheel(sys.argv.pop())
"""


def package_metadata(version: str) -> dict[str, bytes]:
    """The dist-info folder that setup.py makes for that torch."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-c", METADATA, scratch, version]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise CrossError(f"setup.py's metadata for torch {version}:\n{done.stdout}{done.stderr}")
        made = sorted(p for p in Path(scratch).glob("*.dist-info/**/*") if p.is_file())
        return {str(path.relative_to(scratch)): path.read_bytes() for path in made}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=f"of torch; else {', '.join(VERSIONS)}")
    versions = parser.parse_args().versions
    CACHE.mkdir(parents=True, exist_ok=True)
    lock = open(CACHE / "lock", "w")  # noqa: SIM115  held until the process ends: one `make cross` at a time
    fcntl.flock(lock, fcntl.LOCK_EX)
    extensions = mac_extensions()
    for version in versions:
        torch = fetch_torch(version)
        say(f"torch {version}: compiling {sum(len(e.sources) for e in extensions)} files for macOS on arm64")
        built = build(version, torch, extensions)
        check(version, built, torch)
        say(f"torch {version}: {write_wheel(version, built).relative_to(ROOT)}")


if __name__ == "__main__":
    try:
        main()
    except (CrossError, BuildError) as error:
        sys.exit(f"make cross: {error}")
