"""This project on the simulated Metal: what metal_sim builds of it."""

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
    """The mps device, and this project's mps kernels on it. Safe to call again."""
    metal_sim.load(PROJECT)
