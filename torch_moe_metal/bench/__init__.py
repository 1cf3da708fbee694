"""`python -m torch_moe_metal bench`: how long every op takes, beside the machine's own limits and beside its rivals.

Each row is measured against what computes the same: for an op, the ways that one writes in plain PyTorch; for a whole
block or its experts, transformers' implementations and MLX, where they are installed; for packed weights, our own op on
the same numbers dense, MLX, and what PyTorch has. All take turns in one loop, so that what slows the machine slows them
alike, and medians are told. Everyone walks through the same sets of inputs, so
that the weights read come out of memory. Outputs are made at each call and gone before the next, as in a model.
"""

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path

import torch

from .. import tuning
from ..arguments import DTYPES
from ..models import DEFAULT, MODELS
from . import report
from .calls import DECODING, OPS, WORTH_A_LIMIT, Unfit
from .here import Here, add_device, has_mlx, positive
from .measure import keep_freed_memory, machine
from .packed import FORMATS
from .plot import check_place, picture
from .report import Progress, Result

DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
__all__ = ["OPS", "add_arguments", "run"]


def dtype(text: str) -> torch.dtype:
    if text not in DTYPES_BY_NAME:
        raise ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(DTYPES_BY_NAME)})")
    return DTYPES_BY_NAME[text]


def add_arguments(parser: ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument(
        "--model",
        choices=list(MODELS),
        metavar="NAME",
        help=f"whose sizes (default: {DEFAULT}), one of {', '.join(MODELS)}; if given, only its block and experts",
    )
    parser.add_argument("--ops", nargs="+", choices=OPS, metavar="OP", help=f"which rows: {', '.join(OPS)}")
    parser.add_argument("--tokens", nargs="+", type=positive, metavar="T", help="how many tokens (default: by op)")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        type=dtype,
        default=[torch.bfloat16, torch.float32],
        metavar="DTYPE",
        help=", ".join(DTYPES_BY_NAME),
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=list(FORMATS),
        metavar="FORMAT",
        help=f"of the weights (default: dense): {', '.join(FORMATS)}; affine in groups of 64 columns. If given without "
        f"--ops and --model, only {', '.join(DECODING)}",
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="how long each row is measured (default: 0.5)")
    parser.add_argument("--threads", type=positive, metavar="N", help="of the CPU (default: PyTorch's choice)")
    parser.add_argument("--json", action="store_true", help="print JSON and no table")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw time against bytes, with memory's limits")


@torch.no_grad()
def run(options: Namespace, measurer: Callable[[Namespace], Here] = Here) -> int:
    """0 when all that was asked for could be measured and is right. `measurer` may be somebody else's, with the
    attributes and methods of `Here` that are used on this page."""
    if options.threads:
        torch.set_num_threads(options.threads)
    keep_freed_memory()
    try:
        if options.plot:
            check_place(options.plot)
        there = measurer(options)
    except Unfit as reason:
        print(f"bench: {reason}", file=sys.stderr)
        return 2
    shown = {"x dense": any(c.packing for c in there.calls), "x MLX": has_mlx() and any(c.of_mlx for c in there.calls)}
    ratios = [name for name, wanted in shown.items() if wanted]
    if not options.json:
        print(heading(there), report.head(ratios), sep="\n\n", flush=True)
    results, progress = [], Progress(len(there.calls), wanted=not options.json)
    for done, call in enumerate(there.calls):
        progress.show(done, str(call))
        results.append(there.measure(call))
        progress.clear()
        if not options.json:
            print(report.line(results[-1], ratios), flush=True)
    finish(there, results, options)
    return 1 if any(result.ours is None for result in results) else 0


def heading(there) -> str:
    speeds = there.limits.gb_per_s.items()
    limits = ", ".join(f"{name} {speed:.1f} GB/s ({there.limits.names[name]})" for name, speed in speeds)
    lines = [
        "   ".join(f"{key} {value}" for key, value in there.about().items()),
        f"Memory: {limits}.",
        "GB/s: bytes read and written, each once, over the median time; of the experts' weights, those of the experts",
        "chosen; of packed ones, data, scales and offsets. of limit: that over the speed at which this machine reads",
        f"memory (rows that write more than a tenth: copies it), measured {there.limits.when}; for rows that move",
        f"{WORTH_A_LIMIT >> 20} MiB or more.",
    ]
    return "\n".join(lines + there.notes)


def finish(there, results: list[Result], options: Namespace) -> None:
    if options.json:
        limits = {f"{name}_gb_per_s": speed for name, speed in there.limits.gb_per_s.items()}
        about = {**machine(), **there.about(), **limits, "notes": there.notes}
        if about["device"] == "mps" and tuning.is_built():
            about["tuning"] = tuning.about()
        found = about | {"rows": [result.as_json() for result in results]}
        print(json.dumps(found, indent=1))
    else:
        for note in report.footnotes(results):
            print(note)
    if options.plot:
        options.plot.write_text(picture(results, there.limits.gb_per_s, there.about()))
        print(f"drawn: {options.plot}", file=sys.stderr)
