"""The fused forwards. A patched module keeps its parameters, its hooks and its place; only its class changes, to a
subclass of its own class, so that isinstance, state_dict, save_pretrained, .to(), deepcopy and pickle work as before.

Whenever a fused forward would skip something (a hook on a router, a replaced submodule, a gradient, other experts that
were selected since), it calls the original forward instead.
"""

import functools
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ...arguments import DTYPES
from ...grad import wants_grad
from ...layers import Linear
from ...warmup import warm_up_best_effort
from .attention import key_heads, rehearse_attention
from .cache import grow_in_place
from .experts import NAME, WITH_SHAPES, dtype_for, expert_arguments, member, why_not_fused
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
    """What the fused classes share."""

    original: type  # the class that this module had before
    homes: tuple[str, ...]  # the Python modules that the classes of its parts are from, unless others put theirs in
    selected: bool  # whether its configuration selected our experts when it was fused; if not, that does not count

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), "fused by torch_moe_metal")))

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        warm_up_best_effort(self)  # where it was moved to mps
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
        """What a norm that this layer calls makes of x."""
        norm = self._modules[name]
        return rms_norm(x, norm) if self.are_unmodified(norm) else norm(x)

    def still_selected(self) -> bool:
        """Whether nobody has selected other experts since: transformers' exporters do, whose targets lack our ops."""
        return not self.selected or selects_ours(self)

    def experts_part(self, x: Tensor, experts: nn.Module) -> dict | None:
        """The experts' part of the arguments of `experts`, or None where they have to be called themselves."""
        arguments, obstacle = expert_arguments(experts)
        return arguments if obstacle is None and x.dtype == dtype_for(x, arguments) else None


def rebuild(original: type, selected: bool) -> nn.Module:
    cls = fused_class(original, selected) or original
    return cls.__new__(cls)


