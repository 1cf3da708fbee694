"""Quantised checkpoints through `from_pretrained`: loaded packed, and compared with transformers' dequantised
models."""

import copy
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AwqConfig,
    FineGrainedFP8Config,
    GPTQConfig,
    Mxfp4Config,
)
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

import checkpoints
import torch_moe_metal
from checkpoints import formats
from checks import relative
from test_transformers import counted, generated
from tiny_models import FAMILIES, tiny_model, tiny_module, tokens
from torch_moe_metal import MoeMetalConfig, transformers_support
from torch_moe_metal.grad import warned
from torch_moe_metal.nn import MoE
from torch_moe_metal.transformers.checkpoints import awq_gptq as integers_module
from torch_moe_metal.transformers.checkpoints import quantizer_choice
from torch_moe_metal.transformers.checkpoints.awq_gptq import is_linear_in_up
from torch_moe_metal.transformers.checkpoints.awq_gptq_layouts import integers_of
from torch_moe_metal.transformers.checkpoints.fp8 import Fp8, FromPowers
from torch_moe_metal.transformers.checkpoints.mlx_config import MlxConfig
from torch_moe_metal.transformers.checkpoints.mlx_quantizer import Mlx
from torch_moe_metal.transformers.checkpoints.moe_metal import MoeMetal
from torch_moe_metal.transformers.checkpoints.mxfp4 import Mxfp4
from torch_moe_metal.transformers.checkpoints.quantizer import runs_here
from torch_moe_metal.transformers.fusing.packed_modules import dense_shape, packed_modules

PLAIN = {"dtype": torch.float32}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory) -> Path:
    return checkpoints.gpt_oss(tmp_path_factory.mktemp("gpt_oss"))


def load(folder: Path, device: str = "cpu", **options):
    return AutoModelForCausalLM.from_pretrained(folder, device_map=device, **PLAIN | options)


def dequantised(folder: Path, **options):
    """The same checkpoint, dequantised by transformers."""
    return load(folder, quantization_config=Mxfp4Config(dequantize=True), experts_implementation="eager", **options)


# ------------------------------------------------------------------------------------------------ gpt-oss


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


def broken(folder: Path, to: Path, change) -> Path:
    """A copy of a checkpoint with the tensors of each file modified by `change`."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    for file in to.glob("*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
    return to


SCALES = "model.layers.1.mlp.experts.down_proj_scales"
BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"


@pytest.mark.parametrize(
    "said, change",
    [
        (f"{BLOCKS}: expected {SCALES} as well, which is missing", lambda t: t.pop(SCALES, None)),
        (f"{SCALES}: expected {BLOCKS} as well, which is missing", lambda t: t.pop(BLOCKS, None)),
        (
            rf"{SCALES}: expected U8 \[8, 64, 3\], one for each of its blocks, got U8 \[8, 64, 2\]",
            lambda t: t.update({k: v[..., :2].contiguous() for k, v in t.items() if k == SCALES}),
        ),
        (
            rf"{BLOCKS}: expected U8 \[..., N, C / 32, 16\], got I8 \[8, 64, 3, 16\]",
            lambda t: t.update({k: v.view(torch.int8) for k, v in t.items() if k == BLOCKS}),
        ),
        (
            rf"{BLOCKS}: expected shape \[8, 64, 3, 16\], by the model's configuration, got U8 \[8, 32, 3, 16\]",
            lambda t: t.update({k: v[:, :32].contiguous() for k, v in t.items() if k in (SCALES, BLOCKS)}),
        ),
        (f"missing: {BLOCKS}, {SCALES}$", lambda t: [t.pop(k, None) for k in (SCALES, BLOCKS)]),
    ],
)
def test_inconsistent_gpt_oss_raises(gpt_oss, tmp_path, said, change):
    """The error has the file, the tensor and what was expected, and no model is returned."""
    folder = broken(gpt_oss, tmp_path, change)
    with pytest.raises(ValueError, match=said) as raised:
        load(folder)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize("config", [None, MoeMetalConfig(group_size=16)], ids=["mxfp4", "MoeMetalConfig"])
def test_missing_biases_are_initialised(gpt_oss, tmp_path, config, monkeypatch):
    """Initialised as in transformers (zeros for gpt-oss), with a warning that names them; no uninitialised memory."""
    biases = {f"model.layers.1.mlp.experts.{name}_proj_bias" for name in ("gate_up", "down")}
    if config is not None:
        biases.add("model.layers.0.self_attn.q_proj.bias")
        tiny_model("gpt_oss", tie_word_embeddings=False).save_pretrained(tmp_path / "dense")
    whole_folder = tmp_path / "dense" if config else gpt_oss
    folder = broken(whole_folder, tmp_path / "broken", lambda t: [t.pop(name, 0) for name in biases])
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: torch.full_like(x, 77, **options))
    options = {"quantization_config": config} if config else {}
    model, info = load(folder, output_loading_info=True, **options)
    assert info["missing_keys"] == biases
    for name, parameter in model.named_parameters():
        assert name not in biases or not parameter.any(), name
    whole = load(whole_folder, **options)
    assert model.state_dict().keys() == whole.state_dict().keys()
    for name, tensor in whole.state_dict().items():
        assert name in biases or torch.equal(tensor, model.state_dict()[name]), name
    assert not hasattr(model.model.layers[0].mlp.experts, "down_proj") or config


@pytest.mark.parametrize("kept", [4, 500, -200])
def test_truncated_files_raise(gpt_oss, tmp_path, kept):
    shutil.copytree(gpt_oss, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=rf"{file}: .*expected .* bytes.*, got"):
        load(tmp_path)


def with_header(folder: Path, to: Path, change) -> Path:
    """A copy whose second file has another header: modified by `change`, or these bytes."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    file = to / "model-00002-of-00002.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = change(json.loads(whole[8 : 8 + length]))
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + length :])
    return file


