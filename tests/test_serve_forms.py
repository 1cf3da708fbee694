"""Answers of a given form: `response_format`, grammars and forced tool calls, with llguidance."""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, PreTrainedTokenizerFast

import served
from served import HELLO, chat, client, collect, text_of
from tiny_models import tiny_model
from torch_moe_metal.commands.common.loading import Source

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
#: Beginnings of strings that are no JSON, and that a constraint must not allow.
THOUGHT = "hm { } maybe"


def tool(name: str, **properties: dict) -> dict:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", city={"type": "string", "maxLength": 6}), tool("count", n={"type": "integer"})]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return served.checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module", params=[False, True], ids=["sequential", "batched"])
def server(request, folder: Path) -> Iterator[served.ServerThread]:
    with served.ServerThread(Source.of(str(folder)), request.param, context=4096) as server:
        yield server


def checked(answer, schema: dict) -> str:
    """The finish reason of an answer, which is valid if the model ended it."""
    choice = answer.choices[0]
    if choice.finish_reason == "stop":
        jsonschema.validate(json.loads(choice.message.content), schema)
    return choice.finish_reason


def test_an_answer_has_its_schema(server):
    """Also streamed, sampled, with penalties, and cut."""
    assert checked(chat(server, response_format=FORM, max_tokens=300), SCHEMA) == "stop"
    text, reason, _ = collect(chat(server, response_format=FORM, max_tokens=300, stream=True))
    assert reason == "stop" and text == text_of(chat(server, response_format=FORM, max_tokens=300))
    for seed in range(4):
        options = {"temperature": 1.5, "seed": seed, "frequency_penalty": 1, "max_tokens": 400}
        assert checked(chat(server, response_format=FORM, **options), SCHEMA) == "stop"
    assert checked(chat(server, response_format=FORM, max_tokens=3), SCHEMA) == "length"
    answer = chat(server, response_format={"type": "json_object"}, max_tokens=40)
    assert text_of(answer).startswith("{")


class Step(pydantic.BaseModel):
    kind: Literal["sum", "product"]
    digits: list[Literal[1, 2, 3]] = pydantic.Field(max_length=3)
    right: bool | None


def test_the_client_parses_a_model(server):
    options = {"model": server.model, "temperature": 0}
    answer = client(server).chat.completions.parse(**options, messages=HELLO, response_format=Step)
    assert isinstance(answer.choices[0].message.parsed, Step)
    assert isinstance(client(server).responses.parse(**options, input="hello", text_format=Step).output_parsed, Step)
    with client(server).chat.completions.stream(**options, messages=HELLO, response_format=Step) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Step)


def test_responses_have_a_schema(server):
    form = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}
    options = {"model": server.model, "input": "hello", "temperature": 0, "max_output_tokens": 300}
    jsonschema.validate(json.loads(client(server).responses.create(**options, text=form).output_text), SCHEMA)
    called = client(server).responses.create(
        **options,
        tools=[{"type": "function", **TOOLS[0]["function"]}],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    assert [item.name for item in called.output if item.type == "function_call"] == ["weather"]


def test_grammars(server):
    for grammar in ('root ::= "yes" | "no"', 'start: "yes" | "no"'):
        assert text_of(chat(server, extra_body={"grammar": grammar})) in ("yes", "no")
        options = {"model": server.model, "prompt": "once", "temperature": 0, "extra_body": {"grammar": grammar}}
        assert client(server).completions.create(**options).choices[0].text in ("yes", "no")


def test_several_answers_and_log_probabilities_of_a_form(server):
    """Each answer has a constraint of its own. The log probabilities are those without it."""
    options = {"response_format": FORM, "max_tokens": 300, "temperature": 1.2, "seed": 3, "n": 3, "logprobs": True}
    answer = chat(server, **options)
    assert len({choice.message.content for choice in answer.choices}) == 3
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
        assert min(entry.logprob for entry in choice.logprobs.content) < -1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_forced_calls(server, stream: bool):
    for choice, names in (
        ("required", {"weather", "count"}),
        ({"type": "function", "function": {"name": "count"}}, {"count"}),
    ):
        options = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 400}
        answer = chat(server, **options, stream=stream)
        if stream:
            deltas = [part.choices[0].delta for part in answer]
            calls = [call for delta in deltas for call in delta.tool_calls or ()]
        else:
            calls = answer.choices[0].message.tool_calls
            assert answer.choices[0].finish_reason == "tool_calls"
        assert len(calls) == 1 and calls[0].function.name in names
        schemas = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
        jsonschema.validate(json.loads(calls[0].function.arguments), schemas[calls[0].function.name])


def test_a_form_or_a_call(tmp_path: Path):
    """With tools and a form, the answer is a call or has the form."""
    call = json.dumps({"name": "weather", "arguments": {"city": "Paris"}})
    script = ["<tool_call>", call, "</tool_call>"]
    with served.ServerThread(Source.of(str(served.scripted(tmp_path, script))), context=2048) as server:
        answer = chat(server, tools=TOOLS, response_format=FORM, max_tokens=200)
        assert [each.function.name for each in answer.choices[0].message.tool_calls] == ["weather"]


