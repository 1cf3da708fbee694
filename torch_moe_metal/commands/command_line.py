"""The command line: `python -m torch_moe_metal --help`."""

import argparse

import torch

from .. import __version__

BENCH = """
examples:
  bench                              every op, the experts and a whole block, in the sizes of Qwen3-30B-A3B
  bench --model mixtral-8x7b         Mixtral's block and its experts, compared with transformers
  bench --formats affine4 mxfp4      products with packed weights, compared with the same values as dense weights
  bench --ops experts --tokens 1 4 --dtypes bf16

In a checkout, `python tools/bench_mlx.py` has the same options and also measures MLX.
"""


def add_bench(commands: argparse._SubParsersAction) -> None:
    from . import bench

    parser = commands.add_parser(
        "bench",
        help="times of every op and of a model's block, compared with the memory bandwidth, PyTorch and transformers",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=BENCH,
    )
    bench.add_arguments(parser)
    parser.set_defaults(run=bench.run)


def add_bench_model(commands: argparse._SubParsersAction) -> None:
    from .bench import whole_model

    parser = commands.add_parser(
        "bench-model",
        help="tokens per second of a whole model: stock transformers, experts_implementation, patch",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=whole_model.__doc__,
    )
    whole_model.add_arguments(parser)
    parser.set_defaults(run=whole_model.run)


def add_tune(commands: argparse._SubParsersAction) -> None:
    from . import tune

    parser = commands.add_parser(
        "tune",
        help="measure launch parameters on this Mac's GPU and save the fastest",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=tune.__doc__,
    )
    tune.add_arguments(parser)
    parser.set_defaults(run=tune.run)


def add_serve(commands: argparse._SubParsersAction) -> None:
    from . import serve

    parser = commands.add_parser(
        "serve",
        help="an OpenAI-compatible server with a patched model",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=serve.__doc__,
        epilog=serve.EXAMPLES,
    )
    serve.add_arguments(parser)
    parser.set_defaults(run=serve.run)


def add_chat(commands: argparse._SubParsersAction) -> None:
    from . import chat

    parser = commands.add_parser(
        "chat",
        help="a conversation in the terminal with a patched model",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=chat.__doc__,
        epilog=chat.EXAMPLES,
    )
    chat.add_arguments(parser)
    parser.set_defaults(run=chat.run)


def add_fit(commands: argparse._SubParsersAction) -> None:
    from . import fit

    parser = commands.add_parser(
        "fit",
        help="in which format a model fits into a Mac's memory, and with how long a context",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=fit.__doc__,
        epilog=fit.EXAMPLES,
    )
    fit.add_arguments(parser)
    parser.set_defaults(run=fit.run)


def add_report(commands: argparse._SubParsersAction, name: str, help: str) -> None:
    def run(_args: argparse.Namespace) -> int:
        from importlib import import_module

        return import_module(f".{name}", __package__).run()

    commands.add_parser(name, help=help).set_defaults(run=run)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_moe_metal", description=__doc__)
    version = f"torch_moe_metal {__version__}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(metavar="command")
    add_serve(commands)
    add_chat(commands)
    add_fit(commands)
    add_report(commands, "demo", "one real MoE layer, fused and stock")
    add_report(commands, "doctor", "versions and devices, and a test of every op")
    add_bench(commands)
    add_bench_model(commands)
    add_tune(commands)
    parser.set_defaults(run=lambda _: parser.print_help() or 0)
    args = parser.parse_args(arguments)
    return args.run(args)
