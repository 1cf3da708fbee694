"""That the shaders name the address space of every pointer and reference, and the right one."""

from pathlib import Path

import pytest

from metal_sim.engine import address_spaces

SHADERS = sorted((Path(__file__).parents[1] / "shaders").glob("*.metal"))


@pytest.mark.parametrize("version", [310, 400])
@pytest.mark.parametrize("path", SHADERS, ids=lambda path: path.stem)
def test_address_spaces(path: Path, version: int) -> None:
    address_spaces.check(address_spaces.inlined(path), version)
