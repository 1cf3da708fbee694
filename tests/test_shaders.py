"""That the shaders are what Metal takes, in every language, and pure ASCII."""

from pathlib import Path

import pytest

from metal_sim.engine import address_spaces

SHADERS = sorted((Path(__file__).parents[1] / "shaders").glob("*.metal"))


@pytest.mark.parametrize("version", address_spaces.VERSIONS)
@pytest.mark.parametrize("path", SHADERS, ids=lambda path: path.stem)
def test_address_spaces(path: Path, version: int) -> None:
    address_spaces.check(address_spaces.inlined(path), version)


@pytest.mark.parametrize("path", sorted(SHADERS[0].parent.glob("*.[hm]*")), ids=lambda path: path.name)
def test_ascii(path: Path) -> None:
    assert path.read_text(encoding="utf-8").isascii()
