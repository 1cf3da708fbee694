"""Prefixes on disk: a new process finds what an earlier one computed, whatever has happened to the files."""

import os
import random
import signal
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
import torch

import served
import torch_moe_metal
from test_chat import conversation
from test_chat import model_of as chat_model
from test_prefixes import ANSWER, FAMILIES, GIGABYTE, conversation_of, drawn, generate, reused_and_answer
from test_serve import chat, text_of
from tiny_models import tiny_model
from torch_moe_metal.commands.command_line import main
from torch_moe_metal.commands.common import prefix_folder
from torch_moe_metal.commands.common.loading import Source
from torch_moe_metal.commands.common.prefix_folder import SUFFIX, UNFINISHED, PrefixFolder
from torch_moe_metal.commands.common.prefix_options import identity
from torch_moe_metal.commands.common.prefixes import Prefixes

KEY = "0" * 64


def model_of(family: str) -> torch.nn.Module:
    model = tiny_model(family, **({"sliding_window": 16} if family == "gpt_oss" else {}))
    torch_moe_metal.patch(model)
    return model


def store_of(model, folder: Path, limit: float = GIGABYTE, memory: float = GIGABYTE, key: str = KEY) -> Prefixes:
    return Prefixes(model, memory, PrefixFolder(folder, limit, key))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_after_a_restart(family: str, tmp_path: Path):
    """From its end, and, as another one, from its system prompt. All files are of one conversation, so one is left."""
    model, rng = model_of(family), random.Random(0)
    first, ids = store_of(model, tmp_path), drawn(rng, 60)
    for _ in range(2):
        _, answer = reused_and_answer(first, model, ids, [20, len(ids) - 3])
        first.folder.leaves(first.entries[0])
        first.settle()
        ids = [*ids[:-3], *answer, *drawn(rng, 6)]
    first.close()
    assert len(files(tmp_path)) == 1
    for new, expected in ((ids, len(ids) - 14), (ids[:20] + drawn(rng, 60), 20)):
        second = store_of(model, tmp_path)
        reused, answer = reused_and_answer(second, model, new, [20, 57])
        second.close()
        assert reused >= expected and answer == generate(model, new, ANSWER)[len(new) :]


def test_files_are_mapped(tmp_path: Path):
    model, ids = model_of("qwen3_moe"), drawn(random.Random(1), 40)
    first = store_of(model, tmp_path)
    reused_and_answer(first, model, ids)
    first.close()
    prefix = store_of(model, tmp_path).take(ids)
    assert str(files(tmp_path)[0]) in Path("/proc/self/maps").read_text() and len(prefix.ids) == 39


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-999] ^= 1
    path.write_bytes(data)


def change_a_length(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(rb"\"prompt\": 39", rb"\"prompt\": 38"))


def replace(path: Path) -> None:
    path.write_text("something else")


@pytest.mark.parametrize("damage", [cut, flip, change_a_length, replace])
def test_damaged_files_are_deleted(damage: Callable, tmp_path: Path, capsys):
    model, ids = model_of("qwen3_moe"), drawn(random.Random(2), 40)
    first = store_of(model, tmp_path)
    reused_and_answer(first, model, ids)
    first.close()
    (path,) = files(tmp_path)
    damage(path)
    (other := tmp_path / "model.safetensors").write_text("of the user")
    second = store_of(model, tmp_path)
    reused, answer = reused_and_answer(second, model, ids)
    assert reused == 0 and answer == generate(model, ids, ANSWER)[40:]
    assert not path.exists() and other.exists()
    assert capsys.readouterr().err.count("\n") == 1
    second.close()


def test_another_model_has_other_files(tmp_path: Path):
    model, ids = model_of("qwen3_moe"), drawn(random.Random(3), 40)
    for key in (KEY, "1" * 64):
        store = store_of(model, tmp_path, key=key)
        assert reused_and_answer(store, model, ids)[0] == 0
        store.close()
    assert len(files(tmp_path)) == 2


def test_the_folder_has_a_limit(tmp_path: Path):
    """Those that were not used for the longest time leave, also those of other models."""
    model, rng = model_of("qwen3_moe"), random.Random(4)
    store = store_of(model, tmp_path, memory=1)  # so each is written at once
    prompts = [drawn(rng, 60) for _ in range(2)]
    for ids in prompts:
        reused_and_answer(store, model, ids)
        store.settle()
        for age, path in enumerate(reversed(files(tmp_path)), 1):
            os.utime(path, (time.time() - 100 * age,) * 2)
    first, second = files(tmp_path)
    size = first.stat().st_size
    store.folder.limit = 3.5 * size
    for ids in (prompts[0][:20] + drawn(rng, 40), drawn(rng, 60)):
        assert reused_and_answer(store, model, ids)[0] == (20 if ids[0] == prompts[0][0] else 0)
        store.settle()
    assert len(files(tmp_path)) == 3 and first.exists() and not second.exists()
    store.close()
    again = store_of(model, tmp_path, key="1" * 64, limit=1.5 * size)
    reused_and_answer(again, model, drawn(rng, 60))
    again.close()
    (left,) = files(tmp_path)
    assert left.name.startswith("1" * 16)


