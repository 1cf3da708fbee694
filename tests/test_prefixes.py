"""The store of prefixes, and how `serve` uses it: a prompt that begins like an earlier one gets the same answer as
without the store."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import served
import torch_moe_metal
from test_serve import chat, client, collect, text_of
from tiny_models import tiny_model
from torch_moe_metal.commands.common import prefixes
from torch_moe_metal.commands.common.cli import UNSAMPLED
from torch_moe_metal.commands.common.loading import Source
from torch_moe_metal.commands.common.prefixes import Prefixes, cuts, least_useful
from torch_moe_metal.transformers.versions import with_cache

#: Keys and values, windows, latents, recurrent states, and a short convolution.
FAMILIES = ("qwen3_moe", "gpt_oss", "gemma4_text", "deepseek_v3", "qwen3_next", "qwen3_5_moe_text")
GIGABYTE = 1e9
ANSWER = 5


@pytest.fixture(params=FAMILIES)
def model(request) -> torch.nn.Module:
    changes = {"sliding_window": 16} if request.param == "gpt_oss" else {}
    made = tiny_model(request.param, **changes)
    torch_moe_metal.patch(made)
    return made


def generate(model, ids: list[int], tokens: int, **options) -> list[int]:
    prompt = torch.tensor([ids])
    options = {"pad_token_id": 0, "eos_token_id": -1, "attention_mask": torch.ones_like(prompt)} | UNSAMPLED | options
    return model.generate(prompt, max_new_tokens=tokens, **options)[0].tolist()


def reused_and_answer(store: Prefixes, model, ids: list[int], cuts=()) -> tuple[int, list[int]]:
    """As `chat` and `serve` use the store."""
    prefix = store.take(ids)
    reused = len(prefix.ids)
    for beginning in store.before(prefix, ids, cuts):
        generate(model, beginning, 1, **with_cache(prefix.cache))
        prefix.note(beginning)
    output = generate(model, ids, ANSWER, **with_cache(prefix.cache))
    store.give(prefix, output)
    return reused, output[len(ids) :]


def drawn(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(2, 89) for _ in range(count)]


def test_a_conversation_goes_on(model):
    """Also if its answer is written in another way, or is cut."""
    rng, store = random.Random(0), Prefixes(model, GIGABYTE)
    ids = drawn(rng, 60)
    reused, answer = reused_and_answer(store, model, ids, [20, 57])
    assert reused == 0 and answer == generate(model, ids, ANSWER)[60:]
    for change in (lambda ids, answer: ids + answer, lambda ids, answer: ids[:-3] + drawn(rng, 7)):
        before, ids = len(ids), [*change(ids, answer), *drawn(rng, 40)]
        reused, answer = reused_and_answer(store, model, ids, [20, len(ids) - 3])
        assert before - 3 <= reused < len(ids) and len(store.entries) == 1
        assert answer == generate(model, ids, ANSWER)[len(ids) :]


def test_conversations_in_turn_each_find_their_own(model):
    """They share the system prompt."""
    rng, store = random.Random(1), Prefixes(model, GIGABYTE)
    system = drawn(rng, 30)
    conversations = [system + drawn(rng, 40 + 7 * i) for i in range(3)]
    for turn in range(3):
        for i, ids in enumerate(conversations):
            reused, answer = reused_and_answer(store, model, ids, [30, len(ids)])
            assert answer == generate(model, ids, ANSWER)[len(ids) :]
            assert reused == (len(ids) - 7 if turn else 30 if i else 0)
            conversations[i] = ids + answer + drawn(rng, 6)
    assert len(store.entries) == 3


@pytest.mark.parametrize("limit", [0.2, 1.5, 100])  # conversations
def test_any_prompts(model, limit: float):
    """Edited, cut and repeated ones, in a store that is too small, almost full, or large enough."""
    rng = random.Random(limit)
    store = Prefixes(model, GIGABYTE)
    reused_and_answer(store, model, drawn(rng, 80))
    store.limit = limit * store.nbytes()
    store.clear()
    known = [drawn(rng, 50) for _ in range(2)]
    total = 0
    for _ in range(20):
        base = rng.choice(known)
        ids = base[: rng.randrange(1, len(base) + 1)] + drawn(rng, rng.randrange(12))
        reused, answer = reused_and_answer(store, model, ids, sorted(rng.sample(range(len(ids)), min(2, len(ids)))))
        assert answer == generate(model, ids, ANSWER)[len(ids) :]
        assert store.nbytes() <= store.limit
        known = [*known[-5:], ids + answer]
        total += reused
    assert total == 0 if limit < 1 else total > 0


def test_images_of_another_prompt_do_not_move_positions():
    """transformers keeps the distance between tokens and positions in the model."""
    model = tiny_model("qwen3_vl_moe")
    rng, store = random.Random(6), Prefixes(model, GIGABYTE)
    ids = drawn(rng, 40)
    _, answer = reused_and_answer(store, model, ids)
    ids += answer + drawn(rng, 9)
    model.model.rope_deltas = torch.tensor([[-30]])
    reused, answer = reused_and_answer(store, model, ids)
    assert reused > 40 and answer == generate(model, ids, ANSWER)[len(ids) :]


def test_entries_leave_in_the_order_of_their_use():
    model = tiny_model("qwen3_moe")
    rng, store = random.Random(2), Prefixes(model, GIGABYTE)
    first, second, third = (drawn(rng, 50) for _ in range(3))
    for ids in (first, second, first):
        reused_and_answer(store, model, ids)
    assert len(store.entries) == 2
    store.limit = store.nbytes()
    reused_and_answer(store, model, third)
    assert [entry.ids[:50] for entry in store.entries] == [first, third]


def test_a_snapshot_is_taken_at_every_step(monkeypatch):
    monkeypatch.setattr(prefixes, "STEP", 10)
    model = tiny_model("qwen3_next")
    store, ids = Prefixes(model, GIGABYTE), drawn(random.Random(3), 40)
    prefix = store.take(ids)
    for end in range(8, 40, 8):
        store.note_step(prefix, ids)
        generate(model, ids[:end], 1, **with_cache(prefix.cache))
    store.note_step(prefix, ids)
    assert list(prefix.snapshots) == [16, 32]


def test_the_least_useful_snapshot_is_close_to_the_one_before_it():
    assert least_useful([10, 2000, 2100, 4000, 6000, 6010, 6020]) == 2100


def test_a_conversation_keeps_few_snapshots():
    model = tiny_model("qwen3_next")
    store, ids = Prefixes(model, GIGABYTE), drawn(random.Random(4), 90)
    reused_and_answer(store, model, ids, range(5, 90, 5))
    kept = list(store.entries[0].snapshots)
    assert len(kept) == prefixes.MOST and kept[0] == 5 and kept[-3:] == [80, 85, 94]


def test_a_token_that_was_not_returned_leaves_the_cache(model):
    """On mps `generate` is a token ahead when an answer is cancelled."""
    rng, store = random.Random(5), Prefixes(model, GIGABYTE)
    ids = drawn(rng, 60)
    prefix = store.take(ids)
    for beginning in store.before(prefix, ids, [50]):
        generate(model, beginning, 1, **with_cache(prefix.cache))
        prefix.note(beginning)
    output = generate(model, ids, ANSWER, **with_cache(prefix.cache))
    store.give(prefix, output[: prefix.cache.get_seq_length() - 1])
    assert store.entries[0].cache.get_seq_length() == len(store.entries[0].ids) >= 50
    ids = output[:63] + drawn(rng, 9)
    reused, answer = reused_and_answer(store, model, ids, [50])
    assert reused >= 50 and answer == generate(model, ids, ANSWER)[len(ids) :]


def test_a_model_that_cannot_continue_a_prompt_is_computed_again():
    """Jamba's mixers lose their state between two parts of a prompt."""
    store = Prefixes(tiny_model("jamba"), GIGABYTE)
    assert not store.works and not store.continues


