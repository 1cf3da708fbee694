"""The cache that grows in place: what transformers' own layers give after any operations, `generate` in all its modes,
and how much is copied and kept."""

import contextlib
import copy
import pickle
import random

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, Fp8QuantizedLayer
from transformers.integrations.executorch import export_with_dynamic_cache

import torch_moe_metal
from checks import relative
from tiny_models import tiny_model, tokens
from torch_moe_metal.transformers.fusing.cache import GROWING, grow_in_place
from torch_moe_metal.transformers.versions import cache_of, with_cache

LIMIT = 256  # tokens, in addition to a quarter of those stored
KEY, VALUE = 3, 5  # widths

# Windows are short, so that they move in these tests. DeepSeek V3's keys and values differ in width.
FAMILIES = {
    "qwen3_moe": {},
    "gpt_oss": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"sliding_window": 5},
    "deepseek_v3": {"first_k_dense_replace": 1, "num_hidden_layers": 3},
    "gemma4_text": {"tie_word_embeddings": False},  # tied, these random weights repeat the last token
}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def model_of(family: str, device: str = "cpu", **changes) -> torch.nn.Module:
    """A length that a hundred tokens may reach."""
    return tiny_model(family, device, **FAMILIES[family] | {"max_position_embeddings": 512} | changes)


def patched(model: torch.nn.Module) -> torch.nn.Module:
    torch_moe_metal.patch(model)
    return model


def layer_pair(window: int | None) -> tuple[DynamicLayer, DynamicLayer]:
    """A layer of transformers and one of ours."""
    stock, ours = (DynamicSlidingWindowLayer(window) if window else DynamicLayer() for _ in range(2))
    ours.__class__ = GROWING[type(ours)]
    return stock, ours


def states(batch: int, rows: int, device: str = "cpu", dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(batch, 2, rows, width).to(device, dtype) for width in (KEY, VALUE))


def rows_stored(layer: DynamicLayer) -> int:
    return layer.keys.shape[-2] if layer.keys is not None and layer.keys.dim() > 1 else 0


def rows_of_memory(layer: DynamicLayer) -> list[float]:
    """Keys and values with this layer's batch and heads. Latents share memory with the keys that rotate."""
    parts = [part for part in (layer.keys, layer.values) if len(part)]
    memory = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    rows = [part[..., 0, :].nbytes for part in parts]
    rows = [sum(rows)] if len(memory) < len(parts) else rows
    return [nbytes / row for nbytes, row in zip(memory.values(), rows, strict=True)] or [0]


def assert_bounded(layer: DynamicLayer) -> None:
    stored = rows_stored(layer)
    assert max(rows_of_memory(layer)) <= 1.25 * stored + LIMIT, (stored, rows_of_memory(layer))


# ------------------------------------------------------------------------------------------------ one layer


def outcome(function, *args):
    try:
        return function(*args), None
    except (RuntimeError, IndexError, AttributeError) as error:
        return None, (type(error), str(error))


