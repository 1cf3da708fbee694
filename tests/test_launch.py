"""How csrc/mps/launch.mm and pipelines.mm use Metal, and how kernels handle a grid that is larger than their data."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torch_moe_metal
from cases import SAMPLES, Case, call, expected
from cases.packed import packed_case
from checks import assert_matches
from conftest import DEVICES, SIMULATED
from simulated import lines_of
from torch_moe_metal import gpu_settings
from torch_moe_metal.commands.common import devices

pytestmark = pytest.mark.skipif(
    not SIMULATED or "mps" not in DEVICES, reason="only the simulated Metal plays other systems and changes grids"
)

SHADERS = sorted((Path(__file__).parents[1] / "shaders").glob("*.metal"))

# ------------------------------------------------------------------------------------------------ compiling


def test_kernels_and_shaders_name_the_same_parts() -> None:
    """A kernel of a part that its shader does not have would not be found, and a part without kernels is never used."""
    kernels: dict[str, set[str]] = {}
    for line in torch.ops.moe_metal._kernels():
        shader = line.split()[2]
        kernels.setdefault(shader, set()).update(re.findall(r" MOE_METAL_PART=(\w+)", line))
    assert kernels == {path.stem: set(re.findall(r"in_part\((\w+)\)", path.read_text())) for path in SHADERS}


COMPILED = """
import sys
import torch, torch_moe_metal, simulated, metal_sim

simulated.load()
x = torch.tensor([float("nan"), -float("inf"), 1.0], device="mps")
with metal_sim.playing_macos(int(sys.argv[1]), for_older_sdk=len(sys.argv) > 2):
    torch.ops.moe_metal.glu(x, x)
print(metal_sim.compiled())
"""


def on_macos(*arguments: str) -> subprocess.CompletedProcess:
    """A new process, because a library is compiled once."""
    here = __file__.rpartition("/")[0]
    return subprocess.run([sys.executable, "-c", COMPILED, *arguments], cwd=here, capture_output=True, text=True)


def compiled_as(language: int) -> str:
    return f"[Compiled(metal_version={language}, safe=True, precise=True, concurrently=True)]"


@pytest.mark.slow
@pytest.mark.parametrize("major, language", [(14, 310), (15, 320), (26, 400), (27, 400)])
def test_safe_maths_on_every_macos(major: int, language: int) -> None:
    """macOS 14 only has `fastMathEnabled`; from 15 on it is `mathMode`, and safe functions are a separate option."""
    done = on_macos(str(major))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == compiled_as(language)


def test_macos_26_in_a_program_for_an_older_one() -> None:
    """NSProcessInfo reports 16 there, as in many Pythons."""
    done = on_macos("26", "for an older SDK")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == compiled_as(400)


def test_an_older_macos_raises() -> None:
    assert "expected macOS 14 or newer, whose Metal supports bfloat16; this one is older" in on_macos("13").stderr


def test_a_virtual_mac_raises() -> None:
    """Metal guarantees neither simdgroup matrices nor bfloat16 on its GPU. Nothing is compiled for it."""
    script = """
with metal_sim.playing_gpu("Apple Paravirtual device", 1005):
    print(message_of(glu, x, x))
print(metal_sim.compiled())
"""
    message, compiled = lines_of(script)
    assert "expected an Apple GPU of family 7 or newer" in message and "Apple Paravirtual device is not one" in message
    assert compiled == "[]"


def test_doctor_reports_missing_features_of_a_virtual_mac() -> None:
    import metal_sim

    assert dict(devices.devices())["mps"] is None
    with metal_sim.playing_gpu("Apple Paravirtual device", 1005):
        assert "Apple Paravirtual device is not one: a virtual Mac's GPU lacks" in dict(devices.devices())["mps"]


def test_doctor_reports_compile_times() -> None:
    script = """
