"""The fused mixers with a recurrent state: joined projections, and one op for all that is between them and the
projection of the output."""

import torch
from torch import Tensor, nn

from ...packed_layers import Linear
from ...refused import refuses_fusion
from ..versions import cache_given
from .fused import JoinedProjections, eps_of
from .linear_cache import MOST_DRAFTED, WITHOUT_CACHE, Sizes, Step
from .linear_steps import leave, step_in
from .members import member
from .projections import project
from .records import LinearAttention, Mamba2, ShortConv

ops = torch.ops.moe_metal

#: transformers' names of the activations that the ops compute.
POINTWISE = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
#: Arguments for packed sequences.
PACKED = ("cu_seq_lens_q", "seq_idx")


class FusedMixer(JoinedProjections):
    """A mixer with a state in the cache."""

    record: LinearAttention | ShortConv
    more_homes = (Linear.__module__, "torch.nn.modules.conv")
    borrows_config = False  # whether `patch` gave it the configuration of its model

    def forward(self, hidden_states: Tensor, *args, attention_mask: Tensor | None = None, **kwargs):
        cache, step, weights = cache_given(kwargs), None, self.weights()
        known = not args and not any(kwargs.get(name) is not None for name in PACKED)
        if known and self.is_ready(hidden_states, attention_mask, weights):
            step = WITHOUT_CACHE
            if cache is not None:
                step = step_in(cache, self.layer_idx, hidden_states, self.kept_sizes())
        if step is None:
            leave(cache, self.layer_idx)
            return super().forward(hidden_states, *args, attention_mask=attention_mask, **kwargs)
        x = hidden_states
        if attention_mask is not None:
            x = (x * attention_mask.unsqueeze(-1)).to(x.dtype)
        output = self.mix(x, attention_mask, step, weights)
        if step.done is not None:
            step.done()
        return self.product(output, self._modules[self.record.output])

    def is_ready(self, x: Tensor, mask: Tensor | None, weights: tuple[Tensor | None, ...]) -> bool:
        """Whether our op can compute this call."""
        known = x.dim() == 3 and x.shape[1] > 0 and (mask is None or mask.shape == x.shape[:2])
        return (
            known
            and self.knows_activations()
            and self.are_unmodified(*self.read())
            and self.is_plain_inference(x)
            and self.still_selected()
            and all(weight is None or weight.dtype in (x.dtype, torch.float32) for weight in weights)
        )

    def knows_activations(self) -> bool:
        return True

    def read(self) -> list[nn.Module]:
        """The submodules whose forward is not called."""
        raise NotImplementedError

    def weights(self) -> tuple[Tensor | None, ...]:
        """The parameters that the op gets."""
        raise NotImplementedError

    def kept_sizes(self) -> Sizes:
        raise NotImplementedError

    def mix(self, x: Tensor, mask: Tensor | None, step: Step, weights: tuple[Tensor | None, ...]) -> Tensor:
        """All but the projection of the output. -> [B, T, H]"""
        raise NotImplementedError

    def _warmup_call(self, tokens: int, dtype: torch.dtype) -> None:
        width = self.parts(self.joined)[0].in_features
        x = torch.empty(1, tokens, width, dtype=dtype, device="meta")
        if not refuses_fusion(x):
            self.mix(x, None, self.warmup_step(tokens, dtype), self.weights())

    def warmup_step(self, tokens: int, dtype: torch.dtype) -> Step:
        sizes = self.kept_sizes()
        past, kept = (
            torch.empty(1, rows, sizes.channels, dtype=dtype, device="meta") for rows in (sizes.taps - 1, tokens)
        )
        state = None
        if sizes.heads:
            state = torch.empty(1, *sizes.state(), device="meta")
            state = state.mT if sizes.transposed else state
        return Step(past, kept, state, continues=True)


