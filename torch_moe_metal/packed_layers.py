"""Layers with packed weights, and the PyTorch code that runs instead of the ops if a gradient is needed.

`torch_moe_metal.nn` exports the layers for users; the transformers integration puts them into models.
"""

import copy
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import reference
from .arguments import DTYPES, format_of, scale_names
from .file_pages import is_mapped, on_host
from .formats import FORMATS
from .grad import autocasts, wants_grad
from .packing import quantize
from .refused import is_refused

ops = torch.ops.moe_metal
PARTS = ("data", "scale", "offset")  # the tensors of a packed weight
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by the number of their bytes


class Packed(nn.Module):
    """A module whose packed weights are buffers. They are frozen, and `.to(dtype)` does not change their bits: it
    converts only the other tensors of the module. (Scales would lose bits, and not every format supports every dtype.)

    `packing` maps each packed weight, by its argument name in the ops, to the names of its data, scale and offset in
    the module, so that a module can keep the names of its checkpoint.
    """

    packing: dict[str, tuple[str, ...]]

    def _apply(self, fn, recurse=True):
        names = [name for names in self.packing.values() for name in names]
        parts = [part for name in names if (part := self._buffers.get(name)) is not None]
        done = {id(part): with_its_bits(part, fn) for part in parts}  # before anything is assigned
        return super()._apply(lambda tensor: done[id(tensor)] if id(tensor) in done else fn(tensor), recurse)

    def mapped(self) -> dict[str, Tensor]:
        """The parts in Metal buffers over a file's pages, which nothing can write."""
        return {name: part for name, part in self._buffers.items() if is_mapped(part)}

    def __deepcopy__(self, memo: dict):
        """Copies share such parts."""
        memo.update({id(part): part for part in self.mapped().values()})
        memo[id(self)] = copied = self.__class__.__new__(self.__class__)
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied

    def __getstate__(self) -> dict:
        """For pickle and `torch.save`, which write whole storages: such parts are written from the file's pages, with
        an empty tensor on their device, which loading moves them to."""
        state, mapped = self.__dict__.copy(), self.mapped()
        if mapped:
            state["_buffers"] = self._buffers | {name: on_host(part) for name, part in mapped.items()}
            state["_home"] = torch.empty(0, device=next(iter(mapped.values())).device), tuple(mapped)
        return state

    def __setstate__(self, state: dict) -> None:
        state = dict(state)
        home, names = state.pop("_home", (None, ()))
        super().__setstate__(state)
        for name in names:
            self._buffers[name] = self._buffers[name].to(home.device)

    def hold(self, weight: str, parts: Mapping[str, Tensor | None]) -> None:
        """Register the data, scale and offset of one packed weight as buffers with these names."""
        for name, part in parts.items():
            self._parameters.pop(name, None)
            self.register_buffer(name, part)
        self.packing = {**self.__dict__.get("packing", {}), weight: tuple(parts)}

    def format_of(self, weight: str) -> str:
        """The format of a packed weight."""
        return self.format

    def parts(self, weight: str) -> list[Tensor | None]:
        """Data, scale and offset of a packed weight."""
        names, buffers = self.packing[weight], self._buffers
        return [buffers[name] for name in names] + [None] * (len(PARTS) - len(names))


