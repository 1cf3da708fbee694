"""`python -m torch_moe_metal bench`: times of every op, compared with the memory bandwidth and with other
implementations.

An op is compared with several ways to write it in plain PyTorch; a block or its experts with transformers, if it is
installed; packed weights with our own op on the same values as dense weights. `python tools/bench_mlx.py` in a checkout
adds MLX. All implementations take turns in one loop, so that a slow phase of the machine affects all of them, and the
medians are reported. All use the same sets of inputs, which are large enough that weights are read from memory. As in a
model, each call allocates its outputs, and they are freed before the next call.
"""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable

import torch

from ... import gpu_settings
from ...arguments import DTYPES
from ...random_weights import FORMATS
from ..common.cli import CannotRun, positive
from ..common.devices import add_device
from ..common.progress import Progress, minutes
from . import report
from .calls import DECODING, OPS, WORTH_A_LIMIT
from .device_bench import DeviceBench
from .measure import keep_freed_memory, machine
from .model_sizes import DEFAULT, MODELS
from .report import Result

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
        help=f"the model whose sizes are used (default: {DEFAULT}): {', '.join(MODELS)}. If given, only its block and "
        "experts are measured",
    )
    parser.add_argument("--ops", nargs="+", choices=OPS, metavar="OP", help=f"the rows to measure: {', '.join(OPS)}")
    parser.add_argument(
        "--tokens", nargs="+", type=positive, metavar="T", help="numbers of tokens (default: depends on the op)"
    )
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
        help=f"formats of the weights (default: dense): {', '.join(FORMATS)}; affine has groups of 64 columns. If "
        f"given without --ops and --model, only {', '.join(DECODING)} are measured",
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="measuring time of each row (default: 0.5)")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: PyTorch's choice)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


@torch.no_grad()
def run(options: Namespace, measurer: Callable[[Namespace], DeviceBench] = DeviceBench) -> int:
    """Measure and print all rows. Returns 0 if all could be measured with correct results.

    `measurer` makes an object with the attributes and methods of `DeviceBench` that this module uses."""
    if options.threads:
        torch.set_num_threads(options.threads)
    keep_freed_memory()
    try:
        bench = measurer(options)
    except CannotRun as reason:
        print(f"bench: {reason}", file=sys.stderr)
        return 2
    rows, least = len(bench.calls), minutes(len(bench.calls) * options.seconds)
    print(f"bench: {rows} rows, which take at least {least} minutes (fewer: --ops, --tokens)", file=sys.stderr)
    ratios = ["x dense"] * any(call.packing for call in bench.calls) + ["x MLX"] * bench.has_mlx
    if not options.json:
        print(heading(bench), report.head(ratios), sep="\n\n", flush=True)
    results, progress = [], Progress(len(bench.calls), wanted=not options.json)
    for done, call in enumerate(bench.calls):
        progress.show(done, str(call))
        results.append(bench.measure(call))
        progress.clear()
        if not options.json:
            print(report.line(results[-1], ratios), flush=True)
    finish(bench, results, options)
    return 1 if any(result.ours is None for result in results) else 0


def heading(bench) -> str:
    speeds = bench.limits.gb_per_s.items()
    limits = ", ".join(f"{name} {speed:.1f} GB/s ({bench.limits.names[name]})" for name, speed in speeds)
    lines = [
        "   ".join(f"{key} {value}" for key, value in bench.about().items()),
        f"Memory: {limits}.",
        "GB/s: bytes read and written, each counted once, divided by the median time. Of the experts' weights, only",
        "those of selected experts count; packed weights include scales and offsets. of limit: this speed divided by",
        "the read bandwidth of this machine (the copy bandwidth if a row writes more than a tenth), measured",
        f"{bench.limits.when}, for rows that move {WORTH_A_LIMIT >> 20} MiB or more.",
    ]
    return "\n".join(lines + bench.notes)


def finish(bench, results: list[Result], options: Namespace) -> None:
    if options.json:
        limits = {f"{name}_gb_per_s": speed for name, speed in bench.limits.gb_per_s.items()}
        about = {**machine(), **bench.about(), **limits, "notes": bench.notes}
        if about["device"] == "mps" and gpu_settings.is_built():
            about["tuning"] = gpu_settings.about()
        found = about | {"rows": [result.as_json() for result in results]}
        print(report.json_of(found))
    else:
        for note in report.footnotes(results):
            print(note)
