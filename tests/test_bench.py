"""`python -m torch_moe_metal bench`, in sizes that take no time."""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from transformers import AutoConfig

from torch_moe_metal.__main__ import main
from torch_moe_metal.bench import calls, here, measure
from torch_moe_metal.bench.block import (
    Block,
    Implementation,
    configuration,
    empty_block,
    expert_bytes,
    fitted,
    plain,
    transformers,
)
from torch_moe_metal.bench.calls import OPS, WHOLE, Call, Noise, Unfit, inputs
from torch_moe_metal.bench.plot import picture
from torch_moe_metal.bench.report import Progress, Result
from torch_moe_metal.bench.rivals import RIVALS, rivals, too_large
from torch_moe_metal.models import DEFAULT, MODELS, Model

QUICK = ["--seconds", "0.001", "--device", "cpu"]
GB = 1 << 30


@pytest.fixture
def tiny(monkeypatch) -> Model:
    """The default model, small, and machine limits that are found at once."""
    small = MODELS[DEFAULT].reduced(E=8, K=2, H=64, I=32)
    monkeypatch.setitem(MODELS, DEFAULT, small)
    limits = measure.Limits("cpu", 0.001, 1 << 20)
    monkeypatch.setattr(here, "Limits", lambda *_: limits)
    return small


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


# ------------------------------------------------------------------------------------------------ the models


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_of_transformers_block(name: str):
    model = MODELS[name]
    block = empty_block(model)
    E, H, I = model.E, model.H, model.I
    gate_up, down = ((E, H, 2 * I), (E, I, H)) if model.experts.get("transposed") else ((E, 2 * I, H), (E, H, I))
    assert block.experts.gate_up_proj.shape == gate_up and block.experts.down_proj.shape == down
    expected = E * H + 3 * E * H * I + 3 * H * model.S
    optional = {"shared_gate": H, "norm_weight": H, "per_expert_scale": E, "router_bias": E, "select_bias": E}
    optional |= {"gate_up_bias": E * 2 * I, "down_bias": E * H}
    expected += sum(optional[tensor] for tensor in model.tensors)
    assert sum(t.numel() for t in (*block.parameters(), *block.buffers())) == expected


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"qwen3-235b-a22b", "olmoe", "gpt-oss-20b", "gemma4-26b-a4b"}))
def test_sizes_are_the_published_ones(name: str):
    """Where they are transformers' defaults. Whether those renormalize is another matter: Qwen3's checkpoints do."""
    published = AutoConfig.for_model(MODELS[name].config)
    inner = "moe_intermediate_size" if hasattr(published, "moe_intermediate_size") else "intermediate_size"
    left_out = {"norm_topk_prob", "intermediate_size", "moe_intermediate_size"} - {inner}
    ours = {k: v for k, v in configuration(MODELS[name]).items() if hasattr(published, k) and k not in left_out}
    assert ours == {k: getattr(published, k) for k in ours} and len(ours) >= 4


@pytest.mark.parametrize("name", MODELS)
def test_every_way_to_a_block_agrees(name: str):
    """Ours, plain PyTorch's and transformers', on weights that are shared; MLX's copies where it is installed."""
    model = MODELS[name].reduced(E=16, H=64, I=32)
    noise = Noise("cpu", torch.float32)
    block = Block.random(model, noise)
    ways = plain(block) | transformers(block)
    if here.has_mlx():
        from torch_moe_metal.bench.mlx import mlx

        ways |= mlx(block)
    for op in WHOLE:
        for T in (3, 20):  # MLX sorts from 64 choices on
            call = Call(op, name, model, T, torch.float32)
            assert disagreeing(call, block, ways, [inputs(call, noise)]) == {}


def disagreeing(call: Call, block: Block, ways: dict[str, Implementation], sets: list[dict]) -> dict[str, str]:
    measurer = here.Here.__new__(here.Here)
    measurer.block, measurer.others = block, ways
    functions, failed = measurer.whole(call, sets), {}
    kept = here.agreeing(call, functions, failed, most=1e-5)
    assert set(kept) | set(failed) == set(functions)
    return failed


