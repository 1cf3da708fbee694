"""On a Mac with mps and a torch whose own ops are wrong there, `patch` and the commands refuse in one line."""

import sys

import pytest
import torch

import torch_moe_metal
from tiny_models import tiny_model
from torch_moe_metal import macos
from torch_moe_metal.commands import doctor
from torch_moe_metal.commands.command_line import main

SAID = "torch 2.13.0, which is installed, gives wrong results on Apple GPUs without an error: pip install 'torch>=2.14'"


def play(monkeypatch, platform: str = "darwin", version: str = "2.13.0", has_mps: bool = True) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)


@pytest.mark.parametrize("version, old", [
    ("2.9.1", True), ("2.13.0", True), ("2.13.1+git", True), ("2.14.0.dev20260801", True),
    ("2.14.0", False), ("2.14.1", False), ("2.15.0a0+git", False), ("3.0.0", False),
])  # fmt: skip
def test_versions(version: str, old: bool, monkeypatch):
    play(monkeypatch, version=version)
    assert bool(macos.why_torch_is_too_old()) == old


@pytest.mark.parametrize("where", [{"platform": "linux"}, {"has_mps": False}], ids=["simulated", "no mps"])
def test_other_machines(where: dict, monkeypatch):
    play(monkeypatch, **where)
    assert macos.why_torch_is_too_old() is None


def test_patch(monkeypatch):
    """A model on the CPU as well, since it may be moved. It is not changed."""
    model = tiny_model("qwen3_moe")
    classes = [type(module) for module in model.modules()]
    with monkeypatch.context() as patches, pytest.raises(ImportError) as refused:
        play(patches)
        torch_moe_metal.patch(model)
    assert str(refused.value) == f"torch_moe_metal: {SAID}"
    assert [type(module) for module in model.modules()] == classes
    assert model.config._experts_implementation != "moe_metal"


@pytest.mark.parametrize("chosen", ["cpu", "mps"])
@pytest.mark.parametrize("command", ["chat", "serve", "bench-model", "bench-host"])
def test_commands(command: str, chosen: str, monkeypatch, capsys):
    play(monkeypatch)
    model = ["any/model"] if command in ("chat", "serve") else []
    assert main([command, *model, "--device", chosen]) == 2
    assert capsys.readouterr().err == f"{command}: {SAID}\n"


def test_fit(monkeypatch, capsys):
    assert main(["fit", "gpt-oss-20b", "--memory", "16"]) == 0
    before = capsys.readouterr().out
    play(monkeypatch)
    assert main(["fit", "gpt-oss-20b", "--memory", "16"]) == 0
    assert capsys.readouterr().out.replace(f"Before a model can run on this Mac: {SAID}\n", "") == before
    assert SAID not in before


def test_doctor(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "devices", lambda: iter(()))
    assert doctor.run() == 0
    assert SAID not in capsys.readouterr().out
    play(monkeypatch)
    assert doctor.run() == 1
    assert f"\n{SAID}\n" in capsys.readouterr().out
