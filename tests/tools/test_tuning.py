"""The launch parameters ("settings"): none changes a result, they are saved in a file, and `tune` selects them."""

import contextlib
import json
import math
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import each_op
import test_ops
import test_tensor_ops
from cases import BFLOAT, CASES, FLOAT, Args, Case
from conftest import DEVICES, SIMULATED, in_full_grid
from torch_moe_metal import gpu_settings
from torch_moe_metal.commands import tune
from torch_moe_metal.commands.bench.calls import Call
from torch_moe_metal.commands.bench.model_sizes import DEFAULT, MODELS, of_config
from torch_moe_metal.commands.command_line import main
from torch_moe_metal.commands.comparison import MIN_WIN, Comparison, compare
from torch_moe_metal.commands.tune import SETTINGS, Setting, search

on_mps = pytest.mark.skipif("mps" not in DEVICES, reason="only mps has settings, and MOE_METAL_DEVICES leaves it out")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch) -> Path:
    """Settings are saved there. Afterwards the defaults are set again."""
    monkeypatch.setenv("MOE_METAL_TUNING", str(tmp_path / "folder" / "tuning.json"))
    yield tmp_path / "folder" / "tuning.json"
    if gpu_settings.is_built():
        gpu_settings.use({})


@pytest.fixture
def m9(monkeypatch) -> str:
    monkeypatch.setattr(gpu_settings, "gpu", lambda: "Apple M9")
    return "Apple M9"


# ------------------------------------------------------------------------------------------------ right answers

ALTERNATIVES = [(setting, value) for setting in SETTINGS for value in setting.values]
EACH = pytest.mark.parametrize("setting, value", ALTERNATIVES, ids=[f"{n.name}-{v}" for n, v in ALTERNATIVES])
ROW_OPS = (
    "norm",
    "norm_add",
    "residual_norm",
    *(op for op in tune.arguments.ARGUMENTS if "norm" in op and "sum" in op),
)
#: Small cases. For every alternative of a setting, at least one of its cases is dispatched differently.
SHOWING = {
    "decode_simdgroups": [
        ("experts", {"T": 3, "E": 8, "K": 4, "H": 140, "I": 40}),
        ("linear", {"T": 2, "N": 70, "H": 96}),
    ],
    "target_simdgroups": [
        ("linear", {"T": 8, "N": 320, "H": 517}),
        ("experts", {"T": 3, "E": 8, "K": 4, "H": 264, "I": 40}),
        ("linear", {"T": 3, "N": 320, "H": 1028}),
        ("attention", {"B": 8, "A": 4, "J": 4, "T": 1, "S": 1300, "D": 16, "V": 16}),
    ],
    "decode_max_slots_percent": [("experts", {"T": T, "E": 20, "K": 2, "H": 40, "I": 24}) for T in (9, 13, 18, 28, 38)],
    "gate_up_pairs_percent": [("experts", {"T": T, "E": 16, "K": 2, "H": 40, "I": 24}) for T in (2, 4, 8)],
    "down_pairs_percent": [("experts", {"T": T, "E": 16, "K": 2, "H": 40, "I": 24}) for T in (2, 4, 8)],
    "few_tokens": [("linear", {"T": T, "N": 37, "H": 96}) for T in (3, 6, 10, 14, 20, 28)],
    "tokens_together": [("linear", {"T": T, "N": 37, "H": 96}) for T in (2, 5, 8)],
    "tile32_min_rows": [("experts", {"T": T, "E": 2, "K": 1, "H": 40, "I": 24}) for T in (20, 30, 40)],
    "tile64_min_rows": [("experts", {"T": T, "E": 2, "K": 1, "H": 24, "I": 16}) for T in (80, 112, 160, 256)],
    "tiles_per_band": [
        ("experts", {"T": 80, "E": 4, "K": 2, "H": 40, "I": 24}),
        ("linear", {"T": 300, "N": 37, "H": 24}),
    ],
    # In float32 and in bfloat16; only bfloat16 can use Apple's kernel.
    "tensor_ops": [
        *(("experts", {"T": T, "E": 2, "K": 1, "H": 40, "I": 24}) for T in (20, 20, 80, 80, 160, 160)),
        *(("linear", {"T": T, "N": 37, "H": 96}) for T in (40, 40)),
    ],
    "gate_min_tiles": [("gate", {"T": T, "E": 65, "K": 2, "H": 8}) for T in (257, 545, 1025, 1281)],
    "attention_keys": [("attention", {"B": 1, "A": 4, "J": 2, "T": 1, "S": 300, "D": 64, "V": 64})],
    "commit_dispatches": [("experts", {"T": 3, "E": 8, "K": 4, "H": 40, "I": 24})],
    "commit_threads": [("experts", {"T": 80, "E": 4, "K": 2, "H": 40, "I": 24})],
    "row_threads": [(op, {"T": 2, "K": 2, "H": 2100, "U": 1}) for op in ROW_OPS],
}


