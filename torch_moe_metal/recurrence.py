"""The specification of linear attention: layers that keep a state of fixed size instead of keys and values.

reference.py has the other ops, and says what these functions are for.
"""

import functools
import inspect
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .rounding import as_float, normed, rounded

#: What is computed of a convolution's result, and of a gate.
ACTIVATIONS = {"none": lambda x: x, "silu": F.silu, "sigmoid": torch.sigmoid}


#: The arguments of tokens and of sequences.
_OF_TOKENS = ("q", "k", "v", "decay", "beta", "gate", "mask")
_OF_SEQUENCES = ("past", "state", "kept")


def _by_sequence(specification: Callable) -> Callable:
    """Call the specification for each of the sequences of `offsets`."""
    signature = inspect.signature(specification)

    @functools.wraps(specification)
    def function(*args, **kwargs) -> Tensor:
        given = signature.bind(*args, **kwargs).arguments
        offsets = given.pop("offsets", None)
        if offsets is None:
            return specification(**given)
        q, v = given["q"], given["v"]
        output = q.new_zeros(*q.shape[:2], v.flatten(2, -2).shape[2], v.shape[-1])
        limits = offsets.clamp(0, q.shape[1]).cummax(0).values.tolist()
        for n, (begin, end) in enumerate(itertools.pairwise(limits)):
            one = {name: given[name][:, begin:end] for name in _OF_TOKENS if given.get(name) is not None}
            one |= {name: given[name][n : n + 1] for name in _OF_SEQUENCES if given.get(name) is not None}
            output[:, begin:end] = specification(**given | one)
        return output

    return function


