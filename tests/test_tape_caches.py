"""Layers that are replayed in one call: the cache changes between tokens."""

import copy
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from taped import Both, Conversation, fused, replays
from tiny_models import tokens
from torch_moe_metal.transformers import restore, snapshot
from torch_moe_metal.transformers.fusing import tape
from torch_moe_metal.transformers.fusing.linear_cache import GrowingLinearLayer
from torch_moe_metal.transformers.versions import with_cache


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def both(monkeypatch) -> Callable[..., Both]:
    return lambda model, **options: Both(model, monkeypatch, **options)


# ------------------------------------------------------------------------------------------------ changes in between


def crop(conversation: Conversation, count: int) -> None:
    conversation.cache.crop(-count)


def reorder(conversation: Conversation) -> None:
    conversation.cache.reorder_cache(torch.tensor([1, 0]))


def assign(conversation: Conversation) -> None:
    for layer in conversation.cache.layers:
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()


def several(conversation: Conversation) -> None:
    ids = torch.tensor([[5, 6, 7]]).expand(conversation.batch, -1)
    conversation.model(ids, **with_cache(conversation.cache))


def copied(conversation: Conversation) -> None:
    conversation.cache = copy.deepcopy(conversation.cache)


BETWEEN = [
    lambda each: crop(each, 1),
    lambda each: crop(each, 0),
    lambda each: crop(each, 3),
    reorder,
    assign,
    several,
    copied,
]


@pytest.mark.parametrize("seed", range(12))
def test_changes_of_the_cache(seed: int, both):
    """Between any two tokens, in random order."""
    choose, conversation = random.Random(seed), both(fused(), batch=2)
    for _ in range(12):
        conversation.steps(choose.randint(1, 5))
        conversation.change(choose.choice(BETWEEN))
    assert conversation.steps(6) >= 4


# ------------------------------------------------------------------------------------------------ recurrent states


def linear_layer(conversation: Conversation) -> GrowingLinearLayer:
    return conversation.cache.layers[0]


def new_state(conversation: Conversation) -> None:
    states = linear_layer(conversation).recurrent_states
    states[0] = states[0] * 0.5


def new_inputs(conversation: Conversation) -> None:
    states = linear_layer(conversation).conv_states
    states[0] = states[0] * 0.5


def state_in_place(conversation: Conversation) -> None:
    linear_layer(conversation).recurrent_states[0].mul_(0.5)


def select(conversation: Conversation) -> None:
    conversation.cache.batch_select_indices(torch.tensor([1, 0]))


def there_and_back(conversation: Conversation) -> None:
    """Tokens that a snapshot takes back, one of them with the tape."""
    kept = snapshot(conversation.cache)
    several(conversation)
    conversation.model(torch.full((conversation.batch, 1), 7), **with_cache(conversation.cache))
    restore(conversation.cache, kept)


def reset(conversation: Conversation) -> None:
    conversation.cache.reset()
    several(conversation)


STATES = [reorder, several, copied, new_state, new_inputs, state_in_place, select, there_and_back, reset]


@pytest.mark.parametrize("seed", range(8))
def test_changes_of_a_recurrent_cache(seed: int, both):
    choose, conversation = random.Random(seed), both(fused("qwen3_5_moe_text"), batch=2)
    for _ in range(10):
        conversation.steps(choose.randint(1, 5))
        conversation.change(choose.choice(STATES))
    assert conversation.steps(6) >= 4


def test_rows_of_a_recurrent_cache_in_new_memory(both, monkeypatch):
    """It is replaced twice. The tape stays, but for the tokens that need new memory."""
    recorded, stock = [], tape.LayerTape.recorded
    monkeypatch.setattr(tape.LayerTape, "recorded", lambda *args: recorded.append(1) or stock(*args))
    replayed = both(fused("qwen3_5_moe_text")).steps(140)
    assert replayed == 2 * 138 - 2
    assert len(recorded) == 2


def test_tokens_that_can_be_cropped(both):
    """As on mps, where `generate` crops after each token whether or not it takes the last one back."""
    conversation = both(fused("qwen3_5_moe_text"), batch=2)
    conversation.steps(2)
    conversation.change(lambda each: each.cache.activate_past_recording())
    for count in (0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0):
        conversation.step()
        conversation.change(lambda each, count=count: crop(each, count))
    assert conversation.replayed >= 8
    conversation.steps(3)  # without a crop the log is longer with each token
    conversation.change(several)
    conversation.steps(4)


def test_padded_prompts_of_recurrent_layers(monkeypatch):
    model, ids = fused("qwen3_5_moe_text"), tokens(3, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :1] = 0
    found = []
    for on in (True, False):
        monkeypatch.setattr(tape, "ENABLED", on)
        options = {"attention_mask": mask, "max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
        replayed = replays(lambda options=options: found.append(model.generate(ids, pad_token_id=0, **options)))
        assert bool(replayed) == on
    assert torch.equal(*found)
