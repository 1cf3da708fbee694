"""Measures our ops and other implementations on a device of this machine: the CPU, or a Mac's GPU."""

import gc
import itertools
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ... import gpu_settings
from ...arguments import DTYPES
from ...random_weights import dequantized
from ..common.cli import has_transformers
from ..common.devices import check_device, free_memory
from .baselines import baselines, int4pack, linear, too_large
from .block import Block, Implementation, expert_bytes, fitted, plain, transformers
from .calls import (
    TOKENS,
    WHOLE,
    WORTH_A_LIMIT,
    Call,
    RandomTensors,
    calls_of,
    inputs,
    moved,
    wanted_formats,
    wanted_ops,
)
from .linear_attention import as_in_transformers
from .measure import Limits, seconds_each, synchronize
from .model_sizes import DEFAULT, MODELS
from .report import OURS_DENSE, Result

ops = torch.ops.moe_metal
CHECKED = 16  # tokens of each set whose results are compared
TOO_SLOW = 2.0  # seconds per call; a slower implementation is left out if it also takes 20 times as long as ours


class DeviceBench:
    """Measures our ops on a device of this machine. Subclasses add other implementations."""

    has_mlx = False  # tools/bench_mlx.py

    def __init__(self, options: Namespace):
        self.device, self.seconds = options.device, options.seconds
        check_device(self.device)
        name, whole = options.model or DEFAULT, bool(set(wanted_ops(options)) & set(WHOLE))
        free, tokens = free_memory(self.device), max(options.tokens or TOKENS[True])
        copies = 1 + self.has_mlx
        self.models = {}
        for dtype, format in itertools.product(options.dtypes, wanted_formats(options)):
            model = MODELS[name] if format == "dense" else MODELS[name].packed
            self.models[dtype, format] = fitted(model, dtype, free, tokens, copies, format) if whole else model
        self.calls = calls_of(options, self.models)
        self.notes = [
            f"{DTYPES[dtype]}{'' if format == 'dense' else f', {format}'}: {model.E} of {MODELS[name].E} experts: "
            f"{free / 2**30:.1f} GiB of free memory hold no more"
            for (dtype, format), model in self.models.items()
            if model.E < MODELS[name].E
        ]
        self.notes += self.missing() + tuned(self.device)
        self.limits = Limits(self.device, min(0.2, self.seconds))
        self.made: tuple[torch.dtype, str] | None = None  # the dtype and format of the tensors below
        self.noise: RandomTensors | None = None
        self.block: Block | None = None
        self.dense: Block | None = None  # the values of a packed block
        self.others: dict[str, Implementation] = {}

    def about(self) -> dict[str, object]:
        from ... import __version__, cpu_isa

        if self.device == "cpu":
            hardware = {"isa": cpu_isa, "threads": torch.get_num_threads()}
        else:
            hardware = {"gpu": f"{gpu_settings.gpu()}, {torch.backends.mps.get_core_count()} cores"}
        return {"torch_moe_metal": __version__, "torch": torch.__version__, "device": self.device} | hardware

    def missing(self) -> list[str]:
        """Notes about implementations that are not measured because they are not installed."""
        if all(call.packing or call.op not in WHOLE for call in self.calls) or has_transformers():
            return []
        return ["transformers is not installed: the same algorithms are measured in plain PyTorch"]

    def prepare(self, call: Call) -> None:
        """Make the weights in the call's dtype and format. The memory of the previous ones is freed first."""
        if self.made != (call.dtype, call.format):
            self.noise = self.block = self.dense = None
            self.others = {}
            gc.collect()
            self.noise = RandomTensors(self.device, call.dtype)
            self.made = call.dtype, call.format
        if call.op in WHOLE and self.block is None:
            self.block = Block.random(call.model, self.noise, call.packing)
            self.dense = self.block.dense() if call.packing else None
            self.others = self.other_blocks()

    def other_blocks(self) -> dict[str, Implementation]:
        """Other implementations of `self.block`."""
        if self.block.packing:
            return {}
        return transformers(self.block) if has_transformers() else plain(self.block)

    def functions_of(self, call: Call, sets: list[dict[str, Tensor]]) -> dict[str, Callable[[], object]]:
        """Our function and all others, by name."""
        return self.whole(call, sets) if call.op in WHOLE else of_op(call, sets)

    def measure(self, call: Call) -> Result:
        self.prepare(call)
        sets = [inputs(call, self.noise) for _ in range(call.sets)]
        functions = self.functions_of(call, sets)
        read = statistics.mean(self.bytes_read(call, s) for s in sets)
        result, ours = Result(call, read), functions["ours"]
        functions["ours"] = partial(time_first_call, ours, result, self.device)
        functions = agreeing(call, functions, result.failed)
        if "ours" not in functions:
            return result
        functions["ours"] = ours
        probes: dict[str, Callable[[], object]] = {}
        if result.bytes >= WORTH_A_LIMIT:
            probes = {result.kind: self.limits.probes[result.kind]}
        result.seconds = seconds_each(functions | probes, self.device, self.seconds)
        spent = {name: result.seconds.pop(name) for name in probes}
        result.limits = {name: self.limits.moved[name] / spent[name] / 1e9 for name in spent}
        return result

    def whole(self, call: Call, sets: list[dict[str, Tensor]]) -> dict[str, Callable[[], object]]:
        """Our block, or its experts alone, and other implementations."""
        one, functions = expert_bytes(call.model, call.dtype), {}
        for name, block in {"ours": self.block, OURS_DENSE: self.dense}.items():
            if block:
                functions[name] = in_turn(block if call.op == "block" else block.experts_only, sets)
        for name, other in self.others.items():
            if not too_large(name, call.T, call.model.K, one):
                theirs = [{key: other.convert(tensor) for key, tensor in s.items()} for s in map(for_baselines, sets)]
                functions[name] = in_turn(other.block if call.op == "block" else other.experts, theirs)
        return functions

    def bytes_read(self, call: Call, one_set: dict[str, Tensor]) -> int:
        read = moved(*one_set.values())
        if call.op == "experts":
            return read + self.block.bytes_read(one_set["ids"])
        if call.op == "block":
            _, ids = ops.gate(one_set["x"], **self.block.router, **self.block.routing)
            return read + self.block.bytes_read(ids) + self.block.other_bytes()
        return read


