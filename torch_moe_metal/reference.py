"""The specification: every op in a few lines of plain PyTorch. Read from top to bottom it is the MoE layer, followed by
rope and attention. The layers that keep a state instead of keys and values are in recurrence.py.

Each function is the definition of an op, the oracle of the tests (with float64 tensors it computes in float64), the
fake function for torch.compile, and the text that `help` shows. arguments.py lists the letters of shapes; T may be any
leading dimensions. Sums are kept in float32 or wider and rounded once, at the end.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import ggml
from .formats import FORMATS, Format
from .recurrence import linear_attention_, short_conv_
from .rounding import as_float, normed, rounded

__all__ = [  # noqa: RUF022  the ops, in the order of this file
    "gate",
    "route",
    "glu",
    "experts",
    "linear",
    "dequantize",
    "weighted_sum",
    "weighted_sum_residual_",
    "weighted_sum_residual_norm_",
    "weighted_sum_norm_add",
    "weighted_sum_dual_norm_add",
    "norm",
    "norm_add",
    "residual_norm",
    "rope",
    "attention",
    "linear_attention_",
    "short_conv_",
]

INF = float("inf")


#: The allowed relative L2 error of a result compared with float64.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def tolerance(dtype: torch.dtype, longest_sum: int = 1) -> float:
    """The tolerance of a dtype: one rounding in 16 bits; in float32 it depends on the number of terms of the longest
    sum."""
    return TOLERANCES[dtype] if dtype.itemsize == 2 else TOLERANCES[torch.float32] * max(1.0, longest_sum / 1024) ** 0.5


# ------------------------------------------------------------------------------------------------ router

SCORING = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda logits: F.softplus(logits).sqrt(),
}


def best(choice: Tensor, k: int, excluded: Tensor | None = None) -> Tensor:
    """Ids of the k best, best first. Ties go to the lowest id, NaN ranks below -inf, and excluded experts below NaN."""
    order = choice.nan_to_num(nan=-INF, posinf=INF, neginf=-INF).argsort(dim=-1, descending=True, stable=True)
    last = choice.isnan().int() if excluded is None else choice.isnan().int() + 2 * excluded.int()
    return order.gather(-1, last.gather(-1, order).argsort(dim=-1, stable=True))[..., :k]


def outside_best_groups(choice: Tensor, n_group: int, topk_group: int, group_score: str) -> Tensor:
    """True for the experts outside of the `topk_group` best of `n_group` equal groups of neighbours."""
    groups = choice.unflatten(-1, (n_group, -1))
    top = groups.gather(-1, best(groups, min(2 if group_score == "top2_sum" else 1, groups.shape[-1])))
    kept = best(top.sum(-1), topk_group)
    outside = torch.ones_like(top[..., 0], dtype=torch.bool).scatter(-1, kept, False)
    return outside.unsqueeze(-1).expand_as(groups).flatten(-2)


def route(
    logits: Tensor,  # [T, E]
    select_bias: Tensor | None = None,  # [E]
    per_expert_scale: Tensor | None = None,  # [E]
    *,
    top_k: int,
    scoring: str = "softmax",
    renormalize: str = "before_scale",
    n_group: int = 1,
    topk_group: int = 1,
    group_score: str = "top2_sum",
    scaling_factor: float = 1.0,
    softcap: float = 0.0,
    sum_eps: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    """Each token's K best experts, best first, and their weights. -> weights float32 [T, K], ids int32 [T, K]

    - The ids of a token are distinct and in [0, E). Ties go to the lowest id, and NaN ranks below -inf.
    - scoring: softmax, sigmoid or sqrt_softplus.
    - renormalize: none, before_scale (the selected scores are divided by their sum, then multiplied by
      per_expert_scale) or after_scale (the other order). sum_eps is added to the sum. scaling_factor multiplies last.
    - n_group, topk_group, group_score (top2_sum or max): experts are selected only from the topk_group best of n_group
      groups.
    - softcap, if not 0, replaces the logits by softcap * tanh(logits / softcap).

    `select_bias` affects only the selection, never the weights. Without it experts are selected by their logits. All
    scorings increase with the logit, so the order is the same, but large logits do not become ties by saturation.
    """
    logits = as_float(logits)
    scores = SCORING[scoring](softcap * torch.tanh(logits / softcap) if softcap else logits)
    biased = scores if select_bias is None else scores + as_float(select_bias)
    excluded = None if n_group == 1 else outside_best_groups(biased, n_group, topk_group, group_score)
    ids = best(logits if select_bias is None else biased, top_k, excluded)
    weights = scores.gather(-1, ids)
    scale = 1.0 if per_expert_scale is None else as_float(per_expert_scale)[ids]
    if renormalize == "after_scale":
        weights, scale = weights * scale, 1.0
    if renormalize != "none":
        weights = weights / (weights.sum(-1, keepdim=True) + sum_eps)
    return (weights * scale * scaling_factor).float(), ids.int()


def gate(
    hidden: Tensor,  # [T, H]
    router_weight: Tensor,  # [E, H]
    norm_weight: Tensor | None = None,  # [H]
    router_bias: Tensor | None = None,  # [E]
    select_bias: Tensor | None = None,  # [E]
    per_expert_scale: Tensor | None = None,  # [E]
    *,
    top_k: int,
    scoring: str = "softmax",
    renormalize: str = "before_scale",
    n_group: int = 1,
    topk_group: int = 1,
    group_score: str = "top2_sum",
    scaling_factor: float = 1.0,
    softcap: float = 0.0,
    sum_eps: float = 1e-20,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The whole router: `route(norm(hidden) @ router_weight.T + router_bias)`; no norm without `norm_weight`.

    -> weights float32 [T, K], ids int32 [T, K]. Its options are those of `route`, and the norm's eps.
    """
    hidden = as_float(hidden) if norm_weight is None else normed(hidden, eps) * as_float(norm_weight)
    bias = None if router_bias is None else as_float(router_bias)
    return route(
        F.linear(hidden, as_float(router_weight), bias),
        select_bias,
        per_expert_scale,
        top_k=top_k,
        scoring=scoring,
        renormalize=renormalize,
        n_group=n_group,
        topk_group=topk_group,
        group_score=group_score,
        scaling_factor=scaling_factor,
        softcap=softcap,
        sum_eps=sum_eps,
    )


