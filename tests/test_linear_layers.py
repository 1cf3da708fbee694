"""Mixers with a recurrent state: fused, they compute what transformers' own forward computes, and leave the same
states."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, DynamicCache, StaticCache
from transformers.cache_utils import LinearAttentionLayer

import torch_moe_metal
from linear_mixers import MIXERS, H, cache_for, call, tiny_mixer
from tiny_models import eager, tiny_model, tokens
from torch_moe_metal import MoeMetalConfig
from torch_moe_metal.commands.bench.whole_model import calls
from torch_moe_metal.transformers.fusing.linear_blocks import FusedMixer
from torch_moe_metal.transformers.fusing.linear_cache import GrowingLinearLayer
from torch_moe_metal.transformers.versions import cache_of, with_cache

BOUND = 2e-5  # of the largest
FAMILIES = ("qwen3_next", "qwen3_5_moe_text", "lara_mini", "kimi_linear", "bailing_hybrid", "granitemoehybrid")
MODELS = [family for family in (*FAMILIES, "lfm2_moe", "nemotron_h") if family in CONFIG_MAPPING]
#: transformers limits the steps of Mamba 2 in prompts only, so that its own tokens depend on how they are computed.
NOT_BY_LENGTH = ("nemotron_h",)


def mostly_slow(*fast: str) -> list:
    """All models; those not named here run with `make test-all`."""
    slow = [pytest.mark.full_grid, pytest.mark.slow]
    return [pytest.param(name, marks=[] if name in fast else slow) for name in MODELS]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative to the largest element. 0 if both are 0."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def fused(layer: nn.Module) -> nn.Module:
    report = torch_moe_metal.patch(layer)
    assert report["fused"] == [""], str(report)
    return layer


def states_of(cache: DynamicCache, layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    kept = cache.layers[layer.layer_idx]
    return kept.conv_states[0], kept.recurrent_states[0]


def assert_same_states(layer: nn.Module, actual: DynamicCache, expected: DynamicCache, bound: float = BOUND) -> None:
    (inputs, state), (wanted_inputs, wanted_state) = states_of(actual, layer), states_of(expected, layer)
    assert inputs.shape == wanted_inputs.shape and inputs.dtype == wanted_inputs.dtype
    assert error(inputs, wanted_inputs) <= bound
    assert (state is None) == (wanted_state is None)
    assert state is None or (state.shape == wanted_state.shape and error(state, wanted_state) <= bound)
    stock, ours = (cache.layers[layer.layer_idx] for cache in (expected, actual))
    for name in ("has_previous_state", "conv_kernel_size", "is_conv_states_initialized", "dtype", "device"):
        assert getattr(ours, name) == getattr(stock, name), name
    assert ours.is_recurrent_states_initialized == stock.is_recurrent_states_initialized


def padding(batch: int, length: int, device: str) -> Tensor:
    mask = torch.ones(batch, length, dtype=torch.long, device=device)
    mask[-1, :3] = 0
    return mask


# ------------------------------------------------------------------------------------------------ every class


@pytest.mark.parametrize("lengths", [(7, 1, 1, 5, 70, 1, 1), (2, 1, 130, 1), (1, 1, 1, 1, 1, 3)], ids=str)
@pytest.mark.parametrize("name", MIXERS)
def test_mixers(name, lengths, device):
    """Prompts, continued prompts and single tokens of a batch, also with left padding, shorter than the convolution."""
    for padded in (False, True):
        stock, config = tiny_mixer(name, device)
        ours = fused(copy.deepcopy(stock))
        caches = cache_for(config), cache_for(config)
        for i, length in enumerate(lengths):
            x = torch.randn(2, length, H).to(device)
            mask = padding(2, length, device) if padded and i == 0 else None
            expected, actual = (call(layer, x, cache, mask) for layer, cache in zip((stock, ours), caches, strict=True))
            assert error(actual, expected) <= BOUND, (i, length)
            assert_same_states(stock, caches[1], caches[0])
        layer = caches[1].layers[stock.layer_idx]
        assert type(layer) is (GrowingLinearLayer if layer.number_of_states == 1 else LinearAttentionLayer)


@pytest.mark.parametrize("name", MIXERS)
def test_without_a_cache(name, device):
    stock, _ = tiny_mixer(name, device)
    ours, x = fused(copy.deepcopy(stock)), torch.randn(2, 9, H).to(device)
    for mask in (None, padding(2, 9, device)):
        assert error(call(ours, x, None, mask), call(stock, x, None, mask)) <= BOUND


@pytest.mark.parametrize("name", MIXERS)
def test_ops_of_a_token(name, device):
    """Two projections around our op. Kimi's decays and gates have low rank: two more."""
    layer, config = tiny_mixer(name, device)
    fused(layer)
    cache = cache_for(config)
    for length in (5, 1):
        call(layer, torch.randn(1, length, H).to(device), cache)
    token = torch.randn(1, 1, H).to(device)
    with calls() as found:
        call(layer, token, cache)
    ours = "short_conv_" if name == "lfm2_moe" else "linear_attention_"
    several = cache.layers[layer.layer_idx].number_of_states > 1  # its inputs are not in our memory
    assert found.total() == MIXERS[name].ops + several, found
    assert found[f"moe_metal.{ours}.default"] == 1, found


