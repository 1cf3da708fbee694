"""Changes of a module that happen completely or not at all."""

import copy

from torch import nn

#: The containers in which a module keeps its tensors and submodules; they are changed in-place.
TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")


class all_or_nothing:
    """`with all_or_nothing(module):` An exception inside, including KeyboardInterrupt and MemoryError, restores the
    module and its submodules: classes, attributes, parameters, buffers, submodules and transformers' configurations.

    The values of tensors and the contents of other containers are not restored: replace them instead of writing into
    them. Replaced tensors keep their memory until the end.

    This is a class, because a generator that an interrupt left suspended would raise, and restore, when it is
    collected.
    """

    def __init__(self, module: nn.Module):
        self.before = [(part, type(part), dict(vars(part)), tables_of(part)) for part in module.modules()]
        found = (own.get("config") for _, _, own, _ in self.before)
        configs = {id(config): config for config in found if hasattr(config, "__dict__")}
        self.configs = [(config, dict(vars(config))) for config in configs.values()]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, *details) -> None:
        if kind is None:
            return
        for part, cls, own, tables in self.before:
            if type(part) is not cls:
                part.__class__ = cls  # the modules are the model's own, which the caller holds
            restore(vars(part), own)
            for name, content in tables.items():
                restore(own[name], content)
        for config, own in self.configs:
            restore(vars(config), own)


def tables_of(module: nn.Module) -> dict[str, dict | set]:
    """Copies of the module's containers. TorchScript's modules have other ones, which are not changed here."""
    own = vars(module)
    return {name: copy.copy(own[name]) for name in TABLES if isinstance(own.get(name), dict | set)}


def restore(container: dict | set, content: dict | set) -> None:
    container.clear()
    container.update(content)
