"""uvicorn's connections, with limits: how many there are, and how long a request may take to arrive.

uvicorn has neither. Clients that connect and send half a request would use up the files that a process may open. Then
no other client could connect.
"""

import asyncio
import resource
from collections.abc import Callable

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10  # for all that precedes the body
BODY_SECONDS = 60  # without a byte of the body
REST_SECONDS = 10  # for the rest of a body that was refused
MOST = 512  # connections


class Connection(H11Protocol):
    """A connection waits while it has no complete request, or has answered it. It may not wait for long, and if there
    are too many connections, the one that has waited longest is closed."""

    most = MOST
    waits_since = 0.0
    timer: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.waits_since = self.loop.time()
        self.set_timer(HEADER_SECONDS)
        if len(self.connections) > self.most:
            self.make_room()

    def make_room(self) -> None:
        others = [each for each in self.connections if each.waits and each is not self]
        waiting = [each for each in others if not each.transport.is_closing()]
        min(waiting, key=lambda each: each.waits_since, default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.waits:
            self.stop_timer()
        elif self.cycle is not None and not self.cycle.response_complete:  # the body has come on
            self.set_timer(BODY_SECONDS)
        elif self.timer is None:
            self.set_timer(REST_SECONDS if self.cycle is not None and self.cycle.more_body else HEADER_SECONDS)

    def on_response_complete(self) -> None:
        self.waits_since = self.loop.time()
        self.stop_timer()
        super().on_response_complete()

    def connection_lost(self, reason: Exception | None) -> None:
        self.stop_timer()
        super().connection_lost(reason)

    def shutdown(self) -> None:
        """uvicorn's own, except that it does not wait for the rest of a request."""
        if self.waits:
            self.transport.abort()
        else:
            super().shutdown()

    def set_timer(self, seconds: float) -> None:
        self.stop_timer()
        self.timer = self.loop.call_later(seconds, self.transport.abort)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def config(app: Callable, log_level: str) -> uvicorn.Config:
    """uvicorn's configuration with these connections. A quarter of the files that the process may open are for them,
    and asyncio may accept as many again before it tells us of the first one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 4 * MOST:
        soft = 4 * MOST if hard == resource.RLIM_INFINITY else min(4 * MOST, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = MOST if soft == resource.RLIM_INFINITY else min(MOST, soft // 4)
    limited = type("Connection", (Connection,), {"most": most})
    return uvicorn.Config(
        app, http=limited, ws="none", lifespan="off", log_level=log_level, backlog=most, timeout_graceful_shutdown=10
    )
