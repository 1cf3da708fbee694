"""Fuses the modules of a model in place, and undoes it: what `patch` and `unpatch` do after their checks."""

import re
from dataclasses import dataclass, field

from torch import nn

from ...all_or_nothing import all_or_nothing
from .attention_blocks import FusedProjections
from .between_calls import between_calls, changing
from .experts import NAME, is_experts, why_not_fused
from .factory import fused_class
from .families import NOT_FUSED, class_name
from .fused import Fused, JoinedProjections, original_class, selects_ours
from .layers import FusedNorm, FusedPreNormLayer, TapedLayer, keeps_state
from .linear_blocks import FusedMixer
from .moe_blocks import FusedBlock, FusedMlp
from .stock_gguf import give_back, take
from .tape import why_not_taped

FUSED, EXPERTS_ONLY, LEFT = "fused", "experts only", "left"
# Attributes with the implementations of experts and attention that a configuration had before `patch`. They are set on
# the innermost model with this configuration, where outer models and wrappers find them too. In the configuration
# itself they would be saved.
BEFORE = "_moe_metal_experts_before"
ATTENTION_BEFORE = "_moe_metal_attention_before"

#: transformers' name for what forbids drafts.
STATEFUL = "_is_stateful"
LAST_NORMS = ("norm", "embedding_norm")
MLPS = FusedBlock | FusedMlp


@dataclass(frozen=True)
class Row:
    """The result for one module."""

    name: str
    cls: str
    state: str
    note: str = ""


