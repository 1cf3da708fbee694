"""csrc/cpu/x86, broken one line at a time: the test in each row must fail.

As in test_mutated_cpu_readers.py, the built library is linked again with the changed file. The tests of the AMX code
also run, unbroken, on any processor: emulated_amx.h emulates its instructions.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from test_mutated_cpu_readers import (
    GGUF_LINEAR,
    LINEAR,
    MAGNITUDE,
    NUMBERS,
    REFERENCE,
    ROOT,
    ROWS,
    changed,
    detected,
    library,
    needs,
    run_tests,
)
from test_mutated_cpu_readers import Fault as PortableFault

PROCESSOR = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""


@dataclass(frozen=True)
class Fault(PortableFault):
    amx: bool = False  # with emulated AMX

    def __str__(self) -> str:
        return self.name


UNUSED = "test_quantized.py::test_few_tokens_with_a_number_that_no_weight_uses"
MANY_UNUSED = "test_quantized.py::test_many_tokens_with_a_number_that_no_weight_uses"
NOT_FINITE = "test_quantized.py::test_few_tokens_that_are_not_finite"
MLX_LINEAR = "test_ggml.py::test_linear_equals_mlx_quantized_matmul"
TINY = "test_quantized.py::test_few_tokens_of_tiny_numbers"
MXFP8 = "test_quantized.py::test_many_tokens_meet_every_scale_of_mxfp8"
SAME_BITS = "test_ops.py::test_same_bits_for_any_number_of_threads"
WALL = "test_quantized.py::test_no_read_beyond_the_last_row"

FAULTS = [
    Fault("nibble_twice_as_integers", "x86/integers.h", "srli_epi16(bytes, 4)", "srli_epi16(bytes, 0)", LINEAR),
    Fault("digit_lost", "x86/vnni.h", "_mm512_cvtepi32_ps(add(begin, numbers, x.digits[2]))",
          "_mm512_setzero_ps()", MAGNITUDE),
    Fault("two_digits_always", "x86/integers.h", "return many == 0", "return many >= 0", UNUSED),
    Fault("rest_lost", "x86/vnni.h", "if (finite) lay_out(all, c, *rest++);", "", UNUSED),
    Fault("inf_as_integers", "x86/vnni.h", "if (!finite) std::fill_n(chunks->units, 16, NAN);", "(void)finite;",
          NOT_FINITE),
    Fault("nibble_swapped_in_tiles", "x86/formats/codes.h", "slli_epi32(bytes, 12)", "slli_epi32(bytes, 16)",
          REFERENCE),
    Fault("first_group_in_tiles", "x86/packed_tile_rows.h", " + (column >> shift_)", "", NUMBERS),
    Fault("two_blocks_late", "x86/packed_tile_rows.h", "start(block + 2)", "start(block)", NUMBERS),
    Fault("half_of_the_only_tile", "x86/packed_tile_rows.h", "multiply_by_vectors<1, false, Ahead>",
          "multiply_by_vectors<0, true, Ahead>", NUMBERS),
    Fault("half_a_tile_forgotten", "x86/packed_tile_rows.h", "multiply_by_vectors<1, true, Ahead>",
          "multiply_by_vectors<1, false, Ahead>", NUMBERS),
    Fault("scale_of_the_first_block_in_tiles", "x86/packed_tile_rows.h", "column_ + n * kDepth", "column_",
          GGUF_LINEAR),
    Fault("scale_as_offset_in_tiles", "x86/formats/ggml_32.h", "offset = both[1]", "offset = both[0]", GGUF_LINEAR),
    Fault("first_tokens_in_half_a_tile", "x86/avx512_bf16.h", "here + G * size, sizeof", "here, sizeof", NUMBERS),
    Fault("short_ring_for_many_tokens", "x86/weight_tile_rows.h", "tiles.ring = more ?", "tiles.ring = false ?",
          NUMBERS),
    Fault("scales_of_one_row_for_16", "x86/rounded.h", "!= 0) return false;", "!= 0) break;", REFERENCE),
    Fault("scales_beyond_normal_numbers", "x86/rounded.h", "return least > kRange && most < 2 * kOne - kRange;",
          "return true;", MXFP8),
    Fault("zero_times_a_scale", "x86/rounded.h", "_mm512_set1_epi16(0x7ffe)", "_mm512_set1_epi16(-1)", MXFP8),
    Fault("scale_of_the_first_half_in_tiles", "x86/rounded.h", "scale[i * kLanes / Group]",
          "scale[i / 2 * kDepth / Group]", GGUF_LINEAR),
    Fault("nibbles_of_one_run_in_tiles", "x86/formats/ggml_k.h", "column / 64 * 32), column / 32 % 2 * 4",
          "column / 64 * 32), 0", GGUF_LINEAR),
    Fault("fifth_bit_of_the_first_run_in_tiles", "x86/formats/ggml_k.h", "load_256(block + 16), column / 32",
          "load_256(block + 16), 0", GGUF_LINEAR),
    Fault("tail_overrun", "x86/integers.h", "std::min<int64_t>(left / 8 * bits, kMost)", "kMost", WALL),
    Fault("half_of_8_bits_twice", "x86/integers.h", "in_order(from + 8 * bits, left - 64)",
          "in_order(from, left)", LINEAR),
    Fault("shifts_of_the_first_four", "x86/integers.h", "(i % 8 * bits)", "(i % 4 * bits)", LINEAR),
    Fault("few_tokens_of_two_passes", "x86/bfloat16_dots.h", "tokens.out + n);", "tokens.out);", MAGNITUDE),
    Fault("fifth_bit_of_neighbours", "x86/formats/ggml_32.h", "high |= (word >> 16)", "high |= (word >> 15)",
          GGUF_LINEAR),
    Fault("highest_bits_of_one_run", "x86/formats/ggml_k.h", "in_quarters<0, 0, 2, 2>()",
          "in_quarters<0, 0, 0, 0>()", GGUF_LINEAR),
    Fault("offsets_of_the_scales", "x86/formats/ggml_k.h", "in_halves(0, 4LL << 32)", "in_halves(0, 0)", GGUF_LINEAR),
    Fault("scales_of_the_first_half", "x86/formats/ggml_k.h", "_mm512_permutexvar_ps(lanes,",
          "_mm512_permutexvar_ps(_mm512_sub_epi32(lanes, first),", GGUF_LINEAR),
    Fault("units_of_low_nibbles", "x86/vnni.h", "units, kTimes16", "units, 0", GGUF_LINEAR),
    Fault("offsets_twice", "x86/vnni.h", "if (p == 0) {", "{", GGUF_LINEAR),
    Fault("scales_of_one_chunk_of_two", "x86/vnni.h", "scales += P * groups", "scales += groups", GGUF_LINEAR),
    Fault("last_block_beyond_the_row", "x86/formats/ggml_32.h", "std::min<int64_t>(3, last)", "3", WALL),
    Fault("last_scale_beyond_the_row", "x86/formats/ggml_32.h", "first + std::min(b, last) * kBytes, sizeof(half)",
          "first + b * kBytes, sizeof(half)", WALL),
    Fault("one_scale_of_64_columns", "x86/e4m3_dots.h", "scales_of_row[1]", "scales_of_row[0]", MLX_LINEAR),
    Fault("half_chunk_forgotten", "x86/e4m3_dots.h", "left > 0) {", "left < 0) {", MLX_LINEAR),
    Fault("even_numbers_twice", "x86/e4m3_dots.h",
          "_mm512_and_si512(numbers[v], _mm512_set1_epi32(static_cast<int>(0xffff0000)))",
          "_mm512_slli_epi32(numbers[v], 16)", MLX_LINEAR),
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
    Fault("tokens_without_digits_are_nan", "x86/packed_rows.h", "if (!all_finite(tokens.out[n], rows.count)) portable_",
          "if (false) portable_", MANY_UNUSED),
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
]  # fmt: skip

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


# The files that choose tiles of bfloat16. On an Intel the built ones choose AMX's, or none.
CHOOSE_TILES = {"experts_tiles", "linear_tiles"} if "GenuineIntel" in PROCESSOR else set()
# Panels of integers are for processors without tiles.
OF_PANELS = {fault for fault in FAULTS if fault.file in ("x86/integer_panels.h", "x86/packed_rows.h")}
# Tiles of bfloat16 need AVX512-BF16, and so do all tests with emulated AMX.
HAS_BFLOAT16 = "avx512_bf16" in PROCESSOR
BFLOAT16 = ("packed_tile_rows", "avx512_bf16", "weight_tile_rows", "rounded", "tiles", "transposed_rows",
            "bfloat16_dots", "e4m3_dots", "gate_tiles", "experts_tiles")  # fmt: skip
OF_BFLOAT16 = {
    fault for fault in FAULTS if fault.amx or Path(fault.file).stem in BFLOAT16 or fault.name.endswith("in_tiles")
}
for_bfloat16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="needs a processor with AVX512-BF16")
# The files with AMX instructions.
OF_AMX = {"experts_tiles", "gate_tiles", "linear_tiles"}


def reached_by(fault: Fault) -> set[str]:
    """The files to compile again: those of the formats in which the fault's test detects it."""
    if fault.file == "x86/gate_tiles.cpp" or fault.name == "experts_over_the_first":
        return {"gate_tiles"}
    if fault.name == "shifts_of_the_first_four":
        return {"x86_affine_across_bytes"}
    if fault.amx:
        return OF_AMX
    if fault in OF_PANELS:
        return {"x86_affine", "linear_tiles"}
    if fault.file == "x86/weight_tile_rows.h":
        return {"linear_tiles"}
    of_experts = ("x86/avx512_bf16.h", "x86/tiles.h", "x86/transposed_rows.h", "x86/experts_tiles.cpp")
    if fault.test == REFERENCE and fault.file in of_experts:
        return {"experts_tiles"}
    if fault.test == GGUF_LINEAR and fault.file == "x86/rounded.h":
        return {"x86_ggml_k_of_16"}  # a scale for each half of 32 columns
    if fault.test == GGUF_LINEAR and fault.file == "x86/packed_tile_rows.h":
        return {"x86_ggml_32"}  # a scale in each block of 32 columns
    if fault.test == GGUF_LINEAR and fault.file in ("x86/vnni.h", "x86/bfloat16_dots.h"):
        return {"x86_ggml_k"}  # formats that read scales and offsets from their blocks
    if "ggml" in fault.file:
        return {"x86_ggml_k" if "ggml_k" in fault.file else "x86_ggml_32", "x86_ggml_k_of_16"}
    # Offsets make NaN of an infinite number in any case.
    of_floats = fault.file in ("x86/e4m3_dots.h", "x86/rounded.h") or fault.name == "inf_as_integers"
    return {"x86_floats" if of_floats else "x86_affine"}


def for_avx512(test):
    for mark in needs("avx512"):
        test = mark(test)
    return test


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=[*needs("avx512"), *[for_bfloat16] * (fault in OF_BFLOAT16)])
        for fault in FAULTS
    ],
)
def test_broken_x86_is_detected(fault: Fault, tmp_path: Path):
    tiles = {"tiles": "false"} if fault in OF_PANELS else {}
    sources = copied_sources(tmp_path, fault.amx, fault.file == "x86/bfloat16_dots.h", **tiles)
    choose = ["-k", "many_tokens or tiles-"] if fault.test == REFERENCE else []
    detected(fault, sources, reached_by(fault) | CHOOSE_TILES, tmp_path, *choose)


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
    reached = {"x86_affine", "x86_affine_across_bytes", "x86_floats", "x86_ggml_k", "experts_tiles", "linear_tiles"}
    made = library(copied_sources(tmp_path, False, not amd, tiles=TILES[7:-1]), reached, tmp_path)
    chosen = "few_tokens or many_tokens or small_scale or linear_equals"
    done = run_tests(made, tmp_path, "test_quantized.py", "test_ggml.py", "-k", chosen)
    assert done.returncode == 0, done.stdout[-3000:]
