"""Multi-token prediction, `generate(use_mtp=True)`, of packed and patched models: the drafting layers are packed and
fused like the layers of the model.

transformers loads them from the checkpoint in each call of `generate`, as dense layers of the class of the model's last
layer. Here they are loaded once, and again if the model has changed.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from torch import Tensor, nn

from ...packing import quantize
from ..fusing.fused import Fused
from ..fusing.packed_modules import Parts, named_parts, packed_modules
from ..fusing.patch import patch
from .config import Form, MoeMetalConfig, pack_all

#: The drafting models made so far, with the state of the main model they were made for.
_made: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def made(stock: Callable, main_model: nn.Module, device_map, **kwargs) -> nn.Module:
    """The drafting model. transformers' own function makes it if no part of the main model is ours."""
    packed = any(True for _ in packed_modules(main_model))
    fused = any(isinstance(module, Fused) for module in main_model.modules())
    if not packed and not fused:
        return stock(main_model, device_map=device_map, **kwargs)
    shared = main_model.get_input_embeddings(), main_model.lm_head
    made_of = packed, fused, str(device_map), main_model.dtype, *map(id, shared)
    known, model = _made.get(main_model, (None, None))
    if known != made_of:
        config = quantization(main_model) if packed else None
        with plain_conversions(main_model, packed):
            model = stock(main_model, device_map=device_map, **kwargs)
        if config is not None:
            pack_layers(model.layers, config)
        if fused:
            patch(model)
        _made[main_model] = made_of, model
    return model


def quantization(model: nn.Module) -> MoeMetalConfig:
    """How the model was packed. Raises for checkpoints whose drafting layers we cannot read."""
    config = model.hf_quantizer.quantization_config
    if isinstance(config, MoeMetalConfig):
        return config
    raise ValueError(
        "torch_moe_metal: use_mtp: expected a dense checkpoint, perhaps packed by MoeMetalConfig or quantize_, got one "
        f"that is packed as {config.quant_method}, {model.config.name_or_path}"
    )


@contextmanager
def plain_conversions(model: nn.Module, packed: bool) -> Iterator[None]:
    """Convert the checkpoint's names like those of a dense model, not like those of the packed one."""
    name = "_weight_conversions"
    before = {name: vars(model).pop(name)} if packed and name in vars(model) else {}
    try:
        yield
    finally:
        vars(model).update(before)


def pack_layers(layers: nn.ModuleList, config: MoeMetalConfig) -> None:
    """Pack the layers, except the parts that they share with the model: embedding, head and rotary angles."""

    def parts(name: str, dense: Tensor, form: Form) -> Parts:
        return named_parts(name.rpartition(".")[2], quantize(dense, **asdict(form)))

    pack_all(layers, config.plan(layers), parts)
