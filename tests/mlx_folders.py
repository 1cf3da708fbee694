"""Folders of tiny random models written by `mlx_lm.convert -q`, and the logits of mlx-lm itself."""

import contextlib
import importlib
import io
import json
from pathlib import Path
from unittest import mock

import mlx.core as mx
import mlx_lm
import numpy
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import checkpoints
import tiny_models
from tiny_models import tiny_model

SIZES = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 64}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
#: Sizes of the families in addition to SIZES, for groups of 64 columns.
CHANGES = {
    "qwen3_next": {"shared_expert_intermediate_size": 64},
    "mixtral": {"intermediate_size": 64, "head_dim": 32},
    "olmoe": {"intermediate_size": 64, "head_dim": 32},
    "qwen2_moe": {"shared_expert_intermediate_size": 64, "head_dim": 32},
    "minimax_m2": {"intermediate_size": 64},
    # mlx-lm's YaRN rounds the ends of its ramp, gpt-oss's own and transformers' do not: so it is plain RoPE.
    "gpt_oss": {"intermediate_size": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "gemma4_text": {"tie_word_embeddings": True},
    "gemma4": {"tie_word_embeddings": True},
    "qwen3_5_moe": {"shared_expert_intermediate_size": 64},
}
#: Entries of published configurations that mlx-lm needs, and that transformers 5 writes differently.
PUBLISHED = {
    "qwen3_moe": {"num_experts": 8},
    "qwen3_next": {"full_attention_interval": 2},
    "gemma4_text": {"global_head_dim": 16, "num_global_key_value_heads": 2},
    "minimax_m2": {"shared_intermediate_size": 0},
    "qwen3_5_moe_text": {"full_attention_interval": 2},
}
FAMILIES = [
    "qwen3_moe", "qwen3_next", "mixtral", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v3", "gemma4_text",
    "glm4_moe_lite", "qwen2_moe", "minimax_m2", "gemma4", "qwen3_5_moe",
]  # fmt: skip


#: Multimodal models, of which mlx-lm supports only the language model, by the family of that.
NESTED = {"gemma4": "gemma4_text", "qwen3_5_moe": "qwen3_5_moe_text"}


def nested(folder: Path, family: str, **sizes) -> None:
    """A checkpoint of such a model, without its towers."""
    torch.manual_seed(0)
    text = tiny_models.COMMON | tiny_models.CONFIGS[NESTED[family]] | sizes
    config = AutoConfig.for_model(family, text_config=text, vision_config=None)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings
    model = tiny_models.randomised(AutoModelForCausalLM.from_config(config))
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    checkpoints.write(folder, model, tensors, shards=1)
    config.save_pretrained(folder)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {str(i): i for i in range(SIZES["vocab_size"])}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")))


def rope(config: dict) -> dict:
    """The entries as in published configurations, which have all of them at the top level."""
    found = config.get("rope_parameters", {})
    if "rope_theta" not in found:  # Gemma 4's, which differ by layer, are as they were
        return {}
    scaling = found if found["rope_type"] != "default" else None
    return {"rope_scaling": scaling, "partial_rotary_factor": 1.0} | found


def source(folder: Path, family: str, **changes) -> Path:
    """A dense checkpoint in its published form; for gpt-oss the MXFP4 one, because mlx-lm supports only that."""
    sizes = SIZES | CHANGES.get(family, {}) | changes
    if family == "gpt_oss":
        checkpoints.gpt_oss(folder, **sizes)
    elif family in NESTED:
        nested(folder, family, **sizes)
    else:
        tiny_model(family, **sizes).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text |= rope(text) | PUBLISHED.get(NESTED.get(family, family), {})
    config["vocab_size"] = text["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer().save_pretrained(folder)
    return folder


def convert(folder: Path, family: str, changes: dict | None = None, **options) -> Path:
    """The same, converted by mlx-lm; `options` are those of mlx_lm.convert."""
    mx.set_default_device(mx.cpu)
    dense = source(folder / "dense", family, **changes or {})
    with contextlib.redirect_stdout(io.StringIO()):
        mlx_lm.convert(str(dense), str(folder / "mlx"), quantize=True, dtype="float32", **options)
    return folder / "mlx"


def command(folder: Path, family: str, *arguments: str, **changes) -> Path:
    """The same, converted by mlx-lm's command with exactly these arguments."""
    mx.set_default_device(mx.cpu)
    dense, to = source(folder / "dense", family, **changes), folder / "mlx"
    line = ["mlx_lm.convert", "--hf-path", str(dense), "--mlx-path", str(to), "-q", *arguments]
    with contextlib.redirect_stdout(io.StringIO()), mock.patch("sys.argv", line):
        importlib.import_module("mlx_lm.convert").main()
    return to


def with_its_configuration(saved: Path, folder: Path) -> Path:
    """A model saved by transformers, for mlx-lm: transformers' configuration uses other names for some entries."""
    config = json.loads((folder / "config.json").read_text())
    written = json.loads((saved / "config.json").read_text())
    config |= {key: written.get(key) for key in ("quantization", "quantization_config")}
    (saved / "config.json").write_text(json.dumps(config))
    tokenizer().save_pretrained(saved)
    return saved


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """By mlx-lm, on the CPU."""
    mx.set_default_device(mx.cpu)
    model, _ = mlx_lm.load(str(folder))
    return torch.from_numpy(numpy.array(model(mx.array(ids.numpy())).astype(mx.float32)))
