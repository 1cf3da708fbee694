"""Write every shader's text into one C++ header, so that the extension carries its kernels and needs no files.

Called by setup.py and by the simulated Metal, so that both compile exactly the same text;
`python shaders/embed.py shaders/glu.metal` prints that of one shader, whose lines error messages count.
`#include "common.h"` is replaced by the file's text: Metal's run-time compiler has no include path of ours.
"""

import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
#: The formats of weights that a shader with a `weights_suffix` is compiled for, and the macros of each.
TABLE = (FOLDER.parent / "csrc" / "formats.h").read_text()
FORMATS = {
    library: [] if library == "dense" else [f"MOE_METAL_FORMAT={library}"]
    for library in re.findall(r'^    {"\w+", "(\w+)"', TABLE, re.MULTILINE)
}


def shader_text(path: Path) -> str:
    """One `.metal` file with our own headers inlined, each once, where it is first included."""
    done = set()

    def inline(match: re.Match[str]) -> str:
        header = path.parent / match[1]
        if header in done:
            return ""
        done.add(header)
        return text_of(header).replace("#pragma once\n", "")

    def text_of(file: Path) -> str:
        return re.sub(r'^#include "([^"]+)"$', inline, file.read_text(), flags=re.MULTILINE)

    return text_of(path)


def libraries(path: Path) -> dict[str, list[str]]:
    """What one `.metal` file is compiled for: names, and macros. `glu`, or `linear`, `linear-affine2` and so on."""
    if "weights_suffix" not in path.read_text():
        return {path.stem: []}
    return {path.stem if name == "dense" else f"{path.stem}-{name}": macros for name, macros in FORMATS.items()}


def write_header(target: Path) -> Path:
    """`shader_texts[]`: pairs of a shader's name and its text. Left alone when nothing changed, for quick rebuilds."""
    rows = []
    for path in sorted(FOLDER.glob("*.metal")):
        text = shader_text(path)
        if not text.isascii():
            raise SystemExit(f"{path.name}: Metal's run-time compiler reads ASCII only, this file holds more")
        rows.append(f'    {{"{path.stem}", R"MSL({text})MSL"}},\n')
    header = (
        "// Written by shaders/embed.py.\n#pragma once\n\nnamespace moe_metal {\n"
        "struct ShaderText {\n  const char* name;\n  const char* text;\n};\n"
        f"inline constexpr ShaderText shader_texts[] = {{\n{''.join(rows)}}};\n}}  // namespace moe_metal\n"
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() or target.read_text() != header:
        target.write_text(header)
    return target


if __name__ == "__main__":
    print(shader_text(Path(sys.argv[1])), end="")
