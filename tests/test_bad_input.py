"""Bad input: each op raises with a message that names the cause, and has written nothing."""

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cases import Args, Case
from cases.bad import BAD
from cases.bad_linear_attention import BAD_LINEAR_ATTENTION
from each_op import EACH, GOOD, IN_PLACE, ODD, OTHERS, refusal, run
from torch_moe_metal.arguments import ARGUMENTS, written

ALL_BAD = BAD + BAD_LINEAR_ATTENTION
#: For each op and format, its first call with one wrong shape.
ONE_WRONG_SHAPE = {bad.values[0]: bad for bad in reversed(ALL_BAD) if "expected shape" in bad.values[1]}


def with_changes(case: Case, device: str, changes: dict) -> tuple[Args, dict]:
    args, options = case.arguments(device), dict(case.options)
    for name, change in changes.items():
        if name not in ARGUMENTS[case.op]:
            options[name] = change
        elif callable(change):
            args[name] = change(args[name])
        else:
            args[name] = None if change is None else change.to(device)
    return args, options


def check_refusal(good: str, device: str, message: str, changes: dict) -> None:
    op = GOOD[good].op
    args, options = with_changes(GOOD[good], device, changes)
    assert refusal(op, args, options) == f"moe_metal::{op}: {message}"


@pytest.mark.parametrize("good, message, changes", ALL_BAD)
def test_bad_input(good: str, message: str, changes: dict):
    """On meta, as used by torch.compile and torch.export, errors have the same messages as on the CPU."""
    check_refusal(good, "cpu", message, changes)
    check_refusal(good, "meta", message, changes)


@pytest.mark.parametrize("good, message, changes", ONE_WRONG_SHAPE.values())
def test_bad_input_on_mps(good: str, mps: str, message: str, changes: dict):
    """The checks are shared with the CPU; this tests that each op on mps calls them."""
    check_refusal(good, mps, message, changes)


@EACH
def test_freed_memory(case: Case):
    """FSDP frees the storage of tensors: this must raise before anything is read or written. PyTorch cannot do it on
    mps, where the check is the same."""
    for name in case.shapes:
        for left in (0, 1):  # an empty storage, and one that is a byte too short
            args = case.arguments()
            args[name] = args[name].clone()
            size = args[name].nbytes
            args[name].untyped_storage().resize_((size - 1) * left)
            with pytest.raises(RuntimeError) as error:
                run(case, args)
            assert str(error.value).splitlines()[0] == (
                f"moe_metal::{case.op}: {name}: expected a tensor of {size} bytes of memory, got one of "
                f"{(size - 1) * left}: its storage was freed or cut"
            )


@EACH
def test_meta_tensors_need_no_memory(case: Case):
    want = run(case, case.arguments("meta"))
    args = case.arguments("meta")
    for tensor in args.values():
        tensor.untyped_storage().resize_(0)
    assert [tensor.shape for tensor in run(case, args)] == [tensor.shape for tensor in want]


def test_inner_size_whose_double_overflows():
    args = ODD["experts"].arguments()
    args |= {"x": args["x"][:, :1], "down": args["down"][:1, :1, :1].expand(1, 1, 2**62)}
    said = "moe_metal::experts: down: expected 1 to 4611686018427387903 (its inner size, I), got 4611686018427387904"
    with pytest.raises(RuntimeError, match=re.escape(said)):
        run(ODD["experts"], args)


@pytest.mark.parametrize("op", [op for op, case in ODD.items() if len(case.shapes) > 1])
def test_shapes_are_checked_before_anything_is_copied(op: str, device: str):
    """A copy with so many columns would exhaust memory, and its error would hide the real one."""
    args, shapes = ODD[op].arguments(device), ODD[op].shapes
    for name in args:
        last, others = shapes[name][-1:], "".join(shapes[other] for other in args if other != name)
        if last not in others:
            continue  # a value of attention may have any size
        wide = args[name][..., :1].expand(*args[name].shape[:-1], 2**40)
        with pytest.raises(RuntimeError) as error:
            run(ODD[op], args | {name: wide})
        assert re.match(rf"moe_metal::{op}: \w+: expected (shape|1 to \d+ )", str(error.value)), name


@EACH
def test_none_for_a_tensor(case: Case, device: str):
    args = case.arguments(device)
    for name in args:
        if not ARGUMENTS[case.op][name].optional:
            assert refusal(case.op, args | {name: None}, case.options) == (
                f"moe_metal::{case.op}: {name}: expected a tensor, got None"
            )


