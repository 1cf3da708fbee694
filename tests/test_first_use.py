"""The check at first use finds kernels and operations of PyTorch that are wrong, and others compute instead."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_moe_metal
from conftest import DEVICES, SIMULATED
from simulated import lines_of
from tiny_models import tiny_model
from torch_moe_metal import arguments, first_use, formats, gpu_settings, nn, refused, torch_checks, verdicts
from torch_moe_metal.checked_kernels import HELPERS, Kernel, check_of, kernels_of
from torch_moe_metal.first_use import MORE_TOKENS
from torch_moe_metal.samples import SAMPLES
from torch_moe_metal.verdicts import Verdict
from torch_moe_metal.warmup import TOKENS, new_calls

pytestmark = pytest.mark.skipif(
    not SIMULATED or "mps" not in DEVICES, reason="a Mac's own kernels cannot be made wrong"
)

SIZES = {"hidden_size": 64, "inner_size": 32, "num_experts": 8, "top_k": 2}


def all_keys() -> set[str]:
    """The names of all kernels in the file of verdicts, and of the checks of PyTorch."""
    lines = (line.split(" ", 2) for line in torch.ops.moe_metal._kernels())
    return {f"{name} {threads}" for threads, name, _ in lines} | {f"torch.{c.__name__}" for c in torch_checks.CHECKS}


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """The check as in a new process. The returned function says which kernels are wrong; all others are right."""
    monkeypatch.setenv(first_use.SWITCH, "1")
    monkeypatch.setenv("MOE_METAL_TUNING", str(tmp_path / "tuning.json"))
    for name, value in (("_checked", set()), ("_verdict", None), ("_reported", set())):
        monkeypatch.setattr(first_use, name, value)
    lines, real = [], Kernel.refuse
    monkeypatch.setattr(Kernel, "refuse", lambda kernel: lines.append(" ".join(kernel)) or real(kernel))

    def given(*wrong: str) -> None:
        keys = all_keys()
        bad = {key: "relative error 1e+00, allowed 2e-02" for key in keys if key.startswith(wrong or ("none",))}
        monkeypatch.setattr(first_use, "_verdict", Verdict(keys - bad.keys(), bad))

    yield given
    refused._refused.clear()
    gpu_settings.use({})
    for line in lines:
        torch.ops.moe_metal._refuse(line, False)


def functions_of(model: torch.nn.Module) -> set[str]:
    """The functions of the shaders that the model needs now."""
    return {kernel.function for kernel in kernels_of(new_calls(model, set(), (*TOKENS, *MORE_TOKENS)))}


# ------------------------------------------------------------------------------------------------ what is checked


@pytest.mark.parametrize(
    "libraries",
    [("dense", "q4_k"), pytest.param(tuple(formats.LIBRARIES), marks=pytest.mark.slow)],
    ids=["two_formats", "all_formats"],
)
def test_every_kernel_has_a_check(libraries: tuple[str, ...]) -> None:
    """For each function, format and number of threads. Nothing is compiled. Packed columns do not exist, and each
    address of GGUF's MXFP4 is aligned."""
    missing = []
    for name in torch.ops.moe_metal._functions()[0]:
        function, threads = name.removesuffix(" threads)").split(" (")
        if function.startswith("tensor_products"):
            continue  # compiled to be chosen: test_matrix_units
        op = next(sample.op for sample in SAMPLES if function in sample.functions)
        packs = arguments.takes_formats(op) and function not in HELPERS and "columns" not in function
        dtypes = "none" if function in ("experts_sort", "experts_gather") else "bfloat"
        dtypes = "bfloat_bfloat" if function.startswith("gate") else dtypes
        for library in libraries if packs else ("dense",):
            kernel = Kernel(function, library, dtypes, threads)
            if function in HELPERS[2:] or (library == "ggml_mxfp4" and "wide" not in function):
                continue
            if check_of(kernel, Kernel("experts_gate_up_tiles16_wide", library, "bfloat", "128")) is None:
                missing.append(str(kernel))
    assert not [name for name in missing if not name.startswith("dequantize")] and len(missing) < 2


