"""Changes of a module that happen as a whole or not at all."""

import contextlib
import copy
from collections.abc import Iterator

from torch import nn

#: The containers in which a module keeps its tensors and submodules, and which are changed in place.
TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")


@contextlib.contextmanager
def all_or_nothing(module: nn.Module) -> Iterator[None]:
    """An exception inside, KeyboardInterrupt and MemoryError too, leaves the module and all in it as it was: classes,
    attributes, parameters, buffers, submodules and transformers' configurations.

    The values of tensors and the contents of other containers are not restored: replace them, do not write into them.
    What was replaced keeps its memory until the end.
    """
    before = [
        (part, type(part), dict(vars(part)), {name: copy.copy(vars(part)[name]) for name in TABLES})
        for part in module.modules()
    ]
    configs = {id(config): config for _, _, own, _ in before if hasattr(config := own.get("config"), "__dict__")}
    settings = [(config, dict(vars(config))) for config in configs.values()]
    try:
        yield
    except BaseException:
        for part, cls, own, tables in before:
            part.__class__ = cls
            restore(vars(part), own)
            for name, content in tables.items():
                restore(own[name], content)
        for config, own in settings:
            restore(vars(config), own)
        raise


def restore(container: dict | set, content: dict | set) -> None:
    container.clear()
    container.update(content)
