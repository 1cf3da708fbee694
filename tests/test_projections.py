"""Joined projections: one product for layers with the same input, whose parameters do not change."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import torch_moe_metal
from checks import relative
from dispatch_table import load_of_a_layer
from tiny_models import eager, tiny_model, tokens
from torch_moe_metal.commands.bench.whole_model import calls
from torch_moe_metal.nn import Linear
from torch_moe_metal.transformers.fusing.attention_options import one_plus_weight
from torch_moe_metal.transformers.fusing.projections import is_joined, join, project, tensors_of
from torch_moe_metal.transformers.versions import cache_of, with_cache

SIZES = 256, 128, 48
FORMATS = {"dense": None, "affine": ("affine", 4, 32), "mxfp4": ("mxfp4", 4, 32), "fp8": ("fp8", 8, 128)}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def layers_of(kind: str, device: str = "cpu", bias: bool = True) -> list[nn.Linear]:
    torch.manual_seed(0)
    layers = [nn.Linear(128, rows, bias=bias, dtype=torch.bfloat16) for rows in SIZES]
    if FORMATS[kind]:
        layers = [Linear.from_module(layer, *FORMATS[kind]) for layer in layers]
    return [layer.to(device) for layer in layers]


def are_joined(layers: list[nn.Linear]) -> bool:
    return all(parts[0] is None or is_joined(parts) for parts in zip(*map(tensors_of, layers), strict=True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", FORMATS)
def test_one_product_has_the_same_results(kind: str, bias: bool, device: str):
    layers = layers_of(kind, device, bias)
    before = [copy.deepcopy(layer.state_dict()) for layer in layers]
    x = torch.randn(3, 128).to(device, torch.bfloat16)
    expected = [layer(x) for layer in layers]
    identities = [list(map(id, layer.parameters())) for layer in layers]
    join(layers)
    assert are_joined(layers) and [list(map(id, layer.parameters())) for layer in layers] == identities
    for layer, state in zip(layers, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    for got, wanted in zip(project(x, layers), expected, strict=True):
        assert relative(got.float(), wanted.float()) <= 1e-2
    parts = [part for layer in layers for part in tensors_of(layer) if part is not None]
    memory = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    assert sum(memory.values()) == sum(part.nbytes for part in parts)


def replaced(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def of_another_dtype(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.float()
    layer.bias.data = layer.bias.data.float()


def without_bias(layer: nn.Linear) -> None:
    layer.bias = None


@pytest.mark.parametrize("change", [replaced, without_bias])
@pytest.mark.parametrize("which", range(3))
def test_layers_that_are_no_longer_joined_run_alone(change, which: int):
    layers, x = layers_of("dense"), torch.randn(2, 128, dtype=torch.bfloat16)
    join(layers)
    change(layers[which])
    assert not are_joined(layers) if change is replaced else layers[which].bias is None
    for got, layer in zip(project(x, layers), layers, strict=True):
        assert torch.equal(got, layer(x))


def test_neighbours_in_other_memory_are_not_joined():
    """Tensors of two allocations may be adjacent by chance."""
    memory = bytearray(256)
    first, second = (torch.frombuffer(memory, dtype=torch.uint8, count=128, offset=at) for at in (0, 128))
    assert first.data_ptr() + first.nbytes == second.data_ptr()
    assert not is_joined((first, second))
    assert is_joined(torch.frombuffer(memory, dtype=torch.uint8).split(128))


@pytest.mark.parametrize("mixed", ["formats", "kinds", "biases", "dtypes", "meta", "shared"])
def test_unsupported_projections_stay_separate(mixed: str):
    layers = layers_of("dense")
    if mixed == "formats":
        layers = [layers_of(kind)[i] for i, kind in enumerate(("affine", "mxfp4", "affine"))]
    elif mixed == "kinds":
        layers[1] = layers_of("affine")[1]
    elif mixed == "biases":
        layers[1].bias = None
    elif mixed == "dtypes":
        of_another_dtype(layers[2])
    elif mixed == "meta":
        layers = [layer.to("meta") for layer in layers]
    elif mixed == "shared":
        layers[0].share_memory()
    before = [[part if part is None else part.data_ptr() for part in tensors_of(layer)] for layer in layers]
    join(layers)
    after = [[part if part is None else part.data_ptr() for part in tensors_of(layer)] for layer in layers]
    of_weights = [parts[:-1] for parts in after] == [parts[:-1] for parts in before]
    assert of_weights if mixed != "biases" else [parts[-1] for parts in after] == [parts[-1] for parts in before]


@pytest.mark.parametrize("other", [0, 2])
def test_neighbours_of_one_format_are_one_product(other: int, device: str):
    """In llama.cpp's Q4_K_M files v_proj has more bits in every second layer."""
    layers = [layers_of("mxfp4" if i == other else "affine", device)[i] for i in range(3)]
    x = torch.randn(3, 128).to(device, torch.bfloat16)
    expected = [layer(x) for layer in layers]
    join(layers)
    assert are_joined([layer for i, layer in enumerate(layers) if i != other]) and not are_joined(layers)
    with calls() as counted:
        results = project(x, layers)
    assert counted["moe_metal.linear.default"] == 2
    assert all(torch.equal(got, wanted) for got, wanted in zip(results, expected, strict=True))


