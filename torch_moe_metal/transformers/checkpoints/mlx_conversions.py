"""Converts mlx-lm's names and tensors to those of transformers, and back when a model is saved."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.quantizers.base import HfQuantizer

from ... import joining
from ...packed_layers import dequantized
from .conversions import AsBytes
from .mlx_folder import MODES

#: mlx-lm's projections of experts, by the op's name of the weight.
EXPERTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
#: Families whose norms multiply by 1 + weight, which mlx-lm stores as the sum.
SHIFTED = ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe")
SHIFTED_NORMS = (
    r"\.input_layernorm\.weight",
    r"\.post_attention_layernorm\.weight",
    r"\.q_norm\.weight",
    r"\.k_norm\.weight",
    r"model\.norm\.weight",
    r"language_model\.norm\.weight",
)


def renamings(model: nn.Module) -> list[WeightRenaming]:
    """Renames tensors from mlx-lm's names."""
    nested = any(name == "model.language_model" for name, _ in model.named_modules())
    names = {
        r"^language_model\.model\.": r"model\.language_model\." if nested else r"model\.",
        r"^language_model\.lm_head\.": r"lm_head\.",
        r"\.switch_mlp\.": r"\.experts\.",
        r"\.experts\.switch_glu\.": r"\.experts\.",
        r"\.experts\.down_proj\.scales": r"\.experts\.down_proj_scale",
        r"\.experts\.down_proj\.biases": r"\.experts\.down_proj_offset",
        r"\.experts\.down_proj\.bias": r"\.experts\.down_proj_bias",
    }
    return [WeightRenaming(source, target) for source, target in names.items()]


def converters(quantizer: HfQuantizer, model: nn.Module) -> list[WeightConverter]:
    """Conversions of experts, and of tensors that mlx-lm stores in another form."""
    words = [FromWords()]
    found = [WeightConverter([r"\.experts\.down_proj\.weight"], [r"\.experts\.down_proj"], words)]
    for part, suffix in (("weight", ""), ("scales", "_scale"), ("biases", "_offset"), ("bias", "_bias")):
        names = [rf"\.experts\.{name}\.{part}" for name in EXPERTS["gate_up"]]
        joined = [rf"\.experts\.gate_up_proj{suffix}"]
        found.append(WeightConverter(names, joined, [Join(), *words] if part == "weight" else [Join()]))
    latent = [*parts_of(r"\.self_attn\.embed_q"), *parts_of(r"\.self_attn\.unembed_out")]
    found.append(WeightConverter(latent, [r"\.self_attn\.kv_b_proj\.weight"], [LatentAttention(quantizer)]))
    changed = {r"\.conv1d\.weight": Elementwise(swapped, swapped)}
    if model.config.get_text_config().model_type in SHIFTED:
        changed |= dict.fromkeys(SHIFTED_NORMS, Elementwise(less_one, plus_one))
    return found + [WeightConverter([name], [name], [change]) for name, change in changed.items()]


def parts_of(stem: str) -> list[str]:
    """Patterns for mlx-lm's names of a weight's parts."""
    return [rf"{stem}\.{part}" for part in ("weight", "scales", "biases")]


def kind_of(name: str) -> str:
    """A pattern for a module and the same module in other layers."""
    *_, last = re.split(r"\.\d+(?=\.)", name)
    return re.escape(last if last.startswith(".") else last.rpartition(".")[2])


def inside(model: nn.Module, name: str) -> tuple[str, nn.Module | None]:
    """The module of this name, and its name in the model: with or without the base model's prefix."""
    prefix = f"{model.base_model_prefix}."
    for known in (name, name.removeprefix(prefix), prefix + name):
        try:
            return known, model.get_submodule(known)
        except AttributeError:
            continue
    return name, None


class FromWords(AsBytes):
    """Reinterprets MLX's uint32 as bytes, the data dtype of our formats on every device."""

    dtypes = (torch.uint32, torch.uint8)

    def convert(self, input_dict, target_patterns, **kwargs):
        (given,) = super().convert(input_dict, **kwargs).values()
        return {target_patterns[0]: given}

    @property
    def reverse_op(self) -> ConversionOps:
        return ToWords()


class ToWords(FromWords):
    dtypes = (torch.uint8, torch.uint32)

    @property
    def reverse_op(self) -> ConversionOps:
        return FromWords()


class Join(ConversionOps):
    """Joins gate and up of all experts, [E, I, ...] each: concatenated or row by row, as the model's experts expect."""

    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name=None, model=None, **kwargs):
        gate, up = (input_dict.pop(pattern)[0] for pattern in source_patterns)
        together = has_halves(model, full_layer_name)
        joined = joining.cat((gate, up), 1) if together else joining.stack((gate, up), 2).flatten(1, 2)
        return {target_patterns[0]: joined}

    @property
    def reverse_op(self) -> ConversionOps:
        return Part()


