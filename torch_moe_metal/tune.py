"""`python -m torch_moe_metal tune`: measures the numbers that depend on the GPU, and keeps those that win here.

Each number of csrc/mps/tuning.h is tried in turn, with what was kept before it in force: its alternatives take turns in
one loop with the value that holds, on the calls that show it, in the sizes of your models. An alternative is kept if
over all those calls it wins more than the noise: three times the error that the spread over the rounds leaves, and what
two turns of one value differ by; 1 % at least. Last, all that was kept must win so together against the defaults. None
changes what is computed. But `matrix_units` and `tensor_ops` hand products to PyTorch and to Apple's matmul2d, and
round more often. Each of their values is first compared with our other kernels' results, in the sizes that are
measured, and `tensor_ops` in every format.
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

from . import arguments, tuning
from .bench import dtype
from .bench.block import Block, fitted
from .bench.calls import Call, Noise, Unfit, inputs
from .bench.here import check_device, in_turn
from .bench.measure import free_memory, machine, rounds_each
from .bench.packed import FORMATS
from .models import DEFAULT, MODELS, Model, of_config
from .reference import tolerance
from .tuning import Numbers

# ------------------------------------------------------------------------------------------------ what is tried

Tokens = Callable[[Model], dict[str, tuple[int, ...]]]  # the T of each op


def tokens(**by_op: tuple[int, ...]) -> Tokens:
    return lambda _: by_op


def slots_per_expert(*shares: float, **by_op: tuple[int, ...]) -> Tokens:
    """Of `experts` so many tokens that each expert has this share of slots, and of other ops these."""
    return lambda model: {"experts": tuple(math.ceil(share * model.E / model.K) for share in shares)} | by_op


@dataclass(frozen=True)
class Number:
    name: str
    values: tuple[int, ...]
    tokens: Tokens  # of the calls that show it: between any two of the values there is one that they treat differently


DECODE = tokens(experts=(1, 4), linear=(1,))
NUMBERS = (
    Number("decode_simdgroups", (1, 2, 4, 8), DECODE),
    Number("enough_simdgroups", (320, 640, 1280, 2560, 5120), DECODE),
    Number("decode_slots", (50, 100, 150, 200, 300, 400), slots_per_expert(0.75, 1.25, 1.75, 2.5, 3.5)),
    Number("few_tokens", (2, 4, 8, 12, 16, 24, 32), tokens(linear=(3, 6, 10, 14, 20, 28))),
    Number("tokens_together", (1, 2, 4), tokens(linear=(2, 4, 8))),
    # The two shares do not overlap, so that any two of them go together.
    Number("tile32_share", (9, 12, 17, 25), slots_per_expert(10, 15, 20, linear=(10, 15, 20))),
    Number("tile64_share", (33, 49, 65, 97, 193), slots_per_expert(40, 56, 80, 128, linear=(40, 56, 80, 128))),
    Number("band", (1, 2, 4, 8, 16, 32), tokens(experts=(512, 2048), linear=(512, 2048))),
    Number("matrix_units", (0, 8, 24, 64), slots_per_expert(12, 40, 96)),
    Number("tensor_ops", (0, 8, 24, 64), slots_per_expert(12, 40, 96, linear=(12, 40, 96))),
    Number("gate_tiles", (10, 24, 48, 80, 160), tokens(gate=(256, 512, 1024, 2048))),
    Number("row_threads", (128, 256, 512, 1024), tokens(norm_add=(1, 32), residual_norm=(1, 8, 32))),
    Number("attention_keys", (64, 128, 256, 512), tokens(attention=(1, 4))),
    # Calls in a row are as many dispatches without a commit as in a model.
    Number("commit_dispatches", (4, 8, 16, 32, 64), tokens(experts=(1, 4), residual_norm=(1,))),
    Number("commit_threads", (2**18, 2**19, 2**20, 2**21, 2**22), tokens(experts=(64, 512, 2048))),
)
NAMES = [number.name for number in NUMBERS]


def calls_of(number: Number, models: dict[tuple[str, str], Model], dtype: torch.dtype) -> list[Call]:
    """`models`: by name and format of the weights. Ops without weights in formats have one row for each model."""
    found = {}
    for (name, format), model in models.items():
        for op, several in number.tokens(model).items():
            packed = format if arguments.takes_formats(op) else "dense"
            calls = [Call(op, name, model, T, dtype, packed) for T in several]
            found |= {str(call): call for call in calls}
    return [*found.values()]


# ------------------------------------------------------------------------------------------------ the search

#: The times of one call under each of these numbers, which take turns: for each of them, seconds in every round.
Measure = Callable[[Call, Sequence[Numbers]], list[list[float]]]
MOST = 2048  # tokens of a call
START = 0.2  # seconds besides, with which long calls are meant
LEAST = 0.01  # of the time: a win that is worth a number of one's own
ROUNDINGS = 4  # of a result on the matrix units, more than twice what three or four roundings more cost


@dataclass(frozen=True)
class Comparison:
    """What some numbers win against those that hold. Per call the median counts of what a round's two times differ by.
    Noise is three times the error that the spread over the rounds gives the mean of the medians, and what two turns of
    the numbers that hold differ by; 1 % at least."""

    won: float  # of the time, the mean over all calls
    noise: float

    @property
    def wins(self) -> bool:
        return self.won > self.noise

    def __str__(self) -> str:
        return f"{abs(self.won):.1%} {'faster' if self.won > 0 else 'slower'}, noise {self.noise:.1%}"


def logs(rounds: list[float], base: list[float]) -> tuple[float, float]:
    """The median logarithm of the ratio of two times in one round, and its error."""
    ratios = [math.log(time / other) for time, other in zip(rounds, base, strict=True)]
    middle = statistics.median(ratios)
    spread = 1.4826 * statistics.median(abs(ratio - middle) for ratio in ratios)  # of a normal distribution
    return middle, 1.2533 * spread / math.sqrt(len(ratios))


def compare(measured: list[list[list[float]]]) -> list[Comparison]:
    """By call and by numbers, of which the first two are the same: those that hold. -> of all from the third on"""

    def mean(index: int) -> tuple[float, float]:
        each = [logs(rounds[index], rounds[0]) for rounds in measured]
        return statistics.mean(m for m, _ in each), math.hypot(*(error for _, error in each)) / len(each)

    twin, _ = mean(1)
    found = []
    for index in range(2, len(measured[0])):
        won, error = mean(index)
        found.append(Comparison(1 - math.exp(won), max(LEAST, abs(twin) + 3 * error)))
    return found


@dataclass
class Won:
    """One call under the defaults and under all numbers kept."""

    call: str
    before: float  # seconds
    after: float


@dataclass
class Result:
    defaults: Numbers
    kept: Numbers = field(default_factory=dict)  # those that are not the default's
    tried: list[dict] = field(default_factory=list)
    together: Comparison | None = None
    rows: list[Won] = field(default_factory=list)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def search(
    calls: dict[str, list[Call]], numbers: Sequence[Number], defaults: Numbers, measure: Measure, held: Numbers
) -> Result:
    """The calls are by the number that they show. `held`: what stays in force of the numbers that are not tried."""
    result = Result(defaults, dict(held))
    for place, number in enumerate(numbers, 1):
        holds = (defaults | result.kept)[number.name]
        others = [value for value in number.values if value != holds]
        if not others:
            continue
        shown = ", ".join(str(call) for call in calls[number.name])
        say(f"{place} of {len(numbers)}: {number.name}: {holds}, or {' '.join(map(str, others))}: {shown}")
        trials = [result.kept | {number.name: value} for value in others]
        found = compare([measure(call, [result.kept, result.kept, *trials]) for call in calls[number.name]])
        result.tried += [
            {"number": number.name, "held": holds, "value": value, "won": each.won, "noise": each.noise}
            for value, each in zip(others, found, strict=True)
        ]
        best = max(range(len(found)), key=lambda i: found[i].won - found[i].noise)
        if found[best].wins:
            result.kept = trials[best]
        stays = "kept" if found[best].wins else "not enough"
        say(f"    {holds} -> {others[best]}: {found[best]}: {stays}")
    return checked(result, calls, measure, held)


def checked(result: Result, calls: dict[str, list[Call]], measure: Measure, held: Numbers) -> Result:
    """All that was kept together against what held before, on all calls that show any of it."""
    won = {name: value for name, value in result.kept.items() if name not in held}
    concerned = {str(call): call for name in won for call in calls[name]}
    if not won:
        return result
    say(f"At last {words(won)} together, on all their calls, against the defaults")
    measured = [measure(call, [held, held, result.kept]) for call in concerned.values()]
    (result.together,) = compare(measured)
    say(f"    {result.together}: {'kept' if result.together.wins else 'not enough, the defaults stay'}")
    for call, (before, _, after) in zip(concerned, measured, strict=True):
        result.rows.append(Won(call, statistics.median(before), statistics.median(after)))
    if not result.together.wins:
        result.kept = dict(held)
    return result


def words(numbers: Numbers) -> str:
    return ", ".join(f"{name} {value}" for name, value in numbers.items())


# ------------------------------------------------------------------------------------------------ this machine's GPU


class OnGpu:
    """Measures calls on mps."""

    device = "mps"

    def __init__(self, seconds: float):
        self.seconds = seconds  # for each of the numbers that take turns
        self.made: tuple | None = None
        self.block: Block | None = None

    def __call__(self, call: Call, settings: Sequence[Numbers]) -> list[list[float]]:
        function, before = self.function(call), tuning.in_force()
        try:
            rounds = rounds_each(under(settings, function), self.device, self.seconds * len(settings))
        finally:
            tuning.use(before)
        return [*rounds.values()]

    def function(self, call: Call) -> Callable[[], object]:
        noise = Noise(self.device, call.dtype)
        sets = [inputs(call, noise) for _ in range(call.sets)]
        return in_turn(self.op(call, noise), sets)

    def op(self, call: Call, noise: Noise) -> Callable[..., torch.Tensor]:
        if call.op != "experts":
            return partial(getattr(torch.ops.moe_metal, call.op), **call.options)
        made = (call.name, call.format, call.dtype)
        if self.made != made:
            self.block = None  # its memory is given back first
            self.block, self.made = Block.random(call.model, noise, call.packing), made
        return self.block.chosen

    def is_right(self, call: Call, numbers: Numbers) -> bool:
        """Whether each row of the result is the default's, but for rounding a few times more."""
        noise, before = Noise(self.device, call.dtype), tuning.in_force()
        op, arguments = self.op(call, noise), inputs(call, noise)
        try:
            results = []
            for each in ({}, numbers):
                tuning.use(each)
                results.append(op(**arguments).float())
        finally:
            tuning.use(before)
        want, got = results
        error = (got - want).norm(dim=-1) / want.norm(dim=-1)
        return bool((error <= ROUNDINGS * tolerance(call.dtype, call.model.H)).all())  # NaN is not


