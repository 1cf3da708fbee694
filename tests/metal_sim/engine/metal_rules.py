"""Code that Metal refuses and clang accepts: one function per rule, on the tokens of a shader after macro expansion.

Every rule has a name, which its tests and the README use. Rules that need types are elsewhere: in the declarations of
shim/ and opencl/, and in the flags and warnings of address_spaces.py.
"""

import re
from dataclasses import dataclass, field

from metal_tokens import OPENERS, SCALARS, SPACES, RefusedError, closing, closing_angle, opening_angle, refuse, split

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
    "register": "'register' is not supported in Metal",
    "asm": "'asm' is not supported here",
    "std": "use of undeclared identifier 'std'",
    "requires": "'requires' is C++20; Metal is C++14 or C++17",
    "concept": "'concept' is C++20; Metal is C++14 or C++17",
    "consteval": "'consteval' is C++20; Metal is C++14 or C++17",
    "constinit": "'constinit' is C++20; Metal is C++14 or C++17",
    "co_await": "coroutines are not supported in Metal",
    "_Float16": "'_Float16' is not a type of Metal; 'half' is",
    "__fp16": "'__fp16' is not a type of Metal; 'half' is",
    "__bf16": "'__bf16' is not a type of Metal; 'bfloat' is",
    "__int128": "'__int128' is not supported in Metal",
    "__float128": "'__float128' is not supported in Metal",
}
# Builtin functions that need no library.
BUILTIN_FUNCTIONS = re.compile(
    "__builtin_(assume|expect|unreachable|bit_cast|offsetof|inff?|nanf?|huge_valf?|fabsf|clzl?|ctzl?|ffs|popcountl?"
    "|bswap(16|32|64)|bitreverse(8|16|32|64)|rotateleft(8|16|32|64)|is_constant_evaluated|LINE|FILE|COLUMN)"
)
RECORDS = ("struct", "class", "union")
# Words before a parenthesis that do not start a function.
NO_FUNCTIONS = {"decltype", "alignas", "static_assert", "__attribute__", "noexcept", "sizeof", "explicit", "alignof"}
RULES = {}


@dataclass
class Function:
    """A function that is declared in a namespace or a struct. The fields are indices into the tokens."""

    start: int
    name: int  # for an operator, the word `operator`
    opening: int  # of its parameters
    closing: int
    body: int | None  # the brace that opens it
    end: int  # of its declaration or definition
    record: str | None  # the struct it is a member of


@dataclass
class Shader:
    tokens: list
    version: int
    functions: list = field(default_factory=list)

    def text(self, i):
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""


def rule(function):
    RULES[function.__name__] = function
    return function


def refuse_non_metal(tokens, version):
    shader = Shader(tokens, version, functions(tokens))
    for name, check in RULES.items():
        try:
            check(shader)
        except RefusedError as error:
            error.rule = name
            raise


# --- finding functions


def functions(tokens):
    found = []
    scan(tokens, 0, len(tokens), None, found)
    return found


def scan(tokens, i, end, record, found):
    """Collect the functions of one namespace or struct, and of those nested in it."""
    start = i
    while i < end:
        text = tokens[i].text
        if text == "template" and tokens[i + 1].text == "<":
            i = closing_angle(tokens, i + 1)
        elif text == "=" and tokens[i - 1].text != "operator":
            i = skip_to(tokens, i, end, ";") - 1
        elif text == "(" and (function := function_at(tokens, start, i, record)):
            found.append(function)
            if function.body:
                scan_local_records(tokens, function.body, function.end, found)
            i, start = function.end, function.end + 1
        elif text in ("(", "[", "[["):
            i = closing(tokens, i)
        elif text == "{":
            last = closing(tokens, i)
            kind, name = scope(tokens[start:i])
            if kind:
                scan(tokens, i + 1, last, name, found)
            i, start = last, last + 1 if kind == "namespace" else start
        elif text == ";" or (text == ":" and tokens[i - 1].text in ("public", "private", "protected")):
            start = i + 1
        i += 1


