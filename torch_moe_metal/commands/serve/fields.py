"""The fields of requests: what each may be and what it does. Requests are checked with these tables, and the table in
docs/serving.md is made of them: `python -m torch_moe_metal.commands.serve.fields`.

A field either has an effect, or its value asks for nothing, or it is refused with status 400.
"""

import json
from collections.abc import Callable
from typing import NamedTuple

from .requests import Refused

#: Below this temperature the likeliest token is taken: divided by much less, scores leave float32's range.
LEAST_TEMPERATURE = 1e-5
MAX_STOPS, MAX_STOP = 64, 256  # strings or tokens, and characters of a string
MAX_ANSWERS, MAX_LIKELIEST = 16, 20
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
NOTHING = "nothing"


class Field(NamedTuple):
    expected: str  # in words
    test: Callable[[object], bool]
    effect: str


def refuse(name: str, expected: str, got: object) -> None:
    raise Refused(400, f"{name}: expected {expected}, got {shortened(got)}", param=name)


def expect(right: bool, name: str, expected: str, got: object) -> None:
    if not right:
        refuse(name, expected, got)


def shortened(value: object, length: int = 100) -> str:
    """The value as it may stand in an error."""
    if isinstance(value, str):
        value = value[: length + 1]  # its repr may be ten times as long
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


# ------------------------------------------------------------------------------------------------ values


def of_type(kind: type | tuple[type, ...]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


def is_integer(value: object) -> bool:
    return type(value) is int  # a bool is an int, too


def is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 2**64  # not NaN either


def is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def number(low: float, high: float) -> Callable[[object], bool]:
    return lambda value: is_number(value) and low <= value <= high


def integer(low: int, high: int) -> Callable[[object], bool]:
    return lambda value: is_integer(value) and low <= value <= high


def one_of(*values: object) -> Callable[[object], bool]:
    return lambda value: any(type(value) is type(each) and value == each for each in values)


def is_stop(value: object) -> bool:
    strings = as_list(value) if isinstance(value, str | list) else [None]
    return len(strings) <= MAX_STOPS and all(isinstance(each, str) and 0 < len(each) <= MAX_STOP for each in strings)


def as_list(value: object) -> list:
    return value if isinstance(value, list) else [value]


def is_effort(value: object) -> bool:
    return isinstance(value, str) and value in EFFORTS


def is_reasoning(value: object) -> bool:
    """OpenAI's object of /v1/responses. The text of the reasoning is in every answer, so that no summary is made."""
    known = {"effort": is_effort, "summary": one_of("auto"), "generate_summary": one_of("auto")}
    known |= {"context": one_of("auto"), "mode": one_of("standard")}
    return is_object(value, known)


def is_object(value: object, known: dict[str, Callable[[object], bool]]) -> bool:
    """Whether the value is an object with some of these fields; null is the same as none."""
    given = (
        {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else {None: None}
    )
    return all(name in known and known[name](each) for name, each in given.items())


def is_text_format(value: object) -> bool:
    return is_object(value, {"type": one_of("text")}) and value != {}


def is_text(value: object) -> bool:
    return is_object(value, {"format": is_text_format, "verbosity": one_of("medium")})


def is_tool_choice(value: object) -> bool:
    return value in ("auto", "none")


def is_typed(*kinds: str) -> Callable[[object], bool]:
    """Whether the value is an object of one of these types."""
    return lambda value: isinstance(value, dict) and value.get("type") in kinds


def is_output_config(value: object) -> bool:
    return is_object(value, {"effort": is_effort, "format": is_typed("json_schema")})


def is_bias(value: object) -> bool:
    return isinstance(value, dict) and all(number(-100, 100)(each) for each in value.values())


def is_ids(value: object) -> bool:
    return isinstance(value, list) and len(value) <= MAX_STOPS and all(map(integer(0, 2**31 - 1), value))


# ------------------------------------------------------------------------------------------------ tables

BOOL = ("true or false", of_type(bool))
STRING = ("a string", of_type(str))
COUNT = ("an integer of at least 1", integer(1, 2**63 - 1))
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
    "tool_choice": Field("'auto' or 'none': others are not supported", is_tool_choice, "`none` leaves out the tools"),
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
    "response_format": Field('{"type": "text"}: others are not supported', is_text_format, NOTHING),
    "logprobs": Field(*BOOL, "the log probabilities of the answer's tokens, without those of its reasoning"),
    "top_logprobs": Field(
        f"an integer from 0 to {MAX_LIKELIEST}", integer(0, MAX_LIKELIEST), "the same of the likeliest tokens"
    ),
    "modalities": only(["text"]),
    "verbosity": only("medium"),
    "prediction": Field("an object", of_type(dict), "nothing: the answer is the same"),
    "function_call": Field("'auto' or 'none'", is_tool_choice, NOTHING),
    "functions": refused("use tools"),
    "audio": refused("the model makes text only"),
    "web_search_options": refused("the server has no tools of its own"),
}
COMPLETIONS = {
    "prompt": Field("a string", of_type(str), "the text to continue; a list of one string is the same"),
    **SHARED,
    **SINGLE,
    "best_of": only(1),
    "echo": only(False),
    "logprobs": Field(
        f"an integer from 0 to {MAX_LIKELIEST}",
        lambda value: value is False or integer(0, MAX_LIKELIEST)(value),
        "the log probabilities of the answer's tokens, and of so many of the likeliest ones",
    ),
    "suffix": only("", "text is only added at the end"),
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
    "text": Field('{"format": {"type": "text"}}: others are not supported', is_text, NOTHING),
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
    **dict.fromkeys(("inference_geo", "speed"), COMMON["service_tier"]),
    "container": refused("the server has no tools of its own"),
    "mcp_servers": refused("the server has no tools of its own"),
}
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
