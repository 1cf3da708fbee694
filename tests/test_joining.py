"""Weights are joined without a result that PyTorch's `cat` may write beyond on mps. The limit is small here."""

import pytest
import torch
from torch import Tensor, nn

from torch_moe_metal import joining
from torch_moe_metal.transformers.checkpoints import mlx_conversions
from torch_moe_metal.transformers.checkpoints.gguf.architectures import JoinGateUp
from torch_moe_metal.transformers.fusing.projections import is_joined, join

MOST = 40


@pytest.fixture(autouse=True)
def large(monkeypatch) -> None:
    """`torch.cat` and `torch.stack` raise on mps for results above the limit."""

    def checked(stock):
        def joined(tensors, *args, **kwargs) -> Tensor:
            elements = sum(tensor.numel() for tensor in tensors)
            assert tensors[0].device.type != "mps" or elements <= MOST, elements
            return stock(tensors, *args, **kwargs)

        return joined

    monkeypatch.setattr(joining, "MOST_ELEMENTS", MOST)
    for name in ("cat", "stack"):
        monkeypatch.setattr(torch, name, checked(getattr(torch, name)))


def experts(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Gate and up of three experts."""
    return [torch.arange(first, first + 60).reshape(3, 4, 5).to(dtype) for first in (0, 60)]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("kind", ["plain", "turned", "mixed"])
def test_equals_pytorch(mps: str, dim: int, kind: str):
    gate, up = experts()
    parts = [gate, up.transpose(1, 2).contiguous().transpose(1, 2) if kind == "turned" else up]
    parts = [gate, up.half()] if kind == "mixed" else parts
    for ours, pytorch in ((joining.cat, torch.cat), (joining.stack, torch.stack)):
        got, want = ours([part.to(mps) for part in parts], dim), pytorch(parts, dim)
        assert got.dtype == want.dtype and got.is_contiguous() and torch.equal(got.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=["dense", "packed"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_experts_of_gguf_files(mps: str, dtype: torch.dtype, interleaved: bool):
    assert torch.equal(*(joined_by(JoinGateUp(interleaved=interleaved), each, dtype) for each in (mps, "cpu")))


@pytest.mark.parametrize("halves", [False, True])
def test_experts_of_mlx_folders(mps: str, halves: bool, monkeypatch):
    monkeypatch.setattr(mlx_conversions, "has_halves", lambda *_: halves)
    assert torch.equal(*(joined_by(mlx_conversions.Join(), each, torch.int32) for each in (mps, "cpu")))


def joined_by(operation, device: str, dtype: torch.dtype) -> Tensor:
    given = dict(zip(("gate", "up"), ([part.to(device)] for part in experts(dtype)), strict=True))
    found = operation.convert(given, source_patterns=["gate", "up"], target_patterns=["both"])
    return found["both"].cpu()


def test_projections(mps: str):
    layers = [nn.Linear(5, 4).to(mps).requires_grad_(False) for _ in range(3)]
    before = [layer.weight.cpu() for layer in layers]
    join(layers)
    assert is_joined([layer.weight for layer in layers])
    assert all(torch.equal(layer.weight.cpu(), weight) for layer, weight in zip(layers, before, strict=True))