def checks(number: Number, calls: list[Call]) -> list[Call]:
    """On which calls its values have to be right. `tensor_ops` has a kernel for each format and dtype, which it uses in
    all of them; so each is checked, for as many tokens as there are sizes of tiles. `experts` runs the same kernels."""
    if number.name != "tensor_ops":
        return calls
    tokens = sorted({call.T for call in calls if call.op == "linear"})
    every = product(FORMATS, (torch.float16, torch.bfloat16), tokens)
    more = [Call("linear", DEFAULT, MODELS[DEFAULT], T, dtype, format) for format, dtype, T in every]
    return [*calls, *(call for call in more if not call.packing or MODELS[DEFAULT].H % call.packing.whole_columns == 0)]


def right(number: Number, calls: list[Call], defaults: Numbers, gpu: OnGpu) -> Number:
    """Without the values by which the matrix units have other results than our other kernels."""
    if number.name not in tuning.FOREIGN:
        return number
    calls = checks(number, calls)

    def holds(value: int) -> bool:
        if value == defaults[number.name] or all(gpu.is_right(call, {number.name: value}) for call in calls):
            return True
        say(f"{number.name} {value} is left out: its results are wrong on this Mac")
        return False

    return replace(number, values=tuple(filter(holds, number.values)))


def under(settings: Sequence[Numbers], function: Callable[[], object]) -> dict[str, Callable[[], object]]:
    """The function under each of these numbers, which are set where others hold."""
    now = None

    def call(index: int) -> None:
        nonlocal now
        if now != index:
            tuning.use(settings[index])
            now = index
        function()

    return {str(index): partial(call, index) for index in range(len(settings))}


