"""Answers that `serve` computes at once: they take turns, and prompts are computed in pieces."""

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch

import served
import torch_moe_metal
from test_serve import HELLO, LONG, chat, client, collect, raw, text_of
from tiny_models import FAMILIES, tiny_model, tokens
from torch_moe_metal.commands.common.loading import Source
from torch_moe_metal.commands.common.prefixes import can_compute_in_pieces
from torch_moe_metal.commands.serve import in_turns
from torch_moe_metal.commands.serve.turns import Turns, with_turns

PIECE = 16
WORDS = [{"role": "user", "content": "word " * 60}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return served.checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[served.ServerThread]:
    """Prompts are computed in small pieces."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(in_turns, "PIECE", PIECE)
        with served.ServerThread(Source.of(str(folder)), context=40000) as server:
            yield server


@pytest.fixture
def forwards(server, monkeypatch) -> list[int]:
    """The number of tokens of each forward."""
    counts, forward = [], server.models.model.forward

    def counted(*args, **kwargs):
        counts.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(server.models.model, "forward", counted)
    return counts


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


# ------------------------------------------------------------------------------------------------ turns


def test_a_short_answer_does_not_wait_for_a_long_one(server):
    parts = chat(server, max_tokens=LONG, stream=True)
    next(iter(parts))
    assert chat(server, max_tokens=3, timeout=20).usage.completion_tokens == 3
    assert next(iter(parts)).choices  # which goes on
    parts.close()
    assert server.becomes_idle()


def test_answers_at_once_have_the_tokens_of_one_alone(server):
    """Greedy ones and those with a seed, though all threads draw from one generator."""
    kinds = [{"temperature": 0}, {"temperature": 1.5, "seed": 7}, {"temperature": 1.5, "seed": 8}]
    requests = [
        {"messages": [{"role": "user", "content": f"{word} " * 20}], "max_tokens": 40, **kind}
        for word, kind in zip(("one", "two", "three"), kinds, strict=True)
    ]
    alone = [text_of(chat(server, **request)) for request in requests]
    with ThreadPoolExecutor(4) as threads:
        unseeded = threads.submit(chat, server, temperature=1.5, max_tokens=40)
        together = [text_of(answer) for answer in threads.map(lambda request: chat(server, **request), requests)]
        unseeded.result()
    assert together == alone


def test_parallel_limits_the_answers_at_once(folder: Path):
    with served.ServerThread(Source.of(str(folder)), parallel=1) as server:
        parts = chat(server, max_tokens=LONG, stream=True)
        next(iter(parts))
        with pytest.raises(openai.APITimeoutError):
            chat(server, max_tokens=1, timeout=1)
        parts.close()
        assert chat(server, max_tokens=1).usage.completion_tokens == 1


def test_turns_are_in_the_order_in_which_threads_ask():
    turns, taken, begun = Turns(torch.device("cpu")), [], threading.Event()

    def take(name: str) -> None:
        with turns:
            for _ in range(3):
                taken.append(name)
                begun.set()
                turns.give_way()

    threads = [threading.Thread(target=take, args=(name,)) for name in "abc"]
    with turns:
        for waiting, thread in enumerate(threads):
            thread.start()
            wait_until(lambda waiting=waiting: len(turns.waiting) > waiting)
    for thread in threads:
        thread.join()
    assert "".join(taken) == "abcabcabc" and not turns.taken


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def test_turns_and_pieces_do_not_change_the_tokens(family: str):
    """Of two answers by one model, which keeps no state of either."""
    model, turns = tiny_model(family), Turns(torch.device("cpu"))
    torch_moe_metal.patch(model)
    prompts, order = [tokens(1, 40, seed=seed) for seed in (1, 2)], []
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    alone = [model.generate(ids, **options) for ids in prompts]

    def generate(ids: torch.Tensor) -> torch.Tensor:
        def before_forward() -> None:
            turns.give_way()
            order.append(threading.get_ident())

        with turns:
            return with_turns(model, before_forward).generate(ids, **options, prefill_chunk_size=PIECE)

    with ThreadPoolExecutor(2) as threads:
        with turns:
            together = [threads.submit(generate, ids) for ids in prompts]
            wait_until(lambda: len(turns.waiting) == 2)
        assert all(torch.equal(each.result(), own) for each, own in zip(together, alone, strict=True))
    assert sum(one != other for one, other in itertools.pairwise(order)) > 20


# ------------------------------------------------------------------------------------------------ pieces


def test_a_long_prompt_gives_way_between_its_pieces(server, forwards):
    whole = server.models.model.generate
    ids = server.models.processor.apply_chat_template(WORDS, add_generation_prompt=True, return_tensors="pt")
    expected = whole(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    forwards.clear()
    parts = chat(server, max_tokens=LONG, stream=True)
    next(iter(parts))
    assert text_of(chat(server, messages=WORDS, max_tokens=8)) == server.models.processor.decode(expected)
    parts.close()
    assert server.becomes_idle()
    length = ids["input_ids"].shape[1]
    first, last = forwards.index(PIECE, 4), len(forwards) - forwards[::-1].index(PIECE)
    pieces = forwards[first:last]
    assert forwards.count(PIECE) >= length // PIECE and max(forwards) == PIECE
    assert pieces.count(1) >= length // PIECE - 2  # tokens of the other answer


def test_a_client_that_disconnects_ends_its_prompt(server, monkeypatch):
    server.generation.get_manager("").prefixes.clear()
    model, sizes, begun, go_on = server.models.model, [], threading.Event(), threading.Event()
    forward = model.forward

    def waiting(*args, **kwargs):
        sizes.append(kwargs["input_ids"].shape[1])
        begun.set()
        go_on.wait(20)
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", waiting)
    with ThreadPoolExecutor(1) as threads:
        abandoned = threads.submit(chat, server, messages=WORDS, timeout=1)
        assert begun.wait(20)
        assert raw(server, "/health", method="GET") == (200, b'{"status":"ok"}')
        with pytest.raises(openai.APITimeoutError):
            abandoned.result()
    wait_until(lambda: not server.generation.requests)
    go_on.set()
    assert server.becomes_idle()
    assert sizes == [PIECE]


def test_the_progress_of_a_long_prompt_is_logged(server, caplog, monkeypatch):
    monkeypatch.setattr(in_turns, "BETWEEN", -1.0)
    server.generation.get_manager("").prefixes.clear()
    with caplog.at_level("INFO", "uvicorn.error"):
        prompt = chat(server, messages=WORDS, max_tokens=1).usage.prompt_tokens
    found = re.findall(r"(\d+) of the prompt's (\d+) tokens are computed", caplog.text)
    assert found == [(str(done), str(prompt)) for done in range(0, prompt, PIECE)]


@pytest.mark.parametrize(("family", "expected"), [("qwen3_next", True), ("minimax", False)])
def test_prompts_come_in_pieces_only_if_the_model_can(family: str, expected: bool):
    assert can_compute_in_pieces(tiny_model(family)) == expected


# ------------------------------------------------------------------------------------------------ names


def test_aliases(folder: Path):
    with served.ServerThread(Source.of(str(folder)), alias=["gpt-4o"]) as server:
        api = client(server)
        assert [model.id for model in api.models.list()] == [server.model, "gpt-4o"]
        assert api.models.retrieve("gpt-4o").id == "gpt-4o"
        assert text_of(chat(server, model="gpt-4o")) == collect(chat(server, stream=True))[0]
        with pytest.raises(openai.NotFoundError, match=r"expected .*'gpt-4o'"):
            chat(server, model="another")
    with served.ServerThread(Source.of(str(folder)), alias=["*"]) as server:
        assert [model.id for model in client(server).models.list()] == [server.model]
        assert chat(server, model="another", messages=HELLO, max_tokens=1).usage.completion_tokens == 1