# ------------------------------------------------------------------------------------------------ models


@pytest.fixture
def patched(device: str) -> nn.Module:
    model = eager(tiny_model("qwen3_moe", device))
    torch_moe_metal.patch(model)
    return model


def attention_of(model: nn.Module) -> nn.Module:
    return model.model.layers[0].self_attn


def joined(model: nn.Module) -> bool:
    attention = attention_of(model)
    return are_joined([attention.q_proj, attention.k_proj, attention.v_proj])


def test_one_product_for_three(patched, device: str):
    """Two in attention are ours, and the head is PyTorch's."""
    with calls() as counted:
        patched(tokens(1, 1, device=device))
    assert counted["moe_metal.linear.default"] == 2 * 2
    assert sum(counted[f"aten.{name}.default"] for name in ("mm", "addmm", "bmm")) == 1


def test_moved_and_converted_weights_are_joined_again(patched, device: str):
    assert joined(patched)
    assert joined(patched.to(torch.bfloat16)) and joined(patched.to("cpu").to(device))


def test_copies_are_joined(patched):
    for other in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert joined(other)
        attention_of(other).q_proj.weight.data.zero_()
        assert attention_of(patched).q_proj.weight.any()


def test_saved_and_loaded(patched, tmp_path, device: str):
    """Saved models have the usual names and shapes, and load, also into unpatched models."""
    ids = tokens(1, 5, device=device)
    expected, names = patched(ids).logits, set(patched.state_dict())
    for model in (patched, copy.deepcopy(patched)):
        if model is not patched:
            torch_moe_metal.unpatch(model)
        model.save_pretrained(tmp_path)
        loaded = type(patched).from_pretrained(tmp_path).to(device)
        assert set(loaded.state_dict()) == names
        assert relative(loaded(ids).logits, expected) <= 1e-5


def test_loaded_weights_are_used(patched, device: str):
    ids, other = tokens(1, 5, device=device), eager(tiny_model("qwen3_moe", device))
    for parameter in other.parameters():
        parameter.data.mul_(1.25)
    for assign in (False, True):
        patched.load_state_dict(other.state_dict(), assign=assign)
        assert relative(patched(ids).logits, other(ids).logits) <= 1e-5


@pytest.mark.parametrize("name", ["q_proj", "v_proj", "k_norm"])
def test_hooks_run(patched, device: str, name: str):
    seen, ids = [], tokens(1, 5, device=device)
    expected = patched(ids).logits
    handle = getattr(attention_of(patched), name).register_forward_hook(lambda *args: seen.append(name))
    assert relative(patched(ids).logits, expected) <= 1e-5 and seen == [name]
    handle.remove()
    patched(ids)
    assert seen == [name]


