"""Loads GGUF files through `from_pretrained` and keeps their blocks packed: `gguf_file="model-Q4_K_M.gguf"`.

transformers has its own packed path for some architectures, with kernels from the hub. If those kernels run, this
quantizer leaves the checkpoint to it, and `patch` fuses the modules that it makes.
"""

import copy
import dataclasses
from math import prod

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter
from transformers.integrations.accelerate import get_device
from transformers.integrations.gguf.dequant import GGML_BLOCK
from transformers.integrations.gguf.dequant import dequantize as stock_dequantize
from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS, Cast
from transformers.integrations.gguf.kernels import get_gguf_kernel
from transformers.quantizers import auto
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer
from transformers.utils import logging

from ....gguf import STAMPS, GgufFile, GgufTensor, architecture_of, read_ahead
from ....gguf.hub import read
from ....gguf.views import mapped
from ....packed_layers import Permuted
from ...fusing.experts import NAME, is_experts, why_not_packed
from ...fusing.packed_modules import PackedExperts, Parts, let_transformers_initialise
from ..config import ALWAYS_DENSE, Form, MoeMetalConfig, Plan, alike, pack_all, packable, weight_names
from ..moe_metal import MoeMetal
from ..patterns import within
from ..quantizer import PackedQuantizer, device_type, naming
from ..sources import Sources, sources_of
from .architectures import CONVERSIONS, JoinGateUp

logger = logging.get_logger(__name__)
ops = torch.ops.moe_metal


class Unpacked:
    """A tensor of blocks that becomes dense when transformers' loader reads it."""

    def __init__(self, tensor: GgufTensor, dtype: torch.dtype):
        self.tensor, self.dtype, self.shape = tensor, dtype, tensor.shape

    def is_floating_point(self) -> bool:
        return True

    def __getitem__(self, _) -> Tensor:
        return unpacked(self.tensor, self.dtype)


