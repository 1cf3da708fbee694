"""Modules of transformers with packed weights: experts that keep their class, and our layers in place of linear ones.

Only this file knows how a transformers module holds packed weights. The parts of a weight (data, scale and, in some
formats, offset) keep the names that they have in the checkpoint, so that loading at most renames them. A weight is
therefore described by the names of its parts.

    pack_experts(experts, "mxfp4", {"gate_up": {"gate_up_proj_blocks": ..., "gate_up_proj_scales": ...}, "down": ...})
    pack(model, "lm_head", "affine", lambda name, dense: {"weight": ..., "scales": ..., "biases": ...})
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from math import prod

import torch
from torch import Tensor, nn

from ... import reference
from ...arguments import scale_names
from ...formats import FORMATS
from ...grad import warn_once
from ...packed_layers import PARTS, Embedding, Linear, Packed, TiedLinear, dequantized
from ...packing import packed_sizes, quantize
from .experts import NAME

#: The names of the ops' weights gate_up and down in transformers' classes of experts.
PROJECTIONS = {"gate_up": "gate_up_proj", "down": "down_proj"}
#: The attributes that packed experts have in addition to those of dense ones.
PACKED = ("packing", "format", "down_format", "columns", "group_size", "arguments")
Parts = Mapping[str, Tensor]  # data, scale and offset of one weight, by their names in the module


class PackedExperts(Packed):
    """The base class of experts with packed weights, which are also subclasses of the experts' own class."""

    original: type  # the class that this module had before
    format: str
    down_format: str | None  # if it is another format
    columns: dict[str, int]  # of each weight when it is dense
    group_size: int  # of both weights; 0 if they differ, or if it is fixed by the format
    arguments: tuple[tuple[str, str], ...]  # arguments of the op `experts`, and the names of their buffers

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        implementation = self.config._experts_implementation
        if implementation == NAME:
            return super().forward(hidden_states, *args, **kwargs)
        warn_once(
            f"{type(self).__name__} runs on {implementation!r}, which cannot read {self.format}: its weights are "
            f'dequantised at every call. model.set_experts_implementation("{NAME}") runs them as they are'
        )
        return self.original.forward(self.dequantized(hidden_states.dtype), hidden_states, *args, **kwargs)

    def format_of(self, weight: str) -> str:
        return self.down_format or self.format if weight == "down" else self.format

    def dequantized(self, dtype: torch.dtype) -> nn.Module:
        """A module of the original class with dense weights of this dtype. It shares everything else with this
        module."""
        dense = self.original.__new__(self.original)
        dense.__dict__ |= {name: value for name, value in self.__dict__.items() if name not in PACKED}
        dense._parameters = dict(self._parameters)
        dense._buffers = {name: value for name, value in self._buffers.items() if name not in packed_names(self)}
        for weight, name in PROJECTIONS.items():
            parts = self.parts(weight)
            of_row = parts[0].new_empty(0, self.columns[weight], dtype=dtype)
            unpacked = dequantized(*parts, self.format_of(weight), of_row)
            unpacked = reference.joined(unpacked, None, not self.is_concatenated)
            dense._parameters[name] = unpacked.mT if self.is_transposed else unpacked
        return dense

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), f"format={formats_text(self)}")))

    def __reduce_ex__(self, protocol):
        # These classes are made at run time, so a copy is made from the original class.
        return rebuild, (self.original,), self.__getstate__()


def formats_text(module: Packed) -> str:
    """The formats of its packed weights."""
    return " and ".join(dict.fromkeys(module.format_of(weight) for weight in module.packing))


def rebuild(original: type) -> nn.Module:
    cls = packed_class(original)
    return cls.__new__(cls)


