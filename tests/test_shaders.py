"""That the shaders are what Metal takes, in every language, and pure ASCII."""

from pathlib import Path

import pytest

import simulated  # noqa: F401  finds embed
from embed import libraries
from metal_sim.engine import address_spaces

SHADERS = sorted((Path(__file__).parents[1] / "shaders").glob("*.metal"))
LIBRARIES = {name: (path, macros) for path in SHADERS for name, macros in libraries(path).items()}


@pytest.mark.parametrize("version", address_spaces.VERSIONS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_address_spaces(library: str, version: int) -> None:
    path, macros = LIBRARIES[library]
    address_spaces.check(address_spaces.inlined(path), version, macros)


@pytest.mark.parametrize("path", sorted(SHADERS[0].parent.glob("*.[hm]*")), ids=lambda path: path.name)
def test_ascii(path: Path) -> None:
    assert path.read_text(encoding="utf-8").isascii()
