"""A version of transformers that is newer than our tests is compared with itself before we change anything in it.

`patch` fuses a family only if a tiny model of it, with random weights, gives the same logits and tokens fused as it did
before (`fusing/family_check.py`). `from_pretrained` loads a checkpoint packed only if a tiny checkpoint of that kind
gives the logits of its dequantised values (`checkpoints/loader_check.py`). Both take a second or two on the CPU, once
per process. This file has what both use.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.utils import logging

from ..transformers_support import NEWEST, installed_version

#: Of the largest logit, in float32.
TOLERANCE = 1e-4
REMEDY = f"pip install 'transformers=={NEWEST}.*' installs the newest version that we test"


def described() -> str:
    return f"transformers {installed_version()}, which is newer than our tests"


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """On the CPU, in float32, without gradients and progress bars, and without an effect on random numbers."""
    before, shown = torch.get_default_dtype(), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
            if shown:
                logging.enable_progress_bar()


def raised(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"raised {type(error).__name__}{': ' + lines[0] if lines else ''}"


def close(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() <= TOLERANCE * expected.abs().max())  # not if one is NaN
