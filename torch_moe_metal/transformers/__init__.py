"""torch_moe_metal in Hugging Face transformers.

One argument swaps the experts of every MoE model, one call fuses whole blocks:

    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moe_metal")
    report = torch_moe_metal.patch(model)
"""

try:
    import transformers.integrations.moe  # noqa: F401
except ImportError as error:
    raise ImportError(
        "torch_moe_metal needs transformers 5.0 or newer here, whose models run their experts through an interface: "
        "`pip install -U transformers`"
    ) from error

from .config import MoeMetalConfig, quantize_
from .patch import Report, Row, patch, unpatch

__all__ = ["MoeMetalConfig", "Report", "Row", "patch", "quantize_", "unpatch"]