class Pair:
    """Random operations on a layer of transformers and one of ours. After each, all visible state must be equal."""

    def __init__(self, seed: int, device: str):
        self.random, self.device = random.Random(seed), device
        torch.manual_seed(seed)
        self.window = self.random.choice([None, None, 1, 2, 5, 40, 300])
        self.stock, self.ours = layer_pair(self.window)
        self.batch = 2
        self.taken = []  # tensors taken from our cache, and their values

    def both(self, name: str, *args) -> None:
        (expected, error), (actual, ours) = (outcome(getattr(layer, name), *args) for layer in (self.stock, self.ours))
        assert ours == error, (name, args)
        if name == "update" and error is None:
            for a, e in zip(actual, expected, strict=True):
                assert torch.equal(a, e), name
        else:
            assert actual == expected

    def update(self):
        rows = self.random.choice([1, 1, 1, 2, 7, 60, 300])
        mode = self.random.choice([contextlib.nullcontext] * 4 + [torch.inference_mode, torch.enable_grad])
        with mode():
            self.both("update", *states(self.batch, rows, self.device))
        if mode is not torch.enable_grad and type(self.ours) in GROWING.values():
            assert_bounded(self.ours)

    def take(self):
        for tensor in (self.ours.keys, self.ours.values):
            if tensor is not None:
                self.taken.append((tensor, tensor.clone()))

    def crop(self):
        self.taken.clear()
        self.both("crop", -self.random.choice([0, 0, 1, 2, 5, 50]))

    def record(self):
        if self.window:
            self.stock.record_past = self.ours.record_past = not self.stock.record_past

    def reorder(self):
        """To the same number of sequences, or to another one. transformers leaves a layer without tokens unchanged."""
        self.both("reorder_cache", torch.randint(self.batch, (self.random.choice([self.batch, self.batch, 1, 3]),)))
        if self.stock.is_initialized:
            self.batch = self.stock.keys.shape[0]

    def repeat(self):
        if self.batch <= 4 and rows_stored(self.stock):
            self.both("batch_repeat_interleave", 2)
            self.batch *= 2

    def select(self):
        if self.batch > 1 and rows_stored(self.stock):
            self.both("batch_select_indices", torch.arange(0, self.batch, 2, device=self.device))
            self.batch = (self.batch + 1) // 2

    def reset(self):
        self.both("reset")

    def offload(self):
        self.both("offload")
        self.both("prefetch")

    def copy(self):
        """Further operations on the copy must not affect the original layer."""
        self.take()
        how = self.random.choice([copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
        copied = how(self.ours)
        assert type(copied) is self.ours.original
        copied.__class__ = type(self.ours)
        self.ours = copied

    def put(self):
        """A tensor that was taken out and is put back has the values that it shows."""
        if rows_stored(self.stock) > 2 and not self.window:
            for layer in (self.stock, self.ours):
                layer.keys, layer.values = layer.keys[:, :, :2], layer.values[:, :, :2]

    def check(self):
        for name in ("keys", "values"):
            expected, actual = getattr(self.stock, name), getattr(self.ours, name)
            assert (actual is None) == (expected is None)
            assert actual is None or torch.equal(actual, expected), name
        assert vars(self.ours).keys() | {"keys", "values"} <= {*vars(self.stock), "room"}
        for name, value in vars(self.stock).items():
            assert torch.is_tensor(value) or getattr(self.ours, name) == value, name
        self.both("get_seq_length")
        self.both("get_mask_sizes", 3)
        for tensor, shown in self.taken:
            assert torch.equal(tensor, shown)

    def run(self, steps: int):
        ways = [self.update] * 8 + [self.take, self.crop, self.crop, self.record, self.reorder, self.repeat]
        ways += [self.select, self.reset, self.offload, self.copy, self.put]
        for _ in range(steps):
            self.random.choice(ways)()
            self.check()


def test_random_operations_match_transformers_layers(device):
    for seed in range(400 if device == "cpu" else 20):
        try:
            Pair(seed, device).run(25)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize("window", [None, 4, 1000])
def test_memory_is_bounded(window):
    """At every length, token by token, after prompts and after a crop."""
    for prompt in (1, 100, 5000):
        _, layer = layer_pair(window)
        layer.update(*states(1, prompt))
        for _ in range(700):
            assert_bounded(layer)
            layer.update(*states(1, 1))
    layer.reset()
    layer.record_past = True
    layer.update(*states(1, 5000))
    layer.crop(-4990)
    layer.update(*states(1, 1))
    assert_bounded(layer)


@pytest.mark.parametrize("window", [None, 100])
def test_memory_of_a_batch_that_was_reordered_or_changed(window):
    """Rows that a layer no longer shows are freed."""
    for change in ("reorder_cache", "batch_select_indices"):
        _, layer = layer_pair(window)
        layer.update(*states(4, 90))
        before = layer.keys.untyped_storage().data_ptr()
        getattr(layer, change)(torch.tensor([1, 1, 0]))
        assert_bounded(layer)
        assert layer.keys.untyped_storage().data_ptr() != before
        layer.update(*states(3, 1))
        assert_bounded(layer)


@pytest.mark.parametrize("window", [None, 50])
def test_unsupported_appends_match_transformers(window, device):
    """Another device, batch, width or number of dimensions raises; another dtype is promoted."""
    wrong = [states(3, 1, device), [t[..., :2] for t in states(2, 1, device)], [t[0] for t in states(2, 1, device)]]
    for new in (*wrong, states(2, 1, "meta")):
        stock, ours = layer_pair(window)
        first = states(2, 9, device)
        results = []
        for layer in (stock, ours):
            layer.update(*first)
            results.append(outcome(layer.update, *new)[1])
        assert results[0] == results[1] is not None
        assert torch.equal(ours.keys, first[0])
    stock, ours = layer_pair(window)
    for new in (states(2, 9, device, torch.bfloat16), states(2, 2, device), states(2, 1, device)):
        for a, e in zip(ours.update(*new), stock.update(*new), strict=True):
            assert a.dtype == e.dtype and torch.equal(a, e)


def test_rows_after_a_crop_are_overwritten():
    """As documented in cache.py: the one case in which a tensor that was taken out changes."""
    _, layer = layer_pair(None)
    layer.update(*states(1, 9))
    taken, before = layer.keys, layer.keys.clone()
    layer.crop(-2)
    layer.update(*states(1, 2))
    assert torch.equal(taken[:, :, :7], before[:, :, :7]) and not torch.equal(taken, before)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
@pytest.mark.parametrize("window", [None, 100])
def test_copies(how, window):
    """transformers' own layers with only the stored rows, independent of the layers they were copied from."""
    _, layer = layer_pair(window)
    layer.update(*states(2, 20))
    copied, before = how(layer), layer.keys.clone()
    assert type(copied) is layer.original and "room" not in vars(copied)
    assert rows_of_memory(copied) == [20, 20]
    layer.crop(-5)
    layer.update(*states(2, 5))
    assert torch.equal(copied.keys, before) and not torch.equal(layer.keys, before)
    assert len(pickle.dumps(layer)) < 2 * sum(t.nbytes for t in (before, copied.values))


# ------------------------------------------------------------------------------------------------ how much is copied


class Copied(TorchDispatchMode):
    """The bytes that `cat` and `copy_` write."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.cat.default, torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
            self.bytes += result.nbytes
        return result


def copied_per_token(layer: DynamicLayer, prompt: int, tokens: int) -> float:
    """In rows."""
    layer.update(*states(1, prompt))
    with Copied() as copied:
        for _ in range(tokens):
            layer.update(*states(1, 1))
    return copied.bytes / tokens / sum(t[..., 0, :].nbytes for t in (layer.keys, layer.values))


@pytest.mark.parametrize("window", [None, 1000])
def test_few_bytes_are_copied(window):
    """A token's own row, and sometimes all stored rows: growing by a quarter copies each row about five times."""
    stock, ours = layer_pair(window)
    assert copied_per_token(stock, 2000, 3000) > 900
    assert copied_per_token(ours, 2000, 3000) < 6


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patched_model_copies_no_keys(family):
    """Between growths the memory of each layer does not move."""
    model = patched(model_of(family))
    cache = cache_of(model(tokens(2, 40)))
    assert {type(layer) for layer in cache.layers} <= set(GROWING.values())
    model(tokens(2, 1), **with_cache(cache))  # DeepSeek's dense layers come before the first fused one

    def memory():
        return [t.untyped_storage().data_ptr() for layer in cache.layers for t in (layer.keys, layer.values)]

    before = memory()
    for _ in range(100):
        model(tokens(2, 1), **with_cache(cache))
    assert memory() == before
    for layer in cache.layers:
        assert_bounded(layer)


# ------------------------------------------------------------------------------------------------ whole models

PADDED = [[0, 0, 0, 5, 6, 7, 8], [9, 8, 7, 6, 5, 4, 3]]
REPEATING = [[5, 6, 7, 8] * 6]  # prompt lookup finds candidates in it


def generated(model, ids, **options):
    torch.manual_seed(3)
    mask = (ids != 0).long()
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True} | options
    return model.generate(ids, attention_mask=mask, **options)


WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 2.0, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_generate(family):
    """A padded batch, in all modes that support batches: the same tokens."""
    model, ids = model_of(family), torch.tensor(PADDED)
    expected = {name: generated(model, ids, **way).sequences for name, way in WAYS.items()}
    patched(model)
    for name, way in WAYS.items():
        output = generated(model, ids, **way)
        assert torch.equal(output.sequences, expected[name]), name
        grows = isinstance(cache_of(output), DynamicCache)
        assert grows == (name not in ("static", "no cache")), name
        if grows:
            assert all(type(layer) in GROWING.values() for layer in cache_of(output).layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_assisted_decoding(family):
    """Rejected candidates are cropped. The assistant has other weights, so that it is sometimes wrong."""
    model, ids = model_of(family), torch.tensor(REPEATING)
    assistant = copy.deepcopy(model)
    for parameter in assistant.parameters():
        parameter *= 1 + 0.3 * torch.randn_like(parameter)
    ways = [{"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}]
    expected = [generated(model, ids, **way).sequences for way in ways]
    patched(model)
    for both in (False, True):  # also with a patched assistant
        if both:
            patched(assistant)
        for way, sequence in zip(ways, expected, strict=True):
            with counted_crops() as cropped:
                output = generated(model, ids, **way)
            assert torch.equal(output.sequences, sequence), way
            assert cropped and (max(cropped) > 0 or "assistant_model" not in way)
            assert all(type(layer) in GROWING.values() for layer in cache_of(output).layers)


@contextlib.contextmanager
def counted_crops():
    """The numbers of tokens that our layers had to remove."""
    calls, crops = [], {cls: cls.crop for cls in GROWING.values()}

    def crop(self, tokens_to_remove):
        calls.append(-tokens_to_remove)
        return crops[type(self)](self, tokens_to_remove)

    for cls in crops:
        cls.crop = crop
    try:
        yield calls
    finally:
        for cls, stock in crops.items():
            cls.crop = stock


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("with_config", [True, False])
def test_a_cache_that_the_user_passes_back(family, with_config):
    """Turn by turn, and two continuations of one prompt by deepcopy."""
    model = model_of(family)

    def talk():
        cache = DynamicCache(config=model.config) if with_config else DynamicCache()
        first = generated(model, tokens(1, 9), **with_cache(cache)).sequences
        saved = copy.deepcopy(cache)
        second = generated(model, torch.cat([first, tokens(1, 5, seed=4)], 1), **with_cache(cache)).sequences
        other = generated(model, torch.cat([first, tokens(1, 5, seed=5)], 1), **with_cache(saved)).sequences
        return second.tolist(), other.tolist(), cache

    expected = talk()
    patched(model)
    actual = talk()
    assert actual[:2] == expected[:2]
    assert all(type(layer) in GROWING.values() for layer in actual[2].layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family):
    """Token by token and in chunks, longer than the window."""
    check_logits(family, "cpu")


def test_logits_on_mps(mps):
    check_logits("gpt_oss", mps)


def check_logits(family: str, device: str) -> None:
    model, ids = model_of(family, device), tokens(2, 24, device=device)
    expected = model(ids, use_cache=False).logits
    patched(model)
    cache, actual = DynamicCache(config=model.config), []
    for chunk in ids.split([9, 1, 1, 8, 1, 1, 1, 2], dim=1):
        actual.append(model(chunk, **with_cache(cache)).logits)
    assert relative(torch.cat(actual, 1), expected) <= 1e-5
    assert all(type(layer) in GROWING.values() for layer in cache.layers)


def test_unpatched_models_keep_transformers_cache():
    """Models that were never patched, and unpatched ones."""
    other, model = tiny_model("qwen3_moe"), patched(tiny_model("qwen3_moe"))
    cache = cache_of(model(tokens(1, 9)))
    assert {type(layer) for layer in cache_of(other(tokens(1, 9))).layers} == {DynamicLayer}
    next_logits = model(tokens(1, 1), **with_cache(copy.deepcopy(cache))).logits
    torch_moe_metal.unpatch(model)
    assert {type(layer) for layer in cache_of(model(tokens(1, 9))).layers} == {DynamicLayer}
    assert relative(model(tokens(1, 1), **with_cache(cache)).logits, next_logits) <= 1e-5


def test_other_caches_are_not_changed():
    class OwnLayer(DynamicLayer):
        pass

    class OwnCache(DynamicCache):
        pass

    model = patched(tiny_model("qwen3_moe"))
    config, layers = model.config, [OwnLayer(), OwnLayer()]
    own = DynamicCache(config=config)
    own.layers = layers
    for cache in (own, OwnCache(config=config), StaticCache(config=config, max_cache_len=32)):
        classes = [type(layer) for layer in cache.layers]
        model(tokens(1, 9), **with_cache(cache))
        assert [type(layer) for layer in cache.layers] == classes and cache.get_seq_length() == 9


def test_quantised_and_offloaded_caches_are_not_changed():
    """The offloaded cache needs CUDA's streams to run, so here it is only created."""
    model, ids = model_of("qwen3_moe"), torch.tensor(REPEATING)
    way = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    expected = generated(model, ids, **way).sequences
    output = generated(patched(model), ids, **way)
    assert torch.equal(output.sequences, expected)
    assert {type(layer) for layer in cache_of(output).layers} == {Fp8QuantizedLayer}
    offloaded = DynamicCache(config=model.config)
    offloaded.offloading = True
    both = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    for cache in (offloaded, both):
        grow_in_place(cache, model.model.layers[0].self_attn)
    for cache in (offloaded, both.self_attention_cache, both.cross_attention_cache):
        assert {type(layer) for layer in cache.layers} == {DynamicLayer}


# ------------------------------------------------------------------------------------------------ traced and trained


def test_compiled_models_concatenate():
    """torch.compile takes a grown and an empty cache, and eager code continues with its cache."""
    model, ids = patched(model_of("gpt_oss")), tokens(1, 14)
    expected = model(ids, use_cache=False).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache, actual = DynamicCache(config=model.config), []
    runs = [(model, 8), (model, 1), (compiled, 2), (model, 1), (model, 1), (model, 1)]
    for (run, _), chunk in zip(runs, ids.split([n for _, n in runs], dim=1), strict=True):
        before = cache.layers[1].keys
        shown = before.clone() if before is not None else None
        actual.append(run(chunk, **with_cache(cache)).logits)
        assert before is None or torch.equal(before, shown)
        assert_bounded(cache.layers[0])
    assert relative(torch.cat(actual, 1), expected) <= 1e-5
    empty = DynamicCache(config=model.config)
    assert relative(compiled(ids[:, :9], **with_cache(empty)).logits, expected[:, :9]) <= 1e-5
    assert {type(layer) for layer in empty.layers} == {DynamicLayer, DynamicSlidingWindowLayer}


def test_exported_models_concatenate():
    """With a cache as argument, as transformers exports for ExecuTorch."""
    model, ids = patched(model_of("qwen3_moe")), tokens(1, 9)
    program = export_with_dynamic_cache(model, ids, torch.ones_like(ids))
    cache = DynamicCache(config=model.config)
    output = program.module()(input_ids=ids, attention_mask=torch.ones_like(ids), **with_cache(cache), use_cache=True)
    assert relative(output.logits, model(ids).logits) <= 1e-6
    assert [layer.keys.shape[-2] for layer in cache_of(output).layers] == [9, 9]
    grown = cache_of(model(ids))
    leaves, _ = torch.utils._pytree.tree_flatten(copy.deepcopy(grown))  # as in README.md: a deepcopy may be passed
    assert type(grown.layers[0]) in GROWING.values()
    assert torch.equal(leaves[0], grown.layers[0].keys) and len(leaves) == 4


@pytest.mark.parametrize("window", [None, 50])
def test_no_in_place_writes_with_tangents_or_while_tracing(window):
    """Under forward_ad and torch.jit.trace the layer equals transformers' layer, and its memory is not written."""
    for stock, ours in (layer_pair(window), layer_pair(window)):
        first, new, tangents = states(1, 9), states(1, 2), states(1, 2)
        for layer in (stock, ours):
            layer.update(*first)
        memory = ours.room.memory()[0].clone()
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(*pair) for pair in zip(new, tangents, strict=True)]
            for a, e in zip(ours.update(*duals), stock.update(*duals), strict=True):
                assert torch.equal(forward_ad.unpack_dual(a).tangent, forward_ad.unpack_dual(e).tangent)
        assert ours.room is None or torch.equal(ours.room.memory()[0].nan_to_num(), memory.nan_to_num())
    _, ours = layer_pair(window)
    ours.update(*first)
    traced = torch.jit.trace(lambda keys, values: ours.update(keys, values), new, check_trace=False)
    one = traced(*states(1, 2))
    before = one[0].clone()
    traced(*states(1, 2))
    assert torch.equal(one[0], before)


def test_gradients_flow_through_a_cache_that_has_grown():
    """Steps without gradients grow in-place; backward of steps with gradients sees the original values."""
    prompt, ids = tokens(1, 9), tokens(1, 12, seed=2)
    gradients = []
    for prepare in (lambda model: model, patched):
        model = prepare(model_of("qwen3_moe")).requires_grad_(True)
        cache = DynamicCache(config=model.config)
        model(prompt, **with_cache(cache))
        model(ids[:, :2], **with_cache(cache))
        with torch.enable_grad():
            first = model(ids[:, 2:7], **with_cache(cache)).logits
        model(ids[:, 7:8], **with_cache(cache))
        with torch.enable_grad():
            second = model(ids[:, 8:], **with_cache(cache)).logits
            (first.square().sum() + second.square().sum()).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 20
    for stock, ours in zip(*gradients, strict=True):
        assert relative(ours, stock) <= 1e-5 or float(stock.norm()) < 1e-6
