"""Tiny random checkpoints in the true layouts of those that people have."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from tiny_models import tiny_model
from torch_moe_metal import quantize, reference

GPT_OSS_SKIPPED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def write(folder: Path, model, tensors: dict[str, Tensor], quantization: dict | None = None, shards: int = 2) -> None:
    """A checkpoint of so many files, with the model's configuration."""
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [type(model).__name__]}
    config |= {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(config))
    index, names = {}, sorted(tensors)
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[i::shards]}  # apart, as large checkpoints may be
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def stored(folder: Path) -> dict[str, Tensor]:
    """All that the files of a folder hold."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def gpt_oss(folder: Path, **changes) -> Path:
    """What openai/gpt-oss-20b looks like."""
    model = tiny_model("gpt_oss", **{"intermediate_size": 96, "tie_word_embeddings": False} | changes).bfloat16()
    tensors = model.state_dict()
    for name in [name for name in tensors if re.search(r"experts\.(gate_up|down)_proj$", name)]:
        data, scale, _ = quantize(tensors.pop(name).mT, "mxfp4")
        tensors |= {f"{name}_blocks": data.unflatten(-1, (-1, 16)), f"{name}_scales": scale}
    write(folder, model, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": GPT_OSS_SKIPPED})
    return folder


def original(model) -> dict[str, Tensor]:
    """A model's weights by the names that its family's checkpoints have for them: expert by expert."""
    model._weight_conversions = None
    tensors = revert_weight_conversion(model, model.state_dict())
    return {name: tensor.clone() for name, tensor in tensors.items()}


FP8_SIZES = {
    "qwen3_moe": {"moe_intermediate_size": 256, "intermediate_size": 128},
    "deepseek_v3": {"moe_intermediate_size": 128, "intermediate_size": 256, "n_shared_experts": 2},
}


def fp8(folder: Path, family: str, scales: torch.dtype = torch.float32, **changes) -> Path:
    """What Qwen/Qwen3-30B-A3B-FP8 and deepseek-ai/DeepSeek-V3 look like: all linear layers but routers and the head.
    The folder `dense` in it has the same in float32."""
    model = tiny_model(family, **FP8_SIZES[family] | {"tie_word_embeddings": False} | changes).bfloat16()
    tensors = original(model)
    dense = {name: tensor.float() for name, tensor in tensors.items()}
    for name in [name for name in tensors if re.search(r"(_proj|_a_proj_with_mqa)\.weight$", name)]:
        data, scale, _ = quantize(tensors[name], "fp8")
        scale = scale.to(scales)
        dense[name] = reference.dequantize(data, scale, format="fp8", dtype=torch.float32)
        tensors |= {name: data.view(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    tensors |= {name: tensor.float() for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")}
    skipped = [name.removesuffix(".weight") for name in tensors if name.endswith("mlp.gate.weight")]
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    write(folder, model, tensors, method | {"modules_to_not_convert": ["lm_head", *skipped]})
    write(folder / "dense", model, dense)
    return folder


def formats(model) -> dict[str, str]:
    """Which packed weights its modules hold."""
    return {name: module.format for name, module in model.named_modules() if getattr(module, "packing", None)}