def showing(setting: Setting) -> list[Case]:
    return [
        Case(op, f"tuning_T{dims['T']}", dims, options={"top_k": dims["K"]} if op == "gate" else {}, dtype=dtype)
        for (op, dims), dtype in zip(SHOWING[setting.name], [FLOAT, BFLOAT] * 4, strict=False)
    ]


def table(setting: Setting) -> list[Case]:
    """The fast cases of the ops that it affects."""
    ops = {op for op, _ in SHOWING[setting.name]}
    return [case for case in CASES if case.op in ops and not in_full_grid(case, "mps")]


def dispatched(case: Case, args: Args, settings: dict) -> list[tuple]:
    import metal_sim

    gpu_settings.use(settings)
    with metal_sim.record() as record, metal_sim.host_only():
        each_op.run(case, args)
    inline = [[a["bytes"] for a in d.arguments if a["bytes"]] for d in record.dispatches]
    return [(d.kernel, d.grid, d.threads, bytes) for d, bytes in zip(record.dispatches, inline, strict=True)]


def changed(setting: Setting, value: int) -> list[Case]:
    """The cases whose dispatches this value changes, out of those above and the fast table. All others have the same
    dispatches as with the default, which test_ops checks."""
    cases = []
    for case in [*showing(setting), *table(setting)]:
        args = case.arguments("mps")
        if dispatched(case, args, {setting.name: value}) != dispatched(case, args, {}):
            cases.append(case)
    return cases


def sampled(setting: Setting, value: int) -> list[Case]:
    """For settings whose effect is not in the dispatches (commits), and for a Mac, which does not record them."""
    fast, step = table(setting), 20
    return [*showing(setting), *fast[random.Random(f"{setting.name} {value}").randrange(step) :: step]]


@contextlib.contextmanager
def kernels_of_others(setting: Setting) -> Iterator[float]:
    """With Apple's kernels, as from macOS 26.3 on. -> the roundings that they may add"""
    if setting.name not in gpu_settings.PER_MACOS:
        yield 1
    elif not SIMULATED:
        yield test_tensor_ops.ROUNDINGS
    else:
        import metal_sim

        with metal_sim.playing_macos(26, 3):
            yield test_tensor_ops.ROUNDINGS


@pytest.mark.slow
@on_mps
@EACH
def test_every_alternative_is_right(setting: Setting, value: int, mps: str):
    with kernels_of_others(setting) as roundings:
        is_right(setting, value, mps, roundings)


def is_right(setting: Setting, value: int, mps: str, roundings: float) -> None:
    """On every fast case that it dispatches differently."""
    if not SIMULATED or setting.name.startswith("commit_"):
        cases = sampled(setting, value)
    else:
        cases = changed(setting, value)
        assert bool(cases) == (value != gpu_settings.defaults()[setting.name])
    gpu_settings.use({setting.name: value})
    for case in cases:
        test_ops.test_equals_the_reference(mps, case, roundings)


@pytest.mark.full_grid
@on_mps
@pytest.mark.slow
@EACH
def test_every_alternative_is_right_on_the_whole_table(setting: Setting, value: int, mps: str):
    gpu_settings.use({setting.name: value})
    with kernels_of_others(setting) as roundings:
        for case in table(setting):
            test_ops.test_equals_the_reference(mps, case, roundings)


# ------------------------------------------------------------------------------------------------ setting them


