"""The command line: `python -m torch_moe_metal demo|doctor|bench`."""

import argparse

import torch


def add_bench(commands: argparse._SubParsersAction) -> None:
    from . import bench

    dtypes = {name: dtype for dtype, name in bench.SHORT.items()}
    parser = commands.add_parser("bench", help="times of every op, beside a copy's speed and beside PyTorch")
    parser.add_argument("--device", default="mps" if torch.backends.mps.is_available() else "cpu")
    parser.add_argument("--ops", nargs="+", choices=bench.OPS, default=list(bench.OPS), metavar="OP")
    parser.add_argument("--dtypes", nargs="+", choices=list(dtypes), default=["f32", "bf16"], metavar="DTYPE")
    parser.add_argument("--seconds", type=float, default=0.5, help="how long each row is measured (default: 0.5)")
    parser.add_argument("--json", action="store_true", help="print JSON and no table")
    parser.set_defaults(
        run=lambda args: bench.run(args.device, args.ops, [dtypes[d] for d in args.dtypes], args.seconds, args.json)
    )


def add_report(commands: argparse._SubParsersAction, name: str, help: str) -> None:
    def run(_args: argparse.Namespace) -> int:
        from importlib import import_module

        return import_module(f".{name}", __package__).run()

    commands.add_parser(name, help=help).set_defaults(run=run)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_moe_metal", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    add_report(commands, "demo", "one real MoE layer, fused against stock")
    add_report(commands, "doctor", "what is installed and loaded, and whether every op is right")
    add_bench(commands)
    args = parser.parse_args()
    return args.run(args)


if __name__ == "__main__":
    raise SystemExit(main())
