"""What the values of fields may be."""

from collections.abc import Callable

from .requests import Refused

MAX_STOPS, MAX_STOP = 64, 256  # strings or tokens, and characters of a string
MAX_ANSWERS, MAX_LIKELIEST = 16, 20
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def refuse(name: str, expected: str, got: object) -> None:
    raise Refused(400, f"{name}: expected {expected}, got {shortened(got)}", param=name)


def expect(right: bool, name: str, expected: str, got: object) -> None:
    if not right:
        refuse(name, expected, got)


def shortened(value: object, length: int = 100) -> str:
    """The value as it may stand in an error."""
    if isinstance(value, str):
        value = value[: length + 1]  # its repr may be ten times as long
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def of_type(kind: type | tuple[type, ...]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


def is_integer(value: object) -> bool:
    return type(value) is int  # a bool is an int, too


def is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 2**64  # not NaN either


def is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def number(low: float, high: float) -> Callable[[object], bool]:
    return lambda value: is_number(value) and low <= value <= high


def integer(low: int, high: int) -> Callable[[object], bool]:
    return lambda value: is_integer(value) and low <= value <= high


def one_of(*values: object) -> Callable[[object], bool]:
    return lambda value: any(type(value) is type(each) and value == each for each in values)


def is_stop(value: object) -> bool:
    strings = as_list(value) if isinstance(value, str | list) else [None]
    return len(strings) <= MAX_STOPS and all(isinstance(each, str) and 0 < len(each) <= MAX_STOP for each in strings)


def as_list(value: object) -> list:
    return value if isinstance(value, list) else [value]


def is_effort(value: object) -> bool:
    return isinstance(value, str) and value in EFFORTS


def is_reasoning(value: object) -> bool:
    """OpenAI's object of /v1/responses. The text of the reasoning is in every answer, so that no summary is made."""
    known = {"effort": is_effort, "summary": one_of("auto"), "generate_summary": one_of("auto")}
    known |= {"context": one_of("auto"), "mode": one_of("standard")}
    return is_object(value, known)


def is_object(value: object, known: dict[str, Callable[[object], bool]]) -> bool:
    """Whether the value is an object with some of these fields; null is the same as none."""
    given = (
        {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else {None: None}
    )
    return all(name in known and known[name](each) for name, each in given.items())


NAMED = {"name": of_type(str), "description": of_type(str), "schema": of_type(dict), "strict": of_type(bool)}


def is_format(value: object, named: dict[str, Callable[[object], bool]]) -> bool:
    """Whether the value is an answer's form. A schema is in an object of its own, or in this one."""
    kind = value.get("type") if isinstance(value, dict) else None
    known = {"type": one_of("text", "json_object", "json_schema")} | (named if kind == "json_schema" else {})
    return is_object(value, known) and isinstance(kind, str) and all(name in value for name in known)


def is_response_format(value: object) -> bool:
    return is_format(value, {"json_schema": lambda given: is_object(given, NAMED) and "schema" in (given or {})})


def is_text_format(value: object) -> bool:
    given = {name: None for name in NAMED} | value if isinstance(value, dict) else value
    return is_format(given if isinstance(value, dict) and value.get("type") == "json_schema" else value, NAMED)


def is_text(value: object) -> bool:
    return is_object(value, {"format": is_text_format, "verbosity": one_of("medium")})


def is_auto(value: object) -> bool:
    return value in ("auto", "none")


def is_tool_choice(value: object) -> bool:
    """Also a function, whose name is in an object of its own in chat."""
    if not isinstance(value, dict):
        return value in ("auto", "none", "required")
    given = value.get("function", value)
    return value.get("type") == "function" and isinstance(given, dict) and isinstance(given.get("name"), str)


def is_typed(*kinds: str) -> Callable[[object], bool]:
    """Whether the value is an object of one of these types."""
    return lambda value: isinstance(value, dict) and value.get("type") in kinds


def is_output_config(value: object) -> bool:
    return is_object(value, {"effort": is_effort, "format": is_output_format})


def is_output_format(value: object) -> bool:
    return is_object(value, {"type": one_of("json_schema"), "schema": of_type(dict)}) and len(value) == 2


def is_bias(value: object) -> bool:
    return isinstance(value, dict) and all(number(-100, 100)(each) for each in value.values())


def is_integers(value: object) -> bool:
    return isinstance(value, list) and all(map(is_integer, value))


def is_ids(value: object) -> bool:
    return isinstance(value, list) and len(value) <= MAX_STOPS and all(map(integer(0, 2**31 - 1), value))
