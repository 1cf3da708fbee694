"""Integer checkpoints of other projects - AWQ, GPTQ and compressed-tensors - which become affine while they are loaded.

Nothing is rounded: a code q with a scale s and a zero point z, (q - z) * s, is s * q + offset with the offset -z * s,
which float32 holds exactly. Codes stay as they are; where a project packs them along the rows of the output, they are
packed anew. Of compressed-tensors' symmetric weights not even that: what is stored is the affine layout.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers import auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..packing import GROUPS, pack
from ..reference import unpack
from .checkpoint import Stored
from .config import Form, MoeMetalConfig, described
from .experts import why_not_packed
from .packed import Parts, columns_of, empty_parts, packed_modules
from .packed import pack as pack_module
from .patch import is_experts
from .quantizer import PackedQuantizer, merged, merges_experts, packed_weight, runs_here, whole_names

Affine = tuple[Tensor, Tensor, Tensor]  # data, scale, offset
#: Where AutoAWQ puts each of 8 neighbouring columns in a word.
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True)
class Method:
    """One project's way to store a weight [N, C]: what it calls its parts, and what they are in the affine format."""

    data: str
    scale: str
    required: tuple[str, ...]  # and always there
    optional: tuple[str, ...]
    affine: Callable[[Mapping[str, Tensor], int, "IntegerConfig"], Affine]
    groups_first: bool  # whether scales are [C / group, N]

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.data, self.scale, *self.required, *self.optional)

    def dtype(self, scale: Stored, tensors: Mapping[str, Stored]) -> torch.dtype:
        """Of the scales and offsets that come out: float32, but where 16 bits hold these offsets, too."""
        zeros = f"{scale.name.removesuffix('scale')}zero_point" in tensors
        return torch.bfloat16 if self is COMPRESSED_TENSORS and scale.dtype == "BF16" and not zeros else torch.float32


def of_gptq(given: Mapping[str, Tensor], C: int, config: "IntegerConfig") -> Affine:
    """qweight [C * bits / 32, N], qzeros [C / group, N * bits / 32], less one but in its second version."""
    scales = given["scales"].float()
    zeros = unpack(given["qzeros"].contiguous().view(torch.uint8), config.bits)[:, : scales.shape[1]]
    zeros = zeros if config.zeros_as_they_are else zeros + 1
    check_order(given.get("g_idx"), C, len(scales))
    return given["qweight"].T.contiguous(), scales.T.contiguous(), -(zeros * scales).T.contiguous()


def of_awq(given: Mapping[str, Tensor], C: int, config: "IntegerConfig") -> Affine:
    """qweight [C, N / 8], qzeros [C / group, N / 8], of 4 bits in AutoAWQ's order."""
    scales = given["scales"].float()
    codes, zeros = (
        unpack(given[name].contiguous().view(torch.uint8), 4).unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2)
        for name in ("qweight", "qzeros")
    )
    return pack(codes.T.contiguous(), 4), scales.T.contiguous(), -(zeros * scales).T.contiguous()


def of_compressed_tensors(given: Mapping[str, Tensor], C: int, config: "IntegerConfig") -> Affine:
    """weight_packed [N, C * bits / 32], weight_scale [N, C / group], weight_zero_point [N * bits / 32, C / group]."""
    scale, zeros = given["weight_scale"], given.get("weight_zero_point")
    check_order(given.get("weight_g_idx"), C, scale.shape[-1])
    if zeros is not None:
        zeros = unpack(zeros.T.contiguous().view(torch.uint8), config.bits).T[: len(scale)]
        return given["weight_packed"], scale.float(), -(zeros * scale.float())
    scale = scale if scale.dtype == torch.bfloat16 else scale.float()  # float16 might overflow
    return given["weight_packed"], scale, scale * -(2 ** (config.bits - 1))


