"""The base class of our quantizers: `from_pretrained` loads quantised checkpoints without dequantising them.

On cuda and xpu, and with `dequantize=True`, transformers' own quantizers run instead.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

from ... import reference
from ...all_or_nothing import all_or_nothing
from ...file_pages import is_mapped, on_host
from ...first_use import weights_arrived
from ...formats import FORMATS
from ...grad import warn_once
from ...packed_layers import Embedding, Permuted
from ...transformers_support import packed_checkpoints
from ..fusing.experts import DEVICES, NAME
from ..fusing.packed_modules import (
    PROJECTIONS,
    PackedExperts,
    Parts,
    end_initialisation,
    let_transformers_initialise,
    packed_modules,
    packed_names,
    unpack,
)
from .checkpoint import FP8_SCALES, SAFETENSORS, SCALES, Stored, stored_tensors
from .config import MoeMetalConfig, described
from .loader_check import why_not_packed
from .sources import Sources, sources_of

logger = logging.get_logger(__name__)


def runs_here(device_map) -> bool:
    """Whether all devices of this device map have our ops."""
    if device_map is None:
        return not (torch.cuda.is_available() or torch.xpu.is_available())  # the user may move the model there
    places = device_map.values() if isinstance(device_map, dict) else [device_map]
    return all(device_type(place) in DEVICES for place in places)


def device_type(place) -> str:
    """The type of a device map's entry: a device, its name or number, or a strategy such as "auto"."""
    if isinstance(place, str) and place in ("auto", "balanced", "balanced_low_0", "sequential"):
        place = 0
    if isinstance(place, int):
        accelerator = torch.accelerator.current_accelerator()
        return accelerator.type if accelerator is not None else "cpu"
    return "cpu" if place == "disk" else torch.device(place).type


#: The dtypes in which scales of each kind are stored.
STORED_SCALES = {"any_float": SCALES, "float32_or_bfloat16": FP8_SCALES, "e8m0": ("U8",), "e4m3": ("F8_E4M3", "U8")}


def stored_dtypes(format: str, part: int) -> tuple[str, ...]:
    """safetensors' names of the dtypes that the data (0), scale (1) or offset (2) of a format may have."""
    row = FORMATS[format]
    if part == 0:
        return ("F8_E4M3", "U8") if row.columns == row.bytes == 1 else ("U8",)
    return ("F32",) if part == 2 and row.offset == "factor" else STORED_SCALES[row.scale]


def packs(kind: str) -> bool:
    """Whether checkpoints of this kind are loaded packed, if they can be."""
    if not packed_checkpoints():
        return False
    reason = why_not_packed(kind)
    if reason is not None:
        warn_once(reason)
    return reason is None


def require_packed(kind: str) -> None:
    """Raises if a kind of checkpoint cannot be loaded that only we can load."""
    reason = why_not_packed(kind)
    if reason is not None:
        raise ValueError(f"torch_moe_metal: {reason}")


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """Adds the checkpoint to our errors that do not name one of its files."""
    try:
        yield
    except ValueError as error:
        said = str(error).removeprefix("torch_moe_metal: ")
        if place in said or said == str(error):
            raise
        raise ValueError(f"torch_moe_metal: {place}: {said}") from error


