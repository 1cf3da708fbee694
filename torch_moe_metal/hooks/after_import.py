"""Call a function when a module has been imported, without importing it ourselves."""

import importlib.util
import sys
from collections.abc import Callable


class _Finder:
    """A finder in sys.meta_path for one module. It finds the module like Python does and adds a call to the end of
    its import."""

    def __init__(self, name: str, then: Callable[[], None]):
        self.name, self.then = name, then

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # until an import succeeds: one in a circle of imports may fail
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then_call(module):
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self.then()

            spec.loader.exec_module = execute_then_call
        return spec


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then()` now if the module `name` is already imported, else directly after its import."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))
