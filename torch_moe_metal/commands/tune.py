"""`python -m torch_moe_metal tune`: measures the launch parameters of csrc/mps/tuning.h, and saves those that win here.

Settings are tried one after the other, together with those kept so far. The values of a setting take turns in one
loop, on the calls that show a difference, at the sizes of your models. A value is kept if over all these calls it wins
more than the noise: three times the error estimated from the spread over the rounds, plus the difference between two
measurements of the current value, and at least 1 %. Finally all kept settings together must win against the defaults.

Settings do not change results, except `tensor_ops`: Apple's matmul2d rounds more often than our other kernels. Each of
its values is first compared with their results, at the sizes that are measured and in every format.
"""

import json
import math
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from .. import arguments, gpu_settings
from ..gpu_settings import Settings
from ..random_weights import FORMATS
from ..reference import tolerance
from .bench import dtype
from .bench.block import Block, fitted
from .bench.calls import Call, RandomTensors, inputs
from .bench.device_bench import in_turn
from .bench.measure import machine, rounds_each
from .bench.model_sizes import DEFAULT, MODELS, Model, of_config
from .common.cli import CannotRun
from .common.devices import check_device, free_memory
from .comparison import Comparison, compare

# ------------------------------------------------------------------------------------------------ the settings

Tokens = Callable[[Model], dict[str, tuple[int, ...]]]  # the T of each op


def tokens(**by_op: tuple[int, ...]) -> Tokens:
    return lambda _: by_op


def slots_per_expert(*shares: float, **by_op: tuple[int, ...]) -> Tokens:
    """For `experts`, the tokens that give each expert these shares of slots; for other ops, these numbers of tokens."""
    return lambda model: {"experts": tuple(math.ceil(share * model.E / model.K) for share in shares)} | by_op


@dataclass(frozen=True)
class Setting:
    name: str
    values: tuple[int, ...]
    tokens: Tokens  # of the calls that show it: any two of the values differ in one of these calls


DECODE = tokens(experts=(1, 4), linear=(1,))
SETTINGS = (
    Setting("decode_simdgroups", (1, 2, 4, 8), DECODE),
    Setting("target_simdgroups", (320, 640, 1280, 2560, 5120), DECODE),
    Setting("decode_max_slots_percent", (50, 100, 150, 200, 300, 400), slots_per_expert(0.75, 1.25, 1.75, 2.5, 3.5)),
    Setting("gate_up_pairs_percent", (0, 20, 50, 100), slots_per_expert(0.25, 0.5, 1)),
    Setting("down_pairs_percent", (0, 20, 50, 100), slots_per_expert(0.25, 0.5, 1)),
    Setting("few_tokens", (2, 4, 8, 12, 16, 24, 32), tokens(linear=(3, 6, 10, 14, 20, 28))),
    Setting("tokens_together", (1, 2, 4), tokens(linear=(2, 4, 8))),
    # The values of these two do not overlap, so any two of them are valid together.
    Setting("tile32_min_rows", (9, 12, 17, 25), slots_per_expert(10, 15, 20, linear=(10, 15, 20))),
    Setting("tile64_min_rows", (33, 49, 65, 97, 193), slots_per_expert(40, 56, 80, 128, linear=(40, 56, 80, 128))),
    Setting("tiles_per_band", (1, 2, 4, 8, 16, 32), tokens(experts=(512, 2048), linear=(512, 2048))),
    Setting("tensor_ops", (0, 8, 24, 64), slots_per_expert(12, 40, 96, linear=(12, 40, 96))),
    Setting("gate_min_tiles", (10, 24, 48, 80, 160), tokens(gate=(256, 512, 1024, 2048))),
    Setting("row_threads", (128, 256, 512, 1024), tokens(norm_add=(1, 32), residual_norm=(1, 8, 32))),
    Setting("attention_keys", (64, 128, 256, 512), tokens(attention=(1, 4))),
    # Several calls in a row have as many dispatches without a commit as in a model.
    Setting("commit_dispatches", (4, 8, 16, 32, 64), tokens(experts=(1, 4), residual_norm=(1,))),
    Setting("commit_threads", (2**18, 2**19, 2**20, 2**21, 2**22), tokens(experts=(64, 512, 2048))),
)
NAMES = [setting.name for setting in SETTINGS]


