"""torch_moe_metal in Hugging Face transformers.

One argument swaps the experts of every MoE model, one call fuses whole blocks:

    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moe_metal")
    report = torch_moe_metal.patch(model)
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ..transformers_support import require_supported

if TYPE_CHECKING:
    from .checkpoints.config import MoeMetalConfig
    from .checkpoints.quantize import quantize_
    from .fusing.patch import Report, Row, patch, unpatch

require_supported()

#: Where the names are that users import. They are imported when one is needed, because transformers imports some of our
#: modules while it is imported itself.
HOMES = {"MoeMetalConfig": "checkpoints.config", "quantize_": "checkpoints.quantize"}
HOMES |= dict.fromkeys(("Report", "Row", "patch", "unpatch"), "fusing.patch")


if not TYPE_CHECKING:  # with it, type checkers would accept every name

    def __getattr__(name: str):
        if name not in HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Importing these registers our experts and our attention, which imports modules of ours.
        import_module("transformers.integrations.moe")
        import_module("transformers.modeling_utils")
        return getattr(import_module(f".{HOMES[name]}", __name__), name)


__all__ = ["MoeMetalConfig", "Report", "Row", "patch", "quantize_", "unpatch"]
