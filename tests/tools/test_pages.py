"""The pages that `make benchmarks` generates, and the files with figures that it reads."""

import json
from pathlib import Path

import pytest

import benchmarks
import ops_page
from torch_moe_metal.commands.bench.report import json_of


@pytest.mark.parametrize("found", [{"a": 1, "rows": [{"T": 1, "us": None}, {"T": 2}]}, {"rows": {"stock": {"x": 1.5}}}])
def test_json_has_a_line_for_each_row(found: dict):
    text = json_of(found)
    assert json.loads(text) == found
    rows = found["rows"].values() if isinstance(found["rows"], dict) else found["rows"]
    for row in rows:
        assert len([line for line in text.splitlines() if json.dumps(row) in line]) == 1


def test_files_with_figures_have_a_line_for_each_row():
    files = benchmarks.files()
    assert files and all(file.read_text() == json_of(json.loads(file.read_text())) + "\n" for file in files)


def test_list_of_ops(tmp_path: Path, monkeypatch):
    source = tmp_path / "reference.py"
    source.write_text('''
__all__ = ["scale", "plain", "elsewhere"]


def scale(
    x: Tensor,  # [T, H], activations
    factor: Tensor | None = None,  # [1] or [H]
    *,
    eps: float = 1e-6,
) -> Tensor:
    """x * factor. -> [T,
    H]

    - The first rule,
      on two lines.
    - The second.
    """


def plain(x: Tensor) -> None:
    """Nothing."""


def helper(x: Tensor) -> None:
    """Not in the list."""
''')
    other = tmp_path / "recurrence.py"
    other.write_text('''
@decorated
def elsewhere(
    x: Tensor,  # [B, T]
) -> None:
    """Steps:

    1. The first,
       on two lines.
    2. The second.
    """
''')
    monkeypatch.setattr(ops_page, "SOURCES", [source, other])
    first = "### scale\n\n`scale(x [T, H], factor? [1] or [H], *, eps=1e-06)`\n\nx * factor. -> [T, H]\n\n"
    rules = "- The first rule, on two lines.\n- The second.\n"
    last = "### elsewhere\n\n`elsewhere(x [B, T])`\n\nSteps:\n\n1. The first, on two lines.\n2. The second.\n"
    assert ops_page.text() == f"{first}{rules}\n### plain\n\n`plain(x)`\n\nNothing.\n\n{last}"


def test_only_the_part_between_the_comments_is_replaced(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- ops: a command -->\nold\n<!-- end of ops -->\nafter\n")
    assert benchmarks.with_part(page, "ops", "new\n") == page.read_text().replace("old", "new")


def test_words_that_all_rows_have_are_left_out():
    assert benchmarks.differing(["T=1 H=8", "T=4 H=8"]) == ["T=1", "T=4"]
    assert benchmarks.differing(["T=1 H=8"]) == ["T=1 H=8"]


def test_what_all_files_have_in_common_is_said_once():
    files = [{"torch": "2.13", "machine": "A", "threads": 2}, {"torch": "2.13", "machine": "B"}]
    assert benchmarks.shared(files) == {"torch": "2.13", "threads": 2}
