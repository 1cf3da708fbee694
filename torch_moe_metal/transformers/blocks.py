"""The fused forwards. A patched module keeps its parameters, its hooks and its place; only its class changes, to a
subclass of its own class, so that isinstance, state_dict, save_pretrained, .to(), deepcopy and pickle work as before.

Whenever a fused forward would skip something (a hook on a router, a replaced submodule, a gradient), it calls the
original forward instead.
"""

import functools

import torch
from torch import Tensor, nn

from ..nn import wants_grad
from .experts import ACTIVATION_DTYPES, DEVICES, expert_arguments, why_not_fused
from .families import BLOCKS, GEMMA4_LAYERS, PRE_NORM_LAYERS, Block, family_name

ops = torch.ops.moe_metal


class Fused(nn.Module):
    """What the fused classes share."""

    original: type  # the class that this module had before

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), "fused by torch_moe_metal")))

    def __reduce_ex__(self, protocol):
        # These classes are made at run time, so a copy is made from the original class.
        return rebuild, (self.original,), self.__dict__

    def untouched(self, *modules: nn.Module) -> bool:
        """Whether reading these modules' parameters is as good as calling them: no hook, no replaced forward, and
        still the classes that they were built with (PEFT and quantizers put their own in)."""
        return all(
            not (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks)
            and "forward" not in m.__dict__
            and type(m).__module__ in (self.original.__module__, "torch.nn.modules.linear")
            for m in modules
        )

    def free(self, x: Tensor) -> bool:
        """Whether nothing but our ops' result is asked of this call: no gradient, no autocast, a dtype of ours."""
        return (
            x.dtype in ACTIVATION_DTYPES
            and x.device.type in DEVICES
            and not torch.is_autocast_enabled(x.device.type)
            and not wants_grad(self, x)
        )

    def fits(self, x: Tensor) -> bool:
        """The same for a module with experts. (The noise is Mixtral's and MiniMax's, in training.)"""
        noisy = self.training and getattr(self, "jitter_noise", 0)
        same_dtype = x.dtype == self.experts.down_proj.dtype
        return not noisy and same_dtype and self.free(x) and why_not_fused(self.experts) is None


def rebuild(original: type) -> nn.Module:
    cls = fused_class(original) or original
    return cls.__new__(cls)


