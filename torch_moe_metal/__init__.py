"""Fast Mixture-of-Experts ops for PyTorch on Apple GPUs, with a native CPU backend.

Importing this package registers `torch.ops.moe_metal.*`; `torch_moe_metal.gate`, `.experts` and the others are the same
ops as functions with a signature and a docstring. What each computes: `torch_moe_metal.reference`.
"""

import ctypes
import functools
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from . import arguments, nn, reference, refusals, tuning
from .after_import import after_import
from .fake import fake
from .integration import is_supported, packed_checkpoints
from .packing import quantize
from .rehearsal import warm_up

if TYPE_CHECKING:  # Editors and type checkers are shown the specification itself: signature, types and docstring.
    from .reference import *  # noqa: F403
    from .transformers.config import MoeMetalConfig, quantize_
    from .transformers.patch import patch, unpatch

__version__ = "0.1.0"
FOLDER = Path(__file__).parent


def _installed_elsewhere() -> Path | None:
    """The installed package, where this is a checkout that Python finds first, as it does in the checkout's folder."""
    for distribution in metadata.distributions(name=__name__):
        folder = Path(str(distribution.locate_file(__name__)))
        if folder != FOLDER and (folder / "_C.so").exists():
            return folder
    return None


def _load_libraries() -> str:
    """Load the schemas and the CPU kernels for the best instruction set that was built and that this machine has."""
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
        raise ImportError(
            f"torch_moe_metal: its C++ extension does not load into torch {torch.__version__}, most likely because it "
            "was built against another version. Rebuild it: `pip install --no-build-isolation --force-reinstall "
            f"--no-deps .`\nThe loader said: {error}"
        ) from error
    return isa


#: The instruction set that the CPU kernels run on: avx512, avx2 or default (NEON on ARM).
cpu_isa: str = _load_libraries()
if tuning.is_built():
    tuning.load()
#: The most experts that the ops take: kMaxExperts of shaders/common.h.
max_experts: int = ctypes.c_int32.in_dll(
    ctypes.CDLL(str(Path(__file__).with_name("_C.so"))), "moe_metal_max_experts"
).value


def _function(specification: Callable) -> Callable:
    """The op as a plain function, which looks like its specification. Calling it takes 0.4 us more than calling
    torch.ops (glu of [1, 1], 2.0 us there: tests/test_functions.py holds it below one)."""
    op = getattr(torch.ops.moe_metal, specification.__name__).default

    @functools.wraps(specification)
    def function(*args, **kwargs):
        return op(*args, **kwargs)

    function.__module__ = __name__
    return function


for _name in arguments.ARGUMENTS:
    torch.library.register_fake(f"moe_metal::{_name}", fake(getattr(reference, _name)))
    globals()[_name] = _function(getattr(reference, _name))


def _register_experts() -> None:
    if is_supported():
        from .transformers.experts import register

        register()


def _register_attention() -> None:
    if is_supported():
        from .transformers.attention import register

        register()


def _register_quantizers() -> None:
    if not is_supported():
        return
    try:
        from .transformers.takeover import register
    except ImportError as error:  # transformers itself must not fail to be imported
        warnings.warn(f"torch_moe_metal: quantised checkpoints are not loaded packed, since {error}", stacklevel=2)
        return
    register()


# transformers is optional and slow to import: its interfaces of experts and attention and its quantizers learn of us
# when somebody else imports them.
after_import("transformers.integrations.moe", _register_experts)
after_import("transformers.quantizers.auto", _register_quantizers)
after_import("transformers.modeling_utils", refusals.refuse_resizing)
after_import("transformers.modeling_utils", _register_attention)
after_import("peft.tuners.tuners_utils", refusals.refuse_merging)


if not TYPE_CHECKING:  # to which every name would be known

    def __getattr__(name: str):
        if name in ("MoeMetalConfig", "patch", "quantize_", "unpatch"):
            from . import transformers

            return getattr(transformers, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


__all__ = ["MoeMetalConfig", "arguments", "cpu_isa", "max_experts", "nn", "packed_checkpoints", "patch", "quantize"]
__all__ += ["quantize_", "reference", "unpatch", "warm_up"]
__all__ += reference.__all__
