"""Layers that are replayed in one call: the same bits as without tapes, in every family and way of generating."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

import torch_moe_metal
from checks import assert_matches
from conftest import DEVICES, SIMULATED
from taped import WINDOW, Both, Conversation, fused, replays
from tiny_models import CONFIGS, tiny_model, tokens
from torch_moe_metal.transformers.fusing import attention_blocks, tape
from torch_moe_metal.transformers.fusing.layers import TapedLayer

RECURRENT = "its mixer keeps a recurrent state"
#: Why the layers of a family are not replayed, or None for a layer that is. All layers of the other families are.
REASONS: dict[str, list[str | None]] = {
    "mistral4": ["aten::div"] * 2,
    "laguna": ["aten::to"] * 2,
}
#: Families whose layers are not fused.
WITHOUT_LAYERS = {
    "flex_olmo",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "deepseek_ocr2",
    "unlimited_ocr",
    "dots3_note_text",
    "glm_moe_dsa",
    "hy_v4",
    "minimax_m3_vl_text",
    "llama4_text",
    "minimax",
    "jamba",
    "nemotron_h",
}


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def both(monkeypatch) -> Callable[..., Both]:
    return lambda model, **options: Both(model, monkeypatch, **options)


# ------------------------------------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("family", [each for each in CONFIGS if each.removesuffix("_thinker") in CONFIG_MAPPING])
def test_every_family(family: str, both, monkeypatch):
    """The reason why a family's layers are not replayed is listed, so none is lost in silence."""
    model = fused(family)
    layers = [module for module in model.modules() if isinstance(module, TapedLayer)]
    replayed = both(model).steps(5)
    monkeypatch.setattr(tape, "ENABLED", True)
    reasons = [tape.why_not_taped(layer) for layer in layers]
    assert reasons == REASONS.get(family, [None] * len(layers))
    assert replayed == 3 * reasons.count(None)
    assert bool(layers) == (family not in WITHOUT_LAYERS)


def test_the_report_says_what_is_not_replayed(monkeypatch):
    """At once if it is known, and an op that a tape cannot replay after it was met."""
    model = tiny_model("qwen3_next", hidden_act="gelu")  # so its mixers are not fused
    rows = {row.name: row.note for row in torch_moe_metal.patch(model).rows}
    assert rows["model.layers.0"] == f"not replayed: {RECURRENT}" and rows["model.layers.1"] == ""
    model = tiny_model("laguna")
    rows = {row.name: row.note for row in torch_moe_metal.patch(model).rows}
    assert rows["model.layers.1"] == ""
    conversation = Conversation(model)
    for _ in range(3):
        conversation.step()
    rows = {row.name: row.note for row in torch_moe_metal.patch(model).rows}
    assert rows["model.layers.1"] == "not replayed: aten::to"
    monkeypatch.setattr(tape, "ENABLED", False)
    assert "TORCH_MOE_METAL_TAPE is 0" in str(torch_moe_metal.patch(model))


@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 20])
def test_windows(prompt: int, both):
    """A window that fills while its layer is replayed."""
    assert both(fused("gpt_oss", **WINDOW), prompt=prompt).steps(20) >= 30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype, both):
    assert both(fused().to(dtype)).steps(6) == 8
    assert both(fused("gpt_oss", **WINDOW).to(dtype)).steps(6) == 8


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text"])
def test_packed_weights(family: str, both):
    shared = {"shared_expert_intermediate_size": 64} if family != "qwen3_moe" else {}
    model = tiny_model(family, moe_intermediate_size=64, max_position_embeddings=512, **shared)
    torch_moe_metal.quantize_(model, bits=4)
    torch_moe_metal.patch(model)
    assert both(model).steps(6) == 8


#: Sizes of DeepSeek V3 that packed formats take.
PACKED_LATENTS = dict.fromkeys(("kv_lora_rank", "q_lora_rank", "hidden_size", "moe_intermediate_size"), 64)
PACKED_LATENTS |= {"intermediate_size": 64, "qk_nope_head_dim": 48, "v_head_dim": 64}


@pytest.mark.parametrize("format", ["affine", "nvfp4", "fp8"])
def test_packed_latents(format: str, both, monkeypatch):
    """The expansion of latents is dequantised once, and not for each token."""
    counted, stock = [], attention_blocks.dequantized
    monkeypatch.setattr(attention_blocks, "dequantized", lambda *args: counted.append(1) or stock(*args))
    model = tiny_model("deepseek_v3", **PACKED_LATENTS)
    torch_moe_metal.quantize_(model, format)
    expected = Conversation(model)
    torch_moe_metal.patch(model)
    assert both(model).steps(5) == 6
    assert len(counted) == 2
    found = Conversation(model)
    for _ in range(3):
        logits = found.step()
    torch_moe_metal.unpatch(model)
    for _ in range(3):
        wanted = expected.step()
    assert_matches([logits], [wanted], roundings=10)


def test_the_expansion_of_latents_follows_its_weight():
    attention = fused("deepseek_v3").model.layers[0].self_attn

    def keys(dtype: torch.dtype) -> Tensor:
        return attention.expansions(torch.zeros(1, dtype=dtype))[0]["weight"]

    before, weight = keys(torch.float32).clone(), attention.kv_b_proj.weight
    weight.mul_(2)
    assert torch.equal(keys(torch.float32), before * 2)
    attention.bfloat16()
    assert torch.equal(keys(torch.bfloat16), (before * 2).bfloat16())


def test_on_each_device(device, both):
    assert both(fused("qwen3_moe", device)).steps(5) == 6
    assert both(fused("gpt_oss", device, **WINDOW), prompt=7).steps(5) >= 6
    assert both(fused("qwen3_5_moe_text", device)).steps(5) == 6


