"""Tests of the checkers: they detect wrong results, changed memory and near ties."""

import pytest
import torch

from cases import CASES, HALF, OPTIONAL, SAMPLES, Case, expected, grids, oracle
from checks import Guarded, assert_matches, bits, strides_of
from torch_moe_metal import reference
from torch_moe_metal.arguments import ARGUMENTS, without
from torch_moe_metal.reference import TOLERANCES

WANT = torch.randn(64, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_an_error_of_ten_tolerances_is_detected(dtype: torch.dtype):
    assert_matches([WANT.to(dtype)], [WANT])
    with pytest.raises(AssertionError, match="relative L2"):
        assert_matches([(WANT * (1 + 10 * TOLERANCES[dtype])).to(dtype)], [WANT])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_one_wrong_element_among_many_is_detected(dtype: torch.dtype):
    want = torch.ones(4000, 1000, dtype=torch.float64)
    got = want.to(dtype)
    got[3999, 999] *= 1 + 40 * TOLERANCES[dtype]
    with pytest.raises(AssertionError, match="an element"):
        assert_matches([got], [want])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_detected(wrong: float):
    got = WANT.float()
    got[5, 7] = wrong
    with pytest.raises(AssertionError):
        assert_matches([got], [WANT])
    with pytest.raises(AssertionError):  # a finite value must not replace one that is not finite
        assert_matches([WANT.float()], [got.double()])
    assert_matches([got], [got.double()])


def test_any_infinity_does_not_accept_finite_values():
    inf, nan = float("inf"), float("nan")
    want = torch.tensor([inf, nan, 1.0], dtype=torch.float64)
    for got in ([nan, inf, 1.0], [-inf, -inf, 1.0]):
        assert_matches([torch.tensor(got)], [want], any_infinity=True)
        with pytest.raises(AssertionError):
            assert_matches([torch.tensor(got)], [want])
    for got in ([1.0, nan, 1.0], [inf, 1.0, 1.0], [inf, nan, nan]):
        with pytest.raises(AssertionError):
            assert_matches([torch.tensor(got)], [want], any_infinity=True)


def test_overflow_of_the_output_dtype_is_expected_where_the_oracle_has_it():
    assert_matches([torch.tensor([float("inf"), 1.0], dtype=HALF)], [torch.tensor([1e6, 1.0], dtype=torch.float64)])
    with pytest.raises(AssertionError):
        assert_matches([torch.tensor([65504.0, 1.0], dtype=HALF)], [torch.tensor([1e6, 1.0], dtype=torch.float64)])


def test_wrong_ids_and_shapes_are_detected():
    ids = torch.tensor([[3, 1, 2]], dtype=torch.int32)
    assert_matches([ids], [ids.clone()])
    for wrong in (torch.tensor([[3, 2, 1]], dtype=torch.int32), ids.long(), ids[0]):
        with pytest.raises(AssertionError):
            assert_matches([wrong], [ids])


@pytest.mark.parametrize("kind", ["contiguous", "strided", "padded", "transposed"])
def test_a_changed_guard_is_detected(kind: str):
    tensor = torch.arange(12.0).view(3, 4)
    outside = Guarded(tensor, kind, 3)
    assert torch.equal(outside.view, tensor) and list(outside.view.stride()) == strides_of(tensor.shape, kind)
    outside.assert_untouched("x")
    outside.view[1, 1] = -1.0
    outside.assert_untouched("x", written=True)
    with pytest.raises(AssertionError, match="memory of an input"):
        outside.assert_untouched("x")
    for place in (0, outside.view.storage_offset() - 1, len(outside.storage) - 1):
        guarded = Guarded(tensor, kind, 3)
        guarded.storage[place] = 0.0
        with pytest.raises(AssertionError, match="memory next to it"):
            guarded.assert_untouched("x", written=True)


def test_bits_are_a_copy(device: str):
    for tensor in (torch.ones(3, 4, device=device), torch.ones(4, 3, device=device).mT):
        before = bits(tensor)
        tensor[1, 1] = -1.0
        assert not torch.equal(bits(tensor), before)


def test_near_ties_are_detected():
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 2.0], [1.0, 2.0, 2.0 + 1e-6]])
    biases = {"select_bias": torch.tensor([0.5, 0.0, 0.0])}
    options = {"top_k": 2, "scoring": "sigmoid"}
    assert oracle.clear_choice("route", {"logits": logits} | biases, options).tolist() == [True, True, False]
    assert oracle.clear_choice("route", {"logits": logits}, options).all()  # the logits themselves are compared


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_every_argument_matters(case: Case):
    """The samples detect a kernel that ignores an argument: without it, or with another one, the result differs."""
    args = case.arguments()
    want = expected(case.op, args, case.options)
    for name in case.shapes:
        changed = dict(args)
        options = case.options
        if name in OPTIONAL[case.op]:
            changed = {other: args[other] for other in without(case.op, args, name)}
            options = options if "log" in changed else options | dict.fromkeys({"replay"} & set(options), 0)
        else:
            other = args[name].flip(0 if len(args[name]) > 1 else -1) if args[name].numel() > 1 else 2 * args[name]
            changed[name] = other if name != "hidden" else -args[name].flip(-1)
        with pytest.raises(AssertionError):
            assert_matches(expected(case.op, changed, options), want, case.longest_sum)


@pytest.mark.parametrize("case", [case for case in SAMPLES if case.op == "experts"], ids=str)
def test_the_two_oracles_of_experts_agree(case: Case):
    args = {name: t.double() if t.is_floating_point() else t for name, t in case.arguments().items()}
    args["ids"][1:3] = torch.tensor([-1, 2, 2, 1000, 5, 5, 5, 0])[: args["ids"].shape[1]]
    assert_matches([oracle.experts_one_by_one(**args, **case.options)], [reference.experts(**args, **case.options)])


def test_the_table_is_complete():
    """Every op, every value of the grids, every named case once."""
    assert {case.op for case in SAMPLES} == set(ARGUMENTS)
    names = [str(case) for case in CASES]
    assert len(set(names)) == len(names)
    for op, letters in {"gate": "TEKH", "route": "TEK", "experts": "TEKHI", "glu": "TI", "weighted_sum": "TKH"}.items():
        for letter in letters:
            seen = {case.dims[letter] for case in CASES if case.op == op}
            grid = {"T": grids.T_GRID, "E": grids.E_GRID, "K": grids.K_GRID[:-1]}.get(letter, grids.H_GRID)
            assert seen >= set(grid), f"{op} {letter}: {sorted(set(grid) - seen)}"


def test_pairwise_covers_every_pair():
    factors = {"a": (1, 2, 3, 4), "b": "xyz", "c": (True, False), "d": (0, 5)}
    rows = grids.pairwise(lambda **_: True, **factors)
    for one in factors:
        for other in factors:
            pairs = {(row[one], row[other]) for row in rows}
            assert one == other or len(pairs) == len(factors[one]) * len(factors[other])
    assert len(rows) < 4 * 3 * 2 * 2 // 2
    assert all(row["a"] + row["d"] < 8 for row in grids.pairwise(lambda a, d, **_: a + d < 8, **factors))
