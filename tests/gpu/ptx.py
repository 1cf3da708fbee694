"""Compiles the shaders for an NVIDIA GPU: the simulator's translator makes C++, and clang compiles it to PTX.

    python tests/gpu/ptx.py FOLDER [NAME ...]   # every shader (or these: linear, linear-affine4), as FOLDER/<name>.ptx

It needs clang 19 and CUDA's libdevice (a file of maths functions), but no GPU. clang inlines as Metal's compiler does.
If record.py has written traces to the folder, each kernel states the largest number of threads of its launches.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENGINE = ROOT / "tests" / "metal_sim" / "engine"
sys.path[:0] = [str(ROOT / "shaders"), str(ENGINE)]

import embed  # noqa: E402
import translate  # noqa: E402

PLANTED_RACE = ENGINE / "mutants" / "missing_barrier.metal"

TARGET = ["--target=nvptx64-nvidia-cuda", "-march=sm_90", "-Xclang", "-target-feature", "-Xclang", "+ptx83", "-S"]
# Functions are assumed to wait for other lanes, unless the compiler can prove that they do not.
LANGUAGE = ["-std=c++20", "-fno-exceptions", "-fno-rtti", "-nostdlibinc", "-w", "-fconvergent-functions"]
MATHS = ["-O3", "-ffp-contract=on", "-fno-math-errno", "-mllvm", "-inline-threshold=100000"]
MATHS += ["-mllvm", "-pre-RA-sched=source"]  # keeps loads in the shader's order, early enough before their uses


def libdevice() -> Path | None:
    """CUDA's maths functions as LLVM bitcode, if a toolkit is installed."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    files = [Path(home) / "nvvm" / "libdevice" / "libdevice.10.bc" for home in homes if home]
    return next((file for file in files if file.exists()), None)


def compile_source(source: str, target: Path, macros: list[str]) -> Path:
    """Compile Metal source to PTX."""
    text = target.with_suffix(".cpp")
    text.write_text(translate.translate(source, macros=macros))
    matrices = ["-DMSL_MATRICES"] * ("<metal_simdgroup_matrix>" in source)
    include = [*matrices, f"-I{HERE / 'shim'}", f"-I{ENGINE / 'shim'}"]
    device = ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", str(libdevice())]
    command = [translate.find_compiler(), *TARGET, *LANGUAGE, *MATHS, *include, *device, str(text), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{target.stem}: {done.stderr}")
    return target


def most_threads(folder: Path) -> dict[str, int]:
    """The most threads of a threadgroup, by kernel, over all traces in the folder."""
    most: dict[str, int] = {}
    for file in ("cases.json", "bench.json", "packed.json", "tune.json"):
        traces = json.loads((folder / file).read_text()) if (folder / file).exists() else []
        for dispatch in (dispatch for trace in traces for dispatch in trace["dispatches"]):
            most[dispatch["kernel"]] = max(most.get(dispatch["kernel"], 0), dispatch["threads"][0])
    return most


def state_threads(folder: Path) -> None:
    """Write `.maxntid` after each kernel's parameters, so that ptxas limits its registers and it can be launched."""
    most = most_threads(folder)

    def stated(entry: re.Match) -> str:
        threads = most.get(entry["name"])
        return entry["header"] + (f"\n.maxntid {threads}, 1, 1" if threads else "")

    header = r"(?P<header>^\.visible \.entry (?P<name>\w+)\([^)]*\))(\n\.maxntid [\d, ]+)?"
    for file in folder.glob("*.ptx"):
        file.write_text(re.sub(header, stated, file.read_text(), flags=re.MULTILINE))


def libraries() -> dict[str, tuple[Path, list[str]]]:
    """Every shader, for each weight format, and a broken one that a race detector must catch."""
    all = {"planted_race": (PLANTED_RACE, [])}
    for file in sorted((ROOT / "shaders").glob("*.metal")):
        all |= {name: (file, macros) for name, macros in embed.libraries(file).items()}
    return all


def compile_all(folder: Path, names: list[str] | None = None) -> list[Path]:
    """Compile every library, or those named: a shader with all its formats, or one of them."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {
        name: library
        for name, library in libraries().items()
        if not names or name in names or name.split("-")[0] in names
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        work = [
            pool.submit(compile_source, embed.shader_text(file), folder / f"{name}.ptx", macros)
            for name, (file, macros) in chosen.items()
        ]
        files = [future.result() for future in work]
    state_threads(folder)
    return files


if __name__ == "__main__":
    if libdevice() is None:
        raise SystemExit("CUDA's libdevice.10.bc is not here: install a CUDA toolkit, or set CUDA_HOME")
    for file in compile_all(Path(sys.argv[1]), sys.argv[2:]):
        print(file)