@functools.cache
def packed_class(original: type) -> type:
    """The class keeps its name and module, because blocks and device maps identify it by these."""
    own = {"original": original, "__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (PackedExperts, original), own)


def empty_parts(name: str, size: tuple[int, ...], format: str, bits: int, group: int, dtype: torch.dtype) -> Parts:
    """The parts that `quantize` makes of a weight [..., N, C], on the meta device, with the names of `named_parts`."""
    sizes = packed_sizes(size, format, bits, group, dtype)
    return named_parts(name, [torch.empty(size, dtype=kind, device="meta") for size, kind in sizes.values()])


def named_parts(name: str, parts: list[Tensor]) -> Parts:
    """Our own names for the parts: the data has the name of the dense weight, the others have `_scale` and `_offset`
    appended."""
    names = (name, *(f"{name}_{part}" for part in PARTS[1:]))
    return {name: part for name, part in zip(names, parts, strict=False) if part is not None}


def quantize_like(module: Packed, weight: str, dense: Tensor) -> Parts:
    """A dense weight, packed with the format, bits and groups of the module's current one."""
    (data, scale, _), format = module.parts(weight), module.format_of(weight)
    bits = reference.bits_of(data, scale, format, dense.shape[-1])
    group = dense.shape[-1] // scale.shape[-1] if FORMATS[format].is_affine else 0
    parts = [part for part in quantize(dense, format, bits, group) if part is not None]
    return dict(zip(module.packing[weight], parts, strict=True))


def packed_names(module: Packed) -> set[str]:
    return {name for names in module.packing.values() for name in names}


def is_moe(module: nn.Module) -> bool:
    """Whether it is a `torch_moe_metal.nn.MoE`."""
    return isinstance(module, Packed) and hasattr(module, "quantize_")


def rows_of(module: nn.Module) -> dict[str, Tensor]:
    """The dense weights of a module that can be packed, as rows [..., N, C]."""
    if is_moe(module):
        return module.dense_rows()
    if isinstance(module, nn.Linear | nn.Embedding):
        return {"weight": module.weight.detach()}
    dense = {weight: getattr(module, projection).detach() for weight, projection in PROJECTIONS.items()}
    return {weight: tensor.mT if module.is_transposed else tensor for weight, tensor in dense.items()}


def columns_of(module: Packed, weight: str) -> int:
    """The length of the rows of a packed weight when it is dense."""
    if isinstance(module, PackedExperts):
        return module.columns[weight]
    if is_moe(module):
        return module.router_weight.shape[-1] if weight == "gate_up" else module.gate_up.shape[1] // 2
    return module.in_features if isinstance(module, Linear) else module.embedding_dim


def dense_shape(module: Packed, weight: str) -> tuple[int, ...]:
    """The shape [..., N, C] of a packed weight when it is dense."""
    data, scale, _ = module.parts(weight)
    has_blocks = scale is not None and data.dim() > scale.dim()  # gpt-oss has a dimension for blocks
    return (*(scale if has_blocks else data).shape[:-1], columns_of(module, weight))


def packed_modules(model: nn.Module) -> Iterator[tuple[str, Packed]]:
    """All modules of a model that hold packed weights, with their names."""
    return ((name, module) for name, module in model.named_modules() if getattr(module, "packing", None))


def packed_weight_names(model: nn.Module) -> Iterator[tuple[str, Packed]]:
    """The names that all packed weights of a model have when they are dense, with their modules. Those of adapted
    modules are without PEFT's `base_layer`."""
    for name, module in packed_modules(model):
        for weight in module.packing:
            own = weight if is_moe(module) else PROJECTIONS.get(weight, weight)
            yield f"{name}.{own}".replace(".base_layer", ""), module


def count(model: nn.Module, embeddings: bool = True) -> int:
    """How many numbers the packed weights of a model stand for."""
    modules = (module for _, module in packed_modules(model) if embeddings or not isinstance(module, Embedding))
    return sum(prod(dense_shape(module, weight)) for module in modules for weight in module.packing)


def weight_shape(experts: nn.Module, weight: str) -> tuple[int, int, int]:
    """The shape [E, N, C] of dense experts' gate_up [E, 2I, H] or down [E, H, I], which may be stored transposed."""
    E, N, C = getattr(experts, PROJECTIONS[weight]).shape
    return (E, C, N) if experts.is_transposed else (E, N, C)


def pack_experts(experts: nn.Module, format: str, weights: Mapping[str, Parts], down_format: str | None = None) -> None:
    """Replace the dense weights by these packed ones, {"gate_up": ..., "down": ...}: rows [E, N, C], as the ops read
    them, even if the dense ones were transposed. While a checkpoint is loaded they are on the meta device."""
    experts.columns = {weight: weight_shape(experts, weight)[2] for weight in PROJECTIONS}
    for name in PROJECTIONS.values():
        del experts._parameters[name]
    # The class is assigned, since the module must stay the same object: its hooks, name and other attributes remain.
    experts.__class__ = packed_class(type(experts))
    experts.format, experts.down_format = format, None if down_format == format else down_format
    experts.group_size = 0
    if FORMATS[format].is_affine and experts.down_format is None:
        groups = {experts.columns[weight] // list(parts.values())[1].shape[-1] for weight, parts in weights.items()}
        experts.group_size = groups.pop() if len(groups) == 1 else 0
    for weight, parts in weights.items():
        experts.hold(weight, parts)
    experts.arguments = op_arguments(experts)
    experts._is_hf_initialized = True  # transformers can only initialise dense weights


def op_arguments(experts: PackedExperts) -> tuple[tuple[str, str], ...]:
    return tuple(
        (argument, name)
        for weight, names in experts.packing.items()
        for argument, name in zip((weight, *scale_names(weight)), names, strict=False)
    )


def use_own_names(module: Packed) -> None:
    """Rename the parts of packed weights from the checkpoint's names to those of `MoeMetalConfig`."""
    if is_moe(module):
        return
    for weight, names in list(module.packing.items()):
        data, scale, offset = module.parts(weight)
        if scale is not None and data.dim() > scale.dim():  # gpt-oss has a dimension for blocks
            data = data.flatten(-2)
        parts = named_parts(PROJECTIONS.get(weight, weight), [data.view(torch.uint8), scale, offset])
        for name in names:
            del module._buffers[name]
        module.hold(weight, parts)
    if isinstance(module, PackedExperts):
        module.arguments = op_arguments(module)


def let_transformers_initialise(model: nn.Module) -> None:
    """Before a model is loaded: let transformers initialise those parameters of packed modules, such as biases, that a
    checkpoint lacks. It initialises the parameters of experts together with their dense weights, so it must find
    placeholders of these, marked as initialised."""
    for _, module in packed_modules(model):
        tensors = [*module._parameters.values(), *module._buffers.values()]
        for tensor in filter(lambda tensor: tensor is not None, tensors):
            tensor._is_hf_initialized = True  # a tensor created for a missing one is not marked
        module._is_hf_initialized = not any(parameter is not None for parameter in module._parameters.values())
        if isinstance(module, PackedExperts) and not module._is_hf_initialized:
            for name in {*PROJECTIONS.values()} - module._buffers.keys():
                module.__dict__[name] = torch.empty(0)
                module.__dict__[name]._is_hf_initialized = True


def end_initialisation(model: nn.Module) -> None:
    """After loading: remove the placeholders of dense weights from packed experts."""
    for _, module in packed_modules(model):
        for name in PROJECTIONS.values():
            module.__dict__.pop(name, None)


def pack(
    model: nn.Module,
    name: str,
    format: str,
    parts: Callable[[str, Tensor], Parts],
    down_format: str | None = None,
) -> None:
    """Replace the weights of one module by packed ones: experts, a linear layer or an embedding. `parts` is called for
    each weight, with its full name and its dense tensor [..., N, C]."""
    module = model.get_submodule(name)
    dense = rows_of(module)
    if not isinstance(module, nn.Linear | nn.Embedding):
        weights = {weight: parts(f"{name}.{PROJECTIONS[weight]}", tensor) for weight, tensor in dense.items()}
        return pack_experts(module, format, weights, down_format)
    found, columns = parts(f"{name}.weight", dense["weight"]), module.weight.shape[-1]
    if isinstance(module, nn.Embedding):
        layer = Embedding.from_parts(found, columns, format, module.weight.dtype)
        layer.multiplier = embedding_multiplier(module)
        replace(model, name, layer)
    else:
        replace(model, name, Linear.from_parts(found, columns, format, module.bias))


def embedding_multiplier(embedding: nn.Embedding) -> float | None:
    """The factor of the embedding's rows, rounded to its dtype (Gemma's); None if its class is not known."""
    if type(embedding) is nn.Embedding:
        return 1.0
    if not type(embedding).__name__.endswith("ScaledWordEmbedding"):
        return None
    return torch.tensor(embedding.scalar_embed_scale, dtype=embedding.weight.dtype, device="cpu").item()


def replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Replace a module of the model by this layer."""
    layer.train(model.get_submodule(name).training)
    layer._is_hf_initialized = True
    model.set_submodule(name, layer)


def tied_head(model: nn.Module) -> tuple[str, str] | None:
    """The names of the embedding and of the head if they share their weight, or will after loading."""
    embedding, head = (getattr(model, f"get_{kind}_embeddings", lambda: None)() for kind in ("input", "output"))
    if not (isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)):
        return None
    names = {module: name for name, module in model.named_modules()}
    pair = names[embedding], names[head]
    tied = model.all_tied_weights_keys.get(f"{pair[1]}.weight") == f"{pair[0]}.weight"
    return pair if tied or head.weight is embedding.weight else None


def replace_tied(model: nn.Module, embedding: str, head: str) -> None:
    """Make the head read the packed embedding, and remove the tie between parameters from transformers' tables."""
    replace(model, head, TiedLinear(model.get_submodule(embedding)))
    for name, part in model.named_modules():
        if "all_tied_weights_keys" in vars(part):
            weight = f"{head}.weight".removeprefix(f"{name}." if name else "")
            ties = part.all_tied_weights_keys.items()
            part.all_tied_weights_keys = {target: source for target, source in ties if target != weight}


def unpack(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace all packed weights by dense ones of this dtype."""
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedExperts):
            dense = module.dequantized(dtype)
            # The same object becomes dense again, as it became packed.
            module.__dict__, module.__class__ = dense.__dict__, module.original
            for projection in PROJECTIONS.values():
                weight = module._parameters[projection].contiguous()
                module._parameters[projection] = nn.Parameter(weight, requires_grad=False)
        elif isinstance(module, Linear | Embedding):
            columns, (data, *scales) = columns_of(module, "weight"), module.parts("weight")
            weight = nn.Parameter(
                dequantized(data, *scales, module.format, data.new_empty(0, columns, dtype=dtype)), False
            )
            if isinstance(module, Linear):
                dense = nn.Linear(columns, module.out_features, device="meta", bias=False)
                dense.weight, dense.bias = weight, module.bias
            else:
                dense = nn.Embedding(module.num_embeddings, columns, _weight=weight * module.multiplier)
            replace(model, name, dense)
