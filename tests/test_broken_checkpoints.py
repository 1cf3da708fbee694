"""Broken checkpoints: an error names the file, the tensor and what was expected, and no model is returned."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from checkpoints import broken, load
from tiny_models import tiny_model
from torch_moe_metal import MoeMetalConfig


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


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


# ------------------------------------------------------------------------------------------------ files


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


def test_fp8_with_a_missing_expert_raises(qwen3_fp8, tmp_path):
    folder = broken(qwen3_fp8, tmp_path, lambda t: [t.pop(k, 0) for k in (WEIGHT, f"{WEIGHT}_scale_inv")])
    with pytest.raises(
        ValueError, match=r"up_proj.weight of the experts 0 to 7, by .*, without 3, got F8_E4M3"
    ) as raised:
        load(folder)
    assert str(folder) in str(raised.value)


# ------------------------------------------------------------------------------------------------ nvfp4


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


# ------------------------------------------------------------------------------------------------ integers


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
