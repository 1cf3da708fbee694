"""Quantised checkpoints in `from_pretrained`, run as they are on disk: transformers' quantizers, with packed weights.

On cuda and xpu, and where the user asks for dequantised weights, transformers' own quantizers do what they always did.
"""

import contextlib
import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import logging

from ... import reference
from ...formats import FORMATS
from ...ggml import power_of_two
from ...integration import packed_checkpoints
from ...layers import Permuted
from ...packing import FP8_BLOCK, MXFP4_GROUP
from ...transaction import all_or_nothing
from ..fusing.experts import DEVICES, NAME, is_experts, why_not_packed
from ..fusing.packed import (
    PROJECTIONS,
    PackedExperts,
    Parts,
    columns_of,
    dense_shape,
    empty_parts,
    end_initialisation,
    let_transformers_initialise,
    pack,
    packed_modules,
    packed_names,
    quantize_like,
    unpack,
    use_own_names,
    weight_shape,
)
from ..fusing.patch import BEFORE
from .checkpoint import FLOATS, FP8_SCALES, POWERS, SAFETENSORS, SCALES, Stored, check_fp8, check_mxfp4, stored_tensors
from .config import Form, MoeMetalConfig, described, pack_all
from .sources import Sources, sources_of

logger = logging.get_logger(__name__)


def runs_here(device_map) -> bool:
    """Whether a model with this device map lies where our ops run."""
    if device_map is None:
        return not (torch.cuda.is_available() or torch.xpu.is_available())  # it may be meant to be moved there
    places = device_map.values() if isinstance(device_map, dict) else [device_map]
    return all(device_type(place) in DEVICES for place in places)


def device_type(place) -> str:
    """Of an entry of a device map: a device, its name, the number of one, or a way to choose ("auto")."""
    if isinstance(place, str) and place in ("auto", "balanced", "balanced_low_0", "sequential"):
        place = 0
    if isinstance(place, int):
        accelerator = torch.accelerator.current_accelerator()
        return accelerator.type if accelerator is not None else "cpu"
    return "cpu" if place == "disk" else torch.device(place).type


#: In which dtypes scales of each kind are stored.
STORED_SCALES = {"any_float": SCALES, "float32_or_bfloat16": FP8_SCALES, "e8m0": ("U8",), "e4m3": ("F8_E4M3", "U8")}


def stored_dtypes(format: str, part: int) -> tuple[str, ...]:
    """Of the data (0), the scale (1) or the offset (2) of a format: safetensors' words."""
    row = FORMATS[format]
    if part == 0:
        return ("F8_E4M3", "U8") if row.columns == row.bytes == 1 else ("U8",)
    return ("F32",) if part == 2 and row.offset == "factor" else STORED_SCALES[row.scale]


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """Has errors of ours name the checkpoint that they are about, where they name no file of it."""
    try:
        yield
    except ValueError as error:
        said = str(error).removeprefix("torch_moe_metal: ")
        if place in said or said == str(error):
            raise
        raise ValueError(f"torch_moe_metal: {place}: {said}") from error


