"""Checks whether a call of fuzz_cases.py did the right thing: the right result, or an error that names the cause."""

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from cases import Args, call, expected
from cases.oracle import clear_choice, is_number
from checks import assert_matches, bits, has_infinite_factor, meets_infinity, same_bits
from fuzz_cases import Call
from torch_moe_metal import cpu_isa, ggml, reference
from torch_moe_metal.arguments import ARGUMENTS, ROUTERS, format_of, outputs, scale_names, weights, written
from torch_moe_metal.formats import FORMATS
from torch_moe_metal.reference import tolerance

NOISE = 2.0**-20  # sixteen roundings of float32
# The same for its smallest values. Apple's GPUs flush values below 2^-126 to 0, and so do products of bfloat16 on
# processors with AVX512-BF16 or AMX, so any result is possible there (-inf times 1e-40: seed 3100, avx512-70838).
LEAST_NOISE, FLUSHED = 2.0**-145, 2.0**-126
MAX_ELEMENTS = 2**22  # maximum elements of an argument of a spoiled call, so that the reference is fast enough
SANITIZED = "ASAN_OPTIONS" in os.environ  # tools/sanitize.py, which explains why there are no forks then
SECONDS = 600.0 if SANITIZED else 240.0  # maximum time of a case, on a busy machine


def check(drawn: Call, device: str) -> str:
    """Run it, and raise AssertionError if it did something wrong. Returns "right" or "refused"."""
    args, memories = drawn.on_device(device)
    before = [bits(memory) for memory in memories]
    values = drawn.values() if drawn.good else contiguous_values(args)
    try:
        got = run(drawn, args)
    except (RuntimeError, TypeError, ValueError, MemoryError) as error:
        assert not drawn.good, f"a good call was refused: {error}"
        untouched(drawn, device, memories, before, wrote=False)
        refused(drawn, args, str(error), device)
        return "refused"
    untouched(drawn, device, memories, before, wrote=True)
    if drawn.good or all(arg.numel() < MAX_ELEMENTS for arg in values.values() if isinstance(arg, Tensor)):
        right(drawn, device, values, got)
    again(drawn, device, got)
    return "right"


def run(drawn: Call, args: dict) -> list[Tensor]:
    """The op's outputs, and copies of the tensors it wrote."""
    with drawn.mode():
        found = call(getattr(torch.ops.moe_metal, drawn.op), drawn.op, args, drawn.options)
    own = len(found) - len(written(drawn.op, args))
    for output in found[:own]:
        assert output.is_contiguous(), f"an output has strides {output.stride()}"
        others = [arg for arg in args.values() if isinstance(arg, Tensor) and arg.layout == torch.strided]
        shared = [arg for arg in others if output.numel() and arg.numel() and address(arg) == address(output)]
        assert not shared, "an output uses the memory of an argument"
    return found[:own] + [tensor.detach().clone() for tensor in found[own:]]


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def contiguous_values(args: dict) -> dict:
    """The arguments of a spoiled call, on the CPU."""
    found = {}
    for name, arg in args.items():
        plain = isinstance(arg, Tensor) and arg.layout == torch.strided and arg.numel() < MAX_ELEMENTS
        found[name] = arg.detach().cpu().contiguous().clone() if plain else arg
    return found


def untouched(drawn: Call, device: str, memories: list[Tensor], before: list[Tensor], wrote: bool) -> None:
    """No memory has changed, except that of arguments written in-place."""
    changed = [number for number, memory in enumerate(memories) if not torch.equal(bits(memory), before[number])]
    if not changed:
        return
    assert wrote, "it raised, and had written"
    lazy = {change.name for change in drawn.changes_on(device) if change.what == "lazy_clone"}
    for name in set(written(drawn.op, drawn.layouts)) - lazy:
        layout = drawn.layouts[name]
        (which,) = {
            number for number, memory in enumerate(dict.fromkeys(id(p.memory) for p in drawn.layouts.values()))
            if memory == id(layout.memory)
        }  # fmt: skip
        old = before[which].view(layout.memory.dtype).clone()
        layout.of(old).copy_(layout.of(memories[which]))
        before[which] = bits(old)
    for number, memory in enumerate(memories):
        assert torch.equal(bits(memory), before[number]), "memory of an input, or next to it, has changed"


# ------------------------------------------------------------------------------------------------ refusals


