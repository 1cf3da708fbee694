"""Builds the simulated device and a project's own sources for Linux, incrementally."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
HEADERS = HERE / "headers"
ENGINE = HERE.parent / "engine"
BUILD = HERE.parent / "build"  # the simulator's in device, each project's in projects/<name>
SIMULATOR = BUILD / "device" / "libmetal_sim.so"
PCH = BUILD / "device" / "torch.pch"
PERSONALITY = BUILD / "device" / "personality.cpp.o"

ENGINE_SOURCES = ["engine.cpp", "library.cpp", "scheduler.cpp"]
DEVICE_SOURCES = ["metal.mm", "stream.mm", "device.cpp", "api.cpp", "personality.cpp"]
PACKAGES = "clang-19 libobjc-12-dev libgnustep-base-dev libblocksruntime-dev"


class BuildError(RuntimeError):
    pass


@dataclass(frozen=True)
class Project:
    """The part of an extension that uses Metal through PyTorch's MPS stream. It is built for the simulated device and
    loaded into PyTorch, with its ops."""

    name: str  # of its library, and of its folder below build/projects
    sources: Sequence[Path]  # .mm and .cpp
    include: Sequence[Path] = ()  # folders
    prepare: Callable[[Path], object] | None = None  # writes headers into this folder, which is an include folder

    @property
    def folder(self) -> Path:
        return BUILD / "projects" / self.name

    @property
    def library(self) -> Path:
        return self.folder / f"lib{self.name}.so"


def clang() -> str:
    """Clang is needed because GCC does not support blocks."""
    others = (f"clang++-{version}" for version in range(22, 15, -1))
    for name in [os.environ.get("METAL_SIM_CXX"), "clang++-19", "clang++", *others]:
        if name and shutil.which(name):
            return name
    raise BuildError(f"Missing: clang++ 16 or newer. On Debian and Ubuntu: apt-get install {PACKAGES}")


def objc_headers() -> list[Path]:
    """The folders of GCC's objc/objc.h and GNUstep's Foundation/Foundation.h."""
    gcc = sorted(Path("/usr/lib/gcc").glob("*/*/include/objc/objc.h"), key=lambda p: int(p.parts[5].split(".")[0]))
    gnustep = [Path(p) for p in ("/usr/include/GNUstep", "/usr/local/include") if Path(p, "Foundation").is_dir()]
    block = Path("/usr/include/Block.h")
    for found, what in [(gcc, "objc/objc.h"), (gnustep, "GNUstep's Foundation"), (block.exists(), "Block.h")]:
        if not found:
            raise BuildError(f"Missing: {what}. On Debian and Ubuntu: apt-get install {PACKAGES}")
    return [gnustep[0], gcc[-1].parents[1]]


def find_ninja() -> str:
    beside_python = Path(sys.executable).parent / "ninja"
    found = str(beside_python) if beside_python.exists() else shutil.which("ninja")
    if not found:
        raise BuildError("Missing: ninja. pip install ninja")
    return found


def install_what_is_missing() -> None:
    """Only as root on Debian and Ubuntu. Otherwise the error message has the command."""
    try:
        clang(), objc_headers()
    except BuildError as missing:
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            raise
        print(f"==> {missing}", flush=True)
        quiet = {"env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, "check": True, "stdout": subprocess.DEVNULL}
        subprocess.run(["apt-get", "update", "-qq"], **quiet)
        subprocess.run(["apt-get", "install", "-y", "-qq", *PACKAGES.split()], **quiet)


def torch_flags() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [f"-isystem{include}", f"-isystem{include}/torch/csrc/api/include", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]


def rules(include: Sequence[Path] = ()) -> list[str]:
    """No `deps = gcc`: ninja would keep all dependencies in one file, which a killed build can corrupt."""
    compiler, system = clang(), objc_headers()
    flags = ["-std=c++20", "-fPIC", "-O2", "-g1", "-fblocks", "-Wall", "-MMD", "-MF $out.d", *torch_flags()]
    flags += [f"-I{folder}" for folder in include]
    objc = ["-fobjc-runtime=gcc", "-fobjc-exceptions", "-fconstant-string-class=NSConstantString"]
    objc += ["-D_NATIVE_OBJC_EXCEPTIONS=1", f"-I{HEADERS}", *(f"-isystem{folder}" for folder in system)]
    torch_lib = Path(torch.__file__).parent / "lib"
    link = [f"-L{torch_lib}", f"-Wl,-rpath,{torch_lib}", f"-L{system[1].parent}", "-Wl,-z,defs"]
    # The runtime of blocks comes first, because GNUstep has functions of the same names that do nothing.
    link += ["-ltorch", "-ltorch_cpu", "-lc10", "-lBlocksRuntime", "-lgnustep-base", "-lobjc", "-ldl"]
    cxx, objcxx = " ".join([compiler, *flags]), " ".join([compiler, *flags, *objc])
    return [
        f"rule cxx\n  command = {cxx} -c $in -o $out\n  depfile = $out.d",
        f"rule objc\n  command = {objcxx} -c $in -o $out $pch\n  depfile = $out.d",
        f"rule pch\n  command = {objcxx} -x objective-c++-header $in -o $out\n  depfile = $out.d",
        f"rule link\n  command = {compiler} -shared $in -o $out -Wl,-soname,$soname {' '.join(link)}",
    ]


def compile_line(source: Path, target: str | Path) -> str:
    return f"build {target}: {'objc' if source.suffix == '.mm' else 'cxx'} {source}"


def link_line(library: Path, inputs: Sequence[str | Path]) -> str:
    """The soname is the file name alone, so that a project's library finds the simulator's, which is already loaded."""
    return f"build {library}: link {' '.join(map(str, inputs))}\n  soname = {library.name}"


def simulator_ninja() -> str:
    sources = [*(ENGINE / name for name in ENGINE_SOURCES), *(HERE / name for name in DEVICE_SOURCES)]
    objects = {source: SIMULATOR.parent / f"{source.name}.o" for source in sources}
    lines = [*rules(), f"build {PCH}: pch {HERE / 'torch_pch.h'}"]
    lines += [compile_line(source, target) for source, target in objects.items()]
    return "\n".join([*lines, link_line(SIMULATOR, list(objects.values()))]) + "\n"


def project_ninja(project: Project) -> str:
    """Object files are named by the part of the path in which the sources differ."""
    sources = [Path(source).absolute() for source in project.sources]
    root = os.path.commonpath([source.parent for source in sources])
    objects = {source: str(source.relative_to(root)).replace("/", "_") + ".o" for source in sources}
    lines = rules([*(Path(folder).absolute() for folder in project.include), project.folder])
    for source, target in objects.items():
        lines.append(compile_line(source, target))
        if source.suffix == ".mm":
            lines[-1] += f" | {PCH}\n  pch = -include-pch {PCH}"
    return "\n".join([*lines, link_line(project.library, [*objects.values(), PERSONALITY, SIMULATOR])]) + "\n"


def run_ninja(folder: Path, text: str, what: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text(text)
    jobs = os.environ.get("MAX_JOBS", "2")
    run = subprocess.run([find_ninja(), "-C", folder, "-j", jobs], capture_output=True, text=True)
    if run.returncode:
        raise BuildError(f"{what} does not build:\n{run.stdout[-8000:]}{run.stderr[-2000:]}")


def build_project(project: Project) -> None:
    if not project.sources:
        raise BuildError(f"project {project.name} names no sources")
    if missing := [str(source) for source in project.sources if not Path(source).is_file()]:
        raise BuildError(f"project {project.name}: there is no {', '.join(missing)}")
    project.folder.mkdir(parents=True, exist_ok=True)
    if project.prepare:
        project.prepare(project.folder)
    run_ninja(project.folder, project_ninja(project), f"project {project.name}")


def build(projects: Sequence[Project] = ()) -> None:
    BUILD.mkdir(exist_ok=True)
    with open(BUILD / "lock", "w") as lock:  # parallel builds would corrupt ninja's log
        fcntl.flock(lock, fcntl.LOCK_EX)
        install_what_is_missing()
        print("==> Building the simulated Metal, if anything changed (some minutes the first time)", file=sys.stderr)
        run_ninja(SIMULATOR.parent, simulator_ninja(), "the simulated Metal")
        for project in projects:
            build_project(project)