from torch_moe_metal.commands import doctor
print(*doctor.compiling("mps"))
glu(x, x), norm_add(x, x, x[0]), glu(x.half(), x.half())
print(*doctor.compiling("mps"), *doctor.compiling("cpu"), sep="\\n")
"""
    nothing, total, *shaders = lines_of(script)
    assert not nothing and total.startswith("libraries of shaders, compiled by Metal: ")
    assert [line.split()[:2] for line in shaders] == [["glu", "2,"], ["norm_add", "1,"]]
    assert all(re.fullmatch(r".*, \d+\.\d\d s each, at most \d+\.\d\d s: dtype=[012]", line) for line in shaders)


REFUSES = "echo one >> tries; echo 'program_source:1:1: error: not today' >&2; exit 1"


def test_a_shader_that_does_not_compile_is_tried_once(tmp_path: Path) -> None:
    """All kernels of its library fail in all threads, with the same message."""
    script = """
with ThreadPoolExecutor(4) as pool:
    errors = {*pool.map(lambda _: message_of(glu, x, x), range(8)), message_of(glu, x, x)}
print(len(errors), "shaders/glu.metal does not compile" in min(errors), "not today" in min(errors))
gate, half = torch.ops.moe_metal.gate, torch.ones(8, 8, dtype=torch.half, device="mps")
of_half, of_float = (message_of(lambda: gate(half, router, top_k=1)) for router in (half, half.float()))
print("shaders/gate.metal does not compile" in of_half, of_half == of_float)
"""
    assert lines_of(script, REFUSES, tmp_path) == ["1 True True", "True True"]
    assert (tmp_path / "tries").read_text().split() == ["one", "one"]


MEETS = """
touch started.$$
for i in $(seq 200); do
  if [ $(ls started.* | wc -l) -ge 2 ]; then echo 'error: met another' >&2; exit 1; fi
  sleep 0.1
done
echo 'error: alone' >&2; exit 1
"""


def test_libraries_compile_in_parallel(tmp_path: Path) -> None:
    """Each of two compilers waits until the other one has started."""
    script = """
with ThreadPoolExecutor(2) as pool:
    both = [pool.submit(message_of, glu, x, x), pool.submit(message_of, norm_add, x, x, x[0])]
print(*("met another" in one.result() for one in both))
"""
    assert lines_of(script, MEETS, tmp_path) == ["True True"]


# ------------------------------------------------------------------------------------------------ commits


def commits(call: Callable[[], object]) -> int:
    import metal_sim

    with metal_sim.record() as record:
        call()
    return record.commits


def commit_before(call: Callable[[], object]) -> int:
    """Make calls until one of them causes a commit. Returns their number."""
    return next(i for i in range(1, 100) if commits(call))


def test_commits_after_many_dispatches(mps: str) -> None:
    """Commits happen at regular intervals of several dispatches."""
    x = torch.randn(1, 64, device=mps)
    commit_before(lambda: torch.ops.moe_metal.glu(x, x))
    periods = [commit_before(lambda: torch.ops.moe_metal.glu(x, x)) for _ in range(3)]
    assert len({*periods}) == 1 and 8 <= periods[0] <= 64


def test_commits_after_a_long_launch(mps: str) -> None:
    """The experts of Qwen3-30B-A3B: a prompt is committed immediately, a single token is not."""
    import metal_sim

    E, K, H, I = 128, 8, 2048, 768
    with metal_sim.host_only():
        weights = [torch.empty(shape, dtype=torch.bfloat16, device=mps) for shape in ((E, 2 * I, H), (E, H, I))]

        def prompt(T: int) -> int:
            x, chosen = torch.empty(T, H, dtype=torch.bfloat16, device=mps), torch.empty(T, K, device=mps)
            return commits(lambda: torch.ops.moe_metal.experts(x, chosen, chosen.int(), *weights))

        commit_before(lambda: prompt(1))
        assert prompt(1) == 0
        assert all(prompt(512) >= 1 for _ in range(3))
        assert prompt(4096) > 1  # so no command buffer holds all of it


def test_results_across_a_commit(mps: str) -> None:
    """A commit between two dispatches of an op ends the encoder that the first one used."""
    case, x, got = sized("experts", "prefill", T=40), torch.randn(1, 64, device=mps), []

    def one() -> None:
        torch.ops.moe_metal.glu(x, x)

    def prefill() -> None:
        got.append(call(torch.ops.moe_metal.experts, "experts", case.arguments(mps), case.options))

    commit_before(one)
    period = commit_before(one)
    for i in range(period):
        for _ in range(i):
            one()
        assert commits(prefill) == (i + 4 >= period)
        assert_matches(got.pop(), expected("experts", case.arguments(), case.options), case.longest_sum)
        commit_before(one)


def test_a_stream_that_makes_a_command_buffer_for_each_commit(mps: str, commits_each_dispatch: None) -> None:
    """PyTorch's, where it does not use commitAndContinue. A failure of any of them is still noticed."""
    import metal_sim

    case, x = sized("experts", "prefill", T=40), torch.randn(1, 64, device=mps)
    with metal_sim.new_command_buffers():
        with metal_sim.record() as record:
            got = call(torch.ops.moe_metal.experts, "experts", case.arguments(mps), case.options)
        with metal_sim.failing_commits(TIMEOUT):
            torch.ops.moe_metal.glu(x, x)
        with pytest.raises(RuntimeError, match="the last of which was glu_float"):
            torch.ops.moe_metal.glu(x, x)
    assert record.commits == 4
    assert_matches(got, expected("experts", case.arguments(), case.options), case.longest_sum)


