"""Tool calls and reasoning in the forms of the families: the text that a family's template makes of a message is parsed
to this message, and the grammar of a forced call allows it. tools/chat_templates.py does the same with whole templates.
"""

import json
import re
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks
from transformers.utils.chat_parsing import ResponseParser, parse_response

import served
from torch_moe_metal.commands.serve.calls import Rules, quoted
from torch_moe_metal.commands.serve.constraints import Constraints
from torch_moe_metal.commands.serve.families import DSML, UNKNOWN, deepseek, form_of
from torch_moe_metal.commands.serve.parsing import LenientParser

ARGUMENTS = {"city": 'Rio <b> "x"', "days": 3, "more": {"wet": True}}
AS_JSON = json.dumps(ARGUMENTS)
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "more": {"type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES]}
TOOLS = [{"type": "function", "function": {"name": "the-weather.1", "parameters": PARAMETERS}}]
CALL = {"type": "function", "function": {"name": "the-weather.1", "arguments": ARGUMENTS}}
THINK, THINK_END = "<think>", "</think>"


class Family(NamedTuple):
    marks: str  # which the chat template has
    prompt: str  # its end
    thought: str  # before and after the reasoning, with {}
    call: str
    ends: str
    tokens: tuple[str, ...]
    between: str | None = None  # two calls
    first: str = ""
    last: str = ""
    says: bool = True  # whether a text may precede a call


def tags(form: str) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in ARGUMENTS.items()}
    return "".join(form.format(*each) for each in texts.items())


