"""How AWQ, GPTQ and compressed-tensors store a packed weight, and how each layout becomes one of ours.

Nothing is rounded: with a code q, a scale s and a zero point z, the value (q - z) * s equals s * q + offset with the
offset -z * s, which float32 holds exactly. Codes do not change, but they are packed again if a project packs them along
the output rows. compressed-tensors' symmetric weights are already stored in the affine layout. Its nvfp4 equals ours,
except that it divides a whole weight by a number: our factor is the inverse.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...formats import FORMATS
from ...packing import pack
from ...reference import unpack
from .checkpoint import Stored
from .config import FIXED

Ours = tuple[Tensor, Tensor, Tensor]  # data, scale, offset
#: The positions in a word of 8 neighbouring columns in AutoAWQ.
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True)
class Width:
    """Bits and group size of weights, from the checkpoint's configuration."""

    bits: int
    group: int | None = None  # -1: a row; None: not given
    symmetric: bool = True

    def groups(self, C: int, scale: Stored, axis: int) -> int:
        """The number of groups in a row. It follows from the stored scales if the configuration has no group size; 0 if
        they do not fit."""
        if self.group is None:
            return scale.shape[axis] if len(scale.shape) == 2 else 0
        group = C if self.group == -1 else self.group
        return C // group if group > 0 and C % group == 0 else 0


@dataclass(frozen=True)
class Method:
    """A project's layout of a weight [N, C]: the names of its parts, and how they become a format of ours."""

    data: str
    scale: str
    required: tuple[str, ...]  # always stored
    optional: tuple[str, ...]
    ours: Callable[[Mapping[str, Tensor], "IntegerConfig", int], Ours]
    # shapes of the parts, from N, C, bits and groups
    shapes: Callable[[int, int, int, int], dict[str, tuple[int, ...]]]
    groups_axis: int  # of the scales
    zeros: str = "qzeros"  # the part from which offsets are computed
    format: str = "affine"

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.data, self.scale, *self.required, *self.optional)

    @property
    def has_factor(self) -> bool:
        """Whether one factor of the whole weight takes the place of offsets."""
        return FORMATS[self.format].offset == "factor"

    @property
    def value_parts(self) -> tuple[str, ...]:
        """The parts from which values are computed."""
        return (self.data, self.scale, self.zeros)

    def dtype(self, singles: list[dict[str, Stored]]) -> torch.dtype:
        """The dtype of our scales and offsets: float32, or 16 bits if they hold all offsets."""
        short = all(parts[self.scale].dtype == "BF16" and self.zeros not in parts for parts in singles)
        return torch.bfloat16 if self is COMPRESSED_TENSORS and short else torch.float32


def words_for(numbers: int, bits: int) -> int:
    """The number of 32-bit words for so many elements."""
    return -(-numbers * bits // 32)


def gptq_shapes(N: int, C: int, bits: int, groups: int) -> dict[str, tuple[int, ...]]:
    parts = {"qweight": (words_for(C, bits), N), "qzeros": (groups, words_for(N, bits))}
    return parts | {"scales": (groups, N), "g_idx": (C,)}


def awq_shapes(N: int, C: int, bits: int, groups: int) -> dict[str, tuple[int, ...]]:
    return {"qweight": (C, words_for(N, bits)), "qzeros": (groups, words_for(N, bits)), "scales": (groups, N)}


def compressed_shapes(N: int, C: int, bits: int, groups: int) -> dict[str, tuple[int, ...]]:
    parts = {"weight_packed": (N, words_for(C, bits)), "weight_zero_point": (words_for(N, bits), groups)}
    return parts | {"weight_scale": (N, groups), "weight_g_idx": (C,), "weight_shape": (2,)}


def of_gptq(given: Mapping[str, Tensor], config: "IntegerConfig", bits: int) -> Ours:
    """qweight [C * bits / 32, N], qzeros [C / group, N * bits / 32], stored minus one except in gptq_v2."""
    scales = given["scales"].float()
    zeros = unpack(given["qzeros"].contiguous().view(torch.uint8), bits)[:, : scales.shape[1]]
    zeros = zeros + config.zero_point_offset
    return given["qweight"].T.contiguous(), scales.T.contiguous(), -(zeros * scales).T.contiguous()


def of_awq(given: Mapping[str, Tensor], config: "IntegerConfig", bits: int) -> Ours:
    """qweight [C, N / 8], qzeros [C / group, N / 8], with 4 bits in AutoAWQ's order."""
    scales = given["scales"].float()
    codes, zeros = (
        unpack(given[name].contiguous().view(torch.uint8), 4).unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2)
        for name in ("qweight", "qzeros")
    )
    return pack(codes.T.contiguous(), 4), scales.T.contiguous(), -(zeros * scales).T.contiguous()


def of_compressed_tensors(given: Mapping[str, Tensor], config: "IntegerConfig", bits: int) -> Ours:
    """weight_packed [N, C * bits / 32], weight_scale [N, C / group], weight_zero_point [N * bits / 32, C / group]."""
    scale, zeros = given["weight_scale"], given.get("weight_zero_point")
    if zeros is not None:
        zeros = unpack(zeros.T.contiguous().view(torch.uint8), bits).T[: len(scale)]
        return given["weight_packed"], scale.float(), -(zeros * scale.float())
    scale = scale if scale.dtype == torch.bfloat16 else scale.float()  # float16 might overflow
    return given["weight_packed"], scale, scale * -(2 ** (bits - 1))


