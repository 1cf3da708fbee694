"""Checks shaders for what plain C++ cannot see: pointers and references without their address space, or with a wrong
one, program-scope variables outside constant, recursion, and characters outside ASCII.

clang's C++ for OpenCL has Metal's address spaces under other names. The shaders are read as that, without OpenCL's
generic address space, so every pointer and reference must say where it points, as in Metal.

`python address_spaces.py FILE.metal ...` prints one line for each file and exits 1 if one is refused.
"""

import argparse
import itertools
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import translate  # noqa: E402
from translate import RefusedError, Token  # noqa: E402

WITHOUT = ["pipes", "device_enqueue", "program_scope_global_variables"]
FLAGS = ["--target=spir64", "-x", "cl", "-Xclang", "-cl-std=clc++2021", "-w", "-cl-no-stdinc", "-fno-caret-diagnostics"]
FLAGS += ["-Xclang", "-cl-ext=+cl_khr_fp16," + ",".join(f"-__opencl_c_{name}" for name in WITHOUT)]
FLAGS += ["-include", str(HERE / "opencl" / "metal_stdlib.h")]
VECTOR = re.compile("(packed_)?(bool|char|uchar|short|ushort|int|uint|long|ulong|half|bfloat|float)[234]")
OPENCL_WORDS = {"local", "global", "generic", "pipe", "read_only", "write_only", "read_write", "uniform", "event_t"}


def rename(tokens):
    """Words that OpenCL has taken and Metal has not, and atomics, which clang would take for OpenCL's."""
    for token in tokens:
        if token.kind == "name" and (token.text in OPENCL_WORDS or token.text.startswith("atomic_")):
            token.text += "_"
    return tokens


def constructors(tokens):
    """float4(x, y, z, w) is written ((float4)(...)) in OpenCL; a function takes Metal's other forms too."""
    out, i = [], 0
    while i < len(tokens):
        end = None
        if tokens[i].kind == "name" and VECTOR.fullmatch(tokens[i].text):
            end = i + 1
        elif tokens[i].text == "vec" and tokens[i + 1].text == "<":
            end = translate.closing_angle(tokens, i + 1) + 1
        if end is None or end >= len(tokens) or tokens[end].text != "(":
            out.append(tokens[i])
            i += 1
            continue
        name = tokens[i:end]
        if out and out[-1].text == "::":  # metal::float4
            out = out[:-2] if out[-2:-1] and out[-2].kind == "name" else out[:-1]
        space, name[0].space = name[0].space, ""
        out += [Token("::msl_make<", "code", space, name[0].line), *name, Token(">", "code")]
        i = end
    return out


def temporaries(tokens):
    """thread const Tile<T>& takes a temporary in Metal. In OpenCL those have no address space, so none is asked."""
    for i, token in enumerate(tokens):
        if token.text == "thread" and tokens[i + 1].text == "const" and tokens[i + 3].text == "<":
            end = translate.closing_angle(tokens, i + 3) + 1
            if tokens[end].text == "&":
                token.text = ""
    return tokens


def copies(tokens):
    """Tells every struct of the shader that it can be copied between address spaces."""
    out, i = [], 0
    while i < len(tokens):
        out.append(tokens[i])
        is_struct = tokens[i].text in ("struct", "class") and not (i and tokens[i - 1].text == "enum")
        if is_struct and tokens[i + 1].kind == "name" and tokens[i + 2].text in ("{", ":", "<"):
            name, start = tokens[i + 1].text, i + 2
            while tokens[start].text not in ("{", ";", ">"):
                start += 1
            if tokens[start].text == "{":
                out += tokens[i + 1 : start + 1]
                out.append(Token(members(tokens, start, name), "code"))
                i = start
        i += 1
    return out


def members(tokens, start, name):
    body = tokens[start : translate.closing(tokens, start)]
    own = any(a.text == name and b.text == "(" for a, b in itertools.pairwise(body))
    return f" MSL_COPIES({name})" if own else f" MSL_AGGREGATE({name})"


def translated(source, version=310, macros=()):
    tokens = translate.tokenize(translate.preprocess(source, version, macros))
    translate.refuse_non_metal(tokens)
    tokens = copies(constructors(temporaries(rename(translate.literals(tokens)))))
    tokens = translate.Kernels(translate.attributes(tokens)).tokens
    return translate.render(translate.Spaces(tokens, keep=True).out) + "\n"


def recursion(ir):
    """A function that can reach itself, by its symbol, or None. Metal forbids it."""
    calls = {}
    for line in ir.splitlines():
        if line.startswith("define"):
            name = re.search(r"@([\w.$]+)\(", line)[1]
            calls[name] = set()
        elif line.startswith("}"):
            name = None
        elif " call " in line and (called := re.search(r"@([\w.$]+)\(", line)):
            calls[name].add(called[1])
    for start in calls:
        seen, todo = set(), list(calls[start])
        while todo:
            at = todo.pop()
            if at == start:
                return start
            if at not in seen:
                seen.add(at)
                todo += calls.get(at, ())
    return None


def check(source, version=310, macros=()):
    """Raises RefusedError with the compiler's message, or says nothing."""
    text = translated(source, version, macros)
    command = [translate.find_compiler(), *FLAGS, "-S", "-emit-llvm", "-Xclang", "-disable-llvm-passes", "-o", "-", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise RefusedError(in_metal_words(done.stderr))
    if name := recursion(done.stdout):
        raise RefusedError(f"program_source: error: recursion is not supported in Metal: {name}")


def in_metal_words(message):
    words = {"__global": "device", "__local": "threadgroup", "__constant": "constant", "__private": "thread"}
    return re.sub("__(global|local|constant|private)", lambda match: words[match[0]], message)


def inlined(path):
    """The file with its own headers inlined, each once, as the host gives it to Metal."""
    done = set()

    def text_of(file):
        return re.sub(r'^#include "([^"]+)"$', header, file.read_text(encoding="utf-8"), flags=re.MULTILINE)

    def header(match):
        file = path.parent / match[1]
        if file in done:
            return ""
        done.add(file)
        return text_of(file)

    return text_of(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--version", type=int, action="append", help="__METAL_VERSION__; 310 and 400 if not given")
    options = parser.parse_args()
    refused = False
    for path in options.files:
        for version in options.version or (310, 400):
            try:
                check(inlined(path), version)
                print(f"{path.name} as Metal {version / 100:.1f}: ok")
            except RefusedError as error:
                refused = True
                print(f"{path.name} as Metal {version / 100:.1f}: refused\n{error}")
    sys.exit(refused)


if __name__ == "__main__":
    main()
