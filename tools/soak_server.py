"""Keeps a server busy for a given time, and reports lost requests and growing memory.

    python tools/soak_server.py --minutes 5
    python tools/soak_server.py --minutes 5 --continuous-batching
    python tools/soak_server.py --requests 2000 --family qwen3_next

`python -m torch_moe_metal serve` runs in a new process with a tiny model that has large keys and values. `--clients`
threads use OpenAI's client: streams, whole answers, stop strings, tool calls, streams that are abandoned in the middle,
and conversations of two turns, of which the store of prefixes holds a few. Every answer is compared with the first one
to the same request. Between rounds, when no request runs, the memory of the process and of the store is read. The exit
code is 1 if a request fails or differs, if the store exceeds its limit, if the process takes 10 % more than at its
start with the store and the requests that run, or if its memory grows over the last two thirds of the time.
"""

import argparse
import itertools
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import openai
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import served
from soak import Sample, faults
from torch_moe_metal.commands.common.cli import positive

KINDS = ("stream", "whole", "stop", "tools", "abandoned", "conversation")
TALKS, LONGEST = 40, 2000  # conversations, and letters of their first message
SIZES = {"num_key_value_heads": 4, "head_dim": 128}
PARALLEL, MOST_MIB = 4, 60  # requests at once, and the cache of one with the inputs of its layers
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


class Client:
    """Sends requests and remembers the first answer to each."""

    def __init__(self, process: served.Process):
        self.api = openai.OpenAI(base_url=f"{process.base}/v1", api_key="any", max_retries=0, timeout=120)
        self.model, self.answers, self.done = process.model, {}, Counter()

    def __call__(self, seed: int) -> None:
        """One request, drawn from the seed."""
        random = Random(seed)
        kind, prompt = random.choice(KINDS), random.randrange(8)
        if kind == "conversation":
            return self.talk(random.randrange(TALKS))
        options = {"max_tokens": 8 + 4 * prompt, "temperature": 0, "stream": kind in ("stream", "abandoned")}
        options |= {"stop": ["e"]} if kind == "stop" else {}
        options |= {"tools": TOOLS} if kind == "tools" else {}
        messages = [{"role": "user", "content": "hello " * (1 + 20 * prompt)}]
        answer = self.api.chat.completions.create(model=self.model, messages=messages, **options)
        if kind == "abandoned":
            next(iter(answer))
            answer.close()
        else:
            key = prompt, kind if kind in ("stop", "tools") else "plain"
            self.compare(key, streamed(answer) if kind == "stream" else answer.choices[0].message.content)
        self.done[kind] += 1

    def talk(self, number: int) -> None:
        """Two turns of a conversation."""
        random, messages = Random(number), []
        for length in (random.randrange(LONGEST // 4, LONGEST), 20):
            words = "".join(random.choices("abcdefghij ", k=length))
            messages.append({"role": "user", "content": words})
            options = {"model": self.model, "messages": messages, "max_tokens": 8, "temperature": 0}
            text = self.api.chat.completions.create(**options).choices[0].message.content
            self.compare(("conversation", number, len(messages)), text)
            messages.append({"role": "assistant", "content": text})
        self.done["conversation"] += 1

    def compare(self, request: tuple, text: str) -> None:
        if text != self.answers.setdefault(request, text):
            raise AssertionError(f"{request}: expected {self.answers[request]!r}, got {text!r}")

    def metric(self, name: str) -> float:
        """A number of the server."""
        text = urllib.request.urlopen(f"{str(self.api.base_url).removesuffix('/v1/')}/metrics").read().decode()
        return float(re.search(rf"^torch_moe_metal_{name} (\S+)$", text, re.MULTILINE)[1])


def streamed(parts) -> str:
    return "".join(part.choices[0].delta.content or "" for part in parts)


def soak(client: Client, process: psutil.Process, options: argparse.Namespace) -> tuple[list[Sample], list[str]]:
    seeds, start, samples, errors = itertools.count(), time.monotonic(), [], []
    seconds = options.minutes * 60
    limit = 0 if options.continuous_batching else options.prefix_memory * 1e9
    allowed = 1.1 * (process.memory_info().rss + limit + PARALLEL * MOST_MIB * 2**20) / 2**20
    with ThreadPoolExecutor(options.clients) as pool:
        while len(samples) < 6 or samples[-1].seconds < seconds or client.done.total() < options.requests:
            until = time.monotonic() + max(seconds, 30) / 30
            while True:
                sent = [pool.submit(client, next(seeds)) for _ in range(2 * options.clients)]
                errors += [str(each.exception()) for each in sent if each.exception()]
                if time.monotonic() > until:
                    break
            memory, kept = process.memory_info().rss / 2**20, 0.0
            samples.append(Sample(time.monotonic() - start, client.done.total(), memory, {}))
            if not options.continuous_batching:
                kept = client.metric("prefix_memory_bytes")
                errors += [f"the store has {kept:,.0f} bytes"] if kept > limit else []
            errors += [f"the process has {memory:,.0f} of {allowed:,.0f} MiB"] if memory > allowed else []
            shown = f"{samples[-1].seconds / 60:5.2f} min {client.done.total():6} requests {memory:7.1f} MiB"
            print(f"{shown}, at most {allowed:.1f}; {kept / 1e6:5.1f} MB of prefixes", flush=True)
    return samples, errors


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1, help="default: 1")
    parser.add_argument("--clients", type=positive, default=8, help="default: 8")
    parser.add_argument("--requests", type=int, default=0, help="go on until so many are answered")
    parser.add_argument("--family", default="qwen3_moe", help="default: qwen3_moe")
    parser.add_argument("--prefix-memory", type=float, default=0.1, metavar="GB", help="default: 0.1")
    parser.add_argument("--continuous-batching", action="store_true")
    options = parser.parse_args(arguments)
    arguments = ["--prefix-memory", options.prefix_memory, "--parallel", PARALLEL]
    arguments += ["--continuous-batching"] if options.continuous_batching else []
    with tempfile.TemporaryDirectory() as folder:
        served.checkpoint(Path(folder), options.family, **SIZES)
        with served.process(folder, "--context", 8192, "--log-level", "warning", *arguments) as process:
            client = Client(process)
            samples, errors = soak(client, psutil.Process(process.process.pid), options)
            errors += faults(samples)
            reused = client.metric("reused_tokens_total") / client.metric("prompt_tokens_total")
            if process.process.poll() is not None or "Traceback" in process.output:
                errors.append(f"the server failed:\n{process.output}")
    done = ", ".join(f"{count} {kind}" for kind, count in sorted(client.done.items()))
    print(f"answered: {done}; {reused:.0%} of the prompts' tokens were reused")
    print("\n".join(errors) or "no error, no lost request, no growth of memory")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
