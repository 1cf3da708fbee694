"""Forward-mode AD: with a tangent, PyTorch's own ops run, as for a backward."""

import pytest
import torch
from torch.autograd import forward_ad
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeSparseMoeBlock

import torch_moe_metal
from checks import relative
from test_transformers import counted
from tiny_models import tiny_module
from torch_moe_metal import nn


def layer():
    torch.manual_seed(0)
    return nn.MoE(64, 8, num_experts=4, top_k=2, shared_size=8).requires_grad_(False)


def block():
    module = tiny_module(Qwen3MoeSparseMoeBlock)
    torch_moe_metal.patch(module)
    return module


def experts():
    module = tiny_module(Qwen3MoeExperts, _experts_implementation="moe_metal")
    ids, weights = torch.tensor([[0, 1], [5, 3], [7, 7]]), torch.tensor([[0.5, 0.2], [0.1, 0.9], [0.3, 0.3]])
    return lambda x: module(x.flatten(0, 1), ids, weights)


def jvp(function):
    return lambda x, tangent: torch.func.jvp(function, (x,), (tangent,))


def dual(function):
    def both(x, tangent):
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))))

    return both


def compiled(function):
    return torch.compile(function, backend="aot_eager")


WAYS = {
    "jvp": jvp,
    "dual": dual,
    "compiled_jvp": lambda function: compiled(jvp(function)),
    "jvp_of_compiled": lambda function: jvp(compiled(function)),
    "compiled_dual": lambda function: compiled(dual(function)),
    "dual_of_compiled": lambda function: dual(compiled(function)),
}


# The fast set has every way to compute them, and every module; each compilation takes seconds.
BUILT = [
    pytest.param(build, way, marks=pytest.mark.slow if "compiled" in way and build is not block else [])
    for build in (layer, block, experts)
    for way in WAYS
]


@pytest.mark.parametrize("grad", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("build, way", BUILT)
def test_tangents(build, way, grad):
    """The tangent equals the difference quotient, whether or not gradients are recorded too."""
    function, step = build(), 1e-2
    generator = torch.Generator().manual_seed(1)
    x, tangent = (torch.randn(1, 3, 64, generator=generator) for _ in range(2))
    with torch.set_grad_enabled(grad):
        output, derivative = WAYS[way](function)(x, tangent)
        with counted() as calls:
            assert relative(output, function(x)) <= 1e-5
        quotient = (function(x + step * tangent) - function(x - step * tangent)) / (2 * step)
    assert calls["experts"] == 1
    assert relative(derivative, quotient) <= 2e-2


def test_tangents_of_parameters():
    module, x = layer(), torch.randn(3, 64)
    tangent = torch.randn_like(module.down)
    output, derivative = torch.func.jvp(
        lambda down: torch.func.functional_call(module, {"down": down}, (x,)), (module.down,), (tangent,)
    )
    assert relative(output, module(x)) <= 1e-5
    less = module(x)
    module.down += tangent  # the output is linear in it
    assert relative(derivative, module(x) - less) <= 1e-4


def test_no_tangent_no_fallback():
    """A level of forward-mode AD without any tangent changes nothing."""
    module, x = layer(), torch.randn(3, 64)
    with forward_ad.dual_level(), counted() as calls:
        module(x)
    assert calls == {"gate": 1, "glu": 1, "experts": 1}
