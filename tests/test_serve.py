"""`python -m torch_moe_metal serve`, asked by OpenAI's own client: a real process, or a server in a thread of the test."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest
import torch
import uvicorn
from transformers import AutoModelForCausalLM, AutoTokenizer

import checkpoints
import gguf_files
import mlx_folders
import served
import torch_moe_metal
from torch_moe_metal.__main__ import main
from torch_moe_metal.bench.calls import Unfit
from torch_moe_metal.loading import Source
from torch_moe_metal.serve.app import build
from torch_moe_metal.serve.generation import Generation, Until, sampling
from torch_moe_metal.serve.models import HARMONY, Models

HELLO = [{"role": "user", "content": "hello"}]
LONG = 30000  # tokens, which take minutes


def client(base: str, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base}/v1", max_retries=0, **{"api_key": "any", "timeout": 60} | options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return served.checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module", params=["one by one", "continuous batching"])
def process(request, folder: Path) -> Iterator[served.Process]:
    batched = ["--continuous-batching"] if request.param == "continuous batching" else []
    with served.server(folder, "--context", 40000, "--log-level", "warning", *batched) as process:
        process.model = str(folder)
        yield process
        assert process.process.poll() is None, process.said


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    """What `generate` says of some prompts, greedily."""
    words = AutoTokenizer.from_pretrained(folder)
    model = torch_moe_metal_model(folder)

    def answer(**inputs) -> str:
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        return words.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    chat = words.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    return {"chat": answer(**chat), "text": answer(**words("once upon", return_tensors="pt"))}


def torch_moe_metal_model(folder: Path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch_moe_metal.patch(model)
    return model


def asked(client: openai.OpenAI, model: str, **options):
    options = {"messages": HELLO, "max_tokens": 24, "temperature": 0} | options
    return client.chat.completions.create(model=model, **options)


def streamed(parts) -> tuple[str, str, object]:
    """The whole text, why it ended, and how many tokens it has."""
    parts = list(parts)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    return text, parts[-1].choices[0].finish_reason, parts[-1].usage


# ------------------------------------------------------------------------------------------------ a real process


def test_an_answer_is_that_of_generate(process, expected):
    answer = asked(client(process.base), process.model)
    assert answer.choices[0].message.content == expected["chat"]
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 24)
    assert answer.usage.prompt_tokens == len(served.tokenizer().apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"])
    text, end, usage = streamed(asked(client(process.base), process.model, stream=True))
    assert (text, end, usage.completion_tokens) == (expected["chat"], "length", 24)


def test_completions_and_responses(process, expected):
    ask = client(process.base)
    options = {"model": process.model, "prompt": "once upon", "max_tokens": 24, "temperature": 0}
    answer = ask.completions.create(**options)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected["text"], "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 24)
    assert "".join(part.choices[0].text for part in ask.completions.create(**options, stream=True)) == expected["text"]
    options = {"model": process.model, "input": "hello", "max_output_tokens": 24, "temperature": 0}
    answer = ask.responses.create(**options)
    assert (answer.output_text, answer.usage.output_tokens) == (expected["chat"], 24)
    events = list(ask.responses.create(**options, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected["chat"]
    assert events[-1].type == "response.completed"


def test_the_list_of_models_and_health(process):
    ask = client(process.base)
    assert [model.id for model in ask.models.list()] == [process.model]
    assert ask.models.retrieve(process.model).id == process.model
    assert ask.with_options(timeout=5).get("/../health", cast_to=object) == {"status": "ok"}
    with pytest.raises(openai.NotFoundError):
        ask.models.retrieve("another")


def test_eight_clients_at_once(process, expected):
    def one(i: int) -> str:
        streams = i % 2 == 0
        answer = asked(client(process.base), process.model, stream=streams)
        return streamed(answer)[0] if streams else answer.choices[0].message.content

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(one, range(16))) == [expected["chat"]] * 16


def test_each_request_draws_as_it_says(process, expected):
    """Greedy requests are not disturbed by those at their side that draw tokens, which do draw."""

    def one(i: int) -> str:
        options = {"temperature": 0} if i % 2 else {"temperature": 2.0, "top_p": 0.9 if i % 4 else 1.0}
        return asked(client(process.base), process.model, **options).choices[0].message.content

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(one, range(8)))
    assert answers[1::2] == [expected["chat"]] * 4
    assert len({*answers[::2], expected["chat"]}) == 5


def test_stop(process, expected):
    """The text ends before the stop string, whole or streamed, also where it begins in one token and ends in another."""
    stop = expected["chat"][9:12]
    before = expected["chat"][: expected["chat"].index(stop)]
    for stops in (stop, [stop, "not in it"], [stop[:2] + "~", stop]):
        answer = asked(client(process.base), process.model, stop=stops)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (before, "stop")
        assert answer.usage.completion_tokens == len(before) + len(stop)
        text, end, usage = streamed(asked(client(process.base), process.model, stop=stops, stream=True))
        assert (text, end, usage.completion_tokens) == (before, "stop", len(before) + len(stop))
    options = {"model": process.model, "prompt": "once upon", "max_tokens": 24, "temperature": 0}
    stop = expected["text"][5:7]
    answer = client(process.base).completions.create(**options, stop=stop)
    assert answer.choices[0].text == expected["text"][: expected["text"].index(stop)]


def test_an_error_is_openai_s(process):
    ask = client(process.base)
    with pytest.raises(openai.NotFoundError) as told:
        asked(ask, "another")
    assert (told.value.code, told.value.param, told.value.type) == ("model_not_found", "model", "invalid_request_error")
    for streams in (False, True):
        with pytest.raises(openai.BadRequestError) as told:
            asked(ask, process.model, messages=[{"role": "user", "content": "x" * 40000}], stream=streams)
        assert told.value.code == "context_length_exceeded" and "40000 tokens, which is the context" in str(told.value)
    status, answer = posted(process.base, "/v1/chat/completions", b'{"messages": [')
    assert status == 400 and "JSON" in answer["error"]["message"]


CLIENT = """
import openai, sys
ask = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="any")
for _ in ask.chat.completions.create(model=sys.argv[2], messages=[{"role": "user", "content": "hello"}],
                                     max_tokens=int(sys.argv[3]), temperature=0, stream=True):
    print("token", flush=True)
