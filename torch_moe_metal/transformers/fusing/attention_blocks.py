"""The fused forwards. A patched module keeps its parameters, its hooks and its place in the model. Only its class
changes, to a subclass of its own class, so isinstance, state_dict, save_pretrained, .to(), deepcopy and pickle work as
before.

If a fused forward would skip something (a hook on a router, a replaced submodule, a gradient, a later selection of
other experts), it calls the original forward instead.
"""

import functools
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ...arguments import DTYPES
from ...grad import wants_grad
from ...layers import Linear, dequantized
from ...warmup import warm_up_best_effort
from ..versions import CACHE, take_cache, updated, updated_if_paged
from .attention import FEW_QUERIES, attention_forward, key_heads, paged_attention, warm_up_attention, why_not_ours
from .cache import grow_in_place, joined_rows
from .experts import NAME, WITH_SHAPES, dtype_for, expert_arguments, member, prepared, setting, why_not_fused
from .families import (
    ATTENTIONS,
    BLOCKS,
    GEMMA4_ATTENTIONS,
    GEMMA4_LAYERS,
    LAST_NORMS,
    LATENT_ATTENTIONS,
    PRE_NORM_LAYERS,
    Attention,
    Block,
    family_name,
)
from .projections import join, project

ops = torch.ops.moe_metal


class Fused(nn.Module):
    """The base class of the fused classes."""

    original: type  # the class that this module had before
    homes: tuple[str, ...]  # the Python modules with the classes of its unmodified parts
    selected: bool  # whether its configuration selected our experts when it was fused; if not, it is not checked later

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), "fused by torch_moe_metal")))

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        warm_up_best_effort(self)  # it may have been moved to mps
        return self

    def __reduce_ex__(self, protocol):
        # These classes are made at run time, so a copy is made from the original class.
        return rebuild, (self.original, self.selected), self.__dict__

    def are_unmodified(self, *modules: nn.Module) -> bool:
        """Whether reading these modules' parameters gives the same as calling them: they have no hook, no replaced
        forward, and the classes that they were built with (PEFT and quantizers replace these)."""
        homes = self.homes
        for module in modules:
            own = module.__dict__
            if (
                own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or own["_backward_hooks"]
                or own["_backward_pre_hooks"]
            ):
                return False
            if "forward" in own or type(module).__module__ not in homes:
                return False
        return True

    def is_plain_inference(self, x: Tensor) -> bool:
        """Whether our ops can compute this call: no gradient, no autocast, a supported dtype and device."""
        device = x.device.type
        return (
            x.dtype in DTYPES
            and device in WITH_SHAPES
            and (device == "meta" or not torch.is_autocast_enabled(device))
            and not wants_grad(self, x)
        )

    def norm(self, name: str, x: Tensor) -> Tensor:
        """x normalised by the submodule of this name."""
        norm = self._modules[name]
        return rms_norm(x, norm) if self.are_unmodified(norm) else norm(x)

    def still_selected(self) -> bool:
        """Whether no other experts were selected since. transformers' exporters do that for targets without our ops."""
        return not self.selected or selects_ours(self)

    def experts_part(self, x: Tensor, experts: nn.Module) -> dict | None:
        """The arguments of `experts` that the experts provide, or None if their module must be called."""
        arguments, obstacle = expert_arguments(experts)
        return arguments if obstacle is None and x.dtype == dtype_for(x, arguments) else None


def rebuild(original: type, selected: bool) -> nn.Module:
    cls = fused_class(original, selected) or original
    return cls.__new__(cls)


def selects_ours(module: nn.Module) -> bool:
    """Whether the configuration of this block or layer selects our experts. Llama 4's has no such setting."""
    own = module.__dict__
    config = own["config"] if "config" in own else getattr(own["_modules"].get("experts"), "config", None)
    return config is not None and setting(config, "_experts_implementation_internal") == NAME


