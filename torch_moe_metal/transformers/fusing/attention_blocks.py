"""The fused attention: joined projections, and rope with its norms as one op. `attention.py` then attends."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...formats import FORMATS
from ...packed_layers import Linear, dequantized
from ...refused import refuses_fusion
from ..versions import CACHE, take_cache, updated, updated_if_paged
from .attention import (
    FEW_QUERIES,
    attention_forward,
    key_heads,
    paged_attention,
    shows_attentions,
    warm_up_attention,
    why_not_ours,
)
from .cache import Cache, Room, grow_in_place, joined_rows, room_of
from .experts import NAME
from .fused import JoinedProjections, eps_of, rms_norm
from .members import member, prepared, setting
from .projections import product, project
from .records import Attention

ops = torch.ops.moe_metal

#: The arguments of a weight's data, scale and offset.
WEIGHT = ("weight", "scale", "offset")


class FusedProjections(JoinedProjections):
    """Attention with joined projections."""

    record: Attention
    more_homes = (Linear.__module__,)
    is_paged = False  # whether transformers' manager of continuous batching runs it

    @classmethod
    def why_left(cls, module: nn.Module) -> str | None:
        if getattr(module.config, "clip_qkv", None) is not None:
            return "it clips its queries, keys and values"
        if getattr(module, "is_kv_shared_layer", False):
            return "it uses the keys and values of another layer"
        return cls.why_replaced(module, cls.joined)

    def forward(self, hidden_states: Tensor, position_embeddings=None, attention_mask=None, **kwargs):
        record, rotates, cache = self.record, self.record.rotates(self), take_cache(kwargs, self.is_paged)
        projections, norms = self.parts(self.joined), self.parts(record.norms)
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
        if record.temperature is not None:  # it depends on the length of the cache before this call
            temperature = record.temperature(self, hidden_states, cache, kwargs.get("position_ids"))
        angles = angles_of(position_embeddings, record.angles) if rotates else None
        room = self.room(hidden_states, cache, attention_mask, kwargs) if temperature is None else None
        if room is not None:
            output, gate = self.over_room(room, hidden_states, projections, norms, angles, attention_mask)
            weights = None
            cache.layers[self.layer_idx].show()
        else:
            q, *stored, gate = self.states(hidden_states, projections, norms, angles)
            if temperature is not None:
                q = (q * temperature).to(q.dtype)
            if cache is not None:
                stored = updated(cache, *stored, self.layer_idx, kwargs)
            output, weights = self.attend(q, *stored, attention_mask, **kwargs)
        if gate is not None:
            output = gated(output, gate.reshape(*output.shape[:-1], -1), record.gate)
        output = output.reshape(*hidden_states.shape[:-1], -1)
        projection = self._modules[record.output]
        return (product(output, projection) if self.are_unmodified(projection) else projection(output)), weights

    def warm_up_products(self, tokens: int, dtype: torch.dtype) -> None:
        """On meta no projections are joined; a joined product has the kernel of each of them."""
        for layer in self.parts((*self.joined, self.record.output)):
            if self.are_unmodified(layer):
                product(torch.empty(1, tokens, layer.in_features, dtype=dtype, device="meta"), layer)

    def room(self, x: Tensor, cache: Cache | None, mask: Tensor | None, kwargs: dict) -> Room | None:
        """The room of the cache that `over_room` can use for this token, or None."""
        if x.shape[1] != 1 or self.is_paged or self.training or not self.takes_room(kwargs):
            return None
        ours = setting(self.config, "_attn_implementation_internal") == NAME and not shows_attentions(self)
        if not ours or kwargs.get("output_attentions") or why_not_ours(x, x, x, None, kwargs):
            return None
        known = mask is None or (mask.dim() == 4 and mask.dtype in (torch.bool, torch.float32, x.dtype))
        return room_of(cache, self) if known and (mask is None or mask.shape[-1] > 1) else None

    def takes_room(self, kwargs: dict) -> bool:
        """Whether there is an `over_room` for this attention."""
        raise NotImplementedError

    def over_room(
        self, room: Room, x: Tensor, projections: list, norms: list, angles: tuple | None, mask: Tensor | None
    ):
        """Append the key and the value of a token, and attend. Returns the weighted sums [B, 1, A, V], and the gate."""
        raise NotImplementedError

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


def gated(x: Tensor, gate: Tensor, function: str | Callable[[Tensor], Tensor]) -> Tensor:
    """x * function(gate), with gates [B, T, A, V] or [B, T, A, 1]."""
    return ops.glu(gate.expand(x.shape), x, activation="sigmoid") if function == "sigmoid" else x * function(gate)


def with_neighbours_paired(heads: Tensor) -> Tensor:
    """Reorder heads whose pairs are elements i and i + D / 2, so that pairs are 2i and 2i + 1. That is the order of
    models with complex angles, and a cache may contain keys that they computed."""
    return heads.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


class FusedAttention(FusedProjections):
    """One product for queries, keys, values and a gate, and one op that normalises and rotates queries and keys."""

    joined = ("q_proj", "k_proj", "v_proj", "g_proj")
    norms_values = False

    def takes_room(self, kwargs: dict) -> bool:
        return self.record.angles != "complex"

    def over_room(
        self, room: Room, x: Tensor, projections: list, norms: list, angles: tuple | None, mask: Tensor | None
    ):
        q, k, v, gate = self.heads(*project(x, projections))
        weights = self.norm_weights(norms, q, k)
        options = {"eps": eps_of(norms[0]), "norms_last": not self.record.norms_first} if norms else {}
        options |= {"v_scale": self.__dict__.get("v_scale", 1.0), "norms_v": self.norms_values}
        q = ops._rope_into(q, k, v, *(angles or (None, None)), room, *weights, **options)
        return ops._attention_over(q, room, mask, self._parameters.get("sinks"), scale=self.scaling), gate

    def norm_weights(self, norms: list, q: Tensor, k: Tensor) -> list[Tensor]:
        weights = [self.record.norm_weight(norm) for norm in norms[:2]]
        if weights and len(weights[0]) != self.head_dim:  # one norm for all heads of a token
            weights = [weight.view(heads.shape[2:]) for weight, heads in zip(weights, (q, k), strict=True)]
        return weights

    def states(self, x: Tensor, projections: list, norms: list, angles: tuple[Tensor, Tensor] | None) -> tuple:
        q, k, v, gate = self.heads(*project(x, projections))
        q, k = self.rope(q, k, angles, norms)
        v = (ops.norm(v, eps=eps_of(norms[0])) if self.norms_values else v).transpose(1, 2)
        scale = self.__dict__.get("v_scale", 1.0)  # MiMo's
        return q, k, v if scale == 1.0 else v * scale, gate

    def heads(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None) -> tuple:
        """Queries, keys and values [B, T, heads, width] from the projections, and the gate."""
        width = self.head_dim
        v = heads_of(v, self.__dict__.get("v_head_dim", width))
        if self.record.gate is None or gate is not None:
            return heads_of(q, width), heads_of(k, width), v, gate
        q, gate = heads_of(q, 2 * width).chunk(2, -1)
        return q, heads_of(k, width), v, gate

    def rope(self, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor] | None, norms: list) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, T, heads, D], normalised and rotated -> [B, heads, T, D]"""
        record = self.record
        first = norms and record.norms_first and angles is not None
        if angles is None:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        elif first:
            q, k = ops.rope(q, k, *angles, *self.norm_weights(norms, q, k), eps=eps_of(norms[0]))
        else:
            complex_angles = record.angles == "complex"
            q, k = ops.rope(q, k, *angles, interleaved=complex_angles)
            if complex_angles:
                q, k = with_neighbours_paired(q), with_neighbours_paired(k)
        if norms and not first:
            q, k = (
                ops.norm(x, record.norm_weight(norm), eps=eps_of(norm))
                for x, norm in zip((q, k), norms[:2], strict=True)
            )
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs) -> tuple[Tensor, Tensor | None]:
        if self.record.window:
            owner = self if self.record.window == "module" else self.config
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
        if not refuses_fusion(q):
            self.rope(q, k, (cos, cos) if self.record.rotates(self) else None, self.parts(self.record.norms))
        self.warm_up_products(tokens, dtype)
        warm_up_attention(self, tokens, dtype)