"""


def test_a_client_that_is_killed_frees_its_slot(process, expected):
    """In the middle of a stream. Nothing of it is computed any more: the processor is idle."""
    command = [sys.executable, "-c", CLIENT, process.base, process.model, str(LONG)]
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert [killed.stdout.readline().strip() for _ in range(3)] == ["token"] * 3
    killed.kill()
    killed.wait()
    assert asked(client(process.base, timeout=30), process.model).choices[0].message.content == expected["chat"]
    assert is_idle(process)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_slot(process, expected, streams: bool):
    """Also one that waits for a whole answer, and one that waits for its turn."""

    def leave(_i: int) -> None:
        with pytest.raises((openai.APITimeoutError, TimeoutError)):
            answer = asked(client(process.base, timeout=1), process.model, max_tokens=LONG, stream=streams)
            started = time.monotonic()
            for _ in answer:
                if time.monotonic() > started + 1:
                    answer.close()
                    raise TimeoutError

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(leave, range(3)))
    assert asked(client(process.base, timeout=30), process.model).choices[0].message.content == expected["chat"]
    assert is_idle(process)


def is_idle(process) -> bool:
    """Within seconds, while an answer that goes on would take minutes."""
    observed = psutil.Process(process.process.pid)
    return any(observed.cpu_percent(0.5) < 20 for _ in range(20))


def test_health_is_told_while_an_answer_is_computed(process):
    parts = asked(client(process.base), process.model, max_tokens=LONG, stream=True)
    next(iter(parts))
    started = time.monotonic()
    assert client(process.base).get("/../health", cast_to=object) == {"status": "ok"}
    parts.close()
    assert time.monotonic() < started + 5


# ------------------------------------------------------------------------------------------------ malformed requests

TEXT = {"messages": HELLO, "max_tokens": 1}
MALFORMED = [
    {},
    [],
    None,
    "text",
    {"messages": None},
    {"messages": []},
    {"messages": "hello"},
    {"messages": {"role": "user", "content": "hello"}},
    {"messages": [None]},
    {"messages": ["hello"]},
    {"messages": [{}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"content": "hello"}]},
    {"messages": [{"role": "nobody", "content": "hello"}]},
    {"messages": [{"role": ["user"], "content": "hello"}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [5]}]},
    {"messages": [{"role": "user", "content": [{}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
    {"messages": [{"role": "assistant", "tool_calls": 5}]},
    {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
    {"messages": [{"role": "function", "content": "hello"}]},  # the template refuses it
    {"messages": [{"role": "user", "content": "x" * 600}]},
    TEXT | {"model": 5},
    TEXT | {"model": "another"},
    TEXT | {"model": ["another"]},
    TEXT | {"max_tokens": 0},
    TEXT | {"max_tokens": -1},
    TEXT | {"max_tokens": "many"},
    TEXT | {"max_tokens": 1.5},
    TEXT | {"max_tokens": True},
    TEXT | {"max_completion_tokens": []},
    TEXT | {"temperature": "hot"},
    TEXT | {"temperature": -1},
    TEXT | {"temperature": 3},
    TEXT | {"temperature": float("nan")},
    TEXT | {"temperature": {}},
    TEXT | {"top_p": 0},
    TEXT | {"top_p": 1.1},
    TEXT | {"top_p": "1"},
    TEXT | {"seed": "x"},
    TEXT | {"seed": 2**80},
    TEXT | {"seed": 1.5},
    TEXT | {"stop": 5},
    TEXT | {"stop": [5]},
    TEXT | {"stop": ""},
    TEXT | {"stop": ["a", ""]},
    TEXT | {"stop": {"a": "b"}},
    TEXT | {"stream": "yes"},
    TEXT | {"stream": 1},
    TEXT | {"n": 2},
    TEXT | {"logprobs": True},
    TEXT | {"response_format": {"type": "json_object"}},
    TEXT | {"response_format": 5},
    TEXT | {"frequency_penalty": -1},
    TEXT | {"frequency_penalty": "x"},
    TEXT | {"presence_penalty": 9},
    TEXT | {"logit_bias": 5},
    TEXT | {"logit_bias": {"x": 1}},
    TEXT | {"logit_bias": {"99999": 1}},
    TEXT | {"logit_bias": {"5": "x"}},
    TEXT | {"logit_bias": {"5": 1000}},
    TEXT | {"tools": 5},
    TEXT | {"tools": [5]},
    TEXT | {"chat_template_kwargs": 5},
    TEXT | {"generation_config": 5},
    TEXT | {"generation_config": "{"},
    TEXT | {"generation_config": "5"},
    TEXT | {"generation_config": '{"num_beams": 4}'},
    TEXT | {"generation_config": '{"max_new_tokens": "many"}'},
    TEXT | {"unknown": 1},
    TEXT | {"\ud800": 1},
]
WRONG_PROMPTS = [5, None, [], ["a", "b"], [1, 2], {}, "", "x" * 600]
WRONG_INPUTS = [5, None, [], "", {}, [5], [{}], [{"type": "image"}], [{"role": "user", "content": 5}], "x" * 600]
BYTES = [b"", b"{", b"nothing", b"\xff\xfe", b"{}{}", b'{"messages": [}', b"[" * 100000, b'{"a":' * 5000, b"NaN"]


def malformed() -> Iterator[tuple[str, str, bytes, dict]]:
    """Method, path, body and headers of more than 200 requests."""
    chat, text, responses = "/v1/chat/completions", "/v1/completions", "/v1/responses"
    bodies = [(chat, body) for body in MALFORMED]
    bodies += [(chat, body | {"stream": True}) for body in MALFORMED if isinstance(body, dict) and "stream" not in body]
    bodies += [(text, {"prompt": prompt, "max_tokens": 1, "stream": streams}) for prompt in WRONG_PROMPTS for streams in (0, False)]
    bodies += [(text, {"prompt": "a", "max_tokens": 1} | change) for change in ({"echo": True}, {"best_of": 3}, {"suffix": 5})]
    bodies += [(responses, {"input": each, "max_output_tokens": 1, "stream": s}) for each in WRONG_INPUTS for s in (True, False)]
    for path, body in bodies:
        yield "POST", path, json.dumps(body).encode(), {}
    for path in (chat, text, responses, "/load_model"):
        for body in BYTES:
            yield "POST", path, body, {}
    for path in (chat, text, responses):
        yield "POST", path, b"messages=hello", {"content-type": "application/x-www-form-urlencoded"}
        yield "GET", path, b"", {}
        yield "DELETE", path, b"", {}
    for path in ("/", "/v1", "/v2/models", "/v1/embeddings", "/reset", "/v1/audio/transcriptions", "/v1/models/another"):
        yield "GET", path, b"", {}
    yield "POST", "/load_model", b'{"model": "another"}', {}


def posted(base: str, path: str, body: bytes, headers: dict | None = None, method: str = "POST") -> tuple[int, dict]:
    import http.client

    connection = http.client.HTTPConnection(base.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, body, {"content-type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def test_malformed_requests_are_the_client_s_fault(small):
    cases = list(malformed())
    assert len(cases) >= 200
    for method, path, body, headers in cases:
        status, answer = posted(small.base, path, body, headers, method)
        told = answer["error"]
        assert 400 <= status < 500 and told["message"] and told["type"] == "invalid_request_error", (path, body[:200], answer)
    assert asked(client(small.base), small.model, max_tokens=1).usage.completion_tokens == 1


# ------------------------------------------------------------------------------------------------ a server in a thread


class Inside:
    """The same application and server, without a process of its own."""

    def __init__(self, source: Source, batched: bool = False, api_key: str | None = None, **options):
        options = Namespace(**{"device": "cpu", "bits": None, "format": None, "dtype": "auto", "context": None} | options)
        self.models = Models(source, options)
        self.generation = Generation(self.models.context, batched)
        if batched:
            self.generation.get_manager("", use_cb=True).init_cb(self.models.model)
        config = uvicorn.Config(build(self.models, self.generation, api_key), log_level="warning")
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.base, self.model = f"http://127.0.0.1:{self.socket.getsockname()[1]}", source.name
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))

    def __enter__(self) -> "Inside":
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        return self

    def __exit__(self, *_error) -> None:
        self.generation.fail_all()
        self.server.should_exit = True
        self.thread.join(30)
        self.generation.shutdown()
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[Inside]:
    with Inside(Source.of(str(folder)), context=512) as inside:
        yield inside


WEATHER = {"name": "weather", "arguments": {"city": "Paris"}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]


@pytest.mark.parametrize("batched", [False, True])
def test_tool_calls_and_thoughts(tmp_path: Path, batched: bool):
    """As Qwen3 writes them."""
    said = ["<think>", "which city?", "</think>", "one moment", "<tool_call>", json.dumps(WEATHER), "</tool_call>"]
    with Inside(Source.of(str(served.saying(tmp_path, said))), batched, context=2048) as inside:
        check_tool_calls(inside, "which city?", "one moment")


def check_tool_calls(inside: Inside, thought: str, content: str) -> None:
    answer = asked(client(inside.base), inside.model, tools=TOOLS).choices[0]
    call = answer.message.tool_calls[0].function
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    assert (answer.message.content or "", answer.finish_reason) == (content, "tool_calls")
    assert answer.message.reasoning_content == thought
    parts = [part.choices[0] for part in asked(client(inside.base), inside.model, tools=TOOLS, stream=True)]
    call = next(part.delta.tool_calls[0].function for part in parts if part.delta.tool_calls)
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    assert "".join(part.delta.content or "" for part in parts) == content
    assert "".join(getattr(part.delta, "reasoning_content", None) or "" for part in parts) == thought
    history = [*HELLO, answer.message.to_dict(), {"role": "tool", "tool_call_id": "1", "content": "rain"}]
    assert asked(client(inside.base), inside.model, messages=history, tools=TOOLS).choices[0].message.tool_calls


GPT_OSS = "{% for message in messages %}{{ message.content }}{% endfor %}<|start|>assistant\n"


def test_gpt_oss_s_channels(tmp_path: Path):
    """Also without a template of answers in the tokenizer: GGUF files and mlx-lm's folders have none."""
    call = [" to=functions.weather", "<|channel|>", "commentary <|constrain|>json", "<|message|>", '{"city": "Paris"}', "<|call|>"]
    said = ["<|channel|>analysis<|message|>", "which city?", "<|end|><|start|>assistant", *call]
    with Inside(Source.of(str(served.saying(tmp_path, said, "gpt_oss", GPT_OSS)))) as inside:
        check_tool_calls(inside, "which city?", "")


