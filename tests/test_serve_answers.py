"""Several answers, log probabilities, text between two others, counters, tokens and the page."""

import base64
import contextlib
import json
import logging
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import malformed
import served
from served import HELLO, chat, client, raw, text_of
from torch_moe_metal.commands.common.loading import Source
from torch_moe_metal.commands.serve import app
from torch_moe_metal.commands.serve.logprobs import Recorder, covering


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return served.checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module", params=[False, True], ids=["sequential", "batched"])
def server(request, folder: Path) -> Iterator[served.ServerThread]:
    with served.ServerThread(Source.of(str(folder)), request.param, context=2048) as server:
        yield server


def get(server, path: str) -> tuple[int, str]:
    status, body = raw(server, path, method="GET")
    return status, body.decode()


def send(server, path: str, **body) -> tuple[int, dict]:
    status, answer = raw(server, path, json.dumps(body).encode())
    return status, json.loads(answer)


# ------------------------------------------------------------------------------------------------ n


def test_several_answers(server):
    """They are those of the seeds that follow each other, also streamed."""
    options = {"temperature": 1.5, "seed": 7, "max_tokens": 8}
    answer = chat(server, **options, n=3)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3 and [choice.index for choice in answer.choices] == [0, 1, 2]
    assert texts == [text_of(chat(server, **options | {"seed": seed})) for seed in (7, 8, 9)]
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (24, answer.usage.prompt_tokens + 24)
    parts = list(chat(server, **options, n=3, stream=True))
    streamed = [""] * 3
    for part in parts:
        for choice in part.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts and len({part.id for part in parts}) == 1
    assert [part.usage.completion_tokens for part in parts if part.usage] == [24]
    assert sorted(choice.index for part in parts for choice in part.choices if choice.finish_reason) == [0, 1, 2]
    completions = client(server).completions
    answer = completions.create(model=server.model, prompt="once", n=2, max_tokens=4, temperature=2, seed=1)
    assert len({choice.text for choice in answer.choices}) == 2
    assert server.becomes_idle()


def test_a_client_that_leaves_ends_all_answers(server):
    parts = chat(server, n=4, max_tokens=1900, stream=True)
    next(iter(parts))
    parts.close()
    assert server.becomes_idle(3)
    with pytest.raises(openai.APITimeoutError):
        chat(server, n=4, max_tokens=1900, timeout=0.5)
    assert server.becomes_idle(3)


