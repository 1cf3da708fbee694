"""Quantised checkpoints through `from_pretrained`: gpt-oss, who loads a checkpoint, and models with packed experts."""

import copy
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AwqConfig,
    FineGrainedFP8Config,
    GPTQConfig,
    Mxfp4Config,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

import checkpoints
import torch_moe_metal
from checkpoints import dequantised, formats, load
from checks import relative
from test_transformers import counted, generated
from tiny_models import tiny_model, tokens
from torch_moe_metal import MoeMetalConfig, transformers_support
from torch_moe_metal.grad import warned
from torch_moe_metal.nn import MoE
from torch_moe_metal.transformers.checkpoints import quantizer_choice
from torch_moe_metal.transformers.checkpoints.mlx_config import MlxConfig
from torch_moe_metal.transformers.checkpoints.mlx_quantizer import Mlx
from torch_moe_metal.transformers.checkpoints.moe_metal import MoeMetal
from torch_moe_metal.transformers.checkpoints.mxfp4 import Mxfp4
from torch_moe_metal.transformers.checkpoints.quantizer import runs_here


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def test_gpt_oss_runs_packed(gpt_oss, device):
    """Blocks do not change and keep their names; the logits equal those of dense weights."""
    model, ids = load(gpt_oss, device), tokens(2, 9, device=device)
    dense = dequantised(gpt_oss)
    expected = dense(ids.cpu()).logits
    assert model.num_parameters() == dense.num_parameters()
    tensors = checkpoints.stored(gpt_oss)
    assert model.state_dict().keys() == tensors.keys()
    for name, tensor in model.state_dict().items():
        assert tensor.device.type == device and torch.equal(tensor.cpu(), tensors[name].to(tensor.dtype)), name
    assert model.get_experts_implementation() == {"": "moe_metal"}
    with counted() as calls:
        assert relative(model(ids).logits.cpu(), expected) <= 1e-5
    assert calls == {"experts": 2}
    report = torch_moe_metal.patch(model)
    assert len(report["fused"]) == 7 and "mxfp4" in str(report), str(report)
    assert relative(model(ids).logits.cpu(), expected) <= 1e-5
    torch_moe_metal.unpatch(model)
    assert isinstance(model.model.layers[0].mlp.experts, GptOssExperts)
    assert relative(model(ids).logits.cpu(), expected) <= 1e-5


def test_gpt_oss_in_its_own_dtype(gpt_oss, device):
    """In bfloat16 it is as close to float32 as the dense model, and it generates."""
    ids = tokens(2, 9)
    exact, dense = dequantised(gpt_oss)(ids).logits, dequantised(gpt_oss, dtype="auto")(ids).logits
    model = load(gpt_oss, device, dtype="auto")
    torch_moe_metal.patch(model)
    assert model.dtype == torch.bfloat16
    assert relative(model(ids.to(device)).logits.cpu(), exact) <= 2 * relative(dense, exact)
    assert len(generated(model, ids.to(device))) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports which memory belongs to a file")
def test_gpt_oss_is_not_copied(gpt_oss):
    """On the CPU the packed weights are pages of the file."""
    model = load(gpt_oss)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [tuple(int(end, 16) for end in fields[0].split("-")) for fields in maps if str(gpt_oss) in fields[-1]]
    packed = [tensor for name, tensor in model.state_dict().items() if name.endswith(("_blocks", "_scales"))]
    assert len(packed) == 8
    for tensor in packed:
        assert any(first <= tensor.data_ptr() < last for first, last in ranges)


def test_gpt_oss_is_saved_unchanged(gpt_oss, tmp_path):
    model = load(gpt_oss, dtype="auto")
    torch_moe_metal.patch(model)
    model.save_pretrained(tmp_path)
    before, after = checkpoints.stored(gpt_oss), checkpoints.stored(tmp_path)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    ids = tokens(1, 5)
    assert torch.equal(load(tmp_path)(ids).logits, load(gpt_oss)(ids).logits)


def test_gpt_oss_on_every_device_map(gpt_oss):
    model, ids = load(gpt_oss, "auto"), tokens(1, 5)
    assert set(formats(model).values()) == {"mxfp4"}
    ids = ids.to(model.device)
    assert relative(model(ids).logits.cpu(), load(gpt_oss)(ids.cpu()).logits) <= 1e-5


# ------------------------------------------------------------------------------------------------ who loads one


def test_gpt_oss_falls_back_to_transformers(gpt_oss):
    """If dequantised weights are requested, and on other devices."""
    model = dequantised(gpt_oss)
    assert type(model.model.layers[0].mlp.experts) is GptOssExperts and not hasattr(model, "hf_quantizer")
    for device_map, here in ((None, True), ({"": "mps"}, True), ({"": "cuda:0"}, False), ({"a": "cpu", "b": 0}, None)):
        assert runs_here(device_map) is (here if here is not None else runs_here({"": 0}))
    for device_map, quantizer in (({"": "xpu"}, Mxfp4HfQuantizer), ({"": torch.device("cpu")}, Mxfp4)):
        chosen = Mxfp4(Mxfp4Config(), pre_quantized=True)
        chosen.validate_environment(device_map=device_map)
        assert type(chosen) is quantizer
    dense = Mxfp4(Mxfp4Config(), pre_quantized=False)
    with pytest.raises((ValueError, RuntimeError)):  # transformers' own error
        dense.validate_environment(device_map=None)
    assert type(dense) is Mxfp4HfQuantizer


