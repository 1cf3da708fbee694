"""transformers, as a user would: every family's logits and tokens, compiled, copied, hooked, trained and saved."""

import collections
import contextlib
import copy
import importlib
import itertools
import logging
import re
import subprocess
import sys
import threading
import warnings
from concurrent import futures
from importlib.util import find_spec

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeSparseMoeBlock

import torch_moe_metal
from checks import relative
from conftest import SIMULATED
from dispatch_table import decoding
from tiny_models import FAMILIES, SAME_CODE, eager, experts_classes, tiny_model, tiny_module, tokens
from torch_moe_metal.grad import warned
from torch_moe_metal.transformers import Report
from torch_moe_metal.transformers.fusing.experts import experts_forward, why_not_fused
from torch_moe_metal.transformers.fusing.families import RECORDS
from torch_moe_metal.transformers.fusing.fused import Fused
from torch_moe_metal.transformers.fusing.hybrid_families import RECURRENT
from torch_moe_metal.transformers.fusing.records import Block
from torch_moe_metal.transformers.fusing.routing import deepseek_v2, deepseek_v3, mistral4
from torch_moe_metal.transformers.versions import cache_of, with_cache

BLOCKS = {name: record for name, record in RECORDS.items() if isinstance(record, Block)}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


# ------------------------------------------------------------------------------------------------ every family


SLOW = [pytest.mark.full_grid, pytest.mark.slow]


def mostly_slow(*fast: str) -> list:
    """All families; those not named here run with `make test-all`."""
    return [pytest.param(name, marks=[] if name in fast else SLOW) for name in FAMILIES]


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=SLOW) for name in SAME_CODE)])
def test_logits(family, device):
    """In float32 the logits are eager's, through the interface and patched, at prefill and at decode."""
    model, ids = eager(tiny_model(family, device)), tokens(2, 9, device=device)
    expected = model(ids, use_cache=False).logits
    if family != "llama4_text":  # not on the interface
        model.set_experts_implementation("moe_metal")
        assert relative(model(ids, use_cache=False).logits, expected) <= 1e-5
    report = torch_moe_metal.patch(model)
    fused, left = (FAMILIES | SAME_CODE)[family], [row for row in report.rows if row.state == "left"]
    assert len(report["fused"]) == fused == len(report.rows) - len(left), str(report)
    assert all(row.note == RECURRENT for row in left), str(report)
    assert relative(model(ids, use_cache=False).logits, expected) <= 1e-5
    cache = cache_of(model(ids[:, :8], use_cache=True))
    assert relative(model(ids[:, 8:], **with_cache(cache)).logits, expected[:, 8:]) <= 1e-5


def generated(model, ids, **options) -> list[list[int]]:
    mask = (ids != 0).long()
    options = {"max_new_tokens": 8, "do_sample": False} | options
    return model.generate(ids, attention_mask=mask, **options).tolist()


@pytest.mark.parametrize("family", mostly_slow("qwen3_moe", "gemma4_text", "llama4_text"))
def test_generate(family, device):
    """The same greedy tokens as eager, with a dynamic and a static cache, in a left-padded batch, and from beams."""
    model, ids = eager(tiny_model(family, device)), tokens(2, 7, device=device)
    ids[1, :3] = 0  # left padding
    ways = [{}, {"num_beams": 3}, {"cache_implementation": "static"}]
    expected = [generated(model, ids, **way) for way in ways]
    torch_moe_metal.patch(model)
    for way, sequence in zip(ways, expected, strict=True):
        assert generated(model, ids, **way) == sequence, way


@pytest.mark.slow_on_mps
@pytest.mark.parametrize("family", ["deepseek_ocr2", "unlimited_ocr"])
def test_generate_with_the_kept_prompt(family, device):
    """Unlimited-OCR has a cache of its own: the prompt stays, and a window moves over the answer."""
    model, ids = eager(tiny_model(family, device)), tokens(2, 7, device=device)
    ways = [{"max_new_tokens": 16}, {"max_new_tokens": 16, "cache_implementation": "static"}]
    expected = [generated(model, ids, **way) for way in ways]
    assert len(expected[0][0]) > 7 + 6
    torch_moe_metal.patch(model)
    assert [generated(model, ids, **way) for way in ways] == expected


