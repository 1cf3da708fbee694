"""Sends random requests to a server process in each of its modes: `make fuzz-serve`.

    python tests/fuzz_serve.py --requests 2000               # a random seed, which it prints
    python tests/fuzz_serve.py --seed 7 --case batched-123   # repeat one request, and print the answer

A request has some fields of OpenAI's API, of other servers, or of neither, with likely values or with any JSON value.
Each must get status 2xx or 4xx in the API's form. `/health` must answer within half a second all the time, memory must
not grow after the first quarter of the requests, and the answer to a right request must be the same at the end.
"""

import argparse
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import psutil
from anthropic.types.message_create_params import MessageCreateParamsStreaming as MessageFields
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatFields
from openai.types.completion_create_params import CompletionCreateParamsStreaming as TextFields
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponseFields
from transformers import GenerationConfig

import served

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
RIGHT = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    TEXT: {"prompt": "hello", "max_tokens": 2},
    RESPONSES: {"input": "hello", "max_output_tokens": 2},
    MESSAGES: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    COUNT: {"messages": [{"role": "user", "content": "hello"}]},
    TOKENIZE: {"content": "hello"},
    DETOKENIZE: {"tokens": [1, 2]},
}
#: Fields of other servers, of transformers, and of none.
OTHERS = ["top_k", "min_p", "repetition_penalty", "ignore_eos", "stop_token_ids", "seed", "stop", "generation_config"]
OTHERS += ["grammar", "chat_template_kwargs", "think", "cache_prompt", "\ud800", "x" * 2000]
FIELDS = {
    path: sorted({*fields.__mutable_keys__, *OTHERS})
    for path, fields in ((CHAT, ChatFields), (TEXT, TextFields), (RESPONSES, ResponseFields), (MESSAGES, MessageFields))
}
FIELDS |= {COUNT: FIELDS[MESSAGES], TOKENIZE: ["content", "add_special", "with_pieces", "parse_special", "x"]}
FIELDS |= {DETOKENIZE: ["tokens", "x"]}
NUMBERS = [0, 1, -1, 2, 0.5, 1.0, 1e-38, 1e-45, 1e-5, -1e-38, 1e38, 1e300, 10**30, -(10**30), 2**31, 2**63, 2**64]
NUMBERS += [float("inf"), float("-inf"), float("nan"), -2, 100, 96, 99999]
TEXTS = [
    "",
    "a",
    "auto",
    "none",
    "required",
    "high",
    "banana",
    "text",
    "\ud800",
    "\x00",
    "é" * 300,
    "x" * 3000,
    "{%",
    "<|im_end|>",
]
SCALARS = [None, True, False, *NUMBERS, *TEXTS]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max", "banana"]
CHOICES = ["none", "auto", "required", TOOL, {"type": "function", "function": {"name": "g"}}, {"type": "allowed_tools"}]
CHOICES += [{"type": "any"}, {"type": "tool", "name": "f"}, {"type": "auto", "disable_parallel_tool_use": True}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", 5]}}, "required": ["a"], "additionalProperties": False}
WRONG_SCHEMAS = [{"type": "wat"}, {"not": {}}, {"$ref": "#/x"}, {"pattern": "("}, {"anyOf": []}, {"enum": []}]
EVERY_SCHEMA = [SCHEMA, {}, *WRONG_SCHEMAS]
SCHEMAS = [{"type": "json_schema", "json_schema": {"name": "x", "schema": each}} for each in EVERY_SCHEMA]
TEXT_FORMS = [{"format": {"type": "json_schema", "name": "x", "schema": each}} for each in EVERY_SCHEMA]
TOOL_OF_CLAUDE = {"name": "f", "input_schema": SCHEMA}
#: Likely values, right and wrong.
LIKELY = {
    "temperature": [0, 1e-38, 1e-7, 0.01, 0.7, 1, 2],
    "top_p": [1e-38, 1e-9, 0.5, 1],
    "min_p": [0, 1e-38, 0.1, 1],
    "top_k": [-1, 0, 1, 20, 2**31 - 1, 2**31],
    "repetition_penalty": [1e-38, 0.01, 1, 1.1, 100],
    "presence_penalty": [-2, -0.5, 0, 1.5, 2],
    "frequency_penalty": [-2, -1, 0, 1.5, 2],
    "logit_bias": [{}, {"5": -100}, {"5": 100, "6": 0.5}, {"98": 1}, {str(i): -100 for i in range(99)}],
    "seed": [0, -1, 7, 2**63 - 1, -(2**63)],
    "stop": ["e", ["a", "b"], ["a"] * 64, ["a"] * 65, "x" * 256, "x" * 300, []],
    "stop_token_ids": [[], [5], [98, 97], [99], [-1], [1] * 65],
    "ignore_eos": [True, False],
    "stream": [True, False],
    "stream_options": [{}, {"include_usage": True}, {"include_usage": "yes"}],
    "n": [1, 2, 3, 17],
    "logprobs": [False, True, 1, 5, 21],
    "top_logprobs": [0, 5, 20, 21],
    "grammar": ['root ::= "a" | "bc"', 'start: "a" | /b+/', "start: x", "", "root ::= ("],
    "system": ["be brief", [{"type": "text", "text": "a"}], [{"type": "image"}]],
    "stop_sequences": [[], ["e"], ["a"] * 65],
    "thinking": [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "x"}],
    "output_config": [{}, {"effort": "low"}, {"format": {"type": "json_schema", "schema": SCHEMA}}],
    "content": ["hello", "", "é\x00", "<|im_end|>"],
    "tokens": [[], [1, 2], [10**9], [-1]],
    "tools": [
        [],
        [TOOL],
        [TOOL, TOOL],
        [{"type": "function"}],
        [{"type": "web_search"}],
        [{"type": "function", "name": "f"}],
        [TOOL_OF_CLAUDE],
    ],
    "tool_choice": CHOICES,
    "parallel_tool_calls": [True, False],
    "reasoning_effort": EFFORTS,
    "reasoning": [{}, *({"effort": each} for each in EFFORTS), {"summary": "auto"}],
    "response_format": [{"type": "text"}, {"type": "json_object"}, *SCHEMAS],
    "text": [{}, {"format": {"type": "text"}}, {"verbosity": "low"}, {"format": {"type": "json_schema"}}, *TEXT_FORMS],
    "modalities": [["text"], ["audio"]],
    "metadata": [{}, {"a": "b"}],
    "store": [True, False],
    "include": [[], ["reasoning.encrypted_content"]],
    "truncation": ["auto", "disabled"],
    "suffix": ["", "the end"],
    "prompt": ["hello", ["hello"], [], [1, 2], "x" * 600],
    "max_tokens": [1, 3, 10**6],
    "max_completion_tokens": [1, 3, 10**6],
    "max_output_tokens": [1, 3, 10**6],
    "model": ["another", "x" * 5000],
}
ROLES = ["system", "developer", "user", "assistant", "tool", "function", "wizard", 5, None]
TEMPLATE = ["chat_template", "padding", "max_length", "tokenize", "return_tensors", "return_dict", "tools", "messages"]
TEMPLATE += ["conversation", "documents", "continue_final_message", "add_generation_prompt", "tokenizer_kwargs"]
TEMPLATE += ["enable_thinking", "truncation", "eos_token", "load_audio_from_video", "return_assistant_tokens_mask"]


