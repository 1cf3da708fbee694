"""Dense models of transformers, packed while loading or in memory: `MoeMetalConfig` and `quantize_`."""

import contextlib
import copy
import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

import checkpoints
import torch_moe_metal
from checkpoints import formats
from checks import relative
from interruptions import interrupted
from test_transformers import counted, generated
from tiny_models import COMMON, FAMILIES, build, left_without_need, tiny_model, tokens
from torch_moe_metal import MoeMetalConfig, quantize, quantize_, reference
from torch_moe_metal.grad import warned
from torch_moe_metal.nn import MoE
from torch_moe_metal.transformers.fusing.packed_modules import packed_modules

SIZES = {"moe_intermediate_size": 64, "intermediate_size": 64, "tie_word_embeddings": False}
SIZES |= {"q_lora_rank": 32, "shared_expert_intermediate_size": 64, "intermediate_size_mlp": 64}
WAYS = {
    "qwen3_moe": {"group_size": 32},
    "qwen3_next": {"bits": 8, "group_size": 16},
    "gpt_oss": {"format": "mxfp4"},
    "mixtral": {"format": "fp8"},
    "gemma4_text": {"bits": 6, "group_size": 32},
    "deepseek_v3": {"bits": 5, "group_size": 16, "bits_by_name": {"experts.down_proj": 8, "o_proj": 3}},
}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def dense(family: str, **changes):
    return tiny_model(family, **SIZES | changes)


def saved(family: str, folder: Path, **changes) -> Path:
    """A dense checkpoint in its family's layout: expert by expert if it has that."""
    dense(family, **changes).save_pretrained(folder)
    return folder


def load(folder: Path, device: str = "cpu", config: MoeMetalConfig | None = None, **options):
    options = {"dtype": torch.float32, "device_map": device} | options
    options |= {"quantization_config": config} if config else {}  # transformers treats None as "not quantised"
    return AutoModelForCausalLM.from_pretrained(folder, **options)


@contextlib.contextmanager
def our_log(caplog):
    """Makes our part of transformers' log reach `caplog`."""
    with caplog.at_level("WARNING"):
        transformers.utils.logging.enable_propagation()
        try:
            yield
        finally:
            transformers.utils.logging.disable_propagation()


def rounded(model, config: MoeMetalConfig, names: set[str]):
    """The dense model with dequantised weights in these modules."""

    def round_(weight: torch.Tensor, name: str) -> None:
        bits = config.bits_of(name)
        parts = quantize(weight, config.format, bits, config.group_size)
        weight.copy_(reference.dequantize(*parts, format=config.format, bits=bits, dtype=weight.dtype))

    for name in names:
        module = model.get_submodule(name)
        for weight in ("weight",) if hasattr(module, "weight") else ("gate_up_proj", "down_proj"):
            tensor = getattr(module, weight).data
            round_(tensor.mT if getattr(module, "is_transposed", False) else tensor, f"{name}.{weight}")
    return model


@pytest.mark.parametrize("family", WAYS)
def test_quantised_while_loading(family, device, tmp_path):
    """Everything except routers is packed like single weights; patched, it is fused."""
    folder, config, ids = saved(family, tmp_path), MoeMetalConfig(**WAYS[family]), tokens(2, 9, device=device)
    model, stock = load(folder, device, config), load(folder, experts_implementation="eager")
    packed = formats(model)
    linear = {name for name, module in stock.named_modules() if type(module) is nn.Linear}
    routers = {name for name in linear if name.endswith((".router.proj", ".shared_expert_gate"))}
    experts = {name for name, _ in stock.named_modules() if name.endswith(".experts")}
    assert packed.keys() == linear - routers | experts | {"model.embed_tokens"}
    expected = rounded(stock, config, packed.keys())(ids.cpu()).logits
    assert relative(model(ids).logits.cpu(), expected) <= 2e-5
    report = torch_moe_metal.patch(model)
    assert report["fused"] and not left_without_need(report), str(report)
    assert {row.note.partition(",")[0] for row in report.rows if row.state == "fused" and row.name != "model.norm"} == {
        config.format
    }
    with counted() as calls:
        assert relative(model(ids).logits.cpu(), expected) <= 2e-5
    assert calls["experts"] >= 1 and calls["linear"] > calls["experts"] and calls["dequantize"] == 1
    assert all(buffer.device.type == device for buffer in model.buffers())


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4_text"])
@pytest.mark.parametrize("skip", [[], ["lm_head"]], ids=str)
def test_tied_embeddings(family, skip, tmp_path, device):
    """A tied head uses the embedding's packed weight; if one of them is skipped, both stay dense."""
    folder = saved(family, tmp_path, tie_word_embeddings=True)
    config, ids = MoeMetalConfig(group_size=32, skip=skip), tokens(2, 9, device=device)
    model, stock = load(folder, device, config), load(folder)
    names = formats(model).keys()
    assert ("model.embed_tokens" in names) == (not skip) and "lm_head" not in names
    assert isinstance(model.lm_head, torch_moe_metal.packed_layers.TiedLinear) == (not skip)
    expected = rounded(stock, config, names)(ids.cpu()).logits
    assert relative(model(ids).logits.cpu(), expected) <= 2e-5
    assert relative(copy.deepcopy(model)(ids).logits.cpu(), expected) <= 2e-5
    model.save_pretrained(tmp_path / "again")
    assert not skip or model.lm_head.weight is model.model.embed_tokens.weight
    assert relative(load(tmp_path / "again", device)(ids).logits.cpu(), expected) <= 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, tmp_path):
    """Loaded packed, packed in memory, and saved and loaded again, it computes the same; patched, it is fused."""
    model, ids = dense(family), tokens(2, 9)
    model.save_pretrained(tmp_path)
    options = {"quantization_config": MoeMetalConfig(bits=8, group_size=16), "dtype": torch.float32}
    loaded = type(model).from_pretrained(tmp_path, **options)
    expected = loaded(ids).logits
    stock = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert 1e-4 < relative(expected, stock(ids).logits) <= 0.25
    assert torch.equal(quantize_(stock, bits=8, group_size=16)(ids).logits, expected)
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(type(model).from_pretrained(tmp_path / "again", dtype=torch.float32)(ids).logits, expected)
    assert len(torch_moe_metal.patch(loaded)["fused"]) == FAMILIES[family]
    assert relative(loaded(ids).logits, expected) <= 1e-5