# ------------------------------------------------------------------------------------------------ the command


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        nargs="+",
        choices=list(MODELS),
        metavar="NAME",
        help=f"whose sizes (default: {DEFAULT}): {', '.join(MODELS)}",
    )
    parser.add_argument(
        "--checkpoint", type=Path, nargs="+", metavar="FOLDER", help="whose config.json gives the sizes"
    )
    parser.add_argument(
        "--formats", nargs="+", choices=list(FORMATS), default=["dense"], metavar="FORMAT",
        help=f"of the weights (default: dense): {', '.join(FORMATS)}",
    )  # fmt: skip
    parser.add_argument(
        "--dtype",
        type=dtype,
        default=torch.bfloat16,
        metavar="DTYPE",
        help="of the activations: bf16 (default), f16, f32",
    )
    parser.add_argument(
        "--numbers",
        nargs="+",
        choices=NAMES,
        default=NAMES,
        metavar="NUMBER",
        help=f"which (default: all): {', '.join(NAMES)}",
    )
    parser.add_argument("--seconds", type=float, default=0.2, help="for each alternative and call (default: 0.2)")
    parser.add_argument("--reset", action="store_true", help="forget what is kept for this GPU, of every torch version")
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON, and no table")


def run(options: Namespace) -> int:
    """0 when the numbers were measured, whatever won."""
    try:
        check_device("mps")
        if not tuning.is_built():
            raise Unfit("the package was built without its MPS backend; reinstall it on this Mac")
        if options.reset:
            return reset()
        models = wanted_models(options)
    except (Unfit, OSError, ValueError) as reason:
        print(f"tune: nothing to tune: {reason}", file=sys.stderr)
        return 2
    return tune(options, models)