@on_mps
def test_settings_are_set_and_the_rest_is_the_default(mps: str):
    defaults = gpu_settings.defaults()
    assert gpu_settings.current() == defaults and gpu_settings.about() == {"settings": defaults, "default": True}
    gpu_settings.use({"tiles_per_band": 4, "few_tokens": 3})
    assert (
        gpu_settings.current() == defaults | {"tiles_per_band": 4, "few_tokens": 3}
        and not gpu_settings.about()["default"]
    )
    gpu_settings.use({"tiles_per_band": 2})
    assert gpu_settings.current() == defaults | {"tiles_per_band": 2} and gpu_settings.defaults() == defaults
    assert set(defaults) - {"dispatch_mflops"} == {setting.name for setting in SETTINGS}


REFUSED = [
    ({"bands": 4}, "expected the name of a setting, got bands"),
    ({"tiles_per_band": 0}, "expected tiles_per_band from 1 to 64, got 0"),
    ({"tiles_per_band": 65}, "expected tiles_per_band from 1 to 64, got 65"),
    ({"decode_simdgroups": 16}, "expected decode_simdgroups from 1 to 8, got 16"),
    ({"decode_simdgroups": 3}, "expected a power of two as decode_simdgroups, got 3"),
    ({"target_simdgroups": 0}, "expected target_simdgroups from 1"),
    ({"few_tokens": -1}, "expected few_tokens from 0"),
    ({"tile32_min_rows": 50}, "expected tile32_min_rows up to tile64_min_rows, got 50 and 49"),
    ({"row_threads": 0}, "expected row_threads from 32 to 1024, got 0"),
    ({"row_threads": 100}, "expected a multiple of 32 as row_threads, got 100"),
]