@pytest.mark.parametrize("family", mostly_slow("qwen3_moe", "gpt_oss"))
def test_compile(family):
    """No graph break in prefill and decode, and the same logits."""
    check_compiled(family, "aot_eager")


@pytest.mark.full_grid
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4_text"])
def test_compile_with_inductor(family):
    check_compiled(family, "inductor")


def check_compiled(family: str, backend: str) -> None:
    model, ids = tiny_model(family), tokens(2, 9)
    expected = eager(model)(ids, use_cache=False).logits
    torch_moe_metal.patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert relative(compiled(ids, use_cache=False).logits, expected) <= 1e-5
    assert relative(compiled(ids[:, :1], use_cache=False).logits, expected[:, :1]) <= 1e-5


# ------------------------------------------------------------------------------------------------ every class


FALLBACKS = {
    "NemotronHExperts": "its experts have no gate",
    "Inkling2Experts": "its gate is its own: Inkling2Experts._apply_gate",
    "Inkling2LoopExperts": "its gate is its own: Inkling2LoopExperts._apply_gate",
}
#: The number of classes on the experts interface, by the minor version of transformers.
CLASSES = {"5.23": 65, "5.24": 68}


def test_every_experts_class():
    """Each class of the installed transformers is fused and equals its eager forward, or is a known fallback.

    `pytest -s -k every` prints the tables.
    """
    classes = experts_classes()
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(5, 64, generator=generator), torch.rand(5, 3, generator=generator)
    ids = torch.rand(5, 8, generator=generator).argsort(-1)[:, :3]
    reasons = {}
    for cls in classes:
        experts = tiny_module(cls, _experts_implementation="moe_metal")
        reasons[cls.__name__] = why_not_fused(experts)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = experts(x, ids, weights)
        error = relative(output, cls.forward.__wrapped__(experts, x, ids, weights))
        print(f"{cls.__name__:32}{error:10.1e}  {reasons[cls.__name__] or 'fused'}")
        assert error <= 1e-6, cls
    left = {name: why for name, why in reasons.items() if why}
    assert left.items() <= FALLBACKS.items()
    print(f"{len(classes)} classes on the experts interface: {len(classes) - len(left)} fused")
    assert len(classes) == CLASSES.get(transformers.__version__.rpartition(".")[0], len(classes))


def test_every_block_class():
    """Each block that `patch` knows returns what it returned before, in value, shape and dtype."""
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    known = [name for name in BLOCKS if find_spec(f"transformers.models.{name.partition('.')[0]}")]
    assert len(BLOCKS) - len(known) == (2 if transformers.__version__.startswith("5.23.") else 0)
    for name in known:
        family, _, cls = name.partition(".")
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        for norm_topk_prob in (False, True):
            block = tiny_module(getattr(module, cls), norm_topk_prob=norm_topk_prob)
            expected = block(x.clone())
            with counted() as calls:
                assert torch_moe_metal.patch(block)["fused"] == [""]
                actual = block(x)
            assert sum(calls.values()) == (3 if cls == "Llama4TextMoe" else 2), (name, calls)
            if torch.is_tensor(expected):
                actual, expected = (actual,), (expected,)
            for a, e in zip(actual, expected, strict=True):
                assert a.shape == e.shape and a.dtype == e.dtype and relative(a, e) <= 1e-6, name
        print(f"{name:56} fused, {dict(calls)}")
    print(f"{len(known)} block classes fused")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cls", [Qwen3MoeExperts, GptOssExperts, Gemma4TextExperts])
def test_half_precision(cls, dtype, device):
    """With the ids given, the experts are at least as near to float32 as eager is in the same dtype."""
    experts = tiny_module(cls).to(device, dtype)
    x = torch.randn(40, 64, dtype=dtype).to(device)
    weights, ids = torch.rand(40, 3).to(device), torch.rand(40, 8).argsort(-1)[:, :3].to(device)
    eager_forward = cls.forward.__wrapped__
    exact = eager_forward(copy.deepcopy(experts).float(), x.float(), ids, weights)
    allowed = relative(eager_forward(experts, x, ids, weights.to(dtype)), exact)
    for these_ids, these_weights in ((ids, weights), (ids.int(), weights.to(dtype))):
        actual = experts_forward(experts, x, these_ids, these_weights)
        assert actual.dtype == dtype
        assert relative(actual, exact) <= max(allowed, torch.finfo(dtype).eps)


