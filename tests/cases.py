"""The one table of cases: the arguments with which every test calls the ops.

A case has shapes as letters (T tokens, E experts, K experts per token, H hidden, I inner, G = 2I, N rows, U scalars;
those of rope and attention are in arguments.py), its optional arguments, options and dtypes. Its tensors are drawn on
the CPU, the same in every run.

`CASES` contains named cases (real routers and blocks, other projects' tests, hostile inputs), the pairwise grids, and
small samples of each op and of each weight format with all optional arguments: the slower tests run the samples too.
"""

import copy
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from math import inf, nan, prod

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_moe_metal import arguments, formats, reference
from torch_moe_metal.arguments import ARGUMENTS, DTYPES, ROUTERS, Parts, format_of, optional_arguments
from torch_moe_metal.commands.bench.model_sizes import MODELS, Model
from torch_moe_metal.commands.bench.random_weights import Packing
from torch_moe_metal.commands.doctor import PACKED as FAMILIES

FLOAT, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16
OPTIONAL = {op: optional_arguments(op) for op in ARGUMENTS}

Args = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Case:
    op: str
    name: str
    dims: dict[str, int]
    given: tuple[str, ...] = ()  # the optional arguments
    options: dict = field(default_factory=dict)
    dtype: torch.dtype = FLOAT  # of the activations
    parameter_dtype: torch.dtype | None = None  # None: the dtype of activations
    prepare: Callable[[Args], None] | None = None  # changes the drawn arguments: hostile values, other layouts
    bits: int = 4  # bits of affine weights
    group: int = 64  # their group size
    scale_dtype: torch.dtype | None = None  # dtype of the scales of affine and fp8; None: float32
    # too large or not finite: compare in float32, because float64 would overflow and round differently
    hostile: bool = False
    sample: bool = False
    full_grid: bool = False  # only in the full grid, even if it is fast
    fast_on: tuple[str, ...] = ()  # devices on which it is in the fast set even if it is slow

    def __str__(self) -> str:
        return f"{self.op}-{self.name}-{DTYPES[self.dtype]}"

    @property
    def shapes(self) -> dict[str, str]:
        """The letters of this case's arguments."""
        options = {name: self.options[name] for name in ("transposed", "down_format") if name in self.options}
        return arguments.shapes(self.op, self.given, format=self.format, **options)

    @property
    def format(self) -> str:
        return self.options.get("format", "dense")

    @property
    def common_shader(self) -> bool:
        """Whether the fast set compiles the case's shader, which takes the simulated Metal a second or two. Readers of
        packed weights do not depend on the activations' dtype, and the samples cover the other dtypes. Of the affine
        widths, 3 bits cross bytes like 5 and 6 bits. `make lint` compiles every shader in every format."""
        if self.format == "dense" or self.sample or "mps" in self.fast_on:
            return True
        return self.dtype == FLOAT and (self.bits in (3, 4, 8) or self.op == "dequantize")

    def size(self, letters: str) -> tuple[int, ...]:
        return arguments.size(letters, self.dims)

    def arguments(self, device: str | torch.device = "cpu") -> Args:
        """The arguments, equal in every call; the caller may change them."""
        args = copy.deepcopy(self._recent_arguments()) if self.elements < 2**20 else self._all_arguments()
        return {name: tensor.to(device) for name, tensor in args.items()}

    def expected(self) -> list[Tensor]:
        """The reference's result for `arguments`; callers must not change it."""
        return self._recent_answer() if self.elements < 2**20 else self._answer()

    # Tests use the same small cases one after the other: drawing and packing them took half of the time of all tests.
    @functools.lru_cache(maxsize=16)  # noqa: B019
    def _recent_arguments(self) -> Args:
        return self._all_arguments()

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def _recent_answer(self) -> list[Tensor]:
        return self._answer()

    def _answer(self) -> list[Tensor]:
        return expected(self.op, self.arguments(), self.options, self.hostile)

    def _all_arguments(self) -> Args:
        """Arguments drawn from the case's name. For routers, tokens with near ties are drawn again."""
        seed = zlib.crc32(str(self).encode())
        args = self._draw(seed, tuple(self.shapes))
        if self.op in ROUTERS and not self.hostile:
            row = next(iter(args))
            unclear = torch.arange(self.dims["T"])
            for attempt in range(1, 200):
                unclear = unclear[~clear_choice(self.op, args | {row: args[row][unclear]}, self.options)]
                if unclear.numel() == 0:
                    break
                args[row][unclear] = self._draw(seed + attempt, (row,))[row][unclear]
            else:
                raise AssertionError(f"{self}: no clear choice in 200 attempts")
        return args

    def _draw(self, seed: int, names: tuple[str, ...]) -> Args:
        generator = torch.Generator().manual_seed(seed)
        kinds = {name: ARGUMENTS[self.op][name].kind for name in names}
        args = {
            name: arguments.draw(name, self.size(self.shapes[name]), self.dims, generator)
            for name, kind in kinds.items()
            if kind not in ("scale", "offset")
        }
        args = arguments.pack(self.op, args, lambda name, weight: self._pack(name, weight, generator))
        for name, tensor in args.items():
            if kinds[name] not in ("scale", "offset") and tensor.is_floating_point():
                args[name] = tensor.to((self.parameter_dtype if kinds[name] == "parameter" else None) or self.dtype)
        if self.prepare:
            self.prepare(args)
        return args

    def _pack(self, name: str, weight: Tensor, generator: torch.Generator) -> Parts:
        """A weight in `down_format` has its own bits and group size."""
        format = format_of(name, self.options)
        if format == "dense":
            return weight, None, None
        row = formats.FORMATS[format]
        own = (self.bits, self.group) if format == self.format else (row.bits, row.scale_columns or 32)
        data, *others = Packing(format, *own).of(weight, generator)
        if takes_floats(row):
            others = [part if part is None else part.to(self.scale_dtype or part.dtype) for part in others]
        return data, *others

    @property
    def longest_sum(self) -> int:
        """The number of terms of its longest sum, which determines the tolerance of float32."""
        letters = {"gate": "HI", "experts": "HI", "dequantize": "K", "attention": "DS", "rope": "AD"}.get(self.op, "KH")
        return max(self.dims.get(letter, 1) for letter in letters)

    @property
    def flops(self) -> int:
        T, E, K, H, I, N = (self.dims.get(letter, 1) for letter in "TEKHIN")
        products = {"gate": 2 * T * E * H, "experts": 6 * T * K * H * I, "linear": 2 * T * N * H}
        others = {"route": 8 * T * E, "glu": 8 * T * I, "dequantize": 8 * N * H}
        if self.op == "attention":
            return 2 * T * prod(self.dims[letter] for letter in "BAS") * (self.dims["D"] + self.dims["V"])
        if self.op == "rope":
            return 8 * T * self.dims["B"] * (self.dims["A"] + self.dims["J"]) * self.dims["D"]
        return (products | others).get(self.op, 2 * T * (K + 3) * H)

    @property
    def elements(self) -> int:
        """Elements of all arguments, used or not. Scales of packed weights do not count."""
        table = ARGUMENTS[self.op]
        return sum(
            prod(self.size(letters))
            for name, letters in self.shapes.items()
            if table[name].kind not in ("scale", "offset")
        )

    @property
    def bytes(self) -> int:
        """Bytes that must be moved once. Of the experts' weights, those of the maximum number of selected experts."""
        dims = self.dims
        if self.op == "experts":
            dims = dims | {"E": min(dims["E"], dims["T"] * dims["K"])}
        used = replace(self, dims=dims)
        written = sum(prod(used.size(letters)) for letters in arguments.RETURNS.get(self.op, ("TH",)))
        return (used.elements + written) * self.dtype.itemsize


