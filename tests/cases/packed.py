"""Cases of `linear`, `experts` and `dequantize` with packed weights."""

import functools
from collections.abc import Callable, Sequence
from itertools import product
from math import inf

import torch

from cases.case import BFLOAT, DTYPES, FLOAT, HALF, OPTIONAL, Case, scaling, setting, takes_floats
from cases.experts import BIASES, OAI, SHARED_GATED
from cases.oracle import Args, is_number
from cases.packed_bytes import (
    HOSTILE_IDS,
    as_float8,
    as_unsigned_words,
    as_words,
    every_code,
    extreme_powers,
    in_blocks,
    infinite_scale,
    nan_scale,
    scales_as_float8,
    wider_even_rows,
    wider_rows,
    without_factor,
)
from torch_moe_metal import arguments, formats, reference
from torch_moe_metal.arguments import ARGUMENTS
from torch_moe_metal.commands.bench.samples import PACKED as FAMILIES

PACKED_OPS = tuple(op for op in ARGUMENTS if arguments.takes_formats(op))
WIDTHS = [("affine", bits, group) for bits in formats.BITS for group in formats.GROUPS]
WIDTHS += [(row.name, row.bits, row.scale_columns) for row in formats.FORMATS.values() if not row.is_affine]


def packed_case(
    op: str, name: str, width: tuple[str, int, int], dims: dict[str, int], options: dict, dtype: torch.dtype = FLOAT,
    given: tuple[str, ...] = (), prepare: Sequence[Callable[[Args], None]] = (), scale_dtype: torch.dtype = FLOAT,
    hostile: bool = False, full_grid: bool = False, fast_on: tuple[str, ...] = (),
) -> Case:  # fmt: skip
    """`dims` without irrelevant sizes. Scales of fp8 are never float16, and those of most formats no floats."""
    format, bits, group = width
    row = formats.FORMATS.get(format, formats.LIBRARIES["dense"])

    def prepare_all(args: Args) -> None:
        for one in prepare:
            one(args)

    if not takes_floats(row):
        scale_dtype = None
    elif not row.is_affine and scale_dtype == HALF:
        scale_dtype = BFLOAT
    options = arguments.options(op, options | {"format": format, "bits": bits, "dtype": dtype})
    called = f"{format}{bits}g{group}" if row.is_affine else format
    sizes = "".join(f"-{letter}{size}" for letter, size in dims.items() if letter in "THI")
    scales = "" if scale_dtype in (FLOAT, None) else f"-s{DTYPES[scale_dtype]}"
    return Case(
        op, f"{called}-{name}{sizes}{scales}", {"E": 5, "K": 2, "N": 21} | dims, given, options, dtype, FLOAT,
        prepare_all, bits, group, scale_dtype, hostile, full_grid=full_grid, fast_on=fast_on,
    )  # fmt: skip


def sizes_for(width: tuple[str, int, int]) -> list[tuple[int, int, int]]:
    """H, I and N: the smallest; then sizes that are no multiple of a vector, a block or a power of two; then larger
    ones."""
    format, _, group = width
    row = formats.FORMATS[format]
    if row.rows_per_scale > 1:
        return [(1, 1, 1), (130, 70, 200), (257, 129, 131)]
    if row.whole_columns > 128:
        return [(256, 256, 3), (768, 512, 37), (512, 256, 70)]
    return [
        (group, group, 3 if row.has_own_scales else 1),
        (3 * group, 5 * group, 37),
        (9 * max(group, 32), 2 * group, 70),
    ]


def without_signs(args: Args) -> None:
    """Makes values positive, because a lone result may cancel to almost 0 and consist of rounding only. GGML's scales
    keep their signs."""
    for tensor in args.values():
        if is_number(tensor):
            tensor.abs_()


#: Bytes of a block, and bits that make its values positive. Each of the 16 values of a block is rounded to bfloat16 in
#: the same direction in all columns: if terms of two signs cancel, this error can exceed the tolerance.
POSITIVE = {
    "q4_0": [(slice(2, 18), 0x88)],
    "iq4_nl": [(slice(2, 18), 0x88)],
    "iq4_xs": [(slice(2, 4), 0xAA), (slice(8, 136), 0x88)],
}


def set_bits(args: Args, format: str) -> None:
    for at, bits in POSITIVE.get(format, ()):
        for name in args.keys() & {"gate_up", "down", "weight"}:
            args[name].unflatten(-1, (-1, formats.FORMATS[format].bytes))[..., at] |= bits


@functools.cache
def packed_cases() -> list[Case]:
    """Every format and width with every group size; dtypes of activations and scales take turns. One in five is in the
    fast set for formats that share readers with many others; the rest comes from `families`."""
    cases: list[Case] = []
    dtypes = [(dtype, scales) for dtype in (FLOAT, HALF, BFLOAT) for scales in (FLOAT, BFLOAT, HALF)]

    def add(op: str, width: tuple[str, int, int], dims: dict[str, int]) -> None:
        turn = len(cases)
        dtype, scales = dtypes[turn % len(dtypes)]
        prepare = [without_signs] if op == "linear" and dims["N"] == 1 else []
        rare = turn % 5 > 0 or width not in OLD_WIDTHS
        cases.append(packed_case(op, "plain", width, dims, {}, dtype, (), prepare, scales, full_grid=rare))

    for width in WIDTHS:
        for H, I, N in sizes_for(width):
            for T in (0, 1, 2, 3, 4, 5, 33, 300):
                for op in ("linear", "experts"):
                    add(op, width, {"T": T, "H": H, "I": I, "N": N})
            for columns in (H, I, 7 * H):
                add("dequantize", width, {"H": columns, "N": N})
    return cases + families() + packed_layers() + hostile_packed() + real_packed()


