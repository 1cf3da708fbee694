"""The examples run, and say what they should: on a Mac's GPU, or on the CPU."""

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


def test_swap(capsys):
    swap.main()
    said = capsys.readouterr().out
    assert "Qwen3MoeSparseMoeBlock  fused" in said and said.count("e-07") + said.count("e-08") == 2, said


def test_compiled(capsys):
    compiled.main(backend="aot_eager")
    assert capsys.readouterr().out.endswith("the same tokens\n")


def test_chat(tmp_path, capsys):
    """With a checkpoint of random weights and a vocabulary of words."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(99)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w98").save_pretrained(tmp_path)
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    answers = []
    for arguments in ([], ["--stock"]):
        chat.main([str(tmp_path), "--prompt", "w5 w6 w7", "--tokens", "6", *arguments])
        said = capsys.readouterr().out
        assert "tokens/s" in said and ("fused" in said) == (not arguments)
        answers.append(next(line for line in said.splitlines() if line.startswith("w")))
    assert answers[0] == answers[1]