def checked_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of calls of each check, which does nothing."""
    found: list[int] = []
    monkeypatch.setattr(first_use, "check_calls", lambda calls, _: found.append(len(calls)))
    return found


def test_what_starts_it(verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked_calls(monkeypatch)
    moe = nn.MoE(**SIZES)
    with FakeTensorMode():
        nn.MoE(**SIZES, device="mps")
    assert not found
    moe.to("mps")
    assert len(found) == 1
    torch.nn.Sequential(nn.MoE(**SIZES), nn.MoE(**SIZES)).to("mps")  # the same kernels
    assert len(found) == 1
    moe.quantize_("mxfp4")
    assert len(found) == 2
    model = tiny_model("qwen3_moe", "mps")
    torch_moe_metal.patch(model)
    assert len(found) == 3
    monkeypatch.setenv(first_use.SWITCH, "0")
    nn.MoE(**SIZES, device="mps", dtype=torch.float16)
    assert len(found) == 3


def test_the_modes_of_its_caller(verdict, monkeypatch: pytest.MonkeyPatch, recwarn) -> None:
    """They do not change the check. Only one kernel is compiled."""
    verdict()
    moe = nn.MoE(**SIZES, dtype=torch.bfloat16)
    first_use._verdict.right -= {"route_1_bfloat 128"}
    monkeypatch.setattr(first_use, "new_calls", lambda *_: [lambda: torch.ops.moe_metal.route(logits, top_k=2)])
    logits = torch.empty(3, 8, dtype=torch.bfloat16, device="meta")
    with torch.inference_mode(), torch.device("mps"), torch.autocast("cpu", torch.bfloat16):
        first_use.check(moe)
    assert "route_1_bfloat 128" in first_use._verdict.right and not recwarn.list
    assert verdicts.load().right == first_use._verdict.right  # saved


def test_an_aborted_command_buffer(verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that macOS aborts is not used, and the verdict is not saved."""
    import metal_sim

    verdict()
    moe = nn.MoE(**SIZES, dtype=torch.bfloat16)
    first_use._verdict.right -= {"route_1_bfloat 128"}
    monkeypatch.setattr(first_use, "new_calls", lambda *_: [lambda: torch.ops.moe_metal.route(logits, top_k=2)])
    logits = torch.empty(3, 8, dtype=torch.bfloat16, device="meta")
    said = "kernel route_1_bfloat: .*in a check of the kernels: it took too long"
    with metal_sim.failing_commits("it took too long"), pytest.warns(UserWarning, match=said):
        first_use.check(moe)
    assert first_use._verdict.failed and not verdicts.load().errors


# ------------------------------------------------------------------------------------------------ what replaces

MODELS = {
    "dense": lambda: tiny_model("qwen3_moe", "mps").to(torch.bfloat16),
    "packed": lambda: torch_moe_metal.quantize_(tiny_model("qwen3_moe", "mps").to(torch.bfloat16), "mxfp4"),
}
#: A wrong function, what is used instead, and what PyTorch computes.
WAYS = {
    "linear_rows4_wide": ("linear_rows2_wide", None),
    "linear_rows": ("linear_tiles16_wide", None),
    "linear_tiles16": ("linear_tiles32_wide", None),
    "linear_tiles64": ("linear_tiles32_wide", None),
    "experts_gate_up_rows2": ("experts_gate_up_rows_wide", None),
    "experts_down_rows": ("experts_down_tiles16_wide", None),
    "experts_gate_up_tiles32": ("experts_gate_up_tiles16_wide", None),
    "attention_combine": ("attention_64_wide", None),
    "attention_64_wide": (None, "attention"),
    "linear_": ("dequantize", "linear"),
    "experts_": (None, "experts"),
    "rope": (None, "rope"),
}


@pytest.mark.parametrize("wrong", WAYS)
def test_another_way_computes(wrong: str, verdict) -> None:
    """Nothing is computed here: the kernels have verdicts, and warm-up calls find those that are needed."""
    instead, by_torch = WAYS[wrong]
    verdict(wrong)
    model = MODELS["packed" if wrong.startswith("linear") else "dense"]()
    with pytest.warns(UserWarning, match=f"wrong on Simulated Metal device, macOS .*: kernel {wrong}") as said:
        torch_moe_metal.patch(model)
    assert len(said) == 1 and "relative error 1e+00" in str(said[0].message)
    needed = functions_of(model)
    assert not any(function.startswith(wrong) for function in needed)
    assert instead in {None, "dequantize", *needed} and refused._refused == ({by_torch} if by_torch else set())


