"""A fused model under torch.compile(fullgraph=True), decoding into a static cache.

python -m torch_moe_metal.examples.compiled [DIRECTORY] [--device cpu|mps] [--backend inductor]
"""

import torch
from transformers import StaticCache

import torch_moe_metal

from .models import Parser, random_prompt, say


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


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("compiled", __doc__)
    backends = torch.compiler.list_backends(exclude_tags=())
    parser.add_argument("--backend", choices=backends, metavar="NAME", default="inductor", help="default: inductor")
    options = parser.parse_args(arguments)
    model = parser.model(options)
    print(torch_moe_metal.patch(model))
    prompt = random_prompt(model, 1, 16)
    eager = decode(model, model, prompt, 12)
    print("eager:   ", eager)
    say(f"Compiling with {options.backend}: the first token takes a while ...")
    compiled = decode(model, torch.compile(model, fullgraph=True, backend=options.backend), prompt, 12)
    print("compiled:", compiled)
    print("the same tokens" if eager == compiled else "DIFFERENT tokens")


if __name__ == "__main__":
    main()
