"""The CPU's readers of packed weights, broken one line at a time: the test in each row must fail.

Each fault needs a compilation, so these are not in the fast set. The built library is linked again with the changed
file; the unchanged test runs on a copy of the package. The tests of the AMX code also run, unbroken, on any processor:
emulated_amx.h emulates its instructions.
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
PROCESSOR = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""


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
    amx: bool = False  # with emulated AMX
    isa: str = "avx512"

    def __str__(self) -> str:
        return self.name


DEQUANTIZE = "test_quantized.py::test_dequantize_affine_equals_mlx"
LINEAR = "test_quantized.py::test_linear_equals_mlx_quantized_matmul"
EXPERTS = "test_quantized.py::test_experts_equal_mlx_gather_qmm"
REFERENCE = "test_ops.py::test_equals_the_reference"
MAGNITUDE = "test_quantized.py::test_few_tokens_of_any_magnitude"
UNUSED = "test_quantized.py::test_few_tokens_with_a_number_that_no_weight_uses"
MANY_UNUSED = "test_quantized.py::test_many_tokens_with_a_number_that_no_weight_uses"
NOT_FINITE = "test_quantized.py::test_few_tokens_that_are_not_finite"
GGUF = "test_ggml.py::test_dequantize_equals_gguf"
GGUF_LINEAR = "test_ggml.py::test_linear_equals_gguf"
MLX_LINEAR = "test_ggml.py::test_linear_equals_mlx_quantized_matmul"
FACTOR = "test_ggml.py::test_every_scale_of_mxfp8_and_nvfp4"
FP8 = "test_quantized.py::test_dequantize_fp8_equals_transformers"
TINY = "test_quantized.py::test_few_tokens_of_tiny_numbers"
NUMBERS = "test_quantized.py::test_many_tokens_meet_every_number"
ROWS = "test_quantized.py::test_many_tokens_by_many_rows"
MXFP8 = "test_quantized.py::test_many_tokens_meet_every_scale_of_mxfp8"
SAME_BITS = "test_ops.py::test_same_bits_for_any_number_of_threads"
WALL = "test_quantized.py::test_no_read_beyond_the_last_row"

FAULTS = [
    Fault("nibble_swapped", "formats/codes.h", "(from)), 0xff00", "(from)), 0x00ff", DEQUANTIZE),
    Fault("nibble_swapped_for_few_tokens", "formats/codes.h", "setr_epi32(0, 0, 4, 4, 8",
          "setr_epi32(4, 4, 0, 0, 8", LINEAR),
    Fault("nibble_twice_as_integers", "x86/integers.h", "srli_epi16(bytes, 4)", "srli_epi16(bytes, 0)", LINEAR),
    Fault("digit_lost", "x86/vnni.h", "_mm512_cvtepi32_ps(add(begin, numbers, x.digits[2]))",
          "_mm512_setzero_ps()", MAGNITUDE),
    Fault("two_digits_always", "x86/integers.h", "return many == 0", "return many >= 0", UNUSED),
    Fault("rest_lost", "x86/vnni.h", "if (finite) lay_out(all, c, *rest++);", "", UNUSED),
    Fault("inf_as_integers", "x86/vnni.h", "if (!finite) std::fill_n(chunks->units, 16, NAN);", "(void)finite;",
          NOT_FINITE),
    Fault("nibble_swapped_in_tiles", "formats/codes.h", "slli_epi32(bytes, 12)", "slli_epi32(bytes, 16)", REFERENCE),
    Fault("group_before", "weights/group_dots.h", "r * weight.groups + (s + i) * kSpan",
          "r * weight.groups + (s + i) * kSpan - (s > 0)", LINEAR),
    Fault("first_group_in_tiles", "x86/packed_strips.h", " + (column >> shift_)", "", NUMBERS),
    Fault("two_blocks_late", "x86/packed_strips.h", "start(block + 2)", "start(block)", NUMBERS),
    Fault("half_of_the_only_tile", "x86/packed_strips.h", "multiply_by_vectors<1, false, Ahead>",
          "multiply_by_vectors<0, true, Ahead>", NUMBERS),
    Fault("half_a_tile_forgotten", "x86/packed_strips.h", "multiply_by_vectors<1, true, Ahead>",
          "multiply_by_vectors<1, false, Ahead>", NUMBERS),
    Fault("scale_of_the_first_block_in_tiles", "x86/packed_strips.h", "column_ + n * kDepth", "column_", GGUF_LINEAR),
    Fault("scale_as_offset_in_tiles", "formats/ggml_32.h", "offset = both[1]", "offset = both[0]", GGUF_LINEAR),
    Fault("first_tokens_in_half_a_tile", "x86/avx512_bf16.h", "here + G * size, sizeof", "here, sizeof", NUMBERS),
    Fault("short_ring_for_many_tokens", "x86/weight_tile_rows.h", "tiles.ring = more ?", "tiles.ring = false ?",
          NUMBERS),
    Fault("scales_of_one_row_for_16", "x86/rounded.h", "!= 0) return false;", "!= 0) break;", REFERENCE),
    Fault("scales_beyond_normal_numbers", "x86/rounded.h", "return least > kRange && most < 2 * kOne - kRange;",
          "return true;", MXFP8),
    Fault("zero_times_a_scale", "x86/rounded.h", "_mm512_set1_epi16(0x7ffe)", "_mm512_set1_epi16(-1)", MXFP8),
    Fault("scale_of_the_first_half_in_tiles", "x86/rounded.h", "scale[i * kLanes / Group]",
          "scale[i / 2 * kDepth / Group]", GGUF_LINEAR),
    Fault("nibbles_of_one_run_in_tiles", "formats/ggml_k.h", "column / 64 * 32), column / 32 % 2 * 4",
          "column / 64 * 32), 0", GGUF_LINEAR),
    Fault("fifth_bit_of_the_first_run_in_tiles", "formats/ggml_k.h", "load_256(block + 16), column / 32",
          "load_256(block + 16), 0", GGUF_LINEAR),
    Fault("blocks_of_64_rows", "weights/row_scales.h", "weight.format->scale_rows", "weight.format->scale_rows / 2",
          FP8),
    Fault("tail_overrun", "x86/integers.h", "std::min<int64_t>(left / 8 * bits, kMost)", "kMost", WALL),
    Fault("half_of_8_bits_twice", "x86/integers.h", "in_order(from + 8 * bits, left - 64)",
          "in_order(from, left)", LINEAR),
    Fault("shifts_of_the_first_four", "x86/integers.h", "(i % 8 * bits)", "(i % 4 * bits)", LINEAR),
    Fault("few_tokens_of_two_passes", "x86/bfloat16_dots.h", "tokens.out + n);", "tokens.out);", MAGNITUDE),
    Fault("half_block_twice", "formats/ggml_32.h", "shifted(both, column / 16 * 4, 15)", "shifted(both, 0, 15)", GGUF),
    Fault("fifth_bit_of_neighbours", "formats/ggml_32.h", "high |= (word >> 16)", "high |= (word >> 15)", GGUF_LINEAR),
    Fault("highest_bits_of_one_run", "formats/ggml_k.h", "in_quarters<0, 0, 2, 2>()",
          "in_quarters<0, 0, 0, 0>()", GGUF_LINEAR),
    Fault("offsets_of_the_scales", "formats/ggml_k.h", "in_halves(0, 4LL << 32)", "in_halves(0, 0)", GGUF),
    Fault("scales_of_the_first_half", "formats/ggml_k.h", "_mm512_permutexvar_ps(lanes,",
          "_mm512_permutexvar_ps(_mm512_sub_epi32(lanes, first),", GGUF_LINEAR),
    Fault("units_of_low_nibbles", "x86/vnni.h", "units, kTimes16", "units, 0", GGUF_LINEAR),
    Fault("offsets_twice", "x86/vnni.h", "if (p == 0) {", "{", GGUF_LINEAR),
    Fault("scales_of_one_chunk_of_two", "x86/vnni.h", "scales += P * groups", "scales += groups", GGUF_LINEAR),
    Fault("last_block_beyond_the_row", "formats/ggml_32.h", "std::min<int64_t>(3, last)", "3", WALL),
    Fault("last_scale_beyond_the_row", "formats/ggml_32.h", "first + std::min(b, last) * kBytes, sizeof(half)",
          "first + b * kBytes, sizeof(half)", WALL),
    Fault("factor_lost", "weights/row_scales.h", "scaled_[i] = factor * to", "scaled_[i] = to", FACTOR),
    Fault("scale_255_is_infinite", "weights/row_scales.h", "_mm512_mask_or_epi32(bits, nan, bits, highest)", "bits",
          FACTOR),
    Fault("one_scale_of_64_columns", "x86/e4m3_dots.h", "scales_of_row[1]", "scales_of_row[0]", MLX_LINEAR),
    Fault("half_chunk_forgotten", "x86/e4m3_dots.h", "left > 0) {", "left < 0) {", MLX_LINEAR),
    Fault("even_numbers_twice", "x86/e4m3_dots.h",
          "_mm512_and_si512(numbers[v], _mm512_set1_epi32(static_cast<int>(0xffff0000)))",
          "_mm512_slli_epi32(numbers[v], 16)", MLX_LINEAR),
    Fault("columns_swapped_in_fourth_rows", "formats/e4m3.h", "8, 9, 12, 13, 2, 3", "8, 9, 13, 12, 2, 3", MLX_LINEAR),
    Fault("scale_of_the_first_columns", "weights/group_dots.h", "(from + ((column + half) >> all.shift), rows)",
          "(from + (column >> all.shift), rows)", MLX_LINEAR),
    Fault("odd_columns_without_mask", "vector/vec.h", "pairs[i] & upper_half", "pairs[i]", REFERENCE, isa="avx2"),
    Fault("odd_bytes_forgotten", "x86/bfloat16_dots.h", "srli_epi16(numbers[v / 2], 8)",
          "srli_epi16(numbers[v / 2], 0)", LINEAR),
    Fault("last_chunk_forgotten", "x86/bfloat16_dots.h", "rows.columns % kColumns > 0", "false", MAGNITUDE),
    Fault("tiny_numbers_are_0", "x86/bfloat16_dots.h", "if (tiny) *to = NAN;", "(void)tiny;", TINY),
    Fault("offsets_of_each_chunk", "x86/bfloat16_dots.h", "if (p > 0) continue;", "", GGUF_LINEAR),
    Fault("low_digits_twice_in_panels", "x86/integer_panels.h", "x[n]->digits[0], step)", "x[n]->digits[1], step)",
          NUMBERS),
    Fault("lanes_in_the_order_of_codes", "x86/integer_panels.h", "lanes[half][kLanesInOrder[i]]", "lanes[half][i]",
          NUMBERS),
    Fault("scales_of_the_first_panel", "x86/integer_panels.h", "(chunk * kColumns >> rows.shift) * kPanelRows", "0",
          NUMBERS),
    Fault("scales_of_one_panel_for_all", "x86/integer_panels.h", "p * scales_of_panel_ +", "", ROWS),
    Fault("rests_forgotten_in_panels", "x86/integer_panels.h", "if (rest) product(", "if (false) product(",
          MANY_UNUSED),
    Fault("tokens_without_digits_are_nan", "weights/packed_rows.h", "if (!all_finite(tokens.out[n], rows.rows)) scaled",
          "if (false) scaled", MANY_UNUSED),
    Fault("rows_beyond_the_last_in_panels", "x86/integer_panels.h", "if (row >= rows.rows) break;", "", WALL),
    Fault("columns_begin_anew", "x86/gate_tiles.cpp", "b > 0", "false", REFERENCE),
    Fault("pair_swapped_in_vectors", "x86/avx512_bf16.h", "r * row + k, sizeof", "r * row + (k ^ 2), sizeof",
          REFERENCE),
    Fault("experts_over_the_first", "x86/tiles.h", "c + g, add, Nothing()", "c, add, Nothing()", REFERENCE),
    Fault("tokens_of_the_first_chunk", "x86/experts_tiles.cpp", "x_begin_ = first_[begin];",
          "x_begin_ = first_[begin];\n    if (begin > 0) return;", REFERENCE),
    Fault("rows_of_the_first_pair", "x86/weight_tile_rows.h", "&tile_rows_.tiles[2 * p], some",
          "&tile_rows_.tiles[0], some", SAME_BITS),
    Fault("first_rows_of_transposed_pairs", "x86/transposed_rows.h", "words[i / 32][i % 32]", "words[0][i % 32]",
          REFERENCE),
    Fault("up_rows_of_gate", "x86/transposed_rows.h", "* 2 + row % 2", "* 2", REFERENCE),
    Fault("short_ring_on_amx", "x86/weight_tile_rows.h", ": 2 * kAtOnce - 1;\n      at", ": kAtOnce - 1;\n      at",
          REFERENCE, amx=True),
    Fault("upper_strip_twice_on_amx", "x86/amx_bf16.h", "(6, lower.data + (b & lower.ring) * lower.chunk, lower.row",
          "(6, upper.data + (b & upper.ring) * upper.chunk, upper.row", REFERENCE, amx=True),
    Fault("first_tokens_twice_on_amx", "x86/tiles.h", "multiply_two<2, Nothing>, 2,",
          "multiply_two<2, Nothing>, 0,", NUMBERS, amx=True),
    Fault("half_tile_twice_on_amx", "x86/integers.h", "numbers[1], 0xee", "numbers[1], 0x44", LINEAR, amx=True),
    Fault("rest_lost_on_amx", "x86/amx_int8.h", "whole &= all[n].whole;\n      }\n      lay_out",
          "}\n      lay_out", UNUSED, amx=True),
    Fault("group_of_neighbours_on_amx", "x86/amx_int8.h", "i / kHalf % 2 == part", "true", LINEAR, amx=True),
    Fault("odd_numbers_are_even_on_avx2", "formats/codes.h", "odd = _mm256_srli_epi32(both, 4)", "odd = both", LINEAR,
          isa="avx2"),
    Fault("first_tokens_again_on_avx2", "weights/group_dots.h", "tokens.out + first, first)", "tokens.out + first, 0)",
          MAGNITUDE, isa="avx2"),
    Fault("scale_of_the_first_sixteen_on_avx2", "weights/group_dots.h", "(0, 0, 0, 0, 1, 1, 1, 1)",
          "(0, 0, 0, 0, 0, 0, 0, 0)", GGUF_LINEAR, isa="avx2"),
    Fault("middle_forgotten_on_avx2", "weights/group_dots.h", "(all * Vec(-Read::kMiddle)).store", "Vec(0).store",
          GGUF_LINEAR, isa="avx2"),
    Fault("first_number_of_each_word_on_avx2", "formats/codes.h", "static_cast<int>(j * bits)",
          "static_cast<int>(0 * j)", NUMBERS, isa="avx2"),
    Fault("first_byte_of_each_four_on_avx2", "formats/blocks.h", "_mm256_srli_epi32(four, 8 * j)",
          "_mm256_srli_epi32(four, 0 * j)", GGUF_LINEAR, isa="avx2"),
    Fault("permuted_columns_in_panels_on_avx2", "vector/dots.h", "to + columns[v * kLanes + i] * V",
          "to + (v * kLanes + i) * V", NUMBERS, isa="avx2"),
    Fault("rest_at_the_first_column_on_avx2", "vector/dots.h", "to + (column - begin) * kRows);", "to);", NUMBERS,
          isa="avx2"),
    Fault("rows_of_the_first_panel_on_avx2", "vector/dots.h", "i % down * kRows", "0 * i", REFERENCE, isa="avx2"),
    Fault("first_tokens_for_each_thread_on_avx2", "gate.cpp", "+ first * H : x.get()", ": x.get()",
          REFERENCE, isa="avx2"),
    Fault("run_of_the_first_sixteen_on_avx2", "formats/blocks.h", "codes(block, column + 16)", "codes(block, column)",
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


TILES = "return amx_available() || bfloat16_is_fast();"  # the rule of x86/plan.h


def copied_sources(
    folder: Path, emulate_amx: bool, fast_bfloat16: bool = False, tiles: str = "amx_available() || bfloat16_available()"
) -> Path:
    """Without emulated AMX, a processor's own is not used. tiles: when to use tiles of bfloat16."""
    sources = folder / "csrc"
    shutil.copytree(ROOT / "csrc", sources)
    fast = "inline bool bfloat16_is_fast() {\n"
    changed(sources / "cpu" / "x86" / "processor.h", fast, f"{fast}  return {str(fast_bfloat16).lower()};\n")
    changed(sources / "cpu" / "x86" / "plan.h", TILES, f"return {tiles};")
    if emulate_amx:
        emulation = f'#include <immintrin.h>\n#include "{ROOT}/tests/emulated_amx.h"'
        changed(sources / "cpu" / "x86" / "processor.h", "#include <immintrin.h>", emulation)
    available = "inline bool amx_available() {\n"
    changed(sources / "cpu" / "x86" / "processor.h", available, f"{available}  return {str(emulate_amx).lower()};\n")
    return sources


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def library(sources: Path, reached: set[str], folder: Path, isa: str = "avx512") -> Path:
    """The built library, with only the files that a change affects compiled again."""
    objects = sorted((built(isa) / "csrc" / "cpu").rglob("*.o"))
    if isa == "avx512":
        reached = reached | CHOOSE_TILES
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


