"""Loads folders that `mlx_lm.convert -q` wrote, without dequantising them.

mlx-lm stores each weight's codes as `weight` (uint32), with `scales` and, in its affine mode, `biases`. Linear layers
and embeddings keep these tensors and names. Experts are stored as `gate_proj`, `up_proj` and `down_proj`, each for all
experts; gate and up are joined while loading, layer by layer, because the op reads them as one tensor. Routers and
weights that do not belong to linear layers in transformers are dequantised. Saving restores mlx-lm's tensors.
"""

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers import auto

from ..fusing.experts import DEVICES, is_experts, why_not_packed
from ..fusing.packed_modules import (
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
from .checkpoint import Stored
from .config import ALWAYS_DENSE
from .mlx_config import METHOD, MlxConfig
from .mlx_conversions import (
    EXPERTS,
    Dense,
    FromWords,
    Join,
    LatentAttention,
    converters,
    inside,
    kind_of,
    parts_of,
    renamings,
)
from .mlx_folder import Quantised, quantised, replace_stale_index_files
from .patterns import within
from .quantizer import PackedQuantizer, device_type, require_packed, runs_here

#: Set by the user, it decides whether transformers reads tensors ahead.
SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"


class Mlx(PackedQuantizer):
    """The quantizer of mlx-lm's folders."""

    kind = "mlx"
    quantization_config: MlxConfig
    reads_sequentially = False

    def validate_environment(self, *args, device_map=None, **kwargs) -> None:
        if device_map is not None and not runs_here(device_map):
            raise ValueError(
                f"torch_moe_metal: a checkpoint of mlx-lm runs on {' and '.join(DEVICES)} here, got {device_map}"
            )
        require_packed(self.kind)

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, device_map=None, **kwargs):
        replace_stale_index_files(checkpoint_files)
        super()._process_model_before_weight_loading(model, checkpoint_files=checkpoint_files, **kwargs)
        places = device_map.values() if isinstance(device_map, dict) else filter(None, [device_map])
        self.reads_sequentially = SEQUENTIAL not in os.environ and "mps" in map(device_type, places)

    def update_weight_conversions(self, weight_conversions, model):
        """transformers reads each tensor when it needs it, if a quantizer quantises while loading. Otherwise its
        threads may read all gates and ups into a GPU's memory before the first ones are joined. So this quantizer
        claims to quantise until transformers calls `param_needs_quantization`, for the first tensor. On the CPU
        reading ahead costs nothing: the tensors are pages of the file."""
        conversions = super().update_weight_conversions(weight_conversions, model)
        if self.reads_sequentially:
            self.reads_sequentially, self.pre_quantized = False, False
        return conversions

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        self.pre_quantized = True
        return super().param_needs_quantization(model, param_name, **kwargs)

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
        """Record a weight that is dequantised while loading. Raises if it cannot be."""
        known, module = inside(model, name)
        config = self.quantization_config
        if stem in config.layers:
            config.layers[stem] = False  # it is saved dense
        home = inside(model, name.rpartition(".")[0])[1]
        latent = known.endswith(("self_attn.embed_q", "self_attn.unembed_out"))
        if latent and hasattr(home, "kv_lora_rank"):  # the model may ignore some layers
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
        """Raises if the files lack a tensor of the language model."""
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
        """`Quantised` has checked the parts of packed weights; this checks the tensors that are joined."""
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
        self.pre_quantized = True
        super()._process_model_after_weight_loading(model, **kwargs)
        model.config.quantization = self.quantization_config.to_dict()  # mlx-lm's entry, for saving

    def _dequantize(self, model, dtype=None):
        """The model becomes an ordinary one of transformers, and is saved as one."""
        del model.config.quantization
        model._weight_conversions = None
        return super()._dequantize(model, dtype)


def pack_joined(model: nn.Module, name: str, weights: Mapping[str, Quantised]) -> None:
    """Replace dense experts by packed ones, whose gate and up are joined while loading."""
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