def families() -> list[Case]:
    """The fast set's cases of each family of readers: few tokens, and one; many tokens, so that the CPU multiplies
    tiles; and two formats in one call."""
    cases = []
    for width in FEW_WIDTHS:
        H = max(96, formats.FORMATS[width[0]].whole_columns)
        dims = {"H": H, "I": H, "N": 9, "E": 2}
        cases.append(packed_case("linear", "family", width, dims | {"T": 3}, {}, BFLOAT, fast_on=("cpu",)))
        cases.append(packed_case("linear", "family", width, dims | {"T": 1}, {}, FLOAT, fast_on=("cpu", "mps")))
        cases.append(packed_case("experts", "family", width, dims | {"T": 2}, {}, FLOAT, fast_on=("cpu", "mps")))
    for formats_of, T, dtype in product(TWO_FORMATS, (1, 3, 20), (FLOAT, BFLOAT)):
        width, down = formats_of
        options, dims = {"down_format": down}, {"T": T, "H": 256, "I": 256, "E": 3}
        fast = ("cpu", "mps") if T == 3 and dtype == FLOAT else ("cpu",)
        cases.append(packed_case("experts", f"down_{down}", width, dims, options, dtype, BIASES, fast_on=fast))
    return cases


#: Formats with many cases in the fast set, and one of each other family.
OLD_WIDTHS = [width for width in WIDTHS if width[0] in ("affine", "mxfp4", "fp8")]
FEW_WIDTHS = [width for width in WIDTHS if width not in OLD_WIDTHS and width[0] in FAMILIES]
TWO_FORMATS = [(("q4_k", 4, 32), "q6_k"), (("affine", 4, 32), "dense"), (("dense", 4, 32), "q8_0")]
SOME_WIDTHS = [("affine", 4, 64), ("affine", 8, 32), ("affine", 5, 128), ("mxfp4", 4, 32), ("fp8", 8, 128)]
SOME_WIDTHS += [("nvfp4", 4, 16), ("q8_0", 8, 32), ("q4_k", 4, 32)]


def some_sizes(width: tuple[str, int, int]) -> dict[str, int]:
    row = formats.FORMATS[width[0]]
    if row.rows_per_scale > 1:
        return {"H": 257, "I": 129, "N": 130}
    return {"H": 512, "I": 256, "N": 37} if row.whole_columns > 128 else {"H": 384, "I": 128, "N": 37}


def packed_layers() -> list[Case]:
    """All features of `experts` with packed weights, and `linear` with a bias. They do not depend on the format."""
    cases = []
    combined = ((), BIASES, ("shared",), SHARED_GATED, ("residual",), OPTIONAL["experts"])
    for width in SOME_WIDTHS:
        sizes = {"H": 130, "I": 70} if width[0] == "fp8" else some_sizes(width)
        rare = width not in OLD_WIDTHS
        for T in (1, 3, 40):
            dims = sizes | {"T": T}
            for turn, given in enumerate(combined):
                options = {"interleaved": turn % 2 == 0, "activation": tuple(reference.ACTIVATIONS)[turn % 5]}
                options |= {"limit": 7.0 if turn % 3 else None}
                name, dtype = "+".join(given) or "bare", (FLOAT, HALF, BFLOAT)[(turn + T) % 3]
                case = ("experts", name, width, dims, options, dtype, given)
                cases.append(packed_case(*case, scale_dtype=BFLOAT, full_grid=rare))
            for dtype in (FLOAT, HALF, BFLOAT):
                cases.append(packed_case("linear", "bias", width, dims, {}, dtype, ("bias",), full_grid=rare))
        for name, prepare in HOSTILE_IDS.items():
            for T in (3, 33, 130):
                cases.append(packed_case("experts", name, width, sizes | {"T": T}, {}, BFLOAT, BIASES, [prepare]))
    return cases


