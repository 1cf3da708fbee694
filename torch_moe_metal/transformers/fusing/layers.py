"""The fused decoder layers, each with a fused MoE block in it, and the norm after the last layer."""

import functools

import torch
from torch import Tensor, nn

from ..versions import CACHE, cache_argument
from . import tape
from .attention import warm_up_attention
from .attention_blocks import FusedGemma4Attention, FusedProjections
from .cache import grow_in_place
from .experts import why_not_fused
from .families import NOT_FUSED, RECORDS, class_name
from .fused import Fused, eps_of, original_class
from .hybrid_families import RECURRENT
from .linear_blocks import FusedMixer
from .members import member, prepared
from .moe_blocks import FusedBlock, FusedMlp
from .projections import FEW_TOKENS
from .records import Layer, LinearAttention, Norm, ShortConv

ops = torch.ops.moe_metal

#: The arguments of a decoder layer that mixers with a recurrent state do not get.
POSITIONS = ("position_embeddings", "position_ids", "use_cache")
#: The arguments that are inputs of a tape.
TAPE_INPUTS = ("attention_mask", "position_embeddings")


class IdentityAttention(nn.Module):
    """Replaces a layer's attention while the layer is warmed up. It returns its input."""

    def __init__(self, original: nn.Module):
        super().__init__()
        self.original = [original]  # a list, so that it is not a submodule

    def warm_up(self, tokens: int, dtype: torch.dtype) -> None:
        """Warm up the attention. If it is fused, it has its own warm-up call."""
        mixer = self.original[0]
        if not isinstance(mixer, FusedProjections) and not is_recurrent(original_class(mixer)):
            warm_up_attention(mixer, tokens, dtype)

    def forward(self, hidden_states: Tensor, **kwargs) -> tuple[Tensor, None]:
        return hidden_states, None


def keeps_state(mixer: nn.Module) -> bool:
    cls = original_class(mixer)
    return is_recurrent(cls) or NOT_FUSED.get(class_name(cls)) == RECURRENT


@functools.cache
def is_recurrent(mixer: type) -> bool:
    """Whether this class of mixers keeps a state instead of keys and values. Such mixers need no positions."""
    return isinstance(RECORDS.get(class_name(mixer)), LinearAttention | ShortConv)


class TapedLayer(Fused):
    """A decoder layer that is replayed for single tokens if its tape can be recorded."""

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        tape.forget(self)
        return self

    def mixer(self) -> tuple[str, nn.Module]:
        """The name of its attention, or of what is in place of it, and the module."""
        raise NotImplementedError

    def why_never_taped(self) -> str | None:
        """Why no token of this layer can be replayed, or None."""
        _, mixer = self.mixer()
        if isinstance(mixer, FusedMixer):
            return None
        if keeps_state(mixer):
            return "its mixer keeps a recurrent state"
        return None if isinstance(mixer, FusedProjections) else "its attention is not fused"