def test_a_model_with_a_cache_of_its_own_is_computed_again():
    model = tiny_model("qwen3_moe")
    model.generation_config.cache_implementation = "static"
    store = Prefixes(model, GIGABYTE)
    assert not store.works and store.take([1, 2, 3]).cache is None


def test_cuts_are_where_turns_end():
    def encode(messages: list[dict], answers: bool) -> list[int]:
        if len(messages) == 1:
            raise ValueError("a template that wants a user")
        return [ord(letter) for message in messages for letter in message["content"]] + [0] * answers

    messages = [{"role": "system", "content": "abc"}, *({"role": "user", "content": text} for text in ("de", "fg"))]
    ids = encode(messages, True)
    assert cuts(messages, ids, encode) == [5, 7]


# ------------------------------------------------------------------------------------------------ the server


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_next"])
def server(request, tmp_path_factory) -> Iterator[served.ServerThread]:
    folder = served.checkpoint(tmp_path_factory.mktemp("served"), request.param)
    with served.ServerThread(Source.of(str(folder))) as server:
        yield server


@pytest.fixture(autouse=True)
def empty_store(request) -> None:
    if "server" in request.fixturenames:
        request.getfixturevalue("server").generation.get_manager("").prefixes.clear()


def conversation_of(text: str) -> list[dict]:
    return [{"role": "system", "content": "be brief " * 4}, {"role": "user", "content": text}]


def test_usage_says_what_was_reused(server):
    messages = conversation_of("hello " * 9)
    first = chat(server, messages=messages)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    messages += [{"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "and then?"}]
    second = chat(server, messages=messages)
    reused = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens - len("<assistant\n") <= reused < second.usage.prompt_tokens
    text, _, usage = collect(chat(server, messages=messages, stream=True))
    server.generation.get_manager("").prefixes.clear()
    assert text_of(chat(server, messages=messages)) == text_of(second)
    assert text == collect(chat(server, messages=messages, stream=True))[0]
    assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - len("<assistant\n")


def test_other_endpoints_reuse_too(server):
    open_ai, prompt = client(server), "once upon a time " * 3
    for _ in range(2):
        completion = open_ai.completions.create(model=server.model, prompt=prompt, max_tokens=5, temperature=0)
        response = open_ai.responses.create(model=server.model, input=prompt, max_output_tokens=5, temperature=0)
    if not server.generation.get_manager("").prefixes.needs_cuts:
        assert completion.usage.prompt_tokens_details.cached_tokens == len(prompt) - 1
    assert response.usage.input_tokens_details.cached_tokens >= len(prompt)


def test_a_request_that_is_cancelled_leaves_its_prompt(server):
    messages = conversation_of("hello " * 9)
    parts = chat(server, messages=messages, stream=True, max_tokens=3000)
    for _ in range(4):
        next(iter(parts))
    parts.close()
    assert server.becomes_idle()
    again = chat(server, messages=messages)
    assert again.usage.prompt_tokens_details.cached_tokens >= again.usage.prompt_tokens - len("<assistant\n")
    server.generation.get_manager("").prefixes.clear()
    assert text_of(chat(server, messages=messages)) == text_of(again)


def test_without_memory_nothing_is_reused(tmp_path: Path):
    with served.ServerThread(Source.of(str(served.checkpoint(tmp_path))), prefix_memory=0) as server:
        for _ in range(2):
            answer = chat(server, messages=conversation_of("hello " * 9))
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