@pytest.mark.parametrize(
    ("said", "parsed"),
    [
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>", ("hm", "yes")),
        ("<|channel|>final<|message|>{yes}", (None, "{yes}")),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", (None, "{}")),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I ask<|end|>"
            '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
            ("hm\nI ask", None),
        ),
    ],
)
def test_harmony(said: str, parsed: tuple):
    from transformers.utils.chat_parsing import parse_response

    message = parse_response(said, HARMONY, prefix="<|start|>user<|message|>hello<|end|><|start|>assistant")
    assert (message.get("reasoning_content"), message.get("content")) == parsed
    if "functions" in said:
        assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]


def test_a_stop_string_among_thoughts_stops_nothing(tmp_path: Path):
    said = ["<think>", "no stop here", "</think>", "but here: stop", " and more"]
    with Inside(Source.of(str(served.saying(tmp_path, said)))) as inside:
        for streams in (False, True):
            answer = asked(client(inside.base), inside.model, stop="stop", stream=streams)
            text = streamed(answer)[0] if streams else answer.choices[0].message.content
            assert text == "but here: "


def test_seed(small):
    """The same numbers are drawn again, whoever draws some at the same time."""

    def one(seed: int) -> str:
        return asked(client(small.base), small.model, temperature=1.5, seed=seed).choices[0].message.content

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(one, [7, 8, 7, 8, 7, 8]))
    assert len(set(answers)) == 2 and answers[::2] == [answers[0]] * 3