def test_a_proxy_of_the_encoder(mps: str, commits_each_dispatch: None) -> None:
    """As PyTorch's captures have one: all that is encoded is recorded, and each commit ends it."""
    import metal_sim

    case = sized("experts", "prefill", T=40)
    with metal_sim.recording_encoders():
        got = call(torch.ops.moe_metal.experts, "experts", case.arguments(mps), case.options)
    assert_matches(got, expected("experts", case.arguments(), case.options), case.longest_sum)


@pytest.mark.parametrize("variable", ["PYTORCH_MPS_TRACE_SIGNPOSTS", "MTL_CAPTURE_ENABLED"])
def test_no_commits_while_pytorch_keeps_command_buffers(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With signposts or a capture, each commit would keep PyTorch's command buffer alive, and PyTorch commits
    itself."""
    monkeypatch.setenv(variable, "1")
    script = """
with metal_sim.record() as record:
    for _ in range(40):
        glu(x, x)
print(len(record.dispatches), record.commits)
"""
    assert lines_of(script) == ["40 0"]


TIMEOUT = "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"


@pytest.fixture
def commits_each_dispatch() -> Iterator[None]:
    gpu_settings.use(gpu_settings.defaults() | {"commit_dispatches": 1})
    yield
    gpu_settings.use(gpu_settings.defaults())


def test_a_failed_command_buffer_raises_once(mps: str) -> None:
    """The next launch raises, whichever it is. PyTorch up to 2.14 ignores the failure and memory keeps its old
    contents."""
    import metal_sim

    x = torch.randn(1, 64, device=mps)
    commit_before(lambda: torch.ops.moe_metal.glu(x, x))
    with metal_sim.failing_commits(TIMEOUT):
        period = commit_before(lambda: torch.ops.moe_metal.glu(x, x))
    kernels = f"after {period} of our kernels, the last of which was glu_float"
    message = f"moe_metal: the GPU aborted earlier work, {kernels}: {TIMEOUT}\nResults of that work and later ones may"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        torch_moe_metal.norm_add(x, x, x[0])
    assert torch_moe_metal.norm_add(x, x, x[0]).isfinite().all()


def test_the_first_failure_is_reported(mps: str, commits_each_dispatch: None) -> None:
    """An op of four dispatches that are committed separately."""
    import metal_sim

    case, x = sized("experts", "prefill", T=40), torch.randn(1, 64, device=mps)
    torch.ops.moe_metal.glu(x, x)  # commits what earlier tests have left
    with metal_sim.failing_commits(TIMEOUT), metal_sim.record() as record:
        call(torch.ops.moe_metal.experts, "experts", case.arguments(mps), case.options)
    assert record.commits == 4
    with ThreadPoolExecutor(4) as pool:  # one of the threads gets the error
        errors = [*pool.map(lambda _: error_of(lambda: torch.ops.moe_metal.glu(x, x)), range(8))]
    (error,) = filter(None, errors)
    assert f"after 1 of our kernels, the last of which was {record.kernels[0]}" in error


def error_of(run: Callable[[], object]) -> str:
    try:
        run()
    except RuntimeError as error:
        return str(error)
    return ""


# The parts of a long prompt.
MANY = {
    "experts": {"T": 100_000, "E": 128, "K": 8, "H": 2048, "I": 768},
    "linear": {"T": 100_000, "N": 8192, "H": 4096},
}


def flops_of(case: Case) -> int:
    """The flops of the larger product."""
    dims = case.dims
    return dims["T"] * dims["H"] * (4 * dims["K"] * dims["I"] if case.op == "experts" else 2 * dims["N"])


@pytest.mark.parametrize("op", MANY)
def test_long_dispatches_are_split(op: str, mps: str) -> None:
    """On the slowest M1, with 2.3 TFLOPS of which half are reached: macOS aborts work that takes seconds."""
    import metal_sim

    case = Case(op, "many", MANY[op], dtype=torch.bfloat16)
    with metal_sim.host_only(), metal_sim.record() as record:
        args = {n: torch.empty(case.size(s), dtype=case.dtype, device=mps) for n, s in case.shapes.items()}
        args |= {"ids": args["ids"].int()} if "ids" in args else {}
        call(getattr(torch.ops.moe_metal, op), op, args, {})
    tiles = [dispatch for dispatch in record.dispatches if "down" not in dispatch.kernel and "tiles" in dispatch.kernel]
    assert 0.5 < flops_of(case) / len(tiles) / (2.3e12 / 2) < 1
    assert max(tile.grid[0] for tile in tiles) < 1.1 * min(tile.grid[0] for tile in tiles)


@pytest.mark.parametrize("op", MANY)
def test_splitting_a_long_prompt_changes_no_bit(op: str, mps: str) -> None:
    """Although the parts use other tiles."""
    import metal_sim

    dims = {"T": 300, "E": 4, "K": 2, "H": 72, "I": 64} if op == "experts" else {"T": 300, "N": 136, "H": 120}
    case = replace(ODD[op], name="cut", dims=ODD[op].dims | dims)
    whole = call(getattr(torch.ops.moe_metal, op), op, case.arguments(mps), case.options)
    gpu_settings.use(gpu_settings.defaults() | {"dispatch_mflops": flops_of(case) // 3_000_000})
    try:
        with metal_sim.record() as record:
            cut = call(getattr(torch.ops.moe_metal, op), op, case.arguments(mps), case.options)
    finally:
        gpu_settings.use(gpu_settings.defaults())
    assert len(record.dispatches) == (4 if op == "experts" else 1) * 4
    assert all(torch.equal(*both) for both in zip(whole, cut, strict=True))


# ------------------------------------------------------------------------------------------------ grids

ODD = {case.op: case for case in SAMPLES if case.name == "sample_odd"}


def sized(op: str, name: str, **dims: int) -> Case:
    return replace(ODD[op], name=name, dims=ODD[op].dims | dims)


# Every kernel: other grids in addition to the samples.
GRIDS = [
    *ODD.values(),
    sized("gate", "one_token_split", T=1, E=130),
    sized("gate", "few_tokens_split", T=6, E=130),
    sized("gate", "tiles", T=1300, E=130),
    *(sized("linear", f"together{T}", T=T, H=96) for T in (2, 7)),
    sized("route", "together", T=33),
    sized("experts", "decode", T=1),
    sized("experts", "decode_pairs", T=3, H=72, I=40),
    replace(sized("experts", "decode_columns", T=1), options={"transposed": True}),
    replace(sized("experts", "prefill_columns", T=40), options={"transposed": True}),
]


@pytest.mark.parametrize("more", [1, 5])
@pytest.mark.parametrize("case", GRIDS, ids=str)
def test_a_larger_grid_changes_nothing(case: Case, more: int, mps: str) -> None:
    """Threadgroups beyond the last row, slot, tile or expert exit: the simulator detects every access outside of a
    buffer."""
    import metal_sim

    with metal_sim.more_threadgroups(more):
        got = call(getattr(torch.ops.moe_metal, case.op), case.op, case.arguments(mps), case.options)
    assert_matches(got, case.expected(), case.longest_sum)


@pytest.mark.parametrize("case", GRIDS, ids=str)
def test_a_concurrent_encoder_gets_barriers(case: Case, mps: str) -> None:
    """PyTorch's encoder is serial so far. On a concurrent one the simulator requires a barrier before each dispatch."""
    import metal_sim

    with metal_sim.concurrent_encoders():
        got = call(getattr(torch.ops.moe_metal, case.op), case.op, case.arguments(mps), case.options)
    assert_matches(got, case.expected(), case.longest_sum)


# ------------------------------------------------------------------------------------------------ beyond 32 bits

# Sizes for which every tensor of activations has more than 2^32 elements.
FAR = {
    "gate": {"T": 2**20 + 40, "E": 4, "K": 2, "H": 4096},
    "route": {"T": 2**22 + 40, "E": 1024, "K": 2},
    "glu": {"T": 2**20 + 40, "I": 4096},
    "weighted_sum": {"T": 2**20 + 40, "K": 1, "H": 4096},
    "norm": {"T": 2**20 + 40, "H": 4096},
    "rope": {"B": 2**20 + 40, "T": 1, "A": 1, "J": 1, "D": 4096, "R": 8},
    "norm_add": {"T": 2**20 + 40, "H": 4096, "U": 4096},
    "residual_norm": {"T": 2**20 + 40, "H": 4096, "U": 4096},
    "linear": {"T": 2**23 + 40, "N": 512, "H": 512},
    "dequantize": {"N": 2**20 + 40, "H": 4096},
}
FAR |= {op: FAR["weighted_sum"] for op in ODD if op.startswith("weighted_sum_")}


@pytest.mark.slow
@pytest.mark.parametrize("op", FAR)
def test_offsets_beyond_32_bits(op: str, mps: str) -> None:
    """In tensors with more than 2^32 elements, results of the last tokens do not depend on the others. Pages that are
    never touched need no memory, so the threadgroups of other tokens are skipped."""
    import metal_sim

    options = {"gate": {"top_k": 2}, "route": {"top_k": 2}, "dequantize": ODD["dequantize"].options}.get(op, {})
    rows = {"dequantize": "N", "rope": "B"}.get(op, "T")
    tail = Case(op, "tail", FAR[op] | {rows: 8}, ODD[op].given, options, torch.bfloat16)
    few, far = tail.arguments(), {}
    for name, letters in tail.shapes.items():
        if letters[0] == rows:
            far[name] = torch.empty(FAR[op][rows], *few[name].shape[1:], dtype=few[name].dtype, device=mps)
            far[name][-8:] = few[name]
        else:
            far[name] = few[name].to(mps)
    with metal_sim.last_threadgroups(64):
        got = call(getattr(torch.ops.moe_metal, op), op, far, options)
    assert_matches([tensor[-8:] for tensor in got], expected(op, few, options), tail.longest_sum)


@pytest.mark.parametrize("T, kernel", [(1, "rows_wide"), (3, "rows4_wide")])
@pytest.mark.parametrize("name", ["weight", "scale", "offset"])
def test_positions_use_32_bits_if_possible(name: str, T: int, kernel: str, mps: str) -> None:
    """Decode's vector loads use positions of 32 bits within a matrix. Two rows of 4 GB, whose last byte has the last
    such position, and two rows that begin 4 GB apart."""
    import metal_sim

    case = packed_case("linear", "far", ("affine", 4, 64), {"T": T, "H": 128, "N": 2}, {})
    args = case.arguments(mps)
    small, size = args[name], args[name].element_size()
    for apart, found in ((2**32 - small[0].nbytes, kernel), (2**32, "rows")):
        memory = torch.empty(apart // size + small.shape[1], dtype=small.dtype, device=mps)
        args[name] = memory.as_strided(small.shape, (apart // size, 1)).copy_(small)
        with metal_sim.record() as record:
            got = torch.ops.moe_metal.linear(**args, format="affine")
        assert record.kernels == [f"linear_{found}_affine4_float"]
        assert_matches([got], expected("linear", case.arguments(), case.options), case.longest_sum)
