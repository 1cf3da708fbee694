"""The rows as a picture: time against bytes, both logarithmic, with the machine's limits as lines. SVG, by hand.

A filled point is ours, the ring above or below it the fastest rival. No point can lie below the lines, unless caches
held its bytes. A number leads from the point to the list beside the picture; a browser tells the same when one points.
"""

from math import atan2, ceil, degrees, floor, log10
from xml.sax.saxutils import escape

from ..arguments import DTYPES
from .calls import OPS
from .report import Result

WIDTH, LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT, LINE = 1380, 84, 84, 800, 620, 17
LIST = LEFT + PLOT_WIDTH + 36  # where the list begins
COLOURS = (
    "#4269d0", "#97bbf5", "#8a8f98", "#9c6b4e", "#c49a3a", "#e0762f", "#ff725c", "#d6568f", "#6cc5b0", "#3ca951",
    "#a463f2", "#1b2b4b",
)  # fmt: skip
STYLE = """
text { font: 12px -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #333 }
.title { font-size: 19px; font-weight: 600; fill: #111 }
.small { font-size: 11px; fill: #666 }
.number { font-size: 10px; fill: #333; text-anchor: middle }
.grid { stroke: #e6e8ec; stroke-width: 1 }
.leader { stroke: #9aa0a8; stroke-width: 0.7 }
.rival { fill: #fff; stroke-width: 1.6 }
.link { stroke-width: 1.2; stroke-opacity: 0.45 }
.limit { stroke: #222; stroke-width: 1.6 }
.copy { stroke-dasharray: 7 5 }
"""


class Axis:
    """A logarithmic axis of whole decades, from `start` to `end` in pixels."""

    def __init__(self, values: list[float], start: float, end: float):
        self.low, self.high = floor(log10(min(values)) - 0.1), ceil(log10(max(values)) + 0.1)
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        return self.start + (log10(value) - self.low) / (self.high - self.low) * (self.end - self.start)

    @property
    def decades(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]


def named(value: float, units: tuple[str, ...]) -> str:
    """1000 of each unit are one of the next."""
    step = min(max(0, floor(log10(value) / 3 + 1e-9)), len(units) - 1)
    return f"{value / 1000**step:g} {units[step]}"


