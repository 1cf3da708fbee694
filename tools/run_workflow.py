"""Runs a job of a GitHub workflow on this machine: `python tools/run_workflow.py FILE JOB [--matrix key=value]`.

The job's `run:` steps run in order, by bash as on GitHub's machines, in a fresh clone of the last commit and with the
workflow's variables. Actions (`uses:`), containers and conditions only work on GitHub; they are skipped, and the last
lines say so. Expressions are supported only if they are a name: `${{ matrix.torch }}`.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
FILES = ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "GITHUB_ENV")


class Unknown(LookupError):
    pass


def resolved(text: object, values: dict[str, str]) -> str:
    """With every `${{ name }}` replaced by its value."""

    def value(match: re.Match) -> str:
        if match[1] not in values:
            raise Unknown(f"{match[0]} is not known here")
        return values[match[1]]

    return re.sub(r"\$\{\{\s*(.+?)\s*\}\}", value, str(text))


def environment(*levels: dict, values: dict[str, str]) -> dict[str, str]:
    """The `env` of the workflow, the job and the step, without values that only GitHub knows."""
    found = {}
    for level in levels:
        for name, text in level.get("env", {}).items():
            try:
                found[name] = resolved(text, values)
            except Unknown as unknown:
                print(f"==> {name} is not set: {unknown}", flush=True)
    return found


def known(job: dict, options: argparse.Namespace) -> dict[str, str]:
    """The values of expressions: the chosen (or first) value of each matrix key, and the inputs, empty if not given."""
    matrix = job.get("strategy", {}).get("matrix", {})
    wishes = dict(pair.split("=", 1) for pair in options.matrix)
    lists = {key: choices for key, choices in matrix.items() if key not in ("include", "exclude")}
    chosen = {key: wishes.get(key, choices[0]) for key, choices in lists.items()}
    for extra in matrix.get("include", []):
        if all(chosen.get(key, value) == value for key, value in extra.items()):
            chosen |= extra
    values = {f"matrix.{key}": str(value) for key, value in (chosen | wishes).items()}
    values |= {f"inputs.{name}": "" for name in re.findall(r"inputs\.(\w+)", options.file.read_text())}
    values |= {f"inputs.{key}": value for key, value in (pair.split("=", 1) for pair in options.input)}
    return values


def run_step(step: dict, folder: Path, variables: dict[str, str], values: dict[str, str]) -> str:
    """Returns 'ran', 'FAILED', or the reason why it was skipped."""
    if "uses" in step:
        return f"left out: GitHub's {step['uses'].partition('@')[0]}"
    if "if" in step and step["if"] != "always()":
        return f"left out: only GitHub knows if {step['if']}"
    try:
        script = resolved(step["run"], values)
    except Unknown as unknown:
        return f"left out: {unknown}"
    print(f"==> {script.strip()}", flush=True)
    bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    done = subprocess.run(bash, cwd=folder, env=os.environ | variables, stdin=subprocess.DEVNULL)
    return "FAILED" if done.returncode else "ran"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("job")
    parser.add_argument("--matrix", action="append", default=[], metavar="KEY=VALUE", help="(default: each first one)")
    parser.add_argument("--input", action="append", default=[], metavar="KEY=VALUE", help="of the workflow")
    options = parser.parse_args()
    workflow = yaml.safe_load(options.file.read_text())
    job = workflow["jobs"][options.job]
    values, outcomes = known(job, options), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkout"
        subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
        github = {name: str(Path(scratch) / name) for name in FILES}
        common = {"CI": "true"} | github | environment(workflow, job, values=values)
        for step in job["steps"]:
            variables = common | environment(step, values=values)
            failed = any(result == "FAILED" for _, result in outcomes)
            result = "left out: a step before it failed" if failed else run_step(step, folder, variables, values)
            outcomes.append((step.get("name") or step.get("run") or step["uses"], result))
        summary = Path(github["GITHUB_STEP_SUMMARY"])
        if summary.exists():
            print(f"\n==> The job's summary:\n{summary.read_text()}")
    print(f"\n{options.file.name}, job {options.job}, on this machine:")
    if "container" in job:
        print("  not in its container")
    for name, result in outcomes:
        print(f"  {result:8} {name.strip().splitlines()[0]}" if result in ("ran", "FAILED") else f"  {result}: {name}")
    results = [result for _, result in outcomes]
    return int("FAILED" in results or "ran" not in results)


if __name__ == "__main__":
    sys.exit(main())
