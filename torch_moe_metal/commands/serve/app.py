"""The server's application: transformers' own, in a wrapper that checks who asks and cancels abandoned requests."""

import asyncio
import contextlib
import hmac
import ipaddress
import re
from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import CBWorkerDeadError, Modality

from .answers import error_body
from .anthropic_answers import error_body as anthropic_error
from .anthropic_handlers import CountTokens, Messages
from .bodies import MAX_BYTES, OTHER_BYTES, parse, read, text_limit, too_long
from .checked import Checked
from .generation import Generation
from .handlers import Chat, Completions, Responses
from .metrics import memory
from .model_manager import Models
from .requests import STOPPED, Failed, Refused, Request, current
from .tokens import Detokenize, Tokenize, props
from .values import expect

#: The paths of transformers' application that are kept. The others unload the model or need models of other kinds.
KEPT = ("/v1/models", "/health")
MESSAGES = "/v1/messages"
OPEN = ("/health", "/")  # without a key
PAGE = Path(__file__).with_name("page.html")
#: The page loads nothing, asks this server only, and is in no frame of another page.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
POLICY += "frame-ancestors 'none'"
LOCAL = ("localhost", "127.0.0.1", "[::1]")
JSON = re.compile(r"application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)
EVERY = ("0.0.0.0", "::")  # as --host: all addresses of this machine


def error(path: str, status: int, message: str, code: str | None = None, param: str | None = None) -> JSONResponse:
    """In Anthropic's or OpenAI's form."""
    if path.startswith(MESSAGES):
        return JSONResponse(anthropic_error(message, status), status)
    return JSONResponse(error_body(message, status, code, param), status)


def answer_to(path: str, reason: HTTPException) -> JSONResponse:
    status = 400 if reason.status_code == 422 else reason.status_code
    code, param = (reason.code, reason.param) if isinstance(reason, Refused) else (None, None)
    return error(path, status, str(reason.detail) if param else str(reason.detail)[:300], code, param)


class Guard:
    """Wraps the application. It checks the key or the host, refuses bodies that are too long before they are parsed,
    and gives each request a `Request`, whose generation ends with it: when it is answered, when the client disconnects,
    or when the server stops."""

    def __init__(
        self, app: Callable, generation: Generation, limits: dict[str, int], api_key: str | None, cors: bool, host: str
    ):
        self.app, self.generation, self.limits = app, generation, limits
        self.api_key, self.cors, self.host = api_key, cors, host

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        send = self.generation.metrics.counting(scope["path"], send)
        try:
            headers = dict(scope["headers"])
            self.check_sender(scope, headers)
            limit = self.limits.get(scope["path"], OTHER_BYTES)
            if int(headers.get(b"content-length", 0)) > limit:
                raise too_long(limit)
            body = await read(receive, limit)
        except Refused as reason:
            return await answer_to(scope["path"], reason)(scope, receive, send)
        if body is None:
            return
        request = Request()
        current.set(request)
        self.generation.requests.add(request)
        try:
            await run_while_connected(self.app, scope, body, receive, send)
        finally:
            self.generation.requests.discard(request)
            request.cancel()

    def check_sender(self, scope: dict, headers: dict[bytes, bytes]) -> None:
        """Refuse requests without the key. If there is none, refuse those of web pages whose name leads to this
        machine: their browser takes the answer for the page's own."""
        if self.api_key is None:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            if not self.is_ours(host):
                ours = ", ".join((*LOCAL, self.host))
                raise Refused(403, f"Host: expected one of {ours}, as this server has no key, got {host[:200]!r}")
            return
        preflight = self.cors and scope["method"] == "OPTIONS" and b"access-control-request-method" in headers
        if scope["path"] in OPEN or preflight:  # browsers send preflights without the key
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        keys = [headers.get(b"x-api-key", b""), *([given] if scheme.lower() == b"bearer" else [])]
        if not any(hmac.compare_digest(key.strip(), self.api_key.encode()) for key in keys):
            message = "Authorization: expected 'Bearer' and the server's key, or the key in x-api-key"
            raise Refused(401, message, "invalid_api_key")

    def is_ours(self, host: str) -> bool:
        name, colon, port = host.rpartition(":")
        if not colon or not port.isdigit():
            name = host
        if name in (*LOCAL, self.host.lower(), f"[{self.host.lower()}]"):
            return True
        with contextlib.suppress(ValueError):  # no page has an address as its name
            return self.host in EVERY and bool(ipaddress.ip_address(name.strip("[]")))
        return False


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
    """Answer every error in the form of the path's API."""

    @app.exception_handler(HTTPException)
    async def refused(request: HTTPRequest, reason: HTTPException) -> JSONResponse:
        return answer_to(request.url.path, reason)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: HTTPRequest, reason: RequestValidationError) -> JSONResponse:
        first = reason.errors()[0]
        details = [first["msg"], *filter(None, [first.get("ctx", {}).get("error")])]
        return error(request.url.path, 400, f"the body: expected a JSON object: {': '.join(details)}")

    @app.exception_handler(Failed)
    async def failed(request: HTTPRequest, reason: Failed) -> JSONResponse:
        return error(request.url.path, 503 if str(reason) == STOPPED else 500, str(reason))

    @app.exception_handler(CBWorkerDeadError)
    async def dead(request: HTTPRequest, reason: CBWorkerDeadError) -> JSONResponse:
        return error(request.url.path, 503, str(reason))


