"""Fast Mixture-of-Experts ops for PyTorch on Apple GPUs, with a native CPU backend.

Importing this package registers `torch.ops.moe_metal.*`. What each op computes: `torch_moe_metal.reference`.
"""

from pathlib import Path

import torch

from . import nn, reference
from .after_import import after_import

__version__ = "0.1.0"


def _load_libraries() -> str:
    """Load the schemas and the CPU kernels for the best instruction set that was built and that this machine has."""
    folder = Path(__file__).parent
    if not (folder / "_C.so").exists():
        raise ImportError(
            f"torch_moe_metal: its C++ extension is not built in {folder}. "
            "Run `pip install --no-build-isolation .` in the checkout (or `-e .` to keep working on it)."
        )
    best = torch.backends.cpu.get_cpu_capability().lower()
    isa = best if (folder / f"_cpu_{best}.so").exists() else "default"
    try:
        torch.ops.load_library(folder / "_C.so")
        torch.ops.load_library(folder / f"_cpu_{isa}.so")
    except OSError as error:
        raise ImportError(
            f"torch_moe_metal: its C++ extension does not load into torch {torch.__version__}, most likely because it "
            "was built against another version. Rebuild it: `pip install --no-build-isolation --force-reinstall "
            f"--no-deps .`\nThe loader said: {error}"
        ) from error
    return isa


#: The instruction set that the CPU kernels run on: avx512, avx2 or default (NEON on ARM).
cpu_isa: str = _load_libraries()

for _op in reference.OPS:
    torch.library.register_fake(f"moe_metal::{_op.__name__}", _op)


def _register_experts() -> None:
    from .transformers.experts import register

    register()


# transformers is optional and slow to import: its experts interface learns our name when somebody else imports it.
after_import("transformers.integrations.moe", _register_experts)


def __getattr__(name: str):
    if name in ("patch", "unpatch"):
        from . import transformers

        return getattr(transformers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["cpu_isa", "nn", "patch", "reference", "unpatch"]
