"""The list of ops in docs/ops.md, from the signatures, shapes and docstrings of torch_moe_metal/reference.py, and of
recurrence.py, from which it imports some. Only their text is read, so nothing has to be built or installed. `make
benchmarks` writes the page."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [ROOT / "torch_moe_metal" / name for name in ("reference.py", "recurrence.py")]


def shape_of(line: str) -> str:
    """The shapes in the comment of an argument: "[T, H]" of "x: Tensor,  # [T, H], logits"."""
    found = re.search(r"# (\[[^\]]*\](?: or \[[^\]]*\])*)", line)
    return f" {found[1]}" if found else ""


def argument(node: ast.arg, default: ast.expr | None, lines: list[str]) -> str:
    """A tensor with its shape, or an option with its default; "?" marks an optional tensor."""
    if "Tensor" in ast.unparse(node.annotation):
        return node.arg + "?" * (default is not None) + shape_of(lines[node.lineno - 1])
    return node.arg if default is None else f"{node.arg}={ast.unparse(default)}"


def signature(op: ast.FunctionDef, lines: list[str]) -> str:
    tensors, options = op.args.args, op.args.kwonlyargs
    defaults = [None] * (len(tensors) - len(op.args.defaults)) + op.args.defaults
    given = [argument(*one, lines) for one in zip(tensors, defaults, strict=True)]
    named = [argument(*one, lines) for one in zip(options, op.args.kw_defaults, strict=True)]
    return f"{op.name}({', '.join([*given, *['*'] * bool(named), *named])})"


def section(op: ast.FunctionDef, lines: list[str]) -> str:
    """Each paragraph of the docstring, and each item of a list, becomes one line."""
    docstring = re.sub(r"(?<!\n)\n(?!\n|- |\d\. ) *", " ", ast.get_docstring(op))
    return f"### {op.name}\n\n`{signature(op, lines)}`\n\n{docstring}\n"


def text() -> str:
    sections, names = {}, []
    for source in (file.read_text() for file in SOURCES):
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef):
                sections[node.name] = node, source.splitlines()
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names = ast.literal_eval(node.value)
    return "\n".join(section(*sections[name]) for name in names)
