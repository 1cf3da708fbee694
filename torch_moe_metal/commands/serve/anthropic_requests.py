"""Requests to /v1/messages: their blocks are checked, and become a request to /v1/chat/completions."""

import json
from collections.abc import Iterator

from .values import expect, refuse, shortened

#: Claude Code's first block of a system prompt, which has another number in each request: no prefix would be reused.
BILLING = "x-anthropic-billing-header"
ENDS = {"auto": "auto", "none": "none", "any": "required"}


def as_chat(body: dict, takes_images: bool) -> dict:
    thinks = body.get("thinking", {}).get("type", "disabled") != "disabled"
    settings, choice = body.get("output_config", {}), body.get("tool_choice", {})
    found = {name: body.get(name) for name in ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")}
    found |= {
        "messages": [*system(body.get("system", []), "system"), *conversation(body["messages"], takes_images)],
        "stop": body.get("stop_sequences") or None,
        "tools": [tool(each, f"tools[{i}]") for i, each in enumerate(body.get("tools", []))] or None,
        "chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks},
        "reasoning_effort": settings.get("effort"),
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        "tool_choice": ENDS.get(choice.get("type")) or (choice and function(choice)) or None,
    }
    if (form := settings.get("format")) is not None:
        schema = {"name": "answer", "schema": form.get("schema"), "strict": True}
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {name: value for name, value in found.items() if value is not None}


def function(choice: dict) -> dict:
    return {"type": "function", "function": {"name": choice.get("name")}}


def tool(given: object, name: str) -> dict:
    right = isinstance(given, dict) and given.get("type") in (None, "custom") and isinstance(given.get("name"), str)
    right = right and isinstance(given.get("input_schema"), dict)
    expect(right, name, "a tool of the client, with a name and an input_schema", given)
    described = {"description": given["description"]} if given.get("description") else {}
    made = {"name": given["name"], **described, "parameters": given["input_schema"]}
    return {"type": "function", "function": made}


def system(given: object, name: str) -> Iterator[dict]:
    texts = [block["text"] for block in blocks(given, name, ("text",))]
    if texts := [text for text in texts if text and not text.startswith(BILLING)]:
        yield {"role": "system", "content": "\n\n".join(texts)}


def conversation(messages: list, takes_images: bool) -> Iterator[dict]:
    for i, message in enumerate(messages):
        name = f"messages[{i}]"
        expect(isinstance(message, dict), name, "an object", message)
        role = message.get("role")
        expect(role in ("user", "assistant", "system"), f"{name}.role", "user, assistant or system", role)
        if role == "system":
            yield from system(message.get("content"), f"{name}.content")
        elif role == "user":
            yield from of_user(message.get("content"), f"{name}.content", takes_images)
        else:
            yield of_assistant(message.get("content"), f"{name}.content")
    expect(role != "assistant", f"{name}.role", "user in the last message, as an answer cannot be continued", role)


def blocks(content: object, name: str, kinds: tuple[str, ...]) -> list[dict]:
    """The blocks of a content, each of one of these kinds. A string is a block of text."""
    expect(isinstance(content, str | list), name, "a string or a list of blocks", content)
    found = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for i, block in enumerate(found):
        kind = block.get("type") if isinstance(block, dict) else None
        expect(kind in kinds, f"{name}[{i}].type", f"one of {', '.join(kinds)}", kind)
        check_block(block, f"{name}[{i}]")
    return found


def check_block(block: dict, name: str) -> None:
    strings = {"text": ["text"], "thinking": ["thinking"], "tool_use": ["id", "name"], "tool_result": ["tool_use_id"]}
    for field in strings.get(block["type"], []):
        expect(isinstance(block.get(field), str), f"{name}.{field}", "a string", block.get(field))
    if block["type"] == "tool_use":
        expect(isinstance(block.get("input"), dict), f"{name}.input", "an object", block.get("input"))


def of_user(content: object, name: str, takes_images: bool) -> Iterator[dict]:
    """The results of tools, each a message, and the rest."""
    found = blocks(content, name, ("text", "image", "document", "tool_result"))
    for i, block in enumerate(found):
        if block["type"] == "tool_result":
            inner = blocks(block.get("content") or "", f"{name}[{i}].content", ("text", "image", "document"))
            result = parts(inner, f"{name}[{i}].content", takes_images)
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": result}
    rest = [block for block in found if block["type"] != "tool_result"]
    if rest or not found:
        yield {"role": "user", "content": parts(rest, name, takes_images)}


def parts(found: list[dict], name: str, takes_images: bool) -> str | list[dict]:
    """The parts of a message for chat. Text alone is a string."""
    made = [part(block, f"{name}[{i}]", takes_images) for i, block in enumerate(found)]
    if all(each["type"] == "text" for each in made):
        return "\n\n".join(each["text"] for each in made)
    return made


def part(block: dict, name: str, takes_images: bool) -> dict:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if block["type"] == "document":
        right = kind == "text" and isinstance(source.get("data"), str)
        expect(right, f"{name}.source", "a document of type text, as the model takes no others", kind)
        return {"type": "text", "text": source["data"]}
    if not takes_images:
        refuse(name, "text only, as the model takes no images", block["type"])
    data = {"base64": ("media_type", "data"), "url": ("url",)}.get(kind, (None,))
    right = all(isinstance(source.get(each), str) for each in data) if isinstance(source, dict) else False
    right = right and (kind != "url" or source["url"].startswith(("http://", "https://")))
    expect(right, f"{name}.source", "base64 with media_type and data, or a url", shortened(source))
    url = source["url"] if kind == "url" else f"data:{source['media_type']};base64,{source['data']}"
    return {"type": "image_url", "image_url": {"url": url}}


def of_assistant(content: object, name: str) -> dict:
    found = blocks(content, name, ("text", "thinking", "redacted_thinking", "tool_use"))
    of = {kind: [block for block in found if block["type"] == kind] for kind in ("text", "thinking", "tool_use")}
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
        }
        for block in of["tool_use"]
    ]
    made = {"role": "assistant", "content": "\n\n".join(block["text"] for block in of["text"])}
    thoughts = "\n".join(block["thinking"] for block in of["thinking"])
    return made | ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})