def takes_floats(row: formats.Format) -> bool:
    """Whether a format has a choice of dtypes for its scales."""
    return row.scale in ("any_float", "float32_or_bfloat16")


def clear_choice(op: str, args: Args, options: dict) -> Tensor:
    """[T] whether rounding in float32 cannot change the selected experts or their order. Exact ties count as clear."""
    get = {name: tensor.double() for name, tensor in args.items()}.get
    hidden, logits, H = get("hidden"), get("logits"), 1
    if op == "gate":
        if get("norm_weight") is not None:
            hidden = reference.normed(hidden, options.get("eps", 1e-6)) * get("norm_weight")
        logits, H = F.linear(hidden, get("router_weight"), get("router_bias")), hidden.shape[-1]
    elif get("select_bias") is None and options.get("n_group", 1) == 1:
        return torch.ones(logits.shape[0], dtype=torch.bool)
    cap = options.get("softcap", 0.0)
    scores = reference.SCORING[options.get("scoring", "softmax")](cap * torch.tanh(logits / cap) if cap else logits)
    biased = scores if get("select_bias") is None else scores + get("select_bias")
    choice, clear = (logits if get("select_bias") is None else biased), True
    margin = 2e-6 * max(1.0, H / 64) ** 0.5
    if options.get("n_group", 1) > 1:
        n_group, topk_group, group_score = (
            options["n_group"],
            options["topk_group"],
            options.get("group_score", "top2_sum"),
        )
        groups = biased.unflatten(-1, (n_group, -1)).sort(-1, descending=True).values
        totals = groups[..., : 2 if group_score == "top2_sum" else 1].sum(-1)
        clear = far_apart(totals.sort(-1, descending=True).values[:, topk_group - 1 : topk_group + 1], margin)
        choice = choice.masked_fill(reference.outside_best_groups(biased, n_group, topk_group, group_score), -inf)
    return clear & far_apart(choice.sort(-1, descending=True).values[:, : options["top_k"] + 1], margin)


