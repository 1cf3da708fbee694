"""Changes of a module that happen as a whole or not at all."""

import copy

from torch import nn

#: The containers in which a module keeps its tensors and submodules, and which are changed in place.
TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")


class all_or_nothing:
    """`with all_or_nothing(module):` An exception inside, KeyboardInterrupt and MemoryError too, leaves the module and
    all in it as it was: classes, attributes, parameters, buffers, submodules and transformers' configurations.

    The values of tensors and the contents of other containers are not restored: replace them, do not write into them.
    What was replaced keeps its memory until the end.

    It is no generator, since one that an interrupt leaves behind would raise, and restore, whenever it is collected.
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
                part.__class__ = cls
            restore(vars(part), own)
            for name, content in tables.items():
                restore(own[name], content)
        for config, own in self.configs:
            restore(vars(config), own)


def tables_of(module: nn.Module) -> dict[str, dict | set]:
    """Copies of its containers; TorchScript's modules have other ones, which nothing here changes."""
    own = vars(module)
    return {name: copy.copy(own[name]) for name in TABLES if isinstance(own.get(name), dict | set)}


def restore(container: dict | set, content: dict | set) -> None:
    container.clear()
    container.update(content)
