"""Prints the notes of a release: links to its wheels, then the changelog.

    python tools/release_notes.py v0.1.0 dist/*.whl

README.md gives the page of the latest release to `pip install --find-links`. The notes are part of that page; GitHub's
own list of a release's files is loaded later, by a browser, so pip would not see it.
"""

import argparse
import tomllib
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
HOME = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]


def notes(tag: str, wheels: list[str]) -> str:
    links = [f"- [{name}]({HOME}/releases/download/{quote(tag)}/{quote(name)})" for name in sorted(wheels)]
    return "\n".join(["## Wheels", "", *links, "", (ROOT / "CHANGELOG.md").read_text()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tag", help="of the release, as in v0.1.0")
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    options = parser.parse_args()
    print(notes(options.tag, [wheel.name for wheel in options.wheels]))


if __name__ == "__main__":
    main()
