"""No tape outlives what it was recorded from: the model, the cache, modes, threads, errors."""

import copy
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

import torch_moe_metal
from taped import Both, Conversation, fused, replays
from tiny_models import tokens
from torch_moe_metal.transformers.fusing import tape
from torch_moe_metal.transformers.versions import with_cache


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def both(monkeypatch) -> Callable[..., Both]:
    return lambda model, **options: Both(model, monkeypatch, **options)


class Adapter(nn.Module):
    """A module in place of a linear layer, as PEFT's."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * 1.5


def doubled(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    return output * 2


def of_layer(model: nn.Module) -> nn.Module:
    return model.model.layers[1]


def new_weight(model: nn.Module) -> None:
    norm = of_layer(model).input_layernorm
    norm.weight = nn.Parameter(norm.weight * 2, requires_grad=False)


def new_data(model: nn.Module) -> None:
    projection = of_layer(model).self_attn.o_proj
    projection.weight.data = projection.weight.data * 2


def in_place(model: nn.Module) -> None:
    of_layer(model).self_attn.q_norm.weight.mul_(2)


def in_place_experts(model: nn.Module) -> None:
    of_layer(model).mlp.experts.down_proj.mul_(2)


def instance_forward(model: nn.Module) -> None:
    of_layer(model).self_attn.o_proj.forward = lambda x: x * 0.5


def replaced(model: nn.Module) -> None:
    attention = of_layer(model).self_attn
    attention.o_proj = Adapter(attention.o_proj)


def other_class(model: nn.Module) -> None:
    norm = of_layer(model).self_attn.q_norm
    stock = type(norm)
    norm.__class__ = type("Doubled", (stock,), {"forward": lambda self, x: stock.forward(self, x) * 2})


CHANGES = {
    "a class": other_class,
    "a weight": new_weight,
    "the memory of a weight": new_data,
    "a weight in place": in_place,
    "experts in place": in_place_experts,
    "a hook": lambda model: of_layer(model).self_attn.o_proj.register_forward_hook(doubled),
    "a hook of a router": lambda model: of_layer(model).mlp.gate.register_forward_hook(lambda *_: None),
    "a hook of the layer": lambda model: of_layer(model).register_forward_hook(doubled),
    "a forward": instance_forward,
    "a submodule": replaced,
    "unpatched": lambda model: torch_moe_metal.unpatch(model),
    "other experts": lambda model: model.set_experts_implementation("eager"),
    "other attention": lambda model: model.set_attn_implementation("eager"),
    "a number": lambda model: setattr(of_layer(model).mlp.gate, "top_k", 1),
    "a number less": lambda model: delattr(of_layer(model).mlp.gate, "num_experts"),
    "training": lambda model: of_layer(model).train(),
    "the dtype": lambda model: of_layer(model).to(torch.float32),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changes_of_the_model(what: str):
    """The next token is that of a model that has had no tape."""
    results = []
    for warm in (True, False):
        model = fused()
        conversation = Conversation(model)
        tape.ENABLED, before = warm, tape.ENABLED
        try:
            for _ in range(4):
                conversation.step()
            CHANGES[what](model)
            results.append(torch.stack([conversation.step() for _ in range(4)]))
        finally:
            tape.ENABLED = before
    assert torch.equal(*results)


#: A part of the guard's state, and a change that only it notices.
PARTS = {0: "a submodule", 1: "a class", 2: "a forward", 3: "other experts"}


@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_the_guard_is_needed(part: int, monkeypatch):
    read = tape.Guard.read
    monkeypatch.setattr(tape.Guard, "read", lambda self: read(self)[:part] + read(self)[part + 1 :])
    with pytest.raises(AssertionError):
        test_changes_of_the_model(PARTS[part])


@pytest.mark.parametrize("what", ["a hook", "gradients"])
def test_the_rest_of_the_guard_is_needed(what: str, monkeypatch, both):
    if what == "a hook":
        holds = tape.Guard.holds
        monkeypatch.setattr(tape.Guard, "holds", lambda self, layer: setattr(self, "empty", []) or holds(self, layer))
        with pytest.raises(AssertionError):
            test_changes_of_the_model(what)
    else:
        monkeypatch.setattr(tape, "modes", lambda: tape.PLAIN[0])
        with pytest.raises(AssertionError):
            test_modes(what, both)


def test_a_hook_of_a_layer_is_honoured_without_losing_the_tape():
    model = fused()
    conversation = Conversation(model)
    for _ in range(4):
        conversation.step()
    calls = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    assert replays(lambda: [conversation.step() for _ in range(3)]) == 6 and len(calls) == 3


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


MODES = {
    "gradients": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "tangents": forward_ad.dual_level,
    "a dispatch mode": Passing,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("what", MODES)
def test_modes(what: str, both):
    """A token in another mode runs without the tape; the later ones with it."""
    conversation = both(fused())
    conversation.steps(4)
    with MODES[what]():
        assert conversation.steps(1) == 0
    conversation.steps(2)
    assert conversation.steps(2) == 4


def test_a_default_device_is_no_obstacle():
    conversation = Conversation(fused())
    with torch.device("cpu"):
        assert replays(lambda: [conversation.step() for _ in range(5)]) == 6


# ------------------------------------------------------------------------------------------------ memory and errors


def replayed_conversation(model: nn.Module) -> Conversation:
    conversation = Conversation(model)

    def steps() -> None:
        for _ in range(4):
            conversation.step()

    assert replays(steps)
    return conversation


def test_the_model_is_not_kept_alive():
    model = fused()
    cache = replayed_conversation(model).cache
    layer, weight = (weakref.ref(each) for each in (model.model.layers[0], model.model.layers[0].mlp.experts.down_proj))
    del model
    gc.collect()
    assert layer() is None and weight() is None
    assert cache.get_seq_length() == 10


def test_the_cache_is_not_kept_alive():
    model = fused()
    conversation = replayed_conversation(model)
    gc.collect()
    gc.disable()  # its memory is freed at once
    try:
        layer = conversation.cache.layers[0]
        stored, tapes = weakref.ref(layer), weakref.ref(layer.tape)
        del conversation, layer
        assert stored() is None and tapes() is None
    finally:
        gc.enable()
    assert not list(tape.TAPES[model.model.layers[0]])


def test_weights_that_were_moved_are_not_kept_alive():
    model = fused()
    conversation = replayed_conversation(model)
    model.to(torch.float16)
    assert conversation.cache.layers[0].tape.replay is None


def test_copies_have_no_tape():
    model = fused()
    replayed_conversation(model)
    twin = copy.deepcopy(model)
    twin.model.layers[0].input_layernorm.weight.mul_(3)
    other = Conversation(twin)
    first = [other.step() for _ in range(5)]
    tape.ENABLED, before = False, tape.ENABLED
    try:
        other = Conversation(twin)
        assert all(torch.equal(each, other.step()) for each in first)
    finally:
        tape.ENABLED = before


def test_an_error_while_a_layer_is_recorded(monkeypatch):
    """It passes through. The thread can record other layers afterwards."""
    model = fused()
    conversation = Conversation(model)
    conversation.step()
    monkeypatch.setattr(type(model.model.layers[0].mlp), "moe", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        conversation.step()
    monkeypatch.undo()
    assert replays(lambda: [Conversation(model).step() for _ in range(2)]) == 0
    other = Conversation(fused())
    assert replays(lambda: [other.step() for _ in range(5)]) == 6


def test_an_error_in_a_replay(monkeypatch):
    """It passes through, and the cache is as long as before."""
    model = fused()
    conversation = Conversation(model)
    for _ in range(4):
        conversation.step()
    mask = torch.zeros(1, 1, 1, 3, dtype=torch.bool)  # of a wrong length
    before = conversation.cache.get_seq_length()
    with pytest.raises(RuntimeError, match="mask"):
        conversation.step(attention_mask=mask)
    assert conversation.cache.layers[1].get_seq_length() == before
    conversation.cache.crop(before - conversation.cache.get_seq_length())
    conversation.step()


def test_two_threads():
    """Each with its own cache: the same results as one after the other."""
    model = fused()
    expected, found = [], {}

    def run(seed: int) -> list[Tensor]:
        conversation = Conversation(model, prompt=4 + seed)
        with torch.no_grad():
            return [conversation.step() for _ in range(30)]

    expected = [run(seed) for seed in range(2)]
    threads = [threading.Thread(target=lambda seed=seed: found.update({seed: run(seed)})) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(2):
        assert all(torch.equal(a, b) for a, b in zip(found[seed], expected[seed], strict=True))


def test_other_numbers_of_threads(both):
    conversation, before = both(fused()), torch.get_num_threads()
    try:
        for threads in itertools.islice(itertools.cycle((1, 2)), 8):
            torch.set_num_threads(threads)
            conversation.step()
    finally:
        torch.set_num_threads(before)
    assert conversation.replayed == 12


def test_caches_that_do_not_grow_are_not_replayed():
    model = fused()
    cache = StaticCache(model.config, max_cache_len=64)
    assert replays(lambda: model.generate(tokens(1, 5), **with_cache(cache), max_new_tokens=6)) == 0
    assert type(cache) is not DynamicCache
