"""Print in which format a model fits into a Mac's memory, and with how long a context. No weights are loaded: sizes
come from transformers' model of the configuration on the meta device, and from packed files."""

import sys
import weakref
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .cli import CannotRun, positive, reason_of
from .formats import LIBRARIES
from .integration import require_supported
from .loading import MODEL, Source
from .macos import why_torch_is_too_old
from .models import MODELS, configuration
from .packing import WRITTEN

EXAMPLES = """
examples:
  fit Qwen/Qwen3-30B-A3B --memory 32          the formats that fit a Mac with 32 GB
  fit gpt-oss-20b --memory 16 32 64           with sizes from this package, without network access
  fit models/Qwen3-30B-A3B-Q4_K_M.gguf        a GGUF file, on this machine
"""
#: The share of memory that macOS lets the GPU use, unless iogpu.wired_limit_mb sets it. Apple documents no rule:
#: Metal's recommendedMaxWorkingSetSize was reported as 10.7 GB and 11.8 GB of 16, 17.8 of 24 and 107.5 of 128.
SHARES = (2 / 3, 3 / 4)
PROMPT = 2048
SHOWN = ("dense", "affine4", "affine6", "affine8", "mxfp4", "q4_k", "q6_k", "q8_0")
#: Models whose whole configuration is in this package.
PUBLISHED = tuple(name for name, model in MODELS.items() if model.layers)


def gigabytes(text: str) -> float:
    if not 0 < (number := float(text)) < float("inf"):
        raise ArgumentTypeError(f"must be more than 0, got {text}")
    return number


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"{MODEL}, or one of {', '.join(PUBLISHED)}")
    parser.add_argument("--gguf", metavar="FILE", help="a GGUF file in that folder or repository")
    said = "memory of Macs, as advertised (default: that of this machine)"
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--memory", type=gigabytes, nargs="+", metavar="GB", help=said)
    said = "memory of the GPU in MB, if you have set sysctl iogpu.wired_limit_mb"
    sizes.add_argument("--limit", type=positive, metavar="MB", help=said)
    said = f"tokens that are computed at once; they need working memory (default: {PROMPT})"
    parser.add_argument("--prompt", type=positive, default=PROMPT, metavar="N", help=said)
    said = f"default: {' '.join(SHOWN)}"
    parser.add_argument("--formats", nargs="+", choices=LIBRARIES, default=list(SHOWN), metavar="FORMAT", help=said)


def run(options: Namespace) -> int:
    try:
        require_supported()
    except ImportError as reason:
        print(f"fit: {reason}", file=sys.stderr)
        return 2
    from transformers.utils import logging

    logging.set_verbosity_error()  # the table explains formats that do not fit
    try:
        source, config = configuration_of(options.model, options.gguf)
        print("\n".join(lines(source, config, options)))
    except CannotRun as reason:
        print(f"fit: {reason}", file=sys.stderr)
        return 2
    return 0


# ------------------------------------------------------------------------------------------------ the model


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
    """The configuration of a model whose sizes are in models.py."""
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
    from .transformers import MoeMetalConfig

    row = LIBRARIES[library]
    if row.name in WRITTEN:
        return MoeMetalConfig(format=row.name, bits=row.bits if row.is_affine else 4)
    names = [name for name, forms in MoeMetalConfig(format="q8_0").forms(model).items() if forms]
    return MoeMetalConfig(layers={name: {"format": row.name} for name in names})


def pack_empty(model: nn.Module, config, dtype: torch.dtype) -> None:
    from .transformers.checkpoints.config import pack_all
    from .transformers.fusing.packed_modules import empty_parts

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
    from .transformers import MoeMetalConfig

    model = empty_model(config, dtype)
    pack_empty(model, MoeMetalConfig(format="mxfp4", skip=["!experts"]), dtype)
    if bits is not None:
        pack_empty(model, MoeMetalConfig(bits=bits), dtype)
    return model


def gguf_weights(path: str, dtype: torch.dtype) -> tuple[str, int]:
    """The formats of a GGUF file and its bytes once loaded: blocks with a reader stay packed, everything else becomes
    dense."""
    from .gguf import read

    tensors = read(path).tensors.values()
    packed = [tensor for tensor in tensors if tensor.is_packed and tensor.has_reader]
    dense = [tensor for tensor in tensors if not (tensor.is_packed and tensor.has_reader)]
    formats = ", ".join(sorted({tensor.format for tensor in tensors if tensor.is_packed})) or str(dtype)
    return formats, sum(tensor.bytes for tensor in packed) + sum(prod(t.shape) * dtype.itemsize for t in dense)


def stored_bytes(folder: Path) -> int:
    from .transformers.checkpoints.checkpoint import header

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
        from .transformers.fusing.cache import most_rows

        stored = tokens if self.window is None else min(tokens, self.window - 1)
        return self.once + self.token * (most_rows(stored) if self.token else 0)


def cache_layers(model: nn.Module, config) -> list[CacheLayer]:
    """The layers of this model's cache after its first token."""
    from transformers import DynamicCache

    cache = DynamicCache(config=config.get_text_config(decoder=True))
    forward(model, 1, cache)
    return [cache_layer(layer) for layer in cache.layers]


def forward(model: nn.Module, tokens: int, cache) -> None:
    from .transformers.versions import with_cache

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


# ------------------------------------------------------------------------------------------------ the table


@contextmanager
def explained(name: str) -> Iterator[None]:
    try:
        yield
    except CannotRun:
        raise
    except Exception as error:  # any error of transformers' class for this configuration
        raise CannotRun(f"cannot make the model of {name}: {type(error).__name__}: {error}") from error