def scan_local_records(tokens, i, end, found):
    for j in range(i, end):
        if tokens[j].text in RECORDS and tokens[j + 1].kind == "name" and tokens[j - 1].text not in ("<", ","):
            opening = skip_to(tokens, j, end, ";", "{", ")", "=")
            if tokens[opening].text == "{":
                scan(tokens, opening + 1, closing(tokens, opening), tokens[j + 1].text, found)


def skip_to(tokens, i, end, *texts):
    """Index of the next of these tokens, not counting those inside brackets."""
    while i < end and tokens[i].text not in texts:
        i = closing(tokens, i) + 1 if tokens[i].text in OPENERS else i + 1
    return i


def scope(head):
    """("namespace", None) or ("record", its name) for the tokens before a brace; (None, None) for anything else."""
    if any(t.text == "namespace" for t in head) or [t.text for t in head[:1]] == ["extern"]:
        return "namespace", None
    i = 0
    while i < len(head):
        if head[i].text == "template":
            i = closing_angle(head, i + 1)
        elif head[i].text == "enum":
            return None, None
        elif head[i].text in RECORDS:
            name = next((t.text for t in head[i + 1 :] if t.kind == "name"), "")
            return "record", name
        i += 1
    return None, None


def function_at(tokens, start, i, record):
    """The function whose parameters begin at i, or None."""
    before = tokens[i - 1]
    operator = next((j for j in range(start, i) if tokens[j].text == "operator"), None)
    if operator == i - 1 and tokens[i + 1].text == ")":  # operator()
        i += 2
    elif operator is None and (before.kind != "name" or before.text in NO_FUNCTIONS):
        return None
    if (operator is None and tokens[i + 1].text in ("*", "&")) or i == start:
        return None
    close = closing(tokens, i)
    body = skip_to(tokens, close + 1, len(tokens), "{", ";", ":", "=")
    if body < len(tokens) and tokens[body].text == ":":
        body = after_initializers(tokens, body)
    if body >= len(tokens):
        return None
    is_defined = tokens[body].text == "{"
    end = closing(tokens, body) if is_defined else skip_to(tokens, body, len(tokens), ";")
    return Function(start, operator or i - 1, i, close, body if is_defined else None, end, record)


def after_initializers(tokens, i):
    """Index of a constructor's body, whose list of initializers begins at i."""
    while True:
        i = skip_to(tokens, i, len(tokens), "{", "(", ";") if tokens[i].text == "<" else next_bracket(tokens, i)
        i = closing(tokens, i) + 1
        if tokens[i].text != ",":
            return i


def next_bracket(tokens, i):
    while tokens[i].text not in ("(", "{", ";"):
        i += 1
    return i


def is_constructor(shader, function):
    return function.record is not None and shader.text(function.name) == function.record


def without_constructor_spaces(tokens):
    """`S() threadgroup {}` restricts the address space of objects. Neither back end needs it."""
    shader = Shader(tokens, 0, functions(tokens))
    for function in shader.functions:
        if is_constructor(shader, function):
            end = skip_to(tokens, function.closing, function.end, "{", ":", ";", "=")
            for token in tokens[function.closing : end]:
                token.text = "" if token.text in SPACES else token.text
    return [token for token in tokens if token.text or token.space.strip()]


def without_repeated_methods(tokens):
    """Keep one of several overloads of a method that only differ in the address space of the object."""
    seen, gone = set(), []
    for f in functions(tokens):
        end = f.body or f.end
        tail = tokens[f.closing + 1 : end]
        if f.record is None or not any(t.text in SPACES for t in tail):
            continue
        text = [t.text for t in tokens[f.name : f.closing]] + [t.text for t in tail if t.text == "const"]
        key = (f.record, *text)
        gone += [(f.start, f.end)] if key in seen else []
        seen.add(key)
    return [token for i, token in enumerate(tokens) if not any(start <= i <= end for start, end in gone)]


# --- words


@rule
def words(shader):
    for i, token in enumerate(shader.tokens):
        if token.text not in REFUSED or token.kind != "name":
            continue
        is_deleted = token.text == "delete" and shader.text(i - 1) == "="
        is_member = shader.text(i - 1) in (".", "->")
        if not is_member and not is_deleted:
            refuse(token, REFUSED[token.text])


