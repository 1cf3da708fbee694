"""The CPU's portable readers of packed weights, broken one line at a time: the test in each row must fail.

Each fault needs a compilation, so these are not in the fast set. The built library is linked again with the changed
file; the unchanged test runs on a copy of the package. test_mutated_x86.py does the same to csrc/cpu/x86.
"""

import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import torch_moe_metal

ROOT = Path(__file__).resolve().parents[1]


def built(isa: str) -> Path:
    """The objects of a library."""
    return ROOT / "build" / "objects" / f"torch-{torch.__version__}" / f"torch_moe_metal._cpu_{isa}"


@dataclass(frozen=True)
class Fault:
    name: str
    file: str  # of csrc/cpu
    line: str
    broken: str
    test: str  # the test that must fail
    isa: str = "avx512"

    def __str__(self) -> str:
        return self.name


DEQUANTIZE = "test_quantized.py::test_dequantize_affine_equals_mlx"
LINEAR = "test_quantized.py::test_linear_equals_mlx_quantized_matmul"
REFERENCE = "test_ops.py::test_equals_the_reference"
MAGNITUDE = "test_quantized.py::test_few_tokens_of_any_magnitude"
GGUF = "test_ggml.py::test_dequantize_equals_gguf"
GGUF_LINEAR = "test_ggml.py::test_linear_equals_gguf"
FACTOR = "test_ggml.py::test_every_scale_of_mxfp8_and_nvfp4"
FP8 = "test_quantized.py::test_dequantize_fp8_equals_transformers"
NUMBERS = "test_quantized.py::test_many_tokens_meet_every_number"
ROWS = "test_quantized.py::test_many_tokens_by_many_rows"

FAULTS = [
    Fault("nibble_swapped", "vector/bytes.h", "shifts[i] = i * bits % 8", "shifts[i] = (i + 1) * bits % 8", DEQUANTIZE),
    Fault("group_before", "weights/group_dots.h", "r * weight.groups + (s + i) * kSpan",
          "r * weight.groups + (s + i) * kSpan - (s > 0)", LINEAR),
    Fault("blocks_of_64_rows", "weights/scales.h", "weight.format->scale_rows", "weight.format->scale_rows / 2",
          FP8),
    Fault("half_block_twice", "formats/ggml_32.h", "shifted(both, column / 16 * 4, 15)", "shifted(both, 0, 15)", GGUF),
    Fault("factor_lost", "weights/scales.h", "scaled_[i] = factor * to", "scaled_[i] = to", FACTOR),
    Fault("scale_255_is_infinite", "vector/bytes.h", "(e == 255 ? highest : 0)", "0", FACTOR),
    Fault("scale_of_the_first_columns_on_avx2", "weights/packed_matrix.h",
          "(from + ((column + half) >> all.shift), rows)", "(from + (column >> all.shift), rows)", GGUF_LINEAR,
          isa="avx2"),
    Fault("odd_columns_without_mask", "vector/vec.h", "pairs[i] & upper_half", "pairs[i]", REFERENCE, isa="avx2"),
    Fault("odd_numbers_are_even_on_avx2", "formats/codes.h", "odd = both >> Words(4)", "odd = both", LINEAR,
          isa="avx2"),
    Fault("first_tokens_again_on_avx2", "weights/group_dots.h", "tokens.out + first, first)", "tokens.out + first, 0)",
          MAGNITUDE, isa="avx2"),
    Fault("scale_of_the_first_sixteen_on_avx2", "weights/packed_matrix.h", "Vec(from[1]))", "Vec(from[0]))",
          GGUF_LINEAR, isa="avx2"),
    Fault("middle_forgotten_on_avx2", "weights/group_dots.h", "(all * Vec(-Read::kMiddle)).store", "Vec(0).store",
          GGUF_LINEAR, isa="avx2"),
    Fault("first_number_of_each_word_on_avx2", "formats/codes.h", "static_cast<int32_t>(j * bits)",
          "static_cast<int32_t>(0 * j)", NUMBERS, isa="avx2"),
    Fault("first_byte_of_each_four_on_avx2", "formats/blocks.h", "words >> Words(8 * i)",
          "words >> Words(0 * i)", GGUF_LINEAR, isa="avx2"),
    Fault("first_half_of_sixteen_columns_on_avx2", "vector/dots.h", "tiles[v][i] = values[v]",
          "tiles[v][i] = values[0 * v]", NUMBERS, isa="avx2"),
    Fault("rest_at_the_first_column_on_avx2", "vector/dots.h", "to + (column - begin) * kRows);", "to);", NUMBERS,
          isa="avx2"),
    Fault("rows_of_the_first_panel_on_avx2", "vector/dots.h", "i % down * kRows", "0 * i", REFERENCE, isa="avx2"),
    Fault("first_tokens_for_each_thread_on_avx2", "gate.cpp", "+ first * H : x.get()", ": x.get()",
          REFERENCE, isa="avx2"),
    Fault("first_sixteen_of_32_columns_on_avx2", "formats/blocks.h", "codes(block, at + 16)", "codes(block, at)",
          GGUF_LINEAR, isa="avx2"),
    Fault("last_tokens_of_a_panel_forgotten", "vector/dots.h", "if (n + N / 2 < tokens.count)", "if (false)",
          REFERENCE, isa="avx2"),
    Fault("rows_after_wide_panels_forgotten", "vector/dots.h", "  product_of_rows<kVectors>(weight, wide",
          "  if (wide == 0) product_of_rows<kVectors>(weight, wide", ROWS),
    Fault("logits_without_room_for_panels", "gate.cpp", "logits + t * width",
          "logits + t * call.params.experts", REFERENCE, isa="avx2"),
]  # fmt: skip


