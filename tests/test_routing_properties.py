"""Properties of the selection of experts for random logits, with ties, infinities and NaN."""

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases.oracle import far_apart
from checks import assert_matches
from torch_moe_metal import reference

INF, NAN = float("inf"), float("nan")
SPECIAL = [INF, -INF, NAN, 0.0, -0.0, 1.0, 1.0, 100.0, -100.0, 3e4]

quick = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def routings(draw, special: bool = True, biased: bool = True) -> tuple[Tensor, dict, dict]:
    """logits, the other tensors, the options"""
    per_group, n_group = draw(st.integers(1, 70)), draw(st.sampled_from([1, 1, 2, 4, 8]))
    E, topk_group = per_group * n_group, draw(st.integers(1, n_group))
    options = {
        "top_k": draw(st.integers(1, per_group * topk_group)),
        "scoring": draw(st.sampled_from(list(reference.SCORING))),
        "renormalize": draw(st.sampled_from(["none", "before_scale", "after_scale"])),
        "n_group": n_group,
        "topk_group": topk_group,
        "group_score": draw(st.sampled_from(["top2_sum", "max"])),
        "scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "softcap": draw(st.sampled_from([0.0, 5.0])),
    }
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(draw(st.integers(1, 4)), E, generator=generator) * draw(st.sampled_from([0.1, 2.0, 30.0]))
    if special and draw(st.booleans()):
        where = torch.rand(logits.shape, generator=generator) < draw(st.sampled_from([0.05, 0.5, 1.0]))
        picks = torch.tensor(draw(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=4)))
        logits[where] = picks[torch.randint(len(picks), (int(where.sum()),), generator=generator)]
    logits = logits.to(draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])))
    tensors = {}
    if biased and draw(st.booleans()):
        tensors["select_bias"] = torch.randn(E, generator=generator)
    if draw(st.booleans()):
        tensors["per_expert_scale"] = torch.rand(E, generator=generator) + 0.5
    return logits, tensors, options


def route(logits: Tensor, tensors: dict, options: dict, device: str) -> tuple[Tensor, Tensor]:
    on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
    weights, ids = torch.ops.moe_metal.route(logits.to(device), **on_device, **options)
    return weights.cpu(), ids.cpu()


def choice_of(logits: Tensor, tensors: dict, options: dict) -> Tensor:
    """The scores by which experts are selected, without groups."""
    if "select_bias" not in tensors:
        return logits.double()
    cap, exact = options["softcap"], logits.double()
    scores = reference.SCORING[options["scoring"]](cap * torch.tanh(exact / cap) if cap else exact)
    return scores + tensors["select_bias"].double()


@quick
@given(routing=routings())
def test_ids_are_distinct_and_in_range(device: str, routing):
    logits, tensors, options = routing
    weights, ids = route(logits, tensors, options, device)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert ids.min() >= 0 and ids.max() < logits.shape[-1]
    assert all(len(set(row)) == options["top_k"] for row in ids.tolist())


@quick
@given(routing=routings(biased=False))
def test_equals_the_reference_in_float32(device: str, routing):
    """Without a bias experts are selected by logits, so rounding cannot change an id; with groups it can."""
    logits, tensors, options = routing
    if options["n_group"] > 1:
        groups = choice_sums(logits, options)
        assume(bool(far_apart(groups, 1e-5).all()))
    assert_matches(route(logits, tensors, options, device), reference.route(logits, **tensors, **options))


def choice_sums(logits: Tensor, options: dict) -> Tensor:
    cap, exact = options["softcap"], logits.double()
    scores = reference.SCORING[options["scoring"]](cap * torch.tanh(exact / cap) if cap else exact)
    groups = scores.unflatten(-1, (options["n_group"], -1)).sort(-1, descending=True).values
    return groups[..., : 2 if options["group_score"] == "top2_sum" else 1].sum(-1).sort(-1, descending=True).values


@quick
@given(routing=routings())
def test_best_first(device: str, routing):
    """Descending; equal ones by id; NaN after minus infinity. No other expert is better."""
    logits, tensors, options = routing
    options = options | {"n_group": 1, "topk_group": 1}
    choice = choice_of(logits, tensors, options)
    assume("select_bias" not in tensors or bool(far_apart(choice.sort(-1, descending=True).values, 1e-5).all()))
    _, ids = route(logits, tensors, options, device)
    for row, chosen in zip(choice.tolist(), ids.tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda e: (row[e] != row[e], -row[e] if row[e] == row[e] else 0.0, e))
        assert chosen == order[: options["top_k"]]


