"""`python -m torch_moe_metal bench` and tools/bench_mlx.py, with tiny sizes."""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from transformers import AutoConfig
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

import bench_mlx
from benchmarks import rows_of_bench
from tiny_models import tiny_model
from torch_moe_metal import gpu_settings
from torch_moe_metal.commands import bench
from torch_moe_metal.commands.bench import calls, device_bench, measure, whole_model
from torch_moe_metal.commands.bench.baselines import BASELINES, baselines, int4pack, too_large
from torch_moe_metal.commands.bench.block import (
    Block,
    Implementation,
    empty_block,
    expert_bytes,
    fitted,
    plain,
    transformers,
)
from torch_moe_metal.commands.bench.calls import DECODING, OPS, WHOLE, Call, RandomTensors, inputs, moved, packing_of
from torch_moe_metal.commands.bench.linear_attention import LAYERS, SHORT_CONV, Layer
from torch_moe_metal.commands.bench.model_sizes import DEFAULT, MODELS, Model, configuration
from torch_moe_metal.commands.bench.report import OURS_DENSE, Result
from torch_moe_metal.commands.command_line import main
from torch_moe_metal.commands.common import devices
from torch_moe_metal.commands.common.cli import CannotRun
from torch_moe_metal.commands.common.progress import Progress
from torch_moe_metal.random_weights import FORMATS
from torch_moe_metal.transformers.versions import cache_of

HAS_MLX = bench_mlx.mx is not None
MEASURER = bench_mlx.WithMlx if HAS_MLX else device_bench.DeviceBench
QUICK = ["--seconds", "0.001", "--device", "cpu"]
GB = 1 << 30
#: Of GGML's formats only one: the benchmark treats them all alike.
PACKED = [
    format for format, packing in FORMATS.items() if packing and (not packing.row.has_own_scales or format == "q8_0")
]
OF_MLX = [format for format in PACKED if format not in ("fp8", "nvfp4", "q8_0")]


def run_bench(*arguments: str) -> int:
    """The benchmark, with MLX if it is installed."""
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args([*QUICK, *arguments]), MEASURER)


