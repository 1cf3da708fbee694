"""Runs the tests that depend on transformers with another version of it: `make test-oldest`.

    python tools/other_transformers.py 5.23.0                      # installs it into build/, runs the fast tests
    python tools/other_transformers.py 5.23.0 -- --numprocesses 2  # pytest's options follow --

These are the test files of the package and of the examples that import transformers, themselves or through another
file. Tests of our own tools run with the pinned version alone. They run on the CPU, since a kernel does not know which
transformers its caller is. The version is installed without its dependencies: the pinned transformers has the same.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tests", "tests/tools", "tools", "examples")
IMPORT = re.compile(r"^\s*(?:from|import) +(\w+)", re.MULTILINE)  # also in a program that a test starts


def dependent_tests(root: Path = ROOT) -> list[str]:
    """The test files of FOLDERS that depend on transformers."""
    files = [file for folder in FOLDERS for file in sorted((root / folder).glob("*.py"))]
    files = [file for file in files if file.name != "conftest.py"]  # only a fixture of it imports transformers
    imported = {file: set(IMPORT.findall(file.read_text())) for file in files}
    dependent, before = {"transformers"}, set()
    while dependent != before:
        before = dependent
        dependent = dependent | {file.stem for file in files if imported[file] & dependent}
    tools = root / "tests" / "tools"
    found = [f for f in files if f.stem in dependent and f.stem.startswith("test_") and f.parent != tools]
    return [str(file.relative_to(root)) for file in found]


def install(version: str) -> Path:
    """The folder with that version."""
    folder = ROOT / "build" / f"transformers-{version}"
    if not list(folder.glob("*.dist-info/RECORD")):
        pip = (
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-compile",
        )
        subprocess.run([*pip, "--upgrade", "--target", folder, f"transformers=={version}"], check=True)
    return folder


def main(argv: list[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="of transformers, as in 5.23.0")
    version = parser.parse_args(argv[:cut]).version
    environment = os.environ | {"PYTHONPATH": str(install(version)), "MOE_METAL_DEVICES": "cpu"}
    program = "import transformers; print(transformers.__version__)"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    if found.strip() != version:
        sys.exit(f"make test-oldest: Python imports transformers {found.strip()} instead of {version}")
    tests = dependent_tests()
    print(f"==> {len(tests)} test files with transformers {version}, on the CPU", flush=True)
    command = [sys.executable, "-m", "pytest", "-m", "not slow", *argv[cut + 1 :], *tests]
    return subprocess.run(command, env=environment, cwd=ROOT).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"make test-oldest: this failed, its output is above: {' '.join(map(str, error.cmd))}\n{error.stderr}")