def test_a_conversation_that_goes_on_while_it_is_written_is_written_later(tmp_path: Path, monkeypatch):
    """It overwrites rows that the writer reads."""
    model, ids = model_of("qwen3_moe"), drawn(random.Random(5), 60)
    monkeypatch.setattr(prefix_folder, "QUIET", 0.0)
    store, taken = store_of(model, tmp_path), []

    def flush(_handle) -> None:
        if not taken:
            taken.append(store.take([*ids[:50], 1]))

    monkeypatch.setattr(prefix_folder.os, "fsync", flush)
    reused_and_answer(store, model, ids)
    store.settle()
    while not taken or store.folder.jobs:
        time.sleep(0.01)
    assert not files(tmp_path) and not list(tmp_path.iterdir())
    store.give(taken[0], ids[:50])
    store.close()
    assert len(files(tmp_path)) == 1


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch, capsys):
    model, ids = model_of("qwen3_moe"), drawn(random.Random(6), 60)

    def full(*_args) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prefix_folder.os, "fsync", full)
    store = store_of(model, tmp_path)
    reused_and_answer(store, model, ids)
    store.close()
    assert "No space left" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_changed_checkpoint_is_another_model(tmp_path: Path):
    folder, model = served.checkpoint(tmp_path), model_of("qwen3_moe")
    found = []
    for dtype, template in ((torch.float32, "a"), (torch.float32, "b"), (torch.bfloat16, "a")):
        options = Namespace(bits=None, format=None)
        found.append(identity(options, Source.of(str(folder)), model.to(dtype), template))
    assert len({*found}) == 3
    os.utime(folder / "model.safetensors", (1, 1))
    assert identity(options, Source.of(str(folder)), model, "a") not in found


def test_chat_finds_its_conversation_again(tmp_path: Path):
    computed, model = [], chat_model()
    for _ in range(2):
        talk = conversation(model, folder=PrefixFolder(tmp_path, GIGABYTE, KEY))
        computed.append(talk.turn("hello, how are you today?").computed)
        talk.prefixes.close()
    assert computed[1] == 1 < computed[0]


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text("{}")
    for command in ("serve", "chat"):
        assert main([command, str(tmp_path), "--prefix-cache", str(tmp_path / "config.json" / "new")]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"{command}: --prefix-cache: cannot write to {tmp_path}") and error.count("\n") == 1


KILLED = """
import os, signal
def kill(_handle): os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("KILLS"): os.fsync = kill
"""


@pytest.mark.slow
def test_a_kill_while_a_prefix_is_written(tmp_path: Path, monkeypatch):
    """The next process has what was written before. The one that is killed is just about to flush a file."""
    (tmp_path / "sitecustomize.py").write_text(KILLED)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    model, folder = served.checkpoint(tmp_path / "model", "qwen3_next"), tmp_path / "prefixes"
    messages = conversation_of("hello " * 9)
    with served.process(model, "--prefix-cache", folder) as process:
        first = text_of(chat(process, messages=messages))
    before = files(folder)
    assert len(before) == 1
    monkeypatch.setenv("KILLS", "1")
    process = served.Process(model, "--prefix-cache", folder)
    answer = chat(process, messages=messages)
    assert answer.usage.prompt_tokens_details.cached_tokens > 60 and text_of(answer) == first
    with pytest.raises(openai.APIError):
        while True:
            chat(process, messages=conversation_of(f"other {time.time()} " * 9), max_tokens=1)
            time.sleep(0.2)
    assert process.stop() == -signal.SIGKILL
    assert list(folder.glob(f"*{UNFINISHED}")) and before[0] in files(folder)
    monkeypatch.delenv("KILLS")
    with served.process(model, "--prefix-cache", folder) as process:
        answer = chat(process, messages=messages)
        assert answer.usage.prompt_tokens_details.cached_tokens > 60 and text_of(answer) == first
        assert not list(folder.glob(f"*{UNFINISHED}"))
    assert files(folder) == before
