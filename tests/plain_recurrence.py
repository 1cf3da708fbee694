"""`linear_attention_` and `short_conv_` over plain Python numbers, for test_reference.py. Tensors are nested lists, and
what an op writes in place is returned."""

import itertools
import math
from collections.abc import Iterable, Iterator

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


def inputs(parts: dict[str, list], order: str) -> Rows:
    """The convolution's input, with its channels in this order."""
    return [[x for name in order for head in parts[name][t] for x in head] for t in range(len(parts["q"]))]


def convolved_heads(q, k, v, before, weight, bias, activation: str, order: str) -> Iterator[list[Rows]]:
    """q, k and v after the convolution."""
    parts = {"q": q, "k": k, "v": v}
    sizes = [sum(map(len, parts[name][0])) for name in order]
    y = [split(row, *sizes) for row in convolved(before, inputs(parts, order), weight, bias, activation)]
    for name in "qkv":
        yield [heads_of(row[order.index(name)], len(parts[name][0][0])) for row in y]


def unit(rows: Rows, eps: float | None) -> Rows:
    return rows if eps is None else [[x / math.sqrt(dot(row, row) + eps) for x in row] for row in rows]


class Decays:
    """The steps of tokens, and the factors of the state of a head: one, or one for each channel."""

    def __init__(self, raw, rate, bias, kind="softplus", lower_bound=-5.0, step_min=0.0, step_max=None):
        self.raw, self.rate, self.bias, self.kind, self.lower_bound = raw, rate, bias, kind, lower_bound
        self.limits = step_min, math.inf if step_max is None else step_max

    def of(self, t: int, a: int) -> tuple[float, list[float]]:
        raws, biases = self.raw[t][a], self.bias[a] if self.bias else 0.0
        raws = raws if isinstance(raws, list) else [raws]
        biases = biases if isinstance(biases, list) else [biases] * len(raws)
        rate, step, found = exp(self.rate[a]) if self.rate else 1.0, 0.0, []
        for raw, bias in zip(raws, biases, strict=True):
            if self.kind == "sigmoid":
                found.append(math.exp(self.lower_bound * sigmoid(rate * (raw + bias))))
                continue
            step = min(max(softplus(raw + bias), self.limits[0]), self.limits[1])
            found.append(math.exp(-rate * step))
        return step, found


class State:
    """[A, D, V]."""

    def __init__(self, rows: list[Rows]):
        self.heads = copied(rows)

    def change(self, a: int, factors: list[float], key: list[float], u: list[float]) -> None:
        factors = factors if len(factors) == len(key) else factors * len(key)
        rows = zip(factors, key, self.heads[a], strict=True)
        self.heads[a] = [[f * s + x * y for s, y in zip(row, u, strict=True)] for f, x, row in rows]

    def seen_by(self, a: int, query: list[float]) -> list[float]:
        return [dot(query, column) for column in zip(*self.heads[a], strict=True)]

    def replay(self, row: list[float], J: int) -> None:
        """Applies a row of a log: u, keys and factors of a token."""
        A, D, V = len(self.heads), len(self.heads[0]), len(self.heads[0][0])
        us, keys, factors = split(row, A * V, J * D, len(row) - A * V - J * D)
        for a in range(A):
            factor = heads_of(factors, len(factors) // A)[a]
            self.change(a, factor, heads_of(keys, D)[a * J // A], heads_of(us, V)[a])


def copied(state: list[Rows]) -> list[Rows]:
    return [[row[:] for row in head] for head in state]


def flat(*parts: list) -> list[float]:
    return [x for part in parts for each in part for x in (each if isinstance(each, list) else [each])]


def token_of(S: State, t: int, q: Rows, k: Rows, v: Rows, decays: Decays, beta, rule: str, beta_scale: float):
    """Changes the state. Returns what it gives the queries, and the row of the log."""
    us, factors, outputs, A = [], [], [], len(v)
    for a in range(A):
        key, (step, own) = k[a * len(k) // A], decays.of(t, a)
        decayed = [x * f for x, f in zip(key, own if len(own) == len(key) else own * len(key), strict=True)]
        if rule == "sum":
            u = [step * x for x in v[a]]
        else:
            u = [beta_scale * sigmoid(beta[t][a]) * (x - y) for x, y in zip(v[a], S.seen_by(a, decayed), strict=True)]
        S.change(a, own, key, u)
        us.append(u)
        factors += own
        outputs.append(S.seen_by(a, q[a * len(q) // A]))
    return outputs, flat(us, k, factors)


def one_sequence(q, k, v, decay, beta=None, gate=None, log_rate=None, decay_bias=None, norm_weight=None, skip=None,
                 conv_weight=None, conv_bias=None, past=None, mask=None, state=None, kept=None, log=None, *,
                 rule="delta", beta_scale=1.0, scale=None, qk_eps=1e-6, activation="silu", order="qkv",
                 decay_kind="softplus", tiled=False, replay=0, **options):  # fmt: skip
    """Outputs [T, A, V], and the new state, kept and log."""
    T, J, D, A, V = len(q), len(q[0]), len(q[0][0]), len(v[0]), len(v[0][0])
    if conv_weight:
        rows = inputs({"q": q, "k": k, "v": v}, order)
        before = past if past is not None else [[0.0] * len(rows[0])] * (len(conv_weight[0]) - 1)
        kept = None if kept is None else last(before + rows, len(kept))
        q, k, v = convolved_heads(q, k, v, before, conv_weight, conv_bias, activation, order)
    S = State(state if state is not None else [[[0.0] * V] * D] * A)
    written = list(log) if log is not None else []
    for row in written[:replay]:
        S.replay(row, J)
    limits = {name: options.pop(name) for name in ("lower_bound", "step_min", "step_max") if name in options}
    decays = Decays(decay, log_rate, decay_bias, decay_kind, **limits)
    outputs, before_log, unlogged = [], copied(S.heads), T - (len(written) - replay)
    for t in range(T):
        counts = 1.0 if mask is None or mask[t] else 0.0
        key, value = ([[x if counts else 0.0 for x in row] for row in each[t]] for each in (k, v))
        query = [[x * (D**-0.5 if scale is None else scale) for x in row] for row in unit(q[t], qk_eps)]
        found, logged = token_of(S, t, query, unit(key, qk_eps), value, decays, beta, rule, beta_scale)
        found = [
            [o + (skip[a] if skip else 0.0) * x for o, x in zip(found[a], value[a], strict=True)] for a in range(A)
        ]
        outputs.append(gated_norm(found, gate and gate[t], norm_weight, **options))
        if t < unlogged:
            before_log = copied(S.heads)
        else:
            written[replay + t - unlogged] = logged
    if tiled:
        outputs = [[token[h % J * (A // J) + h // J] for h in range(A)] for token in outputs]
    return outputs, before_log, kept, written


def gated_norm(token: Rows, gate, weight, gate_activation="silu", gate_first=False, eps=1e-6) -> Rows:
    A, V = len(token), len(token[0])
    factors = [[POINTWISE[gate_activation](x) for x in head] for head in gate] if gate else [[1.0] * V] * A

    def gated(rows: Rows) -> Rows:
        return [[x * f for x, f in zip(*pair, strict=True)] for pair in zip(rows, factors, strict=True)]

    rows = gated(token) if gate_first else token
    if weight:
        groups = weight if isinstance(weight[0], list) else [weight] * A
        parts = heads_of([x for head in rows for x in head], len(groups[0]))
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