# ------------------------------------------------------------------------------------------------ a good citizen


@contextlib.contextmanager
def counted():
    """Counts the calls of our ops by name."""

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "moe_metal":
                calls[function.__name__.split(".")[0]] += 1
            return function(*args, **(kwargs or {}))

    calls = collections.Counter()
    with Counter():
        yield calls


@pytest.fixture
def patched():
    model = tiny_model("qwen3_moe")
    torch_moe_metal.patch(model)
    return model


def test_dispatches():
    """Of a Qwen3 layer all but the cache are eight of our ops; of a Gemma 4 layer, which has four more norms and a
    dense MLP, sixteen. One more is the last norm."""
    gemma4 = {"gate": 2, "experts": 2, "norm_add": 4, "weighted_sum_dual_norm_add": 2, "attention": 2, "rope": 2}
    for family, expected in (
        (
            "qwen3_moe",
            dict.fromkeys(("rope", "attention", "residual_norm", "gate", "experts"), 2) | {"norm": 3, "linear": 4},
        ),
        ("gemma4_text", gemma4 | {"norm": 9, "linear": 8, "glu": 2}),
    ):
        model = tiny_model(family)
        torch_moe_metal.patch(model)
        with counted() as calls:
            model(tokens(1, 1))
        assert calls == expected


def test_calls_per_token(device):
    """A token takes fewer ops with our experts and fewer still with fused blocks, and none of ours makes the host wait.
    A fused layer is ten dispatches: the two norms, two products, rope, which writes to the cache, attention, the router
    in two, the experts in two. One dispatch more is the last norm."""
    layers, simulated = 2, device == "mps" and SIMULATED
    table = decoding(layers, device, simulated)
    for name, loads in table.items():
        print(f"{name:24}{loads}")
    *stock, (ours, our_block), (fused, fused_block) = table.values()
    for step, block in stock:
        assert step.ours == block.ours == 0 and step.ops > ours.ops > fused.ops, table
        assert block.ops >= 16 and block.ops > our_block.ops > fused_block.ops == 2, table
        assert step.ops - fused.ops >= 20 * layers, table
    assert (ours.ours, fused.ours, our_block.ours, fused_block.ours) == (layers, 8 * layers + 1, 1, 2), table
    if simulated:
        assert (ours.dispatches, our_block.dispatches) == (2 * layers, 2), table
        assert (fused.dispatches, fused_block.dispatches) == (10 * layers + 1, 4), table
        assert not any(load.waits for loads in list(table.values())[-2:] for load in loads), table


def test_gemma4_variants():
    """Per-layer inputs, and layers without experts."""
    for changes in ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99}, {"enable_moe_block": False}):
        model, ids = eager(tiny_model("gemma4_text", **changes)), tokens(2, 9)
        expected = model(ids).logits
        assert len(torch_moe_metal.patch(model)["fused"]) == 5
        assert relative(model(ids).logits, expected) <= 1e-5


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4_text", "gpt_oss", "deepseek_v3", "llama4_text"])
def test_router_logits(family):
    """With output_router_logits a patched model returns them."""
    model, ids = eager(tiny_model(family)), tokens(2, 9)
    base = model.model
    expected = base(ids, output_router_logits=True)
    torch_moe_metal.patch(model)
    actual = base(ids, output_router_logits=True)
    assert relative(actual.last_hidden_state, expected.last_hidden_state) <= 1e-5
    for a, e in zip(actual.router_logits, expected.router_logits, strict=True):
        assert relative(a, e) <= 1e-5


@pytest.mark.parametrize("name", ["mlp.gate", "mlp.experts", "mlp", "post_attention_layernorm"])
def test_hooks_are_called(patched, name):
    """A hook on a module that the fused forward would skip sees it run, and may change its output."""
    layer, ids, seen = patched.model.layers[0], tokens(1, 5), []
    expected = patched(ids).logits
    with layer.get_submodule(name).register_forward_hook(lambda *args: seen.append(args)):
        assert relative(patched(ids).logits, expected) <= 1e-5
    assert len(seen) == 1
    with layer.get_submodule(name).register_forward_hook(lambda module, args, output: scaled(output)):
        assert relative(patched(ids).logits, expected) > 1e-3
    assert relative(patched(ids).logits, expected) == 0


