"""What a server reads: whom it answers, how long a body may be, and how many connections may wait."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

import served
from test_serve import HELLO, LONG, chat, client, raw
from torch_moe_metal.commands.common.loading import Source
from torch_moe_metal.commands.serve import connections
from torch_moe_metal.commands.serve.app import Guard
from torch_moe_metal.commands.serve.bodies import MAX_BYTES, OTHER_BYTES, parse, text_limit
from torch_moe_metal.commands.serve.requests import Refused

CHAT = "/v1/chat/completions"
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return served.checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[served.ServerThread]:
    with served.ServerThread(Source.of(str(folder)), context=40000) as server:
        yield server


def connect(server, sent: bytes = b"") -> socket.socket:
    host, _, port = server.base.removeprefix("http://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(sent)
    return connection


def head(path: str, *lines: str) -> bytes:
    lines = ("Host: localhost", "Content-Type: application/json", *lines)
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode()


def answer(connection: socket.socket) -> tuple[int, bytes]:
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, response.read()


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed it, or closes it before the socket's timeout."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


# ------------------------------------------------------------------------------------------------ whom it answers


def test_without_a_key_only_names_of_this_machine_are_answered(server):
    """A web page's name can be made to lead to 127.0.0.1."""
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]", "[::1]:8000"):
        assert raw(server, "/v1/models", headers={"host": host}, method="GET")[0] == 200
    for host in ("page.example", "page.example:8000", "localhost.page.example", "192.168.0.1", "localhost:x", ""):
        for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", "/health")):
            status, body = raw(server, path, headers={"host": host}, method=method)
            assert status == 403 and "Host: expected one of localhost" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("host", "answered", "refused"),
    [
        ("192.168.0.1", "192.168.0.1:8000", "192.168.0.2:8000"),
        ("fe80::1", "[fe80::1]:8000", "[fe80::2]:8000"),
        ("My.Name", "my.name:8000", "your.name:8000"),
        ("0.0.0.0", "192.168.0.1:8000", "page.example:8000"),
        ("::", "[fe80::1]", "page.example"),
    ],
)
def test_the_host_of_the_command_is_answered(host: str, answered: str, refused: str):
    guard = Guard(None, None, {}, None, False, host)
    assert guard.is_ours(answered) and guard.is_ours("localhost:1") and not guard.is_ours(refused)


def test_a_key_in_any_case_of_bearer_is_right_from_any_host(folder: Path):
    with served.ServerThread(Source.of(str(folder)), api_key="secret") as server:
        for scheme, expected in (("Bearer", 200), ("bearer", 200), ("BEARER", 200), ("Basic", 401), ("", 401)):
            headers = {"host": "page.example", "authorization": f"{scheme} secret"}
            assert raw(server, "/v1/models", headers=headers, method="GET")[0] == expected


# ------------------------------------------------------------------------------------------------ bodies


def test_a_body_that_is_too_long_is_refused_before_it_is_sent(server):
    """16 bytes for each of 40,000 tokens of context, and 65,536."""
    for path, limit in ((CHAT, 16 * 40000 + 65536), ("/v1/responses", 16 * 40000 + 65536), ("/load_model", 65536)):
        with connect(server, head(path, f"Content-Length: {limit + 1}")) as connection:
            status, body = answer(connection)
            assert status == 413 and b"context_length_exceeded" in body and f"at most {limit} bytes".encode() in body
    with connect(server, head(CHAT, "Transfer-Encoding: chunked")) as connection:
        for _ in range(8):
            connection.sendall(b"20000\r\n" + b" " * 0x20000 + b"\r\n")
        assert answer(connection)[0] == 413


def test_health_is_answered_while_60_mib_are_refused(server):
    body = json.dumps({"prompt": "a" * (60 * MIB)}).encode()
    with ThreadPoolExecutor(2) as threads:
        refused = [threads.submit(raw, server, "/v1/completions", body) for _ in range(2)]
        slowest = 0.0
        while not all(each.done() for each in refused):
            start = time.monotonic()
            assert raw(server, "/health", method="GET")[0] == 200
            slowest = max(slowest, time.monotonic() - start)
    assert [each.result()[0] for each in refused] == [413, 413]
    assert slowest < 0.5


def test_a_prompt_is_tokenised_off_the_event_loop(server, monkeypatch):
    begun, go_on, processor = threading.Event(), threading.Event(), server.models.processor
    stock = type(processor).apply_chat_template

    def slow(*args, **kwargs):
        begun.set()
        assert go_on.wait(20)
        return stock(processor, *args, **kwargs)

    monkeypatch.setattr(processor, "apply_chat_template", slow)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(chat, server, max_tokens=1)
        assert begun.wait(20)
        assert raw(server, "/health", method="GET")[0] == 200
        go_on.set()
        assert answer.result().usage.completion_tokens == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_that_is_too_long_is_not_decoded_on_the_event_loop(server, monkeypatch, stream: bool):
    def parser(*_args, **_kwargs):
        raise AssertionError

    monkeypatch.setattr("transformers.cli.serving.chat_completion.build_response_parser", parser)
    with pytest.raises(openai.BadRequestError, match="fewer than 40000 tokens"):
        chat(server, messages=[{"role": "user", "content": "x" * 600000}], stream=stream)


