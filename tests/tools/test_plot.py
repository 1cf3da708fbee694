"""The picture of `bench --plot`: what is written in it can be read, and where it goes is looked at first."""

import argparse
import math
import os
import random
import re
from math import prod
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from torch_moe_metal.__main__ import main
from torch_moe_metal.bench.calls import EXPERTS, OPS, WHOLE, Call, calls_of
from torch_moe_metal.bench.plot import picture
from torch_moe_metal.bench.report import Result
from torch_moe_metal.models import DEFAULT, MODELS

LIMITS = {"read": 21.3, "copy": 17.8}
FONT = {"title": 19, "small": 11, "number": 10}  # px, by the first word of the class; else 12


def results(tokens: list[int] | None, seed: int) -> list[Result]:
    """Every op's rows, with times as a CPU takes them: small calls a fixed time, those out of caches less than memory
    allows, a prefill its flops."""
    noise = random.Random(seed)
    options = argparse.Namespace(
        model=None, ops=None, formats=None, tokens=tokens, dtypes=[torch.bfloat16, torch.float32]
    )
    found = []
    for call in calls_of(options, {(dtype, "dense"): MODELS[DEFAULT] for dtype in options.dtypes}):
        result = Result(call, bytes_read(call))
        speed = 200e9 if result.bytes < 20e6 else 22e9
        ours = (2e-6 + max(result.bytes / speed, call.flops / 1e12)) * noise.uniform(1, 1.3)
        result.seconds = {"ours": ours, "plain": ours * noise.uniform(1.05, 6), "other": ours * noise.uniform(2, 12)}
        found.append(result)
    return found


def bytes_read(call: Call) -> float:
    m, size = call.model, call.dtype.itemsize
    chosen = m.E * (1 - (1 - m.K / m.E) ** call.T) if call.op in WHOLE else 0
    own = sum(prod(call.size(letters)) for name, letters in call.shapes.items() if name not in EXPERTS)
    return size * (own + chosen * 3 * m.H * m.I)


class Text:
    """Where a text of the picture is: a box, turned around a point."""

    def __init__(self, element: ElementTree.Element):
        self.words, self.classes = element.text, element.get("class").split()
        size = FONT.get(self.classes[0] if self.classes else "", 12)
        width = (0.64 if self.words.isdigit() else 0.6) * size * len(self.words)  # in a wide font
        anchor = "middle" if "number" in self.classes else element.get("text-anchor")
        x, y = float(element.get("x")), float(element.get("y"))
        left = x - width * {None: 0, "middle": 0.5, "end": 1}[anchor]
        self.box = left, y - 0.74 * size, left + width, y + (0 if self.words.isdigit() else 0.2 * size)
        turn = re.match(r"rotate\((\S+) (\S+) (\S+)\)", element.get("transform", "rotate(0 0 0)"))
        angle, *self.centre = map(float, turn.groups())
        self.angle = math.radians(angle)

    def turned(self, points: torch.Tensor, angle: float) -> torch.Tensor:
        cos, sin = math.cos(angle), math.sin(angle)
        return (points - torch.tensor(self.centre)) @ torch.tensor([[cos, sin], [-sin, cos]]) + torch.tensor(
            self.centre
        )

    @property
    def points(self) -> torch.Tensor:
        left, top, right, bottom = self.box
        columns = torch.linspace(left, right, 1 + len(self.words))
        return self.turned(torch.cartesian_prod(columns, torch.linspace(top, bottom, 5)), self.angle)

    def covers(self, points: torch.Tensor, margin: float = 0.0) -> bool:
        x, y = self.turned(points, -self.angle).T
        left, top, right, bottom = self.box
        return bool(((left - margin < x) & (x < right + margin) & (top - margin < y) & (y < bottom + margin)).any())


