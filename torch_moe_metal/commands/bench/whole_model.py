"""A whole model, end to end: stock transformers, experts_implementation and patch, with bf16 and packed weights.

The model has the sizes of `--model` and random bf16 weights. It has only `--layers` of its layers, and its vocabulary
is cut in the same proportion, so that the head has the same share of the time as in the whole model. All variants take
turns in every round, with the same weights and tokens; the medians over the rounds are reported. Each of `--formats`
adds two variants with `patch`: one with packed experts only, and one with all large weights packed. GGML formats that
`quantize` does not write get random blocks. Each of `--context` is a number of tokens in the cache when decoding
begins; their keys and values are random.

On mps there is also the host's time per token: until the call of the model returns, before the wait for the GPU. If it
is nearly the whole time of a token, then the host decides the speed. On the CPU the call returns when it is done, so
this time would be the same as that of the token; `bench-host` separates them.
"""

import copy
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...packing import WRITTEN
from ...random_weights import FORMATS
from ..common.cli import CannotRun, has_transformers, positive
from ..common.devices import add_device, check_device
from ..common.loading import weights_gb
from ..common.progress import Progress
from .measure import machine, synchronize
from .model_sizes import DEFAULT, MODELS, configuration
from .report import json_of

PROMPT, TOKENS = 512, 16
CONTEXT = [64, 4096, 16384]
WHOLE = ("qwen3-30b-a3b", "gpt-oss-20b", "qwen3.5-35b-a3b")  # the models that can be measured
#: GGUF files use more bits for some weights: the usual format and the larger one.
MIXES = {"q4_k_m": ("q4_k", "q6_k"), "q5_k_m": ("q5_k", "q6_k")}
EXPERTS_ONLY = ["!experts"]  # `skip` of everything else
HOST = "host ms per token"


