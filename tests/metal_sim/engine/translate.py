"""Translates the Metal Shading Language to C++, for any back end.

The output is C++20 that includes "metal.h". The include path selects the back end: shim/metal.h runs the kernels on the
CPU, another one may make them CUDA kernels. Each metal.h must define these words:
msl::device_ptr<T>, msl::constant_ptr<T>, msl::threadgroup_ptr<T>, msl::reinterpret_pointer<T>, MSL_HALF, MSL_BFLOAT,
MSL_KERNEL_BODY, MSL_THREADGROUP, MSL_INSTANTIATE, MSL_KERNEL, MSL_BUFFER, MSL_BUILTIN, MSL_FUNCTION_CONSTANT, and
namespace metal itself; its vectors have v.msl_swizzle<0, 1>() for v.xy and v.msl_swizzle_of<0, 1>() where v.xy is
assigned to. All names that begin with msl are the back end's own: a shader that uses one is refused. A shader of
Metal 4 that includes MetalPerformancePrimitives.h gets mpp.h as well, with msl::in_space<msl::Space::device, T> for a
`device T` among template arguments; only shim/ has it.
"""

import argparse
import gc
import itertools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # needed if this is imported as part of a package
from metal_rules import refuse_non_metal, skip_to, without_constructor_spaces, without_repeated_methods
from metal_tokens import (
    OPENERS,
    QUALIFIERS,
    SPACES,
    RefusedError,
    Token,
    closing,
    closing_angle,
    refuse,
    render,
    split,
    tokenize,
)

# Attributes without an effect here. `kernel` and the attributes of kernel parameters are handled separately.
HARMLESS = {"likely", "unlikely", "maybe_unused", "nodiscard", "fallthrough", "always_inline", "unroll"}
BUILTINS = {
    "thread_position_in_grid",
    "threadgroup_position_in_grid",
    "thread_position_in_threadgroup",
    "thread_index_in_threadgroup",
    "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "threadgroups_per_grid",
    "threads_per_grid",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "threads_per_simdgroup",
    "thread_execution_width",
    "thread_index_in_quadgroup",
    "quadgroup_index_in_threadgroup",
}


# Without one of Metal's headers there are only keywords and C++'s own types.
LIBRARY_NAME = re.compile(
    r"\b(metal|u(char|short|int|long)[234]?|(bool|char|short|int|long|half|float)[234]|u?int\d+_t)\b"
)


# Headers with the names of Apple's frameworks. The back end has their declarations.
FRAMEWORKS = Path(__file__).resolve().parent / "frameworks"
MPP = "#pragma metal_sim mpp"  # in MetalPerformancePrimitives.h


def find_compiler():
    """METAL_SIM_CXX, else the newest clang with which the simulator was tested."""
    names = [os.environ.get("METAL_SIM_CXX"), "clang++-19", "clang++"]
    return next((name for name in names if name and shutil.which(name)), "clang++-19")


@dataclass
class Parameter:
    name: str
    space: str | None  # address space of a buffer
    attribute: str  # buffer, threadgroup, or the name of a builtin
    index: str = ""


def without_comment(match):
    return match[0] if match[0].startswith('"') else "\n" * match[0].count("\n") or " "


