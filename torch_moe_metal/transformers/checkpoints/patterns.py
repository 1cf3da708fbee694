"""Patterns for module names: our names and globs, and the regular expressions in checkpoints."""

import re
from fnmatch import fnmatchcase

#: Names and globs: of the special characters of regular expressions, only [], * and ? are allowed.
GLOB = re.compile(r"!?[\w.*?-]*(?:\[[\w-]+\][\w.*?-]*)*")


def is_glob(pattern: object) -> bool:
    """Whether a pattern of `skip` or `bits_by_name` is a name or a glob."""
    return isinstance(pattern, str) and bool(pattern.strip("!") and GLOB.fullmatch(pattern))


def within(pattern: str, name: str) -> bool:
    """Whether a name or a glob matches whole parts of a module's name; with a leading !, whether it does not. Python's
    globs do not backtrack from one star to the previous one, so no pattern takes long."""
    if pattern.startswith("!"):
        return not within(pattern[1:], name)
    if not {*"*?["} & set(pattern):
        return f".{pattern}." in f".{name}."
    parts = name.split(".")
    ends = range(1, len(parts) + 1)
    return any(fnmatchcase(".".join(parts[first:end]), pattern) for end in ends for first in range(end))


def expect_bounded(skipped: object) -> None:
    """Raises if a checkpoint's list of modules to skip has patterns that may take long to match."""
    if skipped is not None and not (isinstance(skipped, list) and all(map(is_bounded, skipped))):
        raise ValueError(f"modules_to_not_convert: expected module names or plain patterns, got {skipped!r}")


def is_bounded(pattern: object) -> bool:
    """Whether a regular expression from a file matches quickly: it repeats no group, and has few repetitions."""
    if not isinstance(pattern, str) or len(pattern) > 1000 or re.search(r"\)[*+?{]", pattern):
        return False
    try:
        re.compile(pattern)
    except (re.error, RecursionError):
        return False
    return len(re.findall(r"[*+?{]", pattern)) <= 4
