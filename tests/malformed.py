"""Malformed requests to the server, drawn from a seed: each is a valid one with a single fault."""

import json
from collections.abc import Iterator, Sequence
from random import Random

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
RIGHT = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    TEXT: {"prompt": "hello", "max_tokens": 1},
    RESPONSES: {"input": "hello", "max_output_tokens": 1},
    MESSAGES: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    COUNT: {"messages": [{"role": "user", "content": "hello"}]},
    TOKENIZE: {"content": "hello"},
    DETOKENIZE: {"tokens": [1, 2]},
}
HUGE = [10**30, -(10**30), 1e300, float("inf"), float("nan")]
#: Wrong values of fields that several endpoints have, and of those of one.
SHARED = {
    "model": [5, "another", ["another"], {}, ""],
    "temperature": ["hot", -1, 3, {}, [], True, *HUGE],
    "top_p": [0, 1.1, "1", [], False, *HUGE],
    "stream": ["yes", 1, 0, {}, []],
    "logit_bias": [
        5,
        [],
        {"x": 1},
        {"99999": 1},
        {"9" * 5000: 1},
        {"-1": 1},
        {"5": "x"},
        {"5": 1000},
        {"5": 1e300},
    ],
    "frequency_penalty": [-2.1, "x", [], *HUGE],
    "presence_penalty": [9, "x", {}, *HUGE],
    "repetition_penalty": [0, 1e-38, -1, True, *HUGE],
    "top_k": [-2, 0.5, "x", *HUGE],
    "min_p": [-0.1, 1.1, "x", *HUGE],
    "stop": [5, [5], "", ["a", ""], {"a": "b"}, ["a"] * 65, "x" * 257],
    "stop_token_ids": [5, ["a"], [-1], [99999], [5] * 65, {}],
    "ignore_eos": [1, "true"],
    "seed": ["x", 1.5, True, [], *HUGE],
    "generation_config": [
        5,
        {},
        "{",
        "5",
        '{"num_beams": 4}',
        '{"num_return_sequences": 2}',
        '{"max_new_tokens": "many"}',
        '{"penalty_alpha": 0.5}',
        '{"cache_implementation": "static"}',
        '{"output_scores": true}',
        '{"eos_token_id": -1}',
    ],
}
LIMIT = [0, -1, "many", 1.5, True, [], {}, *HUGE]


