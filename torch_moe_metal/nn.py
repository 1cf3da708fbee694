"""A Mixture-of-Experts layer for plain PyTorch, and layers of quantised weights; transformers is not needed.

Letters: T tokens (any leading dimensions), E experts, K experts per token, H hidden, I expert inner size, S the shared
expert's inner size.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import reference
from .all_or_nothing import all_or_nothing
from .arguments import format_of, scale_names
from .first_use import weights_arrived
from .formats import FORMATS
from .grad import autocasts, wants_grad
from .packed_layers import Embedding, Linear, Packed, slots_with_grad
from .packing import check, quantize
from .refused import is_refused

__all__ = ["Embedding", "Linear", "MoE"]

ops = torch.ops.moe_metal
ROUTING = tuple(reference.route.__kwdefaults__)  # the options of a router; top_k has no default


def matrix(*shape: int, **options) -> nn.Parameter:
    """A random weight whose products with unit-variance vectors have unit variance."""
    return nn.Parameter(torch.randn(*shape, **options) * shape[-1] ** -0.5)


def call_with_no_tokens(E: int, H: int, I: int, S: int, shared_gate: bool, activation: dict, **routing) -> None:
    """Call the ops of a layer of these sizes without tokens, so that bad arguments raise now and not at the first
    forward. The elements of each weight share one element of memory, because none is read."""

    def tensor(*shape: int) -> Tensor:
        return torch.empty_strided(shape, (0,) * len(shape), dtype=torch.float32, device="cpu")

    if S:
        ops.glu(tensor(0, S), tensor(0, S), **activation)
    x = tensor(0, H)
    weights, ids = ops.gate(x, tensor(E, H), **routing)
    shared = {"shared": tensor(0, H) if S else None, "shared_gate": tensor(0) if shared_gate else None}
    ops.experts(x, weights, ids, tensor(E, 2 * I, H), tensor(E, H, I), **shared, **activation)


class SharedExpert(nn.Module):
    """The expert that processes every token: gate_up [2S, H], down [H, S]; x [..., H] -> [..., H]."""

    def __init__(self, hidden_size: int, inner_size: int, activation: dict, **options):
        super().__init__()
        self.activation = activation
        self.gate_up = matrix(2 * inner_size, hidden_size, **options)
        self.down = matrix(hidden_size, inner_size, **options)

    def forward(self, x: Tensor) -> Tensor:
        glu = reference.glu if wants_grad(self, x) or is_refused("glu", x) else ops.glu
        return F.linear(glu(*F.linear(x, self.gate_up).chunk(2, -1), **self.activation), self.down)


class MoE(Packed):
    """Router, experts and an optional shared expert: x [..., H] -> [..., H].

        moe = MoE(2048, 768, num_experts=128, top_k=8, dtype=torch.bfloat16, device="mps")
        with torch.no_grad():
            y = moe(x)                # x [..., 2048]; runs `gate` and `experts`
            h = moe(x, residual=h)    # h + moe(x), with the same two ops

    Parameters, named as in the ops (those in parentheses are optional):
        router_weight [E, H], (router_bias [E]), (select_bias [E], a buffer that affects only the selection),
        gate_up [E, 2I, H] with the gate's I rows first, down [E, H, I], (shared: a module, [..., H] -> [..., H]),
        (shared_gate: a module, [..., H] -> [..., 1], the logit of the shared expert's gate).

    `routing` are options of `torch.ops.moe_metal.gate`: scoring, renormalize, n_group, topk_group, group_score,
    scaling_factor, softcap, sum_eps. If a gradient is needed, PyTorch's own ops compute the same, expert by expert.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        num_experts: int,
        top_k: int,
        *,
        shared_size: int = 0,
        shared_gate: bool = False,
        router_bias: bool = False,
        select_bias: bool = False,
        activation: str = "silu",
        limit: float | None = None,
        device=None,
        dtype=None,
        **routing,
    ):
        super().__init__()
        if unknown := routing.keys() - ROUTING:
            raise TypeError(
                f"torch_moe_metal.nn.MoE: unknown: {', '.join(sorted(unknown))}; its routing options are "
                f"{', '.join(ROUTING)}"
            )
        options = {"device": device, "dtype": dtype}
        act = {"activation": activation, "limit": limit}
        call_with_no_tokens(num_experts, hidden_size, inner_size, shared_size, shared_gate, act, top_k=top_k, **routing)
        router = {"router_weight": matrix(num_experts, hidden_size, **options), "top_k": top_k}
        if router_bias:
            router["router_bias"] = nn.Parameter(torch.zeros(num_experts, **options))
        if select_bias:
            router["select_bias"] = torch.zeros(num_experts, device=device)
        experts = {
            "gate_up": matrix(num_experts, 2 * inner_size, hidden_size, **options),
            "down": matrix(num_experts, hidden_size, inner_size, **options),
        }
        self._take(
            router | routing,
            experts | act,
            SharedExpert(hidden_size, shared_size, act, **options) if shared_size else None,
            nn.Linear(hidden_size, 1, bias=False, **options) if shared_gate else None,
        )

    @classmethod
    def from_block(cls, block: nn.Module) -> "MoE":
        """The same layer as `block`: a transformers MoE block that `patch` supports, or another `MoE`, quantised or
        not. It shares the weights of the block."""
        if isinstance(block, MoE):
            parts, obstacle = (*block._router_and_experts(), block.shared, block.shared_gate), None
        else:
            from .transformers.fusing.moe_layer import layer_of  # optional, and slow to import

            parts, obstacle = layer_of(block)
        if obstacle:
            raise TypeError(f"torch_moe_metal.nn.MoE.from_block: {obstacle}")
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._take(*parts)
        return module.train(block.training)

    def quantize_(self, format: str = "affine", bits: int = 4, group_size: int = 64) -> "MoE":
        """Quantise the experts' weights in-place, one after the other, as `torch_moe_metal.quantize` does: buffers
        gate_up, gate_up_scale, (gate_up_offset), and the same for down. Router and shared expert do not change."""
        if self.packing:
            raise RuntimeError(f"torch_moe_metal.nn.MoE.quantize_: its weights are {self.format} already")
        weights = self.dense_rows()
        for name, weight in weights.items():
            check(weight, format, bits, group_size, "nn.MoE.quantize_", name)
        settings = self._arguments[1] | {"format": format, "transposed": False}
        if FORMATS[format].is_affine:  # the shapes of other formats are unambiguous
            settings["group_size"] = group_size
        with all_or_nothing(self):
            for name, weight in weights.items():
                parts = dict(zip((name, *scale_names(name)), quantize(weight, format, bits, group_size), strict=True))
                self.hold(name, parts)
                settings |= dict.fromkeys(parts)
            self._arguments = [self._arguments[0], settings]
        weights_arrived(self)
        return self

    @property
    def format(self) -> str:
        """The format of the experts' weights."""
        return self._arguments[1].get("format", "dense")

    def dense_rows(self) -> dict[str, Tensor]:
        """The experts' weights that are not packed, [E, N, C]."""
        experts = self._router_and_experts()[1]
        weights = {name: experts[name].detach() for name in ("gate_up", "down")}
        return {name: weight.mT if experts.get("transposed") else weight for name, weight in weights.items()}

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        weights_arrived(self)
        return self

    def _take(self, router: dict, experts: dict, shared: nn.Module | None, shared_gate: nn.Module | None) -> None:
        """Register the tensors among the arguments of `gate` and `experts` under their names."""
        self.shared, self.shared_gate = shared, shared_gate
        self.packing = {
            name: tuple(part for part in (name, *scale_names(name)) if experts.get(part) is not None)
            for name in ("gate_up", "down")
            if format_of(name, experts) != "dense"
        }
        for name, value in (router | experts).items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            elif isinstance(value, Tensor):
                self.register_buffer(name, value)
        self._arguments = [
            {name: None if isinstance(value, Tensor) else value for name, value in part.items()}
            for part in (router, experts)
        ]
        weights_arrived(self)

    def _warmup_call(self, tokens: int, dtype: torch.dtype) -> None:
        self(torch.empty(tokens, self.router_weight.shape[1], dtype=dtype, device="meta"))

    def _router_and_experts(self) -> list[dict]:
        """The arguments of `gate` and `experts` with the current tensors."""
        return [
            {name: getattr(self, name, value) if value is None else value for name, value in part.items()}
            for part in self._arguments
        ]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., H], residual [..., H] -> [..., H]"""
        router, experts = self._router_and_experts()
        by_torch = is_refused("gate", x) or is_refused("experts", x)
        grad, autocast = wants_grad(self, x, residual) or by_torch, autocasts(x)
        if autocast and not grad:
            return self.without_autocast(x, residual)
        shared = None if self.shared is None else self.shared(x)
        shared_gate = None if self.shared_gate is None else self.shared_gate(x).squeeze(-1)
        if grad:
            # The router's sums are float32, as in the op.
            with torch.autocast(x.device.type, enabled=False) if autocast else contextlib.nullcontext():
                weights, ids = reference.gate(x, **router)
            slots = slots_with_grad(x, ids, experts)
            return reference.weighted_sum(slots, weights, shared, shared_gate, residual).to(x.dtype)
        weights, ids = ops.gate(x, **router)
        return ops.experts(x, weights, ids, shared=shared, shared_gate=shared_gate, residual=residual, **experts)

    def without_autocast(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The same in the dtype of the layer's weights, rounded to that of x."""
        dtype = self.router_weight.dtype if self.packing else self.down.dtype
        with torch.autocast(x.device.type, enabled=False):
            return self.forward(x.to(dtype), None if residual is None else residual.to(dtype)).to(x.dtype)

    def extra_repr(self) -> str:
        router, experts = self._arguments
        (E, H), options = self.router_weight.shape, {**router, **experts}
        inner_size = self.gate_up.shape[2 if experts.get("transposed") else 1] // 2
        others = "".join(f", {name}={value}" for name, value in options.items() if value not in (None, False))
        return f"H={H}, I={inner_size}, E={E}{others}"