def far_apart(descending: Tensor, margin: float) -> Tensor:
    gaps = descending[:, :-1] - descending[:, 1:]
    scale = descending.nan_to_num(neginf=0.0).abs().amax(-1, keepdim=True)
    return ((gaps > margin * scale) | (gaps == 0) | gaps.isnan()).all(-1)


# ------------------------------------------------------------------------------------------------ the oracle


def call(function: Callable, op: str, args: Args, options: dict) -> list[Tensor]:
    """Call an op or its reference. Returns its outputs, then what it wrote in-place."""
    return arguments.results(op, function(**args, **options), args)


def expected(op: str, args: Args, options: dict, hostile: bool = False) -> list[Tensor]:
    """The reference's result for arguments on the CPU, in float64, or in float32 for hostile values."""
    large = (
        op == "experts"
        and not hostile
        and max(args["ids"].numel(), len(args["gate_up"])) * args["gate_up"][0].numel() > 2**18
    )
    parts = {"experts": experts_one_by_one, "attention": attention_by_parts}
    function = parts[op] if large or op == "attention" else getattr(reference, op)
    as_they_are = ("gate_up", "down") if large else ()
    exact = {
        name: tensor.double() if is_number(tensor) and name not in as_they_are else tensor
        for name, tensor in args.items()
    }
    return call(function, op, {name: tensor.clone() for name, tensor in args.items()} if hostile else exact, options)


def is_number(tensor: Tensor) -> bool:
    """Whether it has plain values: no ids, and not packed (float8_e4m3fn is packed)."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def experts_one_by_one(
    x, weights, ids, gate_up, down, gate_up_bias=None, down_bias=None, shared=None, shared_gate=None, residual=None,
    gate_up_scale=None, gate_up_offset=None, down_scale=None, down_offset=None,
    *, interleaved=False, transposed=False, format="dense", down_format=None, group_size=0, **activation,
):  # fmt: skip
    """The reference's `experts` without copies of the weights for every token, so that real sizes fit into memory."""

    def linear(format: str, x: Tensor, bias: Tensor | None, weight: Tensor, *others: Tensor | None) -> Tensor:
        of_expert = (None if t is None else t[e] for t in (weight.mT if transposed else weight, *others))
        return F.linear(
            x, reference.dequantize_for(*of_expert, format, x, group_size), None if bias is None else bias[e]
        )

    slots = x.new_zeros(*ids.shape, x.shape[-1])
    for e in ids.unique().tolist():
        if not 0 <= e < gate_up.shape[0]:
            continue
        *token, slot = (ids == e).nonzero(as_tuple=True)
        both = linear(format, x[tuple(token)], gate_up_bias, gate_up, gate_up_scale, gate_up_offset)
        gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
        inner = reference.glu(gate, up, **activation)
        slots[(*token, slot)] = linear(down_format or format, inner, down_bias, down, down_scale, down_offset)
    used = (ids >= 0) & (ids < gate_up.shape[0])
    return reference.rounded(reference.weighted_sum(slots, weights.where(used, 0), shared, shared_gate, residual), x)


