"""Tiny random checkpoints, one of each kind that we load packed. Each has a folder `dense` in it: a dense one
with the same values.

The tests use them, and the check of versions of transformers that are newer than the tests (`loader_check.py`). Layouts
with variants have their writers here, too, for the tests. The writers use none of our quantizers, which import that
check.
"""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from ... import reference
from ...packing import quantize
from ..fusing.packed_modules import named_parts
from ..fusing.tiny_models import tiny_model
from .config import MoeMetalConfig

DENSE = "dense"  # the folder of the dense checkpoint, inside that of the packed one
SIZES = {"moe_intermediate_size": 64, "intermediate_size": 64, "tie_word_embeddings": False}
GPT_OSS_SKIPPED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
Parts = tuple[Tensor, Tensor | None, Tensor | None]


def write(folder: Path, model, tensors: dict[str, Tensor], quantization: dict | None = None, shards: int = 2) -> None:
    """Write a checkpoint with `shards` files and the model's configuration."""
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [type(model).__name__]}
    config |= {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(config))
    index, names = {}, sorted(tensors)
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        # in different files, as large checkpoints may be
        part = {name: tensors[name].contiguous() for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def original(model) -> dict[str, Tensor]:
    """A model's weights under the names in its family's checkpoints: expert by expert."""
    model._weight_conversions = None
    tensors = revert_weight_conversion(model, model.state_dict())
    return {name: tensor.clone() for name, tensor in tensors.items()}


def pack_in_place(model: nn.Module, format: str, packs: Callable[[str], bool], **sizes) -> dict[str, Parts]:
    """The packed parts of the weights whose names `packs` accepts. The model then has their values."""
    found = {}
    for name, weight in model.state_dict().items():
        if packs(name):
            found[name] = quantize(weight, format, **sizes)
            bits = {"bits": sizes["bits"]} if "bits" in sizes else {}
            weight.copy_(reference.dequantize(*found[name], format=format, dtype=weight.dtype, **bits))
    return found


# ------------------------------------------------------------------------------------------------ gpt-oss, FP8


def gpt_oss(folder: Path, **changes) -> Path:
    """A checkpoint like openai/gpt-oss-20b."""
    model = tiny_model("gpt_oss", **{"intermediate_size": 96, "tie_word_embeddings": False} | changes).bfloat16()
    tensors = model.state_dict()
    dense = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in [name for name in tensors if re.search(r"experts\.(gate_up|down)_proj$", name)]:
        data, scale, _ = quantize(tensors.pop(name).mT, "mxfp4")
        dense[name] = reference.dequantize(data, scale, format="mxfp4", dtype=torch.bfloat16).mT
        tensors |= {f"{name}_blocks": data.unflatten(-1, (-1, 16)), f"{name}_scales": scale}
    write(folder, model, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": GPT_OSS_SKIPPED})
    write(folder / DENSE, model, dense)
    return folder


FP8_SIZES = {
    "qwen3_moe": {"moe_intermediate_size": 256, "intermediate_size": 128},
    "deepseek_v3": {"moe_intermediate_size": 128, "intermediate_size": 256, "n_shared_experts": 2},
}


def fp8(
    folder: Path, family: str, scales: torch.dtype = torch.float32, scale_fmt: str | None = None, **changes
) -> Path:
    """Checkpoints like Qwen/Qwen3-30B-A3B-FP8 and deepseek-ai/DeepSeek-V3: all linear layers except routers and the
    head. With the scale_fmt "ue8m0" scales are powers of two: bytes named `scale` as in DeepSeek V4, or float32 as in
    V3.1, where o_proj nevertheless has others."""
    sizes = FP8_SIZES.get(family, {"moe_intermediate_size": 128, "intermediate_size": 128})
    model = tiny_model(family, **sizes | {"tie_word_embeddings": False} | changes).bfloat16()
    model.config.dtype = torch.bfloat16  # as in published checkpoints; transformers cannot derive it from e8m0
    tensors = original(model)
    dense = {name: tensor.float() for name, tensor in tensors.items()}
    for name in [name for name in tensors if re.search(r"(_proj|_a_proj_with_mqa|\.w[123])\.weight$", name)]:
        data, scale, _ = quantize(tensors[name], "fp8")
        bytes_alone = scales == torch.float8_e8m0fnu
        if scale_fmt and (bytes_alone or ".o_proj." not in name):
            scale = scale.log2().ceil().exp2()
        scale = scale.to(scales)
        dense[name] = reference.dequantize(data, scale.float(), format="fp8", dtype=torch.float32)
        of_scale = f"{name.removesuffix('weight')}scale" if bytes_alone else f"{name}_scale_inv"
        tensors |= {name: data.view(torch.float8_e4m3fn), of_scale: scale}
    tensors |= {name: tensor.float() for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")}
    skipped = [name.removesuffix(".weight") for name in tensors if name.endswith("mlp.gate.weight")]
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    method |= {"scale_fmt": scale_fmt} if scale_fmt else {}
    write(folder, model, tensors, method | {"modules_to_not_convert": ["lm_head", *skipped]})
    write(folder / DENSE, model, dense)
    return folder


# ------------------------------------------------------------------------------------------------ integers


def words(codes: Tensor, bits: int) -> Tensor:
    """Integers [N, C] as int32 [N, C * bits / 32], the first in the lowest bits, as in GPTQ and compressed-tensors."""
    found = torch.zeros(len(codes), codes.shape[1] * bits // 32, dtype=torch.int64)
    for i in range(codes.shape[1]):
        word, bit = divmod(i * bits, 32)
        found[:, word] |= codes[:, i].long() << bit & 0xFFFFFFFF
        if bit + bits > 32:
            found[:, word + 1] |= codes[:, i].long() >> 32 - bit
    return found.to(torch.int32)


def integers_in(shape: torch.Size, bits: int, group: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, C], zero points and scales [N, C / group]."""
    random = torch.Generator().manual_seed(seed)
    N, C = shape
    codes = torch.randint(2**bits, (N, C), generator=random)
    zeros = torch.randint(2 ** (bits - 1) - 2, 2 ** (bits - 1) + 3, (N, C // group), generator=random)
    return codes, zeros, (0.5 + torch.rand(N, C // group, generator=random)) * 0.5 / 2**bits


def gptq_parts(codes, zeros, scales, bits, v2=False) -> dict[str, Tensor]:
    g_idx = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    parts = {"qweight": words(codes, bits).T, "qzeros": words(zeros.T - (0 if v2 else 1), bits)}
    return parts | {"scales": scales.T.half(), "g_idx": g_idx.int()}


GPTQ = {"quant_method": "gptq", "desc_act": False}


def integers(
    folder: Path,
    model: nn.Module,
    parts_of: Callable[..., dict[str, Tensor]],
    method: dict,
    group: int | None,
    bits_of: Callable[[str], int],
    symmetric: bool = False,
) -> Path:
    """All linear layers except routers and the head in integers, in groups of columns, or rows (None)."""
    tensors = original(model.bfloat16())
    dense = {name: tensor.float() for name, tensor in tensors.items()}
    matrices = [name for name in tensors if re.search(r"(_proj|\.w[123])\.weight$", name)]
    for seed, name in enumerate(matrices):
        shape, bits = tensors.pop(name).shape, bits_of(name)
        codes, zeros, scales = integers_in(shape, bits, group or shape[1], seed)
        parts = parts_of(codes, zeros, scales, bits)
        scales = (parts["weight_scale"] if "weight_scale" in parts else parts["scales"].T).float()
        if symmetric:
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
        values = codes.unflatten(-1, (scales.shape[1], -1)) - zeros.unsqueeze(-1)
        dense[name] = (values * scales.unsqueeze(-1)).flatten(-2)
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    write(folder, model, tensors, method)
    write(folder / DENSE, model, dense)
    return folder


# ------------------------------------------------------------------------------------------------ ours, MLX, GGUF


LAYERS = ("_proj.weight", "embed_tokens.weight", "lm_head.weight")


def moe_metal(folder: Path) -> Path:
    """As `quantize_` and `save_pretrained` write it: under the model's own names."""
    model = tiny_model("qwen3_moe", **SIZES)
    packed = pack_in_place(model, "affine", lambda name: name.endswith((*LAYERS, "_proj")), bits=4, group_size=32)
    model.save_pretrained(folder / DENSE)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in packed}
    for name, parts in packed.items():
        tensors |= named_parts(name, parts)
    write(folder, model, tensors, MoeMetalConfig(bits=4, group_size=32).to_dict())
    return folder


def mlx(folder: Path) -> Path:
    """As `mlx_lm.convert -q` writes it: gate and up of experts apart."""
    model = tiny_model("qwen3_moe", **SIZES)
    packed = pack_in_place(model, "affine", lambda name: name.endswith((*LAYERS, "_proj")), bits=4, group_size=32)
    model.save_pretrained(folder / DENSE)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in packed}
    for name, parts in packed.items():
        for part, tensor in zip(("weight", "scales", "biases"), parts, strict=True):
            tensor = tensor.view(torch.uint32) if part == "weight" else tensor
            stem = name.removesuffix(".weight").replace(".experts.", ".switch_mlp.")
            if stem.endswith("gate_up_proj"):
                gate, up = tensor.chunk(2, -2)
                tensors |= {f"{stem.replace('gate_up', 'gate')}.{part}": gate}
                tensors |= {f"{stem.replace('gate_up', 'up')}.{part}": up}
            else:
                tensors[f"{stem}.{part}"] = tensor
    write(folder, model, tensors, {"bits": 4, "group_size": 32})
    return folder


def metal(folder: Path) -> Path:
    """As transformers' `MetalConfig` saves it: linear layers packed, experts dense."""
    model = tiny_model("qwen3_moe", **SIZES)
    packed = pack_in_place(model, "affine", lambda name: name.endswith("_proj.weight"), bits=4, group_size=32)
    tensors = original(model)
    write(folder / DENSE, model, tensors)
    for name, (data, scales, offsets) in packed.items():
        stem = name.removesuffix("weight")
        tensors |= {name: data.view(torch.uint32), f"{stem}scales": scales, f"{stem}qbiases": offsets}
    write(folder, model, tensors, {"quant_method": "metal", "bits": 4, "group_size": 32})
    return folder


#: llama.cpp's names of the tensors of Qwen3-MoE.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.o_proj": "attn_output",
    "self_attn": "attn",
    "_proj": "",
    ".attn.": ".attn_",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate.": "ffn_gate_inp.",
}


def gguf(folder: Path) -> Path:
    """A GGUF file of llama.cpp's Qwen3-MoE, in Q8_0."""
    model = tiny_model("qwen3_moe", **SIZES)
    packed = pack_in_place(model, "q8_0", lambda name: name.endswith((*LAYERS, "_proj")))
    model.save_pretrained(folder / DENSE)
    tensors: dict[str, tuple[Tensor, int]] = {}  # the data, and GGML's number of its type: F32 or Q8_0
    for name, tensor in model.state_dict().items():
        data, kind = (packed[name][0], 8) if name in packed else (tensor.float(), 0)
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        home, _, projection = name.partition(".mlp.experts.")
        if projection == "gate_up":
            for part, rows in zip(("gate", "up"), data.chunk(2, 1), strict=True):
                tensors[f"{home}.ffn_{part}_exps.weight"] = rows.contiguous(), kind
        else:
            tensors[f"{home}.ffn_{projection}_exps.weight" if projection else name] = data, kind
    write_gguf(folder / "model.gguf", gguf_metadata(model.config), tensors)
    return folder


def gguf_metadata(config) -> dict[str, str | int | float]:
    rope = config.rope_parameters
    of_model = {
        "vocab_size": config.vocab_size,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    return {"general.architecture": "qwen3moe"} | {f"qwen3moe.{key}": value for key, value in of_model.items()}


def write_gguf(file: Path, metadata: dict[str, str | int | float], tensors: dict[str, tuple[Tensor, int]]) -> None:
    """A GGUF file of version 3, whose tensors begin at multiples of 32 bytes."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def value(given: str | int | float) -> bytes:
        if isinstance(given, str):
            return struct.pack("<I", 8) + text(given)
        return struct.pack("<If", 6, given) if isinstance(given, float) else struct.pack("<II", 4, given)

    header, data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)), bytearray()
    header += b"".join(text(key) + value(given) for key, given in metadata.items())
    for name, (tensor, kind) in tensors.items():
        *rows, last = tensor.shape
        shape = [last if kind == 0 else last // 34 * 32, *reversed(rows)]  # GGML's order; 34 bytes are 32 columns
        header += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(data))
        data += tensor.numpy().tobytes()
        data += bytes(-len(data) % 32)
    file.write_bytes(header + bytes(-len(header) % 32) + data)


def gptq(folder: Path) -> Path:
    method = GPTQ | {"bits": 4, "group_size": 32}
    return integers(folder, tiny_model("qwen3_moe", **SIZES), gptq_parts, method, 32, lambda name: 4)


#: Writers by the kind of checkpoint, the `kind` of its quantizer.
KINDS: dict[str, Callable[[Path], Path]] = {
    "mxfp4": gpt_oss,
    "fp8": lambda folder: fp8(folder, "qwen3_moe"),
    "integers": gptq,
    "moe_metal": moe_metal,
    "mlx": mlx,
    "metal": metal,
    "gguf": gguf,
}
