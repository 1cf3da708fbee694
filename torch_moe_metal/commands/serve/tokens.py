"""/tokenize, /detokenize and /props, as llama.cpp's server has them."""

import asyncio

from fastapi.responses import JSONResponse

from .fields import DETOKENIZE, TOKENIZE, check
from .model_manager import Models
from .values import expect


class Tokenize:
    def __init__(self, models: Models):
        self.tokenizer = getattr(models.processor, "tokenizer", models.processor)
        self.vocabulary = models.model.config.get_text_config().vocab_size

    async def handle_request(self, body: dict, request_id: str) -> JSONResponse:
        return JSONResponse(await asyncio.to_thread(self.answer, body))

    def answer(self, body: dict) -> dict:
        check(body, TOKENIZE)
        expect("content" in body, "content", "a value", None)
        ids = self.tokenizer.encode(body["content"], add_special_tokens=body.get("add_special", False))
        if body.get("with_pieces"):
            return {"tokens": [{"id": each, "piece": self.tokenizer.decode([each])} for each in ids]}
        return {"tokens": ids}


class Detokenize(Tokenize):
    def answer(self, body: dict) -> dict:
        check(body, DETOKENIZE)
        tokens = body.get("tokens")
        right = isinstance(tokens, list) and all(0 <= each < self.vocabulary for each in tokens)
        expect(right, "tokens", f"token ids below {self.vocabulary}", tokens)
        return {"content": self.tokenizer.decode(tokens)}


def props(models: Models) -> dict:
    return {
        "model_path": models.source.name,
        "model_alias": models.names[-1],
        "chat_template": str(getattr(models.processor, "chat_template", None) or ""),
        "default_generation_settings": {"n_ctx": models.context},
        "total_slots": models.parallel,
    }
