"""The fields of requests: what each may be and what it does. Requests are checked with these tables, and the table in
docs/serving.md is made of them: `python -m torch_moe_metal.commands.serve.fields`.

A field either has an effect, or its value asks for nothing, or it is refused with status 400.
"""

import json
from collections.abc import Callable
from typing import NamedTuple

from .requests import Refused
from .values import (
    EFFORTS,
    MAX_ANSWERS,
    MAX_LIKELIEST,
    MAX_STOP,
    MAX_STOPS,
    as_list,
    expect,
    integer,
    is_auto,
    is_bias,
    is_effort,
    is_ids,
    is_integers,
    is_list_of,
    is_object,
    is_output_config,
    is_reasoning,
    is_response_format,
    is_stop,
    is_text,
    is_tool_choice,
    is_typed,
    number,
    of_type,
    one_of,
    refuse,
    shortened,
)

#: Below this temperature the likeliest token is taken: divided by much less, scores leave float32's range.
LEAST_TEMPERATURE = 1e-5
NOTHING = "nothing"


class Field(NamedTuple):
    expected: str  # in words
    test: Callable[[object], bool]
    effect: str


BOOL = ("true or false", of_type(bool))
STRING = ("a string", of_type(str))
COUNT = ("an integer of at least 1", integer(1, 2**63 - 1))
GRAMMAR = Field("a string: Lark, or llama.cpp's GBNF", of_type(str), "the answer has this grammar")
LENGTH = Field(*COUNT, "the most tokens of the answer")


def only(value: object, reason: str = "others are not supported") -> Field:
    return Field(f"{json.dumps(value)}: {reason}", one_of(value), NOTHING)


def refused(reason: str) -> Field:
    return Field(f"no value: {reason}", one_of([], {}), "refused")


