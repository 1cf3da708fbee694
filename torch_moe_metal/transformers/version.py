"""Which transformers this was made for."""

import functools
import warnings

import transformers

TESTED = (5, 23)


@functools.cache
def check_version() -> None:
    """Warn, once, when the installed transformers is newer than the one our tests ran with."""
    installed = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if installed > TESTED:
        warnings.warn(
            f"torch_moe_metal was tested with transformers {TESTED[0]}.{TESTED[1]}, and {transformers.__version__} is "
            "installed. Compare a few outputs with unpatch(model) before you rely on it.",
            stacklevel=3,
        )
