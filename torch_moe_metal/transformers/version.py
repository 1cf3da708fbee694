"""Which transformers this was made for."""

import functools
import importlib.metadata
import warnings

TESTED = (5, 23)


@functools.cache
def check_version() -> None:
    """Warn, once, when the installed transformers is another than the one our tests ran with."""
    version = importlib.metadata.version("transformers")
    if tuple(int(part) for part in version.split(".")[:2]) != TESTED:
        warnings.warn(
            f"torch_moe_metal was tested with transformers {TESTED[0]}.{TESTED[1]}, and {version} is installed. "
            "Compare a few outputs with unpatch(model) before you rely on it.",
            stacklevel=3,
        )
