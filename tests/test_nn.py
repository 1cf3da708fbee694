"""torch_moe_metal.nn.MoE, made from sizes and from a block, compared with the specification; trained, saved,
compiled."""

import ast
import copy
import itertools
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

from checks import relative
from tiny_models import tiny_module
from torch_moe_metal import nn, quantize, reference
from torch_moe_metal.packed_layers import slots_with_grad

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


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_from_sizes(options, device):
    """The fused forward and the forward with gradients equal the specification."""
    moe = made(**options).to(device)
    x = torch.randn(2, 5, 32, dtype=moe.down.dtype).to(device)
    residual = torch.randn_like(x)
    exact = copy.deepcopy(moe).double().cpu().requires_grad_(True)
    expected = exact(x.double().cpu(), residual.double().cpu()).detach()
    tolerance = 1e-6 if moe.down.dtype == torch.float32 else 8e-3
    with torch.no_grad():
        assert relative(moe(x, residual).cpu(), expected) <= tolerance
    assert relative(moe(x, residual).cpu(), expected) <= tolerance


def test_equals_the_specification():
    """Compared with direct calls of reference.gate and reference.experts."""
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
    """A layer of a transformers block, which shares its weights."""
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
        ({"inner_size": 0}, "down: expected 1 to 4611686018427387903 (its inner size, I), got 0"),
        ({"inner_size": -1}, "negative"),
        ({"shared_size": -1}, "negative"),
        ({"scoring": "x"}, "scoring: expected one of softmax, sigmoid, sqrt_softplus; got 'x'"),
        ({"renormalize": "x"}, "renormalize: expected one of none, before_scale, after_scale; got 'x'"),
        ({"group_score": "x"}, "group_score: expected one of top2_sum, max; got 'x'"),
        ({"n_group": 3}, "n_group: expected a divisor of E = 8, got 3"),
        ({"n_group": 4, "topk_group": 5}, "topk_group: expected 1 to 4 (n_group), got 5"),
        ({"n_group": 4}, "top_k: expected 1 to 2 (the experts in topk_group groups), got 3"),
        ({"softcap": -1.0}, "softcap: expected a finite number >= 0, got -1"),
        ({"activation": "x"}, "activation: expected one of silu, gelu, gelu_tanh, relu2, swiglu_oai, sigmoid; got 'x'"),
        ({"limit": 0.0}, "limit: expected a number > 0 or None, got 0"),
        ({"shared_gate": True}, "shared_gate: expected `shared` as well, got none"),
    ],
    ids=str,
)
def test_options_are_checked_at_construction(options: dict, said: str):
    """The ops raise with their messages, on any device of the weights."""
    sizes = {"hidden_size": 32, "inner_size": 16, "num_experts": 8, "top_k": 3}
    for device in ("cpu", "meta"):
        with pytest.raises(RuntimeError) as raised:
            nn.MoE(**(sizes | options), device=device)
        assert said in str(raised.value).splitlines()[0]


def test_unknown_options_raise():
    with pytest.raises(TypeError, match=r"unknown: norm_topk_prob, scorings; .* scoring, renormalize, n_group,"):
        nn.MoE(32, 16, 8, 3, scorings="softmax", norm_topk_prob=True, softcap=0.0)


def test_dtypes_that_only_the_fallback_supports():
    """While autograd records, a layer runs in any dtype, including those that the ops do not support."""
    with torch.device("meta"):
        assert nn.MoE(32, 16, 8, 3, dtype=torch.float64).down.is_meta


def test_imports_go_one_way():
    """nn imports the transformers integration, which imports nothing from nn, and `fusing` imports nothing from
    `checkpoints`, neither at the top of a file nor in a function."""
    package = Path(nn.__file__).parent
    found = {path: imports(path) for path in (package / "nn.py", *(package / "transformers").rglob("*.py"))}
    assert "torch_moe_metal.transformers.fusing.moe_layer" in found.pop(package / "nn.py") and len(found) >= 20
    assert {path.name for path, names in found.items() if "torch_moe_metal.nn" in names} == set()
    checkpoints = "torch_moe_metal.transformers.checkpoints"
    fusing = {path: names for path, names in found.items() if path.parent.name == "fusing"}
    assert len(fusing) >= 8
    assert [path.name for path, names in fusing.items() if any(name.startswith(checkpoints) for name in names)] == []
    script = "import sys, torch_moe_metal.nn; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=package.parent)