class FusedBlock(Fused):
    """A whole MoE block: one `gate`, the shared expert if there is one, one `experts`."""

    family: Block

    def forward(self, hidden_states: Tensor, *args, **kwargs):
        parts = None if args or kwargs else self.parts(hidden_states, self)
        if parts is None:
            return super().forward(hidden_states, *args, **kwargs)
        output, weights = self.moe(hidden_states, parts)
        if self.family.returns == "output, weights":
            return output, weights.flatten(0, -2).to(output.dtype)
        return output

    def _warmup_call(self, tokens: int, dtype: torch.dtype) -> None:
        router = self.family.routing(self._modules[self.family.router], self)["router_weight"]
        self(torch.empty(1, tokens, router.shape[-1], dtype=dtype, device="meta"))

    def parts(self, x: Tensor, caller: Fused, *read: nn.Module) -> tuple[dict, dict] | None:
        """The arguments of `gate` and of `experts` that this block provides, or None if `caller` must run its original
        forward. `caller` is the block, or a layer that also uses the modules `read`.

        This runs for every token in every layer, so its cost matters: the Python code around the ops takes about 40 us
        in a Qwen3 layer on a slow Xeon core, of which this function takes 10. Submodules are read from `_modules` for
        the reason given in `member`.
        """
        modules, family = self._modules, self.family
        router, experts = modules[family.router], modules["experts"]
        inside = router.modules() if router._modules else (router,)
        if (
            not self.are_unmodified(experts, *inside, *read)
            or not caller.is_plain_inference(x)
            or not self.still_selected()
        ):
            return None
        if self.training and getattr(self, "jitter_noise", 0):  # Mixtral's and MiniMax's
            return None
        arguments = self.experts_part(x, experts)
        return None if arguments is None else (family.routing(router, self), arguments)

    def moe(self, x: Tensor, parts: tuple[dict, dict], residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The block's output plus `residual`, both [..., H], and the routing weights [..., K]."""
        routing, arguments = parts
        family = self.family
        weights, ids = ops.gate(x, **routing)
        if family.shared:
            arguments["shared"] = self._modules[family.shared](x)
        if family.shared_gate:
            arguments["shared_gate"] = self._modules[family.shared_gate](x).squeeze(-1)
        if residual is not None:
            arguments["residual"] = residual
        return ops.experts(x, weights, ids, **arguments), weights


class FusedLlama4Block(FusedBlock):
    """Llama 4: the routing weight multiplies an expert's input, and the block returns the router's logits too."""

    def forward(self, hidden_states: Tensor):
        parts = self.parts(hidden_states, self)
        if parts is None:
            return super().forward(hidden_states)
        routing, arguments = parts
        x = hidden_states.flatten(0, -2)
        logits = nn.functional.linear(x, routing.pop("router_weight"))
        weights, ids = ops.route(logits, **routing)
        inputs = (x.unsqueeze(-2) * weights.unsqueeze(-1)).to(x.dtype)
        ones = torch.ones_like(weights)
        slots = ops.experts(inputs, ones.unsqueeze(-1), ids.unsqueeze(-1), **arguments)
        return ops.weighted_sum(slots, ones, shared=self.shared_expert(x)), logits


class FusedProjections(Fused):
    """Attention with joined projections. They are joined again when the weights are moved or converted."""

    family: Attention
    joined: tuple[str, ...]  # the names of these projections
    is_paged = False  # whether transformers' manager of continuous batching runs it

    def parts(self, names: tuple[str, ...]) -> list[nn.Module]:
        """The existing submodules out of these."""
        found = [self._modules.get(name) for name in names]
        return [module for module in found if module is not None]

    def join(self) -> None:
        projections = self.parts(self.joined)
        if self.are_unmodified(*projections):
            join(projections)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.join()
        return self

    def __setstate__(self, state) -> None:
        super().__setstate__(state)
        self.join()  # in a copy, each weight has its own memory

    def forward(self, hidden_states: Tensor, position_embeddings=None, attention_mask=None, **kwargs):
        family, rotates, cache = self.family, self.family.rotates(self), take_cache(kwargs, self.is_paged)
        projections, norms = self.parts(self.joined), self.parts(family.norms)
        known = hidden_states.dim() == 3 and (position_embeddings is not None or not rotates)
        if not (
            known
            and self.are_unmodified(*projections, *norms)
            and self.is_plain_inference(hidden_states)
            and self.still_selected()
        ):
            kwargs = {CACHE: cache} | kwargs | {"attention_mask": attention_mask}
            if position_embeddings is not None:  # some do not accept them, such as Jamba's
                kwargs["position_embeddings"] = position_embeddings
            return super().forward(hidden_states, **kwargs)
        grow_in_place(cache, self)
        temperature = None
        if family.temperature is not None:  # it depends on the length of the cache before this call
            temperature = family.temperature(self, hidden_states, cache, kwargs.get("position_ids"))
        angles = angles_of(position_embeddings, family.angles) if rotates else None
        q, *stored, gate = self.states(hidden_states, projections, norms, angles)
        if temperature is not None:
            q = (q * temperature).to(q.dtype)
        if cache is not None:
            stored = updated(cache, *stored, self.layer_idx, kwargs)
        output, weights = self.attend(q, *stored, attention_mask, **kwargs)
        if gate is not None:
            output = output * family.gate(gate).reshape(*output.shape[:-1], -1)
        return self._modules["o_proj"](output.reshape(*hidden_states.shape[:-1], -1)), weights

    def states(self, x: Tensor, projections: list, norms: list, angles: tuple[Tensor, Tensor] | None) -> tuple:
        """The queries [B, A, T, D], the two tensors that the cache stores, and the output's gate or None."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs) -> tuple[Tensor, Tensor | None]:
        """The attention that the configuration selects: the values' weighted sums [B, T, A, V], and the weights."""
        if self.is_paged:
            output = paged_attention(self, q, k, v, **kwargs)
            if output is not None:
                return output, None
            k, v = updated_if_paged(self, k, v, kwargs)
        implementation = setting(self.config, "_attn_implementation_internal")
        function = attention_forward
        if implementation != NAME:
            home = sys.modules[self.original.__module__]
            function = home.ALL_ATTENTION_FUNCTIONS.get_interface(implementation, home.eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        return function(self, q, k, v, mask, dropout=dropout, scaling=self.scaling, **kwargs)


def angles_of(position_embeddings: Tensor | tuple[Tensor, Tensor], kind: str) -> tuple[Tensor, Tensor]:
    """The cosine and sine of each angle, once."""
    if kind == "complex":
        return position_embeddings.real, position_embeddings.imag
    cos, sin = position_embeddings
    if kind == "once":
        return cos, sin
    half = cos.shape[-1] // 2
    return cos[..., :half], sin[..., :half]


def with_neighbours_paired(heads: Tensor) -> Tensor:
    """Reorder heads whose pairs are elements i and i + D / 2, so that pairs are 2i and 2i + 1. That is the order of
    models with complex angles, and a cache may contain keys that they computed."""
    return heads.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


class FusedAttention(FusedProjections):
    """One product for queries, keys, values and a gate, and one op that normalises and rotates queries and keys."""

    joined = ("q_proj", "k_proj", "v_proj", "g_proj")

    def states(self, x: Tensor, projections: list, norms: list, angles: tuple[Tensor, Tensor] | None) -> tuple:
        q, k, v, gate = self.heads(*project(x, projections))
        q, k = self.rope(q, k, angles, norms)
        v = v.transpose(1, 2)
        scale = self.__dict__.get("v_scale", 1.0)  # MiMo's
        return q, k, v if scale == 1.0 else v * scale, gate

    def heads(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None) -> tuple:
        """Queries, keys and values [B, T, heads, width] from the projections, and the gate."""
        width = self.head_dim
        v = heads_of(v, self.__dict__.get("v_head_dim", width))
        if self.family.gate is None or gate is not None:
            return heads_of(q, width), heads_of(k, width), v, gate
        q, gate = heads_of(q, 2 * width).chunk(2, -1)
        return q, heads_of(k, width), v, gate

    def rope(self, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor] | None, norms: list) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, T, heads, D], normalised and rotated -> [B, heads, T, D]"""
        family = self.family
        weights = [family.norm_weight(norm) for norm in norms[:2]]
        first = norms and family.norms_first and angles is not None
        if angles is None:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        elif first:
            if len(weights[0]) != self.head_dim:  # one norm for all heads of a token
                weights = [weight.view(heads.shape[2:]) for weight, heads in zip(weights, (q, k), strict=True)]
            q, k = ops.rope(q, k, *angles, *weights, eps=eps_of(norms[0]))
        else:
            complex_angles = family.angles == "complex"
            q, k = ops.rope(q, k, *angles, interleaved=complex_angles)
            if complex_angles:
                q, k = with_neighbours_paired(q), with_neighbours_paired(k)
        if norms and not first:
            eps = eps_of(norms[0])
            q, k = ops.norm(q, weights[0], eps=eps), ops.norm(k, weights[1], eps=eps)
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs) -> tuple[Tensor, Tensor | None]:
        if self.family.window:
            owner = self if self.family.window == "module" else self.config
            kwargs["sliding_window"] = getattr(owner, "sliding_window", None)
        if "sinks" in self._parameters:
            kwargs["s_aux"] = self._parameters["sinks"]
        return super().attend(q, k, v, mask, **kwargs)

    def _warmup_call(self, tokens: int, dtype: torch.dtype) -> None:
        of_keys = key_heads(self)
        q, k = (
            torch.empty(1, tokens, heads, self.head_dim, dtype=dtype, device="meta")
            for heads in (of_keys * self.num_key_value_groups, of_keys)
        )
        cos = torch.empty(1, tokens, self.head_dim // 2, dtype=dtype, device="meta")
        self.rope(q, k, (cos, cos) if self.family.rotates(self) else None, self.parts(self.family.norms))
        warm_up_attention(self, tokens, dtype)


def heads_of(x: Tensor, width: int) -> Tensor:
    """[B, T, heads * width] -> [B, T, heads, width]"""
    return x.view(*x.shape[:-1], -1, width)


class FusedGemma4Attention(FusedAttention):
    """Gemma 4 also normalises the values. Without v_proj, they are the keys before norm and rotation."""

    def heads(self, q: Tensor, k: Tensor, v: Tensor | None = None) -> tuple:
        q, k, v, _ = super().heads(q, k, k if v is None else v)
        return q, k, ops.norm(v, eps=eps_of(self._modules["v_norm"])), None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shared_kv_states=None, **kwargs):
        if self.store_full_length_kv:
            shared_kv_states[self.layer_type] = k, v
        return super().attend(q, k, v, mask, **kwargs)


class FusedLatentAttention(FusedProjections):
    """MLA: the cache stores latents, and the part of the keys that is rotated."""

    joined = ("q_proj", "q_a_proj", "kv_a_proj_with_mqa", "g_proj")  # it has one of the first two

    def states(self, x: Tensor, projections: list, norms: list, angles: tuple[Tensor, Tensor] | None) -> tuple:
        q, latent, *gate = project(x, projections)
        if len(norms) > 1:
            q = self._modules["q_b_proj"](rms_norm(q, norms[0]))
        q = heads_of(q, self.qk_head_dim)
        latent, k_rot = latent.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        latent, k_rot = rms_norm(latent, norms[-1]).unsqueeze(1), k_rot.unsqueeze(2)
        if angles is None:
            q, k_rot = q.transpose(1, 2), k_rot.transpose(1, 2)
        else:
            q, q_rot = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
            q_rot, k_rot = self.rope(q_rot, k_rot, *angles)
            q = torch.cat((q.transpose(1, 2), q_rot), -1)
        return q, latent, k_rot, gate[0] if gate else None

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        if self.family.angles == "complex":
            return tuple(with_neighbours_paired(heads) for heads in ops.rope(q, k, cos, sin, interleaved=True))
        # Bailing's configuration has no such setting: its pairs are neighbours.
        return ops.rope(q, k, cos, sin, interleaved=bool(getattr(self.config, "rope_interleave", True)))

    def attend(self, q: Tensor, latent: Tensor, k_rot: Tensor, mask: Tensor | None, **kwargs):
        keys = joined_rows(latent, k_rot) if self.may_absorb(q, latent, mask, kwargs) else None
        if keys is None:
            return super().attend(q, *self.expand_kv(latent, k_rot), mask, **kwargs)
        to_keys, to_values = self.expansions(latent)
        q, q_rot = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        q = torch.cat((torch.einsum("batn,anr->batr", q, to_keys), q_rot), -1)
        output, weights = super().attend(q, keys, latent, mask, **kwargs)
        return torch.einsum("btar,avr->btav", output, to_values), weights

    def may_absorb(self, q: Tensor, latent: Tensor, mask: Tensor | None, kwargs: dict) -> bool:
        """Whether to multiply the queries by the expansion of keys, and attend to the latents directly. For few queries
        this is cheaper, because the cost of the expansion then does not depend on the length of the context."""
        if torch.compiler.is_compiling() or not q.shape[2] <= min(FEW_QUERIES, latent.shape[2] - 1):
            return False
        shows_weights = kwargs.get("output_attentions") or self.config.output_attentions
        if self.config._attn_implementation != NAME or shows_weights or (self.training and self.attention_dropout):
            return False
        expansion = self._modules["kv_b_proj"]
        plain = self.are_unmodified(expansion) and expansion.bias is None
        return plain and why_not_ours(q, latent, latent, mask, kwargs) is None

    def expansions(self, latent: Tensor) -> Iterable[Tensor]:
        """The weights [A, N, R] and [A, V, R] that compute unrotated keys and values from latents."""
        layer = self._modules["kv_b_proj"]
        packed = isinstance(layer, Linear)
        weight = dequantized(*layer.parts("weight"), layer.format, latent) if packed else member(layer, "weight")
        sizes = [self.qk_nope_head_dim, self.v_head_dim]
        return weight.view(self.num_heads, sum(sizes), -1).split(sizes, 1)

    def _warmup_call(self, tokens: int, dtype: torch.dtype) -> None:
        q, k, cos, latent = (
            torch.empty(1, tokens, *sizes, dtype=dtype, device="meta")
            for sizes in (
                (self.num_heads, self.qk_rope_head_dim),
                (1, self.qk_rope_head_dim),
                (self.qk_rope_head_dim // 2,),
                (self.kv_lora_rank,),
            )
        )
        if self.family.rotates(self):
            self.rope(q, k, cos, cos)
        rms_norm(latent, self._modules["kv_a_layernorm"])
        warm_up_attention(self, tokens, dtype)


class FusedNorm(Fused):
    """The norm after the last layer. Other norms are part of the fused layers."""

    config: object  # of its model, which selects the experts

    def forward(self, hidden_states: Tensor) -> Tensor:
        ours = self.is_plain_inference(hidden_states) and self.still_selected()
        return rms_norm(hidden_states, self) if ours else super().forward(hidden_states)

    def _warmup_call(self, tokens: int, dtype: torch.dtype) -> None:
        self(torch.empty(1, tokens, len(self.weight), dtype=dtype, device="meta"))


def rms_norm(x: Tensor, norm: nn.Module) -> Tensor:
    return ops.norm(x, member(norm, "weight"), eps=eps_of(norm))


def eps_of(norm: nn.Module) -> float:
    return norm.eps if "eps" in norm.__dict__ else norm.variance_epsilon


class IdentityAttention(nn.Module):
    """Replaces a layer's attention while the layer is warmed up. It returns its input."""

    def __init__(self, original: nn.Module):
        super().__init__()
        self.original = [original]  # a list, so that it is not a submodule

    def warm_up(self, tokens: int, dtype: torch.dtype) -> None:
        """Warm up the attention. If it is fused, it has its own warm-up call."""
        if not isinstance(self.original[0], FusedProjections):
            warm_up_attention(self.original[0], tokens, dtype)

    def forward(self, hidden_states: Tensor, **kwargs) -> tuple[Tensor, None]:
        return hidden_states, None


