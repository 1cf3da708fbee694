"""Metal Shading Language to C++, for any back end.

The output is C++20 that includes "metal.h". Which metal.h is found decides the back end: shim/metal.h runs the kernels
on the CPU, another one may make them CUDA kernels. The words that each metal.h must define are few:
msl::device_ptr<T>, msl::constant_ptr<T>, msl::threadgroup_ptr<T>, msl::reinterpret_pointer<T>, MSL_HALF, MSL_BFLOAT,
MSL_KERNEL_BODY, MSL_THREADGROUP, MSL_INSTANTIATE, MSL_KERNEL, MSL_BUFFER, MSL_BUILTIN, and namespace metal itself; its
vectors have v.swizzle<0, 1>() for v.xy and v.swizzle_of<0, 1>() where v.xy is assigned to.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

SPACES = ("device", "constant", "threadgroup", "thread")
QUALIFIERS = ("const", "volatile", "constexpr", "static")
SCALARS = ("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float")
OPENERS = {"(": ")", "[": "]", "{": "}", "[[": "]"}
REFUSED = {
    "double": "'double' is not supported in Metal",
    "goto": "'goto' is not supported in Metal",
    "try": "exceptions are not supported in Metal",
    "catch": "exceptions are not supported in Metal",
    "throw": "exceptions are not supported in Metal",
    "new": "'new' is not supported in Metal",
    "delete": "'delete' is not supported in Metal",
    "virtual": "virtual functions are not supported in Metal",
    "dynamic_cast": "'dynamic_cast' is not supported in Metal",
    "typeid": "'typeid' is not supported in Metal",
    "thread_local": "'thread_local' is not supported in Metal",
    "asm": "'asm' is not supported here",
    "erf": "use of undeclared identifier 'erf'",
    "erfc": "use of undeclared identifier 'erfc'",
    "lgamma": "use of undeclared identifier 'lgamma'",
    "tgamma": "use of undeclared identifier 'tgamma'",
    "printf": "use of undeclared identifier 'printf'",
    "std": "use of undeclared identifier 'std'",
    "msl": "'msl' is a name of the simulator",
    "function_constant": "function constants are not supported here",
    "requires": "'requires' is C++20; Metal is C++14 or C++17",
    "concept": "'concept' is C++20; Metal is C++14 or C++17",
    "consteval": "'consteval' is C++20; Metal is C++14 or C++17",
    "co_await": "coroutines are not supported in Metal",
}
# Attributes that change nothing here. `kernel` and those of kernel parameters have their own places.
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
TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r\n\f\v]+|^[ \t]*\#[^\n]*)+)
      |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      |(?P<number>\.?[0-9](?:[eEpP][+-]|[0-9A-Za-z_.])*)
      |(?P<name>[A-Za-z_][A-Za-z_0-9]*)
      |(?P<mark>\[\[|<<=|>>=|<=|>=|->|\+\+|--|&&|\|\||::|==|!=|<<|[-+*/%&|^]=|\.\.\.|[^\s\w])""",
    re.VERBOSE | re.MULTILINE,
)


def find_compiler():
    """METAL_SIM_CXX, else the newest clang of those the simulator was tried with."""
    names = [os.environ.get("METAL_SIM_CXX"), "clang++-19", "clang++"]
    return next((name for name in names if name and shutil.which(name)), "clang++-19")


class RefusedError(Exception):
    """The source breaks a rule of Metal, or uses something this translator does not know."""


@dataclass
class Token:
    text: str
    kind: str  # name, number, string, mark; code: text made by this translator
    space: str = ""  # blanks, line markers and pragmas before it
    line: int = 0


@dataclass
class Parameter:
    name: str
    space: str | None  # address space of a buffer
    attribute: str  # buffer, threadgroup, or the name of a builtin
    index: str = ""


def refuse(token, message):
    raise RefusedError(f"program_source:{token.line}: error: {message}")


def preprocess(source, version, macros=()):
    """Expands macros and conditions as Metal's own preprocessor would; keeps line markers."""
    for number, line in enumerate(source.splitlines(), 1):
        if not line.isascii():
            raise RefusedError(f"program_source:{number}: error: character outside ASCII")
    source = re.sub(r"^[ \t]*#[ \t]*(include|import)[ \t]*<(metal_\w+|simd/simd\.h)>[^\n]*", "", source, flags=re.M)
    source = re.sub(r"^[ \t]*#[ \t]*pragma[ \t]+(once|METAL)\b[^\n]*", "", source, flags=re.M)
    command = [find_compiler(), "-E", "-x", "c++", "-std=c++17", "-undef", "-nostdinc", "-Werror=macro-redefined"]
    command += [f"-D__METAL_VERSION__={version}", "-D__METAL__=1", "-D__METAL_MACOS__=1", "-DMETAL_FUNC=inline"]
    command += [f"-D{macro}" for macro in macros] + ["-"]
    done = subprocess.run(command, input=f'#line 1 "program_source"\n{source}', capture_output=True, text=True)
    if done.returncode:
        raise RefusedError(done.stderr)
    return done.stdout


