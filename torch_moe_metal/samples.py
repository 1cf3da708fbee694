"""Small calls of the ops, one for every way to compute an op. `doctor` and the check at first use make them.

A sample names the functions of the shaders that it is for, so a wrong result names a kernel.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import arguments, gpu_settings
from .formats import FORMATS
from .random_weights import Packing

DIMS = {"E": 33, "K": 3, "H": 96, "I": 40, "N": 37, "U": 1}  # odd sizes: most faults of kernels are in tails
DIMS |= {"B": 2, "A": 6, "J": 2, "S": 101, "D": 40, "V": 24, "R": 8, "W": 4, "L": 4}
GROUP = 32  # columns of affine weights


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
    odd: bool = False  # rows of weights that cannot be loaded several bytes at a time
    bits: int = 4  # of affine weights

    def __str__(self) -> str:
        format = "" if self.format == "dense" else f" {self.format}"
        sizes = "".join(f", {letter} = {size}" for letter, size in self.dims.items())
        functions = f" ({', '.join(self.functions)})" if self.functions else ""
        return f"{format}, T = {self.tokens}{sizes}{functions}"

    @property
    def options(self) -> dict[str, object]:
        wanted = {"top_k": self.sizes()["K"], "format": self.format, "bits": self.bits, "causal": True, "replay": 1}
        return arguments.options(self.op, wanted | ({"transposed": True} if self.transposed else {}))

    def sizes(self) -> dict[str, int]:
        found = DIMS | self.dims | {"T": self.tokens}
        if self.format == "dense":
            return found | ({"H": 97, "I": 41} if self.odd else {})
        whole = FORMATS[self.format].whole_columns
        # Few experts, because unpacking them for the reference takes most of the time.
        found["E"] = min(found["E"], 8 if "E" in self.dims else 5)
        return found | {letter: -(-max(found[letter], 64) // whole) * whole for letter in "HI"}

    def arguments(self, dtype: torch.dtype, parameters: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The same on every device."""
        dims, random = self.sizes(), torch.Generator().manual_seed(0)
        table, packed = arguments.ARGUMENTS[self.op], self.format != "dense"
        shapes = arguments.shapes(self.op, arguments.optional_arguments(self.op), self.transposed)
        sizes = {name: arguments.size(letters, dims) for name, letters in shapes.items()}
        weights = arguments.weights(self.op) if packed else ()
        drawn = {
            name: torch.empty(size) if name in weights else arguments.draw(self.op, name, size, dims, random)
            for name, size in sizes.items()
        }
        if packed:
            packing = Packing(self.format, self.bits, GROUP)
            drawn = arguments.pack(self.op, drawn, lambda _, weight: packing.weight(*weight.shape, generator=random))
        dtypes = {"activation": dtype, "parameter": parameters} | ({} if packed else {"weight": dtype})
        return {name: t.to(dtypes.get(table[name].kind, t.dtype)) for name, t in drawn.items()}

    def on(self, device: str, args: dict[str, Tensor]) -> dict[str, Tensor]:
        """These arguments on a device, where odd packed rows begin at the second byte of their memory."""
        found = {name: tensor.to(device) for name, tensor in args.items()}
        if self.odd and self.format != "dense":
            found |= {name: at_second_byte(found[name]) for name in arguments.weights(self.op)}
        return found


def at_second_byte(tensor: Tensor) -> Tensor:
    data = tensor.view(torch.uint8)
    memory = torch.empty(data.numel() + 1, dtype=torch.uint8, device=data.device)
    return memory[1:].view(data.shape).copy_(data)


TALL = {"B": 1, "A": 4, "J": 1, "S": 700}  # enough keys for several parts
LONG = {"H": 544}  # several simdgroups divide a row
TILES = {"N": 72}  # more than one of them, with tails
TILES16 = {"tile32_min_rows": 64, "tile64_min_rows": 64}
SINGLE = {"gate_up_pairs_percent": 0, "down_pairs_percent": 0}
UNITS = {"tensor_ops": 1}
ONE_PART = {"attention_keys": 1 << 30}


def experts(functions: str, tokens: int, E: int, dims: dict[str, int] | None = None, **options) -> Sample:
    named = tuple(f"experts_{name}" for name in functions.split())
    return Sample("experts", tokens, functions=named, dims={"E": E} | (dims or {}), **options)


def linear(function: str, tokens: int, dims: dict[str, int] | None = None, **options) -> Sample:
    return Sample("linear", tokens, functions=(f"linear_{function}",), dims=dims or {}, **options)


