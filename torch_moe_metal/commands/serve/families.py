"""The forms in which models write their reasoning and their calls of tools. A model's form is found by the marks in its
chat template, since a family may have several: Qwen3 has JSON, and Qwen3-Coder tags."""

import copy
from typing import NamedTuple

from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS

from .harmony import HARMONY


class Call(NamedTuple):
    """How a call is written. A line's end may be left out in each of these texts."""

    open: str  # with {name}
    close: str
    first: str = ""  # before all calls
    last: str = ""
    between: str | None = ""  # None: an answer has one call
    #: Around each value, with {key}, and {text}: whether it is a string. None: the arguments are one object.
    parameter: tuple[str, str] | None = None
    bare: bool = False  # the object is written without quotes, as Gemma's


class Form(NamedTuple):
    marks: tuple[str, ...]  # all of them are in the chat template
    types: tuple[str, ...] = ()  # of models whose template has no marks
    template: dict | None = None  # transformers' response template, with which answers are parsed
    think: tuple[str, str] | None = ("<think>", "</think>")
    before: str = ""  # before the text of an answer
    call: Call | None = None


def known(model_type: str) -> dict:
    """transformers' own response template."""
    return next(template for types, template in _RESPONSE_TEMPLATE_FALLBACKS.items() if model_type in types)


FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def template(anchor: str, ends: str, open_pattern: str, close_pattern: str, **content) -> dict:
    """A response template with reasoning between <think> and </think>, for a prompt that ends with `anchor`. `ends` are
    what follows a text or the last call."""
    call = {"open_pattern": open_pattern, "close_pattern": close_pattern, "repeats": True, "transform": FUNCTION}
    fields = {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": call | {"content": "json"} | content,
        "content": {"close_pattern": rf"\s*(?:{ends})"},
    }
    return {"defaults": {"role": "assistant"}, "start_anchor_pattern": anchor, "fields": fields}


def tags(key: str) -> dict:
    """Arguments in tags, one for each."""
    return {"content": "xml-inline", "content_args": {"tag_pattern": key}}


