"""Compares the specification with plain loops over Python numbers, written from descriptions of the models."""

import math
from itertools import chain

import gguf
import numpy as np
import pytest
import torch

from cases import CASES, OPTIONAL, SAMPLES, Case, call
from cases.packed import WIDTHS
from cases.rows import SUMS
from checks import assert_matches
from each_op import PER_TOKEN
from packings import gguf_type
from plain_recurrence import linear_attention_, short_conv_
from torch_moe_metal import reference
from torch_moe_metal.arguments import format_of, scale_names, weights
from torch_moe_metal.formats import FORMATS


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(v - max(values)) for v in values]
    return [p / sum(powers) for p in powers]


SCORING = {
    "softmax": softmax,
    "sigmoid": lambda values: [sigmoid(v) for v in values],
    "sqrt_softplus": lambda values: [math.sqrt(math.log1p(math.exp(v))) for v in values],
}
ACTIVATION = {
    "silu": lambda g, alpha: g * sigmoid(g),
    "gelu": lambda g, alpha: g * 0.5 * (1 + math.erf(g / math.sqrt(2))),
    "gelu_tanh": lambda g, alpha: g * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
    "relu2": lambda g, alpha: max(g, 0.0) ** 2,
    "swiglu_oai": lambda g, alpha: g * sigmoid(alpha * g),
    "sigmoid": lambda g, alpha: sigmoid(g),
}


def norm(values: list[float], weight: list[float], eps: float = 1e-6) -> list[float]:
    scale = 1 / math.sqrt(sum(v * v for v in values) / len(values) + eps)
    return [v * scale * w for v, w in zip(values, weight, strict=True)]


