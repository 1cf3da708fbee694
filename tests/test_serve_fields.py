"""Fields of requests: each has an effect, or asks for nothing, or gets status 400 with its name, in both modes."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, MinPLogitsWarper
from transformers.generation.continuous_batching.requests import RequestState

import fuzz_serve
import served
from fuzz_serve import CHAT, MESSAGES, RESPONSES, RIGHT, TEXT, TOOL
from served import HELLO, LONG, chat, client, collect, raw, text_of
from torch_moe_metal.commands.common.loading import Source
from torch_moe_metal.commands.serve import fields, prompts
from torch_moe_metal.commands.serve.sampling import MinP, Penalties

MODES = pytest.mark.parametrize("batched", [False, True], ids=["sequential", "batched"])
A, B = map(served.LETTERS.index, "ab")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return served.checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module", params=[False, True], ids=["sequential", "batched"])
def server(request, folder: Path) -> Iterator[served.ServerThread]:
    with served.ServerThread(Source.of(str(folder)), request.param, context=512) as server:
        yield server


@pytest.fixture(scope="module")
def plain(server) -> str:
    return text_of(chat(server))


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[served.ServerThread]:
    with served.ServerThread(Source.of(str(folder)), context=2048) as server:
        yield server


def send(server, path: str = CHAT, **body) -> tuple[int, dict]:
    status, answer = raw(server, path, json.dumps(RIGHT[path] | {"temperature": 0} | body).encode())
    return status, json.loads(answer)


def refused(server, path: str, **body) -> dict:
    status, answer = send(server, path, **body)
    assert status == 400, (body, answer)
    return answer["error"]


# ------------------------------------------------------------------------------------------------ sampling


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 9e-6])
def test_very_small_temperatures_are_greedy(server, plain, temperature: float):
    assert text_of(chat(server, temperature=temperature)) == plain
    config = {"generation_config": json.dumps({"do_sample": True, "temperature": temperature})}
    for _ in range(2):  # the server still answers
        assert text_of(chat(server, temperature=openai.omit, extra_body=config)) == plain


def greedy(folder: Path, change: Callable[[torch.Tensor, list[int], list[int]], None], length: int = 24) -> str:
    """The answer whose tokens have the largest scores after a change by the prompt and the answer so far."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), served.tokenizer()
    prompt = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
    answer: list[int] = []
    with torch.no_grad():
        for _ in range(length):
            scores = model(torch.tensor([prompt + answer])).logits[0, -1].float()
            change(scores, prompt, answer)
            answer.append(int(scores.argmax()))
    return tokenizer.decode(answer)


def test_penalties_are_those_of_openai_s_definition(server, folder: Path, plain):
    def presence(scores, _prompt, answer) -> None:
        for token in set(answer):
            scores[token] -= 1.5

    def frequency(scores, _prompt, answer) -> None:
        for token in answer:
            scores[token] -= 1.0

    def repetition(scores, prompt, answer) -> None:
        for token in {*prompt, *answer}:
            scores[token] *= 1.5 if scores[token] < 0 else 1 / 1.5

    for change, field in (
        (presence, {"presence_penalty": 1.5}),
        (frequency, {"frequency_penalty": 1.0}),
        (repetition, {"repetition_penalty": 1.5}),
    ):
        expected = greedy(folder, change)
        assert expected != plain
        assert text_of(chat(server, extra_body=field)) == expected, field


def test_penalties_change_the_scores_of_one_row():
    scores = torch.tensor([1.0, -2.0, 3.0, 4.0])
    Penalties(bias={3: -1.5}, repetition=2.0, presence=0.25, frequency=0.5).change(scores, [0, 1, 2, 2, 1], start=2)
    assert scores.tolist() == [0.5, -4.0 - 0.25 - 0.5, 1.5 - 0.25 - 1.0, 2.5]
    assert not Penalties() and Penalties(presence=0.1)


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
def test_a_bias_of_integers_decides_the_tokens(server, path: str):
    """As OpenAI's clients send it. An empty one is the same as none."""

    def answer(**body) -> str:
        status, found = send(server, path, **body)
        assert status == 200, found
        return content(path, found)

    assert answer(logit_bias={str(A): 100}) == "aa"
    assert answer(logit_bias={str(A): 100, str(B): -100.0, "0": 0}) == "aa"
    assert answer(logit_bias={}) == answer() != "aa"