def test_images_do_not_count_as_text():
    limit = text_limit(context=512)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "a" * MIB}}
    sound = {"type": "input_audio", "input_audio": {"data": "a" * MIB, "format": "wav"}}
    for part in (image, sound, {"type": "input_image", "image_url": "a" * MIB}):
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 1000}, part]}]}
        assert parse(json.dumps(body, indent=1).encode(), limit) == body
    for value in ("a" * MIB, ["aa"] * (MIB // 8), [{}] * (MIB // 4), {"url": ["a" * MIB]}, '\\"url\\":\\"' + "a" * MIB):
        with pytest.raises(Refused, match=f"at most {limit} bytes besides images") as reason:
            parse(json.dumps({"prompt": value}).encode(), limit)
        assert reason.value.status_code == 413
    assert text_limit(512) == 16 * 512 + OTHER_BYTES and text_limit(10**7) == MAX_BYTES


def test_other_content_types_are_refused(server):
    """A web page of another origin can send them."""
    body = json.dumps({"messages": HELLO, "max_tokens": 1}).encode()
    for kind, status in (("text/plain", 400), ("", 400), ("application/json; charset=utf-8", 200)):
        assert raw(server, CHAT, body, {"content-type": kind})[0] == status


# ------------------------------------------------------------------------------------------------ connections


def test_half_a_request_ends_after_a_time(server, monkeypatch):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(connections, "REST_SECONDS", 0.3)
    half = (b"", b"POST /v1/compl", head(CHAT, "Content-Length: 100"), head(CHAT, "Content-Length: 100") + b"{")
    for sent in half:
        with connect(server, sent) as connection:
            assert is_closed(connection)
    with connect(server, head("/health", "Content-Length: 0")) as connection:
        assert answer(connection)[0] == 405
        connection.sendall(b"GET /he")  # after an answer
        assert is_closed(connection)
    with connect(server, head(CHAT, f"Content-Length: {10 * MIB}")) as connection:
        assert answer(connection)[0] == 413
        connection.sendall(b"{")  # the rest of what was refused
        assert is_closed(connection)
    # a body may take longer as long as it comes on, and an answer as long as it likes
    body = json.dumps({"messages": HELLO, "max_tokens": 4000, "stream": True}).encode()
    with connect(server, head(CHAT, f"Content-Length: {len(body)}")) as connection:
        for i in range(0, len(body), len(body) // 5):
            time.sleep(0.1)
            connection.sendall(body[i : i + len(body) // 5])
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            assert connection.recv(65536)
    assert server.becomes_idle()


def test_the_oldest_half_request_gives_way_to_a_new_connection(folder: Path, monkeypatch):
    monkeypatch.setattr(connections, "MOST", 8)
    with served.ServerThread(Source.of(str(folder))) as server, contextlib.ExitStack() as stack:
        parts = chat(server, max_tokens=LONG, stream=True)
        next(iter(parts))
        sent = (b"", b"POST", head(CHAT, "Content-Length: 9"))
        half = [stack.enter_context(connect(server, sent[i % 3])) for i in range(30)]
        assert raw(server, "/health", method="GET")[0] == 200
        assert all(map(is_closed, half[:23]))  # all but the last seven, one of them for the request above
        half[-1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            half[-1].recv(1)
        assert next(iter(parts)).choices  # a complete request is not closed
        parts.close()
        assert server.becomes_idle()


def test_a_server_that_stops_does_not_wait_for_half_a_request(folder: Path):
    with contextlib.ExitStack() as stack:
        with served.ServerThread(Source.of(str(folder))) as server:
            for sent in (b"", b"POST", head(CHAT, "Content-Length: 9") + b"{"):
                stack.enter_context(connect(server, sent))
            assert raw(server, "/health", method="GET")[0] == 200
            start = time.monotonic()
        assert time.monotonic() - start < 3


@pytest.mark.slow
def test_a_thousand_half_open_connections(folder: Path):
    """A request is answered within a second, few lines are logged, and the server ends within three seconds."""
    with served.process(folder) as process, contextlib.ExitStack() as stack:
        slowest = 0.0
        for i in range(1200):
            sent = (b"", b"POST /v1/compl", head(CHAT, "Content-Length: 9"))[i % 3]
            stack.enter_context(connect(process, sent))
            if i % 100 == 99:
                start = time.monotonic()
                api = client(process)
                assert (
                    api.completions.create(model=process.model, prompt="a", max_tokens=1).usage.completion_tokens == 1
                )
                slowest = max(slowest, time.monotonic() - start)
        assert slowest < 1
        start = time.monotonic()
        assert process.stop() == 0
        assert time.monotonic() - start < 3
    assert len(process.lines) < 100 and "Traceback" not in process.output