def scaled(output):
    return tuple(o * 2 if o.is_floating_point() else o for o in output) if isinstance(output, tuple) else output * 2


def test_replaced_submodule():
    """A router whose linear layer somebody wrapped, as PEFT does, is called and not read."""

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model, ids = tiny_model("gemma4_text"), tokens(1, 5)
    for layer in model.model.layers:
        layer.router.proj.__class__ = Doubled
    expected = eager(model)(ids).logits
    torch_moe_metal.patch(model)
    assert relative(model(ids).logits, expected) <= 1e-5


def test_weights_are_shared(patched, tmp_path):
    """Same parameters, same keys; saved and loaded the model computes the same. The parameters of joined projections
    have moved."""
    stock, ids = tiny_model("qwen3_moe"), tokens(1, 5)
    names = dict(stock.named_parameters()).keys()
    before = {name: (p, p.data_ptr()) for name, p in stock.named_parameters()}
    torch_moe_metal.patch(stock)
    assert dict(stock.named_parameters()).keys() == names == patched.state_dict().keys()
    for name, parameter in stock.named_parameters():
        same, place = before[name]
        assert parameter is same
        assert parameter.data_ptr() == place or name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
    patched.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="moe_metal")
    assert loaded.get_experts_implementation() == {"": "moe_metal"}
    assert relative(loaded(ids).logits, patched(ids).logits) <= 1e-5
    assert type(loaded.model.layers[0].mlp) is Qwen3MoeSparseMoeBlock


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(patched, how, tmp_path):
    """A copy is fused too, and shares nothing with the original."""
    ids = tokens(1, 5)
    expected = patched(ids).logits
    if how == "deepcopy":
        other = copy.deepcopy(patched)
    else:
        torch.save(patched, tmp_path / "model.pt")
        other = torch.load(tmp_path / "model.pt", weights_only=False)
    assert type(other.model.layers[0].mlp) is type(patched.model.layers[0].mlp)
    assert torch.equal(other(ids).logits, expected)
    other.model.layers[0].mlp.experts.down_proj.zero_()
    assert torch.equal(patched(ids).logits, expected)
    torch_moe_metal.unpatch(other)
    assert type(other.model.layers[0].mlp) is Qwen3MoeSparseMoeBlock
    assert other.get_experts_implementation() == tiny_model("qwen3_moe").get_experts_implementation()


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe", "gemma4_text", "llama4_text"])
def test_unpatch(family):
    """Everything is as it was: classes, experts implementation, attributes."""
    model = eager(tiny_model(family))
    implementation = model.get_experts_implementation()
    before = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    torch_moe_metal.patch(model)
    torch_moe_metal.patch(model)
    assert "fused by torch_moe_metal" in repr(model)
    torch_moe_metal.unpatch(model)
    assert [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()] == before
    assert model.get_experts_implementation() == implementation


def test_unpatch_of_a_block_alone(patched):
    """A fused layer around a block that is fused no longer runs as it did before."""
    ids, block = tokens(1, 5), patched.model.layers[0].mlp
    expected = patched(ids).logits
    torch_moe_metal.unpatch(block)
    assert type(block) is Qwen3MoeSparseMoeBlock
    with counted() as calls:
        assert relative(patched(ids).logits, expected) <= 1e-5
    assert calls == {"norm": 2, "rope": 2, "attention": 2, "residual_norm": 1, "gate": 1, "experts": 2, "linear": 4}


