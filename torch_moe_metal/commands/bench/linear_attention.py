"""Layers of linear attention in the sizes of models: the arguments of `linear_attention_` and `short_conv_`, and the
same in plain PyTorch, by transformers' own functions."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from math import prod
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from ...recurrence import ACTIVATIONS

OPS = ("linear_attention_", "short_conv_")
TOKENS = (1, 512)  # the default of --tokens
GIVEN = ("gate", "log_rate", "decay_bias", "norm_weight", "conv_weight", "past", "state", "kept")


@dataclass(frozen=True)
class Layer:
    """As a model calls the op."""

    heads: tuple[int, int, int, int] = (1, 1, 1, 1)  # J, A, D, V
    taps: int = 4
    letters: dict[str, str] = field(default_factory=dict)  # of arguments whose shapes differ from the table's
    given: tuple[str, ...] = GIVEN
    options: dict = field(default_factory=dict)

    def dims(self, T: int) -> dict[str, int]:
        """X: the size of a group of heads that is normalised together."""
        J, A, D, V = self.heads
        kept = min(T, self.taps - 1)
        return {"B": 1, "T": T, "J": J, "A": A, "D": D, "V": V, "W": self.taps, "R": kept, "X": A * V // J}


MAMBA = {"rule": "sum", "order": "vkq", "gate_first": True, "scale": 1.0, "qk_eps": None}
BY_CHANNEL = {"decay": "BTAD", "decay_bias": "AD"}
LAYERS = {
    "qwen3.5": Layer((16, 32, 128, 128)),
    "kimi": Layer((32, 32, 128, 128), letters=BY_CHANNEL, options={"gate_activation": "sigmoid"}),
    "mamba2": Layer((8, 64, 128, 64), 4, {"norm_weight": "JX"}, (*GIVEN, "conv_bias", "skip"), MAMBA),
}
SHORT_CONV = Layer(taps=3, given=("input_gate", "output_gate", "past", "kept"))  # LFM2's


def layer_of(op: str, which: str) -> Layer | None:
    """None for other ops."""
    return {"linear_attention_": LAYERS.get(which, LAYERS["qwen3.5"]), "short_conv_": SHORT_CONV}.get(op)


def of_projections(call, noise: Callable[..., Tensor]) -> dict[str, Tensor]:
    """The arguments that are views of one projection, as in a layer."""
    B, T, C = call.size("BTC")
    if call.op == "short_conv_":
        return dict(zip(("input_gate", "output_gate", "x"), noise(B, T, 3, C).unbind(2), strict=True))
    shapes = {name: call.size(call.shapes[name]) for name in "qkv"}
    order = call.options.get("order", "qkv")
    parts = noise(B, T, C).split([prod(shapes[name][2:]) for name in order], -1)
    return {name: part.view(shapes[name]) for name, part in zip(order, parts, strict=True)}


# ------------------------------------------------------------------------------------------------ in plain PyTorch


def as_in_transformers(one_set: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same arguments with transformers' cache: the last W inputs of the convolution [B, C, W], in memory of its
    own, like the state."""
    found = {name: tensor for name, tensor in one_set.items() if name not in ("past", "kept")}
    found["conv_state"] = F.pad(one_set["past"].mT, (1, 0))
    return found | ({"state": one_set["state"].clone()} if "state" in found else {})


@functools.cache
def models() -> tuple[ModuleType, ...]:
    """The files of transformers whose functions a layer calls: per head, per channel, and Mamba 2's."""
    names = ("qwen3_5_moe", "kimi_linear", "nemotron_h")
    return tuple(import_module(f"transformers.models.{name}.modeling_{name}") for name in names)


