"""`python -m torch_moe_metal chat`: conversations in this process, through a pipe, and in a terminal."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import gguf_files
import served
import torch_moe_metal
from tiny_models import tiny_model
from torch_moe_metal.commands import chat
from torch_moe_metal.commands.command_line import main
from torch_moe_metal.commands.common import cli, prefixes

#: Only the last part of an answer is kept, because templates of reasoning models drop the reasoning.
FORGETS = served.TEMPLATE.replace(
    "{{ message.content }}", "{{ message.content[:3] if message.role == 'assistant' else message.content }}"
)
#: Fused and unfused attention, with all kinds of cache layers.
FAMILIES = ("qwen3_moe", "gpt_oss", "gemma4_text", "deepseek_v3", "qwen3_next")
WINDOW = {"gpt_oss": {"sliding_window": 16}}


def options_of(*arguments: str):
    parser = ArgumentParser()
    chat.add_arguments(parser)
    return parser.parse_args(["unused", *map(str, arguments)])


def model_of(family: str = "qwen3_moe", device: str = "cpu"):
    model = tiny_model(family, **served.sizes(served.VOCABULARY) | WINDOW.get(family, {}))
    model.generation_config = GenerationConfig(eos_token_id=served.END, pad_token_id=served.PAD)
    torch_moe_metal.patch(model.to(device))
    return model


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture
def lengths(model) -> Iterator[list[int]]:
    """The number of tokens in each forward."""
    found = []
    hook = model.register_forward_pre_hook(
        lambda _model, _args, kwargs: found.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    yield found
    hook.remove()


def conversation(model, *arguments: str, template: str = served.TEMPLATE, folder=None) -> chat.Chat:
    talk = chat.Chat(model, served.tokenizer(template=template), options_of("--max-tokens", 12, *arguments), folder)
    talk.response_template = None  # a random model's answers have no format
    return talk


def alone(talk: chat.Chat, messages: list[dict]) -> str:
    """The answer of `generate` without an earlier cache."""
    how = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    inputs = talk.tokenizer.apply_chat_template(messages, **how).to(talk.model.device)
    output = talk.model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return talk.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_only_new_tokens_are_computed(model, lengths: list[int]):
    talk = conversation(model)
    for text in ("hello", "and then?", "go on"):
        lengths.clear()
        before = sum(len(entry.ids) for entry in talk.prefixes.entries)
        answer = talk.turn(text)
        prompt = len(talk.tokenizer.apply_chat_template(talk.messages[:-1], add_generation_prompt=True)["input_ids"])
        assert lengths == [prompt - before] + [1] * 11
        assert (answer.prompt, answer.computed, len(answer.times)) == (prompt, prompt - before, 12)
        assert answer.message["content"] == alone(talk, talk.messages[:-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_that_rewrites_answers(family: str):
    """The cache is cropped where the new prompt differs. Windows and states cannot be cropped: they go back to the end
    of the user's last message."""
    talk = conversation(model_of(family), template=FORGETS)
    before = None
    for text in ("hello, this is longer than a window", "and then?", "go on", "x"):
        answer = talk.turn(text)
        assert answer.message["content"] == alone(talk, talk.messages[:-1])
        if before is not None:
            kept = before.prompt + (-len("<assistant\n") if talk.prefixes.needs_cuts else 3)
            assert answer.computed == answer.prompt - kept
        before = answer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_branches_earlier(family: str):
    """Earlier than the range of the layers with a sliding window."""
    talk = conversation(model_of(family))
    for text in ("hello, this is longer than a window", "and then?", "go on"):
        talk.turn(text)
    del talk.messages[2:]
    assert talk.turn("no, this").message["content"] == alone(talk, talk.messages[:-1])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_on_mps(mps: str, family: str):
    """The same answers as on the CPU. The second prompt continues the cache, and the third one crops it, earlier than
    the range of the layers with a sliding window."""
    talks = [conversation(model_of(family, device), template=FORGETS) for device in (mps, "cpu")]
    for text in ("hello, this is longer than a window", "and then?"):
        answer, on_cpu = (talk.turn(text) for talk in talks)
        assert (answer.message, answer.computed) == (on_cpu.message, on_cpu.computed)
        assert answer.message["content"] == alone(talks[0], talks[0].messages[:-1])
    assert 0 < answer.computed < answer.prompt


def test_generate_waits_for_the_gpu(device: str, monkeypatch):
    """Which it does not by itself on mps."""
    waited = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append(None))
    monkeypatch.setattr(cli, "TOKENS_PER_WAIT", 5)
    conversation(model_of(device=device)).turn("hello")
    assert len(waited) in ((2, 3) if device == "mps" else (0,))


def test_linear_attention_continues(model):
    talk = conversation(model_of("qwen3_next"))
    first, second = talk.turn("hello"), talk.turn("and then?")
    assert second.computed == second.prompt - first.prompt - 11
    assert second.message["content"] == alone(talk, talk.messages[:-1])


