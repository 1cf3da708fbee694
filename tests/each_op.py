"""A call of each op and of each format of weights, for tests of rules that hold for all of them."""

import pytest
import torch
from torch import Tensor

from cases import SAMPLES, Args, Case, call
from checks import bits
from torch_moe_metal.arguments import ARGUMENTS, written

IN_PLACE = tuple(op for op in ARGUMENTS if written(op))
SIZED = ("sample_odd", "sample_even", "sample_half")  # the samples of every op
ODD = {case.op: case for case in SAMPLES if case.name == "sample_odd"}
OTHERS = {f"{case.op} {case.name.removeprefix('sample_')}": case for case in SAMPLES if case.name not in SIZED}
GOOD = ODD | OTHERS  # every op, every format of weights, and offsets: "gate", "linear affine4"
EACH = pytest.mark.parametrize("case", GOOD.values(), ids=GOOD)
EACH_OP = pytest.mark.parametrize("case", ODD.values(), ids=ODD)
PER_TOKEN = [case for case in SAMPLES if next(iter(case.shapes.values()))[0] == "T"]


def run(case: Case, args: Args, device: str | None = None) -> list[Tensor]:
    """The op's outputs on a device; the default is that of the arguments."""
    if device is not None:
        args = {name: tensor.to(device, copy=True) for name, tensor in args.items()}
    return call(getattr(torch.ops.moe_metal, case.op), case.op, args, case.options)


def refusal(op: str, args: Args, options: dict) -> str:
    """The message of the op's error. Also checks that nothing was written."""
    tensors = {name: value for name, value in args.items() if isinstance(value, Tensor) and not value.is_meta}
    before = {name: bits(tensor) for name, tensor in tensors.items()}
    with pytest.raises(RuntimeError) as error:
        call(getattr(torch.ops.moe_metal, op), op, args, options)
    for name, tensor in tensors.items():
        assert torch.equal(bits(tensor), before[name]), f"{name} has changed"
    return str(error.value)