def changed(file: Path, line: str, broken: str) -> None:
    text = file.read_text()
    assert text.count(line) == 1, f"{file.name} has the line {text.count(line)} times: {line}"
    file.write_text(text.replace(line, broken))


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def library(sources: Path, reached: set[str], folder: Path, isa: str = "avx512") -> Path:
    """The built library, with only the files that a change affects compiled again."""
    objects = sorted((built(isa) / "csrc" / "cpu").rglob("*.o"))
    link = [folder / compiled.name if compiled.stem in reached else compiled for compiled in objects]

    def compile_again(compiled: Path) -> None:
        command = run("ninja", "-C", built(isa), "-t", "commands", compiled).strip().splitlines()[-1]
        command = command.replace(f"{ROOT}/csrc", str(sources)).replace(str(compiled), str(folder / compiled.name))
        run(*shlex.split(command), "-O1")  # in half the time

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_again, (compiled for compiled in objects if compiled.stem in reached)))
    libraries = Path(torch.__file__).parent / "lib"
    made = folder / "library.so"
    compiler = os.environ.get("CXX", "c++")
    run(compiler, "-shared", "-fopenmp", *link, f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch", "-o", made)
    return made


def run_tests(made: Path, folder: Path, *options: str, isa: str = "avx512") -> subprocess.CompletedProcess:
    """pytest on a copy of the package with this library."""
    package = folder / "package" / "torch_moe_metal"
    shutil.copytree(ROOT / "torch_moe_metal", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(made, package / f"_cpu_{isa}.so")
    environment = os.environ | {"PYTHONPATH": str(package.parent), "MOE_METAL_DEVICES": "cpu"}
    environment["ATEN_CPU_CAPABILITY"] = isa
    environment["OMP_NUM_THREADS"] = "2"  # with more threads a case is a single chunk of tokens
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *options]
    return subprocess.run(command, cwd=ROOT / "tests", env=environment, capture_output=True, text=True)


def reached_by(fault: Fault) -> set[str]:
    """The files to compile again: those of the formats in which the fault's test detects it."""
    if fault.file == "gate.cpp":
        return {"gate"}
    if fault.file == "vector/vec.h":
        return {"weight_rows"}
    if fault.file == "vector/dots.h":
        return {"affine_rows" if fault.test in (NUMBERS, ROWS) else "weight_rows"}
    if fault.isa == "avx2" and fault.test == GGUF_LINEAR:
        return {"ggml_k_rows_of_16", "ggml_32_rows"}
    if "ggml" in fault.file:
        return {"ggml_k_rows" if "ggml_k" in fault.file else "ggml_32_rows", "ggml_k_rows_of_16"}
    if fault.file == "weights/scales.h" or fault.test == FACTOR:  # scales of rows, and factors, are those of floats
        return {"float_rows", "x86_floats"} if fault.isa == "avx512" else {"float_rows"}
    return {"affine_rows"}


def needs(isa: str) -> list[pytest.MarkDecorator]:
    """Marks of the tests that compile part of a library for these instructions again."""
    available = torch_moe_metal.cpu_isa in (isa, "avx512")  # every processor with AVX-512 has AVX2
    return [
        pytest.mark.slow,
        pytest.mark.skipif(not available, reason=f"needs a processor with {isa}"),
        pytest.mark.skipif(
            not (built(isa) / "build.ninja").exists(), reason="needs the objects of a build in this folder"
        ),
    ]


def detected(fault: Fault, sources: Path, reached: set[str], folder: Path, *choose: str) -> None:
    """The fault's test fails on a library with the fault."""
    changed(sources / "cpu" / fault.file, fault.line, fault.broken)
    made = library(sources, reached, folder, fault.isa)
    done = run_tests(made, folder, fault.test, *choose, isa=fault.isa)
    assert f"FAILED {fault.test}" in done.stdout, done.stdout[-3000:]


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name, marks=needs(fault.isa)) for fault in FAULTS])
def test_broken_readers_are_detected(fault: Fault, tmp_path: Path):
    sources = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", sources)
    detected(fault, sources, reached_by(fault), tmp_path)