class FusedBlock(Fused):
    """A whole MoE block: one `gate`, the shared expert if there is one, one `experts`."""

    family: Block

    def forward(self, hidden_states: Tensor, *args, **kwargs):
        if args or kwargs or not self.ready(hidden_states):
            return super().forward(hidden_states, *args, **kwargs)
        output, weights = self.moe(hidden_states)
        if self.family.returns == "output, weights":
            return output, weights.flatten(0, -2).to(output.dtype)
        return output

    def ready(self, x: Tensor) -> bool:
        return self.untouched(*getattr(self, self.family.router).modules(), self.experts) and self.fits(x)

    def moe(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The block's output plus `residual`, both [..., H], and the routing weights [..., K]."""
        weights, experts = ops.gate(x, **self.family.routing(self))
        shared = {}
        if self.family.shared:
            shared["shared"] = getattr(self, self.family.shared)(x)
        if self.family.shared_gate:
            shared["shared_gate"] = getattr(self, self.family.shared_gate)(x).squeeze(-1)
        return ops.experts(x, weights, experts, residual=residual, **shared, **expert_arguments(self.experts)), weights


class FusedLlama4Block(FusedBlock):
    """Llama 4: the routing weight multiplies an expert's input, and the block returns the router's logits too."""

    def forward(self, hidden_states: Tensor):
        if not self.ready(hidden_states):
            return super().forward(hidden_states)
        x = hidden_states.flatten(0, -2)
        routing = self.family.routing(self)
        logits = nn.functional.linear(x, routing.pop("router_weight"))
        weights, experts = ops.route(logits, **routing)
        inputs = (x.unsqueeze(-2) * weights.unsqueeze(-1)).to(x.dtype)
        ones = torch.ones_like(weights)
        slots = ops.experts(inputs, ones.unsqueeze(-1), experts.unsqueeze(-1), **expert_arguments(self.experts))
        return ops.weighted_sum(slots, ones, shared=self.shared_expert(x)), logits


class FusedPreNormLayer(Fused):
    """A decoder layer whose MLP is a fused block: its second norm takes in the residual addition before it, and the
    experts' sum the one behind it."""

    def forward(self, hidden_states: Tensor, *args, attention_mask=None, position_embeddings=None, **kwargs):
        kwargs |= {"attention_mask": attention_mask, "position_embeddings": position_embeddings}
        if args or not self.ready(hidden_states):
            return super().forward(hidden_states, *args, **kwargs)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        norm = self.post_attention_layernorm
        x, residual = ops.residual_norm(hidden_states, attended, norm.weight, eps=norm.variance_epsilon)
        return self.mlp.moe(x, residual)[0]

    def ready(self, x: Tensor) -> bool:
        return self.untouched(self.post_attention_layernorm, self.mlp) and self.free(x) and self.mlp.ready(x)


class FusedGemma4Layer(Fused):
    """Gemma 4's decoder layer: every norm that adds to or joins a residual is one op, and so are router and experts."""

    def forward(self, hidden_states: Tensor, per_layer_input=None, shared_kv_states=None, *args, **kwargs):
        kwargs |= {"shared_kv_states": shared_kv_states}
        if args or not self.ready(hidden_states):
            return super().forward(hidden_states, per_layer_input, *args, **kwargs)
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            **{"position_embeddings": None, "attention_mask": None} | kwargs,
        )
        residual = norm_add(hidden_states, attended, self.post_attention_layernorm)
        output = self.mlp(self.pre_feedforward_layernorm(residual))
        if self.enable_moe_block:
            output = self.with_experts(output, residual)
        if not self.hidden_size_per_layer_input:
            return norm_add(residual, output, self.post_feedforward_layernorm, self.layer_scalar)
        residual = norm_add(residual, output, self.post_feedforward_layernorm)
        gated = self.act_fn(self.per_layer_input_gate(residual)) * per_layer_input
        output = self.per_layer_projection(gated)
        return norm_add(residual, output, self.post_per_layer_input_norm, self.layer_scalar)

    def with_experts(self, dense: Tensor, residual: Tensor) -> Tensor:
        """The norms of the dense MLP's output and of the experts' output, added."""
        router = self.router
        weights, experts = ops.gate(
            residual,
            router.proj.weight,
            norm_weight=router.scale * router.scalar_root_size,
            per_expert_scale=router.per_expert_scale,
            top_k=router.config.top_k_experts,
            eps=router.eps,
        )
        x = self.pre_feedforward_layernorm_2(residual)
        output = ops.experts(x, weights, experts, **expert_arguments(self.experts))
        dense_norm, norm = self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2
        one = torch.ones_like(weights[..., :1])
        slots = output.unsqueeze(-2)
        return ops.weighted_sum_dual_norm_add(slots, one, dense, dense_norm.weight, norm.weight, eps=norm.eps)

    def ready(self, x: Tensor) -> bool:
        bypassed = [self.post_attention_layernorm, self.post_feedforward_layernorm]
        if self.hidden_size_per_layer_input:
            bypassed.append(self.post_per_layer_input_norm)
        if not self.enable_moe_block:
            return self.untouched(*bypassed) and self.free(x)
        bypassed += [self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2, self.experts]
        return self.untouched(*bypassed, *self.router.modules()) and self.fits(x)


def norm_add(residual: Tensor, x: Tensor, norm: nn.Module, scalar: Tensor | None = None) -> Tensor:
    return ops.norm_add(residual, x, norm.weight, scalar, eps=norm.eps)


@functools.cache
def fused_class(original: type) -> type | None:
    """The class that fuses `original`, or None when we know none. It keeps its name: device maps go by it."""
    name = family_name(original)
    if name in BLOCKS:
        family = BLOCKS[name]
        base = FusedLlama4Block if family.returns == "output, logits" else FusedBlock
        own = {"family": family}
    elif name in PRE_NORM_LAYERS:
        base, own = FusedPreNormLayer, {}
    elif name in GEMMA4_LAYERS:
        base, own = FusedGemma4Layer, {}
    else:
        return None
    own |= {"original": original, "__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (base, original), own)
