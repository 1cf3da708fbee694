"""`python -m torch_moe_metal serve` with OpenAI's own client: on a server in a thread of the test, and on a process."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import openai
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.continuous_batching import cb_logits_processors as stock
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import RequestState
from transformers.utils.chat_parsing import parse_response

import checkpoints
import gguf_files
import malformed
import mlx_folders
import served
import torch_moe_metal
from served import HELLO, LONG, chat, client, collect, raw, text_of
from torch_moe_metal.commands.command_line import main
from torch_moe_metal.commands.common import cli
from torch_moe_metal.commands.common.cli import CannotRun
from torch_moe_metal.commands.common.loading import Source
from torch_moe_metal.commands.serve.harmony import HARMONY
from torch_moe_metal.commands.serve.sampling import QuickTopK, Seeded, draw, quick, sampling
from torch_moe_metal.commands.serve.stopping import StopFilter


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return served.checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module", params=[False, True], ids=["sequential", "batched"])
def server(request, folder: Path) -> Iterator[served.ServerThread]:
    with served.ServerThread(Source.of(str(folder)), request.param, context=40000) as server:
        yield server


@pytest.fixture(scope="module")
def batched(folder: Path) -> Iterator[served.ServerThread]:
    with served.ServerThread(Source.of(str(folder)), True, context=512) as server:
        yield server


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[served.ServerThread]:
    """One request after the other, with a small context."""
    with served.ServerThread(Source.of(str(folder)), context=512) as server:
        yield server


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    """The greedy answers of `generate` to a chat and to a text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch_moe_metal.patch(model)

    def answer(**inputs) -> str:
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    messages = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    return {"chat": answer(**messages), "text": answer(**tokenizer("once upon", return_tensors="pt"))}


# ------------------------------------------------------------------------------------------------ answers


def test_chat_gives_the_tokens_of_generate(server, expected):
    answer = chat(server)
    assert text_of(answer) == expected["chat"]
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 24)
    prompt = served.tokenizer().apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
    assert answer.usage.prompt_tokens == len(prompt)
    text, reason, usage = collect(chat(server, stream=True))
    assert (text, reason, usage.completion_tokens) == (expected["chat"], "length", 24)


def test_completions_and_responses_give_the_tokens_of_generate(server, expected):
    api = client(server)
    options = {"model": server.model, "prompt": "once upon", "max_tokens": 24, "temperature": 0}
    answer = api.completions.create(**options)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected["text"], "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 24)
    assert "".join(part.choices[0].text for part in api.completions.create(**options, stream=True)) == expected["text"]
    options = {"model": server.model, "input": "hello", "max_output_tokens": 24, "temperature": 0}
    answer = api.responses.create(**options)
    assert (answer.output_text, answer.usage.output_tokens) == (expected["chat"], 24)
    events = list(api.responses.create(**options, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected["chat"]
    assert events[-1].type == "response.completed"


@pytest.mark.parametrize("batched", [False, True], ids=["sequential", "batched"])
def test_a_server_on_mps(mps: str, folder: Path, expected, batched: bool, monkeypatch):
    """Stop strings and seeds too: on mps, `generate` gives tokens to its streamer one step late, and never waits for
    the GPU. Batched requests wait in each step."""
    waited, wait = [], torch.mps.synchronize
    monkeypatch.setattr(torch.mps, "synchronize", lambda: (waited.append(None), wait()))
    monkeypatch.setattr(cli, "TOKENS_PER_WAIT", 10)
    with served.ServerThread(Source.of(str(folder)), batched, context=512, device=mps) as server:
        assert text_of(chat(server)) == expected["chat"]
        assert batched or waited
        text, _, usage = collect(chat(server, stop=expected["chat"][9:12], stream=True))
        assert (text, usage.completion_tokens) == (expected["chat"][:9], 12)
        seeded = [text_of(chat(server, temperature=1.5, seed=7, max_tokens=8)) for _ in range(2)]
        assert seeded[0] == seeded[1]


def test_models_and_health(server):
    api = client(server)
    assert [model.id for model in api.models.list()] == [server.model]
    assert api.models.retrieve(server.model).id == server.model
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("another")
    parts = chat(server, max_tokens=LONG, stream=True)
    next(iter(parts))
    status, body = raw(server, "/health", method="GET")  # while an answer is computed
    assert (status, json.loads(body)) == (200, {"status": "ok"})
    parts.close()


def test_eight_clients_at_once(server, expected):
    def one(i: int) -> str:
        return collect(chat(server, stream=True))[0] if i % 2 else text_of(chat(server))

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(one, range(16))) == [expected["chat"]] * 16
    assert server.becomes_idle()


def test_greedy_requests_draw_no_random_numbers(batched, monkeypatch):
    drawn, exponential = [], torch.Tensor.exponential_

    def observed(*args, **kwargs) -> torch.Tensor:
        drawn.append(None)
        return exponential(*args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "exponential_", observed)
    chat(batched)
    assert not drawn
    chat(batched, temperature=1)
    assert drawn


def test_greedy_requests_are_independent_of_sampled_ones(server, expected):
    def one(i: int) -> str:
        options = {"temperature": 0} if i % 2 else {"temperature": 2.0, "top_p": 0.9 if i % 4 else 1.0}
        return text_of(chat(server, **options))

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(one, range(8)))
    assert answers[1::2] == [expected["chat"]] * 4
    assert len({*answers[::2], expected["chat"]}) == 5