def hostile_packed() -> list[Case]:
    """Other dtypes and positions of the same bytes; then values that are large or not finite."""
    cases = []
    layouts = {"affine": (as_words, as_unsigned_words, wider_rows), "mxfp4": (in_blocks, wider_rows)}
    layouts |= {"fp8": (as_float8, wider_rows), "nvfp4": (wider_rows, without_factor, scales_as_float8)}
    for width in SOME_WIDTHS:
        dims, row = some_sizes(width), formats.FORMATS[width[0]]
        for op in PACKED_OPS:
            for prepare in layouts.get(width[0], (wider_even_rows,)):
                for T in (1, 5, 40) if op != "dequantize" else (1,):
                    cases.append(packed_case(op, prepare.__name__, width, dims | {"T": T}, {}, FLOAT, (), [prepare]))
            hostile = [nan_scale, *([] if row.scale in ("e8m0", "e4m3") else [infinite_scale])]
            hostile += [] if row.has_own_scales else [every_code]  # every code would include their factors
            for prepare in hostile:
                for dtype in (FLOAT, BFLOAT):
                    name = prepare.__name__
                    for T in (1, 3) if op != "dequantize" else (1,):
                        at = dims | {"T": T}
                        cases.append(packed_case(op, name, width, at, {}, dtype, (), [prepare], hostile=True))
        for T in (1, 3, 33):
            infinite, bias = setting("gate_up_bias", (slice(None), 0), inf), ("gate_up_bias",)
            at = dims | {"T": T}
            cases.append(packed_case("experts", "infinite_bias", width, at, {}, FLOAT, bias, [infinite], hostile=True))
        for dtype, large in ((FLOAT, 1e5), (HALF, 2e4), (BFLOAT, 1e5)):
            # For many tokens in bfloat16, other weights may be rounded to bfloat16: if a large sum almost cancels,
            # `limit` may then clamp at the other end.
            rounds = dtype == BFLOAT and width[0] != "mxfp4"
            for T in (1, 3) if rounds else (1, 3, 33):
                ten = scaling("x", large)
                # In float32 the value that `limit` clamps would be the rounding error of such sums.
                options = OAI if dtype != FLOAT else {}
                cases.append(packed_case("experts", "large_x", width, dims | {"T": T}, options, dtype, (), [ten]))
                if dtype != HALF:
                    case = ("linear", "large_x", width, dims | {"T": T}, {}, dtype, (), [ten])
                    cases.append(packed_case(*case, full_grid=width not in OLD_WIDTHS))
    for dtype in (FLOAT, HALF, BFLOAT):
        powers = {"H": 384, "N": 37}
        width = ("mxfp4", 4, 32)
        cases.append(packed_case("dequantize", "extreme_powers", width, powers, {}, dtype, (), [extreme_powers]))
    return cases + many_packed_tokens()


def many_packed_tokens() -> list[Case]:
    """So many tokens per expert that the CPU multiplies tiles of unpacked weights, with sizes for the fast set. Those
    are rounded to bfloat16, which shows if terms cancel."""
    cases = []
    for width in WIDTHS:
        H, I = {16: (160, 96), 32: (160, 96), 64: (192, 64), 128: (128, 128)}[width[2]]
        if formats.FORMATS[width[0]].whole_columns > 128:
            H = I = 256
        dims = {"E": 2, "K": 2, "T": 16 if width[2] == 128 else 20, "H": H, "I": I}
        fast, rare = ("cpu",) if width in FEW_WIDTHS else (), width not in OLD_WIDTHS
        prepare = [without_signs, functools.partial(set_bits, format=width[0])]
        given = ("experts", "many_tokens", width, dims, {}, BFLOAT, (), prepare)
        cases.append(packed_case(*given, full_grid=rare, fast_on=fast))
        of_linear = ("linear", "many_tokens", width, {"T": 20, "N": 75, "H": H}, {}, BFLOAT, ("bias",), prepare)
        cases.append(packed_case(*of_linear, full_grid=rare, fast_on=fast))
    # 16 rows of `up` are in two blocks of 128 rows.
    dims, prepare = {"E": 2, "K": 2, "T": 20, "H": 128, "I": 132}, [without_signs, large_last_rows]
    cases.append(
        packed_case("experts", "many_tokens", ("fp8", 8, 128), dims, {}, BFLOAT, (), prepare, fast_on=("cpu",))
    )
    return cases


def large_last_rows(args: Args) -> None:
    args["gate_up_scale"][:, -1] *= 64


def real_packed() -> list[Case]:
    """The sizes of published checkpoints, with fewer experts: gpt-oss's 2880 columns are 90 groups of 32."""
    gpt_oss = {"E": 4, "K": 2, "H": 2880, "I": 2880}
    qwen = {"E": 4, "K": 2, "H": 2048, "I": 768}
    oai = OAI | {"interleaved": True}
    rows = [(("mxfp4", 4, 32), gpt_oss, oai, BIASES, "gpt_oss"), (("affine", 4, 32), gpt_oss, oai, BIASES, "gpt_oss")]
    rows += [(("affine", 4, 64), qwen, {}, (), "qwen3"), (("affine", 8, 64), qwen, {}, (), "qwen3")]
    rows += [(("fp8", 8, 128), qwen, {}, (), "qwen3"), (("affine", 4, 16), {"H": 96, "I": 160}, {}, (), "odd_groups")]
    rows += [(("mxfp4", 4, 32), {"H": 96, "I": 160}, {}, (), "odd_groups")]
    rows += [(("q4_k", 4, 32), qwen, {"down_format": "q6_k"}, (), "qwen3_gguf")]
    return [
        packed_case("experts", name, width, dims | {"T": T}, options, BFLOAT, given, scale_dtype=BFLOAT)
        for width, dims, options, given, name in rows
        for T in (1, 4, 40)
    ]
