"""`warm_up` compiles the kernels of a model's first calls in the background, and has no other effect."""

import gc
import time
from pathlib import Path

import pytest
import torch

import torch_moe_metal
from conftest import DEVICES, SIMULATED
from simulated import lines_of
from tiny_models import tiny_model
from torch_moe_metal import nn, warmup

pytestmark = pytest.mark.skipif(
    not SIMULATED or "mps" not in DEVICES, reason="only the simulated Metal reports what was compiled"
)

SIZES = {"hidden_size": 64, "inner_size": 32, "num_experts": 8, "top_k": 2}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists the parts that warm-up was started for, as in a new process without MOE_METAL_WARM_UP."""
    monkeypatch.delenv(warmup.SWITCH, raising=False)
    monkeypatch.setattr(warmup, "_known", set())
    names = []
    meta_copy = warmup.meta_copy
    monkeypatch.setattr(warmup, "meta_copy", lambda part: names.append(type(part).__name__) or meta_copy(part))
    return names


def made() -> tuple[int, int]:
    """The number of libraries and pipelines so far."""
    import metal_sim

    objects = metal_sim.made_objects()
    return objects.get("MTLLibrary", 0), objects.get("MTLComputePipelineState", 0)


def parts(names: list[str]) -> list[str]:
    """Without the names of modules inside of them."""
    return [name for name in names if name == "MoE"]


# ------------------------------------------------------------------------------------------------ what is compiled

COUNTED = """
del os.environ["MOE_METAL_WARM_UP"]
from test_warmup import made
from tiny_models import tiny_model, tokens
from torch_moe_metal import nn
"""


@pytest.mark.slow
def test_kernels_of_a_first_token() -> None:
    """The first token of a Qwen3-30B-A3B layer needs one library per shader, and a pipeline for each dispatch. The
    prompt before it, and its warm-up, may compile more."""
    script = """
sizes = {"x": (1, 2048), "router": (128, 2048), "gate_up": (128, 1536, 2048), "down": (128, 2048, 768), "norm": (2048,)}
with metal_sim.host_only(), metal_sim.record() as record:
    x, router, gate_up, down, norm = (
        torch.empty(size, dtype=torch.bfloat16, device="mps") for size in sizes.values()
    )
    x, residual = torch_moe_metal.residual_norm(x, x, norm)
    weights, ids = torch_moe_metal.gate(x, router, top_k=8)
    torch_moe_metal.experts(x, weights, ids, gate_up, down, residual=residual)
print(*made(), len(record.dispatches), len({*record.kernels}))
"""
    assert lines_of(COUNTED + script) == ["4 5 5 5"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("families", "use"),
    [
        (("qwen3_moe", "gpt_oss", "gemma4_text", "llama4_text"), "torch_moe_metal.patch(model)"),
        (("qwen3_moe", "gpt_oss"), 'model.set_experts_implementation("moe_metal")'),
    ],
    ids=["patch", "experts_implementation"],
)
def test_a_warm_model_compiles_no_more(families: tuple[str, ...], use: str) -> None:
    """After warm-up neither a prompt nor single tokens compile anything."""
    script = f"""
for family in {families}:
    model, cold = tiny_model(family, "mps"), made()
    {use}
    torch_moe_metal.warm_up(model, wait=True)
    warm = made()
    with metal_sim.record() as record:
        cache = model(tokens(1, 40, device="mps")).past_key_values
        for _ in range(4):  # the last ones are replayed
            model(tokens(1, 1, device="mps"), past_key_values=cache)
    print(family, warm > cold, made() == warm, len(record.dispatches) > 5)
"""
    lines = lines_of(COUNTED + script)
    assert len(lines) == len(families) and all(line.endswith(" True True True") for line in lines), lines


@pytest.mark.slow
def test_a_layer_compiles_no_more() -> None:
    """Dense with a shared expert, packed, and layers with packed weights."""
    script = f"""
def check(module, *inputs):
    torch_moe_metal.warm_up(module, wait=True)
    warm = made()
    with torch.no_grad():
        for x in inputs:
            module(x)
    print(made() == warm, warm)

