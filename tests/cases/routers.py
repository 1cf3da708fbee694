"""Cases of `route` and `gate`: the routers of real models, hostile logits, grids."""

from itertools import combinations
from math import inf, nan

from cases.case import BFLOAT, FLOAT, HALF, OPTIONAL, Case, scaling, setting
from cases.grids import E_GRID, H_GRID, K_GRID, PAIRS, T_GRID, crossed, grid_case, pairwise, resolve_top_k
from cases.oracle import Args
from torch_moe_metal import reference
from torch_moe_metal.commands.bench.model_sizes import MODELS

GROUPS = {"n_group": 8, "topk_group": 4}
SIGMOID = {"scoring": "sigmoid"}
BIASED = ("select_bias",)

# E, K, H, optional arguments, options: the routers of real models, those of commands/bench/model_sizes.py and others.
REAL_ROUTERS = {
    name: (model.E, model.K, model.H, tuple(n for n in model.tensors if n in OPTIONAL["gate"]), model.routing)
    for name, model in MODELS.items()
} | {
    "qwen2_moe": (60, 4, 2048, (), {"renormalize": "none"}),
    "flex_olmo": (7, 5, 4096, (), {"renormalize": "none"}),
    "mellum": (64, 8, 2304, (), {}),
    "jamba": (16, 2, 4096, (), {"renormalize": "none"}),
    "granitemoe": (40, 8, 1536, (), {}),
    "gemma4_seed": (128, 8, 2816, ("norm_weight", "per_expert_scale"), {"renormalize": "after_scale"}),
    "deepseek_v2": (160, 6, 5120, (), {"renormalize": "none", "n_group": 8, "topk_group": 3, "group_score": "max"}
                    | {"scaling_factor": 16.0}),
    "deepseek_v4": (256, 6, 4096, BIASED, {"scoring": "sqrt_softplus", "scaling_factor": 1.5}),
    "kimi_linear": (256, 8, 2304, BIASED, SIGMOID | {"scaling_factor": 2.446}),
    "bailing_hybrid": (512, 8, 2560, BIASED, SIGMOID | GROUPS | {"scaling_factor": 2.5}),
    "axk1": (192, 8, 7168, BIASED, SIGMOID | GROUPS | {"scaling_factor": 2.5}),
    "laguna": (256, 8, 3072, BIASED, SIGMOID | {"softcap": 30.0, "scaling_factor": 2.5}),
    "afmoe": (64, 6, 2048, BIASED, SIGMOID | {"scaling_factor": 2.8}),
    "inkling2": (384, 8, 2048, BIASED, SIGMOID | {"scaling_factor": 8.0}),
    "flint": (256, 6, 2048, (), SIGMOID),
    "kolibri1": (384, 6, 2048, ("router_bias",), SIGMOID),
    "mistral4": (128, 4, 4096, (), {"n_group": 4, "topk_group": 2, "scaling_factor": 1.2}),
    "ernie4_5_moe": (64, 6, 2560, BIASED, {}),
    "longcat_flash": (768, 12, 6144, BIASED, {"renormalize": "none", "scaling_factor": 6.0}),
    "llama4": (16, 1, 5120, (), SIGMOID | {"renormalize": "none"}),
}  # fmt: skip


def real_routers() -> list[Case]:
    cases = []
    for turn, (name, (E, K, H, given, options)) in enumerate(REAL_ROUTERS.items()):
        options = options | {"top_k": K}
        logits_given = tuple(name for name in given if name in OPTIONAL["route"])
        for i, dtype in enumerate((FLOAT, HALF, BFLOAT)):
            cases.append(Case("route", f"{name}-T33", {"T": 33, "E": E, "K": K}, logits_given, options, dtype, FLOAT,
                              full_grid=turn % 3 != i))  # fmt: skip
        for T, dtype, parameters in ((1, BFLOAT, None), (5, BFLOAT, FLOAT), (64, HALF, None), (512, BFLOAT, None)):
            dims = {"T": T, "E": E, "K": K, "H": H}
            cases.append(Case("gate", f"{name}-T{T}", dims, given, options, dtype, parameters))
    return cases


