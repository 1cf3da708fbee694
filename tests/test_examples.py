"""The examples run, and say what they should: on a Mac's GPU, or on the CPU."""

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conftest import SIMULATED
from tiny_models import tiny_model
from torch_moe_metal.examples import chat, compiled, swap


@pytest.fixture(autouse=True)
def no_simulated_device(monkeypatch):
    """The examples take mps where it is, and the simulated one lacks scaled_dot_product_attention."""
    if SIMULATED:
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """Of random weights and a vocabulary of words."""
    folder = tmp_path_factory.mktemp("checkpoint")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(99)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w98").save_pretrained(folder)
    tiny_model("qwen3_moe", moe_intermediate_size=64).save_pretrained(folder)  # of which groups of 64 can be packed
    return str(folder)


def test_swap(capsys):
    swap.main([])
    said = capsys.readouterr().out
    assert "Qwen3MoeSparseMoeBlock  fused" in said and said.count("e-07") + said.count("e-08") == 2, said


def test_compiled(capsys):
    compiled.main(["--backend", "aot_eager"])
    said = capsys.readouterr()
    assert said.out.endswith("the same tokens\n") and "Compiling with aot_eager" in said.err


def test_swap_and_compiled_take_a_checkpoint(checkpoint: str, capsys, monkeypatch):
    monkeypatch.setattr("torch_moe_metal.examples.models.small_model", lambda: pytest.fail("the small model"))
    swap.main([checkpoint, "--device", "cpu"])
    said = capsys.readouterr()
    assert "model.layers.*.mlp" in said.out and f"Loading {checkpoint} on cpu" in said.err
    compiled.main([checkpoint, "--backend", "aot_eager"])
    assert capsys.readouterr().out.endswith("the same tokens\n")


def test_chat(checkpoint: str, capsys):
    answers = []
    for arguments in ([], ["--stock"]):
        chat.main([checkpoint, "--prompt", "w5 w6 w7", "--tokens", "6", *arguments])
        said, told = capsys.readouterr()
        assert "tokens/s" in said and ("fused" in said) == (not arguments)
        assert "GB of weights" in told
        answers.append(next(line for line in said.splitlines() if line.startswith("w")))
    assert answers[0] == answers[1]


def test_chat_with_a_checkpoint_that_is_packed_while_it_is_loaded(checkpoint: str, capsys):
    chat.main([checkpoint, "--prompt", "w5 w6 w7", "--tokens", "6", "--bits", "8"])
    said = capsys.readouterr().out
    assert "affine" in said, said
    assert "tokens/s" in said


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_a_chat_ends_where_its_input_does(checkpoint: str, capsys, monkeypatch, end: type[BaseException]):
    """With Ctrl-D, with Ctrl-C, or when all piped lines are answered."""
    lines = iter(["w5 w6", "w7"])

    def typed(_prompt: str) -> str:
        if line := next(lines, None):
            return line
        raise end

    monkeypatch.setattr("builtins.input", typed)
    chat.main([checkpoint, "--tokens", "3"])
    assert capsys.readouterr().out.count("tokens/s") == 2


@pytest.mark.parametrize("example", [chat, swap, compiled])
def test_what_cannot_be_had_is_one_line(example, checkpoint: str, tmp_path: Path, monkeypatch, capsys):
    shutil.copytree(checkpoint, tmp_path / "cut off")
    (tmp_path / "cut off" / "model.safetensors").write_bytes(b"0")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "no such model"}')
    for arguments, said in (
        (["missing"], "no such directory: missing"),
        (["empty"], "no checkpoint, since it has no config.json: empty"),
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


@pytest.mark.parametrize("example", [chat, swap, compiled])
def test_help(example, capsys):
    with pytest.raises(SystemExit) as stop:
        example.main(["--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0 and f"python -m {example.__name__}" in said and "a checkpoint" in said
