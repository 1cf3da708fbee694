"""`generate_batch` with patched and packed models. It treats all requests as one sequence with a paged cache:
transformers' own attention computes steps with prompts, and ours, request by request, those without."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

import torch_moe_metal
from tiny_models import FAMILIES, SAME_CODE, tiny_model, tokens
from torch_moe_metal.transformers import quantize_

NEW_TOKENS = 8
GREEDY = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
#: Models that transformers' paged cache does not support, and its error. The first three raise before anything runs.
NOT_PAGED = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text", "jamba", "kimi_linear", "bailing_hybrid"), "linear_attention"),
    **dict.fromkeys(("granitemoehybrid", "lara_mini"), "linear_attention"),
    "lfm2_moe": "conv",
    "llama4_text": "chunked_attention",
    "unlimited_ocr": "reference_sliding_attention",
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mimo_v2_flash", "mistral4", "sarvam_mla"), "slice shapes"
    ),  # keys and values
}
FAST = ("qwen3_moe", "gpt_oss")
FORMATS = [(None, None), ("affine", 4), ("affine", 8), ("mxfp4", None), ("fp8", None)]

Tokens = list[list[int]]


def make(family: str, format: str | None = None, bits: int | None = None, device: str = "cpu"):
    model = tiny_model(family, **({} if format is None else {"intermediate_size": 64}))  # whole groups
    model.generation_config.eos_token_id = None
    if format is not None:
        sizes = {"bits": bits, "group_size": 32} if format == "affine" else {}
        quantize_(model, format, **sizes)
    model.to(device)
    assert torch_moe_metal.patch(model)["fused"]
    return model


def prompts(*lengths: int) -> Tokens:
    return [tokens(1, length, seed=length)[0].tolist() for length in lengths]


def one_after_the_other(model, of: Tokens) -> Tokens:
    def answer(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt], device=model.device)
        limits = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **limits)[0, len(prompt) :].tolist()

    return [answer(prompt) for prompt in of]


def together(model, of: Tokens, **options) -> Tokens:
    config = ContinuousBatchingConfig(**{"page_size": 16, "num_blocks": 32, "max_batch_tokens": 64} | options)
    answers = model.generate_batch(of, generation_config=GREEDY, continuous_batching_config=config, warmup=False)
    for answer in answers.values():
        if answer.error is not None:
            raise ValueError(answer.error)
    return [answer.generated_tokens for answer in answers.values()]


def check(model, *lengths: int) -> None:
    """With prompts shorter and longer than a page, and together longer than a step."""
    of = prompts(*lengths or (5, 21, 60))
    before = implementations(model)
    expected = one_after_the_other(model, of)
    assert together(model, of) == expected
    assert implementations(model) == before
    assert one_after_the_other(model, of[:1]) == expected[:1]


def implementations(model) -> list[str]:
    return [part.config._attn_implementation for part in model.modules() if hasattr(part, "config")]


@pytest.mark.parametrize("family", FAST)
def test_families(family: str):
    check(make(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*FAMILIES, *SAME_CODE} - {*FAST, *NOT_PAGED}))
def test_more_families(family: str):
    check(make(family))


@pytest.mark.parametrize(
    "family",
    [
        each if each in ("qwen3_next", "deepseek_v3") else pytest.param(each, marks=pytest.mark.slow)
        for each in NOT_PAGED
        if each in FAMILIES | SAME_CODE
    ],
)
def test_families_without_a_paged_cache_generate(family: str):
    """transformers raises for them, patched or not."""
    model, of = make(family), prompts(5)
    before, expected = implementations(model), one_after_the_other(model, of)
    with pytest.raises(ValueError, match=NOT_PAGED[family]):
        together(model, of)
    assert implementations(model) == before
    assert one_after_the_other(model, of) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral", "olmoe", "glm4_moe"])
@pytest.mark.parametrize(("format", "bits"), FORMATS[1:])
def test_formats(family: str, format: str, bits: int | None):
    check(make(family, format, bits))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "format", "bits"),
    [("qwen3_moe", None, None), ("qwen3_moe", "affine", 4), ("gpt_oss", "mxfp4", None), ("mixtral", "affine", 8)],
)
def test_on_mps(mps: str, family: str, format: str | None, bits: int | None):
    check(make(family, format, bits, mps), 5, 21)


@pytest.mark.parametrize("family", FAST)
def test_our_attention_computes_steps_without_prompts(family: str, monkeypatch):
    """In each layer once for each request, with as many keys as it sees. A step with a prompt is left to
    transformers."""
    model, steps = make(family), []
    step = ContinuousBatchProcessor._generation_step

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.moe_metal.attention.default:
                steps[-1].append(args[1].shape[2])
            return function(*args, **(kwargs or {}))

    def observed(self, model) -> None:
        assert model.config._attn_implementation != "moe_metal"
        steps.append([])
        with Seen():
            step(self, model)

    monkeypatch.setattr(ContinuousBatchProcessor, "_generation_step", observed)
    together(model, prompts(5, 21))
    assert model.config._attn_implementation == "moe_metal" and not any("is_paged" in vars(m) for m in model.modules())
    layers, window = model.config.num_hidden_layers, getattr(model.config, "sliding_window", None)
    first, *others = steps
    assert not first and len(others) >= NEW_TOKENS - 1
    for i, seen in enumerate(others[: NEW_TOKENS - 1]):
        assert sorted(seen)[-layers:] == [21 + i + 1] * layers if window is None else len(seen) == 2 * layers


def test_the_users_attention_computes_everything(monkeypatch):
    model = make("qwen3_moe")
    model.set_attn_implementation("sdpa")
    expected = one_after_the_other(model, prompts(5, 21))
    monkeypatch.setattr(torch.ops.moe_metal, "attention", None)
    assert together(model, prompts(5, 21)) == expected


def test_requests_share_the_pages_of_a_prefix(monkeypatch):
    """The second request shares the three pages of the first one's prompt, and only the rest is computed."""
    found, search = [], PagedAttentionCache.search_prefix_match

    def observed(self, *arguments) -> int:
        found.append(search(self, *arguments))
        return found[-1]

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", observed)
    model, (prefix, *ends) = make("qwen3_moe"), prompts(48, 3, 5)
    of = [prefix + end for end in ends]
    expected = one_after_the_other(model, of)
    assert together(model, of, max_batch_tokens=53) == expected  # one prompt in each step
    assert sorted(found) == [0, 48]
