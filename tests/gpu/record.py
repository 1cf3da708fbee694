"""Records the dispatches of the real host code, to replay them on a machine with an NVIDIA GPU.

    python tests/gpu/record.py FOLDER               # FOLDER/cases.json, bench.json, packed.json; the shaders as PTX
    python tests/gpu/record.py FOLDER --ops gate    # these ops anew, the rest of the traces as they are
    python tests/gpu/record.py FOLDER --model olmoe # bench.json also in another model's sizes
    python tests/gpu/record.py FOLDER --tune        # only FOLDER/tune.json: all calls of `tune`, for every choice

The ops run on the simulated mps device in host_only mode: csrc/mps chooses kernels, grids and arguments, and nothing is
computed. A trace refers to tensors by name; run.py creates the same values from the case.
"""

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import metal_sim  # noqa: E402
import packed_rows  # noqa: E402
import ptx  # noqa: E402
import simulated  # noqa: E402
from cases import CASES, Case, call  # noqa: E402
from checks import placed  # noqa: E402
from torch_moe_metal import gpu_settings  # noqa: E402
from torch_moe_metal.arguments import ARGUMENTS  # noqa: E402
from torch_moe_metal.commands import tune  # noqa: E402
from torch_moe_metal.commands.bench.calls import Call, choices, halves, joined_heads, tokens_of  # noqa: E402
from torch_moe_metal.commands.bench.linear_attention import of_projections  # noqa: E402
from torch_moe_metal.commands.bench.model_sizes import DEFAULT, MODELS  # noqa: E402
from torch_moe_metal.extension import format_tables  # noqa: E402

MAX_WORK = 3e7  # flops or bytes of a case that is worth replaying
TOKENS = (1, 4, 16, 32, 64, 512, 2048, 4096)
LONGEST = {"linear_attention_": 2048}  # tokens that have a bar of their own
TIMED = (torch.bfloat16, torch.float32)


def trace(case: Case | Call | packed_rows.Row, args: dict[str, Tensor]) -> dict:
    with metal_sim.record() as record, metal_sim.host_only():
        outputs = call(getattr(torch.ops.moe_metal, case.op), case.op, args, case.options)
    named = args | {f"output{i}": tensor for i, tensor in enumerate(outputs)}
    names = {torch.ops.metal_sim.contents(tensor): name for name, tensor in reversed(named.items())}
    scratch: dict[str, int] = {}
    dispatches = [dispatch_row(d, names, scratch) for d in record.dispatches]
    described = [
        {"name": names[torch.ops.metal_sim.contents(t)], "dtype": str(t.dtype)[6:], "shape": list(t.shape)}
        for t in outputs
    ]
    return {"case": str(case), "dispatches": dispatches, "scratch": scratch, "outputs": described}


def dispatch_row(dispatch: metal_sim.Dispatch, names: dict[int, str], scratch: dict[str, int]) -> dict:
    arguments = []
    for argument in dispatch.arguments:
        if argument["bytes"]:
            arguments.append([argument["index"], argument["bytes"]])
            continue
        name = names.setdefault(argument["contents"], f"scratch{len(scratch)}")
        if name.startswith("scratch"):
            scratch[name] = argument["length"]
        arguments.append([argument["index"], name, argument["offset"]])
    return {"kernel": dispatch.kernel, "grid": dispatch.grid, "threads": dispatch.threads, "arguments": arguments}


#: Arguments that kernels read with any strides. Others, if strided, are copied by PyTorch, which traces do not record.
FOLLOWED = {
    "glu": {"gate", "up"},
    "rope": {"q", "k", "cos", "sin"},
    "attention": {"q", "k", "v", "mask"},
    "linear_attention_": {"q", "k", "v", "decay", "beta", "gate", "past", "mask", "state", "kept", "log"},
    "short_conv_": {"x", "input_gate", "output_gate", "past", "kept"},
    "experts": {f"{weight}{part}" for weight in ("gate_up", "down") for part in ("", "_scale", "_offset")},
    "linear": {"weight", "scale", "offset"},
    "dequantize": {"weight", "scale", "offset"},
}


def replayable(case: Case, args: dict[str, Tensor]) -> bool:
    copied = set(args) - FOLLOWED.get(case.op, set())
    return all(args[name].is_contiguous() for name in copied)


def traces(ops: list[str]) -> Iterator[dict]:
    for case in CASES:
        if case.op in ops and max(case.flops, case.bytes) <= MAX_WORK:
            args = case.arguments()
            if replayable(case, args) and all(tensor.numel() for tensor in args.values()):
                yield trace(case, {name: placed(tensor, "mps") for name, tensor in args.items()})


def bench_traces(ops: list[str], model: str) -> Iterator[dict]:
    """Traces of the benchmark's rows. Dispatches do not depend on values, so tensors are uninitialised."""
    for op, T, dtype in itertools.product(ops, TOKENS, TIMED):
        for which in choices(op, model):
            row = Call(op, model, MODELS[model], T, dtype, which=which)
            if max(*tokens_of(op, which), LONGEST.get(op, 0)) >= T:
                yield trace(row, empties(row))


