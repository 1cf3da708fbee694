"""Tiny random checkpoints in the layouts of published ones."""

import functools
import re
import shutil
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MetalConfig, Mxfp4Config
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_metal import MetalHfQuantizer

from tiny_models import tiny_model
from torch_moe_metal import quantize
from torch_moe_metal.transformers.checkpoints import tiny
from torch_moe_metal.transformers.checkpoints.tiny import GPTQ, fp8, gpt_oss, gptq_parts, original, words, write

__all__ = ["fp8", "gpt_oss", "write"]


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors in the files of a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


FP8_FAMILIES = ["qwen2_moe", "qwen3_next", "mixtral", "olmoe", "glm4_moe", "glm4_moe_lite", "minimax_m2", "deepseek_v2"]


def awq_words(codes: Tensor) -> Tensor:
    """Integers [N, C] of 4 bits as AutoAWQ's int32 [N, C / 8]."""
    return words(codes.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2), 4)


def awq_parts(codes, zeros, scales, bits) -> dict[str, Tensor]:
    return {"qweight": awq_words(codes.T), "qzeros": awq_words(zeros.T), "scales": scales.T.half()}


def compressed_parts(codes, zeros, scales, bits, symmetric=True) -> dict[str, Tensor]:
    found = {"weight_packed": words(codes, bits), "weight_scale": scales.bfloat16()}
    found["weight_shape"] = torch.tensor(codes.shape)
    return found if symmetric else found | {"weight_zero_point": words(zeros.T, bits).T}


def compressed(bits: int, group: int | None, symmetric: bool, attention_bits: int | None = None) -> dict:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights | {"group_size": group}, "input_activations": None}}
    if attention_bits is not None:
        of_attention = groups["group_0"]["weights"] | {"num_bits": attention_bits}
        groups["group_1"] = groups["group_0"] | {"targets": ["re:.*self_attn.*"], "weights": of_attention}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


AWQ = {"quant_method": "awq", "version": "gemm", "zero_point": True}
#: GPTQModel's entries for modules with another width, or none. The last pattern would take forever on most names.
DYNAMIC = {r"+:.*\.self_attn\..*": {"bits": 8}, r"-:lm_head": {}, r"+:([a-z_.0-9]+)+#": {"bits": 8}}
#: The bits of attention's weights, if they differ from those of the experts.
ATTENTION_BITS = {"gptq_dynamic": 8, "compressed_mixed": 8}
#: Layouts of integers in published checkpoints: bits, group (None: a row), parts of a weight, configuration.
INTEGERS = {
    "gptq": (4, 32, gptq_parts, GPTQ | {"bits": 4, "group_size": 32}),
    "gptq3": (3, 64, gptq_parts, GPTQ | {"bits": 3, "group_size": 64}),
    "gptq8_v2": (
        8, 32, functools.partial(gptq_parts, v2=True), GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (4, 32, awq_parts, AWQ | {"bits": 4, "group_size": 32}),
    "compressed": (4, 32, compressed_parts, compressed(4, 32, True)),
    "compressed_channels": (8, None, compressed_parts, compressed(8, None, True)),
    "gptq_dynamic": (4, 32, gptq_parts, GPTQ | {"bits": 4, "group_size": 32, "dynamic": DYNAMIC}),
    "compressed_mixed": (4, 32, compressed_parts, compressed(4, 32, True, 8)),
    "compressed_zeros": (4, 32, functools.partial(compressed_parts, symmetric=False), compressed(4, 32, False)),
    "gptq_rows": (4, None, gptq_parts, GPTQ | {"bits": 4, "group_size": -1}),
    "compressed_zeros_rows": (
        4, None, functools.partial(compressed_parts, symmetric=False), compressed(4, None, False),
    ),
}  # fmt: skip


SYMMETRIC = ("compressed", "compressed_channels", "compressed_mixed")


def integers(folder: Path, way: str, family: str = "qwen3_moe", **changes) -> Path:
    """All linear layers except routers and the head in integers; the folder `dense` in it has the same values in
    float32."""
    usual, group, parts_of, method = INTEGERS[way]
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32}

    def bits_of(name: str) -> int:
        return ATTENTION_BITS.get(way, usual) if ".self_attn." in name else usual

    model = tiny_model(family, **sizes | changes)
    return tiny.integers(folder, model, parts_of, method, group, bits_of, symmetric=way in SYMMETRIC)


