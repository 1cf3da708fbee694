"""Grammars of tool calls, in llguidance's Lark syntax."""

import json

from .families import Call
from .requests import Refused
from .values import as_list

ANYTHING = "/(?s:.*)/"
QUOTE = '<|"|>'
#: A small model may write white space without an end.
LITTLE_SPACE = {"x-guidance": {"whitespace_pattern": r"[ \t\r\n]{1,16}"}}
NUMBERS = ("integer", "number", "boolean", "null")


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def may_be_text(schema: dict) -> bool:
    """Whether a value of this schema may be a string."""
    if (kinds := schema.get("type")) is not None:
        return "string" in as_list(kinds)
    either = schema.get("anyOf") or schema.get("oneOf")
    return not either or any(map(may_be_text, either))


class Rules:
    """The rules of a grammar, and the JSON schemas that they name."""

    def __init__(self, mark, is_special):
        self.mark, self.is_special = mark, is_special  # see Constraints
        self.lines: list[str] = []
        self.grammars: list[dict] = []

    def schema(self, schema: dict, root: dict) -> str:
        """A value of this schema, which is a part of another one."""
        name = f"json_{len(self.grammars)}"
        shared = {each: root[each] for each in ("$defs", "definitions") if each in root}
        self.grammars.append({"name": name, "json_schema": LITTLE_SPACE | shared | schema})
        return f"@{name}"

    def until(self, mark: str) -> str:
        """Any text, and this mark after it."""
        if self.is_special(mark.strip()):
            return f"{ANYTHING} {self.mark(mark.lstrip())}"
        name = f"text_{len(self.lines)}"
        self.lines.append(f"{name}[suffix={quoted(mark.strip())}]: {ANYTHING}")
        return f'{name} "\\n"?'

    def call(self, form: Call, function: dict) -> str:
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        opened, closed = form.open.format(name=function["name"]), form.close.format()
        if form.parameter is not None:
            inner = self.tags(form.parameter, parameters)
        elif form.bare:
            inner = self.bare(parameters, parameters)
        else:
            inner = self.schema({"type": "object"} | parameters, {})
        return f"{self.mark(opened)} {inner} {self.mark(closed)}"

    def tags(self, around: tuple[str, str], parameters: dict) -> str:
        found = []
        for key, schema in parameters.get("properties", {}).items():
            schema = schema if isinstance(schema, dict) else {}
            opened = around[0].format(key=key, text=str(may_be_text(schema)).lower())
            one = f"{self.mark(opened)} {self.tagged(around[1], schema, parameters)}"
            found.append(one if key in parameters.get("required", ()) else f"({one})?")
        return " ".join(found)

    def tagged(self, close: str, schema: dict, root: dict) -> str:
        """A value and the mark after it. Strings have no quotes."""
        words = schema.get("enum", [schema["const"]] if "const" in schema else [])
        if words and all(isinstance(each, str) for each in words):
            return f"({' | '.join(map(quoted, words))}) {self.mark(close)}"
        if may_be_text(schema):
            return self.until(close)
        return f"{self.schema(schema, root)} {self.mark(close)}"

    def bare(self, schema: dict, root: dict) -> str:
        """A value as Gemma writes it: keys have no quotes, and strings are between two marks."""
        quote, kind = self.mark(QUOTE), schema.get("type")
        words = schema.get("enum", [schema["const"]] if "const" in schema else [])
        if words and all(isinstance(each, str) for each in words):
            return f"{quote} ({' | '.join(map(quoted, words))}) {quote}"
        if kind == "string":
            return f"{quote} {self.until(QUOTE)}"
        if kind == "array":
            item = self.bare(schema.get("items") or {"type": "string"}, root)
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "object":
            return self.bare_object(schema, root)
        if kind in NUMBERS:
            return self.schema(schema, root)
        if either := schema.get("anyOf") or schema.get("oneOf"):
            return f"({' | '.join(self.bare(each, root) for each in either)})"
        raise Refused(400, f"tools: expected a schema of known types, got {str(schema)[:100]}", param="tools")

    def bare_object(self, schema: dict, root: dict) -> str:
        """The required values in their order, and then any of the others."""
        required = schema.get("required", ())
        pairs = {key: f'"{key}:" {self.bare(each, root)}' for key, each in schema.get("properties", {}).items()}
        first = ' "," '.join(pair for key, pair in pairs.items() if key in required)
        rest = " | ".join(f"({pair})" for key, pair in pairs.items() if key not in required)
        if first and rest:
            return f'"{{" {first} ("," ({rest}))* "}}"'
        return f'"{{" (({rest}) ("," ({rest}))*)? "}}"' if rest else f'"{{" {first} "}}"'
