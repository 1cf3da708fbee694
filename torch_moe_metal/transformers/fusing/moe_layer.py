"""A MoE block of transformers as the arguments of a `torch_moe_metal.nn.MoE`."""

from torch import nn

from .experts import expert_arguments
from .factory import fused_class
from .fused import original_class
from .moe_blocks import FusedBlock, FusedLlama4Block


def layer_of(block: nn.Module) -> tuple[tuple, str | None]:
    """For `nn.MoE.from_block`: the arguments of `gate` and of `experts`, the shared expert or None, and its gate or
    None; and the reason why the block cannot be converted, or None."""
    original = original_class(block)
    fused = fused_class(original)
    is_block = fused is not None and issubclass(fused, FusedBlock)
    if not is_block or issubclass(fused, FusedLlama4Block):
        return (), f"no MoE layer of this form: {original.__name__}"
    obstacle = fused.why_left(block)
    if obstacle:
        return (), f"cannot take {original.__name__}: {obstacle}"
    arguments, _ = expert_arguments(block.experts)
    record = fused.record
    shared, shared_gate = (getattr(block, name) if name else None for name in (record.shared, record.shared_gate))
    return (record.routing(getattr(block, record.router), block), arguments, shared, shared_gate), None
