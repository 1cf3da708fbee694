"""Metal source as tokens, and functions to navigate them."""

import re
from dataclasses import dataclass

SPACES = ("device", "constant", "threadgroup", "thread")
QUALIFIERS = ("const", "volatile", "constexpr", "static")
SCALARS = ("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float")
OPENERS = {"(": ")", "[": "]", "{": "}", "[[": "]"}
NESTING = {"(": 1, "[": 1, "{": 1, "[[": 2, ")": -1, "]": -1, "}": -1}
TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r\n\f\v]+|^[ \t]*\#[^\n]*)+)
      |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      |(?P<number>\.?[0-9](?:[eEpP][+-]|[0-9A-Za-z_.])*)
      |(?P<name>[A-Za-z_][A-Za-z_0-9]*)
      |(?P<mark>\[\[|<<=|>>=|<=|>=|->|\+\+|--|&&|\|\||::|==|!=|<<|[-+*/%&|^]=|\.\.\.|[^\s\w])""",
    re.VERBOSE | re.MULTILINE,
)


class RefusedError(Exception):
    """The source breaks a rule of Metal, or uses something that this translator does not support."""


@dataclass(slots=True)
class Token:
    text: str
    kind: str  # name, number, string, mark; code: text written by this translator
    space: str = ""  # blanks, line markers and pragmas before it
    line: int = 0


def refuse(token, message):
    raise RefusedError(f"program_source:{token.line}: error: {message}")


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
    if "#" not in text:
        return text, line + text.count("\n")
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
        if text in NESTING:
            depth += NESTING[text]
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


def opening_angle(tokens, i):
    depth = 0
    while i and depth + {">": 1, "<": -1}.get(tokens[i].text, 0) != 0:
        depth += {">": 1, "<": -1}.get(tokens[i].text, 0)
        i -= 1
    return i