@pytest.mark.parametrize("op", ODD)
@pytest.mark.parametrize("mode", [contextlib.nullcontext, FakeTensorMode])
def test_none_for_every_tensor(op: str, mode: Callable):
    """Without tensors there is no device."""
    first = next(iter(ARGUMENTS[op]))
    with mode():
        said = refusal(op, dict.fromkeys(ARGUMENTS[op]), ODD[op].options)
    assert said == f"moe_metal::{op}: {first}: expected a tensor, got None"


@pytest.mark.parametrize("good, message, changes", ONE_WRONG_SHAPE.values())
def test_bad_input_compiled(good: str, message: str, changes: dict):
    """Errors are raised while compiling, with symbolic sizes."""
    case = GOOD[good]
    args, options = with_changes(case, "cpu", changes)
    for name, letters in case.shapes.items():
        if "T" in letters and args[name] is not None and args[name].dim() == len(letters):
            torch._dynamo.maybe_mark_dynamic(args[name], letters.index("T"))
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=re.escape(f"moe_metal::{case.op}: {message}")):
        torch.compile(lambda args: run(replace(case, options=options), args), fullgraph=True, backend="eager")(args)


@pytest.mark.parametrize("op", IN_PLACE)
def test_in_place_target_overlaps_an_input(op: str, device: str):
    """With any of the other arguments, in their last element."""
    for name in written(op):
        for other in ODD[op].shapes:
            args = ODD[op].arguments(device)
            if other == name or args[other].dtype != args[name].dtype:
                continue
            first, second = args[name].numel(), args[other].numel()
            memory = torch.zeros(first + second - 1, device=device)
            args[name] = memory[:first].view(args[name].shape)
            args[other] = memory[first - 1 :].view(args[other].shape)
            said = refusal(op, args, ODD[op].options)
            assert re.fullmatch(
                rf"moe_metal::{op}: ({name}|{other}): expected memory that no other argument uses, got a "
                "tensor that overlaps one",
                said,
            ), (name, other)


@EACH
def test_tensors_of_two_devices(case: Case, mps: str):
    """One tensor on the CPU, or only one on mps: no silent copy, no wrong pointer in a kernel."""
    op = case.op
    first, *rest = case.shapes
    for name in rest:
        for here, there in (("mps:0", "cpu"), ("cpu", "mps:0")):
            args = case.arguments(here)
            args[name] = args[name].to(there)
            assert refusal(op, args, case.options) == (
                f"moe_metal::{op}: {name}: expected device {here}, the device of {first}; got {there}"
            )


@EACH
def test_one_tensor_on_meta(case: Case):
    """Devices must be equal even if only shapes matter."""
    first, *rest = case.shapes
    for name in rest:
        for here, there in (("meta", "cpu"), ("cpu", "meta")):
            args = case.arguments(here)
            args[name] = torch.empty_like(args[name], device=there)
            with pytest.raises(RuntimeError) as error:
                run(case, args)
            assert str(error.value).splitlines()[0] == (
                f"moe_metal::{case.op}: {name}: expected device {here}, the device of {first}; got {there}"
            )


@pytest.mark.parametrize("format", ["affine", "mxfp4", "fp8", "nvfp4", "q4_k"])
def test_strides_of_an_empty_weight_do_not_matter(format: str, device: str):
    case = OTHERS[{"affine": "dequantize affine4"}.get(format, f"dequantize {format}")]
    args = {name: tensor[:0] if name != "offset" or format == "affine" else tensor
            for name, tensor in case.arguments(device).items()}  # fmt: skip
    want = run(case, args)
    args["weight"] = torch.empty_strided(args["weight"].shape, (0, 0), dtype=args["weight"].dtype, device=device)
    assert all(a.shape == b.shape for a, b in zip(run(case, args), want, strict=True))


def test_row_count_near_overflow():
    """2^63 - 1 rows with one element each; only the shape of their scales is wrong."""
    rows = torch.zeros(1, 1, dtype=torch.uint8).expand(2**63 - 1, 1)
    with pytest.raises(RuntimeError, match=r"scale: expected shape \[72057594037927936, 1\], a scale for each 128 x"):
        torch.ops.moe_metal.linear(torch.ones(1, 1), rows, torch.ones(1, 1), format="fp8")


@EACH
def test_sparse_tensors(case: Case):
    for name in case.shapes:
        args = case.arguments()
        args[name] = args[name].to_sparse()
        with pytest.raises(NotImplementedError) as error:
            run(case, args)
        assert str(error.value) == (
            f"moe_metal::{case.op}: {name}: expected a dense tensor on cpu or mps, got one of SparseCPU"
        )