# ------------------------------------------------------------------------------------------------ weights

#: The values of 4 bits in mxfp4 and nvfp4.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def unpack(data: Tensor, bits: int) -> Tensor:
    """Unpack rows of bytes into integers of `bits` bits. A row is a bit stream that begins with the lowest bit of the
    first byte."""
    shifts = torch.arange(8, device=data.device, dtype=torch.uint8)
    stream = (data.unsqueeze(-1) >> shifts & 1).flatten(-2)
    return (stream.unflatten(-1, (-1, bits)) << shifts[:bits]).sum(-1, dtype=torch.uint8)


def dequantize(
    weight: Tensor,  # [..., N, C], or packed
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    format: str,
    bits: int = 4,
    dtype: torch.dtype,
) -> Tensor:
    """The values of a weight. -> [..., N, C]

    - dense: weight itself.
    - affine: scale * q + offset. weight is int32 (or uint32, or its bytes as uint8) [..., N, C * bits / 32] with q of
      `bits` 2, 3, 4, 5, 6 or 8. scale and offset are [..., N, C / group] for groups of 16, 32, 64 or 128 columns (MLX).
    - mxfp4: 2^(scale - 127) * e2m1. weight is uint8 [..., N, C / 2] or [..., N, C / 32, 16], the lower half of a byte
      first. scale is uint8 [..., N, C / 32], where 255 is NaN (gpt-oss).
    - fp8: scale * e4m3. weight is float8_e4m3fn, or uint8, [..., N, C]. scale is [..., N / 128, C / 128], rounded up.
    - mxfp8: 2^(scale - 127) * e4m3. weight is as in fp8, and scale as in mxfp4 (MLX).
    - nvfp4: offset * e4m3 * e2m1. weight is uint8 [..., N, C / 2]. scale is e4m3 [..., N, C / 16], as float8_e4m3fn or
      uint8. The optional offset is a factor: float32 [..., 1], one per matrix (MLX has none, compressed-tensors has).
    - GGML's q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs and ggml_mxfp4: weight is uint8
      [..., N, bytes of the row], as in a GGUF file. The blocks contain the scales (ggml.py).
    """
    if format == "dense":
        return weight.to(dtype, copy=True, memory_format=torch.contiguous_format)
    row, wide, data = FORMATS[format], torch.promote_types(dtype, torch.float32), weight.contiguous().view(torch.uint8)
    if row.has_own_scales:
        return ggml.dequantize(data, row, wide).to(dtype)
    factors = scales(scale, offset, row, wide)
    if row.scale_rows > 1:
        codes = data.view(torch.float8_e4m3fn).to(wide)
        squares = factors.repeat_interleave(row.scale_rows, -2).repeat_interleave(row.scale_columns, -1)
        return (codes * squares[..., : codes.shape[-2], : codes.shape[-1]]).to(dtype)
    if row.is_affine:
        codes = unpack(data, bits).to(wide)
    elif row.bits == 4:
        data = data.flatten(-2) if weight.dim() > scale.dim() else data
        codes = torch.tensor(E2M1, device=weight.device, dtype=wide)[unpack(data, 4).int()]
    else:
        codes = data.view(torch.float8_e4m3fn).to(wide)
    groups = (scale.shape[-1], -1) if row.is_affine else (-1, row.scale_columns)
    values = codes.unflatten(-1, groups) * factors.unsqueeze(-1)
    return (values + offset.unsqueeze(-1) if row.is_affine else values).flatten(-2).to(dtype)