options = {{"dtype": torch.bfloat16, "device": "mps"}}
inputs = [torch.ones(T, 64, **options) for T in (1, 3, 40, 200)]
moe = nn.MoE(**{SIZES}, shared_size=32, shared_gate=True, **options)
check(moe, *inputs)
check(moe.quantize_("affine", 4, 32), *inputs)
check(nn.Linear(64, 32, bias=False, bits=8, group_size=32, **options), *inputs)
check(nn.Embedding(64, 32, bits=8, group_size=32, **options), torch.arange(5, device="mps"))
"""
    lines = lines_of(COUNTED + script)
    assert [line.split()[0] for line in lines] == ["True"] * 4
    assert len({*lines}) == 4  # each of them compiled something


# ------------------------------------------------------------------------------------------------ what starts it


def test_what_starts_warm_up(started: list[str]) -> None:
    moe = nn.MoE(**SIZES)
    assert not started
    moe.to("mps")
    assert parts(started) == ["MoE"]
    moe.to(torch.float16)
    assert parts(started) == ["MoE"] * 2
    nn.MoE(**SIZES, dtype=torch.bfloat16, device="mps")
    assert parts(started) == ["MoE"] * 3
    moe.quantize_("mxfp4")
    assert parts(started) == ["MoE"] * 4
    torch_moe_metal.warm_up(moe, wait=True)  # already warmed up
    assert parts(started) == ["MoE"] * 4


def test_equal_parts_are_warmed_up_once(started: list[str]) -> None:
    torch.nn.Sequential(*(nn.MoE(**SIZES) for _ in range(5))).to("mps")
    assert parts(started) == ["MoE"]


def test_patch_starts_it_only_on_mps(started: list[str]) -> None:
    model = tiny_model("qwen3_moe", "cpu")
    torch_moe_metal.patch(model)
    assert not started
    torch_moe_metal.unpatch(model)
    torch_moe_metal.patch(model.to("mps"))
    assert {"Qwen3MoeDecoderLayer", "Qwen3MoeSparseMoeBlock"} <= {*started}


def test_moving_a_patched_model_starts_it(started: list[str]) -> None:
    model = tiny_model("qwen3_moe", "cpu")
    torch_moe_metal.patch(model)
    model.to("mps")
    assert {"Qwen3MoeDecoderLayer", "Qwen3MoeSparseMoeBlock"} <= {*started}
    warmed_up = len(started)
    torch_moe_metal.warm_up(model, wait=True)  # already warmed up, with the same activations
    assert len(started) == warmed_up


@pytest.mark.parametrize(
    ("family", "experts"),
    [("qwen3_moe", "Qwen3MoeExperts"), ("gpt_oss", "GptOssExperts"), ("gemma4_text", "Gemma4TextExperts")],
)
def test_experts_implementation_is_warmed_up(family: str, experts: str, started: list[str]) -> None:
    """An unpatched model whose configuration selects our op for its experts."""
    model = tiny_model(family, "mps")
    torch_moe_metal.warm_up(model, wait=True)
    assert not started
    model.set_experts_implementation("moe_metal")
    torch_moe_metal.warm_up(model, wait=True)
    assert started[0] == experts and not any("Layer" in name or "Block" in name for name in started)


def test_it_can_be_disabled(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(warmup.SWITCH, "0")
    moe = nn.MoE(**SIZES, device="mps")
    assert not started
    torch_moe_metal.warm_up(moe)
    assert parts(started) == ["MoE"]


# ------------------------------------------------------------------------------------------------ what it leaves alone


def test_nothing_runs_and_nothing_is_allocated(started: list[str]) -> None:
    """No dispatch and no hook runs, and the module does not change."""
    import metal_sim

    moe, calls = nn.MoE(**SIZES, shared_size=32, device="mps"), []
    torch_moe_metal.warm_up(moe, wait=True)
    warmup._known.clear()
    for module in moe.modules():
        module.register_forward_hook(lambda *_: calls.append("hook"))
    gc.collect()
    before = {name: (id(value), value._version) for name, value in moe.state_dict(keep_vars=True).items()}
    memory = torch.mps.current_allocated_memory()
    with metal_sim.record() as record:
        torch_moe_metal.warm_up(moe, wait=True)
    assert torch.mps.current_allocated_memory() == memory
    assert not record.dispatches and not record.host_syncs and not record.commits and not calls
    assert {name: (id(value), value._version) for name, value in moe.state_dict(keep_vars=True).items()} == before


def test_meta_copies_keep_layout_and_offset() -> None:
    tensor = torch.arange(48.0, dtype=torch.float16)[6:].view(6, 7).t()[1:]
    meta = warmup.meta(tensor)
    assert meta.is_meta and (meta.shape, meta.dtype) == (tensor.shape, tensor.dtype)
    assert (meta.stride(), meta.storage_offset()) == (tensor.stride(), tensor.storage_offset())
    # a file's mapped memory need not be a multiple of the element size
    odd = torch.arange(15, dtype=torch.uint8)[:14].view(torch.float16)
    assert warmup.meta(odd).shape == (7,)


# ------------------------------------------------------------------------------------------------ threads and processes

# The source is read from the standard input.
WAITS = "grep -q gate_logits && while [ ! -e go ]; do sleep 0.05; done; echo 'error: not today' >&2; exit 1"


def test_a_call_waits_only_for_its_own_kernels(tmp_path: Path) -> None:
    """The router's library does not finish compiling until the main thread, which needs another one, continues."""
    script = f"""
from torch_moe_metal import nn, warmup
moe = nn.MoE(**{SIZES}, device="mps")
torch_moe_metal.warm_up(moe)
print("not today" in message_of(glu, x, x), any(thread.is_alive() for thread in warmup._threads))
open({str(tmp_path / "go")!r}, "w").close()
print("not today" in message_of(moe, torch.ones(1, 64, device="mps")))
"""
    assert lines_of(script, WAITS, tmp_path) == ["True True", "True"]


