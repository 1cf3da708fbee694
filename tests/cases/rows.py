"""Cases of `glu`, of weighted sums and of norms, which compute each row by itself."""

from collections.abc import Callable
from itertools import combinations
from math import inf, nan

import torch

from cases.case import BFLOAT, FLOAT, HALF, OPTIONAL, Case, scaling, setting
from cases.experts import SHARED_GATED
from cases.grids import H_GRID, K_GRID, PAIRS, T_GRID, crossed, grid_case, pairwise
from cases.oracle import Args
from torch_moe_metal import reference
from torch_moe_metal.arguments import ARGUMENTS

SUMS = tuple(op for op in ARGUMENTS if op.startswith("weighted_sum"))
NORMS = ("norm", "norm_add", "residual_norm")


def halves(args: Args) -> None:
    packed = torch.cat([args["gate"], args["up"]], -1)
    args["gate"], args["up"] = packed.chunk(2, -1)


def interleaved_views(args: Args) -> None:
    packed = torch.stack([args["gate"], args["up"]], -1).flatten(-2)
    args["gate"], args["up"] = packed[..., ::2], packed[..., 1::2]


def hostile_gate_and_up(args: Args) -> None:
    values = torch.tensor([nan, inf, -inf, 0.0, -0.0, 1e4, -1e4, 88.0, -60.0, 7.0])
    # sigmoid or square underflow only in float32; the ups next to them are finite
    vanishing = torch.tensor([-89.0, -104.0, 1e-30])
    pairs = torch.cat([torch.cartesian_prod(values, values), torch.cartesian_prod(vanishing, values[3:])])
    args["gate"][: len(pairs), 0], args["up"][: len(pairs), 0] = pairs.to(args["gate"].dtype).unbind(-1)


GLU_LAYOUTS = {"apart": None, "halves": halves, "interleaved": interleaved_views}


def glu_cases() -> list[Case]:
    cases = []
    rows = crossed(
        activation=tuple(reference.ACTIVATIONS), layout=(*GLU_LAYOUTS, "hostile"), limit=(None, 7.0, 0.5),
        dtype=(FLOAT, HALF, BFLOAT),
    )  # fmt: skip
    for activation, layout, limit, dtype, full_grid in rows:
        # Hostile values are compared in float64: torch's own gelu(inf) is NaN in float32 if oneDNN computes it.
        dims = {"T": 144, "I": 3} if layout == "hostile" else {"T": 19, "I": 45}
        prepare = hostile_gate_and_up if layout == "hostile" else GLU_LAYOUTS[layout]
        options = {"activation": activation, "limit": limit, "alpha": 1.3}
        name = f"{activation}-limit{limit}-{layout}"
        cases.append(Case("glu", name, dims, (), options, dtype, prepare=prepare, full_grid=full_grid))
    return cases


def columns_of_a_matrix(more: int) -> Callable[[Args], None]:
    """The input becomes a part of rows that have this many more columns."""

    def prepare(args: Args) -> None:
        wide = args["input"].new_full((*args["input"].shape[:-1], args["input"].shape[-1] + more), nan)
        wide[..., :-more] = args["input"]
        args["input"] = wide[..., :-more]

    return prepare


def sum_and_norm_cases() -> list[Case]:
    """Rows that are all zero, huge, tiny or not finite, with all combinations of optional arguments."""
    cases = []
    dims = {"T": 5, "K": 3, "H": 72, "U": 1}
    for op in SUMS + NORMS:
        first = "input" if op in NORMS else "slots"
        values = {
            "zero_row": (setting(first, 1, 0.0), False),
            "nan_in_one_token": (setting(first, (2, ..., 5), nan), True),
            "inf_in_one_token": (setting(first, (2, ..., 5), inf), True),
            "huge": (scaling(first, 2e4), False),
            "tiny": (scaling(first, 1e-3), False),
        }
        for name, (prepare, hostile) in values.items():
            for dtype in (FLOAT, HALF, BFLOAT):
                # Results beyond float16's range are tested by the cases that are not finite.
                options = {} if op in ("weighted_sum", "weighted_sum_residual_") else {"eps": 1e-5}
                if not (name == "huge" and dtype == HALF):
                    cases.append(Case(op, name, dims, (), options, dtype, FLOAT, prepare, hostile))
        many = dims | {"T": 32769, "K": 2, "H": 16}
        cases.append(Case(op, "T32769", many, OPTIONAL[op], {}, BFLOAT))
        # Rows that threadgroup memory cannot hold: 32 KB are 8192 floats.
        for H in (8192, 16384, 16385):
            cases.append(Case(op, f"H{H}", dims | {"T": 1, "K": 2, "H": H}, OPTIONAL[op], {}, FLOAT))
    for more in (3, 8):
        prepare = columns_of_a_matrix(more)
        cases.append(Case("norm", f"{more}_more_columns", dims, ("weight",), {}, BFLOAT, FLOAT, prepare))
    for size in range(4):
        for given in combinations(OPTIONAL["weighted_sum"], size):
            if "shared_gate" not in given or "shared" in given:
                cases.append(Case("weighted_sum", "+".join(given) or "bare", dims, given, {}, HALF, FLOAT))
    return cases


def plain_grids() -> list[Case]:
    def fits(T, H=1, K=1, **_):
        return T * H * K <= 2**25

    rows = pairwise(lambda **_: True, T=T_GRID, I=H_GRID, dtypes=PAIRS[:3], activation=tuple(reference.ACTIVATIONS),
                    limit=(None, 7.0), layout=tuple(GLU_LAYOUTS.values()))  # fmt: skip
    cases = [
        grid_case("glu", row, (), {name: row[name] for name in ("activation", "limit")}, row["layout"]) for row in rows
    ]
    for op in SUMS:
        eps = (None,) if op in ("weighted_sum", "weighted_sum_residual_") else (1e-6, 1e-5, 0.01)
        given = (
            ((), ("shared",), SHARED_GATED, ("residual",), OPTIONAL["weighted_sum"]) if op == "weighted_sum" else ((),)
        )
        rows = pairwise(fits, T=T_GRID, K=K_GRID[:-1], H=H_GRID, dtypes=PAIRS, given=given, eps=eps)
        cases += [grid_case(op, row, row["given"], {} if row["eps"] is None else {"eps": row["eps"]}) for row in rows]
    for op in NORMS:
        rows = pairwise(fits, T=T_GRID, H=H_GRID, dtypes=PAIRS, scalar=("none", "one", "each"), eps=(1e-6, 1e-5, 0.01))
        for row in rows:
            if op == "norm":
                given = ("weight",) if row["scalar"] == "one" else ()
                cases.append(grid_case(op, row, given, {"eps": row["eps"]}))
                continue
            sizes = {"U": row["H"] if row["scalar"] == "each" else 1}
            given = () if row["scalar"] == "none" else ("scalar",)
            cases.append(grid_case(op, row | sizes, given, {"eps": row["eps"]}))
    return cases


def row_cases() -> list[Case]:
    reduce = [(2, 2, 8), (4, 8, 64), (4096, 8, 2816)]
    cases = [Case("weighted_sum", f"mistral_rs-T{T}", {"T": T, "K": K, "H": H}, dtype=BFLOAT) for T, K, H in reduce]
    cases.append(Case("glu", "T32769", {"T": 32769, "I": 17}, (), {}, BFLOAT))
    return cases + glu_cases() + sum_and_norm_cases() + plain_grids()
