"""Several answers to one request (`n`): each is a request of its own, and their answers are put together."""

import asyncio
import contextlib
import contextvars
import dataclasses
import json
from collections.abc import AsyncIterator

from fastapi.responses import StreamingResponse

from .requests import Request, current


def split(count: int) -> list[contextvars.Context]:
    """A context for each answer, with its request. All of them end with the current one."""
    whole = current.get()
    if count == 1:
        return [contextvars.copy_context()]
    whole.parts = [dataclasses.replace(whole) for _ in range(count)]
    whole.cancel = lambda: [part.cancel() for part in whole.parts]
    whole.fail = lambda reason: [part.fail(reason) for part in whole.parts]
    return [with_current(part) for part in whole.parts]


def with_current(request: Request) -> contextvars.Context:
    context = contextvars.copy_context()
    context.run(current.set, request)
    return context


def joined(answers: list[dict]) -> dict:
    """One answer with the choices of all."""
    whole = answers[0]
    whole["choices"] = [answer["choices"][0] | {"index": i} for i, answer in enumerate(answers)]
    add_usage(whole["usage"], [answer["usage"] for answer in answers[1:]])
    return whole


def add_usage(usage: dict, others: list[dict]) -> None:
    usage["completion_tokens"] += sum(other["completion_tokens"] for other in others)
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]


def joined_streams(responses: list[StreamingResponse]) -> StreamingResponse:
    """One stream with the events of all. The last one has the usage."""
    first = responses[0]
    if len(responses) > 1:
        first.body_iterator = merged([response.body_iterator for response in responses])
    return first


async def merged(streams: list[AsyncIterator[str]]) -> AsyncIterator[str]:
    queue: asyncio.Queue[tuple[int, str | None]] = asyncio.Queue()

    async def read(index: int, stream: AsyncIterator[str]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for part in stream:
                    queue.put_nowait((index, part))
        finally:
            queue.put_nowait((index, None))

    tasks = [asyncio.create_task(read(*each)) for each in enumerate(streams)]
    running, usages, identity = len(tasks), [], {}
    try:
        while running:
            index, part = await queue.get()
            running -= part is None
            for text in (part or "").split("\n\n")[:-1]:
                event = json.loads(text.removeprefix("data: "))
                for choice in event.get("choices", ()):
                    choice["index"] = index
                    identity = identity or {"id": event["id"]}
                if (usage := event.pop("usage", None)) is not None:
                    usages.append(usage)
                    if len(usages) == len(tasks):
                        add_usage(usage, usages[:-1])
                        event["usage"] = usage
                yield f"data: {json.dumps(event | identity)}\n\n"
    finally:
        for task in tasks:
            task.cancel()