def calls_of(setting: Setting, models: dict[tuple[str, str], Model], dtype: torch.dtype) -> list[Call]:
    """`models`: by name and format of the weights. Ops without packed weights have one row for each model."""
    found = {}
    for (name, format), model in models.items():
        for op, several in setting.tokens(model).items():
            packed = format if arguments.takes_formats(op) else "dense"
            calls = [Call(op, name, model, T, dtype, packed) for T in several]
            found |= {str(call): call for call in calls}
    return [*found.values()]


# ------------------------------------------------------------------------------------------------ the search

#: Times a call under each candidate, in turn. Returns the seconds of every round, for each candidate.
Measure = Callable[[Call, Sequence[Settings]], list[list[float]]]
MAX_TOKENS = 2048  # of a call
STARTUP = 0.2  # estimated seconds in addition to the measurement, for long calls
ROUNDINGS = 4  # tolerance for the matrix units: more than twice the error of three or four more roundings


@dataclass
class Gain:
    """One call under the defaults and under all kept settings."""

    call: str
    before: float  # seconds
    after: float


@dataclass
class Result:
    defaults: Settings
    kept: Settings = field(default_factory=dict)  # without those that are the default
    tried: list[dict] = field(default_factory=list)
    together: Comparison | None = None
    rows: list[Gain] = field(default_factory=list)


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def search(
    calls: dict[str, list[Call]], settings: Sequence[Setting], defaults: Settings, measure: Measure, fixed: Settings
) -> Result:
    """`calls` has the calls that show each setting. `fixed` are the current values of settings that are not tried."""
    result = Result(defaults, dict(fixed))
    for place, setting in enumerate(settings, 1):
        current = (defaults | result.kept)[setting.name]
        others = [value for value in setting.values if value != current]
        if not others:
            continue
        shown = ", ".join(str(call) for call in calls[setting.name])
        log(f"{place} of {len(settings)}: {setting.name}: {current}, or {' '.join(map(str, others))}: {shown}")
        trials = [result.kept | {setting.name: value} for value in others]
        found = compare([measure(call, [result.kept, result.kept, *trials]) for call in calls[setting.name]])
        result.tried += [
            {"setting": setting.name, "current": current, "value": value, "won": each.won, "noise": each.noise}
            for value, each in zip(others, found, strict=True)
        ]
        best = max(range(len(found)), key=lambda i: found[i].won - found[i].noise)
        if found[best].wins:
            result.kept = trials[best]
        stays = "kept" if found[best].wins else "not enough"
        log(f"    {current} -> {others[best]}: {found[best]}: {stays}")
    return confirmed(result, calls, measure, fixed)


def confirmed(result: Result, calls: dict[str, list[Call]], measure: Measure, fixed: Settings) -> Result:
    """Compares all kept settings together with the previous ones, on all calls that show any of them."""
    won = {name: value for name, value in result.kept.items() if name not in fixed}
    concerned = {str(call): call for name in won for call in calls[name]}
    if not won:
        return result
    log(f"Finally {as_text(won)} together, on all their calls, against the defaults")
    measured = [measure(call, [fixed, fixed, result.kept]) for call in concerned.values()]
    (result.together,) = compare(measured)
    log(f"    {result.together}: {'kept' if result.together.wins else 'not enough, keeping the defaults'}")
    for call, (before, _, after) in zip(concerned, measured, strict=True):
        result.rows.append(Gain(call, statistics.median(before), statistics.median(after)))
    if not result.together.wins:
        result.kept = dict(fixed)
    return result


def as_text(settings: Settings) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


# ------------------------------------------------------------------------------------------------ this machine's GPU