def test_nothing_replaces_dequantize(verdict) -> None:
    verdict("dequantize")
    with pytest.warns(UserWarning, match="nothing replaces dequantize_mxfp4_bfloat, so calls that need it raise"):
        moe = nn.MoE(**SIZES, dtype=torch.bfloat16, device="mps").quantize_("mxfp4")
    parts = moe.parts("down")
    with pytest.raises(RuntimeError, match="kernel dequantize_mxfp4_bfloat gave wrong results on this GPU"):
        torch.ops.moe_metal.dequantize(*parts, format="mxfp4", dtype=torch.bfloat16)


@pytest.mark.parametrize("wrong", [(), ("tensor_products32",), ("experts_gather",)])
def test_matrix_units(wrong: tuple[str, ...], verdict) -> None:
    """On an M5 they are on at once, without those that are wrong. What `tune` has found stays."""
    import metal_sim

    moe = nn.MoE(**SIZES, dtype=torch.bfloat16)
    with metal_sim.playing_gpu("Apple M5", 1010), metal_sim.playing_macos(26, 3):
        verdict(*wrong)
        with pytest.warns(match="tensor_products32|experts_gather") if wrong else contextlib.nullcontext():
            moe.to("mps")
        needed = functions_of(moe)
        assert gpu_settings.current()["tensor_ops"] == first_use.ROWS_FOR_UNITS
        assert ("tensor_products64" in needed) == (wrong != ("experts_gather",))
        assert "tensor_products32" not in needed or not wrong
        gpu_settings.use({})
        gpu_settings.save({"tensor_ops": 0})
        first_use._checked.clear()
        first_use.check(moe)
        assert gpu_settings.current()["tensor_ops"] == 0
    first_use._checked.clear()
    first_use.check(moe)  # on another GPU
    assert gpu_settings.current()["tensor_ops"] == 0