def endpoint(handler: Checked | Messages | Tokenize, limit: int) -> Callable:
    """The handler as an endpoint that parses bodies in a thread: FastAPI would do it on the event loop."""

    async def answer(request: HTTPRequest):
        given = request.headers.get("content-type", "")
        if not JSON.match(given):  # a web page can send others without asking
            raise Refused(400, f"Content-Type: expected application/json, got {given[:200]!r}")
        body = await asyncio.to_thread(parse, await request.body(), limit)
        return await handler.handle_request(body, request.state.request_id)

    return answer


def build(
    models: Models,
    generation: Generation,
    api_key: str | None = None,
    cors: bool = False,
    strict: bool = False,
    host: str = LOCAL[0],
) -> Guard:
    handlers = {
        "/v1/chat/completions": (chat := Chat(models, generation, strict)),
        "/v1/completions": Completions(models, generation, strict),
        "/v1/responses": Responses(models, generation, strict),
        MESSAGES: Messages(chat),
        f"{MESSAGES}/count_tokens": CountTokens(chat),
        "/tokenize": Tokenize(models),
        "/detokenize": Detokenize(models),
    }
    app = build_server(models, *[None] * 5, generation, enable_cors=cors)
    app.router.routes[:] = [route for route in app.router.routes if route.path in KEPT]
    of_text = text_limit(models.context)
    for path, handler in handlers.items():
        app.add_route(path, endpoint(handler, of_text), methods=["POST"])

    @app.get("/v1/models/{name:path}")
    def retrieve(name: str) -> dict:
        models.check_name(name)
        return models.entry(name)

    @app.get("/props")
    def properties() -> dict:
        return props(models)

    @app.get("/metrics")
    def counts() -> PlainTextResponse:
        return PlainTextResponse(generation.metrics.text(chat.manager.gauges() | memory(models.model.device)))

    @app.get("/")
    def page() -> FileResponse:
        return FileResponse(PAGE, headers={"content-security-policy": POLICY})

    @app.post("/load_model")
    def load(body: dict) -> StreamingResponse:
        name = body.get("model")
        expect(isinstance(name, str), "model", "a string", name)
        return StreamingResponse(models.load_model_streaming(name), media_type="text/event-stream")

    generation.metrics.paths = {route.path for route in app.router.routes}
    handle_errors(app)
    takes_images = models.get_model_modality(models.model, models.processor) != Modality.LLM
    limits = dict.fromkeys(handlers, MAX_BYTES if takes_images else of_text)
    return Guard(app, generation, limits, api_key, cors, host)