#: The packages that users may have; wheels require only torch.
OF_USERS = {"torch", "torch_moe_metal", "transformers", "huggingface_hub", "numpy", "peft", "gguf"}
OF_USERS |= {"fastapi", "starlette", "uvicorn", "safetensors", "tokenizers", "pydantic", "llguidance"}


def test_the_wheel_needs_no_developer_tools():
    """Nothing in the package imports MLX, a plotting library, or a module of tools/, which are not in the wheel."""
    files = [*Path(nn.__file__).parent.rglob("*.py")]
    found = {name.partition(".")[0] for path in files for name in imports(path)} - {*sys.stdlib_module_names}
    assert found == OF_USERS and len(files) > 50


def test_folders_import_one_way():
    """The library imports no command, and no two folders import each other, in functions neither. A folder contains
    those inside of it."""
    package = Path(nn.__file__).parent
    found = {path: imports(path) for path in package.rglob("*.py")}
    commands = {path for path, names in found.items() if any(n.startswith("torch_moe_metal.commands") for n in names)}
    assert {path for path in commands if "commands" not in path.parts} == {package / "__main__.py"}
    arrows = {(path.parent, home) for path, names in found.items() for home in map(folder_of, names) if home}
    apart = {(a, b) for a, b in arrows if not a.is_relative_to(b) and not b.is_relative_to(a)}
    assert len(apart) > 10 and not apart & {(b, a) for a, b in apart}


def folder_of(module: str) -> Path | None:
    """The folder of a module of this package."""
    path = Path(nn.__file__).parents[1].joinpath(*module.split("."))
    if module.startswith("torch_moe_metal") and path.is_dir():
        return path
    return path.parent if path.with_suffix(".py").exists() else None


def imports(path: Path) -> set[str]:
    """The modules, and their names, that a file of this package imports anywhere."""
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
    """The gradients of the layer equal those of the specification."""
    moe, x = made(shared_size=24).double(), torch.randn(4, 32, dtype=torch.float64)
    parameters = [moe.router_weight, moe.gate_up, moe.down]
    ours = torch.autograd.grad(moe(x).square().sum(), parameters)
    weights, ids = reference.gate(x, moe.router_weight, top_k=3)
    output = reference.experts(x, weights, ids, moe.gate_up, moe.down, shared=moe.shared(x))
    for a, e in zip(ours, torch.autograd.grad(output.square().sum(), parameters), strict=True):
        assert relative(a, e) <= 1e-6  # the router's weights are float32


def test_state():
    """It can be saved, loaded, copied and compiled like any module."""
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


# ------------------------------------------------------------------------------------------------ quantised weights

FORMATS = [("affine", 4, 32), ("affine", 3, 16), ("affine", 8, 64), ("mxfp4", 4, 32), ("fp8", 8, 128)]
formats = pytest.mark.parametrize("format, bits, group", FORMATS)


def layer(**options) -> nn.MoE:
    torch.manual_seed(0)
    return nn.MoE(64, 64, 8, 3, **options)