def test_transformers_shares_the_weights():
    """What changes in ours changes in theirs."""
    model = MODELS["qwen3-next-80b-a3b"].reduced(E=16, H=64, I=32)
    noise = Noise("cpu", torch.float32)
    block = Block.random(model, noise)
    ways = transformers(block)
    for weight in (*block.router.values(), *block.experts.values(), block.shared_gate_up, block.shared_down):
        weight.mul_(1.5)
    call = Call("block", "", model, 3, torch.float32)
    assert disagreeing(call, block, ways, [inputs(call, noise)]) == {}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("op", ["gate", "route", "glu"])
def test_plain_ways_agree_with_the_op(op: str, name: str):
    call = Call(op, name, MODELS[name].reduced(E=32, H=64, I=48), 9, torch.float32)
    functions, failed = here.of_op(call, [inputs(call, Noise("cpu", torch.float32))]), {}
    assert here.agreeing(call, functions, failed, most=1e-5).keys() == functions.keys() and not failed
    assert len(functions) >= 2


# ------------------------------------------------------------------------------------------------ inputs and bytes


def test_ids_rotate_through_more_weights_than_caches_hold():
    call = Call("experts", DEFAULT, MODELS[DEFAULT], 1)
    noise = Noise("cpu", torch.bfloat16)
    sets = [inputs(call, noise) for _ in range(call.sets)]
    ids = torch.cat([one_set["ids"] for one_set in sets])
    assert len({tuple(one_set["x"].flatten().tolist()) for one_set in sets}) == len(sets)
    assert ids.unique().numel() * expert_bytes(call.model, call.dtype) > 600e6


def test_bytes_are_counted_once():
    model = MODELS["gpt-oss-20b"].reduced(E=8, H=64, I=32)
    block = Block.random(model, Noise("cpu", torch.bfloat16))
    ids = torch.tensor([[0, 3, 3], [3, 7, 0]])
    one_expert = 2 * (3 * 64 * 32 + 2 * 32 + 64)
    assert block.bytes_read(ids) == 3 * one_expert
    assert block.bytes_besides() == 2 * (8 * 64 + 8)
    assert Call("residual_norm", "", model, 5).written == 2 * 5 * 64 * 2


def test_rivals_that_would_copy_too_much_are_left_out():
    assert too_large("transformers batched_mm", 32, 8, 9 << 20) and not too_large("plain batched_mm", 1, 8, GB)
    assert not too_large("transformers grouped_mm", 512, 8, GB)


# ------------------------------------------------------------------------------------------------ memory


def test_memory_guard():
    deepseek = MODELS["deepseek-v3"]
    assert fitted(deepseek, torch.bfloat16, 60 * GB, 512, copies=1) is deepseek
    cut = fitted(deepseek, torch.bfloat16, 18 * GB, 512, copies=1)
    assert deepseek.fewest <= cut.E < deepseek.E and cut.E % 8 == 0
    assert cut.E * expert_bytes(deepseek, torch.bfloat16) < 15 * GB
    assert fitted(deepseek, torch.bfloat16, 18 * GB, 512, copies=2).E <= cut.E // 2
    with pytest.raises(Unfit, match="not enough memory"):
        fitted(deepseek, torch.bfloat16, 4 * GB, 512, copies=1)
    for model in MODELS.values():
        assert replace(model, E=model.fewest).fewest >= model.K


def test_a_cut_model_still_routes():
    model = MODELS["deepseek-v3"].reduced(H=64, I=32)
    block = Block.random(replace(model, E=model.fewest), Noise("cpu", torch.float32))
    assert block(torch.randn(3, 64)).isfinite().all()


def test_memory_that_is_missing_is_said(tiny, monkeypatch, capsys):
    monkeypatch.setattr(here, "free_memory", lambda _: GB)
    assert main(["bench", *QUICK]) == 2
    assert "not enough memory" in capsys.readouterr().err
    assert main(["bench", *QUICK, "--ops", "norm_add", "--tokens", "1"]) == 0


def test_fewer_experts_are_said(tiny, monkeypatch, capsys):
    monkeypatch.setattr(here, "fitted", lambda model, *_: replace(model, E=4))
    assert main(["bench", *QUICK, "--ops", "experts", "--tokens", "1", "--dtypes", "f32"]) == 0
    said = capsys.readouterr().out
    assert "f32: 4 of 8 experts" in said and "T=1 E=4/8 K=2" in said