def test_temperature_draws_tokens(small):
    """Also where the model's own configuration does not, as that of a checkpoint without generation_config.json."""
    assert small.models.model.generation_config.do_sample is None
    answers = {asked(client(small.base), small.model, temperature=2).choices[0].message.content for _ in range(3)}
    assert len(answers) == 3


@pytest.mark.parametrize("batched", [False, True])
def test_an_answer_may_fill_the_context(folder: Path, batched: bool):
    """And ends there, where transformers' server ends it behind 1,024 tokens, or fails."""
    with Inside(Source.of(str(folder)), batched, context=1200) as inside:
        ask = client(inside.base).chat.completions
        for options in ({}, {"max_tokens": 5000}):
            answer = ask.create(model=inside.model, messages=HELLO, temperature=0, **options)
            assert answer.usage.total_tokens == 1200 and answer.choices[0].finish_reason == "length"


def test_a_developer_s_message_is_a_system_message(small):
    def tokens(role: str) -> int:
        messages = [{"role": role, "content": "be brief"}, *HELLO]
        return asked(client(small.base), small.model, messages=messages, max_tokens=1).usage.prompt_tokens

    assert tokens("developer") == tokens("system") > asked(client(small.base), small.model).usage.prompt_tokens


def test_streams_end_as_openai_s(small):
    body = json.dumps({"messages": HELLO, "max_tokens": 2, "stream": True}).encode()
    import http.client

    for path, body in (("/v1/chat/completions", body), ("/v1/completions", b'{"prompt": "a", "max_tokens": 2, "stream": true}')):
        connection = http.client.HTTPConnection(small.base.removeprefix("http://"), timeout=30)
        connection.request("POST", path, body, {"content-type": "application/json"})
        assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")