def check_order(g_idx: Tensor | None, C: int, groups: int) -> None:
    if g_idx is not None and not torch.equal(g_idx.cpu().long(), torch.arange(C) // (C // groups)):
        raise ValueError("expected groups of neighbouring columns, got a g_idx of another order")


COMPRESSED_TENSORS = Method(
    "weight_packed",
    "weight_scale",
    (),
    ("weight_zero_point", "weight_g_idx", "weight_shape"),
    of_compressed_tensors,
    groups_first=False,
)
METHODS = {
    "gptq": Method("qweight", "scales", ("qzeros",), ("g_idx",), of_gptq, groups_first=True),
    "awq": Method("qweight", "scales", ("qzeros",), (), of_awq, groups_first=True),
    "compressed-tensors": COMPRESSED_TENSORS,
}


class IntegerConfig(QuantizationConfigMixin):
    """What a checkpoint of one of these methods says of itself, as far as it counts here."""

    def __init__(self, method: str, bits: int, zeros_as_they_are: bool = False):
        self.quant_method = "moe_metal_integers"
        self.method, self.bits, self.zeros_as_they_are = method, bits, zeros_as_they_are


def integers_of(config: Mapping) -> IntegerConfig | None:
    """The same from a checkpoint's dictionary; None for what is not affine: other widths, reordered columns, floats."""
    method = config.get("quant_method")
    if method == "gptq" and config.get("bits") in (2, 3, 4, 8) and not config.get("desc_act"):
        return IntegerConfig(method, config["bits"], config.get("checkpoint_format") == "gptq_v2")
    if method == "awq" and config.get("bits", config.get("w_bit")) == 4:
        gemm = str(config.get("version", config.get("format", "gemm"))).lower() == "gemm"
        return IntegerConfig(method, 4) if gemm and config.get("zero_point", True) else None
    if method == "compressed-tensors" and config.get("format") == "pack-quantized":
        groups = [group for group in (config.get("config_groups") or {}).values()]
        weights = [group.get("weights") or {} for group in groups]
        bits = {weight.get("num_bits") for weight in weights if weight.get("type", "int") == "int"}
        plain = all(not group.get("input_activations") for group in groups)
        known = all(weight.get("strategy") in ("group", "channel") for weight in weights)
        if len(bits) == 1 and bits <= {4, 8} and plain and known:
            return IntegerConfig(method, bits.pop())
    return None


class Repack(ConversionOps):
    """A method's parts of a weight, or of all experts' weights, as one affine weight."""

    def __init__(self, quantizer: "Integers", operations: list[ConversionOps]):
        self.hf_quantizer = quantizer  # by which transformers knows that no part may be cast
        self.operations = operations

    def convert(self, input_dict, source_patterns, model=None, full_layer_name=None, **kwargs):
        method, config = self.hf_quantizer.method, self.hf_quantizer.integers
        module, weight = packed_weight(model, full_layer_name)
        columns = columns_of(module, weight)
        given: dict[str, dict[str, list[Tensor]]] = {}
        for pattern in source_patterns:
            part = next(part for part in method.parts if re.search(rf"(^|\.){part}$", pattern))
            if pattern in input_dict:
                given.setdefault(pattern[: -len(part)], {})[part] = input_dict.pop(pattern)
        apart = {name: {} for name in module.packing[weight]}
        for source, parts in given.items():
            for single in zip(*parts.values(), strict=True):
                affine = method.affine(dict(zip(parts, single, strict=True)), columns, config)
                for name, tensor in zip(apart, in_groups(affine, columns), strict=True):
                    apart[name].setdefault(source, []).append(tensor)
        kwargs |= {"source_patterns": list(given)}
        found = {name: merged(self.operations, tensors, **kwargs) for name, tensors in apart.items()}
        parts = {name: next(iter(tensors.values())) for name, tensors in found.items()}
        return whole_names(model, full_layer_name, {n: t[0] if isinstance(t, list) else t for n, t in parts.items()})


def in_groups(affine: Affine, C: int) -> Affine:
    """The same with groups that our ops know, by repeating the scales of larger ones."""
    data, *beside = affine
    data = data.view(torch.uint8)
    times = repeats(C // beside[0].shape[-1])
    return (data, *(part.repeat_interleave(times, -1) if times > 1 else part for part in beside))


def repeats(group: int) -> int:
    """How many of the groups that our ops know make one of these; 0 when none do."""
    return next((group // known for known in reversed(GROUPS) if group % known == 0), 0)


class Integers(PackedQuantizer):
    """AWQ, GPTQ and compressed-tensors' integers, without the packages that transformers asks for. What is loaded is
    ours from then on: it is saved as `MoeMetalConfig` would have made it."""

    def __init__(self, quantization_config: IntegerConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        self.integers, self.method = quantization_config, METHODS[quantization_config.method]

    def scales(self, model: nn.Module, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        """The scales of each packed weight, by its name in the model."""
        conversions, known = get_model_conversion_mapping(model), model.state_dict()
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        found = {}
        for name, stored in tensors.items():
            stem, _, part = name.rpartition(".")
            if part == self.method.data:
                others = (self.method.scale, *self.method.required)
                scales = [stored.beside(tensors, f"{stem}.{other}") for other in others]
                key, _ = rename_source_key(f"{stem}.weight", renamings, converters, model.base_model_prefix, known)
                if key in known:  # the model may have no use for some layers
                    found[key] = scales[0]
        return found

    def pack(self, model: nn.Module, tensors: dict[str, Stored]) -> None:
        scales = self.scales(model, tensors)

        def parts(name: str, dense: Tensor) -> Parts:
            if name not in scales:
                raise ValueError(f"torch_moe_metal: {model.config.name_or_path}: {name} is not packed as its sister is")
            scale, C = scales[name], dense.shape[-1]
            groups = scale.shape[0 if self.method.groups_first else -1]
            times = repeats(C // groups) if groups and C % groups == 0 else 0
            scale.expect(times > 0, f"a scale for each 16, 32, 64 or 128 of {C} columns, or multiples of these")
            dtype, group, name = self.method.dtype(scale, tensors), C // groups // times, name.rpartition(".")[2]
            return empty_parts(name, dense.shape, "affine", self.integers.bits, group, dtype)

        for name in dict.fromkeys(key.rpartition(".")[0] for key in scales):
            module = model.get_submodule(name)
            reason = why_not_packed(module) if is_experts(module) else None
            if reason is not None:
                raise ValueError(f"torch_moe_metal: {name} is packed, but cannot run so: {reason}")
            pack_module(model, name, "affine", parts)
        self.quantization_config = as_our_own(model, self.integers.bits)

    def update_weight_conversions(self, weight_conversions, model):
        parts = [f".{part}" for part in self.method.parts]
        updated = [WeightConverter(parts, ".weight", [Repack(self, [])])]
        for conversion in weight_conversions:
            if isinstance(conversion, WeightConverter) and merges_experts(conversion):
                sources, targets = conversion._original_source_patterns, conversion._original_target_patterns
                stems = [source.removesuffix(".weight") for source in sources]
                sources = [f"{stem}{part}" for stem in stems for part in parts]
                updated.insert(0, conversion.copy(sources, targets, operations=[Repack(self, conversion.operations)]))
            updated.append(conversion)
        return updated

    def _process_model_after_weight_loading(self, model, **kwargs):
        super()._process_model_after_weight_loading(model, **kwargs)
        model._weight_conversions = []  # what is packed is saved under the model's own names


def as_our_own(model: nn.Module, bits: int) -> MoeMetalConfig:
    """The configuration that makes of a dense model what this one is."""
    groups = Counter(
        Form.now(module, weight).group_size for _, module in packed_modules(model) for weight in module.packing
    )
    return described(model, MoeMetalConfig(bits=bits, group_size=groups.most_common(1)[0][0]))


def register() -> None:
    """Have transformers ask here first what a checkpoint's configuration is, where its own ways need a GPU anyway."""
    auto.AUTO_QUANTIZER_MAPPING["moe_metal_integers"] = Integers
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING["moe_metal_integers"] = IntegerConfig
    for method in METHODS:
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method] = choice(auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method])


def choice(stock: type) -> type:
    """transformers' own class of configuration, but for the dictionaries that are ours."""

    def from_dict(cls, config_dict, **kwargs):
        ours = integers_of(config_dict) if runs_here(None) else None
        return stock.from_dict(config_dict, **kwargs) if ours is None else ours

    return type(stock.__name__, (stock,), {"from_dict": classmethod(from_dict)})
