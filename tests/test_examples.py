"""The examples run, and say what they should: on a Mac's GPU, or on the CPU."""

import functools
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
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
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(99)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w98", chat_template=template)
    tokenizer.save_pretrained(folder)
    tiny_model("qwen3_moe", moe_intermediate_size=64).save_pretrained(folder)  # of which groups of 64 can be packed
    return str(folder)


def test_swap(capsys):
    swap.main([])
    said = capsys.readouterr().out
    assert "Qwen3MoeSparseMoeBlock  fused" in said and said.count("e-07") + said.count("e-08") == 2, said


def test_compiled(capsys):
    compiled.main(["--backend", "aot_eager"])
    said = capsys.readouterr()
    assert said.out.endswith(", as eager's\n") and "Compiling with aot_eager" in said.err


def test_compiled_is_judged_by_its_logits(capsys, monkeypatch):
    """Not by its tokens: a choice between two that are alike may end either way, and then all that follows differs."""
    stock = torch.compile

    def rounded(model, by: float, **options):
        def step(*args, **kwargs):
            output = model(*args, **kwargs)
            output.logits = output.logits + by * output.logits.std() * torch.randn_like(output.logits)
            return output

        return step

    for by, said in ((1e-6, "as eager's"), (1e-1, "DIFFERENT: expected at most 1e-04")):
        monkeypatch.setattr(torch, "compile", functools.partial(rounded, by=by))
        compiled.main(["--device", "cpu"])
        assert capsys.readouterr().out.endswith(f"{said}\n")
    assert stock is not torch.compile


def test_swap_and_compiled_take_a_checkpoint(checkpoint: str, capsys, monkeypatch):
    monkeypatch.setattr("torch_moe_metal.examples.models.small_model", lambda: pytest.fail("the small model"))
    swap.main([checkpoint, "--device", "cpu"])
    said = capsys.readouterr()
    assert "model.layers.*.mlp" in said.out and f"Loading {checkpoint} on cpu" in said.err
    compiled.main([checkpoint, "--backend", "aot_eager"])
    assert capsys.readouterr().out.endswith(", as eager's\n")


def test_chat_without_a_tokenizer_is_one_line(tmp_path: Path, capsys):
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as stop:
        chat.main([str(tmp_path)])
    last = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and f"cannot load the tokenizer of {tmp_path}: no tokenizer" in last


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
    said = capsys.readouterr().out
    assert said.count("[3 tokens") == 2 and "fused" in said


@pytest.mark.parametrize("example", [chat, swap, compiled])
def test_what_cannot_be_had_is_one_line(example, checkpoint: str, tmp_path: Path, monkeypatch, capsys):
    shutil.copytree(checkpoint, tmp_path / "cut off")
    (tmp_path / "cut off" / "model.safetensors").write_bytes(b"0")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "no such model"}')
    for arguments, said in (
        (["missing"], "no such folder: missing"),
        (["./missing"], "no such folder: missing"),
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
