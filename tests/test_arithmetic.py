"""Arithmetic of Apple's GPUs that differs from the simulated one, emulated by it: which results stay right."""

import pytest

from conftest import DEVICES, SIMULATED
from simulated import lines_of
from torch_moe_metal.commands import doctor

pytestmark = pytest.mark.skipif(not SIMULATED or "mps" not in DEVICES, reason="only the simulated Metal plays others")

CHECKS = """
from torch_moe_metal.commands import doctor
from torch_moe_metal.commands.bench.samples import Sample, problem
for op, dtype, tokens, format in {checks}:
    print(op, format, problem(Sample(op, tokens, format), "mps", getattr(torch, dtype)))
"""


def lines_about(*checks: tuple[str, str, int, str], more: str = "") -> list[str]:
    """doctor's result for an op in a format, on a line for each; then what `more` prints. Each process of Python takes
    seconds to start."""
    return lines_of(CHECKS.format(checks=checks) + more)


def results(lines: list[str]) -> dict[tuple[str, str], str]:
    """By op and format."""
    return {(op, format): said for op, format, said in (line.split(" ", 2) for line in lines)}


def test_flushed_halves_are_detected(monkeypatch: pytest.MonkeyPatch, mps: str) -> None:
    """Codes of packed weights are subnormal halves; a GPU that flushes those to 0 must be detected."""
    monkeypatch.setenv("METAL_SIM_ARITHMETIC", "flush_half")
    formats = ("dense", "affine", "mxfp4", "fp8")
    checks = (("dequantize", "float32", 5, format) for format in formats)
    *lines, line = lines_about(*checks, more='print(doctor.subnormal_halves("mps"))')
    said = results(lines)
    assert [format for format in formats if "relative error" in said["dequantize", format]] == [*formats[1:]]
    assert line.startswith("half subnormals are flushed on this GPU") and line.endswith("expected 0.5, got 0.0")
    assert doctor.subnormal_halves(mps) is None  # in this process the variable was not set


@pytest.mark.slow
def test_flushed_floats_and_contracted_products_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's GPUs flush subnormal floats, and may round a * b + c once."""
    monkeypatch.setenv("METAL_SIM_ARITHMETIC", "flush_float,contract")
    packed = [("experts", "bfloat16", T, format) for T in (5, 50) for format in ("affine", "mxfp4", "fp8", "q4_k")]
    dense = [(op, "float32", 5, "dense") for op in ("gate", "experts", "norm_add", "attention", "glu", "rope")]
    dense += [(op, "float32", 50, "dense") for op in ("linear_attention_", "short_conv_")]
    said = results(lines_about(*packed, *dense))
    assert {*said.values()} == {"None"}, said