def test_transformers_own_client_finds_the_model_loaded(small):
    """`transformers chat` loads its model first."""
    import http.client

    connection = http.client.HTTPConnection(small.base.removeprefix("http://"), timeout=30)
    body = json.dumps({"model": f"{small.model}@main"})
    connection.request("POST", "/load_model", body, {"content-type": "application/json"})
    assert b'"status": "ready"' in connection.getresponse().read()
    told = {"extra_body": {"generation_config": json.dumps({"max_new_tokens": 3, "do_sample": False})}}
    answer = client(small.base).chat.completions.create(model=f"{small.model}@main", messages=HELLO, **told)
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("streams", [True, False])
def test_an_error_of_the_model_is_told(small, monkeypatch, streams: bool):
    """And is the server's fault; the next request is answered."""

    def broken(**_inputs):
        raise RuntimeError('out of "memory"')

    with monkeypatch.context() as patched:
        patched.setattr(small.models.model, "generate", broken)
        with pytest.raises(openai.APIError) as told:
            list(asked(client(small.base), small.model, stream=streams))
    assert 'out of "memory"' in str(told.value) and getattr(told.value, "status_code", 500) == 500
    assert asked(client(small.base), small.model, max_tokens=1).usage.completion_tokens == 1


def test_a_key(folder: Path):
    with Inside(Source.of(str(folder)), api_key="secret") as inside:
        assert asked(client(inside.base, api_key="secret"), inside.model, max_tokens=1).usage.completion_tokens == 1
        for wrong in ("other", "secret2", "secre"):
            with pytest.raises(openai.AuthenticationError) as told:
                asked(client(inside.base, api_key=wrong), inside.model)
            assert told.value.code == "invalid_api_key"
        assert posted(inside.base, "/v1/models", b"", method="GET")[0] == 401
        assert posted(inside.base, "/health", b"", method="GET")[0] == 200