def heads_of(x: Tensor, width: int) -> Tensor:
    """[B, T, heads * width] -> [B, T, heads, width]"""
    return x.view(*x.shape[:-1], -1, width)


def of_heads(x: Tensor, weight: dict) -> Tensor:
    """[B, T, A, H] times the weights [A, N, H] -> [B, T, A, N]"""
    return ops._linear_of_heads(x.flatten(0, 1), **weight).unflatten(0, x.shape[:2])


class FusedGemma4Attention(FusedAttention):
    """Gemma 4 also normalises the values. Without v_proj, they are the keys before norm and rotation."""

    norms_values = True  # with the epsilon of queries and keys

    def heads(self, q: Tensor, k: Tensor, v: Tensor | None = None) -> tuple:
        return super().heads(q, k, k if v is None else v)

    def is_shared(self) -> bool:
        """Whether other layers use its keys and values. Those of the last layers are stored in any case."""
        return self.store_full_length_kv and self.config.num_kv_shared_layers > 0

    def takes_room(self, kwargs: dict) -> bool:
        asked = self.store_full_length_kv and kwargs.get("return_shared_kv_states")  # by an assistant
        return not (self.is_shared() or asked)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shared_kv_states=None, **kwargs):
        if self.store_full_length_kv:
            shared_kv_states[self.layer_type] = k, v
        return super().attend(q, k, v, mask, **kwargs)