def test_a_model_without_experts(tmp_path, device):
    """Its linear layers and embeddings are packed too."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**COMMON | {"tie_word_embeddings": False})
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    config, ids = MoeMetalConfig(group_size=16), tokens(2, 9, device=device)
    model = load(tmp_path, device, config)
    names = formats(model).keys()
    assert {name for name, module in model.named_modules() if type(module) in (nn.Linear, nn.Embedding)} == set()
    expected = rounded(load(tmp_path), config, names)(ids.cpu()).logits
    assert relative(model(ids).logits.cpu(), expected) <= 2e-5


@pytest.mark.parametrize(
    "family, way",
    [(family, WAYS[family]) for family in ("qwen3_moe", "gpt_oss", "deepseek_v3")]
    + [
        pytest.param("qwen3_moe", {"format": format}, marks=pytest.mark.slow_on_mps)
        for format in ("mxfp8", "nvfp4", "q4_0", "q8_0")
    ],
    ids=str,
)
def test_in_memory(family, way, tmp_path, device):
    """`quantize_` is bitwise equal to loading; both can be saved and loaded again."""
    folder, ids = saved(family, tmp_path / "dense"), tokens(2, 9, device=device)
    loaded = load(folder, device, MoeMetalConfig(**way))
    model = quantize_(load(folder, device), **way)
    assert isinstance(model.lm_head, nn.Linear) and model.get_experts_implementation() == {"": "moe_metal"}
    expected = loaded.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), expected[name].cpu()), name
    for i, each in enumerate((model, loaded)):
        each.save_pretrained(tmp_path / str(i))
        again = load(tmp_path / str(i), device)
        assert again.state_dict().keys() == expected.keys()
        assert torch.equal(again(ids).logits, loaded(ids).logits)
    assert len(generated(model, ids)) == 2


PACKED = {
    "gpt_oss": ({"bits": 8, "group_size": 32}, {"bits": 8, "group_size": 32, "skip": ["experts"]}),
    "fp8": ({"bits": 8, "group_size": 32},),
    "awq": ({"bits": 8, "group_size": 32}, {"format": "fp8"}),
    "affine": ({"bits": 8, "group_size": 32}, {"bits": 4, "group_size": 64}),
}


def packed_checkpoint(kind: str, folder: Path) -> Path:
    if kind == "gpt_oss":
        return checkpoints.gpt_oss(folder)
    if kind == "fp8":
        return checkpoints.fp8(folder, "qwen3_moe")
    if kind == "awq":
        return checkpoints.integers(folder, "awq")
    config = {"group_size": 16, "skip": ["lm_head", "layers.1.self_attn"]}
    quantize_(dense("qwen3_moe", tie_word_embeddings=True), **config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind, options", [(kind, options) for kind in PACKED for options in PACKED[kind]], ids=str)
def test_packed_weights_are_not_packed_again(kind, options, device, tmp_path, caplog):
    """A warning names them, the rest is packed, and a saved model loads as the same model."""
    folder, ids = packed_checkpoint(kind, tmp_path), tokens(2, 9, device=device)
    model = load(folder, device)
    before, logits = formats(model), model(ids).logits
    parts = {name: [part for weight in m.packing for part in m.parts(weight)] for name, m in packed_modules(model)}
    with our_log(caplog):
        assert quantize_(model, **options) is model
    assert "unchanged, since they are packed already: model" in caplog.text
    after = formats(model)
    assert before.items() < after.items() and {type(m) for m in model.modules()} & {nn.Embedding} == set()
    for name, tensors in parts.items():
        now = [part for weight in model.get_submodule(name).packing for part in model.get_submodule(name).parts(weight)]
        pairs = ((a, b) for a, b in zip(tensors, now, strict=True) if a is not None)
        assert all(torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)) for a, b in pairs), name
    expected = model(ids).logits
    assert 0 < relative(expected, logits) <= (0.1 if options.get("bits") == 8 else 0.5)
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again", device)
    assert formats(again) == after and torch.equal(again(ids).logits, expected)
    assert relative(again.dequantize()(ids).logits, expected) <= 1e-5


def test_quantised_twice(tmp_path, caplog):
    """The second call does nothing, and a warning says so."""
    model, ids = quantize_(dense("qwen3_moe"), group_size=32), tokens(2, 9)
    state, expected = model.state_dict(), model(ids).logits
    with our_log(caplog):
        quantize_(model, bits=8, group_size=16)
    assert (
        "since they are packed already: model.embed_tokens (affine), model.layers.*.self_attn.q_proj (affine), "
        in caplog.text
    )
    assert "nothing was packed: the model has no dense weights" in caplog.text
    assert all(tensor is state[name] or torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(ids).logits, expected)


def test_weights_that_cannot_be_packed_raise(tmp_path):
    """Another dtype, or offloaded; nothing is changed."""
    model = dense("qwen3_moe").double()
    with pytest.raises(
        ValueError, match=r"quantize_: model.embed_tokens.weight: expected float32, float16 .*, got float64"
    ):
        quantize_(model, group_size=32)
    assert not formats(model) and not hasattr(model, "hf_quantizer")
    places = {"model": "cpu", "lm_head": "disk"}
    model = load(saved("qwen3_moe", tmp_path / "a"), places, offload_folder=tmp_path / "b")
    with pytest.raises(ValueError, match=r"lm_head.weight: expected a weight in memory, got an offloaded one"):
        quantize_(model, group_size=32)
    assert not formats(model)


def test_models_of_other_quantizers_raise():
    model = dense("qwen3_moe")
    model.hf_quantizer = Mxfp4HfQuantizer(transformers.Mxfp4Config())
    with pytest.raises(ValueError, match=r"expected a dense model, or .*, got one of transformers' Mxfp4HfQuantizer"):
        quantize_(model, group_size=32)
    assert not formats(model)


def test_a_patched_model_is_quantised_too():
    model, ids = dense("qwen3_moe"), tokens(2, 9)
    torch_moe_metal.patch(model)
    expected = quantize_(copy.deepcopy(model), bits=8, group_size=32)(ids).logits
    torch_moe_metal.unpatch(model)
    assert relative(quantize_(model, bits=8, group_size=32)(ids).logits, expected) <= 1e-5


def test_packed_weights_keep_their_bits():
    """When the rest of the model is cast to any dtype."""
    model = quantize_(dense("qwen3_moe"), group_size=32)
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    model.to(torch.float16).to(torch.float32)
    for name, tensor in model.named_buffers():
        if "experts" in name or "_proj" in name or "embed_tokens.weight" in name:
            assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name]), name
    assert model.to(torch.float16)(tokens(1, 5)).logits.dtype == torch.float16


def test_dequantize(tmp_path):
    """Everything is dense again, and transformers has no quantizer."""
    model, ids = quantize_(dense("gpt_oss"), format="mxfp4"), tokens(2, 9)
    expected = model(ids).logits
    other = model.dequantize()
    assert not formats(other) and not hasattr(other, "hf_quantizer")
    assert relative(eager_logits(other, ids), expected) <= 1e-5
    other.save_pretrained(tmp_path)
    assert relative(load(tmp_path)(ids).logits, expected) <= 1e-5


def test_packed_experts_raise_for_another_width():
    """Twice the columns with half the bits have the same bytes."""
    experts = quantize_(dense("qwen3_moe"), group_size=32).model.layers[1].mlp.experts
    ids, weights = torch.tensor([[0, 1]]), torch.ones(1, 2)
    for grad, said in ((False, "gate_up_scale: .* and group 32; got"), (True, "shapes cannot be multiplied")):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=said):
            experts(torch.randn(1, 128, requires_grad=grad), ids, weights)
        with torch.set_grad_enabled(grad):
            assert experts(torch.randn(1, 64, requires_grad=grad), ids, weights).shape == (1, 64)
    mixed = quantize_(dense("qwen3_moe"), group_size=32, bits_by_name={"down_proj": 8}).model.layers[1].mlp.experts
    assert experts.group_size == mixed.group_size == 32


def eager_logits(model, ids):
    model.set_experts_implementation("eager")
    return model(ids).logits


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "gemma4_text"])
def test_eager_reads_every_format(family, device):
    """Dequantised in every call, with a warning."""
    model, ids = quantize_(dense(family), **WAYS[family]).to(device), tokens(2, 9, device=device)
    expected = model(ids).logits
    warned.clear()
    with pytest.warns(UserWarning, match=rf"cannot read {WAYS[family].get('format', 'affine')}: its weights are deq"):
        assert relative(eager_logits(model, ids).cpu(), expected.cpu()) <= 1e-5


@pytest.mark.parametrize(
    "skip, expected",
    [
        (["!experts"], ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]),
        (["model.layers.0", "model", "!layers.*"], []),
        (["layers.*.self_attn", "layers.?.mlp", "embed*"], ["lm_head"]),
        (["layers.0", "self_attn", "lm_head"], ["model.embed_tokens", "model.layers.1.mlp.experts"]),
        (["experts", "layers.0", "embed_tokens", "lm_head", r"[kvo]_proj"], ["model.layers.1.self_attn.q_proj"]),
    ],
    ids=str,
)
def test_skip(skip, expected):
    assert list(formats(quantize_(dense("qwen3_moe"), group_size=32, skip=skip))) == expected


def test_formats_that_do_not_fit(caplog):
    """A linear layer whose columns are no multiple of the group size stays dense; experts raise before any work."""
    model = dense("deepseek_v3", q_lora_rank=24)
    quantize_(model, group_size=16)
    assert type(model.model.layers[0].self_attn.q_b_proj) is nn.Linear
    model = dense("qwen3_moe", moe_intermediate_size=48)
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.experts.down_proj: its 48 columns are no multiple of"):
        quantize_(model, group_size=32)
    assert not formats(model)
    quantize_(model, group_size=16)


def test_quantize_has_the_arguments_of_the_configuration():
    """Both signatures are written out for editors and `help`, and must not differ."""
    config, function = (list(inspect.signature(each).parameters.values()) for each in (MoeMetalConfig, quantize_))
    assert function[1:] == config[:-1] and config[-1].kind is inspect.Parameter.VAR_KEYWORD


FORMATS_WRITTEN = "affine, mxfp4, fp8, mxfp8, nvfp4, q4_0, q8_0"
PATTERNS = "names of modules or globs, such as 'lm_head' or '!experts'"


@pytest.mark.parametrize(
    "said, options",
    [
        (f"format: expected one of {FORMATS_WRITTEN}, got 'int4'", {"format": "int4"}),
        ("bits: expected 2, 3, 4, 5, 6 or 8, got 7", {"bits": 7}),
        ("bits_by_name: lm_head: bits: expected 2, 3, 4, 5, 6 or 8, got 16", {"bits_by_name": {"lm_head": 16}}),
        ("group_size: expected 16, 32, 64 or 128, got 48", {"group_size": 48}),
        ("skip: expected a list of names, got 'lm_head'", {"skip": "lm_head"}),
        (
            "layers: lm_head: expected False, or a dictionary of format, bits and group_size, got 4",
            {"layers": {"lm_head": 4}},
        ),
        ("layers: lm_head: bits: expected 2, 3, 4, 5, 6 or 8, got 7", {"layers": {"lm_head": {"bits": 7}}}),
        (f"format: expected one of {FORMATS_WRITTEN}, got ['affine']", {"format": ["affine"]}),
        ("bits: expected 2, 3, 4, 5, 6 or 8, got 4.0", {"bits": 4.0}),
        ("bits: expected 2, 3, 4, 5, 6 or 8, got True", {"bits": True}),
        ("bits: expected 2, 3, 4, 5, 6 or 8, got '4'", {"bits": "4"}),
        ("group_size: expected 16, 32, 64 or 128, got 64.0", {"group_size": 64.0}),
        (f"skip: expected {PATTERNS}, got None", {"skip": [None]}),
        (f"skip: expected {PATTERNS}, got '('", {"skip": ["("]}),
        (f"skip: expected {PATTERNS}, got ''", {"skip": [""]}),
        (f"skip: expected {PATTERNS}, got '(?!.*experts).*'", {"skip": ["(?!.*experts).*"]}),
        (f"skip: expected {PATTERNS}, got '([a-z_.0-9]+)+#'", {"skip": ["([a-z_.0-9]+)+#"]}),
        (f"bits_by_name: expected {PATTERNS}, got 'q|k'", {"bits_by_name": {"q|k": 4}}),
        ("bits_by_name: expected bits by names, got ['lm_head']", {"bits_by_name": ["lm_head"]}),
    ],
)
def test_options_are_checked(said, options):
    with pytest.raises(ValueError) as raised:
        MoeMetalConfig(**options)
    assert str(raised.value) == f"torch_moe_metal.MoeMetalConfig: {said}"


def test_unknown_options_raise():
    with pytest.raises(
        TypeError, match="MoeMetalConfig: unknown: groupsize, modules_to_not_convert; its arguments are f"
    ):
        MoeMetalConfig(modules_to_not_convert=["lm_head"], groupsize=32)
    with pytest.raises(ValueError, match=f"format: expected one of {FORMATS_WRITTEN}, got 8"):
        quantize_(dense("qwen3_moe"), 8, 32)  # the order of arguments is that of `quantize`


@pytest.mark.parametrize(
    "said, options",
    [
        ("skip: expected names of modules in Qwen3MoeForCausalLM, got 'lmhead'$", {"skip": ["self_attn", "lmhead"]}),
        ("bits_by_name: expected .* that can be packed, got 'down'$", {"bits_by_name": {"down": 8}}),
        ("bits_by_name: expected .* that can be packed, got 'gate'$", {"bits_by_name": {"gate": 8}}),
        ("layers: expected .* that can be packed, got 'layers.0'$", {"layers": {"layers.0": False}}),
        ("whole modules, got 'experts.down_proj'.*; skip 'experts'", {"skip": ["experts.down_proj"]}),
        ("whole modules, got 'gate_up_proj'.*; skip 'experts'", {"skip": ["gate_up_proj"]}),
        (
            "expected one format for model.layers.0.mlp.experts.gate_up_proj and .*down_proj",
            {"layers": {"model.layers.0.mlp.experts.down_proj": False}},
        ),
    ],
    ids=str,
)
def test_names_without_a_match_raise(said, options, tmp_path):
    """Before anything is changed or loaded."""
    model = dense("qwen3_moe")
    with pytest.raises(ValueError, match=said):
        quantize_(model, group_size=32, **options)
    assert not formats(model) and not hasattr(model, "hf_quantizer")
    with pytest.raises(ValueError, match=said):
        load(saved("qwen3_moe", tmp_path), config=MoeMetalConfig(group_size=32, **options))


def test_layers_by_full_names(tmp_path):
    """They override all other options; a base model accepts them without its prefix."""
    layers = {"model.layers.0.mlp.experts": {"format": "mxfp4"}, "model.layers.1.mlp.experts.down_proj": {"bits": 8}}
    layers |= {"lm_head": False, "model.embed_tokens": {"bits": 6, "group_size": 16}}
    model = dense("qwen3_moe")
    quantize_(model, group_size=32, skip=["embed_tokens"], layers=layers)
    found, experts = formats(model), model.model.layers[1].mlp.experts
    assert found["model.layers.0.mlp.experts"] == "mxfp4" and "lm_head" not in found
    assert experts.down_proj.shape[-1] == 64 and experts.gate_up_proj.shape[-1] == 32
    assert model.model.embed_tokens.weight.shape[-1] == 48 and model.model.embed_tokens.weight_scale.shape[-1] == 4
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["layers"].keys() >= {"lm_head"}
    ids = tokens(2, 9)
    base = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert formats(load(tmp_path)) == found and {f"model.{name}" for name in formats(base)} == found.keys()
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_layers_while_loading(tmp_path):
    """Loading and `quantize_` give the same result for `layers`: fp8, whose blocks end inside of an expert, and two
    formats for one layer's experts."""
    folder, experts = saved("qwen3_moe", tmp_path), "model.layers.{}.mlp.experts"
    options = {
        "group_size": 32,
        "layers": {experts.format(0): {"format": "fp8"}, f"{experts.format(1)}.down_proj": {"format": "q8_0"}},
    }
    loaded, model = load(folder, config=MoeMetalConfig(**options)), quantize_(load(folder), **options)
    assert formats(loaded) == formats(model) and set(formats(model).values()) == {"affine", "fp8"}
    assert loaded.model.layers[1].mlp.experts.down_format == "q8_0"
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.allclose(loaded(tokens(2, 9)).logits, loaded.dequantize()(tokens(2, 9)).logits, atol=1e-4)