def empties(row: Call) -> dict[str, Tensor]:
    with metal_sim.host_only():  # otherwise they would be poisoned
        if row.op == "glu":
            return halves(row, torch.empty(row.size("TG"), dtype=row.dtype, device="mps"))
        if row.op == "rope":
            return joined_heads(row, partial(torch.empty, dtype=row.dtype, device="mps"))
        found = of_projections(row, partial(torch.empty, dtype=row.dtype, device="mps")) if row.layer else {}
        return found | {
            name: torch.empty(row.size(letters), dtype=row.dtype_of(name), device="mps")
            for name, letters in row.shapes.items()
            if name not in found
        }


def packed_traces() -> Iterator[dict]:
    """Traces of the rows in packed formats. Only one expert is packed, to get the layout; memory is uninitialised."""
    generator = torch.Generator().manual_seed(0)
    for row in packed_rows.ROWS:
        args = {name: placed(tensor, "mps") for name, tensor in row.inputs(generator).items()}
        for name, one in row.weights(generator, experts=1).items():
            shape = one.shape if row.N else (packed_rows.E, *one.shape[1:])
            args[name] = torch.empty(shape, dtype=one.dtype, device="mps")
        yield trace_under(row.settings, row, args)


def tune_traces(model: str) -> Iterator[dict]:
    """For every call that `tune` measures, its different lists of dispatches under all choices of settings, each once,
    with the choices that lead to it, and the names and defaults of the settings that make a difference."""
    models = {(model, "dense"): MODELS[model]}
    for row in {str(c): c for n in tune.SETTINGS for c in tune.calls_of(n, models, torch.bfloat16)}.values():
        args = empties(row)
        names = mattering(row, args)
        found: dict[str, dict] = {}
        for settings in itertools.product(*(VALUES[name] for name in names)):
            one = trace_under(dict(zip(names, settings, strict=True)), row, args)
            of = found.setdefault(dispatched(one), one | {"defaults": {n: DEFAULTS[n] for n in names}, "settings": []})
            of["settings"].append(settings)
        verify(row, args, names, found)
        print(f"  {row}: {', '.join(names) or 'nothing'}: {len(found)} ways", file=sys.stderr, flush=True)
        yield from found.values()


DEFAULTS: gpu_settings.Settings = {}
VALUES: dict[str, list[int]] = {}  # for each setting, all values that the search may try


def prepare_tune() -> None:
    DEFAULTS.update(gpu_settings.defaults())
    VALUES.clear()
    VALUES.update({n.name: sorted({*n.values, DEFAULTS[n.name]}) for n in tune.SETTINGS})


def trace_under(settings: gpu_settings.Settings, row: Call | packed_rows.Row, args: dict[str, Tensor]) -> dict:
    gpu_settings.use(settings)
    try:
        return trace(row, args)
    finally:
        gpu_settings.use({})


def dispatched(trace: dict) -> str:
    return json.dumps(trace["dispatches"])


def mattering(row: Call, args: dict[str, Tensor]) -> list[str]:
    """The settings that change the dispatches of a call, alone or together with others."""
    names: set[str] = set()
    known, todo = {dispatched(trace_under({}, row, args))}, [{}]
    while todo:
        settings = todo.pop()
        before = dispatched(trace_under(settings, row, args))
        for name, value in ((name, value) for name, values in VALUES.items() for value in values):
            after = dispatched(trace_under(settings | {name: value}, row, args))
            if after != before:
                names.add(name)
            if after not in known:
                known.add(after)
                todo.append(settings | {name: value})
    return [name for name in VALUES if name in names]


def verify(row: Call, args: dict[str, Tensor], names: list[str], found: dict[str, dict]) -> None:
    """Check with 30 random choices that no other setting makes a difference."""
    choice = random.Random(0)
    for _ in range(30):
        settings = {name: choice.choice(values) for name, values in VALUES.items()}
        expected = found[dispatched(trace_under(settings, row, args))]["settings"]
        assert tuple(settings[name] for name in names) in expected, f"{row}: {settings}"


def write(file: Path, traces: Iterator[dict], replaced: tuple[str, ...]) -> None:
    """Write the traces, after those of the file whose case does not begin with one of `replaced`."""
    before = json.loads(file.read_text()) if file.exists() else []
    rows = [row for row in before if not row["case"].startswith(replaced)] + list(traces)
    file.write_text(json.dumps(rows, separators=(",", ":")))
    print(f"{file.stem}: {len(rows)} traces, {sum(len(row['dispatches']) for row in rows)} dispatches")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ops", nargs="+", default=list(ARGUMENTS))
    parser.add_argument("--model", choices=list(MODELS), default=DEFAULT, help=f"whose sizes are timed ({DEFAULT})")
    parser.add_argument("--tune", action="store_true", help="write tune.json alone, and compile the shaders")
    parser.add_argument("--libraries", nargs="+", help="compile these alone, as ptx.py names them")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    simulated.load()
    (options.folder / "formats.json").write_text(json.dumps(format_tables))
    if options.tune:
        prepare_tune()
        write(options.folder / "tune.json", tune_traces(options.model), ("",))
    else:
        record_all(options)
    ptx.compile_all(options.folder, options.libraries)


def record_all(options: argparse.Namespace) -> None:
    write(options.folder / "cases.json", traces(options.ops), tuple(f"{op}-" for op in options.ops))
    rows = tuple(f"{op}-{options.model}-" for op in options.ops)
    write(options.folder / "bench.json", bench_traces(options.ops, options.model), rows)
    write(options.folder / "packed.json", packed_traces(), ("",))


if __name__ == "__main__":
    main()
