"""Write the text of all shaders into one C++ header, so that the extension contains its kernels and needs no files.

setup.py and the simulated Metal both call it, so both compile exactly the same text.
`python shaders/embed.py shaders/glu.metal` prints the text of one shader; line numbers in error messages refer to it.
`#include "common.h"` is replaced by the text of the file, because Metal's run-time compiler cannot find our headers.
"""

import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
#: The weight formats for which a shader with `weights_suffix` is compiled, with the macros of each.
TABLE = (FOLDER.parent / "csrc" / "formats.h").read_text()
FORMATS = {
    library: [] if library == "dense" else [f"MOE_METAL_FORMAT={library}"]
    for library in re.findall(r'^    {"\w+", "(\w+)"', TABLE, re.MULTILINE)
}


def shader_text(path: Path) -> str:
    """The text of one `.metal` file, with each of our headers inlined where it is first included."""
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
    """The libraries of one `.metal` file, with their macros: `glu`, or `linear`, `linear-affine2` and so on."""
    if "weights_suffix" not in path.read_text():
        return {path.stem: []}
    return {path.stem if name == "dense" else f"{path.stem}-{name}": macros for name, macros in FORMATS.items()}


def write_header(target: Path) -> Path:
    """Write `shader_texts[]`, the name and text of each shader. An unchanged file is not written, to avoid rebuilds."""
    rows = []
    for path in sorted(FOLDER.glob("*.metal")):
        text = shader_text(path)
        if not text.isascii():
            raise SystemExit(f"{path.name}: expected ASCII only, which is all that Metal's run-time compiler reads")
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