SHARED = {
    "model": Field(*STRING, "must be the name of this server's model"),
    "stream": Field(*BOOL, "the answer in pieces"),
    "stream_options": Field(
        "an object of true and false",
        lambda value: is_object(value, {"include_usage": of_type(bool), "include_obfuscation": of_type(bool)}),
        "nothing: usage always comes with the last piece",
    ),
    "temperature": Field(
        "a number from 0 to 2", number(0, 2), f"how random the answer is; below {LEAST_TEMPERATURE:.5f} not at all"
    ),
    "top_p": Field(
        "a number above 0, up to 1",
        lambda value: number(0, 1)(value) and value > 0,
        "draws from the likeliest tokens that have this share together",
    ),
    "top_k": Field(
        "an integer of at least -1",
        integer(-1, 2**31 - 1),
        "draws from this many of the likeliest tokens; 0 and -1: from all",
    ),
    "min_p": Field(
        "a number from 0 to 1", number(0, 1), "draws from tokens with this share of the largest probability"
    ),
    "presence_penalty": Field(
        "a number from -2 to 2", number(-2, 2), "lowers the scores of tokens that are in the answer"
    ),
    "frequency_penalty": Field("a number from -2 to 2", number(-2, 2), "the same, for each time that they are in it"),
    "repetition_penalty": Field(
        "a number from 0.01 to 100", number(0.01, 100), "divides the scores of tokens in the prompt and the answer"
    ),
    "logit_bias": Field("an object of token ids and numbers from -100 to 100", is_bias, "is added to their scores"),
    "seed": Field("an integer of 64 bits", integer(-(2**63), 2**63 - 1), "repeats an answer"),
    "stop": Field(
        f"a string or a list of at most {MAX_STOPS} strings, each of 1 to {MAX_STOP} characters",
        is_stop,
        "ends the answer before one of them; does not apply to reasoning",
    ),
    "stop_token_ids": Field(f"a list of at most {MAX_STOPS} token ids", is_ids, "tokens that end the answer, too"),
    "ignore_eos": Field(*BOOL, "the model's own last tokens do not end the answer"),
    "generation_config": Field("a string of JSON", of_type(str), "such fields by transformers' names"),
    "user": Field(*STRING, NOTHING),
}
#: Fields that two or three of OpenAI's endpoints have.
COMMON = {
    "chat_template_kwargs": Field(
        "an object of at most 65,536 characters", of_type(dict), "variables of the model's chat template"
    ),
    "tools": Field(
        "a list of functions with names", lambda value: is_list_of(value, dict), "functions that the model may call"
    ),
    "tool_choice": Field(
        "'auto', 'none', 'required', or a function with its name",
        is_tool_choice,
        "`none` leaves out the tools, `required` forces a call, and a function a call of it",
    ),
    "parallel_tool_calls": Field(*BOOL, "`false` ends the answer after one call"),
    "metadata": Field("an object", of_type(dict), NOTHING),
    "store": Field(*BOOL, NOTHING),
    "service_tier": Field(*STRING, NOTHING),
    "safety_identifier": Field(*STRING, NOTHING),
    "prompt_cache_key": Field(*STRING, NOTHING),
    "prompt_cache_retention": Field(*STRING, NOTHING),
    "prompt_cache_options": Field("an object", of_type(dict), NOTHING),
    "moderation": refused("moderation is not supported"),
}
SINGLE = {
    "n": Field(f"an integer from 1 to {MAX_ANSWERS}", integer(1, MAX_ANSWERS), "answers, each with a seed of its own"),
    "max_tokens": LENGTH,
}
CHAT = {
    "messages": Field(
        "a list of messages, at least one", lambda value: isinstance(value, list) and value != [], "the conversation"
    ),
    **SHARED,
    **COMMON,
    **SINGLE,
    "max_completion_tokens": LENGTH,
    "reasoning_effort": Field(f"one of {', '.join(EFFORTS)}", is_effort, "what the model's chat template makes of it"),
    "response_format": Field(
        "an object of type text, json_object or json_schema", is_response_format, "the answer has this form"
    ),
    "grammar": GRAMMAR,
    "logprobs": Field(*BOOL, "the log probabilities of the answer's tokens, without those of its reasoning"),
    "top_logprobs": Field(
        f"an integer from 0 to {MAX_LIKELIEST}", integer(0, MAX_LIKELIEST), "the same of the likeliest tokens"
    ),
    "modalities": only(["text"]),
    "verbosity": only("medium"),
    "prediction": Field("an object", of_type(dict), "nothing: the answer is the same"),
    "function_call": Field("'auto' or 'none'", is_auto, NOTHING),
    "functions": refused("use tools"),
    "audio": refused("the model makes text only"),
    "web_search_options": refused("the server has no tools of its own"),
}
COMPLETIONS = {
    "prompt": Field("a string", of_type(str), "the text to continue; a list of one string is the same"),
    **SHARED,
    **SINGLE,
    "grammar": GRAMMAR,
    "best_of": only(1),
    "echo": only(False),
    "logprobs": Field(
        f"an integer from 0 to {MAX_LIKELIEST}",
        lambda value: value is False or integer(0, MAX_LIKELIEST)(value),
        "the log probabilities of the answer's tokens, and of so many of the likeliest ones",
    ),
    "suffix": Field(*STRING, "the text after the answer, if the model has tokens for it"),
}
RESPONSES = {
    "input": Field(
        "a string or a list, not empty",
        lambda value: isinstance(value, str | list) and len(value) > 0,
        "the conversation",
    ),
    **SHARED,
    **COMMON,
    "max_output_tokens": LENGTH,
    "instructions": Field(*STRING, "the system message"),
    "reasoning": Field(
        "an object with an effort, and no summary but 'auto'", is_reasoning, "`effort`: as `reasoning_effort`"
    ),
    "text": Field("an object with a format, as `response_format`", is_text, "the answer has this form"),
    "top_logprobs": only(0, "log probabilities are not supported here"),
    "truncation": only("disabled"),
    "max_tool_calls": Field(*COUNT, "nothing: the server has no tools of its own"),
    "background": only(False),
    "include": refused("answers have all that they can have"),
    "previous_response_id": refused("answers are not stored; send the whole conversation as input"),
    "conversation": refused("conversations are not stored; send it as input"),
    "prompt": refused("prompts are not stored; send it as input"),
    "context_management": refused("the context is left as it is"),
    "background_options": refused("the server has no background"),
    "access_programs": refused("the server has no tools of its own"),
    "image": refused("the model makes text only"),
}
MESSAGES = {
    "messages": Field(
        "a list of messages, at least one", lambda value: isinstance(value, list) and value != [], "the conversation"
    ),
    **{name: SHARED[name] for name in ("model", "stream", "top_p", "top_k")},
    "max_tokens": Field(*COUNT, "the most tokens of the answer; required"),
    "system": Field("a string or a list of texts", of_type((str, list)), "the system message"),
    "temperature": Field(
        "a number from 0 to 1", number(0, 1), f"how random the answer is; below {LEAST_TEMPERATURE:.5f} not at all"
    ),
    "stop_sequences": Field(
        f"a list of at most {MAX_STOPS} strings, each of 1 to {MAX_STOP} characters",
        lambda value: isinstance(value, list) and is_stop(value),
        "ends the answer before one of them; does not apply to reasoning",
    ),
    "tools": Field("a list of tools of the client", lambda value: is_list_of(value, dict), COMMON["tools"].effect),
    "tool_choice": Field(
        "an object of type auto, any, tool or none",
        is_typed("auto", "any", "tool", "none"),
        "`any` forces a call, `tool` a call of this tool; `disable_parallel_tool_use` ends the answer after one call",
    ),
    "thinking": Field(
        "an object of type enabled, adaptive, between_tools or disabled",
        is_typed("enabled", "adaptive", "between_tools", "disabled"),
        "sets the template's `enable_thinking`, and whether the answer has the reasoning; its budget has no effect",
    ),
    "output_config": Field(
        "an object with an effort, and a format of type json_schema",
        is_output_config,
        "`effort`: as `reasoning_effort`; `format`: as `response_format`",
    ),
    "metadata": COMMON["metadata"],
    "service_tier": COMMON["service_tier"],
    **dict.fromkeys(("cache_control", "context_management", "diagnostics"), COMMON["metadata"]),
    **dict.fromkeys(("inference_geo", "speed", "user_profile_id", "workspace_id"), COMMON["service_tier"]),
    "container": refused("the server has no tools of its own"),
    "mcp_servers": refused("the server has no tools of its own"),
}
TOKENIZE = {
    "content": Field(*STRING, "the text"),
    "add_special": Field(*BOOL, "adds the tokens that begin a text"),
    "with_pieces": Field(*BOOL, "the text of each token, too"),
    "parse_special": only(True),
}
DETOKENIZE = {"tokens": Field("a list of token ids", is_integers, "the tokens")}
TABLES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}

