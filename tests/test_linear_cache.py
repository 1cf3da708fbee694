"""The cache of mixers with a recurrent state: what transformers' own layer shows after any operations, tokens that are
taken back, and snapshots."""

import copy
import gc
import pickle
import random
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import LinearAttentionLayer, StaticLayer

import torch_moe_metal
from checks import same_bits
from linear_mixers import MIXERS, WITH_STATE, H, cache_for, call, tiny_mixer
from test_linear_layers import BOUND, assert_same_states, error, fused
from tiny_models import tiny_model, tokens
from torch_moe_metal.transformers import restore, snapshot
from torch_moe_metal.transformers.fusing import projections
from torch_moe_metal.transformers.fusing.linear_cache import FREE_ROWS, MOST_DRAFTED, OURS, GrowingLinearLayer
from torch_moe_metal.transformers.versions import cache_of, with_cache


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def pair(name: str, device: str = "cpu") -> tuple:
    """A mixer of transformers and a fused one, each with a cache."""
    stock, config = tiny_mixer(name, device)
    return (stock, cache_for(config)), (fused(copy.deepcopy(stock)), cache_for(config))


#: After hundreds of tokens in transformers' chunks, which subtract sums of logarithms (2.0e-5 was found).
LOOSE = 5e-5


def kept_by(cache: DynamicCache, layer: torch.nn.Module) -> LinearAttentionLayer:
    return cache.layers[layer.layer_idx]


# ------------------------------------------------------------------------------------------------ one layer


class Both:
    """Random operations on both caches. After each, all that transformers shows must be equal."""

    def __init__(self, name: str, seed: int, device: str):
        self.random, self.device, self.batch = random.Random(seed), device, 2
        torch.manual_seed(seed)
        (self.stock, self.expected), (self.ours, self.actual) = pair(name, device)

    def layers(self) -> list[LinearAttentionLayer]:
        return [cache.layers[self.stock.layer_idx] for cache in (self.expected, self.actual)]

    def run_tokens(self):
        length = self.random.choice([1, 1, 1, 1, 2, 3, 7, 30, 140])
        x = torch.randn(self.batch, length, H).to(self.device)
        expected = call(self.stock, x, self.expected)
        assert error(call(self.ours, x, self.actual), expected) <= LOOSE

    def reorder(self):
        rows = torch.randint(self.batch, (self.random.choice([self.batch, 1, 3]),), device=self.device)
        if self.has_tokens():
            for layer in self.layers():
                layer.reorder_cache(rows)
            self.batch = len(rows)

    def select(self):
        """transformers' own layer cannot do this."""
        if self.is_ours() and self.batch > 1:
            rows = torch.arange(0, self.batch, 2, device=self.device)
            stock, ours = self.layers()
            stock.reorder_cache(rows)
            ours.batch_select_indices(rows)
            self.batch = len(rows)

    def repeat(self):
        if self.is_ours() and self.batch < 4:
            stock, ours = self.layers()
            stock.reorder_cache(torch.arange(self.batch, device=self.device).repeat_interleave(2))
            ours.batch_repeat_interleave(2)
            self.batch *= 2

    def reset(self):
        for layer in self.layers():
            layer.reset()

    def offload(self):
        for layer in self.layers():
            layer.offload()
            layer.prefetch()

    def copy(self):
        """A copy is transformers' own layer, and shares no memory."""
        how = self.random.choice([copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
        before = self.actual
        self.actual = how(before)
        copied = self.layers()[1]
        assert type(copied) is LinearAttentionLayer and not set(OURS) & vars(copied).keys()
        if self.has_tokens():
            before.layers[self.stock.layer_idx].conv_states[0].fill_(7.0)

    def unpatch(self):
        (torch_moe_metal.unpatch if hasattr(self.ours, "original") else torch_moe_metal.patch)(self.ours)

    def assign(self):
        """Other tensors with the same values."""
        if self.has_tokens():
            layer = self.layers()[1]
            layer.conv_states[0] = layer.conv_states[0].clone()

    def is_ours(self) -> bool:
        return self.has_tokens() and type(self.layers()[1]) is GrowingLinearLayer

    def has_tokens(self) -> bool:
        return self.layers()[0].has_previous_state[0]

    def check(self):
        if self.layers()[0].is_conv_states_initialized[0]:
            assert_same_states(self.stock, self.actual, self.expected, LOOSE)

    def run(self, steps: int):
        ways = [self.run_tokens] * 9 + [self.reorder, self.select, self.repeat, self.reset, self.offload]
        ways += [self.copy, self.unpatch, self.assign]
        for _ in range(steps):
            self.random.choice(ways)()
            self.check()


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "kimi_linear", "lfm2_moe"])
def test_random_operations_match_transformers_layer(name, device):
    for seed in range(12 if device == "cpu" else 2):
        try:
            Both(name, seed, device).run(20)
        except Exception as why:
            raise AssertionError(f"seed {seed}") from why


