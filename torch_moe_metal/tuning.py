"""The numbers of csrc/mps/tuning.h that depend on the GPU: what holds now, and what `tune` has kept for this machine.

They are kept per GPU name and torch version in one JSON file, of which those that are not the default's stand there:

    {"Apple M4 Max": {"2.13.0": {"band": 4, "few_tokens": 12}}}

Numbers by which the matrix units are used are kept per macOS as well, under "2.15.0, macOS 26.5": another one compiles
those kernels anew, and it has happened that they were wrong then, at the sizes of models only.

The file is `path()`, in the user's cache folder; the environment's MOE_METAL_TUNING names another, or none if empty.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch

from . import macos

ops = torch.ops.moe_metal
Numbers = dict[str, int]
FOREIGN = ("matrix_units", "tensor_ops")  # numbers by which PyTorch's or Apple's kernels multiply matrices


def torch_and_macos() -> str:
    return f"{torch.__version__}, macOS {macos.version()}"


def path() -> Path | None:
    """Where numbers are kept; None: nowhere."""
    stated = os.environ.get("MOE_METAL_TUNING")
    if stated is not None:
        return Path(stated) if stated else None
    if sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "torch_moe_metal" / "tuning.json"


def is_built() -> bool:
    """Whether the extension has its MPS half, which alone has these numbers."""
    return hasattr(ops, "_tuning")


def in_force() -> Numbers:
    return dict(zip(*ops._tuning(), strict=True))


def defaults() -> Numbers:
    return dict(zip(*ops._tuning(defaults=True), strict=True))


def use(numbers: Numbers) -> None:
    """From now on these hold, and the default of each that is not named. A wrong name or value is a ValueError."""
    ops._set_tuning(list(numbers), list(numbers.values()))


def gpu() -> str:
    """As Metal calls it. Nothing is computed there for it."""
    return torch.backends.mps.get_name()


def about() -> dict[str, object]:
    """What figures of this GPU are kept with."""
    return {"numbers": in_force(), "default": in_force() == defaults()}


# ------------------------------------------------------------------------------------------------ the file


def kept() -> dict[str, dict[str, Numbers]]:
    """What the file holds, by GPU and torch version; empty where there is none. Anything else in it is a ValueError."""
    file = path()
    if file is None or not file.exists():
        return {}
    found = json.loads(file.read_text())
    if not (isinstance(found, dict) and all(isinstance(versions, dict) for versions in found.values())):
        raise ValueError("expected numbers by torch version by GPU")
    for numbers in (numbers for versions in found.values() for numbers in versions.values()):
        if not (isinstance(numbers, dict) and all(type(value) is int for value in numbers.values())):
            raise ValueError(f"expected integers by name, got {numbers}")
    return found


def load() -> None:
    """Use what is kept for this GPU, torch and macOS. A file that cannot be used is ignored, with a warning."""
    try:
        found = kept()
        if found:  # else the GPU need not be asked for its name
            of_gpu = found.get(gpu(), {})
            use(of_gpu.get(torch.__version__, {}) | of_gpu.get(torch_and_macos(), {}))
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(f"torch_moe_metal: the GPU's numbers in {path()} are ignored: {why}", stacklevel=2)


def keep(numbers: Numbers) -> Path:
    """Write these down for this GPU, torch and macOS; whoever reads meanwhile finds the old file or the new one."""
    everything = usable()
    of_gpu = everything.setdefault(gpu(), {})
    of_gpu[torch.__version__] = {name: value for name, value in numbers.items() if name not in FOREIGN}
    foreign = {name: value for name, value in numbers.items() if name in FOREIGN}
    of_gpu.pop(torch_and_macos(), None)
    return write(everything | {gpu(): of_gpu | ({torch_and_macos(): foreign} if foreign else {})})


def forget() -> bool:
    """What is kept for this GPU, of all torch versions. -> whether there was anything"""
    everything = usable()
    if everything.pop(gpu(), None) is None:
        return False
    write(everything)
    return True


def usable() -> dict[str, dict[str, Numbers]]:
    """What the file holds, which a new one goes on with; nothing of a broken one."""
    try:
        return kept()
    except ValueError:
        return {}


def write(everything: dict[str, dict[str, Numbers]]) -> Path:
    file = path()
    if file is None:
        raise OSError("MOE_METAL_TUNING is empty: no file to keep numbers in")
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(json.dumps(everything, indent=1) + "\n")
    new.replace(file)
    return file
