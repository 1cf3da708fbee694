"""Checks shaders for errors that plain C++ cannot detect: pointers and references into the wrong address space, methods
called on objects outside thread memory, program-scope variables outside constant or without a constant value,
recursion, and C++ that is newer than the language (Metal 3 is C++14, Metal 4 is C++17).

clang's C++ for OpenCL has Metal's address spaces under other names. Every pointer and reference must name its address
space (metal_rules.py). A method without an address space is for thread memory; from Metal 4.1 on, for any memory.

`python address_spaces.py FILE.metal ...` prints one line for each file and exits 1 if one is refused.
"""

import argparse
import functools
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import metal_rules  # noqa: E402
import translate  # noqa: E402
from metal_tokens import RefusedError, Token, closing_angle, render, tokenize  # noqa: E402

VERSIONS = (310, 320, 400, 410)
WITHOUT = ["pipes", "device_enqueue", "program_scope_global_variables"]
FLAGS = ["--target=spir64", "-x", "cl", "-Xclang", "-cl-std=clc++2021", "-cl-no-stdinc", "-fno-caret-diagnostics"]
FLAGS += ["-Xclang", "-cl-ext=+cl_khr_fp16," + ",".join(f"-__opencl_c_{name}" for name in WITHOUT)]
# All warnings are off except those that are errors in Metal, and those in NEWER_LANGUAGE.
FLAGS += ["-Wno-everything", "-Werror=global-constructors", "-Werror=c++11-narrowing"]
FLAGS += ["-Wpre-c++17-compat", "-Wc++20-extensions", "-ferror-limit=0"]
FLAGS += ["-include", str(HERE / "opencl" / "metal_stdlib.h")]
# clang's messages about C++ that is newer than the shader's, and the first Metal that has it (0: none).
NEWER_LANGUAGE = {
    "class template argument deduction is incompatible with": 400,
    "uninitialized variable in a constexpr function": 0,
    "implicit 'typename' is a C\\+\\+20 extension": 0,
}
TEMPORARY = re.compile(
    "object parameter of type '(const )?__private [^']*' with an expression of type '(?!(const )?__)"
    "|cannot bind reference in default address space to object in address space '__private'"
    "|could not match '(const )?__private [^']*' against '(?!(const )?__)"
    "|would make '(const )?__private [^']*' equal '(?!(const )?__)"
    "|binding reference of type 'const __private [^']*' to value of type '(?!(const )?__)"
)
VECTOR = re.compile("(packed_)?(bool|char|uchar|short|ushort|int|uint|long|ulong|half|bfloat|float)[234]")
OPENCL_WORDS = {"local", "global", "generic", "pipe", "read_only", "write_only", "read_write", "uniform", "event_t"}


def rename(tokens):
    """Rename words that are reserved in OpenCL but not in Metal, and atomics, which clang would take for OpenCL's."""
    for token in tokens:
        if token.kind == "name" and (token.text in OPENCL_WORDS or token.text.startswith("atomic_")):
            token.text += "_"
    return tokens


def constructors(tokens):
    """float4(x, y, z, w) is ((float4)(...)) in OpenCL; a function call supports Metal's other forms, too."""
    out, i = [], 0
    while i < len(tokens):
        end = None
        if tokens[i].kind == "name" and VECTOR.fullmatch(tokens[i].text):
            end = i + 1
        elif tokens[i].text == "vec" and tokens[i + 1].text == "<":
            end = closing_angle(tokens, i + 1) + 1
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


def references_as_values(tokens):
    """const T for thread const T&."""
    for i, token in enumerate(tokens):
        if token.text == "thread" and tokens[i + 1].text == "const":
            end = tokens[translate.type_end(tokens, i + 2)]
            if end.text == "&":
                token.text = end.text = ""
    return tokens


def without_thread(tokens):
    for token in tokens:
        token.text = "" if token.text == "thread" else token.text
    return tokens


def function_parameters(tokens):
    """template <float (*f)(float)>, whose pointer would get an address space, becomes template <MSL_FUNCTION f>."""
    out, i = [], 0
    while i < len(tokens):
        declares = tokens[i].text == "(" and tokens[i + 1].text == "*" and tokens[i + 2].kind == "name"
        if declares and metal_rules.in_template_parameters(tokens, i):
            while out[-1].text not in ("<", ","):
                out.pop()
            out += [Token(" MSL_FUNCTION ", "code"), tokens[i + 2]]
            i = metal_rules.closing(tokens, i) + 1
            i = metal_rules.closing(tokens, i) + 1
            continue
        out.append(tokens[i])
        i += 1
    return out


def copies(tokens, version):
    """Add constructors to every struct of the shader that lacks them, so that it can be copied from constant memory."""
    out, i = [], 0
    methods = metal_rules.functions(tokens)
    while i < len(tokens):
        out.append(tokens[i])
        brace = record_body(tokens, i)
        if brace is not None:
            is_derived = version < 400 and any(t.text == ":" for t in tokens[i:brace])
            text = members(tokens, i + 1, methods, "DERIVED" if is_derived else "PLAIN")
            out += [*tokens[i + 1 : brace + 1], Token(text, "code")]
            i = brace
        i += 1
    return out


