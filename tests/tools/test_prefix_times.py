"""tools/prefix_times.py, with a tiny model."""

import pytest

import prefix_times


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_later_turns_reuse_the_first_one(family: str, monkeypatch):
    monkeypatch.setattr(prefix_times, "SIZES", {"max_position_embeddings": 1024})
    monkeypatch.setattr(prefix_times, "PROMPT", 100)
    for rewritten in (False, True):
        first, second, third = prefix_times.times(family, rewritten)
        assert first[1:] == (0, 100) and second[1] >= 97 and third[1] >= second[2] - 3