class OnGpu:
    """Measures calls on mps."""

    device = "mps"

    def __init__(self, seconds: float):
        self.seconds = seconds  # for each candidate
        self.made: tuple | None = None
        self.block: Block | None = None

    def __call__(self, call: Call, candidates: Sequence[Settings]) -> list[list[float]]:
        function, before = self.function(call), gpu_settings.current()
        try:
            rounds = rounds_each(function_under(candidates, function), self.device, self.seconds * len(candidates))
        finally:
            gpu_settings.use(before)
        return [*rounds.values()]

    def function(self, call: Call) -> Callable[[], object]:
        noise = RandomTensors(self.device, call.dtype)
        sets = [inputs(call, noise) for _ in range(call.sets)]
        return in_turn(self.op(call, noise), sets)

    def op(self, call: Call, noise: RandomTensors) -> Callable[..., torch.Tensor]:
        if call.op != "experts":
            return partial(getattr(torch.ops.moe_metal, call.op), **call.options)
        made = (call.name, call.format, call.dtype)
        if self.made != made:
            self.block = None  # frees its memory first
            self.block, self.made = Block.random(call.model, noise, call.packing), made
        return self.block.experts_only

    def is_right(self, call: Call, settings: Settings) -> bool:
        """Whether each row of the result equals the default's, except for a few more roundings."""
        noise, before = RandomTensors(self.device, call.dtype), gpu_settings.current()
        op, arguments = self.op(call, noise), inputs(call, noise)
        try:
            results = []
            for each in ({}, settings):
                gpu_settings.use(each)
                results.append(op(**arguments).float())
        finally:
            gpu_settings.use(before)
        want, got = results
        error = (got - want).norm(dim=-1) / want.norm(dim=-1)
        return bool((error <= ROUNDINGS * tolerance(call.dtype, call.model.H)).all())  # NaN is not


def calls_to_check(setting: Setting, calls: list[Call]) -> list[Call]:
    """The calls on which its values must be right. For `tensor_ops` they cover each format, dtype and tile size, since
    each has its own kernel. `experts` runs the same kernels."""
    if setting.name != "tensor_ops":
        return calls
    tokens = sorted({call.T for call in calls if call.op == "linear"})
    every = product(FORMATS, (torch.float16, torch.bfloat16), tokens)
    more = [Call("linear", DEFAULT, MODELS[DEFAULT], T, dtype, format) for format, dtype, T in every]
    return [*calls, *(call for call in more if not call.packing or MODELS[DEFAULT].H % call.packing.whole_columns == 0)]


def without_wrong_values(setting: Setting, calls: list[Call], defaults: Settings, gpu: OnGpu) -> Setting:
    """The setting without the values with which the matrix units have wrong results."""
    if setting.name not in gpu_settings.PER_MACOS:
        return setting
    calls = calls_to_check(setting, calls)

    def is_right(value: int) -> bool:
        if value == defaults[setting.name] or all(gpu.is_right(call, {setting.name: value}) for call in calls):
            return True
        log(f"{setting.name} {value} is left out: its results are wrong on this Mac")
        return False

    return replace(setting, values=tuple(filter(is_right, setting.values)))


def function_under(candidates: Sequence[Settings], function: Callable[[], object]) -> dict[str, Callable[[], object]]:
    """The function under each candidate. Settings are changed only if the previous call had others."""
    now = None

    def call(index: int) -> None:
        nonlocal now
        if now != index:
            gpu_settings.use(candidates[index])
            now = index
        function()

    return {str(index): partial(call, index) for index in range(len(candidates))}


# ------------------------------------------------------------------------------------------------ the command


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        nargs="+",
        choices=list(MODELS),
        metavar="NAME",
        help=f"models with these sizes (default: {DEFAULT}): {', '.join(MODELS)}",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="models with the sizes in this folder's config.json",
    )
    parser.add_argument(
        "--formats", nargs="+", choices=list(FORMATS), default=["dense"], metavar="FORMAT",
        help=f"formats of the weights (default: dense): {', '.join(FORMATS)}",
    )  # fmt: skip
    parser.add_argument(
        "--dtype",
        type=dtype,
        default=torch.bfloat16,
        metavar="DTYPE",
        help="dtype of the activations: bf16 (default), f16, f32",
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=NAMES,
        default=NAMES,
        metavar="SETTING",
        help=f"which to try (default: all): {', '.join(NAMES)}",
    )
    parser.add_argument("--seconds", type=float, default=0.2, help="time for each alternative and call (default: 0.2)")
    parser.add_argument(
        "--reset", action="store_true", help="remove the settings saved for this GPU, of every torch version"
    )
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON instead of a table")