class Wrapper(torch.nn.Module):
    """A module around a model that passes on what it does not have, as PEFT's do."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def base(model):
    return model.model


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe", "gemma4_text", "llama4_text"])
@pytest.mark.parametrize(
    "patched_at, unpatched_at",
    [(None, Wrapper), (Wrapper, None), (base, None), (None, base), (base, Wrapper), (Wrapper, base)],
    ids=lambda at: getattr(at, "__name__", "model"),
)
def test_unpatch_from_elsewhere(family, patched_at, unpatched_at):
    """From a wrapper or from a part, `unpatch` undoes what was done from another."""
    model = eager(tiny_model(family))
    implementation = model.get_experts_implementation()
    before = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    torch_moe_metal.patch(patched_at(model) if patched_at else model)
    assert model.get_experts_implementation() != implementation or family == "llama4_text"
    torch_moe_metal.unpatch(unpatched_at(model) if unpatched_at else model)
    assert [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()] == before
    assert model.get_experts_implementation() == implementation
    model.set_experts_implementation(implementation | {"": "moe_metal"})
    chosen = model.get_experts_implementation()
    torch_moe_metal.unpatch(model)
    assert model.get_experts_implementation() == chosen


def test_unpatch_keeps_a_later_choice(patched):
    """An experts implementation selected after `patch` stays, and the next `patch` remembers that one."""
    patched.set_experts_implementation("eager")
    torch_moe_metal.unpatch(patched)
    assert patched.get_experts_implementation() == {"": "eager"}
    torch_moe_metal.patch(patched)
    torch_moe_metal.unpatch(patched)
    assert patched.get_experts_implementation() == {"": "eager"}


def test_dtype_and_new_parameters(patched):
    """The parameters are read at each call: casting and loading after patch() are seen."""
    ids = tokens(1, 5)
    other = tiny_model("qwen3_moe")
    for parameter in other.parameters():
        parameter *= 0.9
    patched.load_state_dict(other.state_dict(), assign=True)
    assert relative(patched(ids).logits, eager(other)(ids).logits) <= 1e-5
    logits = patched.bfloat16()(ids).logits
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4_text", "deepseek_v3"])
def test_training(family):
    """With gradients wanted, a patched model trains as the stock one does."""
    gradients = []
    for fuse in (False, True):
        model = eager(tiny_model(family)).requires_grad_(True).train()
        if fuse:
            torch_moe_metal.patch(model)
        with torch.enable_grad():
            model(tokens(2, 9), labels=tokens(2, 9, seed=2)).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    stock, ours = gradients
    assert stock.keys() == ours.keys() and any("experts" in name for name in stock)
    for name in stock:
        assert relative(ours[name], stock[name]) <= 1e-4, name


def test_report():
    """What is not fused is named, with the reason."""

    class OwnBlock(Qwen3MoeSparseMoeBlock):
        pass

    model = tiny_model("qwen3_moe", num_hidden_layers=4)
    model.model.layers[1].mlp.__class__ = OwnBlock
    model.model.layers[2].mlp.forward = model.model.layers[2].mlp.forward
    model.model.layers[3].mlp.experts.act_fn = torch.nn.Tanh()
    report = torch_moe_metal.patch(model)
    attention = [f"model.layers.{i}.self_attn" for i in range(4)]
    assert report["fused"] == ["model.layers.0", attention[0], "model.layers.0.mlp", *attention[1:], "model.norm"]
    assert report["experts only"] == ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]
    assert report["left"] == ["model.layers.2.mlp", "model.layers.3.mlp", "model.layers.3.mlp.experts"]
    with pytest.raises(KeyError, match="a report has 'fused', 'experts only' and 'left', got 'fuse'"):
        report["fuse"]
    text = str(report)
    assert "its forward has been replaced already" in text and "its activation is Tanh" in text
    assert str(torch_moe_metal.patch(torch.nn.Linear(2, 2))).endswith("no Mixture-of-Experts module in this model")


def test_no_choice():
    """Experts that no token chooses add nothing."""
    model, ids = eager(tiny_model("qwen3_moe", num_experts_per_tok=0)), tokens(1, 5)
    expected = model(ids).logits
    model.set_experts_implementation("moe_metal")
    assert relative(model(ids).logits, expected) <= 1e-5


def test_more_choices_than_the_groups_hold():
    """Where the best groups hold fewer experts than are chosen, transformers fills up with barred ones: such a block is
    left, with its reason, and so is its layer."""
    reason = "it chooses more experts than its best groups hold"
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    left = set()
    known = [name for name in BLOCKS if find_spec(f"transformers.models.{name.partition('.')[0]}")]
    assert len(BLOCKS) - len(known) == (2 if transformers.__version__.startswith("5.23.") else 0)
    for name in known:
        family, _, cls = name.partition(".")
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        block = tiny_module(getattr(module, cls), num_experts_per_tok=5)  # and 4 in the 2 best of 4 groups
        (row,) = torch_moe_metal.patch(block).rows[:1]
        assert row.state == "fused" or row.note == reason
        left |= {name} if row.state == "left" else set()
        block(x)
    assert left == {name for name in known if BLOCKS[name].routing in (deepseek_v2, deepseek_v3, mistral4)}

    model = eager(tiny_model("deepseek_v3", num_experts_per_tok=8, n_group=2, topk_group=1))
    ids = tokens(2, 9)
    expected = model(ids).logits
    report = torch_moe_metal.patch(model)
    assert report["left"] == ["model.layers.1.mlp"] and report["experts only"] == ["model.layers.1.mlp.experts"]
    with counted() as calls:
        assert relative(model(ids).logits, expected) <= 1e-5
    assert calls == {"norm": 6, "rope": 2, "attention": 2, "residual_norm": 1, "experts": 1}
    with pytest.raises(TypeError, match=reason):
        torch_moe_metal.nn.MoE.from_block(model.model.layers[1].mlp)


class ParamWrapper(torch.nn.Module):
    """What PEFT puts around a module to adapt one of its parameters, with nothing but `base_layer` in common."""

    def __init__(self, base_layer: torch.nn.Module, parameter_name: str):
        super().__init__()
        self.base_layer, self.parameter_name = base_layer, parameter_name

    def forward(self, *args):
        parameter = getattr(self.base_layer, self.parameter_name)
        with torch.no_grad():
            parameter *= 2
            output = self.base_layer(*args)
            parameter /= 2
        return output


@pytest.mark.parametrize(
    "family, part, parameter",
    [
        ("qwen3_moe", "mlp.experts", "down_proj"),
        ("qwen3_moe", "mlp.gate", "weight"),
        ("gemma4_text", "experts", "down_proj"),
        ("llama4_text", "feed_forward.experts", "down_proj"),
    ],
)
def test_wrapped_parameters(family, part, parameter):
    """A block whose experts or router somebody wrapped, as PEFT does, is left with its reason, and so is its layer."""
    model, ids = eager(tiny_model(family)), tokens(2, 9)
    layer, (block, _, name) = model.model.layers[1], part.rpartition(".")
    setattr(layer.get_submodule(block), name, ParamWrapper(layer.get_submodule(part), parameter))
    expected = model(ids).logits
    report = torch_moe_metal.patch(model)
    left = {row.name: row.note for row in report.rows if row.state == "left"}
    assert left == {f"model.layers.1.{block}".rstrip("."): f"a ParamWrapper is in place of its {name}"}
    assert all(re.search(r"layers\.0|self_attn$|model\.norm$", name) for name in report["fused"])
    assert relative(model(ids).logits, expected) <= 1e-5
    torch_moe_metal.unpatch(model)
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("fused_before", [False, True])
@pytest.mark.parametrize("at, call", [("fuse", 3), ("report_experts", 3), ("set_experts_implementation", 2)])
def test_patch_changes_all_or_nothing(at, call, fused_before, monkeypatch):
    """An error in its middle leaves every class, attribute and the experts implementation as they were."""

    def failing(*args):
        if next(calls) == call:
            raise RuntimeError("on purpose")
        return original(*args)

    def state():
        return [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]

    model, calls = eager(tiny_model("qwen3_moe", num_hidden_layers=4)), itertools.count(1)
    if fused_before:
        torch_moe_metal.patch(model.model.layers[3])
    for layer in model.model.layers[:3]:
        layer.mlp.forward = layer.mlp.forward
    before, implementation = state(), model.get_experts_implementation()
    home = PreTrainedModel if at == "set_experts_implementation" else sys.modules[Report.__module__]
    original = getattr(home, at)
    monkeypatch.setattr(home, at, failing)
    with pytest.raises(RuntimeError, match="on purpose"):
        torch_moe_metal.patch(model)
    assert state() == before and model.get_experts_implementation() == implementation


@pytest.mark.parametrize("compiled", [False, True])
def test_one_warning_per_class(compiled):
    """The fallback says so once, and while it is traced, too."""
    cls = next(cls for cls in experts_classes() if cls.__name__ == "NemotronHExperts")
    experts = tiny_module(cls, _experts_implementation="moe_metal")
    x, ids, weights = torch.randn(2, 64), torch.tensor([[0, 1], [2, 3]]), torch.rand(2, 2)
    warned.clear()
    first = torch.compile(experts, fullgraph=True, backend="eager") if compiled else experts
    with pytest.warns(UserWarning, match="NemotronHExperts runs on transformers' grouped_mm, since its experts have"):
        first(x, ids, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        experts(x, ids, weights)


@pytest.mark.parametrize("cls", [Qwen3MoeExperts, MuseSparkExperts])
def test_sentinel_ids(cls, device):
    """Ids of other processes' experts are skipped, not multiplied by 0, even when their weight is NaN."""
    experts = tiny_module(cls).to(device)
    x, weights = torch.randn(4, 64).to(device), torch.rand(4, 3).to(device)
    ids = torch.tensor([[0, 8, 1], [8, 8, 8], [2, 3, 4], [8, 7, 8]]).to(device)
    expected = cls.forward.__wrapped__(experts, x, ids, weights)
    poisoned = weights.where(ids < 8, float("nan"))
    assert relative(experts_forward(experts, x, ids, poisoned), expected) <= 1e-6