def topk_moe() -> list[Case]:
    """Shapes from the kernel tests of llama.cpp and vLLM."""
    sizes = [(22, 8, 4), (22, 31, 8), (22, 32, 8), (22, 40, 8), (22, 71, 8), (128, 1, 1), (128, 128, 8)]
    sizes += [
        (128, 129, 8),
        (4, 160, 160),
        (22, 256, 6),
        (22, 288, 8),
        (33, 6, 3),
        (56, 16, 4),
    ]  # the last two are vLLM's
    cases = []
    rows = crossed(
        size=tuple(sizes), scoring=tuple(reference.SCORING), renormalize=("none", "before_scale"), given=((), BIASED)
    )
    for (T, E, K), scoring, renormalize, given, full_grid in rows:
        options = {"top_k": K, "scoring": scoring, "renormalize": renormalize, "scaling_factor": 2.0}
        name = f"topk_moe-{scoring}-{renormalize}{'-biased' * bool(given)}-T{T}-E{E}"
        cases.append(Case("route", name, {"T": T, "E": E, "K": K}, given, options, full_grid=full_grid))
    return cases


def few_levels(args: Args) -> None:
    args["logits"].round_()


def signed_zeros(args: Args) -> None:
    args["logits"].zero_()
    args["logits"][..., ::2] = -0.0


def less_finite_than_k(args: Args) -> None:
    args["logits"][:, 2:] = -inf
    args["logits"][:, 7] = nan


HOSTILE_LOGITS = {
    "all_equal": setting("logits", ..., 0.25),
    "few_levels": few_levels,
    "signed_zeros": signed_zeros,
    "one_inf": setting("logits", (slice(None), 3), inf),
    "two_infs": setting("logits", (slice(None), slice(5, 7)), inf),
    "one_minus_inf": setting("logits", (slice(None), 0), -inf),
    "all_inf": setting("logits", ..., inf),
    "all_minus_inf": setting("logits", ..., -inf),
    "one_nan": setting("logits", (slice(None), 4), nan),
    "last_nan": setting("logits", (slice(None), -1), nan),
    "nan_in_one_token": setting("logits", (2, slice(3, 9)), nan),
    "all_nan": setting("logits", ..., nan),
    "less_finite_than_k": less_finite_than_k,
    "gap_over_88": scaling("logits", 200.0),
    "gap_in_one_expert": setting("logits", (slice(None), 14), 95.0),
    "huge": scaling("logits", 1e4),
}


def hostile_routes() -> list[Case]:
    cases = []
    variants = {"": ((), {}), "-biased": (BIASED, {}), "-biased-groups": (BIASED, {"n_group": 4, "topk_group": 2})}
    rows = crossed(values=tuple(HOSTILE_LOGITS), scoring=tuple(reference.SCORING), variant=tuple(variants), E=(60, 128))
    for name, scoring, variant, E, full_grid in rows:
        given, extra = variants[variant]
        dims, options = {"T": 5, "E": E, "K": 6}, {"top_k": 6, "scoring": scoring} | extra
        cases.append(Case("route", f"{name}-{scoring}-E{E}{variant}", dims, given, options,
                          prepare=HOSTILE_LOGITS[name], hostile=True, full_grid=full_grid))  # fmt: skip
    one = {"T": 3, "E": 1, "K": 1}
    every = {"T": 3, "E": 1024, "K": 1024}
    for scoring in reference.SCORING:
        cases.append(Case("route", f"one_expert-{scoring}", one, (), {"top_k": 1, "scoring": scoring}))
        cases.append(Case("route", f"k_is_e_1024-{scoring}", every, BIASED, {"top_k": 1024, "scoring": scoring}))
        cases.append(
            Case("route", f"k_is_e_1024-all_nan-{scoring}", every, (), {"top_k": 1024, "scoring": scoring},
                 prepare=setting("logits", ..., nan), hostile=True)
        )  # fmt: skip
    return cases