def with_its_bits(part: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `fn`, which moves or converts a module, to data or a scale. `fn` gets integers of the same width,
    because conversions to a floating dtype do not change those, and their strides do not matter."""
    bits = part.view(INTEGERS[part.element_size()])
    moved = fn(bits)
    if moved is bits:
        return part
    if moved.dtype != bits.dtype:
        raise TypeError(
            "torch_moe_metal: packed weights keep their bits: expected .to(dtype), which converts the module's other "
            f"tensors alone, got a conversion of all tensors to {str(moved.dtype).removeprefix('torch.')}"
        )
    return moved.view(part.dtype)


class PackedLayer(Packed):
    """A layer with one packed weight. A subclass copies its sizes and other tensors from a dense layer in `_copy`."""

    @classmethod
    def from_module(cls, module: nn.Module, format: str = "affine", bits: int = 4, group_size: int = 64):
        """The same layer with a quantised weight. A bias is shared with `module`."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(module, format, bits, group_size)
        return layer.train(module.training)

    @classmethod
    def _of_parts(cls, parts: Mapping[str, Tensor | None], format: str):
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.hold("weight", parts)
        layer.format = format
        return layer

    def _take(self, module: nn.Module, format: str, bits: int, group_size: int) -> None:
        self.hold("weight", dict(zip(PARTS, quantize(module.weight.detach(), format, bits, group_size), strict=True)))
        self.format = format
        self._copy(module)


class Linear(PackedLayer, nn.Linear):
    """torch.nn.Linear with a quantised weight: x [..., in_features] -> [..., out_features].

        layer = torch_moe_metal.nn.Linear.from_module(torch_layer, "affine", bits=4, group_size=64)

    Buffers: `data` and, depending on the format, `scale` and `offset`, as returned by `torch_moe_metal.quantize`.
    Parameter: `bias`. The weight is frozen; gradients reach x and the bias.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, format: str = "affine", bits: int = 4,
        group_size: int = 64, device=None, dtype=None,
    ):  # fmt: skip
        nn.Module.__init__(self)
        module = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._take(module, format, bits, group_size)

    @classmethod
    def from_parts(
        cls, parts: Mapping[str, Tensor | None], in_features: int, format: str, bias: nn.Parameter | None = None
    ) -> "Linear":
        """A layer with a packed weight: data, scale and offset with the names that their buffers get."""
        layer = cls._of_parts(parts, format)
        layer.in_features, layer.out_features = in_features, len(layer.parts("weight")[0])
        layer.register_parameter("bias", bias)
        return layer

    def _copy(self, module: nn.Linear) -> None:
        self.in_features, self.out_features = module.in_features, module.out_features
        self.register_parameter("bias", module.bias)

    def forward(self, x: Tensor) -> Tensor:
        # An x with twice the columns and a weight with half the bits have the same bytes, so shapes alone cannot detect
        # it.
        if x.shape[-1] != self.in_features:
            raise RuntimeError(
                f"torch_moe_metal.nn.Linear: x: expected shape [..., {self.in_features}], got {list(x.shape)}"
            )
        x, parameters = as_autocast(x), self._parameters
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401 - the latter is slow
        if bias is not None and bias.dtype not in (x.dtype, torch.float32):
            bias = as_autocast(bias)
        if wants_grad(self, x) or is_refused("linear", x):
            return linear_with_grad(x, *self.parts("weight"), bias, self.format)
        return ops.linear(x, *self.parts("weight"), bias, format=self.format)

    def _warmup_call(self, tokens: int, dtype: torch.dtype) -> None:
        self(torch.empty(tokens, self.in_features, dtype=dtype, device="meta"))

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, format={self.format}"


class TiedLinear(Linear):
    """A linear layer that uses the packed weight of an embedding: a tied head."""

    def __init__(self, embedding: "Embedding"):
        nn.Module.__init__(self)
        self.embedding = (embedding,)  # in a tuple, so that it is not a submodule
        self.packing, self.bias, self.format = {}, None, embedding.format
        self.in_features, self.out_features = embedding.embedding_dim, embedding.num_embeddings

    def parts(self, weight: str) -> list[Tensor | None]:
        return self.embedding[0].parts(weight)


def is_packed(module: nn.Module) -> bool:
    return isinstance(module, TiedLinear) or bool(getattr(module, "packing", None))


class Embedding(PackedLayer):
    """torch.nn.Embedding with a quantised weight: ids [...] -> [..., embedding_dim].

        layer = torch_moe_metal.nn.Embedding.from_module(torch_layer, "affine", bits=4, group_size=64)

    Buffers: `data` and, depending on the format, `scale` and `offset`, as returned by `torch_moe_metal.quantize`. The
    weight is frozen. The output has the dtype of the original weight, or that of the last `.to(dtype)`, and is
    multiplied by `multiplier`.
    """

    multiplier: float = 1.0

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, format: str = "affine", bits: int = 4, group_size: int = 64,
        device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        self._take(nn.Embedding(num_embeddings, embedding_dim, device=device, dtype=dtype), format, bits, group_size)

    @classmethod
    def from_parts(
        cls, parts: Mapping[str, Tensor | None], embedding_dim: int, format: str, dtype: torch.dtype
    ) -> "Embedding":
        """A layer with a packed weight: data, scale and offset with the names that their buffers get."""
        layer = cls._of_parts(parts, format)
        data = layer.parts("weight")[0]
        layer.num_embeddings, layer.embedding_dim = len(data), embedding_dim
        layer.register_buffer("of_dtype", torch.empty(0, dtype=dtype, device=data.device), persistent=False)
        return layer

    def _copy(self, module: nn.Embedding) -> None:
        if module.max_norm is not None:
            raise TypeError("torch_moe_metal.nn.Embedding.from_module: max_norm changes the weight, which is frozen")
        self.num_embeddings, self.embedding_dim = module.num_embeddings, module.embedding_dim
        self.register_buffer("of_dtype", module.weight.new_empty(0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Each row is dequantised as a matrix of its own, because in fp8 neighbouring rows share scales."""
        data, scale, offset = self.parts("weight")
        format, rows = FORMATS[self.format], ids.flatten()
        bits = reference.bits_of(data, scale, self.format, self.embedding_dim)
        data = rows_of(data.view(torch.uint8), rows)  # some dtypes cannot be indexed
        if scale is not None:
            scale = scale.view(torch.uint8) if scale.dtype.itemsize == 1 else scale
            scale = rows_of(scale, rows // format.rows_per_scale)
        if offset is not None:
            offset = rows_of(offset, rows) if format.is_affine else offset.expand(len(rows), 1)
        options = {"format": self.format, "bits": bits, "dtype": self.of_dtype.dtype}
        output = ops.dequantize(data, scale, offset, **options).view(*ids.shape, self.embedding_dim)
        return output if self.multiplier == 1 else output * self.multiplier

    def _warmup_call(self, tokens: int, dtype: torch.dtype) -> None:
        self(torch.empty(tokens, dtype=torch.int64, device="meta"))

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format}"


def rows_of(tensor: Tensor, rows: Tensor) -> Tensor:
    """These rows, each as a matrix. Unlike `tensor[rows]`, where -1 is the last row, it raises for the same ids as
    torch.nn.Embedding."""
    return tensor.index_select(0, rows).unsqueeze(-2)


class Permuted(nn.Module):
    """A linear layer whose packed columns are in another order than its input."""

    def __init__(self, linear: nn.Module, permutation: Tensor):
        super().__init__()
        self.linear = linear
        self.register_buffer("permutation", permutation, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.index_select(-1, self.permutation))


def as_autocast(x: Tensor) -> Tensor:
    """A layer's input in the dtype that torch.nn.Linear would use: autocast knows only PyTorch's own ops."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if autocasts(x) else x


# ------------------------------------------------------------------------------------------------ with a gradient


def dequantized(
    data: Tensor, scale: Tensor | None, offset: Tensor | None, format: str, x: Tensor, group_size: int = 0
) -> Tensor:
    """The values of a packed weight in the dtype of x, whose last size is the number of columns."""
    if x.dtype not in DTYPES or x.device.type not in ("cpu", "mps"):
        return reference.dequantize_for(data, scale, offset, format, x, group_size).to(x.dtype)
    bits = reference.bits_of(data, scale, format, x.shape[-1], group_size)
    return ops.dequantize(data, scale, offset, format=format, bits=bits, dtype=x.dtype)


class _PackedProduct(torch.autograd.Function):
    """x @ weight^T with a backward for x. The backward dequantises the weight again instead of keeping it in
    memory."""

    @staticmethod
    def forward(ctx, x: Tensor, format: str, group_size: int, *parts: Tensor | None) -> Tensor:
        ctx.format, ctx.columns, ctx.group_size = format, x.shape[-1], group_size
        ctx.save_for_backward(*parts)
        return F.linear(x, dequantized(*parts, format, x, group_size))

    @staticmethod
    def backward(ctx, grad: Tensor):
        of_x = grad.new_empty(0, ctx.columns)
        weight = dequantized(*ctx.saved_tensors, ctx.format, of_x, ctx.group_size)
        return grad @ weight, None, None, None, None, None


def linear_with_grad(
    x: Tensor,
    data: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    bias: Tensor | None,
    format: str,
    group_size: int = 0,
) -> Tensor:
    product = _PackedProduct.apply(x, format, group_size, data, scale, offset)
    return product if bias is None else product + bias.to(product.dtype)


def slots_with_grad(x: Tensor, ids: Tensor, experts: dict) -> Tensor:
    """The output of each selected expert [..., K, H], computed expert by expert, with a backward. `experts` are
    arguments of the op."""
    options = {name: value for name, value in experts.items() if name in ("activation", "alpha", "limit")}
    x = as_autocast(x)
    slots = x.new_zeros(*ids.shape, x.shape[-1])
    for e in range(experts["down"].shape[0]):
        chosen = (ids == e).nonzero(as_tuple=True)
        both = expert_linear(x[chosen[:-1]], e, experts, "gate_up")
        gate, up = (both[..., ::2], both[..., 1::2]) if experts.get("interleaved") else both.chunk(2, -1)
        output = expert_linear(reference.glu(gate, up, **options), e, experts, "down")
        slots = slots.index_put(chosen, output.to(slots.dtype))  # under autocast the dtype may differ
    return slots


def expert_linear(x: Tensor, e: int, experts: dict, name: str) -> Tensor:
    scales = [None if experts.get(part) is None else experts[part][e] for part in scale_names(name)]
    weight = reference.joined(experts[name][e : e + 1], scales[0], experts.get("interleaved", False))[0]
    bias, format = experts.get(f"{name}_bias"), format_of(name, experts)
    bias = None if bias is None else bias[e]
    if format == "dense":
        return F.linear(x, weight.mT if experts.get("transposed") else weight, bias)
    return linear_with_grad(x, weight, *scales, bias, format, experts.get("group_size", 0))
