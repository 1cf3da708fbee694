"""This Mac: the version of macOS, and whether the installed torch computes correctly on its GPU. Tools import this file
before the package is built, so it imports nothing from the package."""

import ctypes
import platform
import sys

import torch
from torch.torch_version import TorchVersion

#: The oldest torch for Apple GPUs.
OLDEST_TORCH = "2.14"


def version() -> str:
    """For example 26.5, from the kernel's release; empty on other systems.

    macOS 26 reports 16 to a Python that was linked for an older SDK, as many are. csrc/mps/pipelines.mm does the same
    in C++."""
    if platform.system() != "Darwin":
        return ""
    darwin, minor, *_ = platform.release().split(".")
    major = int(darwin) - 9 if int(darwin) < 25 else 26 if darwin == "25" else int(darwin)
    return f"{major}.{minor}"


def build() -> str:
    """For example 25F71; empty on other systems. Apple's compiler changes with builds."""
    if platform.system() != "Darwin":
        return ""
    name, size = ctypes.create_string_buffer(64), ctypes.c_size_t(64)
    ctypes.CDLL(None).sysctlbyname(b"kern.osversion", name, ctypes.byref(size), None, ctypes.c_size_t(0))
    return name.value.decode()


def why_torch_is_too_old() -> str | None:
    """The reason why a model should not run with the installed torch on this Mac; None if it may.

    PyTorch's own ops of older versions are silently wrong on Apple GPUs: they draw tokens of probability zero, lose
    biases, let queries see later keys, and write beyond a tensor's memory. A model on the CPU may be moved to mps at
    any time, so what counts is whether this Mac has mps, not where the model is.
    """
    if sys.platform != "darwin" or not torch.backends.mps.is_available():
        return None
    if TorchVersion(torch.__version__) >= OLDEST_TORCH:
        return None
    return (
        f"torch {torch.__version__}, which is installed, gives wrong results on Apple GPUs without an error: "
        f"pip install 'torch>={OLDEST_TORCH}'"
    )


def require_torch() -> None:
    """Raise if the installed torch is too old for this Mac."""
    if (reason := why_torch_is_too_old()) is not None:
        raise ImportError(f"torch_moe_metal: {reason}")