def dequantized(module: torch.nn.Module, prefix: str, columns: int, format: str) -> torch.Tensor:
    names = [f"{prefix}{part}" for part in ("scale", "offset")]
    data = getattr(module, prefix.rstrip("_") or "data")
    scales = (getattr(module, name) for name in names)
    return reference.dequantize_for(data, *scales, format, torch.empty(0, columns))


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantized_moe(format: str, bits: int, group: int, dtype: torch.dtype, device: str):
    """Packed like `quantize` does; the result equals that of a dense layer with the rounded values."""
    moe = layer(dtype=dtype, shared_size=24, shared_gate=True)
    dense = copy.deepcopy(moe).float()
    want = [quantize(weight.detach(), format, bits, group) for weight in (moe.gate_up, moe.down)]
    assert moe.quantize_(format, bits, group) is moe
    for name, parts in zip(("gate_up", "down"), want, strict=True):
        got = (getattr(moe, name), getattr(moe, f"{name}_scale"), getattr(moe, f"{name}_offset"))
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(got, parts, strict=True))
        setattr(dense, name, torch.nn.Parameter(dequantized(moe, f"{name}_", 64, format)))
    x, residual = torch.randn(2, 2, 5, 64).to(dtype)
    expected = dense(x.float(), residual.float()).detach()
    moe, tolerance = moe.to(device), 1e-5 if dtype == torch.float32 else 2e-2
    with torch.no_grad():
        assert relative(moe(x.to(device), residual.to(device)).cpu(), expected) <= tolerance
    assert relative(moe(x.to(device), residual.to(device)).cpu(), expected) <= tolerance  # with gradients
    assert f"format={format}" in repr(moe) and "I=64" in repr(moe)


def test_quantized_block(device: str):
    """gpt-oss's block has transposed weights, interleaved rows and biases; it is packed along rows."""
    block = tiny_module(GptOssMLP).to(device)
    moe, x = nn.MoE.from_block(block), torch.randn(2, 5, 64).to(device)
    with torch.no_grad():
        before = moe(x)
        moe.quantize_(bits=8, group_size=32)
        assert moe.gate_up.shape == (*block.experts.gate_up_proj.mT.shape[:2], 64)
        assert 1e-5 < relative(moe(x).cpu(), before.cpu()) <= 2e-2
        other = nn.MoE.from_block(moe)
        assert other.gate_up is moe.gate_up and torch.equal(other(x), moe(x)) and repr(other) == repr(moe)
    assert block.experts.down_proj.is_floating_point()


def test_quantize_raises_before_any_change():
    moe = nn.MoE(64, 48, 8, 3)
    with pytest.raises(ValueError) as raised:
        moe.quantize_()
    said = "down: expected a multiple of 64 columns, its group_size, got [8, 64, 48]"
    assert str(raised.value) == f"torch_moe_metal.nn.MoE.quantize_: {said}"
    assert isinstance(moe.gate_up, torch.nn.Parameter) and isinstance(moe.down, torch.nn.Parameter)
    with pytest.raises(RuntimeError, match="its weights are affine already"):
        moe.quantize_(group_size=16).quantize_(group_size=16)


@formats
def test_quantized_state(format: str, bits: int, group: int):
    """It can be saved, loaded, copied and compiled like any module, and made on meta without memory."""
    moe, x = layer().quantize_(format, bits, group), torch.randn(4, 64)
    assert all(
        not tensor.requires_grad for name, tensor in moe.state_dict(keep_vars=True).items() if "router" not in name
    )
    with torch.device("meta"):
        empty = nn.MoE(64, 64, 8, 3).quantize_(format, bits, group)
    empty.load_state_dict(moe.state_dict(), assign=True)
    other = nn.MoE(64, 64, 8, 3).quantize_(format, bits, group)
    other.load_state_dict(moe.state_dict())
    with torch.no_grad():
        want = moe(x)
        for same in (other, empty, copy.deepcopy(moe), torch.compile(moe, fullgraph=True, backend="aot_eager")):
            assert torch.equal(same(x), want)


@pytest.mark.slow_on_mps
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@formats
def test_conversions_keep_packed_weights(format: str, bits: int, group: int, dtype: torch.dtype, device: str):
    moe = layer().quantize_(format, bits, group)
    linear = nn.Linear(64, 32, format=format, bits=bits, group_size=group)
    embedding = nn.Embedding(300, 64, format=format, bits=bits, group_size=group)
    for module in (moe, linear, embedding):
        before = {name: buffer.clone() for name, buffer in module.named_buffers() if name != "of_dtype"}
        module.to(device).to(dtype)
        after = dict(module.named_buffers())
        assert before.keys() == after.keys() - {"of_dtype"}
        for name, buffer in before.items():
            assert after[name].dtype == buffer.dtype and torch.equal(after[name].cpu(), buffer)
            assert after[name].device.type == device
    assert moe.router_weight.dtype == linear.bias.dtype == dtype
    if dtype != torch.float64:
        with torch.no_grad():
            assert moe(torch.ones(2, 64, dtype=dtype, device=device)).dtype == dtype
            assert linear(torch.ones(2, 64, dtype=dtype, device=device)).dtype == dtype
            assert embedding(torch.tensor([3], device=device)).dtype == dtype


