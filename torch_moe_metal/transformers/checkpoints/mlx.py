"""Folders that `mlx_lm.convert -q` wrote, in `from_pretrained`: run packed, as they are.

mlx-lm keeps each weight's codes as `weight` (uint32), with `scales` and, in its affine mode, `biases` beside it. Linear
layers and embeddings keep these very tensors, under these names. Experts come as `gate_proj`, `up_proj` and `down_proj`
of all experts; gate and up are joined while they are loaded, layer by layer, since the op reads them as one. Routers,
and what is no linear layer in transformers, are dequantised. Saved, weights are as mlx-lm has them again.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers import auto
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...formats import BITS, GROUPS
from ...layers import numbers
from ..fusing.experts import DEVICES, is_experts, why_not_packed
from ..fusing.packed import (
    PROJECTIONS,
    Parts,
    embedding_multiplier,
    named_parts,
    pack,
    pack_experts,
    replace_tied,
    tied_head,
    weight_shape,
)
from .checkpoint import SAFETENSORS, SCALES, Stored, stored_tensors
from .config import ALWAYS_DENSE, FIXED, within
from .quantizer import AsBytes, PackedQuantizer, device_type, runs_here

logger = logging.get_logger(__name__)
METHOD = "moe_metal_mlx"
INDEX = "model.safetensors.index.json"
#: Set, transformers reads a tensor when it is needed. Its threads may read all gates and ups into a GPU's memory before
#: the first are joined; on the CPU what is read ahead is the file's own pages.
IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"
#: mlx-lm's projections of experts, by the op's word for the weight that they are in.
EXPERTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
#: MLX's modes, which have the names of our formats, with the bits and the group that hold where nothing is said. Only
#: affine weights may have others.
MODES = {"affine": (4, 64)} | {mode: FIXED[mode] for mode in ("mxfp4", "nvfp4", "mxfp8")}
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


class MlxConfig(QuantizationConfigMixin):
    """What mlx-lm writes into config.json: bits, group and mode of all layers, and by a layer's path its own, or false
    where it is dense."""

    def __init__(self, bits: int | None = None, group_size: int | None = None, mode: str = "affine", **layers):
        self.quant_method = METHOD
        layers.pop("quant_method", None)
        for name, value, kind in (("bits", bits, int), ("group_size", group_size, int), ("mode", mode, str)):
            if type(value) is not kind and (value is not None or kind is str):
                raise ValueError(f"{name}: expected a value of type {kind.__name__}, got {value!r}")
        self.bits, self.group_size, self.mode, self.layers = bits, group_size, mode, layers

    @property
    def default(self) -> dict:
        """What holds for the layers that have no entry of their own."""
        return {"bits": self.bits, "group_size": self.group_size, "mode": self.mode}

    def to_dict(self) -> dict:
        """As mlx-lm has it, without a `quant_method`."""
        return self.default | self.layers

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        return cls(**config_dict)


def is_of_mlx(found: dict) -> bool:
    """Whether a checkpoint's quantization_config is mlx-lm's, which names no method."""
    return "quant_method" not in found and {"bits", "group_size"} <= found.keys()


# ------------------------------------------------------------------------------------------------ what is stored


@dataclass(frozen=True)
class Quantised:
    """One weight of a folder: its parts, and what they are."""

    weight: Stored
    scales: Stored
    biases: Stored | None
    entry: dict  # what config.json has for its path, or for all others

    @classmethod
    def of(cls, stem: str, tensors: Mapping[str, Stored], config: MlxConfig) -> "Quantised":
        weight, entry = tensors[f"{stem}.weight"], config.layers.get(stem)
        scales = weight.beside(tensors, f"{stem}.scales")
        weight.expect(weight.dtype == "U32", "U32, which its scales go with")
        weight.expect(entry is not False, "no packed weight, since config.json says false for it")
        entry = {"mode": "affine"} | entry if isinstance(entry, dict) else config.default
        mode = entry["mode"]
        known = isinstance(mode, str) and mode in MODES
        scales.expect(known, f"{', '.join(MODES)}, the modes that run here, and not {mode!r}, which config.json says")
        dtypes = ("U8",) if mode != "affine" else SCALES
        scales.expect(scales.dtype in dtypes, f"{', '.join(dtypes)}, the scales of mode {mode}, which config.json says")
        biases = scales.beside(tensors, f"{stem}.biases") if mode == "affine" else None
        if biases:
            biases.expect((biases.dtype, biases.shape) == (scales.dtype, scales.shape), f"what {scales.name} is")
        alone = f"{stem}.global_scale" not in tensors
        scales.expect(alone, f"no {stem}.global_scale beside it: factors of whole matrices do not run here")
        return cls(weight, scales, biases, entry)

    @property
    def format(self) -> str:
        return self.entry["mode"]

    @property
    def said(self) -> tuple[int, int]:
        """Bits and group by config.json. Where it has null, or nothing, MLX has its defaults."""
        usual = MODES[self.format]
        return tuple(
            default if self.entry.get(name) is None else self.entry[name]
            for name, default in zip(("bits", "group_size"), usual, strict=True)
        )

    def bits_and_group(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Of a weight of this shape; an error where they are none that run, or not those of config.json."""
        *rows, C = shape
        of_config = ", by the model's configuration"
        for part in (self.weight, self.scales):
            part.expect(len(part.shape) == len(shape) and list(part.shape[:-1]) == rows, f"rows {rows}{of_config}")
        words, groups = self.weight.shape[-1], self.scales.shape[-1]
        self.weight.expect(words * 32 % C == 0, f"{C} columns of as many bits each{of_config}")
        whole = groups > 0 and C % groups == 0
        self.scales.expect(whole, f"{rows} and groups of {C} columns")
        bits, group = words * 32 // C, C // groups
        if self.format in FIXED:
            of_mode = "{} bits in groups of {}, as mode {} has".format(*FIXED[self.format], self.format)
            self.scales.expect((bits, group) == FIXED[self.format], of_mode)
        self.weight.expect(bits in BITS, f"{C} columns of 2, 3, 4, 5, 6 or 8 bits")
        self.scales.expect(group in GROUPS, f"a scale for each 16, 32, 64 or 128 of {C} columns")
        wrong = self.weight if bits != self.said[0] else self.scales
        of_config = "{} bits in groups of {}, as config.json says".format(*self.said)
        wrong.expect((bits, group) == self.said, of_config)
        return bits, group

    def parts(self, shape: tuple[int, ...]) -> list[Tensor]:
        """Data, scale and offset on the meta device, of a weight of this shape."""
        bits, group = self.bits_and_group(shape)
        *rows, C = shape
        dtype = SAFETENSORS[self.scales.dtype]
        sizes = [(C * bits // 8, torch.uint8), *[(C // group, dtype)] * (2 if self.biases else 1)]
        return [torch.empty(*rows, columns, dtype=kind, device="meta") for columns, kind in sizes]


def quantised(tensors: Mapping[str, Stored], config: MlxConfig) -> dict[str, Quantised]:
    """All weights of a folder that are packed, by their paths in mlx-lm's model."""
    found = {}
    for name, stored in tensors.items():
        stem, _, part = name.rpartition(".")
        if part in ("scales", "biases"):
            stored.beside(tensors, f"{stem}.weight")
        if (part == "weight" and stored.dtype == "U32") or part in ("scales", "biases"):
            found[stem] = found.get(stem) or Quantised.of(stem, tensors, config)
    return found


def true_files(files: list[str] | None) -> None:
    """Have all weight files of the folder in this list, as mlx-lm would, where its index tells another story."""
    folder = Path(files[0]).parent if files else None
    if folder is None or not (folder / INDEX).exists():
        return
    there = sorted(folder.glob("model*.safetensors"))
    listed = json.loads((folder / INDEX).read_text()).get("weight_map", {})
    truth = {tensor.name: tensor.file.name for tensor in stored_tensors(there).values()}
    if listed != truth and there:
        logger.warning(
            f"torch_moe_metal: {folder / INDEX} is stale: it does not list what the files beside it hold. All of "
            f"{', '.join(file.name for file in there)} are loaded instead"
        )
        files[:] = map(str, there)


# ------------------------------------------------------------------------------------------------ while loading


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

    def __init__(self, quantizer: "Mlx"):
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

    def __init__(self, quantizer: "Mlx"):
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


# ------------------------------------------------------------------------------------------------ names


def parts_of(stem: str) -> list[str]:
    """Patterns for a weight's parts in mlx-lm's words."""
    return [rf"{stem}\.{part}" for part in ("weight", "scales", "biases")]


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


def converters(quantizer: "Mlx", model: nn.Module) -> list[WeightConverter]:
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


# ------------------------------------------------------------------------------------------------ the quantizer


class Mlx(PackedQuantizer):
    """A folder of mlx-lm."""

    quantization_config: MlxConfig
    reads_in_turn = False  # whether IN_TURN is set, and not by the user

    def validate_environment(self, *args, device_map=None, **kwargs) -> None:
        if device_map is not None and not runs_here(device_map):
            raise ValueError(
                f"torch_moe_metal: a checkpoint of mlx-lm runs on {' and '.join(DEVICES)} here, got {device_map}"
            )

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, device_map=None, **kwargs):
        true_files(checkpoint_files)
        super()._process_model_before_weight_loading(model, checkpoint_files=checkpoint_files, **kwargs)
        places = device_map.values() if isinstance(device_map, dict) else filter(None, [device_map])
        if IN_TURN not in os.environ and "mps" in map(device_type, places):
            os.environ[IN_TURN], self.reads_in_turn = "1", True

    def get_new_dtype(self, converter, param, dtype):
        """The first thing that transformers asks when it has looked at that variable."""
        if self.reads_in_turn:
            self.reads_in_turn = False
            os.environ.pop(IN_TURN, None)
        return super().get_new_dtype(converter, param, dtype)

    def pack(self, model: nn.Module, tensors: dict[str, Stored]) -> None:
        names = [*get_model_conversion_mapping(model), *renamings(model)]
        names = [each for each in names if isinstance(each, WeightRenaming)]
        found, experts, self.kinds = {}, {}, {}
        for stem, weight in quantised(tensors, self.quantization_config).items():
            name = rename_source_key(f"{stem}.weight", names, [])[0].removesuffix(".weight")
            home, _, projection = name.rpartition(".")
            if is_experts(inside(model, home)[1]):
                experts.setdefault(inside(model, home)[0], {})[projection] = weight
            elif self.stays_packed(model, name):
                found[inside(model, name)[0]] = weight
                self.kinds[kind_of(name)] = FromWords()
            else:
                self.will_be_dense(model, name, stem, weight)
        for name, weights in experts.items():
            pack_joined(model, name, weights)
        self.pack_layers(model, found)
        self.expect_all(model, tensors)

    def stays_packed(self, model: nn.Module, name: str) -> bool:
        module = inside(model, name)[1]
        if any(within(pattern, name) for pattern in ALWAYS_DENSE):
            return False
        return type(module) is nn.Linear or (
            isinstance(module, nn.Embedding) and embedding_multiplier(module) is not None
        )

    def will_be_dense(self, model: nn.Module, name: str, stem: str, weight: Quantised) -> None:
        """Note a weight that is dequantised while it is loaded, after a look at whether it can be."""
        known, module = inside(model, name)
        config = self.quantization_config
        if stem in config.layers:
            config.layers[stem] = False  # as it will be saved
        home = inside(model, name.rpartition(".")[0])[1]
        latent = known.endswith(("self_attn.embed_q", "self_attn.unembed_out"))
        if latent and hasattr(home, "kv_lora_rank"):  # the model may have no use for some layers
            nope, rank, rows = home.qk_nope_head_dim, home.kv_lora_rank, home.v_head_dim
            sides = (rank, nope) if known.endswith("embed_q") else (rows, rank)
            weight.bits_and_group((home.num_heads, *sides))
        elif isinstance(getattr(module, "weight", None), nn.Parameter):
            weight.bits_and_group(tuple(module.weight.shape))
            self.kinds[kind_of(name)] = Dense(self)
        elif hasattr(home, PROJECTIONS["gate_up"]):
            weight.weight.expect(False, "experts that are on transformers' interface for them, to run packed")

    def pack_layers(self, model: nn.Module, found: dict[str, Quantised]) -> None:
        def parts(name: str, dense: Tensor) -> Parts:
            weight = found[name.removesuffix(".weight")]
            return dict(zip(("weight", "scales", "biases"), weight.parts(tuple(dense.shape)), strict=False))

        tied = tied_head(model)
        for name, weight in found.items():
            if tied is None or name != tied[1]:
                pack(model, name, weight.format, parts)
        if tied and tied[0] in found:
            replace_tied(model, *tied)

    def expect_all(self, model: nn.Module, tensors: dict[str, Stored]) -> None:
        """An error where the files do not have all of the language model."""
        known = model.state_dict()
        conversions = self.conversions(get_model_conversion_mapping(model), model)
        names = [each for each in conversions if isinstance(each, WeightRenaming)]
        others = [each for each in conversions if isinstance(each, WeightConverter)]
        reached = {rename_source_key(name, names, others, model.base_model_prefix, known)[0] for name in tensors}
        parts = [id(module) for module in (model.get_decoder(), model.get_output_embeddings())]
        homes = tuple(f"{name}." if name else "" for name, module in model.named_modules() if id(module) in parts)
        reached |= model.all_tied_weights_keys.keys()
        if missing := [name for name in known if name.startswith(homes) and name not in reached]:
            raise ValueError(f"torch_moe_metal: {model.config.name_or_path}: missing: {', '.join(missing)}")

    def conversions(self, weight_conversions, model):
        found = converters(self, model)
        for kind, operation in self.kinds.items():
            names = parts_of(kind) if isinstance(operation, Dense) else parts_of(kind)[:1]
            found.append(WeightConverter(names, [rf"{kind}\.weight"], [operation]))
        return [*found, *weight_conversions, *renamings(model)]

    def check(self, model, sources):
        """The parts of packed weights have been checked to find what becomes of them; here, what is joined."""
        super().check(model, sources)
        known = model.state_dict()
        for key, given in sources.items():
            operations = given.converter.operations if given.converter else []
            if isinstance(operations[0] if operations else None, LatentAttention):
                given.expect_patterns([*given.patterns[:1], *given.patterns[3:4]])
            elif operations and isinstance(operations[0], Join):
                given.expect_patterns(given.patterns)
                E, rows, *_ = known[key].shape
                for stored in given:
                    stored.expect(stored.shape[:2] == (E, rows // 2), f"shape {[E, rows // 2]}, by the model's config")

    def check_part(self, module, weight, part, sources):
        """See `check`."""

    def _process_model_after_weight_loading(self, model, **kwargs):
        super()._process_model_after_weight_loading(model, **kwargs)
        model.config.quantization = self.quantization_config.to_dict()  # mlx-lm's own key, for what is saved

    def _dequantize(self, model, dtype=None):
        """From now on it is a model of transformers like any other, and is saved as one."""
        del model.config.quantization
        model._weight_conversions = None
        return super()._dequantize(model, dtype)


def pack_joined(model: nn.Module, name: str, weights: Mapping[str, Quantised]) -> None:
    """Have packed experts in place of dense ones, whose gate and up will be joined."""
    experts, first = model.get_submodule(name), next(iter(weights.values())).weight
    reason = why_not_packed(experts)
    first.expect(reason is None, f"experts that can run packed, but {reason}")
    for projection in sum(EXPERTS.values(), ()):
        first.expect(projection in weights, f"{projection} packed as well")
    formats = {weight.format for weight in weights.values()}
    first.expect(len(formats) == 1, "one format for all weights of the experts")
    found = {}
    for weight, projections in EXPERTS.items():
        E, N, C = weight_shape(experts, weight)
        parts = [weights[projection].parts((E, N // len(projections), C)) for projection in projections]
        forms = [[(part.shape, part.dtype) for part in each] for each in parts]
        weights[projections[-1]].weight.expect(forms[0] == forms[-1], f"the form of {projections[0]}'s")
        found[weight] = named_parts(f"{weight}_proj", [torch.cat(each, 1) for each in zip(*parts, strict=True)])
    pack_experts(experts, formats.pop(), found)


def register() -> None:
    auto.AUTO_QUANTIZER_MAPPING[METHOD] = Mlx
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = MlxConfig
