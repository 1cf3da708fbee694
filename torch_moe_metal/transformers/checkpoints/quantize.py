"""`quantize_`: packs the dense weights of a model in memory."""

from dataclasses import asdict

from torch import Tensor, nn
from transformers.utils import logging

from ...all_or_nothing import all_or_nothing
from ...packed_layers import is_packed
from ...packing import check, quantize
from ..fusing.experts import NAME
from ..fusing.fuse import BEFORE
from ..fusing.packed_modules import Parts, formats_text, named_parts, packed_modules, rows_of, use_own_names
from .config import Form, MoeMetalConfig, Plan, alike, pack_all, packable
from .moe_metal import MoeMetal
from .quantizer import PackedQuantizer

logger = logging.get_logger(__name__)


def quantize_(
    model: nn.Module,
    format: str = "affine",
    bits: int = 4,
    group_size: int = 64,
    skip: list[str] | None = None,
    bits_by_name: dict[str, int] | None = None,
    layers: dict[str, dict | bool] | None = None,
) -> nn.Module:
    """Pack the dense weights of a model in-place, one after the other. The arguments are those of `MoeMetalConfig`.

    The model is one of transformers, or any with `torch_moe_metal.nn.MoE` and linear layers. A saved model loads
    packed. Weights that are packed already do not change, and a warning names them. If experts cannot be packed, it
    raises before anything is changed. After an interruption the model is partly packed, but can run and can be saved;
    another call packs the rest.
    """
    config = MoeMetalConfig(format, bits, group_size, skip, bits_by_name, layers)
    expect_ours(model)
    config.expect_names(model)
    plan = config.plan(model)
    expect_weights(model, plan)
    kept = [f"{name} ({formats_text(module)})" for name, module in packable(model) if is_packed(module)]
    if kept:
        logger.warning(f"torch_moe_metal.quantize_: unchanged, since they are packed already: {', '.join(alike(kept))}")
    if not plan:
        logger.warning("torch_moe_metal.quantize_: nothing was packed: the model has no dense weights for it")
        return model

    def parts(name: str, dense: Tensor, form: Form) -> Parts:
        return named_parts(name.rpartition(".")[2], quantize(dense, **asdict(form)))

    with all_or_nothing(model):
        attach_config(model, config)
    pack_all(model, plan, parts, progress=True)
    return model


def expect_weights(model: nn.Module, plan: Plan) -> None:
    """Raises if `quantize` cannot pack a weight, or if it is not in memory."""
    for name, forms in plan.items():
        module = model.get_submodule(name)
        for (weight, form), rows in zip(forms.items(), rows_of(module).values(), strict=True):
            check(rows, **asdict(form), caller="quantize_", name=weight)
            if rows.is_meta and hasattr(module, "_hf_hook"):
                raise ValueError(
                    f"torch_moe_metal.quantize_: {weight}: expected a weight in memory, got an offloaded one"
                )


def expect_ours(model: nn.Module) -> None:
    """Raises if the model has a quantizer of transformers, which could not handle it afterwards."""
    for part in model.modules():
        quantizer = vars(part).get("hf_quantizer")
        if not isinstance(quantizer, PackedQuantizer | None):
            raise ValueError(
                "torch_moe_metal.quantize_: expected a dense model, or one with packed weights of torch_moe_metal, got "
                f"one of transformers' {type(quantizer).__name__}"
            )


def attach_config(model: nn.Module, config: MoeMetalConfig) -> None:
    """Give a model packed in memory the attributes of one that was loaded with this configuration."""
    parts = {name: part for name, part in model.named_modules() if hasattr(type(part), "set_experts_implementation")}
    for part in parts.values():
        part.set_experts_implementation(NAME)
        vars(part).pop(BEFORE, None)
    for _, module in packed_modules(model):
        use_own_names(module)
    for name, part in parts.items():
        if any(name != other and (not other or name.startswith(f"{other}.")) for other in parts):
            continue  # only the outermost model is saved
        part.is_quantized, part.quantization_method = True, config.quant_method
        part.hf_quantizer = MoeMetal(config, pre_quantized=True)
        part.config.quantization_config = config
        vars(part.config).pop("quantization", None)  # mlx-lm's entry
        part._weight_conversions = []