@_by_sequence
def linear_attention_(
    q: Tensor,  # [B, T, J, D]
    k: Tensor,  # [B, T, J, D]
    v: Tensor,  # [B, T, A, V] or [B, T, J, A/J, V]
    decay: Tensor,  # [B, T, A] or [B, T, A, D], per channel; with 5 dimensions of v A is J, A/J
    beta: Tensor | None = None,  # [B, T, A], or [B, T, J, A/J]
    gate: Tensor | None = None,  # [B, T, A, V] or [B, T, J, A/J, V]
    log_rate: Tensor | None = None,  # [A]
    decay_bias: Tensor | None = None,  # [A] or [A, D], per channel
    norm_weight: Tensor | None = None,  # [V] or [N, A V / N], for groups of heads
    skip: Tensor | None = None,  # [A]
    conv_weight: Tensor | None = None,  # [C, W]
    conv_bias: Tensor | None = None,  # [C]
    past: Tensor | None = None,  # [B, W - 1, C]
    mask: Tensor | None = None,  # [B, T], bool
    offsets: Tensor | None = None,  # [S + 1], int32 or int64
    state: Tensor | None = None,  # [B, A, D, V], float32
    kept: Tensor | None = None,  # [B, R, C]
    log: Tensor | None = None,  # [B, replay + L, F], float32, F = A V + J D + A; or A D instead of A per channel
    *,
    rule: str = "delta",
    decay_kind: str = "softplus",
    lower_bound: float = -5.0,
    step_min: float = 0.0,
    step_max: float | None = None,
    beta_scale: float = 1.0,
    scale: float | None = None,
    qk_eps: float | None = 1e-6,
    activation: str = "silu",
    order: str = "qkv",
    gate_activation: str = "silu",
    gate_first: bool = False,
    tiled: bool = False,
    eps: float = 1e-6,
    replay: int = 0,
) -> Tensor:
    """A layer of linear attention between its projections: short convolution, gated delta rule (or Mamba 2's sum), and
    gated norm. `state`, `kept` and `log` are written in place. -> [B, T, A, V]

    B sequences, T tokens, J key heads, A value heads, D size of a query and a key, V size of a value, W taps, and
    C = 2 J D + A V channels. Value head h uses key head h // (A / J). All arguments may be views of one projection.

    1. q, k and v are convolved over time, if there is a `conv_weight`: y[t] = activation(sum of conv_weight[i] *
       x[t - W + 1 + i] + conv_bias). An activation is "silu", "sigmoid" or "none". `order` is that of the channels:
       "qkv" or "vkq". `past` has the inputs before the first token, or they are 0. `kept` gets the last R rows of past
       and inputs.
    2. k and v are 0 where `mask` is False. The decay goes on there.
    3. q and k are divided by sqrt(sum of squares + qk_eps), unless that is None. q is multiplied by `scale`, whose
       default is D^-0.5.
    4. With decay_kind "softplus", step = softplus(decay + decay_bias), limited to step_min and step_max, and
       a = exp(-exp(log_rate) * step). With "sigmoid", a = exp(lower_bound * sigmoid(exp(log_rate) * (decay +
       decay_bias))).
    5. For each token: S = a * S; u = b * (v - k @ S) with b = beta_scale * sigmoid(beta); S = S + outer(k, u);
       output = q @ S. That is rule "delta"; with rule "sum", u = step * v. The state S is [D, V] for each value head.
    6. skip * v is added. The output is multiplied by the gate's activation: after its norm, or with `gate_first` before
       it. The norm is that of `norm`, of each head or of each group of heads.

    - `state` is S before the first token, and then S after the last one. Without it S starts at 0.
    - With `log` a state can go back. First the u, k and a in the first `replay` rows are applied to the state. Then all
      tokens are computed, but the state that is kept is the one before the last L tokens, whose u, k and a are written
      to the last L rows of the log. After that, the next call says how many of these tokens to replay.
    - With `offsets`, B is 1 and sequence n consists of the tokens from offsets[n] to offsets[n + 1]. state, past and
      kept then have one entry for each of these S sequences. Offsets are limited to [0, T] and to rising order. The
      output of tokens without a sequence is 0.
    - With `tiled`, output head h is the value head (h % J) * (A / J) + h // J, the order of heads in GGUF files.
    """
    B, T, J, D = k.shape
    v, gate = (None if x is None else x.flatten(2, -2) for x in (v, gate))
    A = v.shape[2]
    x, y, z = _convolved(q, k, v, conv_weight, conv_bias, past, kept, activation, order)
    if mask is not None:
        y, z = (each.where(mask[..., None, None], 0) for each in (y, z))
    if qk_eps is not None:
        x, y = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + qk_eps) for each in (x, y))
    x = x * (D**-0.5 if scale is None else scale)
    step, a = _decays(decay, A, log_rate, decay_bias, decay_kind, lower_bound, step_min, step_max)
    b = step[..., 0] if rule == "sum" else beta_scale * as_float(beta).reshape(B, T, A).sigmoid()
    output = _recurrence(x, y, z, a, b, rule, state, log, replay)
    if skip is not None:
        output = output + as_float(skip).view(A, 1) * z
    output = _gated_norm(output, gate, norm_weight, gate_activation, gate_first, eps)
    return rounded(output.unflatten(2, (J, -1)).transpose(2, 3).flatten(2, 3) if tiled else output, q)


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None, kept: Tensor | None, dilation: int
):
    """The convolution over time of x [B, T, C], which writes `kept`."""
    T, W = x.shape[1], weight.shape[1]
    before = x.new_zeros(x.shape[0], (W - 1) * dilation, x.shape[2]) if past is None else past
    rows = torch.cat([before, x], 1)
    if kept is not None:
        kept.copy_(rows[:, rows.shape[1] - kept.shape[1] :])
    taps = [as_float(rows[:, i * dilation : i * dilation + T]) * as_float(weight[:, i]) for i in range(W)]
    return sum(taps) if bias is None else sum(taps) + as_float(bias)


def _convolved(q, k, v, weight, bias, past, kept, activation: str, order: str) -> list[Tensor]:
    """q, k and v after the convolution."""
    if weight is None:
        return [as_float(x) for x in (q, k, v)]
    parts = {"q": q, "k": k, "v": v}
    x = torch.cat([parts[name].flatten(2) for name in order], -1)
    y = ACTIVATIONS[activation](_convolution(x, weight, bias, past, kept, 1))
    found = dict(zip(order, y.split([parts[name].shape[2:].numel() for name in order], -1), strict=True))
    return [found[name].view(parts[name].shape) for name in "qkv"]