def test_unpatched_weights_have_the_same_bits(device: str):
    model = eager(tiny_model("gpt_oss", device))
    ids, before = tokens(2, 6, device=device), copy.deepcopy(model.state_dict())
    expected = model(ids).logits
    torch_moe_metal.patch(model)
    torch_moe_metal.unpatch(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(ids).logits, expected)


#: The ops of a layer for one decoded token, without views and allocations.
OPS_OF_A_LAYER = {
    "qwen3_moe": 8,
    "gpt_oss": 8,
    "mixtral": 8,
    "olmoe": 8,
    "minimax_m2": 8,
    "glm4_moe": 11,
    "qwen2_moe": 12,
    "deepseek_v3": 15,
    "glm4_moe_lite": 15,
}


@pytest.mark.parametrize("family", OPS_OF_A_LAYER)
def test_ops_of_a_layer(family: str):
    assert load_of_a_layer(family, "cpu", simulated=False, patched=True).ops == OPS_OF_A_LAYER[family]


def test_ops_outside_of_layers():
    """The embedding, two for the position, ten for its angles, the padding as a mask, the last norm, and the head."""
    token, padding, totals = tokens(1, 1), torch.ones(1, 10, dtype=torch.long), []
    for layers in (1, 2):
        model = tiny_model("qwen3_moe", num_hidden_layers=layers).bfloat16()
        torch_moe_metal.patch(model)
        cache = cache_of(model(tokens(1, 8), use_cache=True))
        model(token, **with_cache(cache))  # grows the cache
        with calls() as ops:
            model(token, **with_cache(cache), attention_mask=padding)
        totals.append(ops.total())
    one, two = totals
    assert one - (two - one) == 16


def test_clipped_attention_is_not_fused():
    report = torch_moe_metal.patch(tiny_model("olmoe", clip_qkv=4.0))
    rows = {row.name: row for row in report.rows if row.name.endswith("self_attn")}
    assert rows and all(row.state == "left" and "clips" in row.note for row in rows.values())


# ------------------------------------------------------------------------------------------------ prepared weights


def in_place(norm: nn.Module) -> None:
    norm.weight.mul_(2)


def new_memory(norm: nn.Module) -> None:
    norm.weight.data = norm.weight.data * 2


def new_parameter(norm: nn.Module) -> None:
    norm.weight = nn.Parameter(norm.weight * 2)


def loaded(norm: nn.Module) -> None:
    norm.load_state_dict({"weight": norm.weight * 2})


def converted(norm: nn.Module) -> None:
    norm.to(torch.bfloat16)


@pytest.mark.parametrize("change", [in_place, new_memory, new_parameter, loaded, converted], ids=lambda c: c.__name__)
def test_prepared_weights_follow_changes(change, device: str):
    norm = nn.RMSNorm(64, device=device)
    with torch.inference_mode():
        first = one_plus_weight(norm)
    assert one_plus_weight(norm) is first and not first.is_inference()
    for _ in range(2):  # the second change may get the memory of the first
        change(norm)
        assert torch.equal(one_plus_weight(norm), 1 + norm.weight.float())


def test_fake_results_are_not_kept():
    norm = nn.RMSNorm(64)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(one_plus_weight(norm), FakeTensor)
    assert torch.equal(one_plus_weight(norm), torch.full((64,), 2.0))


@pytest.mark.parametrize("family, computed", [("qwen3_next", "aten.add.Tensor"), ("gemma4_text", "aten.mul.Tensor")])
def test_weights_are_prepared_once(family: str, computed: str, device: str):
    model, ids = tiny_model(family, device), tokens(1, 1, device=device)
    torch_moe_metal.patch(model)
    counts = []
    for _ in range(3):
        with calls() as counted:
            logits = model(ids).logits
        counts.append(counted[computed])
    assert counts[0] > counts[1] == counts[2]
    other = copy.deepcopy(model)
    assert torch.equal(other(ids).logits, logits) and len(pickle.dumps(other)) == len(pickle.dumps(model))
