"""What the server has done so far, in Prometheus' text form."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from resource import RUSAGE_SELF, getrusage

import torch

PREFIX = "torch_moe_metal_"
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # the buckets of the time to the first token
HELP = {
    "requests_total": "counter: requests that were answered, by path and status",
    "requests_running": "gauge: requests whose tokens are being computed",
    "requests_waiting": "gauge: requests that wait for their turn",
    "prompt_tokens_total": "counter: tokens of prompts",
    "reused_tokens_total": "counter: tokens of prompts that were not computed again",
    "generated_tokens_total": "counter: tokens of answers",
    "generation_seconds_total": "counter: seconds from the first to the last token of answers",
    "first_token_seconds": "histogram: seconds from a request to its first token",
    "prefix_memory_bytes": "gauge: memory of the store of prefixes",
    "peak_memory_bytes": "gauge: the most memory that the process has used so far",
    "gpu_memory_bytes": "gauge: the GPU's memory in use",
}


class Metrics:
    """The counters. Threads of generation add to them, too."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.paths: set[str] = set()  # others are counted together
        self.requests: Counter[tuple[str, int]] = Counter()
        self.counts: Counter[str] = Counter()
        self.firsts: list[int] = [0] * (len(SECONDS) + 1)  # answers with a first token, by bucket

    def counting(self, path: str, send: Callable) -> Callable:
        """`send`, which counts a request when its answer begins."""

        async def counted(message: dict) -> None:
            if message["type"] == "http.response.start":
                known = path if path in self.paths else "other"
                self.requests[known, message["status"]] += 1
            await send(message)

        return counted

    def generated(self, prompt: int, reused: int, times) -> None:
        """Count a generation that has ended."""
        with self.lock:
            self.counts["prompt_tokens_total"] += prompt
            self.counts["reused_tokens_total"] += reused
            self.counts["generated_tokens_total"] += len(times)
            if times.first is not None:
                self.counts["generation_seconds_total"] += times.seconds
                self.counts["first_token_seconds_sum"] += times.first
                self.firsts[sum(times.first > limit for limit in SECONDS)] += 1

    def text(self, gauges: dict[str, float]) -> str:
        with self.lock:
            lines = [line for name in HELP for line in self.lines(name, gauges)]
        return "\n".join([*lines, ""])

    def lines(self, name: str, gauges: dict[str, float]) -> Iterator[str]:
        kind, _, words = HELP[name].partition(": ")
        if kind == "gauge" and name not in gauges:
            return
        yield f"# HELP {PREFIX}{name} {words}"
        yield f"# TYPE {PREFIX}{name} {kind}"
        if name == "requests_total":
            for (path, status), count in sorted(self.requests.items()):
                yield f'{PREFIX}{name}{{path="{path}",status="{status}"}} {count}'
        elif kind == "histogram":
            yield from self.buckets(PREFIX + name)
        else:
            yield f"{PREFIX}{name} {gauges.get(name, self.counts[name])}"

    def buckets(self, name: str) -> Iterable[str]:
        total = 0
        for limit, count in zip((*SECONDS, "+Inf"), self.firsts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{limit}"}} {total}'
        yield f"{name}_sum {self.counts['first_token_seconds_sum']}"
        yield f"{name}_count {total}"


def memory(device: torch.device) -> dict[str, float]:
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"peak_memory_bytes": getrusage(RUSAGE_SELF).ru_maxrss * unit}
    if device.type == "mps" and torch.backends.mps.is_built():
        found["gpu_memory_bytes"] = torch.mps.driver_allocated_memory()
    return found
