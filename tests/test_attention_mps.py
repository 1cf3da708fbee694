"""The op attention on mps, beyond its values: how its work is divided, what it loads, and what it does not read."""

import math

import pytest
import torch
from torch import Tensor

from cases import BFLOAT, FLOAT, HALF
from checks import assert_matches
from conftest import SIMULATED
from torch_moe_metal import reference

recorded = pytest.mark.skipif(not SIMULATED, reason="the simulated Metal records dispatches; a Mac's own does not")
Args = dict[str, Tensor]

#: Sequences, heads, key heads, queries, keys, sizes of keys and values: one for each way to divide the work.
CUTS = {
    "key parts": (1, 8, 2, 1, 100, 64, 64),  # four simdgroups divide the keys of 8 rows,
    "key parts of two tiles": (1, 4, 1, 3, 100, 64, 64),  # two divide those of 16,
    "tiles": (2, 4, 2, 20, 70, 128, 96),  # or each has all keys for rows of its own
    "parts": (1, 8, 2, 1, 700, 128, 128),
    "parts of tiles": (1, 2, 1, 9, 700, 64, 64),
    "many parts": (1, 6, 2, 1, 1500, 67, 99),
    "two column parts": (1, 4, 2, 3, 70, 192, 256),
    "four column parts": (1, 16, 1, 1, 300, 576, 512),
    "two threadgroups of columns": (1, 2, 1, 3, 70, 64, 1096),
    "tiles that are not kept": (1, 2, 2, 3, 70, 680, 64),
    "odd": (2, 3, 1, 5, 70, 67, 99),
}
CUT = pytest.mark.parametrize("name", CUTS)


def drawn(B: int, A: int, J: int, T: int, S: int, D: int, V: int, dtype: torch.dtype = FLOAT) -> Args:
    generator = torch.Generator().manual_seed(S)
    shapes = {"q": (B, A, T, D), "k": (B, J, S, D), "v": (B, J, S, V), "sinks": (A,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def wanted(args: Args, **options) -> Tensor:
    return reference.attention(**{n: t.double() if t.is_floating_point() else t for n, t in args.items()}, **options)


def check(device: str, args: Args, **options) -> None:
    got = torch.ops.moe_metal.attention(**{n: t.to(device) for n, t in args.items()}, **options)
    assert_matches([got], [wanted(args, **options)])


def dispatched(device: str, args: Args, **options) -> list:
    import metal_sim

    given = {name: tensor.to(device) for name, tensor in args.items()}
    with metal_sim.record(costs=True) as record:
        torch.ops.moe_metal.attention(**given, **options)
    assert not record.host_syncs
    return record.dispatches


# ------------------------------------------------------------------------------------------------ values


@CUT
def test_every_division_of_the_work(mps: str, name: str):
    check(mps, drawn(*CUTS[name]), causal=True)


@CUT
def test_invisible_keys(mps: str, name: str):
    """A third of the rows see all keys, a third all except NaN keys, and a third only finite ones. Values of keys that
    a row does not see must not reach it."""
    args = drawn(*CUTS[name])
    B, A, T, S = *args["q"].shape[:3], args["k"].shape[2]
    args["v"][:, :, 1::8, ::2] = math.nan
    args["v"][:, :, 5::8, 1::2] = math.inf
    args["k"][:, :, 7::8] = math.nan
    row = (torch.arange(A).view(A, 1, 1) % (A // args["k"].shape[1]) + torch.arange(T).view(T, 1)) % 3
    key = torch.arange(S)
    args["mask"] = ((row == 0) | ((row == 1) & (key % 8 < 7)) | (key % 2 == 0)).expand(B, A, T, S)
    check(mps, args)
    want = wanted(args)
    assert want.isnan().any() and want.isinf().any() and want.isfinite().any()


@pytest.mark.parametrize("S, causal", [(64, False), (0, False), (5, True)])
def test_queries_without_visible_keys(S: int, causal: bool, mps: str):
    """All of them; without keys; and the first ones, if there are more queries than keys."""
    args = drawn(1, 4, 2, 9, S, 64, 64)
    if not causal:
        args["mask"] = torch.full((1, 1, 9, S), -math.inf)
    got = torch.ops.moe_metal.attention(**{n: t.to(mps) for n, t in args.items()}, causal=causal)
    assert torch.equal(got[:, :4].cpu(), torch.zeros(1, 4, 4, 64))
    assert_matches([got], [wanted(args, causal=causal)])


@pytest.mark.parametrize("D, V", [(64, 64), (67, 99)])
def test_offsets_beyond_32_bits(D: int, V: int, mps: str):
    """Heads, and queries of a mask, that are 2^32 elements apart. Pages that are never touched need no memory."""
    args = drawn(1, 2, 2, 2, 40, D, V, HALF) | {"mask": torch.randn(1, 2, 2, 40).to(HALF)}
    memory = torch.empty(2**32 + 2**24, dtype=HALF, device=mps)
    given = {"sinks": args["sinks"].to(mps)}
    for index, (name, apart) in enumerate({"q": 1, "k": 1, "v": 1, "mask": 2}.items()):
        strides = list(args[name].stride())
        strides[apart] = 2**32
        given[name] = memory.as_strided(args[name].shape, strides, index * 2**20)
        given[name].copy_(args[name])
    assert_matches([torch.ops.moe_metal.attention(**given)], [wanted(args)])


# ------------------------------------------------------------------------------------------------ cost


@recorded
def test_bytes_loaded_per_token(mps: str):
    """With the heads of Qwen3-30B-A3B each key and value is loaded once for all heads that share it. All the rest are
    queries, once for each simdgroup."""
    args = drawn(1, 32, 4, 1, 4096, 128, 128, BFLOAT)
    attention, combine = dispatched(mps, args, causal=True)
    assert (attention.kernel, combine.kernel) == ("attention_128_wide_bfloat", "attention_combine_bfloat")
    keys = args["k"].nbytes + args["v"].nbytes
    simdgroups = attention.grid[0] * attention.grid[1] * 4
    assert attention.costs.device_loaded == keys + simdgroups * 8 * 128 * 2
    assert attention.costs.matrix_multiplications == 4 * 4096 // 8 * (128 // 8) * 2
    assert attention.costs.device_stored < keys / 8 and combine.costs.device_loaded < keys / 8


@recorded
def test_masked_keys_are_not_loaded(mps: str):
    """The last token of a window; and the keys after each query of a prompt, almost half of all."""
    window = dispatched(mps, drawn(1, 8, 1, 1, 4096, 64, 64, BFLOAT), causal=True, window=128)
    assert len(window) == 1 and window[0].costs.device_loaded < 2 * 128 * 64 * 2 * 1.2
    prompt = drawn(1, 4, 4, 256, 256, 64, 64, BFLOAT)
    (whole,), (causal,) = dispatched(mps, prompt), dispatched(mps, prompt, causal=True)
    assert causal.costs.matrix_multiplications < 0.6 * whole.costs.matrix_multiplications