def test_a_token_writes_one_row():
    """Neither inputs nor states move between the growths, and a view that was taken before shows the same."""
    _, (layer, cache) = pair("qwen3_5")
    for length in (9, 1):
        call(layer, torch.randn(2, length, H), cache)
    kept = cache.layers[0]
    memory, state = kept.memory.data_ptr(), kept.recurrent_states[0].data_ptr()
    taken, shown = kept.conv_states[0], kept.conv_states[0].clone()
    for _ in range(FREE_ROWS - 1):
        call(layer, torch.randn(2, 1, H), cache)
        assert torch.equal(taken, shown)
    assert (kept.memory.data_ptr(), kept.recurrent_states[0].data_ptr()) == (memory, state)
    for _ in range(FREE_ROWS):
        call(layer, torch.randn(2, 1, H), cache)
    assert kept.memory.shape[1] <= 2 * FREE_ROWS
    call(layer, torch.randn(2, 5000, H), cache)
    assert (
        kept.memory.shape[1] <= 2 * FREE_ROWS and kept.conv_states[0].untyped_storage().nbytes() == kept.memory.nbytes
    )


def test_memory_is_freed_with_the_cache():
    """Without waiting for the garbage collector."""
    _, (layer, cache) = pair("qwen3_5")
    cache.activate_past_recording()
    call(layer, torch.randn(1, 9, H), cache)
    gc.disable()
    try:
        freed = []
        for tensor in (cache.layers[0].memory, cache.layers[0].log):
            weakref.finalize(tensor, freed.append, "freed")
        del tensor, cache
        assert len(freed) == 2
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------ tokens taken back


@pytest.mark.parametrize("name", MIXERS)
def test_crop(name, device, monkeypatch):
    """After any accepted drafts the bits are those of the accepted tokens, computed one at a time, if those of the
    projections are. On the CPU `linear` computes up to 8 tokens like that; PyTorch's product of more does not, nor do
    the Metal kernels, which divide rows by the number of tokens."""

    def one_at_a_time(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        tokens = [token.clone() for token in x.split(1, 1)]  # in memory of the same alignment
        return torch.cat([torch.ops.moe_metal.linear(token, weight, bias=bias) for token in tokens], 1)

    monkeypatch.setattr(F, "linear", one_at_a_time)
    if device == "mps":
        monkeypatch.setattr(projections, "linear", one_at_a_time)
    layer, config = tiny_mixer(name, device)
    fused(layer)
    if kept_by(cache_for(config), layer).number_of_states > 1:  # n-grams, which are not ours
        return
    for seed in range(200 if device == "cpu" else 4):
        choose, cache, direct = random.Random(seed), cache_for(config), cache_for(config)
        torch.manual_seed(seed)
        prompt = torch.randn(1, choose.choice([1, 3, 9, 150]), H).to(device)
        for each in (cache, direct):
            call(layer, prompt, each)
        kept = kept_by(cache, layer)
        kept.activate_past_recording()
        for _ in range(choose.choice([1, 3])):
            drafts = torch.randn(1, choose.choice([1, 2, 3, 5, 9, 16]), H).to(device)
            accepted = choose.randint(0, drafts.shape[1])
            output = call(layer, drafts, cache)
            kept.crop(accepted - drafts.shape[1])
            for i in range(accepted):
                expected = call(layer, drafts[:, i : i + 1], direct)
                assert error(output[:, i : i + 1], expected) <= BOUND
        ours, wanted = kept, kept_by(direct, layer)
        assert same_bits(ours.conv_states[0], wanted.conv_states[0]), seed
        if name in WITH_STATE:
            assert same_bits(ours.recurrent_states[0], wanted.recurrent_states[0]), seed


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "kimi_linear", "lfm2_moe"])
def test_tokens_of_several_calls_are_taken_back(name, device):
    """As of a drafting model, which computes several tokens before `crop`; up to those of the prompt."""
    layer, config = tiny_mixer(name, device)
    fused(layer)
    x = torch.randn(1, 60, H).to(device)
    for prompt in (4, 20):
        for single in (1, 7, 30):
            for back in sorted({0, 1, single, single + 2}):
                cache, direct = cache_for(config), cache_for(config)
                kept_by(cache, layer).activate_past_recording()
                call(layer, x[:, :prompt], cache)
                for i in range(prompt, prompt + single):
                    call(layer, x[:, i : i + 1], cache)
                kept_by(cache, layer).crop(-back)
                left = prompt + single - back
                parts = [min(left, prompt), *[1] * (left - prompt)]
                for part in x[:, :left].split(parts, 1):
                    call(layer, part, direct)
                assert_same_states(layer, copy.deepcopy(cache), direct)
                a, e = (call(layer, x[:, left : left + 1], each) for each in (cache, direct))
                assert error(a, e) <= BOUND


