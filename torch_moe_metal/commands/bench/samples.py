"""The samples that `doctor` computes, compared with the reference in float64."""

import itertools

import torch
from torch import Tensor

from ... import arguments, reference
from ...samples import SAMPLES, Sample, under

TOKENS = (5, 50)  # decoding, and a prompt, which has its own kernels

#: One format of each family of readers; the others differ only in constants.
PACKED = ("affine", "mxfp4", "fp8", "mxfp8", "nvfp4", "q4_0", "q5_0", "q8_0", "q2_k", "q3_k", "q4_k", "q6_k", "iq4_xs")


def formats(op: str) -> tuple[str, ...]:
    return ("dense", *PACKED) if arguments.takes_formats(op) else ("dense",)


def samples_of(op: str) -> list[Sample]:
    common = [Sample(op, tokens, format) for format, tokens in itertools.product(formats(op), TOKENS)]
    return common + [sample for sample in SAMPLES if sample.op == op]


def unpacked(experts: dict[str, Tensor], format: str) -> dict[str, Tensor]:
    """The same arguments of `experts` with dense weights. The reference would unpack the experts of each token anew."""
    found = dict(experts)
    for name in arguments.weights("experts"):
        parts = [found.pop(part, None) for part in (name, *arguments.scale_names(name))]
        found[name] = reference.dequantize(*parts, format=format, dtype=torch.float64)
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
        given = sample.on(device, sample.arguments(dtype))
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
