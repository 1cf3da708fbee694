"""Tiny GGUF files as llama.cpp's converter writes them, and dense models with the values of a GGUF file.

`write` converts a model of transformers like llama.cpp's conversion/*.py: names, layouts and metadata are implemented
here independently, from those files alone. `dense` converts back, for any GGUF file: `layout` only moves elements, so
it can also be applied to their positions, which then say where in the model each element of a file belongs.
"""

import copy
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFWriter
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from tiny_models import COMMON, CONFIGS, randomised

Tensors = dict[str, Tensor]
Config = dict[str, Any]

# ------------------------------------------------------------------------------------------------ models

#: A key that the configuration of a family does not have.
ABSENT = object()
#: Rows with a multiple of 256 columns, for k-quants.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "rms_norm_eps": 3e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
PARTIAL = {"rope_parameters": SIZES["rope_parameters"] | {"partial_rotary_factor": 0.5}}
YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 50000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHARED = {"shared_expert_intermediate_size": 256}
LINEAR = SHARED | PARTIAL | {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "full_attention_interval": 2}
MLA = {
    "head_dim": 32,  # of the part that turns, as transformers' own configurations have it
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "rope_interleave": True,
}
SIGMOID = {"scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 1.7}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
GRANITE = {
    "head_dim": ABSENT,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
}
LLAMA4 = {  # the layers without rope are those of the published models
    "intermediate_size_mlp": 512,
    "num_hidden_layers": 4,
    "use_qk_norm": True,
    "attention_chunk_size": 32,
    "no_rope_layers": ABSENT,
    "floor_scale": ABSENT,
}
HUNYUAN = {"num_shared_expert": [1, 1], "moe_intermediate_size": [256, 256], "num_experts_per_tok": ABSENT}
HUNYUAN_A13B = {
    "num_attention_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0},
}
#: By architecture, and its variant if there are several: the family, and differences from SIZES and its defaults.
MODELS: dict[str, tuple[str, dict]] = {
    "qwen3moe": ("qwen3_moe", {}),
    "qwen3moe-yarn": ("qwen3_moe", {"rope_parameters": YARN}),
    "qwen2moe": ("qwen2_moe", SHARED | {"head_dim": ABSENT}),
    "gpt-oss": (
        "gpt_oss",
        {"sliding_window": 8, "rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
    ),
    "glm4moe": ("glm4_moe", SIGMOID | PARTIAL | {"use_qk_norm": True, "attention_bias": True, "n_shared_experts": 2}),
    "glm4moe-air": ("glm4_moe", SIGMOID | PARTIAL | ONE_GROUP),
    "deepseek2-v2": (
        "deepseek_v2",
        MLA | ONE_GROUP | {"topk_method": "greedy", "routed_scaling_factor": 2.0, "n_shared_experts": 2},
    ),
    "deepseek2-v2-groups": ("deepseek_v2", MLA | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0}),
    "deepseek2-lite": (
        "deepseek_v2",
        MLA
        | ONE_GROUP
        | {"q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False}
        | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek2-v3": ("deepseek_v3", MLA | SIGMOID | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek2-kimi": ("deepseek_v3", MLA | SIGMOID | ONE_GROUP),
    "deepseek2-glm": ("glm4_moe_lite", MLA | SIGMOID | ONE_GROUP),
    "llama": ("mixtral", {}),
    "olmoe": ("olmoe", {"rms_norm_eps": 1e-5, "head_dim": ABSENT, "num_key_value_heads": 4}),
    "granitemoe": ("granitemoe", GRANITE),
    "granitemoe-shared": ("granitemoeshared", GRANITE | {"shared_intermediate_size": 256}),
    "minimax-m2": ("minimax_m2", {"rotary_dim": 32, "scoring_func": "sigmoid"}),
    "gemma4": (
        "gemma4_text",
        {
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "global_head_dim": 128,
            "sliding_window": 8,
            "final_logit_softcapping": 20.0,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 50000.0},
            },
        },
    ),
    "qwen35moe": ("qwen3_5_moe_text", LINEAR),
    "qwen3next": ("qwen3_next", LINEAR),
    "llama4": ("llama4_text", LLAMA4 | {"interleave_moe_layer_step": 2}),
    "llama4-scout": ("llama4_text", LLAMA4 | {"rope_parameters": LLAMA3}),
    "ernie4_5-moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 8, "moe_k": 3, "num_experts_per_tok": ABSENT, "intermediate_size": 1024},
    ),
    "hunyuan-moe": ("hunyuan_v1_moe", HUNYUAN),
    "hunyuan-moe-a13b": ("hunyuan_v1_moe", HUNYUAN | HUNYUAN_A13B),
    "dots1": ("dots1", SIGMOID | {"layer_types": ["full_attention"] * 2, "num_key_value_heads": 4}),
}