def nvfp4_shapes(N: int, C: int, bits: int, groups: int) -> dict[str, tuple[int, ...]]:
    return {"weight_packed": (N, C // 2), "weight_scale": (N, groups), "weight_global_scale": (1,)}


def of_nvfp4(given: Mapping[str, Tensor], config: "IntegerConfig", bits: int) -> Ours:
    """weight_packed [N, C / 2], weight_scale [N, C / 16] in e4m3, and the divisor weight_global_scale."""
    scale = given["weight_scale"].view(torch.uint8)  # every device can stack and join uint8
    return given["weight_packed"], scale, 1 / given["weight_global_scale"].view(1)


COMPRESSED_TENSORS = Method(
    "weight_packed",
    "weight_scale",
    (),
    ("weight_zero_point", "weight_g_idx", "weight_shape"),
    of_compressed_tensors,
    compressed_shapes,
    groups_axis=1,
    zeros="weight_zero_point",
)
NVFP4 = Method(
    "weight_packed",
    "weight_scale",
    ("weight_global_scale",),
    ("input_global_scale",),
    of_nvfp4,
    nvfp4_shapes,
    groups_axis=1,
    zeros="weight_global_scale",
    format="nvfp4",
)
METHODS = {
    "gptq": Method("qweight", "scales", ("qzeros",), ("g_idx",), of_gptq, gptq_shapes, groups_axis=0),
    "awq": Method("qweight", "scales", ("qzeros",), (), of_awq, awq_shapes, groups_axis=0),
    "compressed-tensors": COMPRESSED_TENSORS,
    "nvfp4-pack-quantized": NVFP4,
}


class IntegerConfig(QuantizationConfigMixin):
    """The settings of a checkpoint that are needed here."""

    def __init__(self, method: str, widths: list[Width], zero_point_offset: int = 1):
        self.quant_method = "moe_metal_integers"
        self.method, self.widths, self.zero_point_offset = method, widths, zero_point_offset

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        return integers_of(config_dict["checkpoint"])


def integers_of(config: Mapping) -> IntegerConfig | None:
    """The settings in a checkpoint's dictionary; None if it is not affine: other bits, reordered columns, floats."""
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return compressed_tensors_of(config)
    group = config.get("group_size", config.get("q_group_size"))
    widths = [Width(config.get("bits", config.get("w_bit")), group)]
    if method == "awq":
        gemm = str(config.get("version", config.get("format", "gemm"))).lower() == "gemm"
        right = gemm and config.get("zero_point", True) is True
        return IntegerConfig(method, widths) if right and known(widths, (4,)) else None
    if method == "gptq":
        overrides = overrides_of(config)
        widths += [Width(each.get("bits", widths[0].bits), each.get("group_size", group)) for each in overrides]
        if not known(widths, (2, 3, 4, 8)) or any(each.get("desc_act") for each in (config, *overrides)):
            return None
        format = config.get("checkpoint_format", config.get("format"))
        return IntegerConfig(method, widths, 0 if format == "gptq_v2" else 1)
    return None


def known(widths: list[Width], bits: tuple[int, ...]) -> bool:
    return bool(widths) and all(
        type(width.bits) is int and width.bits in bits and (width.group is None or type(width.group) is int)
        for width in widths
    )


def overrides_of(config: Mapping) -> list[dict]:
    """The settings in GPTQ's `dynamic` for modules that are quantised differently. The shapes of the weights show which
    modules these are, so no pattern from the file is matched here."""
    dynamic = config.get("dynamic")
    if not isinstance(dynamic, dict):
        return []
    return [each for name, each in dynamic.items() if isinstance(each, dict) and not name.startswith("-:")]


def compressed_tensors_of(config: Mapping) -> IntegerConfig | None:
    groups = config.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    weights = [group.get("weights") if isinstance(group, dict) else None for group in groups]
    if not weights or not all(isinstance(each, dict) for each in weights) or config.get("transform_config"):
        return None
    usual = "pack-quantized" if config.get("format") == "mixed-precision" else config.get("format")
    formats = [group.get("format") or usual for group in groups]
    if all(format == "nvfp4-pack-quantized" for format in formats):
        return nvfp4_of(weights)
    if not all(format == "pack-quantized" for format in formats) or any(g.get("input_activations") for g in groups):
        return None
    widths = []
    for each in weights:
        strategy = each.get("strategy")
        if strategy not in ("group", "channel") or each.get("type", "int") != "int":
            return None
        size = each.get("group_size") if strategy == "group" else -1
        widths.append(Width(each.get("num_bits"), size, each.get("symmetric", True) is not False))
    return IntegerConfig("compressed-tensors", widths) if known(widths, (4, 8)) else None


def nvfp4_of(weights: list[dict]) -> IntegerConfig | None:
    """The settings for nvfp4. Activations are not quantised here, so their settings are ignored."""
    usual = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    right = all(each.get(key, value) == value for each in weights for key, value in usual.items())
    return IntegerConfig("nvfp4-pack-quantized", [Width(*FIXED["nvfp4"])]) if right else None
