"""Compares a version of transformers that is newer than our tests with itself before we change anything in it.

`patch` fuses a family only if a tiny model of it, with random weights, gives the same logits and tokens fused as it did
before. `from_pretrained` loads a checkpoint packed only if a tiny checkpoint of that kind gives the logits of its
dequantised values. Both take a second or two on the CPU, once per process.
"""

import contextlib
import functools
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from ..grad import warn_once
from ..transformers_support import NEWEST, installed_version, is_untested

# Most imports are in the functions: quantizers import this file while transformers imports its own modules.

#: A family that is compared for experts whose block we do not fuse: they only need transformers' interface.
FOR_EXPERTS = "qwen3_moe"
#: Of the largest logit, in float32.
TOLERANCE = 1e-4
NEW_TOKENS = 10


REMEDY = f"pip install 'transformers=={NEWEST}.*' installs the newest version that we test"


def described() -> str:
    return f"transformers {installed_version()}, which is newer than our tests"


def family_in(folder: str) -> str | None:
    """The family of our tiny models whose classes are in this folder of transformers' models."""
    from .tiny_models import CONFIGS

    return next((name for name in (folder, f"{folder}_text", f"{folder}_thinker") if name in CONFIGS), None)


def why_not_fused(folders: Iterable[str]) -> str | None:
    """The reason why `patch` must not fuse the classes in these folders of transformers' models, or None."""
    if not is_untested():
        return None
    for folder in sorted(folders):
        family = family_in(folder)
        found = differs(family) if family else "could not be compared, because we have no tiny model of it"
        if found is not None:
            return f"in {described()}, {folder} {found}; {REMEDY}"
        warn_once(f"in {described()}, a tiny {folder} model gives the same tokens fused as without us")
    return None


def why_not_packed(kind: str) -> str | None:
    """The reason why checkpoints of this kind, one of tiny_checkpoints.KINDS, must not be loaded packed, or None."""
    if not is_untested() or kind in _loading:
        return None
    found = differs_packed(kind)
    if found is not None:
        return f"in {described()}, a tiny {kind} checkpoint {found}; {REMEDY}"
    warn_once(f"in {described()}, a tiny {kind} checkpoint gives the logits of its dequantised values")
    return None


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """On the CPU, in float32, without gradients and progress bars, and without an effect on random numbers."""
    from transformers.utils import logging

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


# ------------------------------------------------------------------------------------------------ families


@functools.cache
def differs(family: str) -> str | None:
    """What is different about a tiny model of this family when it is fused, or None."""
    from .fusing.patch import fuse_in_place
    from .tiny_models import eager, tiny_model

    with apart():
        try:
            model = eager(tiny_model(family))
            expected = answers(model)
            fuse_in_place(model)
            actual = answers(model)
        except Exception as error:  # transformers may have changed in any way
            return raised(error)
    for what, a, e in zip(("a prompt", "a prompt with padding"), actual, expected, strict=True):
        if not close(a[1], e[1]):
            return f"gave other logits for {what} when it was fused"
        if not torch.equal(a[0], e[0]):
            return f"gave other tokens for {what} when it was fused"
    return None


def answers(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Greedy tokens and their logits, for a prompt and for a batch with padding."""
    random = torch.Generator().manual_seed(1)
    prompt, batch = (torch.randint(2, 89, shape, generator=random) for shape in ((1, 9), (2, 7)))
    batch[1, :3] = 0
    how = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    how |= {"pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    outputs = (model.generate(ids, attention_mask=(ids != 0).long(), **how) for ids in (prompt, batch))
    return [(output.sequences, torch.stack(output.logits)) for output in outputs]


def close(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() <= TOLERANCE * expected.abs().max())  # not if one is NaN


# ------------------------------------------------------------------------------------------------ checkpoints

#: The kinds that are being compared at the moment: their tiny checkpoints are loaded packed.
_loading: set[str] = set()


@functools.cache
def differs_packed(kind: str) -> str | None:
    """What is different about a tiny checkpoint of this kind when it is loaded packed, or None."""
    from transformers import AutoModelForCausalLM

    from .checkpoints.tiny import DENSE, KINDS
    from .tiny_models import eager

    _loading.add(kind)
    how = {"device_map": "cpu", "dtype": torch.float32}
    try:
        with apart(), tempfile.TemporaryDirectory() as scratch:
            folder = KINDS[kind](Path(scratch))
            expected = eager(AutoModelForCausalLM.from_pretrained(folder / DENSE, **how))
            if kind == "gguf":
                how["gguf_file"] = "model.gguf"
            model = AutoModelForCausalLM.from_pretrained(folder, **how)
            if not any(getattr(module, "packing", None) for module in model.modules()):
                return "was not loaded packed"
            ids = torch.arange(2, 14).view(1, -1)
            expected = expected(ids).logits
            return None if close(model(ids).logits, expected) else "gave other logits than its dequantised values"
    except Exception as error:  # transformers may have changed in any way
        return raised(error)
    finally:
        _loading.discard(kind)
