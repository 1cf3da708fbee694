"""The server's application: transformers' own, behind a door that checks the key and ends what nobody waits for."""

import asyncio
import contextlib
import hmac
from collections.abc import Callable

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import CBWorkerDeadError

from .generation import STOPPED, Failed, Generation, Refused, Request, current
from .handlers import Chat, Completions, Responses, problem
from .models import Models

#: Of transformers' application. Its others load and unload models, or want models of other kinds.
KEPT = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health", "/load_model")
OPEN = ("/health",)  # without a key
MOST_BYTES = 64 << 20  # of a request's body


def answer(status: int, message: str, code: str | None = None, param: str | None = None) -> JSONResponse:
    return JSONResponse(problem(message, status, code, param), status)


class Door:
    """Each request has a `Request` of its own here, whose generation ends when the request does: because it has been
    answered, because the client has gone, or because the server stops."""

    def __init__(self, app: Callable, generation: Generation, api_key: str | None):
        self.app, self.generation, self.api_key = app, generation, api_key

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if not self.may_enter(scope):
            refusal = answer(401, "Authorization: expected 'Bearer' and the server's key", "invalid_api_key")
            return await refusal(scope, receive, send)
        body = await read(receive)
        if body is None:
            return await answer(413, f"expected at most {MOST_BYTES} bytes")(scope, receive, send)
        request = Request()
        current.set(request)
        self.generation.requests.add(request)
        try:
            await until_gone(self.app, scope, body, receive, send)
        finally:
            self.generation.requests.discard(request)
            request.cancel()

    def may_enter(self, scope: dict) -> bool:
        if self.api_key is None or scope["path"] in OPEN:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, b"Bearer " + self.api_key.encode())


async def read(receive: Callable) -> bytes | None:
    """A request's body, unless it is too long."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MOST_BYTES:
            return None
    return bytes(body)


async def until_gone(app: Callable, scope: dict, body: bytes, receive: Callable, send: Callable) -> None:
    """Run the application until it has answered or the client has gone."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    gone = asyncio.ensure_future(receive())

    async def replay() -> dict:
        return messages.pop() if messages else await asyncio.shield(gone)

    task = asyncio.ensure_future(app(scope, replay, send))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        task.cancel()
        gone.cancel()


def tell_errors(app: FastAPI) -> None:
    """Every error in the form of OpenAI's."""

    @app.exception_handler(HTTPException)
    async def refused(_request: HTTPRequest, error: HTTPException) -> JSONResponse:
        status = 400 if error.status_code == 422 else error.status_code
        told = error if isinstance(error, Refused) else None
        return answer(status, str(error.detail), told and told.code, told and told.param)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: HTTPRequest, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        reason = first.get("ctx", {}).get("error", "")
        return answer(400, f"the body: expected a JSON object: {first['msg']}" + (f": {reason}" if reason else ""))

    @app.exception_handler(Failed)
    async def failed(_request: HTTPRequest, error: Failed) -> JSONResponse:
        return answer(503 if str(error) == STOPPED else 500, str(error))

    @app.exception_handler(CBWorkerDeadError)
    async def dead(_request: HTTPRequest, error: CBWorkerDeadError) -> JSONResponse:
        return answer(503, str(error))


def build(models: Models, generation: Generation, api_key: str | None = None, cors: bool = False) -> Door:
    chat, completions, responses = (handler(models, generation) for handler in (Chat, Completions, Responses))
    app = build_server(models, chat, completions, responses, None, None, generation, enable_cors=cors)
    app.router.routes[:] = [route for route in app.router.routes if route.path in KEPT]

    @app.get("/v1/models/{name:path}")
    def retrieve(name: str) -> dict:
        models.check_name(name)
        return models.entry

    tell_errors(app)
    return Door(app, generation, api_key)
