"""`attn_implementation="moe_metal"`: attention of few queries as one op, also with sinks and softcap.

The op reads every key and value once, even if several heads share them, and copies none. For many queries PyTorch's
`scaled_dot_product_attention` is used, unless there are sinks or a softcap, which it does not support, or it is wrong
(`is_for_pytorch`). `patch` selects this implementation for models whose layers it fuses.
"""

import functools
import itertools
import sys

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ...arguments import DTYPES
from ...grad import wants_grad, warn_once
from ...refused import SDPA, is_refused
from .experts import NAME, WITH_SHAPES
from .members import setting

#: For more queries PyTorch's attention is used, which multiplies matrices.
FEW_QUERIES = 16
#: The widths of heads that PyTorch's own Metal kernels take, from 9 queries on. Others run on MPSGraph.
METAL_WIDTHS = (32, 64, 72, 80, 96, 128, 256)
#: MPSGraph's sums over more keys are wrong on M1 and M2 (pytorch#195163).
MOST_KEYS_OF_MPSGRAPH = 32766
#: With so many keys several threadgroups always share them, which needs a second kernel.
LONG_CONTEXT = 65536
#: Arguments of some models' attention that our op does not support.
UNKNOWN = ("position_bias", "cache", "indices", "block_indices")


def attention_forward(
    module: nn.Module,
    query: Tensor,  # [B, A, T, D]
    key: Tensor,  # [B, J, S, D]
    value: Tensor,  # [B, J, S, V]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function. Returns the weighted sums of values [B, T, A, V], and the weights if
    `output_attentions` is set, otherwise None."""
    states = query, key, value
    reason = why_not_ours(*states, attention_mask, kwargs)
    if reason is not None:
        warn_once(f"{type(module).__name__} runs on PyTorch's attention, since {reason}")
    T, of_sdpa = query.shape[2], s_aux is None and softcap is None
    # An exported graph for any number of queries must not depend on this number.
    many = of_sdpa and (torch.compiler.is_exporting() or is_for_pytorch(*states, attention_mask))
    shows_weights = kwargs.get("output_attentions") or shows_attentions(module)
    if reason is not None or dropout or many or shows_weights or wants_grad(module, *states):
        more = {"scaling": scaling, "dropout": dropout, "is_causal": is_causal, "softcap": softcap, "s_aux": s_aux}
        more = {name: value for name, value in more.items() if value is not None} | kwargs
        by_sdpa = of_sdpa and not shows_weights and not is_refused(SDPA, query)
        stock = sdpa_attention_forward if by_sdpa else eager_attention
        return stock(module, *states, attention_mask, **more)
    causal = attention_mask is None and T > 1 and attends_causally(module, is_causal)
    if causal:  # omits the unused rows of a static cache
        key, value = key[:, :, :T], value[:, :, :T]
    output = torch.ops.moe_metal.attention(
        query, key, value, attention_mask, s_aux, scale=scaling, causal=causal, softcap=softcap or 0.0
    )
    return output, None


def is_for_pytorch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether PyTorch's attention computes this, and not our op: for many queries, where it is right."""
    if query.shape[2] <= FEW_QUERIES or is_refused(SDPA, query):
        return False
    if query.device.type != "mps" or key.shape[2] <= MOST_KEYS_OF_MPSGRAPH:
        return True
    width = query.shape[-1]
    known_mask = mask is None or mask.dtype in (torch.bool, query.dtype)
    return width == value.shape[-1] and width in METAL_WIDTHS and known_mask


def shows_attentions(module: nn.Module) -> bool:
    """Whether the configuration asks for the weights of attention."""
    config = getattr(module, "config", None)
    return config is not None and bool(setting(config, "_output_attentions"))


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, s_aux: Tensor | None = None, **kwargs
) -> Tensor | None:
    """A step of continuous batching in which each request has one new token: [1, T, A, V], or None if transformers'
    attention must compute it. That treats all requests as one sequence, and computes every query with every key."""
    cache = kwargs.get("cache")
    if cache is None or kwargs.get("max_length_q") != 1:
        return None
    if torch.compiler.is_compiling():  # the lengths change in each step
        return None
    if why_not_ours(query, key, value, None, {}) is not None or wants_grad(module, query, key, value):
        return None
    ends = kwargs["cu_seq_lens_k"]  # of all kinds of layers; `update` puts this layer's in its place
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    kind = cache.layer_to_allocator[module.layer_idx].layer_type
    if (kind, "on the host") not in ends:  # once in a step, since it waits for the device
        ends[kind, "on the host"] = kwargs["cu_seq_lens_k"].tolist()
    outputs = [
        torch.ops.moe_metal.attention(
            query[:, :, i : i + 1], key[:, :, begin:end], value[:, :, begin:end], None, s_aux, scale=module.scaling
        )
        for i, (begin, end) in enumerate(itertools.pairwise(ends[kind, "on the host"]))
    ]
    return torch.cat(outputs, 1)


def attends_causally(module: nn.Module, chosen: bool | None) -> bool:
    return getattr(module, "is_causal", True) if chosen is None else chosen


