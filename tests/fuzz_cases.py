"""Random calls of every op, each drawn from a seed and a number, for fuzz.py.

The arguments come from the package's own tables: shapes, dtypes and optional arguments from arguments.py, options and
their types from the signatures in reference.py, and the values of string options from the op's own error message. So
new ops, arguments and options are fuzzed without a change here. A call is `good`, and its result must be right, or it
was spoiled: then it may also raise.
"""

import functools
import inspect
import math
import random
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, nan

import torch
from torch import Tensor

from cases import Args, Case
from cases.grids import PAIRS
from cases.linear_attention import by_channel, grouped, norm_of_groups, usual_log
from checks import Guarded, with_leading
from torch_moe_metal import formats, max_experts, reference
from torch_moe_metal.arguments import (
    ARGUMENTS,
    DTYPES,
    format_of,
    optional_arguments,
    shapes,
    takes_formats,
    weights,
    written,
)

SIZES = (1, 1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 33, 61, 64, 67, 96, 127, 128, 129, 251, 256, 257, 509, 512, 521, 1021)
SIZES_LARGE = (1024, 1031, 2048, 2053)
NUMBERS = (0.25, 1.0, 1.702, 2.5, 7.0, 30.0)  # the values of numeric options
NUMBERS_OF = {
    "lower_bound": (-5.0, -0.25, 0.0),
    "step_min": (0.0, 0.25),
    "step_max": (0.25, 2.5),
    "beta_scale": (0.5, 1.0, 2.0),
}
ROWS_KEPT = tuple(op for op in ARGUMENTS if "kept" in ARGUMENTS[op])


@dataclass
class Layout:
    """The memory of a tensor: a view of some flat memory, which other arguments may share."""

    memory: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    kind: str

    def of(self, memory: Tensor) -> Tensor:
        return memory.as_strided(self.size, self.stride, self.offset)


@dataclass
class Change:
    """The last change of an argument."""

    name: str
    what: str
    function: Callable[[Tensor], object]


@dataclass
class Call:
    op: str
    case: Case
    layouts: dict[str, Layout]
    options: dict
    good: bool = True
    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # changes of values and memory
    threads: int = 1  # the number of PyTorch's threads
    alongside: str = "nothing"  # what runs at the same time
    mode: type = torch.no_grad

    def values(self) -> Args:
        """The arguments, contiguous on the CPU, before any change."""
        return {name: layout.of(layout.memory).contiguous().clone() for name, layout in self.layouts.items()}

    def on_device(self, device: str, changed_for: str | None = None) -> tuple[dict, list[Tensor]]:
        """Returns the arguments of the op, and the memory that they use. `changed_for`: apply the changes of that
        device."""
        memories: dict[int, Tensor] = {}
        args: dict[str, object] = {}
        for name, layout in self.layouts.items():
            memory = memories.setdefault(id(layout.memory), layout.memory.to(device, copy=True))
            args[name] = layout.of(memory)
        for change in self.changes_on(changed_for or device):
            if isinstance(args[change.name], Tensor):
                args[change.name] = change.function(args[change.name])
        return {name: arg for name, arg in args.items() if arg is not MISSING}, list(memories.values())

    def changes_on(self, device: str) -> list[Change]:
        return [change for change in self.changes if (change.what, device) not in NOT_THERE]

    def __str__(self) -> str:
        lines = [
            f"{self.op}, {'good' if self.good else 'spoiled'}; threads: {self.threads}; alongside: {self.alongside}; "
        ]
        lines[0] += f"{self.mode.__name__}; options: {self.options}"
        for name, layout in self.layouts.items():
            lines.append(f"  {name}: {str(layout.memory.dtype).removeprefix('torch.')} {list(layout.size)}, strides ")
            lines[-1] += f"{list(layout.stride)}, offset {layout.offset}, {layout.kind}"
        lines += [f"  then {change.name}: {change.what}" for change in self.changes]
        return "\n".join(lines + [f"  {note}" for note in self.notes])


