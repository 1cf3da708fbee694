"""PyTorch's rules, which every op follows: opcheck, torch.compile, autograd, in-place writes, transforms."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from cases import SAMPLES, Args, Case
from checks import Guarded, assert_matches, same_bits
from each_op import EACH, EACH_OP, GOOD, IN_PLACE, ODD, refusal, run
from torch_moe_metal.arguments import ARGUMENTS, written


@EACH_OP
def test_opcheck(case: Case):
    """On the CPU with dense weights: schema, fake function and dispatch keys are the same on every device and for every
    format. `test_compiles_once_on_mps` compares the results on mps with the fake function."""
    args = case.arguments()
    positional = tuple(args.get(name) for name in ARGUMENTS[case.op])
    torch.library.opcheck(getattr(torch.ops.moe_metal, case.op).default, positional, case.options)


def compiles_once(case: Case, device: str, backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda args: run(case, args), fullgraph=True, backend=counter)
    for T in (6, 9, 33):
        case = replace(case, dims=case.dims | {"T": T})
        args = case.arguments(device)
        want = run(case, args, device)
        for name, letters in case.shapes.items():
            if "T" in letters:
                torch._dynamo.mark_dynamic(args[name], letters.index("T"))
        assert all(same_bits(a, b) for a, b in zip(compiled(args), want, strict=True))
    assert counter.frame_count == 1


@EACH
def test_compiles_once_for_any_number_of_tokens(case: Case):
    """The whole graph without breaks, with a single compilation, and bitwise equal to eager."""
    compiles_once(case, "cpu", "aot_eager")


@EACH_OP
def test_compiles_once_on_mps(case: Case, mps: str):
    compiles_once(case, mps, "aot_eager")


@EACH_OP
def test_compiles_with_inductor(case: Case):
    compiles_once(case, "cpu", "inductor")


@EACH
def test_input_that_requires_grad_raises(case: Case, device: str):
    want = run(case, case.arguments(), device)
    for name in case.shapes:
        args = case.arguments(device)
        if not args[name].is_floating_point():
            continue
        leaf = args[name].requires_grad_()
        args[name] = leaf.view_as(leaf)  # not a leaf, so that autograd allows in-place writes
        message = f"moe_metal::{case.op}: {name}: expected a tensor that does not require grad"
        with torch.enable_grad(), pytest.raises(RuntimeError, match=re.escape(message)):
            run(case, args)
        with torch.no_grad():
            got = run(case, args)
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_lazily_cloned_inputs_are_read_and_not_copied(case: Case):
    """Two tensors share memory until one of them is written: no op may give an input memory of its own."""
    want = run(case, case.arguments())
    args = {name: torch._lazy_clone(tensor) for name, tensor in case.arguments().items()}
    got = run(case, args)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    owned = {name for name, tensor in args.items() if not torch._C._is_cow_tensor(tensor)}
    assert owned == set(written(case.op, args))


@EACH
def test_inference_mode(case: Case, device: str):
    want = run(case, case.arguments(), device)
    with torch.inference_mode():
        got = run(case, case.arguments(), device)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", IN_PLACE)
def test_in_place_ops_bump_the_version(op: str, device: str, mode: type):
    """Once per call, also if the kernel copies its result into a tensor that is not contiguous."""
    for kind in ("contiguous", "strided"):
        args = {name: Guarded(tensor.to(device), kind).view for name, tensor in ODD[op].arguments().items()}
        versions = {name: tensor._version for name, tensor in args.items()}
        with mode():
            run(ODD[op], args)
        assert {name: args[name]._version - versions[name] for name in args} == {
            name: int(name in written(op)) for name in args
        }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", IN_PLACE)
def test_compiled_in_place_ops_bump_the_version(op: str, device: str, mode: type):
    """As often as PyTorch's own compiled in-place ops."""

    def bumps(write: Callable[[Args], object]) -> list[int]:
        torch._dynamo.reset()
        args = ODD[op].arguments(device)
        before = [args[name]._version for name in written(op)]
        with mode():
            torch.compile(write, fullgraph=True, backend="aot_eager")(args)
        return [args[name]._version - version for name, version in zip(written(op), before, strict=True)]

    found = bumps(lambda args: run(ODD[op], args))
    assert found == bumps(lambda args: [args[name].add_(1) for name in written(op)]) and min(found) > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", IN_PLACE)