@pytest.mark.parametrize("name", MIXERS)
def test_in_turn_with_transformers_forward(name, device):
    """Each continues from what the other one left, as after `unpatch` in the middle of a conversation."""
    stock, config = tiny_mixer(name, device)
    other, x = copy.deepcopy(stock), torch.randn(2, 26, H).to(device)
    expected, cache, outputs = cache_for(config), cache_for(config), []
    wanted = []
    for i, part in enumerate(x.split([7, 1, 1, 4, 1, 1, 1, 1, 6, 1, 2], 1)):
        wanted.append(call(stock, part, expected))
        (torch_moe_metal.unpatch if i in (1, 3, 4, 7, 10) else torch_moe_metal.patch)(other)
        assert isinstance(other, FusedMixer) == (i not in (1, 3, 4, 7, 10))
        outputs.append(call(other, part, cache))
        assert_same_states(stock, cache, expected)
    assert error(torch.cat(outputs, 1), torch.cat(wanted, 1)) <= BOUND
    assert vars(other).keys() == vars(stock).keys()


# ------------------------------------------------------------------------------------------------ stock forwards


class Doubled(nn.Conv1d):
    pass


def stock_calls(layer: nn.Module, monkeypatch) -> list[None]:
    found, forward = [], layer.original.forward

    def counted(self, *args, **kwargs):
        found.append(None)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(layer.original, "forward", counted)
    return found


def hooked(name: str):
    def change(layer: nn.Module, cache: DynamicCache):
        module = layer.get_submodule(name)
        module.register_forward_hook(lambda module, args, output: output)

    return change


def of_another_class(layer: nn.Module, cache: DynamicCache):
    layer.conv1d.__class__ = Doubled


def of_another_dtype(layer: nn.Module, cache: DynamicCache):
    states = cache.layers[layer.layer_idx].recurrent_states
    states[0] = states[0].double()


def with_gradient(layer: nn.Module, cache: DynamicCache):
    layer.A_log.requires_grad_(True)


CHANGES = {
    "hook on conv1d": hooked("conv1d"),
    "hook on the norm": hooked("norm"),
    "hook on a projection": hooked("in_proj_z"),
    "another class": of_another_class,
    "another dtype of the state": of_another_dtype,
    "parameters of another dtype": lambda layer, cache: layer.norm.to(torch.float64),
    "an unknown activation": lambda layer, cache: setattr(layer, "activation", "gelu"),
    "a gradient": with_gradient,
}


@pytest.mark.parametrize("change", CHANGES)
def test_stock_forward(change, monkeypatch):
    """What our op does not know runs on transformers' own forward, from the states that ours left."""
    stock, config = tiny_mixer("qwen3_5")
    ours, caches = fused(copy.deepcopy(stock)), (cache_for(config), cache_for(config))
    counted, x = stock_calls(ours, monkeypatch), torch.randn(2, 9, H)
    for part in x[:, :6].split([5, 1], 1):
        call(stock, part, caches[0])
        call(ours, part, caches[1])
    counted.clear()
    for layer, cache in zip((stock, ours), caches, strict=True):
        CHANGES[change](layer, cache)
    with torch.set_grad_enabled(change == "a gradient"):
        for part in x[:, 6:].split([2, 1], 1):
            expected, actual = (call(layer, part, cache) for layer, cache in zip((stock, ours), caches, strict=True))
            assert error(actual, expected) <= BOUND
    assert len(counted) == 4