def attention_by_parts(q, k, v, mask=None, sinks=None, *, causal=False, **options):
    """The reference's `attention` for one head and some queries at a time, so that real sizes fit into memory."""
    (B, A, T, _), (_, J, S, V) = q.shape, v.shape
    output, queries = q.new_empty(B, T, A, V), max(1, 2**22 // max(1, S * V))
    for b, a, t in product(range(B), range(A), range(0, T, queries)):
        end, j = min(t + queries, T), a * J // A
        keys = max(0, S - T + end) if causal else S  # keys that the last of these queries sees
        kv = (x[b : b + 1, j : j + 1, :keys] for x in (k, v))
        seen = None if mask is None else mask.expand(B, A, T, S)[b : b + 1, a : a + 1, t:end, :keys]
        sink = None if sinks is None else sinks[a : a + 1]
        part = reference.attention(q[b : b + 1, a : a + 1, t:end], *kv, seen, sink, causal=causal, **options)
        output[b, t:end, a] = part[0, :, 0]
    return output


# ------------------------------------------------------------------------------------------------ combinations


def pairwise(fits: Callable[..., bool], **factors: tuple) -> list[dict]:
    """Rows in which any two values of any two factors occur together at least once, if a row that `fits` allows it."""
    pairs = {((a, x), (b, y)) for a, b in combinations(factors, 2) for x in factors[a] for y in factors[b]}
    order = [((a, x), (b, y)) for a, b in combinations(factors, 2) for x in factors[a] for y in factors[b]]
    smallest = {name: values[0] for name, values in factors.items()}
    rows = []
    for pair in order:
        if pair not in pairs:
            continue
        row = dict(pair)
        for name, values in factors.items():
            if name not in row:
                turn = len(rows) % len(values)  # equally good values take turns
                fitting = [v for v in values[turn:] + values[:turn] if fits(**(smallest | row | {name: v}))]
                if fitting:
                    row[name] = max(
                        fitting, key=lambda v: sum(_pair(factors, name, v, other) in pairs for other in row.items())
                    )
        row = {name: row.get(name, smallest[name]) for name in factors}
        if fits(**row):
            rows.append(row)
            pairs.difference_update(combinations(row.items(), 2))
    return rows


def _pair(factors: dict, name: str, value, other: tuple) -> tuple:
    first = list(factors).index(name) < list(factors).index(other[0])
    return ((name, value), other) if first else (other, (name, value))


def crossed(**factors: tuple) -> Iterator[tuple]:
    """Every combination of the values, and whether it is only in the full grid. In the fast set any two values occur
    together at least once, which finds faults of one value or of two together."""
    fast = {tuple(row.values()) for row in pairwise(lambda **_: True, **factors)}
    for values in product(*factors.values()):
        yield *values, values not in fast


# ------------------------------------------------------------------------------------------------ named cases

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


def real_cases() -> list[Case]:
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
    cases = [
        Case("experts", f"{project}-T{T}-E{E}-K{K}-H{H}-I{I}", {"T": T, "E": E, "K": K, "H": H, "I": I}, dtype=dtype)
        for project, rows in experts.items()
        for T, E, K, H, I in rows
        for dtype in (FLOAT, BFLOAT)
    ]
    topk_moe = [(22, 8, 4), (22, 31, 8), (22, 32, 8), (22, 40, 8), (22, 71, 8), (128, 1, 1), (128, 128, 8)]
    topk_moe += [
        (128, 129, 8),
        (4, 160, 160),
        (22, 256, 6),
        (22, 288, 8),
        (33, 6, 3),
        (56, 16, 4),
    ]  # the last two are vLLM's
    rows = crossed(
        size=tuple(topk_moe), scoring=tuple(reference.SCORING), renormalize=("none", "before_scale"), given=((), BIASED)
    )
    for (T, E, K), scoring, renormalize, given, full_grid in rows:
        options = {"top_k": K, "scoring": scoring, "renormalize": renormalize, "scaling_factor": 2.0}
        name = f"topk_moe-{scoring}-{renormalize}{'-biased' * bool(given)}-T{T}-E{E}"
        cases.append(Case("route", name, {"T": T, "E": E, "K": K}, given, options, full_grid=full_grid))
    reduce = [(2, 2, 8), (4, 8, 64), (4096, 8, 2816)]
    cases += [Case("weighted_sum", f"mistral_rs-T{T}", {"T": T, "K": K, "H": H}, dtype=BFLOAT) for T, K, H in reduce]
    return cases


def setting(name: str, index, value: float) -> Callable[[Args], None]:
    def prepare(args: Args) -> None:
        args[name][index] = value

    return prepare


def scaling(name: str, factor: float) -> Callable[[Args], None]:
    def prepare(args: Args) -> None:
        args[name] *= factor

    return prepare


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


def experts_cases() -> list[Case]:
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


def both(*changes: Callable[[Args], None]) -> Callable[[Args], None]:
    def prepare(args: Args) -> None:
        for change in changes:
            change(args)

    return prepare


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
    for size in range(4):
        for given in combinations(OPTIONAL["weighted_sum"], size):
            if "shared_gate" not in given or "shared" in given:
                cases.append(Case("weighted_sum", "+".join(given) or "bare", dims, given, {}, HALF, FLOAT))
    return cases


def transposed_weight(args: Args) -> None:
    args["weight"] = args["weight"].t().contiguous().t()


def many_tokens() -> list[Case]:
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
        Case("glu", "T32769", {"T": T, "I": 17}, (), {}, BFLOAT),
        Case("experts", "T32769", {"T": T, "E": 5, "K": 2, "H": 20, "I": 12}, BIASES, {}, BFLOAT),
        Case("experts", "T40001", {"T": 40001, "E": 8, "K": 1, "H": 64, "I": 64}, (), {}, FLOAT),
    ]