def model(name: str, **changes) -> torch.nn.Module:
    torch.manual_seed(0)
    family, values = MODELS[name]
    values = COMMON | CONFIGS.get(family, {}) | SIZES | values | changes
    present = {key: copy.deepcopy(value) for key, value in values.items() if value is not ABSENT}
    config = AutoConfig.for_model(family, **present)  # it changes the dicts that it gets
    found = AutoModelForCausalLM.from_config(config)
    computed = {name: buffer.clone() for name, buffer in found.named_buffers() if name not in found.state_dict()}
    for name, buffer in randomised(found).named_buffers():
        if name in computed:  # computed from the configuration, like gemma4's embed_scale
            buffer.copy_(computed[name])
    return found


#: llama.cpp's name of a family of transformers.
ARCHITECTURES = {
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "minimax_m2": "minimax-m2",
    "gemma4_text": "gemma4",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "llama4_text": "llama4",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "dots1": "dots1",
}

# ------------------------------------------------------------------------------------------------ layout


def layout(model, tensors: Tensors, *, whole_kv_b: bool = False, fuse: Container[str] = ()) -> Tensors:
    """A state dict in the names and layouts of a file. `whole_kv_b`: attn_kv_b in one piece, as in files before April
    2025. `fuse`: ffn_gate_up_exps and attn_qkv, the converter's options --fuse-gate-up-exps and --fuse-qkv."""
    arch, config = ARCHITECTURES[model.config.model_type], model.config.to_dict()
    names = gguf.get_tensor_name_map(architecture_of(arch), config["num_hidden_layers"])
    found: Tensors = {}
    for name, tensor in merged(checkpoint_names(model, tensors)).items():
        for part, moved in ARRANGED.get(arch, unchanged)(config, name, tensor):
            if whole_kv_b or "kv_b_proj" not in part:
                found[named(names, part)] = moved
            else:
                found |= {named(names, split): half for split, half in of_kv_b(config, part, moved)}
    return fused(found, lambda name: name.split(".")[2] in fuse)


def architecture_of(arch: str) -> gguf.MODEL_ARCH:
    return next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)


def checkpoint_names(model, tensors: Tensors) -> Tensors:
    """As written by `save_pretrained`: experts one by one for most families, and no head if it equals the embedding."""
    model._weight_conversions = None
    if model.config.tie_word_embeddings:
        tensors = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    return revert_weight_conversion(model, dict(tensors))


def merged(tensors: Tensors) -> Tensors:
    """Single experts, stacked to one tensor under the name without their number."""
    found, experts = {}, {}
    for name, tensor in tensors.items():
        if expert := re.fullmatch(r"(.*\.experts\.)(\d+)\.(.*)", name):
            experts.setdefault(expert[1] + expert[3], {})[int(expert[2])] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([those[i] for i in range(len(those))]) for name, those in experts.items()}


#: Names that llama.cpp's converter changes before it looks them up.
RENAMED = {
    r"e_score_correction_bias$": "e_score_correction.bias",
    r"\.sinks$": ".sinks.weight",
    r"\.layer_scalar$": ".layer_scalar.weight",
    r"\.dt_bias$": ".dt_proj.bias",
    r"experts\.(gate_up_proj|down_proj)$": r"experts.\1.weight",
    r"experts\.(gate|up|down)_proj_bias$": r"experts.\1_proj.bias",
}
#: Names that are not in gguf's table: the converters make them from the kind of tensor.
FORMED = {
    r"model\.layers\.(\d+)\.router\.scale": r"blk.\1.ffn_gate_inp.scale",
    r"model\.layers\.(\d+)\.router\.per_expert_scale": r"blk.\1.ffn_down_exps.scale",
}


