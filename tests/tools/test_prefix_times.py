"""tools/prefix_times.py, with a tiny model."""

import pytest

import prefix_times
import torch_moe_metal
from tiny_models import tiny_model


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_later_turns_reuse_the_first_one(family: str, monkeypatch):
    monkeypatch.setattr(prefix_times, "PROMPT", 100)
    model = tiny_model(family, max_position_embeddings=1024)
    torch_moe_metal.patch(model)
    for way in prefix_times.WAYS:
        first, second, third = prefix_times.times(model, way)
        assert first[1:] == (0, 100) and second[1] >= 97 and third[1] >= second[2] - 3