@pytest.mark.slow
def test_gemma4_on_each_device(device, both):
    assert both(fused("gemma4_text", device)).steps(4) == 4


def dispatches(call: Callable[[], object]) -> list[tuple]:
    """What was encoded, apart from the addresses of buffers."""
    import metal_sim

    with metal_sim.record() as record:
        call()

    def bound(kernel: str, argument: dict) -> tuple:
        params = argument.get("bytes") or ""
        if kernel.startswith("glu"):
            params = params[: 2 * 84]  # of GluParams' 88 bytes the last four are padding
        return argument["index"], argument.get("offset"), params

    return [
        (each.kernel, each.grid, each.threads, [bound(each.kernel, argument) for argument in each.arguments])
        for each in record.dispatches
    ]


@pytest.mark.skipif(not SIMULATED or "mps" not in DEVICES, reason="a Mac's own Metal does not record")
@pytest.mark.parametrize(("family", "batch"), [("qwen3_moe", 1), ("deepseek_v3", 3)])
def test_the_same_dispatches(family: str, batch: int, both):
    """Each replayed dispatch is the one that the layer's code encodes: kernel, grid, offsets and params."""
    conversation = both(fused(family, "mps"), batch=batch)
    conversation.steps(3)
    found, expected = (
        dispatches(lambda on=on, each=each: conversation.of(on, each.step))
        for on, each in zip((True, False), conversation.pair, strict=True)
    )
    assert [each[0] for each in found].count("rope_float") == 2
    assert found == expected


def test_padding(both):
    """A mask that is one column longer with each token."""
    model = fused()
    conversation = both(model, batch=3)
    for length in range(7, 14):
        mask = torch.ones(3, length, dtype=torch.long)
        mask[0, :3] = mask[1, :1] = 0
        conversation.step(attention_mask=mask)
    assert conversation.replayed == 10
    conversation.step()  # without a mask the layer is recorded again
    assert conversation.steps(4) > 4


def test_padded_prompts(monkeypatch):
    model, found = fused(), []
    ids, mask = tokens(3, 7), torch.ones(3, 7, dtype=torch.long)
    mask[0, :4] = mask[2, :1] = 0
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0, "do_sample": False}
    for on, expected in ((True, 2 * 5), (False, 0)):
        monkeypatch.setattr(tape, "ENABLED", on)
        assert replays(lambda: found.append(model.generate(ids, attention_mask=mask, **options))) == expected
    assert torch.equal(*found)


def test_a_large_batch_does_not_keep_others_from_being_replayed(both):
    model = fused()
    assert both(model, batch=9).steps(4) == 0
    assert both(model).steps(4) == 4


@pytest.mark.parametrize("positions", [[20, 9, 300, 7, 8], [7, 7, 7, 7, 7]])
def test_positions_that_are_given(positions: list[int], both):
    conversation = both(fused())
    for position in positions:
        conversation.step(position_ids=torch.tensor([[position]]))
    assert conversation.replayed == 6


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "linear", "factor": 2.0},
    ],
)
def test_angles_that_depend_on_the_length(rope: dict, both):
    model = fused(rope_parameters=rope | {"rope_theta": 1e4}, max_position_embeddings=16)
    assert both(model, prompt=10).steps(14) == 24


def test_other_arguments(both):
    """A tensor that a layer gets may differ with each token, so its code runs."""
    conversation = both(fused())
    assert conversation.steps(5, some_lengths=torch.arange(3)) == 0
    assert conversation.steps(4, some_number=3) == 4


def test_outputs_are_never_written_again(both, monkeypatch):
    """Those of the recorded token too, whoever keeps them."""
    kept, model = [], fused()
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: kept.append((output, output.clone())))
    conversation = Conversation(model)
    assert replays(lambda: [conversation.step() for _ in range(8)]) == 12
    assert all(torch.equal(output, copied) for output, copied in kept)


# ------------------------------------------------------------------------------------------------ ways of generating

WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 5},
    "beams": {"num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "guidance": {"guidance_scale": 1.5},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "pieces": {"prefill_chunk_size": 3},
    "static": {"cache_implementation": "static"},
    "hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "weights": {"output_attentions": True, "return_dict_in_generate": True},
}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_5_moe_text"])
def test_generate(family: str, how: str, monkeypatch):
    model, found = fused(family, **(WINDOW if family == "gpt_oss" else {})), []
    for on in (True, False):
        monkeypatch.setattr(tape, "ENABLED", on)
        torch.manual_seed(0)
        output = model.generate(tokens(1, 7), max_new_tokens=12, min_new_tokens=12, pad_token_id=0, **WAYS[how])
        found.append(getattr(output, "sequences", output))
    assert torch.equal(*found)


def test_drafts_record_a_layer_once(monkeypatch):
    """An assistant generates a few tokens in each round, with the same cache."""
    model, assistant = fused(), fused(num_hidden_layers=1)
    recorded, stock = [], tape.LayerTape.recorded
    monkeypatch.setattr(tape.LayerTape, "recorded", lambda *args: recorded.append(1) or stock(*args))
    found = model.generate(tokens(1, 7), assistant_model=assistant, max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert len(recorded) <= 3
    monkeypatch.setattr(tape, "ENABLED", False)
    assert torch.equal(found, model.generate(tokens(1, 7), max_new_tokens=30, do_sample=False, pad_token_id=0))


def test_memory_that_grows_keeps_the_tape(both, monkeypatch):
    recorded, stock = [], tape.LayerTape.recorded
    monkeypatch.setattr(tape.LayerTape, "recorded", lambda *args: recorded.append(1) or stock(*args))
    assert both(fused(num_hidden_layers=1)).steps(450) == 448
    assert len(recorded) == 1
