"""The command line: `python -m torch_moe_metal demo|doctor|bench`."""

import argparse
from pathlib import Path

import torch

BENCH = """
examples:
  bench                              every op, the experts and a whole block, in the sizes of Qwen3-30B-A3B
  bench --model mixtral-8x7b         Mixtral's block and its experts: ours, transformers and MLX where installed
  bench --ops experts --tokens 1 4 --dtypes bf16 --plot roofline.svg

The translated shaders on an NVIDIA GPU (no Apple figures): `python tests/gpu/record.py FOLDER` on a machine with the
built package, then `python tests/gpu/run.py FOLDER --bench [arguments of bench]` on the GPU's, which needs torch and
the checkout only. Where the package is built there too, `bench --device cuda-translated --recording FOLDER` does it.
"""


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return number


def add_bench(commands: argparse._SubParsersAction) -> None:
    from .bench import DEVICES, OPS
    from .bench.calls import SHORT
    from .bench.models import DEFAULT, MODELS

    dtypes = {name: dtype for dtype, name in SHORT.items()}
    parser = commands.add_parser(
        "bench",
        help="times of every op and of a model's block, beside memory's speed, PyTorch, transformers and MLX",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=BENCH,
    )
    parser.add_argument("--device", choices=DEVICES, default="mps" if torch.backends.mps.is_available() else "cpu")
    parser.add_argument(
        "--model",
        choices=list(MODELS),
        metavar="NAME",
        help=f"whose sizes (default: {DEFAULT}), one of {', '.join(MODELS)}; if given, only its block and experts",
    )
    parser.add_argument("--ops", nargs="+", choices=OPS, metavar="OP", help=f"which rows: {', '.join(OPS)}")
    parser.add_argument("--tokens", nargs="+", type=positive, metavar="T", help="how many tokens (default: by op)")
    parser.add_argument(
        "--dtypes", nargs="+", choices=list(dtypes), default=["bf16", "f32"], metavar="DTYPE", help="f32, f16, bf16"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="how long each row is measured (default: 0.5)")
    parser.add_argument("--threads", type=positive, metavar="N", help="of the CPU (default: PyTorch's choice)")
    parser.add_argument(
        "--keep-memory",
        action="store_true",
        help="Linux: memory that PyTorch frees keeps its pages, as with jemalloc or tcmalloc, so that the rivals' "
        "outputs cost no page faults, either",
    )
    parser.add_argument("--recording", type=Path, metavar="FOLDER", help="for cuda-translated: tests/gpu/record.py's")
    parser.add_argument("--json", action="store_true", help="print JSON and no table")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw time against bytes, with memory's limits")

    def run(args: argparse.Namespace) -> int:
        from . import bench

        args.dtypes = [dtypes[name] for name in args.dtypes]
        return bench.run(args)

    parser.set_defaults(run=run)


def add_report(commands: argparse._SubParsersAction, name: str, help: str) -> None:
    def run(_args: argparse.Namespace) -> int:
        from importlib import import_module

        return import_module(f".{name}", __package__).run()

    commands.add_parser(name, help=help).set_defaults(run=run)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_moe_metal", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    add_report(commands, "demo", "one real MoE layer, fused against stock")
    add_report(commands, "doctor", "what is installed and loaded, and whether every op is right")
    add_bench(commands)
    args = parser.parse_args(arguments)
    return args.run(args)


if __name__ == "__main__":
    raise SystemExit(main())
