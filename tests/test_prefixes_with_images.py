"""Prompts with images in the store of prefixes, as `serve` computes them."""

import asyncio
import random
from collections.abc import Iterator

import pytest
import torch
import transformers
from transformers import BatchEncoding, GenerationConfig

import served
import torch_moe_metal
from test_prefixes import GIGABYTE, drawn
from torch_moe_metal.commands.common.prefixes import Prefixes
from torch_moe_metal.commands.serve.in_turns import InTurns
from torch_moe_metal.commands.serve.metrics import Metrics
from torch_moe_metal.commands.serve.requests import Request, current
from torch_moe_metal.transformers.fusing.tiny_models import COMMON, CONFIGS, MEDIA_TOKENS, VISION, randomised

START, END, PLACE = (MEDIA_TOKENS[f"{name}_token_id"] for name in ("vision_start", "vision_end", "image"))
ANSWER = 5


def model_of(family: str) -> torch.nn.Module:
    """Keys and values, or a recurrent state as well."""
    torch.manual_seed(0)
    text = COMMON | CONFIGS[family if family in CONFIGS else f"{family}_text"] | {"vocab_size": served.VOCABULARY}
    config = transformers.AutoConfig.for_model(family, text_config=text, vision_config=VISION, **MEDIA_TOKENS)
    model = randomised(transformers.AutoModelForMultimodalLM.from_config(config))
    torch_moe_metal.patch(model)
    return model


class Talk:
    """Prompts of pieces: lists of tokens, and images by number."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.images = model, 0
        self.manager = InTurns(4096, Metrics(), 2, model, Prefixes(model, GIGABYTE))
        vision = model.model.visual
        vision.register_forward_pre_hook(self.count)
        self.size = vision.patch_embed.proj.weight[0].numel()

    def count(self, *_) -> None:
        self.images += 1

    def inputs(self, pieces: list) -> BatchEncoding:
        ids, images = [], []
        for piece in pieces:
            if isinstance(piece, int):
                images.append(torch.randn(16, self.size, generator=torch.Generator().manual_seed(piece)))
                ids += [START, *[PLACE] * 4, END]
            else:
                ids += piece
        prompt = torch.tensor([ids])
        found = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        found["mm_token_type_ids"] = (prompt == PLACE).long()
        if images:
            found |= {"pixel_values": torch.cat(images), "image_grid_thw": torch.tensor([[1, 4, 4]] * len(images))}
        return BatchEncoding(found)

    def __call__(self, *pieces, cuts: tuple[int, ...] = ()) -> tuple[int, int, list[int]]:
        """The tokens that were reused, how often images were computed, and the answer, which is that of `generate`."""
        inputs, request, before = self.inputs(list(pieces)), Request(cuts=list(cuts)), self.images
        settings = GenerationConfig(max_new_tokens=ANSWER, eos_token_id=None, pad_token_id=0, do_sample=False)

        async def answer() -> list[int]:
            current.set(request)
            given = self.model, served.tokenizer(), inputs, settings, "id"
            return (await self.manager.generate_non_streaming(*given))[2]

        ids, images = asyncio.run(answer()), self.images - before
        alone = self.model.generate(**inputs, generation_config=settings)
        assert ids == alone[0, inputs["input_ids"].shape[1] :].tolist()
        return request.reused, images, ids


@pytest.fixture(params=["qwen3_vl_moe", "qwen3_5_moe"])
def talk(request) -> Iterator[Talk]:
    made = Talk(model_of(request.param))
    yield made
    made.manager.stop()


def test_an_image_is_computed_once(talk: Talk):
    rng = random.Random(0)
    system, question = drawn(rng, 20), drawn(rng, 30)
    first = [system, 1, question]
    reused, images, answer = talk(*first, cuts=(20, 53))
    assert (reused, images) == (0, 1)
    more = [*first, answer, drawn(rng, 9)]
    reused, images, _ = talk(*more, cuts=(20, 68))
    assert (reused, images) == (60, 0)
    reused, images, _ = talk(system, 2, question, cuts=(20, 53))  # another image
    assert (reused, images) == (21 if talk.manager.prefixes.needs_cuts is False else 20, 1)
    reused, images, _ = talk(*more, 2, drawn(rng, 9), cuts=(20, 60, 78))  # a second image
    assert reused <= 21 and images == 1
    reused, images, _ = talk(*more, drawn(rng, 9), cuts=(20, 60, 78))
    assert reused >= 60 and images == 0


def test_texts_and_images_in_turn(talk: Talk):
    """transformers keeps the distance between tokens and positions in the model."""
    rng = random.Random(1)
    text, question = drawn(rng, 40), drawn(rng, 20)
    for _ in range(2):
        talk(text, cuts=(37,))
        talk(question, 3, drawn(rng, 9), cuts=(20, 32))
        reused, _, _ = talk(text, drawn(rng, 5), cuts=(37, 42))
        assert reused >= 37
