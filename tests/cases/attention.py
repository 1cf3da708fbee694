"""Cases of `attention`."""

from itertools import product
from math import inf, nan

import torch

from cases.case import BFLOAT, FLOAT, HALF, Case
from cases.grids import crossed
from cases.oracle import Args


def as_a_cache(args: Args) -> None:
    """Keys and values as views of longer memory, and queries as a view of a joined projection."""
    for name in ("k", "v"):
        B, J, S, size = args[name].shape
        longer = args[name].new_full((B, J, S + 37, size), nan)
        longer[:, :, :S] = args[name]
        args[name] = longer[:, :, :S]
    B, A, T, D = args["q"].shape
    joined = args["q"].new_full((B, T, A + 2, D), nan)
    joined[:, :, :A] = args["q"].transpose(1, 2)
    args["q"] = joined[:, :, :A].transpose(1, 2)


def across(args: Args) -> None:
    """The columns of keys and values are not contiguous, and one value is used for all sequences."""
    args["k"] = args["k"].mT.contiguous().mT
    args["v"] = torch.stack([args["v"], args["v"]], -1)[:1, ..., 0].expand(args["v"].shape)


def bool_mask(args: Args) -> None:
    """One mask for all heads: padding at the start, and single keys."""
    args["mask"] = args["mask"][:, :1] > -1
    args["mask"][0, ..., : args["mask"].shape[-1] // 3] = False


def bars_whole_queries(args: Args) -> None:
    """Some queries see no key, and some of these keys are NaN. A mask of -inf hides a key like False."""
    args["mask"] = args["mask"][:1].where(args["mask"][:1] < 1, -inf)
    args["mask"][..., 1::3, :] = -inf
    args["mask"][..., -2:] = -inf
    args["k"][..., -1, :], args["v"][..., -2, :] = nan, inf


def bars_by_head(args: Args) -> None:
    """Keys that are visible to some heads only, with NaN that must reach only those."""
    args["mask"] = args["mask"] > 0
    args["v"][..., 7, 0] = nan


def bars_one_key(args: Args) -> None:
    """Hidden from the last query of the last head. All other keys are visible, so blocks of keys need no mask."""
    args["mask"] = torch.ones_like(args["mask"], dtype=torch.bool)
    args["mask"][-1, -1, -1, -3] = False


def not_finite_keys(args: Args) -> None:
    args["k"][:, 0, 3, 0], args["v"][:, -1, 4, -1] = nan, -inf


def infinite_scores(args: Args) -> None:
    """-inf, which hides a key, and inf, which gives NaN."""
    args["q"].abs_()
    args["k"][..., 2, :], args["v"][..., 2, :] = -inf, nan
    args["k"][:1, ..., 5, :] = inf


def large_scores(args: Args) -> None:
    args["q"] *= 60.0


SEEING = {  # optional arguments, options, what is changed, whether it is hostile
    "all": ((), {}, None, False),
    "causal": (("sinks",), {"causal": True}, as_a_cache, False),
    "window": ((), {"causal": True, "window": 33, "scale": -0.1}, as_a_cache, False),
    "softcap": (("sinks",), {"softcap": 5.0, "scale": 0.5}, across, False),
    "float_mask": (("mask",), {"softcap": 0.3}, across, False),
    "bool_mask": (("mask", "sinks"), {"causal": True}, bool_mask, False),
    "barred": (("mask", "sinks"), {}, bars_whole_queries, False),
    "one_key_barred": (("mask",), {}, bars_one_key, False),
    "barred_by_head": (("mask",), {}, bars_by_head, True),
    "not_finite": (("sinks",), {"causal": True, "window": 20}, not_finite_keys, True),
    "infinite_scores": (("sinks",), {}, infinite_scores, True),
    "large_scores": ((), {}, large_scores, True),
}
HEADS = [(4, 4, 64, 64), (8, 1, 80, 80), (6, 2, 96, 40), (16, 2, 128, 128), (5, 5, 1, 3), (17, 1, 33, 65)]
HEADS += [(3, 1, 192, 128), (2, 1, 256, 256), (4, 2, 112, 112), (16, 1, 576, 512)]


def attention_cases() -> list[Case]:
    """All combinations of masks and kinds of heads: for decoding, for a prompt, and for more queries than keys."""
    cases = []
    rows = crossed(seeing=tuple(SEEING), heads=tuple(HEADS), dtype=(FLOAT, HALF, BFLOAT), T=(1, 5, 44, 90))
    for seeing, (A, J, D, V), dtype, T, full_grid in rows:
        given, options, prepare, hostile = SEEING[seeing]
        if seeing == "large_scores" and dtype == FLOAT:
            continue  # in any order of summation its scores have larger errors than its tolerance
        dims = {"B": 2, "A": A, "J": J, "T": T, "S": 70, "D": D, "V": V}
        cases.append(Case("attention", f"{seeing}-A{A}-J{J}-D{D}-V{V}-T{T}", dims, given, options, dtype,
                          None if T == 5 else FLOAT, prepare, hostile, full_grid=full_grid))  # fmt: skip
    real = {"qwen3": (32, 4, 128), "gpt_oss": (64, 8, 64)}
    for (name, (A, J, D)), dtype in product(real.items(), (FLOAT, BFLOAT)):
        given, window = (("sinks",), 128) if name == "gpt_oss" else ((), 0)
        for B, T, S in ((1, 1, 1500), (1, 1, 4096), (3, 4, 700), (1, 300, 300), (1, 130, 1000)):
            dims = {"B": B, "A": A, "J": J, "T": T, "S": S, "D": D, "V": D}
            options = {"causal": True, "window": window * (T > 1)}
            cases.append(Case("attention", f"{name}-B{B}-T{T}-S{S}", dims, given, options, dtype, None, as_a_cache))
    for B, T, S in (
        (1, 1, 4500),
        (2, 3, 1200),
        (1, 2, 511),
        (1, 1, 513),
        (1, 3, 0),
        (0, 3, 9),
        (2, 0, 9),
        (1, 200, 64),
    ):
        dims = {"B": B, "A": 3, "J": 1, "T": T, "S": S, "D": 8, "V": 5}
        for dtype, mask in ((FLOAT, "bool_mask"), (BFLOAT, "float_mask")):
            given, options, prepare, _ = SEEING[mask]
            prepare = prepare if B * S else None
            cases.append(Case("attention", f"parts-B{B}-T{T}-S{S}", dims, given, options, dtype, FLOAT, prepare))
    return cases
