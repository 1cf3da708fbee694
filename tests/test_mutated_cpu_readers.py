"""The CPU's readers of packed weights, broken on purpose one line at a time: the test named beside each must fail.

Each fault costs a compilation, so these are not in the fast set. The library of the build is linked again with the
changed file; the test runs as it is, on a copy of the package.
"""

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import torch_moe_metal
from test_mutated_readers import named_in

ROOT = Path(__file__).resolve().parents[1]
ISA = "avx512"  # the readers that the faults are in
BUILT = ROOT / "build" / "objects" / f"torch_moe_metal._cpu_{ISA}"


@dataclass(frozen=True)
class Fault:
    name: str
    file: str  # of csrc/cpu
    line: str
    broken: str
    test: str  # that fails

    def __str__(self) -> str:
        return self.name


DEQUANTIZE = "test_quantized.py::test_dequantize_affine_is_mlx"
LINEAR = "test_quantized.py::test_linear_is_mlx_s_quantized_matmul"
EXPERTS = "test_quantized.py::test_experts_are_mlx_s_gather_qmm"
REFERENCE = "test_ops.py::test_equals_the_reference"
WALL = "test_quantized.py::test_nothing_beyond_the_last_row_is_read"

FAULTS = [
    Fault("nibble_swapped", "codes.h", "(from)), 0xff00", "(from)), 0x00ff", DEQUANTIZE),
    Fault("nibble_swapped_for_few_tokens", "codes.h", "setr_epi32(0, 0, 4, 4, 8", "setr_epi32(4, 4, 0, 0, 8", LINEAR),
    Fault("nibble_swapped_in_bfloat16", "bfloat16_dots.h", "srli_epi16(bytes, 4)", "srli_epi16(bytes, 8)", LINEAR),
    Fault("nibble_swapped_in_tiles", "weights.cpp", "slli_epi32(bytes, 12)", "slli_epi32(bytes, 16)", REFERENCE),
    Fault("group_before", "weights.cpp", "scale = rows.scales[r * weight.groups + g]",
          "scale = rows.scales[r * weight.groups + g - (g > 0)]", LINEAR),
    Fault("first_group_in_tiles", "weights.cpp", "row.scales[g]", "row.scales[0]", REFERENCE),
    Fault("blocks_of_64_rows", "weights.cpp", "Format::fp8 ? kFp8Block", "Format::fp8 ? kFp8Block / 2", REFERENCE),
    Fault("tail_overrun", "bfloat16_dots.h", "row_bytes - at >= 64", "true", WALL),
    Fault("pair_swapped_in_vectors", "tiles.h", "weights.row + 2 * pair", "weights.row + 2 * (pair ^ 1)", REFERENCE),
]  # fmt: skip


def changed_sources(fault: Fault, folder: Path) -> Path:
    sources = folder / "csrc"
    shutil.copytree(ROOT / "csrc", sources)
    file = sources / "cpu" / fault.file
    text = file.read_text()
    assert text.count(fault.line) == 1, f"{fault.file} has the line {text.count(fault.line)} times: {fault.line}"
    file.write_text(text.replace(fault.line, fault.broken))
    return sources


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def library(fault: Fault, folder: Path) -> Path:
    """The built library, but for the source that the fault reaches."""
    sources, link = changed_sources(fault, folder), []
    reached = "experts" if fault.file == "tiles.h" else "weights"
    for compiled in sorted((BUILT / "csrc" / "cpu").glob("*.o")):
        if compiled.stem != reached:
            link.append(compiled)
            continue
        link.append(folder / compiled.name)
        command = run("ninja", "-C", BUILT, "-t", "commands", compiled).strip().splitlines()[-1]
        command = command.replace(f"{ROOT}/csrc", str(sources)).replace(str(compiled), str(link[-1]))
        run(*shlex.split(command), "-O1")  # in half the time
    libraries = Path(torch.__file__).parent / "lib"
    made = folder / "library.so"
    compiler = os.environ.get("CXX", "c++")
    run(compiler, "-shared", "-fopenmp", *link, f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch", "-o", made)
    return made


@pytest.mark.slow
@pytest.mark.skipif(torch_moe_metal.cpu_isa != ISA, reason="the faults are in the readers for AVX-512")
@pytest.mark.skipif(not (BUILT / "build.ninja").exists(), reason="needs the objects of a build in this folder")
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_broken_reader_is_seen(fault: Fault, tmp_path: Path):
    package = tmp_path / "package" / "torch_moe_metal"
    shutil.copytree(ROOT / "torch_moe_metal", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(library(fault, tmp_path), package / f"_cpu_{ISA}.so")
    environment = os.environ | {"PYTHONPATH": str(package.parent), "MOE_METAL_DEVICES": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", fault.test]
    choose = ["-k", "many_tokens"] if fault.test == REFERENCE else []
    told = subprocess.run(
        [*command, *choose], cwd=ROOT / "tests", env=environment, capture_output=True, text=True
    ).stdout
    assert f"FAILED {fault.test}" in told, told[-3000:]


def test_the_readme_names_them():
    of_cpu = (ROOT / "tests" / "README.md").read_text().partition("test_mutated_cpu_readers.py")[2]
    assert named_in(of_cpu) == {fault.name: fault.test.partition("::")[2] for fault in FAULTS}
