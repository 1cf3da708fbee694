"""Tiny models that can chat, in the layouts that people serve, and a server process with one of them."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tiny_models import tiny_model

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [*map(chr, range(32, 127)), "\n"]
PAD, START, END = range(len(LETTERS), len(LETTERS) + len(SPECIAL))
VOCABULARY = len(LETTERS) + len(SPECIAL)
#: As Qwen's: tools in the system message, and each turn between two marks.
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(pieces: Sequence[str] = (), template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Each letter of ASCII is a token, and so is each of these pieces."""
    made = Tokenizer(BPE({word: i for i, word in enumerate([*LETTERS, *SPECIAL])}, []))
    made.decoder = decoders.Fuse()
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=SPECIAL[2], pad_token=SPECIAL[0], chat_template=template
    )


def checkpoint(folder: Path, family: str = "qwen3_moe", **changes) -> Path:
    """A folder with a random model whose tokens are those of `tokenizer`."""
    return save(tiny_model(family, **sizes(VOCABULARY) | changes), tokenizer(), folder)


def sizes(vocabulary: int) -> dict:
    ends = {"eos_token_id": END, "pad_token_id": PAD, "bos_token_id": None}
    return {"vocab_size": vocabulary, "max_position_embeddings": 65536, "moe_intermediate_size": 64, **ends}


def save(model, words: PreTrainedTokenizerFast, folder: Path) -> Path:
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=PAD)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def saying(folder: Path, pieces: Sequence[str], family: str = "qwen3_moe", template: str = TEMPLATE) -> Path:
    """A folder with a model that answers with these pieces, one token each, no two alike: nothing of what its layers
    compute reaches its head, which knows the successor of each token."""
    words = tokenizer(pieces, template)
    model = tiny_model(family, **sizes(len(words)) | {"hidden_size": 128, "tie_word_embeddings": False})
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
        elif "o_proj" in name or "down_proj" in name:
            weight.zero_()
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedding.copy_(torch.nn.init.orthogonal_(torch.empty(embedding.shape)))
    head.zero_()
    ids = [LETTERS.index("\n"), *map(words.convert_tokens_to_ids, pieces), END]
    for token, successor in itertools.pairwise(ids):
        head[successor] = 10 * embedding[token]
    return save(model, words, folder)


class Process:
    """`python -m torch_moe_metal serve ...`, of which `base` is the address."""

    def __init__(self, *arguments: str, timeout: float = 120):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "torch_moe_metal", "serve", *map(str, arguments), "--port", "0"]
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
            raise AssertionError(f"the server did not start:\n{self.said}")

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"Serving .* at (http://\S+)/v1;", line):
                self.base = found[1]
                self._ready.set()
        self._ready.set()

    @property
    def said(self) -> str:
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
def server(*arguments: str) -> Iterator[Process]:
    process = Process(*arguments)
    try:
        yield process
    finally:
        process.stop()
