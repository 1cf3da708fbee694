"""Malformed requests to the server, drawn from a seed: each is a valid one with a single fault."""

import json
from collections.abc import Iterator
from random import Random

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
RIGHT = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    TEXT: {"prompt": "hello", "max_tokens": 1},
    RESPONSES: {"input": "hello", "max_output_tokens": 1},
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


def messages(*contents: object, role: object = "user") -> list:
    return [[{"role": role, "content": content}] for content in contents]


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
        "n": [2, 0, "one", *HUGE],
        "logprobs": [True, 1, "x"],
        "response_format": [{"type": "json_object"}, 5, {}],
        "chat_template_kwargs": [5, "x", [], {"padding": "max_length"}, {"x": "y" * 70000}],
        "top_logprobs": [1, "x"],
        "reasoning_effort": ["banana", 5],
        "tool_choice": ["required", "f", {"type": "function", "function": {"name": "f"}}],
        "tools": [5, [5], {}, "x", [{}], [{"type": "web_search"}], [{"type": "function", "function": {"name": 5}}]],
    },
    TEXT: {
        **SHARED,
        "prompt": [5, None, [], ["a", "b"], [1, 2], {}, "", "x" * 600],
        "max_tokens": LIMIT,
        "echo": [True, 5],
        "best_of": [3, "x"],
        "suffix": [5, [], "the end"],
    },
    RESPONSES: {
        **SHARED,
        "input": [5, None, [], "", {}, [5], [{}], [{"type": "image"}], [{"role": "user", "content": 5}], "x" * 600],
        "max_output_tokens": LIMIT,
        "instructions": [5, []],
        "previous_response_id": ["resp_1", 5],
        "reasoning": [5, {"effort": "banana"}, {"summary": "detailed"}],
        "text": [5, {"format": {"type": "json_object"}}],
        "truncation": ["auto"],
    },
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
PATHS = ["/", "/v1", "/v2/models", "/v1/embeddings", "/reset", "/v1/audio/transcriptions", "/v1/models/another"]

Case = tuple[str, str, bytes, dict]  # method, path, body, headers


def draw(random: Random) -> Case:
    path = random.choice([CHAT, CHAT, TEXT, RESPONSES])
    kind = random.random()
    if kind < 0.6:
        name = random.choice(list(WRONG[path]))
        streamed = {"stream": True} if random.random() < 0.5 else {}
        return "POST", path, json.dumps(RIGHT[path] | streamed | {name: random.choice(WRONG[path][name])}).encode(), {}
    if kind < 0.8:
        return "POST", path, damaged(random, json.dumps(RIGHT[path]).encode()), {}
    if kind < 0.9:
        return "POST", random.choice([path, "/load_model"]), random.choice(BODIES), {}
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


def cases(seed: int, count: int) -> Iterator[Case]:
    random = Random(seed)
    for _ in range(count):
        yield draw(random)
