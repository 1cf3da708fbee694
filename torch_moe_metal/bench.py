"""`python -m torch_moe_metal bench`: how long every op takes, beside the machine's own limit and beside PyTorch.

Each row is measured against the compositions of PyTorch ops that compute the same; the fastest of them counts. All take
turns in one loop, so that what slows the machine slows them alike, and medians are told. Nobody's output memory is kept
between calls: it is allocated anew each time, as it is in a model.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from . import __version__, cpu_isa

ops = torch.ops.moe_metal
SHORT = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
COPIED_BYTES = 256 << 20
WORTH_A_COPY = 32 << 20  # bytes a row moves at least to be held against the copy: smaller ones stay in caches


@dataclass
class Row:
    """One op on one set of inputs, and the PyTorch compositions that compute the same."""

    op: str
    shape: str
    dtype: torch.dtype
    ours: Callable[[], object]
    rivals: dict[str, Callable[[], object]]
    bytes: int  # read and written, each once
    flops: int = 0
    results: dict[str, float] = field(default_factory=dict)


def moved(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


class Draw:
    """Random tensors of one device and dtype."""

    def __init__(self, device: str, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.random = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.random).to(self.device, dtype or self.dtype)


# ------------------------------------------------------------------------------------------------ rows

TOKENS = (1, 64, 4096)
E, K, H, I = 128, 8, 2048, 768  # Qwen3-30B-A3B


def gate_row(draw: Draw, T: int, with_norm: bool) -> Row:
    hidden, router_weight, norm_weight = draw(T, H), draw(E, H) / H**0.5, draw(H) if with_norm else None

    def logits():
        rows = hidden if norm_weight is None else F.rms_norm(hidden, (H,), norm_weight, 1e-6)
        return F.linear(rows, router_weight)

    def softmax_topk():
        weights, experts = logits().softmax(-1, dtype=torch.float32).topk(K, -1)
        return weights / weights.sum(-1, keepdim=True), experts

    return Row(
        "gate",
        f"T={T} E={E} K={K} H={H}" + " norm" * with_norm,
        draw.dtype,
        lambda: ops.gate(hidden, router_weight, norm_weight, top_k=K),
        {"linear, our route": lambda: ops.route(logits(), top_k=K), "linear, softmax, topk": softmax_topk},
        moved(hidden, router_weight) + T * K * 8,
        2 * T * E * H,
    )


def route_row(draw: Draw, T: int, E: int, K: int) -> Row:
    logits = draw(T, E)

    def softmax_topk():
        weights, experts = logits.softmax(-1, dtype=torch.float32).topk(K, -1)
        return weights / weights.sum(-1, keepdim=True), experts

    def topk_softmax():
        chosen, experts = logits.topk(K, -1)
        return chosen.softmax(-1, dtype=torch.float32), experts

    return Row(
        "route",
        f"T={T} E={E} K={K}",
        draw.dtype,
        lambda: ops.route(logits, top_k=K),
        {"softmax, topk": softmax_topk, "topk, softmax": topk_softmax},
        moved(logits) + T * K * 8,
    )


def glu_row(draw: Draw, T: int, layout: str) -> Row:
    packed = draw(T * K, 2 * I)
    gate, up = (packed[:, ::2], packed[:, 1::2]) if layout == "interleaved" else packed.chunk(2, -1)
    return Row(
        "glu",
        f"rows={T * K} I={I} {layout}",
        draw.dtype,
        lambda: ops.glu(gate, up),
        {
            "silu, mul_": lambda: F.silu(gate).mul_(up),
            "silu, mul": lambda: F.silu(gate) * up,
            "sigmoid, mul_, mul_": lambda: torch.sigmoid(gate).mul_(gate).mul_(up),
        },
        moved(gate, up, gate),
    )


def combine_rows(draw: Draw, T: int) -> Iterator[Row]:
    slots, weights, residual = draw(T, K, H), draw(T, K, dtype=torch.float32).softmax(-1), draw(T, H)
    norm_weight, other_weight = draw(H), draw(H)
    weights_row = weights.to(draw.dtype).unsqueeze(-2)
    sums = {
        "bmm": lambda: torch.bmm(weights_row, slots).squeeze(-2),
        "einsum": lambda: torch.einsum("tkh,tk->th", slots, weights_row.squeeze(-2)),
        "mul, sum": lambda: (slots * weights_row.mT).sum(-2),
    }

    def then(steps: str, finish: Callable[[Tensor], object]) -> dict[str, Callable[[], object]]:
        return {f"{name}, {steps}": lambda way=way: finish(way()) for name, way in sums.items()}

    def norm(x: Tensor, weight: Tensor = norm_weight) -> Tensor:
        return F.rms_norm(x, (H,), weight, 1e-6)

    def row(op: str, arguments: tuple[Tensor | None, ...], rivals: dict[str, Callable[[], object]], writes: int) -> Row:
        function = getattr(ops, op)
        bytes = moved(*arguments) + writes * moved(residual)
        return Row(op, f"T={T} K={K} H={H}", draw.dtype, lambda: function(*arguments), rivals, bytes)

    baddbmm = {"baddbmm": lambda: torch.baddbmm(residual.unsqueeze(-2), weights_row, slots).squeeze(-2)}
    plus = then("add_", lambda x: x.add_(residual)) | baddbmm
    yield row("weighted_sum", (slots, weights, None, None, residual), plus, 1)
    yield row("weighted_sum_residual_", (residual, slots, weights), then("add_", residual.add_), 1)
    yield row(
        "weighted_sum_residual_norm_",
        (residual, slots, weights, norm_weight),
        then("add_, rms_norm", lambda x: norm(residual.add_(x))),
        2,
    )
    yield row(
        "weighted_sum_norm_add",
        (slots, weights, residual, norm_weight),
        then("rms_norm, add_", lambda x: norm(x).add_(residual)),
        1,
    )
    yield row(
        "weighted_sum_dual_norm_add",
        (slots, weights, residual, other_weight, norm_weight),
        then("2 rms_norm, add_", lambda x: norm(x).add_(norm(residual, other_weight))),
        1,
    )


def norm_rows(draw: Draw, T: int) -> Iterator[Row]:
    residual, input, weight, shape = draw(T, H), draw(T, H), draw(H), f"T={T} H={H}"

    def norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, (H,), weight, 1e-6)

    def add_norm() -> tuple[Tensor, Tensor]:
        total = residual + input
        return norm(total), total

    yield Row(
        "norm_add",
        shape,
        draw.dtype,
        lambda: ops.norm_add(residual, input, weight),
        {"rms_norm, add_": lambda: norm(input).add_(residual)},
        3 * moved(residual) + moved(weight),
    )
    yield Row(
        "residual_norm",
        shape,
        draw.dtype,
        lambda: ops.residual_norm(residual, input, weight),
        {"add, rms_norm": add_norm},
        4 * moved(residual) + moved(weight),
    )


# What draws its tensors together stands together: the rows of some ops, for T tokens.
GROUPS: dict[tuple[str, ...], Callable[[Draw, int], Iterable[Row]]] = {
    ("gate",): lambda draw, T: (gate_row(draw, T, with_norm) for with_norm in (False, True)),
    ("route",): lambda draw, T: (route_row(draw, T, *sizes) for sizes in ((E, K), (512, 10))),
    ("glu",): lambda draw, T: (glu_row(draw, T, layout) for layout in ("packed", "interleaved")),
    (
        "weighted_sum",
        "weighted_sum_residual_",
        "weighted_sum_residual_norm_",
        "weighted_sum_norm_add",
        "weighted_sum_dual_norm_add",
    ): combine_rows,
    ("norm_add", "residual_norm"): norm_rows,
}
OPS = tuple(op for group in GROUPS for op in group)


def rows_of(wanted: list[str], device: str, dtypes: list[torch.dtype]) -> Iterator[Row]:
    for dtype, (group, rows), T in itertools.product(dtypes, GROUPS.items(), TOKENS):
        if set(group) & set(wanted):
            yield from (row for row in rows(Draw(device, dtype), T) if row.op in wanted)


# ------------------------------------------------------------------------------------------------ measuring


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def seconds_each(functions: dict[str, Callable[[], object]], device: str, seconds: float) -> dict[str, float]:
    """The median time of one call of each, all taking turns for about `seconds` and for 7 rounds at least."""

    def measure(function: Callable[[], object], calls: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        return (time.perf_counter() - start) / calls

    calls = {}
    for name, function in functions.items():
        measure(function, 2)  # warm up
        calls[name] = max(1, min(100, int(1e-3 / measure(function, 1))))  # a millisecond each turn, for small ones
    samples: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples[name]) < 7:
        for name, function in functions.items():
            samples[name].append(measure(function, calls[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def copy_of(device: str) -> Callable[[], object]:
    source = torch.ones(COPIED_BYTES // 4, device=device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def check_agreement(row: Row) -> None:
    """A rival that computes something else would be no rival. (What works in place differs call by call.)"""
    if row.op.endswith("_"):
        return
    ours = row.ours()
    for name, rival in row.rivals.items():
        got, want = (first.double() for first in (r if isinstance(r, Tensor) else r[0] for r in (ours, rival())))
        error = ((got - want).norm() / want.norm()).item()
        assert error < 0.02, f"{row.op} {row.shape} differs from '{name}' by {error:.2%}"


def measured(row: Row, device: str, seconds: float, copy: Callable[[], object]) -> Row:
    check_agreement(row)
    functions = {"ours": row.ours, **row.rivals}
    if row.bytes >= WORTH_A_COPY:
        functions["copy"] = copy
    times = seconds_each(functions, device, seconds)
    rival = min(row.rivals, key=times.__getitem__)
    row.results = {
        "us": times["ours"] * 1e6,
        "gb_per_s": row.bytes / times["ours"] / 1e9,
        "gflop_per_s": row.flops / times["ours"] / 1e9,
        "x_pytorch": times[rival] / times["ours"],
        "best_rival": rival,
    }
    if "copy" in times:
        copy_speed = 2 * COPIED_BYTES / times["copy"]
        row.results |= {"copy_gb_per_s": copy_speed / 1e9, "of_copy": row.bytes / times["ours"] / copy_speed}
    return row


# ------------------------------------------------------------------------------------------------ output

HEAD = (
    f"{'op':28} {'shape':28} {'dtype':>5} {'us':>10} {'GB/s':>7} {'of copy':>8} {'x PyTorch':>10}  fastest of PyTorch"
)


def line(row: Row) -> str:
    r = row.results
    of_copy = f"{r['of_copy']:8.0%}" if "of_copy" in r else f"{'':8}"
    return (
        f"{row.op:28} {row.shape:28} {SHORT[row.dtype]:>5} {r['us']:10.1f} {r['gb_per_s']:7.1f} {of_copy} "
        f"{r['x_pytorch']:9.2f}  {r['best_rival']}"
    )


def about(device: str) -> dict[str, object]:
    machine = {"torch_moe_metal": __version__, "torch": torch.__version__, "device": device}
    return machine | ({"isa": cpu_isa, "threads": torch.get_num_threads()} if device == "cpu" else {})


@torch.no_grad()
def run(device: str, wanted: list[str], dtypes: list[torch.dtype], seconds: float, as_json: bool) -> int:
    rows, copy = [], copy_of(device)
    if not as_json:
        print(*(f"{key} {value}" for key, value in about(device).items()), sep="   ")
        print(
            f"GB/s: bytes read and written, each once, over the median time. of copy: that over the GB/s of a copy_ of "
            f"{COPIED_BYTES >> 20} MiB,\nread and written, measured in turn with the row (rows that move "
            f"{WORTH_A_COPY >> 20} MiB or more).\n\n{HEAD}"
        )
    for row in rows_of(wanted, device, dtypes):
        print(f"\033[K{row.op} {row.shape} {SHORT[row.dtype]} ...", end="\r", file=sys.stderr, flush=True)
        rows.append(measured(row, device, seconds, copy))
        if not as_json:
            print(line(row), flush=True)
    if as_json:
        found = [{"op": r.op, "shape": r.shape, "dtype": SHORT[r.dtype], **r.results} for r in rows]
        print(json.dumps({**about(device), "rows": found}, indent=1))
    return 0
