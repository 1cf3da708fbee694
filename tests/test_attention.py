"""`attn_implementation="moe_metal"`, and how `patch` selects it."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

import torch_moe_metal
from checks import relative
from tiny_models import eager, tiny_model, tokens
from torch_moe_metal import reference
from torch_moe_metal.grad import warned
from torch_moe_metal.transformers.fusing import attention
from torch_moe_metal.transformers.fusing.attention import (
    FEW_QUERIES,
    MOST_KEYS_OF_MPSGRAPH,
    attention_forward,
    attention_mask,
    is_for_pytorch,
)
from torch_moe_metal.transformers.versions import cache_of, with_cache


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def with_attention(family: str, implementation: str, device: str = "cpu", **changes):
    model = tiny_model(family, device, **changes)
    model.set_attn_implementation(implementation)
    return model


def logits(model, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits of all tokens: the first ones together, three more together, and the rest one by one."""
    cache, found, first = None, [], 0
    for end in (ids.shape[1] - 6, ids.shape[1] - 3, *range(ids.shape[1] - 2, ids.shape[1] + 1)):
        output = model(ids[:, first:end], attention_mask=mask[:, :end], **with_cache(cache), use_cache=True)
        cache, first = cache_of(output), end
        found.append(output.logits)
    return torch.cat(found, 1)


FAMILIES = ["qwen3_moe", "gpt_oss", "gemma4_text", "deepseek_v3"]


