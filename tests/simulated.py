"""This project on the simulated Metal: what metal_sim builds of it."""

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
    """The mps device, and this project's mps kernels on it. Safe to call again.

    Here a kernel takes clang seconds, so none is compiled that nobody launches, unless a test wants that."""
    os.environ.setdefault("MOE_METAL_WARM_UP", "0")
    metal_sim.load(PROJECT)


START = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import torch, torch_moe_metal, simulated, metal_sim
from torch_moe_metal import glu, norm_add

def told(call, *args):  # the error
    try:
        call(*args)
    except RuntimeError as error:
        return str(error)

simulated.load()
torch.set_grad_enabled(False)
x = torch.ones(1, 64, device="mps")
"""


def lines_of(script: str, compiler: str | None = None, folder: Path | None = None) -> list[str]:
    """What a script prints behind START, in a process of its own, where no shader is compiled yet. `compiler` is a
    shell script to compile them with, in `folder`."""
    environment, start = os.environ.copy(), START
    if compiler is not None:
        program = folder / "compiler"
        program.write_text(f"#!/bin/sh\ncd {folder}\n{compiler}")
        program.chmod(0o755)
        environment["METAL_SIM_CACHE"] = str(folder / "cache")
        start += f"os.environ['METAL_SIM_CXX'] = {str(program)!r}\n"  # only now: the device is built with clang
    run = [sys.executable, "-c", start + script]
    done = subprocess.run(run, cwd=Path(__file__).parent, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