class FusedPreNormLayer(TapedLayer):
    """A decoder layer with a fused block or MLP. One op computes the residual addition after attention and the norm,
    and the op `experts` adds the second residual."""

    record: Layer

    def forward(self, hidden_states: Tensor, *args, attention_mask=None, position_embeddings=None, **kwargs):
        def forward() -> Tensor:
            return self.computed(hidden_states, *args, **kwargs, **positions)

        positions = {"attention_mask": attention_mask, "position_embeddings": position_embeddings}
        if args:
            return forward()
        return tape.computed(self, forward, hidden_states, attention_mask, position_embeddings, kwargs)

    def computed(self, hidden_states: Tensor, *args, attention_mask=None, position_embeddings=None, **kwargs) -> Tensor:
        """The forward without a tape."""
        kwargs["attention_mask"] = attention_mask
        if position_embeddings is not None:
            kwargs["position_embeddings"] = position_embeddings
        record, inner = self.record, self._modules
        mlp, norm = inner.get(record.mlp), inner[record.norms[1]]
        parts = None if args else self.ready(hidden_states, mlp, norm)
        if parts is None:
            return super().forward(hidden_states, *args, **kwargs)
        mixed = self.mixed(self.normed(record.norms[0], hidden_states), kwargs)
        factor = getattr(self, record.multiplier) if record.multiplier else 1.0
        mixed = scaled(mixed, factor, norm)
        x, residual = ops.residual_norm(hidden_states, mixed, record.norm_weight(norm), eps=eps_of(norm))
        if isinstance(mlp, FusedMlp):
            return add(residual, scaled(mlp(x), factor, norm), norm)
        if factor != 1:
            routing, _ = parts
            routing["scaling_factor"] = routing.get("scaling_factor", 1.0) * factor
        if record.shared:
            parts[1]["shared"] = scaled(inner[record.shared](x), factor, norm)
        return mlp.moe(x, parts, residual)[0]

    def ready(self, x: Tensor, mlp: nn.Module | None, norm: nn.Module) -> tuple[dict, dict] | None:
        """The arguments of `gate` and `experts`, empty with a dense MLP; or None if the original forward must run."""
        if isinstance(mlp, FusedBlock):
            return mlp.parts(x, self, mlp, norm)
        known = isinstance(mlp, FusedMlp) and self.are_unmodified(norm) and self.is_plain_inference(x)
        return ({}, {}) if known and mlp.still_selected() else None  # the layer may have no configuration

    def mixer(self) -> tuple[str, nn.Module]:
        modules = self._modules
        for name in self.record.mixers:
            if modules.get(name) is not None:
                break
        return name, modules[name]

    def mixed(self, x: Tensor, kwargs: dict) -> Tensor:
        _, mixer = self.mixer()
        cls = original_class(mixer)
        if is_recurrent(cls):
            kwargs = {name: value for name, value in kwargs.items() if name not in POSITIONS}
            if CACHE in kwargs:
                kwargs = kwargs | {cache_argument(cls): kwargs.pop(CACHE)}
            output = mixer(x, **kwargs)
        else:
            grow_in_place(kwargs.get(CACHE), mixer)
            output = mixer(hidden_states=x, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    def normed(self, name: str, x: Tensor) -> Tensor:
        norm = self._modules[name]
        if not self.are_unmodified(norm):
            return norm(x)
        return ops.norm(x, self.record.norm_weight(norm), eps=eps_of(norm))

    def _warmup_call(self, tokens: int, dtype: torch.dtype) -> None:
        name, mixer = self.mixer()
        width = len(self._modules[self.record.norms[1]].weight)
        self._modules[name] = identity = IdentityAttention(mixer)
        self(torch.empty(1, tokens, width, dtype=dtype, device="meta"))
        identity.warm_up(tokens, dtype)


def add(residual: Tensor, x: Tensor, norm: nn.Module) -> Tensor:
    """residual + x. For few tokens by an op of ours that a tape can replay, although its norm is not used."""
    if torch.compiler.is_compiling() or x.numel() > FEW_TOKENS * x.shape[-1]:
        return residual + x
    return ops.residual_norm(residual, x, member(norm, "weight"), eps=eps_of(norm))[1]


class FusedGemma4Layer(TapedLayer):
    """Gemma 4's decoder layer. Each norm is one op together with its residual addition, and so are router and
    experts."""

    @classmethod
    def why_left(cls, module: nn.Module) -> str | None:
        if "experts" not in module._modules:
            return None
        return cls.why_replaced(module, ("experts",)) or why_not_fused(module._modules["experts"])

    def mixer(self) -> tuple[str, nn.Module]:
        return "self_attn", self._modules["self_attn"]

    def why_never_taped(self) -> str | None:
        attention = self._modules["self_attn"]
        if isinstance(attention, FusedGemma4Attention) and attention.is_shared():
            return "other layers use its keys and values"
        return "it has an input of its own" if self.hidden_size_per_layer_input else super().why_never_taped()

    def forward(self, hidden_states: Tensor, per_layer_input=None, shared_kv_states=None, *args, **kwargs):
        def forward() -> Tensor:
            return self.computed(hidden_states, per_layer_input, *args, shared_kv_states=shared_kv_states, **kwargs)

        if args or per_layer_input is not None:
            return forward()
        others = {name: value for name, value in kwargs.items() if name not in TAPE_INPUTS}
        mask, angles = (kwargs.get(name) for name in TAPE_INPUTS)
        return tape.computed(self, forward, hidden_states, mask, angles, others)

    def computed(self, hidden_states: Tensor, per_layer_input: Tensor | None, *args, **kwargs) -> Tensor:
        """The forward without a tape."""
        arguments = None if args else self.ready(hidden_states)
        if arguments is None:
            return super().forward(hidden_states, per_layer_input, *args, **kwargs)
        inner = self._modules
        grow_in_place(kwargs.get(CACHE), inner["self_attn"])
        attended, _ = inner["self_attn"](
            hidden_states=self.normed("input_layernorm", hidden_states),
            **{"position_embeddings": None, "attention_mask": None} | kwargs,
        )
        residual = norm_add(hidden_states, attended, inner["post_attention_layernorm"])
        output = inner["mlp"](self.normed("pre_feedforward_layernorm", residual))
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
        output = ops.experts(self.normed("pre_feedforward_layernorm_2", residual), weights, ids, **arguments)
        dense_norm, norm = inner["post_feedforward_layernorm_1"], inner["post_feedforward_layernorm_2"]
        return ops.weighted_sum_dual_norm_add(
            output.unsqueeze(-2),
            weights_of(1.0, weights.shape[:-1], norm),
            dense,
            member(dense_norm, "weight"),
            member(norm, "weight"),
            eps=norm.eps,
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
        known = (
            self.are_unmodified(*read, *inner["router"].modules())
            and self.is_plain_inference(x)
            and self.still_selected()
        )
        return self.experts_part(x, experts) if known else None


def scaled(x: Tensor, factor: float, norm: nn.Module) -> Tensor:
    """x * factor. For few tokens by an op of ours that a tape can replay."""
    if factor == 1:
        return x
    if torch.compiler.is_compiling() or x.numel() > FEW_TOKENS * x.shape[-1]:
        return x * factor
    return ops.weighted_sum(x.unsqueeze(-2), weights_of(factor, x.shape[:-1], norm))


def weights_of(value: float, sizes: torch.Size, norm: nn.Module) -> Tensor:
    """This value [..., 1] in float32. For few tokens it is prepared, once for each norm, since a tape cannot make
    it."""
    # In this order: numel() would make a size constant while compiling.
    if torch.compiler.is_compiling() or (count := sizes.numel()) > FEW_TOKENS:
        return torch.full((*sizes, 1), value, device=norm.weight.device)
    found = prepared(norm, "weight", lambda weight: weight.new_full((FEW_TOKENS,), value, dtype=torch.float32))
    return found[:count].view(*sizes, 1)


def norm_add(residual: Tensor, x: Tensor, norm: nn.Module, scalar: Tensor | None = None) -> Tensor:
    return ops.norm_add(residual, x, member(norm, "weight"), scalar, eps=eps_of(norm))


class FusedNorm(Fused):
    """The norm after the last layer. Other norms are part of the fused layers."""

    record: Norm
    config: object  # of its model, which selects the experts

    def forward(self, hidden_states: Tensor) -> Tensor:
        ours = self.is_plain_inference(hidden_states) and self.still_selected()
        if not ours:
            return super().forward(hidden_states)
        return ops.norm(hidden_states, self.record.norm_weight(self), eps=eps_of(self))

    def _warmup_call(self, tokens: int, dtype: torch.dtype) -> None:
        self(torch.empty(1, tokens, len(self.weight), dtype=dtype, device="meta"))
