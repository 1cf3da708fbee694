"""How much memory a model needs: its weights in each format, its cache, and its working memory. No weights are loaded:
sizes come from transformers' model of the configuration on the meta device, and from packed files."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..formats import LIBRARIES
from ..packing import WRITTEN
from .bench.model_sizes import MODELS, configuration
from .common.cli import CannotRun, reason_of
from .common.loading import Source

#: Models whose whole configuration is in this package.
PUBLISHED = tuple(name for name, model in MODELS.items() if model.layers)


def configuration_of(name: str, gguf: str | None):
    """The source of a model's files, if there are any, and its configuration. Models known to this package need neither
    files nor a network."""
    from transformers import AutoConfig

    import torch_moe_metal  # noqa: F401  makes transformers read GGUF files

    known = name.rpartition("/")[2].lower()
    if name.lower() in PUBLISHED and not Path(name).exists():
        return None, published(known)
    source = Source.of(name, gguf)
    try:
        return source, AutoConfig.from_pretrained(source.path, **source.where)
    except Exception as error:  # transformers raises a dozen kinds
        if known in PUBLISHED and not Path(name).exists() and gguf is None:
            return None, published(known)
        raise CannotRun(f"cannot read the configuration of {source.name}: {reason_of(error)}") from error


def published(name: str):
    """The configuration of a model whose sizes are in model_sizes.py."""
    from transformers import AutoConfig

    model = MODELS[name]
    default = AutoConfig.for_model(model.config).to_dict()
    own = configuration(model) | model.attention
    own |= {"vocab_size": model.vocabulary, "num_hidden_layers": model.layers}
    if "moe_intermediate_size" in default:  # then the other one is that of the dense layers
        del own["intermediate_size"]
    own = {key: value for key, value in own.items() if key in default}
    own |= {} if model.low_rank else model.attention
    if model.context:
        own["max_position_embeddings"] = model.context
    if model.quantization:
        own["quantization_config"] = {"quant_method": model.quantization}
    return AutoConfig.for_model(model.config, **own)


def empty_model(config, dtype: torch.dtype) -> nn.Module:
    """The model on the meta device, with shapes but without values."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    of_text = config.model_type not in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    cls = AutoModelForCausalLM if of_text else AutoModelForMultimodalLM
    with torch.device("meta"):
        return cls.from_config(config, dtype=dtype).eval().requires_grad_(False)


