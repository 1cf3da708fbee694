"""/v1/messages with Anthropic's own client: on a server in a thread of the test, and on a process."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import anthropic
import pydantic
import pytest

import malformed
import served
from served import HELLO, LONG, raw
from torch_moe_metal.commands.common.loading import Source
from torch_moe_metal.commands.serve import anthropic_requests

WEATHER = {"name": "weather", "arguments": {"city": "Paris"}}
SCRIPT = ["<think>", "which city?", "</think>", "one moment", "<tool_call>", json.dumps(WEATHER), "</tool_call>"]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "the weather", "input_schema": SCHEMA | {"additionalProperties": False}}]
THINKS = {"type": "enabled", "budget_tokens": 1024}
COUNT = "/v1/messages/count_tokens"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return served.checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module", params=[False, True], ids=["sequential", "batched"])
def server(request, folder: Path) -> Iterator[served.ServerThread]:
    with served.ServerThread(Source.of(str(folder)), request.param, context=2048, api_key="secret") as server:
        yield server


@pytest.fixture(scope="module", params=[False, True], ids=["sequential", "batched"])
def scripted(request, tmp_path_factory) -> Iterator[served.ServerThread]:
    """A model that thinks, says something, and calls a tool."""
    folder = served.scripted(tmp_path_factory.mktemp("scripted"), SCRIPT)
    with served.ServerThread(Source.of(str(folder)), request.param, context=2048) as server:
        yield server


def client(server, key: str = "secret") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.base, api_key=key, max_retries=0, timeout=60)


def ask(server, **options):
    options = {"model": server.model, "messages": HELLO, "max_tokens": 24} | options
    return client(server).messages.create(**options, extra_body={"temperature": 0})


def kinds(message) -> list[str]:
    return [block.type for block in message.content]


def test_a_message_is_the_answer_of_chat(server):
    chat = served.client(server, api_key="secret").chat.completions
    options = {"model": server.model, "max_tokens": 24, "temperature": 0}
    expected = chat.create(messages=[{"role": "system", "content": "be\n\nbrief"}, *HELLO], **options)
    system = [{"type": "text", "text": "x-anthropic-billing-header: 5"}, {"type": "text", "text": "be"}]
    message = ask(server, system=[*system, {"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}}])
    assert (kinds(message), message.content[0].text) == (["text"], expected.choices[0].message.content)
    assert (message.role, message.model, message.stop_reason) == ("assistant", server.model, "max_tokens")
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert usage.output_tokens == 24
    stop = message.content[0].text[9:12]
    stopped = ask(server, system="be\n\nbrief", stop_sequences=[stop, "never"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text.startswith(stopped.content[0].text) and stop not in stopped.content[0].text


def test_a_conversation_is_that_of_chat(server):
    """Blocks of all kinds give the prompt of the same conversation in chat."""
    calls = [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]
    chat = [
        {"role": "user", "content": "one\n\ntwo"},
        {"role": "assistant", "content": "see", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "rain\n\ncold"},
        {"role": "user", "content": "and?"},
    ]
    result = {"type": "tool_result", "tool_use_id": "a"}
    source = {"type": "text", "media_type": "text/plain", "data": "two"}
    texts = [{"type": "text", "text": "rain"}, {"type": "text", "text": "cold"}]
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "document", "source": source}]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "see"}, call]},
        {"role": "user", "content": [result | {"content": texts}, {"type": "text", "text": "and?"}]},
    ]
    api = client(server)
    tokens = api.messages.count_tokens(model=server.model, messages=messages).input_tokens
    expected = served.client(server, api_key="secret").chat.completions.create(
        model=server.model, messages=chat, max_tokens=1
    )
    assert tokens == expected.usage.prompt_tokens
    with_tools = api.messages.count_tokens(model=server.model, messages=messages, tools=TOOLS).input_tokens
    assert with_tools > tokens


def test_thinking_and_tools(scripted):
    message = ask(scripted, tools=TOOLS, thinking=THINKS)
    assert kinds(message) == ["thinking", "text", "tool_use"]
    thought, text, call = message.content
    assert (thought.thinking, text.text) == ("which city?", "one moment")
    assert (call.name, call.input, message.stop_reason) == ("weather", {"city": "Paris"}, "tool_use")
    for thinking in ({"type": "disabled"}, THINKS | {"display": "omitted"}):
        assert kinds(ask(scripted, tools=TOOLS, thinking=thinking)) == ["text", "tool_use"]
    history = [*HELLO, {"role": "assistant", "content": [block.to_dict() for block in message.content]}]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    assert ask(scripted, messages=[*history, {"role": "user", "content": [result]}], tools=TOOLS).content


@pytest.mark.parametrize("thinking", [THINKS, {"type": "disabled"}], ids=["shown", "hidden"])
def test_a_stream_is_the_same_message(scripted, thinking: dict):
    options = {"model": scripted.model, "messages": HELLO, "max_tokens": 24, "tools": TOOLS, "thinking": thinking}
    whole = ask(scripted, tools=TOOLS, thinking=thinking)
    with client(scripted).messages.stream(**options, extra_body={"temperature": 0}) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_message()
    assert events[0] == "message_start" and events[-2:] == ["message_delta", "message_stop"]
    assert events.count("content_block_start") == events.count("content_block_stop") == len(whole.content)
    assert [block.to_dict() | {"id": 0} for block in message.content] == [
        block.to_dict() | {"id": 0} for block in whole.content
    ]
    assert (message.stop_reason, message.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_forced_calls_and_forms(server):
    message = ask(server, tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=200)
    assert (kinds(message), message.stop_reason) == (["tool_use"], "tool_use")
    assert isinstance(message.content[0].input["city"], str)
    form = {"format": {"type": "json_schema", "schema": TOOLS[0]["input_schema"]}}
    message = ask(server, output_config=form, max_tokens=200)
    assert message.stop_reason == "end_turn" and list(json.loads(message.content[0].text)) == ["city"]


class City(pydantic.BaseModel):
    name: Literal["Rome", "Paris"]
    size: Literal[1, 2]


def test_the_client_parses_a_model(server):
    options = {"model": server.model, "messages": HELLO, "max_tokens": 200}
    assert isinstance(client(server).messages.parse(**options, output_format=City).parsed_output, City)


def test_errors_have_anthropic_s_form(server):
    for body, expected in (
        ({"model": "another"}, anthropic.NotFoundError),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, anthropic.BadRequestError),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError),
    ):
        with pytest.raises(expected) as error:
            ask(server, **body)
        assert error.value.body["type"] == "error"
    with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
        client(server, "wrong").messages.create(model=server.model, messages=HELLO, max_tokens=1)
    headers = {"x-api-key": "secret"}
    for path, body, expected in (
        ("/v1/messages", {"messages": HELLO}, "max_tokens: expected a value"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 1, "temperature": 1.5}, "temperature: "),
        (COUNT, {"max_tokens": 1}, "messages: expected a value"),
        (COUNT, {"messages": [*HELLO, {"role": "assistant", "content": "a"}]}, "messages[1].role: expected user"),
        (COUNT, {"messages": HELLO, "tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0]: "),
    ):
        status, answer = raw(server, path, json.dumps(body).encode(), headers)
        error = json.loads(answer)
        assert (status, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
        assert error["error"]["message"].startswith(expected), error


def test_an_error_of_the_model_ends_a_stream(folder: Path, monkeypatch):
    def broken(**_inputs):
        raise RuntimeError("out of memory")

    with served.ServerThread(Source.of(str(folder)), context=2048) as server:
        monkeypatch.setattr(server.models.model, "generate", broken)
        with pytest.raises(anthropic.APIStatusError, match="out of memory") as error:
            list(client(server).messages.create(model=server.model, messages=HELLO, max_tokens=5, stream=True))
    assert error.value.body["error"]["type"] == "api_error"


def test_images_are_those_of_chat():
    data = base64.b64encode(b"png").decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "text", "text": "what?"}, {"type": "image", "source": source}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]}
    body = {"messages": [{"role": "user", "content": [*content, result]}]}
    tool, user = anthropic_requests.as_chat(body, takes_images=True)["messages"]
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    assert (tool["role"], tool["content"]) == ("tool", [image])
    assert user["content"] == [{"type": "text", "text": "what?"}, image]
    with pytest.raises(Exception, match="no images"):
        anthropic_requests.as_chat(body, takes_images=False)
    content[1]["source"] = {"type": "url", "url": "file:///etc/passwd"}
    with pytest.raises(Exception, match="base64 with media_type and data, or a url"):
        anthropic_requests.as_chat(body, takes_images=True)


def test_malformed_requests_get_a_4xx_status(server):
    check_malformed(server, count=150)


@pytest.mark.slow
def test_a_thousand_malformed_requests_to_each_endpoint(server):
    check_malformed(server, count=1000)


def check_malformed(server, count: int) -> None:
    for path in ("/v1/messages", COUNT):
        for case in malformed.cases(path, count, paths=[path]):
            method, path, body, headers = case
            status, answer = raw(server, path, body, {"x-api-key": "secret", **headers}, method)
            about = path, body[:300], status, answer[:300]
            assert 400 <= status < 500, about
            error = json.loads(answer)
            assert error["type"] == "error" and error["error"]["message"], about
    assert ask(server, max_tokens=1).usage.output_tokens == 1
    assert server.becomes_idle()


def test_a_process(folder: Path):
    """The examples of the package's description, on the command."""
    with served.process(folder, "--context", 2048, "--alias", "*") as process:
        api = client(process)
        options = {"model": "claude-opus-4", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
        assert api.messages.create(**options).content[0].text
        with api.messages.stream(**options) as stream:
            assert "".join(stream.text_stream) and stream.get_final_message().stop_reason
        assert api.messages.count_tokens(model="claude-opus-4", messages=HELLO).input_tokens > 5
        assert any(part.type == "message_stop" for part in api.messages.create(**options, stream=True))
        parts = api.messages.create(**options | {"max_tokens": LONG}, stream=True)
        next(iter(parts))
        parts.close()
        assert process.stop() == 0
    assert "Traceback" not in process.output
