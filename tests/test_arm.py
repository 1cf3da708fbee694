"""Packed and dense weights on an emulated ARM processor, compiled as for a Mac: unchanged tests of the CPU's ops.

arm/build.py compiles the ops, and arm/emulated.py sends the tests' calls to them. Then readers are broken, one line at
a time, and the test in each row must fail. On an ARM processor all tests use these readers anyway.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from arm import build
from test_mutated_cpu_readers import changed

TESTS = Path(__file__).resolve().parent
CHOSEN = (
    "dequantize_ or linear_equals or experts_equal or few_tokens or small_scale or affine_scale or infinite_scale or "
    "every_scale or separate or equals_the_reference and sample and (experts or linear or dequantize) or "
    "equals_the_reference and experts and many_tokens-T"
)
emulated = [
    pytest.mark.slow,  # only by `make test-arm`: it needs qemu and the aarch64 wheel of torch
    pytest.mark.skipif(platform.machine() in ("arm64", "aarch64"), reason="all tests run on ARM here"),
    pytest.mark.timeout(1800),
]


@dataclass(frozen=True)
class Fault:
    name: str
    file: str  # of csrc/cpu/arm
    line: str
    broken: str
    reached: str  # the file that is compiled again
    test: str  # the test that must fail

    def __str__(self) -> str:
        return self.name


GGUF = "test_ggml.py::test_dequantize_equals_gguf"
FAULTS = [
    Fault("nibble_twice", "codes.h", "vsliq_n_u16(both, both, 4)", "vsliq_n_u16(both, both, 0)", "affine_rows",
          "test_quantized.py::test_dequantize_affine_equals_mlx"),
    Fault("sign_of_a_code", "codes.h", "is_signed ? vcvtq", "!is_signed ? vcvtq", "ggml_32_rows", GGUF),
    Fault("digit_lost", "integer_dots.h", "low = vcvtq_f32_s32(all[2])", "low = vdupq_n_f32(0)", "affine_rows",
          "test_quantized.py::test_few_tokens_of_any_magnitude"),
    Fault("rest_lost", "integer_dots.h", "if (rests > 0)", "if (false)", "float_rows",
          "test_quantized.py::test_few_tokens_with_a_number_that_no_weight_uses"),
    Fault("beyond_the_last_byte", "codes.h", "vmovl_u8(vld1_u8(from))", "vmovl_u8(vget_low_u8(vld1q_u8(from)))",
          "affine_rows", "test_quantized.py::test_dequantize_affine_equals_mlx"),
]  # fmt: skip


def run_tests(program: Path, *chosen: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"ARM_CALLS": str(program), "MOE_METAL_DEVICES": "cpu"}
    command = [sys.executable, "-m", "pytest", "-p", "arm.emulated", "-x", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "-m", "not slow", *chosen], cwd=TESTS, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def program() -> Path:
    return build.build()


def marked(test):
    for mark in emulated:
        test = mark(test)
    return test


@marked
def test_experts_and_linear_on_arm(program: Path):
    done = run_tests(program, "test_quantized.py", "test_ggml.py", "test_ops.py", "-k", CHOSEN)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) calls on ARM", done.stdout)[1]) > 900


@marked
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_broken_readers_are_detected(program: Path, fault: Fault, tmp_path: Path):
    sources = tmp_path / "csrc"
    shutil.copytree(build.ROOT / "csrc", sources)
    changed(sources / "cpu" / "arm" / fault.file, fault.line, fault.broken)
    done = run_tests(build.build(sources, tmp_path / "built", {fault.reached}), fault.test)
    assert f"FAILED {fault.test}" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