def with_entry(**changes):
    """The header with another dtype, shape or position of one tensor."""
    return lambda header: header | {BLOCKS: header[BLOCKS] | changes}


@pytest.mark.parametrize(
    "said, change",
    [
        ("expected a header in JSON, got one with Expecting", lambda header: b"{"),
        ("expected a header in JSON, got one with .*utf-8", lambda header: b"\xff\xff"),
        ("expected a header in JSON, got one with .*recursion", lambda header: b"[" * 100_000),
        ("expected a header with the names of tensors, got list", lambda header: []),
        ("expected __metadata__ of strings, got 5", lambda header: header | {"__metadata__": 5}),
        (f"{BLOCKS}: expected an entry with dtype, shape and data_offsets, got 5", lambda h: h | {BLOCKS: 5}),
        (f"{BLOCKS}: expected a dtype that safetensors has, got 'U9'", with_entry(dtype="U9")),
        (rf"{BLOCKS}: expected a shape of integers, got \[-8, 64, 3, -16\]", with_entry(shape=[-8, 64, 3, -16])),
        (rf"{BLOCKS}: expected the bytes of U8 \[8, 64, 3, 15\], got 24576", with_entry(shape=[8, 64, 3, 15])),
        (f"{BLOCKS}: expected the bytes where it begins", with_entry(data_offsets=[0])),
        (f"{BLOCKS}: expected it to begin at byte ", lambda h: with_entry(data_offsets=moved(h, 1))(h)),
        (f"{BLOCKS}: expected {2**60} bytes", with_entry(shape=[2**60], data_offsets=[0, 2**60])),
        ("expected 0 bytes of tensors, got", lambda header: {}),
    ],
)
def test_broken_headers_raise(gpt_oss, tmp_path, said, change):
    file = with_header(gpt_oss, tmp_path, change)
    with pytest.raises(ValueError, match=f"^torch_moe_metal: {file}: {said}"):
        load(tmp_path)


def moved(header: dict, by: int) -> list[int]:
    return [place + by for place in header[BLOCKS]["data_offsets"]]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")
