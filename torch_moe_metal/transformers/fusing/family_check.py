"""Before `patch` fuses a family, in a version of transformers that is newer than our tests: a tiny model of the family
must give the same logits and tokens fused as it did before."""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ...grad import warn_once
from ...transformers_support import is_untested
from ..self_check import REMEDY, apart, close, described, raised
from .fuse import fuse_in_place
from .tiny_models import CONFIGS, eager, tiny_model

#: A family that is compared for experts whose block we do not fuse: they only need transformers' interface.
FOR_EXPERTS = "qwen3_moe"
NEW_TOKENS = 10


def family_in(folder: str) -> str | None:
    """The family of our tiny models whose classes are in this folder of transformers' models."""
    return next((name for name in (folder, f"{folder}_text", f"{folder}_thinker") if name in CONFIGS), None)


def why_not_patched(folders: Iterable[str]) -> str | None:
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


@functools.cache
def differs(family: str) -> str | None:
    """What is different about a tiny model of this family when it is fused, or None."""
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