def test_distributed_models_fall_back_to_transformers(gpt_oss):
    model = load(gpt_oss)
    model.config.distributed_config = {"tp_size": 2}
    chosen = Mxfp4(Mxfp4Config(), pre_quantized=True)
    assert chosen.obstacle(model, {}) == "packed weights are not distributed over processes"
    del model.config.distributed_config
    assert chosen.obstacle(model, {}) is None


@pytest.fixture
def switch(monkeypatch):
    """Restores the switch."""
    monkeypatch.setattr(transformers_support, "_packed_checkpoints", None)
    monkeypatch.delenv(transformers_support.VARIABLE, raising=False)
    return monkeypatch


@pytest.mark.parametrize("by", ["the environment", "the function"])
def test_packed_checkpoints_can_be_disabled(gpt_oss, qwen3_fp8, integers, switch, by):
    if by == "the environment":
        switch.setenv("TORCH_MOE_METAL_CHECKPOINTS", "0")
    else:
        assert torch_moe_metal.packed_checkpoints(False) is False
    assert not formats(load(gpt_oss)) and not formats(load(qwen3_fp8))
    with pytest.raises(ImportError, match=r"optimum|gptqmodel"):  # transformers needs these packages
        load(integers("gptq"))
    assert formats(load(gpt_oss, quantization_config=Mxfp4Config(dequantize=True))) == {}
    torch_moe_metal.packed_checkpoints(True)
    assert formats(load(gpt_oss)) and formats(load(qwen3_fp8)) and formats(load(integers("gptq")))


def test_passed_configurations(qwen3_fp8, integers):
    """Configurations of the checkpoint's own method change nothing; others raise with names that users know."""
    passed = {"gptq": GPTQConfig(bits=4), "awq": AwqConfig()}
    for way, config in passed.items():
        assert set(formats(load(integers(way), quantization_config=config)).values()) == {"affine"}
    assert set(formats(load(qwen3_fp8, quantization_config=FineGrainedFP8Config())).values()) == {"fp8"}
    said = (
        r"config.json: it is quantised \(gptq\): expected no quantization_config, or a GPTQConfig, got a MoeMetalConfig"
    )
    with pytest.raises(ValueError, match=said):
        load(integers("gptq"), quantization_config=MoeMetalConfig())


def test_cuda_uses_transformers(gpt_oss, integers, monkeypatch):
    """Without a device map the model might be meant for cuda. A configuration of ours still runs on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = json.loads((integers("gptq") / "config.json").read_text())["quantization_config"]
    assert quantizer_choice.claimed(config, None) is None and quantizer_choice.claimed(config, {"": "cpu"}) is not None
    assert (
        quantizer_choice.claimed({"bits": 4, "group_size": 64}, None) is not None
    )  # nothing else reads mlx-lm folders
    for quantizer in (MoeMetal(MoeMetalConfig(), pre_quantized=False), Mlx(MlxConfig(), pre_quantized=True)):
        quantizer.validate_environment(device_map=None)
        with pytest.raises(ValueError, match="cpu and mps"):
            quantizer.validate_environment(device_map={"": "cuda:0"})


@pytest.mark.slow
def test_other_versions_of_transformers_are_imported():
    """If a quantizer of transformers has other attributes than expected, a warning says so and transformers loads the
    model."""
    script = """
import sys, warnings, torch_moe_metal
sys.modules["torch_moe_metal.transformers.checkpoints.quantizer"] = None
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import transformers.quantizers.auto as auto
    import transformers.modeling_utils
print([str(warning.message) for warning in said], auto.AUTO_QUANTIZER_MAPPING["mxfp4"].__name__)
"""
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert "quantised checkpoints are not loaded packed, since" in said and "Mxfp4HfQuantizer" in said


IMPORTED_FIRST = ["quantizers", "integrations.metal_quantization", "core_model_loading", "integrations.finegrained_fp8"]


@pytest.mark.slow
@pytest.mark.parametrize("first", IMPORTED_FIRST)
def test_registration_with_any_import_order(first):
    """Modules of transformers that import its quantizers are incomplete at that time. Some imports fail at first."""
    script = f"""