@quick
@given(routing=routings(special=False, biased=False), seed=st.integers(0, 2**31))
def test_permuting_the_experts_permutes_their_ids(device: str, routing, seed: int):
    logits, tensors, options = routing
    options = options | {"n_group": 1, "topk_group": 1}
    assume(all(len(set(row)) == len(row) for row in logits.tolist()))
    order = torch.randperm(logits.shape[-1], generator=torch.Generator().manual_seed(seed))
    permuted = {name: tensor[order] for name, tensor in tensors.items()}
    weights, ids = route(logits, tensors, options, device)
    other_weights, other_ids = route(logits[:, order], permuted, options, device)
    assert torch.equal(order[other_ids.long()].int(), ids)
    assert_matches([other_weights], [weights.double()])


@quick
@given(routing=routings(special=False, biased=False), shift=st.sampled_from([-64.0, 0.5, 1024.0]))
def test_softmax_is_invariant_to_a_shift(device: str, routing, shift: float):
    """Shifts that float32 adds exactly to rounded logits, for which softmax gives the same scores."""
    logits, tensors, options = routing
    logits = (logits.float() * 64).round() / 64
    options = options | {"n_group": 1, "topk_group": 1, "scoring": "softmax", "softcap": 0.0}
    weights, ids = route(logits, tensors, options, device)
    shifted_weights, shifted_ids = route(logits + shift, tensors, options, device)
    assert torch.equal(ids, shifted_ids)
    assert_matches([shifted_weights], [weights.double()])


@quick
@given(routing=routings(special=False))
def test_renormalized_weights_sum_to_the_scaling_factor(device: str, routing):
    logits, tensors, options = routing
    logits = logits.clamp(-8, 8)  # so that no sum of scores is close to the 1e-20 that prevents a division by zero
    for renormalize in ("before_scale", "after_scale"):
        options = options | {"renormalize": renormalize}
        weights, ids = route(logits, tensors, options, device)
        if renormalize == "before_scale" and "per_expert_scale" in tensors:
            weights = weights / tensors["per_expert_scale"][ids.long()]
        total = weights.double().sum(-1)
        assert torch.allclose(total, torch.full_like(total, options["scaling_factor"]), rtol=1e-5)


@quick
@given(routing=routings(special=False))
def test_only_the_best_groups_are_selected(device: str, routing):
    logits, tensors, options = routing
    _, ids = route(logits, tensors, options, device)
    per_group = logits.shape[-1] // options["n_group"]
    assert all(len({i // per_group for i in row}) <= options["topk_group"] for row in ids.tolist())


@quick
@given(routing=routings(special=False), hidden_size=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_gate_is_route_of_its_logits(device: str, routing, hidden_size: int, seed: int):
    """With a router weight for which every logit is a single exact product, gate and route return the same ids."""
    logits, tensors, options = routing
    logits = logits.float()
    generator = torch.Generator().manual_seed(seed)
    router_weight = torch.zeros(logits.shape[-1], hidden_size)
    router_weight[:, int(torch.randint(hidden_size, (1,), generator=generator))] = logits[0]
    on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
    got = torch.ops.moe_metal.gate(
        torch.ones(2, hidden_size).to(device), router_weight.to(device), **on_device, **options
    )
    want = route(logits[:1].expand(2, -1), tensors, options, device)
    assert torch.equal(got[1].cpu(), want[1])
    assert_matches([got[0]], [want[0].double()])


def test_an_infinite_norm_weight_makes_infinite_logits(device: str):
    """Not NaN, which would select the first experts: AMX multiplies a normalised row as a sum of three terms."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, norm = (torch.randn(*s, generator=generator).bfloat16() for s in ((16, 32), (8, 32), (32,)))
    norm[5] = -INF
    args = {"hidden": hidden, "router_weight": weight, "norm_weight": norm}
    _, ids = torch.ops.moe_metal.gate(**{name: t.to(device) for name, t in args.items()}, top_k=3)
    _, want = reference.gate(**{name: t.double() for name, t in args.items()}, top_k=3)
    assert torch.equal(ids.cpu(), want)