def test_a_fifo_raises(gpt_oss, tmp_path):
    """The error names it, and nothing blocks while waiting for a writer."""
    shutil.copytree(gpt_oss, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.unlink()
    os.mkfifo(file)
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("waits for the FIFO"))
    signal.alarm(10)
    with pytest.raises(ValueError, match=f"^torch_moe_metal: {file}: expected a regular file, got prw"):
        load(tmp_path)
    signal.alarm(0)


# ------------------------------------------------------------------------------------------------ FP8


@pytest.fixture(scope="session")
def qwen3_fp8(tmp_path_factory) -> Path:
    return checkpoints.fp8(tmp_path_factory.mktemp("qwen3_fp8"), "qwen3_moe", torch.bfloat16)


@pytest.fixture(scope="session")
def deepseek_fp8(tmp_path_factory) -> Path:
    return checkpoints.fp8(tmp_path_factory.mktemp("deepseek_fp8"), "deepseek_v3")


@pytest.fixture(scope="session")
def deepseek_v3_1(tmp_path_factory) -> Path:
    return checkpoints.fp8(tmp_path_factory.mktemp("deepseek_v3_1"), "deepseek_v3", scale_fmt="ue8m0")


@pytest.fixture(scope="session")
def e8m0_fp8(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("e8m0_fp8")
    return checkpoints.fp8(folder, "qwen3_moe", torch.float8_e8m0fnu, "ue8m0")


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


WEIGHT = "model.layers.1.mlp.experts.3.up_proj.weight"


def as_fp8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A dense weight as float8 blocks, where the configuration expects a dense one."""
    scales = torch.ones(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    return {name: weight.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


@pytest.mark.parametrize(
    "said, change",
    [
        (
            f"{WEIGHT}: expected {WEIGHT}_scale_inv as well, which is missing",
            lambda t: t.pop(f"{WEIGHT}_scale_inv", 0),
        ),
        (f"{WEIGHT}_scale_inv: expected {WEIGHT} as well, which is missing", lambda t: t.pop(WEIGHT, 0)),
        (
            rf"{WEIGHT}_scale_inv: expected \[2, 1\], a scale for each 128 x 128 block of {WEIGHT}, got BF16 \[1, 1\]",
            lambda t: t.update({k: v[:1].clone() for k, v in t.items() if k == f"{WEIGHT}_scale_inv"}),
        ),
        (
            f"{WEIGHT}: expected F8_E4M3, which {WEIGHT}_scale_inv goes with, got BF16",
            lambda t: t.update({WEIGHT: t[WEIGHT].bfloat16()} if WEIGHT in t else {}),
        ),
        (
            rf"{WEIGHT}: expected F8_E4M3 \[N, C\], got F8_E4M3 \[\]",
            lambda t: t.update({WEIGHT: t[WEIGHT].flatten()[0]} if WEIGHT in t else {}),
        ),
        (
            f"{WEIGHT}_scale_inv: expected scales in F32, BF16 or F8_E8M0, got F16",
            lambda t: t.update({k: v.half() for k, v in t.items() if k == f"{WEIGHT}_scale_inv"}),
        ),
        (
            f"{WEIGHT}_scale_inv: expected scales in F32, BF16 or F8_E8M0, got F64",
            lambda t: t.update({k: v.double() for k, v in t.items() if k == f"{WEIGHT}_scale_inv"}),
        ),
        (
            f"{WEIGHT}: expected shape .256, 64., by the model's configuration, got F8_E4M3 .128, 64.",
            lambda t: t.update({k: v[: len(v) // 2].clone() for k, v in t.items() if k.startswith(WEIGHT)}),
        ),
        (
            "lm_head.weight: expected floats, F64, F32, F16 or BF16, got F8_E4M3",
            lambda t: t.update({k: v for n in t if n == "lm_head.weight" for k, v in as_fp8(n, t[n]).items()}),
        ),
        (
            r"model.layers.0.self_attn.q_proj.weight: expected shape \[64, 64\], by the .*, got F8_E4M3 \[48, 64\]",
            lambda t: t.update(
                {k: v[:48].clone() for k, v in t.items() if k == "model.layers.0.self_attn.q_proj.weight"}
            ),
        ),
    ],
)
def test_inconsistent_fp8_raises(qwen3_fp8, tmp_path, said, change):
    folder = broken(qwen3_fp8, tmp_path, change)
    with pytest.raises(ValueError, match=said) as raised:
        load(folder)
    assert str(folder) in str(raised.value)


OF_WEIGHT, OF_QUERY = WEIGHT.replace("weight", "scale"), "model.layers.0.self_attn.q_proj.scale"


@pytest.mark.parametrize(
    "said, change",
    [
        (f"{WEIGHT}: expected {WEIGHT}_scale_inv as well, which is missing", lambda t: t.pop(OF_WEIGHT, 0)),
        (
            rf"{OF_QUERY}: expected \[1, 1\], a scale for each 128 x 128 block of \S+q_proj.weight, got F8_E8M0 \[1\]",
            lambda t: t.update({k: v[0].clone() for k, v in t.items() if k == OF_QUERY}),
        ),
        (
            f"{OF_QUERY}: expected F8_E8M0, as .*scale is, got F32",
            lambda t: t.update({k: v.float() for k, v in t.items() if k == OF_QUERY}),
        ),
        (
            f"{OF_WEIGHT}: expected scales in F32, BF16 or F8_E8M0, got U8",
            lambda t: t.update({k: v.view(torch.uint8) for k, v in t.items() if k == OF_WEIGHT}),
        ),
    ],
)
def test_inconsistent_fp8_with_powers_of_two_raises(e8m0_fp8, tmp_path, said, change):
    folder = broken(e8m0_fp8, tmp_path, change)
    with pytest.raises(ValueError, match=said) as raised:
        load(folder)
    assert str(folder) in str(raised.value)


def test_every_power_of_two():
    """All bytes of e8m0 become the float32 that PyTorch has for them, and bytes again: also 2^-127, which float32 has
    as a subnormal number, and NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    there = FromPowers(None)
    numbers = there.convert({"scale": [codes]})["scale"][0]
    assert torch.equal(numbers.view(torch.int32)[:-1], codes.float().view(torch.int32)[:-1]) and numbers[-1].isnan()
    back = there.reverse_op.convert({"scale": numbers})["scale"]
    assert back.dtype == codes.dtype and torch.equal(back.view(torch.uint8), codes.view(torch.uint8))


def test_fp8_with_a_missing_expert_raises(qwen3_fp8, tmp_path):
    folder = broken(qwen3_fp8, tmp_path, lambda t: [t.pop(k, 0) for k in (WEIGHT, f"{WEIGHT}_scale_inv")])
    with pytest.raises(
        ValueError, match=r"up_proj.weight of the experts 0 to 7, by .*, without 3, got F8_E4M3"
    ) as raised:
        load(folder)
    assert str(folder) in str(raised.value)


# ------------------------------------------------------------------------------------------------ integers


@pytest.fixture(scope="session")
def integers(tmp_path_factory):
    """One checkpoint for each layout and family."""
    return functools.cache(
        lambda way, family="qwen3_moe": checkpoints.integers(tmp_path_factory.mktemp(f"{way}_{family}"), way, family)
    )


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


@pytest.fixture(scope="session")
def nvfp4(tmp_path_factory):
    """One of each kind of checkpoint."""
    return functools.cache(
        lambda family="qwen3_moe", **options: checkpoints.nvfp4(tmp_path_factory.mktemp("nvfp4"), family, **options)
    )


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


NVFP4 = "model.layers.1.mlp.experts.5.down_proj"


@pytest.mark.parametrize(
    "said, change",
    [
        (f"{NVFP4}.weight_packed: expected {NVFP4}.{part} as well", lambda t, part=part: t.pop(f"{NVFP4}.{part}", 0))
        for part in ("weight_scale", "weight_global_scale")
    ]
    + [
        (f"{NVFP4}.{part}: expected {NVFP4}.weight_packed as well", lambda t: t.pop(f"{NVFP4}.weight_packed", 0))
        for part in ("input_global_scale",)
    ]
    + [
        (
            rf"{NVFP4}.weight_packed: expected U8 \[64, 32\], got U8 \[64, 16\]",
            lambda t: t.update({k: v[:, :16].clone() for k, v in t.items() if k == f"{NVFP4}.weight_packed"}),
        ),
        (
            rf"{NVFP4}.weight_scale: expected F8_E4M3 \[64, 4\], got U8 \[64, 4\]",
            lambda t: t.update({k: v.view(torch.uint8) for k, v in t.items() if k == f"{NVFP4}.weight_scale"}),
        ),
        (
            rf"{NVFP4}.weight_scale: expected F8_E4M3 \[64, 4\], got F8_E4M3 \[64, 2\]",
            lambda t: t.update({k: v[:, :2].clone() for k, v in t.items() if k == f"{NVFP4}.weight_scale"}),
        ),
        (
            rf"{NVFP4}.weight_global_scale: expected F32 \[1\], got F64 \[1\]",
            lambda t: t.update({k: v.double() for k, v in t.items() if k == f"{NVFP4}.weight_global_scale"}),
        ),
        (
            rf"{NVFP4}.weight_global_scale: expected F32 \[1\], got F32 \[64\]",
            lambda t: t.update({k: v.repeat(64) for k, v in t.items() if k == f"{NVFP4}.weight_global_scale"}),
        ),
    ],
)
def test_inconsistent_nvfp4_raises(nvfp4, tmp_path, said, change):
    folder = broken(nvfp4(with_activations=True), tmp_path, change)
    with pytest.raises(ValueError, match=said) as raised:
        load(folder)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    "change", [{"group_size": 32}, {"type": "int"}, {"num_bits": 8}, {"symmetric": False}], ids=str
)
def test_other_floats_fall_back_to_transformers(change):
    config = checkpoints.nvfp4_config(with_activations=False)
    assert integers_of(config) is not None
    weights = config["config_groups"]["group_0"]["weights"]
    assert integers_of(config | {"config_groups": {"group_0": {"weights": weights | change}}}) is None


