"""Runs the slow tests whose subject has changed since they last passed: `make test-slow`.

    python tools/slow_sets.py                      # the sets that have changed
    python tools/slow_sets.py wheels tuning        # these sets, changed or not
    python tools/slow_sets.py --all                # every set
    python tools/slow_sets.py -- --numprocesses 2  # pytest's options follow --
    python tools/slow_sets.py --at COMMIT          # only prints the hash of each set at a commit

tests/slow_sets.toml has a table for each set: its test files, or a command that tests; the files that it tests (its
subject); and a hash of all of them from when it last passed. A set that passes gets its new hash there, and the commit
that changed the subject includes it. History plays no part, so a fresh clone decides in the same way. A set whose tests
were not all run and passed gets none; skipped tests count as not run. If CI has run a set, its hash is in CI's last
lines, and `--at` prints it.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path("tests") / "slow_sets.toml"
MARKED = "slow and not full_grid"
REPORT = Path("build") / "slow.xml"


class SlowSetsError(RuntimeError):
    pass


@dataclass(frozen=True)
class SlowSet:
    name: str
    subject: list[str]  # git's pathspecs
    passed: str  # the hash when it last passed; "": never
    tests: list[str] = field(default_factory=list)  # files
    command: list[str] = field(default_factory=list)  # instead of pytest on files
    build: list[str] = field(default_factory=list)  # what it needs besides the build of this machine's instruction set

    def hash(self, root: Path) -> str:
        """Of the names and bytes of its tests and its subject, as they are in the checkout."""
        digest = hashlib.sha256()
        for name in listed(root, [*self.tests, *self.subject]):
            if (root / name).is_file():  # git also lists what has been deleted since the last commit
                digest.update(f"{name} {hashlib.sha256((root / name).read_bytes()).hexdigest()}\n".encode())
        return digest.hexdigest()[:16]


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def listed(root: Path, patterns: Iterable[str], *options: str) -> list[str]:
    """The tracked files that match, or with git's `--others --exclude-standard` those that are not tracked."""
    # A clone in a container may belong to another user.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", *options, "--", *patterns]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise SlowSetsError(f"git, which lists the files of a set, fails in {root}: {done.stderr.strip()}")
    return sorted({name for name in done.stdout.split("\0") if name})


def read(root: Path) -> dict[str, SlowSet]:
    tables = tomllib.loads((root / TABLE).read_text())
    return {name: SlowSet(name=name, **table) for name, table in tables.items()}


def record(root: Path, name: str, new: str) -> None:
    text = (root / TABLE).read_text()
    changed, count = re.subn(rf'(^\[{name}\]$.*?^passed = ")\w*', rf"\g<1>{new}", text, flags=re.MULTILINE | re.DOTALL)
    assert count == 1, f"{TABLE}: [{name}] has no line `passed`"
    (root / TABLE).write_text(changed)


def print_hashes(root: Path, commit: str) -> None:
    with tempfile.TemporaryDirectory() as clone:
        for command in (("clone", "--quiet", "--shared", root, clone), ("-C", clone, "checkout", "--quiet", commit)):
            if subprocess.run(["git", *command]).returncode:
                raise SlowSetsError(f"git does not check out {commit}; its output is above")
        for name, each in read(root).items():
            print(f"{name}: {each.hash(Path(clone))}")


# ------------------------------------------------------------------------------------------------ running them


def build(root: Path, chosen: list[SlowSet]) -> None:
    for command in {tuple(each.build) for each in chosen if each.build}:
        if subprocess.run(command, cwd=root).returncode:
            raise SlowSetsError(f"this failed; its output is above: {' '.join(command)}")


def run(root: Path, chosen: list[SlowSet], options: list[str]) -> int:
    """pytest on their tests. -> its exit status"""
    (root / REPORT).unlink(missing_ok=True)
    files = [file for each in chosen for file in each.tests]
    # Of the kinds of reports, only xunit1 names the files.
    reporting = [f"--junit-xml={REPORT}", "-o", "junit_family=xunit1"]
    command = [sys.executable, "-m", "pytest", "-m", MARKED, *reporting, *options, *files]
    return subprocess.run(command, cwd=root).returncode


