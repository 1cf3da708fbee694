"""A fused model under torch.compile(fullgraph=True), decoding into a static cache.

python -m torch_moe_metal.examples.compiled
"""

import torch
from transformers import StaticCache

import torch_moe_metal

from .swap import small_model


@torch.no_grad()
def decode(model, step, prompt: torch.Tensor, count: int) -> list[int]:
    """`count` greedy tokens after `prompt`; `step` is the model, compiled or not."""
    cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + count)
    logits = model(prompt, past_key_values=cache).logits
    tokens = []
    for position in range(prompt.shape[1], prompt.shape[1] + count):
        token = logits[:, -1:].argmax(-1)
        tokens.append(int(token))
        where = torch.tensor([[position]], device=prompt.device)
        logits = step(token, past_key_values=cache, position_ids=where).logits
    return tokens


def main(backend: str = "inductor") -> None:
    model = small_model()
    print(torch_moe_metal.patch(model))
    prompt = torch.randint(0, 1000, (1, 16), device=model.device)
    eager = decode(model, model, prompt, 12)
    compiled = decode(model, torch.compile(model, fullgraph=True, backend=backend), prompt, 12)
    print("eager:   ", eager)
    print("compiled:", compiled)
    print("the same tokens" if eager == compiled else "DIFFERENT tokens")


if __name__ == "__main__":
    main()
