"""Fuse the MoE blocks of a model in memory, compare the logits, and restore the model.

python examples/swap.py [CHECKPOINT] [--device cpu|mps]
"""

import torch

import torch_moe_metal
from common import Parser, random_prompt


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    model = parser.model(parser.parse_args(arguments))
    ids = random_prompt(model, 2, 16)
    stock = model(ids).logits

    report = torch_moe_metal.patch(model)  # blocks, layers and attention, in place and without copies of weights
    print(report)
    fused = model(ids).logits
    print(f"relative difference of the logits: {float((fused - stock).norm() / stock.norm()):.1e}")

    torch_moe_metal.unpatch(model)
    model.set_experts_implementation("moe_metal")  # only the experts, as with from_pretrained's argument
    experts_only = model(ids).logits
    print(f"with experts_implementation:       {float((experts_only - stock).norm() / stock.norm()):.1e}")


if __name__ == "__main__":
    main()