@formats
def test_linear(format: str, bits: int, group: int, device: str):
    torch.manual_seed(0)
    module = torch.nn.Linear(128, 200).to(device).eval()
    ours = nn.Linear.from_module(module, format, bits, group)
    assert (
        ours.bias is module.bias
        and not ours.training
        and torch.equal(ours.data, quantize(module.weight.detach(), format, bits, group)[0])
    )
    parts = [None if part is None else part.cpu() for part in (ours.data, ours.scale, ours.offset)]
    weight = reference.dequantize_for(*parts, format, torch.empty(0, 128))
    x = torch.randn(2, 5, 128)
    want = torch.nn.functional.linear(x, weight, module.bias.cpu())
    with torch.no_grad():
        assert relative(ours(x.to(device)).cpu(), want) <= 1e-6
    state = ours.state_dict()
    assert set(state) == {"bias", "data", "scale"} | ({"offset"} if format == "affine" else set())
    other = nn.Linear(128, 200, format=format, bits=bits, group_size=group).to(device)
    other.load_state_dict(state)
    bare = nn.Linear(128, 200, bias=False, format=format, bits=bits, group_size=group).to(device)
    with torch.no_grad():
        assert torch.equal(other(x.to(device)), ours(x.to(device)))
        assert bare.bias is None and bare(x.to(device)).shape == (2, 5, 200)
    assert f"in_features=128, out_features=200, bias=True, format={format}" in repr(ours)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("columns", [32, 63, 128, 0])
def test_linear_raises_for_another_width(columns: int, grad: bool, device: str):
    """Twice the columns with half the bits have the same bytes."""
    ours = nn.Linear.from_module(torch.nn.Linear(64, 24), "affine", 4, 32).to(device)
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError) as raised:
        ours(torch.randn(5, columns, device=device, requires_grad=grad))
    assert str(raised.value) == f"torch_moe_metal.nn.Linear: x: expected shape [..., 64], got [5, {columns}]"


def test_experts_know_their_group_size(device: str):
    """Another width raises with and without a gradient."""
    moe = layer().quantize_("affine", 4, 32).to(device)
    experts = moe._router_and_experts()[1]
    assert experts["group_size"] == 32 and "group_size=32" in repr(moe)
    weights, ids = torch.ones(5, 2, device=device), torch.zeros(5, 2, dtype=torch.int32, device=device)
    x = torch.randn(5, 128, device=device)
    with pytest.raises(RuntimeError, match=r"gate_up_scale: expected shape .* and group 32; got"):
        torch.ops.moe_metal.experts(x, weights, ids, **experts)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        slots_with_grad(x, ids, experts)
    halves = {name: experts[name][:, ::2] for name in ("gate_up", "gate_up_scale", "gate_up_offset")}
    with pytest.raises(RuntimeError, match=r"down_scale: expected shape .* and group 32; got"):
        torch.ops.moe_metal.experts(x[:, :64], weights, ids, **experts | halves)
    assert "group_size" not in layer().quantize_("fp8")._router_and_experts()[1]


# ------------------------------------------------------------------------------------------------ autocast


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_moe_under_autocast(packed: bool, dtype: torch.dtype, grad: bool, device: str):
    """Any dtypes of weights, x and residual: the output has the dtype of x."""
    moe = layer(shared_size=24, shared_gate=True, router_bias=True, dtype=dtype)
    moe = moe.quantize_("affine", 8, 32) if packed else moe
    x, residual = torch.randn(2, 5, 64)
    want = copy.deepcopy(moe).float()(x, residual).detach()
    moe = moe.to(device)
    for of_x in (torch.float32, torch.bfloat16):
        with torch.set_grad_enabled(grad), torch.autocast(device, torch.bfloat16):
            leaf = x.to(device, of_x).requires_grad_(grad)
            got = moe(leaf, residual.to(device))
        assert got.dtype == of_x and relative(got.cpu(), want) <= 2e-2
        if grad:
            (of_leaf,) = torch.autograd.grad(got.square().sum(), leaf)
            assert of_leaf.dtype == of_x and of_leaf.isfinite().all() and of_leaf.any()