GLM = template(
    r"<\|assistant\|>(?:\s*</think>)?",  # which ends the reasoning where it is turned off
    r"<\|user\|>|<\|observation\|>|<\|endoftext\|>",
    r"\s*<tool_call>(?P<name>[^\n<]+)(?=[\n<])",
    "</tool_call>",
    **tags(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
)


def deepseek(name: str) -> str:
    """A token of DeepSeek's. Its lines are not ASCII's."""
    return f"<\uff5c{name}\uff5c>"


CALL, CALLS, SEPARATOR = deepseek("tool▁call▁begin"), deepseek("tool▁calls▁begin"), deepseek("tool▁sep")
CALL_END, CALLS_END = deepseek("tool▁call▁end"), deepseek("tool▁calls▁end")
DEEPSEEK = template(
    rf"(?:{deepseek('Assistant')}|{deepseek('tool▁output▁end')})(?:</think>)?",
    rf"{deepseek('end▁of▁sentence')}|{CALLS_END}",
    rf"(?:\s*{CALLS})?\s*{CALL}(?P<name>[^<]+?){SEPARATOR}",
    CALL_END,
)
DEEPSEEK_V3 = template(
    rf"{deepseek('Assistant')}|{deepseek('tool▁output▁end')}|{deepseek('tool▁outputs▁end')}",
    rf"{deepseek('end▁of▁sentence')}|{CALLS_END}",
    rf"(?:\s*{CALLS})?\s*{CALL}function{SEPARATOR}(?P<name>[^\n<]+)\n```json\n",
    rf"\n```\s*{CALL_END}",
)
DSML = "\uff5cDSML\uff5c"
DEEPSEEK_V3_2 = template(
    rf"(?:{deepseek('Assistant')}|</function_results>\n\n)(?:</think>)?",
    rf"{deepseek('end▁of▁sentence')}|</{DSML}function_calls>",
    rf'(?:\s*<{DSML}function_calls>)?\s*<{DSML}invoke name="(?P<name>[^"]+)">',
    f"</{DSML}invoke>",
    **tags(rf'<{DSML}parameter name="(?P<key>[^"]+)" string="\w+">(?P<value>.*?)</{DSML}parameter>'),
)
MINIMAX = template(
    r"\]~b\]ai\n",
    r"\[e~\[|</minimax:tool_call>",
    r'(?:\s*<minimax:tool_call>)?\s*<invoke name="(?P<name>[^"]+)">',
    "</invoke>",
    **tags(r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>'),
)
KIMI = template(
    r"<\|im_assistant\|>[^<]*<\|im_middle\|>",
    r"<\|im_end\|>|<\|tool_calls_section_end\|>",
    r"(?:\s*<\|tool_calls_section_begin\|>)?\s*<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^:<]+?):\d+\s*"
    r"<\|tool_call_argument_begin\|>",
    r"<\|tool_call_end\|>",
)
GEMMA = copy.deepcopy(known("gemma4"))
GEMMA["fields"]["tool_calls"]["open_pattern"] = r"<\|tool_call>call:(?P<name>[\w.-]+)"  # transformers has \w+
LLAMA = template(
    r"<\|header_start\|>assistant<\|header_end\|>\n\n",
    r"<\|eot\|>|<\|eom\|>|<\|python_end\|>",
    r'(?:<\|python_start\|>\s*)?(?=\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"parameters")',
    r"<\|python_end\|>|<\|eot\|>|<\|eom\|>",
    transform={"type": "function", "function": {"name": "{content.name}", "arguments": "{content.parameters}"}},
)

FORMS = (
    Form(
        ("<|channel|>", "<|message|>"),
        types=("gpt_oss",),
        template=HARMONY,
        think=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        before="<|channel|>final<|message|>",
        call=Call("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "", between=None),
    ),
    Form(
        ("<arg_key>",),
        template=GLM,
        call=Call(
            "<tool_call>{name}\n",
            "</tool_call>",
            between="\n",
            parameter=("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
    ),
    Form(
        ("<tool_call>", "<function="),
        template=known("qwen3_5"),
        call=Call(
            "<tool_call>\n<function={name}>\n",
            "</function>\n</tool_call>",
            between="\n",
            parameter=("<parameter={key}>\n", "\n</parameter>\n"),
        ),
    ),
    Form(
        ("<minimax:tool_call>",),
        template=MINIMAX,
        call=Call(
            '<invoke name="{name}">\n',
            "</invoke>\n",
            "<minimax:tool_call>\n",
            "</minimax:tool_call>",
            between="",
            parameter=('<parameter name="{key}">', "</parameter>\n"),
        ),
    ),
    Form(
        ("<|tool_calls_section_begin|>",),
        template=KIMI,
        call=Call(
            "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            between=None,
        ),
    ),
    Form(
        (DSML, "function_calls>"),
        types=("deepseek_v32",),
        template=DEEPSEEK_V3_2,
        call=Call(
            f'<{DSML}invoke name="{{name}}">\n',
            f"</{DSML}invoke>\n",
            f"<{DSML}function_calls>\n",
            f"</{DSML}function_calls>",
            parameter=(f'<{DSML}parameter name="{{key}}" string="{{text}}">', f"</{DSML}parameter>\n"),
        ),
    ),
    Form(
        (SEPARATOR, "```json"),
        template=DEEPSEEK_V3,
        call=Call(f"{CALL}function{SEPARATOR}{{name}}\n```json\n", f"\n```{CALL_END}", CALLS, CALLS_END, between="\n"),
    ),
    Form(
        (SEPARATOR,),
        template=DEEPSEEK,
        call=Call(f"{CALL}{{name}}{SEPARATOR}", CALL_END, CALLS, CALLS_END, between=""),
    ),
    Form(
        ("<|tool_call>call:",),
        types=("gemma4", "gemma4_text"),
        template=GEMMA,
        think=("<|channel>thought\n", "<channel|>"),
        call=Call("<|tool_call>call:{name}", "<tool_call|>", bare=True),
    ),
    Form(
        ("<|header_start|>", '"parameters"'),
        types=("llama4", "llama4_text"),
        template=LLAMA,
        think=None,
        call=Call('{{"name": "{name}", "parameters": ', "}}", between=None),
    ),
    Form(
        ("<tool_call>",),
        types=("qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl_moe"),
        template=known("qwen3_moe"),
        call=Call('<tool_call>\n{{"name": "{name}", "arguments": ', "}}\n</tool_call>", between="\n"),
    ),
)
UNKNOWN = Form((), think=None)


def form_of(chat_template: str, model_type: str) -> Form:
    """The form of a model's answers."""
    by_marks = (form for form in FORMS if all(mark in chat_template for mark in form.marks))
    by_type = (form for form in FORMS if model_type in form.types)
    return next(by_marks, None) or next(by_type, UNKNOWN)
