"""Fast Mixture-of-Experts models in PyTorch on Apple GPUs, with a native CPU backend.

Models of Hugging Face transformers:

    model = AutoModelForCausalLM.from_pretrained(path, device_map="mps")   # quantised checkpoints stay packed
    print(torch_moe_metal.patch(model))                                    # fuses blocks, layers and attention

    patch, unpatch        fuse a model in place, and undo it
    warm_up               compile the kernels of a model for mps
    MoeMetalConfig        quantise a dense checkpoint while it loads
    quantize_             quantise a model in memory
    packed_checkpoints    whether quantised checkpoints load packed
    snapshot, restore     what a cache is now, and how it becomes that again

Plain PyTorch:

    nn                    MoE, and layers with packed weights
    quantize              pack one weight
    gate, experts, ...    the ops, also registered as torch.ops.moe_metal.*; help(torch_moe_metal.gate) describes one
    reference             the definition of each op in PyTorch
    cpu_isa, max_experts  the instruction set in use, and the largest number of experts

On the command line, `python -m torch_moe_metal --help`.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from . import arguments, gpu_settings, hooks, nn, reference
from .extension import cpu_isa, max_experts
from .fake import fake
from .packing import quantize
from .transformers_support import packed_checkpoints
from .warmup import warm_up

if TYPE_CHECKING:  # Editors and type checkers see the specification itself: signature, types and docstring.
    from .reference import *  # noqa: F403
    from .transformers.checkpoints.config import MoeMetalConfig
    from .transformers.checkpoints.quantize import quantize_
    from .transformers.fusing.patch import patch, unpatch
    from .transformers.fusing.snapshots import restore, snapshot

__version__ = "0.1.0"


if gpu_settings.is_built():
    gpu_settings.load()


def _function(specification: Callable) -> Callable:
    """The op as a plain function with the signature and docstring of its specification. Calling it takes 0.4 us
    longer than calling torch.ops (glu of [1, 1]: 2.0 us; tests/test_functions.py requires less than 1 us)."""
    op = getattr(torch.ops.moe_metal, specification.__name__).default

    @functools.wraps(specification)
    def function(*args, **kwargs):
        return op(*args, **kwargs)

    function.__module__ = __name__
    return function


for _name in arguments.ARGUMENTS:
    torch.library.register_fake(f"moe_metal::{_name}", fake(getattr(reference, _name)))
    globals()[_name] = _function(getattr(reference, _name))


hooks.install()


if not TYPE_CHECKING:  # with it, type checkers would accept every name

    def __getattr__(name: str):
        if name in ("MoeMetalConfig", "patch", "quantize_", "restore", "snapshot", "unpatch"):
            from . import transformers

            return getattr(transformers, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


__all__ = ["MoeMetalConfig", "cpu_isa", "max_experts", "nn", "packed_checkpoints", "patch", "quantize", "quantize_"]
__all__ += ["reference", "restore", "snapshot", "unpatch", "warm_up"]
__all__ += reference.__all__