def test_text_ends_before_a_stop_string(server, expected):
    """Also where the stop string begins in one token and ends in another."""
    stop = expected["chat"][9:12]
    before = expected["chat"][: expected["chat"].index(stop)]
    for stops in (stop, [stop, "not in it"], [stop[:2] + "~", stop]):
        answer = chat(server, stop=stops)
        assert (text_of(answer), answer.choices[0].finish_reason) == (before, "stop")
        assert answer.usage.completion_tokens == len(before) + len(stop)
        text, reason, usage = collect(chat(server, stop=stops, stream=True))
        assert (text, reason, usage.completion_tokens) == (before, "stop", len(before) + len(stop))
    options = {"model": server.model, "prompt": "once upon", "max_tokens": 24, "temperature": 0}
    stop = expected["text"][5:7]
    answer = client(server).completions.create(**options, stop=stop)
    assert answer.choices[0].text == expected["text"][: expected["text"].index(stop)]
    assert server.becomes_idle()


def test_stop_strings_do_not_apply_to_reasoning(tmp_path: Path):
    script = ["<think>", "no stop here", "</think>", "but here: stop", " and more"]
    with served.ServerThread(Source.of(str(served.scripted(tmp_path, script)))) as server:
        assert text_of(chat(server, stop="stop")) == "but here: "
        assert collect(chat(server, stop="stop", stream=True))[0] == "but here: "


def test_a_seed_repeats_an_answer(server):
    """Also while other requests draw numbers, with a seed or without one."""

    def one(seed: int | None) -> str:
        return text_of(chat(server, temperature=1.5, seed=seed))

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(one, [7, -8, None, 7, -8, None, 7, -8, None]))
    assert answers[::3] == [answers[0]] * 3 and answers[1::3] == [answers[1]] * 3
    assert len(set(answers)) == 5


def test_a_temperature_turns_sampling_on(small):
    """Also where the checkpoint has no generation_config.json."""
    assert small.models.model.generation_config.do_sample is None
    assert len({text_of(chat(small, temperature=2)) for _ in range(3)}) == 3


@pytest.mark.parametrize("batched", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["sequential", "batched"])
def test_an_answer_may_fill_the_context(folder: Path, batched: bool):
    check_full_context(folder, batched, context=280)


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True], ids=["sequential", "batched"])
def test_an_answer_may_be_longer_than_1024_tokens(folder: Path, batched: bool):
    """transformers' own server ends it there, or fails."""
    check_full_context(folder, batched, context=1200)


def check_full_context(folder: Path, batched: bool, context: int) -> None:
    """Three requests at once, which together need more than the cache of a batch."""
    source, limits = Source.of(str(folder)), [None, 5000, context - 100]
    with served.ServerThread(source, batched, context=context) as server, ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda limit: chat(server, timeout=600, max_tokens=limit), limits))
    assert {answer.choices[0].finish_reason for answer in answers} == {"length"}
    assert [answer.usage.total_tokens for answer in answers[:2]] == [context, context]
    assert answers[2].usage.completion_tokens == context - 100
    assert text_of(answers[0]) == text_of(answers[1])


