"""transformers' own `MetalConfig` with our ops: checkpoints written by transformers, and dense ones."""

import copy
import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MetalConfig
from transformers.integrations import metal_quantization

import checkpoints
import torch_moe_metal
from checkpoints import formats, stored
from checks import relative
from test_transformers import counted
from tiny_models import tokens
from torch_moe_metal.transformers.checkpoints.metal import Metal, MetalHfQuantizer
from torch_moe_metal.transformers.checkpoints.moe_metal import MoeMetal

SKIPPED = ("lm_head", "model.layers.0.self_attn")


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def load(folder: Path, device: str = "cpu", **options):
    return AutoModelForCausalLM.from_pretrained(folder, device_map=device, **{"dtype": torch.float32} | options)


@pytest.fixture(scope="session")
def packed(tmp_path_factory):
    """A checkpoint made by transformers itself, one per family and configuration."""

    @functools.cache
    def made(family: str = "qwen3_moe", modules_to_not_convert: tuple | None = None, **options) -> Path:
        skipped = modules_to_not_convert and list(modules_to_not_convert)
        folder = tmp_path_factory.mktemp(f"metal_{family}")
        return checkpoints.metal(folder, family, modules_to_not_convert=skipped, **options)

    return made


@pytest.fixture(scope="session")
def dense(packed) -> Path:
    return packed(bits=4, group_size=32) / "dense"


@pytest.mark.slow_on_mps
@pytest.mark.parametrize(
    "family, options",
    [
        ("qwen3_moe", {"bits": 4, "group_size": 64}),
        ("qwen3_moe", {"bits": 2, "group_size": 32}),
        ("deepseek_v3", {"bits": 8, "group_size": 32}),
        ("qwen2_moe", {"bits": 4, "group_size": 32, "modules_to_not_convert": SKIPPED}),
    ],
    ids=str,
)
def test_checkpoints_run_packed(packed, family, options, device, tmp_path):
    """Linear layers stay as stored, experts are dense; a saved model is the same checkpoint."""
    folder, ids = packed(family, **options), tokens(2, 9, device=device)
    stems = {name.removesuffix(".qbiases") for name in stored(folder) if name.endswith(".qbiases")}
    twin, tensors = load(folder / "dense"), stored(folder)
    for stem in stems:
        parts = (tensors[f"{stem}.{part}"] for part in ("weight", "scales", "qbiases"))
        numbers = metal_quantization._affine_dequantize_tensor(*parts, options["group_size"], options["bits"])
        twin.get_submodule(stem).weight.copy_(numbers)
    expected = twin(ids.cpu()).logits
    model = load(folder, device)
    assert formats(model) == dict.fromkeys(stems, "affine") and "lm_head" not in stems
    assert type(model.hf_quantizer) is Metal and model.get_experts_implementation() == {"": "moe_metal"}
    with counted() as calls:
        assert relative(model(ids).logits.cpu(), expected) <= 1e-5
    assert calls["linear"] == len(stems) and calls["experts"]
    report = torch_moe_metal.patch(model)
    assert report["fused"] and not report["left"], str(report)
    assert relative(model(ids).logits.cpu(), expected) <= 1e-5
    load(folder, device, dtype="auto").save_pretrained(tmp_path)
    before, after = stored(folder), stored(tmp_path)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    of_config = [json.loads((each / "config.json").read_text())["quantization_config"] for each in (folder, tmp_path)]
    assert of_config[0] == of_config[1]


def test_dense_checkpoints_are_packed_as_transformers_does(dense, packed, device, tmp_path):
    """Equal values without the kernel from the hub. A saved model loads again."""
    config, ids = MetalConfig(bits=4, group_size=32), tokens(2, 9, device=device)
    model = load(dense, device, dtype="auto", quantization_config=config)
    expected = load(packed(bits=4, group_size=32), device, dtype="auto")
    assert formats(model) == formats(expected)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name].cpu(), tensor.cpu()), name
    model.save_pretrained(tmp_path)
    for name, tensor in stored(packed(bits=4, group_size=32)).items():
        assert torch.equal(stored(tmp_path)[name], tensor), name
    again = load(tmp_path, device, dtype="auto")
    assert formats(again) == formats(model) and torch.equal(again(ids).logits, model(ids).logits)


def test_quantize_packs_what_metal_leaves_dense(packed, tmp_path):
    """`quantize_` packs the experts; a saved model is a checkpoint of ours."""
    model, ids = load(packed(bits=4, group_size=32)), tokens(2, 9)
    before = formats(model)
    torch_moe_metal.quantize_(model, bits=8, group_size=32)
    assert before.items() < formats(model).items() and "model.layers.0.mlp.experts" in formats(model)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert isinstance(again.hf_quantizer, MoeMetal) and formats(again) == formats(model)
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_dequantised_then_saved(packed, tmp_path):
    model, ids = load(packed(bits=4, group_size=32)), tokens(2, 9)
    expected = model(ids).logits
    model.dequantize().save_pretrained(tmp_path)
    again = load(tmp_path)
    assert not formats(again) and relative(again(ids).logits, expected) <= 1e-5


# ------------------------------------------------------------------------------------------------ who takes over