def content(path: str, answer: dict) -> str:
    if path == RESPONSES:
        return answer["output"][0]["content"][0]["text"]
    return answer["choices"][0]["message"]["content"] if path == CHAT else answer["choices"][0]["text"]


def test_draws_from_one_token_are_greedy(server, plain):
    for field in ({"top_k": 1}, {"min_p": 1}, {"top_k": 0, "min_p": 1.0}):
        assert text_of(chat(server, temperature=2, extra_body=field)) == plain
    assert text_of(chat(server, temperature=openai.omit, extra_body={"top_k": 1})) == plain
    assert text_of(chat(server, temperature=2, seed=1, extra_body={"top_k": -1})) != plain


def test_a_least_share_gives_the_scores_of_transformers():
    scores, shares = torch.randn(4, 99, generator=torch.Generator().manual_seed(0)), [0.0, 0.05, 0.5, 1.0]
    requests = [SimpleNamespace(state=RequestState("", [0], logit_processor_kwargs={"min_p": p})) for p in shares]
    processor = MinP()
    found = processor(scores, processor.prepare_tensor_args(requests))
    for row, share in enumerate(shares):
        assert torch.equal(found[row], MinPLogitsWarper(share)(None, scores[row : row + 1])[0])


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
def test_stop_strings_end_every_kind_of_answer(server, path: str):
    length = {"max_output_tokens" if path == RESPONSES else "max_tokens": 24}
    text = content(path, send(server, path, **length)[1])
    stop = text[9:12]
    assert content(path, send(server, path, **length, stop=[stop])[1]) == text[: text.index(stop)]


@MODES
def test_tokens_that_end_an_answer(tmp_path: Path, batched: bool):
    pieces = ["one", " two", " three"]
    with served.ServerThread(Source.of(str(served.scripted(tmp_path, pieces))), batched, context=512) as server:
        assert text_of(chat(server)) == "one two three"
        token = server.models.processor.convert_tokens_to_ids(" two")
        answer = chat(server, extra_body={"stop_token_ids": [token]})
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (2, "stop")
        for ends, count in (([], 24), ([token], 2)):
            answer = chat(server, extra_body={"ignore_eos": True, "stop_token_ids": ends})
            assert answer.usage.completion_tokens == count
        # as `transformers chat` sends it, without the model's own last tokens
        config = json.dumps({"do_sample": False, "max_new_tokens": 200, "transformers_version": "5.23.0"})
        answer = chat(server, max_tokens=openai.omit, temperature=openai.omit, extra_body={"generation_config": config})
        assert (text_of(answer), answer.choices[0].finish_reason) == ("one two three", "stop")


# ------------------------------------------------------------------------------------------------ accepted, refused

NEUTRAL = {
    "n": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "tool_choice": "none",
    "tools": [],
    "parallel_tool_calls": True,
    "store": True,
    "user": "someone",
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "stop": [],
    "stream_options": {"include_usage": True},
}


