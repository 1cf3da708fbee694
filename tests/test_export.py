"""torch.export, strict and not: the graph contains our ops, for any number of tokens, or a warning gives the reason."""

import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torch_moe_metal
from checks import relative, same_bits
from each_op import ODD, run
from tiny_models import build, experts_classes, tiny_model, tiny_module, tokens
from torch_moe_metal import nn
from torch_moe_metal.arguments import results
from torch_moe_metal.grad import warned

OPS = {
    "qwen3_moe": {"norm": 3, "rope": 2, "residual_norm": 2, "gate": 2, "experts": 2},
    "gemma4_text": {"gate": 2, "experts": 2, "norm": 9, "rope": 2, "norm_add": 4, "weighted_sum_dual_norm_add": 2},
    "gpt_oss": {"norm": 3, "rope": 2, "attention": 2, "residual_norm": 2, "gate": 2, "experts": 2},
    "llama4_text": {"norm": 2, "rope": 1, "route": 2, "experts": 2, "weighted_sum": 2},
}
each_strictness = pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])


class Logits(torch.nn.Module):
    """A model as a function of one tensor."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


def export(module: torch.nn.Module, *args: torch.Tensor, strict: bool, dim: int = 0) -> torch.export.ExportedProgram:
    """A dynamic size of this dimension, the same in all arguments."""
    T = torch.export.Dim("T", min=2, max=64)
    return torch.export.export(module, args, strict=strict, dynamic_shapes=tuple({dim: T} for _ in args))


def ours_in(program: torch.export.ExportedProgram) -> dict[str, int]:
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return Counter(target.split(".")[1] for target in targets if target.startswith("moe_metal."))


def check_model(model: torch.nn.Module, ops: dict[str, int], strict: bool) -> None:
    module = Logits(model)
    with torch.no_grad():
        program = export(module, tokens(2, 9), strict=strict, dim=1)
        assert ours_in(program) == ops
        for T in (9, 13):
            assert relative(program.module()(tokens(2, T)), module(tokens(2, T))) <= 1e-6


@each_strictness
@pytest.mark.parametrize("family", OPS)
def test_patched_models(family, strict):
    model = tiny_model(family)
    torch_moe_metal.patch(model)
    check_model(model, OPS[family], strict)


@each_strictness
def test_experts_implementation(strict):
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("moe_metal")
    check_model(model, {"experts": 2}, strict)


@each_strictness
def test_layer(strict):
    """`nn.MoE`, with its shared expert."""
    layer, x = nn.MoE(16, 8, num_experts=4, top_k=2, shared_size=8).requires_grad_(False), torch.randn(9, 16)
    program = export(layer, x, strict=strict)
    assert ours_in(program) == {"gate": 1, "glu": 1, "experts": 1}
    assert torch.equal(program.module()(x), layer(x))


@each_strictness
@pytest.mark.parametrize("op", ["linear_attention_", "short_conv_"])
def test_optional_arguments_that_are_written(op, strict):
    """The exported program writes them, too, for any number of tokens."""
    case = ODD[op]

    class Op(torch.nn.Module):
        def forward(self, args: dict[str, torch.Tensor]) -> torch.Tensor:
            return getattr(torch.ops.moe_metal, op)(**args, **case.options)

    T = torch.export.Dim("T", min=5, max=64)
    dims = {name: {letters.index("T"): T} if "T" in letters else None for name, letters in case.shapes.items()}
    program = torch.export.export(Op(), (case.arguments(),), dynamic_shapes=(dims,), strict=strict)
    assert ours_in(program) == {op: 1}
    for tokens_of_call in (6, 11):
        other = replace(case, dims=case.dims | {"T": tokens_of_call})
        args, want = other.arguments(), run(other, other.arguments())
        got = results(op, program.module()(args), args)
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@each_strictness
def test_experts_selected_later(strict):
    """Experts that are selected after `patch` are used, as in transformers' exporters for targets without our ops."""
    model, ids = tiny_model("qwen3_moe"), tokens(2, 9)
    torch_moe_metal.patch(model)
    expected = model(ids).logits
    model.set_experts_implementation("batched_mm")
    check_model(model, {}, strict)
    assert relative(model(ids).logits, expected) <= 1e-5
    model.set_experts_implementation("moe_metal")
    check_model(model, OPS["qwen3_moe"], strict)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma4_text", "deepseek_v3"])
def test_experts_selected_later_in_other_families(family):
    model = tiny_model(family)
    torch_moe_metal.patch(model)
    model.set_experts_implementation("batched_mm")
    check_model(model, {}, strict=False)


@each_strictness
def test_a_needed_gradient_warns(strict):
    """One warning for the whole model, and the graph computes the same."""
    module, ids = Logits(tiny_model("qwen3_moe").requires_grad_(True)), tokens(2, 9)
    torch_moe_metal.patch(module)
    warned.clear()
    with pytest.warns(UserWarning, match="torch_moe_metal") as caught:
        program = export(module, ids, strict=strict, dim=1)
    ours = [str(warning.message) for warning in caught if "torch_moe_metal" in str(warning.message)]
    assert len(ours) == 1 and "since it records a gradient; under torch.no_grad() it has ours" in ours[0]
    assert not ours_in(program)
    with torch.no_grad():
        assert relative(program.module()(ids), module(ids)) <= 1e-5


@each_strictness
def test_experts_that_are_not_fused_warn(strict):
    cls = next(cls for cls in experts_classes() if cls.__name__ == "NemotronHExperts")
    experts = tiny_module(cls, _experts_implementation="moe_metal")
    args = torch.randn(2, 64), torch.tensor([[0, 1], [2, 3]]), torch.rand(2, 2)
    warned.clear()
    with pytest.warns(UserWarning, match="NemotronHExperts runs on transformers' grouped_mm, since its experts have"):
        torch.export.export(experts, args, strict=strict)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        experts(*args)


def test_fake_models():
    """A model on the meta device, as used by torch.export and memory planners, is fused like a real one."""
    ids = tokens(2, 9)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = build("qwen3_moe").eval()
        assert len(torch_moe_metal.patch(model)["fused"]) == 7
        assert model(ids).logits.shape == (2, 9, 99)
