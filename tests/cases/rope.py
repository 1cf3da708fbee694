"""Cases of `rope`."""

import functools
from itertools import product
from math import inf, nan

import torch

from cases.case import BFLOAT, FLOAT, HALF, Case, both, setting
from cases.grids import crossed
from cases.oracle import Args


def joined_heads(args: Args) -> None:
    """Queries and keys as views of one projection, which also has values, followed by NaN; angles as the first half of
    transformers' angles of one sequence, for all sequences."""
    (B, T, A, D), J = args["q"].shape, args["k"].shape[2]
    joined = args["q"].new_full((B, T, (A + 2 * J) * D + 3), nan)
    joined[..., : A * D], joined[..., A * D : (A + J) * D] = args["q"].flatten(-2), args["k"].flatten(-2)
    args["q"], args["k"] = joined[..., : A * D].view(B, T, A, D), joined[..., A * D : (A + J) * D].view(B, T, J, D)
    for name in ("cos", "sin"):
        angles = args[name][:1]
        args[name] = torch.cat([angles, angles], -1)[..., : angles.shape[-1]]


def heads_across(args: Args) -> None:
    """Heads, or tokens, are neighbours in memory; one sine is used for all tokens."""
    args["q"], args["k"] = args["q"].mT.contiguous().mT, args["k"].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    args["cos"] = args["cos"].mT.contiguous().mT
    args["sin"] = args["sin"][:, :1].expand(args["sin"].shape)


def norms_of_all_heads(args: Args) -> None:
    """Weights [A, D] and [J, D], different for each head."""
    for heads, name in (("q", "q_norm_weight"), ("k", "k_norm_weight")):
        if name in args:
            count = args[heads].shape[2]
            args[name] = args[name] * torch.linspace(0.5, 1.5, count).to(args[name].dtype).view(count, 1)


def not_finite_heads(args: Args) -> None:
    """In the second head, in a rotated pair and in an element that is not rotated; and an angle."""
    args["q"][:, 0, 1, 0], args["q"][:, 1, 1, -1], args["k"][:, 2, 0, 1] = nan, inf, -inf
    args["cos"][:, 3, 0] = inf


Q_NORM, K_NORM = ("q_norm_weight",), ("k_norm_weight",)
TURNED = {  # optional arguments, what is changed, whether it is hostile
    "plain": ((), None, False),
    "joined": ((), joined_heads, False),
    "normed": (Q_NORM + K_NORM, joined_heads, False),
    "normed_whole": (Q_NORM + K_NORM, both(norms_of_all_heads, joined_heads), False),
    "q_normed": (Q_NORM, None, False),
    "k_normed_whole": (K_NORM, both(norms_of_all_heads, heads_across), False),
    "across": (Q_NORM, heads_across, False),
    "not_finite": (Q_NORM + K_NORM, not_finite_heads, True),
    "zero": (Q_NORM + K_NORM, both(setting("q", slice(1, None), 0.0), setting("k", 0, 0.0)), False),
}
TURNED_HEADS = [(4, 2, 64, 32), (6, 1, 80, 40), (8, 8, 128, 64), (3, 1, 192, 32), (2, 1, 256, 128), (5, 2, 33, 9)]
TURNED_HEADS += [(1, 1, 2, 1), (3, 3, 20, 10), (40, 3, 7, 3), (2, 1, 576, 288)]


@functools.cache
def rope_cases() -> list[Case]:
    """All combinations of norms, strides and kinds of heads; then heads of real models, many tokens, and none."""
    cases = []
    rows = crossed(
        turned=tuple(TURNED), heads=tuple(TURNED_HEADS), dtype=(FLOAT, HALF, BFLOAT), interleaved=(False, True)
    )
    for turned, (A, J, D, R), dtype, interleaved, full_grid in rows:
        given, prepare, hostile = TURNED[turned]
        if turned == "not_finite" and J == A == 1:
            continue  # it has no second head
        dims = {"B": 2, "A": A, "J": J, "T": 5, "D": D, "R": R}
        name = f"{turned}{'-interleaved' * interleaved}-A{A}-J{J}-D{D}-R{R}"
        parameters = FLOAT if D % 3 else None
        options = {"interleaved": interleaved, "eps": 1e-5}
        cases.append(Case("rope", name, dims, given, options, dtype, parameters, prepare, hostile, full_grid=full_grid))
    real = {"qwen3": (32, 4, 128, 64, "normed", False), "olmoe": (16, 16, 128, 64, "normed_whole", False),
            "qwen3_next": (16, 2, 256, 32, "normed", False), "gpt_oss": (64, 8, 64, 32, "joined", False),
            "deepseek_v3": (128, 1, 64, 32, "joined", True)}  # fmt: skip
    for (name, (A, J, D, R, turned, interleaved)), dtype in product(real.items(), (FLOAT, BFLOAT)):
        given, prepare, _ = TURNED[turned]
        for B, T in ((1, 1), (3, 1), (1, 70)):
            dims = {"B": B, "A": A, "J": J, "T": T, "D": D, "R": R}
            cases.append(Case("rope", f"{name}-B{B}-T{T}", dims, given, {"interleaved": interleaved}, dtype, None,
                              prepare))  # fmt: skip
    for B, T in ((0, 3), (2, 0), (1, 33000), (300, 2)):
        dims = {"B": B, "A": 2, "J": 1, "T": T, "D": 6, "R": 2}
        cases += [Case("rope", f"B{B}-T{T}", dims, given, {}, BFLOAT, FLOAT) for given in ((), Q_NORM + K_NORM)]
    return list({str(case): case for case in cases}.values())
