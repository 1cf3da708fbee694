"""Measures our ops, and everybody else's, on a device of this machine: the CPU, or a Mac's GPU."""

import gc
import itertools
import statistics
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from .. import tuning
from ..arguments import DTYPES
from ..models import DEFAULT, MODELS
from .block import Block, Implementation, expert_bytes, fitted, plain, transformers
from .calls import (
    TOKENS,
    WHOLE,
    WORTH_A_LIMIT,
    Call,
    Noise,
    Unfit,
    calls_of,
    inputs,
    moved,
    wanted_formats,
    wanted_ops,
)
from .measure import Limits, free_memory, seconds_each, synchronize
from .packed import dequantized
from .report import MLX, OURS_DENSE, Result
from .rivals import int4pack, linear, rivals, too_large

ops = torch.ops.moe_metal
CHECKED = 16  # tokens of each set whose results are compared
HOPELESS = 2.0  # seconds that one call may take of somebody who is 20 times slower than we are


def has_mlx() -> bool:
    return find_spec("mlx") is not None and find_spec("mlx.core") is not None


def has_transformers() -> bool:
    return find_spec("transformers") is not None


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"must be 1 or more, got {text}")
    return number


def add_device(parser: ArgumentParser) -> None:
    best = "mps" if torch.backends.mps.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "mps"), default=best, help=f"default: {best}, the best one here")


def check_device(device: str) -> None:
    if device == "mps" and not torch.backends.mps.is_available():
        from ..doctor import devices

        raise Unfit(f"--device mps: {dict(devices())['mps']}")


class Here:
    """Measures our ops on a device of this machine."""

    def __init__(self, options: Namespace):
        self.device, self.seconds = options.device, options.seconds
        check_device(self.device)
        name, whole = options.model or DEFAULT, bool(set(wanted_ops(options)) & set(WHOLE))
        free, tokens = free_memory(self.device), max(options.tokens or TOKENS[True])
        copies = 1 + has_mlx()
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
        self.notes += missing(self.calls) + tuned(self.device)
        self.limits = Limits(self.device, min(0.2, self.seconds))
        self.made: tuple[torch.dtype, str] | None = None  # the dtype and format of what follows
        self.noise: Noise | None = None
        self.block: Block | None = None
        self.dense: Block | None = None  # of a packed block's numbers
        self.others: dict[str, Implementation] = {}

    def about(self) -> dict[str, object]:
        from .. import __version__, cpu_isa

        if self.device == "cpu":
            there = {"isa": cpu_isa, "threads": torch.get_num_threads()}
        else:
            there = {"gpu": f"{tuning.gpu()}, {torch.backends.mps.get_core_count()} cores"}
        return {"torch_moe_metal": __version__, "torch": torch.__version__, "device": self.device} | there

    def prepare(self, call: Call) -> None:
        """The weights of the call's dtype and format; the ones before are given back first."""
        if self.made != (call.dtype, call.format):
            self.noise = self.block = self.dense = None
            self.others = {}
            gc.collect()
            self.noise = Noise(self.device, call.dtype)
            self.made = call.dtype, call.format
        if call.op in WHOLE and self.block is None:
            self.block = Block.random(call.model, self.noise, call.packing)
            if call.packing:
                self.dense = self.block.dense()
            else:
                self.others = transformers(self.block) if has_transformers() else plain(self.block)
            if has_mlx():
                from .mlx import mlx

                self.others |= mlx(self.block)

    def measure(self, call: Call) -> Result:
        self.prepare(call)
        sets = [inputs(call, self.noise) for _ in range(call.sets)]
        if call.op in WHOLE:
            functions = self.whole(call, sets)
        else:
            functions = of_op(call, sets)
        read = statistics.mean(self.bytes_read(call, s) for s in sets)
        result, ours = Result(call, read), functions["ours"]
        functions["ours"] = partial(noted, ours, result, self.device)
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
        """The block, or its experts alone, and everybody else's."""
        one, functions = expert_bytes(call.model, call.dtype), {}
        for name, block in {"ours": self.block, OURS_DENSE: self.dense}.items():
            if block:
                functions[name] = in_turn(block if call.op == "block" else block.chosen, sets)
        for name, other in self.others.items():
            if not too_large(name, call.T, call.model.K, one):
                theirs = [{key: other.take(tensor) for key, tensor in s.items()} for s in map(for_rivals, sets)]
                functions[name] = in_turn(other.block if call.op == "block" else other.experts, theirs)
        return functions

    def bytes_read(self, call: Call, one_set: dict[str, Tensor]) -> int:
        read = moved(*one_set.values())
        if call.op == "experts":
            return read + self.block.bytes_read(one_set["ids"])
        if call.op == "block":
            _, ids = ops.gate(one_set["x"], **self.block.router, **self.block.routing)
            return read + self.block.bytes_read(ids) + self.block.bytes_besides()
        return read


