"""Results as a table and as JSON."""

import json
from dataclasses import dataclass, field

from ...arguments import DTYPES
from .calls import Call
from .model_sizes import MODELS

OURS_DENSE = "ours, dense"  # our own op on the values of packed weights, as dense weights
MLX = "mlx"
RATIOS = {"x dense": OURS_DENSE, "x MLX": MLX}  # columns in addition to that of PyTorch


@dataclass
class Result:
    """One row: our time, those of other implementations, and the memory bandwidth measured in turn with them."""

    call: Call
    read: float = 0.0  # bytes read, each counted once; the mean over the sets of inputs
    seconds: dict[str, float] = field(default_factory=dict)  # by name; ours is "ours"
    limits: dict[str, float] = field(default_factory=dict)  # GB/s by kind, if the row moves enough bytes
    failed: dict[str, str] = field(default_factory=dict)  # by name: the reason why an implementation is left out
    first: float | None = None  # seconds of our first call, including compilation

    @property
    def ours(self) -> float | None:
        return self.seconds.get("ours")

    @property
    def bytes(self) -> float:
        return self.read + self.call.written

    @property
    def kind(self) -> str:
        """The bandwidth that limits it: reads if it writes less than a tenth of its bytes, else copies."""
        return "read" if self.call.written < 0.1 * self.bytes else "copy"

    @property
    def of_limit(self) -> float | None:
        speed = self.limits.get(self.kind)
        return self.bytes / self.ours / 1e9 / speed if speed and self.ours else None

    @property
    def others(self) -> dict[str, float]:
        """The times of all other implementations."""
        return {name: time for name, time in self.seconds.items() if name not in ("ours", OURS_DENSE)}

    def fastest(self) -> str | None:
        """The fastest PyTorch implementation."""
        return min((name for name in self.others if name != MLX), key=self.seconds.__getitem__, default=None)

    def ratio(self, name: str | None) -> float | None:
        return self.seconds[name] / self.ours if name in self.seconds and self.ours else None

    @property
    def shape(self) -> str:
        m, size = self.call.model, self.call.size
        sizes = "".join(f" {letter}={size(letter)[0]}" for letter in "EKNHIAJDVSC" if letter in self.call.letters)
        if m.E < MODELS[self.call.name].E:  # limited by memory
            sizes = sizes.replace(f" E={m.E}", f" E={m.E}/{MODELS[self.call.name].E}")
        return f"T={self.call.T}{sizes}" + (f" S={m.S}" if self.call.op == "block" and m.S else "")

    def as_json(self) -> dict[str, object]:
        best = self.fastest()
        found = {
            "op": self.call.op,
            "model": self.call.name,
            "T": self.call.T,
            "dtype": DTYPES[self.call.dtype],
            "format": self.call.format,
            "shape": self.shape,
            "us": self.ours and self.ours * 1e6,
            "first_us": self.first and self.first * 1e6,
            "bytes": self.bytes,
            "flops": self.call.flops,
            "gb_per_s": self.ours and self.bytes / self.ours / 1e9,
            "gflop_per_s": self.ours and self.call.flops / self.ours / 1e9,
            "limit": self.kind,
            "limit_gb_per_s": self.limits.get(self.kind),
            "of_limit": self.of_limit,
            "fastest_pytorch": best,
            "x_pytorch": self.ratio(best),
            "x_dense": self.ratio(OURS_DENSE),
            "x_mlx": self.ratio(MLX),
            "baselines_us": {name: time * 1e6 for name, time in self.seconds.items() if name != "ours"},
        }
        return found | ({"failed": self.failed} if self.failed else {})


def json_of(found: dict[str, object]) -> str:
    """JSON with one line for each element of a list or an object in it: a row is one line."""

    def lines(value: object) -> str:
        if isinstance(value, list) and value:
            return "[\n" + ",\n".join(f"  {json.dumps(one)}" for one in value) + "\n ]"
        if isinstance(value, dict) and value:
            items = (f"  {json.dumps(key)}: {json.dumps(one)}" for key, one in value.items())
            return "{\n" + ",\n".join(items) + "\n }"
        return json.dumps(value)

    return "{\n" + ",\n".join(f" {json.dumps(key)}: {lines(value)}" for key, value in found.items()) + "\n}"


# ------------------------------------------------------------------------------------------------ the table


def cell(value: float | None, form: str, width: int) -> str:
    return f"{'' if value is None else format(value, form):>{width}}"


def head(ratios: list[str]) -> str:
    """`ratios`: which of RATIOS have a column."""
    columns = f"{'op':28} {'shape':36} {'dtype':>5} {'format':>7} {'us':>10} {'GB/s':>7} {'of limit':>9} "
    return f"{columns}{''.join(f'{name:>9}' for name in ratios)}{'x PyTorch':>10}  fastest of PyTorch"


def line(result: Result, ratios: list[str]) -> str:
    call = result.call
    start = f"{call.op:28} {result.shape:36} {DTYPES[call.dtype]:>5} {call.format:>7}"
    if result.ours is None:
        return f"{start} FAILED: {result.failed['ours']}"
    best = result.fastest()
    of_limit = "" if result.of_limit is None else f"{result.of_limit:.0%} {result.kind}"
    return (
        f"{start} {result.ours * 1e6:10.1f} {result.bytes / result.ours / 1e9:7.1f} {of_limit:>9} "
        f"{''.join(cell(result.ratio(RATIOS[name]), '.2f', 9) for name in ratios)}"
        f"{cell(result.ratio(best), '.2f', 10)}  {best or ''}"
    )


def footnotes(results: list[Result]) -> list[str]:
    """The implementations that were left out, each reason once."""
    notes: dict[tuple[str, str], int] = {}
    for result in results:
        for name, why in result.failed.items():
            notes[name, why] = notes.get((name, why), 0) + 1
    return [f"{name}: {why} ({count} row{'s' * (count > 1)})" for (name, why), count in notes.items()]
