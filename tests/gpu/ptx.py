"""The shaders for an NVIDIA GPU: translated by the simulator's translator, compiled to PTX by clang.

    python tests/gpu/ptx.py FOLDER      # every shader, as FOLDER/<name>.ptx

It needs clang 19 and CUDA's libdevice (a file of maths functions); no GPU. clang inlines as Metal's compiler does.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "shaders"), str(ROOT / "tests" / "metal_sim")]

import embed  # noqa: E402
import translate  # noqa: E402

TARGET = ["--target=nvptx64-nvidia-cuda", "-march=sm_90", "-Xclang", "-target-feature", "-Xclang", "+ptx83", "-S"]
LANGUAGE = ["-std=c++20", "-fno-exceptions", "-fno-rtti", "-nostdlibinc", "-w"]
MATHS = ["-O3", "-ffp-contract=on", "-fno-math-errno", "-mllvm", "-inline-threshold=100000"]


def libdevice() -> Path | None:
    """CUDA's maths functions as LLVM bitcode, where a toolkit is installed."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    files = [Path(home) / "nvvm" / "libdevice" / "libdevice.10.bc" for home in homes if home]
    return next((file for file in files if file.exists()), None)


def compile_source(source: str, target: Path) -> Path:
    """Metal source -> PTX."""
    text = target.with_suffix(".cpp")
    text.write_text(translate.translate(source))
    include = [f"-I{HERE / 'shim'}", f"-I{ROOT / 'tests' / 'metal_sim' / 'shim'}"]
    device = ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", str(libdevice())]
    command = [translate.find_compiler(), *TARGET, *LANGUAGE, *MATHS, *include, *device, str(text), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{target.stem}: {done.stderr}")
    return target


def compile_all(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    shaders = sorted((ROOT / "shaders").glob("*.metal"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda s: compile_source(embed.shader_text(s), folder / f"{s.stem}.ptx"), shaders))


if __name__ == "__main__":
    if libdevice() is None:
        raise SystemExit("CUDA's libdevice.10.bc is not here: install a CUDA toolkit, or set CUDA_HOME")
    for file in compile_all(Path(sys.argv[1])):
        print(file)