def run(options: Namespace) -> int:
    """0 if the settings were measured, whatever the result."""
    try:
        check_device("mps")
        if not gpu_settings.is_built():
            raise CannotRun("the package was built without its MPS backend; reinstall it on this Mac")
        if options.reset:
            return reset()
        models = wanted_models(options)
    except (CannotRun, OSError, ValueError) as reason:
        print(f"tune: nothing to tune: {reason}", file=sys.stderr)
        return 2
    return tune(options, models)


def reset() -> int:
    done = "settings removed" if gpu_settings.forget() else "no settings were saved"
    print(f"{gpu_settings.gpu()}: {done}; using the defaults")
    return 0


def wanted_models(options: Namespace) -> dict[tuple[str, str], Model]:
    """By name and format, with as many experts as fit in memory."""
    names = options.model or ([] if options.checkpoint else [DEFAULT])
    found = {name: MODELS[name] for name in names}
    for folder in options.checkpoint or []:
        found[folder.resolve().name] = of_config(json.loads((folder / "config.json").read_text()))
    free = free_memory("mps")
    return {
        (name, format): fitted(model if format == "dense" else model.packed, options.dtype, free, MAX_TOKENS, 1, format)
        for (name, model), format in product(found.items(), options.formats)
    }


@torch.no_grad()
def tune(options: Namespace, models: dict[tuple[str, str], Model]) -> int:
    settings = [setting for setting in SETTINGS if setting.name in options.settings]
    calls = {setting.name: calls_of(setting, models, options.dtype) for setting in settings}
    turns = sum(len(calls[setting.name]) * (len(setting.values) + 1) for setting in settings)
    minutes = max(1, round(turns * (options.seconds + STARTUP) / 60))
    defaults = gpu_settings.defaults()
    fixed = {n: v for n, v in gpu_settings.current().items() if v != defaults[n] and n not in options.settings}
    log(f"{gpu_settings.gpu()}, torch {torch.__version__}: {len(settings)} settings, about {minutes} minutes")
    gpu = OnGpu(options.seconds)
    settings = [without_wrong_values(setting, calls[setting.name], defaults, gpu) for setting in settings]
    result = search(calls, settings, defaults, gpu, fixed)
    if options.json:
        print(json.dumps(about(options, models) | asdict(result), indent=1))
    else:
        print(table(result))
    # Otherwise the check at first use turns the matrix units on.
    tried = {name: defaults[name] for name in gpu_settings.PER_MACOS if name in options.settings}
    try:
        log(f"Saved for {gpu_settings.gpu()} and torch {torch.__version__} in {gpu_settings.save(tried | result.kept)}")
    except OSError as reason:
        print(f"tune: not saved: {reason}", file=sys.stderr)
        return 1
    return 0


def about(options: Namespace, models: dict[tuple[str, str], Model]) -> dict[str, object]:
    from .. import __version__

    versions = {"torch_moe_metal": __version__, "torch": torch.__version__, "gpu": gpu_settings.gpu()}
    return {**machine(), **versions, "models": sorted({name for name, _ in models}), "formats": options.formats}


def table(result: Result) -> str:
    """The gain of each call, and the kept settings."""
    lines = [f"{'call':44} {'before, us':>10} {'tuned, us':>10} {'ratio':>8}"] if result.rows else []
    for row in result.rows:
        lines.append(f"{row.call:44} {row.before * 1e6:10.1f} {row.after * 1e6:10.1f} {row.before / row.after:8.2f}")
    if result.kept:
        return "\n".join([*lines, f"Kept: {as_text(result.kept)}"])
    return "\n".join([*lines, "Keeping the defaults: nothing wins more than the noise"])
