"""The command line: `python -m torch_moe_metal --help`."""

import argparse
from types import ModuleType

import torch

from .. import __version__, huge_pages
from . import bench, chat, demo, doctor, fit, serve, tune
from .bench import host_time, whole_model

BENCH = """
examples:
  bench                              every op, the experts and a whole block, in the sizes of Qwen3-30B-A3B
  bench --model mixtral-8x7b         Mixtral's block and its experts, compared with transformers
  bench --formats affine4 mxfp4      products with packed weights, compared with the same values as dense weights
  bench --ops experts --tokens 1 4 --dtypes bf16

In a checkout, `python tools/bench_mlx.py` has the same options and also measures MLX.
"""


def add(commands: argparse._SubParsersAction, module: ModuleType, name: str, help: str, **texts: str | None) -> None:
    """Add the command of a module with options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=help, formatter_class=raw, **({"description": module.__doc__} | texts))
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)


def add_report(commands: argparse._SubParsersAction, module: ModuleType, name: str, help: str) -> None:
    """Add the command of a module without options."""
    commands.add_parser(name, help=help).set_defaults(run=lambda _: module.run())


def main(arguments: list[str] | None = None) -> int:
    huge_pages.for_tensors()  # for a command only: an import of the package does not change the user's process
    parser = argparse.ArgumentParser(prog="python -m torch_moe_metal", description=__doc__)
    version = f"torch_moe_metal {__version__}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(metavar="command")
    add(commands, serve, "serve", "an OpenAI-compatible server with a patched model", epilog=serve.EXAMPLES)
    add(commands, chat, "chat", "a conversation in the terminal with a patched model", epilog=chat.EXAMPLES)
    fits = "in which format a model fits into a Mac's memory, and with how long a context"
    add(commands, fit, "fit", fits, epilog=fit.EXAMPLES)
    add_report(commands, demo, "demo", "one MoE layer, and four layers of a model, ours and stock")
    add_report(commands, doctor, "doctor", "versions and devices, and a test of every op")
    times = "times of every op and of a model's block, compared with the memory bandwidth, PyTorch and transformers"
    add(commands, bench, "bench", times, description=None, epilog=BENCH)
    speeds = "tokens per second of a whole model: stock transformers, experts_implementation, patch"
    add(commands, whole_model, "bench-model", speeds)
    host = "the host's time and the dispatcher calls per token, with tiny weights: stock transformers and patch"
    add(commands, host_time, "bench-host", host)
    add(commands, tune, "tune", "measure launch parameters on this Mac's GPU and save the fastest")
    parser.set_defaults(run=lambda _: parser.print_help() or 0)
    args = parser.parse_args(arguments)
    return args.run(args)