MISSING = object()  # replaces an argument that is left out


def draw(seed: int, number: int) -> Call:
    """The same call for the same seed and number, on every machine."""
    rng = random.Random(f"{seed}-{number}")
    op = rng.choice(list(ARGUMENTS))
    given = draw_given(op, rng)
    dtype, parameters = rng.choice(PAIRS)
    packed = draw_format(op, rng)
    dims = draw_dims(op, given, rng, packed)
    options = draw_options(op, dims, rng) | ({"format": packed["format"]} if takes_formats(op) else {})
    if op == "experts" and packed["down_format"]:
        options |= {"down_format": packed["down_format"]}
    if op == "dequantize":
        options |= {"bits": packed["bits"], "dtype": dtype}
    if "group_size" in signature(op):
        options |= {"group_size": 0 if packed["down_format"] else rng.choice((0, group_size(packed)))}
    if any(format_of(name, options) != "dense" for name in weights(op)):
        options.pop("transposed", None)
    if op in ROWS_KEPT:
        draw_rows(op, given, dims, options, rng)
    widths = {name: packed[name] for name in ("bits", "group", "scale_dtype")}
    case = Case(op, f"fuzz-{seed}-{number}", dims, given, options, dtype, parameters, hostile=True, **widths)
    notes: list[str] = []
    args = case.arguments()
    if op == "linear_attention_":
        draw_heads(args, dims, options, rng)
    for _ in range(rng.choice((0, 0, 1, 2))):
        notes.append(make_hostile(case, args, rng))
    for name in own_scales(case):
        if rng.random() < 0.1 and format_of(name, options) != "ggml_mxfp4":  # its largest powers overflow
            data = args[name]  # factors, including infinite ones and NaN
            generator = torch.Generator().manual_seed(rng.getrandbits(32))
            args[name] = torch.randint(256, data.shape, dtype=data.dtype, generator=generator)
            notes.append(f"{name}: random bytes")
    for name, argument in ARGUMENTS[op].items():
        if name in args and argument.kind == "parameter" and rng.random() < 0.2:
            args[name] = args[name].to(rng.choice((torch.float32, dtype)))
        if name in args and argument.kind in ("ids", "offsets") and args[name].dtype == torch.int32:
            args[name] = args[name].to(rng.choice((torch.int32, torch.int64)))
    if op == "rope":
        draw_angles_and_norms(args, rng)
    if op == "attention" and "mask" in args:
        args["mask"] = draw_mask(args["mask"], rng)
    args = with_leading(case, args, draw_leading(dims["T"], rng))
    call = Call(op, case, lay_out_all(case, args, rng), options, notes=notes)
    if rng.random() < 0.1:
        share_memory(call, rng)
    for _ in range(rng.choice((0, 0, 0, 1))):
        dress(call, rng)
    if rng.random() < 0.2:
        spoil(call, rng)
    call.threads = rng.choice((1, 1, 2, 3, 7))
    call.alongside = rng.choice(("nothing",) * 18 + ("threads", "forks"))
    call.mode = rng.choice((torch.no_grad, torch.enable_grad, torch.inference_mode))
    return call


# ------------------------------------------------------------------------------------------------ what is called


def draw_given(op: str, rng: random.Random) -> tuple[str, ...]:
    given = {name for name in optional_arguments(op) if rng.random() < 0.5}
    given |= {ARGUMENTS[op][name].needs for name in given}
    if "offsets" in ARGUMENTS[op] and rng.random() < 0.2:
        given = given - {"log"} | {"offsets"}
    return tuple(name for name in ARGUMENTS[op] if name in given)