def text(x: float, y: float, content: str, style: str = "", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" {more}>{escape(content)}</text>'


def segment(x1: float, y1: float, x2: float, y2: float, style: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}" {more}/>'


def axes(across: Axis, up: Axis) -> list[str]:
    bottom = TOP + PLOT_HEIGHT
    parts = []
    for value in across.decades:
        x = across(value)
        parts += [segment(x, TOP, x, bottom, "grid")]
        parts += [text(x, bottom + 18, named(value, ("B", "kB", "MB", "GB", "TB")), "small", 'text-anchor="middle"')]
    for value in up.decades:
        y = up(value)
        parts += [segment(LEFT, y, LEFT + PLOT_WIDTH, y, "grid")]
        parts += [text(LEFT - 8, y + 4, named(value * 1e9, ("ns", "us", "ms", "s")), "small", 'text-anchor="end"')]
    parts.append(text(LEFT + PLOT_WIDTH / 2, bottom + 40, "bytes read and written", "", 'text-anchor="middle"'))
    turned = f'text-anchor="middle" transform="rotate(-90 22 {TOP + PLOT_HEIGHT / 2})"'
    return [*parts, text(22, TOP + PLOT_HEIGHT / 2, "time of one call", "", turned)]


def limit_lines(limits: dict[str, float], across: Axis, up: Axis) -> list[str]:
    """time = bytes / bandwidth, and in grey what lies below the fastest: out of reach for what comes from memory."""
    parts = []

    def ends(speed: float) -> tuple[float, float, float, float]:
        """The part of the line that is in the picture."""
        first, last = max(across.decades[0], up.decades[0] * speed), min(across.decades[-1], up.decades[-1] * speed)
        return across(first), up(first / speed), across(last), up(last / speed)

    x1, y1, x2, y2 = ends(max(limits.values()) * 1e9)
    right, bottom = LEFT + PLOT_WIDTH, TOP + PLOT_HEIGHT
    corners = f"{x1:.1f},{y1:.1f} {x2:.1f},{y2:.1f} {right},{y2:.1f} {right},{bottom} {x1:.1f},{bottom}"
    parts.append(f'<polygon points="{corners}" fill="#f3f4f6"/>')
    for name, speed in limits.items():
        parts.append(segment(*ends(speed * 1e9), f"limit {name}"))
    x, y = x1 + 0.3 * (x2 - x1), y1 + 0.3 * (y2 - y1)  # in the grey, where no point is
    turned = f'text-anchor="middle" transform="rotate({degrees(atan2(y2 - y1, x2 - x1)):.1f} {x:.1f} {y:.1f})"'
    told = ", ".join(f"{name} {speed:.4g} GB/s{' (dashed)' * (name == 'copy')}" for name, speed in limits.items())
    return [*parts, text(x, y + 21, told, "", turned)]


class Labels:
    """Places for the numbers: near their points, and on nothing else."""

    def __init__(self, taken: list[tuple[float, float]]):
        self.taken = taken

    def place(self, x: float, y: float) -> tuple[float, float]:
        for distance in (11, 14, 18, 23, 29, 36, 44, 53, 63):
            for dx, dy in ((1, -0.5), (1, 0.6), (-1, -0.5), (-1, 0.6), (0.2, -1), (0.2, 1), (1.2, 0), (-1.2, 0)):
                at = x + dx * distance, y + dy * distance
                inside = LEFT + 6 < at[0] < LEFT + PLOT_WIDTH - 6 and TOP + 6 < at[1] < TOP + PLOT_HEIGHT - 6
                if inside and all(abs(at[0] - tx) > 13 or abs(at[1] - ty) > 10 for tx, ty in self.taken):
                    self.taken.append(at)
                    return at
        return x + 11, y - 6


def points(results: list[Result], across: Axis, up: Axis) -> list[str]:
    places = [(across(r.bytes), up(r.ours)) for r in results]
    rivals = [min((n for n in r.seconds if n != "ours"), key=r.seconds.get, default=None) for r in results]
    rings = [None if rival is None else up(r.seconds[rival]) for r, rival in zip(results, rivals, strict=True)]
    labels = Labels(places + [(x, ring) for (x, _), ring in zip(places, rings, strict=True) if ring is not None])
    under, over, numbers = [], [], []
    for number, (r, (x, y), rival, ring) in enumerate(zip(results, places, rivals, rings, strict=True), 1):
        colour = COLOURS[OPS.index(r.call.op)]
        told = f"<title>{escape(f'{number}: {r.call}, {r.ours * 1e6:.1f} us')}</title>"
        if ring is not None:
            faster = escape(f"{number}: {rival}, {r.seconds[rival] * 1e6:.1f} us")
            under.append(segment(x, y, x, ring, "link", f'stroke="{colour}"'))
            circle = f'<circle cx="{x:.1f}" cy="{ring:.1f}" r="3.6" class="rival" stroke="{colour}">'
            under.append(f"{circle}<title>{faster}</title></circle>")
        mark = "rect" if DTYPES[r.call.dtype] == "f32" else "circle"
        where = f'x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"'
        where = where if mark == "rect" else f'cx="{x:.1f}" cy="{y:.1f}" r="4.6"'
        over.append(f'<{mark} {where} class="ours" fill="{colour}">{told}</{mark}>')
        lx, ly = labels.place(x, y)
        numbers += [segment(x, y, lx, ly, "leader")] if abs(lx - x) + abs(ly - y) > 22 else []
        numbers.append(text(lx, ly + 3.5, str(number), "number"))
    return under + over + numbers


def listed(results: list[Result]) -> list[str]:
    """The rows by number: what they are, our time, and how many times as long the fastest rival takes."""
    columns = ((0, "", 'text-anchor="end"'), (60, "op", ""), (290, "T", 'text-anchor="end"'), (304, "dtype", ""))
    columns += ((414, "us", 'text-anchor="end"'), (464, "rival x", 'text-anchor="end"'))
    parts = [text(LIST - 40 + x, TOP - 8, name, "small", more) for x, name, more in columns]
    for number, r in enumerate(results, 1):
        y = TOP + LINE * (number - 0.3)
        best = min((time for name, time in r.seconds.items() if name != "ours"), default=None)
        ratio = "" if best is None else f"{best / r.ours:.2f}"
        cells = (str(number), r.call.op, str(r.call.T), DTYPES[r.call.dtype], f"{r.ours * 1e6:.1f}", ratio)
        parts.append(f'<circle cx="{LIST + 8}" cy="{y - 4:.1f}" r="4" fill="{COLOURS[OPS.index(r.call.op)]}"/>')
        for (x, _, more), cell in zip(columns, cells, strict=True):
            parts.append(text(LIST - 40 + (34 if x == 0 else x), y, cell, "", more))
    return parts


def picture(results: list[Result], limits: dict[str, float], about: dict[str, object]) -> str:
    """An SVG file's text. Rows without a time are left out."""
    results = [r for r in results if r.ours is not None]
    height = max(TOP + PLOT_HEIGHT + 84, TOP + LINE * len(results) + 40)
    across = Axis([r.bytes for r in results] or [1e6], LEFT, LEFT + PLOT_WIDTH)
    times = [time for r in results for time in r.seconds.values()] or [1e-3]
    up = Axis(times, TOP + PLOT_HEIGHT, TOP)
    models = ", ".join(dict.fromkeys(r.call.name for r in results))
    key = "filled: torch_moe_metal (circle bf16 or f16, square f32) · ring: the fastest rival"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
        text(LEFT, 34, f"torch_moe_metal: {models}", "title"),
        text(LEFT, 56, " · ".join(f"{name} {value}" for name, value in about.items()), "small"),
        *limit_lines(limits, across, up),
        *axes(across, up),
        *points(results, across, up),
        text(LEFT, TOP + PLOT_HEIGHT + 66, key, "small"),
        *listed(results),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