def gpt_oss(folder: Path) -> Source:
    checkpoints.gpt_oss(folder, vocab_size=served.VOCABULARY)
    served.tokenizer().save_pretrained(folder)
    return Source.of(str(folder))


def mlx(folder: Path) -> Source:
    converted = mlx_folders.convert(folder, "qwen3_moe")
    served.tokenizer().save_pretrained(converted)
    return Source.of(str(converted))


def gguf(folder: Path) -> Source:
    return Source.of(str(gguf_files.write(gguf_files.model("qwen3moe"), folder / "model.gguf", gguf_files.Q4_K_M)))


def packed(folder: Path) -> Source:
    return Source.of(str(served.checkpoint(folder)))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    ("write", "options", "format"),
    [(gpt_oss, {}, "mxfp4"), (mlx, {}, "affine"), (gguf, {}, "q4_k"), (packed, {"bits": 8}, "affine")],
)
def test_every_kind_of_checkpoint(tmp_path: Path, write, options: dict, format: str, batched: bool):
    source = write(tmp_path)
    with Inside(source, batched, context=100, **options) as inside:
        assert format in str(inside.models) and "GB of weights" in str(inside.models)
        words, model = inside.models.processor, inside.models.model
        inputs = words("abc", return_tensors="pt")
        want = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        options = {"model": inside.model, "prompt": "abc", "max_tokens": 8, "temperature": 0}
        answer = client(inside.base).completions.create(**options).choices[0].text
        assert answer == words.decode(want, skip_special_tokens=True)


def test_a_stop_of_the_server_ends_requests(folder: Path):
    with Inside(Source.of(str(folder))) as inside:
        parts = asked(client(inside.base), inside.model, max_tokens=LONG, stream=True)
        next(iter(parts))
        inside.generation.fail_all()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(parts)


# ------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize("batched", [False, True])
def test_ctrl_c_ends_requests_and_the_server(folder: Path, batched: bool):
    arguments = ["--continuous-batching", "--context", "2048"] if batched else []
    process = served.Process(folder, *arguments)
    try:
        parts = asked(client(process.base), str(folder), max_tokens=LONG, stream=True)
        next(iter(parts))
        process.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(parts)
        assert process.stop() == 0
        for told in (f"Loading {folder}", "Qwen3MoeSparseMoeBlock", "GB of weights", "first tokens", "Serving"):
            assert told in process.said
        assert "Traceback" not in process.said
    finally:
        process.stop()


def test_ctrl_c_while_the_model_is_loaded(folder: Path, monkeypatch, capsys):
    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("torch_moe_metal.serve.models.load_model", interrupted)
    assert main(["serve", str(folder), "--device", "cpu", "--port", "0"]) == 130


def test_what_cannot_be_had_is_one_line(folder: Path, tmp_path: Path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.gguf").write_bytes(b"")
    busy = socket.create_server(("127.0.0.1", 0))
    monkeypatch.chdir(tmp_path)
    for arguments, said in (
        (["missing"], "no such file, folder or name on the hub: missing"),
        (["./missing/file.gguf"], "no such file, folder or name on the hub"),
        (["empty"], "no checkpoint: empty: it has no config.json"),
        (["files"], "no checkpoint: files: choose a file with --gguf: a.gguf"),
        (["files", "--gguf", "b.gguf"], "--gguf: no such file: files/b.gguf"),
        (["files/a.gguf", "--gguf", "b.gguf"], "--gguf: expected MODEL to be a folder or a name on the hub"),
        (["files/a.gguf"], "cannot load files/a.gguf: "),
        ([str(folder), "--format", "mxfp4", "--bits", "4"], "--bits: only the format affine has a choice of bits"),
        ([str(folder), "--context", "70000"], "--context: expected at most 65536"),
        ([str(folder), "--port", str(busy.getsockname()[1])], "cannot listen on 127.0.0.1, port "),
        ([str(folder), "--port", "70000"], "cannot listen on 127.0.0.1, port 70000"),
        ([str(folder), "--host", "no such host"], "cannot listen on no such host"),
    ):
        assert main(["serve", *arguments, "--device", "cpu"]) == 2
        *_, last = capsys.readouterr().err.splitlines()
        assert last.startswith("serve: ") and said in last, last


def test_what_is_not_installed_is_told(folder: Path, capsys, monkeypatch):
    monkeypatch.setattr("torch_moe_metal.serve.NEEDED", ("fastapi", "no_such_package"))
    assert main(["serve", str(folder), "--device", "cpu"]) == 2
    assert "serve: not installed: no_such_package: pip install 'torch_moe_metal[serve]'" in capsys.readouterr().err


def test_help_needs_neither_fastapi_nor_transformers():
    code = "import sys; sys.modules |= dict.fromkeys(('fastapi', 'uvicorn', 'transformers')); import torch_moe_metal.__main__ as m; m.main(['serve', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "--continuous-batching" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("name", "gguf", "found"),
    [
        ("openai/gpt-oss-20b", None, ("openai/gpt-oss-20b", None, None)),
        ("a/b@v1.0", None, ("a/b", "v1.0", None)),
        ("a/b:c/d.gguf", None, ("a/b", None, "c/d.gguf")),
        ("a/b@x:d.gguf", None, ("a/b", "x", "d.gguf")),
        ("a/b", "d.gguf", ("a/b", None, "d.gguf")),
    ],
)
def test_names_of_the_hub(name: str, gguf: str | None, found: tuple):
    source = Source.of(name, gguf)
    assert (source.path, source.revision, source.gguf_file) == found
    assert source.name == (name if gguf is None else f"{name}:{gguf}")


