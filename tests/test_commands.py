"""`python -m torch_moe_metal doctor` and `demo`, and the errors of broken installations."""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_moe_metal
from conftest import DEVICES, SIMULATED
from simulated import lines_of
from torch_moe_metal import reference, torch_checks
from torch_moe_metal.arguments import ARGUMENTS, DTYPES
from torch_moe_metal.commands import demo, doctor
from torch_moe_metal.commands.bench import block, samples, whole_model
from torch_moe_metal.commands.bench.model_sizes import DEFAULT, MODELS
from torch_moe_metal.commands.bench.samples import Sample
from torch_moe_metal.commands.command_line import main
from torch_moe_metal.commands.common import devices
from torch_moe_metal.transformers_support import why_unsupported

PACKAGE = Path(torch_moe_metal.__file__).parent

# ------------------------------------------------------------------------------------------------ doctor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", samples.TOKENS)
@pytest.mark.parametrize("op", ARGUMENTS)
def test_doctor_passes(op: str, tokens: int, dtype: torch.dtype, device: str):
    assert samples.problem(Sample(op, tokens), device, dtype) is None


@pytest.mark.parametrize("sample", samples.samples_of("gate") + samples.samples_of("route"), ids=lambda s: f"{s.op}{s}")
def test_samples_of_doctor_have_no_near_ties(sample: Sample):
    """Rounding must not change the selected experts on any device: with and without noise the reference selects the
    same."""
    args = {name: tensor.double() for name, tensor in sample.arguments(torch.float32).items()}
    _, want = getattr(reference, sample.op)(**args, **sample.options)
    noisy = {name: tensor * (1 + 1e-5 * torch.randn(tensor.shape).double()) for name, tensor in args.items()}
    assert torch.equal(getattr(reference, sample.op)(**noisy, **sample.options)[1], want)


@pytest.mark.skipif(not SIMULATED or "mps" not in DEVICES, reason="only the simulated Metal records dispatches")
def test_samples_of_doctor_run_every_function():
    """Each sample runs the functions that it names, and together they run all. Nothing is computed here."""
    script = """
from torch_moe_metal.arguments import ARGUMENTS, options
from torch_moe_metal.commands.bench.samples import never_ran, samples_of, under
print(len(never_ran()))
with metal_sim.host_only(), metal_sim.playing_macos(26, 3):
    for sample in (sample for op in ARGUMENTS for sample in samples_of(op) if sample.format == "dense"):
        given = {name: tensor.to("mps") for name, tensor in sample.arguments(torch.bfloat16).items()}
        with metal_sim.record() as record, under(sample.settings, "mps"):
            op = getattr(torch.ops.moe_metal, sample.op)
            op(**given, **sample.options, **options(sample.op, {"dtype": torch.bfloat16}))
        ran = {dispatch.kernel.partition("_bfloat")[0] for dispatch in record.dispatches}
        if set(sample.functions) - ran:
            print(sample.op, sample, "ran", ran)
print("never:", never_ran())
"""
    count, *others, never = lines_of(script)
    assert int(count) > 60 and not others and never == "never: []"


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    said = capsys.readouterr().out
    assert stop.value.code == 0
    assert said == f"torch_moe_metal {torch_moe_metal.__version__}, torch {torch.__version__}\n"


def test_doctor_warns_of_busy_cores_and_of_an_unsupported_transformers(monkeypatch):
    cores = torch.get_num_threads() + 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0, 0))
    assert not list(doctor.advice())
    monkeypatch.setattr(os, "getloadavg", lambda: (cores - 0.2, 0, 0))
    [warning] = doctor.advice()
    assert f"threads, but only 0.2 of {cores} cores were idle" in warning and "OMP_NUM_THREADS" in warning
    monkeypatch.setattr(doctor, "installed", lambda _: "4.57.6")
    first, _ = doctor.advice()
    assert first == why_unsupported("4.57.6") != None  # noqa: E711