@dataclass(frozen=True)
class Report:
    """The result of `patch` for each module: `fused`, `experts only` or `left`, and the reason. It prints as a
    table."""

    rows: list[Row] = field(default_factory=list)

    def __getitem__(self, state: str) -> list[str]:
        """The names of the modules in one state, such as report["fused"]."""
        if state not in (FUSED, EXPERTS_ONLY, LEFT):
            raise KeyError(f"torch_moe_metal: a report has {FUSED!r}, {EXPERTS_ONLY!r} and {LEFT!r}, got {state!r}")
        return [row.name for row in self.rows if row.state == state]

    def __str__(self) -> str:
        if not self.rows:
            return "torch_moe_metal: no Mixture-of-Experts module in this model"
        alike: dict[tuple, list[str]] = {}
        for row in self.rows:
            alike.setdefault((re.sub(r"\d+", "*", row.name), row.cls, row.state, row.note), []).append(row.name)
        table = [("modules", "count", "class", "what", "why")]
        table += [(pattern, str(len(names)), *rest) for (pattern, *rest), names in alike.items()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def fuse_in_place(model: nn.Module) -> Report:
    """`patch` without its checks."""
    parts = [module for module in model.modules() if hasattr(type(module), "set_experts_implementation")]
    selected = {id(part.config): (part, part.config._experts_implementation) for part in parts}
    with changing, all_or_nothing(model), between_calls(model, "patch"):
        take(model)
        for part in parts:
            part.set_experts_implementation(NAME)
        report = fuse_all(model)
        for part, implementation in selected.values():
            if part.config._experts_implementation != implementation:
                setattr(part, BEFORE, implementation)
        select_attention(model)
        allow_drafts(model)
    return report


def unfuse_in_place(model: nn.Module) -> None:
    """`unpatch`: restores the class of every module, which was assigned, and the implementations."""
    with changing, all_or_nothing(model), between_calls(model, "unpatch"):
        for module in model.modules():
            if isinstance(module, FusedNorm) or vars(module).pop("borrows_config", False):
                del module.config
            if isinstance(module, Fused):
                module.__class__ = module.original
            if BEFORE in vars(module):
                implementation = vars(module).pop(BEFORE)
                if module.config._experts_implementation == NAME:
                    select(module, implementation)
            if ATTENTION_BEFORE in vars(module):
                implementation = vars(module).pop(ATTENTION_BEFORE)
                if module.config._attn_implementation == NAME:
                    module.config._attn_implementation_internal = implementation
            if getattr(type(module), STATEFUL, False):
                vars(module).pop(STATEFUL, None)
        give_back(model)


def select(model: nn.Module, implementation: str | None) -> None:
    """Restore the model's own setting, without transformers' checks and without changing other configurations."""
    model.config._experts_implementation_internal = implementation


def select_attention(model: nn.Module) -> None:
    """Select our attention for models whose layers are fused. It replaces PyTorch's attention, and eager attention only
    if transformers has no other for the model, so that eager is not the user's choice."""
    layers = [layer for layer in model.modules() if isinstance(layer, TapedLayer)]
    attentions = [part for part in model.modules() if isinstance(part, FusedProjections)]
    mixers = [*attentions, *(layer._modules.get("self_attn") for layer in layers)]
    fused = {id(mixer.config) for mixer in mixers if hasattr(mixer, "config")}
    parts = [part for part in model.modules() if hasattr(type(part), "_supports_sdpa")]
    for part in {id(part.config): part for part in parts if id(part.config) in fused}.values():
        before = part.config._attn_implementation
        if before == ("sdpa" if part._supports_sdpa else "eager") and not part.config.output_attentions:
            setattr(part, ATTENTION_BEFORE, before)
            part.config._attn_implementation_internal = NAME


def allow_drafts(model: nn.Module) -> None:
    """transformers refuses drafts for models with a recurrent state, because it cannot go back. Ours can, if all mixers
    with such a state are fused."""
    for part in model.modules():
        if getattr(type(part), STATEFUL, False):
            mixers = [module for module in part.modules() if keeps_state(module)]
            states = getattr(part.config.get_text_config(), "number_of_conv_states", 1)
            if mixers and states == 1 and all(isinstance(mixer, FusedMixer) for mixer in mixers):
                setattr(part, STATEFUL, False)


def fuse_all(model: nn.Module) -> Report:
    modules = dict(model.named_modules())
    known = {name: fused for name, module in modules.items() if (fused := fused_class(original_class(module)))}
    norms = [name for name, fused in known.items() if issubclass(fused, FusedNorm)]
    for name, fused in known.items():
        if issubclass(fused, FusedMixer | FusedMlp):
            lend_config(name, modules)
    # Children come first: a layer is fused together with its block.
    rows = [fuse(name, modules[name]) for name in reversed(known) if name not in norms]
    rows += [fuse_norm(name, modules) for name in norms]
    left = {name: NOT_FUSED.get(class_name(type(module))) for name, module in modules.items()}
    rows += [Row(name, type(modules[name]).__name__, LEFT, reason) for name, reason in left.items() if reason]
    rows += [
        report_experts(name, module, modules[name.rpartition(".")[0]])
        for name, module in reversed(modules.items())
        if is_experts(module)
    ]
    order = {name: i for i, name in enumerate(modules)}
    return Report(sorted(filter(None, rows), key=lambda row: order[row.name]))


def lend_config(name: str, modules: dict[str, nn.Module]) -> None:
    """Give a mixer or MLP without a configuration the one of the module around it, which selects the experts."""
    module, outer = modules[name], name
    while outer and "config" not in vars(module):
        outer = outer.rpartition(".")[0]
        config = vars(modules[outer]).get("config")
        if config is not None:
            module.config, module.borrows_config = config, True


def fuse_norm(name: str, modules: dict[str, nn.Module]) -> Row | None:
    """Fuse the norm after the last layer, which has no configuration of its own."""
    norm, model = modules[name], modules[name.rpartition(".")[0]]
    layers = model._modules.get("layers", ())
    if name.rpartition(".")[2] not in LAST_NORMS or not any(isinstance(layer, TapedLayer) for layer in layers):
        return None
    norm.config = model.config
    row = fuse(name, norm)
    if row.state == LEFT:
        del norm.config
    return row


def fuse(name: str, module: nn.Module) -> Row | None:
    """Swap the class of one supported module. None for an MLP, which is a part of a block or a layer, and for a decoder
    layer without a fused block or MLP, which is not changed.

    The class is assigned, since the module must stay the same object: others hold it, and it holds the weights.
    """
    cls = original_class(module)
    fused = fused_class(cls, selects_ours(module))
    if issubclass(fused, FusedPreNormLayer) and not isinstance(module._modules.get(fused.record.mlp), MLPS):
        module.__class__ = cls  # it may have been fused before; nothing else of it has changed
        return None
    obstacle = fused.why_left(module)
    if "forward" in module.__dict__:
        by_accelerate = "accelerate has replaced its forward, to move weights (device_map)"
        obstacle = by_accelerate if hasattr(module, "_hf_hook") else "its forward has been replaced already"
    module.__class__ = cls if obstacle else fused
    if obstacle and vars(module).pop("borrows_config", False):
        del module.config
    if isinstance(module, JoinedProjections):
        module.join()
    if issubclass(fused, FusedMlp):
        return None
    if obstacle:
        return Row(name, cls.__name__, LEFT, obstacle)
    return Row(name, cls.__name__, FUSED, ", ".join(filter(None, (formats(module), tape_note(module)))))


def formats(module: nn.Module) -> str:
    """The formats of its packed weights."""
    parts = [part for part in module.modules() if getattr(part, "packing", None)]
    return ", ".join(sorted({part.format_of(weight) for part in parts for weight in part.packing}))


def tape_note(module: nn.Module) -> str:
    """Whether Python runs this layer's code for each token, although it is fused."""
    reason = why_not_taped(module) if isinstance(module, TapedLayer) else None
    return f"not replayed: {reason}" if reason else ""


def report_experts(name: str, module: nn.Module, parent: nn.Module) -> Row | None:
    """The row for experts whose block is not fused."""
    if isinstance(parent, Fused):
        return None
    reason = why_not_fused(module)
    selected = module.config._experts_implementation
    known = fused_class(type(parent)) is not None
    note = "its block is left" if known else f"{type(parent).__name__} around it is not a supported block"
    note = ", ".join(filter(None, (formats(module), note)))
    if module._is_expert_parallel:  # its weights are shards that its forward makes plain tensors
        reason, note = None, "its block runs under expert parallelism"
    if reason:
        return Row(name, type(module).__name__, LEFT, reason)
    if selected != NAME:
        return Row(name, type(module).__name__, LEFT, f"its configuration selects {selected!r}")
    return Row(name, type(module).__name__, EXPERTS_ONLY, note)
