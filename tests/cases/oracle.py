"""The right answer: the reference's result in float64, and whether a router's choice is clear."""

from collections.abc import Callable
from itertools import product
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_moe_metal import arguments, reference

Args = dict[str, Tensor]


def call(function: Callable, op: str, args: Args, options: dict) -> list[Tensor]:
    """Call an op or its reference. Returns its outputs, then what it wrote in-place."""
    return arguments.results(op, function(**args, **options), args)


def expected(op: str, args: Args, options: dict, hostile: bool = False) -> list[Tensor]:
    """The reference's result for arguments on the CPU, in float64, or in float32 for hostile values."""
    large = (
        op == "experts"
        and not hostile
        and max(args["ids"].numel(), len(args["gate_up"])) * args["gate_up"][0].numel() > 2**18
    )
    parts = {"experts": experts_one_by_one, "attention": attention_by_parts}
    function = parts[op] if large or op == "attention" else getattr(reference, op)
    as_they_are = ("gate_up", "down") if large else ()
    exact = {
        name: tensor.double() if is_number(tensor) and name not in as_they_are else tensor
        for name, tensor in args.items()
    }
    return call(function, op, {name: tensor.clone() for name, tensor in args.items()} if hostile else exact, options)


def is_number(tensor: Tensor) -> bool:
    """Whether it has plain values: no ids, and not packed (float8_e4m3fn is packed)."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def experts_one_by_one(
    x, weights, ids, gate_up, down, gate_up_bias=None, down_bias=None, shared=None, shared_gate=None, residual=None,
    gate_up_scale=None, gate_up_offset=None, down_scale=None, down_offset=None,
    *, interleaved=False, transposed=False, format="dense", down_format=None, group_size=0, **activation,
):  # fmt: skip
    """The reference's `experts` without copies of the weights for every token, so that real sizes fit into memory."""

    def linear(format: str, x: Tensor, bias: Tensor | None, weight: Tensor, *others: Tensor | None) -> Tensor:
        of_expert = (None if t is None else t[e] for t in (weight.mT if transposed else weight, *others))
        return F.linear(
            x, reference.dequantize_for(*of_expert, format, x, group_size), None if bias is None else bias[e]
        )

    slots = x.new_zeros(*ids.shape, x.shape[-1])
    for e in ids.unique().tolist():
        if not 0 <= e < gate_up.shape[0]:
            continue
        *token, slot = (ids == e).nonzero(as_tuple=True)
        both = linear(format, x[tuple(token)], gate_up_bias, gate_up, gate_up_scale, gate_up_offset)
        gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
        inner = reference.glu(gate, up, **activation)
        slots[(*token, slot)] = linear(down_format or format, inner, down_bias, down, down_scale, down_offset)
    used = (ids >= 0) & (ids < gate_up.shape[0])
    return reference.rounded(reference.weighted_sum(slots, weights.where(used, 0), shared, shared_gate, residual), x)


def attention_by_parts(q, k, v, mask=None, sinks=None, *, causal=False, **options):
    """The reference's `attention` for one head and some queries at a time, so that real sizes fit into memory."""
    (B, A, T, _), (_, J, S, V) = q.shape, v.shape
    output, queries = q.new_empty(B, T, A, V), max(1, 2**22 // max(1, S * V))
    for b, a, t in product(range(B), range(A), range(0, T, queries)):
        end, j = min(t + queries, T), a * J // A
        keys = max(0, S - T + end) if causal else S  # keys that the last of these queries sees
        kv = (x[b : b + 1, j : j + 1, :keys] for x in (k, v))
        seen = None if mask is None else mask.expand(B, A, T, S)[b : b + 1, a : a + 1, t:end, :keys]
        sink = None if sinks is None else sinks[a : a + 1]
        part = reference.attention(q[b : b + 1, a : a + 1, t:end], *kv, seen, sink, causal=causal, **options)
        output[b, t:end, a] = part[0, :, 0]
    return output


def clear_choice(op: str, args: Args, options: dict) -> Tensor:
    """[T] whether rounding in float32 cannot change the selected experts or their order. Exact ties count as clear."""
    get = {name: tensor.double() for name, tensor in args.items()}.get
    hidden, logits, H = get("hidden"), get("logits"), 1
    if op == "gate":
        if get("norm_weight") is not None:
            hidden = reference.normed(hidden, options.get("eps", 1e-6)) * get("norm_weight")
        logits, H = F.linear(hidden, get("router_weight"), get("router_bias")), hidden.shape[-1]
    elif get("select_bias") is None and options.get("n_group", 1) == 1:
        return torch.ones(logits.shape[0], dtype=torch.bool)
    cap = options.get("softcap", 0.0)
    scores = reference.SCORING[options.get("scoring", "softmax")](cap * torch.tanh(logits / cap) if cap else logits)
    biased = scores if get("select_bias") is None else scores + get("select_bias")
    choice, clear = (logits if get("select_bias") is None else biased), True
    margin = 2e-6 * max(1.0, H / 64) ** 0.5
    if options.get("n_group", 1) > 1:
        n_group, topk_group, group_score = (
            options["n_group"],
            options["topk_group"],
            options.get("group_score", "top2_sum"),
        )
        groups = biased.unflatten(-1, (n_group, -1)).sort(-1, descending=True).values
        totals = groups[..., : 2 if group_score == "top2_sum" else 1].sum(-1)
        clear = far_apart(totals.sort(-1, descending=True).values[:, topk_group - 1 : topk_group + 1], margin)
        choice = choice.masked_fill(reference.outside_best_groups(biased, n_group, topk_group, group_score), -inf)
    return clear & far_apart(choice.sort(-1, descending=True).values[:, : options["top_k"] + 1], margin)


def far_apart(descending: Tensor, margin: float) -> Tensor:
    gaps = descending[:, :-1] - descending[:, 1:]
    scale = descending.nan_to_num(neginf=0.0).abs().amax(-1, keepdim=True)
    return ((gaps > margin * scale) | (gaps == 0) | gaps.isnan()).all(-1)
