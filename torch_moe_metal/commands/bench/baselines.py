"""PyTorch baselines: for each op the usual ways to write it in plain PyTorch. The fastest one is the comparison.

They have the arguments and options of the op, but with ids in int64 and weights in the activations' dtype, as in a
layer written in plain PyTorch.
"""

from collections.abc import Callable, Container, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...reference import unpack
from ..common.cli import has_transformers
from . import linear_attention

Ways = dict[str, Callable[..., object]]
INF = float("inf")

# ------------------------------------------------------------------------------------------------ router


def linear(hidden, router_weight, norm_weight=None, router_bias=None) -> Tensor:
    rows = hidden if norm_weight is None else norm(hidden, norm_weight)
    return F.linear(rows, router_weight, router_bias)


def gate(hidden, router_weight, norm_weight=None, router_bias=None, **routing) -> tuple[Tensor, Tensor]:
    return route(linear(hidden, router_weight, norm_weight, router_bias), **routing)


def in_best_groups(choice: Tensor, n_group: int, topk_group: int) -> Tensor:
    """`choice` with -inf outside of the groups with the largest sums of their two best scores."""
    groups = choice.unflatten(-1, (n_group, -1))
    best = groups.topk(2, -1).values.sum(-1).topk(topk_group, -1).indices
    barred = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
    return groups.masked_fill(barred.unsqueeze(-1), -INF).flatten(-2)


def route(
    logits, select_bias=None, per_expert_scale=None, *,
    top_k, scoring="softmax", renormalize="before_scale", n_group=1, topk_group=1, scaling_factor=1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scores in float32, then topk."""
    scores = logits.float().sigmoid() if scoring == "sigmoid" else logits.softmax(-1, dtype=torch.float32)
    choice = scores if select_bias is None else scores + select_bias
    if n_group > 1:
        choice = in_best_groups(choice, n_group, topk_group)
    weights, ids = choice.topk(top_k, -1)
    if choice is not scores:
        weights = scores.gather(-1, ids)
    if renormalize != "none":
        weights = weights / weights.sum(-1, keepdim=True)
    if per_expert_scale is not None:
        weights = weights * per_expert_scale[ids]
    return weights if scaling_factor == 1 else weights * scaling_factor, ids


def route_from_the_best(logits, per_expert_scale=None, *, top_k) -> tuple[Tensor, Tensor]:
    """The softmax of the best logits only, which equals the default routing."""
    best, ids = logits.topk(top_k, -1)
    weights = best.softmax(-1, dtype=torch.float32)
    return weights if per_expert_scale is None else weights * per_expert_scale[ids], ids


# ------------------------------------------------------------------------------------------------ dense weights


def product(x, weight, bias=None, *, format="dense") -> Tensor:
    return F.linear(x, weight, bias)


def copy(weight, *, format, dtype) -> Tensor:
    return weight.to(dtype, copy=True)


def int4pack(x: Tensor, weight: Tensor, scale: Tensor, offset: Tensor) -> Callable[[], Tensor]:
    """PyTorch's own product with affine4 in bfloat16 on the CPU, with prepared weights. It has its own order of the
    integers, and its values are (q - 8) * scale + zero. (The one for 8 bits, _weight_int8pack_mm, has one scale per row
    and no offset, so it cannot represent affine8.)"""
    aten = torch.ops.aten
    rows = weight.view(torch.uint8).split(4096)  # few at a time: temporary integers take 32 bits
    codes = torch.cat([aten._convert_weight_to_int4pack_for_cpu(unpack(part, 4).int(), 1) for part in rows])
    zero = (offset.float() + 8 * scale.float()).to(scale.dtype)
    scales, group = torch.stack([scale, zero], -1).transpose(0, 1).contiguous(), x.shape[-1] // scale.shape[-1]
    return lambda: aten._weight_int4pack_mm_for_cpu(x, codes, group, scales)


# ------------------------------------------------------------------------------------------------ experts

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def glu(gate, up, *, activation="silu", alpha=1.702, limit=None) -> Tensor:
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "swiglu_oai":
        return (gate * torch.sigmoid(gate * alpha)).mul_(up + 1)
    return ACTIVATIONS[activation](gate).mul_(up)


def glu_anew(gate, up, *, activation="silu") -> Tensor:
    return ACTIVATIONS[activation](gate) * up


def inner(both: Tensor, interleaved: bool, activation: dict) -> Tensor:
    gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
    return glu(gate, up, **activation)


def expert_by_expert(
    x, weights, ids, gate_up, down, gate_up_bias=None, down_bias=None, *,
    interleaved=False, transposed=False, **activation,
) -> Tensor:  # fmt: skip
    """transformers' eager: a loop over the selected experts."""

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, e: int) -> Tensor:
        return F.linear(rows, weight[e].mT if transposed else weight[e], None if bias is None else bias[e])

    out = torch.zeros_like(x)
    for e in ids.unique().tolist():
        token, slot = (ids == e).nonzero(as_tuple=True)
        rows = inner(linear(x[token], gate_up, gate_up_bias, e), interleaved, activation)
        out.index_add_(0, token, linear(rows, down, down_bias, e) * weights[token, slot, None])
    return out


