"""`python -m torch_moe_metal demo`: one real MoE layer, stock against fused, on the best device there is."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu_isa, reference

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8  # Qwen3-30B-A3B


@dataclass
class Layer:
    """The weights of one Qwen3-30B-A3B MoE block, random: 1.2 GB in bfloat16."""

    router: Tensor  # [E, H]
    gate_up: Tensor  # [E, 2I, H]
    down: Tensor  # [E, H, I]

    @classmethod
    def random(cls, device: str) -> "Layer":
        torch.manual_seed(0)

        def weight(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16).normal_(std=shape[-1] ** -0.5).to(device)

        return cls(weight(EXPERTS, HIDDEN), weight(EXPERTS, 2 * INNER, HIDDEN), weight(EXPERTS, HIDDEN, INNER))

    def fused(self, x: Tensor) -> Tensor:
        weights, experts = torch.ops.moe_metal.gate(x, self.router, top_k=TOP_K)
        return torch.ops.moe_metal.experts(x, weights, experts, self.gate_up, self.down)

    def plain(self, x: Tensor) -> Tensor:
        """The same in plain PyTorch, an expert at a time."""
        scores, experts = F.linear(x, self.router).float().softmax(-1).topk(TOP_K)
        weights = (scores / scores.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        for e in experts.unique().tolist():
            token, slot = (experts == e).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, -1)
            slots = F.linear(F.silu(gate) * up, self.down[e])
            out.index_add_(0, token, slots * weights[token, slot, None])
        return out

    def exact(self, x: Tensor) -> Tensor:
        """The reference in float64, a token at a time to spare memory, with the experts that the fused router chose."""
        weights, experts = torch.ops.moe_metal.gate(x, self.router, top_k=TOP_K)
        rows = []
        for row, weight, chosen in zip(x.double().cpu(), weights.double().cpu(), experts.cpu().long(), strict=True):
            at = chosen.to(self.down.device)
            gate_up, down = self.gate_up[at].double().cpu(), self.down[at].double().cpu()
            rows.append(reference.experts(row, weight, torch.arange(TOP_K), gate_up, down))
        return torch.stack(rows)


def transformers_block(layer: Layer, implementation: str) -> Callable[[Tensor], Tensor] | None:
    """transformers' own block on the same weights, or None when transformers is not installed."""
    try:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
    except ImportError:
        return None
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config)
    block.gate.weight = torch.nn.Parameter(layer.router, requires_grad=False)
    block.experts.gate_up_proj = torch.nn.Parameter(layer.gate_up, requires_grad=False)
    block.experts.down_proj = torch.nn.Parameter(layer.down, requires_grad=False)
    block.eval()

    def run(x: Tensor) -> Tensor:
        out = block(x.unsqueeze(0))
        return (out[0] if isinstance(out, tuple) else out).reshape(x.shape)

    return run


def milliseconds(functions: dict[str, Callable[[Tensor], Tensor]], x: Tensor, rounds: int) -> dict[str, float]:
    """The median time of each, taken in turn so that a busy machine is unfair to none."""
    synchronize = torch.mps.synchronize if x.device.type == "mps" else lambda: None
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            synchronize()
            start = time.perf_counter()
            function(x)
            synchronize()
            if turn:  # the first is warm-up
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def stock_blocks(layer: Layer, tokens: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """transformers' implementations; its batched_mm copies the experts of every token, so it is left to one token."""
    names = ["grouped_mm", "eager"] + ["batched_mm"] * (tokens == 1)
    blocks = {name: transformers_block(layer, name) for name in names}
    found = {f"transformers {name}": block for name, block in blocks.items() if block is not None}
    return found or {"plain PyTorch": layer.plain}


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double().cpu() - want).norm() / want.norm()).item()


@torch.no_grad()
def run() -> int:
    """Build the layer, check it against float64, time it against stock. 1 when the fused result is wrong."""
    device = "mps" if torch.backends.mps.is_available() else "cpu"
    where = "the Apple GPU (mps)" if device == "mps" else f"the CPU ({cpu_isa}, {torch.get_num_threads()} threads)"
    print(f"One MoE layer of Qwen3-30B-A3B: H {HIDDEN}, I {INNER}, E {EXPERTS}, K {TOP_K}, bfloat16, on {where}")
    print("Making 1.2 GB of random weights ...", flush=True)
    layer = Layer.random(device)
    worst = 0.0
    for tokens, rounds in ((1, 20), (32, 5)):
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).bfloat16().to(device)
        print(f"\n{tokens} token{'s' if tokens > 1 else ''}", flush=True)
        exact = layer.exact(x[:4])
        stock = stock_blocks(layer, tokens)
        times = milliseconds(stock | {"torch_moe_metal": layer.fused}, x, rounds)
        best = min(time for name, time in times.items() if name != "torch_moe_metal")
        for name, function in (stock | {"torch_moe_metal": layer.fused}).items():
            error = relative_error(function(x)[:4], exact)
            ratio = f"   {best / times[name]:.2f} times the best stock" if name == "torch_moe_metal" else ""
            print(f"  {name:24} {times[name]:9.2f} ms   error against float64 {error:.1e}{ratio}", flush=True)
        worst = max(worst, error)  # the last one is ours
    if worst > 4e-3:
        print(f"\nThe fused layer is off by {worst:.1e}: too much. Run `python -m torch_moe_metal doctor`.")
        return 1
    return 0