class FusedPreNormLayer(Fused):
    """A decoder layer with a fused block. One op computes the residual addition after attention and the norm, and the
    op `experts` adds the second residual."""

    def forward(self, hidden_states: Tensor, *args, attention_mask=None, position_embeddings=None, **kwargs):
        kwargs |= {"attention_mask": attention_mask, "position_embeddings": position_embeddings}
        inner = self._modules
        mlp, norm = inner["mlp"], inner["post_attention_layernorm"]
        known = not args and isinstance(mlp, FusedBlock)
        parts = mlp.parts(hidden_states, self, mlp, norm) if known else None
        if parts is None:
            return super().forward(hidden_states, *args, **kwargs)
        grow_in_place(kwargs.get(CACHE), inner["self_attn"])
        attended, _ = inner["self_attn"](hidden_states=self.norm("input_layernorm", hidden_states), **kwargs)
        x, residual = ops.residual_norm(hidden_states, attended, member(norm, "weight"), eps=norm.variance_epsilon)
        return mlp.moe(x, parts, residual)[0]

    def _warmup_call(self, tokens: int, dtype: torch.dtype) -> None:
        width = len(self._modules["post_attention_layernorm"].weight)
        self._modules["self_attn"] = attention = IdentityAttention(self._modules["self_attn"])
        self(torch.empty(1, tokens, width, dtype=dtype, device="meta"))
        attention.warm_up(tokens, dtype)


