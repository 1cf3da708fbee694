"""transformers has its own modules for packed GGUF weights, which it uses where its kernels from the hub run. `patch`
replaces them by ours, which share their weights, and `unpatch` restores them."""

import sys

import torch
from torch import nn
from transformers.integrations.gguf.utils import GgufEmbedding, GgufExperts, GgufLinear

from ...gguf import BLOCKS
from ...packed_layers import Embedding, Linear, Permuted
from .experts import is_experts
from .packed_modules import pack_experts

STOCK = "_moe_metal_stock"  # attribute of our module: the module that it replaces


def take(model: nn.Module) -> None:
    """Replace transformers' modules by ours, if we have readers for their formats."""
    for name, module in list(model.named_modules()):
        ours = like(model, name, module)
        if ours is not None:
            ours.train(module.training)
            vars(ours)[STOCK] = module
            model.set_submodule(name, ours)


def give_back(model: nn.Module) -> None:
    """Undo `take`."""
    for name, module in list(model.named_modules()):
        if STOCK in vars(module):
            model.set_submodule(name, vars(module)[STOCK])


def like(model: nn.Module, name: str, module: nn.Module) -> nn.Module | None:
    """Our module with the same weights; None for any other module, and for formats without a reader."""
    if isinstance(module, GgufExperts) and {module.gate_up_type, module.down_type} <= BLOCKS.keys():
        return experts_like(model, name, module)
    if not isinstance(module, GgufLinear | GgufEmbedding) or module.ggml_type not in BLOCKS:
        return None
    parts, format = {"weight": module.weight.detach()}, BLOCKS[module.ggml_type]
    if isinstance(module, GgufEmbedding):
        return Embedding.from_parts(parts, module.embedding_dim, format, module.compute_dtype)
    linear = Linear.from_parts(parts, module.in_features, format, module.bias)
    return linear if module.input_permutation is None else Permuted(linear, module.input_permutation)


def experts_like(model: nn.Module, name: str, module: GgufExperts) -> nn.Module | None:
    """Packed experts. Their class is that of the dense experts, which is in the Python module of the MoE block."""
    home = name.rpartition(".")[0]
    names = [home[:end] for end in range(len(home), -1, -1) if end in (0, len(home)) or home[end] == "."]
    config = next(config for each in names if (config := vars(model.get_submodule(each)).get("config")) is not None)
    config = config.get_text_config()
    for cls in vars(sys.modules[type(model.get_submodule(home)).__module__]).values():
        if not (isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__name__.endswith("Experts")):
            continue
        with torch.device("meta"):
            experts = cls(config)
        if is_experts(experts):
            parts = {"gate_up": {"gate_up_proj": module.gate_up_proj.detach()}}
            parts["down"] = {"down_proj": module.down_proj.detach()}
            pack_experts(experts, BLOCKS[module.gate_up_type], parts, BLOCKS[module.down_type])
            return experts
    return None
