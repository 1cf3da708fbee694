"""The rows as a picture: time against bytes, both logarithmic, with the machine's limits as lines. SVG, by hand.

A filled point is ours, the ring above or below it the fastest rival. No point can lie below the lines, unless caches
held its bytes. A number leads from the point to the list beside the picture; a browser tells the same when one points.
The limits are named below the picture: in it, any place may be some row's.
"""

import os
from math import ceil, cos, floor, hypot, inf, log10, pi, sin
from pathlib import Path
from xml.sax.saxutils import escape

from ..arguments import DTYPES
from .calls import OPS, Unfit
from .report import Result

WIDTH, LEFT, TOP, PLOT_WIDTH, LINE = 1380, 84, 84, 800, 17
LIST = LEFT + PLOT_WIDTH + 36  # where the list begins
COLOURS = (
    "#4269d0", "#97bbf5", "#8a8f98", "#9c6b4e", "#c49a3a", "#e0762f", "#ff725c", "#d6568f", "#6cc5b0", "#3ca951",
    "#a463f2", "#1b2b4b",
)  # fmt: skip
Line = tuple[float, float, float, float]  # from x, y to x, y
Box = tuple[float, float, float, float]  # left, top, right, bottom
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


def colour_of(op: str) -> str:
    return COLOURS[OPS.index(op) % len(COLOURS)]


def check_place(file: Path) -> None:
    """Before anything is measured for it."""
    if file.suffix.lower() != ".svg":
        raise Unfit(f"--plot {file}: expected a name that ends with .svg, since that is what it draws")
    folder = file.absolute().parent
    if not folder.is_dir():
        raise Unfit(f"--plot {file}: no such folder: {folder}")
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise Unfit(f"--plot {file}: cannot be written")


class Axis:
    """A logarithmic axis that holds all values and a power of ten at least, from `start` to `end` in pixels."""

    def __init__(self, values: list[float], start: float, end: float):
        low, high = log10(min(values)), log10(max(values))
        margin = max(0.3, (1 - (high - low)) / 2)
        self.low, self.high = low - margin, high + margin
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        return self.start + (log10(value) - self.low) / (self.high - self.low) * (self.end - self.start)

    @property
    def decades(self) -> list[float]:
        return [10.0**power for power in range(ceil(self.low), floor(self.high) + 1)]


def named(value: float, units: tuple[str, ...]) -> str:
    """1000 of each unit are one of the next."""
    step = min(max(0, floor(log10(value) / 3 + 1e-9)), len(units) - 1)
    return f"{value / 1000**step:g} {units[step]}"