# ------------------------------------------------------------------------------------------------ integers, broken


def wider(name: str) -> tuple[int, ...]:
    """The number of repetitions with which a part of 4 bits has the size of one of 8 bits."""
    return {"qweight": (2, 1), "qzeros": (1, 2), "scales": (1, 1), "g_idx": (1,)}[name.rpartition(".")[2]]


DOWN, QUERY = "model.layers.1.mlp.experts.5.down_proj", "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "way, said, change",
    [
        ("gptq", f"{DOWN}.qweight: expected {DOWN}.scales as well", lambda t: t.pop(f"{DOWN}.scales", 0)),
        ("awq", f"{DOWN}.qweight: expected {DOWN}.qzeros as well", lambda t: t.pop(f"{DOWN}.qzeros", 0)),
        (
            "compressed",
            f"{DOWN}.weight_packed: expected {DOWN}.weight_scale as well",
            lambda t: t.pop(f"{DOWN}.weight_scale", 0),
        ),
        (
            "compressed",
            rf"{QUERY}_scale: expected F32, F16 or BF16 \[64, 2\], a scale for each 32 of 64 columns, got BF16",
            lambda t: t.update({k: torch.ones(64, 3).bfloat16() for k in t if k == f"{QUERY}_scale"}),
        ),
        (
            "gptq",
            rf"{DOWN}.qzeros: expected I32 \[2, 8\], got I32 \[1, 8\]",
            lambda t: t.update({k: v[:1].clone() for k, v in t.items() if k == f"{DOWN}.qzeros"}),
        ),
        (
            "awq",
            rf"{DOWN}.qzeros: expected I32 \[2, 8\], got I32 \[1, 8\]",
            lambda t: t.update({k: v[:1].clone() for k, v in t.items() if k == f"{DOWN}.qzeros"}),
        ),
        (
            "gptq",
            rf"{DOWN}.qweight: expected I32 \[8, 64\]: 64 columns and 64 rows of 4 bits, got F32",
            lambda t: t.update({k: v.float() for k, v in t.items() if k == f"{DOWN}.qweight"}),
        ),
        (
            "awq",
            rf"{DOWN}.qweight: expected I32 \[64, 8\]: 64 columns and 64 rows of 4 bits, got I32 \[\]",
            lambda t: t.update({k: v[0, 0] for k, v in t.items() if k == f"{DOWN}.qweight"}),
        ),
        (
            "awq",
            rf"{DOWN}.scales: expected F32, F16 or BF16 \[2, 64\], a scale for each 32 of 64 columns, got F64",
            lambda t: t.update({k: v.double() for k, v in t.items() if k == f"{DOWN}.scales"}),
        ),
        (
            "gptq_dynamic",
            rf"{DOWN}.qweight: expected the bits and groups of \S+0.down_proj.qweight, which it is joined with",
            lambda t: t.update({k: v.repeat(wider(k)) for k, v in t.items() if k.startswith(DOWN)}),
        ),
        (
            "compressed_zeros",
            f"{DOWN}.weight_packed: expected {DOWN}.weight_zero_point as well",
            lambda t: t.pop(f"{DOWN}.weight_zero_point", 0),
        ),
        (
            "compressed",
            rf"{DOWN}.weight_shape: expected \[64, 64\] by the model's configuration, not \[64, 128\]",
            lambda t: t.update({k: torch.tensor([64, 128]) for k in t if k == f"{DOWN}.weight_shape"}),
        ),
        (
            "gptq",
            r"0.down_proj.qweight: expected mlp.experts.\*.down_proj.weight of the experts 0 to 7, .*, without 5, got",
            lambda t: [t.pop(k) for k in list(t) if k.startswith(DOWN)],
        ),
    ],
)
def test_inconsistent_integers_raise(integers, tmp_path, way, said, change):
    folder = broken(integers(way), tmp_path, change)
    with pytest.raises(ValueError, match=said) as raised:
        load(folder)
    assert str(folder) in str(raised.value)


