"""The one table of arguments: the tensors that every op takes and returns, with their shapes as letters.

T tokens, E experts, K experts per token, H hidden, I expert inner size, N rows of one weight; G is 2I, and U is the
size of a scalar, 1 or H. Attention: B sequences, A query heads, J key heads, T queries, S keys, D size of a query and a
key, V size of a value. Rope: also R angles. Linear attention: A value heads, W taps of C channels, P rows of inputs
before the first token, R rows that are kept, and a log of L rows of F numbers; with offsets [N], B is 1 and S sequences
have a state. The C++ checks (csrc/contract/) use the same letters.

The tests draw their cases from this table, `bench` its rows and `doctor` its samples. Options are not in it: they are
in the signatures in reference.py.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from . import reference
from .formats import FORMATS

#: Data, scale and offset of a weight.
Parts = tuple[Tensor, Tensor | None, Tensor | None]
#: The dtypes of activations, and their names in tables.
DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Argument:
    """One tensor that an op takes. An activation has the dtype of the op's first argument; a parameter may also be
    float32; ids and offsets are int32 or int64. A weight may have any format. The scale and offset of a packed weight
    have the same letters, but their sizes and dtypes depend on the format: see `pack`."""

    letters: str
    kind: str = "activation"
    optional: bool = False
    written: bool = False  # in-place
    needs: str = ""  # an optional argument without which it must be None


def parameter(letters: str, optional: bool = False, needs: str = "") -> Argument:
    return Argument(letters, "parameter", optional, needs=needs)


def optional(letters: str, needs: str = "") -> Argument:
    return Argument(letters, optional=True, needs=needs)


def written_if_given(letters: str, kind: str = "activation", needs: str = "") -> Argument:
    return Argument(letters, kind, optional=True, written=True, needs=needs)


def _scales(prefix: str, letters: str) -> dict[str, Argument]:
    return {f"{prefix}{part}": Argument(letters, part, True) for part in ("scale", "offset")}


_CHOICE = {"select_bias": parameter("E", True), "per_expert_scale": parameter("E", True)}
_ADDED = {"shared": optional("TH"), "shared_gate": parameter("T", True, "shared"), "residual": optional("TH")}
_SLOTS = {"slots": Argument("TKH"), "weights": parameter("TK")}
_RESIDUAL = {"residual": Argument("TH")}
_WRITTEN = {"residual": Argument("TH", written=True)}
#: The first size of angles may be 1 instead of B. The weights of norms may have the shapes [A, D] and [J, D].
_ANGLES = {"cos": parameter("BTR"), "sin": parameter("BTR")}
_HEAD_NORMS = {"q_norm_weight": parameter("D", True), "k_norm_weight": parameter("D", True)}
#: A mask may also be bool, and its sizes B and A may be 1.
_MASKED = {"mask": parameter("BATS", True), "sinks": parameter("A", True)}
#: `decay` and its bias may be per channel. v, decay, beta and gate may have dimensions for J and A / J instead of A.
_GATES = {"decay": parameter("BTA"), "beta": parameter("BTA", True), "gate": optional("BTAV")}
_RATES = {"log_rate": parameter("A", True), "decay_bias": parameter("A", True)}
_CONVOLUTION = {"conv_weight": parameter("CW", True), "conv_bias": parameter("C", True, "conv_weight")}
_SEQUENCES = {"mask": Argument("BT", "bool", True), "offsets": Argument("N", "offsets", True)}
_STATES = {"state": written_if_given("BADV", "float32"), "kept": written_if_given("BRC", needs="conv_weight")}
_NORM = _RESIDUAL | {"input": Argument("TH"), "weight": parameter("H"), "scalar": parameter("U", True)}

#: Every tensor argument of every op, in the order of its schema.
ARGUMENTS: dict[str, dict[str, Argument]] = {
    "gate": {"hidden": Argument("TH"), "router_weight": parameter("EH")}
    | {"norm_weight": parameter("H", True), "router_bias": parameter("E", True)}
    | _CHOICE,
    "route": {"logits": Argument("TE")} | _CHOICE,
    "glu": {"gate": Argument("TI"), "up": Argument("TI")},
    "experts": {"x": Argument("TH"), "weights": parameter("TK"), "ids": Argument("TK", "ids")}
    | {"gate_up": Argument("EGH", "weight"), "down": Argument("EHI", "weight")}
    | {"gate_up_bias": parameter("EG", True), "down_bias": parameter("EH", True)}
    | _ADDED
    | _scales("gate_up_", "EGH")
    | _scales("down_", "EHI"),
    "linear": {"x": Argument("TH"), "weight": Argument("NH", "weight")}
    | _scales("", "NH")
    | {"bias": parameter("N", True)},
    "dequantize": {"weight": Argument("NH", "weight")} | _scales("", "NH"),
    "weighted_sum": _SLOTS | _ADDED,
    "weighted_sum_residual_": _WRITTEN | _SLOTS,
    "weighted_sum_residual_norm_": _WRITTEN | _SLOTS | {"norm_weight": parameter("H")},
    "weighted_sum_norm_add": _SLOTS | _RESIDUAL | {"norm_weight": parameter("H")},
    "weighted_sum_dual_norm_add": _SLOTS
    | _RESIDUAL
    | {"residual_norm_weight": parameter("H"), "moe_norm_weight": parameter("H")},
    "norm": {"input": Argument("TH"), "weight": parameter("H", True)},
    "norm_add": _NORM,
    "residual_norm": _NORM,
    "rope": {"q": Argument("BTAD"), "k": Argument("BTJD")} | _ANGLES | _HEAD_NORMS,
    "attention": {"q": Argument("BATD"), "k": Argument("BJSD"), "v": Argument("BJSV")} | _MASKED,
    "linear_attention_": {"q": Argument("BTJD"), "k": Argument("BTJD"), "v": Argument("BTAV")}
    | _GATES
    | _RATES
    | {"norm_weight": parameter("V", True), "skip": parameter("A", True)}
    | _CONVOLUTION
    | {"past": optional("BPC", "conv_weight")}
    | _SEQUENCES
    | _STATES
    | {"log": written_if_given("BLF", "float32", "state")},
    "short_conv_": {"x": Argument("BTC"), "weight": parameter("CW"), "bias": parameter("C", True)}
    | {"input_gate": optional("BTC"), "output_gate": optional("BTC")}
    | {"past": optional("BPC"), "kept": written_if_given("BRC")},
}

#: The outputs of ops that do not return one tensor [T, H]. A router's weights are float32 and its ids int32; all other
#: outputs are activations.
RETURNS: dict[str, tuple[str, ...]] = {
    "gate": ("TK", "TK"),
    "route": ("TK", "TK"),
    "glu": ("TI",),
    "linear": ("TN",),
    "dequantize": ("NH",),
    "weighted_sum_residual_": (),
    "residual_norm": ("TH", "TH"),
    "rope": ("BATD", "BJTD"),
    "attention": ("BTAV",),
    "linear_attention_": ("BTAV",),
    "short_conv_": ("BTC",),
}

ROUTERS = ("gate", "route")

#: Sizes that follow from others, where they are not given. With `dilation`, P is that times W - 1, and with decays per
#: channel F has A D of them.
DERIVED: dict[str, Callable[[Mapping[str, int]], int]] = {
    "G": lambda dims: 2 * dims["I"],
    "C": lambda dims: 2 * dims["J"] * dims["D"] + dims["A"] * dims["V"],
    "F": lambda dims: dims["A"] * dims["V"] + dims["J"] * dims["D"] + dims["A"],
    "P": lambda dims: dims["W"] - 1,
}


def optional_arguments(op: str) -> tuple[str, ...]:
    """The arguments that may be omitted, whatever the others are. Scales and offsets of weights are not among them,
    since they depend on the format; `beta` is given exactly if the rule is "delta"; and with offsets the shapes of
    others change."""
    kinds = ("scale", "offset", "offsets")
    return tuple(
        name
        for name, argument in ARGUMENTS[op].items()
        if argument.optional and argument.kind not in kinds and name != "beta"
    )


def without(op: str, given: Collection[str], name: str) -> list[str]:
    """The arguments in `given` except this one, and those that need it."""
    return [other for other in given if name not in (other, ARGUMENTS[op][other].needs)]


def takes_formats(op: str) -> bool:
    return bool(weights(op))


def written(op: str, given: Collection[str] | None = None) -> tuple[str, ...]:
    """The arguments that the op writes in-place; only those of them that are in `given`."""
    return tuple(
        name for name, argument in ARGUMENTS[op].items() if argument.written and (given is None or name in given)
    )


def outputs(op: str, shapes: Mapping[str, str]) -> list[str]:
    """The letters of the tensors that `results` returns, where these are the letters of the given arguments."""
    return [*RETURNS.get(op, ("TH",)), *(shapes[name] for name in written(op, shapes))]


def options(op: str, wanted: Mapping[str, object]) -> dict[str, object]:
    """Those of the options that the op has."""
    signature = inspect.signature(getattr(reference, op)).parameters.values()
    taken = {parameter.name for parameter in signature if parameter.kind == parameter.KEYWORD_ONLY}
    return {name: value for name, value in wanted.items() if name in taken}


def weights(op: str) -> tuple[str, ...]:
    """The arguments that may be packed."""
    return tuple(name for name, argument in ARGUMENTS[op].items() if argument.kind == "weight")


def format_of(weight: str, options: Mapping) -> str:
    """The format of one of an op's weights, given the op's options."""
    return (weight == "down" and options.get("down_format")) or options.get("format") or "dense"


def shapes(
    op: str, given: Collection[str] = (), transposed: bool = False, format: str = "dense",
    down_format: str | None = None, rule: str = "delta",
) -> dict[str, str]:  # fmt: skip
    """The letters of all required arguments, with weights in these formats, and of the optional arguments in
    `given`."""
    formats = {weight: format_of(weight, {"format": format, "down_format": down_format}) for weight in weights(op)}
    parts = {weight: FORMATS[format].parts if format in FORMATS else () for weight, format in formats.items()}
    needed = {name for weight, found in parts.items() for name in scale_names(weight)[: len(found)]}
    needed |= {"beta"} if rule == "delta" else set()
    found = {
        name: argument.letters
        for name, argument in ARGUMENTS[op].items()
        if name in given or name in needed or not argument.optional
    }
    if "offsets" in found:
        found |= {name: f"S{found[name][1:]}" for name in ("past", "state", "kept") if name in found}
    return found | {"gate_up": "EHG", "down": "EIH"} if transposed else found


def size(letters: str, dims: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(dims[letter] if letter in dims else DERIVED[letter](dims) for letter in letters)


def draw(op: str, name: str, size: tuple[int, ...], dims: Mapping[str, int], random: torch.Generator) -> Tensor:
    """Realistic values in float32 on the CPU: all sums are about one, and the ids of each token are distinct."""
    if ARGUMENTS[op][name].kind == "bool":
        return torch.rand(size, generator=random) < 0.7
    if name == "offsets":
        return torch.randint(dims["T"] + 1, size, generator=random, dtype=torch.int32).sort().values
    if name == "ids":
        T, E, K = (dims[letter] for letter in "TEK")
        if K > E:
            return torch.randint(E, (T, K), generator=random, dtype=torch.int32)
        return torch.rand(T, E, generator=random).argsort(-1)[:, :K].int().contiguous()
    if name == "weights":
        return torch.rand(size, generator=random)
    values = torch.randn(size, generator=random)
    if len(size) > 1 and name in ("router_weight", "gate_up", "down", "weight"):
        fan_in = {"gate_up": "H", "down": "I"}.get(name)
        return values * (dims[fan_in] if fan_in else size[-1]) ** -0.5
    if "norm_weight" in name or name in ("weight", "scalar", "per_expert_scale"):
        return 1 + values.clamp(-2.5, 2.5) * 0.3
    if name in ("select_bias", "router_bias"):
        return values * 0.2
    if name in ("slots", "residual", "input") and dims["H"] <= 3:
        return values.abs() + 0.1  # the norm of so few values is ill-conditioned if they cancel
    return values * 2 if name == "logits" else values


def scale_names(weight: str) -> tuple[str, str]:
    """The argument names of the scale and the offset of a weight."""
    prefix = "" if weight == "weight" else f"{weight}_"
    return f"{prefix}scale", f"{prefix}offset"


def pack(op: str, given: Mapping[str, Tensor], pack_one: Callable[[str, Tensor], Parts]) -> dict[str, Tensor]:
    """The same arguments with packed weights. `pack_one` packs a weight, given its name and values."""
    found: dict[str, Tensor | None] = dict(given)
    for name in weights(op):
        found |= dict(zip((name, *scale_names(name)), pack_one(name, given[name]), strict=True))
    return {name: tensor for name in ARGUMENTS[op] if (tensor := found.get(name)) is not None}


def results(op: str, returned: Tensor | tuple[Tensor, ...] | None, given: Mapping[str, Tensor]) -> list[Tensor]:
    """All outputs of a call of an op or its reference: the returned tensors, then those written in-place."""
    found = [] if returned is None else [returned] if isinstance(returned, Tensor) else list(returned)
    return found + [tensor for name in written(op) if (tensor := given.get(name)) is not None]
