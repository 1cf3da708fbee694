"""Cases of `experts` and `linear` with dense weights: real models, other projects, hostile inputs, grids."""

from collections.abc import Callable
from math import inf, nan

import torch

from cases.case import BFLOAT, FLOAT, HALF, OPTIONAL, Case, scaling, setting
from cases.grids import E_GRID, H_GRID, K_GRID, PAIRS, T_GRID, crossed, grid_case, pairwise, resolve_top_k
from cases.oracle import Args
from torch_moe_metal import reference
from torch_moe_metal.commands.bench.model_sizes import MODELS, Model

OAI = {"activation": "swiglu_oai", "limit": 7.0}
BIASES = ("gate_up_bias", "down_bias")
SHARED_GATED = ("shared", "shared_gate")


def given_to_experts(model: Model) -> tuple[str, ...]:
    tensors = (*model.tensors, "residual", *(("shared",) if model.S else ()))
    return tuple(name for name in OPTIONAL["experts"] if name in tensors)


# E, K, H, I, optional arguments, options: the experts of real models, with smaller E if a layer would not fit a test.
FEWER = {"qwen3-30b-a3b": 128, "qwen3-next-80b-a3b": 128, "mixtral-8x7b": 4, "gpt-oss-20b": 8, "gemma4-26b-a4b": 64}
FEWER |= {"deepseek-v3": 8}
REAL_EXPERTS = {
    name: (E, model.K, model.H, model.I, given_to_experts(model), model.experts)
    for name, E, model in ((name, E, MODELS[name]) for name, E in FEWER.items())
} | {
    "qwen2_moe": (60, 4, 2048, 1408, SHARED_GATED, {}),
    "aria": (8, 6, 2560, 1664, (), {"transposed": True}),
    "glm5_next": (8, 8, 4096, 2048, ("shared",), {"limit": 10.0}),
}


