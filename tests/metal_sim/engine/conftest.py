"""Settings that tests of the engine share."""

import pytest

from metal_sim import engine
from metal_sim.engine import BACKWARD, FORWARD, random_order


@pytest.fixture
def four_orders() -> None:
    """Kernels run in four orders of threads, with the race detector and a time limit."""
    engine.set_orders(FORWARD, BACKWARD, random_order(1), random_order(2))
    engine.set_seconds(60)
    engine.set_races(True)
