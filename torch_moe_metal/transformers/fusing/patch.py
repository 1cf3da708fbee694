"""`patch` and `unpatch`: whole MoE blocks and decoder layers of a transformers model, fused in place."""

from torch import nn

from ...first_use import weights_arrived
from ...grad import warn_once
from ...macos import require_torch
from .experts import is_experts
from .factory import fused_class
from .families import class_name
from .family_check import FOR_EXPERTS, why_not_patched
from .fuse import LEFT, Report, Row, fuse_in_place, unfuse_in_place
from .fused import original_class
from .layers import FusedNorm
from .moe_blocks import FusedMlp


def patch(model: nn.Module) -> Report:
    """Fuse all supported MoE blocks, attention and decoder layers of `model` in-place, and return a report.

    All other experts run through `experts_implementation="moe_metal"`, which this selects. Weights are shared, not
    copied, and `unpatch` undoes everything. If a gradient is needed, or other experts are selected later, the model
    runs as without `patch`. The cache of fused layers grows in place. If `patch` raises, the model is unchanged. On
    mps it starts to compile kernels in the background: see `warm_up`. For a pipeline, its model is patched.

    If other threads use the model, `patch` and `unpatch` wait for the end of their forward, and their next one waits.
    If transformers is newer than our tests, a tiny model of the same family is compared first, fused and not. On a Mac
    with mps and a torch older than 2.14 it raises an ImportError, wherever the model is, since it may be moved to mps.
    """
    model = model_of(model, "patch")
    require_torch()
    reason = why_not_patched(folders_of(model))
    if reason is not None:
        warn_once(reason)
        return Report([Row(name, type(part).__name__, LEFT, reason) for name, part in fusible(model).items()])
    report = fuse_in_place(model)
    weights_arrived(model)
    return report


def unpatch(model: nn.Module) -> None:
    """Undo `patch`: restore the class of every module, and the experts and attention implementations.

    The argument is the patched model, a module that contains it, or a part of it. An implementation that was selected
    after `patch` stays selected.
    """
    unfuse_in_place(model_of(model, "unpatch"))


def model_of(given: object, caller: str) -> nn.Module:
    """The model itself, or the model of a pipeline."""
    model = given if isinstance(given, nn.Module) else getattr(given, "model", None)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"torch_moe_metal.{caller}: expected a model, or a pipeline of transformers, got {type(given).__name__}"
        )
    return model


def fusible(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that `patch` would change, but for norms and MLPs, by their names."""
    classes = {name: fused_class(original_class(part)) for name, part in model.named_modules()}
    known = {name for name, fused in classes.items() if fused and not issubclass(fused, FusedNorm | FusedMlp)}
    return {name: part for name, part in model.named_modules() if name in known or is_experts(part)}


def folders_of(model: nn.Module) -> set[str]:
    """The folders of transformers' models with the classes that `patch` would fuse."""
    found = fusible(model).values()
    folders = {class_name(original_class(part)).partition(".")[0] for part in found if not is_experts(part)}
    return folders or ({FOR_EXPERTS} if found else set())
