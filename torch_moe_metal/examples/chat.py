"""Chat with a Mixture-of-Experts checkpoint in a local directory.

python -m torch_moe_metal.examples.chat DIRECTORY [--prompt TEXT] [--tokens 256] [--stock]
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import torch_moe_metal


def load(directory: str, stock: bool):
    device = "mps" if torch.backends.mps.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").to(device).eval()
    if not stock:
        print(torch_moe_metal.patch(model))
    return tokenizer, model


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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m torch_moe_metal.examples.chat", description=__doc__.split("\n")[0])
    parser.add_argument("directory", help="a checkpoint: config.json, safetensors and the tokenizer's files")
    parser.add_argument("--prompt", help="one question, instead of a conversation")
    parser.add_argument("--tokens", type=int, default=256, help="the most tokens of an answer")
    parser.add_argument("--stock", action="store_true", help="leave transformers as it is, to compare")
    options = parser.parse_args(arguments)
    tokenizer, model = load(options.directory, options.stock)
    conversation: list[dict] = []
    while prompt := options.prompt or input("> "):
        conversation.append({"role": "user", "content": prompt})
        conversation.append({"role": "assistant", "content": answer(tokenizer, model, conversation, options.tokens)})
        if options.prompt:
            return


if __name__ == "__main__":
    main()