def hostile_gates() -> list[Case]:
    dims, given = {"T": 5, "E": 60, "K": 4, "H": 96}, ("norm_weight", "per_expert_scale")
    hostile = {
        "nan_in_one_token": setting("hidden", (1, 7), nan),
        "inf_in_one_token": setting("hidden", (3, 95), inf),
        "nan_in_one_expert": setting("router_weight", (9, 0), nan),
        "all_zero": setting("hidden", ..., 0.0),
        "huge": scaling("hidden", 1e4),
        "tiny": scaling("hidden", 1e-4),
    }
    return [
        Case("gate", f"{name}-{'normed' if normed else 'plain'}", dims, normed, {"top_k": 4}, dtype, prepare=prepare,
             hostile=name != "tiny" or dtype != FLOAT)
        for name, prepare in hostile.items() for normed in ((), given) for dtype in (FLOAT, BFLOAT)
        # Differences of huge logits exceed the precision of float32 sums; with a norm the logits are ordinary.
        if name not in ("huge", "tiny") or normed
    ]  # fmt: skip


def many_routed_tokens() -> list[Case]:
    T = 32769
    return [
        Case("route", "T32769", {"T": T, "E": 33, "K": 3}, BIASED, SIGMOID | {"top_k": 3}, BFLOAT),
        Case("gate", "T32769", {"T": T, "E": 33, "K": 3, "H": 20}, (), {"top_k": 3}, BFLOAT),
        # More hidden size and experts together than threadgroup memory can hold.
        *(
            Case("gate", f"H{H}", {"T": 1, "E": 4, "K": 2, "H": H}, OPTIONAL["gate"], {"top_k": 2}, FLOAT)
            for H in (8192, 16385)
        ),
        # The gate uses tiles from a product of tokens and experts on.
        Case("gate", "tiles", {"T": 129, "E": 961, "K": 5, "H": 4}, OPTIONAL["gate"], {"top_k": 5}, BFLOAT),
        Case("gate", "tiles-odd", {"T": 129, "E": 961, "K": 5, "H": 67}, OPTIONAL["gate"], {"top_k": 5}, HALF),
        # The CPU's blocks depend on tokens alone; they use bfloat16 if the processor has AMX and there is no norm.
        Case("gate", "blocks", {"T": 261, "E": 20, "K": 5, "H": 70}, (), {"top_k": 5}, FLOAT),
        Case("gate", "blocks", {"T": 261, "E": 20, "K": 5, "H": 70}, (), {"top_k": 5}, BFLOAT),
        Case("gate", "many_tokens", {"T": 257, "E": 70, "K": 3, "H": 2112}, (), {"top_k": 3}, BFLOAT, fast_on=("cpu",)),
        Case("gate", "blocks-normed", {"T": 261, "E": 20, "K": 5, "H": 270}, OPTIONAL["gate"], {"top_k": 5}, FLOAT),
    ]


ROUTING_GRID = {
    "scoring": tuple(reference.SCORING),
    "renormalize": ("none", "before_scale", "after_scale"),
    "groups": (None, (2, 1, "top2_sum"), (4, 2, "max"), (8, 4, "top2_sum"), (8, 3, "max")),
    "scaling_factor": (1.0, 2.5),
    "softcap": (0.0, 15.0),
    "sum_eps": (1e-20, 0.25),
}


def routing_options(row: dict) -> dict:
    n_group, topk_group, group_score = row["groups"] or (1, 1, "top2_sum")
    options = {name: row[name] for name in ("scoring", "renormalize", "scaling_factor", "softcap", "sum_eps")}
    return options | {"top_k": row["K"], "n_group": n_group, "topk_group": topk_group, "group_score": group_score}


def routable(E, K, T, groups, H=1, **_) -> bool:
    n_group, topk_group, _ = groups or (1, 1, None)
    return E % n_group == 0 and resolve_top_k(K, E) <= E // n_group * topk_group and T * E * H <= 2**33


def router_grid(op: str, **more: tuple) -> list[Case]:
    given = tuple(c for n in range(len(OPTIONAL[op]) + 1) for c in combinations(OPTIONAL[op], n))
    rows = pairwise(routable, E=E_GRID, K=K_GRID, T=T_GRID, dtypes=PAIRS, given=given, **ROUTING_GRID, **more)
    rows = [row | {"K": resolve_top_k(row["K"], row["E"])} for row in rows]
    return [grid_case(op, row, row["given"], routing_options(row)) for row in rows]


def router_cases() -> list[Case]:
    cases = real_routers() + topk_moe() + hostile_routes() + hostile_gates() + many_routed_tokens()
    return cases + router_grid("route") + router_grid("gate", H=H_GRID)
