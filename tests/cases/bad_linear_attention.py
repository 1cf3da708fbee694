"""Calls of `linear_attention_` and `short_conv_` that they must refuse, with the messages of their errors."""

from math import inf, nan

import torch
from torch import Tensor

from cases.bad import bad, cut, extra_dim, first_token

LINEAR, PACKED, SHORT = "linear_attention_", "linear_attention_ offsets", "short_conv_"
POINTWISE = "expected one of none, silu, sigmoid; got "


def shares(name: str) -> str:
    return (
        f"{name}: expected a tensor whose elements have memory of their own, got one in which some share theirs; pass "
        f"{name}.clone()"
    )


def no_heads(tensor: Tensor) -> Tensor:
    return tensor[:, :, :0]


def by_group(tensor: Tensor) -> Tensor:
    """A dimension for each of A's factors."""
    return tensor.unflatten(2, (2, 3))


def of_one_element(tensor: Tensor) -> Tensor:
    return tensor[:1, :1, :1].expand(tensor.shape)


def grown(rows: int):
    """With so many rows in the second dimension."""
    return lambda tensor: tensor[:, :1].repeat(1, rows, *[1] * (tensor.dim() - 2))


HEADS = "B = 2, T = 6, J = 2"
# sample_odd: B 2, T 6, J 2, A 6, D 19, V 23, W 4, C 214, R 5, L 5, F 182, float32; all optional arguments but offsets.
BAD_LINEAR_ATTENTION = [
    bad(LINEAR, "q: expected float32, float16 or bfloat16, got float64", q=Tensor.double),
    bad(LINEAR, "q: expected shape [B, T, J, D], got [6, 2, 19]", q=lambda t: t[0]),
    bad(LINEAR, "q: expected J >= 1, got 0", q=no_heads, k=no_heads),
    bad(LINEAR, "q: expected 1 to 256 (its size of a head, D), got 0", q=lambda t: t[..., :0], k=lambda t: t[..., :0]),
    bad(LINEAR, "q: expected 1 to 256 (its size of a head, D), got 257", q=torch.zeros(2, 6, 2, 257)),
    bad(LINEAR, f"k: expected shape [B, T, J, D] with {HEADS}, D = 19, got [2, 6, 2, 18]", k=cut),
    bad(LINEAR, "k: expected float32, the dtype of q; got float16", k=Tensor.half),
    bad(LINEAR, "v: expected shape [B, T, A, V] with B = 2, T = 6, got [1, 6, 6, 23]", v=first_token),
    bad(LINEAR, "v: expected shape [B, T, A, V] with B = 2, T = 6, got [1, 2, 6, 2, 3, 23]",
        v=lambda t: by_group(t).unsqueeze(0)),
    bad(LINEAR, "v: expected shape [B, T, J, A/J, V] with B = 2, T = 6, J = 2, got [2, 6, 3, 2, 23]",
        v=lambda t: t.unflatten(2, (3, 2))),
    bad(LINEAR, "v: expected bfloat16, the dtype of q; got float32", q=Tensor.bfloat16, k=Tensor.bfloat16),
    bad(LINEAR, "v: expected A >= 1, got 0", v=no_heads),
    bad(LINEAR, "v: expected V >= 1, got 0", v=lambda t: t[..., :0]),
    bad(LINEAR, "v: expected A to be a multiple of J = 2, got 5", v=lambda t: t[:, :, :5]),
    bad(LINEAR, "rule: expected one of delta, sum; got 'max'", rule="max"),
    bad(LINEAR, "decay_kind: expected one of softplus, sigmoid; got 'exp'", decay_kind="exp"),
    bad(LINEAR, "decay_kind: expected 'softplus' where rule is 'sum', got 'sigmoid'", rule="sum", decay_kind="sigmoid"),
    bad(LINEAR, "lower_bound: expected a finite number, got -inf", lower_bound=-inf),
    bad(LINEAR, "lower_bound: expected a number <= 0, got 0.5", lower_bound=0.5),
    bad(LINEAR, "step_min: expected a finite number, got nan", step_min=nan),
    bad(LINEAR, "step_max: expected a finite number, got inf", step_max=inf),
    bad(LINEAR, "step_max: expected a number >= step_min = 2, got 1", step_min=2.0, step_max=1.0),
    bad(LINEAR, "beta_scale: expected a finite number, got 1e+39, which is inf as float32", beta_scale=1e39),
    bad(LINEAR, "scale: expected a finite number, got nan", scale=nan),
    bad(LINEAR, "qk_eps: expected a finite number >= 0, got -1", qk_eps=-1.0),
    bad(LINEAR, f"activation: {POINTWISE}'gelu'", activation="gelu"),
    bad(LINEAR, "order: expected one of qkv, vkq; got 'kqv'", order="kqv"),
    bad(LINEAR, f"gate_activation: {POINTWISE}''", gate_activation=""),
    bad(LINEAR, "eps: expected a finite number >= 0, got -0.001", eps=-0.001),
    bad(LINEAR, "decay: expected shape [B, T, A] with B = 2, T = 6, A = 6, got [2, 6, 5]", decay=cut),
    bad(LINEAR, "decay: expected shape [B, T, A, D] with B = 2, T = 6, A = 6, D = 19, got [1, 2, 6, 6]",
        decay=extra_dim),
    bad(LINEAR, "decay: expected shape [B, T, A] with B = 2, T = 6, A = 6, got [2, 6, 6, 19]", rule="sum", beta=None,
        decay=lambda t: t.unsqueeze(-1).expand(2, 6, 6, 19)),
    bad(LINEAR, "decay: expected shape [B, T, J, A/J] with B = 2, T = 6, J = 2, A/J = 3, got [2, 6, 6]", v=by_group),
    bad(LINEAR, "decay: expected float32, the dtype of q; got float16", decay=Tensor.half),
    bad(LINEAR, "beta: expected a tensor where rule is 'delta', got None", beta=None),
    bad(LINEAR, "beta: expected None where rule is 'sum', got a tensor", rule="sum"),
    bad(LINEAR, "beta: expected shape [B, T, A] with B = 2, T = 6, A = 6, got [2, 6, 5]", beta=cut),
    bad(LINEAR, "gate: expected shape [B, T, A, V] with B = 2, T = 6, A = 6, V = 23, got [2, 6, 6, 22]", gate=cut),
    bad(LINEAR, "gate: expected shape [B, T, J, A/J, V] with B = 2, T = 6, J = 2, A/J = 3, V = 23, got [2, 6, 6, 23]",
        v=by_group, decay=by_group, beta=by_group),
    bad(LINEAR, "log_rate: expected shape [A] with A = 6, got [5]", log_rate=cut),
    bad(LINEAR, "decay_bias: expected shape [A] with A = 6, got [6, 19]", decay_bias=torch.zeros(6, 19)),
    bad(LINEAR, "decay_bias: expected shape [A, D] with A = 6, D = 19, got [6]",
        decay=lambda t: t.unsqueeze(-1).expand(2, 6, 6, 19)),
    bad(LINEAR, "norm_weight: expected float32, the dtype of q; got bfloat16", norm_weight=Tensor.bfloat16),
    bad(LINEAR, "norm_weight: expected shape [V], or [N, A V / N] where N divides A, with A = 6, V = 23; got [22]",
        norm_weight=cut),
    bad(LINEAR, "norm_weight: expected shape [V], or [N, A V / N] where N divides A, with A = 6, V = 23; got [4, 23]",
        norm_weight=torch.ones(4, 23)),
    bad(LINEAR, "norm_weight: expected shape [V] where tiled is True, got [2, 69]", norm_weight=torch.ones(2, 69),
        tiled=True),
    bad(LINEAR, "skip: expected shape [A] with A = 6, got [5]", skip=cut),
    bad(LINEAR, "mask: expected bool, got float32", mask=Tensor.float),
    bad(LINEAR, "mask: expected shape [B, T] with B = 2, T = 6, got [2, 5]", mask=cut),
    bad(LINEAR, "offsets: expected None where B is not 1, got a tensor with B = 2", offsets=torch.tensor([0, 6])),
    bad(LINEAR, "conv_weight: expected shape [C, W] with C = 214, got [213, 4]", conv_weight=lambda t: t[1:]),
    bad(LINEAR, "conv_weight: expected W >= 1, got 0", conv_weight=lambda t: t[:, :0]),
    bad(LINEAR, "conv_bias: expected None where conv_weight is None, got a tensor", conv_weight=None),
    bad(LINEAR, "past: expected None where conv_weight is None, got a tensor", conv_weight=None, conv_bias=None),
    bad(LINEAR, "kept: expected None where conv_weight is None, got a tensor", conv_weight=None, conv_bias=None,
        past=None),
    bad(LINEAR, "conv_bias: expected shape [C] with C = 214, got [213]", conv_bias=cut),
    bad(LINEAR, "past: expected shape [B, P, C] with B = 2, P = 3, C = 214, got [2, 4, 214]", past=grown(4)),
    bad(LINEAR, "past: expected float32, the dtype of q; got float16", past=Tensor.half),
    bad(LINEAR, "kept: expected shape [B, R, C] with B = 2, R = 5, C = 214, got [2, 5, 213]", kept=cut),
    bad(LINEAR, "kept: expected at most 9 rows, R, got 10", kept=grown(10)),
    bad(LINEAR, "state: expected float32, got bfloat16", state=Tensor.bfloat16),
    bad(LINEAR, "state: expected shape [B, A, D, V] with B = 2, A = 6, D = 19, V = 23, got [2, 6, 23, 19]",
        state=lambda t: t.mT),
    bad(LINEAR, "replay: expected a number >= 0, got -1", replay=-1),
    bad(LINEAR, "replay: expected 0 where log is None, got 2", log=None, replay=2),
    bad(LINEAR, "log: expected None without a state or with offsets, got a tensor", state=None),
    bad(LINEAR, "log: expected float32, got float64", log=Tensor.double),
    bad(LINEAR, "log: expected shape [B, L, F] with B = 2, L = 5, F = 182, got [2, 5, 181]", log=cut),
    bad(LINEAR, "log: expected shape [B, L, F] with B = 2, L = 5, F = 290, got [2, 5, 182]", decay_bias=None,
        decay=lambda t: t.unsqueeze(-1).expand(2, 6, 6, 19)),
    bad(LINEAR, "log: expected 6 to 12 rows, from replay to replay + T; got 5", replay=6),
    bad(LINEAR, "log: expected 1 to 7 rows, from replay to replay + T; got 8", replay=1, log=grown(8)),
    bad(LINEAR, shares("state"), state=of_one_element),
    bad(LINEAR, shares("kept"), kept=lambda t: t[:1].expand(t.shape)),
    bad(LINEAR, shares("log"), log=lambda t: t[:, :1].expand(t.shape)),
    bad(PACKED, "offsets: expected int32 or int64, got float32", offsets=Tensor.float),
    bad(PACKED, "offsets: expected shape [N], got [1, 4]", offsets=extra_dim),
    bad(PACKED, "offsets: expected at least 2 elements, got 1", offsets=first_token),
    bad(PACKED, "state: expected shape [S, A, D, V] with S = 2, A = 4, D = 16, V = 24, got [3, 4, 16, 24]",
        offsets=cut, past=None, kept=None),
    bad(PACKED, "past: expected shape [S, P, C] with S = 2, P = 3, C = 160, got [3, 3, 160]", offsets=cut),
    bad(PACKED, "kept: expected shape [S, R, C] with S = 3, C = 160, got [1, 3, 160]", kept=first_token),
    bad(PACKED, "kept: expected at most 3 rows, R, got 4", kept=grown(4)),
    bad(PACKED, "log: expected None without a state or with offsets, got a tensor", log=torch.zeros(1, 3, 132)),
]  # fmt: skip