@pytest.mark.parametrize("prefilled", [False, True], ids=["written", "prefilled"])
def test_reasoning_comes_first(tmp_path: Path, prefilled: bool):
    """The constraint begins after it, also where the template has written its beginning."""
    value = json.dumps({"name": "a", "size": 5})
    script, template = [THOUGHT, "</think>", value, "and more"], served.TEMPLATE
    if prefilled:
        template = template.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif")
    script = [*script, "<think>"] if prefilled else ["<think>", *script]  # the template's marks are tokens, too
    folder = served.scripted(tmp_path, script, template=template)
    with served.ServerThread(Source.of(str(folder)), context=2048) as server:
        message = chat(server, response_format=FORM, max_tokens=60).choices[0].message
        assert json.loads(message.content) == {"name": "a", "size": 5}
        assert THOUGHT in message.reasoning_content


def test_wrong_forms_are_refused(server):
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wat"}}}
    for body, param in (
        ({"response_format": bad}, "response_format"),
        ({"response_format": bad | {"json_schema": {"name": "x", "schema": {"not": {}}}}}, "response_format"),
        ({"extra_body": {"grammar": "start: nothing"}}, "grammar"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"response_format": FORM, "extra_body": {"ignore_eos": True}}, "ignore_eos"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            chat(server, **body)
        assert error.value.param == param


def test_without_llguidance_the_error_names_it(folder: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with served.ServerThread(Source.of(str(folder)), context=512) as server:
        assert text_of(chat(server, max_tokens=2))
        for body in ({"response_format": FORM}, {"extra_body": {"grammar": 'root ::= "a"'}}):
            with pytest.raises(openai.BadRequestError, match="pip install llguidance"):
                chat(server, **body)


# ------------------------------------------------------------------------------------------------ random schemas


def drawn(rng: Random, depth: int = 0) -> dict:
    """A schema whose values are bounded."""
    words = ["a", "b c", "ä", "日本", 'quote"', "back\\slash", "🙂"]
    kind = rng.choice(["string", "integer", "number", "boolean", "null", "enum", "const", "array", "object", "anyOf"])
    if depth > 2 and kind in ("array", "object", "anyOf"):
        kind = "boolean"
    return {
        "string": lambda: {"type": "string", "maxLength": rng.randrange(1, 12)},
        "integer": lambda: {"type": "integer", "minimum": rng.randrange(-50, 0), "maximum": rng.randrange(0, 999)},
        "number": lambda: {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
        "boolean": lambda: {"type": "boolean"},
        "null": lambda: {"type": ["null", "boolean"]},
        "enum": lambda: {"enum": rng.sample([*words, 5, None, True], 3)},
        "const": lambda: {"const": rng.choice(words)},
        "array": lambda: {"type": "array", "items": drawn(rng, depth + 1), "maxItems": rng.randrange(1, 4)},
        "object": lambda: of_properties(rng, depth),
        "anyOf": lambda: {"anyOf": [drawn(rng, depth + 1) for _ in range(2)]},
    }[kind]()


def of_properties(rng: Random, depth: int) -> dict:
    names = rng.sample(["name", "größe", "a b", "x", "items", "名前"], rng.randrange(1, 4))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: drawn(rng, depth + 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def recursive(rng: Random) -> dict:
    """A tree, whose depth is bounded by what the schema of a leaf allows."""
    leaf = {"type": "string", "maxLength": 3}
    node = {"type": "object", "properties": {"value": leaf}, "required": ["value"], "additionalProperties": False}
    for _ in range(rng.randrange(1, 4)):
        child = {"anyOf": [{"type": "null"}, node]}
        node = {"type": "object", "properties": {"value": leaf, "next": child}, "required": ["value", "next"]}
        node["additionalProperties"] = False
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory) -> Iterator[served.ServerThread]:
    """A model with a token for each byte, so that it can write every letter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({word: i for i, word in enumerate([*alphabet, *served.SPECIAL])}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(served.SPECIAL)
    options = {"eos_token": served.SPECIAL[2], "pad_token": served.SPECIAL[0], "chat_template": served.TEMPLATE}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **options)
    folder = tmp_path_factory.mktemp("bytes")
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = tiny_model("qwen3_moe", **served.sizes(len(tokenizer)) | ends)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with served.ServerThread(Source.of(str(folder)), context=8192) as server:
        yield server


def check_schemas(server, seeds: range) -> None:
    def one(seed: int) -> str:
        rng = Random(seed)
        schema = recursive(rng) if seed % 10 == 0 else of_properties(rng, 0)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        options = {"temperature": rng.choice([0, 1]), "seed": seed, "max_tokens": 3000, "timeout": 600}
        return checked(chat(server, response_format=form, **options), schema)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(one, seeds)) == ["stop"] * len(seeds)


def test_random_schemas(of_bytes):
    check_schemas(of_bytes, range(12))


@pytest.mark.slow
def test_two_hundred_random_schemas(of_bytes):
    check_schemas(of_bytes, range(200))


def test_a_recursive_schema(of_bytes):
    """Without a bound, an answer is valid or cut."""
    node = {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}}}
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node | {"required": ["next"], "additionalProperties": False}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(4):
        reason = checked(chat(of_bytes, response_format=form, temperature=1, seed=seed), schema)
        assert reason in ("stop", "length")