def smaller(layer: Layer) -> Layer:
    J, A, *_ = layer.heads
    return replace(layer, heads=(2, 2 * (A // J), 24, 16))


@pytest.fixture
def tiny(monkeypatch) -> Model:
    """A small version of the default model, and quick measurements of the bandwidth."""
    small = MODELS[DEFAULT].reduced(E=8, K=2, H=64, I=64)
    monkeypatch.setitem(MODELS, DEFAULT, small)
    for name, layer in LAYERS.items():
        monkeypatch.setitem(LAYERS, name, smaller(layer))
    limits = measure.Limits("cpu", 0.001, 1 << 20)
    monkeypatch.setattr(device_bench, "Limits", lambda *_: limits)
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
    """For models with transformers' default sizes. Renormalisation is not compared: Qwen3's checkpoints change it."""
    published = AutoConfig.for_model(MODELS[name].config)
    inner = "moe_intermediate_size" if hasattr(published, "moe_intermediate_size") else "intermediate_size"
    left_out = {"norm_topk_prob", "intermediate_size", "moe_intermediate_size"} - {inner}
    ours = {k: v for k, v in configuration(MODELS[name]).items() if hasattr(published, k) and k not in left_out}
    assert ours == {k: getattr(published, k) for k in ours} and len(ours) >= 4


#: Models whose published attention differs from transformers' defaults.
OTHER_ATTENTION = {"qwen3-30b-a3b", "qwen3-235b-a22b", "gemma4-26b-a4b", "glm-4.5-air"}


@pytest.mark.parametrize("name", MODELS)
def test_matrices_are_those_of_transformers_models(name: str):
    model = MODELS[name]
    config = AutoConfig.for_model(model.config)
    assert model.linears == {"query": model.query, "head": (config.vocab_size, model.H)}
    assert all(columns % 128 == 0 or columns % 64 == 0 for columns in (model.H, model.I, model.query[1]))
    if name in OTHER_ATTENTION:
        return
    modeling = import_module(
        f"transformers.models.{(folder := config.model_type.removesuffix('_text'))}.modeling_{folder}"
    )
    attention = next(c for n, c in vars(modeling).items() if n.endswith("Attention") and "Vision" not in n)
    with torch.device("meta"):
        parameters = dict(attention(config, 0).named_parameters())
    (query,) = (parameters[name] for name in ("q_proj.weight", "q_b_proj.weight") if name in parameters)
    assert query.shape == model.query
    A, J, D, V = model.heads
    norm = parameters.get("q_norm.weight")
    assert model.head_norms == ("" if norm is None else "each" if len(norm) == D else "all")
    assert config.num_attention_heads == A and bool(config.to_dict().get("kv_lora_rank")) == (J == 1 and D > V)
    if J > 1:
        assert config.num_key_value_heads == J and model.query[0] in (A * D, 2 * A * D)  # twice, with an output gate
    else:
        assert (config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank) == (D, V)


@pytest.mark.parametrize("name", MODELS)
def test_every_way_to_a_block_agrees(name: str):
    """Ours, plain PyTorch and transformers with shared weights, and MLX with copies if it is installed."""
    model = MODELS[name].reduced(E=16, H=64, I=32)
    noise = RandomTensors("cpu", torch.float32)
    block = Block.random(model, noise)
    ways = plain(block) | transformers(block)
    if HAS_MLX:
        ways |= bench_mlx.mlx(block)
    for op in WHOLE:
        for T in (3, 20):  # MLX sorts from 64 choices on
            call = Call(op, name, model, T, torch.float32)
            assert disagreeing(call, block, ways, [inputs(call, noise)]) == {}


@pytest.mark.parametrize("name", [DEFAULT, "qwen3-next-80b-a3b", "gpt-oss-20b"])
@pytest.mark.parametrize("format", PACKED)
def test_every_way_to_a_packed_block_agrees(format: str, name: str):
    """Our block with the same values as dense weights, and MLX with the same bytes: also with a shared expert, and with
    interleaved gate and up and biases."""
    model, noise = MODELS[name].reduced(E=16, H=64, I=64).packed, RandomTensors("cpu", torch.float32)
    block = Block.random(model, noise, packing_of(format, torch.float32))
    ways = {}
    if HAS_MLX:
        ways = bench_mlx.mlx(block)
        assert set(ways) == ({"mlx"} if format in OF_MLX else set())
    for op in WHOLE:
        for T in (3, 20):
            call = Call(op, name, model, T, torch.float32, format)
            assert disagreeing(call, block, ways, [inputs(call, noise)]) == {}


def disagreeing(call: Call, block: Block, ways: dict[str, Implementation], sets: list[dict]) -> dict[str, str]:
    measurer = MEASURER.__new__(MEASURER)
    measurer.block, measurer.others = block, ways
    measurer.dense = block.dense() if call.packing else None
    functions, failed = measurer.whole(call, sets), {}
    assert set(functions) == {"ours", *ways} | ({OURS_DENSE} if call.packing else set())
    kept = device_bench.agreeing(call, functions, failed, most=1e-5)
    assert set(kept) | set(failed) == set(functions)
    return failed


def test_transformers_shares_the_weights():
    """A change of our weights changes transformers' weights."""
    model = MODELS["qwen3-next-80b-a3b"].reduced(E=16, H=64, I=32)
    noise = RandomTensors("cpu", torch.float32)
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
    functions, failed = device_bench.of_op(call, [inputs(call, RandomTensors("cpu", torch.float32))]), {}
    assert device_bench.agreeing(call, functions, failed, most=1e-5).keys() == functions.keys() and not failed
    assert len(functions) >= 2


@pytest.mark.parametrize("T", [1, 9, 70])
@pytest.mark.parametrize("op, which", [*(("linear_attention_", name) for name in LAYERS), ("short_conv_", "")])
def test_layers_of_linear_attention_agree_with_the_op(op: str, which: str, T: int, monkeypatch):
    """What transformers computes between its projections, and the state after it."""
    monkeypatch.setitem(LAYERS, which, smaller(LAYERS.get(which, SHORT_CONV)))
    call = Call(op, DEFAULT, MODELS[DEFAULT].reduced(H=64), T, torch.float32, which=which)
    ours = inputs(call, RandomTensors("cpu", torch.float32))
    theirs = device_bench.for_baselines(ours)
    got = getattr(torch.ops.moe_metal, op)(**ours, **call.options)
    (way,) = baselines(op, call.options, call.shapes).values()
    want = way(**theirs)
    pairs = [(got, want), (ours["kept"].mT, theirs["conv_state"][..., -ours["kept"].shape[1] :])]
    pairs += [(ours["state"], theirs["state"])] if "state" in ours else []
    assert all(float((one - other).abs().max() / other.abs().max()) < 1e-5 for one, other in pairs)


def test_much_slower_implementations_are_left_out(monkeypatch):
    def slowly(gate, up):
        time.sleep(1)
        return torch.nn.functional.silu(gate) * up

    monkeypatch.setattr(device_bench, "TOO_SLOW", 0.01)
    call = Call("glu", "", MODELS[DEFAULT].reduced(E=8, H=64, I=48), 9, torch.float32)
    sets, failed = [inputs(call, RandomTensors("cpu", torch.float32))], {}
    functions = device_bench.of_op(call, sets) | {"slow": device_bench.in_turn(slowly, sets)}
    assert device_bench.agreeing(call, functions, failed).keys() == functions.keys() - {"slow"}
    assert failed == {"slow": "TimeoutError: glu takes 1 s a call"}


@pytest.mark.parametrize("op", ["linear", "dequantize"])
@pytest.mark.parametrize("format", PACKED)
def test_every_way_to_an_op_on_packed_weights_agrees(op: str, format: str):
    for dtype in (torch.float32, torch.bfloat16):
        call = Call(op, "", MODELS[DEFAULT].reduced(H=128), 5, dtype, format, "head")
        sets = [inputs(call, RandomTensors("cpu", dtype)) for _ in range(2)]
        functions, failed = MEASURER.__new__(MEASURER).functions_of(call, sets), {}
        expected = {"ours", OURS_DENSE, *BASELINES[op]} | ({"mlx"} if HAS_MLX and format in OF_MLX else set())
        if (op, format, dtype) == ("linear", "affine4", torch.bfloat16):
            expected.add("int4pack")
        assert set(functions) == expected
        device_bench.agreeing(call, functions, failed, most=1e-5 if dtype == torch.float32 else 0.02)
        assert failed == {}


def test_a_wrong_packed_baseline_is_left_out(tiny, monkeypatch, capsys):
    def without_offset(x, weight, scale, offset):
        return int4pack(x, weight, scale, torch.zeros_like(offset))

    monkeypatch.setattr(device_bench, "int4pack", without_offset)
    arguments = ["--ops", "linear", "--formats", "affine4", "--tokens", "2", "--dtypes", "bf16", "--json"]
    assert main(["bench", *QUICK, *arguments]) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        assert "differs from ours" in row["failed"]["int4pack"] and "int4pack" not in row["baselines_us"]


# ------------------------------------------------------------------------------------------------ inputs and bytes


def test_sets_of_inputs_read_more_weights_than_caches_hold():
    call = Call("experts", DEFAULT, MODELS[DEFAULT], 1)
    noise = RandomTensors("cpu", torch.bfloat16)
    sets = [inputs(call, noise) for _ in range(call.sets)]
    ids = torch.cat([one_set["ids"] for one_set in sets])
    assert len({tuple(one_set["x"].flatten().tolist()) for one_set in sets}) == len(sets)
    assert ids.unique().numel() * expert_bytes(call.model, call.dtype) > 600e6


def test_bytes_are_counted_once():
    model = MODELS["gpt-oss-20b"].reduced(E=8, H=64, I=32)
    block = Block.random(model, RandomTensors("cpu", torch.bfloat16))
    ids = torch.tensor([[0, 3, 3], [3, 7, 0]])
    one_expert = 2 * (3 * 64 * 32 + 2 * 32 + 64)
    assert block.bytes_read(ids) == 3 * one_expert
    assert block.other_bytes() == 2 * (8 * 64 + 8)
    assert Call("residual_norm", "", model, 5).written == 2 * 5 * 64 * 2


#: Bytes of a matrix of 128 rows and 64 columns with bfloat16 scales. 64 rows take half as much, except for fp8's scale
#: and nvfp4's factor.
PACKED_BYTES = {f"affine{bits}": 128 * (64 * bits // 8 + 2 + 2) for bits in (2, 3, 4, 5, 6, 8)}
PACKED_BYTES |= {"mxfp4": 128 * (64 // 2 + 2), "fp8": 128 * 64 + 4, "mxfp8": 128 * (64 + 2)}
PACKED_BYTES |= {"nvfp4": 128 * (64 // 2 + 4) + 4, "q8_0": 128 * 2 * 34}


@pytest.mark.parametrize("format", PACKED)
def test_bytes_of_packed_weights(format: str):
    gate_up, bf16 = PACKED_BYTES[format], torch.bfloat16
    one_expert = gate_up + gate_up // 2 + (2 if format in ("fp8", "nvfp4") else 0)
    model = MODELS["gpt-oss-20b"].reduced(E=8, H=64, I=64).packed
    noise, biases = RandomTensors("cpu", bf16), 2 * (2 * 64 + 64)
    block = Block.random(model, noise, packing_of(format, bf16))
    assert block.bytes_read(torch.tensor([[0, 3, 3], [3, 7, 0]])) == 3 * (one_expert + biases)
    assert expert_bytes(model, bf16, format) == one_expert
    linear = inputs(Call("linear", "", model, 3, bf16, format), noise)
    assert moved(*linear.values()) == 3 * 64 * 2 + gate_up
    assert Call("linear", "", model, 3, bf16, format).bytes("weight") == gate_up


@pytest.mark.parametrize("format", PACKED)
def test_packed_weights_are_as_large_as_trained_ones(format: str):
    model = MODELS[DEFAULT].reduced(E=4, H=256, I=128)
    dense = Block.random(model, RandomTensors("cpu", torch.float32), packing_of(format, torch.float32)).dense()
    for weight, columns in ((dense.experts["gate_up"], 256), (dense.experts["down"], 128)):
        assert weight.isfinite().all() and 0.5 < weight.std() * columns**0.5 < 2
        assert weight.mean().abs() < weight.std() / 2


def test_a_packed_weight_is_never_transposed():
    model = MODELS["gpt-oss-20b"]
    dense, packed = Call("experts", "", model, 1), Call("experts", "", model.packed, 1, format="mxfp4")
    assert dense.options["transposed"] and "transposed" not in packed.options and packed.options["format"] == "mxfp4"
    assert packed.options.items() - {("format", "mxfp4")} == dense.options.items() - {
        ("format", "dense"),
        ("transposed", True),
    }


def test_baselines_that_copy_too_much_are_left_out():
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
    with pytest.raises(CannotRun, match="not enough memory"):
        fitted(deepseek, torch.bfloat16, 4 * GB, 512, copies=1)
    for model in MODELS.values():
        assert replace(model, E=model.fewest).fewest >= model.K


def test_memory_guard_counts_packed_and_dense():
    model, bf16 = MODELS["deepseek-v3"].packed, torch.bfloat16
    found = fitted(model, bf16, 18 * GB, 512, 1, "affine4").E
    held = expert_bytes(model, bf16) + expert_bytes(model, bf16, "affine4")
    assert fitted(model, bf16, 18 * GB, 512, 2).E < found < fitted(model, bf16, 18 * GB, 512, 1).E
    assert found * held < 15 * GB and expert_bytes(model, bf16, "affine4") * 32 == 9 * expert_bytes(model, bf16)


def test_a_cut_model_still_routes():
    model = MODELS["deepseek-v3"].reduced(H=64, I=32)
    block = Block.random(replace(model, E=model.fewest), RandomTensors("cpu", torch.float32))
    assert block(torch.randn(3, 64)).isfinite().all()


def test_not_enough_memory(tiny, monkeypatch, capsys):
    monkeypatch.setattr(device_bench, "free_memory", lambda _: GB)
    assert main(["bench", *QUICK]) == 2
    assert "not enough memory" in capsys.readouterr().err
    assert main(["bench", *QUICK, "--ops", "norm_add", "--tokens", "1"]) == 0


def test_fewer_experts_are_reported(tiny, monkeypatch, capsys):
    monkeypatch.setattr(device_bench, "fitted", lambda model, *_: replace(model, E=4))
    assert main(["bench", *QUICK, "--ops", "experts", "--tokens", "1", "--dtypes", "f32"]) == 0
    said, err = capsys.readouterr()
    assert "bench: 1 rows, which take at least 0:00 minutes" in err
    assert "f32: 4 of 8 experts" in said and "T=1 E=4/8 K=2" in said


def test_free_memory():
    assert 64 << 20 < devices.free_memory("cpu") < 1 << 50


# ------------------------------------------------------------------------------------------------ measuring


def test_probes_touch_everything():
    size = 1 << 20
    count = size // 4
    found = {name: way() for name, way in measure.reads("cpu", size).items()}
    assert found["sum"] == count and found["mv"].sum() == count and found["amax"] == 1
    assert found["sum of int64"] == torch.ones(2).view(torch.int64) * (count // 2)  # both wrap around
    for way in measure.copies("cpu", size).values():
        assert way().sum() == count


def test_bandwidth_is_plausible(device: str):
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
def test_read_or_copy_bandwidth(op: str, T: int, kind: str):
    call = Call(op, DEFAULT, MODELS[DEFAULT], T)
    read = sum(torch.Size(call.size(letters)).numel() for letters in call.shapes.values()) * 2
    assert Result(call, read).kind == kind


def test_a_row_is_compared_with_the_bandwidth(tiny, monkeypatch, capsys):
    monkeypatch.setattr(device_bench, "WORTH_A_LIMIT", 1)
    ops = ["norm_add", "gate"]
    assert main(["bench", *QUICK, "--ops", *ops, "--tokens", "64", "--dtypes", "f32", "--json"]) == 0
    rows = {row["op"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {op: row["limit"] for op, row in rows.items()} == {"norm_add": "copy", "gate": "read"}
    for row in rows.values():
        assert row["of_limit"] == pytest.approx(row["gb_per_s"] / row["limit_gb_per_s"])
        assert not {"read", "copy"} & set(row["baselines_us"])


def test_seconds_each():
    times = measure.seconds_each({n: lambda n=n: time.sleep(n / 1000) for n in (1, 4)}, "cpu", 0.01)
    assert 0.001 <= times[1] < times[4] and times[4] >= 0.004


def test_wrong_baselines_are_left_out(tiny, monkeypatch, capsys):
    wrong = {"zeros": lambda residual, **_: torch.zeros_like(residual), "raises": lambda **_: 1 / 0}
    monkeypatch.setitem(BASELINES, "norm_add", BASELINES["norm_add"] | wrong)
    assert main(["bench", *QUICK, "--ops", "norm_add", "--tokens", "1", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        assert set(row["baselines_us"]) == {"rms_norm, add_"}
        assert row["failed"]["zeros"].startswith("norm_add differs") and "ZeroDivision" in row["failed"]["raises"]


def test_our_failure_is_reported_and_does_not_end_the_run(tiny, monkeypatch, capsys):
    def of_op(call, sets):
        return {"ours": lambda: 1 / 0} if call.op == "glu" else functions_of_op(call, sets)

    functions_of_op = device_bench.of_op
    monkeypatch.setattr(device_bench, "of_op", of_op)
    assert main(["bench", *QUICK, "--ops", "gate", "glu", "--tokens", "1", "--dtypes", "f32"]) == 1
    gate, glu = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("gate", "glu"))]
    assert "FAILED: ZeroDivisionError" in glu and "FAILED" not in gate


# ------------------------------------------------------------------------------------------------ the command


def test_everything_as_json(device: str, tiny, capsys):
    assert run_bench("--device", device, "--tokens", "1", "3", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["rows"]
    twice = {"route": 2, "linear": 2, "attention": 2}  # many experts; the query and the head; a long context
    twice |= {"linear_attention_": len(LAYERS)}
    assert [(r["dtype"], r["op"], r["T"]) for r in rows] == [
        (dtype, op, T) for dtype in ("bf16", "f32") for op in OPS for _ in range(twice.get(op, 1)) for T in (1, 3)
    ]
    assert all(r["us"] > 0 and r["bytes"] > 0 and r["x_pytorch"] > 0 for r in rows)
    assert all(set(r.get("failed", {})) <= {"mlx"} for r in rows)  # gather_mm takes only f32 on a CPU
    assert {name for r in rows if r["op"] == "block" for name in r["baselines_us"]} >= {
        f"transformers {name}" for name in ("eager", "batched_mm", "grouped_mm")
    }
    assert found["read_gb_per_s"] > 0 and found["device"] == device
    assert all(r["first_us"] > 0 for r in rows) and ("gpu" in found) == ("tuning" in found) == (device == "mps")


def test_a_report_says_how_the_gpu_is_tuned(mps: str, tiny, capsys):
    """Tables have a note if the parameters are not the default; JSON always has them."""
    command = ["bench", *QUICK, "--device", mps, "--ops", "glu", "--tokens", "1", "--dtypes", "f32"]
    gpu_settings.use({"tiles_per_band": 4})
    try:
        assert main(command) == 0 and main([*command, "--json"]) == 0
    finally:
        gpu_settings.use({})
    table, _, text = capsys.readouterr().out.partition("{\n")
    found = json.loads("{" + text)
    assert (
        "Tuned for this GPU: tiles_per_band 4\n" in table
        and found["notes"][-1] == "Tuned for this GPU: tiles_per_band 4"
    )
    assert found["tuning"] == {"settings": gpu_settings.defaults() | {"tiles_per_band": 4}, "default": False}
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tuning"] == gpu_settings.about() and found["tuning"]["default"] and "Tuned" not in str(found["notes"])


def test_packed_rows(device: str, tiny, capsys):
    """Each op in each format, on every device."""
    ops = ["linear", "dequantize", "experts", "block"]
    arguments = ["--formats", "dense", *PACKED, "--ops", *ops, "--tokens", "2", "--dtypes", "bf16"]
    assert run_bench("--device", device, *arguments, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    each = ["linear", "linear", "dequantize", "experts", "block"]
    assert [(r["format"], r["op"]) for r in rows] == [(f, op) for f in ("dense", *PACKED) for op in each]
    for row in rows:
        packed = row["format"] != "dense"
        assert set(row.get("failed", {})) <= {"mlx"}  # its sums in bfloat16 are sometimes too inexact on a CPU
        assert packed == (OURS_DENSE in row["baselines_us"]) == (row["x_dense"] is not None)
        if packed and row["op"] in WHOLE:
            assert set(row["baselines_us"]) <= {OURS_DENSE, "mlx"} and row["x_pytorch"] is None
        else:
            assert row["x_pytorch"] > 0
        has_row = "mlx" in (row["baselines_us"] | row.get("failed", {}))
        assert has_row == (HAS_MLX and (row["format"] in OF_MLX or (not packed and row["op"] in WHOLE)))


def test_packed_rows_in_the_table(tiny, capsys):
    assert run_bench("--formats", "mxfp4", "fp8", "--tokens", "1", "--dtypes", "f32") == 0
    head, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("op ", *DECODING))]
    assert "x dense" in head and ("x MLX" in head) == HAS_MLX
    assert [(row.split()[0], row[head.index("format") :].split()[0]) for row in rows] == [
        (op, format) for format in ("mxfp4", "fp8") for op in ("linear", "linear", "experts", "block")
    ]
    start = head.index("x dense") - 2
    assert all(float(row[start : start + 9]) >= 0 for row in rows)  # and not empty


def test_packed_rows_without_other_packages(tiny, monkeypatch, capsys):
    """transformers has no packed weights, so no note says that it is missing."""
    monkeypatch.setattr(device_bench, "has_transformers", lambda: False)
    arguments = ["--ops", "experts", "--formats", "affine4", "--tokens", "1", "--dtypes", "bf16"]
    assert main(["bench", *QUICK, *arguments]) == 0
    said = capsys.readouterr().out
    assert "transformers" not in said
    assert "x dense" in said and "x MLX" not in said


def test_a_file_without_formats_is_dense():
    """Files in benchmarks/ may predate packed weights. Columns without values are left out."""
    call = Call("experts", DEFAULT, MODELS[DEFAULT], 1)
    new = Result(call, 1e6, {"ours": 1e-3, "plain eager": 2e-3}).as_json()
    old = {name: value for name, value in new.items() if name not in ("format", "x_dense")}
    assert rows_of_bench([old]) == rows_of_bench([new]) and "format" not in rows_of_bench([new])
    packed = Result(replace(call, format="fp8"), 1e6, {"ours": 1e-3, OURS_DENSE: 3e-3, "mlx": 5e-3}).as_json()
    head, _, *rows = rows_of_bench([old, packed]).splitlines()
    assert "| format | us |" in head and "x MLX" in head and "| dense | 1000.0 |" in rows[0]
    assert "| fp8 | 1000.0 |" in rows[1] and "| 3.00 | 5.00 |" in rows[1]
    alone = Result(replace(call, format="fp8"), 1e6, {"ours": 1e-3, OURS_DENSE: 3e-3}).as_json()
    assert "x dense |" in rows_of_bench([alone]) and "x MLX" not in rows_of_bench([alone])


def test_table_without_transformers(tiny, monkeypatch, capsys):
    monkeypatch.setattr(device_bench, "has_transformers", lambda: False)
    assert main(["bench", *QUICK, "--model", DEFAULT, "--tokens", "2", "--dtypes", "bf16"]) == 0
    said = capsys.readouterr().out
    assert "transformers is not installed" in said
    rows = [line.split() for line in said.splitlines() if line.startswith(WHOLE)]
    assert [row[0] for row in rows] == list(WHOLE) and all(row[-2] == "plain" for row in rows)


def test_defaults():
    options = argparse.Namespace(model=None, ops=None, formats=None, tokens=None, dtypes=[torch.float32])
    rows = calls.calls_of(options, {(torch.float32, "dense"): MODELS[DEFAULT]})
    assert {r.op for r in rows} == set(OPS)
    experts = {op: {r.model.E for r in rows if r.op == op} for op in ("gate", "route")}
    assert experts == {"gate": {128}, "route": {128, 512}}
    assert [r.T for r in rows if r.op == "block"] == [1, 4, 32, 512] and [r.T for r in rows if r.op == "glu"][
        -1
    ] == 4096
    options.model = "olmoe"
    assert {r.op for r in calls.calls_of(options, {(torch.float32, "dense"): MODELS["olmoe"]})} == set(WHOLE)


def test_defaults_of_packed_rows():
    options = argparse.Namespace(model=None, ops=None, formats=["affine4"], tokens=None, dtypes=[torch.bfloat16])
    rows = calls.calls_of(options, {(torch.bfloat16, "affine4"): MODELS[DEFAULT]})
    tokens = {label: [r.T for r in rows if r.label == label] for label in {r.label for r in rows}}
    all_of_them = [1, 4, 32, 512]
    assert tokens == {
        "linear query affine4": all_of_them,
        "linear head affine4": all_of_them[:-1],
        "experts affine4": all_of_them,
        "block affine4": all_of_them,
    }
    shapes = {r.label: Result(r).shape for r in rows if r.T == 1}
    assert shapes["linear query affine4"] == "T=1 N=4096 H=2048" and str(rows[0]).endswith("-T1-bf16-query-affine4")
    assert shapes["linear head affine4"] == "T=1 N=151936 H=2048"
    options.ops, options.formats = ["gate", "linear"], ["dense", "fp8"]
    models = {(torch.bfloat16, format): MODELS[DEFAULT] for format in options.formats}
    assert {(r.op, r.format) for r in calls.calls_of(options, models)} == {
        ("gate", "dense"), ("linear", "dense"), ("linear", "fp8"),
    }  # fmt: skip


def test_packed_formats_of_an_op_without_weights_raise(tiny, capsys):
    assert main(["bench", *QUICK, "--ops", "gate", "linear", "--formats", "affine4"]) == 2
    assert "--ops gate: " in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="for glibc's malloc")
def test_freed_memory_is_kept():
    """New outputs then cause few page faults. It runs in a new process, because the setting cannot be undone. (Linux
    may reclaim some pages.)"""
    script = """
import resource, torch
from torch_moe_metal.commands.bench.measure import keep_freed_memory
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


def test_progress_says_how_long_everything_takes(monkeypatch, capsys):
    now = iter([100, 100, 130])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    progress = Progress(4, wanted=True)
    progress.next("first")
    progress.next("second")
    first, second = capsys.readouterr().err.split("\r\033[K")[1:]
    assert first.endswith("0/4  first  0:00") and second.endswith("1/4  second  0:30 of about 2:00")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--model", "gpt-5"], "invalid choice: 'gpt-5'"),
        (["--ops", "softmax"], "invalid choice: 'softmax'"),
        (["--tokens", "0"], "must be 1 or more, got 0"),
        (["--dtypes", "f64"], "invalid choice: 'f64'"),
        (["--device", "cuda"], "invalid choice: 'cuda'"),
        (["--formats", "int4"], "invalid choice: 'int4' (choose from "),
        (["--formats", "dense", "affine7"], "affine6"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *arguments])
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_baselines_take_the_options_of_every_model():
    """The baselines accept the options of every model."""
    for name, model in MODELS.items():
        for op in ("gate", "route", "glu", "experts", "attention"):
            call = Call(op, name, model, 1)
            found = baselines(op, call.options, call.shapes)
            assert found, (op, name)
            assert op != "attention" or ("sdpa" in found) != model.sinks, name  # PyTorch's attention has no sinks


def test_packed_variants_of_a_whole_model_share_what_stays_dense():
    model = tiny_model("qwen3_moe", moe_intermediate_size=64)
    query = model.model.layers[0].self_attn.q_proj.weight
    variants = whole_model.packed_variants(model, ["affine8"])
    assert list(variants) == ["patch, affine8 experts", "patch, affine8"]
    experts, whole = (prepare() for prepare in variants.values())
    assert experts.model.layers[0].self_attn.q_proj.weight is query
    gigabytes = [whole_model.weights_gb(one) for one in (whole, experts, model)]
    assert gigabytes == sorted(gigabytes) and gigabytes[0] < 0.5 * gigabytes[2]
    ids = torch.arange(16)[None]
    dense = model(ids).logits
    for packed in (experts, whole):
        alike = torch.cosine_similarity(packed(ids).logits.flatten(), dense.flatten(), 0)
        assert alike > 0.99  # a token may select other experts


def test_whole_model_decodes_after_each_context(tiny: Model, monkeypatch, capsys):
    """Every variant's speed at each context, in JSON and as a table."""
    monkeypatch.setattr(whole_model, "PROMPT", 8)
    lengths = []
    filled = whole_model.filled_cache
    monkeypatch.setattr(whole_model, "filled_cache", lambda *args: lengths.append(args[1]) or filled(*args))
    command = ["bench-model", "--device", "cpu", "--layers", "2", "--rounds", "1", "--context", "3", "300"]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert list(rows) == ["stock", "experts_implementation", "patch"]
    assert lengths == [3, 300] * 2 * len(rows)  # one warm-up round and one measured round
    for row in rows.values():
        assert list(row)[:3] == ["decode tokens/s at 3", "decode tokens/s at 300", "ops per token"]
        assert whole_model.HOST not in row
        assert all(value > 0 or key == "replayed layers" for key, value in row.items())
    assert rows["patch"]["ops per token"] < rows["stock"]["ops per token"]
    assert [row["replayed layers"] for row in rows.values()] == [0, 0, 2]
    assert main(command) == 0
    printed = capsys.readouterr().out.splitlines()[-4:]
    assert "decode tokens/s at 3  " in printed[0] and "at 300" in printed[0]
    assert [line.count("x)") for line in printed] == [0, 3, 3, 3] and printed[1].count("(1.00x)") == 3


def test_host_time_of_a_whole_model(monkeypatch):
    """The time until the call returns, without that of the wait, on any device but the CPU."""
    now = [0.0]

    def take(seconds: float) -> None:
        now[0] += seconds

    model = tiny_model("qwen3_moe")
    model.register_forward_hook(lambda *_: take(1))
    monkeypatch.setattr(whole_model, "filled_cache", lambda *_: DynamicCache())
    monkeypatch.setattr(whole_model, "synchronize", lambda _: take(3))
    monkeypatch.setattr(whole_model.time, "perf_counter", lambda: now[0])
    found = whole_model.decode(model, torch.ones(1, 1, dtype=torch.long), 8, 3)
    assert (found.speed, found.host) == (1 / (1 + 3), 1000)
    monkeypatch.setattr(whole_model, "decode", lambda *_: found)
    monkeypatch.setattr(whole_model, "prefill", lambda *_: 1.0)
    row = whole_model.measured(model, torch.ones(1, 1, device="meta"), [8])
    assert row[whole_model.HOST] == 1000
    head, line = whole_model.table({"stock": row}).splitlines()
    assert f"  {whole_model.HOST}" in head and "  1000.0 (1.00x)" in line


@pytest.mark.parametrize("name", whole_model.WHOLE)
def test_filled_cache_equals_that_of_a_prefill(name: str, monkeypatch):
    monkeypatch.setitem(MODELS, name, MODELS[name].reduced(E=8, K=2, H=64, I=64))
    model = whole_model.random_model(name, 4, "cpu")
    model.config.sliding_window = 16
    cache = whole_model.filled_cache(model, 40)
    read = cache_of(model(torch.zeros(1, 40, dtype=torch.long), use_cache=True))
    for filled, layer in zip(cache.layers, read.layers, strict=True):
        assert type(filled) is type(layer)
        if isinstance(layer, LinearAttentionLayer):
            continue
        assert filled.get_seq_length() == layer.get_seq_length() == 40
        for a, b in ((filled.keys, layer.keys), (filled.values, layer.values)):
            assert a.shape == b.shape and a.dtype == b.dtype


def test_context_0_raises(capsys):
    with pytest.raises(SystemExit):
        main(["bench-model", "--context", "0"])
    assert "must be 1 or more, got 0" in capsys.readouterr().err