def tuned(device: str) -> list[str]:
    """A note about launch parameters that `tune` has saved for this GPU."""
    if device == "cpu" or not gpu_settings.is_built() or gpu_settings.current() == gpu_settings.defaults():
        return []
    settings = [f"{name} {n}" for name, n in gpu_settings.current().items() if n != gpu_settings.defaults()[name]]
    return [f"Tuned for this GPU: {', '.join(settings)}"]


def for_baselines(one_set: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs as a layer in plain PyTorch has them: ids in int64, weights in the activations' dtype."""
    if "kept" in one_set:
        return as_in_transformers(one_set)
    if "weights" not in one_set:
        return one_set
    dtype = next(t.dtype for name, t in one_set.items() if name in ("x", "slots"))
    found = one_set | {"weights": one_set["weights"].to(dtype)}
    return found | ({"ids": found["ids"].long()} if "ids" in found else {})


def in_turn(function: Callable[..., object], sets: list[dict]) -> Callable[[], object]:
    """A function that uses the next set of arguments at each call."""
    return next_of([partial(function, **one_set) for one_set in sets])


def next_of(functions: list[Callable[[], object]]) -> Callable[[], object]:
    """A function that calls the next one of `functions` at each call."""
    turns = itertools.cycle(functions)
    return lambda: next(turns)()


def of_op(call: Call, sets: list[dict[str, Tensor]]) -> dict[str, Callable[[], object]]:
    """Our op and its PyTorch baselines."""
    op, options, theirs = getattr(ops, call.op), call.options, [for_baselines(s) for s in sets]
    functions = {"ours": in_turn(partial(op, **options), sets)}
    if call.packing:
        return functions | packed_functions(call, sets)
    functions |= {name: in_turn(way, theirs) for name, way in baselines(call.op, options, call.shapes).items()}
    if call.op == "gate":
        functions["linear, our route"] = in_turn(linear_and_route(options), sets)
    return functions


def packed_functions(call: Call, sets: list[dict[str, Tensor]]) -> dict[str, Callable[[], object]]:
    """Our op and its PyTorch baselines on the same values as dense weights, and PyTorch's op for 4 bits."""
    dense_sets = [dequantized(call.op, s, call.packing, call.dtype) for s in sets]
    dense = of_op(replace(call, format="dense"), dense_sets)
    functions = {OURS_DENSE: dense.pop("ours")} | dense
    on_cpu = sets[0]["weight"].device.type == "cpu"
    if call.op == "linear" and call.format == "affine4" and call.dtype == torch.bfloat16 and on_cpu:
        functions["int4pack"] = next_of([int4pack(**s) for s in sets])
    return functions


def linear_and_route(routing: dict) -> Callable[..., object]:
    def run(select_bias=None, per_expert_scale=None, **arguments):
        return ops.route(linear(**arguments), select_bias, per_expert_scale, **routing)

    return run


def time_first_call(function: Callable[[], object], result: Result, device: str) -> object:
    """Calls it, and saves the time of the first call in `result`: that call compiles kernels."""
    synchronize(device)
    start = time.perf_counter()
    output = function()
    synchronize(device)
    result.first = result.first or time.perf_counter() - start
    return output


def agreeing(
    call: Call, functions: dict[str, Callable], failed: dict[str, str], most: float = 0.02
) -> dict[str, Callable]:
    """The functions that run and agree with ours. `failed` gets the reason for each of the others.

    Results agree if the median of the errors of all tokens is small, because a router in bf16 may select another expert
    if two scores are nearly equal. In-place ops are not compared, because their results differ from call to call. A
    function that takes seconds per call is left out, unless ours is slow too.
    """
    rows: dict[str, Tensor] = {}
    seconds: dict[str, float] = {}
    for name, function in functions.items():
        try:
            found: list[Tensor] = []
            for _ in range(1 if call.op.endswith("_") else max(1, 4 // call.T)):
                start = time.perf_counter()
                found.append(first_rows(function()))
                seconds[name] = time.perf_counter() - start
                if seconds[name] > max(TOO_SLOW, 20 * seconds["ours"]):
                    raise TimeoutError(f"{call.op} takes {seconds[name]:.0f} s a call")
            rows[name] = torch.cat(found)
            if not (call.op.endswith("_") or name == "ours"):
                error = (rows[name] - rows["ours"]).norm(dim=-1) / rows["ours"].norm(dim=-1)
                if not error.median() < most:
                    failed[name] = f"{call.op} differs from ours by {error.median():.1%}"
        except Exception as error:  # any error: the other rows must still be measured
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if name == "ours" and failed:
            return {}
    return {name: function for name, function in functions.items() if name not in failed}


def first_rows(result: object) -> Tensor:
    """The first tokens of the first output, on the CPU."""
    if result is None:  # in-place
        return torch.zeros(1, 1)
    first = result[0] if isinstance(result, tuple) else result
    if isinstance(first, Tensor):
        return first[:CHECKED].float().cpu()
    return torch.tensor(first[:CHECKED].astype(sys.modules["mlx.core"].float32).tolist())