def record_body(tokens, i):
    """Index of the brace that opens the struct whose definition begins at i, or None if none does."""
    if tokens[i].text not in metal_rules.RECORDS or tokens[i + 1].kind != "name" or tokens[i - 1].text == "enum":
        return None
    brace = metal_rules.skip_to(tokens, i, len(tokens), "{", ";", "(", ")", ">", "=")
    return brace if brace < len(tokens) and tokens[brace].text == "{" else None


def members(tokens, name, functions, kind):
    record = tokens[name].text
    own = [f for f in functions if f.record == record]
    made = [f for f in own if tokens[f.name].text == record and tokens[f.name - 1].text != "~"]
    copied = any(t.text == record for f in made for t in tokens[f.opening : f.closing])
    assigned = any(tokens[f.name].text == "operator" and tokens[f.name + 1].text == "=" for f in own)
    text = "" if made else f" MSL_{kind}({record})"
    text += "" if copied else f" MSL_COPIED({record})"
    return text + ("" if assigned else f" MSL_ASSIGNED({record})")


def methods(tokens, version):
    """Up to Metal 4.0, a method without an address space is for thread memory. For clang it is for any memory."""
    ends = {}
    for function in metal_rules.functions(tokens):
        words = {t.text for t in tokens[function.start : function.name]}
        if function.record is None or words & {"static", "friend"} or tokens[function.name].text == function.record:
            continue
        end = metal_rules.skip_to(tokens, function.closing + 1, function.end, "{", ";", "=", "->")
        if not any(t.text in translate.SPACES for t in tokens[function.closing : end]):
            ends[function.closing] = end
    out = []
    for i, token in enumerate(tokens):
        out.append(token)
        if i in ends and version < 410:
            out.append(Token(" thread", "name", "", token.line))
    return out


def translated(source, version=310, macros=(), change=None):
    text = translate.preprocess(source, version, macros)
    includes = f'#include "{HERE / "opencl" / "mpp.h"}"\n' if translate.MPP in text else ""
    tokens = tokenize(text.replace(translate.MPP, ""))
    metal_rules.refuse_non_metal(tokens, version)
    tokens = change(tokens) if change else tokens
    tokens = translate.literals(metal_rules.without_constructor_spaces(rename(tokens)))
    tokens = methods(copies(constructors(function_parameters(tokens)), version), version)
    tokens = translate.Kernels(translate.attributes(tokens)).tokens
    return includes + render(translate.Spaces(tokens, keep=True).out) + "\n"


def recursion(ir):
    """The symbol of a recursive function, or None. Metal forbids recursion."""
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


@functools.lru_cache(maxsize=8)  # most shaders are translated to the same text in several languages
def compiled(text):
    """Compile a translated shader: its errors, all messages, and the IR if there is no error."""
    command = [translate.find_compiler(), *FLAGS, "-S", "-emit-llvm", "-Xclang", "-disable-llvm-passes", "-o", "-", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    errors = (without_warnings(done.stderr) or "clang failed") if done.returncode else ""
    return errors, done.stderr, done.stdout


def without_warnings(messages):
    kept, keep = [], True
    for line in messages.splitlines():
        if not re.search(r"\bnote: ", line):
            keep = not re.search(r"\bwarning: ", line)
        kept += [line] if keep else []
    return "\n".join(kept)


def without_temporaries(messages):
    """In Metal a temporary is in thread memory. For clang it has no address space in its type's name."""
    groups = re.split(r"^(?=.*\berror: )", messages, flags=re.MULTILINE)
    return "".join(group for group in groups if not TEMPORARY.search(group))


def newer_language(messages, version):
    """Warnings about C++ that this Metal does not have, as errors."""
    found = [name for name, first in NEWER_LANGUAGE.items() if not first or version < first]
    lines = [line for line in messages.splitlines() if re.search("|".join(found), line)]
    return "\n".join(line.replace("warning:", "error:") for line in lines)


def check(source, version=310, macros=()):
    """Raise RefusedError with the compiler's message if the shader is refused."""
    errors, messages, ir = compiled(translated(source, version, macros))
    kept = without_temporaries(errors)
    if errors and not kept:  # compile again without temporaries, for the other errors and the call graph
        kept = without_temporaries(compiled(translated(source, version, macros, references_as_values))[0])
        ir = compiled(translated(source, 410, macros, without_thread))[2]
    if problem := kept or newer_language(messages, version):
        raise RefusedError(in_metal_words(problem))
    if name := recursion(ir):
        raise RefusedError(f"program_source: error: recursion is not supported in Metal: {name}")


def in_metal_words(message):
    words = {"__global": "device", "__local": "threadgroup", "__constant": "constant", "__private": "thread"}
    return re.sub("__(global|local|constant|private)", lambda match: words[match[0]], message)


def inlined(path):
    """The file with its own headers inlined, each once, as the host passes it to Metal."""
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
    parser.add_argument("--version", type=int, action="append", help="__METAL_VERSION__; all if not given")
    options = parser.parse_args()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        lines = list(pool.map(lambda path: verdicts(path, options.version or VERSIONS), options.files))
    print("\n".join(line for of_file in lines for line in of_file))
    sys.exit(any(": refused" in line for of_file in lines for line in of_file))


def verdicts(path, versions):
    lines = []
    for version in versions:
        verdict = "ok"
        try:
            check(inlined(path), version)
        except RefusedError as error:
            verdict = f"refused\n{error}"
        lines.append(f"{path.name} as Metal {version / 100:.1f}: {verdict}")
    return lines


if __name__ == "__main__":
    main()
