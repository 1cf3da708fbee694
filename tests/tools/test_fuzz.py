"""A few hundred fuzzed calls, the same in every run; and tests that the fuzzer can fail."""

import itertools
import sys

import pytest
import torch
from torch import Tensor

import cases
import fuzz
import fuzz_cases
import fuzz_checks
from torch_moe_metal import reference
from torch_moe_metal.arguments import DTYPES

CASES = 240  # `make fuzz` runs any number

ONE_OP = {"norm_add": fuzz_cases.ARGUMENTS["norm_add"]}

# A child in which norm_add kills its process in bfloat16, never ends in float16, and is wrong in float32.
BROKEN = f"""
import ctypes, sys, time
sys.path.insert(0, {str(fuzz.HERE)!r})
import cases, fuzz, fuzz_cases, fuzz_checks
from torch_moe_metal.arguments import DTYPES
def call(function, op, args, options):
    found = cases.call(function, op, args, options)
    kind = DTYPES[found[0].dtype]
    return ctypes.string_at(0) if kind == "bf16" else time.sleep(60) if kind == "f16" else [found[0] * 1.001]
fuzz_checks.call, fuzz_checks.SECONDS = call, 3.0
fuzz_cases.ARGUMENTS = {{"norm_add": fuzz_cases.ARGUMENTS["norm_add"]}}
fuzz.main()
"""


def test_no_case_fails():
    tally = fuzz.fuzz(0, CASES)
    assert not tally.failures, "\n".join(f"{f.target}-{f.number}: {f.text}" for f in tally.failures)
    assert tally.outcomes.total() == CASES
    for target in fuzz.targets():
        assert tally.outcomes[target, "right"] > tally.outcomes[target, "refused"] > 0


def replace(found: list[Tensor], output: Tensor) -> None:
    found[0] = output


@pytest.mark.parametrize("off, times", [(0, 0), (2e-6, 2), (1e-3, 8)])
def test_errors_like_those_of_a_float32_reference_pass(off: float, times: int):
    want = torch.ones(8, dtype=torch.float64)
    assert fuzz_checks.times_allowed((want + off).float(), want) == pytest.approx(times, 0.1)


def test_values_near_0_pass_like_a_float32_reference():
    want, chosen = torch.full((8,), 1e-39, dtype=torch.float64), torch.ones(8, dtype=torch.bool)
    like = (want + 1e-41).float()
    fuzz_checks.too_small((want + 1.9e-41).float(), want, [like], chosen, 1, 0.0)
    for off, by in ((3e-41, like), (1e-41, want.float())):
        with pytest.raises(AssertionError, match="next to 0"):
            fuzz_checks.too_small((want + off).float(), want, [by], chosen, 1, 0.0)