@on_mps
@pytest.mark.parametrize("settings, said", REFUSED, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_wrong_settings_raise(settings: dict, said: str, mps: str):
    """None is set, not even those before the wrong one."""
    with pytest.raises(ValueError, match=said):
        gpu_settings.use({"gate_min_tiles": 1} | settings)
    assert gpu_settings.current() == gpu_settings.defaults()


# ------------------------------------------------------------------------------------------------ the file


@on_mps
def test_saved_settings_are_loaded(file: Path, m9: str, monkeypatch, mps: str):
    gpu_settings.save({"tiles_per_band": 4})
    assert json.loads(file.read_text()) == {m9: {torch.__version__: {"tiles_per_band": 4}}}
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    gpu_settings.load()
    assert gpu_settings.current() == gpu_settings.defaults() | {"tiles_per_band": 4}
    monkeypatch.setattr(gpu_settings, "gpu", lambda: "Apple M9 Max")
    gpu_settings.load()
    assert gpu_settings.current() == gpu_settings.defaults()
    gpu_settings.save({"tiles_per_band": 2})
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    gpu_settings.load()
    assert gpu_settings.current() == gpu_settings.defaults()
    gpu_settings.save({"tiles_per_band": 1})
    monkeypatch.undo()
    assert json.loads(file.read_text())["Apple M9 Max"] == {
        torch.__version__: {"tiles_per_band": 2},
        "2.99.0": {"tiles_per_band": 1},
    }


@on_mps
def test_settings_of_other_kernels_are_saved_per_macos(file: Path, m9: str, monkeypatch, mps: str):
    """The next macOS compiles those kernels again. Other settings are still used."""
    monkeypatch.setattr(gpu_settings.macos, "version", lambda: "26.5")
    gpu_settings.save({"tiles_per_band": 4, "tensor_ops": 8})
    gpu_settings.load()
    assert gpu_settings.current() == gpu_settings.defaults() | {"tiles_per_band": 4, "tensor_ops": 8}
    monkeypatch.setattr(gpu_settings.macos, "version", lambda: "26.6")
    gpu_settings.load()
    assert gpu_settings.current() == gpu_settings.defaults() | {"tiles_per_band": 4}
    monkeypatch.setattr(gpu_settings.macos, "version", lambda: "26.5")
    gpu_settings.save({"tiles_per_band": 2})
    assert json.loads(file.read_text()) == {m9: {torch.__version__: {"tiles_per_band": 2}}}


def test_forget(file: Path, m9: str, monkeypatch):
    """It removes the settings of this GPU, for all torch versions, and of no other GPU."""
    assert not gpu_settings.forget() and not file.exists()
    gpu_settings.save({"tiles_per_band": 4})
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    gpu_settings.save({"tiles_per_band": 2})
    monkeypatch.setattr(gpu_settings, "gpu", lambda: "Apple M9 Max")
    gpu_settings.save({"tiles_per_band": 1})
    monkeypatch.setattr(gpu_settings, "gpu", lambda: m9)
    assert len(gpu_settings.saved()[m9]) == 2 and gpu_settings.forget() and not gpu_settings.forget()
    assert gpu_settings.saved() == {"Apple M9 Max": {"2.99.0": {"tiles_per_band": 1}}}


@on_mps
def test_a_missing_file_is_ignored(file: Path, monkeypatch, mps: str):
    """The name of the GPU is not queried either: importing the package must not wake it."""

    def must_not_be_called() -> str:
        raise AssertionError

    monkeypatch.setattr(gpu_settings, "gpu", must_not_be_called)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gpu_settings.load()
        monkeypatch.setenv("MOE_METAL_TUNING", "")
        gpu_settings.load()
    assert gpu_settings.path() is None
    with pytest.raises(OSError, match="MOE_METAL_TUNING is empty"):
        gpu_settings.write({})


def test_path(monkeypatch, tmp_path: Path):
    monkeypatch.delenv("MOE_METAL_TUNING")
    monkeypatch.setattr(gpu_settings.sys, "platform", "darwin")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert gpu_settings.path() == tmp_path / "Library/Caches/torch_moe_metal/tuning.json"
    monkeypatch.setattr(gpu_settings.sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert gpu_settings.path() == tmp_path / ".cache/torch_moe_metal/tuning.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "else"))
    assert gpu_settings.path() == tmp_path / "else/torch_moe_metal/tuning.json"


def of_this(settings: object) -> str:
    return json.dumps({"Apple M9": {torch.__version__: settings}})


BROKEN = {
    "no JSON": b"{",
    "no text": b"\xff\xfe\xff",
    "a list": b"[]",
    "no versions": b'{"Apple M9": 4}',
    "no settings": of_this(4).encode(),
    "words": of_this({"tiles_per_band": "4"}).encode(),
    "truth": of_this({"tiles_per_band": True}).encode(),
    "another name": of_this({"width": 4}).encode(),
    "out of range": of_this({"tiles_per_band": 4, "row_threads": 4096}).encode(),
    "too large": of_this({"tiles_per_band": 2**70}).encode(),
}


@on_mps
@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_ignored_with_one_warning(content: bytes, file: Path, m9: str, mps: str):
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.warns(UserWarning) as said:
        gpu_settings.load()
    assert len(said) == 1 and str(file) in str(said[0].message) and "ignored" in str(said[0].message)
    assert gpu_settings.current() == gpu_settings.defaults()
    gpu_settings.save({"tiles_per_band": 4})
    gpu_settings.load()
    assert gpu_settings.current()["tiles_per_band"] == 4


@on_mps
def test_a_file_that_cannot_be_read_is_ignored_with_one_warning(file: Path, m9: str, mps: str):
    file.mkdir(parents=True)
    with pytest.warns(UserWarning, match="ignored") as said:
        gpu_settings.load()
    assert len(said) == 1 and str(file) in str(said[0].message)


IMPORT = """
import sys
sys.path[:0] = ["."]
import simulated
simulated.load()  # before the package, as on a Mac, where one library is both
import torch_moe_metal
print(torch_moe_metal.gpu_settings.current())
"""


@on_mps
@pytest.mark.skipif(not SIMULATED, reason="on a Mac, a new process would use the Mac's GPU")
def test_import_loads_saved_settings(mps: str, file: Path):
    """A broken file is only a warning."""

    def imported() -> subprocess.CompletedProcess:
        here = Path(__file__).parents[1]
        return subprocess.run([sys.executable, "-c", IMPORT], cwd=here, capture_output=True, text=True, check=True)

    gpu_settings.save({"tiles_per_band": 4})
    assert imported().stdout.splitlines()[-1] == str(gpu_settings.defaults() | {"tiles_per_band": 4})
    file.write_text("{")
    done = imported()
    assert done.stdout.splitlines()[-1] == str(gpu_settings.defaults()) and done.stderr.count("UserWarning") == 1


# ------------------------------------------------------------------------------------------------ the search

HELD = {"decode_simdgroups": 4, "tiles_per_band": 8, "few_tokens": 8}
CALLS = {name: [Call("linear", DEFAULT, MODELS[DEFAULT], T) for T in (1, 4, 16)] for name in HELD}
CHOICES = [
    Setting("decode_simdgroups", (1, 2, 4, 8), tune.DECODE),
    Setting("tiles_per_band", (1, 2, 4, 8, 16), tune.DECODE),
]
CHOICES += [Setting("few_tokens", (4, 8, 16), tune.DECODE)]


class Machine:
    """A GPU with these costs, with noise and drift."""

    def __init__(self, cost, noise: float, seed: int = 0):
        self.cost, self.noise, self.random, self.asked = cost, noise, random.Random(seed), 0

    def __call__(self, call: Call, candidates: list[dict]) -> list[list[float]]:
        self.asked += 1
        rounds = []
        for place in range(9):
            drift = 1 + 0.2 * math.sin(place + self.asked)
            row = [1e-4 * call.T * self.cost(call, HELD | settings) * drift for settings in candidates]
            rounds.append([time * math.exp(self.random.gauss(0, self.noise)) for time in row])
        return [list(times) for times in zip(*rounds, strict=True)]


def found(cost, noise: float = 0.02, seed: int = 0, **options) -> tune.Result:
    return search(CALLS, CHOICES, HELD, Machine(cost, noise, seed), options.get("fixed", {}))


@pytest.mark.parametrize("seed", range(10))
def test_search_finds_the_best_values(seed: int, capsys):
    """Two settings have a best alternative, a third makes no difference."""

    def cost(call: Call, settings: dict) -> float:
        return 1 + 0.2 * abs(math.log2(settings["tiles_per_band"] / 2)) + 0.15 * (settings["decode_simdgroups"] - 1)

    result = found(cost, seed=seed)
    assert result.kept == {"decode_simdgroups": 1, "tiles_per_band": 2}
    assert result.together.wins and result.together.won > 0.4
    assert [row.call for row in result.rows] == [str(call) for call in CALLS["tiles_per_band"]]
    assert all(row.before > 1.5 * row.after for row in result.rows)
    said = capsys.readouterr().err
    assert "2 of 3: tiles_per_band: 8, or 1 2 4 16: linear-" in said and "tiles_per_band 2" in said


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05, 0.3])
def test_the_search_keeps_the_defaults_under_noise(noise: float):
    results = [found(lambda call, settings: 1.0, noise, seed) for seed in range(20)]
    assert [result.kept for result in results] == [{}] * 20
    assert all(len(result.tried) == 9 and not result.rows for result in results)


