"""Changes of packed weights: other dtypes and positions of the same bytes, hostile scales and codes."""

from collections.abc import Callable
from math import inf, nan

import torch
from torch import Tensor

from cases.case import HALF
from cases.experts import (
    all_ids_out_of_range,
    all_to_one_expert,
    far_ids_out_of_range,
    ids_out_of_range,
    long_ids,
    repeated_ids,
)
from cases.oracle import Args


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
