"""Keeps a server busy for a given time, and reports lost requests and growing memory.

    python tools/soak_server.py --minutes 5
    python tools/soak_server.py --minutes 5 --continuous-batching

`python -m torch_moe_metal serve` runs in a new process with a tiny model. `--clients` threads use OpenAI's client:
streams, whole answers, stop strings, tool calls, and streams that are abandoned in the middle. Every answer is compared
with the first one to the same request. Between rounds, when no request runs, the memory of the process is read. The
exit code is 1 if a request fails or differs, or if memory grows over the last two thirds of the time.
"""

import argparse
import itertools
import sys
import tempfile
import time
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

KINDS = ("stream", "whole", "stop", "tools", "abandoned")
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
            text = streamed(answer) if kind == "stream" else answer.choices[0].message.content
            if text != self.answers.setdefault(key, text):
                raise AssertionError(f"{kind}, prompt {prompt}: expected {self.answers[key]!r}, got {text!r}")
        self.done[kind] += 1


def streamed(parts) -> str:
    return "".join(part.choices[0].delta.content or "" for part in parts)


def soak(process: served.Process, seconds: float, clients: int) -> tuple[list[Sample], Counter, list[str]]:
    client, observed, seeds = Client(process), psutil.Process(process.process.pid), itertools.count()
    start, samples, errors = time.monotonic(), [], []
    with ThreadPoolExecutor(clients) as pool:
        while not samples or samples[-1].seconds < seconds or len(samples) < 6:
            until = time.monotonic() + seconds / 30
            while True:
                sent = [pool.submit(client, next(seeds)) for _ in range(2 * clients)]
                errors += [str(each.exception()) for each in sent if each.exception()]
                if time.monotonic() > until:
                    break
            memory = observed.memory_info().rss / 2**20
            samples.append(Sample(time.monotonic() - start, client.done.total(), memory, {}))
            print(f"{samples[-1].seconds / 60:5.2f} min {client.done.total():6} requests {memory:7.1f} MiB", flush=True)
    return samples, client.done, errors


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1, help="default: 1")
    parser.add_argument("--clients", type=positive, default=8, help="default: 8")
    parser.add_argument("--continuous-batching", action="store_true")
    options = parser.parse_args(arguments)
    batching = ["--continuous-batching"] if options.continuous_batching else []
    with tempfile.TemporaryDirectory() as folder:
        served.checkpoint(Path(folder))
        with served.process(folder, "--context", 8192, "--log-level", "warning", *batching) as process:
            samples, done, errors = soak(process, options.minutes * 60, options.clients)
            errors += faults(samples)
            if process.process.poll() is not None or "Traceback" in process.output:
                errors.append(f"the server failed:\n{process.output}")
    print("answered:", ", ".join(f"{count} {kind}" for kind, count in sorted(done.items())))
    print("\n".join(errors) or "no error, no lost request, no growth of memory")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