@pytest.mark.parametrize("name", ["a", "a/b/c", "a/b:c", "../x", "a b/c"])
def test_names_that_are_none(name: str):
    with pytest.raises(Unfit, match="no such file, folder or name"):
        Source.of(name)


# ------------------------------------------------------------------------------------------------ parts


@pytest.mark.parametrize(
    ("texts", "stops", "passed"),
    [
        (["abc", "def"], [], "abcdef"),
        (["abc", "def"], ["x"], "abcdef"),
        (["abc", "def"], ["cd"], "ab"),
        (["abc", "def"], ["abcdef"], ""),
        (["ab", "ab", "ac"], ["abac"], "ab"),
        (["aa", "ab"], ["aab"], "a"),
        (["abc", "xef"], ["cd", "ce"], "abcxef"),
        (["abcd"], ["d", "bc"], "a"),
        (["ab"], ["bc"], "ab"),
    ],
)
def test_text_until_a_stop_string(texts: list[str], stops: list[str], passed: str):
    until, out = Until(stops), []
    for each in [*texts, None]:
        out += until.passed(each)
        if until.found:
            break
    assert out[-1] is None and "".join(out[:-1]) == passed
    assert until.found == any(stop in "".join(texts) for stop in stops)


def test_a_batch_draws_each_request_s_own_way():
    from transformers import GenerationConfig

    assert sampling(GenerationConfig(do_sample=False), 99) == {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
    drawn = GenerationConfig(do_sample=True, temperature=0.7, top_k=20, top_p=0.8)
    assert sampling(drawn, 99) == {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    assert sampling(GenerationConfig(do_sample=True, top_k=0), 99)["top_k"] == 99


@pytest.mark.parametrize("top_k", [[1, 1, 1], [1, 5, 3], [99, 99, 99], [1, 99, 4]])
@pytest.mark.parametrize("top_p", [[1.0, 1.0, 1.0], [0.5, 1.0, 0.9]])
def test_quick_processors_are_transformers_own(top_k: list[int], top_p: list[float]):
    from types import SimpleNamespace

    from transformers import TopKLogitsWarper, TopPLogitsWarper
    from transformers.generation.continuous_batching import cb_logits_processors as stock

    from torch_moe_metal.serve.generation import quick

    scores = torch.randn(3, 99, generator=torch.Generator().manual_seed(0))
    requests = [
        SimpleNamespace(state=SimpleNamespace(logit_processor_kwargs={"top_k": k, "top_p": p}))
        for k, p in zip(top_k, top_p, strict=True)
    ]
    for plain, of in (
        (TopKLogitsWarper(1), stock.ContinuousBatchingTopKLogitsWarper),
        (TopPLogitsWarper(0.5), stock.ContinuousBatchingTopPLogitsWarper),
    ):
        ours = quick(of(plain))
        arguments = ours.prepare_tensor_args(requests)
        assert type(ours) is not of and torch.equal(ours(scores, arguments), of(plain)(scores, arguments))
