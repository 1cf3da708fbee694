"""Prints where the time of a step of continuous batching goes, as PyTorch's profiler counts it.

    python tools/batching_steps.py --requests 8
    OMP_NUM_THREADS=1 python tools/batching_steps.py --requests 8 --ops

The model and the prompts are those of `tools/batching.py`. `--ops` also prints the time of each op, for requests one
after the other and together.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

import batching
from batching import Batched, Sequential, Tokens

#: What the profiler calls the parts of a step. A function in ranges() gets a range with its part's name.
PARTS = {
    "experts": ("moe_metal::experts",),
    "linear layers": ("moe_metal::linear", "aten::linear"),
    "routers, norms, rope": ("moe_metal::gate", "moe_metal::norm", "moe_metal::residual_norm", "moe_metal::rope"),
    "attention": ("aten::scaled_dot_product_attention", "moe_metal::attention"),
    "paged cache": ("paged cache",),
    "sampling": ("processors", "draw"),
    "scheduler and inputs": ("prepare", "update", "arguments"),
}
WHOLE_STEP = ("prepare", "generation", "update")


def ranges() -> list[tuple[type, str, str]]:
    """Functions of transformers that are parts of a step."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
    from transformers.generation.continuous_batching.model_runner import ModelRunner

    return [
        (ContinuousBatchProcessor, "prepare_next_batch", "prepare"),
        (ContinuousBatchProcessor, "_generation_step", "generation"),
        (ContinuousBatchProcessor, "update_batch", "update"),
        (ContinuousBatchingIOs, "get_model_kwargs", "arguments"),
        (PagedAttentionCache, "update", "paged cache"),
        (ContinuousBatchingLogitsProcessorList, "__call__", "processors"),
        (ModelRunner, "_sample", "draw"),
    ]


@contextlib.contextmanager
def replaced(cls: type, name: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    stock = getattr(cls, name)
    setattr(cls, name, make(stock))
    try:
        yield
    finally:
        setattr(cls, name, stock)


def in_range(name: str) -> Callable[[Callable], Callable]:
    def make(function: Callable) -> Callable:
        def call(*args, **kwargs):
            with torch.profiler.record_function(name):
                return function(*args, **kwargs)

        return call

    return make


class StepProfiler:
    """Profiles the steps in which all requests get their next token. The profiler sees the thread that starts it, so
    the manager's thread does."""

    def __init__(self, requests: int):
        self.requests, self.steps, self.ended = requests, 0, threading.Event()
        self.profiler: torch.profiler.profile | None = None

    def around(self, body: Callable) -> Callable:
        def call(manager, processor, bootstrapping: bool) -> bool:
            states = processor.scheduler.active_requests.values()
            decoding = len(states) == self.requests and all(state.generated_tokens for state in states)
            if decoding and self.profiler is None:
                self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                self.profiler.start()
            elif not decoding and self.profiler is not None and not self.ended.is_set():
                self.profiler.stop()
                self.ended.set()
            self.steps += decoding
            return body(manager, processor, bootstrapping)

        return call


def profiled_steps(model, prompts: Tokens, tokens: int) -> StepProfiler:
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass  # it must be initialised on this thread
    profiler = StepProfiler(len(prompts))
    with contextlib.ExitStack() as stack:
        for cls, function, name in ranges():
            stack.enter_context(replaced(cls, function, in_range(name)))
        stack.enter_context(replaced(ContinuousBatchingManager, "_generation_loop_body", profiler.around))
        way = Batched(model, tokens)
        way(prompts)
        assert profiler.ended.wait(10), "no step had all requests"
        way.stop()
    return profiler


def breakdown(profiler: StepProfiler) -> str:
    spent = {event.key: event.cpu_time_total / 1e3 / profiler.steps for event in profiler.profiler.key_averages()}
    whole = sum(spent[name] for name in WHOLE_STEP)
    parts = {part: sum(spent.get(name, 0.0) for name in names) for part, names in PARTS.items()}
    parts["the rest of the model, and Python"] = whole - sum(parts.values())
    rows = [f"  {part:36}{time:9.3f} ms{time / whole:8.1%}" for part, time in parts.items()]
    title = f"a step of {profiler.requests} requests, with the profiler's own time, mean of {profiler.steps}:"
    return "\n".join([f"{title} {whole:.3f} ms", *rows])


def print_ops(model, prompts: Tokens, tokens: int, together: torch.profiler.profile) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as one_by_one:
        Sequential(model, tokens)(prompts)
    for name, found in (("one after the other", one_by_one), ("together", together)):
        print(name, found.key_averages().table(sort_by="self_cpu_time_total", row_limit=16), sep="\n", flush=True)


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = batching.arguments(__doc__)
    parser.add_argument("--ops", action="store_true", help="print the time of each op")
    options = parser.parse_args(argv)
    model, prompts = batching.make(options)
    steps = profiled_steps(model, prompts, options.tokens)
    print(breakdown(steps), flush=True)
    if options.ops:
        print_ops(model, prompts, options.tokens, steps.profiler)


if __name__ == "__main__":
    main()
