"""macOS's version. This file needs nothing of the package: tools run it before the package is built."""

import platform


def version() -> str:
    """Such as 26.5, from the kernel's release; empty where this is no Mac.

    To a Python that was linked for an older SDK, as many are, macOS 26 calls itself 16. csrc/mps/launch.mm says the
    same to C++."""
    if platform.system() != "Darwin":
        return ""
    darwin, minor, *_ = platform.release().split(".")
    major = int(darwin) - 9 if int(darwin) < 25 else 26 if darwin == "25" else int(darwin)
    return f"{major}.{minor}"
