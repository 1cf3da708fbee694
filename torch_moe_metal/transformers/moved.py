"""The modules' former names, for models that were pickled (`torch.save(model)`) before the modules moved."""

import sys
from importlib import import_module
from types import ModuleType

#: Where the names of each former module are now.
MOVED = {
    "config": ("checkpoints.config", "checkpoints.patterns", "checkpoints.quantize"),
    "mlx": ("checkpoints.mlx_quantizer", "checkpoints.mlx_config", "checkpoints.mlx_conversions"),
    "quantizer": (
        "checkpoints.quantizer",
        "checkpoints.conversions",
        "checkpoints.fp8",
        "checkpoints.moe_metal",
        "checkpoints.mxfp4",
    ),
}
MOVED |= {name: (f"checkpoints.{name}",) for name in ("checkpoint", "gguf_quantizer", "integers", "metal", "sources")}
MOVED |= {name: (f"fusing.{name}",) for name in ("attention", "blocks", "cache", "experts", "packed", "patch")}


class Moved(ModuleType):
    """Imports the modules when a name is needed."""

    def __getattr__(self, name: str):
        if not name.startswith("__"):  # which Python looks up in every module
            package, _, former = self.__name__.rpartition(".")
            for home in MOVED[former]:
                module = import_module(f"{package}.{home}")
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def register() -> None:
    for former in MOVED:
        name = f"{__package__}.{former}"
        sys.modules[name] = Moved(name)