#: What a generation_config may set, by transformers' names.
SETTINGS = {
    "max_new_tokens": LENGTH,
    **{name: SHARED[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "do_sample": Field(*BOOL, "draws tokens"),
    "eos_token_id": Field("token ids", lambda value: is_ids(as_list(value)), "the tokens that end the answer"),
}
#: Those that continuous batching has not.
SEQUENTIAL_SETTINGS = {
    "min_new_tokens": Field(*COUNT, "the least length of the answer"),
    "no_repeat_ngram_size": Field("an integer from 0 to 100", integer(0, 100), "no such sequence comes twice"),
    "typical_p": Field("a number from 0.01 to 1", number(0.01, 1), "draws from typical tokens"),
}
#: Those that ask for nothing.
NEUTRAL_SETTINGS = {
    "num_beams": only(1),
    "num_return_sequences": only(1),
    "use_cache": only(True),
    **dict.fromkeys(("transformers_version", "pad_token_id", "bos_token_id"), Field("any", lambda _: True, NOTHING)),
}
UNKNOWN = refused("it is not supported")


def check(body: dict, fields: dict[str, Field]) -> None:
    for name, value in body.items():
        if name in fields:
            expect(fields[name].test(value), name, fields[name].expected, value)


def read_settings(text: str, batched: bool) -> dict[str, object]:
    """The settings of a generation_config that have an effect, after a check."""
    known = SETTINGS | NEUTRAL_SETTINGS | ({} if batched else SEQUENTIAL_SETTINGS)
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError("no object")
    except (ValueError, RecursionError) as error:
        refuse("generation_config", f"an object as JSON ({error})", text)
    for name, value in given.items():
        field = known.get(name, UNKNOWN)
        if value is not None and not field.test(value):
            message = f"generation_config: {shortened(name)}: expected {field.expected}, got {shortened(value)}"
            raise Refused(400, message, param="generation_config")
    return {name: value for name, value in given.items() if value is not None and name not in NEUTRAL_SETTINGS}


# ------------------------------------------------------------------------------------------------ the documentation


def table() -> str:
    """The table of docs/serving.md. Fields with the same values and effect share a row."""
    paths, rows = {}, {}
    for path, fields in TABLES.items():
        for name, field in fields.items():
            paths.setdefault((name, field.expected, field.effect), []).append(path.split("/")[2])
    for (name, expected, effect), found in paths.items():
        where = "all" if len(found) == len(TABLES) else ", ".join(found)
        rows.setdefault((where, expected, effect), []).append(f"`{name}`")
    lines = [f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items()]
    return "\n".join(["| field | of | value | effect |", "|---|---|---|---|", *lines])


if __name__ == "__main__":
    print(table())
