"""Broken shaders: readers of packed weights, attention and rope. For each there is a test of the suite that must fail.

The test itself does not change. The op is replaced by a replay: the dispatches of the real op with the changed shader,
on the engine of the simulated Metal.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import cases
import test_attention_mps as attention_suite
import test_experts_mps as suite
import test_ops
import test_tensor_ops as units_suite
from conftest import DEVICES, SIMULATED
from packings import AFFINE, FP8, MXFP4
from torch_moe_metal.random_weights import FORMATS

only_simulated = pytest.mark.skipif(
    not SIMULATED or "mps" not in DEVICES, reason="only the simulated Metal runs shaders that are not the project's"
)
pytestmark = [pytest.mark.slow, only_simulated]

HERE = Path(__file__).parent

# ------------------------------------------------------------------------------------------------ replaying


def shader_of(kernel: str) -> str:
    if kernel.startswith("tensor_products"):
        return "tensor_ops"
    if kernel.startswith("attention_combine"):
        return "attention_combine"
    if kernel.startswith(("linear_attention", "short_conv")):
        return "linear_attention" if kernel.startswith("linear") else "short_conv"
    if not kernel.startswith("experts"):
        return kernel.partition("_")[0]
    files = {"_rows2": "pairs", "_rows": "decode", "_columns": "columns", "_tiles": "prefill"}
    return "experts_" + next((file for part, file in files.items() if part in kernel), "slots")


#: The parts of a shader that take long to compile.
PARTS = {f"linear_attention_{keys}": f"keys{keys}" for keys in (64, 128, 256)} | {"linear_attention_groups": "groups"}


def library_of(kernel: str, change: Callable[[str], str]):
    """The library of the kernel, for its dtype and format only, after a change of the source."""
    import embed
    from metal_sim import engine

    before, _, dtype = kernel.rpartition("_")
    dtypes = [f"MOE_METAL_DTYPE=MOE_METAL_{dtype}"] if dtype in ("float", "half", "bfloat") else []
    named = [library for library in embed.FORMATS if before.endswith(f"_{library}")]
    macros = [*embed.FORMATS[max(named, key=len, default="dense")], *dtypes]
    if part := PARTS.get(before):
        macros += [f"MOE_METAL_PART={part}", f"MOE_METAL_PART_{part}=1"]
    defines = "".join(f"#define {macro.replace('=', ' ')}\n" for macro in macros)
    text = embed.shader_text(HERE.parent / "shaders" / f"{shader_of(kernel)}.metal")
    return engine.Library(defines + change(text), 400 if shader_of(kernel) == "tensor_ops" else 310)


def storage_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def replay(op: Callable, change: Callable[[str], str], *args, **options) -> Tensor | list[Tensor]:
    """The op's results with changed shaders. Arguments are also written."""
    import metal_sim
    from metal_sim import engine

    given = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
    with metal_sim.record() as record, metal_sim.host_only():
        output = op(*args, **options)
    contents = torch.ops.metal_sim.contents
    given = [tensor for tensor in given if tensor.numel()]
    memory = {contents(tensor): storage_of(tensor).cpu().numpy().copy() for tensor in given}
    engine.set_orders(engine.FORWARD)
    for dispatch in record.dispatches:
        arguments = [None] * engine.SLOTS
        for one in dispatch.arguments:
            if one["bytes"]:
                arguments[one["index"]] = engine.Bytes(bytes.fromhex(one["bytes"]))
                continue
            array = memory.setdefault(one["contents"], np.full(one["length"], 0xFF, np.uint8))
            arguments[one["index"]] = engine.At(array, one["offset"])
        kernel = library_of(dispatch.kernel, change).kernel(dispatch.kernel)
        kernel(*arguments, grid=dispatch.grid, threads=dispatch.threads)
    for tensor in given:
        storage_of(tensor).copy_(torch.from_numpy(memory[contents(tensor)]))

    def found(one: Tensor) -> Tensor:
        if one.numel() == 0:
            return one.cpu()
        return torch.from_numpy(memory[contents(one)]).view(one.dtype)[: one.numel()].view(one.shape)

    return found(output) if isinstance(output, Tensor) else [found(one) for one in output]


class Ops:
    """`torch.ops.moe_metal`, with each op replaced by its replay."""

    def __init__(self, change: Callable[[str], str]):
        self.change, self.real = change, torch.ops.moe_metal

    def __getattr__(self, op: str) -> Callable:
        return functools.partial(replay, getattr(self.real, op), self.change)


# ------------------------------------------------------------------------------------------------ mutants


