"""From mlx-lm's names and tensors to those of transformers' models, and back when a model is saved."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.quantizers.base import HfQuantizer

from ...layers import numbers
from .conversions import AsBytes
from .mlx_folder import MODES

#: mlx-lm's projections of experts, by the op's word for the weight that they are in.
EXPERTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
#: Families whose norms multiply by 1 + weight, which mlx-lm stores as one number.
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
    """mlx-lm's names for what transformers calls otherwise."""
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
    """What becomes of experts, and of what mlx-lm has in another form."""
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
    """Patterns for a weight's parts in mlx-lm's words."""
    return [rf"{stem}\.{part}" for part in ("weight", "scales", "biases")]


def kind_of(name: str) -> str:
    """A pattern for a module and its like in other layers."""
    *_, last = re.split(r"\.\d+(?=\.)", name)
    return re.escape(last if last.startswith(".") else last.rpartition(".")[2])


def inside(model: nn.Module, name: str) -> tuple[str, nn.Module | None]:
    """A module's name with or without the base model's prefix, whichever the model has, and the module."""
    prefix = f"{model.base_model_prefix}."
    for known in (name, name.removeprefix(prefix), prefix + name):
        try:
            return known, model.get_submodule(known)
        except AttributeError:
            continue
    return name, None


class FromWords(AsBytes):
    """MLX's uint32 as bytes, which every device takes and every format of ours is."""

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
    """Gate and up of all experts, [E, I, ...] each, in one tensor: one behind the other, or row by row where the
    model's experts have them so."""

    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name=None, model=None, **kwargs):
        gate, up = (input_dict.pop(pattern)[0] for pattern in source_patterns)
        together = has_halves(model, full_layer_name)
        joined = torch.cat((gate, up), 1) if together else torch.stack((gate, up), 2).flatten(1, 2)
        return {target_patterns[0]: joined}

    @property
    def reverse_op(self) -> ConversionOps:
        return Part()


class Part(ConversionOps):
    """Gate and up out of the tensor that both are in."""

    def convert(self, input_dict, target_patterns, full_layer_name=None, model=None, **kwargs):
        ((both,),) = input_dict.values()
        together = has_halves(model, full_layer_name)
        parts = both.chunk(2, 1) if together else (both[:, ::2], both[:, 1::2])
        return {pattern: part.contiguous() for pattern, part in zip(target_patterns, parts, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        return Join()


def has_halves(model: nn.Module, name: str) -> bool:
    """Whether the experts in whose parts this name lies have all gate rows before the up rows."""
    return inside(model, name.rpartition(".experts.")[0] + ".experts")[1].is_concatenated


class Dense(ConversionOps):
    """A packed weight as the dense one that it stands for, in the dtype of the model's; what is dense stays so."""

    def __init__(self, quantizer: HfQuantizer):
        self.hf_quantizer = quantizer  # by which transformers knows that no part may be cast

    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name=None, model=None, **kwargs):
        like = model.get_parameter(full_layer_name)
        return {target_patterns[0]: dense(input_dict, source_patterns, like.shape[-1], like.dtype)}

    @property
    def reverse_op(self) -> ConversionOps:
        return Keep()


class Keep(ConversionOps):
    """The same dense weight, under the name that a packed one had."""

    def convert(self, input_dict, target_patterns, **kwargs):
        (given,) = input_dict.values()
        return {target_patterns[0]: given}

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError("which of them was packed is forgotten")


def dense(given: dict[str, list[Tensor]], patterns: list[str], columns: int, dtype: torch.dtype) -> Tensor:
    """Of weight, scales and biases, the last two of which may not be there."""
    weight, scales, biases = (given[pattern][0] if pattern in given else None for pattern in patterns)
    if scales is None:
        return weight.to(dtype)
    of_row = torch.empty(0, columns, dtype=dtype, device=weight.device)
    form = weight.shape[-1] * 32 // columns, columns // scales.shape[-1]
    mode = "affine" if biases is not None else next(mode for mode in MODES if MODES[mode] == form)
    return numbers(weight.view(torch.uint8), scales, biases, mode, of_row)


class LatentAttention(ConversionOps):
    """kv_b_proj [heads * (nope + v), rank] of what mlx-lm makes of it: embed_q [heads, rank, nope], packed along
    another side, and unembed_out [heads, v, rank]."""

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
    """What mlx-lm makes of kv_b_proj, not packed."""

    def convert(self, input_dict, target_patterns, full_layer_name=None, model=None, **kwargs):
        ((weight,),) = input_dict.values()
        attention = inside(model, full_layer_name.rsplit(".", 2)[0])[1]
        sizes = attention.qk_nope_head_dim, attention.v_head_dim
        keys, values = weight.unflatten(0, (-1, sum(sizes))).split(sizes, 1)
        return {target_patterns[0]: keys.mT.contiguous(), target_patterns[3]: values.contiguous()}

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError("which of them was packed is forgotten")


@dataclass
class Elementwise(ConversionOps):
    """A dense tensor that mlx-lm has in another form."""

    change: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]

    def convert(self, input_dict, target_patterns, **kwargs):
        ((tensor,),) = input_dict.values()
        return {target_patterns[0]: self.change(tensor).contiguous()}

    @property
    def reverse_op(self) -> ConversionOps:
        return Elementwise(self.back, self.change)


def swapped(tensor: Tensor) -> Tensor:
    """The weight of a convolution with the last two sides changed, as MLX has it."""
    return tensor.mT


def less_one(tensor: Tensor) -> Tensor:
    return (tensor.float() - 1).to(tensor.dtype)


def plus_one(tensor: Tensor) -> Tensor:
    return (tensor.float() + 1).to(tensor.dtype)