def test_sampling(model):
    """By seed and options, which override those of the checkpoint."""

    def said(*arguments: str) -> list[str]:
        talk = conversation(model, *arguments)
        return [talk.turn(text).message["content"] for text in ("hello", "and then?")]

    greedy = said()
    drawn = said("--temperature", "1.5", "--seed", "1")
    assert greedy != drawn != said("--temperature", "1.5", "--seed", "2")
    assert drawn == said("--temperature", "1.5", "--seed", "1")
    assert said("--top-p", "1e-9") == greedy
    model.generation_config.update(do_sample=True, temperature=1.5)
    try:
        assert said("--temperature", "0") == greedy
        assert said("--seed", "1") == drawn
    finally:
        model.generation_config.update(do_sample=None, temperature=None)


def test_reset(model):
    talk = conversation(model, "--temperature", "1.5", "--seed", "1", "--system", "be brief")
    first = talk.turn("hello")
    assert talk.turn("hello").message != first.message
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "be brief"}]
    again = talk.turn("hello")
    assert (again.message, again.computed) == (first.message, first.prompt)


def interrupting(model, token: int, layer: int, times: int):
    """Ctrl-C, pressed so often while this layer computes this token."""
    calls = []

    def press(*_) -> None:
        calls.append(None)
        if len(calls) == token:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    return model.model.layers[layer].register_forward_pre_hook(press)


def test_an_interrupted_answer_is_kept(model, capsys):
    talk = conversation(model)
    hook = interrupting(model, token=5, layer=1, times=1)
    answer = talk.turn("hello")
    hook.remove()
    assert len(answer.times) == 5 and "; interrupted]" in capsys.readouterr().err
    assert talk.messages[-1] == answer.message and len(answer.message["content"]) == 5
    assert answer.message["content"] == alone(talk, talk.messages[:-1])[:5]
    following = talk.turn("and then?")
    assert following.message["content"] == alone(talk, talk.messages[:-1])
    assert following.computed < following.prompt - answer.prompt
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupted_prompt_is_dropped(model):
    """In the middle of a forward, when only some layers' caches have the new tokens."""
    talk = conversation(model)
    talk.turn("hello")
    before = list(talk.messages)
    hook = interrupting(model, token=1, layer=1, times=2)
    assert talk.turn("never mind") is None
    hook.remove()
    assert talk.messages == before
    assert talk.turn("and then?").message["content"] == alone(talk, talk.messages[:-1])


def test_a_long_prompt_comes_in_pieces(model, lengths: list[int], capsys, monkeypatch):
    """Its progress is shown, and Ctrl-C keeps the pieces that are computed."""
    monkeypatch.setattr(prefixes, "PIECE", 16)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    talk = conversation(model)
    lengths.clear()  # of the test whether the model can do this
    hook = interrupting(model, token=2, layer=1, times=1)
    assert talk.turn("hello, how are you today?") is None and lengths == [16, 16]
    hook.remove()
    assert "] 16/43  tokens of the prompt" in capsys.readouterr().err
    answer = talk.turn("hello, how are you today?")
    assert (answer.prompt, answer.computed, lengths[2]) == (43, 11, 11)
    assert answer.message["content"] == alone(talk, talk.messages[:-1])


def test_the_context_ends(model, capsys):
    talk = conversation(model, "--context", "60")
    assert len(talk.turn("hello").times) == 12
    answer = talk.turn("a")
    assert answer.prompt + len(answer.times) == 60 and "cut off by the context of 60 tokens" in capsys.readouterr().err
    before = list(talk.messages)
    assert talk.turn("more") is None
    assert "the context 60: /reset starts a new one" in capsys.readouterr().err and talk.messages == before


def test_a_template_that_refuses(model, capsys):
    talk = conversation(model, template="{{ raise_exception('no such role') }}")
    assert talk.turn("hello") is None and talk.messages == []
    assert "the model's chat template does not take this: no such role" in capsys.readouterr().err


def test_without_a_template(model):
    talk = conversation(model)
    talk.chat_template = None
    assert talk.turn("once upon").prompt == 9
    assert talk.turn("a time").prompt == 9 + 1 + len(talk.messages[1]["content"]) + 1 + 6


def harmony(folder: Path) -> Path:
    """A model that answers like gpt-oss."""
    pieces = ["<|channel|>analysis<|message|>", "Thinking ", "hard.", "<|end|><|start|>assistant",
              "<|channel|>final<|message|>", "The ", "answer."]  # fmt: skip
    template = served.TEMPLATE.replace("assistant\\n{% endif", "<|start|>assistant\\n{% endif")
    return served.scripted(folder, pieces, template=template)


