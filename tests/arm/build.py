"""Builds the ops of packed weights for ARM on another machine, as a program for qemu: calls.cpp with the sources and
flags of setup.py, for the aarch64 wheel of torch.

clang compiles it for the M1, the default processor of Apple's compiler, which is also clang.
"""

import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from unittest import mock

import setuptools
import torch
from torch.utils.cpp_extension import BuildExtension, CppExtension  # noqa: F401  both imported before the mocks

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "arm"
BUILT = BUILD / "built"
TORCH = torch.__version__.partition("+")[0]
CROSS = Path("/usr/aarch64-linux-gnu")  # the C and C++ libraries of Debian's cross compilers
OPS = ("dequantize", "experts", "linear")
PACKAGES = "clang-19 qemu-user g++-aarch64-linux-gnu"
# Libraries of CUDA that the wheel's CPU library is linked to but does not call.
STUBS = ("libcudart.so", "libcupti.so")
# PyTorch asks the system about its processor. qemu would return the answers of this machine, on which its library
# cpuinfo crashes.
SYSTEM = {
    "proc/cpuinfo": (
        "processor\t: 0\nBogoMIPS\t: 48.00\nFeatures\t: fp asimd atomics fphp asimdhp asimdrdm asimddp\n"
        "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n"
    ),
    "sys/devices/system/cpu/cpu0/regs/identification/midr_el1": "0x00000000413fd0c1\n",
    "sys/devices/system/cpu/cpu0/cache/none": "",
    **{f"sys/devices/system/cpu/{name}": "0\n" for name in ("possible", "present", "online")},
}


class BuildError(RuntimeError):
    pass


def clang() -> str:
    missing = [name for name in ("clang++-19", "qemu-aarch64", "aarch64-linux-gnu-ld") if not shutil.which(name)]
    if missing or not CROSS.is_dir():
        raise BuildError(f"Missing: {' and '.join(missing)}. On Debian and Ubuntu: apt-get install {PACKAGES}")
    return "clang++-19"


def run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{shlex.join(map(str, command))}:\n{done.stdout[-6000:]}{done.stderr[-6000:]}")
    return done.stdout


def fetch_torch() -> Path:
    """Headers and libraries of the aarch64 wheel."""
    folder = BUILD / f"torch-{TORCH}"
    if folder.is_dir():
        return folder
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        run(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", "--platform=manylinux_2_28_aarch64", "--python-version=3.12", "--dest", scratch,
            f"torch=={TORCH}")  # fmt: skip
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            wanted = r"torch/(include/|lib/lib(?!.*(cuda|python|nvshmem|shm))[^/]*\.so)"
            wheel.extractall(scratch, [name for name in wheel.namelist() if re.match(wanted, name)])
        write_stubs(Path(scratch) / "torch" / "lib")
        (Path(scratch) / "torch").rename(folder)
    return folder


def write_stubs(libraries: Path) -> None:
    symbols = run("aarch64-linux-gnu-nm", "-D", "--undefined-only", libraries / "libtorch_cpu.so")
    for stub in STUBS:
        wanted = re.findall(rf" U (\w+)@({stub}\S*)", symbols)
        if not wanted:
            continue
        name = wanted[0][1]
        source, versions = libraries / f"{name}.c", libraries / f"{name}.map"
        source.write_text("".join(f"void {function}(void) {{ __builtin_trap(); }}\n" for function, _ in wanted))
        versions.write_text(f"{name} {{ global: *; }};\n")
        run("aarch64-linux-gnu-gcc", "-shared", "-fPIC", "-w", source, f"-Wl,-soname,{name}",
            f"-Wl,--version-script={versions}", "-o", libraries / name)  # fmt: skip


def system_root() -> Path:
    """The root folder of an emulated program."""
    folder = BUILD / "system"
    for name, text in SYSTEM.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if not (folder / "lib").exists():
        (folder / "lib").symlink_to(CROSS / "lib")
    return folder


def one_thread() -> Path:
    """A folder with an omp.h, which clang does not have; everything runs in one thread."""
    folder = BUILD / "one_thread"
    folder.mkdir(parents=True, exist_ok=True)
    names = ("omp_get_num_threads() { return 1; }", "omp_get_thread_num() { return 0; }")
    (folder / "omp.h").write_text("".join(f"inline int {name}\n" for name in names))
    return folder


def arm_extensions() -> list[CppExtension]:
    """The extensions that setup.py would build on such a machine, from setup.py itself."""
    taken = {}
    with (
        mock.patch.object(platform, "machine", lambda: "aarch64"),
        mock.patch.object(setuptools, "setup", lambda **keywords: taken.update(keywords)),
    ):
        runpy.run_path(str(ROOT / "setup.py"))
    return taken["ext_modules"]


def ninja_file(torch_folder: Path, sources: Path, reached: set[str] | None) -> str:
    include = f"-I{sources} -I{ROOT / 'shaders'} -isystem {torch_folder / 'include'} -isystem {one_thread()}"
    compiler = f"{clang()} --target=aarch64-linux-gnu"
    cache = "ccache " if shutil.which("ccache") else ""
    compile_ = f"{cache}{compiler} -fPIE -mcpu=apple-m1 -D_OPENMP=201511 {include} $flags"
    libraries = torch_folder / "lib"
    lines = [
        f"rule compile\n  command = {compile_} -MMD -MF $out.d -c $in -o $out\n  depfile = $out.d\n  deps = gcc",
        f"rule link\n  command = {compiler} $in -o $out -L{libraries} -ltorch_cpu -lc10 -Wl,--allow-shlib-undefined",
    ]
    files = {HERE / "calls.cpp": "-std=c++20 -O1 -DCPU_CAPABILITY=DEFAULT"}
    for extension in arm_extensions():
        flags = " ".join(flag for flag in extension.extra_compile_args if flag != "-fopenmp")
        for source in map(Path, extension.sources):
            if extension.name.endswith("_C") or source.stem in OPS or "_rows" in source.stem:
                files[sources / source.relative_to("csrc")] = flags
    objects = []
    for source, flags in files.items():
        if reached is None or source.stem in reached:
            objects.append(f"{source.stem}.o")
            lines.append(f"build {objects[-1]}: compile {source}\n  flags = {flags}")
        else:
            objects.append(f"{BUILT / source.stem}.o")
    lines.append(f"build calls: link {' '.join(objects)}\ndefault calls\n")
    return "\n".join(lines)


def build(sources: Path = ROOT / "csrc", folder: Path = BUILT, reached: set[str] | None = None) -> Path:
    """The program. If only the files in `reached` differ from the last build, only these are compiled."""
    torch_folder = fetch_torch()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text(ninja_file(torch_folder, sources, reached))
    jobs = os.environ.get("MAX_JOBS") or os.cpu_count()
    run(sys.executable, "-m", "ninja", "-C", folder, "-j", str(jobs))
    return folder / "calls"


def command(program: Path) -> list[str]:
    """The command that starts it."""
    return ["qemu-aarch64", "-cpu", "max,sve=off", "-L", str(system_root()), "-E",
            f"LD_LIBRARY_PATH={fetch_torch() / 'lib'}", str(program)]  # fmt: skip


if __name__ == "__main__":
    print(*command(build()))
