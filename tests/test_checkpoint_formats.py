"""Checkpoints in FP8, in integers and in NVFP4, loaded packed and compared with dense models of the same values."""

import pytest
import torch
import transformers
from transformers import (
    FineGrainedFP8Config,
)
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import checkpoints
import torch_moe_metal
from checkpoints import formats, load
from checks import relative
from tiny_models import FAMILIES, tiny_module, tokens
from torch_moe_metal.transformers.checkpoints import awq_gptq as integers_module
from torch_moe_metal.transformers.checkpoints.awq_gptq import is_linear_in_up
from torch_moe_metal.transformers.checkpoints.awq_gptq_layouts import integers_of
from torch_moe_metal.transformers.checkpoints.fp8 import Fp8, FromPowers
from torch_moe_metal.transformers.fusing.packed_modules import dense_shape, packed_modules


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", ["qwen3_fp8", "deepseek_fp8", "deepseek_v3_1", "e8m0_fp8"])
def test_fp8_runs_packed(name, device, request):
    """All linear layers and experts stay float8; the logits equal those of dense weights."""
    folder, ids = request.getfixturevalue(name), tokens(2, 9, device=device)
    model, expected = load(folder, device), load(folder / "dense", experts_implementation="eager")(ids.cpu()).logits
    packed = formats(model)
    linear = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert linear - packed.keys() == {"lm_head"} and set(packed.values()) == {"fp8"}
    assert {"self_attn", "experts"} <= {part for n in packed for part in n.split(".")}
    for module in map(model.get_submodule, packed):
        assert {module.parts(weight)[0].dtype for weight in module.packing} == {torch.float8_e4m3fn}
    assert relative(model(ids).logits.cpu(), expected) <= 1e-5
    report = torch_moe_metal.patch(model)
    assert report["fused"] and not report["left"], str(report)
    assert {row.note for row in report.rows if row.name != "model.norm"} == {"fp8"}
    assert relative(model(ids).logits.cpu(), expected) <= 1e-5
    for tensor in dict(model.named_buffers()).values():
        assert tensor.device.type == device


@pytest.mark.parametrize("family", checkpoints.FP8_FAMILIES)
def test_fp8_of_every_family(family, tmp_path):
    folder, ids = checkpoints.fp8(tmp_path, family), tokens(2, 9)
    model, expected = load(folder), load(folder / "dense")(ids).logits
    assert len(torch_moe_metal.patch(model)["fused"]) == FAMILIES[family]
    assert set(formats(model).values()) == {"fp8"} and relative(model(ids).logits, expected) <= 1e-5


@pytest.mark.parametrize("name", ["qwen3_fp8", "deepseek_fp8", "deepseek_v3_1", "e8m0_fp8"])
def test_fp8_is_saved_unchanged(name, request, tmp_path):
    """With the same names, expert by expert, and the same bytes. Since 5.24 transformers keeps some routers in
    float32."""
    folder = request.getfixturevalue(name)
    load(folder, dtype="auto").save_pretrained(tmp_path)
    before, after = checkpoints.stored(folder), checkpoints.stored(tmp_path)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        if key.endswith(".gate.weight") and after[key].dtype == torch.float32:
            tensor = tensor.float()
        assert after[key].dtype == tensor.dtype, key
        assert torch.equal(after[key].view(torch.uint8), tensor.view(torch.uint8)), key
    ids = tokens(1, 5)
    assert torch.equal(load(tmp_path)(ids).logits, load(folder)(ids).logits)


@pytest.mark.parametrize(
    "changes", [{"activation_scheme": "static"}, {"weight_block_size": [64, 64]}, {"dequantize": True}], ids=str
)
def test_other_fp8_falls_back_to_transformers(changes):
    quantizer = Fp8(FineGrainedFP8Config(**changes), pre_quantized=True)
    quantizer.validate_environment(device_map=None)
    assert type(quantizer) is FineGrainedFP8HfQuantizer and quantizer.quantization_config.dequantize