HERMES = ("<tool_call>", "</tool_call>", THINK, THINK_END)
HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|return|>", "<|constrain|>")
DEEPSEEK = "Assistant tool▁call▁begin tool▁sep tool▁call▁end tool▁calls▁begin tool▁calls▁end end▁of▁sentence"
KIMI = "im_assistant im_middle im_end tool_call_begin tool_call_argument_begin tool_call_end "
KIMI += "tool_calls_section_begin tool_calls_section_end"
FAMILIES = {
    "qwen3": Family(
        "<tool_call>",
        "<|im_start|>assistant\n",
        "<think>\n{}\n</think>\n\n",
        f'<tool_call>\n{{"name": "the-weather.1", "arguments": {AS_JSON}}}\n</tool_call>',
        "<|im_end|>",
        HERMES,
        "\n",
    ),
    "qwen3_5": Family(
        "<tool_call> <function=",
        "<|im_start|>assistant\n<think>\n",
        "{}\n</think>\n\n",
        "<tool_call>\n<function=the-weather.1>\n"
        + tags("<parameter={}>\n{}\n</parameter>\n")
        + "</function>\n</tool_call>",
        "<|im_end|>",
        HERMES,
        "\n",
    ),
    "gpt_oss": Family(
        "<|channel|> <|message|>",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        f"<|channel|>commentary to=functions.the-weather.1 <|constrain|>json<|message|>{AS_JSON}<|call|>",
        "",
        HARMONY,
        says=False,
    ),
    "glm_4_6": Family(
        "<tool_call> <arg_key>",
        "<|assistant|>",
        "\n<think>{}</think>\n",
        "<tool_call>the-weather.1\n" + tags("<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n") + "</tool_call>",
        "<|observation|>",
        (*HERMES, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|assistant|>", "<|observation|>"),
        "\n",
    ),
    "glm_4_7_flash": Family(
        "<tool_call> <arg_key>",
        "<|assistant|></think>",
        "",
        "<tool_call>the-weather.1" + tags("<arg_key>{}</arg_key><arg_value>{}</arg_value>") + "</tool_call>",
        "<|observation|>",
        (*HERMES, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|assistant|>", "<|observation|>"),
        "",
    ),
    "deepseek_v3_1": Family(
        deepseek("tool▁sep"),
        deepseek("Assistant") + THINK,
        "{}</think>",
        f"{deepseek('tool▁call▁begin')}the-weather.1{deepseek('tool▁sep')}{AS_JSON}{deepseek('tool▁call▁end')}",
        deepseek("end▁of▁sentence"),
        (THINK, THINK_END, *map(deepseek, DEEPSEEK.split())),
        "",
        deepseek("tool▁calls▁begin"),
        deepseek("tool▁calls▁end"),
    ),
    "deepseek_v3": Family(
        f"{deepseek('tool▁sep')} ```json",
        deepseek("Assistant") + THINK,
        "{}</think>",
        f"{deepseek('tool▁call▁begin')}function{deepseek('tool▁sep')}the-weather.1\n```json\n{AS_JSON}\n```"
        f"{deepseek('tool▁call▁end')}",
        deepseek("end▁of▁sentence"),
        (THINK, THINK_END, *map(deepseek, DEEPSEEK.split())),
        "\n",
        deepseek("tool▁calls▁begin"),
        deepseek("tool▁calls▁end"),
    ),
    "deepseek_v3_2": Family(
        f"'{DSML}' 'function_calls>'",
        deepseek("Assistant") + THINK,
        "{}</think>",
        f'<{DSML}invoke name="the-weather.1">\n'
        + re.sub(
            r'(city" string=")false',
            r"\1true",
            tags(f'<{DSML}parameter name="{{}}" string="false">{{}}</{DSML}parameter>\n'),
        )
        + f"</{DSML}invoke>\n",
        deepseek("end▁of▁sentence"),
        (THINK, THINK_END, DSML, *map(deepseek, DEEPSEEK.split())),
        "",
        f"\n\n<{DSML}function_calls>\n",
        f"</{DSML}function_calls>",
    ),
    "minimax_m2": Family(
        "<minimax:tool_call>",
        "]~b]ai\n<think>\n",
        "{}\n</think>\n\n",
        '<invoke name="the-weather.1">\n' + tags('<parameter name="{}">{}</parameter>\n') + "</invoke>\n",
        "[e~[",
        ("]~b]", "[e~[", THINK, THINK_END, "<minimax:tool_call>", "</minimax:tool_call>"),
        "",
        "\n<minimax:tool_call>\n",
        "</minimax:tool_call>",
    ),
    "kimi_k2": Family(
        "<|tool_calls_section_begin|>",
        "<|im_assistant|>assistant<|im_middle|>",
        "<think>{}</think>",
        f"<|tool_call_begin|>functions.the-weather.1:0<|tool_call_argument_begin|>{AS_JSON}<|tool_call_end|>",
        "<|im_end|>",
        (THINK, THINK_END, *(f"<|{name}|>" for name in KIMI.split())),
        None,
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "gemma4": Family(
        "<|tool_call>call:",
        "<|turn>model\n",
        "<|channel>thought\n{}\n<channel|>",
        '<|tool_call>call:the-weather.1{city:<|"|>Rio <b> "x"<|"|>,days:3,more:{wet:true}}<tool_call|>',
        "<|tool_response>",
        ("<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"),
    ),
    "llama4": Family(
        '<|header_start|> "parameters"',
        "<|header_start|>assistant<|header_end|>\n\n",
        "",
        f'{{"name": "the-weather.1", "parameters": {AS_JSON}}}',
        "<|eot|>",
        ("<|header_start|>", "<|header_end|>", "<|eot|>"),
        says=False,
    ),
}
EVERY = pytest.mark.parametrize("name", FAMILIES)


def written(family: Family, thought: str, text: str, calls: int) -> str:
    """The text of a message."""
    before = family.thought.format(thought) if thought else family.thought.format("")
    body = (family.between or "").join([family.call] * calls)
    return f"{before}{text}{family.first}{body}{family.last}" if calls else before + text


def parse(name: str, text: str, streamed: bool) -> tuple[str, str, list[dict]]:
    """Content, reasoning and calls of an answer, whole or letter by letter."""
    family = FAMILIES[name]
    template, prompt = form_of(family.marks, "").template, f"hello{family.prompt}"
    if not streamed:
        message = parse_response(text, template, prefix=prompt, tools=TOOLS)
        return message.get("content", ""), message.get("reasoning_content", ""), message.get("tool_calls", [])
    parser = LenientParser(ResponseParser(template, prefix=prompt, tools=TOOLS))
    items = response_events_to_chunks(parser.initial_events)
    for letter in text:
        items += response_events_to_chunks(parser.feed(letter))
    items += response_events_to_chunks(parser.finalize()[1])
    calls = [
        {"type": "function", "function": {"name": item.name, "arguments": json.loads(item.arguments)}}
        for item in items
        if isinstance(item, ToolCall)
    ]
    thoughts = "".join(item for item in items if isinstance(item, ReasoningText))
    return "".join(item for item in items if type(item) is str).strip(), thoughts.strip(), calls


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@EVERY
def test_messages_are_parsed(name: str, streamed: bool):
    family = FAMILIES[name]
    thought = "which city?" if "{}" in family.thought else ""
    for calls in (0, 1, *([2] if family.between is not None else [])):
        text = "" if calls and not family.says else "one moment"
        shown = f"<|channel|>final<|message|>{text}<|return|>" if text and name == "gpt_oss" else text
        found = parse(name, written(family, thought, shown, calls) + family.ends, streamed)
        assert found == (text, thought, [CALL] * calls), (name, calls)


@EVERY
def test_a_call_that_is_not_ended_is_text(name: str):
    family = FAMILIES[name]
    text = written(family, "", "", 1)
    *_, calls = parse(name, text[: text.index("days") + 2], streamed=True)
    assert len(calls) <= 1  # those in tags have no end that would be missed


def constraints(name: str) -> tuple[Constraints, object]:
    family = FAMILIES[name]
    tokenizer = served.tokenizer(family.tokens)
    form = form_of(family.marks, "")
    tokenizer.response_template = form.template
    ends = [served.END, *([tokenizer.convert_tokens_to_ids("<|call|>")] if name == "gpt_oss" else [])]
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ends), config=SimpleNamespace(model_type=""))
    return Constraints(SimpleNamespace(processor=tokenizer, form=form, model=model)), tokenizer


def allows(name: str, text: str, tools: list[dict] = TOOLS) -> bool:
    made, tokenizer = constraints(name)
    constraint = made.make("tool_choice", tokenizer.encode(FAMILIES[name].prompt), tools=tools)
    for token in [*tokenizer.encode(text), served.END]:
        if not constraint.matcher.compute_logit_bias()[token]:
            return name == "gpt_oss" and text.endswith("<|call|>") and token == served.END  # which has ended before
        constraint.matcher.consume_token(token)
    return True


@EVERY
def test_a_grammar_allows_the_call(name: str):
    """Also after reasoning, and several; nothing else."""
    family = FAMILIES[name]
    thought = "hm {" if "{}" in family.thought else ""
    call = written(family, thought, "", 1).lstrip("\n")
    assert allows(name, call)
    if family.between is not None:
        assert allows(name, written(family, thought, "", 2).lstrip("\n"))
    assert not allows(name, call.replace("days", "hours"))
    assert not allows(name, call.replace("the-weather.1", "the-weather.2"))
    assert not allows(name, re.sub(r"\b3\b", "x", call))
    assert not allows(name, written(family, thought, "no", 0))


@EVERY
def test_optional_arguments(name: str):
    """A call may leave out what is not required, and an enum has its words."""
    properties = {"a": {"enum": ["x", "y"]}, "b": {"type": "number"}, "c": {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    family, made = FAMILIES[name], constraints(name)[0]
    form = form_of(family.marks, "").call
    assert made.make("tool_choice", [], tools=tools).matcher.get_error() == ""
    opened, closed = form.first + form.open.format(name="f"), form.close.format() + form.last
    if form.parameter is not None:
        one = [
            form.parameter[0].format(key=key, text="true") + value + form.parameter[1]
            for key, value in (("a", "x"), ("c", "z"))
        ]
        right, wrong = ["".join(one), one[0]], [one[1], one[0].replace("x", "z")]
    elif form.bare:
        right = ['{a:<|"|>x<|"|>}', '{a:<|"|>y<|"|>,c:<|"|>z<|"|>}', '{a:<|"|>y<|"|>,b:1.5}']
        wrong = ['{c:<|"|>z<|"|>}', '{a:<|"|>z<|"|>}', "{}"]
    else:
        right, wrong = ['{"a": "x"}', '{"a": "y", "c": "z"}'], ['{"c": "z"}', '{"a": "z"}', "{}"]
    before = family.thought.format("") if family.prompt.endswith((THINK, "<think>\n")) else ""
    for text in right:
        assert allows(name, f"{before}{opened}{text}{closed}", tools), text
    for text in wrong:
        assert not allows(name, f"{before}{opened}{text}{closed}", tools), text


@pytest.mark.parametrize(
    "schema", [{"type": ["string", "null"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}, {}]
)
def test_an_argument_that_may_be_a_string_has_no_quotes(schema: dict):
    parameters = {"type": "object", "properties": {"ä": schema, "b": {"enum": ["ö"]}}, "required": ["ä", "b"]}
    rules = Rules(lambda mark: quoted(mark), lambda mark: False)
    rule = rules.call(form_of(FAMILIES["qwen3_5"].marks, "").call, {"name": "f", "parameters": parameters})
    assert "ä" in rule and '("ö")' in rule and not rules.grammars and len(rules.lines) == 1


def test_a_form_is_found_by_its_marks():
    assert form_of("{{ '<tool_call>' }} <function=", "qwen3_moe") is not form_of("{{ '<tool_call>' }}", "qwen3_moe")
    assert form_of("{{ message }}", "gpt_oss").before == "<|channel|>final<|message|>"
    assert form_of("{{ message }}", "mixtral") is UNKNOWN
    assert form_of(deepseek("tool▁sep") + "\n```json", "") is not form_of(deepseek("tool▁sep"), "")