def tokenize(text):
    tokens, space, line, at = [], "", 1, 0
    while at < len(text):
        match = TOKEN.match(text, at)
        if not match:
            raise RefusedError(f"program_source:{line}: error: unexpected character {text[at]!r}")
        at = match.end()
        if match.lastgroup == "space":
            space, line = blanks(match.group(), line)
        else:
            tokens.append(Token(match.group(), match.lastgroup, space, line))
            space = ""
    return tokens


def blanks(text, line):
    """Line markers become #line, so that messages name the shader's own lines."""
    out = []
    for part in text.split("\n"):
        marker = re.match(r'\s*#\s*(\d+) "([^"]*)"', part)
        out.append(f'#line {marker[1]} "{marker[2]}"' if marker else part)
        line = int(marker[1]) - 1 if marker else line
        line += 1
    return "\n".join(out), line - 1


def render(tokens):
    return "".join(token.space + token.text for token in tokens)


def closing(tokens, i):
    """Index of the bracket that closes tokens[i]; for an attribute, of the second of its two."""
    depth, want = 0, "]]" if tokens[i].text == "[[" else None
    for j in range(i, len(tokens)):
        text = tokens[j].text
        depth += {"(": 1, "[": 1, "{": 1, "[[": 2, ")": -1, "]": -1, "}": -1}.get(text, 0)
        if depth == 0:
            return j
    refuse(tokens[i], f"'{tokens[i].text}' is not closed {want or ''}")


def closing_angle(tokens, i):
    depth, j = 0, i
    while j < len(tokens):
        text = tokens[j].text
        if text in OPENERS:
            j = closing(tokens, j)
        elif text == "<":
            depth += 1
        elif text == ">":
            depth -= 1
            if depth == 0:
                return j
        elif text in (";", "{", "}"):
            break
        j += 1
    refuse(tokens[i], "'<' is not closed")


def split(tokens):
    """The parts between commas, not counting those inside brackets."""
    parts, part, i = [], [], 0
    while i < len(tokens):
        end = i
        if tokens[i].text in OPENERS:
            end = closing(tokens, i)
        elif tokens[i].text == "<" and part and part[-1].kind == "name":
            try:
                end = closing_angle(tokens, i)
            except RefusedError:
                end = i
        if tokens[i].text == ",":
            parts.append(part)
            part = []
        else:
            part += tokens[i : end + 1]
        i = end + 1
    return [*parts, part] if part or parts else []


def refuse_non_metal(tokens):
    """What Metal refuses and C++ accepts."""
    refuse_words(tokens)
    refuse_lambdas(tokens)
    refuse_plain_pointers(tokens)


def type_names(tokens):
    """The names of types: Metal's own, the shader's structs, aliases and template parameters."""
    names = {"void", "unsigned", "signed", "size_t", "ptrdiff_t", "vec", "atomic", "simdgroup_matrix"}
    for scalar in SCALARS:
        names |= {scalar, *(f"{prefix}{scalar}{n}" for n in "234" for prefix in ("", "packed_"))}
    names |= {f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)}
    names |= {f"atomic_{kind}" for kind in ("int", "uint", "float", "bool", "ulong")}
    for i, token in enumerate(tokens[:-1]):
        if token.text in ("struct", "class", "typename", "enum", "using") and tokens[i + 1].kind == "name":
            names.add(tokens[i + 1].text)
    return names - {"namespace", "metal"}


def refuse_plain_pointers(tokens):
    names = type_names(tokens)
    for i in range(1, len(tokens)):
        if tokens[i].text not in ("*", "&"):
            continue
        j = i - 1
        while j and tokens[j].text in ("const", "volatile"):
            j -= 1
        if tokens[j].text == ">":
            j = opening_angle(tokens, j) - 1
        if tokens[j].text not in names or tokens[j].kind != "name" or tokens[j - 1].text in (".", "->"):
            continue
        j -= 1
        while tokens[j].text in ("::", "const", "volatile", "typename") or tokens[j + 1].text == "::":
            j -= 1
        if tokens[j].text not in SPACES:
            kind = "pointer" if tokens[i].text == "*" else "reference"
            refuse(tokens[i], f"{kind} type must have explicit address space qualifier")


def opening_angle(tokens, i):
    depth = 0
    while i and depth + {">": 1, "<": -1}.get(tokens[i].text, 0) != 0:
        depth += {">": 1, "<": -1}.get(tokens[i].text, 0)
        i -= 1
    return i


def refuse_words(tokens):
    for i, token in enumerate(tokens):
        if token.kind == "name" and token.text in REFUSED:
            is_member = i and tokens[i - 1].text in (".", "->")
            if not is_member:
                refuse(token, REFUSED[token.text])


