"""`experts_implementation="moe_metal"`: runs the experts of every model that uses transformers' experts interface as
one op."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import activations
from transformers.integrations import moe

from ...arguments import DTYPES
from ...extension import max_experts
from ...grad import in_forward_mode, traced_as_constant, wants_grad, warn_once
from ...packed_layers import slots_with_grad
from ...reference import weighted_sum
from ...refused import is_refused
from .families import GATES
from .members import member

NAME = "moe_metal"
DEVICES = ("cpu", "mps")
WITH_SHAPES = (*DEVICES, "meta")  # on meta the ops only compute shapes
# Not the tensor subclasses of quantizers and of expert parallelism. torch.export traces plain tensors as FakeTensor.
TENSORS = (nn.Parameter, Tensor, FakeTensor)

ACTIVATIONS = {
    nn.SiLU: "silu",
    activations.SiLUActivation: "silu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_tanh",
    activations.NewGELUActivation: "gelu_tanh",
    activations.ReLUSquaredActivation: "relu2",
}

DEFAULT_GATE = (None, None, None)


def activation_of(function) -> str | None:
    """Our name for an activation of transformers: a module, or PyTorch's function itself."""
    return "silu" if function is nn.functional.silu else ACTIVATIONS.get(type(function))


# Llama 4's experts do not use the interface. These are the values that their attributes would have:
LLAMA4 = SimpleNamespace(
    has_gate=True, has_bias=False, has_post_expert_norm=False, is_concatenated=True, is_transposed=True
)


@traced_as_constant  # a function's __qualname__ is unknown to torch.compile
def gate_of(function) -> tuple | None:
    """Activation (None: the module's act_fn), and the attributes with alpha and limit, of this `_apply_gate`; None if
    it is unknown."""
    if function is moe._default_apply_gate:
        return DEFAULT_GATE
    name = f"{function.__module__}.{function.__qualname__}"
    return GATES.get(name.removeprefix("transformers.models.").removesuffix("._apply_gate"))


def expert_arguments(experts: nn.Module, devices: tuple[str, ...] = WITH_SHAPES) -> tuple[dict, str | None]:
    """The arguments of `torch.ops.moe_metal.experts` that this module provides, and the reason why the op cannot take
    them (or None).

    It runs at every call, since all of this may change between calls. Defaults of the op are left out, because PyTorch
    takes about 1 us to parse a keyword argument.
    """
    flags = experts if "has_gate" in experts.__dict__ else LLAMA4
    if not flags.has_gate:
        return {}, "its experts have no gate"
    gate = gate_of(getattr(type(experts), "_apply_gate", moe._default_apply_gate))
    if gate is None:
        return {}, f"its gate is its own: {type(experts).__name__}._apply_gate"
    activation, alpha, limit = gate
    if activation is None:
        function = experts._modules.get("act_fn") or experts.act_fn
        activation = activation_of(function)
        if activation is None:
            return {}, f"its activation is {getattr(function, '__name__', type(function).__name__)}"
    arguments = weights_of(experts)
    if activation != "silu":
        arguments["activation"] = activation
    if flags.has_bias:
        arguments["gate_up_bias"] = member(experts, "gate_up_proj_bias")
        arguments["down_bias"] = member(experts, "down_proj_bias")
    if alpha:
        arguments["alpha"] = getattr(experts, alpha)
    if limit:
        arguments["limit"] = getattr(experts, limit)
    if flags.is_transposed and "format" not in arguments:
        arguments["transposed"] = True
    if not flags.is_concatenated:
        arguments["interleaved"] = True
        if gate == DEFAULT_GATE:
            return {}, "its gate and up rows are interleaved, but its gate reads halves"
    for weight in (arguments["gate_up"], arguments["down"]):
        obstacle = why_not_read(weight, "format" in arguments, devices)
        if obstacle is not None:
            return {}, obstacle
    return arguments, None


def why_not_read(weight: Tensor, packed: bool, devices: tuple[str, ...]) -> str | None:
    """The reason why the op cannot read a weight of experts, or None."""
    if type(weight) not in TENSORS:
        return f"its weights are of type {type(weight).__name__}"
    if weight.dtype not in DTYPES and not packed:
        return f"its weights are {weight.dtype}"
    if weight.device.type not in devices:
        return f"its weights are on {weight.device.type}"
    if weight.shape[0] > max_experts:
        return f"it has more than {max_experts} experts"
    return None