def test_developer_messages_are_system_messages(small):
    def tokens(role: str) -> int:
        messages = [{"role": role, "content": "be brief"}, *HELLO]
        return chat(small, messages=messages, max_tokens=1).usage.prompt_tokens

    assert tokens("developer") == tokens("system") > chat(small).usage.prompt_tokens


def test_streams_end_with_openai_s_last_line(small):
    for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "a"})):
        _, answer = raw(small, path, json.dumps(body | {"max_tokens": 2, "stream": True}).encode())
        assert answer.endswith(b"data: [DONE]\n\n")


def test_the_client_of_transformers_chat(small):
    """It loads its model first, appends a revision to the name, and sends a whole generation config."""
    assert b'"status": "ready"' in raw(small, "/load_model", json.dumps({"model": f"{small.model}@main"}).encode())[1]
    config = {"generation_config": json.dumps({"max_new_tokens": 3, "do_sample": False})}
    model = f"{small.model}@main"
    answer = client(small).chat.completions.create(model=model, messages=HELLO, extra_body=config)
    assert answer.usage.completion_tokens == 3


# ------------------------------------------------------------------------------------------------ tool calls


WEATHER = {"name": "weather", "arguments": {"city": "Paris"}}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


@pytest.mark.parametrize("batched", [False, True], ids=["sequential", "batched"])
def test_tool_calls_and_reasoning_of_qwen3(tmp_path: Path, batched: bool):
    script = ["<think>", "which city?", "</think>", "one moment", "<tool_call>", json.dumps(WEATHER), "</tool_call>"]
    with served.ServerThread(Source.of(str(served.scripted(tmp_path, script))), batched, context=2048) as server:
        check_tool_calls(server, "which city?", "one moment")


def check_tool_calls(server, reasoning: str, content: str) -> None:
    answer = chat(server, tools=TOOLS).choices[0]
    call = answer.message.tool_calls[0].function
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    assert (answer.message.content or "", answer.finish_reason) == (content, "tool_calls")
    assert answer.message.reasoning_content == reasoning
    parts = [part.choices[0] for part in chat(server, tools=TOOLS, stream=True)]
    call = next(part.delta.tool_calls[0].function for part in parts if part.delta.tool_calls)
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    assert "".join(part.delta.content or "" for part in parts) == content
    assert "".join(getattr(part.delta, "reasoning_content", None) or "" for part in parts) == reasoning
    history = [*HELLO, answer.message.to_dict(), {"role": "tool", "tool_call_id": "1", "content": "rain"}]
    assert chat(server, messages=history, tools=TOOLS).choices[0].message.tool_calls


GPT_OSS = "{% for message in messages %}{{ message.content }}{% endfor %}{{ '<|start|>assistant\n' }}"


def test_channels_of_gpt_oss(tmp_path: Path):
    """Also without a response template in the tokenizer, as in GGUF files and mlx-lm's folders."""
    call = [" to=functions.weather", "<|channel|>", "commentary <|constrain|>json", "<|message|>", '{"city": "Paris"}']
    script = ["<|channel|>analysis<|message|>", "which city?", "<|end|><|start|>assistant", *call, "<|call|>"]
    with served.ServerThread(Source.of(str(served.scripted(tmp_path, script, "gpt_oss", GPT_OSS)))) as server:
        check_tool_calls(server, "which city?", "")


ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
COMMENTARY = "<|channel|>commentary<|message|>a call<|end|><|start|>assistant<|channel|>commentary to=functions.f "


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{ANALYSIS}<|channel|>final<|message|>yes<|return|>", "hm", "yes"),
        ("<|channel|>final<|message|>{yes}", None, "{yes}"),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", None, "{}"),
        (f'{ANALYSIS}{COMMENTARY}<|constrain|>json<|message|>{{"a": 1}}<|call|>', "hm\na call", None),
    ],
)
def test_template_of_gpt_oss(text: str, reasoning: str | None, content: str | None):
    message = parse_response(text, HARMONY, prefix="<|start|>user<|message|>hello<|end|><|start|>assistant")
    assert (message.get("reasoning_content"), message.get("content")) == (reasoning, content)
    if "functions" in text:
        assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]


