"""torch_moe_metal.nn.MoE: from sizes and from a block, against the specification; trained, saved, compiled."""

import ast
import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tiny_models import tiny_module
from torch_moe_metal import nn, reference

VARIANTS = [
    {},
    {"shared_size": 24},
    {"shared_size": 24, "shared_gate": True, "renormalize": "none"},
    {"router_bias": True, "activation": "gelu_tanh", "dtype": torch.bfloat16},
    {"select_bias": True, "scoring": "sigmoid", "n_group": 4, "topk_group": 2, "scaling_factor": 2.5, "limit": 0.5},
]


def made(**options) -> nn.MoE:
    torch.manual_seed(0)
    moe = nn.MoE(32, 16, 8, 3, **options)
    with torch.no_grad():
        for name in ("router_bias", "select_bias"):
            if hasattr(moe, name):
                getattr(moe, name).normal_(std=0.3)
    return moe


def relative(actual, expected) -> float:
    return float((actual - expected).detach().double().norm() / expected.double().norm())


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_from_sizes(options, device):
    """The fused forward is the specification's, and so is the one with gradients."""
    moe = made(**options).to(device)
    x = torch.randn(2, 5, 32, dtype=moe.down.dtype).to(device)
    residual = torch.randn_like(x)
    exact = copy.deepcopy(moe).double().cpu().requires_grad_(True)
    expected = exact(x.double().cpu(), residual.double().cpu()).detach()
    tolerance = 1e-6 if moe.down.dtype == torch.float32 else 8e-3
    with torch.no_grad():
        assert relative(moe(x, residual).cpu(), expected) <= tolerance
    assert relative(moe(x, residual).cpu(), expected) <= tolerance


def test_is_the_specification():
    """Against reference.gate and reference.experts, called by hand."""
    moe = made(shared_size=24, shared_gate=True)
    x = torch.randn(5, 32)
    with torch.no_grad():
        weights, ids = reference.gate(x, moe.router_weight, top_k=3)
        gate, up = (x @ moe.shared.gate_up.T).chunk(2, -1)
        shared = torch.nn.functional.silu(gate) * up @ moe.shared.down.T
        shared_gate = (x @ moe.shared_gate.weight.T).squeeze(-1)
        expected = reference.experts(x, weights, ids, moe.gate_up, moe.down, shared=shared, shared_gate=shared_gate)
        assert relative(moe(x), expected) <= 1e-6


@pytest.mark.parametrize("cls", [Qwen2MoeSparseMoeBlock, Qwen3MoeSparseMoeBlock, DeepseekV3MoE, GptOssMLP])
def test_from_block(cls, device):
    """A transformers block's layer, on the very same weights."""
    block = tiny_module(cls).to(device)
    moe, x = nn.MoE.from_block(block), torch.randn(2, 5, 64).to(device)
    assert moe.down is block.experts.down_proj and not moe.training
    expected = block(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert relative(moe(x), expected) <= 1e-6
    assert relative(moe.requires_grad_(True)(x), expected) <= 1e-6


def test_from_other_blocks():
    with pytest.raises(TypeError, match="no MoE layer of this form: Llama4TextMoe"):
        nn.MoE.from_block(tiny_module(Llama4TextMoe))
    with pytest.raises(TypeError, match="no MoE layer of this form: Linear"):
        nn.MoE.from_block(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"top_k": 9}, "top_k: expected 1 to 8 (E), got 9"),
        ({"top_k": 0}, "top_k: expected 1 to 8 (E), got 0"),
        ({"num_experts": 0}, "E: expected 1 to 1024 (the number of experts), got 0"),
        ({"num_experts": 1025}, "E: expected 1 to 1024 (the number of experts), got 1025"),
        ({"hidden_size": 0}, "expected H >= 1, got 0"),
        ({"inner_size": 0}, "expected I >= 1, got 0"),
        ({"inner_size": -1}, "negative"),
        ({"shared_size": -1}, "negative"),
        ({"scoring": "x"}, "scoring: expected one of softmax, sigmoid, sqrt_softplus; got 'x'"),
        ({"renormalize": "x"}, "renormalize: expected one of none, before_scale, after_scale; got 'x'"),
        ({"group_score": "x"}, "group_score: expected one of top2_sum, max; got 'x'"),
        ({"n_group": 3}, "n_group: expected a divisor of E = 8, got 3"),
        ({"n_group": 4, "topk_group": 5}, "topk_group: expected 1 to 4 (n_group), got 5"),
        ({"n_group": 4}, "top_k: expected 1 to 2 (the experts in topk_group groups), got 3"),
        ({"softcap": -1.0}, "softcap: expected a finite number >= 0, got -1"),
        ({"activation": "x"}, "activation: expected one of silu, gelu, gelu_tanh, relu2, swiglu_oai; got 'x'"),
        ({"limit": 0.0}, "limit: expected a number > 0 or None, got 0"),
        ({"shared_gate": True}, "shared_gate: expected `shared` beside it, got none"),
    ],
    ids=str,
)
def test_options_are_checked_when_it_is_made(options: dict, said: str):
    """By the ops, in their words, and wherever the weights will be."""
    sizes = {"hidden_size": 32, "inner_size": 16, "num_experts": 8, "top_k": 3}
    for device in ("cpu", "meta"):
        with pytest.raises(RuntimeError) as raised:
            nn.MoE(**(sizes | options), device=device)
        assert said in str(raised.value).splitlines()[0]