def route(logits, select_bias=None, per_expert_scale=None, *, top_k, scoring="softmax", renormalize="before_scale",
          n_group=1, topk_group=1, group_score="top2_sum", scaling_factor=1.0, softcap=0.0, sum_eps=1e-20):  # fmt: skip
    if softcap:
        logits = [softcap * math.tanh(v / softcap) for v in logits]
    scores = SCORING[scoring](logits)
    choice = [s + b for s, b in zip(scores, select_bias or [0.0] * len(scores), strict=True)]
    size = len(choice) // n_group
    groups = [choice[g * size : (g + 1) * size] for g in range(n_group)]
    totals = [sum(sorted(group)[-2 if group_score == "top2_sum" else -1 :]) for group in groups]
    kept = sorted(range(n_group), key=lambda g: -totals[g])[:topk_group]
    ids = sorted((e for e in range(len(choice)) if e // size in kept), key=lambda e: (-choice[e], e))[:top_k]
    scale = [per_expert_scale[e] if per_expert_scale else 1.0 for e in ids]
    weights = [scores[e] for e in ids]
    if renormalize == "after_scale":
        weights = [w * s for w, s in zip(weights, scale, strict=True)]
    if renormalize != "none":
        weights = [w / (sum(weights) + sum_eps) for w in weights]
    if renormalize != "after_scale":
        weights = [w * s for w, s in zip(weights, scale, strict=True)]
    return [w * scaling_factor for w in weights], ids


def gate(hidden, router_weight, norm_weight=None, router_bias=None, *route_args, eps=1e-6, **options):
    if norm_weight:
        hidden = norm(hidden, norm_weight, eps)
    logits = [sum(h * w for h, w in zip(hidden, row, strict=True)) for row in router_weight]
    if router_bias:
        logits = [v + b for v, b in zip(logits, router_bias, strict=True)]
    return route(logits, *route_args, **options)


def glu(gate, up, *, activation="silu", alpha=1.702, limit=None):
    cap = math.inf if limit is None else limit
    gate, up = [min(g, cap) for g in gate], [max(-cap, min(u, cap)) for u in up]
    one = 1.0 if activation == "swiglu_oai" else 0.0
    return [ACTIVATION[activation](g, alpha) * (u + one) for g, u in zip(gate, up, strict=True)]


def weighted_sum(slots, weights, shared=None, shared_gate=None, residual=None):
    total = [sum(w * slot[h] for w, slot in zip(weights, slots, strict=True)) for h in range(len(slots[0]))]
    if shared:
        total = [
            t + (sigmoid(shared_gate) if shared_gate is not None else 1.0) * s
            for t, s in zip(total, shared, strict=True)
        ]
    return [t + r for t, r in zip(total, residual or [0.0] * len(total), strict=True)]


def experts(x, weights, ids, gate_up, down, gate_up_bias=None, down_bias=None, *combined, interleaved=False,
            transposed=False, **activation):  # fmt: skip
    slots = []
    for e in ids:
        first, second = (list(zip(*w[e], strict=True)) if transposed else w[e] for w in (gate_up, down))
        both = [sum(a * b for a, b in zip(row, x, strict=True)) for row in first]
        both = [v + b for v, b in zip(both, gate_up_bias[e] if gate_up_bias else [0.0] * len(both), strict=True)]
        half = len(both) // 2
        inner = glu(*((both[::2], both[1::2]) if interleaved else (both[:half], both[half:])), **activation)
        out = [sum(a * b for a, b in zip(row, inner, strict=True)) for row in second]
        slots.append([v + b for v, b in zip(out, down_bias[e] if down_bias else [0.0] * len(out), strict=True)])
    return weighted_sum(slots, weights, *combined)


def numbers(row: list[int], bits: int) -> list[int]:
    """The bytes of a row are the digits of one large number, the lowest first."""
    whole = sum(byte << 8 * place for place, byte in enumerate(row))
    return [whole >> bits * place & (1 << bits) - 1 for place in range(8 * len(row) // bits)]


def e2m1(code: int) -> float:
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -magnitude if code & 8 else magnitude


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    magnitude = math.nan if code & 127 == 127 else magnitude
    return -magnitude if code & 128 else magnitude


def e8m0(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


def dequantize(weight, scale=None, offset=None, *, format, bits=4, **_):
    """One matrix, from lists of bytes and lists of scales. GGML's blocks are decoded by the `gguf` package."""
    if format == "dense":
        return weight
    if scale is None:
        return gguf.quants.dequantize(np.array(weight, dtype=np.uint8), gguf_type(format)).tolist()
    if format == "fp8":
        return [[e4m3(code) * scale[r // 128][c // 128] for c, code in enumerate(row)] for r, row in enumerate(weight)]
    if format == "mxfp8":
        return [
            [e4m3(code) * e8m0(s[c // 32]) for c, code in enumerate(row)] for row, s in zip(weight, scale, strict=True)
        ]
    rows = [numbers(row, bits) for row in weight]
    group = len(rows[0]) // len(scale[0])
    if format in ("mxfp4", "nvfp4"):
        (factor,), number = offset or [1.0], {"mxfp4": e8m0, "nvfp4": e4m3}[format]
        return [
            [e2m1(code) * (factor * number(s[c // group])) for c, code in enumerate(row)]
            for row, s in zip(rows, scale, strict=True)
        ]
    return [
        [code * s[c // group] + o[c // group] for c, code in enumerate(row)]
        for row, s, o in zip(rows, scale, offset, strict=True)
    ]


def linear(x, weight, bias=None):
    products = [sum(a * b for a, b in zip(row, x, strict=True)) for row in weight]
    return [p + b for p, b in zip(products, bias or [0.0] * len(products), strict=True)]


def turned(head, cos, sin, interleaved):
    """One head of one token."""
    R, result = len(cos), list(head)
    for i in range(R):
        a, b = (head[2 * i], head[2 * i + 1]) if interleaved else (head[i], head[i + R])
        result[i], result[i + R] = a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]
    return result


def rope(q, k, cos, sin, q_norm_weight=None, k_norm_weight=None, *, eps=1e-6, interleaved=False):
    """Queries and keys, each as lists of sequences, heads and tokens."""

    def of_token(heads, weight, cos, sin):
        if weight and isinstance(weight[0], list):
            flat = norm([*chain(*heads)], [*chain(*weight)], eps)
            heads = [flat[h * len(weight[0]) : (h + 1) * len(weight[0])] for h in range(len(heads))]
        elif weight:
            heads = [norm(head, weight, eps) for head in heads]
        return [turned(head, cos, sin, interleaved) for head in heads]

    both = []
    for x, weight in ((q, q_norm_weight), (k, k_norm_weight)):
        tokens = [
            [of_token(heads, weight, cos[b % len(cos)][t], sin[b % len(sin)][t]) for t, heads in enumerate(sequence)]
            for b, sequence in enumerate(x)
        ]
        both.append([[[heads[h] for heads in sequence] for h in range(len(sequence[0]))] for sequence in tokens])
    return tuple(both)


def attention_of_query(query, keys, values, added, sink, sees, scale, softcap):
    """One query of one head. `added` contains mask values or bools; `sees` says which keys are otherwise visible."""
    logits, seen = [], []
    for s, key in enumerate(keys):
        if not sees(s) or added[s] is False or added[s] == -math.inf:
            continue
        score = sum(x * y for x, y in zip(query, key, strict=True)) * scale
        score = softcap * math.tanh(score / softcap) if softcap else score
        logits.append(score if added[s] is True else score + added[s])
        seen.append(values[s])
    weights = softmax(logits + sink)[: len(seen)]
    return [sum(w * value[i] for w, value in zip(weights, seen, strict=True)) for i in range(len(values[0]))]


def attention(q, k, v, mask=None, sinks=None, *, scale=None, causal=False, window=0, softcap=0.0):
    """All sequences, queries and heads: lists of lists."""
    B, A, T, S = len(q), len(q[0]), len(q[0][0]), len(k[0][0])
    scale = 1 / math.sqrt(len(q[0][0][0])) if scale is None else scale

    def of(b: int, t: int, a: int) -> list[float]:
        head, own = a * len(k[0]) // A, S - T + t
        added = mask[b % len(mask)][a % len(mask[0])][t] if mask else [True] * S
        sink = [sinks[a]] if sinks else []
        sees = lambda s: not causal or (s <= own and (window == 0 or own - s < window))  # noqa: E731
        return attention_of_query(q[b][a][t], k[b][head], v[b][head], added, sink, sees, scale, softcap)

    return [[[of(b, t, a) for a in range(A)] for t in range(T)] for b in range(B)]


RECURRENT = {"linear_attention_": linear_attention_, "short_conv_": short_conv_}


def unpacked(case: Case, args: dict) -> dict:
    """The arguments for one token, or for none, with packed weights as lists of numbers and without their scales."""
    formats = {name: format_of(name, case.options) for name in weights(case.op)}
    if set(formats.values()) <= {"dense"}:
        return {name: args[name] for name in args}
    found = {name: value for name, value in args.items() if not name.endswith(("_scale", "scale", "offset"))}
    for name, format in formats.items():
        parts = [args[name], *(args.get(part) for part in scale_names(name))]
        options = {"format": format, "bits": case.bits}
        if name == "weight":
            found[name] = dequantize(*parts, **options)
        else:
            experts = [[None if part is None else part[e] for part in parts] for e in range(len(parts[0]))]
            found[name] = [dequantize(*of_expert, **options) for of_expert in experts]
    return found


def summed(op: str, args: dict) -> list:
    """The weighted sums with norms; outputs in the order of `call`."""
    total, residual = weighted_sum(args["slots"], args["weights"]), args["residual"]
    both = [t + r for t, r in zip(total, residual, strict=True)]
    if op == "weighted_sum_residual_":
        return [both]
    if op == "weighted_sum_residual_norm_":
        return [norm(both, args["norm_weight"]), both]
    if op == "weighted_sum_norm_add":
        return [[r + n for r, n in zip(residual, norm(total, args["norm_weight"]), strict=True)]]
    parts = norm(residual, args["residual_norm_weight"]), norm(total, args["moe_norm_weight"])
    return [[a + b for a, b in zip(*parts, strict=True)]]


def normed(op: str, residual, input, weight, scalar) -> list:
    scalar = scalar if len(scalar) > 1 else scalar * len(residual)
    if op == "norm_add":
        total = [r + n for r, n in zip(residual, norm(input, weight), strict=True)]
        return [[t * s for t, s in zip(total, scalar, strict=True)]]
    total = [r + i for r, i in zip(residual, input, strict=True)]
    return [[n * s for n, s in zip(norm(total, weight), scalar, strict=True)], total]


def one_token(case: Case, args: dict) -> list:
    args = unpacked(case, args)
    values = tuple(args.values())
    if case.op in ("linear", "dequantize"):
        return [linear(**args) if case.op == "linear" else args["weight"]]
    if case.op == "norm":
        return [norm(*values)]
    if case.op == "rope":
        return list(rope(**args, **case.options))
    if case.op == "attention":
        return [attention(**args, **case.options)]
    if case.op in RECURRENT:
        return RECURRENT[case.op](**args, **case.options)
    if case.op in SUMS[1:]:
        return summed(case.op, args)
    if case.op in ("norm_add", "residual_norm"):
        return normed(case.op, *values)
    of_weights = ("format", "down_format", "group_size")
    options = {name: value for name, value in case.options.items() if name not in of_weights}
    result = globals()[case.op](*values, **options)
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_reference_equals_plain_loops(case: Case):
    args = {name: t.double() if t.is_floating_point() else t for name, t in case.arguments().items()}
    tokens, at_once = [], case not in PER_TOKEN
    for t in range(1 if at_once else case.dims["T"]):
        of_token = {n: (v[t] if case.shapes[n][0] == "T" else v).tolist() for n, v in args.items()}
        tokens.append(one_token(case, of_token))
    want = [torch.tensor(rows, dtype=torch.float64) for rows in zip(*tokens, strict=True)]
    options = case.options
    if at_once:
        want, options = (
            [rows[0] for rows in want],
            options | ({"dtype": torch.float64} if case.op == "dequantize" else {}),
        )
    got = call(getattr(reference, case.op), case.op, args, options)
    want = [w if g.is_floating_point() else w.int() for w, g in zip(want, got, strict=True)]
    assert set(OPTIONAL[case.op]) <= set(args) | ({"log"} if "offsets" in args else set())
    assert_matches(got, want)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.full_grid, pytest.mark.slow] if case.full_grid else [])
        for case in CASES
        if case.op in RECURRENT
        and not (case.sample or case.hostile)
        and case.flops < 4e5
        and case.dims["B"] * case.dims["T"]
    ],
    ids=str,
)
def test_reference_of_every_recurrence(case: Case):
    """Decays of channels, sequences by offsets, logs, norms of groups of heads."""
    args = {name: t.double() if t.is_floating_point() else t for name, t in case.arguments().items()}
    heads = ("v", "gate", "decay", "beta")  # which may have a dimension for each of A's factors
    flat = {n: t.flatten(2, 3) if n in heads and args["v"].dim() == 5 else t for n, t in args.items()}
    want = RECURRENT[case.op](**{name: tensor.tolist() for name, tensor in flat.items()}, **case.options)
    got = call(getattr(reference, case.op), case.op, args, case.options)
    assert_matches(got, [torch.tensor(w, dtype=torch.float64).view(g.shape) for g, w in zip(got, want, strict=True)])


@pytest.mark.parametrize("format, bits, group", [width for width in WIDTHS if not FORMATS[width[0]].has_own_scales])
def test_reference_of_every_format(format: str, bits: int, group: int):
    """Every byte value in every position, with scales of all sizes."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(256, (130, 9 * 16 * bits), dtype=torch.uint8, generator=generator)
    weight[0] = torch.arange(weight.shape[1]).remainder(256)
    columns = 8 * weight.shape[1] // bits
    scales = torch.randn(130, columns // group, generator=generator, dtype=torch.float64).exp()
    scale = {"affine": scales, "fp8": scales[:2, : -(-columns // 128)]}.get(format)
    if scale is None:
        scale = torch.randint(256, (130, columns // group), dtype=torch.uint8, generator=generator)
        scale[0, :3] = torch.tensor([0, 254, 255])
    offset = {"affine": scales.flip(0).neg(), "nvfp4": torch.tensor([0.1])}.get(format)
    lists = (None if part is None else part.tolist() for part in (weight, scale, offset))
    want = torch.tensor(dequantize(*lists, format=format, bits=bits), dtype=torch.float64)
    got = reference.dequantize(weight, scale, offset, format=format, bits=bits, dtype=torch.float64)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())
    if format == "affine":
        words = weight.view(torch.int32)
        assert torch.equal(reference.dequantize(words, scale, offset, format=format, bits=bits, dtype=got.dtype), got)


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("limit", [None, 1.5])
def test_reference_of_every_activation(activation: str, limit: float | None):
    gate, up = torch.linspace(-6, 6, 40, dtype=torch.float64), torch.linspace(5, -4, 40, dtype=torch.float64)
    options = {"activation": activation, "limit": limit, "alpha": 1.3}
    want = torch.tensor(glu(gate.tolist(), up.tolist(), **options), dtype=torch.float64)
    assert_matches([reference.glu(gate, up, **options)], [want])


@pytest.mark.parametrize("scoring", reference.SCORING)
@pytest.mark.parametrize("renormalize", ["none", "before_scale", "after_scale"])
@pytest.mark.parametrize("groups", [(1, 1, "max"), (5, 2, "max"), (5, 3, "top2_sum")])
def test_reference_of_every_routing(scoring: str, renormalize: str, groups: tuple):
    generator = torch.Generator().manual_seed(7)
    logits, bias, scale = (torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(3))
    options = {
        "top_k": 5,
        "scoring": scoring,
        "renormalize": renormalize,
        "scaling_factor": 1.5,
        "softcap": 3.0,
        "sum_eps": 0.1,
    }
    options |= dict(zip(("n_group", "topk_group", "group_score"), groups, strict=True))
    weights, ids = reference.route(logits, bias, scale, **options)
    want_weights, want_ids = route(logits.tolist(), bias.tolist(), scale.tolist(), **options)
    assert ids.tolist() == want_ids
    assert_matches([weights], [torch.tensor(want_weights, dtype=torch.float64)])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("whole", ["", "q", "k", "qk"])
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("R", [1, 3, 4])
def test_reference_of_every_rope(R: int, B: int, whole: str, interleaved: bool):
    """Angles of all sequences and of each, norms of each head and of all heads, partial and full rotation."""
    generator = torch.Generator().manual_seed(13)
    shapes = {"q": (3, 2, 4, 8), "k": (3, 2, 2, 8), "cos": (B, 2, R), "sin": (3, 2, R)}
    shapes |= {"q_norm_weight": (4, 8)[1 - ("q" in whole) :], "k_norm_weight": (2, 8)[1 - ("k" in whole) :]}
    args = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    for left_out in ((), ("q_norm_weight",), ("k_norm_weight",), ("q_norm_weight", "k_norm_weight")):
        given = {name: tensor for name, tensor in args.items() if name not in left_out}
        want = rope(**{name: tensor.tolist() for name, tensor in given.items()}, eps=1e-3, interleaved=interleaved)
        got = reference.rope(**given, eps=1e-3, interleaved=interleaved)
        assert_matches(list(got), [torch.tensor(rows, dtype=torch.float64) for rows in want])


@pytest.mark.parametrize("T, S", [(1, 9), (5, 9), (9, 5)])
@pytest.mark.parametrize("kind", ["none", "bool", "bool for all", "float", "float for all heads"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window": 2, "softcap": 1.5, "scale": -0.4}]
)
def test_reference_of_every_mask(T: int, S: int, kind: str, options: dict):
    """Queries without visible keys return 0, and NaN in invisible keys has no effect."""
    generator = torch.Generator().manual_seed(11)
    shapes = {"q": (2, 4, T, 3), "k": (2, 2, S, 3), "v": (2, 2, S, 4), "sinks": (4,)}
    args = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    if kind != "none":
        size = {"bool for all": (1, 1), "float for all heads": (2, 1)}.get(kind, (2, 4))
        drawn = torch.randn(*size, T, S, generator=generator, dtype=torch.float64)
        args["mask"] = drawn > 0 if kind.startswith("bool") else drawn.where(drawn < 0.5, -math.inf)
    for sinks in ({}, {"sinks": args.pop("sinks")}):
        lists = {name: tensor.tolist() for name, tensor in (args | sinks).items()}
        want = torch.tensor(attention(**lists, **options), dtype=torch.float64).reshape(2, T, 4, 4)
        assert_matches([reference.attention(**args, **sinks, **options)], [want])


def test_reference_of_invisible_keys():
    """Whatever they contain; NaN in a key, a value or a mask reaches the queries that see it."""
    ones, nan = torch.ones(1, 1, 3, 2), math.nan
    last = torch.tensor([1.0, 1.0, nan]).view(1, 1, 3, 1).expand(ones.shape)
    for changed in ({"k": last}, {"v": last}, {"mask": last[..., :1].mT.expand(1, 1, 3, 3)}):
        got = reference.attention(**{"q": ones, "k": ones, "v": ones} | changed, causal=True)
        assert torch.equal(got.isnan().flatten(), torch.tensor([0, 0, 0, 0, 1, 1]).bool())
    none = ones[:, :, :0]
    assert torch.equal(reference.attention(ones, none, none), torch.zeros(1, 3, 1, 2))


def test_reference_of_odd_logits():
    """Ties go to the lowest id, NaN ranks below minus infinity, and ids are always distinct."""
    inf, nan = math.inf, math.nan
    rows = torch.tensor([[0.0, -0.0, 0.0, 0.0], [nan, -inf, 1.0, inf], [nan, nan, nan, nan], [-inf, nan, -inf, 5.0]])
    assert reference.route(rows, top_k=4)[1].tolist() == [[0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3], [3, 0, 2, 1]]
    equal = torch.tensor([[2.0, 2.0, 1.0, 2.0]])
    assert reference.route(equal, torch.tensor([0.0, 0.0, 9.0, 0.0]), top_k=3)[1].tolist() == [[2, 0, 1]]
