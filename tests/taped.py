"""Conversations with tapes and without, for the tests of tapes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torch_moe_metal
from tiny_models import tiny_model
from torch_moe_metal.transformers.fusing import tape
from torch_moe_metal.transformers.versions import cache_of, with_cache

#: Layers that are taped in one of these families, and the window.
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


def fused(family: str = "qwen3_moe", device: str = "cpu", **changes) -> nn.Module:
    model = tiny_model(family, device, **{"max_position_embeddings": 512} | changes)
    torch_moe_metal.patch(model)
    return model


def replays(call: Callable[[], object]) -> int:
    """How many layers were replayed while it ran."""
    count, stock = 0, tape.LayerTape.replayed

    def counted(self, *arguments):
        nonlocal count
        output = stock(self, *arguments)
        count += output is not None
        return output

    tape.LayerTape.replayed = counted
    try:
        call()
    finally:
        tape.LayerTape.replayed = stock
    return count


class Conversation:
    """A model and a cache, which gets tokens one at a time. Every other model has no tapes."""

    def __init__(self, model: nn.Module, prompt: int = 6, batch: int = 1):
        self.model, self.random = model, torch.Generator().manual_seed(prompt)
        self.cache = cache_of(model(self.tokens(batch, prompt)))
        self.batch = batch

    def tokens(self, *size: int) -> Tensor:
        return torch.randint(2, 89, size, generator=self.random).to(self.model.device)

    def step(self, **more) -> Tensor:
        return self.model(self.tokens(self.batch, 1), **with_cache(self.cache), **more).logits


class Both:
    """The same conversation with tapes and without."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch, **options):
        self.monkeypatch, self.model = monkeypatch, model
        self.pair = [self.of(on, lambda: Conversation(model, **options)) for on in (True, False)]
        self.replayed = 0

    def of(self, on: bool, call: Callable):
        self.monkeypatch.setattr(tape, "ENABLED", on)
        return call()

    def step(self, **more) -> None:
        found = []
        self.replayed += replays(lambda: found.append(self.of(True, lambda: self.pair[0].step(**more))))
        expected = self.of(False, lambda: self.pair[1].step(**more))
        assert torch.equal(found[0], expected)

    def steps(self, count: int, **more) -> int:
        """Returns how many layers were replayed."""
        self.replayed = 0
        for _ in range(count):
            self.step(**more)
        return self.replayed

    def change(self, change: Callable) -> None:
        for each in self.pair:
            change(each)
