"""The table of slow tests, and tools/slow_sets.py, which runs the sets that have changed."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import slow_sets
from slow_sets import ROOT, TABLE

# Run by `make test-arm` alone: it needs another processor, emulated.
OTHERS = {"tests/test_arm.py"}
MARK = re.compile(r"mark\.slow\b|mark\.slow_on_mps\b|\bneeds\(")  # `needs` of test_mutated_cpu_readers.py marks, too


def has_slow_tests(file: Path) -> bool:
    """Whether a mark `slow` in it is not beside `full_grid`, which `make test-all` alone runs."""
    lines = file.read_text().splitlines()
    beside = ["".join(lines[max(number - 2, 0) : number + 2]) for number, line in enumerate(lines) if MARK.search(line)]
    return not all("full_grid" in lines for lines in beside)


def test_every_slow_test_is_in_one_set():
    files = [name for name in slow_sets.listed(ROOT, ["tests/*test_*.py"]) if has_slow_tests(ROOT / name)]
    assert len(files) > 20
    counts = Counter(file for each in slow_sets.read(ROOT).values() for file in each.tests)
    assert counts == dict.fromkeys(set(files) - OTHERS, 1)


def test_every_pattern_matches_a_file():
    for each in slow_sets.read(ROOT).values():
        for pattern in [*each.tests, *each.subject]:
            assert slow_sets.listed(ROOT, [pattern.removeprefix(":!")]), f"[{each.name}] of {TABLE}: {pattern}"


SETS = """
[right]
tests = ["tests/test_right.py"]
subject = ["right", "*.txt"]
passed = ""

[wrong]
tests = ["tests/test_wrong.py"]
subject = ["wrong", ":!*.md"]
passed = "0"