def named(names: gguf.TensorNameMap, name: str) -> str:
    for pattern, name_in_file in FORMED.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, name_in_file, name)
    if name.startswith(("blk.", "token_embd.")):
        return name
    for pattern, changed in RENAMED.items():
        name = re.sub(pattern, changed, name)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found, f"gguf has no name for {name}"
    return found


def unchanged(config: Config, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield name, tensor


def of_llama(config: Config, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Rows of q and k in llama.cpp's order: alternately from the two halves of a head. Granite's gate and up are
    split."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    if projection := re.search(r"\.([qk]_proj)\.(weight|bias)$", name):
        tensor = tensor.unflatten(0, (heads[projection[1]], 2, -1)).transpose(1, 2).flatten(0, 2)
    if layer := re.search(r"layers\.(\d+)\.(block_sparse_moe|shared_mlp)\.input_linear\.weight$", name):
        kind = "exps" if layer[2] == "block_sparse_moe" else "shexp"
        for part, half in zip(("gate", "up"), tensor.chunk(2, -2), strict=True):
            yield f"blk.{layer[1]}.ffn_{part}_{kind}.weight", half
    else:
        yield name, tensor


def of_gpt_oss(config: Config, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Experts [E, N, C] with separate gate and up, whose rows alternate."""
    if name.endswith("experts.gate_up_proj_bias"):
        yield name.replace("gate_up", "gate"), tensor[:, ::2]
        yield name.replace("gate_up", "up"), tensor[:, 1::2]
    elif name.endswith("experts.gate_up_proj"):
        yield name.replace("gate_up_proj", "gate_proj.weight"), tensor.mT[:, ::2]
        yield name.replace("gate_up_proj", "up_proj.weight"), tensor.mT[:, 1::2]
    else:
        yield name, tensor.mT if name.endswith("experts.down_proj") else tensor


def of_llama4(config: Config, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), tensor.mT.chunk(2, -2), strict=True):
            yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
    else:
        yield name, tensor.mT if name.endswith("experts.down_proj") else tensor


def of_kv_b(config: Config, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The parts of keys and values of every head; that of keys is transposed."""
    nope = config["qk_nope_head_dim"]
    k_b, v_b = tensor.unflatten(0, (config["num_attention_heads"], -1)).split([nope, config["v_head_dim"]], 1)
    yield name.replace("kv_b_proj", "k_b_proj"), k_b.mT
    yield name.replace("kv_b_proj", "v_b_proj"), v_b


def of_qwen3next(config: Config, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """q, k, v and z of each key head become those of all heads; the convolution loses its empty dimension."""
    layer = re.search(r"layers\.(\d+)\.", name)
    if "in_proj_qkvz.weight" in name:
        values = config["linear_num_value_heads"] // config["linear_num_key_heads"] * config["linear_value_head_dim"]
        sizes = [config["linear_key_head_dim"]] * 2 + [values] * 2
        heads = tensor.unflatten(0, (config["linear_num_key_heads"], -1))
        q, k, v, z = (part.flatten(0, 1) for part in heads.split(sizes, 1))
        yield f"blk.{layer[1]}.attn_qkv.weight", torch.cat([q, k, v])
        yield f"blk.{layer[1]}.attn_gate.weight", z
    else:
        yield name, tensor.squeeze() if "conv1d" in name else tensor


def of_qwen35(config: Config, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Value heads: those that share a key head are not neighbours, because ggml repeats the keys."""
    keys, size = config["linear_num_key_heads"], config["linear_value_head_dim"]

    def tiled(part: Tensor, rows: int) -> Tensor:
        return part.unflatten(0, (keys, -1, rows)).transpose(0, 1).flatten(0, 2)

    kind = re.search(r"linear_attn\.(\w+)", name)
    if kind and kind[1] in ("in_proj_qkv", "conv1d"):
        tensor, queries = tensor.squeeze(), 2 * keys * config["linear_key_head_dim"]
        tensor = torch.cat([tensor[:queries], tiled(tensor[queries:], size)])
    elif kind and kind[1] == "in_proj_z":
        tensor = tiled(tensor, size)
    elif kind and kind[1] in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        tensor = tiled(tensor, 1)
    elif kind and kind[1] == "out_proj":
        tensor = tiled(tensor.T, size).T
    yield name, tensor


ARRANGED = {
    "llama": of_llama,
    "granitemoe": of_llama,
    "gpt-oss": of_gpt_oss,
    "llama4": of_llama4,
    "qwen3next": of_qwen3next,
    "qwen35moe": of_qwen35,
}
#: The parts of a fused tensor, and the dimension along which they are joined.
FUSED = {
    "ffn_gate_up_exps.weight": (("ffn_gate_exps.weight", "ffn_up_exps.weight"), 1),
    "attn_qkv.weight": (("attn_q.weight", "attn_k.weight", "attn_v.weight"), 0),
    "attn_qkv.bias": (("attn_q.bias", "attn_k.bias", "attn_v.bias"), 0),
}


def fused(tensors: Tensors, wanted: Callable[[str], bool]) -> Tensors:
    """With these tensors fused, in layers that have their parts."""
    found = dict(tensors)
    for layer in {name.split(".")[1] for name in tensors if name.startswith("blk.")}:
        for whole, (parts, dimension) in FUSED.items():
            names = [f"blk.{layer}.{part}" for part in parts]
            if wanted(f"blk.{layer}.{whole}") and all(name in found for name in names):
                found[f"blk.{layer}.{whole}"] = torch.cat([found.pop(name) for name in names], dimension)
    return found


# ------------------------------------------------------------------------------------------------ numbers

#: Norms of Qwen's models with linear attention: a file has 1 more, except in the norms of linear attention.
ONE_MORE = re.compile(r"(.*attn_norm|.*post_attention_norm|.*attn_[qk]_norm|output_norm)\.weight")


def to_file(arch: str, name: str, numbers: Tensor) -> Tensor:
    """Changes of values, not of layout."""
    if arch in ("qwen3next", "qwen35moe"):
        if ONE_MORE.fullmatch(name):
            return numbers + 1
        if name.endswith(".ssm_a"):
            return -numbers.exp()
    return numbers


def from_file(arch: str, name: str, numbers: Tensor) -> Tensor:
    if arch in ("qwen3next", "qwen35moe"):
        if ONE_MORE.fullmatch(name):
            return numbers - 1
        if name.endswith(".ssm_a"):
            return (-numbers).log()
    return numbers


def dense(model, path: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The model with the values of a file, or of a file in parts; `path` is the first of them."""
    arch = ARCHITECTURES[model.config.model_type]
    state = {name: tensor for name, tensor in model.state_dict().items()}
    counts = [0, *itertools.accumulate(tensor.numel() for tensor in state.values())]
    places = {
        name: torch.arange(first, first + tensor.numel()).view(tensor.shape)
        for first, (name, tensor) in zip(counts, state.items(), strict=False)
    }
    stored = dict(tensors_of(path))
    whole_kv_b = any(name.endswith("attn_kv_b.weight") for name in stored)
    moved = fused(layout(model, places, whole_kv_b=whole_kv_b), stored.__contains__)
    flat = torch.cat([tensor.flatten().to(dtype) for tensor in state.values()])
    for name, where in moved.items():
        flat[where.flatten()] = from_file(arch, name, numbers_of(stored[name])).to(dtype).flatten()
    if model.config.tie_word_embeddings:
        flat[places["lm_head.weight"]] = flat[places["model.embed_tokens.weight"]]
    found = copy.deepcopy(model).to(dtype)
    found.load_state_dict({name: flat[where] for name, where in places.items()})
    return found


def files_of(path: Path) -> list[Path]:
    parts = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if not parts:
        return [path]
    return [path.with_name(f"{parts[1]}-{i + 1:05d}-of-{parts[2]}.gguf") for i in range(int(parts[2]))]


def tensors_of(path: Path) -> Iterator[tuple[str, gguf.ReaderTensor]]:
    for file in files_of(path):
        yield from ((tensor.name, tensor) for tensor in GGUFReader(file).tensors)


def numbers_of(tensor: gguf.ReaderTensor) -> Tensor:
    if tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):  # in any byte order
        return torch.from_numpy(tensor.data.astype(np.float32))
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))


def types_of(path: Path) -> dict[str, str]:
    """ggml's type of every tensor of a file."""
    return {name: tensor.tensor_type.name.lower() for name, tensor in tensors_of(path)}


# ------------------------------------------------------------------------------------------------ types

#: The tensors that `write`'s types apply to. llama.cpp keeps all others in float32: norms, biases, routers.
ROLES = {
    "gate_up": r"blk\.\d+\.ffn_(gate|up|gate_up)_exps\.weight",
    "down": r"blk\.\d+\.ffn_down_exps\.weight",
    "dense": r"blk\.\d+\.ffn_(gate|up|down)(_shexp)?\.weight",
    "attention": r"blk\.\d+\.(attn_(q|k|v|qkv|output|gate|(q|kv|k|v)_[ab]|kv_a_mqa)|ssm_(ba|alpha|beta|out))\.weight",
    "embedding": r"token_embd\.weight",
    "head": r"output\.weight",
}
#: The types in llama.cpp's Q4_K_M, in every other layer.
Q4_K_M = {"gate_up": "q4_k", "down": "q6_k", "dense": "q4_k", "attention": "q4_k", "embedding": "q4_k", "head": "q6_k"}
#: The fallback of llama.cpp's quantize if rows are no multiple of 256 columns.
NARROW = {"q2_k": "iq4_nl", "q3_k": "iq4_nl", "iq4_xs": "iq4_nl", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
#: Types that gguf does not write: positions of a block's float16 factors, and their size relative to the first one, so
#: that the values of random bytes are centred on 0.
FACTORS = {
    "q2_k": {80: 1.0, 82: 1.5},
    "q3_k": {108: 1.0},
    "q4_k": {0: 1.0, 2: 7.5},
    "q5_k": {0: 1.0, 2: 15.5},
    "q6_k": {208: 1.0},
} | {name: {0: 1.0} for name in ("iq4_nl", "iq4_xs", "iq1_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")}


def type_of(name: str, shape: torch.Size, types: str | Mapping[str, str]) -> str:
    """By the tensor's name, or else by its role."""
    role = next((role for role, pattern in ROLES.items() if re.fullmatch(pattern, name)), None)
    wanted = types if isinstance(types, str) and role else "f32"
    if not isinstance(types, str):
        wanted = types.get(name, types.get(role, "f32"))
    if shape[-1] % gguf.GGML_QUANT_SIZES[GGMLQuantizationType[wanted.upper()]][0]:
        wanted = NARROW.get(wanted, "f16")
    return wanted if shape[-1] % gguf.GGML_QUANT_SIZES[GGMLQuantizationType[wanted.upper()]][0] == 0 else "f16"


def stored(numbers: Tensor, type: str, generator: np.random.Generator) -> np.ndarray:
    """The bytes of a tensor. For types that gguf does not write, they and the values are random."""
    if type in FACTORS:
        return random_blocks(numbers.shape, type, generator)
    return gguf.quants.quantize(numbers.float().contiguous().numpy(), GGMLQuantizationType[type.upper()])


def random_blocks(shape: Iterable[int], type: str, generator: np.random.Generator) -> np.ndarray:
    """Values with a variance of about 1 / columns."""
    *rows, columns = shape
    size, width = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[type.upper()]]
    blocks = generator.integers(0, 256, (math.prod(rows), columns // size, width), dtype=np.uint8)

    def put(scale: np.ndarray) -> np.ndarray:
        for at, factor in FACTORS[type].items():
            blocks[..., at : at + 2] = (scale * factor).astype(np.float16)[..., None].view(np.uint8)
        return blocks.reshape(*rows, -1)

    ones = gguf.quants.dequantize(put(np.ones(blocks.shape[:2])), GGMLQuantizationType[type.upper()])
    noise = generator.uniform(0.75, 1.25, blocks.shape[:2])
    return put(noise * columns**-0.5 / ones.std())


# ------------------------------------------------------------------------------------------------ metadata


def metadata(config: Config, arch: str, whole_kv_b: bool = False) -> dict[str, Any]:
    """The keys of an architecture, without its prefix."""

    def first(*names: str):
        return next((config[name] for name in names if config.get(name) is not None), None)

    mla = "kv_lora_rank" in config and arch == "deepseek2"
    gating = {"softmax": 1, "sigmoid": 2}
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": first("intermediate_size_mlp", "intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": 1 if mla and not whole_kv_b else config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "expert_count": first("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        "expert_used_count": first("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk"),
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_gating_func": gating.get(config.get("scoring_func")),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        **of_rope(config["rope_parameters"]),
        **METADATA.get(arch, lambda config: {})(config),
    }
    if mla:
        found |= of_mla(config, whole_kv_b)
    return {key: value for key, value in found.items() if value is not None}


def of_rope(rope: Config) -> dict[str, Any]:
    full = rope.get("full_attention", rope)
    found = {
        "rope.freq_base": full["rope_theta"],
        "rope.freq_base_swa": rope.get("sliding_attention", {}).get("rope_theta"),
    }
    if full["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": full["factor"]}
    if full["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
        yarn = {"attn_factor": "attention_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
        found |= {f"rope.scaling.yarn_{key}": full.get(name) for key, name in yarn.items()}
        if full.get("mscale_all_dim") is not None:
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * full["mscale_all_dim"]
    if "mrope_section" in rope:
        found["rope.dimension_sections"] = [*rope["mrope_section"], 0][:4]
    return found


def of_mla(config: Config, whole_kv_b: bool) -> dict[str, Any]:
    """For llama.cpp it is one key head as wide as the rank; older files have the real number of heads."""
    rank, turning = config["kv_lora_rank"], config["qk_rope_head_dim"]
    of_heads = {"key_length": config["qk_nope_head_dim"] + turning, "value_length": config["v_head_dim"]}
    lengths = {"key_length": rank + turning, "value_length": rank}
    lengths |= {f"{key}_mla": value for key, value in of_heads.items()}
    return {f"attention.{key}": value for key, value in (of_heads if whole_kv_b else lengths).items()} | {
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": turning,
        "vocab_size": config["vocab_size"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config.get("norm_topk_prob") or None,
    }


def head_size(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def turned(config: Config, usual: float) -> int:
    return int(head_size(config) * config["rope_parameters"].get("partial_rotary_factor", usual))


def of_qwen(config: Config) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }


def of_linear_attention(config: Config) -> dict[str, Any]:
    values = config["linear_num_value_heads"]
    return of_qwen(config) | {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": values,
        "ssm.inner_size": config["linear_value_head_dim"] * values,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config["layer_types"]],
        "full_attention_interval": config.get("full_attention_interval", 4),
        "rope.dimension_count": turned(config, 0.25),
    }


def of_qwen35_metadata(config: Config) -> dict[str, Any]:
    sections = {} if "mrope_section" in config["rope_parameters"] else {"rope.dimension_sections": [11, 11, 10, 0]}
    return of_linear_attention(config) | sections


def of_glm4(config: Config) -> dict[str, Any]:
    """Layers for multi-token prediction are counted, even if their tensors are left out."""
    more = config.get("num_nextn_predict_layers", 0)
    return of_leading_dense(config) | {
        "block_count": config["num_hidden_layers"] + more,
        "nextn_predict_layers": more,
        "rope.dimension_count": turned(config, 0.5),
        "expert_gating_func": 2,
    }


def of_leading_dense(config: Config) -> dict[str, Any]:
    return of_qwen(config) | {
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
    }


def of_llama_metadata(config: Config) -> dict[str, Any]:
    return {"vocab_size": config["vocab_size"], "rope.dimension_count": head_size(config)}


def of_granite(config: Config) -> dict[str, Any]:
    return of_llama_metadata(config) | {
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
        "expert_shared_feed_forward_length": config.get("shared_intermediate_size"),
        "attention.key_length": None,
        "attention.value_length": None,
    }


def of_gemma4(config: Config) -> dict[str, Any]:
    """Sizes of the layers with full attention; those with a window have their own."""
    windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    full = config["per_layer_config"]
    full = full.get(windows.index(False)) or full[str(windows.index(False))]
    size, heads = full.get("head_dim", config["head_dim"]), config["num_key_value_heads"]
    heads_of_full = full.get("num_key_value_heads")
    return {
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"] or 0,
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windows,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.head_count_kv": [heads if window else heads_of_full for window in windows]
        if heads_of_full
        else heads,
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "rope.dimension_count": size,
        "rope.dimension_count_swa": config["head_dim"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }


def of_llama4_metadata(config: Config) -> dict[str, Any]:
    return of_llama_metadata(config) | {
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
        "expert_feed_forward_length": config["intermediate_size"],
        "attention.sliding_window": 0 if set(config["layer_types"]) == {"full_attention"} else None,
    }


def of_ernie(config: Config) -> dict[str, Any]:
    return {
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["moe_num_shared_experts"],
        "expert_shared_feed_forward_length": config["intermediate_size"] // config["num_key_value_heads"],
    }


def of_hunyuan(config: Config) -> dict[str, Any]:
    """A13B's angles are scaled by alpha, with a length that is not in its configuration."""
    rope, size = config["rope_parameters"], config["hidden_size"] // config["num_attention_heads"]
    slowed = {
        "rope.freq_base": rope["rope_theta"] * rope.get("alpha", 1000) ** (size / (size - 2)),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": 256 * 1024,
        "context_length": 256 * 1024,
    }
    return (slowed if rope["rope_type"] == "dynamic" else {}) | {
        "expert_shared_feed_forward_length": config["intermediate_size"],
        "expert_feed_forward_length": config["moe_intermediate_size"][0],
        "expert_used_count": config["moe_topk"][0],
        "expert_shared_count": config["num_shared_expert"][0],
    }


#: Keys of an architecture in addition to the common keys, or instead of them.
METADATA = {
    "qwen3moe": of_qwen,
    "qwen2moe": of_qwen,
    "qwen3next": of_linear_attention,
    "qwen35moe": of_qwen35_metadata,
    "gpt-oss": lambda config: {
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["intermediate_size"],
    },
    "glm4moe": of_glm4,
    "dots1": of_leading_dense,
    "llama": of_llama_metadata,
    "granitemoe": of_granite,
    "minimax-m2": lambda config: {
        "expert_feed_forward_length": config["intermediate_size"],
        "rope.dimension_count": config["rotary_dim"],
    },
    "gemma4": of_gemma4,
    "llama4": of_llama4_metadata,
    "ernie4_5-moe": of_ernie,
    "hunyuan-moe": of_hunyuan,
}


def rope_factors(config: Config, arch: str) -> np.ndarray | None:
    """For each pair of a head: in gemma4 only the first ones rotate; llama3's are scaled by their wavelength."""
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    if arch == "gemma4":
        pairs = of_gemma4(config)["attention.key_length"] // 2
        turning = int(pairs * rope["partial_rotary_factor"])
        return np.array([1.0] * turning + [1e30] * (pairs - turning), dtype=np.float32)
    if rope["rope_type"] != "llama3":
        return None
    size = head_size(config)
    lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2, dtype=np.float32) / size)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (rope["original_max_position_embeddings"] / lengths - low) / (high - low)
    between = 1 / ((1 - smooth.clip(0, 1)) / rope["factor"] + smooth.clip(0, 1))
    return between.astype(np.float32)


# ------------------------------------------------------------------------------------------------ tokenizer

SPECIAL = {0: "<|pad|>", 1: "<|bos|>", 98: "<|endoftext|>"}
MERGES = ["t h", "Ġ t", "th e", "i n", "Ġ a", "Ġt h"]
TEMPLATE = (
    "{% for message in messages %}<|bos|>{{ message['role'] }}: {{ message['content'] }}<|endoftext|>{% endfor %}"
)


def vocabulary() -> list[str]:
    """99 tokens, as many as the tiny models have: most of ASCII, in the letters of byte-level BPE."""
    letters = [chr(code) for code in range(33, 127) if chr(code) not in "@^`~\\#"] + ["Ġ", "Ċ"]
    letters += [merge.replace(" ", "") for merge in MERGES]
    rest = iter(letters)
    return [SPECIAL.get(i) or next(rest) for i in range(99)]


def add_tokenizer(writer: GGUFWriter, size: int = 0) -> None:
    """`size`: of a larger vocabulary, in which each additional token is its number."""
    tokens = vocabulary()
    tokens += [f"<{i}>" for i in range(len(tokens), size)]
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL.values() else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(98)
    writer.add_chat_template(TEMPLATE)


def save_tokenizer(folder: Path) -> None:
    """The same as transformers' files."""
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(vocabulary())}, "merges": MERGES}
    levels = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    whole = {"version": "1.0", "pre_tokenizer": levels, "decoder": levels, "post_processor": None, "normalizer": None}
    whole |= {"added_tokens": [{"id": i, "content": token} | added for i, token in SPECIAL.items()], "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    names = {f"{name}_token": SPECIAL[i] for name, i in (("pad", 0), ("bos", 1), ("eos", 98))}
    settings = names | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


# ------------------------------------------------------------------------------------------------ files


def write(
    model,
    path: Path,
    types: str | Mapping[str, str] = "f32",
    *,
    whole_kv_b: bool = False,
    fuse: Container[str] = (),
    second_token: bool = False,
    extra: Mapping[str, np.ndarray] | None = None,
    metadata_changes: Mapping[str, Any] | None = None,
    shuffle: bool = False,
    tensors_per_file: int = 0,
    version: int = 3,
    big_endian: bool = False,
    tokenizer: bool = True,
    seed: int = 0,
) -> Path:
    """Write a model as a file, or in parts of `tensors_per_file`. Returns the path of the first. `types` are ggml's, in
    lower case: one for all matrices, or by ROLES or names of tensors; all others are float32. `second_token` adds the
    layer for multi-token prediction of GLM's and Qwen's files; `extra` are additional tensors. `metadata_changes`: full
    keys with other values; None removes a key. In big-endian files the factors of blocks are little-endian, as
    llama.cpp's converter writes them."""
    config, arch = model.config.to_dict(), ARCHITECTURES[model.config.model_type]
    numbers = layout(model, model.state_dict(), whole_kv_b=whole_kv_b, fuse=fuse)
    values = metadata(config, arch, whole_kv_b)
    if second_token:
        numbers |= of_second_token(numbers, config)
        values |= counted_second_token(values, config)
    order = GGUFEndian.BIG if big_endian else GGUFEndian.LITTLE
    writer = GGUFWriter(None, arch, endianess=order, split_max_tensors=tensors_per_file)
    of_arch = {f"{arch}.{key}": value for key, value in values.items()}
    for key, value in (of_arch | dict(metadata_changes or {})).items():
        add_value(writer, key, value)
    if tokenizer:
        add_tokenizer(writer)
    tensors = packed(config, arch, numbers, types, seed) | {name: (data, None) for name, data in (extra or {}).items()}
    for name in random.Random(seed).sample(list(tensors), len(tensors)) if shuffle else tensors:
        data, kind = tensors[name]
        writer.add_tensor(name, data, raw_dtype=kind)
    return written(writer, path, version)


def packed(
    config: Config, arch: str, numbers: Tensors, types: str | Mapping[str, str], seed: int
) -> dict[str, tuple[np.ndarray, GGMLQuantizationType]]:
    """Each tensor's bytes and type."""
    generator, found = np.random.default_rng(seed), {}
    for name, tensor in numbers.items():
        type = type_of(name, tensor.shape, types)
        data = stored(to_file(arch, name, tensor), type, generator)
        found[name] = data, GGMLQuantizationType[type.upper()]
    if (factors := rope_factors(config, arch)) is not None:
        found["rope_freqs.weight"] = factors, GGMLQuantizationType.F32
    return found


def of_second_token(tensors: Tensors, config: Config) -> Tensors:
    """The tensors of one more layer: those of the last layer again, and its additional inputs."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    last = {name: tensor for name, tensor in tensors.items() if name.startswith(f"blk.{layers - 1}.")}
    own = {"eh_proj": torch.randn(hidden, 2 * hidden) * 0.05}
    own |= {norm: torch.ones(hidden) for norm in ("enorm", "hnorm", "shared_head_norm")}
    return {name.replace(f"blk.{layers - 1}.", f"blk.{layers}."): tensor for name, tensor in last.items()} | {
        f"blk.{layers}.nextn.{name}.weight": tensor for name, tensor in own.items()
    }


def counted_second_token(values: dict[str, Any], config: Config) -> dict[str, Any]:
    found = {"block_count": config["num_hidden_layers"] + 1, "nextn_predict_layers": 1}
    recurrent = values.get("attention.recurrent_layers")
    return found | ({"attention.recurrent_layers": [*recurrent, False]} if recurrent else {})


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if value is not None:
        adders.get(type(value), writer.add_array)(key, value)


def written(writer: GGUFWriter, path: Path, version: int) -> Path:
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    count = len(writer.fout)
    writer.close()
    path = path if count == 1 else path.with_name(gguf.SHARD_NAME_FORMAT.format(path.stem, 1, count))
    if version != 3:  # version 2 differs in nothing else
        for file in files_of(path):
            data = bytearray(file.read_bytes())
            data[4:8] = version.to_bytes(4, "little")
            file.write_bytes(data)
    return path
