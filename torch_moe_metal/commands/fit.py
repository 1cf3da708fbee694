"""Print in which format a model fits into a Mac's memory, and with how long a context. No weights are loaded: sizes
come from transformers' model of the configuration on the meta device, and from packed files."""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..formats import LIBRARIES
from ..macos import why_torch_is_too_old
from ..packing import WRITTEN
from ..transformers_support import require_supported
from .common.cli import CannotRun, positive
from .common.loading import MODEL, Source
from .model_memory import (
    PUBLISHED,
    CacheLayer,
    bytes_of,
    cache_layers,
    configuration_of,
    empty_model,
    gpt_oss,
    is_packed,
    packed_weights,
    weights,
    working_memory,
)

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


@contextmanager
def explained(name: str) -> Iterator[None]:
    try:
        yield
    except CannotRun:
        raise
    except Exception as error:  # any error of transformers' class for this configuration
        raise CannotRun(f"cannot make the model of {name}: {type(error).__name__}: {error}") from error


def lines(source: Source | None, config, options: Namespace) -> Iterator[str]:
    from ..transformers.fusing.fuse import fuse_in_place

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