def weights_of(experts: nn.Module) -> dict:
    """Its weights as arguments of `experts`: dense, or packed with any names (see `packed_modules.PackedExperts`)."""
    packed = experts.__dict__.get("arguments")
    if packed is None:
        return {"gate_up": member(experts, "gate_up_proj"), "down": member(experts, "down_proj")}
    buffers, arguments = experts._buffers, {"format": experts.format}
    if experts.group_size:
        arguments["group_size"] = experts.group_size
    if experts.down_format:
        arguments["down_format"] = experts.down_format
    for argument, name in packed:
        arguments[argument] = buffers[name]
    return arguments


def dtype_for(x: Tensor, arguments: dict) -> torch.dtype:
    """The dtype that x must have with these arguments: that of dense weights, or of the biases of packed ones."""
    if "format" not in arguments:
        return arguments["down"].dtype
    bias = arguments.get("down_bias")
    return x.dtype if bias is None or bias.dtype == torch.float32 else bias.dtype


def is_experts(module: nn.Module) -> bool:
    """Whether this module uses transformers' experts interface."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "_apply_gate"))


def why_not_fused(experts: nn.Module) -> str | None:
    """The reason why the op cannot compute this module, or None."""
    return expert_arguments(experts)[1]


def why_not_packed(experts: nn.Module) -> str | None:
    """The reason why its weights cannot be packed, or None. They may be on any device; while they are loaded, on
    meta."""
    return expert_arguments(experts, (*WITH_SHAPES, "cuda", "xpu"))[1]


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of `hidden_states` [T, H] for ids and weights [T, K] -> [T, H], at decode and at prefill.

    Ids outside this module's experts are skipped: under expert parallelism they belong to another process. It falls
    back to transformers' grouped_mm for training, and if the op does not support the module.
    """
    arguments, reason = expert_arguments(self)
    if "format" in arguments and hidden_states.dtype not in DTYPES:
        reason = f"its activations are {hidden_states.dtype}"
    if reason is not None:
        warn_once(f"{type(self).__name__} runs on transformers' grouped_mm, since {reason}")
    refused = is_refused("experts", hidden_states)
    if reason is not None or refused or wants_grad(self, hidden_states, top_k_weights):
        return without_our_op(self, hidden_states, top_k_index, top_k_weights, arguments)
    if not top_k_index.shape[-1]:  # a configuration may select no experts, which the op does not support
        return torch.zeros_like(hidden_states)
    # Under autocast the two dtypes may differ. As in grouped_mm, the result is computed in that of the weights.
    x = hidden_states.to(dtype_for(hidden_states, arguments))
    weights = top_k_weights if top_k_weights.dtype in (x.dtype, torch.float32) else top_k_weights.float()
    if getattr(self, "has_post_expert_norm", False):
        return normed_experts(self, x, weights, top_k_index, arguments).to(hidden_states.dtype)
    return torch.ops.moe_metal.experts(x, weights, top_k_index, **arguments).to(hidden_states.dtype)


def without_our_op(self: nn.Module, x: Tensor, ids: Tensor, weights: Tensor, arguments: dict) -> Tensor:
    """The same with PyTorch's own ops, with a gradient. Packed weights are unpacked one expert at a time, and again in
    the backward pass; all at once if the op does not support the module, or for a jvp."""
    if "format" in arguments and not in_forward_mode() and x.dtype in DTYPES:
        inputs = x.to(dtype_for(x, arguments))
        slots = slots_with_grad(inputs, ids, arguments)
        if getattr(self, "has_post_expert_norm", False):
            slots = self.post_expert_norm(slots)
        return weighted_sum(slots, weights.where(ids < self.num_experts, 0)).to(x.dtype)
    module = self.dequantized(x.dtype) if "arguments" in self.__dict__ else self
    # PyTorch's grouped_mm has no jvp.
    stock = moe.batched_mm_experts_forward if in_forward_mode() else moe.grouped_mm_experts_forward
    return stock(module, x, ids, weights)


def normed_experts(self: nn.Module, x: Tensor, weights: Tensor, ids: Tensor, arguments: dict) -> Tensor:
    """For classes that normalise each expert's output before it is weighted: every slot is computed as a token."""
    inputs = x.unsqueeze(-2).expand(*ids.shape, -1)
    ones = torch.ones_like(weights).unsqueeze(-1)
    slots = torch.ops.moe_metal.experts(inputs, ones, ids.unsqueeze(-1), **arguments)
    weights = weights.where(ids < self.num_experts, 0)  # other ids are experts of other processes
    return torch.ops.moe_metal.weighted_sum(self.post_expert_norm(slots), weights)


def register() -> None:
    """Make "moe_metal" known to from_pretrained, configurations and set_experts_implementation."""
    moe.ExpertsInterface.register(NAME, experts_forward)
