"""Small helpers that the commands share, and the error that ends a command."""

from argparse import ArgumentTypeError
from importlib.util import find_spec

import torch
from torch import Tensor

#: On mps, how many tokens `generate` computes between two waits for the GPU.
TOKENS_PER_WAIT = 256

#: Options of `generate`: greedy decoding, with the defaults of the other settings, so that there is no warning of them.
UNSAMPLED = {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50}


class CannotRun(Exception):
    """Ends a command with exit code 2; the message gives the reason."""


def reason_of(error: Exception) -> str:
    """The first sentence of an error's message. Libraries wrap theirs at any word."""
    lines = str(error).strip().partition("\n\n")[0].splitlines()
    ends = (number for number, line in enumerate(lines, 1) if line.rstrip().endswith((".", "!", "?")))
    return " ".join(line.strip() for line in lines[: next(ends, 1)]) or type(error).__name__


def at_least_0(text: str) -> float:
    if not 0 <= (number := float(text)) < float("inf"):
        raise ArgumentTypeError(f"must be 0 or more, got {text}")
    return number


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"must be 1 or more, got {text}")
    return number


class Waits:
    """A logits processor that changes nothing, and waits for the GPU now and then. On mps `generate` never does, and
    MPSGraph frees its scratch memory only then (pytorch#194459)."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if scores.device.type == "mps" and ids.shape[1] % TOKENS_PER_WAIT == 0:
            torch.mps.synchronize()
        return scores


def has_transformers() -> bool:
    return find_spec("transformers") is not None