class Picture:
    """The texts of a picture, its lines as points at most 1 px apart, and the middles of its marks."""

    def __init__(self, svg: str):
        elements = [(e.tag.split("}")[1], e) for e in ElementTree.fromstring(svg).iter()]
        self.texts = [Text(e) for tag, e in elements if tag == "text" and e.text]
        self.lines = [self.line(e) for tag, e in elements if tag == "line"]
        self.marks = torch.tensor([self.middle(e) for _, e in elements if e.get("class") in ("ours", "rival")])

    @staticmethod
    def line(element: ElementTree.Element) -> torch.Tensor:
        x1, y1, x2, y2 = (float(element.get(name)) for name in ("x1", "y1", "x2", "y2"))
        steps = 2 + int(math.dist((x1, y1), (x2, y2)))
        return torch.stack([torch.linspace(x1, x2, steps), torch.linspace(y1, y2, steps)], dim=-1)

    @staticmethod
    def middle(element: ElementTree.Element) -> tuple[float, float]:
        if element.get("cx"):
            return float(element.get("cx")), float(element.get("cy"))
        return float(element.get("x")) + 4, float(element.get("y")) + 4


@pytest.mark.parametrize("tokens, seed", [([1, 64, 4096], 0), ([1, 64, 4096], 1), (None, 2)])
def test_what_is_written_can_be_read(tokens: list[int] | None, seed: int):
    """No number and no limit's name lies on a mark or on a line, and no text on another."""
    rows = results(tokens, seed)
    drawn = Picture(picture(rows, LIMITS, {"device": "cpu", "threads": 2}))
    numbers = [text for text in drawn.texts if "number" in text.classes]
    limits = [text for text in drawn.texts if "GB/s" in text.words]
    assert len(rows) >= 60 and {row.call.op for row in rows} == set(OPS)
    assert [text.words for text in numbers] == [str(number + 1) for number in range(len(rows))]
    assert all(any(f"{name} {speed}" in text.words for text in limits) for name, speed in LIMITS.items())
    lines = torch.cat(drawn.lines)
    for text in numbers + limits:
        assert not text.covers(drawn.marks, margin=4.5), f"{text.words} lies on a mark"
        assert not text.covers(lines), f"{text.words} lies on a line"
    points = [text.points for text in drawn.texts]
    lengths = torch.tensor([len(own) for own in points])
    everywhere, owner = torch.cat(points), torch.arange(len(points)).repeat_interleave(lengths)
    for number, text in enumerate(drawn.texts):
        assert not text.covers(everywhere[owner != number]), f"{text.words} lies on another text"


@pytest.mark.parametrize("bytes, seconds", [(1e3, 1e-3), (5e6, 1e-6), (2e8, 1e-2)])
def test_limits_stay_in_the_picture(bytes: float, seconds: float):
    """Also where all rows are far above them, or below."""
    row = Result(Call("route", DEFAULT, MODELS[DEFAULT], 1), bytes, {"ours": seconds})
    svg = picture([row], LIMITS, {})
    (corners,) = re.findall(r'<polygon points="([^"]*)"', svg)
    xs, ys = zip(*(map(float, corner.split(",")) for corner in corners.split()), strict=True)
    assert min(xs) >= 84 and max(xs) <= 884 and min(ys) >= 84 and max(ys) <= 704
    assert [text.words for text in Picture(svg).texts if "number" in text.classes] == ["1"]


def test_where_it_goes_is_looked_at_before_anything_is_measured(monkeypatch, tmp_path: Path, capsys):
    monkeypatch.setattr("torch_moe_metal.bench.Here", lambda _: pytest.fail("measured"))
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    missing, locked = tmp_path / "missing" / "roofline.svg", tmp_path / "locked.svg"
    monkeypatch.setattr(os, "access", lambda place, _: place != tmp_path)  # root may write everywhere
    for file, said in (
        (missing, f"no such folder: {missing.parent}"),
        (folder, "cannot be written"),
        (locked, "cannot be written"),
        (tmp_path / "x.png", "expected a name that ends with .svg, since that is what it draws"),
        (tmp_path / "x", "expected a name that ends with .svg, since that is what it draws"),
    ):
        assert main(["bench", "--plot", str(file)]) == 2
        assert capsys.readouterr().err == f"bench: --plot {file}: {said}\n"