class FusedLinearAttention(FusedMixer):
    """The gated delta rule."""

    record: LinearAttention

    @property
    def joined(self) -> tuple[str, ...]:
        return self.record.projections

    @classmethod
    def why_left(cls, module: nn.Module) -> str | None:
        record, activation = cls.record, module.activation
        if activation not in POINTWISE:
            return f"its activation is {activation}"
        return cls.why_replaced(module, (*record.projections, *record.read, record.norm))

    def knows_activations(self) -> bool:
        gate = getattr(self._modules[self.record.norm], "activation", "silu")
        return self.activation in POINTWISE and gate in POINTWISE

    def read(self) -> list[nn.Module]:
        return self.parts((*self.record.projections, *self.record.read, self.record.norm))

    def weights(self) -> tuple[Tensor | None, ...]:
        conv = self._modules["conv1d"]
        weight = member(conv, "weight").squeeze(1)
        return *self.record.parameters(self), weight, conv._parameters["bias"]

    def kept_sizes(self) -> Sizes:
        channels, _, taps = member(self._modules["conv1d"], "weight").shape
        return Sizes(channels, taps, self.record.sizes(self), self.record.by_channel)

    def mix(self, x: Tensor, mask: Tensor | None, step: Step, weights: tuple[Tensor | None, ...]) -> Tensor:
        record = self.record
        tensors = (*record.split(self, *project(x, self.parts(record.projections))), *weights, step.past)
        options = self.options(step, x.shape[1]) | {"eps": eps_of(self._modules[record.norm])}
        if step.replay:
            options["replay"] = step.replay
        activation = POINTWISE[self.activation]
        if activation != "silu":
            options["activation"] = activation
        mask = self.mask_of_op(mask)
        return ops.linear_attention_(*tensors, mask, None, step.state, step.kept, step.log, **options).flatten(2)

    def options(self, step: Step, tokens: int) -> dict:
        activation = POINTWISE[self._modules[self.record.norm].activation]
        gate = {} if activation == "silu" else {"gate_activation": activation}
        return self.record.decay(self) | gate

    def mask_of_op(self, mask: Tensor | None) -> Tensor | None:
        """Masked inputs are 0, and so are their q, k and v."""
        return None


class FusedMamba2(FusedLinearAttention):
    """Mamba 2's sum. A bias of its convolution makes masked inputs different from 0."""

    record: Mamba2

    def kept_sizes(self) -> Sizes:
        return super().kept_sizes()._replace(transposed=True)

    def mask_of_op(self, mask: Tensor | None) -> Tensor | None:
        return None if mask is None else mask.bool()

    def options(self, step: Step, tokens: int) -> dict:
        """transformers limits the steps in prompts only, and verifies drafts as a prompt. Here drafts are computed like
        single tokens, so that they give the same ones."""
        options = {"rule": "sum", "scale": 1.0, "qk_eps": None, "order": "vkq", "gate_first": True}
        drafted = step.log is not None and tokens <= MOST_DRAFTED
        if not (step.continues and (tokens == 1 or drafted)):
            least, most = self.time_step_limit
            options |= {"step_min": least, "step_max": None if most == float("inf") else most}
        return options


class FusedShortConv(FusedMixer):
    """LFM2's convolution of the input times a gate, times another gate."""

    record: ShortConv
    joined = ("in_proj",)

    @classmethod
    def why_left(cls, module: nn.Module) -> str | None:
        return cls.why_replaced(module, cls.record.read)

    def read(self) -> list[nn.Module]:
        return self.parts(self.record.read)

    def weights(self) -> tuple[Tensor | None, ...]:
        conv = self._modules["conv"]
        return member(conv, "weight").squeeze(1), conv._parameters["bias"]

    def kept_sizes(self) -> Sizes:
        channels, _, taps = member(self._modules["conv"], "weight").shape
        return Sizes(channels, taps)

    def mix(self, x: Tensor, mask: Tensor | None, step: Step, weights: tuple[Tensor | None, ...]) -> Tensor:
        before, after, y = self.product(x, self._modules["in_proj"]).chunk(3, -1)
        return ops.short_conv_(y, *weights, before, after, step.past, step.kept)
