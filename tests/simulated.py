"""This project on the simulated Metal device: builds it with metal_sim."""

import os
import subprocess
import sys
from pathlib import Path

import metal_sim

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "shaders"))
from embed import write_header  # noqa: E402

PROJECT = metal_sim.Project(
    name="moe_metal",
    sources=sorted((ROOT / "csrc" / "mps").glob("*.mm")),
    include=[ROOT / "csrc", ROOT / "shaders"],
    prepare=lambda folder: write_header(folder / "shader_texts.h"),
)


def load() -> None:
    """Load the mps device, and this project's mps kernels on it. Further calls do nothing.

    Kernels are compiled only when they are launched, because each takes clang seconds, and are not checked at first
    use, unless a test needs otherwise."""
    os.environ.setdefault("MOE_METAL_WARM_UP", "0")
    os.environ.setdefault("TORCH_MOE_METAL_CHECK", "0")
    metal_sim.load(PROJECT)


START = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import torch, torch_moe_metal, simulated, metal_sim
from torch_moe_metal import glu, norm_add

def message_of(call, *args):  # the error
    try:
        call(*args)
    except RuntimeError as error:
        return str(error)

simulated.load()
torch.set_grad_enabled(False)
x = torch.ones(1, 64, device="mps")
"""


def lines_of(script: str, compiler: str | None = None, folder: Path | None = None) -> list[str]:
    """The output of a script after START, in a new process that has compiled no shader yet. `compiler` is a shell
    script that compiles shaders, in `folder`."""
    environment, start = os.environ.copy(), START
    if compiler is not None:
        program = folder / "compiler"
        program.write_text(f"#!/bin/sh\ncd {folder}\n{compiler}")
        program.chmod(0o755)
        environment["METAL_SIM_CACHE"] = str(folder / "cache")
        # after the import: the device itself is built with clang
        start += f"os.environ['METAL_SIM_CXX'] = {str(program)!r}\n"
    run = [sys.executable, "-c", start + script]
    done = subprocess.run(run, cwd=Path(__file__).parent, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