@dataclass(frozen=True)
class Mutant:
    """The test must fail because of the changed shader: by its values, or by a check of the simulator."""

    right: str
    wrong: str
    rule: str
    test: Callable
    arguments: dict


def linear(packing, T: int) -> tuple[Callable, dict]:
    return suite.test_packed_linear, {"packing": packing, "T": T}


def experts(packing, T: int) -> tuple[Callable, dict]:
    return suite.test_packed_experts, {"packing": packing, "T": T}


def numbers(packing) -> tuple[Callable, dict]:
    return suite.test_dequantize, {"packing": packing}


def nan(packing, T: int) -> tuple[Callable, dict]:
    return suite.test_nan_does_not_spread, {"packing": packing, "T": T}


def packed(name: str) -> tuple[Callable, dict]:
    (case,) = (case for case in cases.packed_cases() if str(case).startswith(name) and case.dtype == cases.FLOAT)
    return test_ops.test_equals_the_reference, {"case": case}


def together(name: str, dtype: torch.dtype = cases.FLOAT) -> tuple[Callable, dict]:
    return suite.test_tokens_together, {"packing": FORMATS[name], "dtype": dtype}


def slots(route: str) -> tuple[Callable, dict]:
    return suite.test_slots_together, {"route": route}


def dense(op: str, T: int) -> tuple[Callable, dict]:
    """A weight whose rows are loaded 16 bytes at a time; a simdgroup has two of three experts' rows alternately."""
    case = cases.Case(op, f"dense-T{T}", {"T": T, "E": 5, "K": 3, "H": 96, "I": 64, "N": 9})
    return test_ops.test_equals_the_reference, {"case": case}


def padded(T: int) -> tuple[Callable, dict]:
    return suite.test_rows_do_not_read_into_the_next_row, {"T": T}


def cut(name: str) -> tuple[Callable, dict]:
    return attention_suite.test_every_division_of_the_work, {"name": name}


def unseen(name: str) -> tuple[Callable, dict]:
    return attention_suite.test_invisible_keys, {"name": name}


def rope(name: str) -> tuple[Callable, dict]:
    """Six query heads and one key head of 80 elements, all rotated; or five and two of 33, of which 18 are rotated."""
    (case,) = (
        case for case in cases.rope_cases() if str(case).startswith(f"rope-{name}-") and case.dtype == cases.FLOAT
    )
    return test_ops.test_equals_the_reference, {"case": case}


def on_units(packing=None) -> tuple[Callable, dict]:
    """A linear layer on the matrix units, or dense experts."""
    if packing is None:
        return units_suite.test_dense_experts, {"name": "biases"}
    return units_suite.test_packed_linear_on_units, {"packing": packing}