def draw_mask(mask: Tensor, rng: random.Random) -> Tensor:
    """A mask of bools, or one that hides keys by -inf; for all sequences, or all heads."""
    mask = mask[: rng.choice((1, len(mask)))][:, : rng.choice((1, mask.shape[1]))]
    way = rng.choice(("added", "barred", "bool"))
    return mask > -0.5 if way == "bool" else mask.where(mask > -0.5, -inf) if way == "barred" else mask


def draw_angles_and_norms(args: Args, rng: random.Random) -> None:
    """Angles for all sequences, and norm weights over all heads."""
    for name in ("cos", "sin"):
        args[name] = args[name][: rng.choice((1, len(args[name])))]
    for heads, name in (("q", "q_norm_weight"), ("k", "k_norm_weight")):
        if name in args and rng.random() < 0.5:
            args[name] = args[name].repeat(args[heads].shape[2], 1)


def draw_rows(op: str, given: tuple[str, ...], dims: dict[str, int], options: dict, rng: random.Random) -> None:
    """Sizes of convolutions, logs and sequences, and the options that depend on them."""
    if op == "short_conv_":
        options["dilation"] = rng.choice((1, 1, 2, 5))
        dims["P"] = (dims["W"] - 1) * options["dilation"]
    elif options.get("rule") == "sum":
        options["decay_kind"] = "softplus"
    else:
        if options.get("qk_eps", 0) is None and dims["T"] > 8:
            options["qk_eps"] = 1e-6  # the state would grow without a limit
        if rng.random() < 0.3:
            dims["F"] = dims["A"] * (dims["V"] + dims["D"]) + dims["J"] * dims["D"]  # decays per channel
    if "offsets" in given:
        dims |= {"B": 1, "S": rng.choice((1, 2, 5))}
        dims["N"] = dims["S"] + 1
    dims["R"] = rng.randint(0, dims.get("P", dims["W"] - 1) + (0 if "offsets" in given else min(dims["T"], 5)))
    if "log" in given:
        options["replay"] = rng.choice((0, 0, 1, 3))
        dims["L"] = options["replay"] + rng.randint(0, min(dims["T"], 9))


def draw_heads(args: Args, dims: dict[str, int], options: dict, rng: random.Random) -> None:
    """Decays per channel, norms of groups of heads, dimensions for both factors of A, and the state of Mamba 2."""
    if "F" in dims:
        by_channel(args)
    if "norm_weight" in args and not options.get("tiled") and rng.random() < 0.5:
        norm_of_groups(rng.choice([n for n in range(1, dims["A"] + 1) if dims["A"] % n == 0]))(args)
    if "log" in args:
        usual_log(options["replay"])(args)
    if rng.random() < 0.3:
        grouped(args)
    if "state" in args and rng.random() < 0.3:
        args["state"] = args["state"].mT.contiguous().mT


def draw_format(op: str, rng: random.Random) -> dict:
    """How weights are packed, if there are any: format, bits, group and the dtype of the scales; and the format of
    down, if it differs."""
    dense = {"format": "dense", "bits": 4, "group": 1, "scale_dtype": None, "down_format": None}
    if not takes_formats(op) or rng.random() < 0.4:
        return dense
    format = draw_name(rng)
    down = rng.choice(("dense", draw_name(rng))) if op == "experts" and rng.random() < 0.2 else None
    found = dense | {"format": format, "down_format": down if down != format else None}
    if format == "affine":
        found |= {"bits": rng.choice(formats.BITS), "group": rng.choice(formats.GROUPS)}
    if not {"affine", "fp8"}.isdisjoint((format, down)):
        dtypes = (torch.float32, torch.bfloat16) if "fp8" in (format, down) else tuple(DTYPES)
        found["scale_dtype"] = rng.choice(dtypes)
    return found


def draw_name(rng: random.Random) -> str:
    """One in two is a format with many widths or with float scales."""
    return rng.choice(("affine", "mxfp4", "fp8", *[rng.choice(list(formats.FORMATS))] * 3))