@pytest.mark.parametrize("how", ["cu_seq_lens_q", "autocast", "positional"])
def test_stock_forward_of_a_call(how, monkeypatch):
    layer, config = tiny_mixer("qwen3_5")
    x, results = torch.randn(1, 6, H), []
    more = {"cu_seq_lens_q": torch.tensor([0, 6])} if how == "cu_seq_lens_q" else {}
    for prepare in (lambda layer: layer, fused):
        prepare(layer)
        cache = cache_for(config)
        call(layer, x, cache)
        counted = stock_calls(layer, monkeypatch) if isinstance(layer, FusedMixer) else []
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            try:
                results.append(layer(x, cache) if how == "positional" else call(layer, x, cache, **more))
            except ValueError as why:  # transformers needs a package for packed sequences
                results.append(str(why))
    expected, actual = results
    assert len(counted) == 1
    assert actual == expected if isinstance(expected, str) else error(actual.float(), expected.float()) <= BOUND


def test_training():
    """Gradients of a fused mixer are those of transformers. A call without one continues from states with one."""
    gradients = []
    for prepare in (lambda layer: layer, fused):
        layer, config = tiny_mixer("qwen3_5")
        prepare(layer).requires_grad_(True).train()
        torch.manual_seed(1)
        x, cache = torch.randn(2, 9, H), cache_for(config)
        call(layer, x[:, :5], cache)
        call(layer, x[:, 5:6], cache)
        with torch.enable_grad():
            call(layer, x[:, 6:], None).square().sum().backward()
            call(layer, x[:, 6:7], cache)
        last = call(layer, x[:, 7:8], cache)
        gradients.append({name: parameter.grad for name, parameter in layer.named_parameters()} | {"": last})
    for name, expected in gradients[0].items():
        assert error(gradients[1][name], expected) <= 1e-4, name


def test_inference_mode():
    """States that were made in inference mode are continued outside of it, and the reverse."""
    layer, config = tiny_mixer("qwen3_5")
    x = torch.randn(1, 80, H)
    expected = call(layer, x, None)
    fused(layer)
    for first in (0, 1):
        cache, outputs = cache_for(config), []
        for i, part in enumerate(x.split([5, 1, 1, 1, 70, 1, 1], 1)):
            with torch.inference_mode(i % 2 == first):
                outputs.append(call(layer, part, cache).clone())
        assert error(torch.cat(outputs, 1), expected) <= BOUND


# ------------------------------------------------------------------------------------------------ whole models


@pytest.mark.parametrize("family", MODELS)
def test_models(family, device):
    """A prompt, a continued prompt and single tokens of a batch with left padding, against eager with its own cache."""
    model, ids = eager(tiny_model(family, device)), tokens(2, 14, device=device)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0

    def logits() -> list[Tensor]:
        cache, found, end = DynamicCache(config=model.config), [model(ids, use_cache=False).logits], 0
        for length in (8, 3, 1, 1, 1):
            end += length
            part, so_far = ids[:, end - length : end], mask[:, :end]
            found.append(model(part, attention_mask=so_far, use_cache=True, **with_cache(cache)).logits)
        caches.append(cache)
        return found

    caches = []
    expected = logits()
    report = torch_moe_metal.patch(model)
    actual = logits()
    assert GrowingLinearLayer in {type(layer) for layer in caches[1].layers}, str(report)
    for a, e in zip(actual, expected, strict=True):
        assert error(a[0], e[0]) <= BOUND and error(a[1, -1:], e[1, -1:]) <= BOUND


def generated(model, ids, **options) -> list[list[int]]:
    mask = (ids != 0).long()
    options = {"max_new_tokens": 8, "do_sample": False} | options
    return model.generate(ids, attention_mask=mask, **options).tolist()


WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "sampling": {"do_sample": True, "temperature": 2.0, "num_return_sequences": 2},
    "no cache": {"use_cache": False},
    "chunks of the prompt": {"prefill_chunk_size": 3},
}


@pytest.mark.parametrize("family", mostly_slow("qwen3_5_moe_text"))
def test_generate(family, device):
    """The same tokens in every mode, for a batch with left padding."""
    model, ids = eager(tiny_model(family, device)), tokens(2, 7, device=device)
    ids[1, :3] = 0
    ways = {name: way for name, way in WAYS.items() if family not in NOT_BY_LENGTH or name != "no cache"}

    def all_ways() -> dict[str, list]:
        found = {}
        for name, way in ways.items():
            torch.manual_seed(3)
            found[name] = generated(model, ids if name != "chunks of the prompt" else ids[:1], **way)
        return found

    expected = all_ways()
    torch_moe_metal.patch(model)
    assert all_ways() == expected


