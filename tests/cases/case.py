"""A case: the arguments, the options and the sizes of one call of an op.

Its tensors are drawn on the CPU, the same in every run.
"""

import copy
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from cases.oracle import Args, clear_choice, expected
from torch_moe_metal import arguments, formats
from torch_moe_metal.arguments import ARGUMENTS, DTYPES, ROUTERS, Parts, format_of, optional_arguments
from torch_moe_metal.random_weights import Packing

FLOAT, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16
OPTIONAL = {op: optional_arguments(op) for op in ARGUMENTS}


class Work(NamedTuple):
    """What an op computes, by the sizes of a case."""

    sums: str  # the letters of its longest sums
    flops: Callable[..., int]


WORK = {
    "gate": Work("HI", lambda T, E, H, **_: 2 * T * E * H),
    "route": Work("KH", lambda T, E, **_: 8 * T * E),
    "glu": Work("KH", lambda T, I, **_: 8 * T * I),
    "experts": Work("HI", lambda T, K, H, I, **_: 6 * T * K * H * I),
    "linear": Work("KH", lambda T, N, H, **_: 2 * T * N * H),
    "dequantize": Work("K", lambda N, H, **_: 8 * N * H),
    "attention": Work("DS", lambda B, A, T, S, D, V, **_: 2 * T * B * A * S * (D + V)),
    "rope": Work("AD", lambda B, A, J, T, D, **_: 8 * T * B * (A + J) * D),
    "linear_attention_": Work("DT", lambda B, T, A, D, V, **_: 8 * T * B * A * D * V),
    "short_conv_": Work("W", lambda B, T, C, W, **_: 2 * T * B * C * W),
}
ROW_BY_ROW = Work("KH", lambda T, K, H, **_: 2 * T * (K + 3) * H)  # weighted sums and norms


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
        options = {name: self.options[name] for name in ("transposed", "down_format", "rule") if name in self.options}
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
            name: arguments.draw(self.op, name, self.size(self.shapes[name]), self.dims, generator)
            for name, kind in kinds.items()
            if kind not in ("scale", "offset")
        }
        args = arguments.pack(self.op, args, lambda name, weight: self._pack(name, weight, generator))
        for name, tensor in args.items():
            if kinds[name] not in ("scale", "offset", "float32") and tensor.is_floating_point():
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
    def work(self) -> Work:
        return WORK.get(self.op, ROW_BY_ROW)

    @property
    def longest_sum(self) -> int:
        """The number of terms of its longest sum, which determines the tolerance of float32."""
        return max(self.dims.get(letter, 1) for letter in self.work.sums)

    @property
    def flops(self) -> int:
        return self.work.flops(**dict.fromkeys("ABCDEHIJKNSTVW", 1) | self.dims)

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


def setting(name: str, index, value: float) -> Callable[[Args], None]:
    def prepare(args: Args) -> None:
        args[name][index] = value

    return prepare


def scaling(name: str, factor: float) -> Callable[[Args], None]:
    def prepare(args: Args) -> None:
        args[name] *= factor

    return prepare


def both(*changes: Callable[[Args], None]) -> Callable[[Args], None]:
    def prepare(args: Args) -> None:
        for change in changes:
            change(args)

    return prepare