def batched_mm(
    x, weights, ids, gate_up, down, gate_up_bias=None, down_bias=None, *,
    interleaved=False, transposed=False, **activation,
) -> Tensor:  # fmt: skip
    """transformers' decode: gathers a copy of each token's experts."""
    flat = ids.flatten()

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        selected = weight[flat]
        out = torch.bmm(selected.mT if transposed else selected, rows.unsqueeze(-1)).squeeze(-1)
        return out if bias is None else out.add_(bias[flat])

    slots = x.repeat_interleave(ids.shape[-1], 0)
    rows = inner(linear(slots, gate_up, gate_up_bias), interleaved, activation)
    return (linear(rows, down, down_bias).view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)


def grouped_mm(
    x, weights, ids, gate_up, down, gate_up_bias=None, down_bias=None, *,
    interleaved=False, transposed=False, **activation,
) -> Tensor:  # fmt: skip
    """transformers' prefill: sorted by expert, one grouped product each way."""
    product = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
    flat, order = ids.flatten().sort()
    ones, counts = torch.ones_like(flat, dtype=torch.int32), ids.new_zeros(len(gate_up), dtype=torch.int32)
    offsets = counts.scatter_add_(0, flat, ones).cumsum(0, dtype=torch.int32)

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = product(rows, weight if transposed else weight.mT, offs=offsets)
        return out if bias is None else out.add_(bias[flat])

    rows = inner(linear(x[order // ids.shape[-1]], gate_up, gate_up_bias), interleaved, activation)
    slots = linear(rows, down, down_bias)
    slots = torch.empty_like(slots).index_copy_(0, order, slots)
    return (slots.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)


# ------------------------------------------------------------------------------------------------ combine and norm


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": lambda slots, weights: torch.bmm(weights.unsqueeze(-2), slots).squeeze(-2),
    "einsum": lambda slots, weights: torch.einsum("tkh,tk->th", slots, weights),
    "mul, sum": lambda slots, weights: (slots * weights.unsqueeze(-1)).sum(-2),
}


def then(steps: str, finish: Callable[..., object]) -> Ways:
    """All ways to compute the weighted sum, each followed by `finish`."""
    return {
        f"{name}, {steps}": lambda slots, weights, way=way, **rest: finish(way(slots, weights), **rest)
        for name, way in SUMS.items()
    }


def baddbmm(slots, weights, residual) -> Tensor:
    return torch.baddbmm(residual.unsqueeze(-2), weights.unsqueeze(-2), slots).squeeze(-2)


def add_norm(residual, input, weight) -> tuple[Tensor, Tensor]:
    total = residual + input
    return norm(total, weight), total


# ------------------------------------------------------------------------------------------------ rope and attention


def normed_heads(x: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None or weight.dim() == 1:
        return x if weight is None else norm(x, weight)
    return norm(x.flatten(-2), weight.flatten()).view(x.shape)


def heads_of(q, k, q_norm_weight, k_norm_weight, interleaved: bool, R: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For queries and for keys: the elements that are rotated, [B, A, T, 2R], and the others."""
    for x, weight in ((q, q_norm_weight), (k, k_norm_weight)):
        heads = normed_heads(x, weight).transpose(1, 2)
        rotated = heads[..., : 2 * R]
        yield rotated.unflatten(-1, (-1, 2)).mT.flatten(-2) if interleaved else rotated, heads[..., 2 * R :]


def joined(turned: Tensor, rest: Tensor) -> Tensor:
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned.contiguous()


def rotate_half(
    q, k, cos, sin, q_norm_weight=None, k_norm_weight=None, *, interleaved=False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As in transformers, with each angle twice. transformers repeats the angles once for all layers, one op less."""
    cos, sin = (torch.cat([x, x], -1).unsqueeze(1) for x in (cos, sin))
    found = []
    for x, rest in heads_of(q, k, q_norm_weight, k_norm_weight, interleaved, cos.shape[-1] // 2):
        a, b = x.chunk(2, -1)
        found.append(joined((x * cos).add_(torch.cat([-b, a], -1).mul_(sin)), rest))
    return found[0], found[1]


def by_halves(
    q, k, cos, sin, q_norm_weight=None, k_norm_weight=None, *, interleaved=False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    R, cos, sin, found = cos.shape[-1], cos.unsqueeze(1), sin.unsqueeze(1), []
    for x, rest in heads_of(q, k, q_norm_weight, k_norm_weight, interleaved, R):
        a, b = x.chunk(2, -1)
        found.append(torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1))
    return found[0], found[1]


def later_keys(T: int, S: int, device: torch.device) -> Tensor:
    """[T, S]: True for the keys that come after a query."""
    return torch.ones(T, S, dtype=torch.bool, device=device).triu(S - T + 1)


def sdpa(q, k, v, *, causal) -> Tensor:
    """PyTorch's own. It does not support sinks, and with is_causal its first query belongs to the first key."""
    T, S = q.shape[2], k.shape[2]
    mask = None if T == 1 or T == S else ~later_keys(T, S, q.device)
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=T == S and T > 1, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def eager(q, k, v, sinks=None, *, causal) -> Tensor:
    """As in transformers, with all scores in memory."""
    (B, A, T, D), S = q.shape, k.shape[2]
    if B * A * T * S > MAX_SCORES:
        raise MemoryError(f"eager attention would need memory for {B * A * T * S:.0e} scores")
    k, v = (x.repeat_interleave(A // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT).mul_(D**-0.5)
    if T > 1:
        scores.masked_fill_(later_keys(T, S, q.device), -INF)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, A, 1, 1).expand(B, A, T, 1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)[..., :S]
    return (weights @ v).transpose(1, 2).contiguous()


# ------------------------------------------------------------------------------------------------ the table

BASELINES: dict[str, Ways] = {
    "gate": {"linear, scores, topk": gate},
    "route": {"scores, topk": route, "topk, softmax": route_from_the_best},
    "glu": {"act, mul_": glu, "act, mul": glu_anew},
    "experts": {"eager": expert_by_expert, "batched_mm": batched_mm, "grouped_mm": grouped_mm},
    "linear": {"linear": product},
    "dequantize": {"copy": copy},
    "weighted_sum": then("add_", lambda x, residual: x.add_(residual)) | {"baddbmm": baddbmm},
    "weighted_sum_residual_": then("add_", lambda x, residual: residual.add_(x)),
    "weighted_sum_residual_norm_": then(
        "add_, rms_norm", lambda x, residual, norm_weight: norm(residual.add_(x), norm_weight)
    ),
    "weighted_sum_norm_add": then(
        "rms_norm, add_", lambda x, residual, norm_weight: norm(x, norm_weight).add_(residual)
    ),
    "weighted_sum_dual_norm_add": then(
        "2 rms_norm, add_",
        lambda x, residual, residual_norm_weight, moe_norm_weight: norm(x, moe_norm_weight).add_(
            norm(residual, residual_norm_weight)
        ),
    ),
    "norm": {"rms_norm": lambda input, weight: norm(input, weight)},
    "norm_add": {"rms_norm, add_": lambda residual, input, weight: norm(input, weight).add_(residual)},
    "residual_norm": {"add, rms_norm": add_norm},
    "rope": {"rotate_half": rotate_half, "halves": by_halves},
    "attention": {"sdpa": sdpa, "eager": eager},
    "linear_attention_": {"transformers": linear_attention.layer},
    "short_conv_": {"mul, conv1d, mul": linear_attention.short_conv},
}
MAX_SCORES = 1 << 28
MAX_COPIED = 1 << 30  # the most bytes of weights that batched_mm may copy for more than one token


def too_large(name: str, T: int, K: int, expert_bytes: int) -> bool:
    """Whether to leave out batched_mm, which copies the experts' weights for every token."""
    return name.endswith("batched_mm") and T > 1 and T * K * expert_bytes > MAX_COPIED


def baselines(op: str, options: dict, arguments: Container[str]) -> Ways:
    """The baselines of `op` that support these options and arguments (by name), bound to the options."""
    ways = dict(BASELINES.get(op, {}))
    if op == "experts":
        options = {name: value for name, value in options.items() if name != "format"}  # the baselines are dense
    if op == "route" and set(options) != {"top_k"}:
        del ways["topk, softmax"]
    if op == "glu" and ("limit" in options or options.get("activation", "silu") not in ACTIVATIONS):
        del ways["act, mul"]
    if op == "linear_attention_":
        if not has_transformers():
            return {}
        linear_attention.models()  # imports them, which takes longer than a call
    if op == "attention" and "sinks" in arguments:
        del ways["sdpa"]
    return {name: partial(way, **options) for name, way in ways.items()}
