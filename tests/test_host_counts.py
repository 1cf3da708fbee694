"""The host's work for one token, as upper bounds: ops that Python calls, blocks on the stream's queue, messages to
encoders, commits. All of them are exact, and they are what the code needs today. Lower them with the code."""

import pytest

from conftest import DEVICES, SIMULATED
from host_counts import host_counts, of_a_layer

pytestmark = pytest.mark.skipif(
    not SIMULATED or "mps" not in DEVICES, reason="the simulated Metal counts; a Mac's own does not"
)

COUNTS = ("calls", "views", "blocks", "aten_ops", "messages", "dispatches")
#: A layer, and a model of two layers. Those of Qwen3-Next and Qwen3.5 differ, and are averaged; one of deepseek_v3's is
#: dense.
BOUNDS = {
    "qwen3_moe": [(1, 0, 1, 0, 45, 9), (21, 8, 3, 14, 101, 19)],
    "gpt_oss": [(1, 0, 1, 0, 45, 9), (20, 8, 3, 13, 101, 19)],
    "deepseek_v3": [(1, 0, 1, 0, 80, 16), (21, 8, 3, 14, 161, 31)],
    "qwen3_next": [(1, 0, 1, 0, 65, 13), (21, 8, 3, 14, 141, 27)],
    "qwen3_5_moe_text": [(1, 0, 1, 0, 65, 13), (44, 26, 3, 19, 141, 27)],
    "gemma4_text": [(1, 0, 1, 0, 80, 16), (34, 14, 3, 25, 171, 33)],
}
MESSAGES_OF_A_DISPATCH = 101 / 19  # the most of these families, qwen3_moe's in a model of two layers
DISPATCHES_OF_A_COMMIT = 16


@pytest.mark.parametrize("family", BOUNDS)
def test_work_of_a_token(family: str):
    two, four = (host_counts(family, layers) for layers in (2, 4))
    for found, bounds in zip((of_a_layer(two, four), two), BOUNDS[family], strict=True):
        most = dict(zip(COUNTS, bounds, strict=True))
        assert not {name: (found[name], most[name]) for name in COUNTS if found[name] > most[name]}
        assert found["messages"] <= MESSAGES_OF_A_DISPATCH * found["dispatches"]
        assert found["commits"] <= found["dispatches"] / DISPATCHES_OF_A_COMMIT
