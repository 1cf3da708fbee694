"""Fast Mixture-of-Experts models in PyTorch on Apple GPUs, with a native CPU backend.

Models of Hugging Face transformers:

    model = AutoModelForCausalLM.from_pretrained(path, device_map="mps")   # quantised checkpoints stay packed
    print(torch_moe_metal.patch(model))                                    # fuses blocks, layers and attention

    patch, unpatch        fuse a model in place, and undo it
    warm_up               compile the kernels of a model for mps
    MoeMetalConfig        quantise a dense checkpoint while it loads
    quantize_             quantise a model in memory
    packed_checkpoints    whether quantised checkpoints load packed

Plain PyTorch:

    nn                    MoE, and layers with packed weights
    quantize              pack one weight
    gate, experts, ...    the ops, also registered as torch.ops.moe_metal.*; help(torch_moe_metal.gate) describes one
    reference             the definition of each op in PyTorch
    cpu_isa, max_experts  the instruction set in use, and the largest number of experts

On the command line, `python -m torch_moe_metal --help`.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from . import advice, arguments, count_packed_weights, gpu_settings, huge_pages, nn, reference, refuse_packed_weights
from .after_import import after_import
from .extension import cpu_isa, max_experts
from .fake import fake
from .packing import quantize
from .transformers_support import NEWEST, installed_version, is_supported, is_untested, packed_checkpoints
from .warmup import warm_up

if TYPE_CHECKING:  # Editors and type checkers see the specification itself: signature, types and docstring.
    from .reference import *  # noqa: F403
    from .transformers.checkpoints.config import MoeMetalConfig
    from .transformers.checkpoints.quantize import quantize_
    from .transformers.fusing.patch import patch, unpatch

__version__ = "0.1.0"


huge_pages.for_tensors()
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


def _register_experts() -> None:
    from .transformers.fusing.experts import register

    register()


def _register_attention() -> None:
    from .transformers.fusing.attention import register

    register()


def _change_models() -> None:
    refuse_packed_weights.refuse_resizing()
    count_packed_weights.count_in_transformers()


def _register_quantizers() -> None:
    try:
        from .transformers.checkpoints.quantizer_choice import register
    except ImportError as error:  # transformers must still import
        if "transformers.modeling_utils" not in sys.modules:  # its modules import each other: try again later
            return after_import("transformers.modeling_utils", _register_quantizers)
        warnings.warn(f"torch_moe_metal: quantised checkpoints are not loaded packed, since {error}", stacklevel=2)
        return
    register()


def _register_mtp() -> None:
    model = getattr(sys.modules["transformers.modeling_layers"], "MtpModel", None)
    if model is not None:
        stock = vars(model)["from_pretrained"].__func__

        @functools.wraps(stock)
        def from_pretrained(cls, main_model, device_map=None, **kwargs):
            from .transformers.checkpoints.mtp import made  # only now: it imports what is being imported

            return made(functools.partial(stock, cls), main_model, device_map, **kwargs)

        model.from_pretrained = classmethod(from_pretrained)


def _register_gguf() -> None:
    from .transformers.checkpoints.gguf.reading import register

    register()


def _check_gguf_files() -> None:
    from .transformers.checkpoints.gguf.reading import check_files_in_generate

    check_files_in_generate(sys.modules["transformers.generation.utils"].GenerationMixin)


def _take_gguf_paths(module: str) -> None:
    from .transformers.checkpoints.gguf.reading import take_paths

    take_paths(sys.modules[module])


def _when_imported(module: str, change: Callable[[], None], *arguments: str) -> None:
    """Change a module when it has been imported, if transformers has a supported version. If that is newer than our
    tests, an error becomes a warning, because the module must still import."""

    def change_it() -> None:
        if not is_supported():
            return
        try:
            change(*arguments)
        except Exception as error:
            if not is_untested():
                raise
            warnings.warn(
                f"torch_moe_metal: transformers {installed_version()} is newer than our tests, and {module} could not "
                f"be changed ({type(error).__name__}: {error}); pip install 'transformers=={NEWEST}.*'",
                stacklevel=2,
            )

    after_import(module, change_it)


# transformers is optional and slow to import, so these functions run when other code imports it.
_when_imported("transformers.integrations.moe", _register_experts)
_when_imported("transformers.quantizers", _register_quantizers)
_when_imported("transformers.integrations.gguf", _register_gguf)
_when_imported("transformers.generation.utils", _check_gguf_files)
for name in ("modeling_auto", "configuration_auto", "tokenization_auto"):
    module = f"transformers.models.auto.{name}"
    _when_imported(module, _take_gguf_paths, module)
_when_imported("transformers.integrations.hub_kernels", advice.drop)
_when_imported("transformers.modeling_utils", _change_models)
_when_imported("transformers.modeling_utils", _register_attention)
_when_imported("transformers.modeling_layers", _register_mtp)
after_import("peft.tuners.tuners_utils", refuse_packed_weights.refuse_merging)
_when_imported("peft.tuners.tuners_utils", refuse_packed_weights.refuse_adapting_parameters)
_when_imported("peft.peft_model", count_packed_weights.count_in_peft)


if not TYPE_CHECKING:  # with it, type checkers would accept every name

    def __getattr__(name: str):
        if name in ("MoeMetalConfig", "patch", "quantize_", "unpatch"):
            from . import transformers

            return getattr(transformers, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


__all__ = ["MoeMetalConfig", "cpu_isa", "max_experts", "nn", "packed_checkpoints", "patch", "quantize", "quantize_"]
__all__ += ["reference", "unpatch", "warm_up"]
__all__ += reference.__all__
