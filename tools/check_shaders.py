"""Checks every shader like Metal's compiler would: `make lint`.

Each shader is compiled in every weight format and every version of Metal by clang's C++ for OpenCL, which has Metal's
address spaces. Its source must be ASCII, because Metal's run-time compiler accepts nothing else.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "shaders"), str(ROOT / "tests")]
from embed import libraries  # noqa: E402
from metal_sim.engine import address_spaces  # noqa: E402

SHADERS = ROOT / "shaders"


def problems(path: Path, name: str, macros: list[str]) -> list[str]:
    """The errors of one shader in one format."""
    found = []
    for version in address_spaces.VERSIONS:
        try:
            address_spaces.check(address_spaces.inlined(path), version, macros)
        except address_spaces.RefusedError as error:
            found.append(f"{name} as Metal {version / 100:.1f} is refused:\n{error}")
    return found


def main() -> None:
    found = [f"{path.name} is not ASCII" for path in SHADERS.rglob("*.[hm]*") if not path.read_text().isascii()]
    work = [(path, *library) for path in sorted(SHADERS.glob("*.metal")) for library in libraries(path).items()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for one in pool.map(lambda arguments: problems(*arguments), work):
            found += one
    if found:
        sys.exit("\n".join(found))
    print(f"{len(work)} libraries of shaders, as {len(address_spaces.VERSIONS)} versions of Metal: ok")


if __name__ == "__main__":
    main()