# The files that choose tiles of bfloat16. On an Intel the built ones choose AMX's, or none.
CHOOSE_TILES = {"experts_tiles", "linear_tiles"} if "GenuineIntel" in PROCESSOR else set()
# Panels of integers are for processors without tiles.
OF_PANELS = {
    fault for fault in FAULTS if fault.file == "x86/integer_panels.h" or fault.name == "tokens_without_digits_are_nan"
}
# Tiles of bfloat16 need AVX512-BF16, and so do all tests with emulated AMX.
HAS_BFLOAT16 = "avx512_bf16" in PROCESSOR
BFLOAT16 = ("packed_strips", "avx512_bf16", "weight_tile_rows", "rounded", "tiles", "transposed_rows", "bfloat16_dots",
            "e4m3_dots", "gate_tiles", "experts_tiles")  # fmt: skip
OF_BFLOAT16 = {
    fault for fault in FAULTS if fault.amx or Path(fault.file).stem in BFLOAT16 or fault.name.endswith("in_tiles")
}
for_bfloat16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="needs a processor with AVX512-BF16")
# The files with AMX instructions.
OF_AMX = {"affine_rows", "affine_rows_across_bytes", "float_rows", "experts_tiles", "gate_tiles", "linear_tiles"}


def reached_by(fault: Fault) -> set[str]:
    """The files to compile again: those of the formats in which the fault's test detects it."""
    if fault.file == "gate.cpp":
        return {"gate"}
    if fault.file == "x86/gate_tiles.cpp" or fault.name == "experts_over_the_first":
        return {"gate_tiles"}
    if fault.file == "vector/vec.h":
        return {"weight_rows"}
    if fault.file == "vector/dots.h":
        return {"affine_rows" if fault.test in (NUMBERS, ROWS) else "weight_rows"}
    if fault.name == "shifts_of_the_first_four":
        return {"affine_rows_across_bytes"}
    if fault.isa == "avx2" and fault.test == GGUF_LINEAR:
        return {"ggml_k_rows_of_16", "ggml_32_rows"}
    if fault.amx:
        return OF_AMX - {"affine_rows_across_bytes", "float_rows"}
    if fault in OF_PANELS:
        return {"affine_rows", "linear_tiles"}
    if fault.file == "x86/weight_tile_rows.h":
        return {"linear_tiles"}
    of_experts = ("x86/avx512_bf16.h", "x86/tiles.h", "x86/transposed_rows.h", "x86/experts_tiles.cpp")
    if fault.test == REFERENCE and fault.file in of_experts:
        return {"experts_tiles"}
    if fault.test == GGUF_LINEAR and fault.file == "x86/rounded.h":
        return {"ggml_k_rows_of_16"}  # a scale for each half of 32 columns
    if fault.test == GGUF_LINEAR and fault.file == "x86/packed_strips.h":
        return {"ggml_32_rows"}  # a scale in each block of 32 columns
    if fault.test == GGUF_LINEAR and fault.file in ("x86/vnni.h", "x86/bfloat16_dots.h"):
        return {"ggml_k_rows"}  # formats that read scales and offsets from their blocks
    if "ggml" in fault.file:
        return {"ggml_k_rows" if "ggml_k" in fault.file else "ggml_32_rows", "ggml_k_rows_of_16"}
    # Scales of rows, and factors, are those of floats, and offsets make NaN of an infinite number in any case.
    of_floats = fault.file in ("formats/e4m3.h", "weights/row_scales.h", "x86/e4m3_dots.h", "x86/rounded.h")
    of_floats |= fault.name in ("inf_as_integers", "scale_of_the_first_columns")
    return {"float_rows" if of_floats else "affine_rows"}


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