class FusedGemma4Layer(Fused):
    """Gemma 4's decoder layer. Each norm is one op together with its residual addition, and so are router and
    experts."""

    def forward(self, hidden_states: Tensor, per_layer_input=None, shared_kv_states=None, *args, **kwargs):
        kwargs |= {"shared_kv_states": shared_kv_states}
        arguments = None if args else self.ready(hidden_states)
        if arguments is None:
            return super().forward(hidden_states, per_layer_input, *args, **kwargs)
        inner = self._modules
        grow_in_place(kwargs.get(CACHE), inner["self_attn"])
        attended, _ = inner["self_attn"](
            hidden_states=self.norm("input_layernorm", hidden_states),
            **{"position_embeddings": None, "attention_mask": None} | kwargs,
        )
        residual = norm_add(hidden_states, attended, inner["post_attention_layernorm"])
        output = inner["mlp"](self.norm("pre_feedforward_layernorm", residual))
        if self.enable_moe_block:
            output = self.with_experts(output, residual, arguments)
        if not self.hidden_size_per_layer_input:
            return norm_add(residual, output, inner["post_feedforward_layernorm"], self.layer_scalar)
        residual = norm_add(residual, output, inner["post_feedforward_layernorm"])
        gated = self.act_fn(self.per_layer_input_gate(residual)) * per_layer_input
        output = self.per_layer_projection(gated)
        return norm_add(residual, output, self.post_per_layer_input_norm, self.layer_scalar)

    def with_experts(self, dense: Tensor, residual: Tensor, arguments: dict) -> Tensor:
        """The norms of the dense MLP's output and of the experts' output, added."""
        inner = self._modules
        router = inner["router"]
        weights, ids = ops.gate(
            residual,
            member(router._modules["proj"], "weight"),
            norm_weight=prepared(router, "scale", lambda scale: scale * router.scalar_root_size),
            per_expert_scale=member(router, "per_expert_scale"),
            top_k=router.config.top_k_experts,
            eps=router.eps,
        )
        output = ops.experts(self.norm("pre_feedforward_layernorm_2", residual), weights, ids, **arguments)
        dense_norm, norm = inner["post_feedforward_layernorm_1"], inner["post_feedforward_layernorm_2"]
        one = torch.ones_like(weights[..., :1])
        slots = output.unsqueeze(-2)
        return ops.weighted_sum_dual_norm_add(
            slots, one, dense, member(dense_norm, "weight"), member(norm, "weight"), eps=norm.eps
        )

    def _warmup_call(self, tokens: int, dtype: torch.dtype) -> None:
        width, per_layer = len(self._modules["post_attention_layernorm"].weight), self.hidden_size_per_layer_input
        self._modules["self_attn"] = attention = IdentityAttention(self._modules["self_attn"])
        x, of_layer = (torch.empty(1, tokens, size, dtype=dtype, device="meta") for size in (width, per_layer))
        self(x, of_layer if per_layer else None)
        attention.warm_up(tokens, dtype)

    def ready(self, x: Tensor) -> dict | None:
        """The arguments of `experts` that the experts provide, empty in a layer without experts; or None if the
        original forward must run."""
        inner = self._modules
        read = [inner["post_attention_layernorm"], inner["post_feedforward_layernorm"]]
        if self.hidden_size_per_layer_input:
            read.append(inner["post_per_layer_input_norm"])
        if not self.enable_moe_block:
            return {} if self.are_unmodified(*read) and self.is_plain_inference(x) and self.still_selected() else None
        experts = inner["experts"]
        read += [inner["post_feedforward_layernorm_1"], inner["post_feedforward_layernorm_2"], experts]
        whole = (
            self.are_unmodified(*read, *inner["router"].modules())
            and self.is_plain_inference(x)
            and self.still_selected()
        )
        return self.experts_part(x, experts) if whole else None