def test_no_command_lists_them(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert re.findall(r"^    ([\w-]+)", said, re.MULTILINE)[:3] == ["serve", "chat", "fit"]


@pytest.mark.slow
def test_fit_with_an_unsupported_transformers_is_one_line():
    program = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: "4.57.6" if name == "transformers" else real(name)
from torch_moe_metal.__main__ import main
raise SystemExit(main(["fit", "gpt-oss-20b", "--memory", "16"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"fit: {why_unsupported('4.57.6')}\n")


@pytest.mark.parametrize(
    "dtypes", [[torch.float32], pytest.param([*reference.TOLERANCES], marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_doctor_reports(dtypes: list[torch.dtype], monkeypatch, capsys):
    monkeypatch.setattr(reference, "TOLERANCES", {dtype: reference.TOLERANCES[dtype] for dtype in dtypes})
    monkeypatch.setattr(torch_checks, "DRAWS", 1000)
    unpacked, dequantize = [], reference.dequantize

    @functools.wraps(dequantize)
    def counted(*args, **kwargs):
        result = dequantize(*args, **kwargs)
        unpacked.append(result.numel() * (kwargs["format"] != "dense"))
        return result

    monkeypatch.setattr(reference, "dequantize", counted)
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    available = [device for device, missing in devices.devices() if not missing]
    for version in (torch_moe_metal.__version__, torch.__version__, torch_moe_metal.cpu_isa):
        assert version in said
    assert re.findall(r"^  (\w+) +ok$", said, re.MULTILINE)[: len(ARGUMENTS)] == list(ARGUMENTS)
    assert sum(unpacked) < 4e7 * len(dtypes) * len(available)  # takes most of the time


def test_doctor_reports_what_is_wrong(monkeypatch, capsys):
    """A wrong result, wrong ids and an exception; the other ops are still tested."""
    monkeypatch.setattr(reference, "TOLERANCES", {torch.float32: reference.TOLERANCES[torch.float32]})
    monkeypatch.setattr(torch_checks, "DRAWS", 1000)
    monkeypatch.setattr(reference, "norm_add", lambda residual, input, **_: residual + input)
    route = reference.route
    monkeypatch.setattr(reference, "route", lambda *a, **o: (route(*a, **o)[0], route(*a, **o)[1] + 1))
    monkeypatch.setitem(ARGUMENTS, "glu", ARGUMENTS["glu"] | {"limit": ARGUMENTS["glu"]["up"]})
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert set(re.findall(r"^  (\w+) +FAILED", said, re.MULTILINE)) == {
        "norm_add",
        "route",
        "gate",
        "glu",
    }  # gate uses route
    assert "relative error" in said and "allowed 1e-06" in said and "wrong expert ids" in said
    assert re.search(r"[48] failed. Rebuild", said) and re.search(r"residual_norm +ok", said)


def test_doctor_computes_on_the_gpu(monkeypatch):
    """A GPU that PyTorch reports as available but that has no memory, as on virtual Macs."""

    def ones(*size, device="cpu"):
        raise RuntimeError("MPS backend out of memory\nmore lines")

    for name in ("is_built", "is_available"):
        monkeypatch.setattr(torch.backends.mps, name, lambda: True)
    monkeypatch.setattr(devices, "has_kernel", lambda _: True)
    monkeypatch.setattr(torch, "ones", ones)
    assert dict(devices.devices())["mps"].endswith("cannot compute on it: MPS backend out of memory")


# ------------------------------------------------------------------------------------------------ demo


@pytest.fixture
def tiny(monkeypatch) -> None:
    monkeypatch.setitem(MODELS, DEFAULT, MODELS[DEFAULT].reduced(E=8, K=2, H=64, I=64))
    monkeypatch.setattr(demo, "SECONDS", 0.01)
    monkeypatch.setattr(demo, "CONTEXT", 40)
    monkeypatch.setattr(whole_model, "TOKENS", 2)


def test_demo_compares(tiny, capsys):
    assert main(["demo"]) == 0
    said = capsys.readouterr().out
    assert "H 64, I 64, E 8, K 2" in said
    ours = re.findall(r"^  torch_moe_metal +[\d.]+ ms .* ([\d.]+) times the best stock$", said, re.MULTILINE)
    assert len(ours) == 2 and all(float(ratio) > 0 for ratio in ours)
    # batched_mm only for one token
    assert len(re.findall(r"^  transformers \w+ +[\d.]+ ms", said, re.MULTILINE)) == 3 + 2
    # The model's weights are packed at the end.
    decoded = re.findall(r"^  (\w[\w, ]+?) +([\d.]+) tokens/s .* GB of weights(.*)$", said, re.MULTILINE)
    names = [name for name, _, _ in decoded]
    assert names == ["stock", *["stock, batched_mm"] * (len(names) == 4), "patch", "patch, 4 bits"]
    assert all(bool(ratio) == name.startswith("patch") for name, _, ratio in decoded)


def test_demo_decodes_with_packed_weights(tiny, monkeypatch):
    """The last way has far smaller weights than the others, which are dense."""
    gigabytes = []
    decode = whole_model.decode
    monkeypatch.setattr(
        whole_model, "decode", lambda model, *args: gigabytes.append(demo.weights_gb(model)) or decode(model, *args)
    )
    demo.compare_model("cpu")
    assert len(gigabytes) == 3 and gigabytes[0] == gigabytes[1] > 2 * gigabytes[2]


def test_demo_skips_the_model_if_memory_is_short(tiny, monkeypatch, capsys):
    monkeypatch.setattr(demo, "free_memory", lambda device: 1000)
    monkeypatch.setattr(whole_model, "random_model", lambda *_: pytest.fail("allocates the weights"))
    assert main(["demo"]) == 0
    assert re.search(r"^Skipped: this needs .* of free memory, and 0.0 GB are free.$", capsys.readouterr().out, re.M)


def test_demo_detects_a_wrong_result(tiny, monkeypatch, capsys):
    class Wrong:
        gate, glu = torch.ops.moe_metal.gate, torch.ops.moe_metal.glu

        @staticmethod
        def experts(*args, **kwargs):
            return torch.ops.moe_metal.experts(*args, **kwargs) * 1.1

    monkeypatch.setattr(block, "ops", Wrong)
    assert main(["demo"]) == 1
    assert "The fused layer is wrong" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ broken installations


def import_error(folder: Path) -> str:
    """The output of `import torch_moe_metal` in this folder."""
    program = "try:\n import torch_moe_metal\nexcept ImportError as error:\n print(error)"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("missing, named", [("_cpu_*.so", "_cpu_default.so missing"), ("_C.so", "_C.so missing")])
def test_missing_library_raises(tmp_path: Path, missing: str, named: str):
    """Reported as missing, not as one for another torch version."""
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns(missing, "__pycache__"))
    said = import_error(tmp_path)
    assert "not built" in said and named in said and "another version" not in said


@pytest.mark.slow
def test_library_that_does_not_load_raises(tmp_path: Path):
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / PACKAGE.name / "_C.so").write_bytes(b"no library")
    said = import_error(tmp_path)
    assert f"does not load into torch {torch.__version__}" in said and "The loader reports" in said


@pytest.mark.slow
def test_a_library_without_openmp_raises(tmp_path: Path):
    """As on a Mac with a torch without OpenMP: a function of its runtime is missing."""
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    program = "void __kmpc_of_no_library(void); void run(void) { __kmpc_of_no_library(); }"
    made = tmp_path / PACKAGE.name / "_C.so"
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-x", "c", "-", "-o", made]
    subprocess.run(command, input=program, text=True, check=True)
    said = import_error(tmp_path)
    assert "a torch with OpenMP" in said and "another version" not in said and "__kmpc_of_no_library" in said