def _decays(decay, A: int, log_rate, bias, kind: str, lower_bound: float, step_min: float, step_max: float | None):
    """The steps, and the factors of the state: [B, T, A, 1], or per channel [B, T, A, D]."""
    B, T = decay.shape[:2]
    raw = as_float(decay).reshape(B, T, A, decay.shape[2:].numel() // A)
    rate = 1.0 if log_rate is None else as_float(log_rate).view(A, 1).exp()
    if bias is not None:
        raw = raw + as_float(bias).view(A, -1)
    if kind == "sigmoid":
        return raw, torch.exp(lower_bound * torch.sigmoid(rate * raw))
    step = F.softplus(raw).clamp(step_min, step_max)
    return step, torch.exp(-rate * step)


def _recurrence(q, k, v, a, b, rule: str, state: Tensor | None, log: Tensor | None, replay: int) -> Tensor:
    """q @ S for each token [B, T, A, V]."""
    (B, T, J, D), (A, V) = k.shape, v.shape[2:]
    S = q.new_zeros(B, A, D, V) if state is None else state.to(q.dtype)
    L = 0 if log is None else log.shape[1] - replay
    heads = functools.partial(torch.repeat_interleave, repeats=A // J, dim=1)
    for t in range(replay):
        u, key, factor = log[:, t].to(q.dtype).split([A * V, J * D, log.shape[-1] - A * V - J * D], -1)
        S = S * factor.view(B, A, factor.shape[-1] // A, 1) + heads(key.view(B, J, D, 1)) * u.view(B, A, 1, V)
    output, before_log = q.new_zeros(B, T, A, V), S
    for t in range(T):
        S = S * a[:, t].unsqueeze(-1)
        key, query = heads(k[:, t]), heads(q[:, t])
        seen = (S * key.unsqueeze(-1)).sum(-2) if rule == "delta" else 0
        u = (v[:, t] - seen) * b[:, t].unsqueeze(-1)
        S = S + key.unsqueeze(-1) * u.unsqueeze(-2)
        output[:, t] = (S * query.unsqueeze(-1)).sum(-2)
        if t >= T - L:
            log[:, replay + t - (T - L)] = torch.cat([x.flatten(1) for x in (u, k[:, t], a[:, t])], -1)
        else:
            before_log = S
    if state is not None:
        state.copy_(before_log)
    return output


def _gated_norm(x: Tensor, gate, norm_weight, gate_activation: str, gate_first: bool, eps: float) -> Tensor:
    factor = 1.0 if gate is None else ACTIVATIONS[gate_activation](as_float(gate))
    x = x * factor if gate_first else x
    if norm_weight is not None:
        groups = x if norm_weight.dim() == 1 else x.reshape(*x.shape[:2], *norm_weight.shape)
        x = (normed(groups, eps) * as_float(norm_weight)).reshape(x.shape)
    return x if gate_first else x * factor


def _linear_attention_shapes(q: Tensor, k: Tensor, v: Tensor, *args, **kwargs) -> Tensor:
    return q.new_empty(*q.shape[:2], v.flatten(2, -2).shape[2], v.shape[-1])


#: What fake.py calls: the specification itself loops over the tokens.
linear_attention_.shapes = _linear_attention_shapes


def short_conv_(
    x: Tensor,  # [B, T, C]
    weight: Tensor,  # [C, W]
    bias: Tensor | None = None,  # [C]
    input_gate: Tensor | None = None,  # [B, T, C]
    output_gate: Tensor | None = None,  # [B, T, C]
    past: Tensor | None = None,  # [B, (W - 1) * dilation, C]
    kept: Tensor | None = None,  # [B, R, C]
    *,
    activation: str = "none",
    dilation: int = 1,
) -> Tensor:
    """output_gate * activation(convolution(input_gate * x)), a convolution over time of each channel. `kept` is written
    in place. -> [B, T, C]

    B sequences, T tokens, C channels, W taps. The activation is "none", "silu" or "sigmoid".

    - convolution(y)[t] = sum of weight[i] * y[t - (W - 1 - i) * dilation] + bias. y is rounded to the dtype of x.
    - `past` has the rows of y before the first token, or they are 0. `kept` gets the last R rows of past and y.
    """
    y = x if input_gate is None else rounded(as_float(x) * as_float(input_gate), x)
    z = ACTIVATIONS[activation](_convolution(y, weight, bias, past, kept, dilation))
    return rounded(z if output_gate is None else as_float(output_gate) * z, x)
