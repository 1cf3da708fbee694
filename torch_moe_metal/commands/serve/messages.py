"""Checks of what a conversation consists of: messages, items of /v1/responses, tools and their calls."""

import json

from .values import expect, refuse

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXTS = ("text", "input_text", "output_text")


def check_conversation(body: dict, takes_images: bool) -> None:
    for i, message in enumerate(body.get("messages", ())):
        expect(isinstance(message, dict), f"messages[{i}]", "an object", message)
        check_message(message, f"messages[{i}]", takes_images)
    if isinstance(body.get("input"), list):
        check_items(body["input"], takes_images)
    for i, tool in enumerate(body.get("tools", ())):
        function = tool if "input" in body and "function" not in tool else tool.get("function")
        right = isinstance(function, dict) and isinstance(function.get("name"), str)
        right = (
            right and isinstance(function.get("parameters") or {}, dict) and tool.get("type", "function") == "function"
        )
        expect(right, f"tools[{i}]", "a tool of type function with a name, and parameters as an object", tool)


def check_message(message: dict, name: str, takes_images: bool) -> None:
    role, content = message.get("role"), message.get("content")
    expect(role in ROLES, f"{name}.role", f"one of {', '.join(ROLES)}", role)
    optional = role in ("assistant", "tool", "function")
    right = isinstance(content, str | list) or (optional and content is None)
    expect(right, f"{name}.content", "a string or a list of parts", content)
    for part in content if isinstance(content, list) else ():
        check_part(part, f"{name}.content", takes_images)
    calls = message.get("tool_calls") or []
    expect(isinstance(calls, list), f"{name}.tool_calls", "a list", calls)
    for call in calls:
        function = (call.get("function") or call) if isinstance(call, dict) else None
        check_call(function, f"{name}.tool_calls")


def check_part(part: object, name: str, takes_images: bool) -> None:
    expect(isinstance(part, dict) and isinstance(part.get("type"), str), name, "parts that have a type", part)
    if part["type"] in TEXTS:
        expect(isinstance(part.get("text"), str), name, f"a text in a part of type {part['type']}", part)
    else:
        expect(takes_images, name, "parts with text only, as the model takes no others", part["type"])


def check_call(call: object, name: str) -> None:
    """The name and the arguments of an earlier call. Templates need the arguments as an object."""
    expect(isinstance(call, dict) and isinstance(call.get("name"), str), name, "calls of functions with names", call)
    arguments = call.get("arguments")
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        refuse(name, "arguments as JSON", arguments)
    expect(isinstance(arguments, dict), name, "arguments as an object, or as the JSON of one", arguments)


def check_items(items: list, takes_images: bool) -> None:
    """The input of /v1/responses: parts of one message, or messages, tool calls with their results, and reasoning."""
    parts = isinstance(items[0], dict) and "role" not in items[0]
    for i, item in enumerate(items):
        name = f"input[{i}]"
        right = isinstance(item, dict) and ("role" in item or isinstance(item.get("type"), str))
        expect(right, name, "an object with a role or a type", item)
        if parts:
            check_part(item, name, takes_images)
        elif "role" in item:
            check_message(item, name, takes_images)
        elif item["type"] == "function_call":
            expect(isinstance(item.get("call_id"), str), f"{name}.call_id", "a string", item.get("call_id"))
            check_call(item, name)
        elif item["type"] == "function_call_output":
            expect(isinstance(item.get("call_id"), str), f"{name}.call_id", "a string", item.get("call_id"))
            check_message({"role": "tool", "content": item.get("output")}, name, takes_images)
        else:
            expect(
                item["type"] == "reasoning", f"{name}.type", "reasoning, function_call or function_call_output", item
            )
            texts = item.get("content") or []
            right = isinstance(texts, list) and all(isinstance(each, dict) for each in texts)
            right = right and all(isinstance(each.get("text"), str) for each in texts)
            expect(right, f"{name}.content", "parts with text", texts)