def selects_ours(module: nn.Module) -> bool:
    """Whether the configuration of this block or layer selects our experts. Llama 4's has no such choice."""
    own = module.__dict__
    config = own["config"] if "config" in own else getattr(own["_modules"].get("experts"), "config", None)
    return getattr(config, "_experts_implementation_internal", None) == NAME


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
        """This block's part of the arguments of `gate` and of `experts`, as they are now, or None where the original
        forward of `caller` has to run: the block itself, or a layer that reads these modules too.

        Every token passes here in every layer, and what these forwards add to their ops is felt: some 40 us in a Qwen3
        layer on a slow Xeon core, of which 10 in here when it is called alone. Submodules are read from `_modules`
        for `member`'s reason.
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
    """Attention whose projections of the same input are joined, also after its weights have moved."""

    family: Attention
    joined: tuple[str, ...]  # those projections
    norms: tuple[str, ...]

    def parts(self, names: tuple[str, ...]) -> list[nn.Module]:
        """Those of these submodules that the module has."""
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
        self.join()  # copies have each weight in memory of its own

    def forward(
        self, hidden_states: Tensor, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
    ):
        projections, norms = self.parts(self.joined), self.parts(self.norms)
        known = position_embeddings is not None and hidden_states.dim() == 3
        if (
            known
            and self.are_unmodified(*projections, *norms)
            and self.is_plain_inference(hidden_states)
            and self.still_selected()
        ):
            grow_in_place(past_key_values, self)
            states = self.states(hidden_states, projections, norms, position_embeddings, past_key_values)
            return self.attend(states, hidden_states, attention_mask, **kwargs)
        kwargs |= {"attention_mask": attention_mask, "past_key_values": past_key_values}
        return super().forward(hidden_states, position_embeddings=position_embeddings, **kwargs)

    def attend(self, states: tuple[Tensor, ...], x: Tensor, mask: Tensor | None, **kwargs):
        """The attention that the configuration selects, and the projection of its output."""
        home = sys.modules[self.original.__module__]
        function = home.ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, home.eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = function(self, *states, mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self._modules["o_proj"](output.reshape(*x.shape[:-1], -1)), weights


class FusedAttention(FusedProjections):
    """One product for queries, keys and values, and one op that norms and rotates them."""

    joined = ("q_proj", "k_proj", "v_proj")
    norms = ("q_norm", "k_norm")

    def states(
        self, x: Tensor, projections: list, norms: list, position_embeddings: tuple[Tensor, Tensor], cache
    ) -> tuple[Tensor, ...]:
        B, T, _ = x.shape
        q, k, v = self.heads(part.view(B, T, -1, self.head_dim) for part in project(x, projections))
        cos, sin = position_embeddings
        if self.family.angles == "twice":
            half = cos.shape[-1] // 2
            cos, sin = cos[..., :half], sin[..., :half]
        q, k = self.rope(q, k, cos, sin, norms)
        v = v.transpose(1, 2)
        return (q, k, v) if cache is None else (q, *cache.update(k, v, self.layer_idx))

    def heads(self, projected: Iterable[Tensor]) -> Iterable[Tensor]:
        """Queries, keys and values out of what the projections make."""
        return projected

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, norms: list) -> tuple[Tensor, Tensor]:
        if not norms:
            return ops.rope(q, k, cos, sin)
        q_weight, k_weight = (member(norm, "weight") for norm in norms[:2])
        if len(q_weight) != self.head_dim:  # that of all heads together
            q_weight, k_weight = q_weight.view(q.shape[2:]), k_weight.view(k.shape[2:])
        return ops.rope(q, k, cos, sin, q_weight, k_weight, eps=eps_of(norms[0]))

    def attend(self, states: tuple[Tensor, ...], x: Tensor, mask: Tensor | None, **kwargs):
        if self.family.window:
            owner = self if self.family.window == "module" else self.config
            kwargs["sliding_window"] = getattr(owner, "sliding_window", None)
        if "sinks" in self._parameters:
            kwargs["s_aux"] = self._parameters["sinks"]
        return super().attend(states, x, mask, **kwargs)

    def _warmup_call(self, tokens: int, dtype: torch.dtype) -> None:
        of_keys = key_heads(self)
        q, k = (
            torch.empty(1, tokens, heads, self.head_dim, dtype=dtype, device="meta")
            for heads in (of_keys * self.num_key_value_groups, of_keys)
        )
        cos = torch.empty(1, tokens, self.head_dim // 2, dtype=dtype, device="meta")
        self.rope(q, k, cos, cos, self.parts(self.norms))
        rehearse_attention(self, tokens, dtype)


class FusedGemma4Attention(FusedAttention):
    """Gemma 4: values are normed too, and are the keys as they were projected where there is no v_proj."""

    norms = ("q_norm", "k_norm", "v_norm")

    def heads(self, projected: Iterable[Tensor]) -> Iterable[Tensor]:
        q, k, *v = projected
        return q, k, ops.norm(v[0] if v else k, eps=eps_of(self._modules["v_norm"]))

    def attend(self, states: tuple[Tensor, ...], x: Tensor, mask: Tensor | None, shared_kv_states=None, **kwargs):
        if self.store_full_length_kv:
            shared_kv_states[self.layer_type] = states[1:]
        return super().attend(states, x, mask, **kwargs)


class FusedLatentAttention(FusedProjections):
    """Keys and values are cached as latents here. transformers' own code expands them."""

    joined = ("q_proj", "q_a_proj", "kv_a_proj_with_mqa")  # either of the first two
    norms = ("q_a_layernorm", "kv_a_layernorm")

    def states(
        self, x: Tensor, projections: list, norms: list, position_embeddings: tuple[Tensor, Tensor], cache
    ) -> tuple[Tensor, ...]:
        B, T, _ = x.shape
        q, latent = project(x, projections)
        if self.q_lora_rank is not None:
            q = self._modules["q_b_proj"](rms_norm(q, norms[0]))
        q, q_rot = q.view(B, T, -1, self.qk_head_dim).split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        latent, k_rot = latent.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        latent = rms_norm(latent, norms[-1]).unsqueeze(1)
        q_rot, k_rot = self.rope(q_rot, k_rot.unsqueeze(2), *self.angles(position_embeddings))
        if cache is not None:
            latent, k_rot = cache.update(latent, k_rot, self.layer_idx)
        return torch.cat((q.transpose(1, 2), q_rot), -1), *self.expand_kv(latent, k_rot)

    def angles(self, position_embeddings: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if self.family.angles == "complex":
            return position_embeddings.real, position_embeddings.imag
        cos, sin = position_embeddings
        half = self.qk_rope_head_dim // 2
        return cos[..., :half], sin[..., :half]

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        if self.family.angles != "complex":
            return ops.rope(q, k, cos, sin, interleaved=bool(self.config.rope_interleave))
        # The model's own rotation leaves pairs side by side, and so they have to be in a cache of its making.
        halves = ops.rope(q, k, cos, sin, interleaved=True)
        return tuple(heads.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for heads in halves)

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
        self.rope(q, k, cos, cos)
        rms_norm(latent, self._modules["kv_a_layernorm"])
        rehearse_attention(self, tokens, dtype)


class FusedNorm(Fused):
    """The norm behind the last layer. Other norms are part of the fused layers."""

    config: object  # that of its model, which selects the experts

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
    """Replaces a layer's attention while the layer is rehearsed: it returns its input."""

    def __init__(self, original: nn.Module):
        super().__init__()
        self.original = [original]  # no part of this one

    def rehearse(self, tokens: int, dtype: torch.dtype) -> None:
        """Unless the attention is fused: then it has a rehearsal of its own."""
        if not isinstance(self.original[0], FusedProjections):
            rehearse_attention(self.original[0], tokens, dtype)

    def forward(self, hidden_states: Tensor, **kwargs) -> tuple[Tensor, None]:
        return hidden_states, None


class FusedPreNormLayer(Fused):
    """A decoder layer whose MLP is a fused block: its second norm takes in the residual addition before it, and the
    experts' sum the one behind it."""

    def forward(self, hidden_states: Tensor, *args, attention_mask=None, position_embeddings=None, **kwargs):
        kwargs |= {"attention_mask": attention_mask, "position_embeddings": position_embeddings}
        inner = self._modules
        mlp, norm = inner["mlp"], inner["post_attention_layernorm"]
        known = not args and isinstance(mlp, FusedBlock)
        parts = mlp.parts(hidden_states, self, mlp, norm) if known else None
        if parts is None:
            return super().forward(hidden_states, *args, **kwargs)
        grow_in_place(kwargs.get("past_key_values"), inner["self_attn"])
        attended, _ = inner["self_attn"](hidden_states=self.norm("input_layernorm", hidden_states), **kwargs)
        x, residual = ops.residual_norm(hidden_states, attended, member(norm, "weight"), eps=norm.variance_epsilon)
        return mlp.moe(x, parts, residual)[0]

    def _warmup_call(self, tokens: int, dtype: torch.dtype) -> None:
        width = len(self._modules["post_attention_layernorm"].weight)
        self._modules["self_attn"] = attention = IdentityAttention(self._modules["self_attn"])
        self(torch.empty(1, tokens, width, dtype=dtype, device="meta"))
        attention.rehearse(tokens, dtype)


class FusedGemma4Layer(Fused):
    """Gemma 4's decoder layer: every norm that adds to or joins a residual is one op, and so are router and experts."""

    def forward(self, hidden_states: Tensor, per_layer_input=None, shared_kv_states=None, *args, **kwargs):
        kwargs |= {"shared_kv_states": shared_kv_states}
        arguments = None if args else self.ready(hidden_states)
        if arguments is None:
            return super().forward(hidden_states, per_layer_input, *args, **kwargs)
        inner = self._modules
        grow_in_place(kwargs.get("past_key_values"), inner["self_attn"])
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
            norm_weight=member(router, "scale") * router.scalar_root_size,
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
        attention.rehearse(tokens, dtype)

    def ready(self, x: Tensor) -> dict | None:
        """The experts' part of the arguments of `experts`, none in a layer without them; or None where the original
        forward has to run."""
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
    """The class that fuses `original`, or None when we know none. It keeps its name: device maps go by it."""
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
    """Why a block or layer of a class that we know cannot be `fused`, or None when it can."""
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
        return "it chooses more experts than its best groups hold"  # transformers fills up with barred ones
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
    """What `nn.MoE` needs of a block: the arguments of `gate` and of `experts`, its shared expert and that one's gate,
    or None for either; and why it cannot be such a layer (or None)."""
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