def convolution(x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """transformers' causal_conv1d_update, which its layers also use for prompts, in other words. x [B, C, T]"""
    rows = torch.cat([conv_state, x], -1)
    conv_state.copy_(rows[..., -conv_state.shape[-1] :])
    y = F.conv1d(rows, weight.unsqueeze(1), bias, groups=x.shape[1])[..., -x.shape[-1] :]
    return ACTIVATIONS[activation](y)


def joined(*parts: Tensor) -> Tensor:
    """[B, T, C], of which these are views, one after the other."""
    (B, T), C = parts[0].shape[:2], sum(part.shape[2:].numel() for part in parts)
    return parts[0].as_strided((B, T, C), (*parts[0].stride()[:2], 1), parts[0].storage_offset())


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, activation: str, gate_first: bool) -> Tensor:
    """As in transformers, in float32; of groups of heads if the weight has a row for each."""
    rows, factor = x.float(), ACTIVATIONS[activation](gate.float())
    rows = rows * factor if gate_first else rows
    groups = rows.reshape(*rows.shape[:2], *weight.shape) if weight.dim() == 2 else rows
    normed = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-6)
    normed = (weight * normed.to(x.dtype)).view(x.shape)
    return (normed if gate_first else normed * factor).to(x.dtype)


def delta(q: Tensor, k: Tensor, v: Tensor, decay, beta, log_rate, decay_bias, state: Tensor) -> Tensor:
    """Qwen3.5's and Kimi's: for one token the recurrence, else chunks of 64 tokens. The new state is copied."""
    (by_head, by_channel, _), one, channels = models(), q.shape[1] == 1, decay.dim() == 4
    if channels:
        rule = by_channel.recurrent_kimi_delta_attention if one else by_channel.chunk_kimi_delta_attention
    else:
        rule = by_head.torch_recurrent_gated_delta_rule if one else by_head.torch_chunk_gated_delta_rule
    rate = log_rate.float().exp()
    g = -(rate.unsqueeze(-1) if channels else rate) * F.softplus(decay.float() + decay_bias)
    output, new = rule(q, k, v, g=g, beta=beta.sigmoid(), initial_state=state, output_final_state=True,
                       use_qk_l2norm_in_kernel=True)  # fmt: skip
    state.copy_(new)
    return output


def summed(q: Tensor, k: Tensor, v: Tensor, decay, log_rate, decay_bias, skip, state: Tensor) -> Tensor:
    """NemotronH's. Its states are [B, A, V, D]."""
    (*_, mamba), (B, T, A, V) = models(), v.shape
    D, rate, steps = q.shape[-1], -log_rate.float().exp(), {"dt_bias": decay_bias, "dt_softplus": True}
    if T == 1:
        steps["dt_bias"] = decay_bias[:, None].expand(-1, V)
        dt, rates = decay.transpose(1, 2).expand(-1, -1, V), rate[:, None, None].expand(-1, V, D)
        output = mamba.mamba2_selective_state_update(
            state.mT, v[:, 0], dt, rates, k[:, 0], q[:, 0], skip[:, None].expand(-1, V), **steps
        )
        return output.view(B, T, A, V)
    output, new = mamba.mamba2_chunk_scan(
        v, decay, rate, k, q, chunk_size=128, D=skip, initial_states=state.mT, return_final_states=True, **steps
    )
    state.mT.copy_(new)
    return output.view(B, T, A, V)


def layer(q, k, v, decay, beta=None, gate=None, log_rate=None, decay_bias=None, norm_weight=None, skip=None,
          conv_weight=None, conv_bias=None, state=None, conv_state=None, *, rule="delta", order="qkv",
          gate_activation="silu", gate_first=False, scale=None, qk_eps=None) -> Tensor:  # fmt: skip
    """A layer between its projections. `scale` and `qk_eps` are those of the models."""
    parts = {"q": q, "k": k, "v": v}
    mixed = convolution(joined(*(parts[name] for name in order)).mT, conv_state, conv_weight, conv_bias, "silu").mT
    sizes = [parts[name].shape[2:].numel() for name in order]
    found = dict(zip(order, mixed.split(sizes, -1), strict=True))
    q, k, v = (found[name].reshape(parts[name].shape) for name in "qkv")
    if rule == "sum":
        output = summed(q, k, v, decay, log_rate, decay_bias, skip, state)
    else:
        output = delta(q, k, v, decay, beta, log_rate, decay_bias, state)
    return gated_norm(output, gate, norm_weight, gate_activation, gate_first)


def short_conv(x, weight, input_gate, output_gate, conv_state) -> Tensor:
    """LFM2's."""
    y = convolution((input_gate * x).mT, conv_state, weight, None, "none")
    return (output_gate.mT * y).mT.contiguous()
