"""The verdicts of the check at first use (first_use.py), in a file next to the settings of `tune`.

They hold for one GPU, build of macOS, torch and version of this package, whose names are the key:

    {"Apple M4 Max, macOS 25F71, torch 2.15.0, torch_moe_metal 0.1.0": {
        "right": ["linear_rows_wide_affine4_bfloat 256", ...],
        "wrong": {"linear_rows4_wide_affine4_bfloat 256": "relative error 3e-01, allowed 2e-02"}}}
"""

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import gpu_settings, macos


@dataclass
class Verdict:
    """What was checked, by name."""

    right: set[str] = field(default_factory=set)
    wrong: dict[str, str] = field(default_factory=dict)  # the error of each
    failed: dict[str, str] = field(default_factory=dict)  # raised, which may have other reasons: not saved

    def knows(self, name: str) -> bool:
        return name in self.right or name in self.errors

    @property
    def errors(self) -> dict[str, str]:
        return self.wrong | self.failed


def path() -> Path | None:
    """The file; None if there is none for settings either."""
    settings = gpu_settings.path()
    return settings and settings.with_name("checked.json")


def key() -> str:
    from . import __version__

    system = f"macOS {macos.build()}, torch {torch.__version__}, torch_moe_metal {__version__}"
    return f"{gpu_settings.gpu()}, {system}"


def saved() -> dict[str, dict]:
    """The content of the file. Raises ValueError for any other content."""
    file = path()
    if file is None or not file.exists():
        return {}
    found = json.loads(file.read_text())
    if not isinstance(found, dict):
        raise ValueError("expected verdicts by GPU, macOS and versions")
    for each in found.values():
        right, wrong = (each.get("right"), each.get("wrong")) if isinstance(each, dict) else (None, None)
        texts = [*right, *wrong, *wrong.values()] if isinstance(right, list) and isinstance(wrong, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"expected names of kernels, got {each}")
    return found


def ignored(error: Exception) -> None:
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    warnings.warn(f"torch_moe_metal: the verdicts in {path()} are ignored: {why}", stacklevel=2)


def load() -> Verdict:
    """Those for this Mac. An unusable file is ignored, with a warning."""
    try:
        found = saved().get(key(), {"right": [], "wrong": {}})
    except (OSError, ValueError) as error:
        ignored(error)
        return Verdict()
    return Verdict(set(found["right"]), dict(found["wrong"]))


def save(verdict: Verdict) -> None:
    """Add these to the file. Other processes read either the old file or the new one."""
    file = path()
    if file is None:
        return
    try:
        everything = saved()
    except (OSError, ValueError):
        everything = {}  # `load` has warned
    before = everything.get(key(), {"right": [], "wrong": {}})
    wrong = before["wrong"] | verdict.wrong
    right = sorted({*before["right"], *verdict.right} - wrong.keys())
    try:
        gpu_settings.write_json(file, everything | {key(): {"right": right, "wrong": wrong}})
    except OSError as error:
        ignored(error)