def test_reordered_columns_raise(integers, tmp_path):
    """Whatever the configuration says about them."""
    folder = broken(integers("gptq"), tmp_path, lambda t: [t[k].copy_(t[k].flip(0)) for k in t if k.endswith("g_idx")])
    with pytest.raises(
        ValueError, match=r"g_idx: expected groups of 32 neighbouring columns, not columns in another"
    ) as raised:
        load(folder)
    assert str(folder) in str(raised.value)


# ------------------------------------------------------------------------------------------------ our own


@pytest.mark.parametrize(
    "format, said, change",
    [
        ("affine", rf"{QUERY}: expected U8 by the format .*, got F32 \[64, 32\]", lambda t, c: as_floats(t, QUERY)),
        ("mxfp4", rf"{QUERY}: expected U8 by the format .*, got F32 \[64, 32\]", lambda t, c: as_floats(t, QUERY)),
        (
            "affine",
            r"\.\S+: expected U8 by the format and the model's .*, got F32",
            lambda t, c: c.update(format="mxfp4"),
        ),
        ("mxfp4", "_offset", lambda t, c: c.update(format="affine")),
        ("affine", rf"{QUERY}_offset: expected the scale's torch.float32, got F16", lambda t, c: as_half(t)),
        (
            "affine",
            rf"{QUERY}: expected floats, F64, F32, F16 or BF16, got U8",
            lambda t, c: c.update(skip=[QUERY[:-7]]),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inconsistent_checkpoints_of_ours_raise(tmp_path, format, said, change):
    config = MoeMetalConfig(group_size=32, format=format)
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "dense")
    load(tmp_path / "dense", quantization_config=config).save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "config.json"
    written = json.loads(file.read_text())
    folder = broken(tmp_path / "saved", tmp_path, lambda t: change(t, written["quantization_config"]))
    (folder / "config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=said) as raised:
        load(folder)
    assert str(folder) in str(raised.value)


def as_floats(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name].float()


def as_half(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{QUERY}_offset"] = tensors[f"{QUERY}_offset"].half()


# ------------------------------------------------------------------------------------------------ who takes over


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
