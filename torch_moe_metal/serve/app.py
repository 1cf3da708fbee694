"""The server's application: transformers' own, in a wrapper that checks the key and cancels abandoned requests."""

import asyncio
import contextlib
import hmac
from collections.abc import Callable

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import CBWorkerDeadError

from .fields import expect
from .generation import STOPPED, Failed, Generation, Refused, Request, current
from .handlers import Chat, Completions, Responses, error_body
from .model_manager import Models

#: The paths of transformers' application that are kept. The others unload the model or need models of other kinds.
KEPT = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health")
OPEN = ("/health",)  # without a key
MAX_BYTES = 64 << 20  # of a request's body


def error(status: int, message: str, code: str | None = None, param: str | None = None) -> JSONResponse:
    return JSONResponse(error_body(message, status, code, param), status)


class Guard:
    """Wraps the application. It checks the key, and gives each request a `Request`, whose generation ends with it:
    when it is answered, when the client disconnects, or when the server stops."""

    def __init__(self, app: Callable, generation: Generation, api_key: str | None, cors: bool):
        self.app, self.generation, self.api_key, self.cors = app, generation, api_key, cors

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if not self.is_allowed(scope):
            refusal = error(401, "Authorization: expected 'Bearer' and the server's key", "invalid_api_key")
            return await refusal(scope, receive, send)
        body = await read(receive)
        if body is None:
            return await error(413, f"expected a body of at most {MAX_BYTES} bytes")(scope, receive, send)
        request = Request()
        current.set(request)
        self.generation.requests.add(request)
        try:
            await run_while_connected(self.app, scope, body, receive, send)
        finally:
            self.generation.requests.discard(request)
            request.cancel()

    def is_allowed(self, scope: dict) -> bool:
        headers = dict(scope["headers"])
        preflight = self.cors and scope["method"] == "OPTIONS" and b"access-control-request-method" in headers
        if self.api_key is None or scope["path"] in OPEN or preflight:  # browsers send preflights without the key
            return True
        given = headers.get(b"authorization", b"")
        return hmac.compare_digest(given, b"Bearer " + self.api_key.encode())


async def read(receive: Callable) -> bytes | None:
    """A request's body, or None if it is too long."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BYTES:
            return None
    return bytes(body)


async def run_while_connected(app: Callable, scope: dict, body: bytes, receive: Callable, send: Callable) -> None:
    """Run the application until it has answered or the client has disconnected."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    disconnected = asyncio.ensure_future(receive())

    async def replay() -> dict:
        return messages.pop() if messages else await asyncio.shield(disconnected)

    task = asyncio.ensure_future(app(scope, replay, send))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        task.cancel()
        disconnected.cancel()


def handle_errors(app: FastAPI) -> None:
    """Answer every error in OpenAI's form."""

    @app.exception_handler(HTTPException)
    async def refused(_request: HTTPRequest, reason: HTTPException) -> JSONResponse:
        status = 400 if reason.status_code == 422 else reason.status_code
        code, param = (reason.code, reason.param) if isinstance(reason, Refused) else (None, None)
        return error(status, str(reason.detail) if param else str(reason.detail)[:300], code, param)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: HTTPRequest, reason: RequestValidationError) -> JSONResponse:
        first = reason.errors()[0]
        details = [first["msg"], *filter(None, [first.get("ctx", {}).get("error")])]
        return error(400, f"the body: expected a JSON object: {': '.join(details)}")

    @app.exception_handler(Failed)
    async def failed(_request: HTTPRequest, reason: Failed) -> JSONResponse:
        return error(503 if str(reason) == STOPPED else 500, str(reason))

    @app.exception_handler(CBWorkerDeadError)
    async def dead(_request: HTTPRequest, reason: CBWorkerDeadError) -> JSONResponse:
        return error(503, str(reason))


def build(
    models: Models, generation: Generation, api_key: str | None = None, cors: bool = False, strict: bool = False
) -> Guard:
    chat, completions, responses = (handler(models, generation, strict) for handler in (Chat, Completions, Responses))
    app = build_server(models, chat, completions, responses, None, None, generation, enable_cors=cors)
    app.router.routes[:] = [route for route in app.router.routes if route.path in KEPT]

    @app.get("/v1/models/{name:path}")
    def retrieve(name: str) -> dict:
        models.check_name(name)
        return models.entry

    @app.post("/load_model")
    def load(body: dict) -> StreamingResponse:
        name = body.get("model")
        expect(isinstance(name, str), "model", "a string", name)
        return StreamingResponse(models.load_model_streaming(name), media_type="text/event-stream")

    handle_errors(app)
    return Guard(app, generation, api_key, cors)