def formats(*schemas: object) -> list:
    return [{"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in schemas]


def messages(*contents: object, role: object = "user") -> list:
    return [[{"role": role, "content": content}] for content in contents]


TEXT_BLOCK = {"type": "text", "text": "hello"}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
OF_MESSAGES = {
    **{name: SHARED[name] for name in ("model", "top_k", "top_p", "stream")},
    "messages": [
        *(None, [], "hello", 5, [None], [{}], [{"role": "user"}], [{"content": "hello"}]),
        *messages("hello", role="wizard"),
        *messages("hello", role="assistant"),
        *messages(5, {}, [5], [{}], [{"type": "text"}], [{"type": "text", "text": 5}], [{"type": "image"}]),
        *messages([RESULT | {"tool_use_id": 5}], [RESULT | {"content": 5}], [RESULT | {"content": [5]}]),
        *messages([{"type": "document", "source": {"type": "base64", "data": "a"}}], [{"type": "search_result"}]),
        [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "{}"}]}],
        [{"role": "assistant", "content": [{"type": "thinking"}]}, {"role": "user", "content": "a"}],
    ],
    "temperature": ["hot", -1, 1.1, {}, True, *HUGE],
    "system": [5, {}, [5], [{"type": "image"}], [{"type": "text"}]],
    "stop_sequences": ["x", [5], [""], ["a"] * 65, {}],
    "tools": [5, [5], {}, [{}], [{"name": "f"}], [{"name": 5, "input_schema": {}}], [{"type": "bash", "name": "b"}]],
    "tool_choice": ["auto", 5, {}, {"type": "x"}, {"type": "any"}, {"type": "tool", "name": "f"}],
    "thinking": [5, True, {}, {"type": "x"}],
    "output_config": [5, {"effort": "x"}, {"format": {"type": "xml"}}, {"format": {"type": "json_schema"}}],
    "container": ["x"],
    "mcp_servers": [[{"url": "x"}]],
}
WRONG = {
    CHAT: {
        **SHARED,
        "messages": [
            *(None, [], "hello", {"role": "user", "content": "hello"}, 5, [None], ["hello"], [{}], [[]]),
            *([{"role": "user"}], [{"content": "hello"}], [{"role": ["user"], "content": "hello"}]),
            *messages("hello", role="wizard"),
            *messages("hello", role="function"),  # the template of the test's model refuses it
            *messages(5, {}, [5], [{}], [{"type": "text"}], [{"type": "text", "text": 5}], "\ud800", "x" * 600),
            *messages([{"type": "image_url", "image_url": {"url": "data:,"}}], [{"type": []}]),
            [{"role": "assistant", "tool_calls": 5}],
            [{"role": "assistant", "tool_calls": [{}]}],
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        ],
        "max_tokens": LIMIT,
        "max_completion_tokens": LIMIT,
        "n": [17, 0, "one", *HUGE],
        "logprobs": [1, "x"],
        "response_format": [
            *(5, {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x"}}),
            *formats(5, {"type": "wat"}, {"not": {}}, {"$ref": "#/x"}, {"pattern": "("}, {"$ref": "http://a/b"}),
        ],
        "grammar": [5, "", "start: x", "root ::= (", 'start: "' + "a" * 300000 + '"'],
        "chat_template_kwargs": [5, "x", [], {"padding": "max_length"}, {"x": "y" * 70000}],
        "top_logprobs": [1, "x", 21],
        "reasoning_effort": ["banana", 5],
        "tool_choice": ["required", "f", {"type": "function", "function": {"name": "f"}}],  # without tools
        "tools": [5, [5], {}, "x", [{}], [{"type": "web_search"}], [{"type": "function", "function": {"name": 5}}]],
    },
    TEXT: {
        **SHARED,
        "prompt": [5, None, [], ["a", "b"], [1, 2], {}, "", "x" * 600],
        "max_tokens": LIMIT,
        "echo": [True, 5],
        "logprobs": [True, -1, 21, "x"],
        "grammar": [5, "start: x"],
        "best_of": [3, "x"],
        "suffix": [5, [], "the end"],  # for which the tokenizer has no tokens
    },
    RESPONSES: {
        **SHARED,
        "input": [5, None, [], "", {}, [5], [{}], [{"type": "image"}], [{"role": "user", "content": 5}], "x" * 600],
        "max_output_tokens": LIMIT,
        "instructions": [5, []],
        "previous_response_id": ["resp_1", 5],
        "reasoning": [5, {"effort": "banana"}, {"summary": "detailed"}],
        "text": [5, {"format": {"type": "xml"}}, {"format": {"type": "json_schema", "name": "x"}}],
        "truncation": ["auto"],
    },
    MESSAGES: OF_MESSAGES
    | {"max_tokens": [None, *LIMIT], "messages": [*OF_MESSAGES["messages"], *messages("x" * 6000)]},
    COUNT: OF_MESSAGES,
    TOKENIZE: {"content": [None, 5, [], {}], "add_special": ["x", 1], "with_pieces": [5, "x"]},
    DETOKENIZE: {"tokens": [None, 5, "x", ["x"], [-1], [99999], [1.5], [True], {}, *HUGE]},
}
BODIES = [
    b"",
    b"{",
    b"nothing",
    b"\xff\xfe",
    b"{}{}",
    b"[" * 100000,
    b'{"a":' * 5000,
    b"NaN",
    b"[]",
    b"5",
    b"null",
    b'""',
    b"{}",
]
BODIES += [b'{"seed": ' + b"9" * 5000 + b"}"]  # more digits than Python reads
PATHS = ["/v1", "/v2/models", "/v1/embeddings", "/reset", "/v1/audio/transcriptions", "/v1/models/another"]

EVERY = [CHAT, CHAT, TEXT, RESPONSES]
Case = tuple[str, str, bytes, dict]  # method, path, body, headers


def draw(random: Random, paths: Sequence[str]) -> Case:
    path = random.choice(paths)
    kind = random.random()
    if kind < 0.6:
        name = random.choice(list(WRONG[path]))
        streams = path not in (COUNT, TOKENIZE, DETOKENIZE) and random.random() < 0.5
        streamed = {"stream": True} if streams else {}
        return "POST", path, json.dumps(RIGHT[path] | streamed | {name: random.choice(WRONG[path][name])}).encode(), {}
    if kind < 0.8:
        return "POST", path, damaged(random, json.dumps(RIGHT[path]).encode()), {}
    if kind < 0.9:
        return "POST", random.choice([path, "/load_model"] if path in EVERY else [path]), random.choice(BODIES), {}
    if path not in EVERY:
        return random.choice(["GET", "DELETE", "PUT"]), path, b"", {}
    return random.choice(
        [
            ("POST", path, b"messages=hello", {"content-type": "application/x-www-form-urlencoded"}),
            ("POST", "/load_model", b'{"model": "another"}', {}),
            ("POST", "/load_model", b'{"model": 5}', {}),
            (random.choice(["GET", "DELETE", "PUT"]), path, b"", {}),
            ("GET", random.choice(PATHS), b"", {}),
        ]
    )


def damaged(random: Random, body: bytes) -> bytes:
    """The body with a byte lost, doubled or changed, or truncated, so that it is not JSON."""
    while True:
        at = random.randrange(len(body))
        wrong = random.choice(
            [
                body[:at],
                body[:at] + body[at + 1 :],
                body[:at] + body[at : at + 1] + body[at:],
                body[:at] + bytes([random.randrange(256)]) + body[at + 1 :],
            ]
        )
        try:
            json.loads(wrong)
        except ValueError:
            return wrong


def cases(seed: int | str, count: int, paths: Sequence[str] = EVERY) -> Iterator[Case]:
    random = Random(seed)
    for _ in range(count):
        yield draw(random, paths)