#: llm-compressor's entries about activations in 4 bits, and about weights.
NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
ACTIVATIONS = NVFP4 | {"dynamic": "local"}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nvfp4_config(with_activations: bool) -> dict:
    group = {
        "targets": ["Linear"],
        "weights": NVFP4 | {"dynamic": False},
        "input_activations": ACTIVATIONS if with_activations else None,
    }
    method = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"]}
    return method | {"config_groups": {"group_0": group}, "quantization_status": "compressed"}


def nvfp4(
    folder: Path, family: str = "qwen3_moe", with_activations: bool = False, apart: bool = False, **changes
) -> Path:
    """A checkpoint of llm-compressor: all linear layers except routers and the head, with a divisor for each weight; an
    expert's gate and up share one, unless they are `apart`. The folder `dense` in it has the same values in float32."""
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32}
    model = tiny_model(family, **sizes | changes)
    tensors = original(model.bfloat16())
    before = {name: tensor.float() for name, tensor in tensors.items()}
    dense = dict(before)
    for name in [name for name in tensors if re.search(r"(_proj|_a_proj_with_mqa|\.w[123])\.weight$", name)]:
        stem, weight = name.removesuffix("weight"), before[name]
        other = "up_proj" if "gate_proj" in name else "gate_proj"
        sister = before.get(re.sub("gate_proj|up_proj", other, name), weight)
        largest = weight.abs().max() if apart else torch.maximum(weight.abs().max(), sister.abs().max())
        divisor = 6 * 448 / largest
        data, scale, _ = quantize(weight * divisor, "nvfp4")
        del tensors[name]
        tensors |= {f"{stem}weight_packed": data, f"{stem}weight_scale": scale.view(torch.float8_e4m3fn)}
        tensors |= {f"{stem}weight_global_scale": divisor.view(1)}
        tensors |= {f"{stem}input_global_scale": torch.ones(1)} if with_activations else {}
        codes = torch.stack((data & 15, data >> 4), -1).flatten(-2)
        scales = scale.view(torch.float8_e4m3fn).float().repeat_interleave(16, -1) / divisor
        dense[name] = E2M1[codes.int()] * scales
    write(folder, model, tensors, nvfp4_config(with_activations))
    write(folder / "dense", model, dense)
    return folder


# ------------------------------------------------------------------------------------------------ MetalConfig

#: Sizes of the families for groups of 32 and 64 columns.
METAL_SIZES = {
    "deepseek_v3": {"q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 16},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
}


class Anywhere(MetalHfQuantizer):
    """transformers' own quantizer, on machines without mps and without the hub's kernel."""

    def validate_environment(self, *args, **kwargs) -> None:
        pass


def metal(folder: Path, family: str = "qwen3_moe", **options) -> Path:
    """A model packed by transformers' `MetalConfig`, as saved by transformers. The folder `dense` in it has the
    original weights in bfloat16."""
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 64, "tie_word_embeddings": False}
    tiny_model(family, **sizes | METAL_SIZES.get(family, {})).bfloat16().save_pretrained(folder / "dense")
    loading = {"device_map": "cpu", "dtype": "auto", "quantization_config": MetalConfig(**options)}
    with mock.patch.dict(AUTO_QUANTIZER_MAPPING, metal=Anywhere):
        AutoModelForCausalLM.from_pretrained(folder / "dense", **loading).save_pretrained(folder)
    return folder


def formats(model) -> dict[str, str]:
    """The names of the packed weights of its modules."""
    return {name: module.format for name, module in model.named_modules() if getattr(module, "packing", None)}


PLAIN = {"dtype": torch.float32}


def load(folder: Path, device: str = "cpu", **options):
    return AutoModelForCausalLM.from_pretrained(folder, device_map=device, **PLAIN | options)


def dequantised(folder: Path, **options):
    """The same checkpoint, dequantised by transformers."""
    return load(folder, quantization_config=Mxfp4Config(dequantize=True), experts_implementation="eager", **options)


def broken(folder: Path, to: Path, change) -> Path:
    """A copy of a checkpoint with the tensors of each file modified by `change`."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    for file in to.glob("*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
    return to
