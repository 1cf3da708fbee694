"""The checkers: they compare results with the oracle, and check the memory around them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cases import Args, Case
from cases.oracle import is_number
from torch_moe_metal import formats, ggml
from torch_moe_metal.arguments import ARGUMENTS, format_of, weights
from torch_moe_metal.reference import tolerance

GUARD = 64  # elements before and after every guarded tensor


def assert_matches(
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    longest_sum: int = 1,
    any_infinity: bool = False,
    roundings: float = 1,
) -> None:
    """Compare with the oracle. Ids must be equal, infinities and NaN must be in the same places, and everything else
    within the tolerance: the whole tensor by relative L2, and each element within ten times that, so that one wrong
    element among many is detected. With `any_infinity`, any infinity or NaN matches any other. `roundings` is the
    number of roundings that have the same direction in all elements."""
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        assert got.shape == want.shape, f"shape {list(got.shape)}, expected {list(want.shape)}"
        got = got.cpu()
        if not got.is_floating_point():
            assert got.dtype == want.dtype and torch.equal(got, want), f"ids differ:\n{got}\nexpected\n{want}"
            continue
        limit = roundings * tolerance(got.dtype, longest_sum)
        finite = want.to(got.dtype).isfinite()
        got, want = got.double(), want.to(got.dtype).double().where(~finite, want.double())
        different = ~finite & (got != want) & ~(got.isnan() & want.isnan())
        if any_infinity:
            different &= got.isfinite()
        assert not different.any(), f"expected {want[different][:8]}, got {got[different][:8]}"
        got, want = got[finite], want[finite]
        if got.numel() == 0:
            continue
        error, rms = (got - want).abs(), want.square().mean().sqrt()
        l2 = error.square().mean().sqrt() / rms if error.any() else 0.0
        assert l2 <= limit, f"relative L2 error {float(l2):.2e}, allowed {limit:.1e}"
        worst = (error / (want.abs() + rms)).nan_to_num(nan=0.0).max()
        assert worst <= 10 * limit, f"an element is wrong by {float(worst):.2e}, allowed {10 * limit:.1e}"


def meets_infinity(op: str, args: Args, options: dict, device: str) -> bool:
    """Whether a factor of packed weights is infinite, or on mps a routing weight. It may multiply a sum or its parts,
    whose signs differ: -inf and inf of two parts give NaN. This also happens with x, if codes are summed before their
    offset, and with the activations in between, which gate_up_bias makes infinite (fuzz: seed 292264, avx2-169; seed
    2811, mps-938)."""
    if op == "linear_attention_":  # a value that is not finite meets others in a state
        return any(tensor.isinf().any() for tensor in args.values())
    if op not in ("experts", "linear"):
        return False
    packed = {name: format_of(name, options) for name in weights(op) if format_of(name, options) != "dense"}
    if not packed:
        factors = ["weights"] if op == "experts" and device == "mps" else []
    else:
        if any(has_infinite_factor(args[name], format) for name, format in packed.items()):
            return True
        factors = [name for name in args if ARGUMENTS[op][name].kind in ("scale", "offset")]
        factors += [name for name in ("weights", "x", "gate_up_bias") if name in args]
    return any(args[name].isinf().any() for name in factors if is_number(args[name]))


def has_infinite_factor(data: Tensor, format: str) -> bool:
    """Whether one of GGML's blocks has an infinite factor."""
    row = formats.FORMATS[format]
    if not row.has_own_scales:
        return False
    blocks = data.cpu().unflatten(-1, (-1, row.bytes))
    _, *places = ggml.DECODERS[format]
    return any(blocks[..., at : at + 2].clone().view(torch.float16).isinf().any() for at in places)


def relative(actual: Tensor, expected: Tensor) -> float:
    """The relative error by norms."""
    return float((actual - expected).detach().double().norm() / expected.double().norm())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(tensor: Tensor) -> Tensor:
    """A copy, which does not change with the tensor."""
    flat = tensor.detach().reshape(-1)  # one element may have any stride
    return torch.empty(flat.shape, dtype=flat.dtype).copy_(flat).view(torch.uint8)


# ------------------------------------------------------------------------------------------------ memory


def placed(tensor: Tensor, device: str) -> Tensor:
    """A copy on a device with the same strides, also where elements share memory, as in an expanded tensor."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((length,), (1,)).to(device)
    return memory.as_strided(tensor.shape, tensor.stride(), 0)


def strides_of(shape: torch.Size, kind: str) -> list[int]:
    """contiguous; strided: every second element; padded, evenly or not: rows of a wider tensor; transposed: the first
    dimension is contiguous."""
    wider = {"padded": 3, "evenly padded": 4}.get(kind, 0)  # all other kinds are contiguous
    order = range(len(shape)) if kind == "transposed" else range(len(shape) - 1, -1, -1)
    strides, step = [0] * len(shape), 2 if kind == "strided" else 1
    for dim in order:
        strides[dim] = step
        step = step * shape[dim] + wider
    return strides


class Guarded:
    """A tensor's values as a view of a larger storage that is filled with NaN, True, or invalid ids."""

    def __init__(self, tensor: Tensor, kind: str = "contiguous", offset: int = 0):
        strides = strides_of(tensor.shape, kind)
        span = 1 + sum(stride * max(0, size - 1) for stride, size in zip(strides, tensor.shape, strict=True))
        if tensor.dtype == torch.bool:
            fill = True
        else:
            fill = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
        self.storage = tensor.new_full((GUARD + offset + span + GUARD,), fill)
        self.view = self.storage.as_strided(tensor.shape, strides, GUARD + offset)
        self.view.copy_(tensor)
        self.before = self.storage.clone()

    def assert_untouched(self, name: str, written: bool = False) -> None:
        """Check that only the tensor itself has changed, and only if it is `written` in-place."""
        after = self.storage.clone()
        if written:
            where = (self.view.shape, self.view.stride(), self.view.storage_offset())
            after.as_strided(*where).copy_(self.before.as_strided(*where))
        assert same_bits(after, self.before), f"{name}: memory {'next to it' if written else 'of an input'} has changed"


def with_leading(case: Case, args: Args, leading: tuple[int, ...]) -> Args:
    """The same arguments with other leading dimensions instead of [T]. Fewer tokens mean the first ones."""
    count = torch.Size(leading).numel()
    table = ARGUMENTS[case.op]
    return {
        name: tensor[:count].reshape(leading + tensor.shape[1:]) if table[name].letters[0] == "T" else tensor
        for name, tensor in args.items()
    }
