"""All shaders compile for an NVIDIA GPU and, if there is one, give right results on it."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import ptx  # noqa: E402
import record  # noqa: E402
import run  # noqa: E402
from torch_moe_metal.commands import tune  # noqa: E402
from torch_moe_metal.commands.bench.calls import OPS, Call, RandomTensors, inputs  # noqa: E402
from torch_moe_metal.commands.bench.model_sizes import DEFAULT, MODELS  # noqa: E402

SHADERS = sorted(file.stem for file in (ptx.ROOT / "shaders").glob("*.metal"))


@pytest.fixture
def compiler() -> None:
    """Skips without a CUDA toolkit, whose maths functions the compiler needs. No GPU is needed."""
    if ptx.libdevice() is None:
        pytest.skip("CUDA's libdevice.10.bc is not here: no CUDA toolkit")


def kernels(file: Path) -> set[str]:
    return set(re.findall(r"^\.visible \.entry (\w+)", file.read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    "shader",
    [pytest.param(s, marks=[pytest.mark.full_grid, pytest.mark.slow] if s != "norm_add" else []) for s in SHADERS],
)
def test_every_shader_compiles(compiler: None, tmp_path: Path, shader: str):
    for file in ptx.compile_all(tmp_path, [shader]):  # one for each format of weights
        assert {name.split("_")[-1] for name in kernels(file)} >= {"float", "half", "bfloat"}


def test_kernels_state_the_most_threads_they_are_launched_with(tmp_path: Path):
    header = ".visible .entry {}(\n\t.param .align 16 .b8 {}_param_0[2304]\n){}\n{{\n}}\n"
    file = tmp_path / "shader.ptx"
    file.write_text(header.format("launched", "launched", "  // a comment") + header.format("other", "other", ""))
    for threads in (64, 1024):
        dispatches = [{"kernel": "launched", "threads": [n, 1, 1]} for n in (32, threads)]
        (tmp_path / "cases.json").write_text(ptx.json.dumps([{"dispatches": dispatches}]))
        ptx.state_threads(tmp_path)
        assert re.findall(r"\)\n\.maxntid (.*?)\s*(?://.*)?\n\{", file.read_text()) == [f"{threads}, 1, 1"]


@pytest.mark.parametrize("op", [op for op in OPS if op != "block"])
def test_recorded_strides_are_those_of_replayed_arguments(op: str, mps: str):
    """A trace has offsets, which follow from strides; a replay uses them with its own arguments."""
    call = Call(op, DEFAULT, MODELS[DEFAULT].reduced(E=4, K=2, H=16, I=8), 3, torch.float16)
    recorded, replayed = record.empties(call), inputs(call, RandomTensors("cpu", torch.float16))
    assert set(recorded) - set(replayed) <= {"gate_up", "down", "gate_up_bias", "down_bias"}
    for name, tensor in replayed.items():
        want, storage = recorded[name], tensor.untyped_storage().nbytes()
        assert (tensor.shape, tensor.stride()) == (want.shape, want.stride()), name
        assert (tensor.storage_offset(), storage) == (want.storage_offset(), want.untyped_storage().nbytes()), name


# Traces have no commits, and the translation to CUDA has no matmul2d of Apple's.
RECORDED = [setting for setting in tune.SETTINGS if not setting.name.startswith(("commit_", "tensor_ops"))]


@pytest.mark.parametrize("setting", RECORDED, ids=lambda setting: setting.name)
def test_calls_of_tune_show_every_alternative(setting: tune.Setting, mps: str):
    """With the sizes of two models: for any two neighbouring values, some call's dispatches differ."""
    models = {(name, "dense"): MODELS[name] for name in (DEFAULT, "mixtral-8x7b")}
    calls = tune.calls_of(setting, models, torch.bfloat16)
    args = [record.empties(call) for call in calls]

    def ways(value: int) -> list[str]:
        settings = {setting.name: value}
        return [record.dispatched(record.trace_under(settings, *one)) for one in zip(calls, args, strict=True)]

    assert all(one != other for one, other in itertools.pairwise(map(ways, setting.values)))


def test_every_candidate_of_the_search_has_a_replay(mps: str, tmp_path: Path, monkeypatch):
    """For any settings, the replay has the dispatches of the host code under these settings."""
    small = MODELS[DEFAULT].reduced(E=8, K=2, H=64, I=32)
    monkeypatch.setitem(MODELS, DEFAULT, small)
    chosen = tune.SETTINGS[0], tune.SETTINGS[2]  # a setting of decode, and the end of decode
    monkeypatch.setattr(tune, "SETTINGS", chosen)
    record.prepare_tune()
    record.write(tmp_path / "tune.json", record.tune_traces(DEFAULT), ("",))
    replays = run.Tuned(tmp_path, kernels=None)
    seen = []

    def measure(call: Call, candidates: list[dict]) -> list[list[float]]:
        args = record.empties(call)
        for settings in candidates:
            want = record.dispatched(record.trace_under(settings, call, args))
            assert record.dispatched(replays.traces[str(call)][replays.trace(call, settings)]) == want
            seen.append(settings)
        return [[1.0 if "decode_max_slots_percent" in settings else 2.0 - len(settings)] * 7 for settings in candidates]

    calls = {n.name: tune.calls_of(n, {(DEFAULT, "dense"): small}, torch.bfloat16) for n in chosen}
    tune.search(calls, chosen, replays.defaults, measure, {})
    assert any(len(settings) == 2 for settings in seen)  # one together with another


@pytest.mark.full_grid
@pytest.mark.slow
def test_every_case_on_a_gpu(compiler: None, tmp_path: Path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: record.py's folder can be taken to a machine that has one")
    for script in ("record.py", "run.py"):
        subprocess.run([sys.executable, HERE / script, tmp_path], check=True)
