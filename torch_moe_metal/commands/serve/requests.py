"""A request: what the server knows of it besides its `GenerationConfig`, and how it is refused."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import HTTPException
from transformers.cli.serving.utils import CBStreamer, DirectStreamer, _StreamError

from .logprobs import Recorder
from .sampling import Change

if TYPE_CHECKING:
    from .constraints import Constraint

STOPPED = "the server is shutting down"


class Refused(HTTPException):
    """A request that is wrong, with OpenAI's code and the name of the wrong field."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(status, message)
        self.code, self.param = code, param


class Failed(RuntimeError):
    """Generation raised an error."""


@dataclass(eq=False)
class Request:
    """The fields of a request that `GenerationConfig` has no place for, and how to end its generation."""

    stops: list[str] = field(default_factory=list)
    one_call: bool = False
    seed: int | None = None
    changes: list[Change] = field(default_factory=list)  # of the scores, in this order
    chat: bool = False
    required: str = "prompt"  # the field with the prompt
    cuts: list[int] = field(default_factory=list)  # of the prompt, see Prefixes
    prompt: int = 0  # tokens
    reused: int = 0  # tokens of the prompt that were not computed again
    stop: str | None = None  # the stop string that ended the answer
    recorder: Recorder | None = None
    constraint: "Constraint | None" = None
    entries: list[dict] = field(default_factory=list)  # of a whole answer, for each token of its text
    parts: list["Request"] = field(default_factory=list)  # one for each answer, if it asks for several
    cancel: Callable[[], None] = lambda: None
    fail: Callable[[str], None] = lambda _reason: None

    def started(self, streamer: DirectStreamer | CBStreamer, put: Callable[[object], None]) -> None:
        self.cancel = streamer.cancel
        self.fail = lambda reason: (put(_StreamError(reason)), streamer.cancel())


#: The request of the current task. The application's wrapper sets it for each one.
current: ContextVar[Request] = ContextVar("current")
