"""`python -m torch_moe_metal demo`: one real MoE layer, stock and fused, on the best available device."""

from collections.abc import Callable

import torch
from torch import Tensor

from .. import cpu_isa, reference
from .bench.block import Block, expert_bytes, plain, transformers
from .bench.calls import RandomTensors
from .bench.measure import seconds_each
from .bench.model_sizes import MODELS
from .common.cli import has_transformers

MODEL = MODELS["qwen3-30b-a3b"]
SECONDS = 1.0  # measuring time for one token; three times as much for 32 tokens


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


@torch.no_grad()
def run() -> int:
    """Build the layer, compare it with float64 and measure it and stock. Returns 1 if the fused result is wrong."""
    device = "mps" if torch.backends.mps.is_available() else "cpu"
    where = "the Apple GPU (mps)" if device == "mps" else f"the CPU ({cpu_isa}, {torch.get_num_threads()} threads)"
    sizes = f"H {MODEL.H}, I {MODEL.I}, E {MODEL.E}, K {MODEL.K}"
    print(f"One MoE layer of Qwen3-30B-A3B: {sizes}, bfloat16, on {where}")
    size = MODEL.E * expert_bytes(MODEL, torch.bfloat16) / 1e9
    print(f"Making {size:.1f} GB of random weights ...", flush=True)
    noise = RandomTensors(device, torch.bfloat16)
    block = Block.random(MODEL, noise)
    worst = 0.0
    for tokens, seconds in ((1, SECONDS), (32, 3 * SECONDS)):
        x = noise(tokens, MODEL.H)
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
    if worst > reference.tolerance(torch.bfloat16):
        print(f"\nThe fused layer is wrong: its error is {worst:.1e}. Run `python -m torch_moe_metal doctor`.")
        return 1
    return 0
