"""Helpers that the commands share: arguments, devices, and the error that ends a command."""

from argparse import ArgumentParser, ArgumentTypeError
from importlib.util import find_spec

import torch


class CannotRun(Exception):
    """Ends a command with exit code 2; the message gives the reason."""


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"must be 1 or more, got {text}")
    return number


def add_device(parser: ArgumentParser) -> None:
    best = "mps" if torch.backends.mps.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "mps"), default=best, help=f"default here: {best}")


def check_device(device: str) -> None:
    if device == "mps" and not torch.backends.mps.is_available():
        from .doctor import devices

        raise CannotRun(f"--device mps: {dict(devices())['mps']}")


def has_transformers() -> bool:
    return find_spec("transformers") is not None