def lines(source: Source | None, config, options: Namespace) -> Iterator[str]:
    from .transformers.fusing.fuse import fuse_in_place

    text = config.get_text_config(decoder=True)
    stored = getattr(config, "dtype", None)
    dtype = stored if isinstance(stored, torch.dtype) and stored.itemsize == 2 else torch.bfloat16
    with explained(options.model):
        model = empty_model(config, dtype)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        rows = list(table(source, config, dtype, options.formats))
        fuse_in_place(model)
        layers = cache_layers(model, config)
        working = working_memory(model, config, options.prompt)
    most = getattr(text, "max_position_embeddings", None) or 32768
    budgets = budgets_of(options)
    yield f"{options.model}: {config.model_type}, {parameters / 1e9:.1f} billion parameters, {len(layers)} layers"
    yield from about_memory(layers, working, most, options.prompt)
    yield ""
    heads = ["format", "weights", *(name for name, _ in budgets)]
    cells = [heads]
    for name, size, why in rows:
        if size is None:
            cells.append([name, "-", why])
            continue
        verdicts = [verdict([budget - size - working for budget in each], layers, most) for _, each in budgets]
        cells.append([name, f"{size / 1e9:.1f} GB", *verdicts])
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(len(heads))]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
    yield ""
    yield from about_budgets(budgets, options)


def table(source: Source | None, config, dtype: torch.dtype, formats: list[str]) -> Iterator[tuple]:
    """Name, bytes, and the reason if there are none."""
    if is_packed(config, source):
        name, size = packed_weights(source, config, dtype)
        yield f"{name}, unchanged", size, ""
        for bits in (8, 4) if name == "mxfp4" else ():
            yield f"mxfp4, other weights by quantize_(model, bits={bits})", bytes_of(gpt_oss(config, dtype, bits)), ""
        return
    for library in formats:
        try:
            yield label(library, dtype), weights(config, dtype, library), ""
        except ValueError as error:
            yield label(library, dtype), None, str(error).removeprefix("torch_moe_metal: ")


def label(library: str, dtype: torch.dtype) -> str:
    row = LIBRARIES[library]
    if not row.is_packed:
        return str(dtype).removeprefix("torch.")
    if row.is_affine:
        return f"affine, --bits {row.bits}"
    return f"{row.name}, --format {row.name}" if row.name in WRITTEN else f"{row.name}, as a GGUF file"


def budgets_of(options: Namespace) -> list[tuple[str, list[float]]]:
    """The GPU's share of memory: by name, its minimum and maximum."""
    if options.limit is not None:
        return [(f"{options.limit:,} MB", [options.limit * 2**20])]
    if options.memory is None and torch.backends.mps.is_built() and torch.backends.mps.is_available():
        return [("this Mac", [torch.mps.recommended_max_memory()])]
    sizes = options.memory or [round(physical_memory() / 2**30)]
    return [(f"{size:g} GB", [size * 2**30 * share for share in SHARES]) for size in sizes]


def physical_memory() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def about_memory(layers: list[CacheLayer], working: int, most: int, prompt: int) -> Iterator[str]:
    for tokens in dict.fromkeys((1000, most)):
        stored, room = (sum(getattr(layer, name)(tokens) for layer in layers) for name in ("bytes", "most"))
        size = f"{stored / 1e6:.1f} MB" if stored < 1e9 else f"{stored / 1e9:.1f} GB"
        yield f"cache of {tokens:,} tokens: {size}, and up to {(room - stored) / 1e9:.2f} GB more for growth"
    size = f"{working / 1e9:.2f} GB"
    yield f"working memory: {size} to compute {prompt:,} tokens at once; longer prompts need more"


def about_budgets(budgets: list[tuple[str, list[float]]], options: Namespace) -> Iterator[str]:
    if (reason := why_torch_is_too_old()) is not None:
        yield f"Before a model can run on this Mac: {reason}"
    yield '"fits": with the whole context. 1 GB is 10^9 bytes; a Mac with 32 GB has 34.4 of these.'
    for name, each in budgets:
        if len(each) > 1:
            yield f"Of {name} the GPU gets about {each[0] / 1e9:.1f} (2/3) to {each[1] / 1e9:.1f} GB (3/4)."
        else:
            yield f"{name}: the GPU gets {each[0] / 1e9:.1f} GB."
    if any(len(each) > 1 for _, each in budgets):
        yield "It depends on the Mac: Apple documents no rule, and Macs with more memory give more. On the Mac itself,"
        yield "this command asks Metal. `sudo sysctl iogpu.wired_limit_mb=N` raises it until a restart. Memory of"
        yield "other programs is not included in these figures."


def verdict(rooms: list[float], layers: list[CacheLayer], most: int) -> str:
    """For the minimum and the maximum of the GPU's share."""
    least, best = (longest(room, layers, most) for room in (rooms[0], rooms[-1]))
    if best == 0:
        return "doesn't fit"
    shown = "fits" if best == most else f"fits with a context up to {best:,}"
    if least == best:
        return shown
    if least == 0:
        return f"with 3/4: {shown}"
    return f"fits with a context up to {least:,} (3/4: {'all' if best == most else f'{best:,}'})"


def longest(room: float, layers: list[CacheLayer], most: int) -> int:
    """The longest context whose cache fits, rounded to two digits; 0 if it is shorter than 1,000 tokens."""
    if takes(layers, most) <= room:
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if takes(layers, middle) <= room else (low, middle)
    if low < 1000:
        return 0
    digit = 10 ** (len(str(low)) - 2)
    return low // digit * digit


def takes(layers: list[CacheLayer], tokens: int) -> int:
    return sum(layer.most(tokens) for layer in layers)
