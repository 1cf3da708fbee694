"""Which transformers this was made for."""

import functools
import sys
import warnings

TESTED = (5, 23)


@functools.cache
def check_version() -> None:
    """Warn, once, when the installed transformers is newer than the one our tests ran with."""
    # This file may be read while transformers is being imported, and transformers replaces its own module at the end.
    version = sys.modules["transformers"].__version__
    if tuple(int(part) for part in version.split(".")[:2]) > TESTED:
        warnings.warn(
            f"torch_moe_metal was tested with transformers {TESTED[0]}.{TESTED[1]}, and {version} is "
            "installed. Compare a few outputs with unpatch(model) before you rely on it.",
            stacklevel=3,
        )