@formats
@pytest.mark.parametrize("grad", [False, True])
def test_linear_under_autocast(format: str, bits: int, group: int, grad: bool, device: str):
    """As in torch.nn.Linear: the output has autocast's dtype for any dtypes of x and bias."""
    ours = nn.Linear(128, 200, format=format, bits=bits, group_size=group).to(device)
    x = torch.randn(5, 128, device=device)
    with torch.no_grad():
        want = ours(x)
    for of_x, of_bias in itertools.product((torch.float32, torch.float16, torch.bfloat16), repeat=2):
        ours.bias = torch.nn.Parameter(ours.bias.detach().to(of_bias))
        with torch.set_grad_enabled(grad), torch.autocast(device, torch.bfloat16):
            got = ours(x.to(of_x).requires_grad_(grad))
        assert got.dtype == torch.bfloat16 and relative(got.cpu(), want.cpu()) <= 1e-2
        assert got.requires_grad == grad
    torch._dynamo.reset()
    with torch.autocast(device, torch.bfloat16), torch.no_grad():
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), ours(x))


@formats
def test_gradients_pass_through_frozen_weights(format: str, bits: int, group: int):
    """Gradients of x, the bias and the router equal those of a dense layer with the same values."""
    ours, x = nn.Linear(64, 32, format=format, bits=bits, group_size=group).double(), torch.randn(5, 64).double()
    x.requires_grad_()
    weight = reference.dequantize_for(ours.data, ours.scale, ours.offset, format, x)
    want = torch.autograd.grad(torch.nn.functional.linear(x, weight, ours.bias).square().sum(), [x, ours.bias])
    for a, b in zip(torch.autograd.grad(ours(x).square().sum(), [x, ours.bias]), want, strict=True):
        assert relative(a, b) <= 1e-12
    moe = layer()
    dense = copy.deepcopy(moe)
    moe.quantize_(format, bits, group)
    for name in ("gate_up", "down"):
        setattr(dense, name, torch.nn.Parameter(dequantized(moe, f"{name}_", 64, format)))
    x = torch.randn(4, 64, requires_grad=True)
    got, want = (torch.autograd.grad(m(x).square().sum(), [x, m.router_weight]) for m in (moe, dense))
    assert all(relative(a, b) <= 1e-5 for a, b in zip(got, want, strict=True))


@formats
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (1, 2, 3), (0,)], ids=str)
def test_embedding(format: str, bits: int, group: int, shape: tuple, device: str):
    torch.manual_seed(0)
    module = torch.nn.Embedding(300, 160 if group < 64 else 128, padding_idx=0).to(torch.bfloat16)
    ours = nn.Embedding.from_module(module, format, bits, group)
    table = reference.dequantize_for(ours.data, ours.scale, ours.offset, format, torch.empty(0, module.embedding_dim))
    ids = torch.randint(300, shape)
    want = table[ids].to(torch.bfloat16)
    got = ours.to(device)(ids.to(device))
    assert got.dtype == torch.bfloat16 and got.shape == want.shape and torch.equal(got.cpu(), want)
    assert set(ours.state_dict()) == {"data", "scale"} | ({"offset"} if format == "affine" else set())
    for outside in (-1, 300):
        with pytest.raises(IndexError, match="out of range"):
            torch.nn.Embedding(300, 64)(torch.tensor([3, outside]))
        with pytest.raises(IndexError, match="out of range"):
            ours.cpu()(torch.tensor([3, outside]))
    with pytest.raises(TypeError, match="max_norm changes the weight"):
        nn.Embedding.from_module(torch.nn.Embedding(4, 64, max_norm=1.0))


# ------------------------------------------------------------------------------------------------ all or nothing


