"""`python -m torch_moe_metal bench`: how long every op takes, beside the machine's own limits and beside its rivals.

Each row is measured against what computes the same: for an op, the ways that one writes in plain PyTorch; for a whole
block or its experts, transformers' implementations and MLX, where they are installed. All take turns in one loop, so
that what slows the machine slows them alike, and medians are told. Everyone walks through the same sets of inputs, so
that the weights read come out of memory. Outputs are made at each call and gone before the next, as in a model.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path

import torch

from . import report
from .calls import OPS, WHOLE, WORTH_A_LIMIT, Unfit
from .here import Here, has_mlx
from .measure import keep_freed_memory
from .plot import check_place, picture
from .report import Progress, Result

DEVICES = ("cpu", "mps", "cuda-translated")
__all__ = ["DEVICES", "OPS", "run"]


def translated(options: Namespace):
    """What measures the translated shaders on an NVIDIA GPU: tests/gpu/run.py of this checkout."""
    folder = Path(__file__).resolve().parents[2] / "tests" / "gpu"
    if not (folder / "run.py").exists():
        raise Unfit("--device cuda-translated needs a checkout of torch_moe_metal: tests/gpu is not here")
    if not torch.cuda.is_available():
        raise Unfit("--device cuda-translated needs an NVIDIA GPU and a torch that is built for it")
    if options.recording is None or not (options.recording / "bench.json").exists():
        raise Unfit("--device cuda-translated needs --recording FOLDER: what `python tests/gpu/record.py FOLDER` wrote")
    sys.path.insert(0, str(folder))
    import run as replayer

    return replayer.Translated(options)


@torch.no_grad()
def run(options: Namespace) -> int:
    """0 when all that was asked for could be measured and is right."""
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.keep_memory and not keep_freed_memory():
        print("bench: --keep-memory is for glibc's malloc, which is not here", file=sys.stderr)
        return 2
    try:
        if options.plot:
            check_place(options.plot)
        there = translated(options) if options.device == "cuda-translated" else Here(options)
    except Unfit as reason:
        print(f"bench: {reason}", file=sys.stderr)
        return 2
    with_mlx = options.device != "cuda-translated" and has_mlx() and any(c.op in WHOLE for c in there.calls)
    if not options.json:
        print(heading(there), report.head(with_mlx), sep="\n\n", flush=True)
    results, progress = [], Progress(len(there.calls), wanted=not options.json)
    for done, call in enumerate(there.calls):
        progress.show(done, str(call))
        results.append(there.measure(call))
        progress.clear()
        if not options.json:
            print(report.line(results[-1], with_mlx), flush=True)
    finish(there, results, options)
    return 1 if any(result.ours is None for result in results) else 0


def heading(there) -> str:
    speeds = there.limits.gb_per_s.items()
    limits = ", ".join(f"{name} {speed:.1f} GB/s ({there.limits.names[name]})" for name, speed in speeds)
    lines = [
        "   ".join(f"{key} {value}" for key, value in there.about().items()),
        f"Memory: {limits}.",
        "GB/s: bytes read and written, each once, over the median time; of the experts' weights, those of the experts",
        "chosen. of limit: that over the speed at which this machine reads memory (rows that write more than a tenth:",
        f"copies it), measured {there.limits.when}; for rows that move {WORTH_A_LIMIT >> 20} MiB or more.",
    ]
    return "\n".join(lines + there.notes)


def finish(there, results: list[Result], options: Namespace) -> None:
    if options.json:
        limits = {f"{name}_gb_per_s": speed for name, speed in there.limits.gb_per_s.items()}
        found = {**there.about(), **limits, "notes": there.notes, "rows": [result.as_json() for result in results]}
        print(json.dumps(found, indent=1))
    else:
        for note in report.footnotes(results):
            print(note)
    if options.plot:
        options.plot.write_text(picture(results, there.limits.gb_per_s, there.about()))
        print(f"drawn: {options.plot}", file=sys.stderr)