def test_many_tokens_without_crop():
    """The oldest ones become final, so that memory does not grow."""
    layer, config = tiny_mixer("qwen3_5")
    fused(layer)
    x, cache, direct = torch.randn(1, 400, H), cache_for(config), cache_for(config)
    cache.activate_past_recording()
    for i in range(400):
        call(layer, x[:, i : i + 1], cache)
        assert cache.layers[0].pending <= MOST_DRAFTED and cache.layers[0].log.shape[1] <= 3 * MOST_DRAFTED
    cache.layers[0].crop(-60)
    for i in range(340):
        call(layer, x[:, i : i + 1], direct)
    assert same_bits(cache.layers[0].recurrent_states[0], direct.layers[0].recurrent_states[0])


def test_crop_of_too_many_tokens():
    """It raises, and the layer stays as it was. So does transformers' own forward, which logs nothing."""
    layer, config = tiny_mixer("qwen3_5")
    fused(layer)
    cache = cache_for(config)
    call(layer, torch.randn(1, 9, H), cache)
    kept = cache.layers[0]
    with pytest.raises(RuntimeError, match="does not track past states"):
        kept.crop(-1)
    assert kept.is_croppable
    cache.activate_past_recording()
    call(layer, torch.randn(1, 3, H), cache)
    with pytest.raises(RuntimeError, match="can only be cropped by passing a negative int"):
        kept.crop(1)
    before = copy.deepcopy(kept)
    with pytest.raises(RuntimeError, match=r"expected to remove at most 3 tokens from a layer of linear .*, got 4$"):
        kept.crop(-4)
    assert torch.equal(kept.conv_states[0], before.conv_states[0]) and kept.pending == 3
    assert torch.equal(kept.recurrent_states[0], before.recurrent_states[0])
    with pytest.raises(RuntimeError, match="at most 0 tokens"):  # reading the state has made the tokens final
        kept.crop(-1)
    torch_moe_metal.unpatch(layer)
    call(layer, torch.randn(1, 3, H), cache)
    assert not kept.is_croppable
    with pytest.raises(RuntimeError, match="at most 0 tokens"):
        kept.crop(-1)
    kept.crop(0)
    torch_moe_metal.patch(layer)
    call(layer, torch.randn(1, 3, H), cache)
    kept.crop(-2)
    assert kept.is_croppable


def test_recording_of_transformers_own_forward(monkeypatch):
    """A cache whose first call ran on it is ours anyway, since transformers would crop half of the layer."""
    layer, config = tiny_mixer("qwen3_5")
    fused(layer)
    cache = cache_for(config)
    cache.activate_past_recording()
    layer.conv1d.register_forward_hook(lambda *args: None)
    call(layer, torch.randn(1, 3, H), cache)
    assert type(cache.layers[0]) is GrowingLinearLayer and not cache.layers[0].is_croppable
    with pytest.raises(RuntimeError, match="at most 0 tokens"):
        cache.layers[0].crop(-1)


def test_states_are_up_to_date_while_recording():
    """For a copy, which does not end the recording, and for everything that reads the state."""
    layer, config = tiny_mixer("qwen3_5")
    fused(layer)
    x, cache, direct = torch.randn(2, 12, H), cache_for(config), cache_for(config)
    call(layer, x[:, :9], direct)
    cache.activate_past_recording()
    call(layer, x[:, :5], cache)
    call(layer, x[:, 5:9], cache)
    assert_same_states(layer, copy.deepcopy(cache), direct)
    assert_same_states(layer, pickle.loads(pickle.dumps(cache)), direct)
    cache.layers[0].crop(-4)
    call(layer, x[:, 5:9], cache)
    for each in (cache, direct):
        each.layers[0].reorder_cache(torch.tensor([1, 1]))
    assert_same_states(layer, cache, direct)
    a, e = (call(layer, x[:, 9:], each) for each in (cache, direct))
    assert error(a, e) <= BOUND