def test_other_checkpoints_fall_back_to_transformers(monkeypatch):
    """Unsupported group sizes, other devices, requested dequantisation, and disabled packed checkpoints."""
    monkeypatch.setattr(MetalHfQuantizer, "validate_environment", lambda *args, **kwargs: None)  # it requires mps
    for config, device_map in (
        (MetalConfig(group_size=256), None),
        (MetalConfig(dequantize=True), None),
        (MetalConfig(), {"": "cuda:0"}),
    ):
        chosen = Metal(config, pre_quantized=True)
        chosen.validate_environment(device_map=device_map)
        assert type(chosen) is MetalHfQuantizer
    monkeypatch.setattr(
        "torch_moe_metal.transformers_support._packed_checkpoints", None
    )  # as if no test had used the switch
    monkeypatch.setenv("TORCH_MOE_METAL_CHECKPOINTS", "0")
    assert not Metal(MetalConfig(), pre_quantized=True).serves(None)


def test_default_device_map_of_transformers(monkeypatch):
    """mps without a device map, if it is available."""
    for there in (False, True):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda there=there: there)
        quantizer = Metal(MetalConfig(), pre_quantized=False)
        assert quantizer.update_device_map(None) == ({"": "mps"} if there else None)
        assert quantizer.update_device_map({"": "cpu"}) == {"": "cpu"}


# ------------------------------------------------------------------------------------------------ what does not fit


def changed(folder: Path, to: Path, change, **of_config) -> Path:
    """A copy with the tensors modified by `change`, and other values in its quantization_config."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"] |= copy.deepcopy(of_config)
    (to / "config.json").write_text(json.dumps(config))
    return to


QUERY, UP = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    "said, change",
    [
        (f"missing: {QUERY}.scales$", lambda t: t.pop(f"{QUERY}.scales")),
        (f"missing: {QUERY}.qbiases$", lambda t: t.pop(f"{QUERY}.qbiases")),
        (
            rf"{QUERY}.weight: expected U32 by the format .*, got F32 \[64, 8\]",
            lambda t: t.update({f"{QUERY}.weight": t[f"{QUERY}.weight"].float()}),
        ),
        (
            rf"{QUERY}.weight: expected shape \[64, 8\], by .*, got U32 \[64, 4\]",
            lambda t: t.update({f"{QUERY}.weight": t[f"{QUERY}.weight"][:, :4].contiguous()}),
        ),
        (
            rf"{QUERY}.scales: expected shape \[64, 2\], by .*, got BF16 \[64, 1\]",
            lambda t: t.update({f"{QUERY}.scales": t[f"{QUERY}.scales"][:, :1].contiguous()}),
        ),
        (
            rf"{QUERY}.\w+: expected F32, F16, BF16 by .*, got F64",
            lambda t: t.update({f"{QUERY}.{part}": t[f"{QUERY}.{part}"].double() for part in ("scales", "qbiases")}),
        ),
        (
            rf"{UP}: expected shape \[64, 64\], by .*, got BF16 \[32, 64\]",
            lambda t: t.update({UP: t[UP][:32].clone()}),
        ),
        (
            r"gate_proj.weight of the experts 0 to 7, by .*, without 3, got BF16",
            lambda t: t.pop(UP.replace("up_proj", "gate_proj")),
        ),
        (
            r"up_proj.weight of the experts 0 to 7, by .*, in turn, of which 8 are stored, got BF16",
            lambda t: t.update({UP.replace("experts.", "experts.."): t.pop(UP)}),
        ),
        (
            rf"{QUERY}.qbiases: expected the scales' torch.bfloat16, got F16",
            lambda t: t.update({f"{QUERY}.qbiases": t[f"{QUERY}.qbiases"].half()}),
        ),
    ],
)
def test_inconsistent_tensors_raise(packed, tmp_path, said, change):
    folder = changed(packed(bits=4, group_size=32), tmp_path, change)
    with pytest.raises(ValueError, match=said) as raised:
        load(folder)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    "said, of_config",
    [
        (r"config.json: Metal quantization only supports bits", {"bits": 3}),
        (r"weight: expected shape \[\d+, \d+\], by .*, got U32", {"bits": 8}),
        (r"scales: expected shape \[\d+, \d+\], by .*, got BF16", {"group_size": 64}),
        (r"config.json: '<=' not supported", {"group_size": "64"}),
        (r"config.json: bits: expected an integer, got 4.0", {"bits": 4.0}),
        (r"config.json: group_size: expected an integer, got 32.0", {"group_size": 32.0}),
        (r"config.json: modules_to_not_convert: expected module names", {"modules_to_not_convert": ["(a+)+#"]}),
        (
            r"q_proj.weight: expected floats, F64, F32, F16 or BF16, got U32",
            {"modules_to_not_convert": ["lm_head", "q_proj"]},
        ),
    ],
)
def test_a_wrong_configuration_raises(packed, tmp_path, said, of_config):
    folder = changed(packed(bits=4, group_size=32), tmp_path, lambda tensors: None, **of_config)
    with pytest.raises(ValueError, match=said) as raised:
        load(folder)
    assert str(folder) in str(raised.value)


def test_columns_that_fit_no_group_raise(dense):
    said = (
        rf"^torch_moe_metal: {dense}: \S+q_proj.weight: expected a multiple of 128 columns, its group_size, got 64; "
        r"modules_to_not_convert=\['model.layers.0.self_attn.q_proj'\] leaves it dense"
    )
    with pytest.raises(ValueError, match=said):
        load(dense, quantization_config=MetalConfig(group_size=128))