def scales(scale: Tensor, offset: Tensor | None, format: Format, dtype: torch.dtype) -> Tensor:
    """The factors by which `dequantize` multiplies."""
    if format.scale == "e8m0":
        return ggml.power_of_two(scale, 127).masked_fill(scale == 255, float("nan"))
    if format.scale == "e4m3":
        values = scale.view(torch.float8_e4m3fn).to(dtype)
        return values if offset is None else offset.unsqueeze(-1) * values
    return scale


def dequantize_for(
    weight: Tensor, scale: Tensor | None, offset: Tensor | None, format: str, x: Tensor, group_size: int = 0
) -> Tensor:
    """`dequantize` in the dtype of x's sums. The number of columns is that of x, or follows from `group_size`."""
    bits = bits_of(weight, scale, format, x.shape[-1], group_size)
    return dequantize(weight, scale, offset, format=format, bits=bits, dtype=as_float(x).dtype)


def bits_of(weight: Tensor, scale: Tensor | None, format: str, columns: int, group_size: int = 0) -> int:
    """The bits of an affine weight, which follow from the shapes and the group size, or without one from the
    columns."""
    if format == "dense" or not FORMATS[format].is_affine:
        return 4
    columns = scale.shape[-1] * group_size or columns
    return 8 * weight.element_size() * weight.shape[-1] // columns


def linear(
    x: Tensor,  # [..., H]
    weight: Tensor,  # [N, H], or packed
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    bias: Tensor | None = None,  # [N]
    *,
    format: str = "dense",
    group_size: int = 0,
) -> Tensor:
    """x @ weight.T + bias, with a weight in any format of `dequantize`. -> [..., N]

    Bits and group size of an affine weight follow from x's columns. If `group_size` is given, an x with another number
    of columns than the weight raises.
    """
    matrix = dequantize_for(weight, scale, offset, format, x, group_size)
    return rounded(F.linear(as_float(x), matrix, None if bias is None else as_float(bias)), x)


# ------------------------------------------------------------------------------------------------ experts

ACTIVATIONS = {
    "silu": lambda gate, up, alpha: F.silu(gate) * up,
    "gelu": lambda gate, up, alpha: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up, alpha: F.gelu(gate, approximate="tanh") * up,
    "relu2": lambda gate, up, alpha: F.relu(gate).square() * up,
    "swiglu_oai": lambda gate, up, alpha: gate * torch.sigmoid(alpha * gate) * (up + 1),
    "sigmoid": lambda gate, up, alpha: torch.sigmoid(gate) * up,
}


def glu(
    gate: Tensor,  # [..., I]
    up: Tensor,  # [..., I]
    *,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float | None = None,
) -> Tensor:
    """act(gate) * up. activation: silu, gelu, gelu_tanh, relu2, swiglu_oai or sigmoid; `alpha` is an option of
    swiglu_oai.

    `limit` clamps gate from above and up on both sides.
    """
    g, u = as_float(gate), as_float(up)
    if limit is not None and limit <= torch.finfo(torch.float32).max:  # larger limits mean none, as in the ops
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return rounded(ACTIVATIONS[activation](g, u, alpha), gate)


def experts(
    x: Tensor,  # [T, H]
    weights: Tensor,  # [T, K]
    ids: Tensor,  # [T, K], of experts
    gate_up: Tensor,  # [E, 2I, H], [E, H, 2I] when transposed, or [E, 2, I, H]
    down: Tensor,  # [E, H, I], or [E, I, H] when transposed
    gate_up_bias: Tensor | None = None,  # [E, 2I]
    down_bias: Tensor | None = None,  # [E, H]
    shared: Tensor | None = None,  # [T, H]
    shared_gate: Tensor | None = None,  # [T], a logit
    residual: Tensor | None = None,  # [T, H]
    gate_up_scale: Tensor | None = None,
    gate_up_offset: Tensor | None = None,
    down_scale: Tensor | None = None,
    down_offset: Tensor | None = None,
    *,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float | None = None,
    interleaved: bool = False,
    transposed: bool = False,
    format: str = "dense",
    down_format: str | None = None,
    group_size: int = 0,
) -> Tensor:
    """The FFN of each token's K experts, and their weighted sum. -> [T, H]

    - The ids of a token may repeat. An id outside [0, E) is skipped: nothing is read or added for it, whatever its
      weight is. So a device can hold only some of the experts.
    - activation, alpha and limit are those of `glu`. `shared` and `residual` are added as in `weighted_sum`.
    - The 2I rows of gate_up hold the gate's I rows first, or gate and up alternately if `interleaved`.
    - With a `format` other than dense, gate_up and down are packed and have scales and offsets as described by
      `dequantize`. `group_size` is that of both weights, as in `linear`. `down_format` is the format of down if it
      differs.
    - A gate_up with four dimensions [E, 2, I, ...] has separate gate and up, for example views of a file, in formats
      without scale tensors. Then `interleaved` only concerns gate_up_bias.
    """
    gate_up = joined(gate_up, gate_up_scale, interleaved)
    used = (ids >= 0) & (ids < gate_up.shape[0])
    chosen = ids.long().where(used, 0)
    first, second = (
        [None if t is None else t[chosen] for t in (w.mT if transposed else w, scale, offset)]
        for w, scale, offset in ((gate_up, gate_up_scale, gate_up_offset), (down, down_scale, down_offset))
    )
    both = torch.einsum("...kih,...h->...ki", dequantize_for(*first, format, x, group_size), as_float(x))
    if gate_up_bias is not None:
        both = both + as_float(gate_up_bias)[chosen]
    gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
    inner = glu(gate, up, activation=activation, alpha=alpha, limit=limit)
    second_dense = dequantize_for(*second, down_format or format, inner, group_size)
    slots = torch.einsum("...khi,...ki->...kh", second_dense, inner)
    if down_bias is not None:
        slots = slots + as_float(down_bias)[chosen]
    slots, weights = slots.where(used.unsqueeze(-1), 0), as_float(weights).where(used, 0)
    return rounded(weighted_sum(slots, weights, shared, shared_gate, residual), x)


def joined(gate_up: Tensor, scale: Tensor | None, interleaved: bool) -> Tensor:
    """A gate_up with separate gate and up, [E, 2, I, ...], as [E, 2I, ...]; any other weight unchanged."""
    if gate_up.dim() != 4 or scale is not None:
        return gate_up
    return (gate_up.transpose(1, 2) if interleaved else gate_up).flatten(1, 2)


# ------------------------------------------------------------------------------------------------ combine and norm


def weighted_sum(
    slots: Tensor,  # [T, K, H]
    weights: Tensor,  # [T, K]
    shared: Tensor | None = None,  # [T, H]
    shared_gate: Tensor | None = None,  # [T], a logit
    residual: Tensor | None = None,  # [T, H]
) -> Tensor:
    """sum_k weights * slots + sigmoid(shared_gate) * shared + residual. Without shared_gate, shared is added
    unscaled."""
    total = (as_float(slots) * as_float(weights).unsqueeze(-1)).sum(-2)
    if shared is not None:
        factor = 1.0 if shared_gate is None else as_float(shared_gate).sigmoid().unsqueeze(-1)
        total = total + factor * as_float(shared)
    if residual is not None:
        total = total + as_float(residual)
    return rounded(total, slots)


def weighted_sum_residual_(residual: Tensor, slots: Tensor, weights: Tensor) -> None:
    """residual += sum_k weights * slots"""
    residual.copy_(weighted_sum(as_float(slots), weights, residual=residual))


def weighted_sum_residual_norm_(
    residual: Tensor, slots: Tensor, weights: Tensor, norm_weight: Tensor, *, eps: float = 1e-6
) -> Tensor:
    """residual += sum_k weights * slots; returns norm(residual) * norm_weight.

    The tail of one layer with the head of the next. The norm sees the sum before it is rounded to the residual's dtype.
    """
    total = weighted_sum(as_float(slots), weights, residual=residual)
    residual.copy_(total)
    return rounded(normed(total, eps) * as_float(norm_weight), residual)


def weighted_sum_norm_add(
    slots: Tensor, weights: Tensor, residual: Tensor, norm_weight: Tensor, *, eps: float = 1e-6
) -> Tensor:
    """residual + norm(sum_k weights * slots) * norm_weight"""
    moe = normed(weighted_sum(as_float(slots), weights), eps) * as_float(norm_weight)
    return rounded(as_float(residual) + moe, slots)