# ------------------------------------------------------------------------------------------------ samples

SUMS = tuple(op for op in ARGUMENTS if op.startswith("weighted_sum"))
NORMS = ("norm", "norm_add", "residual_norm")


def samples() -> list[Case]:
    """All optional arguments with odd sizes; then aligned sizes in bfloat16; then float16."""
    routing = [
        {"top_k": 3},
        {"top_k": 4, "scoring": "sigmoid", "n_group": 4, "topk_group": 2, "scaling_factor": 2.5},
        {"top_k": 8, "scoring": "sqrt_softplus", "renormalize": "after_scale", "softcap": 20.0},
    ]
    activation = [{}, OAI | {"interleaved": True}, {"activation": "gelu_tanh", "transposed": True}]
    dims = [
        {"T": 6, "E": 13, "K": 3, "H": 67, "I": 19, "N": 37, "U": 1},
        {"T": 6, "E": 16, "K": 4, "H": 64, "I": 96, "N": 64, "U": 64},
        {"T": 6, "E": 40, "K": 8, "H": 130, "I": 33, "N": 5, "U": 1},
    ]
    heads = [
        {"B": 2, "A": 6, "J": 2, "S": 21, "D": 19, "V": 23, "R": 7},
        {"B": 1, "A": 8, "J": 1, "S": 80, "D": 64, "V": 64, "R": 32},
        {"B": 3, "A": 3, "J": 3, "S": 33, "D": 72, "V": 40, "R": 20},
    ]
    seeing = [{"causal": True, "window": 9, "scale": 0.3}, {"causal": True}, {}]
    dtypes = [(FLOAT, None), (BFLOAT, FLOAT), (HALF, None)]
    cases = []
    for op in ARGUMENTS:
        for name, size, more, dtype, route, act, see in zip(
            ("odd", "even", "half"), dims, heads, dtypes, routing, activation, seeing, strict=True
        ):
            options = arguments.options(op, route | act | see | {"format": "dense", "dtype": dtype[0]})
            cases.append(Case(op, f"sample_{name}", size | more, OPTIONAL[op], options, *dtype, sample=True))
    return cases + [packed_sample(op, name) for op in PACKED_OPS for name in PACKED_SAMPLES]


PACKED_OPS = tuple(op for op in ARGUMENTS if arguments.takes_formats(op))
# format, bits, group, H, I, N, dtypes of activations, parameters and scales, options
PACKED_SAMPLES = {
    "affine4": ("affine", 4, 32, 96, 32, 37, FLOAT, None, FLOAT, {}),
    "affine3": ("affine", 3, 16, 80, 48, 19, BFLOAT, FLOAT, HALF,
                {"activation": "gelu_tanh", "limit": 2.0, "group_size": 16}),
    "mxfp4": ("mxfp4", 4, 32, 160, 96, 33, BFLOAT, None, None, OAI | {"interleaved": True}),
    "fp8": ("fp8", 8, 128, 130, 70, 200, HALF, FLOAT, BFLOAT, {"interleaved": True, "group_size": 128}),
    "nvfp4": ("nvfp4", 4, 16, 112, 48, 35, HALF, None, None, {"activation": "gelu", "group_size": 16}),
    "q4_k": ("q4_k", 4, 32, 256, 256, 34, BFLOAT, None, None, {"down_format": "q6_k"}),
}  # fmt: skip


