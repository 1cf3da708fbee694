"""Ops with each instruction set of a wheel other than the best one of this machine, which all other tests use."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SELECTED = "equals_the_reference and (sample or bare or small or nan or inf or limit7.0 or pytorch or huge or many)"


def succeed(*arguments: str, **environment: str) -> str:
    """Run Python. Returns its output."""
    command = (sys.executable, *arguments)
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="one instruction set only, run by every other test"
)
@pytest.mark.parametrize("isa", ["default", "avx2"])
def test_equals_the_reference(isa: str):
    environment = {"ATEN_CPU_CAPABILITY": isa, "MOE_METAL_DEVICES": "cpu"}
    program = "import torch_moe_metal; print(torch_moe_metal.cpu_isa)"
    assert succeed("-c", program, **environment).strip() == isa
    pytest_run = ("-m", "pytest", "-m", "not slow", "-k", SELECTED, "tests/test_ops.py", "-p", "no:cacheprovider")
    assert " passed" in succeed(*pytest_run, **environment)
