"""Finds and loads the C++ libraries, and reads the constants that Python shares with them."""

import ctypes
import json
from importlib import metadata
from pathlib import Path

import torch

FOLDER = Path(__file__).parent


def _installed_elsewhere() -> Path | None:
    """The folder of the installed package if Python found this checkout first, as it does in the checkout's
    folder."""
    for distribution in metadata.distributions(name=__package__):
        folder = Path(str(distribution.locate_file(__package__)))
        if folder != FOLDER and (folder / "_C.so").exists():
            return folder
    return None


def _load_libraries() -> str:
    """Load the schemas, and the CPU kernels for the best built instruction set that this machine supports."""
    best = torch.backends.cpu.get_cpu_capability().lower()
    isa = best if (FOLDER / f"_cpu_{best}.so").exists() else "default"
    missing = [name for name in ("_C.so", f"_cpu_{isa}.so") if not (FOLDER / name).exists()]
    if missing:
        if installed := _installed_elsewhere():
            raise ImportError(
                f"torch_moe_metal: {FOLDER}, which has no C++ extension, hides the installed package, {installed}. Run "
                "Python in another folder, or build the extension here: `pip install --no-build-isolation -e .`"
            )
        raise ImportError(
            f"torch_moe_metal: its C++ extension is not built: {' and '.join(missing)} missing in {FOLDER}. "
            "Run `pip install --no-build-isolation .` in the checkout (or `-e .` to keep working on it)."
        )
    try:
        torch.ops.load_library(FOLDER / "_C.so")
        torch.ops.load_library(FOLDER / f"_cpu_{isa}.so")
    except OSError as error:
        said = str(error.__cause__ or error)  # torch's own error names only the file
        # On macOS the CPU kernels use the OpenMP that torch has loaded: see setup.py.
        no_openmp = "__kmpc_" in said or "_omp_" in said
        reason = (
            "because it was built for a torch with OpenMP, and this torch has none"
            if no_openmp
            else "probably because it was built for another version"
        )
        raise ImportError(
            f"torch_moe_metal: its C++ extension does not load into torch {torch.__version__}, {reason}. Rebuild it: "
            f"`pip install --no-build-isolation --force-reinstall --no-deps .`\nThe loader reports: {said}"
        ) from error
    return isa


#: The instruction set of the CPU kernels: avx512, avx2 or default (NEON on ARM).
cpu_isa: str = _load_libraries()
_C = ctypes.CDLL(str(FOLDER / "_C.so"))
#: The maximum number of experts of the ops: kMaxExperts in shaders/common.h.
max_experts: int = ctypes.c_int32.in_dll(_C, "moe_metal_max_experts").value
_C.moe_metal_formats.restype = ctypes.c_char_p
#: The tables of csrc/formats.h: `rows` and `affine_groups`.
format_tables: dict[str, list] = json.loads(_C.moe_metal_formats())