[partial]
tests = ["tests/test_partial.py"]
subject = ["right/source.h"]
passed = ""
"""
TESTS = {
    "right": "assert True",
    "wrong": "assert False",
    "partial": "pytest.skip('not on this machine')",
}


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch) -> Path:
    """A checkout with three sets, which no run has recorded."""
    for variable in ("PYTEST_ADDOPTS", "MOE_METAL_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(slow_sets.sys, "platform", "linux")
    mark = "pytestmark = getattr(pytest.mark, 'slow')"  # not in the words that has_slow_tests() looks for
    files = {
        f"tests/test_{name}.py": f"import pytest\n{mark}\ndef test_it():\n    {body}\n" for name, body in TESTS.items()
    }
    files |= {"tests/slow_sets.toml": SETS, "right/source.h": "1", "wrong/deep/source.h": "1", "wrong/about.md": ""}
    files |= {"about.txt": "", "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["slow", "full_grid"]\n'}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    return tmp_path


def passed(root: Path) -> dict[str, str]:
    return {name: each.passed for name, each in slow_sets.read(root).items()}


def hashes(root: Path) -> dict[str, str]:
    return {name: each.hash(root) for name, each in slow_sets.read(root).items()}


def test_a_set_is_recorded_only_if_all_of_it_passed(checkout: Path, capfd):
    assert slow_sets.main([], checkout) == 1
    said = capfd.readouterr().out
    assert passed(checkout) == {"right": hashes(checkout)["right"], "wrong": "0", "partial": ""}
    assert "slow set right: 1 passed; recorded in tests/slow_sets.toml" in said
    assert "slow set wrong: 1 failed; not recorded: not all of its tests passed" in said
    assert "slow set partial: 1 skipped; not recorded: not all of its tests passed" in said

    (checkout / "tests" / "test_wrong.py").unlink()
    shutil.copy(checkout / "tests" / "test_right.py", checkout / "tests" / "test_wrong.py")
    assert slow_sets.main(["--", "-q"], checkout) == 0
    said = capfd.readouterr().out
    assert "slow set right: NOT RUN, unchanged since it passed" in said
    assert passed(checkout) == hashes(checkout) | {"partial": ""}


@pytest.mark.parametrize(
    "arguments, expected",
    [([], {"wrong", "partial"}), (["right"], {"right"}), (["--all"], {"right", "wrong", "partial"})],
)
def test_sets_that_run(arguments: list[str], expected: set[str], checkout: Path, monkeypatch):
    slow_sets.record(checkout, "right", hashes(checkout)["right"])
    ran = []
    monkeypatch.setattr(slow_sets, "run", lambda root, chosen, options: ran.extend(chosen) or 2)
    assert slow_sets.main(arguments, checkout) == 2
    assert {each.name for each in ran} == expected


def test_a_set_with_a_command(checkout: Path, capfd):
    """It is built for, run and recorded like the others; a build that fails ends the run."""
    command = [sys.executable, "-c", "import pathlib; assert pathlib.Path('built').exists()"]
    built = [sys.executable, "-c", "import pathlib; pathlib.Path('built').touch()"]
    table = f'\n[command]\ncommand = {command}\nbuild = {built}\nsubject = ["right"]\npassed = ""\n'
    (checkout / TABLE).write_text(SETS + table)
    assert slow_sets.main(["command"], checkout) == 0
    assert passed(checkout)["command"] == hashes(checkout)["command"]
    assert "ended with status 0; recorded in" in capfd.readouterr().out

    (checkout / TABLE).write_text(SETS + table.replace("'built').exists", "'absent').exists"))
    assert slow_sets.main(["command", "right"], checkout) == 1
    assert passed(checkout)["command"] == "" and passed(checkout)["right"] == hashes(checkout)["right"]
    assert "ended with status 1; not recorded: it failed" in capfd.readouterr().out

    (checkout / TABLE).write_text(SETS + table.replace("touch()", "rmdir()"))
    with pytest.raises(slow_sets.SlowSetsError, match="this failed"):
        slow_sets.main(["command"], checkout)


def test_hashes_at_a_commit(checkout: Path, capfd):
    before = hashes(checkout)
    git(checkout, "-c", "user.name=me", "-c", "user.email=me@here", "commit", "--quiet", "-m", "before")
    (checkout / "right" / "source.h").write_text("2")
    assert hashes(checkout) != before
    assert slow_sets.main(["--at", "HEAD"], checkout) == 0
    assert capfd.readouterr().out == "".join(f"{name}: {each}\n" for name, each in before.items())


@pytest.mark.parametrize("file", ["right/source.h", "about.txt", "tests/test_right.py"])
def test_a_changed_file_changes_the_hash(file: str, checkout: Path):
    before = hashes(checkout)
    (checkout / file).write_text("2")
    after = hashes(checkout)
    assert before["right"] != after["right"] and before["wrong"] == after["wrong"]


def test_renamed_and_removed_files_change_the_hash(checkout: Path):
    seen = [hashes(checkout)["wrong"]]
    (checkout / "wrong" / "about.md").write_text("excluded")
    assert hashes(checkout)["wrong"] == seen[0]
    git(checkout, "mv", "wrong/deep/source.h", "wrong/source.h")
    seen.append(hashes(checkout)["wrong"])
    (checkout / "wrong" / "source.h").unlink()  # git still lists it
    seen.append(hashes(checkout)["wrong"])
    assert len(set(seen)) == 3


def test_untracked_files_are_not_hashed_and_nothing_is_recorded(checkout: Path, capfd):
    before = hashes(checkout)
    (checkout / "right" / "new.h").write_text("1")
    assert hashes(checkout) == before
    slow_sets.main(["right"], checkout)
    assert passed(checkout)["right"] == "" and "git does not track right/new.h" in capfd.readouterr().out


@pytest.mark.parametrize("variable", ["PYTEST_ADDOPTS", "MOE_METAL_DEVICES"])
def test_part_of_a_set_is_not_recorded(variable: str, checkout: Path, monkeypatch, capfd):
    monkeypatch.setenv(variable, "-q")
    slow_sets.main(["right"], checkout)
    assert passed(checkout)["right"] == "" and f"{variable} may leave tests out" in capfd.readouterr().out


def test_options_in_the_environment_reach_every_process():
    """PYTEST_ADDOPTS chooses tests in CI, where xdist's processes run them."""
    environment = os.environ | {"PYTEST_ADDOPTS": "-k no_such_test", "MOE_METAL_DEVICES": "cpu"}
    command = [sys.executable, "-m", "pytest", "-n", "1", "tests/tools/test_other_transformers.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr
