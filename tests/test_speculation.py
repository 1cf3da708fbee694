"""Speculative decoding of patched and packed models gives the same tokens in fewer forwards: with a smaller model as
draft, with prompt lookup, and with layers for multi-token prediction."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_layers import MtpModel

import checkpoints
import torch_moe_metal
from tiny_models import tiny_model
from torch_moe_metal import MoeMetalConfig
from torch_moe_metal.transformers.fusing.fused import Fused
from torch_moe_metal.transformers.fusing.packed_modules import packed_modules
from torch_moe_metal.transformers.versions import with_cache

#: Full attention, sliding windows with sinks, latent attention, and a gated delta net; their columns can be packed in
#: groups of 64.
SIZES = {
    "qwen3_moe": {"moe_intermediate_size": 64},
    "gpt_oss": {"intermediate_size": 64, "sliding_window": 16},
    "deepseek_v3": {"moe_intermediate_size": 64},
    "qwen3_5_moe_text": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
}
#: Other mixers with a recurrent state, and one without: a short convolution.
RECURRENT = {
    "qwen3_next": {},
    "kimi_linear": {"tie_word_embeddings": False},
    "bailing_hybrid": {},
    "granitemoehybrid": {},
    "lfm2_moe": {},
    "nemotron_h": {},
}
SIZES |= RECURRENT
TOKENS = 20


def generate(model, ids: torch.Tensor, **how) -> tuple[list[int], int]:
    """The tokens, and the number of forwards."""
    ids, forwards = ids.to(model.device), []
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(None))
    how = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | how
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    hook.remove()
    return output[0, ids.shape[1] :].tolist(), len(forwards)


def fused(family: str, bits: int | None, device: str = "cpu", **sizes):
    model = tiny_model(family, **SIZES[family] | sizes)
    if bits is not None:
        torch_moe_metal.quantize_(model, bits=bits)
    torch_moe_metal.patch(model.to(device))
    return model


def prompt(length: int) -> torch.Tensor:
    """The same words twice, for prompt lookup."""
    half = torch.randint(2, 89, (1, length // 2), generator=torch.Generator().manual_seed(1))
    return torch.cat([half, half], 1)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("family", [family for family in SIZES if family not in RECURRENT])
def test_the_same_tokens(family: str, bits: int | None):
    """A draft that is mostly wrong, one that is mostly right (the model itself), and prompt lookup."""
    model, ids = fused(family, bits), prompt(30)
    want, forwards = generate(model, ids)
    assert forwards == TOKENS
    other = fused("qwen3_moe", bits, num_hidden_layers=1)
    assert generate(model, ids, assistant_model=other)[0] == want
    assert generate(model, ids, prompt_lookup_num_tokens=3)[0] == want
    found, forwards = generate(model, ids, assistant_model=fused(family, bits))
    assert found == want and forwards <= TOKENS / 2


@pytest.mark.parametrize("family", RECURRENT)
def test_the_same_tokens_of_recurrent_models(family: str):
    """transformers alone refuses drafts for them, since a recurrent state cannot go back."""
    model, ids = fused(family, None), prompt(30)
    want, _ = generate(model, ids)
    assert generate(model, ids, prompt_lookup_num_tokens=3)[0] == want
    assert generate(model, ids, assistant_model=fused("qwen3_moe", None, num_hidden_layers=1))[0] == want
    found, forwards = generate(model, ids, assistant_model=fused(family, None))
    assert found == want and forwards <= TOKENS / 2
    torch_moe_metal.unpatch(model)
    if type(model)._is_stateful:
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            generate(model, ids, prompt_lookup_num_tokens=3)


def test_a_cache_after_drafts():
    """It holds the accepted tokens, and a conversation continues from it without drafts and with others."""
    model, ids = fused("qwen3_5_moe_text", None), prompt(30)
    want, _ = generate(model, ids)
    longer = torch.cat([ids, torch.tensor([want])], 1)
    more, _ = generate(model, longer)
    for options in ({}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": fused("qwen3_5_moe_text", None)}):
        cache = DynamicCache(config=model.config)
        assert generate(model, ids, prompt_lookup_num_tokens=3, **with_cache(cache))[0] == want
        assert generate(model, longer, **with_cache(cache), **options)[0] == more


@pytest.mark.parametrize(("family", "bits"), [("qwen3_moe", 4), ("qwen3_5_moe_text", None), ("gpt_oss", None)])
def test_the_same_tokens_on_mps(mps: str, family: str, bits: int | None):
    model, ids = fused(family, bits, mps), prompt(30)
    want, _ = generate(model, ids)
    assert want == generate(fused(family, bits), ids)[0]
    assert generate(model, ids, prompt_lookup_num_tokens=3)[0] == want
    found, forwards = generate(model, ids, assistant_model=fused(family, bits, mps))
    assert found == want and forwards <= TOKENS / 2


# ------------------------------------------------------------------------------------- multi-token prediction


@pytest.fixture(params=["glm4_moe", "deepseek_v3"])
def checkpoint(request, tmp_path: Path, monkeypatch) -> Path:
    return drafting_checkpoint(request.param, tmp_path, monkeypatch)


def drafting_checkpoint(family: str, folder: Path, monkeypatch, **kinds: list[str]) -> Path:
    """Two layers, and a third one for multi-token prediction. transformers' classes find the layer by its number, which
    differs in the published models. kinds: of the three layers."""
    sizes = {"num_hidden_layers": 3, "moe_intermediate_size": 64, "tie_word_embeddings": False}
    model = tiny_model(family, **sizes, **kinds)
    tensors, H = checkpoints.original(model), model.config.hidden_size
    more = {
        "eh_proj": torch.randn(H, 2 * H) / 8,
        **dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), torch.ones(H)),
    }
    tensors |= {f"model.layers.2.{name}.weight": tensor.clone() for name, tensor in more.items()}
    model.config.num_hidden_layers, model.config.num_mtp_layers = 2, 1
    for name, of_layers in kinds.items():
        vars(model.config).update({name: of_layers[:2], f"mtp_{name}": of_layers[2:]})
    checkpoints.write(folder, model, tensors)
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    return folder


@pytest.fixture
def drafts(monkeypatch) -> list[tuple[MtpModel, list[int]]]:
    """The drafting models, and what was made."""
    found, stock = [], MtpModel.forward

    def forward(self, *args, **kwargs):
        output = stock(self, *args, **kwargs)
        found.append((self, output[0].tolist()))
        return output

    monkeypatch.setattr(MtpModel, "forward", forward)
    return found


def test_drafting_layers_are_fused(checkpoint: Path, drafts: list, device: str):
    model, ids = AutoModelForCausalLM.from_pretrained(checkpoint).to(device), prompt(12)
    want, _ = generate(model, ids, use_mtp=True)
    stock = [draft for _, draft in drafts]
    drafts.clear()
    torch_moe_metal.patch(model)
    assert generate(model, ids, use_mtp=True)[0] == want == generate(model, ids)[0]
    assert [draft for _, draft in drafts] == stock and stock
    layer = drafts[0][0].layers[0].mtp_block
    assert isinstance(layer, Fused) and isinstance(layer.mlp, Fused)


@pytest.mark.parametrize("way", ["while it is loaded", "in memory"])
def test_drafting_layers_are_packed(checkpoint: Path, drafts: list, way: str):
    """Once for all calls of `generate`; again after `unpatch` and `patch`."""
    config = MoeMetalConfig(bits=8, skip=["lm_head"])
    how = {"quantization_config": config} if way == "while it is loaded" else {}
    model, ids = AutoModelForCausalLM.from_pretrained(checkpoint, **how), prompt(12)
    if not how:
        torch_moe_metal.quantize_(model, bits=8, skip=["lm_head"])
    before = dict(model.state_dict())
    torch_moe_metal.patch(model)
    want, _ = generate(model, ids)
    for _ in range(2):
        assert generate(model, ids, use_mtp=True)[0] == want
    mtp = drafts[0][0]
    assert {id(model) for model, _ in drafts} == {id(mtp)}
    names = {name for name, _ in packed_modules(mtp.layers)}
    assert {"0.eh_proj", "0.mtp_block.mlp.experts", "0.mtp_block.self_attn.o_proj"} <= names
    assert isinstance(mtp.layers[0].mtp_block.mlp, Fused) and type(mtp.shared_head) is torch.nn.Linear
    assert model.state_dict().keys() == before.keys()
    torch_moe_metal.unpatch(model)
    assert generate(model, ids, use_mtp=True)[0] == want
    assert not any(isinstance(module, Fused) for module in drafts[-1][0].modules())


def test_drafts_for_a_recurrent_model(tmp_path: Path, drafts: list, monkeypatch):
    """transformers refuses drafts for such models, because their states cannot go back. Of these families, only Ling
    has drafting layers in transformers."""
    kinds = {"layer_types": ["linear_attention", *["full_attention"] * 2], "mlp_layer_types": ["sparse"] * 3}
    folder = drafting_checkpoint("bailing_hybrid", tmp_path, monkeypatch, **kinds)
    model, ids = AutoModelForCausalLM.from_pretrained(folder), prompt(12)
    torch_moe_metal.patch(model)
    want, _ = generate(model, ids)
    assert generate(model, ids, use_mtp=True)[0] == want and len(drafts) > TOKENS / 2
    assert isinstance(drafts[0][0].layers[0].mtp_block, Fused)


def test_drafts_of_a_packed_checkpoint_raise(tmp_path: Path):
    folder = checkpoints.fp8(tmp_path, "deepseek_v3")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with pytest.raises(ValueError, match=r"use_mtp: expected a dense checkpoint, .* packed as fp8"):
        generate(model, prompt(12), use_mtp=True)
