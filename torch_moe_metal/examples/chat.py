"""How to chat with a Mixture-of-Experts model. `python -m torch_moe_metal chat` does it better: it keeps the cache.

python -m torch_moe_metal.examples.chat CHECKPOINT [--tokens 256] [--device cpu|mps]
"""

import time

from transformers import TextStreamer

import torch_moe_metal

from ..bench.here import positive
from ..loading import Source, load_tokenizer
from .models import Parser


def answer(tokenizer, model, conversation: list[dict], tokens: int) -> str:
    """Print the answer as it comes, then how fast it came."""
    inputs = tokenizer.apply_chat_template(
        conversation, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    start = time.perf_counter()
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, streamer=streamer)
    new = output[0, inputs["input_ids"].shape[1] :]
    print(f"[{len(new)} tokens, {len(new) / (time.perf_counter() - start):.1f} tokens/s with the prompt's time]")
    return tokenizer.decode(new, skip_special_tokens=True)


def chat(tokenizer, model, tokens: int) -> None:
    """Until an empty line, the end of the input or Ctrl-C."""
    conversation: list[dict] = []
    try:
        while prompt := input("> "):
            conversation.append({"role": "user", "content": prompt})
            conversation.append({"role": "assistant", "content": answer(tokenizer, model, conversation, tokens)})
    except (EOFError, KeyboardInterrupt):
        print()


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("chat", __doc__, optional=False)
    parser.add_argument("--tokens", type=positive, default=256, help="the most tokens of an answer (default: 256)")
    options = parser.parse_args(arguments)
    with parser.loading(f"the tokenizer of {options.checkpoint}", "cpu"):
        tokenizer = load_tokenizer(Source.of(options.checkpoint))
    model = parser.model(options)
    print(torch_moe_metal.patch(model))  # all that is needed for transformers' generate to be fast
    chat(tokenizer, model, options.tokens)


if __name__ == "__main__":
    main()