def refuse_lambdas(tokens):
    for i in range(1, len(tokens)):
        before = tokens[i - 1]
        starts = (before.kind == "mark" and before.text not in (")", "]", ">")) or before.text == "return"
        if tokens[i].text == "[" and starts:
            refuse(tokens[i], "lambda expressions are not supported in Metal 3.1")


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
    """&x[i] becomes (x + (i)): the same thing, and a checked pointer stays a checked pointer."""
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
    for i in range(1, len(tokens) - 1):
        token = tokens[i]
        if tokens[i - 1].text not in (".", "->") or not re.fullmatch("[xyzw]{2,4}", token.text):
            continue
        letters = ", ".join(str("xyzw".index(letter)) for letter in token.text)
        is_target = tokens[i + 1].text in ("=", "+=", "-=", "*=", "/=")
        token.text = f"template {'swizzle_of' if is_target else 'swizzle'}<{letters}>()"
        token.kind = "code"
    return tokens


def attributes(tokens):
    """Every [[...]] becomes one token of kind attribute whose space holds nothing of the source."""
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
            if part[0].text not in known | BUILTINS | HARMLESS:
                refuse(part[0], f"attribute '{text}' is not supported here")
            out.append(Token(text, "name" if text == "kernel" else "attribute", space, tokens[i].line))
            space = ""
        i = end + 1
    return out


def without_attributes(tokens):
    """Keeps the line breaks before them, so that lines stay what they are."""
    out, space = [], ""
    for token in tokens:
        if token.kind == "attribute":
            space += token.space
        else:
            token.space, space = space + token.space, ""
            out.append(token)
    return out


def argument(token, name):
    match = re.fullmatch(rf"{name}\s*\((.*)\)", token.text, re.DOTALL)
    return match[1].strip() if match and token.kind == "attribute" else None


def attribute(marks, name):
    """The argument of the attribute of that name, or None."""
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
        if one.index and slot in taken:
            refuse(tokens[0], f"[[{one.attribute}({one.index})]] is used twice")
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
        self.depth = 0  # of braces: above 0 we are in a namespace
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
        plain = "".join(re.findall(r'"([^"]*)"', host_name))
        if plain in self.host_names:
            refuse(at, f"two kernels have the host_name '{plain}'")
        self.host_names.add(plain)
        limit = attribute(marks, "max_total_threads_per_threadgroup") or "0"
        self.count += 1
        arguments = ", ".join(
            f'MSL_BUFFER({p.space}, ({p.index}), "{p.name}")' if p.space else f"MSL_BUILTIN({p.attribute})"
            for p in self.definitions[name]
        )
        text = f'MSL_KERNEL({self.count}, "{plain}", ({limit}), ({arguments}), {render(function).strip()})'
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


class Spaces:
    """Replaces the words device, constant, threadgroup and thread; or, with keep, threadgroup variables only."""

    def __init__(self, tokens, keep=False):
        self.out = []
        self.keep = keep
        self.ordinal = 0
        self.kernel_depth = None  # brace depth of the kernel body we are in
        depth, i = 0, 0
        while i < len(tokens):
            token = tokens[i]
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
            if token.text == "reinterpret_cast" and not keep:
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
        if tokens[i].text in (";", "{", "=") and self.out[-1].text == ")":  # the space of a member function's object
            self.emit("".join(f" {q}" for q in [*qualifiers, word.text if self.keep else ""]), lead, word)
            return i
        if tokens[i].text in ("*", "&"):  # `T thread& x`, `T* thread& x`: the type stands before the word
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
        if after == "(" and tokens[end + 1].text in ("*", "&"):
            refuse(word, "pointers and references to arrays with an address space are not supported here")
        if self.keep and (word.text != "threadgroup" or after in ("&", "*")):
            self.emit(f"{storage}{word.text} {cv}{text}", lead, word)
            return end
        if word.text == "constant" and "const " not in cv and "constexpr" not in storage:
            cv = "const " + cv
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

    def variables(self, tokens, word, lead, kind, i):
        if self.kernel_depth is None:
            refuse(word, "a threadgroup variable must be declared in a kernel")
        end = i
        while tokens[end].text not in (";", ")", "{", "="):
            end = closing(tokens, end) + 1 if tokens[end].text == "[" else end + 1
        if tokens[end].text != ";":
            refuse(word, "a threadgroup variable cannot be initialized where it is declared")
        for part in split(tokens[i:end]):
            extents = render(part[1:]).strip()
            self.emit(f"MSL_THREADGROUP({part[0].text}, {self.ordinal}, ({extents}), {kind});", lead, word)
            self.ordinal += 1
        return end + 1

    def emit(self, text, lead, word):
        self.out.append(Token(text, "code", lead, word.line))


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
    tokens = tokenize(preprocess(source, version, macros))
    refuse_non_metal(tokens)
    tokens = swizzles(addresses(literals(tokens)))
    tokens = Kernels(attributes(tokens)).tokens
    return f'#include "metal.h"\n{render(Spaces(tokens).out)}\n'


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("-o", "--output", default="-")
    parser.add_argument("--version", type=int, default=310, help="__METAL_VERSION__")
    parser.add_argument("-D", dest="macros", action="append", default=[])
    options = parser.parse_args()
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
