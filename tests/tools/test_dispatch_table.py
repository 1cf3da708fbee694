"""tools/dispatch_table.py: costs of a layer that is small enough to run completely. metal_sim has tests of the
counts."""

import pytest

import dispatch_table
from benchmarks import rows_of_costs
from conftest import DEVICES, SIMULATED
from torch_moe_metal.commands.bench.model_sizes import MODELS

pytestmark = pytest.mark.skipif(
    not SIMULATED or "mps" not in DEVICES, reason="the simulated Metal counts; a Mac's own does not"
)
SMALL = MODELS["qwen3-30b-a3b"].reduced(H=128, I=64, E=4, K=2)
WEIGHTS = 4 * 3 * 128 * 64 * 2 / 1e6  # MB in bf16


@pytest.fixture
def small(mps: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(dispatch_table.MODELS, "small", SMALL)
    return "small"


def test_costs_of_prefill(small: str) -> None:
    row = dispatch_table.costs_row(small, "dense", 64, sample=0)
    kernels = row["kernels"]
    assert row["threadgroups"] == row["threadgroups_run"] == sum(kernel["threadgroups"] for kernel in kernels)
    assert row["matrices"] == sum(kernel["matrices"] for kernel in kernels)
    assert 0.5 < row["useful_rows"] == 64 * 2 * 3 * 128 * 64 / (512 * row["matrices"]) <= 1
    assert row["device_mb_loaded"] > WEIGHTS and row["threadgroup_bytes_per_matrix"] > 0


def test_costs_of_decoding(small: str) -> None:
    """Two of four experts are read, and no matrices are multiplied."""
    dense, packed = (dispatch_table.costs_row(small, format, 1, sample=0) for format in ("dense", "mxfp4"))
    assert dense["useful_rows"] is dense["threadgroup_bytes_per_matrix"] is None
    assert WEIGHTS / 2 < dense["device_mb_loaded"] < WEIGHTS
    assert packed["device_mb_loaded"] < dense["device_mb_loaded"] / 2


def test_costs_of_a_sample(small: str) -> None:
    """Only of larger grids: the kernel that sorts slots must run completely, or a later kernel would be invalid."""
    row = dispatch_table.costs_row(small, "dense", 64, sample=8)
    assert 8 * len(row["kernels"]) >= row["threadgroups_run"] < row["threadgroups"]


def test_costs_before_in_the_table(small: str) -> None:
    now = dispatch_table.costs_row(small, "dense", 64, sample=0)
    was = now | {"matrices": 1234567}
    other = now | {"T": 65}
    found = {"rows": [now, other], "before": [was]}
    table = rows_of_costs(found, kernels=True).splitlines()
    with_before = [line for line in table if "(1,234,567)" in line]
    assert len(with_before) == 1 and with_before[0].startswith("| small | dense | 64 |")
    assert sum(kernel["kernel"] in line for line in table for kernel in now["kernels"]) == 2 * len(now["kernels"])
    assert rows_of_costs(found).count("\n") == 3