def test_values_that_ask_for_nothing_are_accepted(server, plain):
    assert text_of(chat(server, **NEUTRAL)) == plain
    assert text_of(chat(server, **dict.fromkeys(NEUTRAL))) == plain
    for choice in ("auto", "none"):
        assert text_of(chat(server, tool_choice=choice)) == plain
    for effort in fields.EFFORTS:
        assert text_of(chat(server, reasoning_effort=effort)) == plain
        assert send(server, RESPONSES, reasoning={"effort": effort, "summary": None}, text={}, store=False)[0] == 200
    assert send(server, TEXT, suffix="", best_of=1, echo=False, logprobs=None)[0] == 200


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (CHAT, "tool_choice", "required"),
        (CHAT, "tool_choice", {"type": "function", "function": {"name": "missing"}}),
        (CHAT, "top_logprobs", 3),
        (CHAT, "logprobs", 5),
        (CHAT, "n", 17),
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        (CHAT, "reasoning_effort", "banana"),
        (CHAT, "verbosity", "low"),
        (CHAT, "functions", [{"name": "f"}]),
        (CHAT, "stop", ["a"] * 65),
        (CHAT, "stop", "x" * 257),
        (CHAT, "logit_bias", {str(served.VOCABULARY): 1}),
        (CHAT, "stop_token_ids", [served.VOCABULARY]),
        (CHAT, "generation_config", '{"output_scores": true}'),
        (CHAT, "generation_config", '{"temperature": NaN}'),
        (TEXT, "suffix", "the end"),
        (RESPONSES, "previous_response_id", "resp_1"),
        (RESPONSES, "truncation", "auto"),
        (RESPONSES, "include", ["reasoning.encrypted_content"]),
        (RESPONSES, "tool_choice", {"type": "web_search"}),
        (RESPONSES, "text", {"format": {"type": "xml"}}),
        (RESPONSES, "reasoning", {"effort": "banana"}),
    ],
)
def test_values_without_effect_are_refused(small, path: str, name: str, value: object):
    error = refused(small, path, **{name: value})
    assert error["param"] == name and name in error["message"]


def test_settings_of_generate_alone_are_refused_by_continuous_batching(server):
    config = json.dumps({"no_repeat_ngram_size": 2})
    if server.generation._continuous_batching:
        assert refused(server, CHAT, generation_config=config)["param"] == "generation_config"
    else:
        assert send(server, CHAT, generation_config=config)[0] == 200


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES])
def test_the_tables_have_every_field_of_the_clients(path: str):
    known = {CHAT: fuzz_serve.ChatFields, TEXT: fuzz_serve.TextFields, RESPONSES: fuzz_serve.ResponseFields}
    known |= {MESSAGES: fuzz_serve.MessageFields}
    assert known[path].__mutable_keys__ <= fields.TABLES[path].keys()


def test_the_documentation_has_the_table():
    assert fields.table() in (Path(__file__).parents[1] / "docs" / "serving.md").read_text()


def test_unknown_fields_are_ignored_with_one_line_each(small, caplog):
    with caplog.at_level(logging.WARNING, "uvicorn.error"):
        for _ in range(2):
            assert send(small, CHAT, think=True, **{"x" * 3000: 1, "\ud800": 1})[0] == 200
    lines = [record.getMessage() for record in caplog.records]
    assert sorted("think" in line for line in lines) == [False, False, True] and max(map(len, lines)) < 300


def test_strict_servers_refuse_unknown_fields(folder: Path):
    with served.ServerThread(Source.of(str(folder)), strict=True, context=512) as server:
        assert refused(server, CHAT, think=True)["param"] == "think"
        assert send(server, CHAT, top_k=5, seed=1)[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/load_model", {"model": 5}),
        ("/load_model", {"model": "x" * 5000}),
        (CHAT, {"model": "x" * 5000}),
        (CHAT, {"messages": [{"role": "x" * 5000, "content": ""}]}),
        (CHAT, {"stop": ["x" * 5000]}),
        (CHAT, {"tools": [{"y" * 5000: 1}]}),
        (CHAT, {"generation_config": json.dumps({"y" * 5000: "x" * 5000})}),
        (CHAT, {"chat_template_kwargs": {"messages": "x" * 5000}}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "x" * 5000}]}]}),
    ],
)
def test_errors_repeat_little_of_a_request(small, path: str, body: dict):
    status, answer = raw(small, path, json.dumps(RIGHT.get(path, {}) | body).encode())
    assert status in (400, 404) and json.loads(answer)["error"]["param"]
    assert max(answer.count(b"x"), answer.count(b"y")) <= 200 and len(answer) < 700


# ------------------------------------------------------------------------------------------------ chat templates

#: Loops for hours, if a request says so.
LOOP = "{% if loop %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"