def group_size(packed: dict) -> int:
    """The values of the option with this name other than 0."""
    row = formats.FORMATS.get(packed["format"])
    return 0 if row is None else row.scale_columns or packed["group"]


def whole_columns(format: str, group: int) -> int:
    """A packing of this format, with this group size for affine."""
    row = formats.FORMATS.get(format)
    return 1 if row is None else group if row.is_affine else row.whole_columns


def own_scales(case: Case) -> list[str]:
    """The weights whose blocks contain their scales."""
    found = {name: formats.FORMATS.get(format_of(name, case.options)) for name in weights(case.op)}
    return [name for name, row in found.items() if row is not None and row.has_own_scales]


def draw_dims(op: str, given: tuple[str, ...], rng: random.Random, packed: dict) -> dict[str, int]:
    """Sizes for all letters: mostly small ones, sometimes an output for which the CPU uses cached memory. Packed
    columns are whole groups."""
    most = 10 ** rng.uniform(2, 6)
    dims = {letter: rng.choice(SIZES) for letter in "TEKHINSDV"} | {"B": rng.choice((1, 1, 2, 3))}
    dims["J"] = rng.choice((1, 1, 2, 5))
    if op == "rope":
        dims |= {"D": max(2, dims["D"]), "R": 1}
    heads = rng.choice((1, 1, 2, 3, 8, 17))  # query heads that share one of these
    if rng.random() < 0.01:
        dims |= {"T": rng.choice(SIZES_LARGE), "K": 2, "E": 8} | dict.fromkeys("HI", rng.choice(SIZES_LARGE[:2]))
        most = 2e7 if op not in ("gate", "experts") else most
    if op in ROWS_KEPT:
        dims |= {"D": min(dims["D"], 256), "T": min(dims["T"], 67), "W": rng.choice((1, 2, 3, 4, 4, 5))}
        dims |= {"R": 1, "L": 1} | ({"C": rng.choice(SIZES)} if op == "short_conv_" else {})
    dims["T"] = 0 if rng.random() < 0.03 else dims["T"]
    letters = [
        letter for letter in dims if any(letter in text.replace("G", "I") for text in shapes(op, given).values())
    ]
    while (case := Case(op, "", dims | {"U": 1, "A": heads * dims["J"]}, given)).flops > most or case.elements > most:
        largest = max(letters, key=dims.get)
        if dims[largest] <= 2:
            break
        dims[largest] = dims[largest] * 2 // 3
    dims["E"] = min(dims["E"], max_experts)
    if "top_k" in inspect.signature(getattr(reference, op)).parameters:
        dims["K"] = dims["E"] if rng.random() < 0.1 else min(dims["K"], dims["E"])
    down = packed["down_format"]
    wholes = {"H": whole_columns(packed["format"], packed["group"])}
    wholes["I"] = whole_columns(down, 32) if down else wholes["H"]
    for letter, whole in wholes.items():
        dims[letter] = whole * math.ceil(dims[letter] / whole)
    dims["S"] = 0 if rng.random() < 0.02 else dims["S"]
    dims["R"] = dims["D"] // 2 if rng.random() < 0.5 else rng.randint(1, max(1, dims["D"] // 2))
    return dims | {"U": rng.choice((1, dims["H"])), "A": heads * dims["J"]}