NARROW4 = suite.NARROW[2]  # groups of 16
# Parts of the shaders that several mutants change.
SHIFT = "params.group_shift"
GROUP = f"column >> {SHIFT}"
DECODE_GROUP = f"(column + g * (columns / groups)) >> {SHIFT}"
COUNT = "whole ? kChunk : column < length ? length - column : 0"
SCALE_ROW = "row / Chunk::scale_rows"
KEY = "first_key + 8 * n + element.row"
FINITE = "store_sums(attended, memory, stats, finite, position)"
MUTANTS = {
    # codes
    "nibble_swapped": Mutant("return i * bits % 32;", "return (i ^ 1) * bits % 32;", "values", *linear(AFFINE[4], 1)),
    "half_word_swapped": Mutant("? both.x : both.y", "? both.y : both.x", "values", *numbers(AFFINE[4])),
    "mxfp4_nibble_swapped": Mutant("n % 2 ? upper : lower", "n % 2 ? lower : upper", "values", *linear(MXFP4, 9)),
    "fp8_byte_swapped": Mutant("n % 2 ? word : word << 8", "n % 2 ? word << 8 : word", "values", *numbers(FP8)),
    "code_cut_at_a_word": Mutant("if (bit(i) + bits > 32)", "if (false)", "values", *experts(AFFINE[3], 3)),
    "sign_lost": Mutant("(word & 0x80808080u) | (word >> 3 & 0x0e", "(word >> 3 & 0x0e", "values", *experts(MXFP4, 3)),
    "middle_forgotten": Mutant("float(Codes::middle), offset", "0.0f, offset", "values", *experts(AFFINE[8], 3)),
    "nan_is_480": Mutant("+ 0x01010101u) & 0x80808080u", "+ 0x01010101u) & 0", "values", *nan(FP8, 1)),
    "nan_is_480_in_tiles": Mutant("nan ? NAN : chunk.scale", "chunk.scale", "values", *nan(FP8, 20)),
    "nan_is_480_alone": Mutant("& 0x7f) == 0x7f", "& 0x7f) == 0x80", "values", *numbers(FP8)),
    "codes_begin_too_early": Mutant("(bytes - 16), 0", "(bytes - 18), 0", "values", *linear(FORMATS["q4_0"], 1)),
    "fifth_bit_of_another": Mutant(
        "16 * second + 4 * k", "16 * second + 4 * (k ^ 1)", "values", *numbers(FORMATS["q5_1"])
    ),
    "sign_of_a_byte_lost": Mutant("^ 0x80808080u", "", "values", *linear(FORMATS["q8_0"], 9)),
    "other_half_of_the_block": Mutant("+ 16 * at.second", "", "values", *numbers(FORMATS["q8_0"])),
    "e2m1_not_doubled": Mutant("(exponent - 1) << 23", "exponent << 23", "values", *experts(FORMATS["ggml_mxfp4"], 3)),
    "polynomial_bent": Mutant("24.1738f", "24.2738f", "values", *numbers(FORMATS["iq4_nl"])),
    "fifth_bits_of_one_group": Mutant("0x00100010u << 4 * second", "0x00100010u", "values", *numbers(FORMATS["q5_k"])),
    "upper_bits_of_another_half": Mutant("(at.chunk & 2)", "0", "values", *linear(FORMATS["q6_k"], 9)),
    "halves_side_by_side": Mutant(
        "if (Codes::distance == kNarrowColumns)", "if (true)", "values", *linear(FORMATS["q4_k"], 1)
    ),
    "half_before": Mutant("narrow / between % 2", "0", "values", *numbers(FORMATS["q6_k"])),
    # scales and offsets
    "scales_of_the_first_groups": Mutant("at.chunk < 4 ?", "true ?", "values", *linear(FORMATS["q4_k"], 1)),
    "offset_sixteen_times": Mutant("-kHalfUnits / 16", "-kHalfUnits", "values", *experts(FORMATS["q2_k"], 3)),
    "scale_has_no_sign": Mutant("high << 4) - 32", "high << 4) - 0", "values", *linear(FORMATS["q3_k"], 9)),
    "scale_of_the_next_group": Mutant("at.chunk % 2 * 4)", "0)", "values", *linear(FORMATS["iq4_xs"], 1)),
    "one_scale_for_32": Mutant("(columns / groups)", "0", "values", *packed("linear-nvfp4-family-H96-I96-T1-")),
    "factor_forgotten": Mutant("params.has_factor ?", "false ?", "values", *experts(FORMATS["nvfp4"], 40)),
    "rows_share_scales": Mutant("is_mxfp8 ? 1 : 128", "128", "values", *linear(FORMATS["mxfp8"], 9)),
    "inner_reordered_for_dense": Mutant(
        "params.inner_reordered ?", "true ?", "race", *packed("experts-affine4g32-down_dense-T3-")
    ),
    "next_group": Mutant(DECODE_GROUP, f"({DECODE_GROUP}) + 1", "bounds", *experts(NARROW4, 3)),
    "next_group_in_tiles": Mutant(GROUP, f"({GROUP}) + 1", "bounds", *experts(NARROW4, 40)),
    "group_before": Mutant(DECODE_GROUP, f"({DECODE_GROUP}) - (column > 63)", "values", *linear(AFFINE[4], 1)),
    "groups_twice_as_wide": Mutant(SHIFT, f"({SHIFT} + 1)", "values", *linear(NARROW4, 9)),
    "groups_half_as_wide": Mutant(SHIFT, f"({SHIFT} - 1)", "bounds", *numbers(NARROW4)),
    "scale_of_the_next_row": Mutant(SCALE_ROW, f"(1 + {SCALE_ROW})", "bounds", *linear(AFFINE[4], 1)),
    "blocks_of_64_rows": Mutant("is_mxfp8 ? 1 : 128", "is_mxfp8 ? 1 : 64", "bounds", *experts(FP8, 40)),
    "scales_of_expert_0": Mutant("scale + expert * params.scale.expert", "scale", "values", *experts(MXFP4, 3)),
    "offset_is_scale": Mutant("load_number(row.offset +", "load_number(row.scale +", "values", *numbers(AFFINE[2])),
    # several tokens together
    "vector_of_the_first_token": Mutant("* apart;", "* 0;", "values", *linear(AFFINE[4], 2)),
    "tokens_overrun": Mutant("min(token + t, params.T - 1)", "token + t", "bounds", *linear(AFFINE[4], 3)),
    "outputs_of_the_first_token": Mutant("partial + t * most", "partial + 0 * most", "values", *linear(MXFP4, 3)),
    "outputs_overrun": Mutant("token + t >= params.T ||", "", "bounds", *linear(MXFP4, 3)),
    "codes_of_the_first_eight": Mutant(
        "(chunks.row[r], i, codes[r]", "(chunks.row[r], 0, codes[r]", "values", *together("q5_k")
    ),
    "sums_of_the_first_group": Mutant(
        "const uint g = i * groups / columns", "const uint g = 0", "values", *together("nvfp4")
    ),
    "exponents_forgotten": Mutant(
        "x.at[n / 4][n % 4] *= 1", "x.at[n / 4][n % 4] *= 1.5f", "values", *linear(AFFINE[4], 8)
    ),
    "code_of_0_forgotten": Mutant(
        "r < kDotRows && off_zero", "r < kDotRows && false", "values", *together("q4_0", cases.BFLOAT)
    ),
    "offset_of_the_last_token": Mutant(
        "row_sum(totals[t], plain[t]", "row_sum(totals[t], plain[N - 1]", "values", *linear(AFFINE[4], 2)
    ),
    "columns_of_the_first_lane": Mutant(
        "rows.data.at[r] + column, w[r]", "rows.data.at[r], w[r]", "values", *dense("linear", 3)
    ),
    # two slots of an expert together
    "pairs_of_any_expert": Mutant("all[n].x == id.x &&", "", "values", *slots("two tokens")),
    "pairs_overlap": Mutant("|| !pair.begins", "", "race", *slots("all alike")),
    "second_of_the_first_lanes": Mutant("begin + ctz(later)", "ctz(later)", "race", *slots("more slots than lanes")),
    "token_of_the_first_slot": Mutant("pair.second / params.K}", "group.x / params.K}", "values", *slots("all alike")),
    "inner_of_the_first_slot": Mutant("which == 0 ? group.x : pair.second", "group.x", "race", *slots("all alike")),
    "weight_of_the_first_token": Mutant(
        "weights, first_slot + vectors.row[t]", "weights, first_slot + lead", "values", *slots("two tokens")
    ),
    "products_of_absent_tokens": Mutant(
        "if (slots_of(slots, t, params) == 0) continue;", "", "values", *slots("none alike")
    ),
    "selected_again_forgotten": Mutant("if (again) listed = 1u << lane;", "", "values", *slots("again in a token")),
    "last_tokens_overrun": Mutant("t >= tokens ||", "", "bounds", *slots("none alike")),
    # positions, and the order of a lane's chunks
    "row_forgotten": Mutant("at.byte += row;", "", "values", *linear(AFFINE[4], 1)),
    "id_not_followed": Mutant("if (i + step < all) next_id", "if (false) next_id", "values", *dense("experts", 1)),
    "pair_taken_again": Mutant("    take_pair(products);", "", "values", *experts(MXFP4, 40)),
    "second_half_side_by_side": Mutant("chunk.column + second", "chunk.column + 8", "values", *dense("linear", 20)),
    "tiles_not_multiplied": Mutant("*= float(Reader::factor)", "*= 1", "values", *linear(AFFINE[4], 9)),
    "offset_not_divided": Mutant("chunk.offset *= 1 / float(factor);", "", "values", *linear(AFFINE[4], 9)),
    "exponent_left_in_tiles": Mutant(
        "of_product ? chunk.scale * down", "of_product ? chunk.scale", "values", *linear(FP8, 9)
    ),
    # the end of a row, and of the matrix
    "row_end_overrun": Mutant("if (8 * n < count * bits)", "if (true)", "bounds", *numbers(FP8)),
    "row_end_overrun_in_decode": Mutant("wide ? columns : left", "columns", "bounds", *linear(FP8, 1)),
    "row_end_in_wide_loads": Mutant("aligned && count >= columns", "aligned", "values", *padded(1)),
    "row_end_overrun_in_tiles": Mutant(COUNT, "kChunk", "bounds", *padded(9)),
    "rows_overrun": Mutant("min(first + n, params.N - 1)", "first + n", "bounds", *linear(AFFINE[4], 33)),
    "rows_overrun_in_decode": Mutant("min(first + r, params.N - 1)", "first + r", "bounds", *linear(MXFP4, 1)),
    # matrix units
    "sums_do_not_begin": Mutant("if (sums.is_valid_element(i)) sums[i] = 0;", "{}", "values", *on_units(MXFP4)),
    "each_product_begins_anew": Mutant("mode::multiply_accumulate", "mode::multiply", "values", *on_units(AFFINE[4])),
    "unpacked_while_it_is_read": Mutant(
        "threadgroup_barrier(mem_flags::mem_threadgroup);  // until the previous matmul2d",
        "// the matmul2d",
        "race",
        *on_units(MXFP4),
    ),
    "stored_over_what_is_read": Mutant(
        "threadgroup_barrier(mem_flags::mem_threadgroup);  // until the last matmul2d",
        "// the last matmul2d",
        "race",
        *on_units(AFFINE[4]),
    ),
    "factor_left_in_units": Mutant(
        "values.at[n] * float(Reader::factor)", "values.at[n]", "values", *on_units(AFFINE[4])
    ),
    "columns_of_the_first_product": Mutant("device_tensor(x + column,", "device_tensor(x,", "values", *on_units(MXFP4)),
    "rows_overrun_in_units": Mutant(
        "min(first + chunk / chunks, params.N - 1)", "first + chunk / chunks", "bounds", *on_units(MXFP4)
    ),
    "dense_rows_overrun": Mutant("min(kProductRows, params.N - first)", "kProductRows", "bounds", *on_units()),
    "weights_of_expert_0": Mutant("tile.expert = entry.x;", "", "values", *on_units()),
    "rows_of_the_tile_before": Mutant("tile.first = entry.y;", "", "bounds", *on_units()),
    # attention
    "unseen_values_counted": Mutant(FINITE, f"{FINITE} || true", "values", *unseen("key parts")),
    "keys_overrun": Mutant(f"min({KEY}, params.S - 1)", f"({KEY})", "bounds", *cut("key parts")),
    "own_key_not_seen": Mutant("max(past, 0)", "max(past - 1, 0)", "values", *cut("tiles")),
    "column_part_left_out": Mutant(
        "position.column_part + column_parts;", "position.column_part + 1;", "values", *cut("two column parts")
    ),
    "key_part_not_scaled": Mutant("exp(other.xy -", "exp(0 * other.xy -", "values", *cut("key parts")),
    "part_not_scaled": Mutant("exp(mine.x - offset)", "1.0f", "values", *cut("parts")),
    "combined_sum_not_scaled": Mutant("exp(other.x - offset_of(highest).x)", "1.0f", "values", *cut("many parts")),
    # rope
    "turned_back": Mutant("a * c - b * s", "a * c + b * s", "values", *rope("plain-A6-J1-D80-R40")),
    "pairs_as_halves": Mutant("params.interleaved ? 2 * i : i", "i", "values", *rope("plain-interleaved-A5-J2-D33-R9")),
    "rest_left_out": Mutant("i = 2 * R + lane", "i = D + lane", "values", *rope("joined-A5-J2-D33-R9")),
    "angles_of_the_first_token": Mutant("+ t * params.cos.row", "", "values", *rope("plain-A6-J1-D80-R40")),
    "norm_of_all_heads": Mutant(
        "if (params.norm == RopeNorm::each_head)", "if (false)", "values", *rope("normed-A6-J1-D80-R40")
    ),
    "norm_of_each_head": Mutant(
        "if (params.norm == RopeNorm::each_head)", "if (true)", "values", *rope("normed_whole-A5-J2-D33-R9")
    ),
    "weights_of_the_first_head": Mutant(
        "params.norm == RopeNorm::all_heads ? head * params.D : 0", "0", "values", *rope("normed_whole-A5-J2-D33-R9")
    ),
    "heads_overrun": Mutant("item >= params.items", "false", "bounds", *rope("plain-A6-J1-D80-R40")),
}


def run_test(mutant: Mutant, change: Callable[[str], str], monkeypatch) -> None:
    monkeypatch.setattr(torch.ops, "moe_metal", Ops(change))
    mutant.test("mps", **mutant.arguments)


def assert_detected(mutant: Mutant, monkeypatch) -> None:
    from metal_sim.engine import Violation

    changed = []

    def change(text: str) -> str:
        changed.append(mutant.right in text)
        return text.replace(mutant.right, mutant.wrong)

    with pytest.raises(AssertionError if mutant.rule == "values" else Violation) as caught:
        run_test(mutant, change, monkeypatch)
    assert any(changed) and (mutant.rule == "values" or caught.value.rule == mutant.rule)


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_readers_are_detected(name: str, monkeypatch):
    assert_detected(MUTANTS[name], monkeypatch)


UNBROKEN = {(mutant.test.__name__, *map(str, mutant.arguments.values())): mutant for mutant in MUTANTS.values()}


@pytest.mark.parametrize("name", UNBROKEN, ids="-".join)
def test_unbroken_readers_pass(name: tuple, monkeypatch):
    run_test(UNBROKEN[name], lambda text: text, monkeypatch)
