"""Devices. Every test with the fixture `device` runs on the CPU and on mps: the real one on a Mac, else the simulated
one.

MOE_METAL_DEVICES=cpu (or mps) selects one. Nothing is skipped silently: a simulator that cannot be built fails the run.
"""

import functools
import math
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from cases import Case

DEVICES = os.environ.get("MOE_METAL_DEVICES", "cpu,mps").split(",")
SIMULATED = not torch.backends.mps.is_built()  # not is_available(): PyTorch would cache its answer

# The maximum work of a case in the fast set, in flops (an element of an argument counts as eight).
FAST = {"cpu": 4e6, "mps": 1e6 if SIMULATED else 2e9}
MAX_FLOPS = {"cpu": math.inf, "mps": 1e9 if SIMULATED else math.inf}  # more would take the simulator minutes to hours


def pytest_configure(config: pytest.Config) -> None:
    # The pytest processes that tests start have options of their own. xdist's main process runs no tests, and keeps the
    # variable for its workers.
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        os.environ.pop("PYTEST_ADDOPTS", None)
    # A shell's background jobs ignore Ctrl-C, and the commands that the tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "cases(list): run with each of these cases on each device")
    # Before any test module is imported: PyTorch looks for its mps backend once, and caches the result.
    if SIMULATED and "mps" in DEVICES:
        import simulated

        simulated.load()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("cases")
    if marker:
        fast_only = metafunc.config.getoption("markexpr") == "not slow"  # then pytest need not collect the others
        rows = [
            pytest.param(case, device, id=f"{case}-{device}", marks=marks(case, device))
            for case in marker.args[0]
            for device in DEVICES
            if case.flops <= MAX_FLOPS[device] and not (fast_only and in_full_grid(case, device))
        ]
        metafunc.parametrize("case, device", rows, indirect=["device"], scope="function")  # not sorted by device
    elif "device" in metafunc.fixturenames:
        metafunc.parametrize("device", DEVICES, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`slow_on_mps` marks a test, or some of its parameters. This comes before pytest deselects slow tests."""
    for item in items:
        if item.get_closest_marker("slow_on_mps") and item.callspec.params.get("device") == "mps":
            item.add_marker("slow")


def marks(case: Case, device: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.full_grid, pytest.mark.slow] if in_full_grid(case, device) else []


def in_full_grid(case: Case, device: str) -> bool:
    """Whether the case is only in the full grid."""
    if case.sample or device in case.fast_on:
        return False
    heavy = max(case.flops, 8 * case.elements) > FAST[device]
    return case.full_grid or heavy or (device == "mps" and not case.common_shader)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """torch.compile gives up on a function that was compiled for too many tests."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(scope="session")
def mps() -> str:
    """For tests that only run on mps."""
    if "mps" not in DEVICES:
        pytest.skip("MOE_METAL_DEVICES leaves mps out")
    return "mps"


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return request.param


# ------------------------------------------------------------------------------------------------ tiny checkpoints


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A function of checkpoints.py by its name, which writes each checkpoint once."""
    import checkpoints  # imports transformers, which most tests do not need

    @functools.cache
    def made(kind: str, *arguments, **options) -> Path:
        return getattr(checkpoints, kind)(tmp_path_factory.mktemp(kind), *arguments, **options)

    return made


@pytest.fixture(scope="session")
def gpt_oss(checkpoint) -> Path:
    return checkpoint("gpt_oss")


@pytest.fixture(scope="session")
def qwen3_fp8(checkpoint) -> Path:
    return checkpoint("fp8", "qwen3_moe", torch.bfloat16)


@pytest.fixture(scope="session")
def deepseek_fp8(checkpoint) -> Path:
    return checkpoint("fp8", "deepseek_v3")


@pytest.fixture(scope="session")
def deepseek_v3_1(checkpoint) -> Path:
    return checkpoint("fp8", "deepseek_v3", scale_fmt="ue8m0")


@pytest.fixture(scope="session")
def e8m0_fp8(checkpoint) -> Path:
    return checkpoint("fp8", "qwen3_moe", torch.float8_e8m0fnu, "ue8m0")


@pytest.fixture(scope="session")
def integers(checkpoint):
    return functools.partial(checkpoint, "integers")


@pytest.fixture(scope="session")
def nvfp4(checkpoint):
    return functools.partial(checkpoint, "nvfp4")
