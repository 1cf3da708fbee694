"""doctor finds kernels and operations of PyTorch that are wrong, and names them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from conftest import DEVICES, SIMULATED
from simulated import lines_of
from torch_moe_metal import torch_checks
from torch_moe_metal.torch_checks import wrong_operations

# Of the shaders as C++: a part of a kernel, and what it becomes.
FAULTS = {
    "linear_several_rows": (r"min(token + t, params\.T - 1)", "min(token, params.T - 1)"),
    "gate_tile": (r"own_expert + kAcross \* n", "own_expert"),
    "attention_combine": (r"sum += loaded\[n\] \* its_factor", "sum += loaded[0] * its_factor"),
    "linear_attention_groups": ("T(exists ? y : 0)", "T(exists ? y + y : 0)"),
    "pairs": (r"{group\.x / params\.K, pair\.second / params\.K}", "{group.x / params.K, group.x / params.K}"),
}
EDITS = " ".join(f"-e 's@{right}@{wrong}@'" for right, wrong in FAULTS.values())
COMPILER = f"""
for word; do
  case $word in
    *program_source.cpp)
      sed -i {EDITS} "$word"
  esac
done
exec $(command -v clang++-19 || command -v clang++) "$@"
"""
WRONG = {"linear_rows2_wide", "gate_tile", "attention_combine", "linear_attention_groups", "experts_gate_up_rows2_wide"}
RIGHT = {"linear_rows_wide", "gate_logits_1", "experts_gate_up_rows", "linear_attention_128"}


@pytest.mark.slow
@pytest.mark.skipif(not SIMULATED or "mps" not in DEVICES, reason="faults are planted in the simulated Metal's C++")
def test_wrong_kernels_are_found_and_named(tmp_path: Path) -> None:
    script = f"""
from torch_moe_metal.commands.bench.samples import SAMPLES, problem
for sample in SAMPLES:
    if set(sample.functions) & {WRONG | RIGHT}:
        print(" ".join(sample.functions), problem(sample, "mps", torch.bfloat16), sep="|")
"""
    said = dict(line.split("|") for line in lines_of(script, COMPILER, tmp_path))
    named = {name for functions, found in said.items() if found != "None" for name in functions.split()}
    assert named & (WRONG | RIGHT) == WRONG
    assert all("relative error" in found or "wrong expert ids" in found for found in said.values() if found != "None")


def broken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make an operation of PyTorch as wrong as it was in some version."""
    F = torch.nn.functional
    linear, attention, copy, topk = F.linear, F.scaled_dot_product_attention, Tensor.copy_, Tensor.topk
    draw, argmax, matmul, calls = Tensor.exponential_, Tensor.argmax, Tensor.__matmul__, []
    place = torch.tensor([7])

    def no_longer_equal(*args: Tensor) -> Tensor:
        calls.append(args)
        return linear(*args) * (1 + 0.01 * (len(calls) % 2))

    faults = {
        "bias": (F, "linear", lambda x, weight, bias=None: linear(x, weight)),
        "twice": (F, "linear", no_longer_equal),
        "exponential_": (Tensor, "exponential_", lambda self, **o: draw(self, **o).index_fill_(0, place, -0.0)),
        "queries": (F, "scaled_dot_product_attention", lambda *args, is_causal=False, **o: attention(*args, **o)),
        "product": (Tensor, "__matmul__", lambda a, b: matmul(a, b) + (b.shape[-2] == torch_checks.LONG)),
        "copy_": (Tensor, "copy_", lambda self, source: copy(self, source[:, :, :1].expand_as(source))),
        "argmax": (Tensor, "argmax", lambda self, dim: argmax(self[:, 1:], dim) + 1),
        "topk": (Tensor, "topk", lambda self, k: topk(self.abs(), k)),
    }
    monkeypatch.setattr(*faults[name])


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_checks, "DRAWS", 1000)


def test_operations_of_pytorch_are_right(device: str, few_draws: None) -> None:
    assert wrong_operations(device) == []


@pytest.mark.parametrize("name", ["bias", "twice", "exponential_", "queries", "product", "copy_", "argmax", "topk"])
def test_wrong_operations_of_pytorch_are_found(name: str, few_draws: None, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, name)
    assert any(name in line for line in wrong_operations("cpu"))