def test_ops_of_a_layer(device):
    """Of a token, without views and allocations: a whole layer of Qwen3.5 at most 14, its mixer with both norms 5."""
    sizes = {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4}
    counts = {}
    for family in ("qwen3_5_moe_text", "kimi_linear", "lfm2_moe"):
        some = sizes if family != "lfm2_moe" else sizes | {"layer_types": ["conv"] * 3 + ["full_attention"]}
        model = tiny_model(family, device, **some)
        torch_moe_metal.patch(model)
        cache = cache_of(model(tokens(1, 5, device=device), use_cache=True))
        token = torch.randn(1, 1, 64).to(device)
        with calls() as found:
            layer = model.model.layers[1]
            layer(token, attention_mask=None, **with_cache(cache))
        counts[family] = found
    for family, most in (("qwen3_5_moe_text", 14), ("kimi_linear", 14), ("lfm2_moe", 11)):
        assert counts[family].total() <= most, (family, counts[family])
    mixer = counts["qwen3_5_moe_text"]
    around = sum(mixer[f"moe_metal.{op}.default"] for op in ("norm", "residual_norm", "linear_attention_"))
    assert around == 3, mixer


def test_report_and_unpatch():
    """The mixers are in the report; `unpatch` leaves no attribute."""
    for family in MODELS:
        model = tiny_model(family)
        before = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
        stateful = model._is_stateful
        report = torch_moe_metal.patch(model)
        assert [row.cls for row in report.rows if row.state == "fused"].count("") == 0
        mixers = [name for name, module in model.named_modules() if isinstance(module, FusedMixer)]
        assert mixers and set(mixers) <= set(report["fused"]), str(report)
        assert not model._is_stateful
        torch_moe_metal.patch(model)
        torch_moe_metal.unpatch(model)
        assert [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()] == before
        assert model._is_stateful == stateful


def test_drafts_are_refused_unless_all_mixers_are_fused():
    model = tiny_model("qwen3_next", layer_types=["linear_attention"] * 2 + ["full_attention"], num_hidden_layers=3)
    model.model.layers[1].linear_attn.conv1d.__class__ = Doubled
    report = torch_moe_metal.patch(model)
    assert report["left"] == ["model.layers.1.linear_attn"] and "a Doubled is in place of its conv1d" in str(report)
    assert model._is_stateful
    for family in ("jamba", "minimax"):
        model = tiny_model(family)
        torch_moe_metal.patch(model)
        assert model._is_stateful == type(model)._is_stateful


def test_no_call_runs_on_our_op_after_others_are_selected(monkeypatch):
    """As transformers' exporters do for targets without our ops."""
    model, ids = tiny_model("qwen3_5_moe_text"), tokens(1, 9)
    torch_moe_metal.patch(model)
    expected = model(ids).logits
    model.set_experts_implementation("eager")
    with calls() as found:
        actual = model(ids).logits
    assert error(actual, expected) <= BOUND and not any("linear_attention_" in op for op in found), found


def test_packed_weights(device):
    """Projections in 8 bits are joined as well; the logits are those of the dequantised model."""
    for family in ("qwen3_5_moe_text", "bailing_hybrid", "lfm2_moe", "granitemoehybrid"):
        sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "intermediate_size": 64}
        sizes |= {"shared_intermediate_size": 64} if family == "granitemoehybrid" else {}
        model, ids = tiny_model(family, **sizes), tokens(2, 9, device=device)
        torch_moe_metal.quantize_(model, bits=8)
        dense = copy.deepcopy(model)
        dense.dequantize()
        expected = eager(dense.to(device))(ids, use_cache=False).logits
        torch_moe_metal.patch(model.to(device))
        assert error(model(ids, use_cache=False).logits, expected) <= BOUND, family
        cache = cache_of(model(ids[:, :8], use_cache=True))
        assert error(model(ids[:, 8:], **with_cache(cache)).logits, expected[:, 8:]) <= BOUND, family


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MIXERS)
def test_half_precision(name, dtype, device):
    """At least as near to float32 as transformers in the same dtype."""
    stock, config = tiny_mixer(name, device)
    x, stock = torch.randn(2, 30, H).to(device, dtype), stock.to(dtype)
    exact = call(copy.deepcopy(stock).float(), x.float(), cache_for(config))
    ours = fused(copy.deepcopy(stock))
    cache, actual = cache_for(config), []
    allowed = float((call(stock, x, cache_for(config)).float() - exact).norm() / exact.norm())
    for part in x.split([20, 4, 6], 1):
        actual.append(call(ours, part, cache))
    assert actual[0].dtype == dtype
    found = float((torch.cat(actual, 1).float() - exact).norm() / exact.norm())
    assert found <= max(1.1 * allowed, 2 * torch.finfo(dtype).eps), (found, allowed)