def test_half_a_percent_is_not_enough():
    assert found(lambda call, settings: 1 - 0.005 * (settings["tiles_per_band"] == 4), noise=0).kept == {}
    assert found(lambda call, settings: 1 - 0.02 * (settings["tiles_per_band"] == 4), noise=0).kept == {
        "tiles_per_band": 4
    }


def test_settings_that_lose_together_are_not_kept():
    """For example, a setting may have won because of another one, which was measured on other calls."""
    machine = Machine(lambda call, settings: 1 - 0.1 * (settings["tiles_per_band"] == 4), 0)

    def measure(call: Call, candidates: list[dict]) -> list[list[float]]:
        last = len(candidates) == 3 and candidates[:2] == [{}, {}]
        return machine(call, candidates if not last else [{"tiles_per_band": 4}, {"tiles_per_band": 4}, {}])

    result = search(CALLS, CHOICES, HELD, measure, {})
    assert result.kept == {} and not result.together.wins and len(result.rows) == 3


def test_settings_that_are_not_tried_do_not_change():
    """They are set in every trial, and are not reported."""
    fixed = {"few_tokens": 16}
    seen = []

    def measure(call: Call, candidates: list[dict]) -> list[list[float]]:
        seen.extend(candidates)
        return Machine(lambda call, settings: settings["tiles_per_band"], 0)(call, candidates)

    assert search(CALLS, CHOICES[:2], HELD, measure, fixed).kept == {"few_tokens": 16, "tiles_per_band": 1}
    assert all(settings["few_tokens"] == 16 for settings in seen)


