"""The endpoints of Anthropic's API. Chat answers them."""

import asyncio
import functools
import json

from fastapi.responses import JSONResponse, StreamingResponse
from transformers.cli.serving.utils import Modality

from . import anthropic_answers as answers
from . import anthropic_requests as requests
from . import fields, prompts
from .handlers import Chat, forced_tools
from .manager import length_of
from .requests import current
from .values import expect


class Messages:
    """/v1/messages. `chat` answers, and `fields` is the table of this endpoint."""

    fields, needed = fields.MESSAGES, ("messages", "max_tokens")

    def __init__(self, chat: Chat):
        self.chat = chat

    async def handle_request(self, body: dict, request_id: str):
        given, shows = await asyncio.to_thread(self.as_chat, body)
        response = await self.chat.handle_request(given, request_id)
        request = current.get()
        if isinstance(response, StreamingResponse):
            events = answers.Events(request, shows)
            response.body_iterator = answers.stream(response.body_iterator, events, self.chat.model_manager.force_model)
            return response
        return JSONResponse(answers.message(json.loads(response.body), request, shows))

    def as_chat(self, body: dict) -> tuple[dict, bool]:
        """The request to chat, and whether its answer has the reasoning."""
        body = self.chat.known({name: value for name, value in body.items() if value is not None}, self.fields)
        for name in self.needed:
            expect(name in body, name, "a value", None)
        fields.check(body, self.fields)
        given = requests.as_chat(body, takes_images=self.chat.modality != Modality.LLM)
        shown = body.get("thinking", {}).get("display") != "omitted"
        return given, shown and given["chat_template_kwargs"]["enable_thinking"]


class CountTokens(Messages):
    """/v1/messages/count_tokens."""

    needed = ("messages",)

    async def handle_request(self, body: dict, request_id: str):
        given, _ = await asyncio.to_thread(self.as_chat, body)
        return JSONResponse({"input_tokens": await prompts.made(functools.partial(self.count, given))})

    def count(self, given: dict) -> int:
        self.chat.check(given)
        forced_tools(given.get("tool_choice"), given.get("tools", []))
        return length_of(self.chat.inputs(given))
