"""Builds the wheel for one torch and tests it as a user would: `python tools/wheel.py 2.13`, `make wheel`.

Needs only Python: the torch to build for is installed into an environment in build/wheel. Then a second, fresh
environment gets the wheel, and pip installs the torch that its metadata requires. The result is in dist/. On Linux its
name contains the oldest supported glibc, which depends on the build machine. No library is copied into it: it uses
torch's own, which `auditwheel repair` would not know.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from check_wheel import Wheel, manylinux

ROOT = Path(__file__).resolve().parents[1]
BUILD_TOOLS = ("setuptools", "wheel", "ninja")
TEST_TOOLS = ("numpy", "expecttest", "hypothesis", "pytest")
# Small cases of every op: the checkout's tests with the installed package.
QUICK = "equals_the_reference and (sample or bare or small)"


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def run(*command: str | Path, **options) -> None:
    if subprocess.run(list(map(str, command)), **options).returncode:
        sys.exit(f"tools/wheel.py: this failed; its output is above: {' '.join(map(str, command))}")


def pinned(names: tuple[str, ...]) -> list[str]:
    """The versions in the pinned requirements."""
    lines = [
        line for room in ("tools", "tests") for line in (ROOT / room / "requirements.txt").read_text().splitlines()
    ]
    return [line for line in lines if re.split("==", line)[0] in names]


def environment(folder: Path, *requirements: str | Path) -> Path:
    """Makes a fresh virtual environment. Returns its Python."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements)
    return python


def build(torch: str, folder: Path) -> Path:
    """The wheel, under its final name."""
    say(f"An environment with torch {torch}, to build in")
    python = environment(folder / "builder", f"torch=={torch}.*", *pinned(BUILD_TOOLS))
    shutil.rmtree(folder / "built", ignore_errors=True)
    pip = (
        python,
        "-m",
        "pip",
        "wheel",
        "--verbose",
        "--disable-pip-version-check",
        "--no-build-isolation",
        "--no-deps",
    )
    run(*pip, "--wheel-dir", folder / "built", ROOT)
    (wheel,) = (folder / "built").glob("*.whl")
    if sys.platform == "linux":
        with zipfile.ZipFile(wheel) as archive:
            glibc = manylinux([archive.read(name) for name in archive.namelist() if name.endswith(".so")])
        if glibc is None:
            sys.exit("tools/wheel.py: the libraries need a newer system than any known; see LINUXES in check_wheel.py")
        tag = f"manylinux_2_{glibc}_{os.uname().machine}"
        run(python, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, wheel, stdout=subprocess.DEVNULL)
        (wheel,) = (folder / "built").glob("*.whl")
    return wheel


def try_out(wheel: Path, folder: Path) -> None:
    """Install into a fresh environment and test from an empty directory."""
    say("A fresh environment with the wheel, to which pip adds the torch that it requires")
    python = environment(folder / "stranger", wheel, *pinned(TEST_TOOLS))
    mps = sys.platform == "darwin" and not subprocess.run([python, ROOT / "tools" / "mps.py", "--needed"]).returncode
    with tempfile.TemporaryDirectory() as elsewhere:
        run(python, "-m", "torch_moe_metal", "doctor", cwd=elsewhere)
        pytest = (python, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-p", "no:cacheprovider", "-m", "not slow")
        devices = {"MOE_METAL_DEVICES": "cpu,mps" if mps else "cpu"}
        run(*pytest, "-k", QUICK, ROOT / "tests" / "test_ops.py", cwd=elsewhere, env=os.environ | devices)


def main() -> None:
    if len(sys.argv) != 2 or not re.fullmatch(r"\d+\.\d+", sys.argv[1]):
        sys.exit("tools/wheel.py: say which torch, as in 2.13")
    torch = sys.argv[1]
    folder = ROOT / "build" / "wheel" / f"torch-{torch}"
    wheel = build(torch, folder)
    if problems := list(Wheel(wheel).problems(torch)):
        sys.exit("\n  ".join([f"tools/wheel.py: {wheel.name} is wrong:", *problems]))
    try_out(wheel, folder)
    (ROOT / "dist").mkdir(exist_ok=True)
    say(f"dist/{shutil.copy(wheel, ROOT / 'dist') and wheel.name}")


if __name__ == "__main__":
    main()