def norm_add(residual: Tensor, x: Tensor, norm: nn.Module, scalar: Tensor | None = None) -> Tensor:
    return ops.norm_add(residual, x, member(norm, "weight"), scalar, eps=eps_of(norm))


@functools.cache
def fused_class(original: type, selected: bool = False) -> type | None:
    """The fused class of `original`, or None. It keeps the name of the original, which device maps contain."""
    name = family_name(original)
    if name in BLOCKS:
        family = BLOCKS[name]
        base = FusedLlama4Block if family.returns == "output, logits" else FusedBlock
        own = {"family": family}
    elif name in ATTENTIONS:
        base, own = FusedAttention, {"family": ATTENTIONS[name]}
    elif name in GEMMA4_ATTENTIONS:
        base, own = FusedGemma4Attention, {"family": GEMMA4_ATTENTIONS[name]}
    elif name in LATENT_ATTENTIONS:
        base, own = FusedLatentAttention, {"family": LATENT_ATTENTIONS[name]}
    elif name in LAST_NORMS:
        base, own = FusedNorm, {}
    elif name in PRE_NORM_LAYERS:
        base, own = FusedPreNormLayer, {}
    elif name in GEMMA4_LAYERS:
        base, own = FusedGemma4Layer, {}
    else:
        return None
    homes = original.__module__, "torch.nn.modules.linear"
    if issubclass(base, FusedProjections):
        homes += (Linear.__module__,)
    own |= {"original": original, "selected": selected, "homes": homes}
    own |= {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (base, original), own)