SLOW = "echo one >> tries; sleep 1; echo 'error: not today' >&2; exit 1"


@pytest.mark.slow
def test_python_exits_without_waiting(tmp_path: Path) -> None:
    """Python waits for compilations that have started, and skips the others: here two of six libraries."""
    script = """
from torch_moe_metal import nn
layers = [nn.Linear(64, 32, bits=bits, group_size=32, device="mps") for bits in (2, 3, 4, 5, 6, 8)]
torch_moe_metal.warm_up(torch.nn.Sequential(*layers))
print("ended")
"""
    assert lines_of(script, SLOW, tmp_path) == ["ended"]
    tries = (tmp_path / "tries").read_text().split() if (tmp_path / "tries").exists() else []
    assert len(tries) <= warmup.THREADS < 6


@pytest.mark.slow
def test_a_forked_process_ends(tmp_path: Path) -> None:
    script = f"""
from torch_moe_metal import nn
torch_moe_metal.warm_up(nn.MoE(**{SIZES}, device="mps"))
child = os.fork()
if child:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    y = torch.ones(1, 64)
    sys.exit(0 if glu(y, y).shape == (1, 64) else 1)
"""
    start = time.monotonic()
    assert lines_of(script, SLOW, tmp_path) == ["0"]
    assert time.monotonic() - start < 60


def test_the_op_that_needs_the_kernel_raises(tmp_path: Path) -> None:
    script = f"""
from torch_moe_metal import nn
moe = nn.MoE(**{SIZES}, device="mps")
torch_moe_metal.warm_up(moe, wait=True)
layers = [nn.Linear(64, 32, bits=bits, group_size=32, device="mps") for bits in (2, 3, 4, 5, 6, 8)]
torch_moe_metal.warm_up(torch.nn.Sequential(*layers), wait=True)  # each thread meets several
tries = len(open({str(tmp_path / "tries")!r}).readlines())
print("not today" in message_of(moe, torch.ones(1, 64, device="mps")))
print(tries == len(open({str(tmp_path / "tries")!r}).readlines()) > 0)
"""
    assert lines_of(script, SLOW.replace("sleep 1; ", ""), tmp_path) == ["True", "True"]


def test_a_patched_model_has_shapes_on_meta() -> None:
    model = tiny_model("qwen3_moe", "meta")
    assert torch_moe_metal.patch(model)["fused"]
    with torch.no_grad():
        block = model.model.layers[0].mlp
        x = torch.empty(2, 5, 64, device="meta")
        assert block(x).is_meta and block(x).shape == x.shape