def bytes_of(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


# ------------------------------------------------------------------------------------------------ weights


def weights(config, dtype: torch.dtype, library: str) -> int:
    """Bytes of the weights, dense or packed while loading."""
    model = empty_model(config, dtype)
    if library != "dense":
        pack_empty(model, quantization(model, library), dtype)
    return bytes_of(model)


def quantization(model: nn.Module, library: str):
    """The `MoeMetalConfig` of a format. Formats that only GGUF files have replace another format in the plan."""
    from ..transformers import MoeMetalConfig

    row = LIBRARIES[library]
    if row.name in WRITTEN:
        return MoeMetalConfig(format=row.name, bits=row.bits if row.is_affine else 4)
    names = [name for name, forms in MoeMetalConfig(format="q8_0").forms(model).items() if forms]
    return MoeMetalConfig(layers={name: {"format": row.name} for name in names})


def pack_empty(model: nn.Module, config, dtype: torch.dtype) -> None:
    from ..transformers.checkpoints.config import pack_all
    from ..transformers.fusing.packed_modules import empty_parts

    def parts(name: str, dense: torch.Tensor, form) -> dict:
        size = tuple(dense.shape)
        return empty_parts(name.rpartition(".")[2], size, form.format, form.bits, form.group_size, dtype)

    pack_all(model, config.plan(model), parts)


def is_packed(config, source: Source | None) -> bool:
    entry = getattr(config, "quantization_config", None) or getattr(config, "quantization", None)
    return entry is not None or (source is not None and source.gguf_file is not None)


def packed_weights(source: Source | None, config, dtype: torch.dtype) -> tuple[str, int]:
    """The format of a packed checkpoint, and its bytes: from its files, or for gpt-oss from its configuration."""
    from transformers.utils import cached_file

    if source is not None and source.gguf_file is not None:
        return gguf_weights(cached_file(source.path, source.gguf_file, revision=source.revision), dtype)
    entry = getattr(config, "quantization_config", None) or config.quantization
    method = entry.get("quant_method") or entry.get("mode") or "affine"
    if source is not None and Path(source.path).is_dir():
        return method, stored_bytes(Path(source.path))
    if method != "mxfp4":
        raise CannotRun("the size of a packed checkpoint is that of its files: download it and pass its folder")
    return method, bytes_of(gpt_oss(config, dtype))


def gpt_oss(config, dtype: torch.dtype, bits: int | None = None) -> nn.Module:
    """gpt-oss with experts in MXFP4, optionally with `quantize_(model, bits=bits)` for the other weights."""
    from ..transformers import MoeMetalConfig

    model = empty_model(config, dtype)
    pack_empty(model, MoeMetalConfig(format="mxfp4", skip=["!experts"]), dtype)
    if bits is not None:
        pack_empty(model, MoeMetalConfig(bits=bits), dtype)
    return model


def gguf_weights(path: str, dtype: torch.dtype) -> tuple[str, int]:
    """The formats of a GGUF file and its bytes once loaded: blocks with a reader stay packed, everything else becomes
    dense."""
    from ..gguf import read

    tensors = read(path).tensors.values()
    packed = [tensor for tensor in tensors if tensor.is_packed and tensor.has_reader]
    dense = [tensor for tensor in tensors if not (tensor.is_packed and tensor.has_reader)]
    formats = ", ".join(sorted({tensor.format for tensor in tensors if tensor.is_packed})) or str(dtype)
    return formats, sum(tensor.bytes for tensor in packed) + sum(prod(t.shape) * dtype.itemsize for t in dense)


def stored_bytes(folder: Path) -> int:
    from ..transformers.checkpoints.checkpoint import header

    entries = [entry for file in sorted(folder.glob("*.safetensors")) for entry in header(file)[0].values()]
    if not entries:
        raise CannotRun(f"{folder}: expected safetensors files, which give the size of a packed checkpoint")
    return sum(end - begin for begin, end in (entry["data_offsets"] for entry in entries))


# ------------------------------------------------------------------------------------------------ cache


@dataclass(frozen=True)
class CacheLayer:
    """Memory of a layer of the cache: bytes per cached token, and once."""

    token: int = 0
    once: int = 0
    window: int | None = None

    def bytes(self, tokens: int) -> int:
        return self.once + self.token * (tokens if self.window is None else min(tokens, self.window - 1))

    def most(self, tokens: int) -> int:
        """Including the spare room for growth that a fused model has."""
        from ..transformers.fusing.cache import most_rows

        stored = tokens if self.window is None else min(tokens, self.window - 1)
        return self.once + self.token * (most_rows(stored) if self.token else 0)


def cache_layers(model: nn.Module, config) -> list[CacheLayer]:
    """The layers of this model's cache after its first token."""
    from transformers import DynamicCache

    cache = DynamicCache(config=config.get_text_config(decoder=True))
    forward(model, 1, cache)
    return [cache_layer(layer) for layer in cache.layers]


def forward(model: nn.Module, tokens: int, cache) -> None:
    from ..transformers.versions import with_cache

    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with torch.no_grad():
        model(ids, **with_cache(cache), use_cache=True, logits_to_keep=1)


def cache_layer(layer) -> CacheLayer:
    states = [getattr(layer, name, None) for name in ("keys", "values")]
    token = sum(state.nbytes for state in states if state is not None)
    recurrent = [getattr(layer, name, {}) for name in ("conv_states", "recurrent_states")]
    once = sum(state.nbytes for found in recurrent for state in found.values() if state is not None)
    return CacheLayer(token, once, layer.sliding_window if getattr(layer, "is_sliding", False) else None)


# ------------------------------------------------------------------------------------------------ working memory


class Living(TorchDispatchMode):
    """Counts the bytes of live tensors and their maximum. Tensors that existed before do not count."""

    def __init__(self, before: Iterator[torch.Tensor]):
        super().__init__()
        self.now = self.most = 0
        self.known = weakref.WeakSet(tensor.untyped_storage() for tensor in before)

    def __torch_dispatch__(self, func: Callable, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        torch.utils._pytree.tree_map_only(torch.Tensor, self.count, result)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self.known:
            return
        self.known.add(storage)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.forget, storage.nbytes())

    def forget(self, size: int) -> None:
        self.now -= size


def working_memory(model: nn.Module, config, tokens: int) -> int:
    """The maximum bytes of temporary tensors in a forward of so many tokens, without weights and cache. Buffers inside
    of an op do not count."""
    from transformers import DynamicCache

    cache = DynamicCache(config=config.get_text_config(decoder=True))
    with Living([*model.parameters(), *model.buffers()]) as living:
        forward(model, tokens, cache)
        kept = living.now
    return living.most - kept