def without_comments(source):
    """The shader without its comments, after the checks that need its includes."""
    code = re.sub(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', without_comment, source, flags=re.DOTALL)
    for number, line in enumerate(code.splitlines(), 1):
        if not line.isascii():
            raise RefusedError(f"program_source:{number}: error: character outside ASCII")
    includes = re.search(r"^[ \t]*#[ \t]*(include|import)[ \t]*<metal_\w+>", code, re.MULTILINE)
    if not includes and (name := LIBRARY_NAME.search(code)):
        message = f"use of undeclared identifier '{name[0]}' without #include <metal_stdlib>"
        raise RefusedError(f"program_source:{code.count(chr(10), 0, name.start()) + 1}: error: {message}")
    return code


def preprocess(source, version, macros=()):
    """Expand macros and conditions as Metal's own preprocessor would; keep line markers."""
    source = without_comments(source)
    source = re.sub(r"^[ \t]*#[ \t]*(include|import)[ \t]*<(metal_\w+|simd/simd\.h)>[^\n]*", "", source, flags=re.M)
    source = re.sub(r"^[ \t]*#[ \t]*pragma[ \t]+(once|METAL)\b[^\n]*", "", source, flags=re.M)
    if not macros and not re.search(r"[#\\]|__|METAL_FUNC", source):  # nothing to expand
        return f'# 1 "program_source"\n{source}'
    command = [find_compiler(), "-E", "-x", "c++", "-std=c++17", "-undef", "-nostdinc"]
    command += ["-Werror=macro-redefined", "-Werror=c++23-extensions"]  # #elifdef
    command += [f"-D__METAL_VERSION__={version}", "-D__METAL__=1", "-D__METAL_MACOS__=1", "-DMETAL_FUNC=inline"]
    command += ["-D__HAVE_TENSOR__=1", "-isystem", str(FRAMEWORKS)] if version >= 400 else []
    command += [f"-D{macro}" for macro in macros] + ["-"]
    text = f'#line 1 "program_source"\n{source}'
    done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", errors="surrogateescape")
    if done.returncode:
        raise RefusedError(done.stderr)
    return done.stdout


def literals(tokens):
    """A floating literal without suffix is a float in Metal."""
    for token in tokens:
        if token.kind != "number":
            continue
        text = token.text
        is_hex = text[:2].lower() == "0x"
        is_float = "." in text or (re.search("[pP]", text) if is_hex else re.search("[eE]", text))
        match = re.fullmatch(r"(.*?[0-9.])(bf|BF|[hHfFlL])?", text) if is_float and not is_hex else None
        if is_hex and is_float:
            token.text = text if text[-1] in "fF" else text + "f"
        elif match:
            digits, suffix = match[1], (match[2] or "f").lower()
            if suffix == "l":
                refuse(token, "'long double' is not supported in Metal")
            token.text = {"f": digits + "f", "h": f"MSL_HALF({digits})", "bf": f"MSL_BFLOAT({digits})"}[suffix]
        elif is_float:
            refuse(token, f"invalid suffix on floating constant '{text}'")
    return tokens


def is_cast(tokens, close):
    """Whether the ')' at `close` ends a cast to a pointer, such as (device float*)."""
    return close > 0 and tokens[close - 1].text == "*"


def addresses(tokens):
    """&x[i] becomes (x + (i)), which is equivalent and keeps a checked pointer checked."""
    out, i = [], 0
    while i < len(tokens):
        token = tokens[i]
        previous = tokens[i - 1] if i else None
        unary = token.text == "&" and previous is not None
        if unary and previous.kind in ("name", "number", "string"):
            unary = previous.text in ("return", "case", "else", "do")
        elif unary and previous.text in (")", "]", ">"):
            unary = previous.text == ")" and is_cast(tokens, i - 1)
        end, subscript = subscripted(tokens, i + 1) if unary else (i, None)
        if subscript is None:
            out.append(token)
            i += 1
            continue
        inner = addresses(tokens[i + 1 : subscript])
        index = addresses(tokens[subscript + 1 : end])
        out += [Token("(", "mark", token.space, token.line), *inner, Token("+", "mark", " "), Token("(", "mark", " ")]
        out += [*index, Token(")", "mark"), Token(")", "mark")]
        i = end + 1
    return out


def subscripted(tokens, i):
    """(end, start of the last subscript) of the postfix expression at i; (i, None) if it does not end in one."""
    if tokens[i].text == "(":
        j = closing(tokens, i) + 1
    elif tokens[i].kind == "name":
        j = i + 1
    else:
        return i, None
    last = None
    while j < len(tokens):
        text = tokens[j].text
        if text in (".", "->", "::"):
            j, last = j + 2, None
        elif text in ("(", "["):
            last = j if text == "[" else None
            j = closing(tokens, j) + 1
        else:
            break
    return j - 1, last


def swizzles(tokens):
    own = {name.text for before, name in itertools.pairwise(tokens) if before.text not in (".", "->")}
    for i in range(1, len(tokens) - 1):
        if tokens[i - 1].text not in (".", "->"):
            continue
        token = tokens[i]
        is_color = re.fullmatch("[rgba]{2,4}", token.text) and token.text not in own
        is_swizzle = is_color or re.fullmatch("[xyzw]{2,4}", token.text)
        if not is_swizzle:
            continue
        letters = ", ".join(str("xyzwrgba".index(letter) % 4) for letter in token.text)
        is_target = tokens[i + 1].text in ("=", "+=", "-=", "*=", "/=")
        token.text = f"template {'msl_swizzle_of' if is_target else 'msl_swizzle'}<{letters}>()"
        token.kind = "code"
    return tokens


def attributes(tokens):
    """Every [[...]] becomes one token of kind attribute, without the space before it."""
    out, i = [], 0
    while i < len(tokens):
        if tokens[i].text != "[[":
            out.append(tokens[i])
            i += 1
            continue
        end, space = closing(tokens, i), tokens[i].space
        for part in split(tokens[i + 1 : end - 1]):
            text = render(part).strip()
            known = {"kernel", "host_name", "max_total_threads_per_threadgroup", "buffer", "threadgroup"}
            known |= {"function_constant"}
            if part[0].text not in known | BUILTINS | HARMLESS:
                refuse(part[0], f"attribute '{text}' is not supported here")
            out.append(Token(text, "name" if text == "kernel" else "attribute", space, tokens[i].line))
            space = ""
        i = end + 1
    return out


def without_attributes(tokens):
    """Keeps the line breaks before attributes, so that line numbers do not change."""
    out, space = [], ""
    for token in tokens:
        if token.kind == "attribute":
            space += token.space
        else:
            token.space, space = space + token.space, ""
            out.append(token)
    return out


def argument(token, name):
    if token.kind != "attribute":
        return None
    match = re.fullmatch(rf"{name}\s*\((.*)\)", token.text, re.DOTALL)
    return match[1].strip() if match else None


def attribute(marks, name):
    """The argument of the attribute with this name, or None."""
    return next((value for mark in marks if (value := argument(mark, name))), None)


def parameter(tokens):
    marks = [t for t in tokens if t.kind == "attribute"]
    plain = [t for t in tokens if t.kind != "attribute"]
    space = next((t.text for t in plain if t.text in SPACES), None)
    name = plain[-1].text
    for mark in marks:
        if mark.text in BUILTINS:
            return Parameter(name, None, mark.text)
        for kind in ("buffer", "threadgroup"):
            index = argument(mark, kind)
            if index is None:
                continue
            if (space == "threadgroup") != (kind == "threadgroup") or space in (None, "thread"):
                refuse(tokens[0], f"[[{kind}]] does not fit the address space of '{name}'")
            return Parameter(name, space, kind, index)
        refuse(mark, f"attribute '{mark.text}' on kernel parameter '{name}' is not supported here")
    refuse(tokens[0], f"kernel parameter '{name}' needs an attribute: [[buffer(n)]], [[threadgroup(n)]] or a builtin")


def parameters(tokens):
    result = [parameter(part) for part in split(tokens)]
    taken = set()
    for one in result:
        slot = (one.attribute, one.index)
        if slot in taken:
            shown = f"{one.attribute}({one.index})" if one.index else one.attribute
            refuse(tokens[0], f"[[{shown}]] is used twice")
        taken.add(slot)
    return result


class Kernels:
    """Finds kernel definitions and instantiations, and replaces the latter by MSL_KERNEL."""

    def __init__(self, tokens):
        self.definitions = {}
        self.host_names = set()
        self.count = 0
        self.tokens = self.scan(tokens)

    def scan(self, tokens):
        out, i, after = [], 0, {}
        self.depth = 0  # of braces; above 0: in a namespace
        while i < len(tokens):
            self.depth += {"{": 1, "}": -1}.get(tokens[i].text, 0)
            if tokens[i].text == "kernel" and tokens[i].kind == "name":
                i = self.kernel(tokens, i, out, after)
                continue
            out.append(tokens[i])
            if i in after:
                out.append(after.pop(i))
            i += 1
        return out

    def kernel(self, tokens, i, out, after):
        marks, space = [], tokens[i].space
        i += 1
        while tokens[i].kind == "attribute":
            marks.append(tokens[i])
            i += 1
        while out and out[-1].kind == "attribute":
            space = out[-1].space + space
            marks.append(out.pop())
        tokens[i].space = space + tokens[i].space
        if tokens[i].text == "decltype":
            return self.instantiation(tokens, closing(tokens, i + 1) + 1, out, marks)
        if tokens[i].text != "void":
            refuse(tokens[i], "a kernel must return void")
        if out and out[-1].text == "template":
            return self.instantiation(tokens, i + 1, out, marks)
        return self.definition(tokens, i, out, marks, after)

    def definition(self, tokens, i, out, marks, after):
        name, group = tokens[i + 1], i + 2
        if tokens[group].text != "(":
            refuse(name, "expected a kernel's parameters")
        end = closing(tokens, group)
        if tokens[end + 1].text != "{":
            refuse(name, f"kernel '{name.text}' is declared but not defined here")
        body = closing(tokens, end + 1)
        self.definitions[name.text] = parameters(tokens[group + 1 : end])
        out += without_attributes(tokens[i : end + 2])
        out.append(Token(" MSL_KERNEL_BODY ", "code", "", tokens[end + 1].line))
        self.depth += 1
        if not is_template(out):
            if self.depth > 1 and not attribute(marks, "host_name"):
                refuse(name, f"kernel '{name.text}' is in a namespace and needs a [[host_name]]")
            after[body] = self.registration([name], name.text, marks, tokens[body])
        return end + 2

    def instantiation(self, tokens, i, out, marks):
        start = out.pop()
        if start.text != "template":
            refuse(start, "expected 'template' before an instantiated kernel")
        end = i
        while tokens[end].text not in (";", "("):
            end = closing_angle(tokens, end) + 1 if tokens[end].text == "<" else end + 1
        function = tokens[i:end]
        if index_of(function, "<") == len(function):
            shown = render(function).strip()
            refuse(start, f"explicit instantiation of '{shown}' does not refer to a function template")
        name = next(t.text for t in reversed(function[: index_of(function, "<")]) if t.kind == "name")
        while tokens[end].text != ";":
            end += 1
        registration = self.registration(function, name, marks, start)
        registration.text = f" MSL_INSTANTIATE({render(function).strip()}){registration.text}"
        registration.space = start.space + "\n" * sum(t.space.count("\n") for t in tokens[i : end + 1])
        out.append(registration)
        return end + 1

    def registration(self, function, name, marks, at):
        if name not in self.definitions:
            refuse(at, f"no kernel template named '{name}'")
        host_name = attribute(marks, "host_name") or f'"{name}"'
        if not host_name.startswith('"'):
            refuse(at, f"the host_name of kernel '{name}' must be a string")
        plain = "".join(re.findall(r'"([^"]*)"', host_name))
        if plain in self.host_names:
            refuse(at, f"two kernels have the host_name '{plain}'")
        self.host_names.add(plain)
        limit = attribute(marks, "max_total_threads_per_threadgroup")
        self.count += 1
        arguments = ", ".join(
            f'MSL_BUFFER({p.space}, ({p.index}), "{p.name}")' if p.space else f"MSL_BUILTIN({p.attribute})"
            for p in self.definitions[name]
        )
        text = f'MSL_KERNEL({self.count}, "{plain}", ({limit or 0}), ({arguments}), {render(function).strip()})'
        if limit:
            text = f'static_assert(({limit}) > 0, "max_total_threads_per_threadgroup is 1 or more"); {text}'
        return Token(" " + re.sub(r"\s+", " ", text) + " ", "code", "", at.line)


def index_of(tokens, text):
    return next((i for i, t in enumerate(tokens) if t.text == text), len(tokens))


def is_template(out):
    """Whether the definition whose head ends `out` follows `template <...>`."""
    for token in reversed(out[:-1]):
        if token.text in (";", "}") or token.kind == "code":
            return False
        if token.text == "template":
            return True
    return False


def function_constants(macros):
    """The values of function constants by index, from macros MSL_FUNCTION_CONSTANT_0=true and so on."""
    found = (re.fullmatch(r"MSL_FUNCTION_CONSTANT_(\d+)=(.*)", macro) for macro in macros)
    return {match[1]: match[2] for match in found if match}


class Spaces:
    """Replaces the words device, constant, threadgroup and thread; or, with keep, threadgroup variables only."""

    def __init__(self, tokens, keep=False, constants=()):
        self.out = []
        self.keep = keep
        self.constants = dict(constants)  # values of function constants by index; others have no value
        self.ordinal = 0
        self.kernel_depth = None  # brace depth of the current kernel's body
        depth, i = 0, 0
        while i < len(tokens):
            token = tokens[i]
            if index := argument(token, "function_constant"):
                i = self.function_constant(tokens, i, index)
                continue
            if token.kind == "attribute":
                tokens[i + 1].space = token.space + tokens[i + 1].space
                i += 1
                continue
            if token.text in SPACES and token.kind == "name":
                i = self.space(tokens, i)
                continue
            depth += {"{": 1, "}": -1}.get(token.text, 0)
            if token.text == " MSL_KERNEL_BODY ":
                self.kernel_depth, self.ordinal = depth, 0
            elif self.kernel_depth is not None and depth < self.kernel_depth:
                self.kernel_depth = None
            if token.text in ("reinterpret_cast", "const_cast") and not keep:
                token.text = "::msl::reinterpret_pointer"
            self.out.append(token)
            i += 1

    def space(self, tokens, i):
        word, lead = tokens[i], tokens[i].space
        qualifiers = []
        while self.out and self.out[-1].kind == "name" and self.out[-1].text in QUALIFIERS:
            taken = self.out.pop()
            qualifiers.insert(0, taken.text)
            lead = taken.space
        i += 1
        is_end = self.out and self.out[-1].text == ")"
        if is_end and tokens[i].text in (";", "{", "=", ":"):  # the space of a member function's object
            self.emit("".join(f" {q}" for q in [*qualifiers, word.text if self.keep else ""]), lead, word)
            return i
        if tokens[i].text in ("*", "&"):  # `T thread& x`, `T* thread& x`: the type is before the word
            if word.text != "thread":
                refuse(word, f"write '{word.text}' before the type it belongs to")
            if self.keep:
                self.out.append(word)
            return i
        start = i
        while tokens[i].text in QUALIFIERS:
            qualifiers.append(tokens[i].text)
            i += 1
            start = i
        end = type_end(tokens, start)
        kind = tokens[start:end]
        while tokens[end].text in ("const", "volatile"):
            qualifiers.append(tokens[end].text)
            end += 1
        return self.write(tokens, word, lead, qualifiers, kind, end)

    def write(self, tokens, word, lead, qualifiers, kind, end):
        cv = "".join(q + " " for q in ("const", "volatile") if q in qualifiers)
        storage = "".join(q + " " for q in ("static", "constexpr") if q in qualifiers)
        inner = Spaces(kind, self.keep).out
        text = render(inner).strip()
        after = tokens[end].text
        if after in (",", ">") and self.is_template_argument():
            kept = f"{word.text} {cv}{text}"
            self.emit(kept if self.keep else f"::msl::in_space<::msl::Space::{word.text}, {cv}{text}>", lead, word)
            return end
        if after == "(" and tokens[end + 1].text in ("*", "&"):
            refuse(word, "pointers and references to arrays with an address space are not supported here")
        if self.keep and (word.text != "threadgroup" or after in ("&", "*")):
            self.emit(f"{storage}{word.text} {cv}{text}", lead, word)
            return end
        if word.text == "constant" and "const " not in cv and "constexpr" not in storage:
            cv = "const " + cv
        if after == "*" and text == "auto":
            self.emit(f"{storage}auto", lead, word)
            return end + 1
        if after == "*" and word.text != "thread":
            if tokens[end + 1].text == "*":
                refuse(word, "a pointer to a pointer needs the address space of both")
            self.emit(f"{storage}::msl::{word.text}_ptr<{cv}{text}>", lead, word)
            end += 1
            while tokens[end].text in ("restrict", "__restrict", "__restrict__"):
                end += 1
            return end
        if word.text == "threadgroup" and after not in ("&", "*"):
            return self.variables(tokens, word, lead, cv + text, end)
        self.emit(storage + cv + text, lead, word)
        return end

    def is_template_argument(self):
        """Whether the next word begins a template argument, as in tensor<device half, ...>."""
        before = self.out[-2:]
        return len(before) == 2 and before[1].text == "<" and before[0].kind == "name"

    def variables(self, tokens, word, lead, kind, i):
        if self.kernel_depth is None:
            refuse(word, "a threadgroup variable must be declared in a kernel")
        end = i
        while tokens[end].text not in (";", ")"):
            end = closing(tokens, end) + 1 if tokens[end].text in OPENERS else end + 1
        for part in split(tokens[i:end]):
            part = without_zeros(part, word)
            extents = render(part[1:]).strip()
            self.emit(f"MSL_THREADGROUP({part[0].text}, {self.ordinal}, ({extents}), {kind});", lead, word)
            self.ordinal += 1
        return end + 1

    def function_constant(self, tokens, i, index):
        """`constant bool wide [[function_constant(0)]];`, whose type and name are already in the output."""
        if tokens[i + 1].text != ";" or self.out[-2:-1] == []:
            refuse(tokens[i], "a function constant is a variable of its own, without a value")
        name, declared = self.out.pop(), self.out.pop()
        kind = re.sub(r"\b(constant|const|static)\b", "", declared.text).strip()
        text = f"MSL_UNSET_FUNCTION_CONSTANT({index}, {name.text}, {kind})"
        if index in self.constants:
            text = f"MSL_FUNCTION_CONSTANT({name.text}, {self.constants[index]}, {kind})"
        self.emit(text, declared.space, tokens[i])
        return i + 2

    def emit(self, text, lead, word):
        self.out.append(Token(text, "code", lead, word.line))


def without_zeros(part, word):
    """Metal accepts zeros as the initial value of a threadgroup variable, but ignores them."""
    end = skip_to(part, 0, len(part), "=", "{", "(")
    value = re.sub(r"MSL_\w+\((.*?)\)|[={}(),;]", r"\1 ", render(part[end:]))
    if not re.fullmatch(r"[\s0.fhu]*|\s*false\s*", value):
        refuse(word, "a threadgroup variable cannot be initialized where it is declared")
    return part[:end]


def type_end(tokens, i):
    """Index after the type name that starts at i."""
    basic = {"unsigned", "signed", "char", "short", "int", "long"}
    if tokens[i].text in basic:
        while tokens[i].text in basic:
            i += 1
        return i
    if tokens[i].text == "decltype":
        return closing(tokens, i + 1) + 1
    while True:
        if tokens[i].text in ("typename", "template", "struct", "::"):
            i += 1
            continue
        if tokens[i].kind != "name":
            refuse(tokens[i], f"expected a type, found '{tokens[i].text}'")
        i += 1
        if tokens[i].text == "<":
            i = closing_angle(tokens, i) + 1
        if tokens[i].text != "::":
            return i


def translate(source, version=310, macros=()):
    text = preprocess(source, version, macros)
    headers = ["metal.h", "mpp.h"] if MPP in text else ["metal.h"]
    tokens = tokenize(text.replace(MPP, ""))
    refuse_non_metal(tokens, version)
    tokens = without_repeated_methods(without_constructor_spaces(tokens))
    tokens = swizzles(addresses(literals(tokens)))
    tokens = Kernels(attributes(tokens)).tokens
    includes = "".join(f'#include "{name}"\n' for name in headers)
    return f"{includes}{render(Spaces(tokens, constants=function_constants(macros)).out)}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("-o", "--output", default="-")
    parser.add_argument("--version", type=int, default=310, help="__METAL_VERSION__")
    parser.add_argument("-D", dest="macros", action="append", default=[])
    options = parser.parse_args()
    gc.disable()  # tokens are kept until the end
    with open(options.source, encoding="utf-8", errors="surrogateescape") as file:
        source = file.read()
    try:
        text = translate(source, options.version, options.macros)
    except RefusedError as error:
        sys.exit(str(error))
    with open(1 if options.output == "-" else options.output, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main()
