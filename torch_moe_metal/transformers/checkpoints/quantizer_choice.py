"""Makes `from_pretrained` use our quantizers, also for checkpoints whose method transformers runs in another way."""

import functools
import re
import sys

from transformers.quantizers import auto
from transformers.utils import logging

from ...transformers_support import packed_checkpoints
from ..fusing.experts import NAME
from . import awq_gptq, fp8, metal, mlx_quantizer, moe_metal, mxfp4
from .awq_gptq_layouts import integers_of
from .gguf import quantizer as gguf_quantizer
from .mlx_config import METHOD, is_of_mlx
from .quantizer import packs, runs_here

logger = logging.get_logger(__name__)
INTEGERS = "moe_metal_integers"


def claimed(found: dict, device_map) -> dict | None:
    """A quantization_config that selects our quantizer for this checkpoint; None if it is not ours."""
    if not packed_checkpoints():
        return None
    if is_of_mlx(found):
        return found | {"quant_method": METHOD}
    if runs_here(device_map) and integers_of(found) is not None and packs("integers"):
        return {"quant_method": INTEGERS, "checkpoint": found}
    return None


def other_than(found: dict, passed) -> object:
    """The configuration that a user passed for a checkpoint of ours: it is ignored if it has the same method, and
    raises otherwise."""
    method = found.get("quant_method", "mlx-lm's")
    stock = auto.AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    if passed is None or (stock is not None and isinstance(passed, stock)):
        return None
    expected = "no quantization_config" + (f", or a {stock.__name__}" if stock else "")
    raise ValueError(f"it is quantised ({method}): expected {expected}, got a {type(passed).__name__}")


def take_over(stock):
    """Wraps transformers' choice of a quantizer."""

    @functools.wraps(stock)
    def get_hf_quantizer(config, quantization_config, device_map, *args, **kwargs):
        holder = config if getattr(config, "quantization_config", None) else config.get_text_config(decoder=True)
        found = getattr(holder, "quantization_config", None) or getattr(config, "quantization", None)
        if not isinstance(found, dict):
            return stock(config, quantization_config, device_map, *args, **kwargs)
        decompress = getattr(quantization_config, "run_compressed", True) is False
        ours = None if decompress else claimed(found, device_map)
        if ours is None and not (packed_checkpoints() and found.get("quant_method") in ("mxfp4", "fp8", "metal", NAME)):
            return stock(config, quantization_config, device_map, *args, **kwargs)
        try:
            if ours is not None:
                quantization_config = other_than(found, quantization_config)
                config.quantization_config = ours
            return stock(config, quantization_config, device_map, *args, **kwargs)
        except (TypeError, ValueError) as error:
            said = re.sub(r"^torch_moe_metal[.:] ?", "", str(error))
            raise ValueError(f"torch_moe_metal: {config.name_or_path}/config.json: {said}") from error

    return get_hf_quantizer


def register() -> None:
    """Register our quantizers, and wrap the function with which `from_pretrained` chooses one."""
    for module in (mxfp4, fp8, moe_metal, awq_gptq, mlx_quantizer, metal, gguf_quantizer):
        module.register()
    stock = auto.get_hf_quantizer
    auto.get_hf_quantizer = take_over(stock)
    home = sys.modules.get("transformers.modeling_utils")  # it imports the function by name
    if getattr(home, "get_hf_quantizer", None) is stock:
        home.get_hf_quantizer = auto.get_hf_quantizer