def tuned(device: str) -> list[str]:
    """What `tune` has found for this GPU."""
    if device == "cpu" or not tuning.is_built() or tuning.in_force() == tuning.defaults():
        return []
    numbers = [f"{name} {n}" for name, n in tuning.in_force().items() if n != tuning.defaults()[name]]
    return [f"Tuned for this GPU: {', '.join(numbers)}"]


def missing(calls: list[Call]) -> list[str]:
    """Who is not here to be measured against."""
    notes = []
    if any(call.op in WHOLE and not call.packing for call in calls) and not has_transformers():
        notes.append("transformers is not installed: its ways are measured in plain PyTorch")
    if any(call.of_mlx for call in calls) and not has_mlx():
        notes.append("MLX is not installed: not measured")
    return notes


def for_rivals(one_set: dict[str, Tensor]) -> dict[str, Tensor]:
    """As a layer of plain PyTorch has them: ids in int64, weights in the activations' dtype."""
    if "weights" not in one_set:
        return one_set
    dtype = next(t.dtype for name, t in one_set.items() if name in ("x", "slots"))
    found = one_set | {"weights": one_set["weights"].to(dtype)}
    return found | ({"ids": found["ids"].long()} if "ids" in found else {})


def in_turn(function: Callable[..., object], sets: list[dict]) -> Callable[[], object]:
    """Takes the next set of arguments at each call."""
    return next_of([partial(function, **one_set) for one_set in sets])


def next_of(functions: list[Callable[[], object]]) -> Callable[[], object]:
    """Calls the next one at each call."""
    turns = itertools.cycle(functions)
    return lambda: next(turns)()


def of_op(call: Call, sets: list[dict[str, Tensor]]) -> dict[str, Callable[[], object]]:
    """Our op, and others' ways to it."""
    op, options, theirs = getattr(ops, call.op), call.options, [for_rivals(s) for s in sets]
    functions = {"ours": in_turn(partial(op, **options), sets)}
    if call.packing:
        return functions | beside_packed(call, sets)
    functions |= {name: in_turn(way, theirs) for name, way in rivals(call.op, options).items()}
    if call.op == "gate":
        functions["linear, our route"] = in_turn(linear_and_route(options), sets)
    return functions


def beside_packed(call: Call, sets: list[dict[str, Tensor]]) -> dict[str, Callable[[], object]]:
    """Our op and PyTorch's ways on the same numbers dense, and who else can compute with so few bits."""
    dense_sets = [dequantized(call.op, s, call.packing, call.dtype) for s in sets]
    dense = of_op(replace(call, format="dense"), dense_sets)
    functions = {OURS_DENSE: dense.pop("ours")} | dense
    on_cpu = sets[0]["weight"].device.type == "cpu"
    if call.op == "linear" and call.format == "affine4" and call.dtype == torch.bfloat16 and on_cpu:
        functions["int4pack"] = next_of([int4pack(**s) for s in sets])
    if has_mlx():
        from .mlx import has_format, of_packed

        if has_format(call.packing):
            functions[MLX] = next_of([of_packed(call, s) for s in sets])
    return functions


def linear_and_route(routing: dict) -> Callable[..., object]:
    def run(select_bias=None, per_expert_scale=None, **arguments):
        return ops.route(linear(**arguments), select_bias, per_expert_scale, **routing)

    return run


def noted(function: Callable[[], object], result: Result, device: str) -> object:
    """Calls it, and notes how long the first call takes, which compiles the kernels that nobody has called before."""
    synchronize(device)
    start = time.perf_counter()
    output = function()
    synchronize(device)
    result.first = result.first or time.perf_counter() - start
    return output


def agreeing(
    call: Call, functions: dict[str, Callable], failed: dict[str, str], most: float = 0.02
) -> dict[str, Callable]:
    """Those that run and compute the same as ours: the others would be no rivals. Why they fail is noted in `failed`.

    The median over tokens counts, since a router in bf16 may take another expert where two are nearly alike. What works
    in place is left unchecked, for it differs call by call. Who takes seconds where we do not is left out, too.
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
                if seconds[name] > max(HOPELESS, 20 * seconds["ours"]):
                    raise TimeoutError(f"{call.op} takes {seconds[name]:.0f} s a call")
            rows[name] = torch.cat(found)
            if not (call.op.endswith("_") or name == "ours"):
                error = (rows[name] - rows["ours"]).norm(dim=-1) / rows["ours"].norm(dim=-1)
                if not error.median() < most:
                    failed[name] = f"{call.op} differs from ours by {error.median():.1%}"
        except Exception as error:  # whatever it is, the other rows must be measured
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if name == "ours" and failed:
            return {}
    return {name: function for name, function in functions.items() if name not in failed}


def first_rows(result: object) -> Tensor:
    """Of the first output, for the first tokens, on the CPU."""
    if result is None:  # all in place
        return torch.zeros(1, 1)
    first = result[0] if isinstance(result, tuple) else result
    if isinstance(first, Tensor):
        return first[:CHECKED].float().cpu()
    return torch.tensor(first[:CHECKED].astype(sys.modules["mlx.core"].float32).tolist())