# ------------------------------------------------------------------------------------------------ errors


def test_errors_have_openai_s_form(server):
    with pytest.raises(openai.NotFoundError) as error:
        chat(server, model="another")
    error = error.value
    assert (error.code, error.param, error.type) == ("model_not_found", "model", "invalid_request_error")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="fewer than 40000 tokens, the context") as error:
            chat(server, messages=[{"role": "user", "content": "x" * 40000}], stream=stream)
        assert error.value.code == "context_length_exceeded"
    status, answer = raw(server, "/v1/chat/completions", b'{"messages": [')
    assert status == 400 and "JSON" in json.loads(answer)["error"]["message"]


def check_malformed(server, seed: int, count: int) -> None:
    for case in malformed.cases(seed, count):
        method, path, body, headers = case
        status, answer = raw(server, path, body, headers, method)
        about = seed, method, path, body[:300], status, answer[:300]
        assert 400 <= status < 500, about
        error = json.loads(answer)["error"]
        assert error["message"] and error["type"] == "invalid_request_error", about
    assert chat(server, max_tokens=1).usage.completion_tokens == 1
    assert server.becomes_idle()


def test_malformed_requests_get_a_4xx_status(small):
    check_malformed(small, seed=0, count=200)


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True], ids=["sequential", "batched"])
def test_thousands_of_malformed_requests_get_a_4xx_status(folder: Path, batched: bool):
    with served.ServerThread(Source.of(str(folder)), batched, context=512) as server:
        for seed in range(1, 11):
            check_malformed(server, seed, 300)


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_of_the_model_is_a_server_error(small, monkeypatch, stream: bool):
    """The next request is answered."""

    def broken(**_inputs):
        raise RuntimeError('out of "memory"')

    with monkeypatch.context() as patched:
        patched.setattr(small.models.model, "generate", broken)
        with pytest.raises(openai.APIError, match=r'out of \\?"memory') as error:
            list(chat(small, stream=stream))
    assert getattr(error.value, "status_code", 500) == 500
    assert chat(small, max_tokens=1).usage.completion_tokens == 1


def test_api_key(folder: Path):
    with served.ServerThread(Source.of(str(folder)), api_key="secret", cors=True) as server:
        assert client(server, api_key="secret").models.list().data
        for wrong in ("other", "secret2", "secre"):
            with pytest.raises(openai.AuthenticationError) as error:
                client(server, api_key=wrong).models.list()
            assert error.value.code == "invalid_api_key"
        assert raw(server, "/v1/models", method="GET")[0] == 401
        assert raw(server, "/health", method="GET")[0] == 200
        preflight = {"origin": "http://page", "access-control-request-method": "POST"}
        assert raw(server, "/v1/chat/completions", headers=preflight, method="OPTIONS")[0] == 200
        assert raw(server, "/v1/models", method="OPTIONS")[0] == 401


# ------------------------------------------------------------------------------------------------ abandoned requests

#: Reads three events of a stream, prints a line, and waits to be killed.
STREAMING = """
import http.client, json, sys
connection = http.client.HTTPConnection(sys.argv[1].removeprefix("http://"))
body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": int(sys.argv[2]), "stream": True}
connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
answer = connection.getresponse()
for _ in range(6):
    answer.readline()
print("streaming", flush=True)
sys.stdin.read()
"""


def kill_in_a_stream(base: str) -> None:
    command = [sys.executable, "-c", STREAMING, base, str(LONG)]
    killed = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert killed.stdout.readline() == "streaming\n"
    killed.kill()
    killed.communicate()


def test_a_killed_client_frees_its_slot(server, expected):
    kill_in_a_stream(server.base)
    assert server.becomes_idle()
    assert text_of(chat(server)) == expected["chat"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_slot(server, expected, stream: bool):
    """Also one that waits for a whole answer, and one that waits for its turn."""

    def leave(_i: int) -> None:
        with pytest.raises((openai.APITimeoutError, TimeoutError)):
            answer = chat(server, timeout=1, max_tokens=LONG, stream=stream)
            started = time.monotonic()
            for _ in answer:
                if time.monotonic() > started + 1:
                    answer.close()
                    raise TimeoutError

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(leave, range(3)))
    assert server.becomes_idle()
    assert text_of(chat(server)) == expected["chat"]