def why_not_ours(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, more: dict) -> str | None:
    """The reason why our op cannot compute this, or None."""
    for name in UNKNOWN:
        if more.get(name) is not None and more[name] is not False:
            return f"{name} is given"
    if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        return f"its queries, keys and values are {query.dtype}, {key.dtype} and {value.dtype}"
    if query.device.type not in WITH_SHAPES:
        return f"it is on {query.device.type}"
    if is_refused("attention", query):
        return "the op is wrong on this GPU"
    if mask is not None and (mask.dim() != 4 or mask.dtype not in (torch.bool, torch.float32, query.dtype)):
        return f"its mask is {mask.dtype} of shape {list(mask.shape)}"
    if mask is not None and mask.shape[-1] == 1 != key.shape[-2]:  # transformers', for a padded batch of MiniMax
        return "its mask is for one key"
    return None


def eager_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more):
    """The model's own eager attention, which needs a mask of numbers."""
    T, S = query.shape[2], key.shape[2]
    if mask is None and T > 1 and attends_causally(module, more.get("is_causal")):
        mask = torch.ones(T, S, dtype=torch.bool, device=query.device).tril(0 if S > T else S - T)[None, None]
    if mask is not None and mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, lowest)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, mask, **more)


def warm_up_attention(module: nn.Module, tokens: int, dtype: torch.dtype) -> None:
    """Launch our op on meta tensors like those of `module`, with few and with many keys, if its configuration selects
    our attention."""
    config, few = module.config, min(tokens, FEW_QUERIES)
    if config._attn_implementation != NAME:
        return
    heads, groups = key_heads(module), module.num_key_value_groups
    width = getattr(module, "qk_head_dim", None) or module.head_dim
    value_width = getattr(module, "v_head_dim", width)
    for keys in (few, LONG_CONTEXT):
        sizes = (heads * groups, few, width), (heads, keys, width), (heads, keys, value_width)
        states = [torch.empty(1, *size, dtype=dtype, device="meta") for size in sizes]
        if is_refused("attention", states[0]):
            return
        torch.ops.moe_metal.attention(*states, sinks=getattr(module, "sinks", None), causal=keys == few)


def key_heads(module: nn.Module) -> int:
    """The number of key heads. Some layers of Gemma 4 and MiMo have more than their configuration says."""
    projection = module._modules.get("k_proj")
    return projection.out_features // module.head_dim if projection else module.config.num_key_value_heads


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config=None,
    **more,
) -> Tensor | None:
    """transformers' mask of the keys that each query sees. For one new token it is the padding mask itself, since all
    keys precede the token. `sdpa_mask` would compute about ten tensors for the same result and read one of them on the
    host."""
    padding, end = attention_mask, kv_offset + kv_length
    if q_length == 1 and allow_is_causal_skip and isinstance(q_offset, int) and not torch.compiler.is_exporting():
        # `local_size` is the size of a window or of chunks. A chunk does not end with the newest token.
        within = local_size is None or (kv_length <= local_size and not getattr(config, "attention_chunk_size", None))
        known = padding is None or (padding.dim() == 2 and padding.shape[-1] >= end)
        if within and known and q_offset == end - 1:
            return None if padding is None else padding[:, None, None, kv_offset:end]
    more |= {"attention_mask": padding, "local_size": local_size, "allow_is_causal_skip": allow_is_causal_skip}
    return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, config=config, **more)


def uses_ours(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == NAME


def leave_paged_caches(manager: type) -> None:
    """Make transformers' manager of continuous batching replace our attention by PyTorch's: there, all requests form
    one sequence, whose keys and values are in pages. Fused attention computes steps without prompts nevertheless
    (`paged_attention`). When the manager stops or fails, our attention is selected again."""
    stock_init, stock_switch, stock_stop = manager.__init__, manager.switch_to_cb_friendly_attn, manager.stop

    def select_again(self) -> None:
        for module in self._moe_metal:
            module.config._attn_implementation_internal = NAME
            vars(module).pop("is_paged", None)
        self._moe_metal = ()

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs) -> None:
        try:
            stock_init(self, *args, **kwargs)
        except BaseException:
            select_again(self)
            raise

    @functools.wraps(stock_switch)
    def switch_to_cb_friendly_attn(self, model: nn.Module, auto_switch_to_flash: bool = True) -> None:
        ours = [each for each in model.modules() if uses_ours(each)]
        for module in ours:
            module.config._attn_implementation_internal = "sdpa" if model._supports_sdpa else "eager"
            if hasattr(module, "is_paged"):  # fused attention
                module.is_paged = True
        self._moe_metal = (*self._moe_metal, *ours)
        stock_switch(self, model, auto_switch_to_flash)

    @functools.wraps(stock_stop)
    def stop(self, *args, **kwargs) -> None:
        stock_stop(self, *args, **kwargs)
        select_again(self)

    manager._moe_metal = ()
    manager.__init__, manager.switch_to_cb_friendly_attn, manager.stop = __init__, switch_to_cb_friendly_attn, stop


def register() -> None:
    """Make "moe_metal" known to from_pretrained, configurations and set_attn_implementation."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
    from transformers.modeling_utils import AttentionInterface  # which imports the experts, and with them this file

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    leave_paged_caches(ContinuousBatchingManager)