@pytest.mark.parametrize("family, tower", [("qwen3_vl_moe", "visual"), ("qwen3_omni_moe_thinker", "audio_tower")])
def test_towers_stay_dense(family, tower, tmp_path):
    """Unless `bits_by_name` names them."""
    model = quantize_(dense(family), group_size=16)
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear and tower in name]
    assert linear and not any(tower in name for name in formats(model))
    other = quantize_(dense(family), group_size=16, bits_by_name={tower: 8})
    packed = {name for name in formats(other) if tower in name}
    assert packed and packed <= set(linear) and formats(model).keys() == formats(other).keys() - packed
    other.save_pretrained(tmp_path)
    assert formats(type(other).from_pretrained(tmp_path)) == formats(other)


def test_layers_of_plain_models():
    """`nn.MoE` and linear layers; the router and the shared expert's gate stay dense."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), MoE(64, 64, 8, 3, shared_size=24, shared_gate=True)).requires_grad_(False)
    expected, x = copy.deepcopy(model[1]).quantize_(bits=8, group_size=32), torch.randn(5, 64)
    quantize_(model, bits=8, group_size=32, skip=["0"])
    assert formats(model) == {"1": "affine"} and type(model[1].shared_gate) is nn.Linear
    assert torch.equal(model(x), expected(model[0](x)))
    quantize_(model, group_size=32)
    assert formats(model) == {"0": "affine", "1": "affine"}
    with pytest.raises(
        ValueError, match=r"0.down: its 48 columns are no multiple of the group, 64; choose another, or"
    ):
        quantize_(model := nn.Sequential(MoE(64, 48, 8, 3)))
    assert not formats(model)


@pytest.mark.parametrize("kind", ["dense", "fp8"])
def test_heads_that_the_checkpoint_lacks(kind, tmp_path):
    """They are initialised dense, as in transformers; the rest is packed."""
    folder = checkpoints.fp8(tmp_path, "qwen3_moe") if kind == "fp8" else saved("qwen3_moe", tmp_path)
    options = {} if kind == "fp8" else {"quantization_config": MoeMetalConfig(group_size=32)}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, **options)
    assert type(model.score) is nn.Linear and "score" not in formats(model) and len(formats(model)) >= 10
    assert 0 < model.score.weight.float().std() <= 0.1
    assert model(tokens(1, 9)).logits.isfinite().all()
    model.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "again")
    assert formats(again) == formats(model) and torch.equal(again.score.weight, model.score.weight)


def test_no_pattern_takes_long():
    """Including patterns whose regular expressions would backtrack forever."""
    name, start = ".".join(["layers"] * 40), time.perf_counter()
    for pattern in ("*a*" * 30 + "-", "?*" * 40 + "-", "[a-z]*" * 40 + "-"):
        MoeMetalConfig(skip=[pattern]).skips(name)
    assert time.perf_counter() - start < 5


def test_a_saved_configuration_is_checked(tmp_path):
    quantize_(dense("qwen3_moe"), group_size=32).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["skip"] = ["([a-z_.0-9]+)+#"]
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"{file}: MoeMetalConfig: skip: expected names of modules or globs"):
        load(tmp_path)


def test_other_devices_raise(tmp_path):
    with pytest.raises(ValueError, match="its packed weights run on cpu and mps, got"):
        load(saved("qwen3_moe", tmp_path), {"": "cuda"}, MoeMetalConfig())


def test_inconsistent_saved_tensors_raise(tmp_path):
    quantize_(dense("qwen3_moe"), group_size=32).save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"group_size": 32', '"group_size": 64'))
    with pytest.raises(ValueError, match=r"model.safetensors: \S+_scale: expected shape .*, by the model's config"):
        load(tmp_path)


def test_unsupported_scales_raise(tmp_path):
    """float16 scales of FP8, with which the first forward would raise."""
    quantize_(dense("qwen3_moe"), "fp8").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({n: t.half() if n.endswith("_scale") else t for n, t in tensors.items()}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model.safetensors: \S+_scale: expected F32, BF16 by the format"):
        load(tmp_path)


@pytest.mark.parametrize("fuse", [False, True])
def test_adapters_train_on_packed_layers(fuse):
    """PEFT's LoRA on packed linear layers gets the same gradients as on dense ones with the same values."""
    gradients = []
    for packed in (False, True):
        model = quantize_(dense("qwen3_moe"), bits=8, group_size=32)
        model = model if packed else model.dequantize()
        if fuse and packed:
            torch_moe_metal.patch(model)
        torch.manual_seed(0)
        adapters = LoraConfig(target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
        adapted = get_peft_model(model, adapters)
        adapted.train()
        with torch.enable_grad():
            embedded = model.get_input_embeddings()(tokens(2, 9)).detach().requires_grad_()
            adapted(inputs_embeds=embedded, labels=tokens(2, 9, seed=2)).loss.backward()
        found = {name: p.grad for name, p in adapted.named_parameters() if "lora" in name}
        gradients.append(found | {"input": embedded.grad})
    stock, ours = gradients
    assert len(ours) == 13 and stock.keys() == ours.keys()
    for name, gradient in ours.items():
        assert relative(gradient, stock[name]) <= 1e-4, name


def test_adapters_are_merged_into_dense_layers():
    """Packed ones raise before anything is changed, and name the alternative."""
    model = quantize_(dense("qwen3_moe"), bits=8, group_size=32)
    ids = tokens(2, 9)
    targets = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    adapted = get_peft_model(model, LoraConfig(**targets)).eval()
    expected = adapted(ids).logits
    for merge in (adapted.merge_and_unload, adapted.merge_adapter):
        with pytest.raises(
            ValueError, match=r"q_proj: expected a dense layer to merge .* \(affine\); call dequantize\(\)"
        ):
            merge()
        assert torch.equal(adapted(ids).logits, expected)
    adapted.dequantize()
    assert relative(adapted.merge_and_unload()(ids).logits, expected) <= 1e-5


def test_a_model_with_adapters_is_quantised(tmp_path):
    """Everything except the adapters; the base model can be saved like any other."""
    model, ids = dense("qwen3_moe", tie_word_embeddings=True), tokens(2, 9)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    before = adapted(ids).logits
    quantize_(adapted, bits=8, group_size=32)
    assert 0 < relative(adapted(ids).logits, before) <= 0.1
    assert {name.rpartition(".")[2] for name in formats(adapted) if "q_proj" in name} == {"base_layer"}
    model = adapted.unload()
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert formats(again) == formats(model) and torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("target", ["mlp.experts.gate_up_proj", "down_proj"])
def test_adapting_packed_experts_raises(target):
    """PEFT would find no parameter there and train nothing. Nothing is changed, and dense experts are adapted."""
    model = quantize_(dense("qwen3_moe"), group_size=32)
    adapters = LoraConfig(target_modules=["q_proj"], target_parameters=[target])
    classes = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=rf"dense weights, got a packed one: model\S*{target} \(affine\); adapt lin"):
        get_peft_model(model, adapters)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    adapted = get_peft_model(model.dequantize(), adapters)
    assert any("experts" in name for name, p in adapted.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("family, changes, way", [
    ("qwen3_moe", {}, {"group_size": 32}), ("qwen3_moe", {"tie_word_embeddings": True}, {"format": "q8_0"}),
    ("gemma4_text", {}, {"bits": 6, "group_size": 32}),
])  # fmt: skip
def test_packed_weights_are_counted(family, changes, way):
    """By transformers and by PEFT, as the numbers that they stand for."""
    model = dense(family, **changes)
    counts = [{}, {"exclude_embeddings": True}, {"only_trainable": True}]
    everything, without_embeddings, _ = [model.num_parameters(**options) for options in counts]
    quantize_(model, **way).requires_grad_(False)
    assert [model.num_parameters(**options) for options in counts] == [everything, without_embeddings, 0]
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert adapted.get_nb_trainable_parameters() == (trainable, everything + trainable)


@pytest.mark.parametrize("skip, kind", [([], "input"), (["embed_tokens"], "output")])
def test_resizing_packed_embeddings_raises(skip, kind):
    model, ids = quantize_(dense("qwen3_moe"), group_size=32, skip=skip), tokens(2, 9)
    before, expected = model.config.to_dict(), model(ids).logits
    with pytest.raises(ValueError, match=rf"expected dense embeddings, got packed ones \({kind}, affine\); call deq"):
        model.resize_token_embeddings(128)
    assert model.config.to_dict() == before and torch.equal(model(ids).logits, expected)
    assert model.resize_token_embeddings(99) is model.get_input_embeddings()
    model = model.dequantize()
    model.resize_token_embeddings(128, mean_resizing=False)
    assert relative(model(ids).logits[..., :99], expected) <= 1e-5


def test_saving_after_dequantize(tmp_path):
    """`save_pretrained` writes the dtype of the configuration as a string."""
    model, ids = quantize_(dense("qwen3_moe"), group_size=32), tokens(2, 9)
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    assert relative(model.dequantize()(ids).logits, expected) <= 1e-5
    assert model.dtype == torch.float32


@pytest.mark.parametrize("skip", [[], ["embed_tokens"]])
def test_dequantize_follows_the_model_to_another_dtype(skip):
    """The configuration still has the dtype before `model.float()`."""
    model = dense("qwen3_moe").bfloat16()
    model.config.dtype = torch.bfloat16
    quantize_(model.float(), group_size=32, skip=skip)
    expected = model(tokens(2, 9)).logits
    model.dequantize()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert relative(model(tokens(2, 9)).logits, expected) <= 1e-5


def test_compiled():
    """Without graph breaks: experts, linear layers, embedding and a tied head."""
    model, ids = dense("qwen3_moe", tie_word_embeddings=True), tokens(2, 9)
    quantize_(model, group_size=32)
    expected = model(ids, use_cache=False).logits
    torch_moe_metal.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative(compiled(ids, use_cache=False).logits, expected) <= 1e-5


class Strange(torch.Tensor):
    """A tensor that belongs to another quantizer."""


def test_other_quantizers_report_their_reason():
    model = dense("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.data.as_subclass(Strange), requires_grad=False)
    quantize_(model, group_size=32)
    assert "model.layers.0.mlp.experts" in formats(model) and "model.layers.1.mlp.experts" not in formats(model)
    report = torch_moe_metal.patch(model)
    left = {row.name: row.note for row in report.rows if row.state == "left"}
    assert set(left.values()) == {"its weights are of type Strange"} and "model.layers.1.mlp" in left


# ------------------------------------------------------------------------------------------------ memory


LOADING = """
import sys, threading, time
import torch, torch_moe_metal
from transformers import AutoModelForCausalLM

def memory():  # without the file's pages, which are the system's to drop
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watch():
    global most
    while True:
        most = max(most, memory())
        time.sleep(0.002)

config = torch_moe_metal.MoeMetalConfig(bits=4, group_size=64)
AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=config)
most = before = memory()
threading.Thread(target=watch, daemon=True).start()
model = AutoModelForCausalLM.from_pretrained(sys.argv[2], quantization_config=config)
packed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
print(most - before, packed)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux distinguishes memory of a process from that of its files"
)
def test_loading_needs_little_memory(tmp_path):
    """Layers of Qwen3-30B-A3B's sizes, with fewer experts: while packing, memory holds at most the packed model and the
    dense experts of one layer."""
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 16, "num_hidden_layers": 3}
    with torch.device("meta"):
        model = build("qwen3_moe", **SIZES | sizes).to(torch.bfloat16)
    for tensor in model.to_empty(device="cpu").state_dict().values():
        tensor.fill_(0.01)
    layer = sum(p.nbytes for p in model.model.layers[0].mlp.experts.parameters())
    model.save_pretrained(tmp_path / "large")
    saved("qwen3_moe", tmp_path / "small")
    del model
    script = subprocess.run(
        [sys.executable, "-c", LOADING, tmp_path / "small", tmp_path / "large"],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # otherwise glibc keeps pages of freed memory
        capture_output=True,
        text=True,
    )
    assert script.returncode == 0, script.stderr
    grown, packed = map(int, script.stdout.split()[-2:])
    print(f"grown {grown / 1e6:.0f} MB, packed {packed / 1e6:.0f} MB, one layer's experts {layer / 1e6:.0f} MB")
    assert packed < 3 * layer * 0.3
    assert grown <= packed + layer


# ------------------------------------------------------------------------------------------------ interrupted


def told_by(model) -> tuple:
    """The whole state of a model, except the values of its tensors."""
    modules = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    tensors = [(name, tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()]
    return modules, tensors, model.config.to_dict(), repr(model)


def one_layer(**changes):
    return dense("qwen3_moe", num_hidden_layers=1, **changes)


def as_saved(model, folder: Path):
    model.save_pretrained(folder)
    return load(folder)


ACTS = {
    "patch": torch_moe_metal.patch,
    "unpatch": torch_moe_metal.unpatch,
    "dequantize": lambda model: model.dequantize(),
    "to": lambda model: model.to(torch.float16).to(torch.float32),
}


#: Only one line of so many is interrupted.
every = pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.slow)])


@every
@pytest.mark.parametrize("act", ACTS)
def test_an_interrupted_change_restores_the_model(act, every, tmp_path):
    """An interruption at any line; a repeated call works."""
    ids, act = tokens(1, 5), ACTS[act]
    model = quantize_(one_layer(tie_word_embeddings=True), group_size=32)
    if act is torch_moe_metal.unpatch:
        torch_moe_metal.patch(model)
    model.save_pretrained(tmp_path)
    before, logits = told_by(model), model(ids).logits
    done = copy.deepcopy(model)
    act(done)
    after, expected, count = told_by(done), done(ids).logits, 0
    for place, other, raised in interrupted(lambda: copy.deepcopy(model), act, every):
        if raised and act is not ACTS["to"]:
            assert told_by(other) in (before, after), place
            assert torch.equal(other(ids).logits, logits if told_by(other) == before else expected), place
        if told_by(other) != after or act is ACTS["to"]:
            act(other)
        assert told_by(other) == after and torch.equal(other(ids).logits, expected), place
        count += raised
    assert count >= 20 / every


@every
@pytest.mark.parametrize("kind", ["dense", "gpt_oss"])
def test_an_interrupted_quantize_can_be_resumed(kind, every, tmp_path):
    """Until then the model runs, and can be saved and loaded."""
    ids, options = tokens(1, 5), {"bits": 8, "group_size": 32}
    if kind == "dense":
        model = one_layer(tie_word_embeddings=True)
    else:
        model = load(checkpoints.gpt_oss(tmp_path / "a", num_hidden_layers=1))
    expected, states, count = quantize_(copy.deepcopy(model), **options)(ids).logits, set(), 0
    for place, other, raised in interrupted(lambda: copy.deepcopy(model), lambda m: quantize_(m, **options), every):
        logits, state = other(ids).logits, (*formats(other), hasattr(other, "hf_quantizer"))
        if state not in states:
            states.add(state)
            again = as_saved(copy.deepcopy(other), tmp_path / str(len(states)))
            assert formats(again) == formats(other) and torch.equal(again(ids).logits, logits), place
        assert torch.equal(quantize_(other, **options)(ids).logits, expected), place
        count += raised
    assert count >= 200 / every and len(states) >= 3