def test_reasoning(tmp_path: Path, capsys):
    """It is not on stdout, and is passed to the template separately from the answer."""
    model = AutoModelForCausalLM.from_pretrained(harmony(tmp_path))
    model.config.model_type = "gpt_oss"
    capsys.readouterr()
    talk = chat.Chat(model, AutoTokenizer.from_pretrained(tmp_path), options_of())
    assert talk.turn("hello").message == {
        "role": "assistant", "content": "The answer.", "reasoning_content": "Thinking hard."
    }  # fmt: skip
    said, err = capsys.readouterr()
    assert said == "The answer.\n" and err.startswith("Thinking hard.\n[8 tokens, ")


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return served.scripted(tmp_path_factory.mktemp("chat"), ["Hello ", "world, ", "you."])


def test_the_command(folder: Path, capsys, monkeypatch):
    lines = iter(["hello", "", "/help", "/nope", "/reset", "hello", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(lines))
    assert main(["chat", str(folder), "--bits", "8", "--device", "cpu"]) == 0
    said, err = capsys.readouterr()
    assert said == "Hello world, you.\n" * 2
    assert "affine" in err and "GB of weights" in err and "no such command: /nope" in err and chat.HELP in err
    speed = r"\[4 tokens, [\d.]+ tokens/s, the first after [\d.]+ s; 23 of the prompt's 23 tokens were new\]"
    assert len(re.findall(f"^{speed}$", err, re.M)) == 2


def test_a_gguf_file(tmp_path: Path, capsys):
    path = gguf_files.write(gguf_files.model("qwen3moe"), tmp_path / "model.gguf", gguf_files.Q4_K_M)
    assert main(["chat", str(path), "--prompt", "hello", "--max-tokens", "4", "--device", "cpu"]) == 0
    err = capsys.readouterr().err
    assert "q4_k, q6_k" in err and "[4 tokens" in err


@pytest.mark.parametrize("arguments, said", [
    (["missing"], "chat: no such file, folder or name on the hub: missing"),
    ([".", "--bits", "4", "--format", "mxfp4"], "chat: --bits: only the format affine"),
    ([".", "--temperature", "-1"], "--temperature: must be 0 or more"),
    ([".", "--top-p", "0"], "--top-p: must be more than 0"),
    ([".", "--max-tokens", "0"], "--max-tokens: must be 1 or more"),
])  # fmt: skip
def test_errors_are_one_line(arguments: list[str], said: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["chat", *arguments, "--device", "cpu"])
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and said in capsys.readouterr().err.splitlines()[-1]


COMMAND = [sys.executable, "-m", "torch_moe_metal", "chat"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}


@pytest.mark.slow
def test_a_pipe(folder: Path):
    done = subprocess.run(
        [*COMMAND, folder, "--device", "cpu"], input="hello\n\nagain", capture_output=True, text=True, env=ENVIRONMENT
    )
    assert (done.returncode, done.stdout) == (0, "Hello world, you.\n" * 2)
    assert done.stderr.count("tokens/s") == 2


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *arguments: object):
        self.screen, self.seen = "", 0
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.execvpe(sys.executable, [*COMMAND, *map(str, arguments)], ENVIRONMENT)

    def wait_for(self, pattern: str, seconds: float = 120) -> str:
        """Wait until this is on the screen, after the text of the previous wait."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.screen[self.seen :], re.S)):
            assert time.monotonic() < end, f"no {pattern!r} on the screen:\n{self.screen}"
            if select.select([self.file], [], [], 1)[0]:
                self.screen += os.read(self.file, 4096).decode()
        self.seen += found.end()
        return found[0]

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def leave(self) -> int:
        """By Ctrl-C at the prompt, repeated if it came before Python's readline was waiting for keys."""
        for _ in range(30):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                self.wait_for("\n", 2)
                return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        raise AssertionError("Ctrl-C does not leave")


@pytest.mark.slow
def test_a_terminal(tmp_path: Path):
    """Ctrl-C ends an answer, the conversation continues, and Ctrl-C at the prompt exits."""
    terminal = Terminal(served.checkpoint(tmp_path, eos_token_id=None), "--device", "cpu", "--temperature", 0)
    try:
        terminal.wait_for("> $")
        terminal.type("hello\n")
        terminal.wait_for("hello\r\n.{20}")  # the answer has begun, and would take 65,000 more tokens
        terminal.type("\x03")
        terminal.wait_for(r"tokens/s.*; interrupted\]\r\n> $")
        terminal.type("again\n")
        terminal.wait_for("again\r\n.{20}")
        terminal.type("\x03")
        err = terminal.wait_for(r"\d+ of the prompt's \d+ tokens were new; interrupted\]\r\n> $")
        new, prompt = map(int, re.findall(r"\d+", err)[:2])
        assert new < prompt
        terminal.type("/reset\n")
        terminal.wait_for("reset\r\n> $")
        assert terminal.leave() == 0
    except BaseException:
        os.kill(terminal.pid, signal.SIGKILL)
        raise
