"""Chat with a Mixture-of-Experts checkpoint, in a folder, a GGUF file or on the hub: dense, or run as quantised.

python -m torch_moe_metal.examples.chat CHECKPOINT [--bits 4] [--prompt TEXT] [--tokens 256] [--stock] [--device DEVICE]
"""

import time

from transformers import AutoTokenizer, TextStreamer

import torch_moe_metal

from ..bench.here import positive
from ..formats import BITS
from .models import Parser, memory, say


def encode(tokenizer, conversation: list[dict], device) -> dict:
    if tokenizer.chat_template:
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        return tokenizer.apply_chat_template(conversation, **options).to(device)
    return tokenizer("\n".join(turn["content"] for turn in conversation), return_tensors="pt").to(device)


def answer(tokenizer, model, conversation: list[dict], tokens: int) -> str:
    """Print the answer as it comes, then how fast it came."""
    inputs = encode(tokenizer, conversation, model.device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    start = time.perf_counter()
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=tokens,
        do_sample=False,
        streamer=streamer,
    )
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
    parser.add_argument("--prompt", help="one question, instead of a conversation")
    parser.add_argument("--tokens", type=positive, default=256, help="the most tokens of an answer (default: 256)")
    parser.add_argument("--stock", action="store_true", help="leave transformers as it is, to compare")
    parser.add_argument("--bits", type=int, choices=BITS, help="pack a dense checkpoint in so many while it is loaded")
    options = parser.parse_args(arguments)
    with parser.loading(f"the tokenizer of {options.checkpoint}", "cpu"):
        tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
        if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):  # what transformers makes of no files
            raise ValueError(
                "it has no words: expected tokenizer.json, or other files of a tokenizer, beside config.json"
            )
    model = parser.model(options)
    if not options.stock:
        print(torch_moe_metal.patch(model))
    say(memory(model))
    if options.prompt:
        answer(tokenizer, model, [{"role": "user", "content": options.prompt}], options.tokens)
    else:
        chat(tokenizer, model, options.tokens)


if __name__ == "__main__":
    main()