@rule
def names_of_the_simulator(shader):
    for token in shader.tokens:
        if token.kind == "name" and (token.text == "msl" or token.text.startswith(("msl_", "MSL_"))):
            refuse(token, f"'{token.text}' is a name of the simulator")


@rule
def builtin_functions(shader):
    for token in shader.tokens:
        if token.text.startswith("__builtin_") and not BUILTIN_FUNCTIONS.fullmatch(token.text):
            refuse(token, f"'{token.text}' is not a function of Metal's library")


@rule
def long_long(shader):
    for i, token in enumerate(shader.tokens):
        twice = token.text == "long" and shader.text(i + 1) == "long"
        if twice or (token.kind == "number" and re.search("ll", token.text, re.IGNORECASE)):
            refuse(token, "'long long' is not supported in Metal; 'long' has 64 bits")


@rule
def lambdas(shader):
    for i in range(1, len(shader.tokens)):
        if shader.tokens[i].text != "[":
            continue
        before = shader.tokens[i - 1]
        if (before.kind == "mark" and before.text not in (")", "]", ">")) or before.text == "return":
            refuse(shader.tokens[i], "lambda expressions are not supported in Metal 3.1")


@rule
def noexcept(shader):
    for token in shader.tokens:
        if token.text == "noexcept":
            refuse(token, "'noexcept' is not supported in Metal")


@rule
def elements_of_a_lane(shader):
    """A lane has two elements of a simdgroup matrix: `thread_elements()[2]` is out of range."""
    for i, token in enumerate(shader.tokens):
        if token.text != "thread_elements":
            continue
        call = [shader.text(i + n) for n in range(6)]
        if call[1:4] == ["(", ")", "["] and call[5] == "]" and re.match("[2-9]|1[0-9]", call[4]):
            refuse(token, f"a lane has two elements of a matrix, and none at index {call[4]}")


@rule
def using_enum(shader):
    for i, token in enumerate(shader.tokens):
        if token.text == "using" and shader.text(i + 1) == "enum":
            refuse(token, "'using enum' is C++20; Metal is C++14 or C++17")


@rule
def auto_template_parameters(shader):
    for i, token in enumerate(shader.tokens):
        if token.text == "auto" and shader.version < 400 and in_template_parameters(shader.tokens, i):
            refuse(token, "a template parameter declared with 'auto' is C++17; Metal 3 is C++14")


@rule
def braced_enums(shader):
    """`Color c{2}` and `Color{2}`: C++17."""
    enums = (shader.text(enum_name(shader, i)) for i, token in enumerate(shader.tokens) if token.text == "enum")
    names = {name for name in enums if name.isidentifier()}
    for i, token in enumerate(shader.tokens):
        if shader.version >= 400 or token.text not in names or shader.text(i - 1) in ("enum", "class", "struct"):
            continue
        brace = i + 1 if shader.text(i + 1) == "{" else i + 2
        if shader.text(brace) == "{" and shader.text(brace + 1) != "}" and shader.text(i + 1) not in (")", ":", ";"):
            refuse(token, f"the enum '{token.text}' is initialized from an integer in braces: that is C++17")


def enum_name(shader, i):
    return i + 2 if shader.text(i + 1) in ("class", "struct") else i + 1


# --- missing address spaces


def type_names(tokens):
    """The names of types: Metal's own, the shader's structs, aliases and template parameters."""
    names = {"void", "auto", "unsigned", "signed", "size_t", "ptrdiff_t", "vec", "atomic", "simdgroup_matrix"}
    for scalar in SCALARS:
        names |= {scalar, *(f"{prefix}{scalar}{n}" for n in "234" for prefix in ("", "packed_"))}
    names |= {f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)}
    names |= {f"atomic_{kind}" for kind in ("int", "uint", "float", "bool", "ulong")}
    for i, token in enumerate(tokens[:-1]):
        if token.text in (*RECORDS, "typename", "enum", "using") and tokens[i + 1].kind == "name":
            names.add(tokens[i + 1].text)
    return names - {"namespace", "metal"}


