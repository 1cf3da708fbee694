"""Cases of `linear_attention_` and `short_conv_`."""

import functools
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import inf, nan

import torch
from torch import Tensor

from cases.case import BFLOAT, FLOAT, HALF, OPTIONAL, Case, both, setting
from cases.grids import PAIRS, crossed, pairwise
from cases.oracle import Args

LINEAR = "linear_attention_"
#: Options of whole families: decays by a sigmoid, and Mamba 2's rule.
FORGETTING = {"decay_kind": "sigmoid", "lower_bound": -3.0, "order": "vkq", "activation": "sigmoid"}
FORGETTING |= {"gate_activation": "sigmoid", "tiled": True}
SUMMING = {"rule": "sum", "activation": "none", "gate_first": True, "step_min": 0.1, "step_max": 1.5}


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# ------------------------------------------------------------------------------------------------ shapes and layouts


def by_channel(args: Args) -> None:
    """A decay for each channel of a key. The case's F is the size of a row of its log."""
    for name in ("decay", "decay_bias"):
        if name in args:
            shape = (*args[name].shape, args["q"].shape[-1])
            args[name] = (args[name].unsqueeze(-1) + noise(*shape)).to(args[name].dtype)


def norm_of_groups(groups: int) -> Callable[[Args], None]:
    """The output is normalised in groups of neighbouring heads."""

    def prepare(args: Args) -> None:
        A, V = args["v"].shape[2:]
        args["norm_weight"] = (1 + 0.3 * noise(groups, A * V // groups)).to(args["norm_weight"].dtype)

    return prepare


def usual_log(replay: int) -> Callable[[Args], None]:
    """A log as an earlier call writes it, in which only the replayed rows may be read; nor may `kept`."""

    def prepare(args: Args) -> None:
        (A, V), (J, D) = args["v"].flatten(2, -2).shape[2:], args["q"].shape[2:]
        u, k, a = args["log"].split([A * V, J * D, args["log"].shape[-1] - A * V - J * D], -1)
        k.mul_(D**-0.5)
        a.sigmoid_()
        u[:, replay:], k[:, replay:], a[:, replay:] = nan, nan, nan
        if "kept" in args:
            args["kept"].fill_(nan)

    return prepare


def joined(args: Args) -> None:
    """The arguments of tokens are views of one projection, in which NaN follows."""
    names = [name for name in ("q", "k", "v", "gate", "decay", "beta") if name in args]
    names = [name for name in names if args[name].dtype == args["q"].dtype]
    (B, T), sizes = args["q"].shape[:2], [args[name].shape[2:].numel() for name in names]
    memory = args["q"].new_full((B, T, sum(sizes) + 3), nan)
    for name, part in zip(names, memory[..., :-3].split(sizes, -1), strict=True):
        args[name] = part.copy_(args[name].flatten(2)).view(args[name].shape)


def grouped(args: Args) -> None:
    """As in Qwen3-Next: one projection has the queries, keys, values and gates of a key head next to each other,
    another one its decays and betas. The views of values have five dimensions."""
    (B, T, J), A = args["q"].shape[:3], args["v"].shape[2]
    heads = {name: args[name].unflatten(2, (J, A // J)) for name in ("v", "gate", "decay", "beta") if name in args}
    args |= heads
    wide = [name for name in ("q", "k", "v", "gate") if name in args]
    sizes = [args[name].shape[3:].numel() for name in wide]
    memory = args["q"].new_full((B, T, J, sum(sizes) + 1), nan)
    for name, part in zip(wide, memory[..., :-1].split(sizes, -1), strict=True):
        args[name] = part.copy_(args[name].flatten(3)).view(args[name].shape)
    if "beta" in args and args["beta"].shape == args["decay"].shape:
        args["beta"], args["decay"] = torch.cat([args["beta"], args["decay"]], -1).split(A // J, -1)


def across(args: Args) -> None:
    """Tokens, heads or columns are neighbours in memory, and the state has its keys there, as in Mamba 2. The gate and
    the decay of all tokens are equal, and so are the betas of all heads."""
    args["q"], args["k"] = args["q"].mT.contiguous().mT, args["k"].transpose(1, -1).contiguous().transpose(1, -1)
    args["v"] = torch.stack([args["v"], args["v"]], -1)[..., 0]
    for name in ("gate", "decay"):
        if name in args:
            args[name] = args[name][:, :1].expand(args[name].shape)
    if "beta" in args:
        args["beta"] = args["beta"][..., :1].expand(args["beta"].shape)
    for name in ("state", "past", "kept", "log"):
        if name in args:
            args[name] = args[name].mT.contiguous().mT


def strided_state(args: Args) -> None:
    """Neither the rows nor the columns of the state are contiguous."""
    if "state" in args:
        args["state"] = torch.stack([args["state"], args["state"]], -1)[..., 1]


def one_memory(args: Args) -> None:
    """`past` and `kept` are neighbours in the memory of a longer cache."""
    if not {"past", "kept"} <= set(args):
        return
    P = args["past"].shape[1]
    cache = torch.cat([args["past"], args["kept"], args["kept"]], 1)
    args["past"], args["kept"] = cache[:, :P], cache[:, P : P + args["kept"].shape[1]]


LAYOUTS = {"plain": None, "joined": both(joined, one_memory), "across": across, "strided_state": strided_state}
LAYOUTS |= {"grouped": grouped}

# ------------------------------------------------------------------------------------------------ models

GATED = ("gate", "log_rate", "decay_bias", "norm_weight", "conv_weight", "past", "state", "kept")
MAMBA = (*GATED, "skip", "conv_bias", "mask")
#: J, A, D, V, optional arguments, options, what is changed, whether decays are per channel.
MODELS = {
    "qwen3_5": (16, 32, 128, 128, GATED, {}, joined, False),
    "qwen3_next": (16, 32, 128, 128, GATED, {}, grouped, False),
    "gguf": (16, 32, 128, 128, GATED, {"tiled": True}, joined, False),
    "olmo_hybrid": (30, 30, 96, 192, GATED, {"beta_scale": 2.0}, None, False),
    "kimi": (32, 32, 128, 128, GATED, {"gate_activation": "sigmoid"}, both(by_channel, joined), True),
    "glm5_next": (64, 64, 128, 128, GATED, {"decay_kind": "sigmoid", "gate_activation": "sigmoid"}, by_channel, True),
    "nemotron": (8, 64, 128, 64, MAMBA, SUMMING | {"activation": "silu", "order": "vkq", "scale": 1.0, "qk_eps": None},
                 both(norm_of_groups(8), joined, across), False),
    "granite": (1, 48, 128, 64, MAMBA, SUMMING | {"activation": "silu", "order": "vkq", "scale": 1.0, "qk_eps": None},
                both(norm_of_groups(1), across), False),
}  # fmt: skip


def real_models() -> list[Case]:
    """One token of each model in its own size, and a few with fewer heads."""
    cases = []
    for name, (J, A, D, V, given, options, prepare, channels) in MODELS.items():
        for B, T, share, dtype in ((1, 1, 1, BFLOAT), (2, 11, 8, BFLOAT), (1, 70, 8, FLOAT), (1, 64, 1, BFLOAT)):
            heads = {"J": max(1, J // share), "A": max(1, J // share) * (A // J) // (share if J == 1 else 1)}
            dims = heads | {"B": B, "T": T, "D": D, "V": V, "W": 4, "R": 1 if T == 1 else 3}
            change = both(norm_of_groups(heads["J"]), across) if name == "nemotron" and share > 1 else prepare
            cases.append(Case(LINEAR, f"{name}-B{B}-T{T}", dims, given, options, dtype, FLOAT, change,
                              fast_on=("cpu",) if T in (1, 11) else ()))  # fmt: skip
            if channels:
                assert "log" not in given  # its F would be another one
    for B, T, dtype in ((1, 1, BFLOAT), (2, 7, BFLOAT), (1, 70, FLOAT)):
        dims = {"B": B, "T": T, "C": 2048, "W": 3, "R": 2}
        given = ("input_gate", "output_gate", "past", "kept")
        cases.append(Case("short_conv_", f"lfm2-B{B}-T{T}", dims, given, {}, dtype))
    return cases


def logged() -> list[Case]:
    """A verification of a few tokens, of which the next call replays those that were accepted."""
    cases = []
    sizes = {"B": 2, "J": 2, "A": 4, "D": 24, "V": 40, "W": 4}
    rows = crossed(T_L=((1, 1), (5, 5), (21, 4), (0, 0)), replay=(0, 1, 7), rule=("delta", "sum"),
                   channels=(False, True), layout=("plain", "across"), dtype=(FLOAT, BFLOAT))  # fmt: skip
    for (T, L), replay, rule, channels, layout, dtype, full_grid in rows:
        channels = channels and rule == "delta"
        dims = sizes | {"T": T, "R": min(3, T), "L": replay + L}
        dims["F"] = 4 * 40 + 2 * 24 + 4 * (24 if channels else 1)
        changes = [by_channel] * channels + [usual_log(replay)] + [across] * (layout == "across")
        options = {"rule": rule, "replay": replay}
        name = f"log-T{T}-L{L}-replay{replay}-{rule}{'-channels' * channels}-{layout}"
        cases.append(Case(LINEAR, name, dims, (*GATED, "log"), options, dtype, FLOAT, both(*changes),
                          full_grid=full_grid))  # fmt: skip
    return cases


# ------------------------------------------------------------------------------------------------ sequences


def offsets(*values: int, dtype: torch.dtype = torch.int32) -> Callable[[Args], None]:
    def prepare(args: Args) -> None:
        args["offsets"] = torch.tensor(values, dtype=dtype)

    return prepare


def sequences() -> list[Case]:
    """Offsets that leave out tokens, are beyond the tokens, fall, or make empty sequences."""
    ways = {
        "usual": (0, 7, 9, 30),
        "one": (0, 30),
        "outside": (3, 9, 25),
        "empty": (0, 9, 9, 9),
        "backwards": (0, 20, 5, 25),
    }
    ways |= {"beyond": (-5, 3, 99, 120), "last_first": (30, 0, 0), "none": (0, 0)}
    cases = []
    for i, (name, values) in enumerate(ways.items()):
        count = len(values) - 1
        dims = {"B": 1, "J": 2, "A": 4, "D": 16, "V": 24, "T": 30, "W": 4, "R": 3, "N": count + 1, "S": count}
        prepare = both(offsets(*values, dtype=(torch.int32, torch.int64)[i % 2]), (joined, across)[i // 2 % 2])
        dtype, options = (FLOAT, HALF, BFLOAT)[i % 3], {"rule": ("delta", "sum")[i // 3 % 2]}
        given = (*(name for name in OPTIONAL[LINEAR] if name != "log"), "offsets")
        cases.append(Case(LINEAR, f"offsets-{name}", dims, given, options, dtype, None, prepare))
    # One of the samples: all optional arguments that a call with offsets may have.
    return [replace(cases[0], name="sample_offsets", sample=True), *cases[1:]]


# ------------------------------------------------------------------------------------------------ hostile values


def no_keys(args: Args) -> None:
    """Of the first tokens; and no queries of the next ones."""
    args["k"][:, :4], args["q"][:, 3:6] = 0.0, 0.0


def endless_keys(args: Args) -> None:
    """Whose squares overflow float32, so that they become 0."""
    args["k"][:, 2], args["q"][:, 4] = 3e19, -3e19


def decays(args: Args) -> None:
    """1, 0, and tiny ones, in every second token and head."""
    values = torch.tensor([-inf, 0.0, -0.0, 300.0, 1e5, inf, -300.0]).to(args["decay"].dtype)
    T, A = args["decay"].shape[1:3]
    for t, a in product(range(0, T, 2), range(0, A, 2)):
        args["decay"][:, t, a] = values[(t // 2 + a) % len(values)]


def saturated(args: Args) -> None:
    """Steps whose softplus is exact or 0, and betas of exactly 0 and 1."""
    args["decay"][:, ::3], args["decay"][:, 1::3] = 100.0, -100.0
    args["beta"][:, ::4], args["beta"][:, 1::4] = inf, -inf


def rates(args: Args) -> None:
    """A head that forgets everything, and one that forgets nothing."""
    args["log_rate"][0], args["log_rate"][1] = inf, -inf


def tiny(args: Args) -> None:
    args["v"][:, :5] *= 1e-39
    args["k"][:, 5:9] *= 1e-39
    args["q"][:, 9:] *= 1e-39


def nan_values(args: Args) -> None:
    """In one channel of a head: the other heads are right."""
    args["v"][0, 5, 1, 2] = nan


def nan_keys(args: Args) -> None:
    """In a key head and in a query head, in different sequences."""
    args["k"][0, 9, 1, 3], args["q"][1, 4, 0, 0] = nan, nan


def nan_gates(args: Args) -> None:
    args["decay"][0, 3, 1], args["beta"][1, 12, 2], args["gate"][0, 7, 0, 1] = nan, nan, nan


def nan_behind_a_mask(args: Args) -> None:
    """k and v of these tokens count as 0, but their queries and decays are those that there are."""
    args["mask"][0, 3:6], args["mask"][:, -1] = False, False
    args["k"][0, 3:6], args["v"][0, 3:6], args["v"][:, -1] = nan, inf, nan


PLAIN = ("gate", "log_rate", "norm_weight", "state")
HOSTILE = {  # optional arguments, options, what is changed, whether it is compared in float32
    "no_keys": (PLAIN, {}, no_keys, False),
    "no_keys_convolved": ((*PLAIN, "conv_weight", "past"), {}, no_keys, False),
    "endless_keys": (PLAIN, {}, endless_keys, True),
    "decays": (PLAIN, {}, decays, False),
    "decays_of_channels": (PLAIN, {}, both(decays, by_channel), False),
    "decays_of_sums": (PLAIN, {"rule": "sum"}, both(decays, setting("decay", slice(1, None), 0.0)), False),
    "decays_by_sigmoid": (PLAIN, {"decay_kind": "sigmoid"}, decays, False),
    "saturated": (PLAIN, {}, saturated, False),
    "rates": (PLAIN, {}, rates, False),
    "tiny": (PLAIN, {}, tiny, False),
    "nan_values": (("gate", "state"), {}, nan_values, True),
    "nan_keys": (PLAIN, {}, nan_keys, True),
    "nan_gates": (PLAIN, {}, nan_gates, True),
    "nan_behind_a_mask": ((*PLAIN, "mask"), {}, nan_behind_a_mask, True),
}


def hostile() -> list[Case]:
    cases = []
    for (name, (given, options, prepare, in_float32)), dtype in product(HOSTILE.items(), (FLOAT, BFLOAT)):
        if name in ("tiny", "endless_keys") and dtype == BFLOAT:
            continue  # what they are about happens in float32
        dims = {"B": 2, "T": 19, "J": 2, "A": 4, "D": 24, "V": 16, "W": 3}
        cases.append(Case(LINEAR, name, dims, given, options, dtype, None, prepare, hostile=in_float32,
                          full_grid=dtype != FLOAT))  # fmt: skip
    dims = {"B": 2, "T": 9, "C": 40, "W": 3, "R": 4}
    for name, prepare in {"nan": setting("x", (0, 3, 7), nan), "inf_gate": setting("output_gate", (1, 2), inf)}.items():
        given = ("input_gate", "output_gate", "past", "kept")
        cases.append(Case("short_conv_", name, dims, given, {"activation": "silu"}, FLOAT, None, prepare,
                          hostile=True))  # fmt: skip
    return cases


# ------------------------------------------------------------------------------------------------ grids

STYLES = {
    "plain": {},
    "gate_first": {"gate_first": True, "order": "vkq"},
    "tiled": {"tiled": True, "gate_activation": "sigmoid"},
    "no_activation": {"activation": "none", "scale": 0.5, "step_max": 1.0},
}
SIZES = (1, 7, 16, 64, 96, 128, 192, 256)
GRID = {
    "heads": ((1, 1), (2, 4), (3, 3), (1, 8)),
    "D": SIZES,
    "V": SIZES,
    "T": (0, 1, 2, 7, 8, 9, 16, 17, 65),
    "W": (None, 1, 2, 3, 4),
    "gates": ("softplus", "sigmoid", "channels", "channels by sigmoid", "sum"),
    "layout": tuple(LAYOUTS),
    "norm": ("each", "none", "groups"),
    "given": ((), ("state",), ("gate",), ("gate", "state", "log_rate", "decay_bias", "mask", "skip")),
    "style": tuple(STYLES),
    "dtypes": PAIRS,
}


def fits(heads, D, V, T, gates, layout, norm, style, **_) -> bool:
    small = heads[1] * D * V * max(T, 4) <= 2**19 and (V > 1 or norm != "groups")
    return small and not ("channels" in gates and layout == "across") and not (norm == "groups" and style == "tiled")


def grid_case(row: dict) -> Case:
    (J, A), T, W, channels = row["heads"], row["T"], row["W"], "channels" in row["gates"]
    dims = {"B": 2, "J": J, "A": A, "D": row["D"], "V": row["V"], "T": T} | ({"W": W, "R": (W + T) // 2} if W else {})
    given = list(row["given"]) + ["norm_weight"] * (row["norm"] != "none")
    given += ["conv_weight", "conv_bias", "past", "kept"][: 1 + row["V"] % 4] if W else []
    options = STYLES[row["style"]] | ({"rule": "sum"} if row["gates"] == "sum" else {})
    options |= {"decay_kind": "sigmoid"} if row["gates"].endswith("sigmoid") else {}
    changes = [by_channel] * channels + [norm_of_groups(J)] * (row["norm"] == "groups")
    changes += [LAYOUTS[row["layout"]]] if LAYOUTS[row["layout"]] else []
    dtype, parameters = row["dtypes"]
    name = f"grid-J{J}-A{A}-D{row['D']}-V{row['V']}-T{T}-W{W or 0}-{row['gates'].replace(' ', '_')}-{row['layout']}"
    name += f"-{row['norm']}-{len(row['given'])}-{row['style']}{'-p32' * bool(parameters)}"
    order = [each for each in OPTIONAL[LINEAR] if each in given]
    return Case(LINEAR, name, dims, tuple(order), options, dtype, parameters, both(*changes),
                full_grid=zlib.crc32(name.encode()) % 8 > 0)  # fmt: skip


def short_convolutions() -> list[Case]:
    cases = []
    rows = crossed(W=(1, 2, 3, 6), dilation=(1, 5), T=(0, 1, 7, 65), C=(1, 40, 300), dtypes=PAIRS[2:],
                   given=((), OPTIONAL["short_conv_"], ("input_gate", "kept"), ("output_gate", "past")),
                   activation=("none", "silu", "sigmoid"))  # fmt: skip
    for W, dilation, T, C, (dtype, parameters), given, activation, full_grid in rows:
        P = (W - 1) * dilation
        dims = {"B": 2, "T": T, "C": C, "W": W, "P": P, "R": (P + T + 1) // 2}
        name = f"W{W}-x{dilation}-T{T}-C{C}-{len(given)}-{activation}{'-p32' * bool(parameters)}"
        options = {"activation": activation, "dilation": dilation}
        if not full_grid:
            cases.append(Case("short_conv_", name, dims, given, options, dtype, parameters, one_memory))
    return cases


@functools.cache
def linear_attention_cases() -> list[Case]:
    cases = real_models() + logged() + sequences() + hostile() + short_convolutions()
    cases += [grid_case(row) for row in pairwise(fits, **GRID)]
    empty = {"B": 0, "T": 4, "J": 1, "A": 2, "D": 8, "V": 8, "W": 2, "R": 1}
    return [*cases, Case(LINEAR, "B0", empty, GATED), Case("short_conv_", "B0", empty, ("past", "kept"))]
