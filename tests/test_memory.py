"""Large outputs of CPU ops use cached memory (csrc/kept_memory.h): a block must never belong to two live tensors."""

import copy
import io
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F

from cases import SAMPLES, Case, call
from checks import same_bits
from torch_moe_metal.arguments import written

MIB = 1 << 20
glu = torch.ops.moe_metal.glu


def packed(mib: int, seed: int = 0) -> torch.Tensor:
    """An input for which `glu` returns an output of `mib` MiB."""
    return torch.randn(mib * MIB // 4096, 2048, generator=torch.Generator().manual_seed(seed))


def output(packed: torch.Tensor) -> torch.Tensor:
    return glu(*packed.chunk(2, -1))


def right(packed: torch.Tensor) -> torch.Tensor:
    gate, up = packed.chunk(2, -1)
    return F.silu(gate) * up


def alone(script: str) -> str:
    """Run a script in a new process. Returns its output."""
    start = "import torch, torch_moe_metal\nfrom test_memory import *\n"
    done = subprocess.run(
        [sys.executable, "-c", start + script], cwd=__file__.rpartition("/")[0], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("mib", [4, 33])
def test_memory_is_reused(mib: int):
    inputs = [packed(mib, seed) for seed in range(4)]
    waiting = [output(x) for x in inputs]  # several blocks of one size are cached: the one freed last is reused first
    del waiting
    places = set()
    for x in inputs:
        out = output(x)
        places.add(out.data_ptr())
        torch.testing.assert_close(out, right(x))
        del out
    assert len(places) == 1


def test_memory_in_use_is_not_reused():
    """A view, a NumPy array or a storage keeps the memory alive after the tensor."""
    x = packed(8)
    view, array, storage = output(x)[3:5], output(x).numpy(), output(x).untyped_storage()
    for seed in range(8):
        output(packed(8, seed)).fill_(seed)
    kept = torch.empty(0).set_(storage).view(2048, 1024)
    assert torch.equal(view, kept[3:5]) and torch.equal(torch.from_numpy(array), kept)
    torch.testing.assert_close(kept, right(x))


def test_outputs_of_one_call_do_not_overlap():
    x = torch.randn(2048, 1024)
    for _ in range(3):
        normed, total = torch.ops.moe_metal.residual_norm(x, x, torch.ones(1024))
        torch.testing.assert_close(total, 2 * x)
        torch.testing.assert_close(normed, F.rms_norm(2 * x, (1024,), eps=1e-6))


def test_alternating_sizes():
    for mib in (64, 7, 40, 61, 16, 9, 33, 5):
        x = packed(mib, mib)
        torch.testing.assert_close(output(x), right(x))


def test_tensor_operations_on_cached_memory():
    x = packed(8)
    expected = right(x)
    close = torch.testing.assert_close
    close(copy.deepcopy(output(x)), expected)
    file = io.BytesIO()
    torch.save(output(x), file)
    file.seek(0)
    close(torch.load(file), expected)
    shared = output(x).share_memory_()
    assert shared.is_shared()
    close(shared, expected)
    grown = output(x)
    grown.resize_(3 * 2048, 1024)
    close(grown[:2048], expected)
    grown.untyped_storage().resize_(4096)
    close(grown.set_(grown.untyped_storage(), 0, (1024,)), expected[0])
    grown.untyped_storage().resize_(0)
    lazy = output(x)
    close(torch._lazy_clone(lazy).add_(1), expected + 1)
    close(lazy, expected)
    with torch.inference_mode():
        assert output(x).is_inference()
    assert not output(x).is_inference()
    swapped = torch.empty(2048, 1024)
    swapped.data = output(x)
    close(swapped, expected)


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_lazily_cloned_inputs_are_read_and_not_copied(case: Case):
    """Two tensors share memory until one of them is written: ops must not copy such inputs."""
    op = getattr(torch.ops.moe_metal, case.op)
    want = call(op, case.op, case.arguments(), case.options)
    args = {name: torch._lazy_clone(tensor) for name, tensor in case.arguments().items()}
    got = call(op, case.op, args, case.options)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    assert {name for name, tensor in args.items() if not torch._C._is_cow_tensor(tensor)} == set(written(case.op))


@pytest.mark.slow
def test_compiled():
    @torch.compile(fullgraph=True)
    def twice(x: torch.Tensor) -> torch.Tensor:
        half = output(x)
        return output(torch.cat([half, half + 1], -1)) * 2

    x = packed(8)
    for _ in range(3):
        half = right(x)
        torch.testing.assert_close(twice(x), right(torch.cat([half, half + 1], -1)) * 2)


def test_many_threads():
    """Tensors are made in one thread and freed in another, while all other threads do the same."""
    inputs = [packed(mib, mib) for mib in (4, 5, 6, 9)]
    expected = [right(x) for x in inputs]
    handed: list[torch.Tensor | None] = [None] * 4
    wrong = []

    def work(me: int) -> None:
        for turn in range(30):
            which = (me + turn) % 4
            out = output(inputs[which])
            handed[(me + turn) % 4] = out if turn % 3 else None
            if not torch.allclose(out, expected[which], atol=1e-5):
                wrong.append((me, turn))

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_a_block_is_reused_down_to_half_its_size():
    served = "print(*(output(packed(mib)).data_ptr() for mib in (64, 40, 32, 16)))"
    large, two_thirds, half, quarter = alone(served).split()
    assert large == two_thirds and large not in (half, quarter)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts Linux's page faults")
def test_page_faults_only_at_first_use():
    faults = """
import resource
x = packed(64)
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    output(x)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    first, *others = map(int, alone(faults).split())
    assert first > 30 and max(others) < 16  # huge pages, if Linux provides them


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cache_holds_at_most_512_mib():
    """Thirty outputs, so that 1200 MiB are in use at once, and then none. Linux may reclaim cached memory at any
    time."""
    waiting = """
def mib(file: str, entry: str) -> int:
    (line,) = (line for line in open(f"/proc/self/{file}") if line.startswith(entry))
    return int(line.split()[1]) // 1024
x = packed(40)
output(packed(4))
before = mib("status", "VmSize")
many = [output(x) for _ in range(30)]
most, in_use = mib("status", "VmSize"), mib("smaps_rollup", "LazyFree")
del many
print(most - before, mib("status", "VmSize") - before, in_use, mib("smaps_rollup", "LazyFree"))
"""
    most, waits, offered_in_use, offered = map(int, alone(waiting).split())
    assert most >= 1200 and 400 <= waits <= 512 + 16
    assert offered_in_use <= 4 and offered >= waits * 3 // 4


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_uncacheable_output_does_not_evict():
    """An output of 600 MiB is returned to the system, and the cache does not change."""
    larger = """
def mib() -> int:
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmSize"))
    return int(line.split()[1]) // 1024
x, large = packed(40), torch.zeros(1, 2048).expand(600 * MIB // 4096, 2048)
output(packed(4))
many = [output(x) for _ in range(3)]
places = {out.data_ptr() for out in many}
del many
before = mib()
out = output(large)
most = mib()
del out
after = mib()
again = [output(x) for _ in range(3)]
print(most - before, after - before, places == {out.data_ptr() for out in again})
"""
    most, after, same = alone(larger).split()
    assert int(most) >= 600 and abs(int(after)) <= 16 and same == "True"


@pytest.mark.slow
def test_a_process_that_ends_or_forks_with_tensors_alive():
    ends = """
import os
x = packed(8)
alive = output(x)
child = os.fork()
if child == 0:
    again = [output(x) for _ in range(3)]
    del again
    os._exit(0 if torch.equal(alive, output(x)) else 1)
assert os.waitpid(child, 0)[1] == 0
torch.kept_beyond_the_end = alive
print("done")
"""
    assert alone("torch.set_num_threads(1)\n" + ends) == "done"


@pytest.mark.slow
def test_forks_while_threads_use_it():
    """The child has one thread: a lock that another thread of the parent held would never be released."""
    forks = """
import os, time

def ends(child: int) -> bool:
    until = time.monotonic() + 20
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return False
        time.sleep(0.001)
    return True

x, stop = packed(8), threading.Event()

def work() -> None:
    while not stop.is_set():
        output(x)

threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for turn in range(100):
    child = os.fork()
    if child == 0:
        for _ in range(3):
            output(x)
        os._exit(0)
    if not ends(child):
        print("child", turn, "hangs")
        break
else:
    print("all end")
stop.set()
for thread in threads:
    thread.join()
"""
    assert alone("torch.set_num_threads(1)\n" + forks) == "all end"