@rule
def pointers_without_a_space(shader):
    tokens, names = shader.tokens, type_names(shader.tokens)
    for i in range(1, len(tokens)):
        if tokens[i].text not in ("*", "&", "&&"):
            continue
        j = start_of_type(tokens, i - 1, names)
        if j is not None and tokens[j].text not in SPACES:
            kind = "pointer" if tokens[i].text == "*" else "reference"
            refuse(tokens[i], f"{kind} type must have explicit address space qualifier")


def start_of_type(tokens, j, names):
    """The index before the type that ends at j, or None if no type ends there."""
    while j and tokens[j].text in ("const", "volatile"):
        j -= 1
    if tokens[j].text == ">":
        j = opening_angle(tokens, j) - 1
    if tokens[j].text not in names or tokens[j].kind != "name" or tokens[j - 1].text in (".", "->"):
        return None
    j -= 1
    while tokens[j].text in ("::", "const", "volatile", "typename") or tokens[j + 1].text == "::":
        j -= 1
    return j


@rule
def arrays_without_a_space(shader):
    """`float a[2]` as a parameter is a pointer; `float (&a)[2]` is a reference."""
    for function in shader.functions:
        for part in split(shader.tokens[function.opening + 1 : function.closing]):
            brackets = any(t.text == "[" for t in part)
            if brackets and not any(t.text in SPACES for t in part):
                refuse(part[0], "array parameter must have explicit address space qualifier")


@rule
def function_pointers(shader):
    """Metal allows functions only as template arguments."""
    tokens, names = shader.tokens, type_names(shader.tokens)
    for i in range(1, len(tokens) - 2):
        declares = tokens[i].text == "(" and tokens[i + 1].text in ("*", "&") and tokens[i + 2].kind == "name"
        if not declares or start_of_type(tokens, i - 1, names) is None:
            continue
        close = closing(tokens, i)
        if tokens[close + 1].text == "(" and not in_template_parameters(tokens, i):
            refuse(tokens[i + 1], "pointers and references to functions are not supported in Metal")


@rule
def member_pointers(shader):
    for i, token in enumerate(shader.tokens):
        if token.text in (".", "->") and shader.text(i + 1) == "*":
            refuse(token, "pointers to members are not supported in Metal")


def in_template_parameters(tokens, i):
    depth = 0
    while i and tokens[i].text not in (";", "{", "}"):
        depth += {"<": 1, ">": -1}.get(tokens[i].text, 0)
        i -= 1
        if tokens[i].text == "template":
            return depth > 0
    return False


# --- functions


@rule
def main_function(shader):
    for function in shader.functions:
        if shader.text(function.name) == "main" and function.record is None:
            refuse(shader.tokens[function.name], "a function named 'main' is not allowed in Metal")


def kernels(shader):
    """The functions that are kernels."""
    return [f for f in shader.functions if any(t.text == "kernel" for t in shader.tokens[f.start : f.name])]


@rule
def calls_of_kernels(shader):
    names = {shader.text(f.name) for f in kernels(shader)}
    for function in shader.functions:
        for i in range(function.body or function.end, function.end):
            if shader.text(i) in names and shader.text(i - 1) not in (".", "->") and is_called(shader.tokens, i):
                refuse(shader.tokens[i], f"kernel '{shader.text(i)}' is called; only the host calls kernels")


def is_called(tokens, i):
    if tokens[i + 1].text != "<":
        return tokens[i + 1].text == "("
    try:
        return tokens[closing_angle(tokens, i + 1) + 1].text == "("
    except RefusedError:
        return False


@rule
def default_arguments_of_kernels(shader):
    for kernel in kernels(shader):
        for part in split(shader.tokens[kernel.opening + 1 : kernel.closing]):
            if any(t.text == "=" for t in part):
                refuse(part[0], "a kernel's parameter cannot have a default argument")


@rule
def static_kernels(shader):
    for kernel in kernels(shader):
        if any(t.text == "static" for t in shader.tokens[kernel.start : kernel.name]):
            refuse(shader.tokens[kernel.name], f"kernel '{shader.text(kernel.name)}' cannot be static")