def test_variables_of_a_template(tmp_path: Path):
    template = "{{ style }}{{ reasoning_effort }}{{ enable_thinking }}" + served.TEMPLATE
    with served.ServerThread(Source.of(str(served.scripted(tmp_path, ["a"], template=template)))) as server:

        def length(**body) -> int:
            return send(server, CHAT, **body)[1]["usage"]["prompt_tokens"]

        plain = length()
        assert length(chat_template_kwargs={"style": "terse", "missing": "variable"}) == plain + 5
        assert length(reasoning_effort="high") == plain + 4
        assert length(reasoning_effort="none") == plain + len("none") + len("False")
        assert length(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}) == plain + 8
        assert length(tools=[TOOL]) > plain == length(tools=[TOOL], tool_choice="none")


@pytest.mark.parametrize("name", ["padding", "max_length", "chat_template", "tokenizer_kwargs", "messages", "tools"])
def test_parameters_of_apply_chat_template_are_refused(small, name: str):
    error = refused(small, CHAT, chat_template_kwargs={name: 5})
    assert error["param"] == "chat_template_kwargs" and repr(name) in error["message"]


def prompt_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prompt"]


@MODES
def test_a_template_that_loops_is_interrupted(tmp_path: Path, monkeypatch, batched: bool):
    """The server answers others in the meantime. The loop ends with its time, and when its client leaves."""
    monkeypatch.setattr(prompts, "SECONDS", 1)
    source = Source.of(str(served.scripted(tmp_path, ["a"], template=LOOP + served.TEMPLATE)))
    with served.ServerThread(source, batched, context=512) as server, ThreadPoolExecutor(1) as threads:
        looping = threads.submit(refused, server, CHAT, chat_template_kwargs={"loop": True})
        while not prompt_threads():
            time.sleep(0.001)
        assert text_of(chat(server)) == "a" and not looping.done()
        assert "the prompt took more than 1 seconds" in looping.result()["message"]
        monkeypatch.setattr(prompts, "SECONDS", 60)
        with pytest.raises(openai.APITimeoutError):
            chat(server, timeout=0.2, extra_body={"chat_template_kwargs": {"loop": True}})
        for thread in prompt_threads():
            thread.join(10)
        assert not prompt_threads() and text_of(chat(server)) == "a"


def test_empty_tool_calls_leave_the_content(small):
    """OpenAI's own messages have such fields when they are sent back."""

    def length(**fields) -> int:
        messages = [*HELLO, {"role": "assistant", "content": "an answer"} | fields, *HELLO]
        return send(small, CHAT, messages=messages)[1]["usage"]["prompt_tokens"]

    assert length() == length(tool_calls=[]) == length(tool_calls=None, function_call=None, refusal=None)


# ------------------------------------------------------------------------------------------------ tool calls

CALL = ["<tool_call>", '{"name": "f", "arguments": {"a": 1}}', "</tool_call>"]
AGAIN = ["\n<tool_call>", '{"name": "f", "arguments": {"a": 2}}', "\n</tool_call>"]


@MODES
def test_one_tool_call_if_calls_are_not_parallel(tmp_path: Path, batched: bool):
    source = Source.of(str(served.scripted(tmp_path, [*CALL, *AGAIN])))
    with served.ServerThread(source, batched, context=512) as server:
        for parallel, count in ((True, 2), (False, 1)):
            options = {"tools": [TOOL], "parallel_tool_calls": parallel}
            message = chat(server, **options).choices[0].message
            assert [json.loads(call.function.arguments)["a"] for call in message.tool_calls] == [1, 2][:count]
            parts = [part.choices[0].delta for part in chat(server, stream=True, **options)]
            assert sum(len(part.tool_calls or []) for part in parts) == count


