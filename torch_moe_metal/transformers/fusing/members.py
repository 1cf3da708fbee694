"""Reads parameters and settings of transformers' modules at little cost.

They are read at every call, since they may be moved, cast, loaded or tied at any time. So the cost matters: a call is
one token in one layer.
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


def member(module: nn.Module, name: str):
    """`module.name` of a parameter. Python's own lookup fails first and then calls nn.Module's __getattr__, which is
    ten times slower and would be most of the cost of checking a module."""
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


def submodule(module: nn.Module, name: str) -> nn.Module | None:
    """The submodule of this name, which may be a path, or None."""
    found = module._modules.get(name)
    if found is None and "." in name:
        parent, _, rest = name.partition(".")
        inner = module._modules.get(parent)
        return None if inner is None else submodule(inner, rest)
    return found


def setting(config, name: str):
    """What a configuration itself holds under this name, or None. transformers' own lookup runs Python code, twice for
    a property: 2 us, several times in each layer."""
    if torch.compiler.is_compiling():  # it cannot trace the lookup below
        return getattr(config, name, None)
    return object.__getattribute__(config, "__dict__").get(name)


#: The results of `prepared`, with the parameter's memory and version. They are not on the modules, which can be saved.
_PREPARED: WeakKeyDictionary[nn.Module, tuple[Tensor, int, Tensor]] = WeakKeyDictionary()


def prepared_results(module: nn.Module) -> list[tuple[Tensor, int, Tensor]]:
    """What `prepared` has computed for this module: the parameter's memory, its version, and the result."""
    found = _PREPARED.get(module)
    return [] if found is None else [found]


def prepared(
    module: nn.Module, name: str, compute: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
) -> Tensor:
    """`compute(module.name)` of the one parameter or buffer that is prepared in this module, computed again only after
    it has changed. Changes in-place count, except through `.data`, which PyTorch does not record. `dtype` is that of
    the result, if it depends on more than the parameter."""
    weight = member(module, name)
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if traced or type(weight) not in (nn.Parameter, Tensor) or weight.is_meta or weight.is_inference():
        return compute(weight)
    known = _PREPARED.get(module)
    if known is not None:
        memory, version, result = known
        same = memory.data_ptr() == weight.data_ptr() and memory.dtype == weight.dtype
        if same and version == weight._version == memory._version and dtype in (None, result.dtype):
            return result
    with torch.inference_mode(False), torch.no_grad():
        result = compute(weight)
        if type(result) is Tensor:  # not a fake tensor of a FakeTensorMode
            # It keeps the memory, so that no other weight can be at the same address.
            _PREPARED[module] = weight.detach(), weight._version, result
    return result
