"""Builds the simulated Metal, and the project's csrc/mps/*.mm against it, for Linux. Only what changed is built again.

`python tests/metal_sim/build.py` builds; so does `metal_sim.load()`.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = HERE / "build"

sys.path.insert(0, str(ROOT / "shaders"))
from embed import write_header  # noqa: E402

SIMULATOR = [
    "engine.cpp",
    "library.cpp",
    "scheduler.cpp",
    "metal.mm",
    "stream.mm",
    "device.cpp",
    "api.cpp",
    "personality.cpp",
]
PACKAGES = "clang-19 libobjc-12-dev libgnustep-base-dev libblocksruntime-dev"


class BuildError(RuntimeError):
    pass


def clang() -> str:
    """Clang, since GCC has no blocks."""
    for name in [
        os.environ.get("METAL_SIM_CXX"),
        "clang++-19",
        "clang++",
        *(f"clang++-{v}" for v in range(22, 15, -1)),
    ]:
        if name and shutil.which(name):
            return name
    raise BuildError(f"Missing: clang++ 16 or newer. On Debian and Ubuntu: apt-get install {PACKAGES}")


def objc_headers() -> list[Path]:
    """The folders that hold GCC's objc/objc.h and GNUstep's Foundation/Foundation.h."""
    gcc = sorted(Path("/usr/lib/gcc").glob("*/*/include/objc/objc.h"), key=lambda p: int(p.parts[5].split(".")[0]))
    gnustep = [Path(p) for p in ("/usr/include/GNUstep", "/usr/local/include") if Path(p, "Foundation").is_dir()]
    block = Path("/usr/include/Block.h")
    for found, what in [(gcc, "objc/objc.h"), (gnustep, "GNUstep's Foundation"), (block.exists(), "Block.h")]:
        if not found:
            raise BuildError(f"Missing: {what}. On Debian and Ubuntu: apt-get install {PACKAGES}")
    return [HERE / "headers", gnustep[0], gcc[-1].parents[1]]


def install_what_is_missing() -> None:
    """As root on Debian and Ubuntu. Everybody else is told the command by the error."""
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


def rules() -> list[str]:
    """No `deps = gcc`: ninja would keep all notes in one file, which a killed build spoils for every later one."""
    compiler = clang()
    headers = objc_headers()
    flags = ["-std=c++20", "-fPIC", "-O2", "-g1", "-fblocks", "-Wall", "-MMD", "-MF $out.d", *torch_flags()]
    flags += [f"-I{folder}" for folder in (ROOT / "csrc", ROOT / "shaders", BUILD, HERE)]
    objc = ["-fobjc-runtime=gcc", "-fobjc-exceptions", "-fconstant-string-class=NSConstantString"]
    objc += ["-D_NATIVE_OBJC_EXCEPTIONS=1", f"-I{headers[0]}", *(f"-isystem{folder}" for folder in headers[1:])]
    torch_lib = Path(torch.__file__).parent / "lib"
    link = [f"-L{torch_lib}", f"-Wl,-rpath,{torch_lib}", f"-L{headers[2].parent}", "-L.", "-Wl,-rpath,'$$ORIGIN'"]
    link += ["-ltorch", "-ltorch_cpu", "-lc10", "-lgnustep-base", "-lobjc", "-lBlocksRuntime", "-ldl", "-Wl,-z,defs"]
    cxx, objcxx = " ".join([compiler, *flags]), " ".join([compiler, *flags, *objc])
    return [
        f"rule cxx\n  command = {cxx} -c $in -o $out\n  depfile = $out.d",
        f"rule objc\n  command = {objcxx} -c $in -o $out $pch\n  depfile = $out.d",
        f"rule pch\n  command = {objcxx} -x objective-c++-header $in -o $out\n  depfile = $out.d",
        f"rule link\n  command = {compiler} -shared $in -o $out {' '.join(link)} $extra",
    ]


def ninja_file(targets: dict[str, list[Path]]) -> str:
    """One shared library per target; the first is the simulator, and the others link against it."""
    lines = [*rules(), f"build torch.pch: pch {HERE / 'torch_pch.h'}"]
    simulator, objects = next(iter(targets)), {}
    for target, sources in targets.items():
        for source in sources:
            if source not in objects:
                objects[source] = f"{source.parent.name}_{source.name}.o"
                lines.append(f"build {objects[source]}: {'objc' if source.suffix == '.mm' else 'cxx'} {source}")
                if source.is_relative_to(ROOT / "csrc"):
                    lines[-1] += " | torch.pch\n  pch = -include-pch torch.pch"
        after = "" if target == simulator else f" | {simulator}\n  extra = -l:{simulator}"
        lines.append(f"build {target}: link {' '.join(objects[source] for source in sources)}{after}")
    return "\n".join(lines) + "\n"


def build(misuse: bool = False) -> dict[str, Path]:
    """Build and return the libraries: the simulator, the project's ops, and the tests' rule breakers if asked for."""
    BUILD.mkdir(exist_ok=True)
    with open(BUILD / "lock", "w") as lock:  # two processes that build at once would spoil ninja's notes
        fcntl.flock(lock, fcntl.LOCK_EX)
        install_what_is_missing()
        return build_locked(misuse)


def build_locked(misuse: bool) -> dict[str, Path]:
    write_header(BUILD / "shader_texts.h")
    personality = HERE / "personality.cpp"
    targets = {
        "libmetal_sim.so": [HERE / name for name in SIMULATOR],
        "libmetal_sim_ops.so": [*sorted((ROOT / "csrc" / "mps").glob("*.mm")), personality],
        "libmetal_sim_misuse.so": [HERE / "misuse.mm", personality],
    }
    wanted = list(targets) if misuse else list(targets)[:2]
    text = ninja_file(targets)
    file = BUILD / "build.ninja"
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
    jobs = os.environ.get("MAX_JOBS", "2")
    print("==> Building the simulated Metal, if anything changed (some minutes the first time)", file=sys.stderr)
    run = subprocess.run([find_ninja(), "-C", BUILD, "-j", jobs, *wanted], capture_output=True, text=True)
    if run.returncode:
        raise BuildError(f"the simulated Metal does not build:\n{run.stdout[-8000:]}{run.stderr[-2000:]}")
    return {Path(name).stem.removeprefix("lib"): BUILD / name for name in wanted}


def find_ninja() -> str:
    beside_python = Path(sys.executable).parent / "ninja"
    found = str(beside_python) if beside_python.exists() else shutil.which("ninja")
    if not found:
        raise BuildError("Missing: ninja. pip install ninja")
    return found


if __name__ == "__main__":
    try:
        for library in build(misuse=True).values():
            print(library.relative_to(ROOT))
    except BuildError as error:
        sys.exit(str(error))