def text(x: float, y: float, content: str, style: str = "", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" {more}>{escape(content)}</text>'


def segment(x1: float, y1: float, x2: float, y2: float, style: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}" {more}/>'


def axes(across: Axis, up: Axis) -> list[str]:
    bottom, right = up.start, across.end
    parts = []
    for value in across.decades:
        x = across(value)
        parts += [segment(x, TOP, x, bottom, "grid")]
        parts += [text(x, bottom + 18, named(value, ("B", "kB", "MB", "GB", "TB")), "small", 'text-anchor="middle"')]
    for value in up.decades:
        y = up(value)
        parts += [segment(LEFT, y, right, y, "grid")]
        parts += [text(LEFT - 8, y + 4, named(value * 1e9, ("ns", "us", "ms", "s")), "small", 'text-anchor="end"')]
    parts.append(text((LEFT + right) / 2, bottom + 40, "bytes read and written", "", 'text-anchor="middle"'))
    middle = (TOP + bottom) / 2
    turned = f'text-anchor="middle" transform="rotate(-90 22 {middle:.1f})"'
    return [*parts, text(22, middle, "time of one call", "", turned)]


def limit_ends(speed: float, across: Axis, up: Axis) -> Line:
    """The part of the line time = bytes / speed that is in the picture: of none, the corner next to it."""

    def within(axis: Axis, power: float) -> float:
        return min(max(power, axis.low), axis.high)

    speed = log10(speed * 1e9)
    ends = [within(across, power + speed) for power in (up.low, up.high)]
    (x1, y1), (x2, y2) = ((across(10**end), up(10 ** within(up, end - speed))) for end in ends)
    return x1, y1, x2, y2


def out_of_reach(limits: dict[str, float], across: Axis, up: Axis) -> str:
    """In grey what lies below the fastest limit: no time for what comes from memory."""
    x1, y1, x2, y2 = limit_ends(max(limits.values()), across, up)
    corners = f"{x1:.1f},{y1:.1f} {x2:.1f},{y2:.1f} {across.end},{y2:.1f} {across.end},{up.start} {x1:.1f},{up.start}"
    return f'<polygon points="{corners}" fill="#f3f4f6"/>'


def key(limits: dict[str, float], y: float) -> list[str]:
    """What the marks are, and below that the limits, each behind a piece of its line."""
    parts = [
        text(LEFT, y, "filled: torch_moe_metal (circle bf16 or f16, square f32) · ring: the fastest rival", "small")
    ]
    for number, (name, speed) in enumerate(limits.items()):
        x = LEFT + 180 * number
        parts.append(segment(x, y + 18, x + 34, y + 18, f"limit {name}"))
        parts.append(text(x + 42, y + 22, f"{name} {speed:.4g} GB/s", "small limit-name"))
    return [*parts, text(LEFT + 180 * len(limits), y + 22, "grey: only caches are that fast", "small")]


def meets(line: Line, box: Box) -> bool:
    """Whether a part of the line, which may be a mere point, lies in the box."""
    (x1, y1, x2, y2), (left, top, right, bottom) = line, box
    first, last = 0.0, 1.0  # from end to end of the line
    for start, end, low, high in ((x1, x2, left, right), (y1, y2, top, bottom)):
        if (start <= low and end <= low) or (start >= high and end >= high):
            return False
        if start != end:
            entered, left_at = sorted(((low - start) / (end - start), (high - start) / (end - start)))
            first, last = max(first, entered), min(last, left_at)
    return first < last


def grown(box: Box, by: float) -> Box:
    left, top, right, bottom = box
    return left - by, top - by, right + by, bottom + by


class Labels:
    """Places for the numbers: near their points, on no mark, no line and no other number."""

    HIGH, MARK = 4.5, 5.5  # half of a number's height and of a mark's, with some air
    FARTHEST, CROSSED = 240, 30  # a leader's length; how much longer it may be to cross one mark or leader less
    AROUND = tuple((cos(part * pi / 12), -sin(part * pi / 12)) for part in range(24))

    def __init__(self, inside: Box, marks: list[tuple[float, float]], lines: list[Line]):
        self.inside, self.marks, self.lines = inside, marks, lines
        self.boxes: list[Box] = []
        self.leaders: list[Line] = []

    def place(self, x: float, y: float, digits: int) -> tuple[float, float]:
        """The middle of a number of so many digits: the point itself, should there be no place."""
        width, best, found = half_width(digits), inf, (x, y)
        for distance in range(11, self.FARTHEST, 3):
            if distance >= best:
                break
            for dx, dy in self.AROUND:
                at = x + distance * dx, y + distance * dy
                box = at[0] - width, at[1] - self.HIGH, at[0] + width, at[1] + self.HIGH
                if self.free(box) and not any(meets((x, y, *at), other) for other in self.boxes):
                    cost = distance + self.CROSSED * self.crossings(x, y, *at)
                    best, found = min((best, found), (cost, at))
        self.boxes.append((found[0] - width, found[1] - self.HIGH, found[0] + width, found[1] + self.HIGH))
        self.leaders.append((x, y, *found))
        return found

    def free(self, box: Box) -> bool:
        low, high, far, deep = self.inside
        if not (low < box[0] and box[2] < far and high < box[1] and box[3] < deep):
            return False
        (left, top, right, bottom), beside = grown(box, self.MARK), grown(box, 1.5)
        return not (
            any(left < x < right and top < y < bottom for x, y in self.marks)
            or any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in self.boxes)
            or any(meets(line, beside) for line in self.lines)
            or any(meets(leader, beside) for leader in self.leaders)
        )

    def crossings(self, *leader: float) -> int:
        """How many leaders it crosses, and how many marks but those that its own one touches."""
        x, y, _, _ = leader
        crossed = sum(crosses(leader, other) for other in self.leaders)
        return crossed + sum(
            meets(leader, (mx - 4, my - 4, mx + 4, my + 4)) and max(abs(mx - x), abs(my - y)) > 2 * self.MARK - 2
            for mx, my in self.marks
        )


