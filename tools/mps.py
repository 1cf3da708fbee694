"""Says whether PyTorch can really compute on this machine's Apple GPU: `python tools/mps.py [--needed]`.

A virtual Mac has a virtual GPU, which PyTorch calls available although the first allocation on it may fail. So this
asks for a sum. With `--needed` it fails when there is no such device. In a GitHub job it also writes the answer where
the next steps (`mps=true` or `mps=false`) and people (the job's summary) read it.
"""

import os
import platform
import subprocess
import sys

import torch


def why_not() -> str | None:
    """None when the device computes, else what is wrong."""
    if not torch.backends.mps.is_available():
        return "PyTorch finds no usable Apple GPU"
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
    return f"{chip}, macOS {platform.mac_ver()[0]}, torch {torch.__version__}"


def append(variable: str, text: str) -> None:
    """To the file that GitHub names there, if this is a GitHub job."""
    if path := os.environ.get(variable):
        with open(path, "a") as file:
            file.write(text + "\n")


def main() -> int:
    problem = why_not()
    append("GITHUB_OUTPUT", f"mps={'false' if problem else 'true'}")
    if problem:
        told = f"## NOT RUN ON mps: CPU only\n{machine()}: {problem}. **No Metal kernel ran here.**"
    else:
        told = f"## mps is there and computes\n{machine()}"
    append("GITHUB_STEP_SUMMARY", told)
    print(told)
    return int(problem is not None and "--needed" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
