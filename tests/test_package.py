"""The package as others get it: a wheel in an environment of its own, and each instruction set it was built for."""

import fcntl
import os
import platform
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import torch_moe_metal

ROOT = Path(__file__).parent.parent


def succeed(*command: str | Path, **options) -> str:
    """Runs a command. -> what it printed"""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in the checkout, so that it takes the objects that are already compiled: by one process at a time."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index")
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        succeed(*pip, "--wheel-dir", folder, ".", cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def stranger(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with the wheel, and with this one's torch."""
    folder = tmp_path_factory.mktemp("stranger")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "torch_of_the_tests.pth").write_text(str(Path(torch.__file__).parent.parent))
    succeed(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    return python


def test_wheel_fits_every_python_and_one_torch(wheel: Path):
    name, version, python, abi, _ = wheel.stem.split("-", 4)
    assert (name, version, abi) == ("torch_moe_metal", torch_moe_metal.__version__, "abi3") and python.startswith("cp3")
    metadata = zipfile.ZipFile(wheel).read(f"{name}-{version}.dist-info/METADATA").decode()
    major, minor = torch.__version__.split(".")[:2]
    assert f"Requires-Dist: torch=={major}.{minor}.*" in metadata.splitlines()


def test_wheel_holds_every_module_and_library(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "torch_moe_metal"
    wanted = [path for pattern in ("**/*.py", "*.so", "py.typed") for path in package.glob(pattern)]
    assert {str(path.relative_to(ROOT)) for path in wanted} <= names


def test_wheel_works_from_another_directory(stranger: Path, tmp_path: Path):
    program = """
import torch, torch_moe_metal
weights, ids = torch.ops.moe_metal.route(torch.tensor([[1.0, 3.0, 2.0]]), top_k=2)
assert ids.tolist() == [[1, 2]] and abs(float(weights.sum()) - 1) < 1e-6
x, ids = torch.ones(1, 8), torch.zeros(1, 1, dtype=torch.int32)
out = torch.ops.moe_metal.experts(x, torch.ones(1, 1), ids, torch.ones(2, 8, 8), torch.ones(2, 8, 4))
assert torch.allclose(out, 4 * 8 * torch.nn.functional.silu(torch.tensor(8.0)).expand(1, 8))
print(torch_moe_metal.__file__)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    place = Path(succeed(stranger, "-c", program, cwd=tmp_path, env=environment).strip())
    assert stranger.parent.parent in place.parents


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="one instruction set only, run by every other test"
)
@pytest.mark.parametrize("isa", ["default", "avx2"])
def test_other_instruction_sets(isa: str):
    """The machine's best one is what all other tests run on."""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": isa, "MOE_METAL_DEVICES": "cpu"}
    program = "import torch_moe_metal; print(torch_moe_metal.cpu_isa)"
    assert succeed(sys.executable, "-c", program, cwd=ROOT, env=environment).strip() == isa
    selected = "equals_the_reference and (sample or bare or small or nan or inf or limit7.0 or pytorch or huge or many)"
    pytest_run = (sys.executable, "-m", "pytest", "-m", "not slow", "-k", selected, "tests/test_ops.py")
    assert " passed" in succeed(*pytest_run, "-p", "no:cacheprovider", cwd=ROOT, env=environment)
