"""A Mixture-of-Experts layer for plain PyTorch, and layers of quantised weights; transformers is not needed.

Letters: T tokens (any leading dimensions), E experts, K experts per token, H hidden, I expert inner size, S the shared
expert's inner size.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import reference
from .arguments import DTYPES, beside
from .grad import wants_grad
from .packing import FP8_BLOCK, quantize

ops = torch.ops.moe_metal
PARTS = ("data", "scale", "offset")  # of a packed weight
ROUTING = tuple(reference.route.__kwdefaults__)  # the options of a router; top_k has no default


def matrix(*shape: int, **options) -> nn.Parameter:
    """A weight whose products with unit-variance vectors have unit variance."""
    return nn.Parameter(torch.randn(*shape, **options) * shape[-1] ** -0.5)


def call_with_no_tokens(E: int, H: int, I: int, S: int, shared_gate: bool, activation: dict, **routing) -> None:
    """The ops of a layer of these sizes, which check all of this before any work: they raise now, not at the first
    forward. All elements of a weight are one in memory, since none is used."""

    def tensor(*shape: int) -> Tensor:
        return torch.empty_strided(shape, (0,) * len(shape), dtype=torch.float32, device="cpu")

    if S:
        ops.glu(tensor(0, S), tensor(0, S), **activation)
    x = tensor(0, H)
    weights, ids = ops.gate(x, tensor(E, H), **routing)
    shared = {"shared": tensor(0, H) if S else None, "shared_gate": tensor(0) if shared_gate else None}
    ops.experts(x, weights, ids, tensor(E, 2 * I, H), tensor(E, H, I), **shared, **activation)


class SharedExpert(nn.Module):
    """The expert that every token goes through: gate_up [2S, H], down [H, S]; x [..., H] -> [..., H]."""

    def __init__(self, hidden_size: int, inner_size: int, activation: dict, **options):
        super().__init__()
        self.activation = activation
        self.gate_up = matrix(2 * inner_size, hidden_size, **options)
        self.down = matrix(hidden_size, inner_size, **options)

    def forward(self, x: Tensor) -> Tensor:
        glu = reference.glu if wants_grad(self, x) else ops.glu
        return F.linear(glu(*F.linear(x, self.gate_up).chunk(2, -1), **self.activation), self.down)


class Packed(nn.Module):
    """A module whose packed weights are buffers: frozen, and to the bit the same after `.to(dtype)`, which converts the
    module's other tensors. Scales would lose bits, and not every format takes every dtype.

    `packing` tells, for each packed weight in the words of the ops, what the module calls its data, its scale and, where
    the format has one, its offset: a checkpoint's own names may stay.
    """

    packing: dict[str, tuple[str, ...]]

    def _apply(self, fn, recurse=True):
        buffers = self._buffers
        names = (name for names in self.packing.values() for name in names)
        dtypes = {name: buffers[name].dtype for name in names if buffers.get(name) is not None}
        for name in dtypes:
            buffers[name] = buffers[name].view(torch.uint8)  # which no conversion touches
        try:
            return super()._apply(fn, recurse)
        finally:
            for name, dtype in dtypes.items():
                buffers[name] = buffers[name].view(dtype)

    def hold(self, weight: str, parts: Mapping[str, Tensor | None]) -> None:
        """Have these as one packed weight: data, scale and offset, by the names that they shall have."""
        for name, part in parts.items():
            self._parameters.pop(name, None)
            self.register_buffer(name, part)
        self.packing = {**self.__dict__.get("packing", {}), weight: tuple(parts)}

    def parts(self, weight: str) -> list[Tensor | None]:
        """Data, scale and offset of a packed weight."""
        names, buffers = self.packing[weight], self._buffers
        return [buffers[name] for name in names] + [None] * (len(PARTS) - len(names))


class MoE(Packed):
    """Router, experts and an optional shared expert: x [..., H] -> [..., H].

        moe = MoE(2048, 768, num_experts=128, top_k=8, dtype=torch.bfloat16, device="mps")
        with torch.no_grad():
            y = moe(x)                # x [..., 2048]: one `gate`, one `experts`
            h = moe(x, residual=h)    # h + moe(x), in the same two

    Parameters, in the words of the ops (those in brackets only when asked for):
        router_weight [E, H], (router_bias [E]), (select_bias [E], a buffer: it counts for the choice only),
        gate_up [E, 2I, H] with the gate's I rows first, down [E, H, I], (shared: a module, [..., H] -> [..., H]),
        (shared_gate: a module, [..., H] -> [..., 1], the logit of the shared expert's share).

    `routing` are options of `torch.ops.moe_metal.gate`: scoring, renormalize, n_group, topk_group, group_score,
    scaling_factor, softcap. With gradients wanted it computes the same from PyTorch's own ops, expert by expert.
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
        """The same layer as a transformers MoE block that `patch` knows, or as another of these, quantised or not: on
        the block's own weights, not copies."""
        if isinstance(block, MoE):
            parts, obstacle = (*block._router_and_experts(), block.shared, block.shared_gate), None
        else:
            from .transformers.blocks import layer_of  # optional, and slow to import

            parts, obstacle = layer_of(block)
        if obstacle:
            raise TypeError(f"torch_moe_metal.nn.MoE.from_block: {obstacle}")
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._take(*parts)
        return module.train(block.training)

    def quantize_(self, format: str = "affine", bits: int = 4, group_size: int = 64) -> "MoE":
        """Have the experts' weights in few bits from now on, as `torch_moe_metal.quantize` packs them, one after the
        other: buffers gate_up, gate_up_scale, (gate_up_offset), and the same of down. Router and shared expert stay."""
        experts = self._router_and_experts()[1]
        if experts.get("format", "dense") != "dense":
            raise RuntimeError(f"torch_moe_metal.nn.MoE.quantize_: its weights are {experts['format']} already")
        weights = {name: experts[name].detach() for name in ("gate_up", "down")}
        if experts.get("transposed"):
            weights = {name: weight.mT for name, weight in weights.items()}
        for weight in weights.values():  # so that neither is changed when one cannot be
            quantize(weight[:0], format, bits, group_size)
        for name, weight in weights.items():
            parts = quantize(weight, format, bits, group_size)
            self.hold(name, dict(zip((name, *beside(name)), parts, strict=True)))
            self._arguments[1] |= dict.fromkeys((name, *beside(name)))
        self._arguments[1] |= {"format": format, "transposed": False}
        return self

    def _take(self, router: dict, experts: dict, shared: nn.Module | None, shared_gate: nn.Module | None) -> None:
        """Register the tensors among the arguments of `gate` and of `experts` under their names."""
        self.shared, self.shared_gate = shared, shared_gate
        dense = experts.get("format", "dense") == "dense"
        self.packing = {} if dense else {name: (name, *beside(name)) for name in ("gate_up", "down")}
        for name, value in (router | experts).items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            elif isinstance(value, Tensor):
                self.register_buffer(name, value)
        self._arguments = [
            {name: None if isinstance(value, Tensor) else value for name, value in part.items()}
            for part in (router, experts)
        ]

    def _router_and_experts(self) -> list[dict]:
        """The arguments of `gate` and of `experts`, with the tensors as they are now."""
        return [
            {name: getattr(self, name, value) if value is None else value for name, value in part.items()}
            for part in self._arguments
        ]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., H], residual [..., H] -> [..., H]"""
        router, experts = self._router_and_experts()
        shared = None if self.shared is None else self.shared(x)
        shared_gate = None if self.shared_gate is None else self.shared_gate(x).squeeze(-1)
        if wants_grad(self, x, residual):
            weights, ids = reference.gate(x, **router)
            slots = slots_with_grad(x, ids, experts)
            return reference.weighted_sum(slots, weights, shared, shared_gate, residual)
        weights, ids = ops.gate(x, **router)
        return ops.experts(x, weights, ids, shared=shared, shared_gate=shared_gate, residual=residual, **experts)

    def extra_repr(self) -> str:
        router, experts = self._arguments
        (E, H), options = self.router_weight.shape, {**router, **experts}
        inner_size = self.gate_up.shape[2 if experts.get("transposed") else 1] // 2
        told = "".join(f", {name}={value}" for name, value in options.items() if value not in (None, False))
        return f"H={H}, I={inner_size}, E={E}{told}"


def slots_with_grad(x: Tensor, ids: Tensor, experts: dict) -> Tensor:
    """Each choice's expert output [..., K, H], expert by expert, with a backward. `experts` are arguments of the op."""
    options = {name: value for name, value in experts.items() if name in ("activation", "alpha", "limit")}
    slots = x.new_zeros(*ids.shape, x.shape[-1])
    for e in range(experts["down"].shape[0]):
        chosen = (ids == e).nonzero(as_tuple=True)
        both = expert_linear(x[chosen[:-1]], e, experts, "gate_up")
        gate, up = (both[..., ::2], both[..., 1::2]) if experts.get("interleaved") else both.chunk(2, -1)
        slots = slots.index_put(chosen, expert_linear(reference.glu(gate, up, **options), e, experts, "down"))
    return slots