def test_fp8_experts_whose_blocks_do_not_meet(tmp_path, caplog):
    """If the up rows begin inside of a block of 128 rows, transformers dequantises, with a warning."""
    folder = checkpoints.fp8(tmp_path, "qwen3_moe", moe_intermediate_size=64)
    with caplog.at_level("WARNING"):
        transformers.utils.logging.enable_propagation()
        model = load(folder, dtype="auto")
        transformers.utils.logging.disable_propagation()
    assert "its up rows do not begin with a block of 128" in caplog.text and not formats(model)
    ids = tokens(1, 5)
    assert relative(model(ids).logits.float(), load(folder / "dense")(ids).logits) <= 0.1


def test_every_power_of_two():
    """All bytes of e8m0 become the float32 that PyTorch has for them, and bytes again: also 2^-127, which float32 has
    as a subnormal number, and NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    there = FromPowers(None)
    numbers = there.convert({"scale": [codes]})["scale"][0]
    assert torch.equal(numbers.view(torch.int32)[:-1], codes.float().view(torch.int32)[:-1]) and numbers[-1].isnan()
    back = there.reverse_op.convert({"scale": numbers})["scale"]
    assert back.dtype == codes.dtype and torch.equal(back.view(torch.uint8), codes.view(torch.uint8))


# ------------------------------------------------------------------------------------------------ integers


@pytest.mark.slow_on_mps
@pytest.mark.parametrize(
    "way, family",
    [(way, "qwen3_moe") for way in checkpoints.INTEGERS] + [("awq", "mixtral"), ("compressed", "deepseek_v3")],
)
def test_integers_become_affine(integers, way, family, device, tmp_path):
    """Without rounding, and without the packages of these projects; a saved model is a checkpoint of ours."""
    folder, ids = integers(way, family), tokens(2, 9, device=device)
    expected = load(folder / "dense", experts_implementation="eager")(ids.cpu()).logits
    model = load(folder, device)
    assert set(formats(model).values()) == {"affine"} and "lm_head" not in formats(model)
    dense = load(folder / "dense").state_dict()
    for name, tensor in load(folder).dequantize().state_dict().items():
        assert relative(tensor, dense[name]) <= 1e-7, name
    report = torch_moe_metal.patch(model)
    assert report["fused"] and not report["left"], str(report)
    assert relative(model(ids).logits.cpu(), expected) <= 1e-5
    model.save_pretrained(tmp_path)
    again = load(tmp_path, device)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert relative(again(ids).logits.cpu(), expected) <= 1e-5


@pytest.mark.parametrize("way", ["gptq_rows", "compressed_zeros_rows"])
def test_integers_move_between_devices(integers, way, device, tmp_path):
    """With one group per row, the last stride of a transposed scale [N, 1] is not 1."""
    model, ids = load(integers(way)), tokens(2, 9)
    expected = model(ids).logits
    moved = model.to(torch.float16).to(torch.float32).to(device)
    assert relative(moved(ids.to(device)).logits.cpu(), expected) <= 1e-3  # norms, the head and RoPE were rounded
    moved.save_pretrained(tmp_path)
    before, after = moved.state_dict(), load(tmp_path, device).state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("way", checkpoints.ATTENTION_BITS)
def test_widths_by_module(integers, way):
    """Attention has 8 bits, experts have 4."""
    model = load(integers(way))
    for name, module in packed_modules(model):
        for weight in module.packing:
            bits = 8 * module.parts(weight)[0].shape[-1] // dense_shape(module, weight)[-1]
            assert bits == (8 if "self_attn" in name else 4), name


def test_codes_of_compressed_tensors_are_not_changed(integers):
    """For linear layers; those of experts are joined."""
    folder = integers("compressed")
    layer = load(folder).model.layers[0].self_attn.q_proj
    stored = checkpoints.stored(folder)["model.layers.0.self_attn.q_proj.weight_packed"]
    assert torch.equal(layer.weight.view(torch.int32), stored) and layer.weight_offset.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "way, changes",
    [
        ("gptq", {"desc_act": True}),
        ("gptq", {"bits": 5}),
        ("awq", {"version": "gemv"}),
        ("awq", {"zero_point": False}),
        ("compressed", {"format": "nvfp4-pack-quantized"}),
        ("compressed", {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}),
        ("compressed", {"config_groups": {"g": {"weights": {"num_bits": 4, "strategy": "tensor_group"}}}}),
    ],
    ids=str,
)
def test_other_integers_fall_back_to_transformers(way, changes):
    config = checkpoints.INTEGERS[way][3]
    assert integers_of(config) is not None and integers_of(config | changes) is None


# ------------------------------------------------------------------------------------------------ nvfp4


@pytest.mark.slow_on_mps
@pytest.mark.parametrize(
    "family, options",
    [("qwen3_moe", {}), ("qwen3_moe", {"apart": True}), ("deepseek_v3", {"with_activations": True}), ("mixtral", {})],
    ids=str,
)
def test_nvfp4_of_compressed_tensors(nvfp4, family, options, device, tmp_path):
    """Its codes and scales stay as they are. Gate and up may be divided by different numbers. Saved, the model is one
    of ours."""
    folder, ids = nvfp4(family, **options), tokens(2, 9, device=device)
    expected = load(folder / "dense", experts_implementation="eager")(ids.cpu()).logits
    model = load(folder, device)
    assert set(formats(model).values()) == {"nvfp4"} and "lm_head" not in formats(model)
    report = torch_moe_metal.patch(model)
    assert report["fused"] and not report["left"], str(report)
    assert relative(model(ids).logits.cpu(), expected) <= 1e-5
    model.save_pretrained(tmp_path)
    again = load(tmp_path, device)
    assert formats(again) == formats(model)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert relative(again(ids).logits.cpu(), expected) <= 1e-5
    assert relative(load(folder).dequantize()(ids.cpu()).logits, expected) <= 1e-5


def test_nvfp4_is_not_changed(nvfp4):
    """Codes and scales of linear layers are the stored ones, and the factor is the float32 inverse."""
    before, layer = checkpoints.stored(nvfp4()), load(nvfp4()).model.layers[0].self_attn.q_proj
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(layer.weight, before[f"{name}_packed"])
    assert torch.equal(layer.weight_scale, before[f"{name}_scale"].view(torch.uint8))
    assert torch.equal(layer.weight_offset, 1 / before[f"{name}_global_scale"])


def test_nvfp4_of_experts_that_clamp(nvfp4, monkeypatch):
    """If experts clamp, down's factor cannot absorb up's: gate and up must have the same divisor."""
    kinds = {Qwen3MoeExperts: True, DeepseekV4Experts: False, GptOssExperts: False}
    assert {kind: is_linear_in_up(tiny_module(kind)) for kind in kinds} == kinds
    monkeypatch.setattr(integers_module, "is_linear_in_up", lambda module: False)
    assert formats(load(nvfp4()))
    with pytest.raises(
        ValueError, match=r"0.up_proj.weight_global_scale: expected the number of \S+0.gate_proj"
    ) as raised:
        load(nvfp4(apart=True))
    assert str(nvfp4(apart=True)) in str(raised.value)


@pytest.mark.parametrize(
    "change", [{"group_size": 32}, {"type": "int"}, {"num_bits": 8}, {"symmetric": False}], ids=str
)
def test_other_floats_fall_back_to_transformers(change):
    config = checkpoints.nvfp4_config(with_activations=False)
    assert integers_of(config) is not None
    weights = config["config_groups"]["group_0"]["weights"]
    assert integers_of(config | {"config_groups": {"group_0": {"weights": weights | change}}}) is None
