"""Single kernels of the GPU: which ones a call needs, and whether a small call of one is right.

The reference is the same op on the CPU in float32, which the tests compare with float64. Ids and `dequantize` must have
the same bits.
"""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from . import arguments, gpu_settings, reference
from .formats import LIBRARIES
from .samples import SAMPLES, Sample
from .warmup import as_warmup

ops = torch.ops.moe_metal
DTYPES = {"float": torch.float32, "half": torch.float16, "bfloat": torch.bfloat16}
#: Kernels that prepare or finish the work of others, in whose samples they run.
HELPERS = ("experts_sort", "experts_combine", "experts_gather", "experts_activate", "experts_combine_sorted")
#: Matrix units were wrong at the sizes of models only (mlx#3586).
SIZES_OF_MODELS = {"H": 2048, "N": 1000}


class Kernel(NamedTuple):
    """One kernel, with the words of its line in csrc/mps/pipelines.mm."""

    function: str
    format: str  # of formats.LIBRARIES
    dtypes: str
    threads: str

    def __str__(self) -> str:
        parts = (self.function, *(part for part in (self.format, self.dtypes) if part not in ("dense", "none")))
        return "_".join(parts)

    @property
    def key(self) -> str:
        """Its name in the file of verdicts. Norms have two kernels of a name."""
        return f"{self} {self.threads}"

    def refuse(self) -> None:
        ops._refuse(" ".join(self), True)


def kernels_of(calls: Iterable[Callable[[], object]]) -> list[Kernel]:
    """The kernels of these calls on meta tensors, which nothing compiles. Errors are ignored, as in warm-up."""
    ops._list_kernels(True)
    try:
        with as_warmup():
            for call in calls:
                with contextlib.suppress(Exception):
                    call()
    finally:
        lines = ops._list_kernels(False)
    return [*dict.fromkeys(Kernel(*line.split()) for line in lines)]


@dataclass(frozen=True)
class Check:
    """A sample with its arguments on the CPU, and the kernels that compute it."""

    sample: Sample
    args: dict[str, Tensor]
    options: dict[str, object]
    kernels: tuple[Kernel, ...]

    def problem(self) -> str | None:
        """None, or a description of the error. The settings of the GPU are those of the sample."""
        op, given = self.sample.op, self.sample.on("mps", self.args)
        with using(self.sample.settings):
            got = arguments.results(op, getattr(ops, op)(**given, **self.options), given)
        ops._watch()
        got = [tensor.cpu() for tensor in got]
        torch.mps.synchronize()
        ops._raise_failure()
        exact = self.args if op == "dequantize" else {name: self.exact(name) for name in self.args}
        want = arguments.results(op, getattr(ops, op)(**exact, **self.options), exact)
        compare = differing_bits if op == "dequantize" else difference
        found = (compare(g, w) for g, w in zip(got, want, strict=True))
        return next(filter(None, found), None)

    def exact(self, name: str) -> Tensor:
        """A float32 argument. Packed weights and their scales are not converted."""
        argument, tensor = arguments.ARGUMENTS[self.sample.op][name], self.args[name]
        kept = ("scale", "offset") if self.sample.format == "dense" else ("scale", "offset", "weight")
        return (
            tensor if argument.kind in kept or not tensor.is_floating_point() else tensor.to(torch.float32, copy=True)
        )


@contextlib.contextmanager
def using(settings: gpu_settings.Settings):
    """With these settings of the GPU, and all others at their defaults: `tune` may have found others."""
    before = gpu_settings.current()
    gpu_settings.use(settings)
    try:
        yield
    finally:
        gpu_settings.use(before)


def difference(got: Tensor, want: Tensor) -> str | None:
    if not got.is_floating_point():
        return None if torch.equal(got, want) else "wrong ids of experts"
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    allowed = reference.tolerance(got.dtype)
    return None if error <= allowed else f"relative error {error:.0e}, allowed {allowed:.0e}"


def differing_bits(got: Tensor, want: Tensor) -> str | None:
    same = (got == want) | (got.isnan() & want.isnan())
    return None if same.all() else f"{(~same).sum()} of {same.numel()} values have other bits"


def check_of(kernel: Kernel, like: Kernel) -> Check | None:
    """A check that runs this kernel; None if no sample does. Helpers get the dtype and the weights of another one."""
    row = LIBRARIES[(like if kernel.function in HELPERS else kernel).format]
    dtypes = [DTYPES[dtype] for dtype in (like if kernel.dtypes == "none" else kernel).dtypes.split("_")]
    for sample in (sample for sample in SAMPLES if kernel.function in sample.functions):
        if row.is_packed and (sample.transposed or not arguments.takes_formats(sample.op)):
            continue
        if row.is_packed:
            sample = replace(sample, format=row.name, bits=row.bits)
        if sample.op == "linear" and kernel.function.startswith("tensor_products"):
            sample = replace(sample, dims=sample.dims | SIZES_OF_MODELS)
        args = prepared(sample, sample.arguments(dtypes[0], dtypes[-1]))
        options = sample.options | arguments.options(sample.op, {"dtype": dtypes[0]})
        on_meta = sample.on("meta", args)
        with using(sample.settings):
            kernels = kernels_of([lambda: getattr(ops, sample.op)(**on_meta, **options)])  # noqa: B023 - called here
        if kernel in kernels:
            return Check(sample, args, options, tuple(kernels))
    return None


def prepared(sample: Sample, args: dict[str, Tensor]) -> dict[str, Tensor]:
    if sample.op == "attention":  # one key is hidden, and contains NaN
        args["mask"][..., 3] = -torch.inf
        args["k"][..., 3, :] = args["v"][..., 3, :] = torch.nan
    if sample.op == "dequantize" and sample.format != "dense":
        args["weight"] = every_byte(args["weight"])
    return args


def every_byte(data: Tensor) -> Tensor:
    bits = data.view(torch.uint8)
    return (torch.arange(bits.numel()) * 37 % 256).byte().view(bits.shape).view(data.dtype)