def test_conversions_take_any_strides():
    """For example those of a transposed scale [N, 1] with one group per row, as in some checkpoints."""
    ours = nn.Linear(64, 32, group_size=64)
    for part in ("scale", "offset"):
        setattr(ours, part, getattr(ours, part).T.clone(memory_format=torch.contiguous_format).T)
        assert getattr(ours, part).stride() == (1, 32)
    expected, x = {part: tensor.clone() for part, tensor in ours.named_buffers()}, torch.randn(3, 64)
    before = ours(x).detach()
    ours.to(torch.float16).to(torch.float32)
    assert all(torch.equal(tensor, expected[part]) for part, tensor in ours.named_buffers())
    assert relative(ours(x), before) <= 1e-3  # the bias was rounded


def test_a_failed_conversion_changes_no_packed_weight():
    """Conversions are computed before anything is assigned; a conversion to integers raises before that too."""
    moe = layer(shared_size=24).quantize_()
    before, x = {name: (tensor, tensor.clone()) for name, tensor in moe.named_buffers()}, torch.randn(3, 64)
    expected = moe(x)
    for nth in range(len(list(moe.parameters())) + len(before)):
        calls = itertools.count()

        def fail(tensor: torch.Tensor, calls=calls, nth=nth) -> torch.Tensor:
            if next(calls) == nth:
                raise MemoryError
            return tensor.clone()

        with pytest.raises(MemoryError):
            moe._apply(fail)
        for name, (tensor, values) in before.items():
            assert getattr(moe, name) is tensor and torch.equal(tensor, values)
        assert torch.equal(moe(x), expected)
    with pytest.raises(TypeError, match=r"expected .to\(dtype\), .*, got a conversion of all tensors to float16"):
        moe.type(torch.float16)
    assert all(getattr(moe, name) is tensor for name, (tensor, _) in before.items())
    assert torch.equal(moe(x), expected)


def test_an_interrupted_quantize_changes_nothing(monkeypatch):
    """An interruption while any of the weights is packed; a repeated call works."""
    moe, x = layer().requires_grad_(False), torch.randn(3, 64)
    expected, state, said = moe(x), moe.state_dict(), repr(moe)
    packed = copy.deepcopy(moe).quantize_()(x)
    for nth in range(2):
        calls = itertools.count()

        def interrupted(*args, calls=calls, nth=nth):
            if next(calls) == nth:
                raise KeyboardInterrupt
            return quantize(*args)

        monkeypatch.setattr(nn, "quantize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            moe.quantize_()
        monkeypatch.undo()
        assert moe.state_dict().keys() == state.keys() and repr(moe) == said and torch.equal(moe(x), expected)
    assert torch.equal(moe.quantize_()(x), packed)


# ------------------------------------------------------------------------------------------------ autocast


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", ["dense", "affine"])
def test_autocast(format: str, of_weights: torch.dtype, of_x: torch.dtype, grad: bool, device: str):
    """x and weights may differ in dtype, as with PyTorch's own layers; results and gradients are close to float32's."""
    moe = layer(shared_size=24, shared_gate=True)
    linear = torch.nn.Linear(64, 32)
    if format == "affine":
        moe, linear = moe.quantize_(bits=8), nn.Linear.from_module(linear, bits=8)
    x = torch.randn(5, 64, requires_grad=grad)
    want = [moe(x, x).detach(), linear(x).detach()]
    want += torch.autograd.grad(moe(x, x).square().sum() + linear(x).square().sum(), [x, linear.bias]) if grad else []
    moe, linear, given = moe.to(device, of_weights), linear.to(device, of_weights), x.detach().to(device, of_x)
    given.requires_grad_(grad)
    with torch.autocast(device, torch.bfloat16), torch.set_grad_enabled(grad):
        got = [moe(given, given), linear(given)]
    assert [output.dtype for output in got] == [of_x, torch.bfloat16]
    if grad:
        loss = got[0].float().square().sum() + got[1].float().square().sum()
        got += torch.autograd.grad(loss, [given, linear.bias])
    for a, b in zip(got, want, strict=True):
        assert relative(a.detach().cpu().float(), b) <= 0.03