# ------------------------------------------------------------------------------------------------ log probabilities


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[dict]:
    """Tokens, their log probabilities and the three likeliest ones, from `generate`."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    output = model.generate(**inputs, **options)
    tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    rows = [logits[0].log_softmax(-1) for logits in output.logits]
    return [
        {"token": token, "logprob": row[token].item(), "top": row.topk(3)}
        for token, row in zip(tokens, rows, strict=True)
    ]


def check_entries(entries, expected: list[dict], decode) -> None:
    assert [entry.token for entry in entries] == [decode([each["token"]]) for each in expected]
    for entry, each in zip(entries, expected, strict=True):
        assert math.isclose(entry.logprob, each["logprob"], abs_tol=1e-3)
        assert bytes(entry.bytes).decode() == entry.token
        found = {top.token: top.logprob for top in entry.top_logprobs}
        assert list(found) == [decode([token]) for token in each["top"].indices.tolist()]
        assert torch.allclose(torch.tensor([*found.values()]), each["top"].values, atol=1e-3)


def test_log_probabilities_are_those_of_generate(server, expected):
    """Penalties do not change them."""
    decode = served.tokenizer().decode
    options = {"logprobs": True, "top_logprobs": 3, "max_tokens": 12}
    answer = chat(server, **options)
    check_entries(answer.choices[0].logprobs.content, expected, decode)
    parts = [part.choices[0] for part in chat(server, **options, stream=True)]
    entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    check_entries(entries, expected, decode)
    for part in parts:
        assert not part.delta.content or "".join(entry.token for entry in part.logprobs.content) == part.delta.content
    biased = {"temperature": 0, "logit_bias": {str(expected[0]["token"]): -100}}
    first = chat(server, **options | biased).choices[0].logprobs.content[0]
    assert first.token != decode([expected[0]["token"]])
    assert math.isclose(first.top_logprobs[0].logprob, expected[0]["logprob"], abs_tol=1e-3)
    assert chat(server, max_tokens=2).choices[0].logprobs is None


def test_log_probabilities_of_completions(server):
    options = {"model": server.model, "prompt": "once", "temperature": 0, "max_tokens": 6}
    answer = client(server).completions.create(**options, logprobs=2).choices[0]
    found = answer.logprobs
    assert "".join(found.tokens) == answer.text and found.text_offset == [0, 1, 2, 3, 4, 5]
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) == 2 and top[token] == logprob == max(top.values())
    parts = [part.choices[0] for part in client(server).completions.create(**options, logprobs=2, stream=True)]
    offsets = [offset for part in parts if part.logprobs for offset in part.logprobs.text_offset]
    assert offsets == found.text_offset


def test_log_probabilities_leave_out_reasoning_and_marks(tmp_path: Path):
    script = ["<think>", "which city?", "</think>", "one", " moment", "stop", "more"]
    with served.ServerThread(Source.of(str(served.scripted(tmp_path, script)))) as server:
        answer = chat(server, logprobs=True, stop="stop")
        assert [entry.token for entry in answer.choices[0].logprobs.content] == ["one", " moment"]
        parts = [part.choices[0] for part in chat(server, logprobs=True, stop="stop", stream=True)]
        assert [entry.token for part in parts if part.logprobs for entry in part.logprobs.content] == ["one", " moment"]


def test_top_logprobs_need_logprobs(server):
    with pytest.raises(openai.BadRequestError) as error:
        chat(server, top_logprobs=2)
    assert error.value.param == "top_logprobs"


def test_entries_of_a_text():
    entries = [{"token": token, "bytes": given} for token, given in (("<a>", [1]), ("bc", [1]), ("\ufffd", None))]
    assert covering(entries, 2) == entries[1:]
    assert covering(entries, 3) == entries and covering(entries, 0) == []
    recorder = Recorder(1, lambda ids: "ab"[ids[0]])
    recorder.change(torch.tensor([0.0, -torch.inf]), [5], 1)
    assert recorder.entry(0, 1)["logprob"] == -9999 and not recorder.rows


# ------------------------------------------------------------------------------------------------ text in the middle

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]


def test_text_between_two_others(tmp_path: Path):
    """The prompt ends with the mark of the middle, and the answer where a new file would begin."""
    folder = served.scripted(tmp_path, [*MARKS, "middle", "<|file_sep|>", "another file"])
    with served.ServerThread(Source.of(str(folder)), context=512) as server:
        options = {"model": server.model, "temperature": 0, "max_tokens": 9}
        answer = client(server).completions.create(**options, prompt="before", suffix="after")
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("middle", "stop")
        assert answer.usage.prompt_tokens == len("beforeafter") + 3
        parts = client(server).completions.create(**options, prompt="before", suffix="after", stream=True)
        assert "".join(part.choices[0].text for part in parts) == "middle"


def test_a_suffix_needs_tokens(server):
    with pytest.raises(openai.BadRequestError) as error:
        client(server).completions.create(model=server.model, prompt="a", suffix="b")
    assert error.value.param == "suffix"


# ------------------------------------------------------------------------------------------------ counters and logs


def counts(server) -> dict[str, float]:
    status, text = get(server, "/metrics")
    assert status == 200
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'torch_moe_metal_\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? [\d.e+-]+', line) for line in lines)
    return {name.removeprefix("torch_moe_metal_"): float(value) for name, value in (line.split(" ") for line in lines)}


def test_metrics(server):
    before = counts(server)
    answer = chat(server, max_tokens=5)
    chat(server, max_tokens=5)
    raw(server, "/nowhere", method="GET")
    with pytest.raises(openai.BadRequestError):
        chat(server, temperature=5)
    assert server.becomes_idle()
    after = counts(server)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["prompt_tokens_total"] == 2 * answer.usage.prompt_tokens
    assert grown["generated_tokens_total"] == 10
    assert grown['first_token_seconds_bucket{le="+Inf"}'] == grown["first_token_seconds_count"] == 2
    assert grown["first_token_seconds_sum"] > 0 and grown["generation_seconds_total"] > 0
    assert grown['requests_total{path="/v1/chat/completions",status="200"}'] == 2
    assert grown['requests_total{path="/v1/chat/completions",status="400"}'] == 1
    assert grown['requests_total{path="other",status="404"}'] == 1
    assert after["requests_running"] == after["requests_waiting"] == 0
    if not server.generation._continuous_batching:
        assert grown["reused_tokens_total"] >= answer.usage.prompt_tokens - 1 and after["prefix_memory_bytes"] > 0


def test_metrics_of_running_requests(folder: Path):
    with served.ServerThread(Source.of(str(folder)), context=4096, parallel=2) as server, contextlib.ExitStack() as all:
        for _ in range(2):
            parts = all.enter_context(contextlib.closing(chat(server, max_tokens=3000, stream=True)))
            next(iter(parts))
        waiting = threading.Thread(target=chat, args=[server], kwargs={"max_tokens": 1})
        waiting.start()
        until = time.monotonic() + 10
        while time.monotonic() < until and not counts(server)["requests_waiting"]:
            time.sleep(0.01)
        found = counts(server)
        all.close()
        waiting.join()
    assert (found["requests_running"], found["requests_waiting"]) == (2, 1)


def test_each_request_is_logged(server, caplog):
    with caplog.at_level(logging.INFO, "uvicorn.error"):
        chat(server, max_tokens=4)
        assert server.becomes_idle()
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("chatcmpl-")]
    pattern = r"chatcmpl-\w+: \d+ tokens, \d+ of them reused; the first token after [\d.]+ s; 4 tokens, [\d.]+ tokens/s"
    assert len(lines) == 1 and re.fullmatch(pattern, lines[0]), lines


# ------------------------------------------------------------------------------------------------ tokens


def test_tokens(server):
    text = "hello <|im_end|>"
    status, answer = send(server, "/tokenize", content=text)
    assert (status, answer["tokens"]) == (200, served.tokenizer().encode(text))
    assert send(server, "/detokenize", tokens=answer["tokens"])[1] == {"content": text}
    pieces = send(server, "/tokenize", content="ab", with_pieces=True)[1]["tokens"]
    assert [piece["piece"] for piece in pieces] == ["a", "b"]
    status, body = get(server, "/props")
    found = json.loads(body)
    assert status == 200 and found["default_generation_settings"]["n_ctx"] == 2048
    assert found["chat_template"] == served.TEMPLATE


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_malformed_requests_get_a_4xx_status(server, path: str, count: int):
    for method, _, body, headers in malformed.cases(f"{path} {count}", count, paths=[path]):
        status, answer = raw(server, path, body, headers, method)
        assert 400 <= status < 500, (path, body[:300], answer[:300])
        assert json.loads(answer)["error"]["type"] == "invalid_request_error"
    assert send(server, "/tokenize", content="a")[0] == 200


# ------------------------------------------------------------------------------------------------ the page


def test_the_page_is_served(folder: Path):
    """Also without the key, which it asks for. It loads nothing from elsewhere, and its requests are right ones."""
    with served.ServerThread(Source.of(str(folder)), context=512, api_key="secret") as server:
        status, page = get(server, "/")
        assert status == 200 and page.startswith("<!doctype html>")
        assert not re.search(r"(src|href)\s*=|@import|url\(|https?://", page)
        paths = set(re.findall(r'fetch\("([^"]+)"', page))
        assert paths == {"v1/models", "v1/chat/completions"}
        headers = {"authorization": "Bearer secret"}
        assert json.loads(raw(server, "/v1/models", headers=headers, method="GET")[1])["data"][0]["id"] == server.model
        body = json.dumps({"messages": HELLO, "stream": True, "max_tokens": 3}).encode()
        status, answer = raw(server, "/v1/chat/completions", body, headers)
        events = answer.decode().split("\n\n")
        assert status == 200 and events[-2:] == ["data: [DONE]", ""]
        for event in events[:-2]:
            value = json.loads(event.removeprefix("data: "))
            assert "delta" in value["choices"][0]
        assert value["usage"]["completion_tokens"] == 3
        assert raw(server, "/v1/models", method="GET")[0] == 401


BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
#: Asks a question in the page, then another one whose answer it stops, and logs what is shown.
DRIVER = """
<script>
const wait = (time) => new Promise((next) => setTimeout(next, time));
const ask = async (text, time) => {
  $("prompt").value = text;
  $("form").requestSubmit();
  if (time) wait(time).then(() => $("stop").click());
  do await wait(50); while (running);
};
addEventListener("load", async () => {
  await ask("hello");
  const text = document.querySelector(".assistant").textContent, speed = $("speed").textContent;
  console.log("FIRST");
  await wait(1000);
  await ask("a long one", 1500);
  const stored = JSON.parse(localStorage.getItem("messages"));
  const shown = [...$("chat").children].map((each) => each.className);
  console.log("RESULT" + btoa(JSON.stringify({text, speed, stored, shown, model: $("model").textContent})));
});
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="NOT RUN: no chromium; apt-get install chromium-headless-shell")
def test_the_page_in_a_browser(folder: Path, tmp_path: Path, monkeypatch):
    """It chats, shows model and speed, stops an answer, and keeps the conversation."""
    page = tmp_path / "page.html"
    page.write_text(app.PAGE.read_text().replace("</html>", DRIVER + "</html>"))
    monkeypatch.setattr(app, "PAGE", page)
    with served.ServerThread(Source.of(str(folder)), context=40000) as server:
        config = server.models.model.generation_config
        config.max_new_tokens, config.eos_token_id = 20, None
        for line in console(f"{server.base}/", tmp_path / "profile"):
            if "FIRST" in line:
                config.max_new_tokens = None  # the next answer would take minutes
            elif encoded := re.search(r"RESULT([\w+/=]+)", line):
                found = json.loads(base64.b64decode(encoded[1]))
                break
        else:
            raise AssertionError("the page has not answered")
        assert server.becomes_idle()
        expected = text_of(chat(server, messages=HELLO, max_tokens=20))
    assert (found["model"], found["text"]) == (server.model, expected)
    assert re.fullmatch(r"[\d.]+ tokens/s after [\d.]+ s", found["speed"]), found
    assert found["shown"] == [message["role"] for message in found["stored"]] == ["user", "assistant"] * 2
    assert 0 < len(found["stored"][3]["content"]) < 20000


def console(address: str, profile: Path) -> Iterator[str]:
    """The lines that a browser with this page writes in a minute."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--remote-debugging-port=0"]
    command = [BROWSER, *options, f"--user-data-dir={profile}", address]
    lines: queue.Queue[str] = queue.Queue()
    until = time.monotonic() + 60
    browser = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    )
    # on a thread, since processes of the browser may keep the pipe open
    threading.Thread(target=lambda: [lines.put(line) for line in browser.stderr], daemon=True).start()
    try:
        with contextlib.suppress(queue.Empty):
            while True:
                yield lines.get(timeout=max(until - time.monotonic(), 0.01))
    finally:
        os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()