def refused(drawn: Call, args: dict, message: str, device: str) -> None:
    """The message names the op and an argument, and is equal on the CPU."""
    large = {"endless", "a million more"}  # a copy of it may not fit into memory
    if any(change.what in large for change in drawn.changes) and re.search("allocat|bad_alloc", message):
        return
    names = {*ARGUMENTS[drawn.op], *drawn.options, *args, *(change.name for change in drawn.changes), "E"}
    named = any(re.search(rf"\b{name}\b", message) for name in names)
    assert f"moe_metal::{drawn.op}" in message and named, f"the message names no op or no argument: {message}"
    if device == "cpu" or any(change.what == "on the cpu" for change in drawn.changes):
        return
    try:
        run(drawn, drawn.on_device("cpu", changed_for=device)[0])
    except (RuntimeError, TypeError, ValueError, MemoryError) as error:
        there = neutral(str(error), "cpu")
        assert neutral(message, device) == there, f"{message}\nbut on the CPU:\n{error}"
        return
    raise AssertionError(f"the CPU accepts what {device} refuses: {message}")


def neutral(message: str, device: str) -> str:
    return re.sub(rf"\b{device}(:0)?\b", "DEVICE", message.split("\n")[0])


# ------------------------------------------------------------------------------------------------ results


def right(drawn: Call, device: str, values: Args, got: list[Tensor]) -> None:
    """Equal to the reference in float64, as far as float32 allows. With bfloat16 tokens `experts` may round packed
    weights to bfloat16, in its tiles: those results are right too, although they differ a lot if large terms cancel."""
    by_magnitudes(drawn, device, values, got)
    try:
        equal(drawn, device, values, drawn.options, got)
    except AssertionError:
        if device != "cpu" or not by_tiles(drawn, values):
            raise
        dense = {"format": "dense", "down_format": None, "group_size": 0}
        equal(drawn, device, with_rounded_weights(drawn, values), drawn.options | dense, got)


def by_magnitudes(drawn: Call, device: str, values: Args, got: list[Tensor]) -> None:
    """The error of each element of a product with packed weights is limited by its own terms, however large other
    elements of its token or group are: weights could be 0 there."""
    format, dtype = drawn.options.get("format", "dense"), got[0].dtype if got else None
    if drawn.op != "linear" or format in ("dense", None) or not drawn.good:
        return
    x, packing = values["x"].double(), {"format": format, "bits": drawn.case.bits, "dtype": torch.float64}
    data, scale, offset = values["weight"], values.get("scale"), values.get("offset")
    weight, row = reference.dequantize(data, scale, offset, **packing), FORMATS[format]
    if row.is_affine:  # a value is a sum of two terms, and so is a group's product
        most = (scale.double().abs() * 2**drawn.case.bits + offset.double().abs()).repeat_interleave(
            drawn.case.group, 1
        )
    elif row.has_own_scales:
        scale, offset, integers = ggml.decoded(data, row, torch.float64)
        most = scale.abs() * integers.abs().clamp(min=2**row.bits) + (0 if offset is None else offset.abs())
        most = most.flatten(-3)
    else:
        most = weight.abs()
    bias = values["bias"].double() if "bias" in values else torch.zeros(())
    # On mps weights are rounded to the dtype of many tokens. Any result is possible for the smallest values.
    share = 8 * tolerance(torch.float32, drawn.case.longest_sum)
    share = max(share, torch.finfo(dtype).eps) if device == "mps" else share
    size, least = x.abs() @ most.mT + bias.abs(), 2.0**-126 * (x.abs().sum(-1, keepdim=True) + most.sum(-1))
    want = x @ weight.mT + bias
    allowed = torch.finfo(dtype).eps * want.abs() + share * size + least + 2.0**-126 + step(dtype)
    sure = (size < torch.finfo(torch.float32).max / 2**8) & want.to(dtype).isfinite()
    error = (got[0].cpu().double() - want).abs()
    worst = (error / allowed)[sure & ~(error <= allowed)]
    assert not worst.numel(), f"an element is wrong by {float(worst.max()):.1f} times what its own terms allow"


def by_tiles(drawn: Call, values: Args) -> bool:
    """Whether `experts` may multiply packed weights as tiles of bfloat16 (cpu/x86/plan.h): many tokens per expert."""
    packed = any(format_of(name, drawn.options) != "dense" for name in weights(drawn.op))
    if drawn.op != "experts" or not packed or values["x"].dtype != torch.bfloat16:
        return False
    ids, dims = values["ids"], drawn.case.dims
    used = ids[(ids >= 0) & (ids < len(values["gate_up"]))]
    return min(dims["H"], dims["I"]) >= 64 and used.numel() >= 8 * used.unique().numel()


