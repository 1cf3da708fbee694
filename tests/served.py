"""Tiny models that can chat, servers with one of them in a thread of the test or a process, and requests to them."""

import contextlib
import http.client
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import openai
import torch
import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tiny_models import tiny_model
from torch_moe_metal.commands.common.loading import Source
from torch_moe_metal.commands.serve.app import build
from torch_moe_metal.commands.serve.connections import config
from torch_moe_metal.commands.serve.generation import Generation
from torch_moe_metal.commands.serve.model_manager import Models
from torch_moe_metal.commands.serve.server import warm_up

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [*map(chr, range(32, 127)), "\n"]
PAD, START, END = range(len(LETTERS), len(LETTERS) + len(SPECIAL))
VOCABULARY = len(LETTERS) + len(SPECIAL)
#: Like Qwen's: tools in the system message, and each turn between two marks.
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('unknown role') }}"
    "{%- endif %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(pieces: Sequence[str] = (), template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each ASCII letter, and for each of these pieces."""
    made = Tokenizer(BPE({word: i for i, word in enumerate([*LETTERS, *SPECIAL])}, []))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # which llguidance knows
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=SPECIAL[2], pad_token=SPECIAL[0], chat_template=template
    )


def checkpoint(folder: Path, family: str = "qwen3_moe", **changes) -> Path:
    """A folder with a random model that has the vocabulary of `tokenizer`."""
    return save(tiny_model(family, **sizes(VOCABULARY) | changes), tokenizer(), folder)


def sizes(vocabulary: int) -> dict:
    ends = {"eos_token_id": END, "pad_token_id": PAD, "bos_token_id": None}
    return {"vocab_size": vocabulary, "max_position_embeddings": 65536, "moe_intermediate_size": 64, **ends}


def save(model, its_tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=PAD)
    model.save_pretrained(folder)
    its_tokenizer.save_pretrained(folder)
    return folder


def scripted(folder: Path, pieces: Sequence[str], family: str = "qwen3_moe", template: str = TEMPLATE) -> Path:
    """A folder with a model that answers with these pieces, one token each, all different. Its layers add nothing to
    the residual stream, and its head maps each token to its successor."""
    its_tokenizer = tokenizer(pieces, template)
    model = tiny_model(family, **sizes(len(its_tokenizer)) | {"hidden_size": 128, "tie_word_embeddings": False})
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
        elif "o_proj" in name or "down_proj" in name:
            weight.zero_()
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedding.copy_(torch.nn.init.orthogonal_(torch.empty(embedding.shape)))
    head.zero_()
    ids = [LETTERS.index("\n"), *map(its_tokenizer.convert_tokens_to_ids, pieces), END]
    for token, successor in itertools.pairwise(ids):
        head[successor] = 10 * embedding[token]
    return save(model, its_tokenizer, folder)


HELLO = [{"role": "user", "content": "hello"}]
LONG = 30000  # tokens, which take minutes


def client(server, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base}/v1", max_retries=0, **{"api_key": "any", "timeout": 60} | options)


def chat(server, timeout: float = 60, **options):
    options = {"model": server.model, "messages": HELLO, "max_tokens": 24, "temperature": 0} | options
    return client(server, timeout=timeout).chat.completions.create(**options)


def text_of(answer) -> str:
    return answer.choices[0].message.content


def collect(parts) -> tuple[str, str, object]:
    """The text, the finish reason and the usage of a stream."""
    parts = list(parts)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    return text, parts[-1].choices[0].finish_reason, parts[-1].usage


def raw(server, path: str, body: bytes = b"", headers: dict | None = None, method: str = "POST") -> tuple[int, bytes]:
    """Status and body of an answer, without OpenAI's client."""
    connection = http.client.HTTPConnection(server.base.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, body, {"content-type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read()


class ServerThread:
    """The server in a thread of this process. `base` is its address and `model` the name of its model."""

    def __init__(
        self,
        source: Source,
        batched: bool = False,
        api_key: str | None = None,
        cors: bool = False,
        strict: bool = False,
        **options,
    ):
        defaults = {"device": "cpu", "bits": None, "format": None, "dtype": "auto", "context": None}
        options = defaults | {"alias": [], "parallel": 4, "prefix_memory": None} | options
        self.models = Models(source, Namespace(**options))
        self.generation = Generation(
            self.models.model, self.models.context, batched, options["parallel"], options["prefix_memory"]
        )
        warm_up(self.models, self.generation)
        app = build(self.models, self.generation, api_key, cors, strict)
        listening = socket.create_server(("127.0.0.1", 0))
        self.base, self.model = f"http://127.0.0.1:{listening.getsockname()[1]}", source.name
        self.server = uvicorn.Server(config(app, "warning"))
        self.thread = threading.Thread(target=self.server.run, args=([listening],))

    def __enter__(self) -> "ServerThread":
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        return self

    def __exit__(self, *_error) -> None:
        self.generation.fail_all()
        self.server.should_exit = True
        self.thread.join(30)
        self.generation.shutdown()
        assert not self.thread.is_alive()

    def becomes_idle(self, timeout: float = 10) -> bool:
        """Whether the server has no request, and the model computes nothing, before the timeout."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            if not self.generation.requests and not self._computes():
                return True
            time.sleep(0.01)
        return False

    def _computes(self) -> bool:
        manager = self.generation.get_manager("", use_cb=self.generation._continuous_batching)
        if self.generation._continuous_batching:
            return manager.scheduler.has_pending_requests() or bool(manager._cb.output_router.result_handlers)
        return manager.turns.taken or not manager.threads._work_queue.empty()


class Process:
    """`python -m torch_moe_metal serve MODEL ...`. `base` is its address and `model` the name of its model."""

    def __init__(self, model: str | Path, *arguments: str, timeout: float = 300):
        self.model = str(model)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "torch_moe_metal", "serve", self.model, *map(str, arguments), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--device", "cpu"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self.base: str | None = None
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(timeout) or self.base is None:
            self.process.kill()
            raise AssertionError(f"the server did not start:\n{self.output}")

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"Serving .* at (http://\S+)/v1;", line):
                self.base = found[1]
                self._ready.set()
        self._ready.set()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def stop(self, sig: int = signal.SIGINT, timeout: float = 60) -> int:
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            return self.process.wait(timeout)
        finally:
            self.process.kill()
            self._reader.join(10)


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[Process]:
    """A server process, which is stopped at the end."""
    process = Process(*arguments)
    try:
        yield process
    finally:
        process.stop()