@pytest.mark.parametrize("name", ["bias", "attention"])
def test_wrong_operations_of_pytorch(name: str, verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict(f"torch.{name}")
    with pytest.warns(UserWarning, match="PyTorch's relative error"):
        nn.MoE(**SIZES, device="mps")
    q = torch.empty(1, 2, 33, 64, device="mps")
    from torch_moe_metal.transformers.fusing.attention import is_for_pytorch

    assert is_for_pytorch(q, q, q, None) == (name == "bias")


# ------------------------------------------------------------------------------------------------ the file


def test_verdicts_are_kept(verdict, monkeypatch: pytest.MonkeyPatch, recwarn) -> None:
    assert verdicts.load() == Verdict()
    verdicts.save(Verdict({"a"}, {"b": "why"}, {"c": "out of memory"}))
    verdicts.save(Verdict({"d", "b"}))  # of another process
    assert verdicts.load() == Verdict({"a", "d"}, {"b": "why"}) and not recwarn.list
    monkeypatch.setattr(verdicts.macos, "build", lambda: "25F71")
    assert verdicts.load() == Verdict()
    verdicts.save(Verdict({"e"}))
    assert len(verdicts.saved()) == 2 and verdicts.load() == Verdict({"e"})


@pytest.mark.parametrize("content", ["{", "[]", '{"a": {}}', '{"a": {"right": [1], "wrong": {}}}'])
def test_a_broken_file_is_ignored(content: str, verdict) -> None:
    file = verdicts.path()
    file.write_text(content)
    with pytest.warns(UserWarning, match=r"the verdicts in .*checked.json are ignored") as said:
        assert verdicts.load() == Verdict()
    assert len(said) == 1
    verdicts.save(Verdict({"a"}))
    assert [each["right"] for each in json.loads(file.read_text()).values()] == [["a"]]


def test_an_unwritable_file_is_ignored(verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOE_METAL_TUNING", str(tmp_path / "file" / "tuning.json"))
    with pytest.warns(UserWarning, match="the verdicts in .* are ignored"):
        verdicts.save(Verdict({"a"}))
    monkeypatch.setenv("MOE_METAL_TUNING", "")
    verdicts.save(Verdict({"a"}))


# ------------------------------------------------------------------------------------------------ wrong kernels

COMPILER = """
for word; do
  case $word in
    *program_source.cpp)
      sed -i {edits} "$word"
  esac
done
exec $(command -v clang++-19 || command -v clang++) "$@"
"""
# Of the shaders as C++: a part of a kernel, and what it becomes.
FAULTS = {
    "several": (r"min(token + t, params\.T - 1)", "min(token, params.T - 1)"),
    "rows": (
        r"output\[ulong(token) \* params\.N + n\] = T(value)",
        "output[ulong(token) * params.N + n] = T(2 * value)",
    ),
    "tiles32": (r"rows\[j\] = token + j;", "rows[j] = (TileRows == 32 ? 0 : token) + j;"),
    "tiles": (r"rows\[j\] = token + j;", "rows[j] = token;"),
    "down": (r"output\[ulong(token) \* params\.H + h\] = T(", "output[ulong(token) * params.H + h] = T(total + "),
    "pairs": (r"{group\.x / params\.K, pair\.second / params\.K}", "{group.x / params.K, group.x / params.K}"),
    "combine": (r"sum += loaded\[n\] \* its_factor", "sum += loaded[0] * its_factor"),
    "attention": (r"attended\.total += scores\.at\[n\]", "attended.total += 2 * scores.at[n]"),
    "rope": ("rope_head(of_token, head, cosines, sines", "rope_head(of_token, head, sines, cosines"),
    "matrix units": (r"T(results\[i\] + added)", "T(2 * results[i] + added)"),
}
#: Faults, the family and format of a model with them, kernels that the warning names, and what PyTorch computes.
PLANTED = {
    "other_kernels": ("several tiles32 pairs combine", "qwen3_moe", "mxfp4", "linear_rows4_wide linear_tiles32_wide "
                      "experts_gate_up_rows2_wide attention_combine", set()),
    "pytorch": ("attention rope down", "gpt_oss", "", "attention rope experts_down", {"attention", "rope"}),
    "packed": ("several rows tiles", "qwen3_moe", "mxfp4", "linear_rows_wide_mxfp4", {"linear"}),
}  # fmt: skip

MODEL = r"""
os.environ["TORCH_MOE_METAL_CHECK"], os.environ["MOE_METAL_TUNING"] = "1", {tuning!r}
import re, warnings
from tiny_models import tiny_model, tokens
from torch_moe_metal import refused, torch_checks
torch_checks.CHECKS = ()
model = tiny_model({family!r}, "cpu")
if {format!r}:
    torch_moe_metal.quantize_(model, {format!r})
ids = [tokens(2, T) for T in (40, 10, 4, 1)]
want = [model(each).logits for each in ids]
model.to("mps")
for _ in range(2):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch_moe_metal.patch(model)
    errors = [(model(x.to("mps")).logits.cpu() - w).norm() / w.norm() for x, w in zip(ids, want)]
    print(*re.findall(r"kernel (\w+)", " ".join(str(each.message) for each in said)))
print(max(errors).item())
print(*refused._refused)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults(name: str, tmp_path: Path) -> None:
    """A model with wrong kernels gives right logits."""
    faults, family, format, kernels, by_torch = PLANTED[name]
    edits = " ".join(f"-e 's@{right}@{wrong}@'" for right, wrong in (FAULTS[fault] for fault in faults.split()))
    script = MODEL.format(family=family, format=format, tuning=str(tmp_path / "tuning.json"))
    named, again, error, refused_ops = lines_of(script, COMPILER.format(edits=edits), tmp_path)
    assert all(any(kernel.startswith(wanted) for kernel in named.split()) for wanted in kernels.split()), named
    assert not again and float(error) < 1e-4 and set(refused_ops.split()) == by_torch


@pytest.mark.slow
def test_planted_faults_of_matrix_units(tmp_path: Path) -> None:
    """Tiles compute instead, in the same format only."""
    right, wrong = FAULTS["matrix units"]
    script = f"""
os.environ["TORCH_MOE_METAL_CHECK"], os.environ["MOE_METAL_TUNING"] = "1", ""
import warnings
from torch_moe_metal import checked_kernels, gpu_settings, nn, torch_checks
torch_checks.CHECKS, checked_kernels.SIZES_OF_MODELS = (), {{"H": 128}}
x = torch.randn(80, 64, dtype=torch.bfloat16)
moe = nn.MoE(**{SIZES}, dtype=torch.bfloat16)
want = moe(x)
with metal_sim.playing_gpu("Apple M5", 1010), metal_sim.playing_macos(26, 3):
    with warnings.catch_warnings(record=True) as said:
        moe.to("mps")
    print(len(said), "tensor_products32_bfloat" in str(said[0].message), gpu_settings.current()["tensor_ops"])
    with metal_sim.record() as record:
        got = moe(x.to("mps")).cpu()
print(any("tensor" in name for name in record.kernels), ((got - want).norm() / want.norm()).item() < 1e-2)
"""
    lines = lines_of(script, COMPILER.format(edits=f"-e 's@{right}@{wrong}@'"), tmp_path)
    assert lines == ["1 True 24", "False True"]
