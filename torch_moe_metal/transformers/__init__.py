"""torch_moe_metal in Hugging Face transformers.

One argument swaps the experts of every MoE model, one call fuses whole blocks:

    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moe_metal")
    report = torch_moe_metal.patch(model)
"""

# ruff: noqa: E402
from ..transformers_support import require_supported

require_supported()

# Before our own modules: importing these registers our experts and our attention, which imports those modules.
import transformers.integrations.moe
import transformers.modeling_utils  # noqa: F401

from .checkpoints.config import MoeMetalConfig
from .checkpoints.quantize import quantize_
from .fusing.fuse import Report, Row
from .fusing.patch import patch, unpatch
from .fusing.snapshots import Snapshot, restore, snapshot

__all__ = ["MoeMetalConfig", "Report", "Row", "Snapshot", "patch", "quantize_", "restore", "snapshot", "unpatch"]
