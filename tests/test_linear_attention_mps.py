"""The ops linear_attention_ and short_conv_ on mps, beyond their cases: how the work is divided, cut prompts, the log,
layouts of the state, what is not read, and what a dispatch costs."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cases import BFLOAT, FLOAT, HALF
from checks import same_bits
from conftest import SIMULATED
from torch_moe_metal import recurrence

recorded = pytest.mark.skipif(not SIMULATED, reason="the simulated Metal records dispatches; a Mac's own does not")
Args = dict[str, Tensor]
WRITTEN = ("state", "kept", "log")
OF_TOKENS = ("q", "k", "v", "decay", "beta", "gate", "mask")

#: Sequences, tokens, key heads, value heads, sizes of keys and values: one for each way to divide the work.
DIVISIONS = {
    "one element": (1, 9, 1, 3, 1, 1),
    "keys of 64": (2, 9, 1, 2, 64, 64),
    "keys of 32": (1, 17, 2, 2, 32, 36),
    "keys of 128": (1, 19, 1, 2, 128, 128),
    "keys of 96": (1, 9, 1, 1, 96, 192),
    "keys of 192": (1, 9, 1, 2, 192, 72),
    "any rows": (1, 17, 2, 2, 17, 33),
    "many rows": (1, 9, 2, 4, 67, 99),
    "keys of 256": (1, 9, 1, 1, 256, 64),
    "tiles of columns": (1, 9, 1, 2, 256, 136),
}
DIVISION = pytest.mark.parametrize("name", DIVISIONS)


def drawn(name: str, W: int = 4, channels: bool = False, rule: str = "delta", dtype: torch.dtype = FLOAT) -> Args:
    """All arguments but `offsets` and `log`. The first half of the tokens has a mask."""
    B, T, J, A, D, V = DIVISIONS[name]
    C = 2 * J * D + A * V
    decays = (D,) if channels else ()
    shapes = {"q": (B, T, J, D), "k": (B, T, J, D), "v": (B, T, A, V), "decay": (B, T, A, *decays), "beta": (B, T, A)}
    shapes |= {"gate": (B, T, A, V), "log_rate": (A,), "decay_bias": (A, *decays), "norm_weight": (V,), "skip": (A,)}
    shapes |= {"conv_weight": (C, W), "conv_bias": (C,), "past": (B, W - 1, C), "kept": (B, W - 1, C)}
    shapes |= {"state": (B, A, D, V)}
    generator = torch.Generator().manual_seed(D + V)
    args = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    args = {name: tensor if name == "state" else tensor.to(dtype) for name, tensor in args.items()}
    if rule == "sum":
        del args["beta"]
    return args | {"mask": (torch.arange(T) % 3 > 0).expand(B, T) | (torch.arange(T) >= T // 2)}


def log_of(args: Args, rows: int) -> Tensor:
    """A log full of NaN."""
    (B, _, J, D), (A, V) = args["q"].shape, args["v"].shape[2:]
    return torch.full((B, rows, A * V + J * D + args["decay"][0, 0].numel()), math.nan)


def on(device: str, args: Args) -> Args:
    return {name: tensor.to(device, copy=True) for name, tensor in args.items()}


def close(got: Tensor, want: Tensor, what: str) -> None:
    error, largest = (got.cpu() - want).abs(), want.abs().amax() if want.numel() else 0.0
    assert bool((error <= {FLOAT: 2e-5, HALF: 2e-3, BFLOAT: 1e-2}[got.dtype] * largest).all()), what


def check(device: str, args: Args, op: str = "linear_attention_", **options) -> None:
    """The output, and the tensors that are written."""
    given, wide = on(device, args), {n: t.double() if t.is_floating_point() else t for n, t in args.items()}
    wide |= {name: wide[name].clone() for name in WRITTEN if name in wide}
    got, want = getattr(torch.ops.moe_metal, op)(**given, **options), getattr(recurrence, op)(**wide, **options)
    close(got, want, "output")
    for name in set(WRITTEN) & set(args):
        close(given[name], wide[name], name)


def some(args: Args, begin: int, end: int) -> Args:
    """The arguments of some of the tokens. State, past and kept remain those of `args`."""
    return {name: tensor[:, begin:end] if name in OF_TOKENS else tensor for name, tensor in args.items()}


def run(args: Args, **options) -> Tensor:
    return torch.ops.moe_metal.linear_attention_(**args, **options)


# ------------------------------------------------------------------------------------------------ values


@DIVISION
@pytest.mark.parametrize("W", [1, 2, 4, 6])
def test_every_division_of_the_work(mps: str, name: str, W: int):
    check(mps, drawn(name, W))


@DIVISION
def test_decays_per_channel(mps: str, name: str):
    check(mps, drawn(name, channels=True), decay_kind="sigmoid", tiled=True)


@DIVISION
@pytest.mark.parametrize("each_head", [False, True], ids=["all heads", "each head"])
def test_sum_with_norms_of_groups(mps: str, name: str, each_head: bool):
    args = drawn(name, rule="sum")
    A, V = args["v"].shape[2:]
    shape = (A, V) if each_head else (1, A * V)
    args["norm_weight"] = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    check(mps, args, rule="sum", qk_eps=None, gate_first=True, order="vkq", step_min=0.1, step_max=2.0)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=["half", "bfloat"])
def test_half_precision(mps: str, dtype: torch.dtype):
    check(mps, drawn("keys of 128", dtype=dtype))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "values contiguous": lambda state: state,
    "keys contiguous": lambda state: state.mT.contiguous().mT,
    "neither": lambda state: state.unsqueeze(-1).expand(*state.shape, 2).contiguous()[..., 0],
    "unaligned": lambda state: torch.cat([torch.zeros(1), state.reshape(-1)])[1:].view(state.shape),
}


@pytest.mark.parametrize("name", ["keys of 64", "any rows", "keys of 128", "keys of 192"])
def test_layouts_of_the_state(mps: str, name: str):
    """The same bits in each layout, and nothing is written around the state."""
    args, results = drawn(name), []
    for layout in LAYOUTS.values():
        given = on(mps, args)
        given["state"] = layout(args["state"]).to(mps)
        output = run(given)
        results.append((output, given["state"]))
    assert all(same_bits(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True))


@recorded
@DIVISION
def test_thread_orders(mps: str, name: str):
    import metal_sim

    args = drawn(name, channels=True)
    metal_sim.set_orders("forward", "backward", "random:1")
    try:
        check(mps, args | {"log": log_of(args, 4)})
    finally:
        metal_sim.set_orders("forward")


def test_infinite_state(mps: str):
    """Rows beyond the last one are not infinity times zero."""
    args = some(drawn("one element", rule="sum"), 4, 8)
    for name in ("conv_weight", "conv_bias", "past", "kept", "norm_weight", "skip"):
        del args[name]
    args["v"][:, 0] = math.inf
    given, wide = on(mps, args), {n: t.double() if t.is_floating_point() else t for n, t in args.items()}
    wide["state"] = wide["state"].clone()
    output, want = run(given, rule="sum"), recurrence.linear_attention_(**wide, rule="sum")
    assert want.isinf().all() and torch.equal(output.cpu().double(), want)
    assert torch.equal(given["state"].cpu().double(), wide["state"])


# ------------------------------------------------------------------------------------------------ cuts and logs


@pytest.mark.parametrize("cuts", [[1], [7], [8], [9], [0, 3, 5, 6, 16], list(range(1, 19))], ids=str)
def test_cut_prompts_have_equal_bits(mps: str, cuts: list[int]):
    whole, parts = on(mps, drawn("keys of 128")), on(mps, drawn("keys of 128"))
    want, got = run(whole), []
    for begin, end in itertools.pairwise([0, *cuts, 19]):
        got.append(run(some(parts, begin, end)))
        parts["past"] = parts["kept"].clone()
    assert same_bits(torch.cat(got, 1), want)
    assert same_bits(parts["state"], whole["state"]) and same_bits(parts["kept"], whole["kept"])


@pytest.mark.parametrize("channels", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize("name", ["keys of 64", "any rows", "keys of 128", "tiles of columns"])
def test_replayed_tokens_have_equal_bits(mps: str, name: str, channels: bool):
    """Each call computes some tokens, of which some are accepted. The next one begins after those. Rejected rows of the
    log become NaN: they are not read."""
    generator, done, replay = torch.Generator().manual_seed(0), 0, 0
    args = drawn(name, W=1, channels=channels)
    del args["past"], args["kept"]  # without any rows
    T, logged, direct, outputs = args["q"].shape[1], on(mps, args), on(mps, args), []
    log = log_of(args, 2 * T).to(mps)
    while done < T:
        count = min(1 + int(torch.randint(5, (), generator=generator)), T - done)
        L = int(torch.randint(count + 1, (), generator=generator))
        output = run(some(logged, done, done + count) | {"log": log[:, : replay + L]}, replay=replay)
        accepted = int(torch.randint(L + 1, (), generator=generator))
        outputs.append(output[:, : count - L + accepted])
        done += count - L + accepted
        log = torch.roll(log, -replay, 1)
        log[:, accepted:], replay = math.nan, accepted
    run(some(logged, 0, 0) | {"log": log[:, :replay]}, replay=replay)
    want = run(direct)
    assert same_bits(torch.cat(outputs, 1), want) and same_bits(logged["state"], direct["state"])


def test_more_replayed_tokens_than_a_block(mps: str):
    args = drawn("keys of 128")
    given, again = on(mps, args), on(mps, args)
    log = log_of(args, 19).to(mps)
    output = run(given | {"log": log})
    assert same_bits(given["state"], args["state"])
    none = {name: tensor for name, tensor in some(given, 0, 0).items() if name not in ("past", "kept")}
    run(none | {"log": log}, replay=19)
    assert same_bits(run(again), output) and same_bits(given["state"], again["state"])


def test_sequences_have_equal_bits_alone_and_packed(mps: str):
    """Offsets that decrease make empty sequences. Tokens outside of all sequences have outputs of 0."""
    args = drawn("any rows")
    generator = torch.Generator().manual_seed(0)
    args["state"] = torch.randn(5, 2, 17, 33, generator=generator)
    args["past"] = torch.randn(5, 3, args["conv_weight"].shape[0], generator=generator)
    args["kept"] = torch.full_like(args["past"], math.nan)
    del args["norm_weight"]
    for limits in ([-3, 2, 9, 4, 9, 14], [3, 5, 5, 5, 6, 40]):
        packed, alone = on(mps, args), on(mps, args)
        output = run(packed | {"offsets": torch.tensor(limits, device=mps)})
        edges = torch.tensor(limits).clamp(0, 17).cummax(0).values.tolist()
        for n, (begin, end) in enumerate(itertools.pairwise(edges)):
            own = {name: alone[name][n : n + 1] for name in ("state", "past", "kept")}
            assert same_bits(run(some(alone, begin, end) | own), output[:, begin:end])
        assert same_bits(packed["state"], alone["state"]) and same_bits(packed["kept"], alone["kept"])
        assert not output[:, : edges[0]].any() and not output[:, edges[-1] :].any()


@pytest.mark.parametrize("long", [False, True], ids=["int32", "int64"])
def test_tokens_outside_of_sequences_with_norms_of_groups(mps: str, long: bool):
    args = drawn("any rows")
    args |= {"offsets": torch.tensor([2, 5, 12], dtype=torch.int64 if long else torch.int32)}
    args |= {name: torch.cat([args[name]] * 2) for name in ("state", "past", "kept")}
    args["norm_weight"] = torch.ones(1, 66)
    args["gate"][:, [0, -1]] = math.nan
    check(mps, args, eps=0.0)


# ------------------------------------------------------------------------------------------------ what is not read


def test_nan_stays_in_its_sequence_and_head(mps: str):
    args = drawn("keys of 64")
    broken = on(mps, args)
    broken["v"][0, 4, 1] = math.nan
    output, want = run(broken), run(on(mps, args))
    assert output[0, 4:, 1].isnan().all() and broken["state"][0, 1].isnan().all()
    where = torch.ones_like(output, dtype=torch.bool)
    where[0, 4:, 1] = False
    assert torch.equal(output[where], want[where])


def test_nan_of_masked_tokens_is_not_read(mps: str):
    """Without a convolution, which spreads it before the mask."""
    args = {name: tensor for name, tensor in drawn("any rows").items() if name not in ("past", "kept")}
    del args["conv_weight"], args["conv_bias"]
    broken = on(mps, args)
    for name in ("k", "v"):
        broken[name][~broken["mask"]] = math.nan
    output, given = run(broken), on(mps, args)
    assert same_bits(output, run(given)) and same_bits(broken["state"], given["state"])


@pytest.mark.parametrize("W", [1, 2, 3, 4])
def test_nan_reaches_as_many_tokens_as_there_are_taps(mps: str, W: int):
    args = drawn("any rows", W)
    del args["mask"]
    clean, broken = on(mps, args), on(mps, args)
    broken["q"][:, 2] = math.nan
    output, want = run(broken), run(clean)
    assert output[:, 2 : 2 + W].isnan().all()
    assert same_bits(output[:, 2 + W :], want[:, 2 + W :]) and same_bits(broken["state"], clean["state"])


def test_no_tokens(mps: str):
    """What is kept is copied, and a state without anything to replay keeps its bits."""
    args = drawn("keys of 64")
    given = on(mps, args)
    assert run(some(given, 0, 0)).shape == (2, 0, 2, 64)
    assert same_bits(given["kept"], given["past"]) and same_bits(given["state"], args["state"])


def test_offsets_beyond_32_bits(mps: str):
    """Tokens, heads and rows that are 2^32 elements apart. Pages that are never touched need no memory."""
    args = drawn("any rows", dtype=HALF)
    args = {name: tensor[:, :2] if name in OF_TOKENS else tensor for name, tensor in args.items()}
    memory, given = torch.empty(2**33, dtype=HALF, device=mps), on(mps, args)
    for index, name in enumerate(("q", "k", "v", "decay", "beta", "gate", "past", "kept")):
        strides = list(args[name].stride())
        strides[1 if name in ("q", "past", "kept") else 2] = 2**31 if name in ("past", "kept") else 2**32
        given[name] = memory.as_strided(args[name].shape, strides, index * 2**20)
        given[name].copy_(args[name])
    want = on(mps, args)
    assert same_bits(run(given), run(want)) and same_bits(given["kept"], want["kept"])


# ------------------------------------------------------------------------------------------------ cost


def dispatched(args: Args, **options) -> list:
    import metal_sim

    with metal_sim.record(costs=True) as record:
        run(args, **options)
    assert not record.host_syncs
    return record.dispatches


@recorded
@pytest.mark.parametrize("T", [1, 8])
def test_the_state_is_read_and_written_once(mps: str, T: int):
    """With the heads of Qwen3.5: however many tokens. It is not written if all tokens are in a log."""
    B, J, A, D, V, W = 1, 16, 32, 128, 128, 4
    C = 2 * J * D + A * V
    joined = torch.ones(B, T, C, dtype=BFLOAT, device=mps)
    q, k, v = joined.split([J * D, J * D, A * V], -1)
    args = {"q": q.unflatten(-1, (J, D)), "k": k.unflatten(-1, (J, D)), "v": v.unflatten(-1, (A, V))}
    args |= {name: torch.ones(B, T, A, dtype=BFLOAT, device=mps) for name in ("decay", "beta")}
    args |= {"state": torch.ones(B, A, D, V, device=mps), "conv_weight": torch.ones(C, W, dtype=BFLOAT, device=mps)}
    args |= {"past": torch.ones(B, W - 1, C, dtype=BFLOAT, device=mps), "gate": torch.ones_like(args["v"])}
    args |= {"log": torch.empty(B, T, A * V + J * D + A, device=mps), "norm_weight": torch.ones(V, device=mps)}
    (one,) = dispatched(args)
    state, logged, output = args["state"].nbytes, args["log"].nbytes, args["v"].nbytes
    assert (one.kernel, one.grid[0], one.threads[0]) == ("linear_attention_128_bfloat", A, 512)
    assert one.costs.device_stored == logged + output
    channels = A * (2 * D + V) * 2  # bytes of a row: each value head reads its key head's
    inputs = channels * (W + (W - 1) + T) + 2 * output + 64 * A * T  # taps, past and tokens; gate; factors
    assert state + channels * (2 * W - 1 + T) < one.costs.device_loaded < state + inputs + 4 * A * V * T
    (one,) = dispatched({name: tensor for name, tensor in args.items() if name != "log"})
    assert one.costs.device_stored == state + output


@recorded
def test_dispatches(mps: str):
    """One, and two for norms that need more than one threadgroup."""
    args = on(mps, drawn("keys of 64"))
    assert len(dispatched(args)) == 1 and len(dispatched(args | {"norm_weight": torch.ones(2, 64, device=mps)})) == 1
    assert len(dispatched(args | {"norm_weight": torch.ones(1, 128, device=mps)})) == 2
    assert len(dispatched(on(mps, drawn("tiles of columns")))) == 2


# ------------------------------------------------------------------------------------------------ short_conv_


def convolution(T: int, W: int, dilation: int, dtype: torch.dtype = FLOAT) -> Args:
    """Gates whose product with x is exact, so that it needs no rounding."""
    B, C, before = 2, 70, (W - 1) * dilation
    shapes = {"x": (B, T, C), "weight": (C, W), "bias": (C,), "input_gate": (B, T, C), "output_gate": (B, T, C)}
    shapes |= {"past": (B, before, C), "kept": (B, before, C)}
    generator = torch.Generator().manual_seed(T)
    args = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return args | {"input_gate": args["input_gate"].sign() * 2}


@pytest.mark.parametrize("T, W, dilation", [(9, 3, 1), (1, 4, 1), (7, 2, 3), (0, 3, 2), (3, 1, 1)])
def test_short_convolutions(mps: str, T: int, W: int, dilation: int):
    for dtype in (FLOAT, BFLOAT):
        check(mps, convolution(T, W, dilation, dtype), "short_conv_", activation="silu", dilation=dilation)


def test_cut_convolutions_have_equal_bits(mps: str):
    op = torch.ops.moe_metal.short_conv_
    args = convolution(9, 3, 2, BFLOAT) | {"input_gate": torch.rand(2, 9, 70).to(BFLOAT)}
    whole, parts, got = on(mps, args), on(mps, args), []
    want = op(**whole, dilation=2)
    for begin, end in itertools.pairwise([0, 1, 6, 9]):
        cut = {name: parts[name][:, begin:end] for name in ("x", "input_gate", "output_gate")}
        got.append(op(**parts | cut, dilation=2))
        parts["past"] = parts["kept"].clone()
    assert same_bits(torch.cat(got, 1), want) and same_bits(parts["kept"], whole["kept"])