# ------------------------------------------------------------------------------------------------ snapshots


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "kimi_linear", "lfm2_moe", "gpt_oss"])
def test_snapshots(family):
    """Of a prompt: several answers continue from it, each as if it were the only one."""
    sizes = {"gpt_oss": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}}
    model, ids = tiny_model(family, **sizes.get(family, {})), tokens(1, 40)
    torch_moe_metal.patch(model)
    cache = cache_of(model(ids[:, :12], use_cache=True))
    fresh = snapshot(DynamicCache(config=model.config))
    taken = snapshot(cache)
    assert 0 < taken.nbytes < 100_000
    for record in (False, True, False):
        expected = model(ids[:, :12], use_cache=False).logits
        restore(cache, taken)
        if record:
            cache.activate_past_recording()
        assert cache.get_seq_length(cache.is_linear.index(False)) == 12
        logits = [model(part, **with_cache(cache)).logits for part in ids[:, 12:].split([1, 1, 5, 21], 1)]
        expected = model(ids, use_cache=False).logits[:, 12:]
        assert error(torch.cat(logits, 1), expected) <= BOUND
    restore(cache, fresh)
    assert error(model(ids, **with_cache(cache)).logits[:, 12:], expected) <= BOUND


def test_a_snapshot_while_recording():
    """It has the state after all tokens, and these can still be taken back."""
    layer, config = tiny_mixer("qwen3_5")
    fused(layer)
    x, cache, direct = torch.randn(1, 12, H), cache_for(config), cache_for(config)
    cache.activate_past_recording()
    call(layer, x[:, :5], cache)
    call(layer, x[:, :5], direct)
    state, layers = direct.layers[0].recurrent_states[0], cache.layers
    cache.layers = layers[:1]
    taken = snapshot(cache)
    assert same_bits(taken.layers[0].copies[1], state)
    cache.layers[0].crop(-2)
    call(layer, x[:, 3:5], cache)
    restore(cache, taken)
    assert same_bits(cache.layers[0].recurrent_states[0], state)


@pytest.mark.skipif(not StaticLayer.is_croppable, reason="transformers crops static caches since 5.24")
def test_snapshots_of_static_caches():
    """Their tensors stay the same, since compiled graphs may know them."""
    model, ids = tiny_model("qwen3_5_moe_text"), tokens(1, 14)
    torch_moe_metal.patch(model)
    expected = model(ids, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=32)
    model(ids[:, :6], **with_cache(cache))
    taken, layer = snapshot(cache), cache.layers[0]
    before = layer.conv_states[0].data_ptr(), layer.recurrent_states[0].data_ptr()
    for _ in range(2):
        assert error(model(ids[:, 6:], **with_cache(cache)).logits, expected[:, 6:]) <= BOUND
        restore(cache, taken)
    assert (layer.conv_states[0].data_ptr(), layer.recurrent_states[0].data_ptr()) == before


def test_what_cannot_be_restored():
    model, ids = tiny_model("qwen3_5_moe_text"), tokens(1, 9)
    torch_moe_metal.patch(model)
    cache = cache_of(model(ids, use_cache=True))
    taken = snapshot(cache)
    shorter, batch = (cache_of(model(some, use_cache=True)) for some in (ids[:, :5], ids.repeat(2, 1)))
    other = cache_of(tiny_model("qwen3_moe")(ids, use_cache=True))
    few = DynamicCache(config=model.config)
    few.layers = few.layers[:1]
    for wrong, message in (
        (shorter, r"restore: layer 1: expected at least 9 tokens, got 5"),
        (batch, r"restore: layer 0: expected states of shapes .*, got "),
        (other, r"restore: layer 0: expected a layer like the one of the snapshot, got one of class DynamicLayer"),
        (few, r"restore: expected a cache of 2 layers, got 1"),
    ):
        before = snapshot(wrong)
        with pytest.raises(ValueError, match=message):
            restore(wrong, taken)
        restore(wrong, before)
    for function, arguments in ((snapshot, ({},)), (restore, ({}, taken))):
        with pytest.raises(TypeError, match=rf"{function.__name__}: expected a cache of transformers, got dict"):
            function(*arguments)
    cache.layers[0].number_of_states = 1
    cache.layers[1] = object()
    with pytest.raises(TypeError, match="snapshot: no support for a layer of class object"):
        snapshot(cache)