def packed_sample(op: str, name: str) -> Case:
    format, bits, group, H, I, N, dtype, parameters, scales, options = PACKED_SAMPLES[name]
    dims = {"T": 6, "E": 7, "K": 3, "H": H, "I": I, "N": N}
    options = arguments.options(op, options | {"format": format, "bits": bits, "dtype": dtype})
    return Case(
        op, f"sample_{name}", dims, OPTIONAL[op], options, dtype, parameters, None, bits, group, scales, sample=True
    )


# ------------------------------------------------------------------------------------------------ packed weights

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
    for place, bits in POSITIVE.get(format, ()):
        for name in args.keys() & {"gate_up", "down", "weight"}:
            args[name].unflatten(-1, (-1, formats.FORMATS[format].bytes))[..., place] |= bits


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


def all_weights(args: Args, change: Callable[[Tensor], Tensor]) -> None:
    for name in ("weight", "gate_up", "down"):
        if name in args:
            args[name] = change(args[name])


def as_words(args: Args) -> None:
    all_weights(args, lambda data: data.view(torch.int32))


def as_unsigned_words(args: Args) -> None:
    all_weights(args, lambda data: data.view(torch.uint32))


def as_float8(args: Args) -> None:
    all_weights(args, lambda data: data.view(torch.float8_e4m3fn))


def scales_as_float8(args: Args) -> None:
    for name in scales_of(args):
        if name.endswith("scale"):
            args[name] = args[name].view(torch.float8_e4m3fn)


def without_factor(args: Args) -> None:
    for name in scales_of(args):
        if name.endswith("offset"):
            del args[name]


def in_blocks(args: Args) -> None:
    """As in gpt-oss."""
    all_weights(args, lambda data: data.unflatten(-1, (-1, 16)))


def wider_rows(args: Args) -> None:
    """Rows at arbitrary positions: 5 bytes follow each row, which must not be read."""
    all_weights(args, lambda data: widened(data, 3, 2))


def wider_even_rows(args: Args) -> None:
    """The same with even positions, as float16 requires."""
    all_weights(args, lambda data: widened(data, 2, 4))


def widened(data: Tensor, before: int, behind: int) -> Tensor:
    wider = data.new_full((*data.shape[:-1], before + data.shape[-1] + behind), 255)
    wider[..., before:-behind] = data
    return wider[..., before:-behind]


def scales_of(args: Args) -> list[str]:
    return [name for name in args if name.endswith(("scale", "offset"))]


def unused_scales_not_finite(args: Args) -> None:
    """Experts that no token has selected must not be read."""
    args["ids"] %= 2
    for name in scales_of(args):
        args[name][2:] = inf if args[name].is_floating_point() else 255
        args[name][3:] = nan if args[name].is_floating_point() else 255
    for name in ("gate_up", "down"):
        args[name][2:] = 255


def nan_scale(args: Args) -> None:
    """The scale of one group or block: results that use it are NaN, all others are not."""
    name = next((name for name in ("scale", "gate_up_scale") if name in args), None)
    if name is None:
        return last_factors(args, "gate_up", nan)
    args[name][..., -1:, -1:] = nan if args[name].is_floating_point() else 255


def infinite_scale(args: Args) -> None:
    name = next((name for name in ("scale", "down_scale") if name in args), None)
    if name is None:
        return last_factors(args, "down", inf)
    args[name][..., :1, :1] = inf


def last_factors(args: Args, name: str, value: float) -> None:
    """Of q8_0 or q4_k, whose blocks begin with a float16."""
    data = args["weight" if "weight" in args else name]
    block = 34 if data.shape[-1] % 34 == 0 else 144
    data[..., -1, -block : 2 - block] = torch.tensor([value], dtype=HALF).view(torch.uint8)


def every_code(args: Args) -> None:
    """All byte values, including the two NaN of e4m3."""

    def change(data: Tensor) -> Tensor:
        data.view(-1)[: min(256, data.numel())] = torch.arange(256, dtype=torch.uint8)[: data.numel()]
        return data

    all_weights(args, change)