def crosses(a: Line, b: Line) -> bool:
    def side(line: Line, x: float, y: float) -> bool:
        return (line[2] - line[0]) * (y - line[1]) > (line[3] - line[1]) * (x - line[0])

    return side(a, *b[:2]) != side(a, *b[2:]) and side(b, *a[:2]) != side(b, *a[2:])


def half_width(digits: int) -> float:
    """Of a number, with some air."""
    return 3.3 * digits + 1.5


def leader(x: float, y: float, to_x: float, to_y: float, digits: int) -> list[str]:
    """From a point to where its number begins; none to a number right beside it."""
    length = hypot(to_x - x, to_y - y)
    if length <= 16:
        return []
    part = 1 - max(8, half_width(digits)) / length
    return [segment(x, y, x + part * (to_x - x), y + part * (to_y - y), "leader")]


def points(results: list[Result], limits: dict[str, float], across: Axis, up: Axis) -> list[str]:
    places = [(across(r.bytes), up(r.ours)) for r in results]
    rivals = [min(r.rivals, key=r.rivals.get, default=None) for r in results]
    rings = [None if rival is None else up(r.rivals[rival]) for r, rival in zip(results, rivals, strict=True)]
    pairs = [(x, y, x, ring) for (x, y), ring in zip(places, rings, strict=True) if ring is not None]
    lines = pairs + [limit_ends(speed, across, up) for speed in limits.values()]
    lines += [(across(value), TOP, across(value), up.start) for value in across.decades]
    lines += [(LEFT, up(value), across.end, up(value)) for value in up.decades]
    labels = Labels((LEFT, TOP, across.end, up.start), places + [pair[2:] for pair in pairs], lines)
    under, over, numbers = [], [], []
    for number, (r, (x, y), rival, ring) in enumerate(zip(results, places, rivals, rings, strict=True), 1):
        colour = colour_of(r.call.op)
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
        digits = len(str(number))
        lx, ly = labels.place(x, y, digits)
        numbers += leader(x, y, lx, ly, digits)
        numbers.append(text(lx, ly + 3.5, str(number), "number"))
    return under + over + numbers


def listed(results: list[Result]) -> list[str]:
    """The rows by number: what they are, our time, and how many times as long the fastest rival takes."""
    columns = ((0, "", 'text-anchor="end"'), (60, "op", ""), (290, "T", 'text-anchor="end"'), (304, "dtype", ""))
    columns += ((414, "us", 'text-anchor="end"'), (464, "rival x", 'text-anchor="end"'))
    parts = [text(LIST - 40 + x, TOP - 8, name, "small", more) for x, name, more in columns]
    for number, r in enumerate(results, 1):
        y = TOP + LINE * (number - 0.3)
        best = min(r.rivals.values(), default=None)
        ratio = "" if best is None else f"{best / r.ours:.2f}"
        cells = (str(number), r.call.label, str(r.call.T), DTYPES[r.call.dtype], f"{r.ours * 1e6:.1f}", ratio)
        parts.append(f'<circle cx="{LIST + 8}" cy="{y - 4:.1f}" r="4" fill="{colour_of(r.call.op)}"/>')
        for (x, _, more), cell in zip(columns, cells, strict=True):
            parts.append(text(LIST - 40 + (34 if x == 0 else x), y, cell, "", more))
    return parts


def picture(results: list[Result], limits: dict[str, float], about: dict[str, object]) -> str:
    """An SVG file's text. Rows without a time are left out."""
    results = [r for r in results if r.ours is not None]
    bottom = TOP + max(620, LINE * len(results))
    height = bottom + 104
    across = Axis([r.bytes for r in results] or [1e6], LEFT, LEFT + PLOT_WIDTH)
    up = Axis([time for r in results for time in (r.ours, *r.rivals.values())] or [1e-3], bottom, TOP)
    models = ", ".join(dict.fromkeys(r.call.name for r in results))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
        text(LEFT, 34, f"torch_moe_metal: {models}", "title"),
        text(LEFT, 56, " · ".join(f"{name} {value}" for name, value in about.items()), "small"),
        out_of_reach(limits, across, up),
        *axes(across, up),
        *(segment(*limit_ends(speed, across, up), f"limit {name}") for name, speed in limits.items()),
        *points(results, limits, across, up),
        *key(limits, bottom + 66),
        *listed(results),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