def why_left(module: nn.Module, fused: type) -> str | None:
    """The reason why a module of a supported class cannot be `fused`, or None."""
    parts = module._modules
    if issubclass(fused, FusedProjections):
        return why_attention_left(module, fused)
    if "experts" not in parts:
        return None
    read = ("experts", fused.family.router) if issubclass(fused, FusedBlock) else ("experts",)
    for name in read:
        if type(parts[name]).__module__ not in fused.homes:
            return f"a {type(parts[name]).__name__} is in place of its {name}"
    reason = why_not_fused(parts["experts"])
    if reason or not issubclass(fused, FusedBlock):
        return reason
    routing = fused.family.routing(parts[fused.family.router], module)
    groups, kept = routing.get("n_group", 1), routing.get("topk_group", 1)
    if routing["top_k"] > len(routing["router_weight"]) // groups * kept:
        return "it chooses more experts than its best groups hold"  # transformers then adds experts of other groups
    return None


def why_attention_left(module: nn.Module, fused: type) -> str | None:
    if getattr(module.config, "clip_qkv", None) is not None:
        return "it clips its queries, keys and values"
    if getattr(module, "is_kv_shared_layer", False):
        return "it uses the keys and values of another layer"
    for name in fused.joined:
        part = module._modules.get(name)
        if part is not None and type(part).__module__ not in fused.homes:
            return f"a {type(part).__name__} is in place of its {name}"
    return None


def layer_of(block: nn.Module) -> tuple[tuple, str | None]:
    """For `nn.MoE.from_module`: the arguments of `gate` and of `experts`, the shared expert or None, and its gate or
    None; and the reason why the block cannot be converted, or None."""
    original = getattr(block, "original", type(block))
    fused = fused_class(original)
    if fused is None or not issubclass(fused, FusedBlock) or issubclass(fused, FusedLlama4Block):
        return (), f"no MoE layer of this form: {original.__name__}"
    obstacle = why_left(block, fused)
    if obstacle:
        return (), f"cannot take {original.__name__}: {obstacle}"
    arguments, _ = expert_arguments(block.experts)
    family = fused.family
    shared, shared_gate = (getattr(block, name) if name else None for name in (family.shared, family.shared_gate))
    return (family.routing(getattr(block, family.router), block), arguments, shared, shared_gate), None
