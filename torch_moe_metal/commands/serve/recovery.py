"""Continuous batching goes on after an error in a step. transformers ends its worker, and with it the server."""

import contextlib
import logging
from collections import deque

from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)

logger = logging.getLogger("uvicorn.error")


def survive(manager: ContinuousBatchingManager) -> None:
    """Make the manager fail the running requests if a step raises an error. Requests that wait are computed next."""
    step = manager._generation_loop_body

    def guarded(batch: ContinuousBatchProcessor, bootstrapping: bool) -> bool:
        try:
            return step(batch, bootstrapping)
        except Exception as error:
            logger.error("An error in a step of continuous batching ends its requests: %s", error, exc_info=error)
            fail(batch, error)
            return True

    manager._generation_loop_body = guarded


def fail(batch: ContinuousBatchProcessor, error: Exception) -> None:
    """Fail the running requests and empty the cache. If none was running, a request that waits made the error."""
    scheduler = batch.scheduler
    running = scheduler.active_requests or scheduler.waiting_requests
    for state in running.values():
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            batch._handle_request_error(error, state)
    running.clear()
    scheduler.waiting_requests_order = deque(
        each for each in scheduler.waiting_requests_order if each in scheduler.waiting_requests
    )
    scheduler.block_new_requests = False
    batch.inputs_and_outputs.reset()
    batch.cache.reset()
