"""Fuse the MoE blocks of a model that is already there, compare, and undo it.

python -m torch_moe_metal.examples.swap
"""

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import torch_moe_metal


def small_model() -> torch.nn.Module:
    """Stands for your own model: a small Qwen3-MoE with random weights."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    )
    device = "mps" if torch.backends.mps.is_available() else "cpu"
    return AutoModelForCausalLM.from_config(config).to(device).eval()


@torch.no_grad()
def main() -> None:
    model = small_model()
    ids = torch.randint(0, 1000, (2, 16), device=model.device)
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
