"""uvicorn's server. It prints its address when it listens, and ends all requests when it is stopped."""

import asyncio
import gc
import signal
from types import FrameType

import torch
import uvicorn

from ... import warmup
from ..common.cli import CannotRun
from ..common.loading import say
from .answers import build_schemas
from .generation import Generation
from .model_manager import Models


class Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, generation: Generation, description: str):
        super().__init__(config)
        self.generation, self.description = generation, description

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        if self.started:
            say(f"Serving {self.description}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's own, except that it does not raise the signal again after the server has stopped."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
        # Not here: the signal may have interrupted a function that holds a lock which cancellation needs.
        asyncio.get_running_loop().call_soon_threadsafe(self.generation.fail_all)

    def run(self, sockets=None) -> None:
        gc.collect()
        gc.freeze()  # later collections would look at every object of the libraries and the model, and stop all threads
        try:
            super().run(sockets)
        finally:
            self.generation.shutdown()
            gc.freeze()  # else Python looks at each object of transformers before it ends, which takes a second


@torch.no_grad()
def warm_up(models: Models, generation: Generation) -> None:
    """Compile everything and allocate the paged cache before the first request."""
    warmup.wait_for_all()
    build_schemas()
    model = models.model
    ids = torch.ones(1, min(8, models.context - 2), dtype=torch.long, device=model.device)
    mask = torch.ones_like(ids)
    model.generate(ids, attention_mask=mask, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    modality = models.get_model_modality(model, models.processor)
    use_cb = generation.use_continuous_batching(model, modality)
    try:
        generation.get_manager(models.force_model, use_cb).init_cb(model, model.generation_config)
    except CannotRun as reason:
        say(f"{reason}; answers take turns instead")
        models.context = models.longest
        generation.stop_batching(models.longest)