def test_backward_raises_after_in_place_overwrite(op: str, device: str, mode: type):
    args = ODD[op].arguments(device)
    products = [torch.ones_like(args[name], requires_grad=True) * args[name] for name in written(op)]
    with mode():
        run(ODD[op], args)
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.parametrize("op", IN_PLACE)
def test_in_place_ops_on_inference_tensors(op: str, device: str):
    """PyTorch's own rule. The other arguments, such as a model's weights, are no inference tensors."""
    case = ODD[op]
    want = run(case, case.arguments(device))
    for name in written(op):
        args = case.arguments(device)
        with torch.inference_mode():
            args[name] = args[name].clone()
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                assert "Inplace update to inference tensor outside InferenceMode" in refusal(op, args, case.options)
        with torch.inference_mode():
            got = run(case, args)
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def differentiable(case: Case) -> list[str]:
    return [name for name, tensor in case.arguments().items() if tensor.is_floating_point()]


#: Ops with a floating-point argument: a weight in mxfp4 has none.
DIFFERENTIABLE = pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for name, case in GOOD.items() if differentiable(case)]
)


def copies(args: Args) -> Args:
    return {name: tensor.clone() for name, tensor in args.items()}


def function_of(case: Case, args: Args, name: str) -> Callable[[Tensor], Tensor]:
    """The op's first output as a function of one argument, without in-place writes."""
    return lambda tensor: run(case, copies(args | {name: tensor}))[0]


def no_jvp(op: str, name: str) -> str:
    return re.escape(
        f"moe_metal::{op}: {name}: expected a tensor without a tangent (forward-mode AD), since this op has no jvp; "
        "got one with a tangent. Pass tensor.detach()"
    )


@EACH
def test_tangent_raises(case: Case, device: str):
    want = run(case, case.arguments(device))
    for name in differentiable(case):
        args = case.arguments(device)
        plain = args[name]
        with forward_ad.dual_level():
            args[name] = forward_ad.make_dual(plain, torch.ones_like(plain))
            for mode in (torch.enable_grad, torch.no_grad):  # no_grad only disables backward
                with mode(), pytest.raises(RuntimeError, match=no_jvp(case.op, name)):
                    run(case, args)
            got = run(case, copies(args | {name: args[name].detach()}))
            with torch.inference_mode():  # PyTorch's own ops have no tangents in inference mode either
                in_inference_mode = run(case, copies(args))
        for outputs in (got, in_inference_mode):
            assert all(same_bits(a, b) for a, b in zip(outputs, want, strict=True))


@EACH_OP
def test_tangent_raises_compiled(case: Case):
    """A tangent made in the graph, and one that comes from outside."""
    op, args = case.op, case.arguments()
    name = differentiable(case)[0]
    function, point = function_of(case, args, name), args[name]
    with pytest.raises(RuntimeError, match=no_jvp(op, name)):
        torch.compile(lambda x: torch.func.jvp(function, (x,), (x,)), backend="aot_eager")(point)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=no_jvp(op, name)):
        torch.compile(function, backend="aot_eager")(forward_ad.make_dual(point, torch.ones_like(point)))


@DIFFERENTIABLE
def test_function_transforms(case: Case):
    """torch.func: derivatives with respect to an argument of the op raise, all others are correct."""
    op, args = case.op, case.arguments()
    for name in differentiable(case):
        function, point = function_of(case, args, name), args[name]
        no_backward = f"moe_metal::{op}: {name}: expected a tensor that does not require grad"
        for mode in MODES:
            with mode(), pytest.raises(RuntimeError, match=no_jvp(op, name)):
                torch.func.jvp(function, (point,), (point,))
            with mode(), pytest.raises(RuntimeError, match=no_backward):
                torch.func.grad(lambda x, function=function: function(x).sum())(point)
            with mode(), pytest.raises(RuntimeError, match=no_backward):
                torch.func.vjp(function, point)
    (output, _), (none, tangent) = torch.func.jvp(lambda x: (function(point), x.sin()), (point,), (point,))
    assert same_bits(output, function(point)) and same_bits(tangent, point * point.cos()) and not none.any()


@EACH
def test_vmap(case: Case):
    """PyTorch calls the op once per sample; for in-place ops it raises."""
    op, args = case.op, case.arguments()
    for name in differentiable(case):
        function, points = function_of(case, args, name), torch.stack([args[name], args[name] * 2])
        if written(op):
            with pytest.raises(RuntimeError, match=f"Batching rule not implemented for moe_metal::{op}"):
                torch.func.vmap(function)(points)
        else:
            assert same_bits(torch.func.vmap(function)(points), torch.stack([function(point) for point in points]))


@EACH
def test_optional_arguments_may_be_none(case: Case, device: str):
    case = replace(case, given=())
    args = case.arguments(device)
    nones = {name: None for name, argument in ARGUMENTS[case.op].items() if argument.optional and name not in args}
    got = run(case, args | nones)
    assert_matches(got, case.expected(), case.longest_sum)
