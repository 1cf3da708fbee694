"""Round trips of messages through whole chat templates: the text that a template makes of a message with reasoning and
calls is parsed by the server's form for this template, and the result must be the message.

    pip download --no-deps --no-binary :all: llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    python tools/chat_templates.py llama_cpp_python-*/vendor/llama.cpp/models/templates

llama.cpp's folder has copies of the families' templates. Without names, those of the families that `patch` fuses.
"""

import argparse
import sys
from pathlib import Path

from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_template_utils import render_jinja_template

from torch_moe_metal.commands.serve.families import Form, form_of

NAMES = ["Qwen-Qwen3-0.6B", "Qwen3.5-4B", "Qwen3-Coder", "openai-gpt-oss-120b", "GLM-4.6", "GLM-4.7-Flash"]
NAMES += [
    "deepseek-ai-DeepSeek-V3.1",
    "deepseek-ai-DeepSeek-V3.2",
    "llama-cpp-deepseek-r1",
    "MiniMax-M2",
    "moonshotai-Kimi-K2",
    "google-gemma-4-31B-it",
]
ARGUMENTS = {"city": 'Paris <b> "x"\n12', "days": 3, "more": {"wet": True}}
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "object", "properties": {}}}
FUNCTION = {"name": "the-weather_1", "description": "d", "parameters": {"type": "object", "properties": PROPERTIES}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"name": "the-weather_1", "arguments": ARGUMENTS}
THINK, NO_MORE = "<think>", "</think>"
USER = [{"role": "user", "content": "hello"}]


def render(template: str, messages: list[dict], **options) -> str:
    options |= {"bos_token": "<bos>", "eos_token": "<eos>"}
    return render_jinja_template([messages], tools=TOOLS, chat_template=template, **options)[0][0]


def message(form: Form, calls: int, thinks: bool) -> dict:
    made = {"role": "assistant", "content": "one moment"}
    if calls:
        made["tool_calls"] = [{"id": f"functions.the-weather_1:{i}", "function": CALL} for i in range(calls)]
    if form.before:  # gpt-oss has reasoning or a text before a call, and its calls are messages of their own
        return made | {"thinking": "which city?", **({"content": ""} if calls else {})}
    return made | ({"reasoning_content": "which city?"} if thinks else {})


def fault(template: str, form: Form, calls: int, thinks: bool) -> str | None:
    """What differs after the round trip."""
    given, values = message(form, calls, thinks), {"enable_thinking": thinks, "thinking": thinks}
    prompt = render(template, USER, add_generation_prompt=True, **values)
    whole = render(template, [*USER, given], add_generation_prompt=False, **values)
    length = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    if (before := prompt.removesuffix(f"{THINK}{NO_MORE}")) != prompt and whole.startswith(before + NO_MORE):
        whole, length = prompt + whole.removeprefix(before + NO_MORE), len(prompt)  # earlier answers have one mark
    prefix = prompt[:length]
    answer = whole[length:].rstrip("\n")  # a line's end after the mark with which the model ends
    found = parse_response(answer, form.template, prefix=prefix, tools=TOOLS)
    expected = [CALL] * (min(calls, 1) if form.call.between is None and form.before else calls)
    if [call["function"] for call in found.get("tool_calls", [])] != expected:
        return f"calls: {found.get('tool_calls')}"
    for name, text in (("reasoning_content", "which city?"), ("content", "one moment")):
        if found.get(name, "") != (text if text in answer else ""):  # some templates leave it out
            return f"{name}: {found.get(name)}"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=NAMES, help="of templates, without .jinja")
    options = parser.parse_args(arguments)
    failed = 0
    for name in options.names:
        template = (options.folder / f"{name}.jinja").read_text()
        form = form_of(template, "")
        if form.call is None:
            print(f"{name}: FAILED: no form")
            failed += 1
            continue
        cases = [(calls, thinks) for calls in (0, 1, 2) for thinks in (False, True)]
        faults = [f"{each}: {found}" for each in cases if (found := fault(template, form, *each)) is not None]
        print(f"{name}: {f'FAILED: {faults}' if faults else 'equal'}")
        failed += bool(faults)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