def expert_linear(x: Tensor, e: int, experts: dict, name: str) -> Tensor:
    weight, bias, format = experts[name][e], experts.get(f"{name}_bias"), experts.get("format", "dense")
    bias = None if bias is None else bias[e]
    if format == "dense":
        return F.linear(x, weight.mT if experts.get("transposed") else weight, bias)
    scales = (None if experts.get(part) is None else experts[part][e] for part in beside(name))
    return linear_with_grad(x, weight, *scales, bias, format)


# ------------------------------------------------------------------------------------------------ quantised layers


class Linear(Packed):
    """torch.nn.Linear with a quantised weight: x [..., in_features] -> [..., out_features].

        layer = torch_moe_metal.nn.Linear.from_module(torch_layer, "affine", bits=4, group_size=64)

    Buffers `data`, `scale` and `offset` as `torch_moe_metal.quantize` packs them, parameter `bias`. The weight is
    frozen; gradients reach x and the bias.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, format: str = "affine", bits: int = 4,
        group_size: int = 64, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        module = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._take(module, format, bits, group_size)

    @classmethod
    def from_module(cls, module: nn.Linear, format: str = "affine", bits: int = 4, group_size: int = 64) -> "Linear":
        """The same layer with its weight quantised; the bias is the module's own."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(module, format, bits, group_size)
        return layer.train(module.training)

    @classmethod
    def from_parts(
        cls, parts: Mapping[str, Tensor | None], in_features: int, format: str, bias: nn.Parameter | None = None
    ) -> "Linear":
        """A layer of a weight that is packed already: data, scale and offset, by the names that they shall have."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.hold("weight", parts)
        layer.in_features, layer.out_features, layer.format = in_features, len(layer.parts("weight")[0]), format
        layer.register_parameter("bias", bias)
        return layer

    def _take(self, module: nn.Linear, format: str, bits: int, group_size: int) -> None:
        self.in_features, self.out_features, self.format = module.in_features, module.out_features, format
        self.hold("weight", dict(zip(PARTS, quantize(module.weight.detach(), format, bits, group_size), strict=True)))
        self.register_parameter("bias", module.bias)

    def forward(self, x: Tensor) -> Tensor:
        if wants_grad(self, x):
            return linear_with_grad(x, *self.parts("weight"), self.bias, self.format)
        return ops.linear(x, *self.parts("weight"), self.bias, format=self.format)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, format={self.format}"


class Embedding(Packed):
    """torch.nn.Embedding with a quantised weight: ids [...] -> [..., embedding_dim].

        layer = torch_moe_metal.nn.Embedding.from_module(torch_layer, "affine", bits=4, group_size=64)

    Buffers `data`, `scale` and `offset` as `torch_moe_metal.quantize` packs them. The weight is frozen. What comes out
    has the dtype of the module's weight, or what `.to(dtype)` said later.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, format: str = "affine", bits: int = 4, group_size: int = 64,
        device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        self._take(nn.Embedding(num_embeddings, embedding_dim, device=device, dtype=dtype), format, bits, group_size)

    @classmethod
    def from_module(
        cls, module: nn.Embedding, format: str = "affine", bits: int = 4, group_size: int = 64
    ) -> "Embedding":
        """The same layer with its weight quantised."""
        if module.max_norm is not None:
            raise TypeError("torch_moe_metal.nn.Embedding.from_module: max_norm changes the weight, which is frozen")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(module, format, bits, group_size)
        return layer.train(module.training)

    @classmethod
    def from_parts(
        cls, parts: Mapping[str, Tensor | None], embedding_dim: int, format: str, dtype: torch.dtype
    ) -> "Embedding":
        """A layer of a weight that is packed already: data, scale and offset, by the names that they shall have."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.hold("weight", parts)
        data = layer.parts("weight")[0]
        layer.num_embeddings, layer.embedding_dim, layer.format = len(data), embedding_dim, format
        layer.register_buffer("of_dtype", torch.empty(0, dtype=dtype, device=data.device), persistent=False)
        return layer

    def _take(self, module: nn.Embedding, format: str, bits: int, group_size: int) -> None:
        self.num_embeddings, self.embedding_dim, self.format = module.num_embeddings, module.embedding_dim, format
        self.hold("weight", dict(zip(PARTS, quantize(module.weight.detach(), format, bits, group_size), strict=True)))
        self.register_buffer("of_dtype", module.weight.new_empty(0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Each row is a matrix of its own, since fp8's neighbours share their scales."""
        data, scale, offset = self.parts("weight")
        data, rows = data.view(torch.uint8), ids.flatten().unsqueeze(-1)  # not every dtype can be indexed
        scale = scale[rows // FP8_BLOCK if self.format == "fp8" else rows]
        offset = None if offset is None else offset[rows]
        bits = 8 * data.shape[-1] // self.embedding_dim
        options = {"format": self.format, "bits": bits, "dtype": self.of_dtype.dtype}
        return ops.dequantize(data[rows], scale, offset, **options).view(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format}"


def numbers(data: Tensor, scale: Tensor, offset: Tensor | None, format: str, x: Tensor) -> Tensor:
    """What a packed weight stands for, in the dtype of x, whose rows are as long as the weight's."""
    if x.dtype not in DTYPES or x.device.type not in ("cpu", "mps"):
        return reference.numbers(data, scale, offset, format, x).to(x.dtype)
    bits = 8 * data.element_size() * data.shape[-1] // x.shape[-1]
    return ops.dequantize(data, scale, offset, format=format, bits=bits, dtype=x.dtype)


class _PackedProduct(torch.autograd.Function):
    """x @ weight^T with a backward to x, which unpacks the weight again rather than keep it."""

    @staticmethod
    def forward(ctx, x: Tensor, format: str, *parts: Tensor | None) -> Tensor:
        ctx.format, ctx.columns = format, x.shape[-1]
        ctx.save_for_backward(*parts)
        return F.linear(x, numbers(*parts, format, x))

    @staticmethod
    def backward(ctx, grad: Tensor):
        of_x = grad.new_empty(0, ctx.columns)
        return grad @ numbers(*ctx.saved_tensors, ctx.format, of_x), None, None, None, None


def linear_with_grad(
    x: Tensor, data: Tensor, scale: Tensor, offset: Tensor | None, bias: Tensor | None, format: str
) -> Tensor:
    product = _PackedProduct.apply(x, format, data, scale, offset)
    return product if bias is None else product + bias.to(product.dtype)
