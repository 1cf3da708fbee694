"""Checkpoints of other projects (AWQ, GPTQ and compressed-tensors), converted to our formats while they load."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.quantizers import auto

from ...formats import GROUPS, any_of
from ..fusing.experts import expert_arguments, is_experts, why_not_packed
from ..fusing.packed_modules import (
    PROJECTIONS,
    PackedExperts,
    Parts,
    columns_of,
    empty_parts,
    packed_modules,
    weight_shape,
)
from ..fusing.packed_modules import pack as pack_module
from .awq_gptq_layouts import METHODS, IntegerConfig, Ours, Width
from .checkpoint import Stored
from .config import FIXED, Form, MoeMetalConfig, described
from .conversions import full_tensor_names, merged, merges_experts, packed_weight
from .quantizer import PackedQuantizer
from .sources import expect_all_experts


def repeats(group: int) -> int:
    """The number of our groups that one of these groups consists of; 0 if it is not a multiple of them."""
    return next((group // known for known in reversed(GROUPS) if group % known == 0), 0)


class Repack(ConversionOps):
    """Converts a method's parts of a weight, or of the weights of all experts, to one weight of ours."""

    def __init__(self, quantizer: "Integers", operations: list[ConversionOps]):
        self.hf_quantizer = quantizer  # so that transformers does not cast the parts
        self.operations = operations

    def convert(self, input_dict, source_patterns, model=None, full_layer_name=None, **kwargs):
        method, config = self.hf_quantizer.method, self.hf_quantizer.integers
        module, weight = packed_weight(model, full_layer_name)
        columns = columns_of(module, weight)
        bits = 8 * module.parts(weight)[0].shape[-1] // columns
        given: dict[str, dict[str, list[Tensor]]] = {}
        for pattern in source_patterns:
            part = next(part for part in method.parts if re.search(rf"(^|\.){part}$", pattern))
            if pattern in input_dict and part in method.value_parts:  # the other parts have been checked
                given.setdefault(pattern[: -len(part)], {})[part] = input_dict.pop(pattern)
        apart = {name: {} for name in module.packing[weight]}
        for source, parts in given.items():
            for single in zip(*parts.values(), strict=True):
                ours = method.ours(dict(zip(parts, single, strict=True)), config, bits)
                for name, tensor in zip(apart, in_groups(ours, columns), strict=True):
                    apart[name].setdefault(source, []).append(tensor)
        kwargs |= {"source_patterns": list(given)}
        found = {name: merged(self.operations, tensors, **kwargs) for name, tensors in apart.items()}
        parts = {name: next(iter(tensors.values())) for name, tensors in found.items()}
        return full_tensor_names(
            model, full_layer_name, {n: t[0] if isinstance(t, list) else t for n, t in parts.items()}
        )


