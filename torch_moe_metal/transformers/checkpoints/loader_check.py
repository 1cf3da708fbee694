"""Before `from_pretrained` loads a kind of checkpoint packed, in a version of transformers newer than our tests: a tiny
checkpoint of the kind must give the logits of its dequantised values."""

import functools
import tempfile
from pathlib import Path

import torch

from ...grad import warn_once
from ...transformers_support import is_untested
from ..self_check import REMEDY, apart, close, described, raised

#: The kinds that are being compared at the moment: their tiny checkpoints are loaded packed.
_loading: set[str] = set()


def why_not_packed(kind: str) -> str | None:
    """The reason why checkpoints of this kind, one of tiny.KINDS, must not be loaded packed, or None."""
    if not is_untested() or kind in _loading:
        return None
    found = differs_packed(kind)
    if found is not None:
        return f"in {described()}, a tiny {kind} checkpoint {found}; {REMEDY}"
    warn_once(f"in {described()}, a tiny {kind} checkpoint gives the logits of its dequantised values")
    return None


@functools.cache
def differs_packed(kind: str) -> str | None:
    """What is different about a tiny checkpoint of this kind when it is loaded packed, or None."""
    # Quantizers import this file while transformers imports its own modules, before its models can be imported.
    from transformers import AutoModelForCausalLM

    from ..fusing.tiny_models import eager
    from .tiny import DENSE, KINDS

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
