"""Tiny random checkpoints in the true layouts of those that people have."""

import json
import re
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny_models import tiny_model
from torch_moe_metal import quantize

GPT_OSS_SKIPPED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def write(folder: Path, model, tensors: dict[str, Tensor], quantization: dict, shards: int = 2) -> None:
    """A checkpoint of so many files, with the model's configuration."""
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [type(model).__name__], "quantization_config": quantization}
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
