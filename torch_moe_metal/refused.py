"""What the check at first use (first_use.py) found wrong on this Mac's GPU, and no other kernel of ours replaces.

PyTorch's ops then compute it, as they do if a gradient is needed.
"""

from torch import Tensor

#: Ops of ours, and SDPA.
_refused: set[str] = set()
#: PyTorch's scaled_dot_product_attention.
SDPA = "scaled_dot_product_attention"
#: Modules that call these ops have another way for each of them. Without any other op they run on their original code.
REPLACED_ONE_BY_ONE = frozenset(("attention", "dequantize", "experts", "linear", SDPA))


def refuse(name: str) -> None:
    _refused.add(name)


def is_refused(name: str, x: Tensor) -> bool:
    """Whether this op must not compute x: on mps, or on meta, where warm-up calls find the kernels that mps needs."""
    return bool(_refused) and name in _refused and x.device.type in ("mps", "meta")


def refuses_fusion(x: Tensor) -> bool:
    """Whether a fused forward must not compute x, since one of the smaller ops is wrong."""
    return bool(_refused) and not _refused <= REPLACED_ONE_BY_ONE and x.device.type in ("mps", "meta")
