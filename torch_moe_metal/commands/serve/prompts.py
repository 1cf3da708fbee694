"""Makes the prompt of a request: on a thread of its own, since a template or a long text may take long, and with a
limit of time."""

import asyncio
import contextlib
import contextvars
import ctypes
import inspect
import json
import threading
from collections.abc import Callable
from typing import TypeVar

from fastapi import HTTPException
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils.chat_template_utils import _get_template_variables

from .requests import Refused
from .values import expect, refuse

SECONDS = 60  # for one prompt
MAX_VARIABLES = 65536  # characters of chat_template_kwargs as JSON
#: Names that mean something else than a variable of the template.
PARAMETERS = {
    "messages",
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *inspect.signature(ProcessorMixin.apply_chat_template).parameters,
}

T = TypeVar("T")


class Interrupted(BaseException):
    """Raised in a thread that takes too long. No `except Exception` of a template's engine ends it."""


async def in_time(function: Callable[[], T]) -> T:
    """The function's result, from a thread of its own. The thread is interrupted if it takes too long, or if the
    client leaves: a loop in a template does not go on."""
    loop = asyncio.get_running_loop()
    result = loop.create_future()

    def report(report_to: Callable, value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: result.done() or report_to(value))

    context = contextvars.copy_context()

    def run() -> None:
        try:
            report(result.set_result, context.run(function))
        except Exception as error:
            report(result.set_exception, error)
        except Interrupted:
            pass

    thread = threading.Thread(target=run, name="prompt", daemon=True)
    thread.start()
    try:
        return await asyncio.wait_for(result, SECONDS)
    except TimeoutError:
        raise Refused(400, f"the prompt took more than {SECONDS} seconds to make") from None
    finally:
        if result.cancelled():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Interrupted))


async def made(function: Callable[[], T]) -> T:
    """The same, where any other error is the request's fault: of the chat template, the tokenizer, or of a wrong value
    inside a field."""
    try:
        return await in_time(function)
    except HTTPException:
        raise
    except Exception as error:
        raise Refused(400, f"{type(error).__name__}: {str(error)[:200]}") from error


def check_variables(given: dict) -> None:
    if wrong := sorted(PARAMETERS & given.keys()):
        refuse("chat_template_kwargs", "variables of the chat template only", wrong[0])
    length = len(json.dumps(given))
    expect(length <= MAX_VARIABLES, "chat_template_kwargs", f"at most {MAX_VARIABLES:,} characters", length)


def variables(processor, tools: list | None, given: dict, effort: str | None) -> dict:
    """The values for a template, without those that it has no variable for."""
    if effort is not None:
        given = {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {}) | given
    if not given:
        return {}
    if isinstance(processor, ProcessorMixin):
        template = processor._resolve_chat_template(None)
    else:
        template = processor.get_chat_template(None, tools)
    return {name: given[name] for name in given.keys() & _get_template_variables(template)}