WRONG = {
    "relative L2 error": lambda found, args: found[0].mul_(1.03),
    "an element is wrong|relative L2 error|expected": lambda found, args: found[0].view(-1)[-1:].add_(1.0),
    "wrong dtypes": lambda found, args: replace(found, found[0].double()),
    "wrong shapes": lambda found, args: replace(found, found[0][..., 1:].contiguous()),
    "an output has strides": lambda found, args: replace(found, torch.stack([found[0], found[0]], -1)[..., 0]),
    "uses the memory": lambda found, args: replace(found, args["residual"].reshape(found[0].shape)),
    "memory of an input, or next to it": lambda found, args: args["input"].zero_(),
    "other bits in the second run": lambda found, args: found[0].mul_(1 + 2e-7 * torch.randint(3, ()).item()),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_broken_op_is_found(words: str, monkeypatch):
    def call(function, op: str, args: dict, options: dict) -> list[Tensor]:
        found = cases.call(function, op, args, options)
        WRONG[words](found, args)
        return found

    monkeypatch.setattr(fuzz_checks, "call", call)
    monkeypatch.setattr(fuzz_cases, "ARGUMENTS", ONE_OP)
    said = []
    for number in range(60):
        try:
            fuzz_checks.check(fuzz_cases.draw(1, number), "cpu")
        except AssertionError as error:
            said.append(str(error))
    assert sum(any(word in text for word in words.split("|")) for text in said) >= 2, said


def test_tolerance_depends_on_experts_only_if_the_op_has_them(monkeypatch):
    monkeypatch.setattr(fuzz_cases, "ARGUMENTS", ONE_OP)
    monkeypatch.setattr(fuzz_checks, "call", lambda *call: [output.mul_(1 + 2e-5) for output in cases.call(*call)])
    drawn = (fuzz_cases.draw(2, number) for number in itertools.count())
    plain = (one for one in drawn if one.good and not one.changes and one.case.dtype == torch.float32)
    with pytest.raises(AssertionError, match="relative L2 error"):
        fuzz_checks.check(next(one for one in plain if one.case.dims["K"] > 400), "cpu")


def test_errors_must_name_op_and_argument(monkeypatch):
    def call(*_) -> None:
        raise RuntimeError("moe_metal::norm_add: something is wrong")

    monkeypatch.setattr(fuzz_checks, "call", call)
    monkeypatch.setattr(fuzz_cases, "ARGUMENTS", ONE_OP)
    drawn = [fuzz_cases.draw(1, number) for number in range(30)]
    for one in drawn:
        wanted = "a good call was refused" if one.good else "names no op or no argument"
        with pytest.raises(AssertionError, match=wanted):
            fuzz_checks.check(one, "cpu")
    assert {one.good for one in drawn} == {True, False}


def test_a_wrong_tolerance_is_found(monkeypatch):
    monkeypatch.setattr(fuzz_cases, "ARGUMENTS", ONE_OP)
    monkeypatch.setattr(fuzz_checks, "unsure", lambda want, *_: torch.zeros_like(want, dtype=torch.bool))
    monkeypatch.setattr(reference, "TOLERANCES", dict.fromkeys(reference.TOLERANCES, 1e-12))
    with pytest.raises(AssertionError, match=r"relative L2 error|next to 0"):
        for number in range(20):
            fuzz_checks.check(fuzz_cases.draw(1, number), "cpu")


def test_a_crashing_case_is_reported_and_others_run(monkeypatch, capsys):
    seed, words = (
        401,
        [  # it draws the three dtypes in this order, all of them good
            "Segmentation fault",
            "Timeout",
            "AssertionError",
        ],
    )
    tally = fuzz.fuzz(seed, 3, ["default"], [sys.executable, "-X", "faulthandler", "-c", BROKEN])
    monkeypatch.setattr(fuzz_cases, "ARGUMENTS", ONE_OP)
    drawn = [fuzz_cases.draw(seed, number) for number in range(3)]
    assert all(one.good for one in drawn)
    assert [DTYPES[one.case.dtype] for one in drawn] == ["bf16", "f16", "f32"]
    assert [failure.number for failure in tally.failures] == [0, 1, 2] and tally.outcomes.total() == 3
    assert all(text in failure.text for text, failure in zip(words, tally.failures, strict=True))
    out = capsys.readouterr().out
    assert all(out.count(f"make fuzz SEED={seed} CASE=default-{number}\n") == 2 for number in range(3))


def test_every_op_option_and_kind_of_memory_is_drawn():
    calls = [fuzz_cases.draw(0, number) for number in range(400)]
    assert {call.op for call in calls} == set(fuzz_cases.ARGUMENTS)
    for op in fuzz_cases.ARGUMENTS:
        drawn = [call for call in calls if call.op == op]
        assert {name for call in drawn for name in call.layouts} == set(fuzz_cases.ARGUMENTS[op])
        assert {name for call in drawn for name in call.options} >= set(fuzz_cases.signature(op))
    kinds = {layout.kind.split(" ")[0] for call in calls for layout in call.layouts.values()}
    assert kinds >= {"exact", "contiguous", "strided", "padded", "transposed", "expanded", "overlapping", "within"}
    assert "packed" in kinds and {call.alongside for call in calls} == {"nothing", "threads", "forks"}
    assert fuzz_cases.choices("route", "scoring") == tuple(reference.SCORING)


def test_cases_are_reproducible():
    for number in range(20):
        first, second = fuzz_cases.draw(3, number), fuzz_cases.draw(3, number)
        assert str(first) == str(second)
        for one, other in zip(first.layouts.values(), second.layouts.values(), strict=True):
            assert torch.equal(one.memory.nan_to_num(), other.memory.nan_to_num())
