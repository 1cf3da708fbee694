"""gpt-oss's MXFP4 checkpoints, which stay packed."""

import torch
from torch import Tensor, nn
from transformers.quantizers import auto
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from ...packing import MXFP4_GROUP
from ..fusing.experts import is_experts
from ..fusing.packed_modules import Parts, pack
from .checkpoint import Stored, check_mxfp4
from .quantizer import PackedQuantizer, as_stored


class Mxfp4(PackedQuantizer, Mxfp4HfQuantizer):
    """gpt-oss: experts `gate_up_proj_blocks` [E, 2I, H / 32, 16], `gate_up_proj_scales` [E, 2I, H / 32], and so on."""

    kind = "mxfp4"
    stock = Mxfp4HfQuantizer

    def pack(self, model: nn.Module, tensors: dict[str, Stored]) -> None:
        check_mxfp4(tensors)

        def parts(name: str, dense: Tensor) -> Parts:
            module, _, name = name.rpartition(".")
            options = {"dtype": torch.uint8, "device": "meta"}
            groups = (*dense.shape[:-1], dense.shape[-1] // MXFP4_GROUP)
            sizes = {f"{name}_blocks": (*groups, MXFP4_GROUP // 2), f"{name}_scales": groups}
            found = {part: torch.empty(size, **options) for part, size in sizes.items()}
            return as_stored(model, tensors, module, found)

        for name, module in list(model.named_modules()):
            if is_experts(module):
                pack(model, name, "mxfp4", parts)


def register() -> None:
    auto.AUTO_QUANTIZER_MAPPING["mxfp4"] = Mxfp4