def in_groups(ours: Ours, C: int) -> Ours:
    """Repeat the scales of groups that are larger than the groups of our ops."""
    data, *scales = ours
    data = data.view(torch.uint8)
    times = repeats(C // scales[0].shape[-1])
    return (data, *(part.repeat_interleave(times, -1) if times > 1 else part for part in scales))


class Integers(PackedQuantizer):
    """AWQ, GPTQ, and compressed-tensors' integers and nvfp4, without the packages that transformers requires. A loaded
    model is in our formats, and is saved like a model of `MoeMetalConfig`."""

    kind = "integers"

    def __init__(self, quantization_config: IntegerConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        self.integers, self.method = quantization_config, METHODS[quantization_config.method]

    def weights(self, model: nn.Module, tensors: Mapping[str, Stored]) -> dict[str, dict[str, list[dict[str, Stored]]]]:
        """The stored parts of each packed weight, by its name in the model and by the pattern of a projection ("" if
        there is only one): the parts of a linear layer, or of each expert."""
        conversions, known = get_model_conversion_mapping(model), model.state_dict()
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        projections = {
            each: converter.source_patterns for converter in converters for each in converter.source_patterns
        }
        found: dict[str, dict[str, list[dict[str, Stored]]]] = {}
        for name in sorted(tensors, key=dot_natural_key):  # in the order of loading
            stored = tensors[name]
            stem, _, part = name.rpartition(".")
            if part in self.method.parts:
                stored.require_sibling(tensors, f"{stem}.{self.method.data}")
            if part != self.method.data:
                continue
            for other in (self.method.scale, *self.method.required):
                stored.require_sibling(tensors, f"{stem}.{other}")
            names = (renamings, converters, model.base_model_prefix, known)
            key, pattern = rename_source_key(f"{stem}.weight", *names)
            if key in known:  # the model may ignore some layers
                parts = {each: tensors[f"{stem}.{each}"] for each in self.method.parts if f"{stem}.{each}" in tensors}
                of_key = found.setdefault(key, {each: [] for each in projections.get(pattern, [""])})
                of_key.setdefault(pattern or "", []).append(parts)
        return found

    def form_of(
        self, model: nn.Module, key: str, stored: dict[str, list[dict[str, Stored]]]
    ) -> tuple[int, int, torch.dtype]:
        """Bits, group size and dtype of the scales of a packed weight. Raises if its stored parts do not fit."""
        home, _, name = key.rpartition(".")
        module, method = model.get_submodule(home), self.method
        first = next(parts for singles in stored.values() for parts in singles)[method.data]
        if is_experts(module):
            reason = why_not_packed(module)
            first.expect(reason is None, f"experts that can run packed, but {reason}")
            E, N, C = weight_shape(module, next(weight for weight, each in PROJECTIONS.items() if each == name))
        else:
            first.expect(type(module) is nn.Linear, f"a linear layer, but {home} is a {type(module).__name__}")
            E, (N, C) = 0, module.weight.shape
        forms = set()
        for pattern, singles in stored.items():
            if E:
                first.expect(bool(singles), f"{pattern} as well, by the model's configuration")
                expect_all_experts([parts[method.data] for parts in singles], pattern, E)
            for parts in singles:
                forms.add(self.form(parts, N // len(stored), C))
                parts[method.data].expect(
                    len(forms) == 1, f"the bits and groups of {first.name}, which it is joined with"
                )
        with_zeros = {method.zeros in parts for singles in stored.values() for parts in singles}
        first.expect(len(with_zeros) == 1, f"{method.zeros} for all weights that it is joined with, or for none")
        if len(stored) > 1 and method.has_factor and not is_linear_in_up(module):
            self.expect_one_factor(stored)
        return *forms.pop(), method.dtype([parts for singles in stored.values() for parts in singles])

    def expect_one_factor(self, stored: dict[str, list[dict[str, Stored]]]) -> None:
        """Raises if weights that are joined have different divisors."""
        first, *others = ([parts[self.method.zeros] for parts in singles] for singles in stored.values())
        for other in others:
            for one, another in zip(first, other, strict=True):
                same = one.read() == another.read()
                another.expect(same, f"the number of {one.name}, since its experts clamp or add")

    def fixed_form(self, parts: dict[str, Stored], N: int, C: int) -> tuple[int, int]:
        """Bits and group size of a weight [N, C] in a format where they are fixed."""
        method, (bits, group) = self.method, FIXED[self.method.format]
        parts[method.data].expect(
            C % group == 0, f"a multiple of {group} columns, not {C} by the model's configuration"
        )
        dtypes = dict(zip(method.value_parts, ("U8", "F8_E4M3", "F32"), strict=True))
        for part, shape in method.shapes(N, C, bits, C // group).items():
            right = parts[part].shape == shape or (part == method.zeros and parts[part].shape == ())
            parts[part].expect(right and parts[part].dtype == dtypes[part], f"{dtypes[part]} {list(shape)}")
        return bits, group

    def form(self, parts: dict[str, Stored], N: int, C: int) -> tuple[int, int]:
        """Bits and group size of a weight [N, C]."""
        if self.method.format in FIXED:
            return self.fixed_form(parts, N, C)
        method, data, scale = self.method, parts[self.method.data], parts[self.method.scale]

        def shapes(width: Width) -> dict[str, tuple[int, ...]]:
            return method.shapes(N, C, width.bits, width.groups(C, scale, method.groups_axis))

        widths = [width for width in self.integers.widths if shapes(width)[method.data] == data.shape]
        bits = " or ".join(map(str, sorted({width.bits for width in self.integers.widths})))
        expected = f"I32 {list(shapes(self.integers.widths[0])[method.data])}: {C} columns and {N} rows of {bits} bits"
        data.expect(bool(widths) and data.dtype == "I32", expected)
        widths = [each for each in widths if shapes(each)[method.scale] == scale.shape] or widths
        width = widths[0]
        groups = width.groups(C, scale, method.groups_axis)
        times = repeats(C // groups) if groups and C % groups == 0 else 0
        scale.expect(times > 0, f"a scale for each {any_of(GROUPS)} of {C} columns, or multiples of these")
        scale.expect_scales(shapes(width)[method.scale], f"a scale for each {C // groups} of {C} columns")
        for part in parts.keys() - {method.data, method.scale}:
            shape, dtypes = shapes(width)[part], ("I32",) if part == method.zeros else ("I32", "I64")
            right = parts[part].shape == shape and parts[part].dtype in dtypes
            parts[part].expect(right, f"{' or '.join(dtypes)} {list(shape)}")
        if method.zeros not in parts and not any(each.symmetric for each in widths):
            data.require_sibling({}, f"{data.name.removesuffix(method.data)}{method.zeros}")
        check_numbers(parts, N, C, C // groups)
        return width.bits, C // groups // times

    def pack(self, model: nn.Module, tensors: dict[str, Stored]) -> None:
        weights, format = self.weights(model, tensors), self.method.format
        forms = {key: self.form_of(model, key, stored) for key, stored in weights.items()}
        if not forms:
            found = f"{self.method.data} in its safetensors files, by its quantization_config"
            raise ValueError(f"torch_moe_metal: {model.config.name_or_path}: expected tensors called {found}, got none")

        def parts(name: str, dense: Tensor) -> Parts:
            if name not in forms:
                home = model.config.name_or_path
                raise ValueError(f"torch_moe_metal: {home}: expected {name} packed, like its sibling, got a dense one")
            (bits, group, dtype), last = forms[name], name.rpartition(".")[2]
            found = empty_parts(last, dense.shape, format, bits, group, dtype)
            if self.method.has_factor:  # one per stored weight, until `one_factor`
                size = (*dense.shape[:-2], len(weights[name]))
                found[f"{last}_offset"] = torch.empty(size, dtype=torch.float32, device="meta")
            return found

        for name in dict.fromkeys(key.rpartition(".")[0] for key in forms):
            pack_module(model, name, format, parts)
        self.quantization_config = our_config(model)

    @property
    def stores_parts(self) -> bool:
        return False

    def check_part(self, module, weight, part, sources):
        """`pack` has checked the parts already, to find the formats."""

    def conversions(self, weight_conversions, model):
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
        for _, module in packed_modules(model):
            if self.method.has_factor and "gate_up" in module.packing:
                one_factor(module)
        model._weight_conversions = []  # packed weights are saved under the model's own names


def is_linear_in_up(experts: nn.Module) -> bool:
    """Whether scaling the up rows by c scales the output by c, apart from down's bias."""
    arguments, _ = expert_arguments(experts)
    return not arguments.keys() & {"limit", "gate_up_bias"} and arguments.get("activation") != "swiglu_oai"


def one_factor(experts: PackedExperts) -> None:
    """Replace separate factors of gate and up by one, as the ops expect. The quotient moves to down's factor."""
    factors, down = (experts.parts(weight)[2] for weight in PROJECTIONS)
    gate, up = factors[:, :1], factors[:, -1:]
    experts._buffers[experts.packing["gate_up"][2]] = gate.contiguous()
    experts._buffers[experts.packing["down"][2]] = down * (up / gate)


def check_numbers(parts: Mapping[str, Stored], N: int, C: int, group: int) -> None:
    """Check the few stored elements that describe the layout of the others."""
    for part in ("g_idx", "weight_g_idx"):
        if part in parts:
            in_order = parts[part].read() == [column // group for column in range(C)]
            parts[part].expect(in_order, f"groups of {group} neighbouring columns, not columns in another order")
    if "weight_shape" in parts:
        numbers = parts["weight_shape"].read()
        parts["weight_shape"].expect(numbers == [N, C], f"{[N, C]} by the model's configuration, not {numbers}")


def our_config(model: nn.Module) -> MoeMetalConfig:
    """The configuration with which a dense model would become like this one."""
    forms = (Form.now(module, weight) for _, module in packed_modules(model) for weight in module.packing)
    (most_common, _), *_ = Counter(forms).most_common(1)
    return described(model, MoeMetalConfig(**asdict(most_common)))


def register() -> None:
    auto.AUTO_QUANTIZER_MAPPING["moe_metal_integers"] = Integers
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING["moe_metal_integers"] = IntegerConfig