def test_comparison():
    twice = [[1.0] * 7, [1.0] * 7, [0.9] * 7, [1.1] * 7]
    won, lost = compare([twice, twice])
    assert won.won == pytest.approx(0.1) and won.noise == MIN_WIN and won.wins and not lost.wins
    assert str(won) == "10.0% faster, noise 1.0%" and str(lost).startswith("10.0% slower")
    apart = [[1.0] * 7, [1.15] * 7, [0.9] * 7]  # two measurements of the current settings differ by more
    assert not compare([apart])[0].wins
    assert not Comparison(0.05, 0.05).wins


# ------------------------------------------------------------------------------------------------ the sizes

QWEN = {
    "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 2048, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32, "vocab_size": 151936,
    "num_key_value_heads": 4,
}  # fmt: skip
OTHER = {"model_type": "brand_new", "text_config": QWEN | {"model_type": "brand_new_text", "n_shared_experts": 2}}


def test_sizes_of_a_checkpoint():
    assert of_config(QWEN) == MODELS["qwen3-30b-a3b"]
    other = of_config(OTHER)
    assert (other.E, other.K, other.H, other.I, other.S, other.query) == (128, 8, 2048, 768, 1536, (4096, 2048))
    with pytest.raises(ValueError, match="no num_experts or num_local_experts or n_routed_experts"):
        of_config({"model_type": "llama", "hidden_size": 4096})


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def tiny(monkeypatch, mps: str):
    """A small version of the default model; the simulated device does not compute."""
    monkeypatch.setitem(MODELS, DEFAULT, MODELS[DEFAULT].reduced(E=8, K=2, H=64, I=64))
    if not SIMULATED:
        yield
        return
    import metal_sim

    with metal_sim.host_only():
        yield


QUICK = ["tune", "--seconds", "0.0001"]


@on_mps
def test_tune(tiny, file: Path, capsys):
    assert main([*QUICK, "--settings", "decode_simdgroups", "row_threads"]) == 0
    said = capsys.readouterr()
    assert "2 settings, about 1 minutes" in said.err and "1 of 2: decode_simdgroups: 4, or 1 2 8: experts-" in said.err
    assert "2 of 2: row_threads" in said.err and str(file) in said.err
    assert "Kept: " in said.out or "Keeping the defaults" in said.out
    assert gpu_settings.current() == gpu_settings.defaults()
    assert set(gpu_settings.saved()[gpu_settings.gpu()]) == {torch.__version__}
    assert main(["tune", "--reset"]) == 0
    assert gpu_settings.saved() == {} and "settings removed" in capsys.readouterr().out