def unpacked(tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
    """The values of blocks, including formats that only the package gguf can dequantise."""
    blocks = tensor.mapped()
    if tensor.has_reader:
        rows = blocks.view(-1, blocks.shape[-1])
        return ops.dequantize(rows, None, None, format=tensor.format, dtype=dtype).view(tensor.shape)
    if tensor.type in GGML_BLOCK:
        return stock_dequantize(blocks.flatten(), tensor.type, dtype).reshape(tensor.shape)
    try:
        from gguf import GGMLQuantizationType, dequantize
    except ImportError:
        raise ImportError(
            f"torch_moe_metal: {tensor.file}: {tensor.name}: {tensor.format} needs the package gguf: pip install gguf"
        ) from None
    numbers = dequantize(blocks.numpy(), GGMLQuantizationType(tensor.type))
    return torch.from_numpy(numbers).view(tensor.shape).to(dtype)


# ------------------------------------------------------------------------------------------------ the quantizer


class Gguf(PackedQuantizer, GgufHfQuantizer):
    """The quantizer of a GGUF file. A loaded model has a `MoeMetalConfig`, with which it is saved."""

    kind = "gguf"
    stock = GgufHfQuantizer
    file: GgufFile

    def validate_environment(self, *args, device_map=None, **kwargs) -> None:
        self.device_map = device_map
        super().validate_environment(*args, device_map=device_map, **kwargs)

    def read_header(self, gguf_file: str) -> None:
        """Called first with the path of the file, before the model is built."""
        self.file = read(gguf_file)
        architecture = architecture_of(self.file)
        known = CONVERSIONS | GGUF_ARCHS
        elsewhere = self.device_map is None or "mps" in str(self.device_map)
        if architecture in GGUF_ARCHS and elsewhere and get_gguf_kernel():
            self.__class__ = self.stock  # transformers loads it, with kernels from the hub
        elif architecture not in known:
            self.__class__ = self.stock  # transformers dequantises it or raises
        else:
            self.convert = known[architecture]
            return
        self.read_header(gguf_file)

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """The default is float32, as in transformers, or the dtype of a file without blocks."""
        found = {tensor.stored_dtype for tensor in self.file.tensors.values()} - {torch.float32}
        halves = len(found) == 1 and found <= {torch.float16, torch.bfloat16}
        self.dtype = dtype or (found.pop() if halves else torch.float32)
        return self.dtype

    def _process_model_before_weight_loading(self, model, device_map=None, **kwargs):
        self.places = device_map or {"": "cpu"}  # now with a device for each module
        with naming(str(self.file.path)):
            self.mapping = self.convert(model.config)
            # Finding names changes the conversions, so it works on copies.
            self.sources = sources_of(model, self.file.tensors, copy.deepcopy(self.mapping))
            expect_all(model, self.sources)
            sizes = {name: tensor.numel() for name, tensor in model.state_dict().items()}
            plan = plan_of(model, self.sources)
            pack_all(model, plan, lambda name, dense, form: packed_parts(name, dense, self.sources[name]))
            self.packed = {weight for forms in plan.values() for weight in forms}
            for name, given in self.sources.items():
                if given.converter is not None and name not in self.packed:
                    expect_numbers(list(given), sizes[name])
        let_transformers_initialise(model)
        warn_of_dense([tensor for name, given in self.sources.items() if name not in self.packed for tensor in given])

    def get_state_dict(self, checkpoint_file: str, model: nn.Module) -> dict:
        """The model's tensors in the file: blocks and elements in the mapped pages, and tensors that become dense when
        read."""
        self.file.expect_as_read()
        found, in_buffers = {}, self.in_metal_buffers()
        for name, given in self.sources.items():
            for tensor in given:
                dense = tensor.is_packed and name not in self.packed
                found[tensor.name] = Unpacked(tensor, self.dtype) if dense else in_buffers.get(tensor.name)
                if found[tensor.name] is None:
                    found[tensor.name] = tensor.mapped()
        return found

    def in_metal_buffers(self) -> dict[str, Tensor]:
        """The blocks of weights on mps, by the tensor's name, in Metal buffers over the file's pages."""
        groups = [list(self.sources[name]) for name in self.packed if self.device_of(name) == "mps"]
        if not groups:
            return {}
        found, said = mapped(groups, {stamp.file: stamp.size for stamp in self.file.stamps})
        for line in said:
            logger.warning(f"torch_moe_metal: {line}")
        buffers = {file: set() for file in {tensor.file for tensor in self.file.tensors.values()}}
        for name, tensor in found.items():
            buffers[self.file.tensors[name].file].add(tensor.untyped_storage().data_ptr())
        stamps = tuple(
            dataclasses.replace(stamp, buffers=frozenset(buffers.get(stamp.file, ()))) for stamp in self.file.stamps
        )
        self.file = dataclasses.replace(self.file, stamps=stamps)
        return found

    def device_of(self, name: str) -> str:
        return device_type(get_device(self.places, name))

    def update_weight_conversions(self, weight_conversions, model):
        return self.mapping

    def get_new_dtype(self, converter, param, dtype):
        """Blocks are not cast. Converted tensors are cast last, because a norm's weight has more bits near 1 than near
        0."""
        if not param.is_floating_point():
            return None
        if not isinstance(converter, WeightConverter):
            return dtype
        if not any(isinstance(operation, Cast) for operation in converter.operations):
            converter.operations.append(Cast(dtype))
        return None

    def _process_model_after_weight_loading(self, model, **kwargs):
        super()._process_model_after_weight_loading(model, **kwargs)
        for name in self.packed:
            for operation in operations_of(self.sources[name]):
                permutation = getattr(operation, "input_permutation", None)
                if permutation is not None:
                    home = name.removesuffix(".weight")
                    linear = model.get_submodule(home)
                    permutation = permutation.to(linear.parts("weight")[0].device)
                    model.set_submodule(home, Permuted(linear, permutation))
        have_own_pages(model)
        experts = [module for module in model.modules() if isinstance(module, PackedExperts)]
        weights = [module.parts(weight)[0] for module in experts for weight in module.packing]
        read_ahead.for_experts([weight for weight in weights if weight.device.type == "cpu"], self.file)
        setattr(model, STAMPS, self.file.stamps)
        if not self.packed:
            self.remove_quantization_config(model)
            return model
        del self.file, self.sources, self.mapping, self.convert
        self.__class__ = MoeMetal  # the model holds this object, and must save itself as any packed model does
        self.quantization_config = model.config.quantization_config = MoeMetalConfig()
        model.quantization_method = NAME
        model._weight_conversions = []
        return model


def operations_of(given: Sources) -> list:
    return given.converter.operations if given.converter else []


def expect_all(model: nn.Module, sources: dict[str, Sources]) -> None:
    """Raises if the file lacks tensors, or if their shapes contradict the metadata."""
    known = model.state_dict()
    if missing := sorted(known.keys() - sources.keys() - model.all_tied_weights_keys.keys()):
        raise ValueError(f"torch_moe_metal: missing: {', '.join(missing)}")
    for key, given in sources.items():
        for tensor in given:
            tensor.expect(tensor.is_packed or tensor.stored_dtype.is_floating_point, "floats or blocks")
        if given.converter is None:
            for tensor in given:
                expect_shape(tensor, tuple(known[key].shape))
        else:
            given.expect_patterns(given.patterns)


def expect_numbers(tensors: list[GgufTensor], count: int) -> None:
    """Raises unless the tensors of a conversion have as many elements as its result, and those of experts one shape."""
    first, found = tensors[0], sum(prod(tensor.shape) for tensor in tensors)
    first.expect(found == count, f"{count} numbers with what is joined to it, by the metadata, not {found}")
    for tensor in tensors:
        if len(first.shape) == 3 and len(tensors) == 2 and "_exps" in first.name:
            tensor.expect(tensor.shape == first.shape, f"shape {list(first.shape)}, that of {first.name}")


def expect_shape(tensor: GgufTensor, shape: tuple[int, ...]) -> None:
    tensor.expect(tensor.shape == shape, f"shape {list(shape)}, by the metadata")


def plan_of(model: nn.Module, sources: dict[str, Sources]) -> Plan:
    """The weights that stay packed: blocks with a reader that no conversion changes."""
    found = {}
    for name, module in packable(model):
        weights = weight_names(name, module).values()
        forms = {weight: form for weight in weights if weight in sources and (form := form_of(sources[weight]))}
        dense = any(within(pattern, name) for pattern in ALWAYS_DENSE)
        if len(forms) == len(weights) and not dense and not (is_experts(module) and why_not_packed(module)):
            found[name] = forms
    return found


def form_of(given: Sources) -> Form | None:
    """How a weight is packed; None if it becomes dense."""
    formats = {tensor.format if tensor.has_reader else None for tensor in given}
    keeps = all(getattr(operation, "supports_packed", False) for operation in operations_of(given))
    format = formats.pop() if keeps and len(formats) == 1 else None
    return Form.of(format, 4, 64) if format else None


def packed_parts(name: str, dense: Tensor, given: Sources) -> Parts:
    """The blocks of a weight [..., N, C] on the meta device. Gate and up of experts are two tensors."""
    tensors = list(given)
    *leading, N, C = dense.shape
    for tensor in tensors:
        rows = N // len(tensors) if leading else tensor.shape[0]
        expect_shape(tensor, (*leading, rows, C))
    if sum(tensor.shape[-2] for tensor in tensors) != N:
        expect_shape(tensors[0], (N, C))
    apart = any(isinstance(operation, JoinGateUp) for operation in operations_of(given))
    size = (*leading, 2, N // 2) if apart else (*leading, N)
    return {name.rpartition(".")[2]: torch.empty(*size, tensors[0].stored_shape[-1], dtype=torch.uint8, device="meta")}


def warn_of_dense(tensors: list[GgufTensor]) -> None:
    """Warn about blocks that become dense, with the memory that they need."""
    dense = [tensor for tensor in tensors if tensor.is_packed]
    if dense:
        formats = ", ".join(sorted({tensor.format for tensor in dense}))
        size = sum(prod(tensor.shape) for tensor in dense) * 2 / 2**30
        logger.warning(
            f"torch_moe_metal: {len(dense)} tensors in {formats} become dense, {size:.2f} GiB in 16 bits: "
            f"{', '.join(alike(tensor.name for tensor in dense))}"
        )


def have_own_pages(model: nn.Module) -> None:
    """Give each tensor in a file's pages a storage of its own bytes only, because copying and saving use whole
    storages."""
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        size = tensor.element_size()
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin, end = tensor.storage_offset() * size, (tensor.storage_offset() + last + 1) * size
        if tensor.device.type == "cpu" and tensor.numel() and end - begin < storage.nbytes():
            tensor.data = torch.empty(0, dtype=tensor.dtype).set_(storage[begin:end], 0, tensor.shape, tensor.stride())


def register() -> None:
    """Replace transformers' own quantizer for GGUF files."""
    auto.AUTO_QUANTIZER_MAPPING["gguf"] = Gguf