def for_avx512(test):
    for mark in needs("avx512"):
        test = mark(test)
    return test


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=[*needs(fault.isa), *[for_bfloat16] * (fault in OF_BFLOAT16)])
        for fault in FAULTS
    ],
)
def test_broken_readers_are_detected(fault: Fault, tmp_path: Path):
    tiles = {"tiles": "false"} if fault in OF_PANELS else {}
    sources = copied_sources(tmp_path, fault.amx, fault.file == "x86/bfloat16_dots.h", **tiles)
    changed(sources / "cpu" / fault.file, fault.line, fault.broken)
    choose = ["-k", "many_tokens or tiles-"] if fault.test == REFERENCE and fault.isa == "avx512" else []
    made = library(sources, reached_by(fault), tmp_path, fault.isa)
    done = run_tests(made, tmp_path, fault.test, *choose, isa=fault.isa)
    assert f"FAILED {fault.test}" in done.stdout, done.stdout[-3000:]


@for_avx512
@for_bfloat16
def test_tiles_on_emulated_amx(tmp_path: Path):
    made = library(copied_sources(tmp_path, True), OF_AMX, tmp_path)
    chosen = "(experts or gate or linear) and bf16 or few_tokens or many_tokens or small_scale"
    done = run_tests(made, tmp_path, "test_ops.py", "test_quantized.py", "-k", chosen)
    assert done.returncode == 0, done.stdout[-3000:]


@for_avx512
@for_bfloat16
def test_products_of_other_processors(tmp_path: Path):
    """On AMD's processors those of an Intel without AMX: integers. On Intel's those of AMD's: bfloat16."""
    amd = "AuthenticAMD" in PROCESSOR
    reached = {"affine_rows", "affine_rows_across_bytes", "float_rows", "ggml_k_rows", "experts_tiles", "linear_tiles"}
    made = library(copied_sources(tmp_path, False, not amd, tiles=TILES[7:-1]), reached, tmp_path)
    chosen = "few_tokens or many_tokens or small_scale or linear_equals"
    done = run_tests(made, tmp_path, "test_quantized.py", "test_ggml.py", "-k", chosen)
    assert done.returncode == 0, done.stdout[-3000:]