def reset() -> int:
    print(f"{tuning.gpu()}: {'forgotten' if tuning.forget() else 'nothing was kept'}; the defaults hold from now on")
    return 0


def wanted_models(options: Namespace) -> dict[tuple[str, str], Model]:
    """By name and format, with as many experts as memory holds."""
    names = options.model or ([] if options.checkpoint else [DEFAULT])
    found = {name: MODELS[name] for name in names}
    for folder in options.checkpoint or []:
        found[folder.resolve().name] = of_config(json.loads((folder / "config.json").read_text()))
    free = free_memory("mps")
    return {
        (name, format): fitted(model if format == "dense" else model.packed, options.dtype, free, MOST, 1, format)
        for (name, model), format in product(found.items(), options.formats)
    }


@torch.no_grad()
def tune(options: Namespace, models: dict[tuple[str, str], Model]) -> int:
    numbers = [number for number in NUMBERS if number.name in options.numbers]
    calls = {number.name: calls_of(number, models, options.dtype) for number in numbers}
    turns = sum(len(calls[number.name]) * (len(number.values) + 1) for number in numbers)
    minutes = max(1, round(turns * (options.seconds + START) / 60))
    defaults = tuning.defaults()
    held = {n: v for n, v in tuning.in_force().items() if v != defaults[n] and n not in options.numbers}
    say(f"{tuning.gpu()}, torch {torch.__version__}: {len(numbers)} numbers, some {minutes} minutes")
    gpu = OnGpu(options.seconds)
    numbers = [right(number, calls[number.name], defaults, gpu) for number in numbers]
    result = search(calls, numbers, defaults, gpu, held)
    if options.json:
        print(json.dumps(about(options, models) | asdict(result), indent=1))
    else:
        print(table(result))
    try:
        say(f"For {tuning.gpu()} and torch {torch.__version__}, in {tuning.keep(result.kept)}")
    except OSError as reason:
        print(f"tune: not kept: {reason}", file=sys.stderr)
        return 1
    return 0


def about(options: Namespace, models: dict[tuple[str, str], Model]) -> dict[str, object]:
    from . import __version__

    versions = {"torch_moe_metal": __version__, "torch": torch.__version__, "gpu": tuning.gpu()}
    return {**machine(), **versions, "models": sorted({name for name, _ in models}), "formats": options.formats}


def table(result: Result) -> str:
    """What was won, call by call, and what is kept."""
    lines = [f"{'call':44} {'before, us':>10} {'tuned, us':>10} {'ratio':>8}"] if result.rows else []
    for row in result.rows:
        lines.append(f"{row.call:44} {row.before * 1e6:10.1f} {row.after * 1e6:10.1f} {row.before / row.after:8.2f}")
    if result.kept:
        return "\n".join([*lines, f"Kept: {words(result.kept)}"])
    return "\n".join([*lines, "The defaults stay: nothing wins more than the noise"])