def with_rounded_weights(drawn: Call, values: Args) -> Args:
    found = dict(values)
    for name in ("gate_up", "down"):
        parts = [found.pop(part, None) for part in (name, *scale_names(name))]
        found[name] = reference.dequantize(
            *parts, **packing_of(name, drawn.options, drawn.case.bits), dtype=torch.bfloat16
        )
    return found


def packing_of(weight: str, options: dict, bits: int) -> dict:
    """Format and bits of a weight. A `down_format` of affine has 4 bits."""
    format = format_of(weight, options)
    return {"format": format, "bits": bits if format == format_of("gate_up", options) else 4}


def equal(drawn: Call, device: str, values: Args, options: dict, got: list[Tensor]) -> None:
    op = drawn.op
    try:
        want = expected(op, values, options)
        likes = expected(op, values, options, hostile=True)
    except Exception as error:
        raise AssertionError(f"accepted, but the reference says {type(error).__name__}: {error}") from error
    assert [tensor.dtype for tensor in got] == [like.dtype for like in likes], "wrong dtypes"
    assert [tensor.shape for tensor in got] == [like.shape for like in likes], "wrong shapes"
    if not all(tensor.numel() for tensor in got) or clamps_infinity(op, values, options):
        return
    others = [likes, *(expected(op, noisy(values, device, seed, drawn.case.bits), options) for seed in (1, -1, 2, -2))]
    # A token's experts are added one by one. If they are similar, all roundings have the same direction, so errors grow
    # with the number of experts, not with its square root.
    experts = any("K" in letters for letters in (*drawn.case.shapes.values(), *outputs(op, drawn.case.shapes)))
    longest = max(drawn.case.longest_sum, 4 * drawn.case.dims["K"] ** 2 * experts)
    if not drawn.good:  # a row of norm may then have a million elements (seed 1, 80 of norm alone)
        longest = max([longest, *(v.shape[-1] for v in values.values() if isinstance(v, Tensor) and v.dim())])
    skipped = [unsure(w, g.dtype, [o[i] for o in others], longest) for i, (w, g) in enumerate(zip(want, got))]  # noqa: B905
    choices = [torch.ones_like(mask) for mask in skipped]
    if op in ROUTERS:
        valid_ids(got[-1].cpu(), values, options)
        chosen = clear(op, values, options).view(*got[-1].shape[:-1], 1)
        choices = [chosen.expand_as(mask) for mask in skipped]
        rows = torch.stack(skipped).any(0).any(-1, keepdim=True) | ~chosen
        skipped = [rows.expand_as(mask) for mask in skipped]
    for i, (tensor, exact, chosen) in enumerate(zip(got, want, choices, strict=True)):
        # In float64, too, gelu(-10) is 0; the kernels' result -8e-23 is closer (seed 2800, avx2-101023).
        tail = 2.0**-64 if options.get("activation") == "gelu" else 0.0
        too_small(tensor.cpu(), exact, [other[i] for other in others], chosen, longest, tail)
    known = [w.to(g.dtype).to(w.dtype) for g, w in zip(got, want, strict=True)]
    got = [k.to(g.dtype).where(mask, g.cpu()) for g, k, mask in zip(got, known, skipped, strict=True)]
    likes = [k.to(l.dtype).where(mask, l) for l, k, mask in zip(likes, known, skipped, strict=True)]
    want = [k.where(mask, w) for w, k, mask in zip(want, known, skipped, strict=True)]
    any_infinity = meets_infinity(op, values, options, device)
    try:
        near(got, want, likes, longest, any_infinity)
    except AssertionError:
        if op not in ("experts", "linear", "attention"):
            raise
        calls = [in_another_order(op, values, options, drawn.case.bits, seed) for seed in range(4)]
        likes = [expected(op, *shuffled, hostile=True)[0] for shuffled in calls]
        # Where they miss by half of the tolerance, the kernel may miss by all of it.
        doubtful = skipped[0] | unsure(want[0], likes[0].dtype, likes, longest, times=4)
        likes = [known[0].to(like.dtype).where(doubtful, like) for like in likes]
        got = [known[0].to(got[0].dtype).where(doubtful, got[0])]
        near(got, want * len(likes), likes, longest, any_infinity)


def near(got: list[Tensor], want: list[Tensor], likes: list[Tensor], longest: float, any_infinity: bool) -> None:
    """As close as the worst of `likes`, which are results of the reference in float32."""
    far = [times_allowed(*pair) for pair in zip(likes, want, strict=True)]
    half = got[0].element_size() == 2
    longest = longest if half else max(longest, *(1024 * times**2 for times in far))
    longest = 4 * max(longest, 1024)  # the worst of 100,000 float32 sums had 1.06 times the usual error
    roundings = max(1, 2 * max(far) - 1) if half else 1
    assert_matches(got, want[: len(got)], longest, any_infinity, roundings)