def extreme_powers(args: Args) -> None:
    """The smallest and largest exponents of e8m0 that float32 can represent: 0 makes subnormal values."""
    for name in scales_of(args):
        args[name].view(-1)[::3], args[name].view(-1)[1::7] = 0, 1
    all_weights(args, lambda data: data & 0x99)  # 0 and 0.5, with their signs: half of 2^127 does not overflow
    args["scale"].view(-1)[2::5] = 254


HOSTILE_IDS = {
    "repeated_ids": repeated_ids,
    "ids_out_of_range": ids_out_of_range,
    "all_ids_out_of_range": all_ids_out_of_range,
    "far_ids_out_of_range": far_ids_out_of_range,
    "long_ids": long_ids,
    "all_to_one_expert": all_to_one_expert,
    "unused_scales_not_finite": unused_scales_not_finite,
}


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


# ------------------------------------------------------------------------------------------------ grids

E_GRID = (
    1, 2, 6, 7, 8, 16, 31, 32, 33, 40, 48, 60, 63, 64, 65, 71, 96, 127, 128, 129, 160, 256, 257, 288, 384, 512, 1024,
)  # fmt: skip
K_GRID = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 22, 32, 64, "E")
T_GRID = (0, 1, 2, 3, 5, 7, 8, 17, 31, 32, 33, 64, 129, 512, 4097)
H_GRID = (1, 3, 17, 64, 96, 511, 512, 555, 704, 768, 1408, 2048, 2816, 2880, 4096, 7168)
PAIRS = ((FLOAT, None), (HALF, None), (BFLOAT, None), (HALF, FLOAT), (BFLOAT, FLOAT))
ROUTING_GRID = {
    "scoring": tuple(reference.SCORING),
    "renormalize": ("none", "before_scale", "after_scale"),
    "groups": (None, (2, 1, "top2_sum"), (4, 2, "max"), (8, 4, "top2_sum"), (8, 3, "max")),
    "scaling_factor": (1.0, 2.5),
    "softcap": (0.0, 15.0),
}


def grid_case(op: str, row: dict, given: tuple[str, ...], options: dict, prepare=None) -> Case:
    dims = {letter: row[letter] for letter in "TEKHIU" if letter in row}
    name = "grid-" + "-".join(f"{letter}{size}" for letter, size in dims.items())
    extras = [v for v in options.values() if v is not None and v not in (False, 1, 1.0, 0.0) and v != row.get("K")]
    name += "".join(f"-{extra}" for extra in (*extras, *given)) + ("" if prepare is None else f"-{prepare.__name__}")
    dtype, parameters = row["dtypes"]
    name += "-p32" if parameters else ""
    one_in_four = zlib.crc32(name.encode()) % 4 == 0
    return Case(op, name, dims, given, options, dtype, parameters, prepare, full_grid=not one_in_four)


def resolve_top_k(K, E: int) -> int:
    return E if K == "E" else K


def routing_options(row: dict) -> dict:
    n_group, topk_group, group_score = row["groups"] or (1, 1, "top2_sum")
    options = {name: row[name] for name in ("scoring", "renormalize", "scaling_factor", "softcap")}
    return options | {"top_k": row["K"], "n_group": n_group, "topk_group": topk_group, "group_score": group_score}


def routable(E, K, T, groups, H=1, **_) -> bool:
    n_group, topk_group, _ = groups or (1, 1, None)
    return E % n_group == 0 and resolve_top_k(K, E) <= E // n_group * topk_group and T * E * H <= 2**33


def router_grid(op: str, **more: tuple) -> list[Case]:
    given = tuple(c for n in range(len(OPTIONAL[op]) + 1) for c in combinations(OPTIONAL[op], n))
    rows = pairwise(routable, E=E_GRID, K=K_GRID, T=T_GRID, dtypes=PAIRS, given=given, **ROUTING_GRID, **more)
    rows = [row | {"K": resolve_top_k(row["K"], row["E"])} for row in rows]
    return [grid_case(op, row, row["given"], routing_options(row)) for row in rows]


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


def table() -> list[Case]:
    cases = (
        samples()
        + real_cases()
        + other_projects()
        + hostile_routes()
        + hostile_gates()
        + experts_cases()
        + packed_cases()
    )
    cases += glu_cases() + sum_and_norm_cases() + many_tokens() + rope_cases() + attention_cases()
    cases += router_grid("route") + router_grid("gate", H=H_GRID) + experts_grid() + plain_grids()
    return list({str(case): case for case in cases}.values())


CASES = table()
SAMPLES = [case for case in CASES if case.sample]
