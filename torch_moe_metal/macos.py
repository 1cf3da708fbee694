"""The version of macOS. Tools import this file before the package is built, so it imports nothing from the
package."""

import platform


def version() -> str:
    """For example 26.5, from the kernel's release; empty on other systems.

    macOS 26 reports 16 to a Python that was linked for an older SDK, as many are. csrc/mps/launch.mm does the same in
    C++."""
    if platform.system() != "Darwin":
        return ""
    darwin, minor, *_ = platform.release().split(".")
    major = int(darwin) - 9 if int(darwin) < 25 else 26 if darwin == "25" else int(darwin)
    return f"{major}.{minor}"