def outcomes(root: Path) -> dict[str, Counter]:
    """For each test file, how many of its tests passed, were skipped, or failed."""
    found: dict[str, Counter] = {}
    if (root / REPORT).exists():  # not after an interruption
        for case in ElementTree.parse(root / REPORT).iter("testcase"):
            kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
            outcome = "skipped" if kinds == {"skipped"} else "failed" if kinds else "passed"
            found.setdefault(case.get("file", ""), Counter())[outcome] += 1
    return found


def why_partial() -> str | None:
    """Why this run says nothing about a whole set, if it does not."""
    for variable in ("PYTEST_ADDOPTS", "MOE_METAL_DEVICES"):
        if os.environ.get(variable):
            return f"{variable} may leave tests out"
    return "on a Mac they run without the simulated Metal" if sys.platform == "darwin" else None


def why_failed(found: Counter, status: int) -> str | None:
    """Why pytest's run is no proof that all tests of a set pass, if it is none."""
    if status not in (0, 1):
        return f"pytest ended with status {status}"
    passed = found["passed"] and not found["failed"] and not found["skipped"]
    return None if passed else "not all of its tests passed"


def conclude(root: Path, each: SlowSet, new: str, outcome: str, failure: str | None) -> None:
    """Says how a set ended, and records it if it passed. new: its hash from before the run."""
    untracked = listed(root, [*each.tests, *each.subject], "--others", "--exclude-standard")
    reason = failure or (f"git does not track {', '.join(untracked)}" if untracked else why_partial())
    if reason is None:
        record(root, each.name, new)
    recorded = f"not recorded: {reason}" if reason else f'recorded in {TABLE}, passed = "{new}"'
    say(f"slow set {each.name}: {outcome}; {recorded}")


def run_tests(root: Path, chosen: list[SlowSet], hashes: dict[str, str], options: list[str]) -> int:
    """The sets that have test files, in one run of pytest. -> its exit status"""
    if not chosen:
        return 0
    status = run(root, chosen, options)
    by_file = outcomes(root)
    for each in chosen:
        found = sum((by_file.get(file, Counter()) for file in each.tests), Counter())
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.items())) or "no result"
        conclude(root, each, hashes[each.name], counts, why_failed(found, status))
    return status


def run_command(root: Path, each: SlowSet, new: str) -> int:
    """A set with a command. -> its exit status"""
    status = subprocess.run(each.command, cwd=root).returncode
    outcome = f"{' '.join(each.command)} ended with status {status}"
    conclude(root, each, new, outcome, "it failed" if status else None)
    return status


def main(argv: list[str], root: Path = ROOT) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="SET", help="sets to run, changed or not (default: the changed)")
    parser.add_argument("--all", action="store_true", help="run every set")
    parser.add_argument("--at", metavar="COMMIT", help="print the hashes at a commit, and run nothing")
    asked = parser.parse_args(argv[:cut])
    if asked.at:
        print_hashes(root, asked.at)
        return 0
    sets = read(root)
    if unknown := set(asked.names) - set(sets):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; the sets are {', '.join(sets)}")
    hashes = {name: each.hash(root) for name, each in sets.items()}
    chosen = [
        each
        for name, each in sets.items()
        if asked.all or (name in asked.names if asked.names else each.passed != hashes[name])
    ]
    for name, each in sets.items():
        if each not in chosen:
            unchanged = each.passed == hashes[name]
            say(f"slow set {name}: NOT RUN, {'unchanged since it passed' if unchanged else 'although it has changed'}")
    if not chosen:
        return 0
    say(f"slow sets to run: {', '.join(each.name for each in chosen)}")
    build(root, chosen)
    status = run_tests(root, [each for each in chosen if each.tests], hashes, argv[cut + 1 :])
    for each in chosen:
        if each.command:
            status = run_command(root, each, hashes[each.name]) or status
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SlowSetsError as error:
        sys.exit(f"make test-slow: {error}")