# sample_odd of short_conv_: B 2, T 6, W 4, C 214, R 5, float32.
BAD_LINEAR_ATTENTION += [
    bad(SHORT, "x: expected float32, float16 or bfloat16, got int32", x=Tensor.int),
    bad(SHORT, "x: expected shape [B, T, C], got [6, 214]", x=lambda t: t[0]),
    bad(SHORT, "weight: expected shape [C, W] with C = 214, got [213, 4]", weight=lambda t: t[1:]),
    bad(SHORT, "weight: expected float32, the dtype of x; got float16", weight=Tensor.half),
    bad(SHORT, "weight: expected W >= 1, got 0", weight=lambda t: t[:, :0]),
    bad(SHORT, "bias: expected shape [C] with C = 214, got [213]", bias=cut),
    bad(SHORT, "input_gate: expected shape [B, T, C] with B = 2, T = 6, C = 214, got [2, 6, 213]", input_gate=cut),
    bad(SHORT, "output_gate: expected float32, the dtype of x; got bfloat16", output_gate=Tensor.bfloat16),
    bad(SHORT, "dilation: expected a number from 1 to 2^31 - 1, got 0", dilation=0),
    bad(SHORT, "dilation: expected a number from 1 to 2^31 - 1, got 2147483648", dilation=2**31),
    bad(SHORT, "past: expected shape [B, P, C] with B = 2, P = 6, C = 214, got [2, 3, 214]", dilation=2),
    bad(SHORT, "kept: expected shape [B, R, C] with B = 2, R = 5, C = 214, got [2, 5, 213]", kept=cut),
    bad(SHORT, "kept: expected at most 9 rows, R, got 10", kept=grown(10)),
    bad(SHORT, f"activation: {POINTWISE}'relu'", activation="relu"),
    bad(SHORT, shares("kept"), kept=of_one_element),
]  # fmt: skip