class PackedQuantizer(HfQuantizer):
    """A subclass gives modules packed weights on the meta device, under the checkpoint's names for their parts.
    transformers then loads these as it loads other tensors."""

    kind: str  # the key in tiny.KINDS
    stock: type | None = None  # transformers' own quantizer, the fallback
    stored: dict[str, Stored] | None = None  # until they have been checked
    is_trainable = True  # gradients pass through packed weights
    is_compileable = True

    def pack(self, model: nn.Module, tensors: dict[str, Stored]) -> None:
        """Replace dense weights by packed ones on the meta device, with the shapes and dtypes of the files."""
        raise NotImplementedError

    def obstacle(self, model: nn.Module, tensors: dict[str, Stored]) -> str | None:
        """Why this model cannot be packed and transformers has to dequantise it, or None."""
        distributed = getattr(model.config, "distributed_config", None) is not None
        return "packed weights are not distributed over processes" if distributed else None

    def serves(self, device_map) -> bool:
        """Whether this quantizer loads the checkpoint packed, instead of falling back to transformers' own."""
        dequantize = getattr(self.quantization_config, "dequantize", False)
        return self.pre_quantized and not dequantize and runs_here(device_map) and packs(self.kind)

    def validate_environment(self, *args, device_map=None, **kwargs) -> None:
        if self.stock is not None and not self.serves(device_map):
            self.__class__ = self.stock  # transformers has made this object already, and will call its later hooks
            self.validate_environment(*args, device_map=device_map, **kwargs)

    def update_attn_implementation(self, config):
        """The first hook that gets the configuration, so it also selects our experts."""
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
        self.__class__ = self.stock  # as above
        self.quantization_config.dequantize = True
        return self._process_model_before_weight_loading(model, checkpoint_files=checkpoint_files, **kwargs)

    def update_weight_conversions(self, weight_conversions, model):
        """The last hook before weights are loaded, so it also checks the files."""
        conversions = self.conversions(weight_conversions, model)
        stored, self.stored = self.stored, None  # conversions hold this quantizer, and transformers copies them
        if stored:
            self.check(model, sources_of(model, stored, conversions))
        return conversions

    def conversions(self, weight_conversions: list, model: nn.Module) -> list:
        return weight_conversions

    @property
    def stores_parts(self) -> bool:
        """Whether all parts of packed weights come from the checkpoint, instead of being made while loading."""
        return self.pre_quantized

    def check(self, model: nn.Module, sources: dict[str, Sources]) -> None:
        """Raises if the files lack parts of packed weights, or have them with a wrong shape or dtype."""
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
        """Check the stored tensors of one part of a packed weight."""
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
        weights_arrived(model)

    def get_state_dict_and_metadata(self, model):
        """The first hook of `save_pretrained`: it makes a `MoeMetalConfig` describe the model as it is now."""
        if isinstance(self.quantization_config, MoeMetalConfig):
            self.quantization_config = model.config.quantization_config = described(model, self.quantization_config)
        return joined_state(model), {}

    def is_serializable(self) -> bool:
        return True

    def dequantize(self, model, dtype=None):
        with all_or_nothing(model):
            return super().dequantize(model, dtype or dtype_of(model))

    def _dequantize(self, model, dtype=None):
        unpack(model, dtype)
        return model


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of a model's activations, which its configuration does not have after `model.to(dtype)`."""
    embeddings = (module for module in model.modules() if isinstance(module, Embedding))
    packed = next(embeddings, None)
    return model.dtype if packed is None else packed.of_dtype.dtype


def joined_state(model: nn.Module) -> dict[str, Tensor] | None:
    """The state of a model whose experts keep gate and up as two tensors, as in a GGUF file, with the two joined, or
    whose weights are in Metal buffers over such a file. None for other models: their state is saved unchanged."""
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
    state = model.state_dict()
    if not apart and not any(map(is_mapped, state.values())):
        return None
    hosted = {name: on_host(tensor) for name, tensor in state.items()}
    return {
        name: reference.joined(tensor, None, not apart[name].is_concatenated) if name in apart else tensor
        for name, tensor in hosted.items()
    }


def find_tensor(model: nn.Module, tensors: dict[str, Stored], name: str) -> Stored | None:
    """The stored tensor of this name, with or without the base model's prefix."""
    prefix = f"{model.base_model_prefix}."
    return tensors.get(name) or tensors.get(name.removeprefix(prefix)) or tensors.get(prefix + name)


def absent(model: nn.Module, tensors: dict[str, Stored]) -> set[str]:
    """The linear layers and embeddings that the files lack, so that transformers initialises them: for example, the
    head of a classifier that will be trained."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    unknown = {f"{name}.weight": name for name in layers if find_tensor(model, tensors, f"{name}.weight") is None}
    if not tensors or not unknown:
        return set()
    conversions, known = get_model_conversion_mapping(model), model.state_dict()
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    names = (renamings, converters, model.base_model_prefix, known)
    reached = {rename_source_key(name, *names)[0] for name in tensors} | model.all_tied_weights_keys.keys()
    return {name for weight, name in unknown.items() if weight not in reached}


def as_stored(model: nn.Module, tensors: dict[str, Stored], module: str, parts: Parts) -> Parts:
    """These parts, on the meta device, with the dtypes of the files. Raises if the files have other shapes."""
    found = {}
    for name, part in parts.items():
        stored = find_tensor(model, tensors, f"{module}.{name}")
        if stored is not None:
            stored.expect(stored.shape == tuple(part.shape), f"shape {list(part.shape)}, by the model's configuration")
            part = part.to(SAFETENSORS[stored.dtype]) if stored.dtype in SAFETENSORS else part
        found[name] = part
    return found