class Part(ConversionOps):
    """Splits a joined tensor into gate and up."""

    def convert(self, input_dict, target_patterns, full_layer_name=None, model=None, **kwargs):
        ((both,),) = input_dict.values()
        together = has_halves(model, full_layer_name)
        parts = both.chunk(2, 1) if together else (both[:, ::2], both[:, 1::2])
        return {pattern: part.contiguous() for pattern, part in zip(target_patterns, parts, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        return Join()


def has_halves(model: nn.Module, name: str) -> bool:
    """Whether the experts that this tensor belongs to have all gate rows before the up rows."""
    return inside(model, name.rpartition(".experts.")[0] + ".experts")[1].is_concatenated


class Dense(ConversionOps):
    """Dequantises a packed weight to the dtype of the model's; a dense one is cast."""

    def __init__(self, quantizer: HfQuantizer):
        self.hf_quantizer = quantizer  # so that transformers does not cast the parts

    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name=None, model=None, **kwargs):
        like = model.get_parameter(full_layer_name)
        return {target_patterns[0]: dense(input_dict, source_patterns, like.shape[-1], like.dtype)}

    @property
    def reverse_op(self) -> ConversionOps:
        return Keep()


class Keep(ConversionOps):
    """Keeps a dense weight, under the name that the packed one had."""

    def convert(self, input_dict, target_patterns, **kwargs):
        (given,) = input_dict.values()
        return {target_patterns[0]: given}

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError("not known which of them was packed")


def dense(given: dict[str, list[Tensor]], patterns: list[str], columns: int, dtype: torch.dtype) -> Tensor:
    """The dense weight of these parts. Scales and biases may be missing."""
    weight, scales, biases = (given[pattern][0] if pattern in given else None for pattern in patterns)
    if scales is None:
        return weight.to(dtype)
    of_row = torch.empty(0, columns, dtype=dtype, device=weight.device)
    form = weight.shape[-1] * 32 // columns, columns // scales.shape[-1]
    mode = "affine" if biases is not None else next(mode for mode in MODES if MODES[mode] == form)
    return dequantized(weight.view(torch.uint8), scales, biases, mode, of_row)


class LatentAttention(ConversionOps):
    """Makes kv_b_proj [heads * (nope + v), rank] of mlx-lm's embed_q [heads, rank, nope], which is packed along another
    dimension, and unembed_out [heads, v, rank]."""

    def __init__(self, quantizer: HfQuantizer):
        self.hf_quantizer = quantizer

    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name=None, model=None, **kwargs):
        like, attention = model.get_parameter(full_layer_name), model.get_submodule(full_layer_name.rsplit(".", 2)[0])
        keys = dense(input_dict, source_patterns[:3], attention.qk_nope_head_dim, like.dtype)
        values = dense(input_dict, source_patterns[3:], like.shape[-1], like.dtype)
        return {target_patterns[0]: torch.cat((keys.mT, values), 1).flatten(0, 1)}

    @property
    def reverse_op(self) -> ConversionOps:
        return LatentAttentionApart()


class LatentAttentionApart(ConversionOps):
    """Splits kv_b_proj into mlx-lm's dense tensors."""

    def convert(self, input_dict, target_patterns, full_layer_name=None, model=None, **kwargs):
        ((weight,),) = input_dict.values()
        attention = inside(model, full_layer_name.rsplit(".", 2)[0])[1]
        sizes = attention.qk_nope_head_dim, attention.v_head_dim
        keys, values = weight.unflatten(0, (-1, sum(sizes))).split(sizes, 1)
        return {target_patterns[0]: keys.mT.contiguous(), target_patterns[3]: values.contiguous()}

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError("not known which of them was packed")


@dataclass
class Elementwise(ConversionOps):
    """Converts a dense tensor that mlx-lm stores in another form."""

    change: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]

    def convert(self, input_dict, target_patterns, **kwargs):
        ((tensor,),) = input_dict.values()
        return {target_patterns[0]: self.change(tensor).contiguous()}

    @property
    def reverse_op(self) -> ConversionOps:
        return Elementwise(self.back, self.change)


def swapped(tensor: Tensor) -> Tensor:
    """The weight of a convolution with the last two dimensions swapped, as in MLX."""
    return tensor.mT


def less_one(tensor: Tensor) -> Tensor:
    return (tensor.float() - 1).to(tensor.dtype)


def plus_one(tensor: Tensor) -> Tensor:
    return (tensor.float() + 1).to(tensor.dtype)