def attention(functions: str, tokens: int, D: int, V: int, settings=None, **dims: int) -> Sample:
    found = TALL | dims | {"D": D, "V": V}
    return Sample("attention", tokens, functions=tuple(functions.split()), dims=found, settings=settings or {})


def units(rows: int, tokens: int, E: int) -> Iterator[Sample]:
    """On the matrix units: macOS 26.3, 16-bit activations. Elsewhere other kernels compute these samples."""
    product = f"tensor_products{rows}"
    of_experts = ("experts_gather", "experts_activate", "experts_combine_sorted", product)
    yield Sample("linear", rows - 5, functions=(product,), settings=UNITS | {"few_tokens": 0})
    yield Sample("experts", tokens, functions=of_experts, dims={"E": E}, settings=UNITS)


def norms() -> Iterator[Sample]:
    for op in ("norm_add", "residual_norm", *(f"weighted_sum_{norm}" for norm in ("residual_norm_", "norm_add",
               "dual_norm_add"))):  # fmt: skip
        yield Sample(op, 5, functions=(op,))
        yield Sample(op, 2, functions=(op,), dims={"H": 8200})  # the kernels with 1024 threads


#: Every function of the shaders is in one of them.
SAMPLES = (
    experts("gate_up_rows_wide down_rows_wide", 5, 5, LONG, settings=SINGLE),
    experts("gate_up_rows down_rows", 5, 5, odd=True, settings=SINGLE),
    experts("gate_up_rows2_wide", 5, 8, settings={"gate_up_pairs_percent": 100, "down_pairs_percent": 0}),
    experts("down_rows2_wide", 5, 8, settings={"gate_up_pairs_percent": 0, "down_pairs_percent": 100}),
    experts("gate_up_columns_wide down_columns_wide", 5, 33, transposed=True),
    experts("gate_up_columns down_columns", 5, 33, odd=True, transposed=True),
    experts("gate_up_tiles16 down_tiles16 combine sort", 20, 8, odd=True),
    experts("gate_up_tiles16_wide down_tiles16_wide", 20, 8),
    experts("gate_up_tiles32 down_tiles32", 50, 8, odd=True),
    experts("gate_up_tiles32_wide down_tiles32_wide", 50, 8),
    experts("gate_up_tiles64", 50, 3, odd=True),
    experts("gate_up_tiles64_wide", 50, 3),
    linear("rows_wide", 1, LONG),
    linear("rows", 1, odd=True),
    linear("rows2_wide", 2, LONG),
    linear("rows4_wide", 7, LONG),
    linear("tiles16_wide", 20, TILES, settings=TILES16),
    linear("tiles16", 20, TILES, odd=True, settings=TILES16),
    linear("tiles32_wide", 40, TILES),
    linear("tiles32", 40, TILES, odd=True),
    linear("tiles64_wide", 70, TILES),
    linear("tiles64", 70, TILES, odd=True),
    Sample("dequantize", 5, functions=("dequantize",)),
    *units(16, 20, 8), *units(32, 50, 8), *units(64, 50, 3),
    Sample("gate", 5, functions=("gate",)),
    Sample("gate", 1, functions=("gate_logits_1", "route_8"), dims={"E": 256, "H": 136}),
    Sample("gate", 20, functions=("gate_logits_4", "route_8"), dims={"E": 256, "H": 136}),
    Sample("gate", 20, functions=("gate_tile", "route_8"), dims={"E": 256, "H": 136}, settings={"gate_min_tiles": 1}),
    *(Sample("route", 5, functions=(f"route_{E // 32}",), dims={"E": E}) for E in (32, 64, 128, 256, 512, 1024)),
    attention("attention_64_wide", 20, 64, 64, ONE_PART),
    attention("attention_64_wide attention_combine", 1, 64, 64),
    attention("attention_128_wide", 20, 128, 128, ONE_PART),
    attention("attention_128_wide", 5, 192, 128, A=3, J=3),
    attention("attention_128_wide", 1, 576, 512),
    attention("attention", 5, 41, 23),
    Sample("rope", 5, functions=("rope",)),
    Sample("glu", 5, functions=("glu",)),
    Sample("weighted_sum", 5, functions=("weighted_sum",)),
    Sample("weighted_sum_residual_", 5, functions=("weighted_sum_residual_",)),
    *norms(),
    Sample("linear_attention_", 5, functions=("linear_attention_64",), dims={"D": 64, "V": 64}),
    Sample("linear_attention_", 5, functions=("linear_attention_128",), dims={"D": 128, "V": 128}),
    Sample("linear_attention_", 5, functions=("linear_attention_256", "linear_attention_groups"), dims={"V": 72}),
    Sample("short_conv_", 5, functions=("short_conv",)),
)  # fmt: skip


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