def test_unknown_options_are_named():
    with pytest.raises(TypeError, match=r"unknown: norm_topk_prob, scorings; .* scoring, renormalize, n_group,"):
        nn.MoE(32, 16, 8, 3, scorings="softmax", norm_topk_prob=True, softcap=0.0)


def test_what_training_alone_can_do_is_not_refused():
    """With gradients wanted a layer runs in any dtype, which the ops do not."""
    with torch.device("meta"):
        assert nn.MoE(32, 16, 8, 3, dtype=torch.float64).down.is_meta


def test_imports_go_one_way():
    """nn asks the transformers package about a block, and nothing in there asks nn back, lazily or not."""
    package = Path(nn.__file__).parent
    found = {path: imports(path) for path in (package / "nn.py", *(package / "transformers").glob("*.py"))}
    assert "torch_moe_metal.transformers.blocks" in found.pop(package / "nn.py") and len(found) >= 5
    assert {path.name for path, names in found.items() if "torch_moe_metal.nn" in names} == set()
    script = "import sys, torch_moe_metal.nn; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=package.parent)


def imports(path: Path) -> set[str]:
    """The modules, and the names out of them, that a file of this package imports anywhere in it."""
    home = path.relative_to(Path(nn.__file__).parents[1]).with_suffix("").parts[:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = home[: len(home) + 1 - node.level] if node.level else ()
            module = ".".join((*package, *filter(None, [node.module])))
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def test_gradients():
    """The gradients of the layer are those of the specification."""
    moe, x = made(shared_size=24).double(), torch.randn(4, 32, dtype=torch.float64)
    parameters = [moe.router_weight, moe.gate_up, moe.down]
    ours = torch.autograd.grad(moe(x).square().sum(), parameters)
    weights, ids = reference.gate(x, moe.router_weight, top_k=3)
    output = reference.experts(x, weights, ids, moe.gate_up, moe.down, shared=moe.shared(x))
    for a, e in zip(ours, torch.autograd.grad(output.square().sum(), parameters), strict=True):
        assert relative(a, e) <= 1e-6  # the router's weights are float32


def test_state():
    """It saves, loads, copies and compiles like any module."""
    moe, other, x = (
        made(select_bias=True, scoring="sigmoid"),
        nn.MoE(32, 16, 8, 3, select_bias=True),
        torch.randn(4, 32),
    )
    other.load_state_dict(moe.state_dict())
    assert sorted(moe.state_dict()) == ["down", "gate_up", "router_weight", "select_bias"]
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(moe)(x), moe(x)) and not torch.equal(other(x), moe(x))
        compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
        assert relative(compiled(x), moe(x)) <= 1e-6
    assert repr(moe) == "MoE(H=32, I=16, E=8, top_k=3, scoring=sigmoid, activation=silu)"