@pytest.mark.parametrize("prompt", [9, FEW_QUERIES + 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_with_padding(family: str, prompt: int, device: str):
    """Equal to eager attention. A window of 8 is shorter than the prompt, and heads share keys."""
    changes = {"sliding_window": 8} if family in ("gpt_oss", "gemma4_text") else {}
    ids = tokens(2, prompt, device=device)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0  # left padding
    want = logits(with_attention(family, "eager", device, **changes), ids, mask)
    got = logits(with_attention(family, "moe_metal", device, **changes), ids, mask)
    seen = mask.bool()
    assert relative(got[seen], want[seen]) <= 1e-5


MANY, LONG = FEW_QUERIES + 1, MOST_KEYS_OF_MPSGRAPH + 1


@pytest.mark.parametrize("T, S, D, V, mask, on_mps, elsewhere", [
    (FEW_QUERIES, LONG, 128, 128, None, False, False),
    (MANY, LONG - 1, 192, 128, None, True, True),
    (MANY, LONG, 192, 128, None, False, True),
    (MANY, LONG, 512, 512, None, False, True),
    (MANY, LONG, 128, 64, None, False, True),
    (MANY, LONG, 128, 128, None, True, True),
    (MANY, LONG, 128, 128, torch.bool, True, True),
    (MANY, LONG, 128, 128, torch.float32, False, True),
])  # fmt: skip
def test_who_computes_many_queries(T: int, S: int, D: int, V: int, mask, on_mps: bool, elsewhere: bool, device: str):
    """On mps PyTorch only where it does not use MPSGraph, whose sums over many keys are wrong on M1 and M2."""
    one = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, device=device)
    mask = None if mask is None else one.to(mask).expand(1, 1, T, S)
    states = one.expand(1, 4, T, D), one.expand(1, 2, S, D), one.expand(1, 2, S, V)
    assert is_for_pytorch(*states, mask) == (on_mps if device == "mps" else elsewhere)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_long_prompts_on_mps(family: str, mps: str, monkeypatch):
    """Heads of other sizes than PyTorch's kernels take."""

    def refused(*_args, **_options):
        raise AssertionError

    ids = tokens(1, FEW_QUERIES + 7, device=mps)
    want = with_attention(family, "eager", mps)(ids).logits
    monkeypatch.setattr(attention, "MOST_KEYS_OF_MPSGRAPH", FEW_QUERIES)
    monkeypatch.setattr(attention, "sdpa_attention_forward", refused)
    model = with_attention(family, "moe_metal", mps)
    assert relative(model(ids).logits, want) <= 1e-5
    torch_moe_metal.patch(model)
    assert relative(model(ids).logits, want) <= 1e-5


#: Families whose attention `patch` fuses in a way of its own: gates, norms after the rotation, layers without rope,
#: scaled queries and values.
PATCHED = ("qwen3_next", "llama4_text", "mimo_v2_flash", "hunyuan_v1_moe", "laguna", "kimi_linear", "bailing_hybrid")
PATCHED += ("flint", "jamba", "mistral4", "qwen3_5_moe_text", "deepseek_v2", "glm4_moe_lite")


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("family", PATCHED)
def test_patched_attention(family: str, packed: bool, device: str):
    """As eager attention's, with left padding, in prompts and single tokens. unpatch restores all bits."""
    model = eager(tiny_model(family, device))
    if packed:
        torch_moe_metal.quantize_(model, bits=8, group_size=16)
    ids = tokens(2, 11, device=device)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    implementation, before = model.config._attn_implementation, copy.deepcopy(model.state_dict())
    model.set_attn_implementation("eager")
    want = logits(model, ids, mask)
    model.set_attn_implementation(implementation)
    report = torch_moe_metal.patch(model)
    assert any(row.name.endswith("self_attn") and row.state == "fused" for row in report.rows)
    seen = mask.bool()
    assert relative(logits(model, ids, mask)[seen], want[seen]) <= 1e-5
    torch_moe_metal.unpatch(model)
    model.set_attn_implementation("eager")
    assert torch.equal(logits(model, ids, mask)[seen], want[seen])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("seen", ["all", "window of 6", "window of 5", "chunks of 6"])
def test_mask_of_one_token(seen: str):
    """transformers' result for six keys, the third to the eighth, and for all keys, including those of the padding.
    A window of 6 keeps all six; one of 5 does not, and chunks of 6 start again with the seventh."""
    size, function = None, causal_mask_function
    if seen != "all":
        size = int(seen[-1])
        window, chunks = sliding_window_causal_mask_function, chunked_causal_mask_function
        function = window(size) if "window" in seen else chunks(size, torch.zeros(2, dtype=int))
    padding = torch.tensor([[False, False, False, True, True, True, True, True], [True] * 8])
    config = SimpleNamespace(attention_chunk_size=size if "chunks" in seen else None)
    given = {"mask_function": function, "attention_mask": padding, "local_size": size, "config": config}
    given |= {"batch_size": 2, "q_length": 1, "kv_length": 6, "q_offset": 7, "kv_offset": 2}
    got = attention_mask(**given)
    assert torch.equal(got, sdpa_mask(**given, allow_is_causal_skip=False))
    same_memory = got.untyped_storage().data_ptr() == padding.untyped_storage().data_ptr()
    assert same_memory == (seen in ("all", "window of 6"))


@pytest.mark.parametrize("family", FAMILIES)
def test_patch_selects_it(family: str):
    """Instead of transformers' choice, which unpatch restores."""
    model = tiny_model(family)
    before = model.config._attn_implementation
    torch_moe_metal.patch(model)
    torch_moe_metal.patch(model)
    assert model.config._attn_implementation == "moe_metal"
    assert "moe_metal" not in str(model.config.to_dict())
    torch_moe_metal.unpatch(model.model)
    assert model.config._attn_implementation == before


def test_patch_keeps_a_selected_implementation():
    model = with_attention("qwen3_moe", "eager")
    torch_moe_metal.patch(model)
    assert model.config._attn_implementation == "eager"
    later = tiny_model("qwen3_moe")
    torch_moe_metal.patch(later)
    later.set_attn_implementation("sdpa")
    torch_moe_metal.unpatch(later)
    assert later.config._attn_implementation == "sdpa"


def test_patch_ignores_vision_towers():
    model = tiny_model("qwen3_vl_moe")
    torch_moe_metal.patch(model)
    assert model.config.text_config._attn_implementation == "moe_metal"
    assert model.config.vision_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_output_attentions(family: str):
    ids = tokens(2, 5)
    want = with_attention(family, "eager")(ids, output_attentions=True)
    got = with_attention(family, "moe_metal")(ids, output_attentions=True)
    assert len(got.attentions) == len(want.attentions) == 2
    for ours, stock in zip(got.attentions, want.attentions, strict=True):
        assert relative(ours, stock) <= 1e-5
    assert relative(got.logits, want.logits) <= 1e-5


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_gradients_flow(family: str):
    """Through PyTorch's own attention."""
    ids, found = tokens(1, 5), []
    for implementation in ("eager", "moe_metal"):
        model = with_attention(family, implementation).requires_grad_(True)
        with torch.enable_grad():
            model(ids, labels=ids).loss.backward()
        found.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    assert relative(found[1], found[0]) <= 1e-4


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_falls_back_with_one_warning(family: str):
    warned.clear()
    module = tiny_model(family).model.layers[0].self_attn.double()
    q, k, v = (torch.randn(1, heads, 5, 16, dtype=torch.float64) for heads in (4, 2, 2))
    sinks = {"s_aux": module.sinks} if family == "gpt_oss" else {}
    with pytest.warns(UserWarning, match="runs on PyTorch's attention, since .*torch.float64") as said:
        got, again = (attention_forward(module, q, k, v, None, scaling=0.25, **sinks)[0] for _ in range(2))
    assert len(said) == 1 and torch.equal(got, again)
    want = reference.attention(q, k, v, sinks=module.sinks if sinks else None, scale=0.25, causal=True)
    assert relative(got, want) <= 1e-12


def test_a_position_bias_is_applied():
    warned.clear()
    module = tiny_model("qwen3_moe").model.layers[0].self_attn
    q, k, v = (torch.randn(1, heads, 4, 16) for heads in (4, module.k_proj.out_features // 16, 2))
    bias = torch.randn(1, 4, 4, 4)
    with pytest.warns(UserWarning, match="position_bias is given"):
        got, _ = attention_forward(module, q, k, v, None, position_bias=bias, is_causal=False)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    assert relative(got, want.transpose(1, 2)) <= 1e-5


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_generation_modes(family: str):
    """With a static cache, beam search, and candidates from the prompt: a few queries at a time."""
    ids = tokens(2, 7)
    ids[1, :3] = 0
    options = {"attention_mask": (ids != 0).long(), "max_new_tokens": 12, "do_sample": False}
    ways = [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 4}]
    for way in ways:
        prompt = ids[:1] if "prompt_lookup_num_tokens" in way else ids
        given = options | {"attention_mask": (prompt != 0).long()} | way
        want = with_attention(family, "eager").generate(prompt, **given)
        got = with_attention(family, "moe_metal").generate(prompt, **given)
        assert got.tolist() == want.tolist(), way
