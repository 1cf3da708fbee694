"""The launch parameters of csrc/mps/tuning.h, "settings" here: the current ones, and those that `tune` saved.

They are saved per GPU name and torch version in one JSON file, which contains only those that differ from the default:

    {"Apple M4 Max": {"2.13.0": {"tiles_per_band": 4, "few_tokens": 12}}}

The setting that selects the matrix units is also saved per macOS, under "2.15.0, macOS 26.5": another macOS compiles
those kernels again, and with some versions they were wrong, only at the sizes of real models.

The file is `path()`, in the user's cache folder. The environment variable MOE_METAL_TUNING names another file; if it is
empty, no file is read or written.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch

from . import macos

ops = torch.ops.moe_metal
Settings = dict[str, int]
PER_MACOS = ("tensor_ops",)  # it selects Apple's kernels for products


def torch_and_macos() -> str:
    return f"{torch.__version__}, macOS {macos.version()}"


def path() -> Path | None:
    """The file with the saved settings; None if MOE_METAL_TUNING is empty."""
    variable = os.environ.get("MOE_METAL_TUNING")
    if variable is not None:
        return Path(variable) if variable else None
    if sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "torch_moe_metal" / "tuning.json"


def is_built() -> bool:
    """Whether the extension has its MPS backend, which has the settings."""
    return hasattr(ops, "_tuning")


def current() -> Settings:
    return dict(zip(*ops._tuning(), strict=True))


def defaults() -> Settings:
    return dict(zip(*ops._tuning(defaults=True), strict=True))


def use(settings: Settings) -> None:
    """Set these, and all others to their defaults. Raises ValueError for a wrong name or value."""
    ops._set_tuning(list(settings), list(settings.values()))


def gpu() -> str:
    """Metal's name of the GPU. No work is sent to it for this."""
    return torch.backends.mps.get_name()


def about() -> dict[str, object]:
    """The settings, as benchmarks record them."""
    return {"settings": current(), "default": current() == defaults()}


# ------------------------------------------------------------------------------------------------ the file


def saved() -> dict[str, dict[str, Settings]]:
    """The content of the file, by GPU and torch version; empty if there is no file. Raises ValueError for any other
    content."""
    file = path()
    if file is None or not file.exists():
        return {}
    found = json.loads(file.read_text())
    if not (isinstance(found, dict) and all(isinstance(versions, dict) for versions in found.values())):
        raise ValueError("expected settings by torch version by GPU")
    for settings in (settings for versions in found.values() for settings in versions.values()):
        if not (isinstance(settings, dict) and all(type(value) is int for value in settings.values())):
            raise ValueError(f"expected integers by name, got {settings}")
    return found


def load() -> None:
    """Use the settings saved for this GPU, torch and macOS. An unusable file is ignored, with a warning."""
    try:
        found = saved()
        if found:  # otherwise the name of the GPU is not needed
            of_gpu = found.get(gpu(), {})
            use(of_gpu.get(torch.__version__, {}) | of_gpu.get(torch_and_macos(), {}))
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(f"torch_moe_metal: the settings in {path()} are ignored: {why}", stacklevel=2)


def save(settings: Settings) -> Path:
    """Save these for this GPU, torch and macOS."""
    everything = saved_or_empty()
    of_gpu = everything.setdefault(gpu(), {})
    of_gpu[torch.__version__] = {name: value for name, value in settings.items() if name not in PER_MACOS}
    per_macos = {name: value for name, value in settings.items() if name in PER_MACOS}
    of_gpu.pop(torch_and_macos(), None)
    return write(everything | {gpu(): of_gpu | ({torch_and_macos(): per_macos} if per_macos else {})})


def is_saved(name: str) -> bool:
    """Whether `tune` has saved a value of this setting for this GPU, torch and macOS."""
    of_gpu = saved_or_empty().get(gpu(), {})
    return any(name in of_gpu.get(key, {}) for key in (torch.__version__, torch_and_macos()))


def forget() -> bool:
    """Remove the settings saved for this GPU, of all torch versions. -> whether there were any"""
    everything = saved_or_empty()
    if everything.pop(gpu(), None) is None:
        return False
    write(everything)
    return True


def saved_or_empty() -> dict[str, dict[str, Settings]]:
    """The content of the file; empty if the file is broken."""
    try:
        return saved()
    except ValueError:
        return {}


def write(everything: dict[str, dict[str, Settings]]) -> Path:
    file = path()
    if file is None:
        raise OSError("MOE_METAL_TUNING is empty, so there is no file for the settings")
    write_json(file, everything)
    return file


def write_json(file: Path, content: object) -> None:
    """Other processes read either the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(json.dumps(content, indent=1) + "\n")
    new.replace(file)
