"""`python -m torch_moe_metal demo`: one real MoE layer, and four layers of a real model, stock and ours, on the best
available device. The weights are random; nothing is downloaded."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import cpu_isa, reference
from .bench import whole_model
from .bench.block import Block, expert_bytes, plain, transformers
from .bench.calls import RandomTensors
from .bench.measure import seconds_each
from .bench.model_sizes import DEFAULT, MODELS
from .common.cli import has_transformers
from .common.devices import free_memory
from .common.loading import weights_gb
from .common.progress import Progress

SECONDS = 1.0  # measuring time for one token; three times as much for 32 tokens
LAYERS, CONTEXT, FORMAT = 4, 4096, "affine4"  # of the whole model; its cache when decoding begins
#: Memory relative to the dense weights: the cache, and the weights of a layer while they are packed.
PEAK = 1.4


def exact(block: Block, x: Tensor) -> Tensor:
    """The reference in float64, one token at a time to save memory, with the experts selected by the fused router."""
    weights, ids = torch.ops.moe_metal.gate(x, **block.router, **block.routing)
    rows = []
    # CPU first: Apple's GPUs have no float64.
    for row, weight, chosen in zip(x.cpu().double(), weights.cpu().double(), ids.cpu().long(), strict=True):
        theirs = [block.experts[name][chosen.to(x.device)].cpu().double() for name in ("gate_up", "down")]
        rows.append(reference.experts(row, weight, torch.arange(len(chosen)), *theirs))
    return torch.stack(rows)


def stock_blocks(block: Block, tokens: int) -> dict[str, Callable[..., Tensor]]:
    """transformers' implementations. batched_mm is used only for one token, because it copies the experts of every
    token."""
    found = transformers(block) if has_transformers() else plain(block)
    return {name: way.block for name, way in found.items() if tokens == 1 or not name.endswith("batched_mm")}


def relative_errors(got: Tensor, want: Tensor) -> Tensor:
    """The relative error of each token. For some tokens a router in bfloat16 may select another expert than ours."""
    return (got.cpu().double() - want).norm(dim=-1) / want.norm(dim=-1)


def compare_layer(device: str) -> float:
    """Build the layer, compare it with float64 and measure it and stock. Returns our largest error."""
    model = MODELS[DEFAULT]
    print(f"One MoE layer: H {model.H}, I {model.I}, E {model.E}, K {model.K}")
    size = model.E * expert_bytes(model, torch.bfloat16) / 1e9
    print(f"Making {size:.1f} GB of random weights ...", flush=True)
    noise = RandomTensors(device, torch.bfloat16)
    block = Block.random(model, noise)
    worst = 0.0
    for tokens, seconds in ((1, SECONDS), (32, 3 * SECONDS)):
        x = noise(tokens, model.H)
        print(f"\n{tokens} token{'s' if tokens > 1 else ''}", flush=True)
        want = exact(block, x[:4])
        blocks = stock_blocks(block, tokens) | {"torch_moe_metal": block}
        times = seconds_each({name: lambda way=way: way(x=x) for name, way in blocks.items()}, device, seconds)  # noqa: B023
        best = min(time for name, time in times.items() if name != "torch_moe_metal")
        for name, way in blocks.items():
            errors = relative_errors(way(x=x)[:4], want)
            ratio = f"   {best / times[name]:.2f} times the best stock" if name == "torch_moe_metal" else ""
            print(
                f"  {name:24} {times[name] * 1e3:9.2f} ms   error against float64 {errors.median():.1e}{ratio}",
                flush=True,
            )
        worst = max(worst, errors.max().item())  # ours is the last one
    return worst


def decoders(model: nn.Module, device: str) -> dict[str, Callable[[], nn.Module]]:
    """Functions that prepare the model, in this order. The last one packs it in place, to need less memory."""
    from ..transformers import unpatch

    ways = whole_model.variants(model, device)
    del ways["experts_implementation"]

    def packed() -> nn.Module:
        unpatch(model)
        whole_model.pack_model(model, FORMAT, [])
        return ways["patch"]()

    return ways | {"patch, 4 bits": packed}


def compare_model(device: str) -> None:
    """Measure decoding by a few layers of the model: stock, patched, and packed by us."""
    layers = f"{LAYERS} of its {MODELS[DEFAULT].layers} layers, and the same share of its head"
    print(f"\nDecoding at a context of {CONTEXT:,} tokens: {layers}", flush=True)
    if not has_transformers():
        print("Skipped: transformers is not installed.")
        return
    size, free = weights_gb(whole_model.meta_model(DEFAULT, LAYERS)), free_memory(device) / 1e9
    if free < PEAK * size:
        print(f"Skipped: this needs {PEAK * size:.1f} GB of free memory, and {free:.1f} GB are free.")
        return
    print(f"Making {size:.1f} GB of random weights ...", flush=True)
    model = whole_model.random_model(DEFAULT, LAYERS, device)
    ways = decoders(model, device)
    progress, speeds = Progress(len(ways), wanted=True), {}
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    for name, prepare in ways.items():
        progress.next(name)
        speeds[name] = whole_model.decode(prepare(), token, CONTEXT, whole_model.TOKENS).speed
        progress.clear()
        best = max(speed for way, speed in speeds.items() if way.startswith("stock"))
        ratio = "" if name.startswith("stock") else f"   {speeds[name] / best:.2f} times stock"
        print(f"  {name:24} {speeds[name]:9.1f} tokens/s   {weights_gb(model):4.1f} GB of weights{ratio}", flush=True)


@torch.no_grad()
def run() -> int:
    """Returns 1 if the result of the fused layer is wrong."""
    device = "mps" if torch.backends.mps.is_available() else "cpu"
    where = "the Apple GPU (mps)" if device == "mps" else f"the CPU ({cpu_isa}, {torch.get_num_threads()} threads)"
    print(f"Qwen3-30B-A3B, bfloat16, on {where}")
    worst = compare_layer(device)
    if worst > reference.tolerance(torch.bfloat16):
        print(f"\nThe fused layer is wrong: its error is {worst:.1e}. Run `python -m torch_moe_metal doctor`.")
        return 1
    if device == "mps":
        torch.mps.empty_cache()  # the layer's weights
    compare_model(device)
    return 0
