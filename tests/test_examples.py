"""The examples run and print correct results, on a Mac's GPU or on the CPU."""

import functools
import shutil
from pathlib import Path

import pytest
import torch

import common
import compiled
import swap
from conftest import SIMULATED
from tiny_models import tiny_model


@pytest.fixture(autouse=True)
def no_simulated_device(monkeypatch):
    """The default device of the examples is mps if it is available; the simulated one has no
    scaled_dot_product_attention."""
    if SIMULATED:
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """A folder with random weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model("qwen3_moe").save_pretrained(folder)
    return str(folder)


def test_swap(capsys):
    swap.main([])
    said = capsys.readouterr().out
    assert "Qwen3MoeSparseMoeBlock  fused" in said and said.count("e-07") + said.count("e-08") == 2, said


def test_compiled(capsys):
    compiled.main(["--backend", "aot_eager"])
    said = capsys.readouterr()
    assert said.out.endswith(", equal to eager\n") and "Compiling with aot_eager" in said.err


def test_compiled_compares_logits(capsys, monkeypatch):
    """Not tokens: where two are nearly equal, either may be chosen, and then all later tokens differ."""

    def rounded(model, by: float, **options):
        def step(*args, **kwargs):
            output = model(*args, **kwargs)
            output.logits = output.logits + by * output.logits.std() * torch.randn_like(output.logits)
            return output

        return step

    for by, said in ((1e-6, "equal to eager"), (1e-1, "DIFFERENT: expected at most 1e-04")):
        monkeypatch.setattr(torch, "compile", functools.partial(rounded, by=by))
        compiled.main(["--device", "cpu"])
        assert capsys.readouterr().out.endswith(f"{said}\n")


def test_examples_take_a_checkpoint(checkpoint: str, capsys, monkeypatch):
    monkeypatch.setattr(common, "small_model", lambda: pytest.fail("the small model"))
    swap.main([checkpoint, "--device", "cpu"])
    said = capsys.readouterr()
    assert "model.layers.*.mlp" in said.out and f"Loading {checkpoint} on cpu" in said.err
    compiled.main([checkpoint, "--backend", "aot_eager"])
    assert capsys.readouterr().out.endswith(", equal to eager\n")


@pytest.mark.parametrize("example", [swap, compiled])
def test_a_failure_prints_one_line(example, checkpoint: str, tmp_path: Path, monkeypatch, capsys):
    shutil.copytree(checkpoint, tmp_path / "cut off")
    (tmp_path / "cut off" / "model.safetensors").write_bytes(b"0")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "no such model"}')
    for arguments, said in (
        (["missing"], "no such file, folder or name on the hub: missing"),
        (["./missing"], "no such file, folder or name on the hub: ./missing"),
        (["empty"], "no checkpoint: empty: it has no config.json"),
        (["broken"], "cannot load "),
        (["cut off"], "cannot load cut off: "),
        (["broken", "--device", "mps"], "--device mps: "),
    ):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        with pytest.raises(SystemExit) as stop:
            example.main(arguments)
        *progress, last = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2 and said in last and all("Loading" in line for line in progress)
