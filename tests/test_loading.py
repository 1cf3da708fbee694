"""Errors of loading, in the commands and in `from_pretrained`: they come at once, are whole, and name the file."""

from pathlib import Path

import pytest
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import TORCHVISION_IMPORT_ERROR

import gguf_files
from torch_moe_metal.commands.common.cli import CannotRun
from torch_moe_metal.commands.common.loading import Source, load_tokenizer, loading


@pytest.mark.parametrize("reads", [AutoConfig, AutoTokenizer, AutoModelForCausalLM])
def test_a_missing_gguf_file_is_no_name_on_the_hub(reads, monkeypatch):
    monkeypatch.setattr("socket.socket", None)
    with pytest.raises(FileNotFoundError, match=r"^torch_moe_metal: no such file: some/file\.gguf$"):
        reads.from_pretrained("some/file.gguf")


def test_commands_do_not_look_for_a_missing_gguf_file_on_the_hub():
    for name in ("some/file.gguf", "file.gguf", "./file.gguf", "/some/where/file.gguf"):
        with pytest.raises(CannotRun, match=f"^no such file: {name}$"):
            Source.of(name)
    assert Source.of("some/model:file.gguf").gguf_file == "file.gguf"


def test_messages_of_libraries_are_whole_sentences():
    """They are wrapped at any word."""
    with pytest.raises(CannotRun) as raised, loading("some/model", "cpu"):
        raise ImportError(TORCHVISION_IMPORT_ERROR.format("SomeVideoProcessor"))
    said = str(raised.value)
    assert said.startswith("cannot load some/model: SomeVideoProcessor requires the Torchvision library")
    assert said.endswith("follow the ones that match your environment.") and "\n" not in said
    with pytest.raises(CannotRun, match=r"^cannot load some/model: KeyError$"), loading("some/model", "cpu"):
        raise KeyError


def test_vision_models_name_the_extra(tmp_path: Path, monkeypatch):
    gguf_files.save_tokenizer(tmp_path)

    def from_pretrained(*args, **kwargs):
        raise ImportError(TORCHVISION_IMPORT_ERROR.format("SomeVideoProcessor"))

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", from_pretrained)
    with pytest.raises(ImportError, match=r"needs torchvision and Pillow, even .*install 'torch-moe-metal\[vision\]'$"):
        load_tokenizer(Source("some/model", str(tmp_path)))


@pytest.mark.parametrize("file, text, said", [
    ("tokenizer.json", "", "EOF while parsing"), ("tokenizer.json", "[]", "expected struct Tokenizer"),
    ("tokenizer_config.json", "{", "Expecting property name"), ("tokenizer_config.json", "[]", "expected an object"),
])  # fmt: skip
def test_broken_tokenizers_are_named(file: str, text: str, said: str, tmp_path: Path):
    AutoConfig.for_model("qwen3_moe").save_pretrained(tmp_path)
    gguf_files.save_tokenizer(tmp_path)
    load_tokenizer(Source.of(str(tmp_path)))
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=f"^{file}: .*{said}"):
        load_tokenizer(Source.of(str(tmp_path)))


TOKENIZER = {
    "model": "gpt2", "pre": "gpt-2", "tokens": gguf_files.vocabulary(), "merges": gguf_files.MERGES,
    "eos_token_id": 98,
}  # fmt: skip


@pytest.mark.parametrize("change, said", [
    ({"model": "other"}, "ValueError: Cannot build"), ({"merges": None}, "KeyError: 'scores'"),
    ({"merges": ["q9 z8"]}, "Token `q9` out of"), ({"eos_token_id": 5000}, "IndexError: list index"),
])  # fmt: skip
def test_broken_tokenizers_of_gguf_files_are_named(change: dict, said: str, tmp_path: Path):
    path = tmp_path / "model.gguf"
    values = {f"tokenizer.ggml.{name}": value for name, value in (TOKENIZER | change).items()}
    gguf_files.write(gguf_files.model("qwen3moe"), path, metadata_changes=values, tokenizer=False)
    with pytest.raises(ValueError, match=f"^torch_moe_metal: {path}: its tokenizer cannot be read: .*{said}"):
        AutoTokenizer.from_pretrained(path)
    with pytest.raises(ValueError, match=f"^torch_moe_metal: {path}: its tokenizer cannot be read: .*{said}"):
        AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
