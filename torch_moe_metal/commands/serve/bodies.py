"""The bodies of requests: their limits, and how they are read and parsed."""

import json
import re
from collections.abc import Callable

from .requests import Refused

MAX_BYTES = 64 << 20  # of a body, with images
OTHER_BYTES = 64 << 10  # of text that is not part of the prompt, and of requests without a prompt
PER_TOKEN = 16  # bytes of text, more than any prompt needs
#: What precedes an image or a sound in a body.
MEDIA = re.compile(rb'"(url|image_url|data)"\s*:\s*"$')


def text_limit(context: int) -> int:
    """The bytes of text that a prompt for this context may have."""
    return min(PER_TOKEN * context + OTHER_BYTES, MAX_BYTES)


def too_long(limit: int, besides: str = "") -> Refused:
    return Refused(413, f"the body: expected at most {limit} bytes{besides}", "context_length_exceeded")


async def read(receive: Callable, limit: int) -> bytes | None:
    """A request's body. None if the client has disconnected before its end. Raises if it is longer than the limit."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit:
            raise too_long(limit)
    return bytes(body)


def parse(body: bytes, limit: int) -> dict:
    """The object in a body, which may have this many bytes of text. Text is counted first, since `json` holds Python's
    lock while it parses: for seconds if 60 MB of text are a million objects."""
    if len(body) > limit and not text_is_within(body, limit):
        raise too_long(limit, " besides images")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body: expected a JSON object: JSON decode error: {error}") from error
    if not isinstance(value, dict):
        raise Refused(400, f"the body: expected a JSON object, got {type(value).__name__}")
    return value


def text_is_within(body: bytes, limit: int) -> bool:
    """Whether the body has at most this many bytes besides its images and sounds."""
    text, start = 0, 0
    while text <= limit:
        end = body.find(b'"', start)
        if end < 0:
            return text + len(body) - start <= limit
        is_media = end - start > 1024 and MEDIA.search(body, max(start - 64, 0), start)
        text += 1 if is_media else end + 1 - start
        start = end + 1
    return False
