#!/usr/bin/env python3
"""A stand-in for Apple's `metal` and `metal-tt`, for the tests of tools/compile_shaders.py.

It accepts only arguments that Apple's tools are known to have. Its diagnostics of a shader are those of our own checks,
and clang's warnings. A library is JSON with the names of its kernels. A native binary has Apple's layout with invented
registers: four, plus one for each value of a `holds_N` kernel.
"""

import argparse
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve()
# without numpy, whose import takes as long as the rest
sys.path.insert(0, str(HERE.parents[1] / "metal_sim" / "engine"))
import address_spaces  # noqa: E402
import translate  # noqa: E402

OLDEST = {"3.1": 14, "3.2": 15, "4.0": 26}
ARCHS = {f"applegpu_g{generation}{size}" for generation in range(13, 17) for size in "gsd"} | {"applegpu_g17g"}
# Added by our translation to C++, and not part of the shader.
UNFOUNDED = ["-Wno-null-dereference", "-Wno-deprecated-copy"]


def refuse(what: str) -> None:
    sys.exit(what)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        refuse(f"error: {message}")


def metal(argv: list[str]) -> None:
    parser = Parser()
    parser.add_argument("source", type=Path)
    parser.add_argument("-std", required=True)
    for name in ("-mmacosx-version-min", "-fmetal-math-mode", "-fmetal-math-fp32-functions"):
        parser.add_argument(name)
    for flag in ("-E", "-P", "-Wall", "-Wextra", "-Werror", "-Wno-unused-const-variable"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("-D", action="append", default=[])
    parser.add_argument("-o", type=Path)
    if argv == ["--version"]:
        print("A stand-in for Apple metal version 32023.404")
        return
    given = vars(parser.parse_args(argv))
    version = given["std"].removeprefix("metal")
    if version not in OLDEST:
        refuse(f"error: invalid value '{given['std']}' in '-std={given['std']}'")
    text, number = given["source"].read_text(), int(float(version) * 100)
    if given["E"]:
        print(translate.preprocess(f"#include <metal_stdlib>\n{text}", number, given["D"]))
        return
    if float(given["mmacosx_version_min"]) < OLDEST[version]:
        refuse(f"error: Metal {version} needs macOS {OLDEST[version]}")
    if (given["fmetal_math_mode"], given["fmetal_math_fp32_functions"]) != ("safe", "precise"):
        refuse("error: pipelines.mm requests safe maths and precise functions")
    library = compiled(text, number, given)
    given["o"].write_text(json.dumps(library))


def compiled(text: str, version: int, given: dict) -> list[str]:
    """The kernels of a source."""
    try:
        address_spaces.check(text, version, given["D"])
        translated = address_spaces.translated(text, version, given["D"])
    except address_spaces.RefusedError as error:
        refuse(str(error))
    if given["Wall"]:
        flags = [flag for flag in address_spaces.FLAGS if flag != "-Wno-everything" and "compat" not in flag]
        flags += ["-Wall", "-Wextra", "-Wno-unused-const-variable", "-fsyntax-only", *UNFOUNDED, "-"]
        done = subprocess.run([translate.find_compiler(), *flags], input=translated, capture_output=True, text=True)
        if given["Werror"] and "warning: " in done.stderr:
            refuse(done.stderr.replace("warning: ", "error: "))
    expanded = translate.preprocess(text, version, given["D"])
    named = re.findall(r"host_name\(((?:\s*\"[^\"]*\")+)\s*\)", expanded)
    names = ["".join(re.findall('"([^"]*)"', name)) for name in named]
    return names + re.findall(r"(?<!>)\nkernel void (\w+)", expanded)


def metal_tt(argv: list[str]) -> None:
    parser = Parser()
    parser.add_argument("-arch", required=True)
    parser.add_argument("-o", type=Path, required=True)
    parser.add_argument("script", type=Path)
    parser.add_argument("library", type=Path)
    given = parser.parse_args(argv)
    if given.arch not in ARCHS:
        refuse(f"metal-tt: error: unknown architecture {given.arch}")
    (pipeline,) = json.loads(given.script.read_text())["pipelines"]["compute_pipelines"]
    name, threads = pipeline.pop("compute_function"), pipeline.pop("max_total_threads_per_threadgroup")
    if pipeline != {"threadgroup_size_is_multiple_of_thread_execution_width": True} or not 0 < threads <= 1024:
        refuse(f"metal-tt: error: {given.script}: {pipeline}, {threads}")
    if threads % 32:
        refuse(f"metal-tt: error: {threads} threads are no multiple of the execution width")
    if name not in json.loads(given.library.read_text()):
        refuse(f"metal-tt: error: cannot find function {name}")
    held = int(name.removeprefix("holds_")) if name.startswith("holds_") else 20
    given.o.write_bytes(binary(code=16 * held, registers=4 + held, spilled=0))


# ---------------------------------------------------------------------------------------------- a native binary


def binary(code: int, registers: int, spilled: int) -> bytes:
    kernel = macho({("__TEXT", "__text"): bytes(code), ("__GPU_METADATA", "__compute"): metadata(registers, spilled)})
    return macho({("__TEXT", "__reflection"): b"other", ("__TEXT", "__compute"): kernel})


def macho(sections: dict[tuple[str, str], bytes]) -> bytes:
    """A Mach-O file of a segment for each section."""
    place, commands, content = 32 + 152 * len(sections), b"", b""
    for (segment, name), data in sections.items():
        commands += struct.pack("<2I16s4Q4I", 0x19, 152, segment.encode(), 0, 0, 0, len(data), 0, 0, 1, 0)
        where = place + len(content)
        commands += struct.pack("<16s16s2Q8I", name.encode(), segment.encode(), 0, len(data), where, *[0] * 7)
        content += data
    return struct.pack("<8I", 0xFEEDFACF, 0, 0, 0, len(sections), len(commands), 0, 0) + commands + content


def metadata(registers: int, spilled: int) -> bytes:
    """A FlatBuffer: a root whose first field is a table, with field 0, and field 14 unless it is None."""
    fields = {0: registers} | ({14: spilled} if spilled else {})
    offsets = [4 + 4 * [*fields].index(i) if i in fields else 0 for i in range(max(fields) + 1)]
    vtable = struct.pack(f"<2H{len(offsets)}H", 4 + 2 * len(offsets), 4 + 4 * len(fields), *offsets)
    vtable += bytes(-len(vtable) % 4)
    table = struct.pack(f"<i{len(fields)}I", len(vtable), *fields.values())
    root = struct.pack("<3H", 6, 8, 4) + b"\0\0" + struct.pack("<iI", 8, 4 + len(vtable))
    return struct.pack("<I", 12) + root + vtable + table


if __name__ == "__main__":
    {"metal": metal, "metal-tt": metal_tt}[sys.argv[1]](sys.argv[2:])
