"""How the attention of different models differs, as functions: options of `records.Attention`."""

import torch
import torch.nn.functional as F

from .members import member, prepared

# ------------------------------------------------------------------------------------------------ which layers rotate


def always(attention):
    return True


def never(attention):
    return False


def llama4_rotates(attention):
    return attention.use_rope


def in_windows(attention):
    return attention.sliding_window is not None


def with_rope(attention):
    return attention.config.position_embedding_type == "rope"


# ------------------------------------------------------------------------------------------------ weights of norms


def plain_weight(norm):
    return member(norm, "weight")


def one_plus_weight(norm):
    return prepared(norm, "weight", lambda weight: 1 + weight.float())


def no_weight(norm):
    return None


# ------------------------------------------------------------------------------------------------ gates, temperatures


def softplus(gate):
    return F.softplus(gate.float()).to(gate.dtype)


def llama4_temperature(attention, x, cache, position_ids):
    """Llama 4 scales the queries of layers without rope by their position in the sequence, including padding."""
    if attention.use_rope or not attention.attn_temperature_tuning:
        return None
    past = 0 if cache is None else cache.get_seq_length(attention.layer_idx)
    positions = torch.arange(x.shape[1], device=x.device) + past  # a static cache's length is a tensor
    steps = torch.floor((positions.float() + 1.0) / attention.floor_scale)
    return (torch.log1p(steps) * attention.attn_scale + 1.0)[:, None]


def mistral4_temperature(attention, x, cache, position_ids):
    rope = attention.config.rope_parameters
    steps = torch.floor(position_ids / rope.get("original_max_position_embeddings"))
    return (1 + rope.get("llama_4_scaling_beta") * torch.log(1 + steps))[:, None, :, None].to(x.dtype)