def test_autocast(patched):
    """Under autocast, where activations and weights may differ in dtype, the model runs."""
    ids = tokens(1, 5)
    expected = patched(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        assert relative(patched(ids).logits.float(), expected) <= 0.1


@pytest.mark.parametrize("cuda", [False, True])
def test_no_advice_to_install_cuda_packages_without_cuda(cuda, monkeypatch, caplog):
    """transformers gives it at the first call of a model with linear attention."""
    model = tiny_model("qwen3_next")
    logging.Logger.warning_once.cache_clear()
    transformers.utils.logging.enable_propagation()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    try:
        with caplog.at_level("WARNING", "transformers"):  # other tests leave another level
            model(tokens(1, 5))
    finally:
        transformers.utils.logging.disable_propagation()
    assert ("install `causal_conv1d`" in caplog.text) == ("install `flash-linear-attention`" in caplog.text) == cuda


class Held(DynamicCache):
    """Stops the call of a model in the middle, once."""

    def __init__(self, config):
        super().__init__(config=config)
        self.reached, self.resume = threading.Event(), threading.Event()

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx == 1:
            self.reached.set()
            assert self.resume.wait(30)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@pytest.mark.parametrize("way", ["patch", "unpatch"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_patch_waits_for_the_calls_of_other_threads(family, way):
    """A running call ends as it began. A call that begins meanwhile waits, and runs as the model is afterwards."""
    model, ids = tiny_model(family), tokens(2, 9)
    stock = model(ids).logits
    torch_moe_metal.patch(model)
    if way == "patch":
        torch_moe_metal.unpatch(model)
    before, cache = model(ids).logits, Held(model.config)
    with futures.ThreadPoolExecutor(3) as pool:
        running = pool.submit(torch.no_grad()(model), ids, past_key_values=cache)
        assert cache.reached.wait(30)
        change = pool.submit(getattr(torch_moe_metal, way), model)
        new = pool.submit(torch.no_grad()(model), ids)
        early, _ = futures.wait([change], timeout=0.1)
        cache.resume.set()
        assert torch.equal(running.result().logits, before) and not early
        change.result()
        assert relative(new.result().logits, stock) <= 1e-5
    assert any(isinstance(module, Fused) for module in model.modules()) == (way == "patch")
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())


def test_patch_and_unpatch_in_turn_while_another_thread_generates():
    model, ids, done = tiny_model("gpt_oss"), tokens(1, 9), threading.Event()
    expected = generated(model, ids)

    def generate():
        with torch.no_grad():
            while not done.is_set():
                assert generated(model, ids) == expected

    with futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate)
        try:
            for _ in range(10):
                torch_moe_metal.patch(model)
                torch_moe_metal.unpatch(model)
        finally:
            done.set()
        running.result()


def test_patch_does_not_wait_forever(monkeypatch):
    """Another thread may wait for this one in the middle of a call."""
    monkeypatch.setattr("torch_moe_metal.transformers.fusing.between_calls.SECONDS", 0)
    model, ids = tiny_model("qwen3_moe"), tokens(2, 9)
    cache = Held(model.config)
    with futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(torch.no_grad()(model), ids, past_key_values=cache)
        assert cache.reached.wait(30)
        try:
            with pytest.raises(RuntimeError, match=r"patch: expected no call of the model by another thread .*; n"):
                torch_moe_metal.patch(model)
            assert not any(isinstance(module, Fused) for module in model.modules())
        finally:
            cache.resume.set()
        running.result()


# ------------------------------------------------------------------------------------------------ importing


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("first, second", [("torch_moe_metal", "transformers"), ("transformers", "torch_moe_metal")])
def test_registered_by_importing(first, second):
    """In either order; and transformers is not imported by us."""
    python(f"""
import sys, {first}
assert '{first}' == 'transformers' or 'transformers' not in sys.modules
import {second}
from transformers import AutoConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
import transformers.modeling_utils
assert 'moe_metal' in ALL_EXPERTS_FUNCTIONS.valid_keys(), list(ALL_EXPERTS_FUNCTIONS)
""")


def test_a_pipeline_is_patched():
    """Its model is."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(99)}, unk_token="w0"))
    model = tiny_model("qwen3_moe")
    pipeline = transformers.pipeline(
        "text-generation", model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=words), device="cpu"
    )
    assert len(torch_moe_metal.patch(pipeline)["fused"]) == 7 and isinstance(model.model.layers[0], Fused)
    torch_moe_metal.unpatch(pipeline)
    assert not isinstance(model.model.layers[0], Fused)
    for function in (torch_moe_metal.patch, torch_moe_metal.unpatch):
        with pytest.raises(TypeError, match=rf"{function.__name__}: expected a model, or a pipeline .*, got dict"):
            function({})


def test_offloaded_layers_are_left_to_accelerate(tmp_path):
    """The report says whose they are, and the logits are right."""
    model, ids = eager(tiny_model("qwen3_moe")), tokens(2, 9)
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    names = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head")
    places = dict.fromkeys(names, "cpu") | {"model.layers.1": "disk"}
    offloaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offload")
    report = torch_moe_metal.patch(offloaded)
    left = {row.name: row.note for row in report.rows if row.state == "left"}
    assert left["model.layers.1.mlp"] == "accelerate has replaced its forward, to move weights (device_map)", str(
        report
    )
    assert relative(offloaded(ids).logits, expected) <= 1e-5


@pytest.mark.slow
def test_unsupported_transformers():
    """Nothing is registered, one line says so, and what needs it raises."""
    printed = python("""
import importlib.metadata, warnings
real = importlib.metadata.version
importlib.metadata.version = lambda name: "5.20.2" if name == "transformers" else real(name)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import torch_moe_metal
    from transformers.integrations import moe
    from transformers.quantizers import auto
    from transformers import modeling_utils
print(*(warning.message for warning in said if "torch_moe_metal" in str(warning.message)), sep="\\n")
assert "moe_metal" not in moe.ExpertsInterface._global_mapping
methods = {*auto.AUTO_QUANTIZER_MAPPING.values(), *auto.AUTO_QUANTIZATION_CONFIG_MAPPING.values()}
assert {method.__module__.split(".")[0] for method in methods} == {"transformers"}
assert modeling_utils.get_hf_quantizer.__module__ == auto.get_hf_quantizer.__module__ == "transformers.quantizers.auto"
assert not hasattr(auto.get_hf_quantizer, "__wrapped__")
try:
    torch_moe_metal.patch
except ImportError as error:
    print(error)
""")
    lines = printed.splitlines()
    expected = "torch_moe_metal supports transformers from 5.23 on and does nothing in 5.20.2, which is installed: "
    assert lines == [expected + "pip install 'transformers>=5.23'"] * 2


@pytest.mark.slow
def test_without_transformers():
    printed = python("""
import importlib.metadata, torch_moe_metal
def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = missing
try:
    torch_moe_metal.patch
except ImportError as error:
    print(error)
""")
    assert printed.strip() == "torch_moe_metal needs transformers for this: pip install transformers accelerate"