@MODES
@pytest.mark.parametrize("call", ["{broken}", "[1]", "5", '{"name": "f"}', '{"name": 5, "arguments": {}}'])
def test_a_wrong_tool_call_of_the_model_is_text(tmp_path: Path, batched: bool, call: str):
    source = Source.of(str(served.scripted(tmp_path, ["so: ", "<tool_call>", call, "</tool_call>", " and on"])))
    with served.ServerThread(source, batched, context=512) as server:
        assert call in text_of(chat(server, tools=[TOOL], max_tokens=100))
        text, reason, _ = collect(chat(server, tools=[TOOL], max_tokens=100, stream=True))
        assert call in text and reason == "stop"
        answer = chat(server, tools=[TOOL], max_tokens=3).choices[0]  # it ends in the call
        assert call in answer.message.content and answer.finish_reason == "length"


# ------------------------------------------------------------------------------------------------ errors in a step


@pytest.fixture
def batched(folder: Path) -> Iterator[served.ServerThread]:
    with served.ServerThread(Source.of(str(folder)), True, context=2048) as server:
        yield server


def once(function: Callable) -> Callable:
    """The function, which raises an error at its first call."""
    planted = [RuntimeError("planted")]

    def wrapped(*args, **kwargs):
        if planted:
            raise planted.pop()
        return function(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize(
    "where",
    [
        "forward",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("sampling", "preparation", "scheduling", "update")),
    ],
)
def test_an_error_in_a_step_fails_its_requests_and_the_next_step_runs(batched, monkeypatch, where: str):
    expected = text_of(chat(batched))
    batch = batched.generation.get_manager("", use_cb=True)._cb.batch_processor
    owner, name = {
        "forward": (batched.models.model, "forward"),
        "sampling": (batch.model_runner, "_sample"),
        "preparation": (batch.logit_processor, "prepare_tensor_args"),
        "scheduling": (batch.scheduler, "schedule_batch"),
        "update": (batch, "update_batch"),
    }[where]
    running = [chat(batched, max_tokens=LONG, stream=True) for _ in range(2)]
    for parts in running:
        assert any(part.choices[0].delta.content for part in parts)  # the request runs
    monkeypatch.setattr(owner, name, once(getattr(owner, name)))
    for parts in running:
        with pytest.raises(openai.APIError, match="planted"):
            list(parts)
    assert text_of(chat(batched)) == expected
    assert raw(batched, "/health", method="GET")[0] == 200
    assert batched.becomes_idle() and not batch.scheduler.waiting_requests_order
    allocator = next(iter(batch.cache.cache_allocators.values()))
    assert not allocator.block_table


def test_an_error_with_a_new_request_fails_it(batched, monkeypatch):
    """No request runs yet, so that the one that waits has made the error."""
    scheduler = batched.generation.get_manager("", use_cb=True)._cb.batch_processor.scheduler
    expected = text_of(chat(batched))
    monkeypatch.setattr(scheduler, "_process_candidates", once(scheduler._process_candidates))
    with pytest.raises(openai.InternalServerError, match="planted"):
        chat(batched)
    assert text_of(chat(batched)) == expected


# ------------------------------------------------------------------------------------------------ random requests


def test_random_requests_get_an_answer_or_a_4xx_status(server, plain):
    """`make fuzz-serve` sends thousands to processes."""
    assert not fuzz_serve.fuzz(server.base, seed=0, numbers=range(100))
    assert text_of(chat(server)) == plain
    assert server.becomes_idle()


@pytest.mark.parametrize(
    ("status", "answer"),
    [(500, "{}"), (400, "Bad Request"), (400, '{"error": "wrong"}'), (200, '{"choices": []}'), (200, "data: {}\n\n")],
)
def test_the_fuzzer_can_fail(status: int, answer: str):
    with pytest.raises((AssertionError, KeyError, TypeError, ValueError)):
        fuzz_serve.check(CHAT, {"stream": answer.startswith("data")}, status, answer)


@pytest.mark.slow
def test_thousands_of_random_requests_to_processes():
    assert fuzz_serve.main(["--seed", "0"]) == 0


def test_the_client_of_openai_sends_a_bias_as_integers(server):
    answer = client(server).chat.completions.create(
        model=server.model, messages=HELLO, max_tokens=3, logit_bias={str(A): 100}, temperature=0
    )
    assert text_of(answer) == "aaa"
