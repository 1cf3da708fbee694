"""The host's work for one token, as upper bounds: ops that Python calls, blocks on the stream's queue, messages to
encoders, commits. All of them are exact, and they are what the code needs today. Lower them with the code."""

import pytest

from conftest import DEVICES, SIMULATED
from host_counts import host_counts, of_a_layer

pytestmark = pytest.mark.skipif(
    not SIMULATED or "mps" not in DEVICES, reason="the simulated Metal counts; a Mac's own does not"
)

COUNTS = ("calls", "views", "blocks", "aten_ops", "messages", "dispatches")
#: A layer, and a model of two layers. Those of qwen3_next differ, and are averaged; one of deepseek_v3's two is dense.
BOUNDS = {
    "qwen3_moe": [(23, 13, 6, 4, 93, 7), (65, 34, 13, 22, 197, 15)],
    "gpt_oss": [(23, 13, 6, 4, 93, 7), (64, 34, 13, 21, 197, 15)],
    "deepseek_v3": [(41, 19, 8, 17, 115, 9), (115, 50, 13, 66, 174, 14)],
    "qwen3_next": [(30, 14.5, 5.5, 10, 92.5, 6.5), (79, 37, 12, 34, 196, 14)],
    "gemma4_text": [(37, 16, 11, 10, 148, 12), (106, 46, 23, 45, 307, 25)],
}
MESSAGES_OF_A_DISPATCH = 92.5 / 6.5  # the most of these families, qwen3_next's
DISPATCHES_OF_A_COMMIT = 16


@pytest.mark.parametrize("family", BOUNDS)
def test_work_of_a_token(family: str):
    two, four = (host_counts(family, layers) for layers in (2, 4))
    for found, bounds in zip((of_a_layer(two, four), two), BOUNDS[family], strict=True):
        most = dict(zip(COUNTS, bounds, strict=True))
        assert not {name: (found[name], most[name]) for name in COUNTS if found[name] > most[name]}
        assert found["messages"] <= MESSAGES_OF_A_DISPATCH * found["dispatches"]
        assert found["commits"] <= found["dispatches"] / DISPATCHES_OF_A_COMMIT