def in_another_order(op: str, values: Args, options: dict, bits: int, seed: int) -> tuple[Args, dict]:
    """The same product with shuffled columns and dense weights; for affine first the codes, then the offsets, which
    kernels add separately. In float32 its result is as good as the kernel's: inexact if terms cancel, like two columns
    of 2^20 (seed 2800, default-86250), or offsets and codes (avx2-110506)."""
    generator = torch.Generator().manual_seed(seed)
    if op == "attention":
        order = torch.randperm(values["q"].shape[-1], generator=generator)
        return values | {name: values[name][..., order] for name in ("q", "k")}, options
    found, dense = dict(values), options | {"format": "dense", "group_size": 0}
    dense |= {"down_format": None} if op == "experts" else {}

    def columns(name: str) -> tuple[Tensor, Tensor]:
        """Returns its columns in their new order, and the input's column for each."""
        data, scale, offset = (found.pop(part, None) for part in (name, *scale_names(name)))
        data = data.mT if options.get("transposed") else data
        packing = packing_of(name, options, bits)
        row, offsets = FORMATS.get(packing["format"]), None
        if row is not None and row.is_affine:
            offsets = reference.as_float(offset)
            offset = torch.zeros_like(offset)
        matrix = reference.dequantize(data, scale, offset, **packing, dtype=torch.float32)
        if row is not None and row.has_own_scales:
            scale, offset, integers = ggml.decoded(data, row, torch.float32)
            if offset is not None:
                matrix, offsets = (integers * scale).flatten(-3), offset.flatten(-3)
        order = torch.randperm(matrix.shape[-1], generator=generator)
        matrix = matrix[..., order]
        if offsets is None:
            return matrix, order
        offsets = offsets.repeat_interleave(len(order) // offsets.shape[-1], -1)
        return torch.cat([matrix, offsets[..., order]], -1), order.repeat(2)

    if op == "linear":
        found["weight"], which = columns("weight")
        return found | {"x": values["x"][..., which]}, dense
    gate_up, which = columns("gate_up")
    found["down"], rows = columns("down")
    rows = torch.cat([2 * rows, 2 * rows + 1] if options.get("interleaved") else [rows, rows + gate_up.shape[-2] // 2])
    found |= {"x": values["x"][..., which], "gate_up": gate_up[:, rows]}
    if "gate_up_bias" in values:
        found["gate_up_bias"] = values["gate_up_bias"][:, rows]
    return found, dense | {"interleaved": False, "transposed": False}


def clamps_infinity(op: str, values: Args, options: dict) -> bool:
    """Whether a limit makes infinite values finite that are NaN if their signs differ: products with an infinite offset
    have the signs of x, but a kernel multiplies the offset by the sum of x (seed 2858, mps-1271). So does a norm, which
    divides the other values of a head by infinity, or by NaN (linear attention: seed 2, 1970)."""
    if op == "linear_attention_":
        return "norm_weight" in values and any(value.isinf().any() for value in values.values())
    if options.get("limit") is None:
        return False
    offset, format = values.get("gate_up_offset"), format_of("gate_up", options)
    blocks = format != "dense" and has_infinite_factor(values["gate_up"], format)
    return blocks or (offset is not None and bool(offset.isinf().any()))


def times_allowed(like: Tensor, want: Tensor) -> float:
    """The error of the reference in float32, relative to the tolerance. Roundings of equal terms have the same
    direction in any order of summation: a sum of 512 has an error of 1.0e-6, and of 1.1e-6 in PyTorch's float32 (seed
    292264, avx2-155). A score plus a mask of 2^20 is rounded to eighths (seed 2800, avx512-97109)."""
    finite = like.isfinite() & want.to(like.dtype).isfinite()
    if not like.is_floating_point() or not (error := (like.double() - want)[finite]).any():
        return 0
    return min(float(error.norm() / want[finite].norm() / tolerance(like.dtype)), 8.0)  # `unsure` covers the rest


def noisy(values: Args, device: str, seed: int, bits: int) -> Args:
    """With noise; that of -seed is the opposite, so that cancelling terms give results on both sides."""
    generator = torch.Generator().manual_seed(abs(seed))

    def shake(name: str, tensor: Tensor) -> Tensor:
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
        noise = noise if seed > 0 else -noise
        flushed = device == "mps" or (cpu_isa == "avx512" and tensor.dtype == torch.bfloat16)
        least = FLUSHED if flushed else LEAST_NOISE
        shaken = tensor.double() * (1 + NOISE * noise) + least * noise * (tensor != 0)
        scale = values.get(name.replace("offset", "scale"))
        # An affine value is the difference of two terms, so one close to 0 is less exact than its size.
        if name.endswith("offset") and is_number(scale):
            shaken += NOISE * noise * 2**bits * scale.double()
        return shaken

    return {n: shake(n, t) if isinstance(t, Tensor) and is_number(t) else t for n, t in values.items()}


def unsure(want: Tensor, dtype: torch.dtype, others: list[Tensor], longest_sum: int, times: float = 8) -> Tensor:
    """True where the reference itself gives another result in float32, or from inputs with rounding errors."""
    if not want.is_floating_point():
        return torch.stack([other != want for other in others]).any(0)
    finite = want.to(dtype).isfinite()
    rms = want[finite].double().square().mean().sqrt()
    size = want.double().abs() + rms
    allowed = times * tolerance(dtype, longest_sum) * size
    found = tolerance(dtype, longest_sum) * size < step(dtype)
    for other in others:
        same = (other.to(dtype) == want.to(dtype)) | (other.isnan() & want.isnan())
        near = finite & other.to(dtype).isfinite() & ((other.double() - want.double()).abs() <= allowed)
        found |= ~(same | near)
    return found


def step(dtype: torch.dtype) -> float:
    """The distance of the smallest values of a dtype, which limits the precision of small results."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def too_small(got: Tensor, want: Tensor, others: list[Tensor], chosen: Tensor, longest_sum: int, more: float) -> None:
    """True where relative errors are meaningless; the result must still be close to 0. So small a factor has few bits,
    and makes the reference wrong in float32 too: a gate of 1.5e-43 next to 14242 by 1.0e-41 (seed 17, avx512-19468). So
    does noise: for a factor of 1e-40 and a scale of 2^100, on mps (seed 2811, mps-757)."""
    if not want.is_floating_point():
        return
    limit = tolerance(got.dtype, longest_sum)
    small = chosen & want.isfinite() & (want.abs() * limit < step(got.dtype)) & got.isfinite()
    rms = want[want.isfinite()].square().mean().sqrt()
    error, *far = ((found.double() - want.double()).abs()[small] for found in (got, *others))
    off = torch.cat(far)
    allowed = more + 64 * step(got.dtype) + 10 * limit * rms + 2 * max(off[off.isfinite()].tolist(), default=0.0)
    assert (error <= allowed).all(), "a number that should be next to 0"


def clear(op: str, values: Args, options: dict) -> Tensor:
    """[T] whether the selection of experts is clear."""
    first = next(iter(ARGUMENTS[op]))
    return clear_choice(op, values | {first: values[first].reshape(-1, values[first].shape[-1])}, options) & True


def valid_ids(ids: Tensor, values: Args, options: dict) -> None:
    """K distinct experts for any logits."""
    (
        first,
        *_,
    ) = values.values()
    E = values["router_weight"].shape[0] if "router_weight" in values else first.shape[-1]
    assert ids.min() >= 0 and ids.max() < E, f"ids out of range: {ids}"
    ordered = ids.sort(-1).values
    assert not (ordered[..., 1:] == ordered[..., :-1]).any(), f"an id comes twice: {ids}"


# ------------------------------------------------------------------------------------------------ while others run


def again(drawn: Call, device: str, first: list[Tensor]) -> None:
    """The same bits, also while threads call the op and in a process that was forked meanwhile."""

    def same() -> bool:
        return all(same_bits(a, b) for a, b in zip(run(drawn, drawn.on_device(device)[0]), first, strict=True))

    if drawn.alongside == "nothing" or not drawn.good:
        assert same(), "other bits in the second run"
        return
    wrong: list[str] = []
    with busy(same, wrong):
        assert same(), "other bits while threads run"
        if drawn.alongside == "forks" and device == "cpu" and not SANITIZED:
            for _ in range(3):
                forked(same)
    assert not wrong, wrong[0]


@contextlib.contextmanager
def busy(same, wrong: list[str]) -> Iterator[None]:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                if not same():
                    wrong.append("other bits in a thread")
            except Exception as error:
                wrong.append(f"a thread raised {error}")
            time.sleep(0.0005)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def forked(same) -> None:
    """In the child PyTorch must use one thread, because OpenMP's other threads do not exist there."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        code = 3
        with contextlib.suppress(BaseException):
            code = 0 if same() else 2
        os._exit(code)
    until = time.monotonic() + SECONDS / 3
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("a forked child hangs")
        time.sleep(0.001)
    assert ended[1] == 0, f"a forked child ended with status {ended[1]}: 512 is other bits, 768 an exception"
