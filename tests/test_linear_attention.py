"""`linear_attention_` and `short_conv_` over several calls: a prompt in parts, drafts that are rejected, sequences and
heads that must not notice each other. test_ops.py compares single calls with the reference."""

import itertools
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from cases import BFLOAT, FLOAT, Args, Case, call
from cases.linear_attention import FORGETTING, SUMMING, by_channel
from checks import same_bits
from torch_moe_metal import reference

TOKENS = ("q", "k", "v", "decay", "beta", "gate", "mask")
GIVEN = ("gate", "log_rate", "decay_bias", "norm_weight", "conv_weight", "conv_bias", "past", "state")
KINDS = {  # options, whether decays are per channel, whether the state has its keys next to each other
    "delta": ({"beta_scale": 2.0}, False, False),
    "channels": ({}, True, False),
    "sigmoid": (FORGETTING, False, True),
    "sum": (SUMMING, False, True),
    "sum_by_rows": (SUMMING | {"qk_eps": None}, False, False),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@dataclass
class Layer:
    """Calls for some tokens of the same sequences, one after the other, with the state and the past of a cache."""

    args: Args
    options: dict
    state: Tensor = field(init=False)
    past: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.state, self.past = self.args.pop("state"), self.args.pop("past")

    @classmethod
    def of(cls, kind: str, device: str, dtype: torch.dtype = FLOAT, **dims: int) -> "Layer":
        options, channels, by_rows = KINDS[kind]
        sizes = {"B": 2, "J": 2, "A": 4, "D": 24, "V": 20, "W": 4} | dims
        case = Case("linear_attention_", kind, sizes, GIVEN, options, dtype, FLOAT, by_channel if channels else None)
        args = case.arguments()
        args["state"] = args["state"].mT.contiguous().mT if by_rows else args["state"]
        return cls({name: tensor.to(device) for name, tensor in args.items()}, options)

    def copy(self) -> "Layer":
        return Layer(self.args | {"state": self.state.clone(), "past": self.past}, self.options)

    def of_sequence(self, b: int) -> "Layer":
        args = self.args | {"state": self.state.clone(), "past": self.past}
        own = (*TOKENS, "state", "past")
        return Layer({name: x[b : b + 1] if name in own else x for name, x in args.items()}, self.options)

    def tokens(self, begin: int, end: int) -> Args:
        return {name: x[:, begin:end] if name in TOKENS else x for name, x in self.args.items()}

    def __call__(self, begin: int, end: int, log: Tensor | None = None, replay: int = 0) -> Tensor:
        """The output of these tokens. Without a log the layer's state is then the one after them."""
        args = self.tokens(begin, end) | {"past": self.past, "state": self.state}
        args |= {"kept": torch.full_like(self.past, float("nan"))} | ({} if log is None else {"log": log})
        output = torch.ops.moe_metal.linear_attention_(**args, **self.options, replay=replay)
        self.past = args["kept"]
        return output

    def log(self, rows: int) -> Tensor:
        """For so many tokens; NaN must not be read."""
        (J, D), A, V = self.args["q"].shape[2:], *self.args["v"].shape[2:]
        F = A * V + J * D + self.args["decay"].shape[2:].numel()
        return self.state.new_full((len(self.state), rows, F), float("nan"))


def same_layers(one: Layer, other: Layer) -> bool:
    return same_bits(one.state.cpu(), other.state.cpu()) and same_bits(one.past.cpu(), other.past.cpu())


@each_kind
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
def test_a_prompt_may_be_cut(kind: str, dtype: torch.dtype, device: str):
    """At multiples of 8 tokens, which a CPU computes together, and at any token within the tolerance."""
    whole = Layer.of(kind, device, dtype, T=53)
    parts, anywhere = whole.copy(), whole.copy()
    want = whole(0, 53)
    got = torch.cat([parts(begin, end) for begin, end in itertools.pairwise((0, 8, 32, 32, 40, 53))], 1)
    assert same_bits(got, want) and same_layers(parts, whole)
    got = torch.cat([anywhere(begin, end) for begin, end in itertools.pairwise((0, 1, 6, 13, 37, 38, 53))], 1)
    torch.testing.assert_close(got, want, rtol=0, atol=float(want.abs().max()) * (4e-5 if dtype == FLOAT else 1e-2))
    torch.testing.assert_close(anywhere.state, whole.state, rtol=0, atol=4e-5 * float(whole.state.abs().max()))
    assert same_bits(anywhere.past.cpu(), whole.past.cpu())


@each_kind
@pytest.mark.parametrize("T", [1, 5, 19])
def test_sequences_do_not_depend_on_the_batch(kind: str, T: int, device: str):
    """Each by itself, and as a packed one."""
    batch = Layer.of(kind, device, T=T, B=3)
    alone = [batch.of_sequence(b) for b in range(3)]
    packed = batch.copy()
    packed.args = {n: x.flatten(0, 1).unsqueeze(0) if n in TOKENS else x for n, x in packed.args.items()}
    packed.args["offsets"] = torch.arange(4, device=device) * T
    want, together = batch(0, T), packed(0, 3 * T)
    assert same_bits(together.view(want.shape).cpu(), want.cpu()) and same_layers(packed, batch)
    for b, one in enumerate(alone):
        assert same_bits(one(0, T).cpu(), want[b : b + 1].cpu())
        assert same_bits(one.state.cpu(), batch.state[b : b + 1].cpu())


@each_kind
@pytest.mark.parametrize("hostile", [float("nan"), float("inf")])
def test_other_heads_and_sequences_keep_their_bits(kind: str, hostile: float, device: str):
    """What is not finite stays in its sequence and its head, or the heads of its key head."""
    A, clean = 4, Layer.of(kind, device, T=21)
    want = clean.copy()
    output = want(0, 21)
    of_key_head = range(2, 4)
    for name, touched in {"v": [2], "decay": [2], "beta": [2], "gate": [2], "q": of_key_head, "k": of_key_head}.items():
        if name not in clean.args:
            continue
        layer = clean.copy()
        layer.args[name] = layer.args[name].clone()
        layer.args[name][0, 9, 1 if name in "qk" else 2] = hostile
        got = layer(0, 21)
        others = [a for a in range(A) if a not in touched]
        heads = [h for h in range(A) if (h % 2 * 2 + h // 2 if layer.options.get("tiled") else h) in others]
        assert same_bits(got[:, :, heads].cpu(), output[:, :, heads].cpu()), name
        assert same_bits(layer.state[:, others].cpu(), want.state[:, others].cpu()), name
        assert same_bits(got[1].cpu(), output[1].cpu()) and same_bits(got[:, :9].cpu(), output[:, :9].cpu()), name
        assert not got[0].isfinite().all() or name in ("decay", "beta", "gate") or hostile == float("inf"), name


# ------------------------------------------------------------------------------------------------ drafts


def accepted_one_by_one(layer: Layer, tokens: list[int]) -> Tensor:
    """The outputs of these tokens, each in a call of its own."""
    return torch.cat([layer(t, t + 1) for t in tokens], 1)


@each_kind
def test_replayed_tokens_give_the_bits_of_direct_ones(kind: str, device: str):
    """A call that logs 16 tokens, after which 0 to 16 of them are accepted."""
    start = Layer.of(kind, device, T=16)
    for accepted in range(17):
        direct, drafting, log = start.copy(), start.copy(), start.log(16)
        outputs = drafting(0, 16, log)
        assert same_bits(drafting.state.cpu(), start.state.cpu())  # it is still that before the log
        log[:, accepted:] = float("nan")
        drafting(16, 16, log[:, :accepted], accepted)
        if accepted:
            want = accepted_one_by_one(direct, list(range(accepted)))
            assert same_bits(outputs[:, :accepted].contiguous().cpu(), want.cpu())
        assert same_bits(drafting.state.cpu(), direct.state.cpu())


@pytest.mark.slow_on_mps
@each_kind
def test_drafts_of_many_calls(kind: str, device: str):
    """Calls with 1 to 6 tokens, of which some are rejected and computed anew: the state has the bits of a run that
    computes each accepted token by itself."""
    choice, T = random.Random(kind), 40
    for _ in range(40):
        direct = Layer.of(kind, device, T=T, B=1)
        drafting, log, replay, position = direct.copy(), direct.log(0), 0, 0
        wanted, found = [], []
        while position < T:
            count = min(choice.randint(1, 6), T - position)
            logged = choice.choice([count, count, 0])
            rows = torch.cat([log[:, :replay], direct.log(logged)], 1)
            past = drafting.past
            before = torch.cat([past, inputs_of(drafting, position, position + count)], 1)
            outputs = drafting(position, position + count, rows, replay)
            accepted = choice.randint(1, count) if logged else count
            drafting.past = before[:, accepted : accepted + past.shape[1]]  # as a view of the cache's rows moves
            log, replay = rows[:, replay:], accepted if logged else 0
            wanted.append(accepted_one_by_one(direct, list(range(position, position + accepted))))
            found.append(outputs[:, :accepted])
            position += accepted
        drafting(T, T, log[:, :replay], replay)
        assert same_bits(torch.cat(found, 1).cpu(), torch.cat(wanted, 1).cpu())
        assert same_bits(drafting.state.cpu(), direct.state.cpu())


def inputs_of(layer: Layer, begin: int, end: int) -> Tensor:
    """The rows of the convolution's input."""
    tokens = layer.tokens(begin, end)
    return torch.cat([tokens[name].flatten(2) for name in layer.options.get("order", "qkv")], -1)


# ------------------------------------------------------------------------------------------------ long runs


@pytest.mark.slow
@pytest.mark.parametrize("alike", [False, True], ids=["any_keys", "alike"])
def test_thousands_of_tokens_without_decay(device: str, alike: bool):
    """Errors do not grow, also if keys are alike and all values are written."""
    case = Case("linear_attention_", "long", {"B": 1, "T": 4096, "J": 1, "A": 1, "D": 64, "V": 32}, ("state",))
    args = case.arguments()
    args["decay"].fill_(-float("inf"))
    args["beta"] += 3
    args["k"] = args["k"] * 0.3 + args["k"][:, :1] if alike else args["k"]
    exact = {name: tensor.double() for name, tensor in args.items()}
    want = call(reference.linear_attention_, case.op, exact, {})
    got = call(torch.ops.moe_metal.linear_attention_, case.op, {n: x.to(device) for n, x in args.items()}, {})
    for one, other in zip(got, want, strict=True):
        assert (one.cpu().double() - other).abs().max() <= 5e-5 * other.abs().max()


@pytest.mark.parametrize("dilation", [1, 3])
def test_a_short_convolution_may_be_cut(dilation: int, device: str):
    """At any token: `kept` of a call is `past` of the next one. Products with the gate are rounded first."""
    P = 3 * dilation
    case = Case("short_conv_", "cut", {"B": 2, "T": 30, "C": 37, "W": 4, "P": P}, ("input_gate", "past"), {}, BFLOAT)
    args, options = case.arguments(device), {"activation": "silu", "dilation": dilation}
    want = torch.ops.moe_metal.short_conv_(**args, **options)
    found, past = [], args["past"]
    for begin, end in itertools.pairwise((0, 1, 2, 9, 9, 30)):
        kept = torch.full_like(past, float("nan"))
        part = {name: args[name][:, begin:end] for name in ("x", "input_gate")}
        found.append(torch.ops.moe_metal.short_conv_(**args | part | {"past": past, "kept": kept}, **options))
        past = kept
    assert same_bits(torch.cat(found, 1).cpu(), want.cpu())