class PackedQuantizer(HfQuantizer):
    """What our quantizers share. A subclass says which modules get which packed weights, on the meta device and by the
    names that the checkpoint has for their parts; the rest is transformers' ordinary loading."""

    stock: type | None = None  # transformers' own quantizer of this method, which takes over elsewhere
    stored: dict[str, Stored] | None = None  # until it is known what becomes of them
    is_trainable = True  # gradients pass through packed weights
    is_compileable = True

    def pack(self, model: nn.Module, tensors: dict[str, Stored]) -> None:
        """Have packed weights on the meta device, as they are stored."""
        raise NotImplementedError

    def obstacle(self, model: nn.Module, tensors: dict[str, Stored]) -> str | None:
        """What of this model cannot be packed, so that transformers has to dequantise it."""
        distributed = getattr(model.config, "distributed_config", None) is not None
        return "packed weights are not distributed over processes" if distributed else None

    def serves(self, device_map) -> bool:
        """Whether this is ours: a checkpoint that is packed and shall stay so, where our ops run."""
        dequantize = getattr(self.quantization_config, "dequantize", False)
        return self.pre_quantized and not dequantize and runs_here(device_map) and packed_checkpoints()

    def validate_environment(self, *args, device_map=None, **kwargs) -> None:
        if self.stock is not None and not self.serves(device_map):
            self.__class__ = self.stock
            self.validate_environment(*args, device_map=device_map, **kwargs)

    def update_attn_implementation(self, config):
        """The first that a quantizer sees of the configuration, so it is also where our experts are selected."""
        if config._experts_implementation is None:
            config._experts_implementation = NAME
        return config

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        tensors = stored_tensors(checkpoint_files)
        obstacle = self.obstacle(model, tensors)
        if obstacle is None:
            with naming(model.config.name_or_path):
                self.pack(model, tensors)
            let_transformers_initialise(model)
            self.stored = tensors
            return
        if self.stock is None:
            raise ValueError(f"torch_moe_metal: cannot load {model.config.name_or_path}: {obstacle}")
        logger.warning(f"torch_moe_metal: transformers dequantises this checkpoint, since {obstacle}")
        self.__class__ = self.stock
        self.quantization_config.dequantize = True
        return self._process_model_before_weight_loading(model, checkpoint_files=checkpoint_files, **kwargs)

    def update_weight_conversions(self, weight_conversions, model):
        """The last that a quantizer sees before weights are loaded, so it is also where files are checked."""
        conversions = self.conversions(weight_conversions, model)
        stored, self.stored = self.stored, None  # transformers copies a quantizer with each conversion that it is in
        if stored:
            self.check(model, sources_of(model, stored, conversions))
        return conversions

    def conversions(self, weight_conversions: list, model: nn.Module) -> list:
        return weight_conversions

    @property
    def stores_parts(self) -> bool:
        """Whether the checkpoint has the parts of packed weights under their own names, or what becomes all of them."""
        return self.pre_quantized

    def check(self, model: nn.Module, sources: dict[str, Sources]) -> None:
        """An error where files lack parts of packed weights, or have other shapes or dtypes than they must have."""
        packed = {
            f"{name}.{part}": (module, weight, part)
            for name, module in packed_modules(model)
            for weight, parts in module.packing.items()
            for part in (parts if self.stores_parts else parts[:1])
        }
        missing = sorted(packed.keys() - sources.keys())
        if missing:
            raise ValueError(f"torch_moe_metal: {model.config.name_or_path}: missing: {', '.join(missing)}")
        dense = model.state_dict()
        for key, given in sources.items():
            if key in packed:
                self.check_part(*packed[key], given)
            elif dense[key].is_floating_point() and not given.is_checked_by_its_operations:
                for stored in given:
                    stored.expect_floats()

    def check_part(self, module: nn.Module, weight: str, part: str, sources: Sources) -> None:
        """Check what is stored for a part of a packed weight."""
        number = module.packing[weight].index(part)
        sources.expect([tuple(module._buffers[part].shape)], stored_dtypes(module.format_of(weight), number))

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        return False

    def _process_model_after_weight_loading(self, model, **kwargs):
        end_initialisation(model)
        missing = [
            f"{name}.{part}"
            for name, module in packed_modules(model)
            for part in sorted(packed_names(module))
            if module._buffers[part] is not None and not getattr(module._buffers[part], "_is_hf_initialized", False)
        ]
        if missing:
            raise ValueError(f"torch_moe_metal: {model.config.name_or_path}: missing: {', '.join(missing)}")

    def get_state_dict_and_metadata(self, model):
        """The first that `save_pretrained` asks: what it writes of our own configuration is how the model is now."""
        if isinstance(self.quantization_config, MoeMetalConfig):
            self.quantization_config = model.config.quantization_config = described(model, self.quantization_config)
        return joined_state(model), {}

    def is_serializable(self) -> bool:
        return True

    def dequantize(self, model, dtype=None):
        dtype = dtype or model.config.dtype  # which `save_pretrained` makes a string
        with all_or_nothing(model):
            return super().dequantize(model, getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    def _dequantize(self, model, dtype=None):
        unpack(model, dtype or model.dtype)
        return model


def joined_state(model: nn.Module) -> dict[str, Tensor] | None:
    """The state of a model whose experts have gate and up apart, as in a GGUF file's pages, with one weight of both;
    None for any other model, whose state is saved as it is."""
    apart = {
        f"{name}.{PROJECTIONS['gate_up']}": module
        for name, module in packed_modules(model)
        if isinstance(module, PackedExperts) and FORMATS[module.format].has_own_scales
        if module.parts("gate_up")[0].dim() == 4
    }
    for name, module in model.named_modules():
        if isinstance(module, Permuted):
            raise ValueError(
                f"torch_moe_metal: save_pretrained: {name}: its blocks' columns are in another order than its input, "
                "which only its GGUF file says: keep the file, or dequantize() the model first"
            )
    if not apart:
        return None
    return {
        name: reference.joined(tensor, None, not apart[name].is_concatenated) if name in apart else tensor
        for name, tensor in model.state_dict().items()
    }


def find(model: nn.Module, tensors: dict[str, Stored], name: str) -> Stored | None:
    """What is stored under a model's name for it, with or without the base model's prefix."""
    prefix = f"{model.base_model_prefix}."
    return tensors.get(name) or tensors.get(name.removeprefix(prefix)) or tensors.get(prefix + name)


def absent(model: nn.Module, tensors: dict[str, Stored]) -> set[str]:
    """The linear layers and embeddings of which the files have nothing, so that transformers initialises them: a
    classifier's head that is to be trained, for one."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    unknown = {f"{name}.weight": name for name in layers if find(model, tensors, f"{name}.weight") is None}
    if not tensors or not unknown:
        return set()
    conversions, known = get_model_conversion_mapping(model), model.state_dict()
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    names = (renamings, converters, model.base_model_prefix, known)
    reached = {rename_source_key(name, *names)[0] for name in tensors} | model.all_tied_weights_keys.keys()
    return {name for weight, name in unknown.items() if weight not in reached}


def as_stored(model: nn.Module, tensors: dict[str, Stored], module: str, parts: Parts) -> Parts:
    """Parts on the meta device with the dtypes in which they are stored, or an error where their shapes are others."""
    found = {}
    for name, part in parts.items():
        stored = find(model, tensors, f"{module}.{name}")
        if stored is not None:
            stored.expect(stored.shape == tuple(part.shape), f"shape {list(part.shape)}, by the model's configuration")
            part = part.to(SAFETENSORS[stored.dtype]) if stored.dtype in SAFETENSORS else part
        found[name] = part
    return found


class Mxfp4(PackedQuantizer, Mxfp4HfQuantizer):
    """gpt-oss: experts `gate_up_proj_blocks` [E, 2I, H / 32, 16], `gate_up_proj_scales` [E, 2I, H / 32], and so on."""

    stock = Mxfp4HfQuantizer

    def pack(self, model: nn.Module, tensors: dict[str, Stored]) -> None:
        check_mxfp4(tensors)

        def parts(name: str, dense: Tensor) -> Parts:
            module, _, name = name.rpartition(".")
            options = {"dtype": torch.uint8, "device": "meta"}
            groups = (*dense.shape[:-1], dense.shape[-1] // MXFP4_GROUP)
            sizes = {f"{name}_blocks": (*groups, MXFP4_GROUP // 2), f"{name}_scales": groups}
            found = {part: torch.empty(size, **options) for part, size in sizes.items()}
            return as_stored(model, tensors, module, found)

        for name, module in list(model.named_modules()):
            if is_experts(module):
                pack(model, name, "mxfp4", parts)


# ------------------------------------------------------------------------------------------------ FP8


def of_each(given: dict, change: Callable[[Tensor], Tensor]) -> dict:
    """The same tensors changed, in lists where they are in lists."""
    return {
        name: [change(tensor) for tensor in tensors] if isinstance(tensors, list) else change(tensors)
        for name, tensors in given.items()
    }


class AsBytes(ConversionOps):
    """float8 as uint8, which every device can stack and join."""

    dtypes = (torch.float8_e4m3fn, torch.uint8)

    def convert(self, input_dict, **kwargs):
        before, after = self.dtypes
        return of_each(input_dict, lambda tensor: tensor.view(after) if tensor.dtype == before else tensor)

    @property
    def reverse_op(self) -> ConversionOps:
        return AsFloats()


class AsFloats(AsBytes):
    dtypes = (torch.uint8, torch.float8_e4m3fn)

    @property
    def reverse_op(self) -> ConversionOps:
        return AsBytes()


class FromPowers(ConversionOps):
    """Scales in e8m0 as the same numbers in float32. By their bytes: not every device has PyTorch's float8."""

    def __init__(self, quantizer: "Fp8"):
        self.hf_quantizer = quantizer  # by which transformers knows that none may be cast

    def convert(self, input_dict, **kwargs):
        return of_each(input_dict, self.numbers)

    def numbers(self, scales: Tensor) -> Tensor:
        codes = scales.view(torch.uint8)
        return power_of_two(codes, 127).masked_fill(codes == 255, float("nan"))

    @property
    def reverse_op(self) -> ConversionOps:
        return ToPowers(self.hf_quantizer)


class ToPowers(FromPowers):
    def numbers(self, scales: Tensor) -> Tensor:
        exponents = scales.contiguous().view(torch.int32) >> 23 & 255
        return exponents.to(torch.uint8).view(torch.float8_e8m0fnu)

    @property
    def reverse_op(self) -> ConversionOps:
        return FromPowers(self.hf_quantizer)


class Fp8(PackedQuantizer, FineGrainedFP8HfQuantizer):
    """Blocks of 128 x 128 with a scale: `weight` and `weight_scale_inv` of linear layers, `gate_up_proj` and
    `gate_up_proj_scale_inv` of experts, which transformers merges out of the single experts' while it loads.

    Where its configuration says "ue8m0", the scales may be powers of two in a byte each (DeepSeek V4). They may be
    float32 as well, and not all of them powers of two (DeepSeek V3.1)."""

    stock = FineGrainedFP8HfQuantizer
    scales: frozenset[str] = frozenset()  # their dtypes, in safetensors' words

    def serves(self, device_map) -> bool:
        config = self.quantization_config
        blocks = list(config.weight_block_size or ()) == [FP8_BLOCK, FP8_BLOCK]
        known = blocks and (config.expert_dtype, config.activation_scheme) == ("fp8", "dynamic")
        return known and not config.modules_to_convert and super().serves(device_map)

    def validate_environment(self, *args, device_map=None, **kwargs) -> None:
        if self.serves(device_map):
            expect_bounded(self.quantization_config.modules_to_not_convert)
        super().validate_environment(*args, device_map=device_map, **kwargs)

    def chosen(self, model: nn.Module) -> dict[str, nn.Module]:
        """The linear layers and experts that its configuration does not skip."""
        config = self.quantization_config
        skipped = self.get_modules_to_not_convert(model, config.modules_to_not_convert, model._keep_in_fp32_modules)
        return {
            name: module
            for name, module in model.named_modules()
            if (is_experts(module) or isinstance(module, nn.Linear)) and should_convert_module(name, skipped)
        }

    def obstacle(self, model: nn.Module, tensors: dict[str, Stored]) -> str | None:
        self.scales = frozenset(check_fp8(tensors))
        self._normalize_modules_to_not_convert(model)
        for name, module in self.chosen(model).items():
            if is_experts(module):
                reason = why_not_packed(module)
                if reason is None and weight_shape(module, "down")[2] % FP8_BLOCK:
                    reason = f"its up rows do not begin with a block of {FP8_BLOCK}"
                if reason is not None:
                    return f"{name} cannot be packed: {reason}"
            elif type(module) is not nn.Linear:
                return f"{name} is a {type(module).__name__}"
        return super().obstacle(model, tensors)

    def pack(self, model: nn.Module, tensors: dict[str, Stored]) -> None:
        dtype = torch.bfloat16 if self.scales == {"BF16"} else torch.float32

        def parts(name: str, dense: Tensor) -> Parts:
            module, _, name = name.rpartition(".")
            data, scale = empty_parts(name, dense.shape, "fp8", 8, FP8_BLOCK, dtype).values()
            return as_stored(
                model, tensors, module, {name: data.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.to(dtype)}
            )

        left = absent(model, tensors)
        for name, module in self.chosen(model).items():
            stored = find(model, tensors, f"{name}.weight")
            if name in left:
                continue
            if is_experts(module) or stored is None or stored.dtype == "F8_E4M3":
                pack(model, name, "fp8", parts)

    def check_part(self, module, weight, part, sources):
        if part == module.packing[weight][1] and POWERS in self.scales:
            sources.expect([tuple(module._buffers[part].shape)], (POWERS,))
        else:
            super().check_part(module, weight, part, sources)

    def conversions(self, weight_conversions, model):
        """Experts' weights are merged as bytes, and their scales as their weights are."""
        updated = super(PackedQuantizer, self).update_weight_conversions([], model)  # other names for scales
        numbers = [FromPowers(self)] if POWERS in self.scales else []
        for conversion in weight_conversions:
            if isinstance(conversion, WeightConverter) and merges_experts(conversion):
                sources, targets = conversion._original_source_patterns, conversion._original_target_patterns
                scales = ([f"{name}_scale_inv" for name in names] for names in (sources, targets))
                updated.append(conversion.copy(*scales, operations=[*numbers, *conversion.operations]))
                conversion.operations = [AsBytes(), *conversion.operations, AsFloats()]
            updated.append(conversion)
        if numbers:
            updated.append(WeightConverter(".weight_scale_inv", ".weight_scale_inv", numbers))
        return updated


def expect_bounded(skipped: object) -> None:
    """An error where a file's list of modules to skip has patterns that may take long to match."""
    if skipped is not None and not (isinstance(skipped, list) and all(map(is_bounded, skipped))):
        raise ValueError(f"modules_to_not_convert: expected module names or plain patterns, got {skipped!r}")


def is_bounded(pattern: object) -> bool:
    """Whether a regular expression out of a file matches module names in no long time: nothing repeats a group, and few
    things are repeated at all."""
    if not isinstance(pattern, str) or len(pattern) > 1000 or re.search(r"\)[*+?{]", pattern):
        return False
    try:
        re.compile(pattern)
    except (re.error, RecursionError):
        return False
    return len(re.findall(r"[*+?{]", pattern)) <= 4


def merges_experts(conversion: WeightConverter) -> bool:
    """Whether it makes one weight of all experts out of their single ones."""
    sources, targets = conversion._original_source_patterns, conversion._original_target_patterns
    whole = len(targets) == 1 and targets[0].rpartition(".")[2] in PROJECTIONS.values()
    return whole and all(source.endswith(".weight") for source in sources)


# ------------------------------------------------------------------------------------------------ our own


class Quantize(ConversionOps):
    """A dense weight, just loaded, in the form of the module's packed one."""

    def convert(self, input_dict, model=None, **kwargs):
        name, tensor = next(iter(input_dict.items()))
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        if len(input_dict) > 1 or not tensor.is_floating_point():  # by QuantizeApart
            return input_dict
        return quantized(model, name, tensor)


class TransposeToFit(Transpose):
    """transformers' own, which may look at the dense weight's shape, where there is a packed one now."""

    def __init__(self, stock: Transpose):
        super().__init__(stock.dim0, stock.dim1, stock.check_dims)

    def convert(self, input_dict, model=None, full_layer_name=None, **kwargs):
        module, weight = packed_weight(model, full_layer_name)
        if weight is None or not self.check_dims:
            return super().convert(input_dict, model=model, full_layer_name=full_layer_name, **kwargs)
        ((name, tensor),) = input_dict.items()
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        fits = tensor.shape[-2:] == (module.parts(weight)[0].shape[-2], columns_of(module, weight))
        return {name: tensor if fits else tensor.transpose(self.dim0, self.dim1)}


class QuantizeApart(ConversionOps):
    """What merges the single experts' weights, for weights that are packed first: one expert is dense at a time."""

    def __init__(self, operations: list[ConversionOps]):
        self.operations = operations

    def convert(self, input_dict, model=None, full_layer_name=None, **kwargs):
        module, weight = packed_weight(model, full_layer_name)
        # Blocks of several rows may not end with an expert's gate.
        if weight is None or FORMATS[module.format_of(weight)].rows_per_scale > 1:
            return merged(self.operations, input_dict, model=model, full_layer_name=full_layer_name, **kwargs)
        apart = {part: {} for part in module.packing[weight]}
        for source in list(input_dict):
            for dense in drained(input_dict.pop(source)):
                for part, tensor in quantize_like(module, weight, dense).items():
                    apart[part].setdefault(source, []).append(tensor)
        parts = {part: next(iter(merged(self.operations, apart.pop(part), **kwargs).values())) for part in list(apart)}
        return whole_names(model, full_layer_name, parts)


def merged(operations: list[ConversionOps], tensors: dict, **kwargs) -> dict:
    for operation in operations:
        tensors = operation.convert(tensors, **kwargs)
    return tensors


def drained(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Each of them, none of which the list keeps."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()


def packed_weight(model: nn.Module, name: str) -> tuple[nn.Module, str | None]:
    """The module of a parameter, and which of its packed weights has its data there, or None."""
    home, _, part = name.rpartition(".")
    module = model.get_submodule(home)
    packing = getattr(module, "packing", {})
    return module, next((weight for weight, names in packing.items() if names[0] == part), None)


def quantized(model: nn.Module, name: str, dense: Tensor) -> dict[str, Tensor]:
    module, weight = packed_weight(model, name)
    dense = dense.mT if getattr(module, "is_transposed", False) else dense
    return whole_names(model, name, quantize_like(module, weight, dense))


def whole_names(model: nn.Module, name: str, parts: Parts) -> dict[str, Tensor]:
    """These parts of a weight, whose data is called `name`, by their names in the model; or an error where they are not
    as large as the model's."""
    home = name.rpartition(".")[0]
    for part, tensor in parts.items():
        expected = model.get_submodule(home)._buffers[part].shape
        if tensor.shape != expected:
            raise ValueError(f"{home}.{part}: expected shape {list(expected)}, got {list(tensor.shape)}")
    return {f"{home}.{part}": tensor for part, tensor in parts.items()}


class MoeMetal(PackedQuantizer):
    """`MoeMetalConfig`: a dense checkpoint, packed while it is loaded, or one that was saved packed."""

    quantization_config: MoeMetalConfig

    def validate_environment(self, *args, device_map=None, **kwargs) -> None:
        if device_map is not None and not runs_here(device_map):
            raise ValueError(f"torch_moe_metal: its packed weights run on {' and '.join(DEVICES)}, got {device_map}")

    def pack(self, model: nn.Module, tensors: dict[str, Stored]) -> None:
        config = self.quantization_config

        def parts(name: str, dense: Tensor, form: Form) -> Parts:
            module, _, name = name.rpartition(".")
            found = empty_parts(name, dense.shape, form.format, form.bits, form.group_size, dense.dtype)
            if FORMATS[form.format].offset == "factor" and find(model, tensors, f"{module}.{name}_offset"):
                factor = torch.empty(*dense.shape[:-2], 1, dtype=torch.float32, device="meta")
                found = {**found, f"{name}_offset": factor}
            return as_stored(model, tensors, module, found) if self.pre_quantized else found

        if not self.pre_quantized:
            config.expect_names(model)
        pack_all(model, config.plan(model, () if self.pre_quantized else absent(model, tensors)), parts)

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        return not self.pre_quantized and packed_weight(model, param_name)[1] is not None

    def get_quantize_ops(self):
        return Quantize()

    def check_part(self, module, weight, part, sources):
        if self.pre_quantized:
            super().check_part(module, weight, part, sources)
            if part == module.packing[weight][-1] and FORMATS[module.format_of(weight)].is_affine:
                of_scale = module.parts(weight)[1].dtype
                offset = next(iter(sources))
                offset.expect(SAFETENSORS[offset.dtype] == of_scale, f"the scale's {of_scale}")
        else:
            *experts, N, C = dense_shape(module, weight)
            sources.expect([(*experts, N, C), (*experts, C, N)] if experts else [(N, C)], FLOATS)

    def conversions(self, weight_conversions, model):
        if self.pre_quantized:  # it was saved under the model's own names
            return [conversion for conversion in weight_conversions if not isinstance(conversion, WeightConverter)]
        for conversion in weight_conversions:
            if not isinstance(conversion, WeightConverter):
                continue
            given = conversion.operations
            operations = [TransposeToFit(each) if isinstance(each, Transpose) else each for each in given]
            plain = all(isinstance(operation, MergeModulelist | Concatenate) for operation in operations)
            if merges_experts(conversion) and plain:
                operations = [QuantizeApart(operations)]
            conversion.operations = operations
        return weight_conversions

    def _process_model_after_weight_loading(self, model, **kwargs):
        super()._process_model_after_weight_loading(model, **kwargs)
        model._weight_conversions = []  # what is packed is saved under the model's own names


def expect_ours(model: nn.Module) -> None:
    """An error where another quantizer has been at the model, which would not know it any more."""
    for part in model.modules():
        quantizer = vars(part).get("hf_quantizer")
        if not isinstance(quantizer, PackedQuantizer | None):
            raise ValueError(
                "torch_moe_metal.quantize_: expected a dense model, or one with packed weights of torch_moe_metal, got "
                f"one of transformers' {type(quantizer).__name__}"
            )


def adopt(model: nn.Module, config: MoeMetalConfig) -> None:
    """Have a model that is packed in memory be as one that `MoeMetalConfig` loaded."""
    parts = {name: part for name, part in model.named_modules() if hasattr(type(part), "set_experts_implementation")}
    for part in parts.values():
        part.set_experts_implementation(NAME)
        vars(part).pop(BEFORE, None)
    for _, module in packed_modules(model):
        use_own_names(module)
    for name, part in parts.items():
        if any(name != other and (not other or name.startswith(f"{other}.")) for other in parts):
            continue  # a part of another one, which is what is saved
        part.is_quantized, part.quantization_method = True, config.quant_method
        part.hf_quantizer = MoeMetal(config, pre_quantized=True)
        part.config.quantization_config = config
        vars(part.config).pop("quantization", None)  # mlx-lm's key
        part._weight_conversions = []


def register() -> None:
    """Have these in the places of transformers' own."""
    auto.AUTO_QUANTIZER_MAPPING |= {"mxfp4": Mxfp4, "fp8": Fp8, NAME: MoeMetal}
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[NAME] = MoeMetalConfig
