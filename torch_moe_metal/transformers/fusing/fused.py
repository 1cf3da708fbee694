"""The base class of the fused classes, and what they share.

A patched module keeps its parameters, its hooks and its name in the model. Only its class changes, to a subclass of
its own class, so isinstance, state_dict, save_pretrained, .to(), deepcopy and pickle work as before.

If a fused forward would skip something (a hook on a router, a replaced submodule, a gradient, a later selection of
other experts), it calls the original forward instead.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ...arguments import DTYPES
from ...first_use import weights_arrived
from ...grad import wants_grad
from ...refused import is_refused, refuses_fusion
from .experts import NAME, WITH_SHAPES, dtype_for, expert_arguments
from .members import member, setting, submodule
from .projections import join, product
from .records import Record

ops = torch.ops.moe_metal


class Fused(nn.Module):
    """The base class of the fused classes."""

    record: Record  # what is special about its class
    original: type  # the class that this module had before
    homes: tuple[str, ...]  # the Python modules with the classes of its unmodified parts
    more_homes: tuple[str, ...] = ()  # in addition to those of the original class and of nn.Linear
    selected: bool  # whether its configuration selected our experts when it was fused; if not, it is not checked later

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), "fused by torch_moe_metal")))

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        weights_arrived(self)  # it may have been moved to mps
        return self

    def are_unmodified(self, *modules: nn.Module) -> bool:
        """Whether these modules do only what their parameters say: no hook, no replaced forward, and the classes that
        they were built with (PEFT and quantizers replace these)."""
        homes = self.homes
        for module in modules:
            own = module.__dict__
            if (
                own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or own["_backward_hooks"]
                or own["_backward_pre_hooks"]
            ):
                return False
            if "forward" in own or type(module).__module__ not in homes:
                return False
        return True

    def is_plain_inference(self, x: Tensor) -> bool:
        """Whether our ops can compute this call: no gradient, no autocast, a supported dtype and device, and no op
        that is wrong on this GPU."""
        device = x.device.type
        return (
            x.dtype in DTYPES
            and device in WITH_SHAPES
            and (device == "meta" or not torch.is_autocast_enabled(device))
            and not wants_grad(self, x)
            and not refuses_fusion(x)
        )

    @classmethod
    def why_left(cls, module: nn.Module) -> str | None:
        """The reason why this module of the original class cannot be fused, or None."""
        return None

    @classmethod
    def why_replaced(cls, module: nn.Module, names: Iterable[str]) -> str | None:
        """A reason for `why_left`: a submodule has another class than the family's own."""
        for name in names:
            part = submodule(module, name)
            if part is not None and type(part).__module__ not in cls.homes:
                return f"a {type(part).__name__} is in place of its {name}"
        return None

    def normed(self, name: str, x: Tensor) -> Tensor:
        """x normalised by the submodule of this name."""
        norm = self._modules[name]
        return rms_norm(x, norm) if self.are_unmodified(norm) else norm(x)

    def product(self, x: Tensor, layer: nn.Module) -> Tensor:
        """The result of one of its linear layers."""
        return product(x, layer) if self.are_unmodified(layer) else layer(x)

    def still_selected(self) -> bool:
        """Whether no other experts were selected since. transformers' exporters do that for targets without our ops."""
        return not self.selected or selects_ours(self)

    def experts_part(self, x: Tensor, experts: nn.Module) -> dict | None:
        """The arguments of `experts` that the experts provide, or None if their module must be called."""
        if is_refused("experts", x):
            return None
        arguments, obstacle = expert_arguments(experts)
        return arguments if obstacle is None and x.dtype == dtype_for(x, arguments) else None


class JoinedProjections(Fused):
    """A mixer with joined projections. They are joined again when the weights are moved or converted."""

    joined: tuple[str, ...]  # the names of these projections

    def parts(self, names: Iterable[str]) -> list[nn.Module]:
        """The existing submodules out of these."""
        found = [submodule(self, name) for name in names]
        return [module for module in found if module is not None]

    def join(self) -> None:
        projections = self.parts(self.joined)
        if self.are_unmodified(*projections):
            join(projections)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.join()
        return self

    def __setstate__(self, state) -> None:
        super().__setstate__(state)
        self.join()  # in a copy, each weight has its own memory


def original_class(module: nn.Module) -> type:
    """The class that the module has, or had before it was fused."""
    return module.original if isinstance(module, Fused) else type(module)


def selects_ours(module: nn.Module) -> bool:
    """Whether the configuration of this block or layer selects our experts. Llama 4's has no such setting."""
    own = module.__dict__
    config = own["config"] if "config" in own else getattr(own["_modules"].get("experts"), "config", None)
    return config is not None and setting(config, "_experts_implementation_internal") == NAME


def rms_norm(x: Tensor, norm: nn.Module) -> Tensor:
    return ops.norm(x, member(norm, "weight"), eps=eps_of(norm))


def eps_of(norm: nn.Module) -> float:
    return norm.eps if "eps" in norm.__dict__ else norm.variance_epsilon
