"""Checks whether PyTorch can compute on this machine's Apple GPU: `python tools/mps.py [--needed]`.

A virtual Mac has a virtual GPU. PyTorch reports it as available, but the first allocation on it may fail, and it lacks
features that our kernels need (check_device in csrc/mps/pipelines.mm). So this checks the GPU's name and computes a
sum. With `--needed` it fails if there is no usable device. In a GitHub job it also writes the result for the next steps
(`mps=true` or `mps=false`) and into the job's summary.
"""

import os
import platform
import runpy
import subprocess
import sys
from pathlib import Path

import torch

MACOS = runpy.run_path(str(Path(__file__).resolve().parents[1] / "torch_moe_metal" / "macos.py"))


def why_not() -> str | None:
    """None if the device computes, else the error."""
    if not torch.backends.mps.is_available():
        return "PyTorch finds no usable Apple GPU"
    if "Paravirtual" in (name := torch.backends.mps.get_name()):
        return f"the GPU is a virtual one, {name}"
    try:
        ones = torch.ones(1 << 20, device="mps")
        total = (ones + ones).sum().item()
    except RuntimeError as error:
        return f"PyTorch calls it available, but: {str(error).splitlines()[0]}"
    return None if total == 2 << 20 else f"PyTorch calls it available, but adds up {2 << 20} to {total:.0f}"


def machine() -> str:
    if sys.platform != "darwin":
        return platform.platform()
    chip = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True).stdout.strip()
    return f"{chip}, macOS {MACOS['version']()}, torch {torch.__version__}"


def append(variable: str, text: str) -> None:
    """Append to a file named by GitHub, if this is a GitHub job."""
    if path := os.environ.get(variable):
        with open(path, "a") as file:
            file.write(text + "\n")


def main() -> int:
    problem = why_not()
    append("GITHUB_OUTPUT", f"mps={'false' if problem else 'true'}")
    if problem:
        summary = f"## NOT RUN ON mps: CPU only\n{machine()}: {problem}. **No Metal kernel ran here.**"
    else:
        summary = f"## mps is there and computes\n{machine()}"
    append("GITHUB_STEP_SUMMARY", summary)
    print(summary)
    return int(problem is not None and "--needed" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