@pytest.mark.full_grid
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "kimi_linear", "granitemoehybrid", "lfm2_moe"])
def test_compile(family):
    """No graph break, without a cache and with one, whose tensors stay the same. Eager code continues."""
    model, ids = eager(tiny_model(family)), tokens(2, 14)
    expected = model(ids, use_cache=False).logits
    torch_moe_metal.patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert error(compiled(ids, use_cache=False).logits, expected) <= BOUND
    for first, others in ((model, compiled), (compiled, model)):
        cache = DynamicCache(config=model.config)
        runs = [(first, 8), (others, 1), (others, 2), (first, 1), (others, 1), (first, 1)]
        logits = [
            run(part, **with_cache(cache)).logits
            for (run, _), part in zip(runs, ids.split([n for _, n in runs], 1), strict=True)
        ]
        assert error(torch.cat(logits, 1), expected) <= BOUND


def test_peft_on_a_projection(monkeypatch):
    """Adapters on a projection of the input, and on that of the output."""
    peft = pytest.importorskip("peft")
    for target in ("in_proj_qkv", "out_proj"):
        model, ids = eager(tiny_model("qwen3_5_moe_text")), tokens(1, 9)
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=[target], init_lora_weights=False))
        expected = adapted(ids).logits
        report = torch_moe_metal.patch(adapted)
        left = [row.name for row in report.rows if row.state == "left"]
        assert bool(left) == (target == "in_proj_qkv"), str(report)
        assert error(adapted(ids).logits, expected) <= BOUND


def test_other_caches():
    """A static cache and subclasses keep transformers' layers, whose tensors do not move."""

    class OwnCache(DynamicCache):
        pass

    model, ids = tiny_model("qwen3_5_moe_text"), tokens(1, 12)
    expected = model(ids, use_cache=False).logits
    torch_moe_metal.patch(model)
    offloaded = DynamicCache(config=model.config)
    offloaded.offloading = True
    for cache in (OwnCache(config=model.config), StaticCache(config=model.config, max_cache_len=32)):
        for _ in range(2):  # also after a reset
            logits, memory = [], set()
            for part in ids.split([6, 1, 4, 1], 1):
                logits.append(model(part, **with_cache(cache)).logits)
                layer = cache.layers[0]
                memory.add((layer.conv_states[0].data_ptr(), layer.recurrent_states[0].data_ptr()))
            assert error(torch.cat(logits, 1), expected) <= BOUND
            assert type(layer) is LinearAttentionLayer and len(memory) == 1
            cache.reset()
    mixer = model.model.layers[0].linear_attn
    for length in (5, 1):
        call(mixer, torch.randn(1, length, 64), offloaded)
    assert type(offloaded.layers[0]) is LinearAttentionLayer and offloaded.layers[0].has_previous_state[0]


def test_loaded_packed(tmp_path):
    model, ids = tiny_model("qwen3_5_moe_text", moe_intermediate_size=64), tokens(1, 9)
    model.save_pretrained(tmp_path)
    config = MoeMetalConfig(bits=8, skip=["in_proj_a", "in_proj_b"])
    loaded = type(model).from_pretrained(tmp_path, quantization_config=config)
    dense = copy.deepcopy(loaded)
    dense.dequantize()
    expected = eager(dense)(ids).logits
    torch_moe_metal.patch(loaded)
    assert error(loaded(ids).logits, expected) <= BOUND
    cache = cache_of(loaded(ids[:, :8], use_cache=True))
    token = torch.randn(1, 1, 64)
    with calls() as found:
        call(loaded.model.layers[0].linear_attn, token, cache)
    assert found.total() == 4, found  # b and a are dense: one more product
