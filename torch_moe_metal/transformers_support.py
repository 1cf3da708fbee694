"""Which versions of transformers are supported, and whether we change how they load checkpoints. This module does
not import transformers, which is slow to import."""

import functools
import importlib.metadata
import os
import re
import warnings

#: The oldest supported minor version, and the newest one that the tests run with; tools/requirements.txt and
#: pyproject.toml repeat them. 5.22 casts weights to uint8 before a quantizer sees them, and with a quantizer it accepts
#: weights of any shape. Newer versions are compared with themselves first: see transformers/self_check.py.
OLDEST, NEWEST = "5.23", "5.24"
VARIABLE = "TORCH_MOE_METAL_CHECKPOINTS"
_packed_checkpoints: bool | None = None


def packed_checkpoints(enabled: bool | None = None) -> bool:
    """Whether `from_pretrained` keeps quantised checkpoints packed. An argument sets this for later loads.

        torch_moe_metal.packed_checkpoints(False)  # transformers loads them itself

    This concerns gpt-oss, FP8, GPTQ, AWQ, compressed-tensors, MetalConfig, GGUF files and mlx-lm folders. A
    `MoeMetalConfig` always works. The default is True, or False with the environment variable
    TORCH_MOE_METAL_CHECKPOINTS=0.
    """
    global _packed_checkpoints
    if enabled is not None:
        _packed_checkpoints = bool(enabled)
    return os.environ.get(VARIABLE) != "0" if _packed_checkpoints is None else _packed_checkpoints


def installed_version() -> str:
    return importlib.metadata.version("transformers")


def minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def why_unsupported(version: str) -> str | None:
    """The reason why this version of transformers is not supported; None if it is."""
    if minor(version) >= minor(OLDEST):
        return None
    return (
        f"torch_moe_metal supports transformers from {OLDEST} on and does nothing in {version}, which is installed: "
        f"pip install 'transformers>={OLDEST}'"
    )


@functools.cache
def is_untested() -> bool:
    """Whether the installed transformers is newer than the newest version that the tests run with."""
    return minor(installed_version()) > minor(NEWEST)


def require_supported() -> None:
    """Raise if transformers is missing or its version is not supported."""
    try:
        reason = why_unsupported(installed_version())
    except importlib.metadata.PackageNotFoundError:
        reason = "torch_moe_metal needs transformers for this: pip install transformers accelerate"
    if reason is not None:
        raise ImportError(reason)


@functools.cache
def is_supported() -> bool:
    """Whether the installed transformers is supported. If not, warn once."""
    reason = why_unsupported(installed_version())
    if reason is not None:
        warnings.warn(reason, stacklevel=2)
    return reason is None