def anything(rng: Random, depth: int = 0) -> object:
    """Any JSON value."""
    kind = rng.random()
    if kind < 0.7 or depth > 3:
        return rng.choice(SCALARS)
    if kind < 0.85:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(["type", "a", "5", "function", "name", ""]): anything(rng, depth + 1) for _ in range(3)}


#: Of Anthropic's messages.
BLOCKS = [
    {"type": "text", "text": "a"},
    {"type": "tool_result", "tool_use_id": "a", "content": "b"},
    {"type": "tool_use", "id": "a", "name": "f", "input": {}},
    {"type": "thinking", "thinking": "hm", "signature": ""},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "a"}},
    {"type": "document", "source": {"type": "text", "data": "a"}},
    {"type": "text", "text": 5},
    {"type": "tool_result"},
]


def message(rng: Random) -> object:
    if rng.random() < 0.1:
        return anything(rng)
    drawn = {"role": rng.choice(ROLES) if rng.random() < 0.3 else "user", "content": "hello"}
    if rng.random() < 0.3:
        parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,"}}, anything(rng)]
        drawn["content"] = rng.choice([parts[:1], parts, anything(rng)])
    if rng.random() < 0.3:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": rng.choice(["{}", "{", 5, {}])}}
        drawn["tool_calls"] = rng.choice([None, [], [call], [call, anything(rng)], anything(rng)])
    if rng.random() < 0.1:
        drawn["content"] = rng.choices(BLOCKS, k=2)
    return drawn | ({"name": anything(rng)} if rng.random() < 0.1 else {})


def item(rng: Random) -> object:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": rng.choice(["{}", "{", None])}
    result = {"type": "function_call_output", "call_id": "1", "output": rng.choice(["a", [], 5])}
    thought = {"type": "reasoning", "content": rng.choice([None, [{"text": "a"}], [5], 5]), "summary": []}
    return rng.choice([message(rng), message(rng), call, result, thought, anything(rng)])


def settings(rng: Random) -> str:
    """A generation_config."""
    names = rng.choices(sorted({*GenerationConfig().to_dict(), "unknown"}), k=rng.randrange(1, 4))
    return json.dumps({name: rng.choice(LIKELY.get(name, SCALARS)) for name in names})


def value(rng: Random, name: str) -> object:
    if rng.random() < 0.3:
        return anything(rng)
    if name == "messages":
        return [message(rng) for _ in range(rng.randrange(1, 4))]
    if name == "input":
        return [item(rng) for _ in range(rng.randrange(1, 4))]
    if name == "generation_config":
        return settings(rng)
    if name == "chat_template_kwargs":
        return {rng.choice(TEMPLATE): anything(rng) for _ in range(rng.randrange(3))}
    return rng.choice(LIKELY.get(name, SCALARS))


def draw(seed: int, number: int) -> tuple[str, object]:
    """The path and the body of a request."""
    rng = Random(f"{seed} {number}")
    if rng.random() < 0.03:
        return "/load_model", {"model": anything(rng)}
    path = rng.choice([CHAT, CHAT, TEXT, RESPONSES, MESSAGES, MESSAGES, COUNT, TOKENIZE, DETOKENIZE])
    if rng.random() < 0.02:
        return path, anything(rng)
    names = rng.sample(FIELDS[path], min(rng.choice([1, 1, 2, 3, 6]), len(FIELDS[path])))
    body = RIGHT[path] | {name: value(rng, name) for name in names}
    return path, body if "stream" in names else body | {"stream": rng.random() < 0.4}


# ------------------------------------------------------------------------------------------------ answers

RESULTS = {COUNT: "input_tokens", TOKENIZE: "tokens", DETOKENIZE: "content"}


def ask(base: str, path: str, body: object = None, timeout: float = 60) -> tuple[int, str]:
    connection = http.client.HTTPConnection(base.removeprefix("http://"), timeout=timeout)
    try:
        headers = {"content-type": "application/json"}
        connection.request("GET" if body is None else "POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def check(path: str, body: object, status: int, answer: str) -> None:
    if 400 <= status < 500:
        error = json.loads(answer)["error"]
        if path in (MESSAGES, COUNT):
            assert error["type"].endswith("_error") and set(error) == {"message", "type"}, "not an error of the API"
        else:
            assert set(error) == {"message", "type", "param", "code"}, "not an error of the API"
            assert error["type"] == "invalid_request_error", "not an error of the API"
        assert error["message"], "not an error of the API"
        assert len(answer) < 1000, "a long error"
    else:
        assert 200 <= status < 300, f"status {status}"
        if path == "/load_model":
            return
        if path in RESULTS:
            assert RESULTS[path] in json.loads(answer), "an empty answer"
        elif body.get("stream") is True and path == MESSAGES:
            assert answer.startswith("event: message_start") and "_error" not in answer, "an error in a stream"
            assert '"type": "message_stop"' in answer, "a stream without an end"
        elif body.get("stream") is True:
            assert answer.startswith(("data: ", "event: ")) and "_error" not in answer, "an error in a stream"
            assert path == RESPONSES or answer.endswith("data: [DONE]\n\n"), "a stream without an end"
        else:
            name = {RESPONSES: "output", MESSAGES: "content"}.get(path, "choices")
            assert json.loads(answer)[name], "an empty answer"


def fault(base: str, seed: int, number: int) -> str | None:
    """What is wrong with the answer to a request, if something is."""
    path, body = draw(seed, number)
    status, answer = 0, ""
    try:
        status, answer = ask(base, path, body)
        check(path, body, status, answer)
    except Exception as error:
        text = f"{type(error).__name__}: {error}\n  {path} {json.dumps(body)[:1500]}\n  {status} {answer[:1500]}"
        return f"case {number}: {text}"
    return None


def fuzz(base: str, seed: int, numbers: Iterable[int], clients: int = 4) -> list[str]:
    """The faults of these requests, of which some run at once."""
    with ThreadPoolExecutor(clients) as pool:
        return [found for found in pool.map(lambda number: fault(base, seed, number), numbers) if found]


class Health(threading.Thread):
    """Asks `/health` all the time, and remembers the longest wait."""

    def __init__(self, base: str):
        super().__init__(daemon=True)
        self.base, self.longest, self.errors, self.ended = base, 0.0, [], threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            start = time.monotonic()
            try:
                assert ask(self.base, "/health")[0] == 200
            except Exception as error:
                self.errors.append(f"/health: {type(error).__name__}: {error}")
            self.longest = max(self.longest, time.monotonic() - start)

    def end(self) -> list[str]:
        self.ended.set()
        self.join()
        slow = [f"/health took {self.longest:.2f} s"] if self.longest > 0.5 else []
        return self.errors[:3] + slow


# ------------------------------------------------------------------------------------------------ the command

MODES = {"sequential": [], "batched": ["--continuous-batching"]}
GREEDY = {"temperature": 0, "max_tokens": 8, "messages": RIGHT[CHAT]["messages"]}


def text(base: str) -> str:
    return json.loads(ask(base, CHAT, GREEDY)[1])["choices"][0]["message"]["content"]


def run(process: served.Process, mode: str, seed: int, requests: int) -> list[str]:
    observed, health, faults = psutil.Process(process.process.pid), Health(process.base), []
    start, expected, memory = time.monotonic(), text(process.base), []
    health.start()
    quarter = max(requests // 4, 1)
    for first in range(0, requests, quarter):
        found = fuzz(process.base, seed, range(first, min(first + quarter, requests)))
        for each in found:
            print(f"FAILED: {mode}: make fuzz-serve SEED={seed} CASE={mode}-{each.split()[1][:-1]}\n{each}", flush=True)
        faults += found
        memory.append(observed.memory_info().rss / 2**20)
        done, seconds = min(first + quarter, requests), time.monotonic() - start
        print(f"==> {mode}: {done} requests, {len(faults)} failed, {seconds:.0f} s, {memory[-1]:.0f} MiB", flush=True)
    faults += health.end()
    if memory[-1] > memory[0] + 50:
        faults.append(f"memory grew from {memory[0]:.0f} to {memory[-1]:.0f} MiB")
    if (found := text(process.base)) != expected:
        faults.append(f"the answer to a right request was {expected!r}, and is {found!r}")
    if process.process.poll() is not None or "Traceback" in process.output:
        faults.append(f"the server failed:\n{process.output[-5000:]}")
    print(f"==> {mode}: the longest wait for /health was {health.longest:.2f} s", flush=True)
    return faults


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--requests", type=int, default=2000, help="to each mode; default: 2000")
    parser.add_argument("--mode", choices=MODES, help="only this one")
    parser.add_argument("--case", metavar="MODE-NUMBER", help="repeat one request")
    options = parser.parse_args(arguments)
    mode, _, number = (options.case or "").partition("-")
    faults = []
    print(f"==> Seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        served.checkpoint(Path(folder))
        for each in filter(None, [mode or options.mode]) if mode or options.mode else MODES:
            with served.process(folder, "--context", 256, "--log-level", "warning", *MODES[each]) as process:
                if number:
                    print(
                        draw(options.seed, int(number)), ask(process.base, *draw(options.seed, int(number))), sep="\n"
                    )
                    faults += filter(None, [fault(process.base, options.seed, int(number))])
                    print(process.output)
                else:
                    faults += run(process, each, options.seed, options.requests)
    print("\n".join(faults) or "no fault")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