def test_free_memory():
    assert 64 << 20 < measure.free_memory("cpu") < 1 << 50


# ------------------------------------------------------------------------------------------------ measuring


def test_probes_touch_everything():
    size = 1 << 20
    count = size // 4
    found = {name: way() for name, way in measure.reads("cpu", size).items()}
    assert found["sum"] == count and found["mv"].sum() == count and found["amax"] == 1
    assert found["sum of int64"] == torch.ones(2).view(torch.int64) * (count // 2)  # both wrap round
    for way in measure.copies("cpu", size).values():
        assert way().sum() == count


def test_limits_are_sane(device: str):
    limits = measure.Limits(device, 0.01, 32 << 20)
    assert set(limits.gb_per_s) == {"read", "copy"}
    assert all(0.2 < speed < 20000 for speed in limits.gb_per_s.values()), limits.gb_per_s


@pytest.mark.parametrize(
    "op, T, kind",
    [
        ("norm_add", 4096, "copy"),
        ("weighted_sum", 4096, "read"),
        ("weighted_sum_residual_", 4096, "read"),
        ("weighted_sum_residual_norm_", 4096, "copy"),
        ("gate", 4096, "read"),
    ],
)
def test_which_limit_holds(op: str, T: int, kind: str):
    call = Call(op, DEFAULT, MODELS[DEFAULT], T)
    read = sum(torch.Size(call.size(letters)).numel() for letters in call.shapes.values()) * 2
    assert Result(call, read).kind == kind


def test_a_row_is_held_against_its_limits(tiny, monkeypatch, capsys):
    monkeypatch.setattr(here, "WORTH_A_LIMIT", 1)
    ops = ["norm_add", "gate"]
    assert main(["bench", *QUICK, "--ops", *ops, "--tokens", "64", "--dtypes", "f32", "--json"]) == 0
    rows = {row["op"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {op: row["limit"] for op, row in rows.items()} == {"norm_add": "copy", "gate": "read"}
    for row in rows.values():
        assert row["of_limit"] == pytest.approx(row["gb_per_s"] / row["limit_gb_per_s"])
        assert not {"read", "copy"} & set(row["rivals_us"])


def test_seconds_each():
    times = measure.seconds_each({n: lambda n=n: time.sleep(n / 1000) for n in (1, 4)}, "cpu", 0.01)
    assert 0.001 <= times[1] < times[4] and times[4] >= 0.004


def test_a_wrong_rival_does_not_count(tiny, monkeypatch, capsys):
    wrong = {"zeros": lambda residual, **_: torch.zeros_like(residual), "raises": lambda **_: 1 / 0}
    monkeypatch.setitem(RIVALS, "norm_add", RIVALS["norm_add"] | wrong)
    assert main(["bench", *QUICK, "--ops", "norm_add", "--tokens", "1", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        assert set(row["rivals_us"]) == {"rms_norm, add_"}
        assert row["failed"]["zeros"].startswith("norm_add differs") and "ZeroDivision" in row["failed"]["raises"]


def test_our_failure_is_told_and_does_not_end_the_run(tiny, monkeypatch, capsys):
    def of_op(call, sets):
        return {"ours": lambda: 1 / 0} if call.op == "glu" else functions_of_op(call, sets)

    functions_of_op = here.of_op
    monkeypatch.setattr(here, "of_op", of_op)
    assert main(["bench", *QUICK, "--ops", "gate", "glu", "--tokens", "1", "--dtypes", "f32"]) == 1
    gate, glu = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("gate", "glu"))]
    assert "FAILED: ZeroDivisionError" in glu and "FAILED" not in gate


# ------------------------------------------------------------------------------------------------ the command


def test_everything_as_json_and_as_a_picture(device: str, tiny, tmp_path, capsys):
    plot = tmp_path / "roofline.svg"
    assert main(["bench", *QUICK, "--device", device, "--tokens", "1", "3", "--json", "--plot", str(plot)]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["rows"]
    twice = {"route": 2}  # also with many experts
    assert [(r["dtype"], r["op"], r["T"]) for r in rows] == [
        (dtype, op, T) for dtype in ("bf16", "f32") for op in OPS for _ in range(twice.get(op, 1)) for T in (1, 3)
    ]
    assert all(r["us"] > 0 and r["bytes"] > 0 and r["x_pytorch"] > 0 for r in rows)
    assert all(set(r.get("failed", {})) <= {"mlx"} for r in rows)  # whose gather_mm takes only f32 on a CPU
    assert {name for r in rows if r["op"] == "block" for name in r["rivals_us"]} >= {
        f"transformers {name}" for name in ("eager", "batched_mm", "grouped_mm")
    }
    assert found["read_gb_per_s"] > 0 and found["device"] == device
    assert points(plot.read_text()) == {"ours": len(rows), "rival": len(rows)}


def points(svg: str) -> dict[str, int]:
    marks = [element.get("class") for element in ElementTree.fromstring(svg).iter()]
    return {name: marks.count(name) for name in ("ours", "rival")}


def test_picture_of_rows_without_rivals_or_times():
    call = Call("route", DEFAULT, MODELS[DEFAULT], 1)
    rows = [Result(call, 1e3, {"ours": 1e-6}), Result(call, 1e3, {}, failed={"ours": "why"})]
    assert points(picture(rows, {"read": 20.0, "copy": 30.0}, {"device": "<&>"})) == {"ours": 1, "rival": 0}
    assert points(picture(rows[1:], {"read": 20.0}, {})) == {"ours": 0, "rival": 0}


def test_table_without_transformers(tiny, monkeypatch, capsys):
    monkeypatch.setattr(here, "has_transformers", lambda: False)
    assert main(["bench", *QUICK, "--model", DEFAULT, "--tokens", "2", "--dtypes", "bf16"]) == 0
    said = capsys.readouterr().out
    assert "transformers is not installed" in said
    rows = [line.split() for line in said.splitlines() if line.startswith(WHOLE)]
    assert [row[0] for row in rows] == list(WHOLE) and all(row[-2] == "plain" for row in rows)


def test_defaults():
    options = argparse.Namespace(model=None, ops=None, tokens=None, dtypes=[torch.float32])
    rows = calls.calls_of(options, {torch.float32: MODELS[DEFAULT]})
    assert {r.op for r in rows} == set(OPS)
    experts = {op: {r.model.E for r in rows if r.op == op} for op in ("gate", "route")}
    assert experts == {"gate": {128}, "route": {128, 512}}
    assert [r.T for r in rows if r.op == "block"] == [1, 4, 32, 512] and [r.T for r in rows if r.op == "glu"][
        -1
    ] == 4096
    options.model = "olmoe"
    assert {r.op for r in calls.calls_of(options, {torch.float32: MODELS["olmoe"]})} == set(WHOLE)


@pytest.mark.skipif(sys.platform != "linux", reason="for glibc's malloc")
def test_freed_memory_is_kept():
    """In a process of its own, for the rest of its life: fresh outputs then need not cost page faults. (Linux may take
    pages back on its own.)"""
    script = """
import resource, torch
from torch_moe_metal.bench.measure import keep_freed_memory
assert keep_freed_memory()
faults = []
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(64 << 18)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
assert min(faults[1:]) < faults[0] / 8, faults
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_no_mps(monkeypatch, capsys):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert main(["bench", "--device", "mps"]) == 2
    assert "--device mps: " in capsys.readouterr().err


def test_progress_is_for_terminals_only(monkeypatch, capsys):
    for terminal, wanted in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        progress = Progress(4, wanted)
        progress.show(1, "experts")
        progress.clear()
        said = capsys.readouterr().err
        assert ("[######------------------] 1/4  experts  0:00" in said) == bool(said) == (terminal and wanted)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--model", "gpt-5"], "invalid choice: 'gpt-5'"),
        (["--ops", "attention"], "invalid choice: 'attention'"),
        (["--tokens", "0"], "must be 1 or more, got 0"),
        (["--dtypes", "f64"], "invalid choice: 'f64'"),
        (["--device", "cuda"], "invalid choice: 'cuda'"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *arguments])
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_ways_take_every_option_of_the_table():
    """Nothing in the table that the plain ways would not understand."""
    for name, model in MODELS.items():
        for op in ("gate", "route", "glu", "experts"):
            assert rivals(op, Call(op, name, model, 1).options), (op, name)
