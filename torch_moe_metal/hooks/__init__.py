"""Changes transformers and PEFT when a program imports them, and before that imports neither."""

import functools
import sys
import warnings
from collections.abc import Callable

from ..transformers_support import NEWEST, installed_version, is_supported, is_untested
from . import advice, count_packed_weights, gguf, refuse_packed_weights, serial_loading
from .after_import import after_import


def install() -> None:
    """Register what runs when transformers' modules and PEFT's have been imported."""
    when_imported("transformers.integrations.moe", register_experts)
    when_imported("transformers.quantizers", register_quantizers)
    when_imported("transformers.integrations.gguf", gguf.register)
    when_imported("transformers.generation.utils", gguf.check_files_in_generate)
    for name in ("modeling_auto", "configuration_auto", "tokenization_auto"):
        module = f"transformers.models.auto.{name}"
        when_imported(module, gguf.take_paths, module)
    when_imported("transformers.integrations.hub_kernels", advice.drop)
    when_imported("transformers.modeling_utils", change_models)
    when_imported("transformers.modeling_utils", register_attention)
    when_imported("transformers.modeling_layers", register_mtp)
    for module in ("transformers.modeling_utils", "transformers.modeling_layers"):
        when_imported(module, serial_loading.load_serially_on_mps, module)
    after_import("peft.tuners.tuners_utils", refuse_packed_weights.refuse_merging)
    when_imported("peft.tuners.tuners_utils", refuse_packed_weights.refuse_adapting_parameters)
    when_imported("peft.peft_model", count_packed_weights.count_in_peft)


def register_experts() -> None:
    from ..transformers.fusing.experts import register

    register()


def register_attention() -> None:
    from ..transformers.fusing.attention import register

    register()


def change_models() -> None:
    refuse_packed_weights.refuse_resizing()
    count_packed_weights.count_in_transformers()


def register_quantizers() -> None:
    try:
        from ..transformers.checkpoints.quantizer_choice import register
    except ImportError as error:  # transformers must still import
        if "transformers.modeling_utils" not in sys.modules:  # its modules import each other: try again later
            return after_import("transformers.modeling_utils", register_quantizers)
        warnings.warn(f"torch_moe_metal: quantised checkpoints are not loaded packed, since {error}", stacklevel=2)
        return
    register()


def register_mtp() -> None:
    model = getattr(sys.modules["transformers.modeling_layers"], "MtpModel", None)
    if model is not None:
        stock = vars(model)["from_pretrained"].__func__

        @functools.wraps(stock)
        def from_pretrained(cls, main_model, device_map=None, **kwargs):
            from ..transformers.checkpoints.mtp import made  # only now: it imports what is being imported

            return made(functools.partial(stock, cls), main_model, device_map, **kwargs)

        model.from_pretrained = classmethod(from_pretrained)


def when_imported(module: str, change: Callable[[], None], *arguments: str) -> None:
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
