"""A fused model under torch.compile(fullgraph=True), decoding into a static cache.

python examples/compiled.py [CHECKPOINT] [--device cpu|mps] [--backend inductor]
"""

import torch
from transformers import StaticCache

import torch_moe_metal
from common import Parser, random_prompt
from torch_moe_metal.commands.common.loading import say
from torch_moe_metal.transformers.versions import with_cache

#: Relative differences of logits: inductor may round differently.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@torch.no_grad()
def decode(model, step, prompt: torch.Tensor, count: int, tokens: list[int] | None = None) -> torch.Tensor:
    """The logits [count, vocabulary] of the tokens after `prompt`. Each next token is the best one, or the next of
    `tokens`. `step` is the model, compiled or not."""
    cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + count)
    found = [model(prompt, **with_cache(cache)).logits[0, -1]]
    for i in range(count - 1):
        token = found[-1].argmax() if tokens is None else torch.tensor(tokens[i], device=prompt.device)
        where = torch.tensor([[prompt.shape[1] + i]], device=prompt.device)
        found.append(step(token.view(1, 1), **with_cache(cache), position_ids=where).logits[0, -1])
    return torch.stack(found).float()


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    backends = torch.compiler.list_backends(exclude_tags=())
    parser.add_argument("--backend", choices=backends, metavar="NAME", default="inductor", help="default: inductor")
    options = parser.parse_args(arguments)
    model = parser.model(options)
    print(torch_moe_metal.patch(model))
    prompt = random_prompt(model, 1, 16)
    eager = decode(model, model, prompt, 12)
    tokens = eager.argmax(-1).tolist()
    print("eager:   ", tokens)
    say(f"Compiling with {options.backend}: the first token takes a while ...")
    # With the same tokens: if rounding changed one token, all later logits would differ.
    compiled = decode(model, torch.compile(model, fullgraph=True, backend=options.backend), prompt, 12, tokens)
    print("compiled:", compiled.argmax(-1).tolist())
    difference, allowed = float((compiled - eager).norm() / eager.norm()), TOLERANCES[model.dtype]
    verdict = "equal to eager" if difference <= allowed else f"DIFFERENT: expected at most {allowed:.0e}"
    print(f"relative difference of the logits: {difference:.1e}, {verdict}")


if __name__ == "__main__":
    main()