def draw_leading(T: int, rng: random.Random) -> tuple[int, ...]:
    """T as a product."""
    if T == 0:
        return rng.choice(((0,), (0, 3), (2, 0)))
    first = rng.choice([n for n in range(1, T + 1) if T % n == 0])
    choices = [(T,), (T,), (first, T // first), (1, first, T // first)]
    return rng.choice([*choices, ()] if T == 1 else choices)


@functools.cache
def choices(op: str, option: str) -> tuple[str, ...]:
    """The values of a string option, from the error message about a wrong one."""
    case = Case(op, "choices", dict.fromkeys("ABCDEHIJKNTUVW", 2), options=dict.fromkeys(("top_k",), 2), hostile=True)
    options = {name: value for name, value in {"top_k": 2, "dtype": torch.float32}.items() if name in signature(op)}
    try:
        getattr(torch.ops.moe_metal, op)(**case.arguments(), **options | {option: "?"})
    except RuntimeError as error:
        return tuple(re.search(rf"{option}: expected one of (.+); got '\?'", str(error))[1].split(", "))
    raise AssertionError(f"{op}: {option}='?' was not refused")


@functools.cache
def signature(op: str) -> dict[str, inspect.Parameter]:
    """The options of an op."""
    every = inspect.signature(getattr(reference, op)).parameters
    return {name: option for name, option in every.items() if option.kind == inspect.Parameter.KEYWORD_ONLY}


def types_of(option: inspect.Parameter) -> tuple[type, ...]:
    annotation = option.annotation
    return annotation.__args__ if isinstance(annotation, types.UnionType) else (annotation,)


def draw_options(op: str, dims: dict[str, int], rng: random.Random) -> dict:
    options: dict[str, object] = {}
    for name, option in signature(op).items():
        kinds = types_of(option)
        if rng.random() < 0.4 and option.default is not inspect.Parameter.empty:
            continue
        if types.NoneType in kinds and rng.random() < 0.3:
            options[name] = None
        elif name in ("format", "down_format", "bits", "dtype", "group_size"):
            continue  # see draw_format
        elif bool in kinds:
            options[name] = rng.random() < 0.5
        elif str in kinds:
            options[name] = rng.choice(choices(op, name))
        elif float in kinds:
            options[name] = rng.choice(NUMBERS_OF.get(name, (*NUMBERS, option.default or 1.0)))
    if options.get("causal"):
        options["window"] = rng.choice((0, 0, 1, 2, 7, 64, 200))
    return options | (draw_choice(dims, rng) if "top_k" in signature(op) else {})


def draw_choice(dims: dict[str, int], rng: random.Random) -> dict[str, int]:
    """The numbers of selected experts and groups, which depend on each other."""
    E, K = dims["E"], dims["K"]
    n_group = rng.choice([n for n in range(1, E + 1) if E % n == 0]) if rng.random() < 0.4 else 1
    fewest = -(-K // (E // n_group))
    return {"top_k": K, "n_group": n_group, "topk_group": rng.randint(fewest, n_group)}


# ------------------------------------------------------------------------------------------------ hostile values

SPECIAL = (inf, -inf, nan, 1e5, -1e5, 65504.0, 1e-40, 6e-8, 0.0, -0.0)
IDS = (-1, -(2**31), 2**31 - 1)
FAR_IDS = (2**32, -(2**33), 2**63 - 1, -(2**63))


def make_hostile(case: Case, args: Args, rng: random.Random) -> str:
    """Changes one argument's values. Returns a description."""
    name = rng.choice([name for name in args if args[name].dtype not in (torch.uint8, torch.bool)] or [""])
    if not name:
        return "all is packed"
    tensor = args[name]
    if name == "offsets":
        args[name] = torch.tensor([rng.randint(-3, case.dims["T"] + 3) for _ in tensor], dtype=tensor.dtype)
        return "offsets: in any order"
    if not tensor.is_floating_point():
        args[name], change = hostile_ids(tensor, case.dims["E"], rng)
        return f"{name}: {change}"
    way = rng.choice(("some", "one", "equal", "scaled", "levels", "massive"))
    if way == "massive" and tensor.numel():  # a column or two, as in real activations
        power, columns = rng.choice((8, 14, 20, 40)), rng.sample(range(tensor.shape[-1]), min(2, tensor.shape[-1]))
        args[name] = tensor.float().index_fill(-1, torch.tensor(columns), 2.0**power).to(tensor.dtype)
        return f"{name}: 2^{power} in columns {columns}"
    if way == "scaled":
        factor = rng.choice((1e-40, 1e-4, 1e4))
        args[name] = tensor.float().mul(factor).to(tensor.dtype)
        return f"{name}: times {factor}"
    if way == "levels":
        args[name] = tensor.float().round().to(tensor.dtype)
        return f"{name}: rounded to integers"
    value = rng.choice(SPECIAL if way != "equal" else (*SPECIAL, 0.25, 0.25))
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    where = torch.rand(tensor.shape, generator=generator) < {"some": 0.1, "equal": 1.1}.get(way, 0)
    if way == "one" and tensor.numel():
        where.view(-1)[rng.randrange(tensor.numel())] = True
    args[name] = tensor.float().masked_fill(where, value).to(tensor.dtype)  # 1e5 is infinite in float16
    return f"{name}: {value} ({way})"


def hostile_ids(ids: Tensor, E: int, rng: random.Random) -> tuple[Tensor, str]:
    way = rng.choice(("repeated", "out of range", "far out of range", "all out of range", "one expert"))
    ids = ids.long() if way.startswith("far") else ids.clone()
    bad = FAR_IDS if way.startswith("far") else (*IDS, E)
    if way == "repeated":
        ids[:] = ids[:, :1].clone()
    elif way == "one expert":
        ids.fill_(E - 1)
    elif way == "all out of range":
        ids.fill_(rng.choice(bad))
    else:
        for slot in range(ids.numel()):
            if rng.random() < 0.3:
                ids.view(-1)[slot] = rng.choice(bad)
    return ids, way


# ------------------------------------------------------------------------------------------------ memory


def contiguous(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def flat(tensor: Tensor) -> Tensor:
    """Separate memory with its values."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))


def lay_out_all(case: Case, args: Args, rng: random.Random) -> dict[str, Layout]:
    plainly = rng.random() < 0.3
    table = ARGUMENTS[case.op]
    rows = {n for n in args if table[n].kind == "weight" and format_of(n, case.options) != "dense"}
    even = own_scales(case)
    return {
        name: lay_out(tensor, "exact")
        if plainly
        else lay_out_randomly(tensor, rng, name in written(case.op), name in rows, name in even)
        for name, tensor in args.items()
    }


def lay_out_randomly(tensor: Tensor, rng: random.Random, is_written: bool, in_rows: bool, even: bool) -> Layout:
    """`in_rows`: the bytes of a row are contiguous; `even`: rows begin at even bytes."""
    if even:
        return lay_out(tensor, rng.choice(("exact", "exact", "evenly contiguous", "evenly padded")), rng)
    kinds = ["exact", "exact", "contiguous", "padded", *([] if in_rows else ["strided", "transposed"])]
    if not is_written and tensor.numel() > 1 and not in_rows:
        kinds += ["expanded", "overlapping"]
    return lay_out(tensor, rng.choice(kinds), rng)


def lay_out(tensor: Tensor, kind: str, rng: random.Random | None = None) -> Layout:
    """exact: memory of exactly its size; expanded and overlapping: elements share memory, and so their values; else
    between guards."""
    if kind == "exact":
        return Layout(flat(tensor), tuple(tensor.shape), contiguous(tensor.shape), 0, kind)
    if kind == "expanded":
        dims = [dim for dim, count in enumerate(tensor.shape) if count > 1]
        for dim in rng.sample(dims, rng.randint(1, len(dims))):
            tensor = tensor.narrow(dim, 0, 1).expand(tensor.shape)
        narrow = tensor.as_strided([1 if s == 0 else n for n, s in zip(tensor.shape, tensor.stride(), strict=True)],
                                   tensor.stride(), tensor.storage_offset())  # fmt: skip
        strides = [0 if s == 0 else n for n, s in zip(contiguous(narrow.shape), tensor.stride(), strict=True)]
        return Layout(flat(narrow), tuple(tensor.shape), tuple(strides), 0, kind)
    if kind == "overlapping":
        strides = tuple(stride // rng.choice((1, 2, 3)) for stride in contiguous(tensor.shape))
        span = 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, strides, strict=True))
        return Layout(flat(tensor)[:span].clone(), tuple(tensor.shape), strides, 0, kind)
    guarded = Guarded(tensor, kind, rng.randrange(0, 9, 2) if kind.startswith("evenly") else rng.randrange(9))
    view = guarded.view
    return Layout(guarded.storage, tuple(view.shape), view.stride(), view.storage_offset(), kind)


def share_memory(call: Call, rng: random.Random) -> None:
    """Two arguments of one dtype in one memory: side by side, alternating, or one inside the other."""
    pairs = [
        (a, b)
        for a in call.layouts
        for b in call.layouts
        if a != b
        and call.layouts[a].memory.dtype != torch.uint8
        and call.layouts[a].memory.dtype == call.layouts[b].memory.dtype
    ]
    if not pairs:
        return
    one, other = rng.choice(pairs)
    values = call.values()
    first, second = values[one], values[other]
    is_written = bool({one, other} & set(written(call.op)))
    if first.shape == second.shape and first.dim() and rng.random() < 0.6:
        dim = rng.choice((-1, first.dim()))  # halves, or alternating
        both = torch.cat([first, second], -1) if dim == -1 else torch.stack([first, second], -1).flatten(-2)
        halves = both.chunk(2, -1) if dim == -1 else (both[..., ::2], both[..., 1::2])
        for name, half in zip((one, other), halves, strict=True):
            kind = f"packed with {other if name == one else one}"
            call.layouts[name] = Layout(flat(both), tuple(half.shape), half.stride(), half.storage_offset(), kind)
        call.layouts[one].memory = call.layouts[other].memory
    elif second.numel() <= first.numel():
        call.layouts[one] = lay_out(first, "exact")
        offset = rng.randint(0, first.numel() - second.numel())
        layout = Layout(
            call.layouts[one].memory, tuple(second.shape), contiguous(second.shape), offset, f"within {one}"
        )
        call.layouts[other] = layout
        call.good = call.good and not is_written


# ------------------------------------------------------------------------------------------------ kinds of tensors

#: Kinds of tensors in PyTorch other than plain ones, with the same values.
DRESSES: dict[str, Callable[[Tensor], Tensor]] = {
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "lazy_clone": lambda t: torch._lazy_clone(t),
    "negative_view": lambda t: torch._neg_view(-t),
    "conjugate": lambda t: t.conj(),
    "detached": lambda t: t.detach(),
}


#: PyTorch's own ops write through lazy clones on mps (pull request 150569), and mps cannot copy them. The simulated
#: device does not keep the negative bit of views, and has no tensors without a storage.
NOT_THERE = [("lazy_clone", "mps"), ("mkldnn", "mps")]
NOT_THERE += [] if torch.backends.mps.is_built() else [("negative_view", "mps"), ("sparse", "mps")]


def dress(call: Call, rng: random.Random) -> None:
    name, what = rng.choice(list(call.layouts)), rng.choice(list(DRESSES))
    if (name in written(call.op) and what != "lazy_clone") or not call.layouts[name].memory.is_floating_point():
        return
    call.changes.append(Change(name, what, DRESSES[what]))


TENSORS: dict[str, Callable[[Tensor], object]] = {
    "cut": lambda t: t[..., :-1],
    "first token": lambda t: t[:1],
    "no columns": lambda t: t[..., :0],
    "no rows": lambda t: t[:0],
    "one dim more": lambda t: t.unsqueeze(0),
    "one dim less": lambda t: t[0],
    "flat": lambda t: t.flatten(),
    "transposed": lambda t: t.mT,
    "scalar": lambda t: t.new_zeros(()),
    "empty": lambda t: t.new_zeros(0),
    "a million more": lambda t: t.unsqueeze(-1).expand(*t.shape, 2**20)[..., 0, :],
    "endless": lambda t: t[..., :1].expand(*t.shape[:-1], 2**40),
    "sparse": lambda t: t.to_sparse(),
    "mkldnn": lambda t: t.float().to_mkldnn(),
    "requires grad": lambda t: t.detach().clone().requires_grad_(),
    "a number": lambda t: 1.0,
    "a text": lambda t: "text",
    "a list": lambda t: t.tolist(),
    "an array": lambda t: t.float().numpy(force=True),
    "left out": lambda t: MISSING,
    "on the cpu": lambda t: t.cpu(),
} | {
    str(dtype).removeprefix("torch."): lambda t, dtype=dtype: t.to(dtype)
    for dtype in (*DTYPES, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.int16, torch.bool)
}

OPTIONS: dict[type, tuple] = {
    int: (-1, 0, 1, 2, 2**20, 2**31, 2**32 + 1, 2**63 - 1, -(2**63), 1.5, "1", None, nan),
    float: (nan, inf, -inf, -1.0, 0.0, -0.0, 1e39, -1e39, 1e-46, 1e-30, 1e30, 3, "1", None),
    bool: (None, "yes", 2, 0.5),
    torch.dtype: (torch.float64, torch.int32, torch.bool, torch.float8_e4m3fn, "float32", None),
    str: ("", " ", "?" * 5000, "S", "softmax ", 'quote"', "\u00e9", None, 3),
}


#: Arguments that may have any width, which takes the simulated device minutes.
WIDE = (("attention", "v"), ("linear_attention_", "v"), ("linear_attention_", "conv_weight"), ("short_conv_", "weight"))


def fits(what: str, tensor: Tensor) -> bool:
    """Whether this change is possible for a tensor of this shape."""
    dims = {"cut": 1, "first token": 1, "no columns": 1, "no rows": 1, "one dim less": 1, "a million more": 1}
    dims |= {"transposed": 2, "endless": 2, "mkldnn": 1}
    enough = tensor.dim() >= dims.get(what, 0) and (tensor.numel() > 0 or what not in ("one dim less", "endless"))
    too_many = what == "mkldnn" and tensor.dim() > 5
    return enough and not too_many and (tensor.is_floating_point() or what not in ("requires grad", "mkldnn"))


def spoil(call: Call, rng: random.Random) -> None:
    """Makes one or two arguments or options bad."""
    call.good = False
    for _ in range(rng.choice((1, 1, 2))):
        if signature(call.op) and rng.random() < 0.4:
            name = rng.choice(list(signature(call.op)))
            kind = types_of(signature(call.op)[name])[0]
            call.options[name] = rng.choice([value for value in OPTIONS[kind] if (name, value) != ("dilation", 2**20)])
        elif rng.random() < 0.05:
            call.options["unknown_option"] = 1
        elif rng.random() < 0.15:
            empty_letter(call, rng)
        else:
            name = rng.choice(list(call.layouts))
            fitting = [what for what in TENSORS if fits(what, call.values()[name])]
            if (call.op, name) in WIDE and "a million more" in fitting:
                fitting.remove("a million more")
            what = rng.choice(fitting)
            call.changes = [change for change in call.changes if change.name != name]
            call.changes.append(Change(name, what, TENSORS[what]))


def empty_letter(call: Call, rng: random.Random) -> None:
    """Makes all sizes of one letter 0."""
    letters = shapes(call.op, tuple(call.layouts), bool(call.options.get("transposed", False)))
    letter = rng.choice([letter for letter in "EKHIBAJSDVR" if any(letter in text for text in letters.values())])
    for name, text in letters.items():
        text = text.replace("G", "I")
        if letter in text and name in call.layouts:
            call.changes = [change for change in call.changes if change.name != name]
            dim = text.index(letter) - len(text)
            call.changes.append(Change(name, f"no {letter}", lambda t, dim=dim: t.narrow(dim, 0, 0)))