def weighted_sum_dual_norm_add(
    slots: Tensor,
    weights: Tensor,
    residual: Tensor,
    residual_norm_weight: Tensor,
    moe_norm_weight: Tensor,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """norm(residual) * residual_norm_weight + norm(sum_k weights * slots) * moe_norm_weight (Gemma 4)"""
    moe = normed(weighted_sum(as_float(slots), weights), eps) * as_float(moe_norm_weight)
    return rounded(normed(residual, eps) * as_float(residual_norm_weight) + moe, slots)


def norm(
    input: Tensor,  # [T, H]
    weight: Tensor | None = None,  # [H]
    *,
    eps: float = 1e-6,
) -> Tensor:
    """norm(input) * weight, with norm(x) = x * rsqrt(mean(x^2) + eps) over the last dimension (RMSNorm)"""
    output = normed(input, eps)
    return rounded(output if weight is None else output * as_float(weight), input)


def norm_add(
    residual: Tensor,  # [T, H]
    input: Tensor,  # [T, H]
    weight: Tensor,  # [H]
    scalar: Tensor | None = None,  # [1] or [H]
    *,
    eps: float = 1e-6,
) -> Tensor:
    """(residual + norm(input) * weight) * scalar (Gemma 4's layer end)"""
    total = as_float(residual) + normed(input, eps) * as_float(weight)
    return rounded(total if scalar is None else total * as_float(scalar), residual)


def residual_norm(
    residual: Tensor,  # [T, H]
    input: Tensor,  # [T, H]
    weight: Tensor,  # [H]
    scalar: Tensor | None = None,  # [1] or [H]
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """s = residual + input -> (norm(s) * weight * scalar, s). The norm sees s before it is rounded."""
    total = as_float(residual) + as_float(input)
    output = normed(total, eps) * as_float(weight)
    return rounded(output if scalar is None else output * as_float(scalar), residual), rounded(total, residual)


# ------------------------------------------------------------------------------------------------ rope and attention


def rope(
    q: Tensor,  # [B, T, A, D]
    k: Tensor,  # [B, T, J, D]
    cos: Tensor,  # [B or 1, T, R]
    sin: Tensor,  # [B or 1, T, R]
    q_norm_weight: Tensor | None = None,  # [D] or [A, D]
    k_norm_weight: Tensor | None = None,  # [D] or [J, D]
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalise queries and keys, and rotate them by R angles, in the layout of `attention`. -> [B, A, T, D], [B, J, T,
    D]

    B sequences, T tokens, A query heads, J key heads.

    - cos and sin have R columns, not 2R. Their first size is B or 1.
    - The first 2R elements of a head are R pairs (a, b), which become (a cos - b sin, b cos + a sin). The others do not
      change.
    - Pair i consists of elements i and i + R. With `interleaved` it is read from 2i and 2i + 1, and written to i and
      i + R.
    - Queries and keys with a norm weight are normalised before, as in `norm`: each head with a weight [D], all heads of
      a token together with [A, D] or [J, D].
    """
    return (
        rounded(rotated(q, cos, sin, q_norm_weight, eps, interleaved).transpose(1, 2), q),
        rounded(rotated(k, cos, sin, k_norm_weight, eps, interleaved).transpose(1, 2), k),
    )


def rotated(heads: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, interleaved: bool) -> Tensor:
    """`rope` of queries or of keys, in their own layout."""
    x, cos, sin, R = as_float(heads), as_float(cos).unsqueeze(2), as_float(sin).unsqueeze(2), cos.shape[-1]
    if weight is not None:
        x = (normed(x, eps) if weight.dim() == 1 else normed(x.flatten(-2), eps).view(x.shape)) * as_float(weight)
    a, b = (x[..., : 2 * R : 2], x[..., 1 : 2 * R : 2]) if interleaved else (x[..., :R], x[..., R : 2 * R])
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * R :]], -1)


def attention(
    q: Tensor,  # [B, A, T, D]
    k: Tensor,  # [B, J, S, D]
    v: Tensor,  # [B, J, S, V]
    mask: Tensor | None = None,  # [B or 1, A or 1, T, S]
    sinks: Tensor | None = None,  # [A], logits
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """softmax(softcap * tanh(scale * q @ k.T / softcap) + mask) @ v over the visible keys. -> [B, T, A, V]

    B sequences, A query heads, J key heads, T queries, S keys. Query head a uses key head a // (A / J).

    - The default of `scale` is D^-0.5. A `softcap` of 0 is none.
    - `mask` is bool, where True is visible, or is added.
    - With `causal`, query t sees keys up to S - T + t, so the last query sees all.
    - `window`, if not 0, needs `causal`. It is the maximum number of keys that a query sees, including its own, which
      is the last.
    - `sinks` are one more logit for each head, without a value.
    - A key that is masked, or whose score is -inf, is not visible: it adds nothing, even if it contains NaN. A query
      that sees no key returns 0.
    """
    A, T, S = q.shape[1], q.shape[2], k.shape[2]
    keys, values = (as_float(x).repeat_interleave(A // k.shape[1], 1) for x in (k, v))
    scores = as_float(q) @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    if mask is not None:
        scores = scores.where(mask, -INF) if mask.dtype == torch.bool else (scores + mask).where(mask != -INF, -INF)
    key, last = torch.arange(S, device=q.device), torch.arange(S - T, S, device=q.device).unsqueeze(-1)
    if causal:
        scores = scores.where(key <= last, -INF)
    if window:
        scores = scores.where(key > last - window, -INF)
    nothing = scores[..., :0] if sinks is None else as_float(sinks).view(A, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, nothing], -1).softmax(-1)[..., :S].unsqueeze(-1)
    total = (weights * values.unsqueeze(2)).where(scores.unsqueeze(-1) != -INF, 0).sum(-2)
    return rounded(total.transpose(1, 2), q)
