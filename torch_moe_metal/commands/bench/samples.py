"""Small calls of the ops, with their results compared with the reference: every way to compute an op has one.

`doctor` makes them. A sample names the functions of the shaders that it is for, so a wrong result names a kernel.
"""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ... import arguments, gpu_settings, reference
from ...formats import FORMATS
from .random_weights import Packing

DIMS = {"E": 33, "K": 3, "H": 96, "I": 40, "N": 37, "U": 1}  # odd sizes: most faults of kernels are in tails
DIMS |= {"B": 2, "A": 6, "J": 2, "S": 101, "D": 40, "V": 24, "R": 8, "W": 4, "L": 4}
BITS = 4  # of affine weights
TOKENS = (5, 50)  # decoding, and a prompt, which has its own kernels


#: One format of each family of readers; the others differ only in constants.
PACKED = ("affine", "mxfp4", "fp8", "mxfp8", "nvfp4", "q4_0", "q5_0", "q8_0", "q2_k", "q3_k", "q4_k", "q6_k", "iq4_xs")


@dataclass(frozen=True)
class Sample:
    """A call of an op with all optional arguments. `functions` are those of the shaders that it is for; `settings` are
    launch parameters without which the GPU would compute it in another way."""

    op: str
    tokens: int
    format: str = "dense"
    functions: tuple[str, ...] = ()
    dims: dict[str, int] = field(default_factory=dict)
    settings: gpu_settings.Settings = field(default_factory=dict)
    transposed: bool = False  # dense weights of experts

    def __str__(self) -> str:
        format = "" if self.format == "dense" else f" {self.format}"
        sizes = "".join(f", {letter} = {size}" for letter, size in self.dims.items())
        functions = f" ({', '.join(self.functions)})" if self.functions else ""
        return f"{format}, T = {self.tokens}{sizes}{functions}"

    @property
    def options(self) -> dict[str, object]:
        wanted = {"top_k": self.sizes()["K"], "format": self.format, "causal": True, "replay": 1}
        return arguments.options(self.op, wanted | ({"transposed": True} if self.transposed else {}))

    def sizes(self) -> dict[str, int]:
        found = DIMS | self.dims | {"T": self.tokens}
        if self.format != "dense":
            whole = FORMATS[self.format].whole_columns
            # Few experts, because unpacking them for the reference takes most of the time.
            found |= {"E": 5, "H": -(-found["H"] // whole) * whole, "I": max(64, whole)}
        return found

    def arguments(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The same on every device. Parameters are float32."""
        dims, random = self.sizes(), torch.Generator().manual_seed(0)
        table = arguments.ARGUMENTS[self.op]
        shapes = arguments.shapes(self.op, arguments.optional_arguments(self.op), self.transposed)
        sizes = {name: arguments.size(letters, dims) for name, letters in shapes.items()}
        drawn = {name: arguments.draw(self.op, name, size, dims, random) for name, size in sizes.items()}
        if self.format != "dense":
            packing = Packing(self.format, BITS, 32)
            drawn = arguments.pack(self.op, drawn, lambda _, weight: packing.of(weight, random))
        converted = ("activation", "weight") if self.format == "dense" else ("activation",)
        return {name: t.to(dtype) if table[name].kind in converted else t for name, t in drawn.items()}


ODD = {"H": 97, "I": 41}  # rows that cannot be loaded 16 bytes at a time
TALL = {"B": 1, "A": 4, "J": 1, "S": 700}  # enough keys for several parts
UNITS = {"tensor_ops": 1}


def experts(functions: str, tokens: int, E: int, odd: bool = False, **options) -> Sample:
    named = tuple(f"experts_{name}" for name in functions.split())
    return Sample("experts", tokens, functions=named, dims={"E": E} | (ODD if odd else {}), **options)


def linear(function: str, tokens: int, odd: bool = False, **options) -> Sample:
    return Sample("linear", tokens, functions=(f"linear_{function}",), dims={"H": 97} if odd else {}, **options)


def attention(functions: str, tokens: int, D: int, V: int, **dims: int) -> Sample:
    return Sample("attention", tokens, functions=tuple(functions.split()), dims=TALL | dims | {"D": D, "V": V})


def units(rows: int, tokens: int, E: int) -> Iterator[Sample]:
    """On the matrix units: macOS 26.3, 16-bit activations. Elsewhere other kernels compute these samples."""
    product = f"tensor_products{rows}"
    of_experts = ("experts_gather", "experts_activate", "experts_combine_sorted", product)
    yield Sample("experts", tokens, functions=of_experts, dims={"E": E}, settings=UNITS)
    yield Sample("linear", rows - 5, functions=(product,), settings=UNITS | {"few_tokens": 0})


#: Those of the functions that the samples of TOKENS and PACKED do not reach, and others of the same op.
SAMPLES = (
    experts("gate_up_rows down_rows", 5, 33, odd=True),
    experts("gate_up_rows2_wide down_rows2_wide", 5, 8, settings={"down_pairs_percent": 100}),
    experts("gate_up_columns_wide down_columns_wide", 5, 33, transposed=True),
    experts("gate_up_columns down_columns", 5, 33, odd=True, transposed=True),
    experts("gate_up_tiles16 down_tiles16 combine sort", 50, 33, odd=True),
    experts("gate_up_tiles32 down_tiles32", 50, 8, odd=True),
    experts("gate_up_tiles32_wide down_tiles32_wide", 50, 8),
    experts("gate_up_tiles64", 50, 3, odd=True),
    experts("gate_up_tiles64_wide", 50, 3),
    linear("rows_wide", 1),
    linear("rows", 1, odd=True),
    linear("rows2_wide", 2),
    linear("tiles16_wide", 10),
    linear("tiles16", 10, odd=True),
    linear("tiles32_wide", 20),
    linear("tiles32", 20, odd=True),
    linear("tiles64", 50, odd=True),
    *itertools.chain(units(16, 50, 33), units(32, 50, 8), units(64, 50, 3)),
    Sample("gate", 1, functions=("gate_logits_1", "route_8"), dims={"E": 256, "H": 136}),
    Sample("gate", 20, functions=("gate_tile", "route_8"), dims={"E": 256, "H": 136}, settings={"gate_min_tiles": 1}),
    *(Sample("route", 5, functions=(f"route_{E // 32}",), dims={"E": E}) for E in (32, 128, 256, 512, 1024)),
    attention("attention_64_wide attention_combine", 1, 64, 64),
    attention("attention_128_wide", 20, 128, 128),
    attention("attention_128_wide", 5, 192, 128, A=3, J=3),
    attention("attention_128_wide", 1, 576, 512),
    attention("attention", 5, 41, 23),
    Sample("linear_attention_", 5, functions=("linear_attention_64",), dims={"D": 64, "V": 64}),
    Sample("linear_attention_", 5, functions=("linear_attention_128",), dims={"D": 128, "V": 128}),
    Sample("linear_attention_", 5, functions=("linear_attention_256", "linear_attention_groups"), dims={"V": 72}),
    *(
        Sample(op, 2, functions=(op,), dims={"H": 8200})  # the kernels with 1024 threads
        for op in ("norm_add", "residual_norm", *(f"weighted_sum_{norm}" for norm in ("residual_norm_", "norm_add",
                   "dual_norm_add")))
    ),
)  # fmt: skip


def formats(op: str) -> tuple[str, ...]:
    return ("dense", *PACKED) if arguments.takes_formats(op) else ("dense",)


def samples_of(op: str) -> list[Sample]:
    common = [Sample(op, tokens, format) for format, tokens in itertools.product(formats(op), TOKENS)]
    return common + [sample for sample in SAMPLES if sample.op == op]


# ------------------------------------------------------------------------------------------------ comparing


@contextlib.contextmanager
def under(settings: gpu_settings.Settings, device: str) -> Iterator[None]:
    """With these launch parameters of the GPU, and the others as they are."""
    if not settings or device != "mps":
        yield
        return
    before = gpu_settings.current()
    gpu_settings.use(before | settings)
    try:
        yield
    finally:
        gpu_settings.use(before)


def unpacked(experts: dict[str, Tensor], format: str) -> dict[str, Tensor]:
    """The same arguments of `experts` with dense weights. The reference would unpack the experts of each token anew."""
    found = dict(experts)
    for name in arguments.weights("experts"):
        parts = [found.pop(part, None) for part in (name, *arguments.scale_names(name))]
        found[name] = reference.dequantize(*parts, format=format, bits=BITS, dtype=torch.float64)
    return found


def expected(sample: Sample, given: dict[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The reference's results, in float64."""
    op, exact = sample.op, {name: t.cpu().double() if t.is_floating_point() else t.cpu() for name, t in given.items()}
    options = sample.options | arguments.options(op, {"dtype": dtype})
    if op == "experts" and sample.format != "dense":
        exact, options = unpacked(exact, sample.format), options | {"format": "dense"}
    return arguments.results(op, getattr(reference, op)(**exact, **options), exact)


def problem(sample: Sample, device: str, dtype: torch.dtype) -> str | None:
    """Compares the op with the reference in float64. Returns None, or a description of the error."""
    op = sample.op
    try:
        given = {name: tensor.to(device) for name, tensor in sample.arguments(dtype).items()}
        before = {name: tensor.clone() for name, tensor in given.items()}  # some are written
        options = sample.options | arguments.options(op, {"dtype": dtype})
        with torch.no_grad(), under(sample.settings, device):
            got = arguments.results(op, getattr(torch.ops.moe_metal, op)(**given, **options), given)
        want = expected(sample, before, dtype)
    except Exception as error:  # any error: the report must go on
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    for index, (g, w) in enumerate(zip((tensor.cpu() for tensor in got), want, strict=True)):
        if not g.is_floating_point():
            if not torch.equal(g, w):
                return f"output {index}: wrong expert ids"
            continue
        error, allowed = ((g.double() - w.double()).norm() / w.double().norm()).item(), reference.tolerance(g.dtype)
        if not error <= allowed:
            return f"output {index}: relative error {error:.1e}, allowed {allowed:.0e}"
    return None


def never_ran() -> list[str]:
    """The functions of the shaders, with their numbers of threads, that this process has not run on mps."""
    return [name for name, has_run in zip(*torch.ops.moe_metal._functions(), strict=True) if not has_run]
