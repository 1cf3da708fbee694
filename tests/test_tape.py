"""Layers that are replayed in one call: the same bits as without tapes, in every way of generating, and no tape
outlives what it was recorded from."""

import copy
import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, DynamicCache, StaticCache

import torch_moe_metal
from checks import assert_matches
from conftest import DEVICES, SIMULATED
from tiny_models import CONFIGS, tiny_model, tokens
from torch_moe_metal.transformers import restore, snapshot
from torch_moe_metal.transformers.fusing import attention_blocks, tape
from torch_moe_metal.transformers.fusing.layers import TapedLayer
from torch_moe_metal.transformers.fusing.linear_cache import GrowingLinearLayer
from torch_moe_metal.transformers.versions import cache_of, with_cache

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
#: Layers that are taped in one of these families, and the window.
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=[True, False], ids=["tape", "no tape"])
def taped(request, monkeypatch) -> bool:
    monkeypatch.setattr(tape, "ENABLED", request.param)
    return request.param


def fused(family: str = "qwen3_moe", device: str = "cpu", **changes) -> nn.Module:
    model = tiny_model(family, device, **{"max_position_embeddings": 512} | changes)
    torch_moe_metal.patch(model)
    return model


def replays(call: Callable[[], object]) -> int:
    """How many layers were replayed while it ran."""
    count, stock = 0, tape.LayerTape.replayed

    def counted(self, *arguments):
        nonlocal count
        output = stock(self, *arguments)
        count += output is not None
        return output

    tape.LayerTape.replayed = counted
    try:
        call()
    finally:
        tape.LayerTape.replayed = stock
    return count


class Conversation:
    """A model and a cache, which gets tokens one at a time. Every other model has no tapes."""

    def __init__(self, model: nn.Module, prompt: int = 6, batch: int = 1):
        self.model, self.random = model, torch.Generator().manual_seed(prompt)
        self.cache = cache_of(model(self.tokens(batch, prompt)))
        self.batch = batch

    def tokens(self, *size: int) -> Tensor:
        return torch.randint(2, 89, size, generator=self.random).to(self.model.device)

    def step(self, **more) -> Tensor:
        return self.model(self.tokens(self.batch, 1), **with_cache(self.cache), **more).logits


class Both:
    """The same conversation with tapes and without."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch, **options):
        self.monkeypatch, self.model = monkeypatch, model
        self.pair = [self.of(on, lambda: Conversation(model, **options)) for on in (True, False)]
        self.replayed = 0

    def of(self, on: bool, call: Callable):
        self.monkeypatch.setattr(tape, "ENABLED", on)
        return call()

    def step(self, **more) -> None:
        found = []
        self.replayed += replays(lambda: found.append(self.of(True, lambda: self.pair[0].step(**more))))
        expected = self.of(False, lambda: self.pair[1].step(**more))
        assert torch.equal(found[0], expected)

    def steps(self, count: int, **more) -> int:
        """Returns how many layers were replayed."""
        self.replayed = 0
        for _ in range(count):
            self.step(**more)
        return self.replayed

    def change(self, change: Callable) -> None:
        for each in self.pair:
            change(each)


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


# ------------------------------------------------------------------------------------------------ changes in between


def crop(conversation: Conversation, count: int) -> None:
    conversation.cache.crop(-count)


def reorder(conversation: Conversation) -> None:
    conversation.cache.reorder_cache(torch.tensor([1, 0]))


def assign(conversation: Conversation) -> None:
    for layer in conversation.cache.layers:
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()


def several(conversation: Conversation) -> None:
    ids = torch.tensor([[5, 6, 7]]).expand(conversation.batch, -1)
    conversation.model(ids, **with_cache(conversation.cache))


def copied(conversation: Conversation) -> None:
    conversation.cache = copy.deepcopy(conversation.cache)


BETWEEN = [
    lambda each: crop(each, 1),
    lambda each: crop(each, 0),
    lambda each: crop(each, 3),
    reorder,
    assign,
    several,
    copied,
]


@pytest.mark.parametrize("seed", range(12))
def test_changes_of_the_cache(seed: int, both):
    """Between any two tokens, in random order."""
    choose, conversation = random.Random(seed), both(fused(), batch=2)
    for _ in range(12):
        conversation.steps(choose.randint(1, 5))
        conversation.change(choose.choice(BETWEEN))
    assert conversation.steps(6) >= 4


# ------------------------------------------------------------------------------------------------ recurrent states


def linear_layer(conversation: Conversation) -> GrowingLinearLayer:
    return conversation.cache.layers[0]


def new_state(conversation: Conversation) -> None:
    states = linear_layer(conversation).recurrent_states
    states[0] = states[0] * 0.5


def new_inputs(conversation: Conversation) -> None:
    states = linear_layer(conversation).conv_states
    states[0] = states[0] * 0.5


def state_in_place(conversation: Conversation) -> None:
    linear_layer(conversation).recurrent_states[0].mul_(0.5)


def select(conversation: Conversation) -> None:
    conversation.cache.batch_select_indices(torch.tensor([1, 0]))


def there_and_back(conversation: Conversation) -> None:
    """Tokens that a snapshot takes back, one of them with the tape."""
    kept = snapshot(conversation.cache)
    several(conversation)
    conversation.model(torch.full((conversation.batch, 1), 7), **with_cache(conversation.cache))
    restore(conversation.cache, kept)


def reset(conversation: Conversation) -> None:
    conversation.cache.reset()
    several(conversation)


STATES = [reorder, several, copied, new_state, new_inputs, state_in_place, select, there_and_back, reset]


@pytest.mark.parametrize("seed", range(8))
def test_changes_of_a_recurrent_cache(seed: int, both):
    choose, conversation = random.Random(seed), both(fused("qwen3_5_moe_text"), batch=2)
    for _ in range(10):
        conversation.steps(choose.randint(1, 5))
        conversation.change(choose.choice(STATES))
    assert conversation.steps(6) >= 4


def test_rows_of_a_recurrent_cache_in_new_memory(both, monkeypatch):
    """It is replaced twice. The tape stays, but for the tokens that need new memory."""
    recorded, stock = [], tape.LayerTape.recorded
    monkeypatch.setattr(tape.LayerTape, "recorded", lambda *args: recorded.append(1) or stock(*args))
    replayed = both(fused("qwen3_5_moe_text")).steps(140)
    assert replayed == 2 * 138 - 2
    assert len(recorded) == 2


def test_tokens_that_can_be_cropped(both):
    """As on mps, where `generate` crops after each token whether or not it takes the last one back."""
    conversation = both(fused("qwen3_5_moe_text"), batch=2)
    conversation.steps(2)
    conversation.change(lambda each: each.cache.activate_past_recording())
    for count in (0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0):
        conversation.step()
        conversation.change(lambda each, count=count: crop(each, count))
    assert conversation.replayed >= 8
    conversation.steps(3)  # without a crop the log is longer with each token
    conversation.change(several)
    conversation.steps(4)


def test_padded_prompts_of_recurrent_layers(monkeypatch):
    model, ids = fused("qwen3_5_moe_text"), tokens(3, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :1] = 0
    found = []
    for on in (True, False):
        monkeypatch.setattr(tape, "ENABLED", on)
        options = {"attention_mask": mask, "max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
        replayed = replays(lambda options=options: found.append(model.generate(ids, pad_token_id=0, **options)))
        assert bool(replayed) == on
    assert torch.equal(*found)


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