@pytest.mark.parametrize("batched", [False, True], ids=["sequential", "batched"])
def test_a_server_that_stops_ends_its_requests(folder: Path, batched: bool):
    with served.ServerThread(Source.of(str(folder)), batched, context=2048) as server:
        parts = chat(server, max_tokens=LONG, stream=True)
        next(iter(parts))
        server.generation.fail_all()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(parts)
        assert server.becomes_idle()


# ------------------------------------------------------------------------------------------------ checkpoints


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


def dense(folder: Path) -> Source:
    return Source.of(str(served.checkpoint(folder)))


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True], ids=["sequential", "batched"])
@pytest.mark.parametrize(
    ("write", "options", "format"),
    [(gpt_oss, {}, "mxfp4"), (mlx, {}, "affine"), (gguf, {}, "q4_k"), (dense, {"bits": 8}, "affine")],
)
def test_checkpoints(tmp_path: Path, write, options: dict, format: str, batched: bool):
    source = write(tmp_path)
    with served.ServerThread(source, context=100, **options) as server:  # the model itself, since a batch locks it
        assert format in str(server.models) and "GB of weights" in str(server.models)
        tokenizer, inputs = server.models.processor, server.models.processor("abc", return_tensors="pt")
        output = server.models.model.generate(**inputs, max_new_tokens=8, do_sample=False)
        expected = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    with served.ServerThread(source, batched, context=100, **options) as server:
        options = {"model": server.model, "prompt": "abc", "max_tokens": 8, "temperature": 0}
        assert client(server).completions.create(**options).choices[0].text == expected


# ------------------------------------------------------------------------------------------------ the command


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True], ids=["sequential", "batched"])
def test_ctrl_c_ends_requests_and_the_server(folder: Path, batched: bool):
    arguments = ["--continuous-batching", "--context", "2048"] if batched else []
    with served.process(folder, *arguments) as process:
        parts = chat(process, max_tokens=LONG, stream=True)
        next(iter(parts))
        process.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(parts)
        assert process.stop() == 0  # which sends it again
    for line in (f"Loading {folder}", "Qwen3MoeSparseMoeBlock", "GB of weights", "first tokens", "Serving"):
        assert line in process.output
    assert "Traceback" not in process.output


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--continuous-batching"]], ids=["sequential", "batched"])
def test_a_process_is_idle_after_its_client_is_killed(folder: Path, expected, arguments: list[str]):
    with served.process(folder, "--context", 40000, "--log-level", "warning", *arguments) as process:
        observed = psutil.Process(process.process.pid)
        for _ in range(3):
            kill_in_a_stream(process.base)
        assert any(observed.cpu_percent(0.5) < 20 for _ in range(20))  # an answer that goes on would take minutes
        assert text_of(chat(process)) == expected["chat"]
        assert process.stop(signal.SIGTERM) == 0


def test_ctrl_c_while_the_model_is_loading(folder: Path, monkeypatch):
    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("torch_moe_metal.commands.serve.model_manager.load_model", interrupted)
    assert main(["serve", str(folder), "--device", "cpu", "--port", "0"]) == 130