def whole_config(name: str, layers: int):
    """The configuration with only some of the layers, and with a vocabulary cut in the same proportion."""
    from transformers import AutoConfig

    model = MODELS[name]
    sizes = {"vocab_size": model.vocabulary * layers // model.layers, "num_hidden_layers": layers}
    return AutoConfig.for_model(model.config, **configuration(model), **sizes, **model.attention)


def meta_model(name: str, layers: int) -> nn.Module:
    """The model without memory for its weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(whole_config(name, layers), dtype=torch.bfloat16)


def random_model(name: str, layers: int, device: str) -> nn.Module:
    model = meta_model(name, layers).to_empty(device=device)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        bound = 1.0 if name.endswith("norm.weight") else (3 / parameter.shape[-1]) ** 0.5
        nn.init.uniform_(parameter, -bound, bound)
    # Its buffers are not parameters.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    return model.eval().requires_grad_(False)


def variants(model: nn.Module, device: str) -> dict[str, Callable[[], nn.Module]]:
    """By name, functions that prepare and return the model. Stock is the default of `generate`: grouped_mm, and on
    other devices than the CPU batched_mm for decoding."""
    from ...transformers import patch, unpatch
    from ...warmup import wait_for_all

    def choose(implementation: str) -> nn.Module:
        unpatch(model)
        model.set_experts_implementation(implementation)
        return model

    def patched() -> nn.Module:
        patch(model)
        wait_for_all()  # so that nothing compiles while it is measured
        return model

    stock = {"stock": lambda: choose("grouped_mm")}
    if device != "cpu":
        stock["stock, batched_mm"] = lambda: choose("batched_mm")
    return stock | {"experts_implementation": lambda: choose("moe_metal"), "patch": patched}


def format_in(mix: str, weight: str) -> str:
    """The format of a weight as in llama.cpp: more bits for the head, and for v_proj and down_proj of every other
    layer."""
    usual, more = MIXES[mix]
    layer = next((int(part) for part in weight.split(".") if part.isdigit()), 0)
    return more if "lm_head" in weight or (layer % 2 == 0 and ("v_proj" in weight or "down_proj" in weight)) else usual


def pack_model(model: nn.Module, name: str, skip: list[str]) -> None:
    """Pack all large weights of the model in a format or a mix of formats."""
    from ...transformers import MoeMetalConfig, quantize_
    from ...transformers.checkpoints.config import Form, pack_all
    from ...transformers.fusing.packed_modules import named_parts

    packing = FORMATS.get(name)
    if packing is not None and packing.format in WRITTEN:
        quantize_(model, packing.format, packing.bits, packing.group, skip)
        return
    generator = torch.Generator(model.device).manual_seed(0)
    plan = {
        module: {weight: Form.of(name if packing else format_in(name, weight), 4, 64) for weight in forms}
        for module, forms in MoeMetalConfig(skip=skip).plan(model).items()
    }
    pack_all(
        model,
        plan,
        lambda weight, dense, form: named_parts(
            weight.rpartition(".")[2], FORMATS[form.format].of(dense, generator=generator)
        ),
        progress=True,
    )


def packed_variants(model: nn.Module, formats: list[str]) -> dict[str, Callable[[], nn.Module]]:
    """The same for packed copies of the model, which share the weights that stay dense."""
    from ...transformers import patch
    from ...warmup import wait_for_all

    made = {}
    for name in formats:
        for variant, skip in ((f"patch, {name} experts", EXPERTS_ONLY), (f"patch, {name}", [])):
            packed = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
            pack_model(packed, name, skip)
            patch(packed)
            made[variant] = lambda packed=packed: packed
    wait_for_all()
    return made


def synchronized(device: str) -> float:
    synchronize(device)
    return time.perf_counter()


@contextmanager
def calls() -> Iterator[Counter]:
    """Counts the ops that reach the device; views and allocations do not."""

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = str(function)
            if not (function.is_view or name.startswith(("aten._unsafe_view", "aten.empty", "aten.new_empty"))):
                counter[name] += 1
            return function(*args, **(kwargs or {}))

    counter: Counter = Counter()
    with Count():
        yield counter


def prefill(model: nn.Module, ids: torch.Tensor) -> float:
    """Tokens per second."""
    start = synchronized(ids.device.type)
    model(ids, use_cache=True, logits_to_keep=1)
    return ids.shape[1] / (synchronized(ids.device.type) - start)


def filled_cache(model: nn.Module, context: int):
    """transformers' cache as if the model had read this many tokens. The states of linear attention do not depend on
    that: they begin with the first token."""
    from transformers import DynamicCache
    from transformers.cache_utils import LinearAttentionLayer

    config, weight = model.config, model.lm_head.weight
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer):
            continue
        shape = 1, config.num_key_value_heads, context, config.head_dim
        keys, values = (torch.randn(shape, dtype=torch.bfloat16, device=weight.device) for _ in range(2))
        cache.update(keys, values, index)
    return cache


class Decoded(NamedTuple):
    speed: float  # tokens per second
    host: float  # milliseconds per token until the call of the model returns
    ops: int  # per token, of code that is not replayed
    replayed: int  # layers that were replayed in one call


def decode(model: nn.Module, token: torch.Tensor, context: int, tokens: int) -> Decoded:
    """Decode with this many tokens in the cache."""
    from ...transformers.fusing.tape import replayed_layers
    from ...transformers.versions import with_cache

    cache = filled_cache(model, context)
    seconds, host = [], []
    for _ in range(tokens):
        start = synchronized(token.device.type)
        output = model(token, **with_cache(cache))
        host.append(time.perf_counter() - start)
        seconds.append(synchronized(token.device.type) - start)
        token = output.logits[:, -1:].argmax(-1)
    replayed = replayed_layers(cache)
    with calls() as counter:
        model(token, **with_cache(cache))
    return Decoded(1 / statistics.median(seconds), statistics.median(host) * 1e3, counter.total(), replayed)


def speed_at(context: int) -> str:
    return f"decode tokens/s at {context}"


def measured(model: nn.Module, ids: torch.Tensor, contexts: list[int]) -> dict[str, float]:
    decoded = {context: decode(model, ids[:, :1], context, TOKENS) for context in contexts}
    first = decoded[contexts[0]]
    return {
        **{speed_at(context): found.speed for context, found in decoded.items()},
        **({HOST: first.host} if ids.device.type != "cpu" else {}),
        "ops per token": first.ops,
        "replayed layers": first.replayed,
        "prefill tokens/s": prefill(model, ids),
        "weights GB": weights_gb(model),
    }


@torch.no_grad()
def measure(options: Namespace) -> dict[str, dict[str, float]]:
    """The median of each figure for each variant."""
    model = random_model(options.model, options.layers, options.device)
    ids = torch.randint(0, model.config.vocab_size, (1, PROMPT), device=options.device)
    prepared = variants(model, options.device) | packed_variants(model, options.formats)
    rows: dict[str, list[dict]] = {name: [] for name in prepared}
    progress = Progress((options.rounds + 1) * len(rows), wanted=not options.json)
    for _ in range(options.rounds + 1):  # the first round only warms up
        for name, prepare in prepared.items():
            progress.show(sum(map(len, rows.values())), name)
            rows[name].append(measured(prepare(), ids, options.context))
    progress.clear()
    return {
        name: {key: statistics.median(row[key] for row in found[1:]) for key in found[0]}
        for name, found in rows.items()
    }


def table(medians: dict[str, dict[str, float]]) -> str:
    stock = medians["stock"]
    counts = {"ops per token": 16, "replayed layers": 17}  # and the widths of their columns
    speeds = [key for key in stock if key not in (*counts, "weights GB")]
    titles = "".join(f"{key:>{width}}" for key, width in counts.items())
    lines = [f"{'':24}{''.join(f'{key:>27}' for key in speeds)}{titles}{'weights GB':>12}"]
    for name, row in medians.items():
        rates = "".join(f"{f'{row[key]:.1f} ({row[key] / stock[key]:.2f}x)':>27}" for key in speeds)
        shown = "".join(f"{row[key]:>{width}.0f}" for key, width in counts.items())
        lines.append(f"{name:24}{rates}{shown}{row['weights GB']:>12.1f}")
    return "\n".join(lines)


def add_arguments(parser: ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument(
        "--model", choices=WHOLE, default=DEFAULT, help=f"the model whose sizes are used (default: {DEFAULT})"
    )
    parser.add_argument("--layers", type=positive, default=4, help="number of layers (default: 4, which take 6 GB)")
    packed = [*MIXES, *(name for name, packing in FORMATS.items() if packing)]
    formats = f"also packed weights: {' '.join(packed)} (default: none; each needs a minute and 4 GB)"
    parser.add_argument("--formats", nargs="+", choices=packed, default=[], metavar="FORMAT", help=formats)
    context = f"numbers of tokens in the cache when decoding begins (default: {' '.join(map(str, CONTEXT))})"
    parser.add_argument("--context", nargs="+", type=positive, default=CONTEXT, metavar="TOKENS", help=context)
    parser.add_argument(
        "--rounds", type=positive, default=5, help="measured rounds, after one warm-up round (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: Namespace) -> int:
    from ... import __version__

    try:
        check_device(options.device)
        if not has_transformers():
            raise CannotRun("transformers is not installed: `pip install transformers`")
    except CannotRun as reason:
        print(f"bench-model: {reason}", file=sys.stderr)
        return 2
    about = {
        "torch_moe_metal": __version__,
        "torch": torch.__version__,
        "device": options.device,
        "threads": torch.get_num_threads(),
        "model": options.model,
        "layers": options.layers,
        "prompt": PROMPT,
    }
    if not options.json:
        print("   ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    medians = measure(options)
    found = {**machine(), **about, "rows": medians}
    print(json_of(found) if options.json else table(medians))
    return 0
