"""Fuse the MoE blocks of a model that is already there, compare, and undo it.

python -m torch_moe_metal.examples.swap [CHECKPOINT] [--device cpu|mps]
"""

import torch

import torch_moe_metal

from .models import Parser, random_prompt


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = Parser("swap", __doc__)
    model = parser.model(parser.parse_args(arguments))
    ids = random_prompt(model, 2, 16)
    stock = model(ids).logits

    report = torch_moe_metal.patch(model)  # whole blocks and layers, in place, on the same weights
    print(report)
    fused = model(ids).logits
    print(f"relative difference of the logits: {float((fused - stock).norm() / stock.norm()):.1e}")

    torch_moe_metal.unpatch(model)
    model.set_experts_implementation("moe_metal")  # or only the experts, as from_pretrained's argument does
    experts_only = model(ids).logits
    print(f"with experts_implementation:       {float((experts_only - stock).norm() / stock.norm()):.1e}")


if __name__ == "__main__":
    main()