def test_wrong_arguments_give_one_line(folder: Path, tmp_path: Path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.gguf").write_bytes(b"")
    busy = socket.create_server(("127.0.0.1", 0))
    monkeypatch.chdir(tmp_path)
    for arguments, expected in (
        (["missing"], "no such file, folder or name on the hub: missing"),
        (["./missing/file.gguf"], "no such file: ./missing/file.gguf"),
        (["empty"], "no checkpoint: empty: it has no config.json"),
        (["files"], "no checkpoint: files: choose a file with --gguf: a.gguf"),
        (["files", "--gguf", "b.gguf"], "--gguf: no such file: files/b.gguf"),
        (["files/a.gguf", "--gguf", "b.gguf"], "--gguf: expected MODEL to be a folder or a name on the hub"),
        (["files/a.gguf"], "cannot load files/a.gguf: "),
        ([str(folder), "--format", "mxfp4", "--bits", "4"], "--bits: only the format affine has a choice of bits"),
        ([str(folder), "--context", "70000"], "--context: expected at most 65536"),
        ([str(folder), "--port", str(busy.getsockname()[1])], "cannot listen on 127.0.0.1, port "),
        ([str(folder), "--port", "70000"], "cannot listen on 127.0.0.1, port 70000"),
        ([str(folder), "--port", "-1"], "cannot listen on 127.0.0.1, port -1"),
        ([str(folder), "--host", "no such host"], "cannot listen on no such host"),
    ):
        assert main(["serve", *arguments, "--device", "cpu"]) == 2
        *_, last = capsys.readouterr().err.splitlines()
        assert last.startswith("serve: ") and expected in last, last


def test_answers_of_a_model_without_a_paged_cache_take_turns(tmp_path: Path, capsys):
    source = Source.of(str(served.checkpoint(tmp_path, "qwen3_next")))
    with served.ServerThread(source, batched=True, context=2048) as server:
        (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("--continuous-batching")]
        assert line == "--continuous-batching: Invalid layer type: linear_attention; answers take turns instead"
        assert chat(server).usage.completion_tokens == 24


def test_missing_packages_give_one_line(folder: Path, capsys, monkeypatch):
    monkeypatch.setattr("torch_moe_metal.commands.serve.NEEDED", ("fastapi", "no_such_package"))
    assert main(["serve", str(folder), "--device", "cpu"]) == 2
    assert "serve: not installed: no_such_package: pip install 'torch_moe_metal[serve]'" in capsys.readouterr().err


@pytest.mark.slow
def test_help_needs_neither_fastapi_nor_transformers():
    missing = "import sys; sys.modules |= dict.fromkeys(('fastapi', 'uvicorn', 'transformers'))"
    code = f"{missing}; import torch_moe_metal.__main__ as command; command.main(['serve', '--help'])"
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
def test_names_on_the_hub(name: str, gguf: str | None, found: tuple):
    source = Source.of(name, gguf)
    assert (source.path, source.revision, source.gguf_file) == found
    assert source.name == (name if gguf is None else f"{name}:{gguf}")


@pytest.mark.parametrize("name", ["a", "a/b/c", "a/b:c", "../x", "a b/c"])
def test_wrong_names(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no file has such a name
    with pytest.raises(CannotRun, match="no such file, folder or name"):
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
def test_stop_filter(texts: list[str], stops: list[str], passed: str):
    stop_filter, out = StopFilter(stops), []
    for each in [*texts, None]:
        out += stop_filter.feed(each)
        if stop_filter.found:
            break
    assert out[-1] is None and "".join(out[:-1]) == passed
    assert stop_filter.found == any(stop in "".join(texts) for stop in stops)


def test_sampling_arguments():
    assert sampling(GenerationConfig(do_sample=False), 99) == {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
    drawn = GenerationConfig(do_sample=True, temperature=0.7, top_k=20, top_p=0.8)
    assert sampling(drawn, 99) == {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    assert sampling(GenerationConfig(do_sample=True, top_k=0), 99)["top_k"] == 99
    assert sampling(drawn, 99, 7)["seed"] == 7 and "seed" not in sampling(GenerationConfig(do_sample=False), 99, 7)


@pytest.mark.parametrize("top_k", [[1, 5, 3], [99, 99, 99], [1, 99, 4]])
@pytest.mark.parametrize("top_p", [[1.0, 1.0, 1.0], [0.5, 1.0, 0.9]])
def test_quick_processors_give_the_scores_of_transformers(top_k: list[int], top_p: list[float]):
    scores = torch.randn(3, 99, generator=torch.Generator().manual_seed(0))
    requests = [
        SimpleNamespace(state=SimpleNamespace(logit_processor_kwargs={"top_k": k, "top_p": p}))
        for k, p in zip(top_k, top_p, strict=True)
    ]
    for processor in (
        stock.ContinuousBatchingTopKLogitsWarper(TopKLogitsWarper(1)),
        stock.ContinuousBatchingTopPLogitsWarper(TopPLogitsWarper(0.5)),
    ):
        ours = quick(processor)
        arguments = ours.prepare_tensor_args(requests)
        assert type(ours) is not type(processor)
        assert torch.equal(ours(scores, arguments), processor(scores, arguments))


def drawn(scores: torch.Tensor, *states: RequestState) -> list[list[int]]:
    """The tokens of each row that can still be drawn."""
    processor = Seeded()
    arguments = processor.prepare_tensor_args([SimpleNamespace(state=state) for state in states])
    return [row.isfinite().nonzero()[:, 0].tolist() for row in processor(scores.clone(), arguments)]


def test_seeds_draw_by_probability():
    """Each place of an answer has other numbers. Requests without a seed, and masked tokens, are left alone."""
    scores = torch.tensor([[0.1, 0.2, 0.7, 0.0]]).log().repeat(1001, 1)
    states = [
        RequestState("", [0] * 5, generated_tokens=[0] * i, logit_processor_kwargs={"seed": 3}) for i in range(1000)
    ]
    *found, free = drawn(scores, *states, RequestState("", [0]))
    assert free == [0, 1, 2] and {len(row) for row in found} == {1}
    shares = [found.count([token]) / 1000 for token in range(4)]
    assert shares[3] == 0 and shares[:3] == pytest.approx([0.1, 0.2, 0.7], abs=0.05)


def test_seeds_draw_the_same_token_when_a_request_is_computed_again():
    scores = torch.zeros(3, 10**6)
    first = RequestState("", [1, 2], generated_tokens=[3, 4], logit_processor_kwargs={"seed": -1})
    other = RequestState("", [1, 2], generated_tokens=[3, 4], logit_processor_kwargs={"seed": 1})
    before, again, another = drawn(scores, first, first.create_equivalent_initial_request(), other)
    assert before == again != another


def faulty_exponential(self: torch.Tensor, *_args, **_options) -> torch.Tensor:
    """As on mps in torch 2.13 (pytorch#192577), but with many zeros."""
    self.fill_(1.0)[..., ::2] = -0.0
    return self


def faulty_multinomial(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
    return (probabilities / faulty_exponential(torch.empty_like(probabilities))).argmax(-1, keepdim=True)


def sampled(scores: torch.Tensor) -> list[int]:
    """The tokens that a runner of continuous batching draws."""
    settings = SimpleNamespace(do_sample=True, return_logprobs=False)
    runner, top_k = SimpleNamespace(), QuickTopK(stock.ContinuousBatchingTopKLogitsWarper(TopKLogitsWarper(1)))
    runner._sample = lambda scores, output: ModelRunner._sample(settings, scores, output)
    top_k.sample_for(runner)
    output = torch.zeros(1, len(scores), dtype=torch.int32)
    runner._sample(scores[None], output)
    return output[0].tolist()


def test_tokens_of_probability_zero_are_not_drawn(monkeypatch):
    """Neither are very unlikely ones. The last rows have a single token left, as `Seeded` leaves them."""
    monkeypatch.setattr(torch, "multinomial", faulty_multinomial)
    monkeypatch.setattr(torch.Tensor, "exponential_", faulty_exponential)
    likely = torch.tensor([2, 3, 4, 5])
    scores = torch.full((4, 9), -torch.inf)
    scores[0], scores[1, [0, 6]] = -40, -30
    scores[range(4), likely] = 1.0
    assert sampled(scores) == likely.tolist()
    rows = [RequestState("", [0], logit_processor_kwargs={"seed": i}) for i in range(4)]
    assert drawn(scores, *rows) == likely[:, None].tolist()


@pytest.mark.parametrize("masked", [0, 90])
def test_draws_are_those_of_multinomial(masked: int):
    probabilities = torch.randn(200, 99, generator=torch.Generator().manual_seed(0))
    probabilities[:, :masked] = -torch.inf
    probabilities = probabilities.softmax(-1)
    torch.manual_seed(1)
    want = torch.multinomial(probabilities, 1)[:, 0]
    torch.manual_seed(1)
    assert torch.equal(draw(probabilities), want)