def real_experts() -> list[Case]:
    cases = []
    for name, (E, K, H, I, given, options) in REAL_EXPERTS.items():
        for T in (1, 4, 17, 512):
            dims = {"T": T, "E": E, "K": K, "H": H, "I": I}
            cases.append(Case("experts", f"{name}-T{T}", dims, given, options, BFLOAT, FLOAT))
            if T <= 17:  # the same block with a sixteenth of its size
                dims = dims | {"H": H // 16, "I": I // 16}
                cases.append(Case("experts", f"{name}_small-T{T}", dims, given, options, FLOAT))
    return cases


def other_projects() -> list[Case]:
    """Shapes from the kernel tests of llama.cpp, MLX, vLLM, PyTorch and mistral.rs."""
    experts = {  # T, E, K, H, I
        "llama_cpp": [(n, E, K, 256, 256) for E in (4, 8) for K in (1, 2, 4) for n in (1, 4, 5, 17, 32, 129)]
        + [(16, 4, 2, 48, 32), (1024, 16, 16, 16, 32), (8192, 2, 2, 64, 32), (200, 16, 4, 64, 50)]
        + [(32, 32, 2, 2880, 2880), (16, 1, 1, 1, 8), (1, 128, 8, 2048, 768), (4, 128, 8, 2048, 768)]
        + [(9, 4, 2, k, 16) for k in (1, 2, 5, 31, 33, 65, 127, 255, 383, 511)],
        "mlx": [(M, 8, 1, 1024, 512) for M in (2, 4, 5, 11)] + [(100, 8, 1, 100, 50)]
        + [(L, 4, 2, D, D) for L in (32, 39, 64, 128, 133) for D in (512, 544, 555)],
        "vllm": [(m, E, K, 128, n) for m, n in ((1, 128), (1, 2048), (33, 2048)) for E in (8, 64) for K in (2, 6)]
        + [(4099, 8, 2, 511, 128)] + [(B, 8, 2, n, n) for B in (1, 64, 256) for n in (128, 720)],
        "pytorch": [(64, 4, 1, 64, 32), (48, 4, 1, 64, 16)],
        "mistral_rs": [(17, 4, 2, 64, 64), (64, 4, 2, 64, 96), (64, 4, 2, 128, 64), (128, 8, 2, 704, 352)],
    }  # fmt: skip
    return [
        Case("experts", f"{project}-T{T}-E{E}-K{K}-H{H}-I{I}", {"T": T, "E": E, "K": K, "H": H, "I": I}, dtype=dtype)
        for project, rows in experts.items()
        for T, E, K, H, I in rows
        for dtype in (FLOAT, BFLOAT)
    ]


def repeated_ids(args: Args) -> None:
    args["ids"][:] = args["ids"][:, :1]


def ids_out_of_range(args: Args) -> None:
    bad = torch.tensor([-1, -(2**31), args["gate_up"].shape[0], 2**31 - 1], dtype=torch.int32)
    args["ids"][:, 1] = bad[torch.arange(len(args["ids"])) % 4]
    args["weights"][:, 1] = nan


def all_ids_out_of_range(args: Args) -> None:
    args["ids"].fill_(args["gate_up"].shape[0])
    args["weights"].fill_(nan)


def far_ids_out_of_range(args: Args) -> None:
    """Ids that would be valid if they were truncated to 32 bits."""
    args["ids"] = args["ids"].long()
    args["ids"][:, 0] += 2**32
    args["ids"][:, 1] -= 2**33


def long_ids(args: Args) -> None:
    args["ids"] = args["ids"].long()


def all_to_one_expert(args: Args) -> None:
    args["ids"][:, 0] = args["gate_up"].shape[0] - 1


def seventeen_to_fifteen(args: Args) -> None:
    args["ids"][:17], args["ids"][17:] = 1, 4


def nan_in_unused_experts(args: Args) -> None:
    args["ids"] %= 3
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        args[name][3:] = nan


def nan_weight_of_a_used_expert(args: Args) -> None:
    args["weights"][2, 0] = nan


def large_between(args: Args) -> None:
    """gate * up exceeds float16's range, the result does not."""
    args["x"] *= 300.0
    args["down"] *= 1e-4


def strides_from(name: str, dim: int) -> Callable[[Args], None]:
    """The weights as a slice of a wider tensor: rows that are not contiguous."""

    def prepare(args: Args) -> None:
        shape = list(args[name].shape)
        shape[dim] += 5
        wider = args[name].new_full(shape, nan)
        wider.narrow(dim, 2, args[name].shape[dim]).copy_(args[name])
        args[name] = wider.narrow(dim, 2, args[name].shape[dim])

    return prepare


def layouts_and_hostile_experts() -> list[Case]:
    """Layouts and hostile inputs of `experts`, for one token (decode) and many (prefill)."""
    finite = {
        "repeated_ids": repeated_ids,
        "ids_out_of_range": ids_out_of_range,
        "all_ids_out_of_range": all_ids_out_of_range,
        "far_ids_out_of_range": far_ids_out_of_range,
        "long_ids": long_ids,
        "all_to_one_expert": all_to_one_expert,
        "nan_in_unused_experts": nan_in_unused_experts,
        "gate_up_of_wider_rows": strides_from("gate_up", 2),
        "down_of_wider_experts": strides_from("down", 1),
    }
    hostile = {
        "nan_weight_of_a_used_expert": nan_weight_of_a_used_expert,
        "nan_in_one_token": setting("x", (1, 5), nan),
        "inf_in_one_token": setting("x", (1, 5), inf),
    }
    dims = {"E": 6, "K": 2, "H": 72, "I": 40}
    dtypes = (FLOAT, HALF, BFLOAT)
    cases = [
        Case("experts", f"{name}-T{T}", dims | {"T": T}, BIASES, {}, dtype, FLOAT, (finite | hostile)[name],
             name in hostile, full_grid=full_grid)
        for name, T, dtype, full_grid in crossed(values=(*finite, *hostile), T=(3, 33, 130), dtype=dtypes)
    ]  # fmt: skip
    few_or_many = ("empty_experts", "k_over_e", "one_expert", "large_x", "large_between", "overflow")
    for name, T, dtype, full_grid in crossed(name=few_or_many, T=(1, 3, 33, 130), dtype=dtypes):
        large = scaling("x", {FLOAT: 1e5, HALF: 2e4, BFLOAT: 1e5}[dtype])
        sizes = {"empty_experts": {"E": 40}, "k_over_e": {"K": 9}, "one_expert": {"E": 1, "K": 1}}.get(name, {})
        prepare = {"large_x": large, "large_between": large_between, "overflow": large}.get(name)
        options = OAI | {"interleaved": True} if name == "large_x" else {}
        cases.append(Case("experts", f"{name}-T{T}", dims | {"T": T} | sizes, (), options, dtype, prepare=prepare,
                          hostile=name == "overflow", full_grid=full_grid))  # fmt: skip
    for dtype in dtypes:
        split = dims | {"T": 32, "K": 1}
        cases.append(Case("experts", "seventeen_to_fifteen", split, (), {}, dtype, prepare=seventeen_to_fifteen))
        # For experts with many tokens the CPU transposes weights, 256 columns and 256 tokens at a time.
        panels = {"T": 67, "E": 2, "K": 1, "H": 261, "I": 35}, {"T": 515, "E": 1, "K": 1, "H": 20, "I": 17}
        for sizes in panels:
            for interleaved in (False, True):
                name = f"{'interleaved-' * interleaved}many_tokens-T{sizes['T']}"
                cases.append(Case("experts", name, sizes, BIASES, {"interleaved": interleaved}, dtype))
    combined = ((), BIASES, ("shared",), SHARED_GATED, ("residual",), OPTIONAL["experts"])
    either = (False, True)
    rows = crossed(given=combined, dtype=dtypes, interleaved=either, transposed=either, T=(1, 19))
    for given, dtype, interleaved, transposed, T, full_grid in rows:
        options = {"interleaved": interleaved, "transposed": transposed}
        layout = "interleaved-" * interleaved + "transposed-" * transposed
        name = f"{layout}{'+'.join(given) or 'bare'}-T{T}"
        sizes = dims | {"T": T, "H": 48}
        cases.append(Case("experts", name, sizes, given, options, dtype, FLOAT, full_grid=full_grid))
    return cases


def transposed_weight(args: Args) -> None:
    args["weight"] = args["weight"].t().contiguous().t()


def many_expert_tokens() -> list[Case]:
    return [
        # The CPU prepares the tokens of some experts at a time: 4 MB for each thread.
        Case(
            "experts",
            "many_tokens",
            {"T": 1100, "E": 6, "K": 4, "H": 1024, "I": 96},
            BIASES,
            {},
            BFLOAT,
            fast_on=("cpu",),
        ),
        # Tiles of the CPU: groups of 16 tokens, of which the last has up to 8 or more.
        *(
            Case("linear", f"tiles-{layout}T{T}", {"T": T, "N": 83, "H": 100}, ("bias",), {}, BFLOAT, prepare=prepare)
            for T in (8, 75)
            for layout, prepare in (("", None), ("transposed-", transposed_weight))
        ),
        *(
            Case("experts", f"tiles-T{T}", {"T": T, "E": 1, "K": 1, "H": 100, "I": 70}, BIASES, {}, BFLOAT)
            for T in (8, 16, 24, 75)
        ),
        *(
            Case(
                "experts",
                "tiles-transposed" + "-interleaved" * interleaved,
                {"T": 130, "E": 4, "K": 2, "H": 100, "I": 70},
                BIASES,
                {"transposed": True, "interleaved": interleaved},
                BFLOAT,
                fast_on=("cpu",),
            )
            for interleaved in (False, True)
        ),
        Case("experts", "T32769", {"T": 32769, "E": 5, "K": 2, "H": 20, "I": 12}, BIASES, {}, BFLOAT),
        Case("experts", "T40001", {"T": 40001, "E": 8, "K": 1, "H": 64, "I": 64}, (), {}, FLOAT),
    ]


def experts_grid() -> list[Case]:
    def fits(E, K, T, H, I, **_):
        k = resolve_top_k(K, E)
        return E * H * I <= 2**24 and T * k * H * I <= 2**32 and T * k * (H + 2 * I) <= 2**25

    given = ((), BIASES, ("shared",), SHARED_GATED, ("residual",), OPTIONAL["experts"])
    rows = pairwise(
        fits, E=E_GRID, K=K_GRID, T=T_GRID, H=H_GRID, I=H_GRID, dtypes=PAIRS, given=given, interleaved=(False, True),
        transposed=(False, True), activation=tuple(reference.ACTIVATIONS), limit=(None, 7.0),
    )  # fmt: skip
    options = ("activation", "limit", "interleaved", "transposed")
    return [
        grid_case(
            "experts",
            row | {"K": resolve_top_k(row["K"], row["E"])},
            row["given"],
            {name: row[name] for name in options},
        )
        for row in rows
    ]


def experts_cases() -> list[Case]:
    cases = real_experts() + other_projects() + layouts_and_hostile_experts()
    return cases + many_expert_tokens() + experts_grid()
