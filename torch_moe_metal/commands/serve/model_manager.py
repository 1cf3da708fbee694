"""transformers' model manager with one model, which is loaded through this package and patched."""

import json
import logging
import time
from argparse import Namespace
from collections.abc import AsyncIterator

from transformers.cli.serving.model_manager import ModelManager

from ...transformers import patch
from ..common.loading import Source, context_of, load_model, load_tokenizer, memory
from .constraints import Constraints
from .families import Form, form_of
from .requests import Refused
from .values import shortened

ANY = "*"  # the alias for every name


class Models(ModelManager):
    """`force_model` is the model's name, and `load_model_and_processor` returns the model to every handler."""

    def __init__(self, source: Source, options: Namespace):
        super().__init__(device=options.device, model_timeout=-1)
        logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)  # uvicorn logs each request
        self.source, self.force_model = source, source.name
        self.names = [source.name, *options.alias]
        self.created, self.parallel = int(time.time()), options.parallel
        self.ignored: set[str] = set()  # unknown fields of requests that were logged
        self.processor = load_tokenizer(source)
        self.model = load_model(source, options)
        self.report = patch(self.model)
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self.template = getattr(self.processor, "chat_template", None) or tokenizer.chat_template
        self.form = self.find_form(tokenizer)
        self.constraints = Constraints(self)
        self.context = self.longest = context_of(self.model, options.context)
        defaults = self.model.generation_config
        if defaults.pad_token_id is None and defaults.eos_token_id is not None:  # `generate` warns of it each time
            ends = defaults.eos_token_id
            defaults.pad_token_id = ends[0] if isinstance(ends, list) else ends

    def find_form(self, tokenizer) -> Form:
        """The form of the model's answers, with which transformers' parser reads them if the tokenizer has none."""
        found = form_of(str(self.template), self.model.config.model_type)
        if getattr(tokenizer, "response_template", None) is None and found.template is not None:
            tokenizer.response_template = found.template
        return found

    def __str__(self) -> str:
        return f"{self.report}\n{memory(self.model)}; context: {self.context:,} tokens"

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id

    def check_name(self, name: object) -> None:
        if name is None or ANY in self.names or name in self.names:
            return
        if str(name).removesuffix("@main") not in self.names:  # `transformers chat` appends the revision
            expected = ", ".join(map(repr, self.names))
            message = f"model: expected {expected}, the model of this server, got {shortened(name)}"
            raise Refused(404, message, "model_not_found", "model")

    def load_model_and_processor(self, model_id_and_revision: str, *_args, **_kwargs):
        return self.model, self.processor

    def load_model_streaming(self, model_id_and_revision: str) -> AsyncIterator[str]:
        self.check_name(model_id_and_revision)

        async def ready() -> AsyncIterator[str]:
            yield f"data: {json.dumps({'status': 'ready', 'model': model_id_and_revision, 'cached': True})}\n\n"

        return ready()

    def list_models(self) -> list[dict]:
        return [self.entry(name) for name in self.names if name != ANY]

    get_gen_models = list_models  # its name before transformers 5.24

    def entry(self, name: str) -> dict:
        return {"id": name, "object": "model", "created": self.created, "owned_by": "torch_moe_metal"}