class FusedLatentAttention(FusedProjections):
    """MLA: the cache stores latents, and the part of the keys that is rotated."""

    joined = ("q_proj", "q_a_proj", "kv_a_proj_with_mqa", "g_proj")  # it has one of the first two

    def states(self, x: Tensor, projections: list, norms: list, angles: tuple[Tensor, Tensor] | None) -> tuple:
        q, latent, k_rot, gate = self.heads(*project(x, projections), norms=norms)
        latent = rms_norm(latent, norms[-1]).transpose(1, 2)
        if angles is None:
            q, k_rot = q.transpose(1, 2), k_rot.transpose(1, 2)
        else:
            q, q_rot = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
            q_rot, k_rot = self.rope(q_rot, k_rot, *angles)
            q = torch.cat((q.transpose(1, 2), q_rot), -1)
        return q, latent, k_rot, gate

    def heads(self, q: Tensor, latent: Tensor, gate: Tensor | None = None, *, norms: list) -> tuple:
        """Queries [B, T, A, D], the latent, which is not normalised yet, and the part of the keys that is rotated, both
        [B, T, 1, width], from the projections; and the gate."""
        if len(norms) > 1:
            layer = self._modules["q_b_proj"]
            q = rms_norm(q, norms[0])
            q = product(q, layer) if self.are_unmodified(layer) else layer(q)
        latent, k_rot = latent.unsqueeze(2).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        return heads_of(q, self.qk_head_dim), latent, k_rot, gate

    def takes_room(self, kwargs: dict) -> bool:
        return self.is_plain_expansion()

    def over_room(
        self, room: Room, x: Tensor, projections: list, norms: list, angles: tuple | None, mask: Tensor | None
    ):
        q, latent, k_rot, gate = self.heads(*project(x, projections), norms=norms)
        q, q_rot = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        to_keys, to_values = self.expansions(x)
        norm, q = norms[-1], ops._linear_of_heads(q.squeeze(1), **to_keys).unsqueeze(1)
        options = (
            {"interleaved": self.pairs_neighbours(), "pairs_stay": self.record.angles == "complex"} if angles else {}
        )
        q = ops._rope_into(
            q_rot, k_rot, latent, *(angles or (None, None)), room, v_norm_weight=member(norm, "weight"), q_first=q,
            eps=eps_of(norm), norms_v=True, **options,
        )  # fmt: skip
        sums = ops._attention_over(q, room, mask, scale=self.scaling)
        return ops._linear_of_heads(sums.squeeze(1), **to_values).unsqueeze(1), gate

    def pairs_neighbours(self) -> bool:
        """Whether the elements of a pair are neighbours. Bailing's configuration has no such setting: they are."""
        return self.record.angles == "complex" or bool(getattr(self.config, "rope_interleave", True))

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        rotated = ops.rope(q, k, cos, sin, interleaved=self.pairs_neighbours())
        return tuple(map(with_neighbours_paired, rotated)) if self.record.angles == "complex" else rotated

    def attend(self, q: Tensor, latent: Tensor, k_rot: Tensor, mask: Tensor | None, **kwargs):
        keys = joined_rows(latent, k_rot) if self.may_absorb(q, latent, mask, kwargs) else None
        if keys is None:
            return super().attend(q, *self.expand_kv(latent, k_rot), mask, **kwargs)
        to_keys, to_values = self.expansions(latent)
        q, q_rot = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        q = torch.cat((of_heads(q.transpose(1, 2), to_keys).transpose(1, 2), q_rot), -1)
        output, weights = super().attend(q, keys, latent, mask, **kwargs)
        return of_heads(output, to_values), weights

    def may_absorb(self, q: Tensor, latent: Tensor, mask: Tensor | None, kwargs: dict) -> bool:
        """Whether to multiply the queries by the expansion of keys, and attend to the latents directly. For few queries
        this is cheaper, because the cost of the expansion then does not depend on the length of the context."""
        if torch.compiler.is_compiling() or not q.shape[2] <= min(FEW_QUERIES, latent.shape[2] - 1):
            return False
        shows_weights = kwargs.get("output_attentions") or self.config.output_attentions
        if self.config._attn_implementation != NAME or shows_weights or (self.training and self.attention_dropout):
            return False
        return self.is_plain_expansion() and why_not_ours(q, latent, latent, mask, kwargs) is None

    def is_plain_expansion(self) -> bool:
        expansion = self._modules["kv_b_proj"]
        return self.are_unmodified(expansion) and expansion.bias is None

    def expansions(self, x: Tensor) -> tuple[dict, dict]:
        """The weights that multiply the unrotated part of the queries, [A, R, N], and the weighted sums of latents,
        [A, V, R], of each head, as arguments of `_linear_of_heads`.

        They are the halves of kv_b_proj. That of the keys is used transposed, so it is prepared once, dense. That of
        the values is read as it is stored, unless the rows of several heads share scales.
        """
        layer, sizes = self._modules["kv_b_proj"], [self.qk_nope_head_dim, self.v_head_dim]
        packed = isinstance(layer, Linear)
        as_stored = not packed or FORMATS[layer.format].rows_per_scale == 1
        parts = layer.parts("weight") if packed else [member(layer, "weight"), None, None]

        def halves(weight: Tensor) -> list[Tensor]:
            return list(weight.view(self.num_heads, sum(sizes), -1).split(sizes, 1))

        def prepare(weight: Tensor) -> Tensor:
            keys, values = halves(dequantized(*parts, layer.format, x) if packed else weight)
            return torch.cat([keys.mT.flatten()] + ([] if as_stored else [values.flatten()]))

        flat = prepared(layer, layer.packing["weight"][0] if packed else "weight", prepare, x.dtype)
        keys = flat[: self.num_heads * sizes[0] * self.kv_lora_rank].view(self.num_heads, self.kv_lora_rank, sizes[0])
        if not as_stored:
            return {"weight": keys}, {"weight": flat[keys.numel() :].view(self.num_heads, sizes[1], self.kv_lora_rank)}
        values = {name: halves(part)[1] for name, part in zip(WEIGHT, parts, strict=True) if part is not None}
        return {"weight": keys}, values | ({"format": layer.format} if packed else {})

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
        if not refuses_fusion(q):
            if self.record.rotates(self):
                self.rope(q, k, cos, cos)
            rms_norm(latent, self._modules["kv_a_layernorm"])
        self.warm_up_products(tokens, dtype)
        warm_up_attention(self, tokens, dtype)