import warnings, torch_moe_metal
warnings.simplefilter("error", UserWarning)
import transformers.{first}
from transformers.quantizers import auto
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
print(auto.AUTO_QUANTIZER_MAPPING["metal"].__module__, "moe_metal" in ALL_ATTENTION_FUNCTIONS)
"""
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert said.split() == ["torch_moe_metal.transformers.checkpoints.metal", "True"]


# ------------------------------------------------------------------------------------------------ packed experts


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_other_implementations_dequantise(gpt_oss, implementation, device):
    """With one warning, if selected while loading or later."""
    ids = tokens(2, 9, device=device)
    expected = dequantised(gpt_oss)(ids.cpu()).logits
    warned.clear()
    model = load(gpt_oss, device, experts_implementation=implementation)
    assert model.get_experts_implementation() == {"": implementation}
    with pytest.warns(UserWarning, match=f"GptOssExperts runs on '{implementation}', which cannot read mxfp4"):
        assert relative(model(ids).logits.cpu(), expected) <= 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids)
    model.set_experts_implementation("moe_metal")
    with counted() as calls:
        assert relative(model(ids).logits.cpu(), expected) <= 1e-5
    assert calls == {"experts": 2}


@pytest.mark.parametrize("fuse", [False, True])
def test_gradients_pass_packed_experts(gpt_oss, fuse):
    """Gradients of trained parameters equal those of a model with dense experts."""
    gradients = []
    for model in (dequantised(gpt_oss), load(gpt_oss)):
        if fuse:
            torch_moe_metal.patch(model)
        model.train().requires_grad_(True)
        with torch.enable_grad():
            model(tokens(2, 9), labels=tokens(2, 9, seed=2)).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    dense, packed = gradients
    assert dense.keys() - packed.keys() == {
        f"model.layers.{i}.mlp.experts.{name}" for i in range(2) for name in ("gate_up_proj", "down_proj")
    }
    for name, gradient in packed.items():
        assert relative(gradient, dense[name]) <= 1e-4, name


@pytest.mark.parametrize("kind", ["gpt_oss", "awq"])
def test_gradients_of_adapters_under_autocast(kind, gpt_oss, integers):
    """With a model prepared by PEFT; the gradients are close to those without autocast."""
    gradients = []
    for autocast in (False, True):
        model = prepare_model_for_kbit_training(load(gpt_oss if kind == "gpt_oss" else integers("awq"), dtype="auto"))
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)).train()
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(tokens(2, 9), labels=tokens(2, 9, seed=2)).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    exact, ours = gradients
    assert len(ours) == 8 and ours.keys() == exact.keys()
    for name, gradient in ours.items():
        assert relative(gradient, exact[name]) <= 0.1, name


def test_copies_of_packed_experts(gpt_oss, tmp_path, device):
    """Copied, pickled, cast and moved; scales keep their bits."""
    ids = tokens(1, 5)
    model = load(gpt_oss)
    expected = model(ids).logits
    torch_moe_metal.patch(model)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        other.model.layers[0].mlp.experts.down_proj_bias.zero_()
        assert type(other.model.layers[0].mlp.experts) is type(model.model.layers[0].mlp.experts)
        moved = copy.deepcopy(model).to(torch.bfloat16).to(torch.float32).to(device)
        assert relative(moved(ids.to(device)).logits.cpu(), expected) <= 0.02
    assert relative(model(ids).logits, expected) <= 1e-5
    assert "format=mxfp4" in repr(model)


def test_moe_from_a_packed_block(gpt_oss):
    block, x = load(gpt_oss).model.layers[0].mlp, torch.randn(2, 5, 64)
    moe = MoE.from_block(block)
    assert moe.down is block.experts.down_proj_blocks
    assert relative(moe.to(torch.float16).float()(x), block(x)[0]) <= 1e-2
    assert relative(MoE.from_block(block)(x), block(x)[0]) <= 1e-6


def test_compiled(gpt_oss):
    model, ids = load(gpt_oss), tokens(2, 9)
    expected = model(ids, use_cache=False).logits
    torch_moe_metal.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative(compiled(ids, use_cache=False).logits, expected) <= 1e-5


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("kind", ["gpt_oss", "awq", "float32"])
def test_adapters_train_under_autocast(kind: str, patched: bool, gpt_oss: Path, integers):
    """Like transformers' Trainer with bf16=True, in training and evaluation, on a model prepared by PEFT."""
    if kind == "float32":
        model = torch_moe_metal.quantize_(tiny_model("qwen3_moe", moe_intermediate_size=64), bits=8, group_size=32)
    else:
        model = AutoModelForCausalLM.from_pretrained(gpt_oss if kind == "gpt_oss" else integers(kind))
    if patched:
        torch_moe_metal.patch(model)
    ids = tokens(2, 9)
    want = model(ids).logits
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    adapters = LoraConfig(target_modules=["q_proj", "v_proj", "o_proj"])  # they change nothing at first
    adapted = get_peft_model(model, adapters).train()
    with torch.autocast("cpu", torch.bfloat16):
        # For some tokens, rounding to bfloat16 may select another expert.
        errors = [
            relative(got, exact)
            for got, exact in zip(*(t.flatten(0, 1) for t in (adapted(ids).logits, want)), strict=True)
        ]
        assert torch.tensor(errors).median() <= 2e-2
        with torch.enable_grad():
            adapted(ids, labels=ids).loss.backward()
    gradients = [p.grad for name, p in adapted.named_parameters() if "lora_B" in name]
    assert gradients and all(gradient.isfinite().all() and gradient.any() for gradient in gradients)
