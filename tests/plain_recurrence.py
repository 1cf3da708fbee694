"""`linear_attention_` and `short_conv_` over plain Python numbers, for test_reference.py. Tensors are nested lists; what
an op writes in place is returned."""

import itertools
import math
from collections.abc import Iterable

Rows = list[list[float]]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def softplus(x: float) -> float:
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))


POINTWISE = {"none": lambda x: x, "silu": lambda x: x * sigmoid(x), "sigmoid": sigmoid}


def dot(a: Iterable[float], b: Iterable[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def exp(x: float) -> float:
    return math.inf if x > 700 else math.exp(x)


def convolved(before: Rows, rows: Rows, weight, bias, activation: str, dilation: int = 1) -> Rows:
    """The rows of one sequence after the convolution. `before` are the rows that come before the first one."""
    every, W = before + rows, len(weight[0])

    def of(t: int, c: int) -> float:
        taps = [every[t + i * dilation][c] for i in range(W)]
        return POINTWISE[activation](dot(weight[c], taps) + (bias[c] if bias else 0.0))

    return [[of(t, c) for c in range(len(weight))] for t in range(len(rows))]


def last(rows: Rows, count: int) -> Rows:
    return rows[len(rows) - count :]


def split(row: list[float], *sizes: int) -> list[list[float]]:
    ends = [0, *itertools.accumulate(sizes)]
    return [row[begin:end] for begin, end in itertools.pairwise(ends)]


def heads_of(row: list[float], size: int) -> Rows:
    return [row[i : i + size] for i in range(0, len(row), size)]


def one_sequence(q, k, v, decay, beta=None, gate=None, log_rate=None, decay_bias=None, norm_weight=None, skip=None,
                 conv_weight=None, conv_bias=None, past=None, mask=None, state=None, kept=None, log=None, *,
                 rule="delta", decay_kind="softplus", lower_bound=-5.0, step_min=0.0, step_max=None, beta_scale=1.0,
                 scale=None, qk_eps=1e-6, activation="silu", order="qkv", gate_activation="silu", gate_first=False,
                 tiled=False, eps=1e-6, replay=0):  # fmt: skip
    """Outputs [T, A, V], and the new state, kept and log."""
    T, J, D, A, V = len(q), len(q[0]), len(q[0][0]), len(v[0]), len(v[0][0])
    group = A // J
    if conv_weight:
        parts = {"q": q, "k": k, "v": v}
        rows = [[x for name in order for head in parts[name][t] for x in head] for t in range(T)]
        before = past if past is not None else [[0.0] * len(rows[0])] * (len(conv_weight[0]) - 1)
        kept = None if kept is None else last(before + rows, len(kept))
        sizes = {"q": J * D, "k": J * D, "v": A * V}
        y = [split(row, *(sizes[name] for name in order)) for row in convolved(before, rows, conv_weight, conv_bias,
                                                                               activation)]  # fmt: skip
        q, k, v = ([heads_of(row[order.index(n)], V if n == "v" else D) for row in y] for n in "qkv")
    S = [[row[:] for row in head] for head in state] if state is not None else [
        [[0.0] * V for _ in range(D)] for _ in range(A)
    ]  # fmt: skip
    written = [list(row) for row in log] if log is not None else []
    first_logged = T - (len(written) - replay)

    def change(a: int, factors: list[float], key: list[float], u: list[float]) -> None:
        for d in range(D):
            S[a][d] = [factors[d] * s + key[d] * x for s, x in zip(S[a][d], u, strict=True)]

    def spread(factors: list[float]) -> list[float]:
        return factors if len(factors) == D else factors * D

    for row in written[:replay]:
        us, keys, factors = split(row, A * V, J * D, len(row) - A * V - J * D)
        for a in range(A):
            own = heads_of(factors, len(factors) // A)[a]
            change(a, spread(own), heads_of(keys, D)[a // group], heads_of(us, V)[a])

    def step_and_factors(t: int, a: int) -> tuple[float, list[float]]:
        raws, biases = decay[t][a], decay_bias[a] if decay_bias else 0.0
        raws = raws if isinstance(raws, list) else [raws]
        biases = biases if isinstance(biases, list) else [biases] * len(raws)
        rate, step, found = exp(log_rate[a]) if log_rate else 1.0, 0.0, []
        for raw, bias in zip(raws, biases, strict=True):
            if decay_kind == "sigmoid":
                found.append(math.exp(lower_bound * sigmoid(rate * (raw + bias))))
                continue
            step = min(max(softplus(raw + bias), step_min), math.inf if step_max is None else step_max)
            found.append(math.exp(-rate * step))
        return step, found

    outputs, before_log = [], [[row[:] for row in head] for head in S]
    for t in range(T):
        seen = mask is None or mask[t]
        keys = [row if seen else [0.0] * D for row in k[t]]
        values = [row if seen else [0.0] * V for row in v[t]]
        queries = q[t]
        if qk_eps is not None:
            queries, keys = ([[x / math.sqrt(dot(row, row) + qk_eps) for x in row] for row in each]
                             for each in (queries, keys))  # fmt: skip
        queries = [[x * (D**-0.5 if scale is None else scale) for x in row] for row in queries]
        us, decays, token = [], [], []
        for a in range(A):
            key, (step, factors) = keys[a // group], step_and_factors(t, a)
            decays += factors
            factors = spread(factors)
            columns = list(zip(*S[a], strict=True))
            known = [sum(key[d] * factors[d] * column[d] for d in range(D)) for column in columns]
            if rule == "sum":
                u = [step * x for x in values[a]]
            else:
                u = [beta_scale * sigmoid(beta[t][a]) * (x - y) for x, y in zip(values[a], known, strict=True)]
            us.append(u)
            change(a, factors, key, u)
            out = [dot(queries[a // group], column) for column in zip(*S[a], strict=True)]
            token.append([o + (skip[a] if skip else 0.0) * x for o, x in zip(out, values[a], strict=True)])
        if t >= first_logged:
            written[replay + t - first_logged] = [x for part in (*us, *keys, decays)
                                                  for x in (part if isinstance(part, list) else [part])]  # fmt: skip
        else:
            before_log = [[row[:] for row in head] for head in S]
        outputs.append(gated_norm(token, gate and gate[t], norm_weight, gate_activation, gate_first, eps))
    if tiled:
        outputs = [[token[h % J * group + h // J] for h in range(A)] for token in outputs]
    return outputs, before_log, kept, written


def gated_norm(token: Rows, gate, weight, activation: str, gate_first: bool, eps: float) -> Rows:
    A, V = len(token), len(token[0])
    factors = [[POINTWISE[activation](x) for x in head] for head in gate] if gate else [[1.0] * V] * A

    def gated(rows: Rows) -> Rows:
        return [[x * f for x, f in zip(*pair, strict=True)] for pair in zip(rows, factors, strict=True)]

    rows = gated(token) if gate_first else token
    if weight:
        groups = weight if isinstance(weight[0], list) else [weight] * A
        flat = [x for head in rows for x in head]
        parts = heads_of(flat, len(groups[0]))
        normed = [
            x / math.sqrt(dot(part, part) / len(part) + eps) * w
            for part, own in zip(parts, groups, strict=True)
            for x, w in zip(part, own, strict=True)
        ]
        rows = heads_of(normed, V)
    return rows if gate_first else gated(rows)


OF_TOKENS = ("q", "k", "v", "decay", "beta", "gate", "mask")
OF_SEQUENCES = ("past", "state", "kept")


def linear_attention_(*, offsets=None, **given) -> list:
    """The output, then those of state, kept and log that are given."""
    B, T = len(given["q"]), len(given["q"][0])
    limits, found = [(b, 0, T) for b in range(B)], []
    if offsets is not None:
        ends = list(itertools.accumulate([min(max(x, 0), T) for x in offsets], max))
        limits = [(0, *pair) for pair in itertools.pairwise(ends)]
    empty = [[0.0] * len(given["v"][0][0][0]) for _ in given["v"][0][0]]
    output = [[empty] * T for _ in range(B)]
    for n, (b, begin, end) in enumerate(limits):
        own = {name: x[b][begin:end] for name, x in given.items() if name in OF_TOKENS}
        own |= {name: x[n] for name, x in given.items() if name in (*OF_SEQUENCES, "log")}
        if begin == end:  # with offsets there is no log
            before = given["past"][n] if "past" in given else None
            state, kept = given.get("state", [None] * (n + 1))[n], given.get("kept", [[]] * (n + 1))[n]
            found.append((state, last(before, len(kept)) if before else [[0.0] * len(row) for row in kept], None))
            continue
        output[b][begin:end], *rest = one_sequence(**given | own)
        found.append(rest)
    written = zip(("state", "kept", "log"), zip(*found, strict=True), strict=True)
    return [output, *(list(tensor) for name, tensor in written if name in given)]


def short_conv_(x, weight, bias=None, input_gate=None, output_gate=None, past=None, kept=None, *, activation="none",
                dilation=1) -> list:  # fmt: skip
    """The output, then `kept` if it is given."""
    output, found = [], []
    for b, rows in enumerate(x):
        if input_gate:
            rows = [[a * g for a, g in zip(*pair, strict=True)] for pair in zip(rows, input_gate[b], strict=True)]
        before = past[b] if past is not None else [[0.0] * len(weight)] * ((len(weight[0]) - 1) * dilation)
        y = convolved(before, rows, weight, bias, activation, dilation)
        if output_gate:
            y = [[a * g for a, g in zip(*pair, strict=True)] for pair in zip(y, output_gate[b], strict=True)]
        output.append(y)
        found.append(last(before + rows, len(kept[b])) if kept is not None else None)
    return [output] if kept is None else [output, found]