@on_mps
def test_tune_of_a_checkpoint_as_json(tiny, tmp_path: Path, capsys):
    small = QWEN | {"num_experts": 4, "hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 2}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(small))
    gpu_settings.use({"tiles_per_band": 4})  # as if saved before
    command = [*QUICK, "--checkpoint", str(tmp_path / "mine"), "--formats", "dense", "affine4", "--dtype", "f32"]
    assert main([*command, "--settings", "few_tokens", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["models"] == ["mine"] and said["formats"] == ["dense", "affine4"] and said["gpu"] == gpu_settings.gpu()
    assert {(row["setting"], row["current"]) for row in said["tried"]} == {("few_tokens", 8)} and len(
        said["tried"]
    ) == 6
    assert said["kept"]["tiles_per_band"] == 4 and said["defaults"] == gpu_settings.defaults()
    assert gpu_settings.saved()[gpu_settings.gpu()][torch.__version__] == said["kept"]


@on_mps
def test_winners_are_reported_and_saved(tiny, monkeypatch, file: Path, capsys):
    """A planted winner goes through the whole command into the file, and is loaded from there."""

    def rounds(ways: dict, device: str, seconds: float) -> dict[str, list[float]]:
        times = {}
        for name, way in ways.items():
            way()
            times[name] = [0.5e-3 if gpu_settings.current()["tiles_per_band"] == 16 else 1e-3] * 7
        return times

    monkeypatch.setattr(tune, "rounds_each", rounds)
    assert main([*QUICK, "--settings", "tiles_per_band"]) == 0
    said = capsys.readouterr().out
    assert (
        "linear-qwen3-30b-a3b-T512-bf16-query" in said and "Kept: tiles_per_band 16" in said and said.count("2.00") == 4
    )
    gpu_settings.load()
    assert gpu_settings.current() == gpu_settings.defaults() | {"tiles_per_band": 16}


@pytest.fixture
def units(monkeypatch, mps: str):
    """With Apple's kernels, a planted winner, and a small default model."""
    import metal_sim

    def rounds(ways: dict, device: str, seconds: float) -> dict[str, list[float]]:
        times = {}
        for name, way in ways.items():
            way()
            times[name] = [0.5e-3 if gpu_settings.current()["tensor_ops"] == 24 else 1e-3] * 7
        return times

    monkeypatch.setattr(tune, "rounds_each", rounds)
    monkeypatch.setattr(tune, "FORMATS", {"dense": None})
    monkeypatch.setitem(MODELS, DEFAULT, MODELS[DEFAULT].reduced(E=2, K=1, H=64, I=64))
    with metal_sim.playing_macos(26, 3):
        yield


@on_mps
@pytest.mark.slow
@pytest.mark.skipif(not SIMULATED, reason="a Mac may have no such kernels")
def test_kernels_of_others_are_used_if_right_and_faster(units, capsys):
    assert main([*QUICK, "--settings", "tensor_ops"]) == 0
    said = capsys.readouterr()
    assert "Kept: tensor_ops 24" in said.out and "left out" not in said.err


class Gpu:
    """Records the compared calls, and reports one format as wrong."""

    def __init__(self, wrong: str):
        self.wrong, self.compared = wrong, []

    def is_right(self, call: Call, settings: dict) -> bool:
        self.compared.append(call)
        return call.format != self.wrong or call.dtype != torch.float16


def test_tensor_ops_are_compared_in_every_format():
    """Each format has its own kernels, and macOS may compile any of them wrong, whichever formats are measured."""
    (setting,) = (setting for setting in SETTINGS if setting.name == "tensor_ops")
    calls = tune.calls_of(setting, {(DEFAULT, "dense"): MODELS[DEFAULT]}, BFLOAT)
    gpu = Gpu("none")
    assert tune.without_wrong_values(setting, calls, {"tensor_ops": 0}, gpu) == setting
    seen = {(call.format, call.dtype, call.T) for call in gpu.compared if call.op == "linear"}
    assert seen == {(f, d, T) for f in tune.FORMATS for d in (torch.float16, BFLOAT) for T in (12, 40, 96)}
    assert {call.op for call in gpu.compared} == {"experts", "linear"}
    assert tune.without_wrong_values(setting, calls, {"tensor_ops": 0}, Gpu("q4_k")).values == (0,)


@on_mps
@pytest.mark.skipif(not SIMULATED, reason="a Mac may have no such kernels")
@pytest.mark.parametrize("fault", ["row", "nan"])
def test_wrong_kernels_of_others_are_left_out(units, monkeypatch, capsys, fault: str):
    """A single wrong row is enough."""
    right_op = tune.OnGpu.op

    def op(self, call: Call, noise: tune.RandomTensors):
        right = right_op(self, call, noise)

        def run(**arguments) -> torch.Tensor:
            result = right(**arguments)
            if gpu_settings.current()["tensor_ops"]:
                result[7] *= float("nan") if fault == "nan" else 1.1
            return result

        return run

    monkeypatch.setattr(tune.OnGpu, "op", op)
    assert main([*QUICK, "--settings", "tensor_ops"]) == 0
    said = capsys.readouterr()
    assert all(f"tensor_ops {value} is left out" in said.err for value in (8, 24, 64))
    assert "Keeping the defaults" in said.out


@on_mps
def test_a_file_that_cannot_be_written(tiny, file: Path, capsys):
    """The table is still printed, since measuring took minutes."""
    file.mkdir(parents=True)
    assert main([*QUICK, "--settings", "gate_min_tiles"]) == 1
    said = capsys.readouterr()
    assert "Keeping the defaults" in said.out or "Kept" in said.out
    assert "not saved" in said.err


def test_unknown_choices_are_rejected(capsys):
    for wrong in (["--dtype", "f64"], ["--settings", "width"], ["--model", "llama"], ["--formats", "int4"]):
        with pytest.raises(SystemExit):
            main(["tune", *wrong])
        assert f"invalid choice: '{wrong[1]}'" in capsys.readouterr().err


def test_nothing_to_tune(monkeypatch, capsys):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert main(["tune"]) == 2
    assert "nothing to tune: --device mps: " in capsys.readouterr().err
