"""The simulated mps device: it behaves like a device, and detects each violation of its rules."""

import copy
import io
import pickle
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import metal_sim

if sys.platform == "darwin":
    pytest.skip("a Mac has the real device", allow_module_level=True)
metal_sim.load(metal_sim.Project("misuse", [Path(__file__).with_name("misuse.mm")]))


def misuse(name: str, x: torch.Tensor | None = None) -> torch.Tensor:
    x = torch.zeros(64, device="mps") if x is None else x
    torch.ops.metal_sim_misuse.run(name, x)
    return x


def both(function, *tensors: torch.Tensor) -> None:
    """The function gives the same values on the CPU and on mps, and returns mps tensors."""
    expected = function(*(t.clone() for t in tensors))
    found = function(*(t.to("mps") for t in tensors))
    assert found.device == torch.device("mps:0")
    assert found.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------------------------------- the device

X = torch.arange(12.0).view(3, 4)
OPS = {
    "arithmetic": lambda x: (x * 2 + 1) / 3,
    "cpu_scalar_tensor": lambda x: x + torch.tensor(2.0),
    "matmul": lambda x: x @ x.T,
    "reduce": lambda x: x.sum(1),
    "slice": lambda x: x[1:, ::2],
    "index": lambda x: x[[0, 2]],
    "cpu_index": lambda x: x[torch.tensor([0, 2])],
    "mask": lambda x: x[x > 5],
    "transpose_copy": lambda x: x.t().contiguous(),
    "write_through_a_view": lambda x: (x[:, 1].add_(100), x)[1],
    "setitem": lambda x: (x.__setitem__((slice(None), 0), 7), x)[1],
    "out_of_same_size": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
    "out_that_grows": lambda x: torch.add(x, 1, out=x.new_empty(0)),
    "resize": lambda x: x.clone().resize_(6),
    "grow": lambda x: x.clone().resize_(24)[:3],
    "cat": lambda x: torch.cat([x, x[:1]]),
    "topk": lambda x: torch.topk(x, 2)[1],
    "argsort": lambda x: torch.argsort(x, descending=True, stable=True),
    "as_strided": lambda x: x.as_strided((2, 2), (4, 1), 1),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "dtype": lambda x: x.to(torch.bfloat16).float().half(),
    "index_add": lambda x: x.clone().index_add_(0, torch.tensor([0, 0], device=x.device), x[:2]),
    "foreach": lambda x: torch._foreach_add([x, x], 1.0)[1],
    "where": lambda x: torch.where(x > 3, x, 0.0),
    "one_hot": lambda x: nn.functional.one_hot(x.long(), 12),
    "like": lambda x: torch.ones_like(x),
    "swap_data": lambda x: (setattr(x, "data", x.data + 1), x)[1],
    "overlapping_copy": lambda x: x.clone().copy_(x.expand(3, 4)),
    "lazy_conjugate": lambda x: torch.view_as_real(torch.view_as_complex(x.view(6, 2)).conj().clone()),
    "lazy_negation": lambda x: torch.view_as_complex(x.view(6, 2)).conj().imag.clone(),
    "lazy_zeros": lambda x: torch._efficientzerotensor((3, 4), device=x.device).clone(),
    "copy_of_lazy_zeros": lambda x: x.clone().copy_(torch._efficientzerotensor((4,), device=x.device)),
}


@pytest.mark.parametrize("name", OPS)
def test_aten_ops_run_and_keep_their_aliases(name: str) -> None:
    both(OPS[name], X)


def test_views_share_memory() -> None:
    x = X.to("mps")
    views = [x[1], x.view(-1), x.t(), x.split(2)[0], x.unfold(1, 2, 1), x.detach(), x.narrow(0, 0, 2)]
    assert {v.untyped_storage().data_ptr() for v in views} == {x.untyped_storage().data_ptr()}
    x.zero_()
    assert all(v.sum().item() == 0 for v in views)


def test_in_place_returns_its_argument() -> None:
    x = X.to("mps")
    assert x.add_(1) is x and torch.relu_(x) is x
    out = torch.empty(3, device="mps")
    assert torch.sum(x, 1, out=out) is out


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.zeros(2, 3, device=d),
        lambda d: torch.full((2,), 3.0, device=d, dtype=torch.float16),
        lambda d: torch.arange(5, device=d),
        lambda d: torch.tensor([1, 2], device=d),
        lambda d: torch.eye(3, device=d),
        lambda d: torch.linspace(0, 1, 5, device=d),
        lambda d: (torch.manual_seed(1), torch.randn(4, device=d))[1],
        lambda d: (torch.manual_seed(1), torch.randint(0, 9, (4,), device=d))[1],
        lambda d: (torch.manual_seed(1), torch.empty(5, device=d).uniform_())[1],
        lambda d: (torch.manual_seed(1), torch.randperm(6, device=d))[1],
    ],
)
def test_factories(make) -> None:
    found = make("mps")
    assert found.device == torch.device("mps", 0)
    assert torch.equal(found.cpu(), make("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fresh_memory_is_nan(dtype: torch.dtype) -> None:
    assert torch.empty(100, dtype=dtype, device="mps").isnan().all()
    assert (torch.empty(3, dtype=torch.int32, device="mps") == -1).all()


def test_copies_of_every_kind() -> None:
    x = X.to("mps")
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    assert str(x.to("cpu").device) == "cpu"
    for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), torch.load(file)["x"], x.clone(), x.to("mps:0")):
        assert y.device.type == "mps" and torch.equal(y.cpu(), X)
    assert "device='mps:0'" in repr(x) and "nan" in repr(torch.empty(1, device="mps"))
    host = torch.empty(4, 3).t()
    assert torch.equal(host.copy_(x), X)


def test_empty_tensors() -> None:
    both(lambda x: x[:0] + 1, X)
    assert torch.empty(0, 4, device="mps").sum().item() == 0


def test_cpu_tensors_do_not_mix_in() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        X.to("mps") + X
    with pytest.raises(RuntimeError, match="same device"):
        torch.embedding(X.to("mps"), torch.tensor([0]))


def test_fallback_is_for_aten_only() -> None:
    with pytest.raises(NotImplementedError, match="cpu_only has no kernel for the mps device"):
        torch.ops.metal_sim_misuse.cpu_only(X.to("mps"))


def test_torch_knows_the_device() -> None:
    assert torch.backends.mps.is_available() and torch.mps.device_count() == 1
    assert torch.accelerator.current_accelerator().type == "mps"
    torch.mps.synchronize()
    torch.mps.empty_cache()
    before = torch.mps.current_allocated_memory()
    x = torch.empty(1000, device="mps")
    assert torch.mps.current_allocated_memory() == before + 4000
    del x
    assert torch.mps.current_allocated_memory() == before


def test_autograd() -> None:
    def gradient(device: str) -> torch.Tensor:
        x = X.clone().to(device).requires_grad_()
        (x.softmax(1) * x).sum().backward()
        return x.grad

    torch.testing.assert_close(gradient("mps").cpu(), gradient("cpu"), rtol=0, atol=0)


DERIVED = {
    "of_a_product": lambda x: x * x,
    "by_a_constant": lambda x: x * 2 + x * torch.tensor(3.0),
    "by_a_tensor": lambda x: torch.mul(x, torch.ones_like(x)),
    "of_a_layer": lambda x: nn.functional.linear(x, torch.full((2, 4), 0.5, device=x.device)).softmax(-1),
    "in_place": lambda x: x.clone().mul_(2),
}


@pytest.mark.parametrize("name", DERIVED)
def test_forward_mode_autograd(name: str) -> None:
    both(lambda x, tangent: torch.func.jvp(DERIVED[name], (x,), (tangent,))[1], X, X + 1)


ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "masked": {"attn_mask": torch.arange(35).view(5, 7) % 3 > 0},
    "biased": {"attn_mask": torch.arange(35.0).view(5, 7).sin()},
    "grouped": {"enable_gqa": True},
}
FUSED = "aten::_scaled_dot_product_attention_math_for_mps"


def heads(device: str) -> list[torch.Tensor]:
    """Query, key and value with 4 and 2 heads, as in models: transposed views of dense tensors."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, length, count, 8, generator=generator).to(device).transpose(1, 2)
        for length, count in ((5, 4), (7, 2), (7, 2))
    ]


def attend(device: str, options: dict, differentiate: bool = False) -> list[torch.Tensor]:
    query, key, value = (tensor.requires_grad_(differentiate) for tensor in heads(device))
    if not options.get("enable_gqa"):
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    moved = {name: o.to(device) if torch.is_tensor(o) else o for name, o in options.items()}
    out = nn.functional.scaled_dot_product_attention(query, key, value, **moved)
    return [out, *torch.autograd.grad(out.square().sum(), (query, key))] if differentiate else [out]


@pytest.mark.parametrize("differentiate", [False, True])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, differentiate: bool) -> None:
    """A single op without gradients, as on a Mac."""
    with torch.profiler.profile() as profile:
        found = attend("mps", ATTENTION[name], differentiate)
    assert [event.name for event in profile.events()].count(FUSED) == (0 if differentiate else 1)
    for got, expected in zip(found, attend("cpu", ATTENTION[name], differentiate), strict=True):
        assert got.device.type == "mps"
        torch.testing.assert_close(got.cpu(), expected)


def test_attention_of_macos_14() -> None:
    """The op of macOS 14 only takes contiguous tensors."""
    with metal_sim.playing_macos(14), torch.profiler.profile() as profile:
        attend("mps", {})
        nn.functional.scaled_dot_product_attention(*(tensor.contiguous() for tensor in heads("mps")), enable_gqa=True)
    assert [event.name for event in profile.events()].count(FUSED) == 1


def test_attention_refuses_a_mask_of_another_dtype() -> None:
    with pytest.raises(RuntimeError, match="Expected attn_mask dtype to be bool or that of query, which is Float"):
        attend("mps", {"attn_mask": torch.zeros(5, 7, dtype=torch.bfloat16)})


@pytest.mark.parametrize("compiled", [False, True])
def test_attention_of_a_module(compiled: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True), torch.randn(2, 5, 8)
    expected = layer(x)
    run = torch.compile(layer.to("mps"), backend="aot_eager", fullgraph=True) if compiled else layer.to("mps")
    torch.testing.assert_close(run(x.to("mps")).cpu(), expected)


CONVOLUTIONS = {
    "of_each_channel": (nn.Conv1d(4, 4, 3, groups=4, padding=2), (2, 4, 6)),
    "of_pictures": (nn.Conv2d(4, 6, 2, stride=2, bias=False), (2, 4, 6, 6)),
    "transposed": (nn.ConvTranspose1d(4, 3, 2), (2, 4, 6)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str) -> None:
    def run(device: str) -> list[torch.Tensor]:
        layer, shape = CONVOLUTIONS[name]
        layer = copy.deepcopy(layer).to(device)
        x = torch.ones(shape).cumsum(-1).to(device).requires_grad_()
        out = layer(x)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]

    for got, expected in zip(run("mps"), run("cpu"), strict=True):
        assert got.device.type == "mps"
        torch.testing.assert_close(got.cpu(), expected)


class TinyMoe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 8, 16))
        self.down = nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, experts = torch.topk(torch.softmax(self.router(x), -1), 2)
        inner = nn.functional.silu(torch.einsum("th,tkhi->tki", x, self.up[experts]))
        return (torch.einsum("tki,tkih->tkh", inner, self.down[experts]) * weights[..., None]).sum(1)


@torch.no_grad()
def test_module_eager_and_compiled() -> None:
    torch.manual_seed(0)
    moe, x = TinyMoe(), torch.randn(5, 8)
    expected = moe(x)
    moe.to("mps")
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    for found in (moe(x.to("mps")), compiled(x.to("mps"))):
        assert found.device.type == "mps"
        torch.testing.assert_close(found.cpu(), expected)
    assert next(iter(moe.state_dict().values())).device.type == "mps"


def test_opcheck() -> None:
    library = torch.library.Library("metal_sim_test", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "MPS")
    library.impl("double", lambda x: torch.empty_like(x), "Meta")
    torch.library.opcheck(torch.ops.metal_sim_test.double.default, (X.to("mps"),))


# ---------------------------------------------------------------------------------------------- kernels run


def test_a_kernel_writes_at_the_given_offset() -> None:
    base = torch.zeros(256, device="mps")
    misuse("fill", base[64:192])
    expected = torch.zeros(256)
    expected[64:128] = 3
    assert torch.equal(base.cpu(), expected)


def test_exact_threads() -> None:
    assert misuse("exact_threads").sum().item() == 40 * 3


def test_dynamic_threadgroup_memory() -> None:
    assert torch.equal(misuse("shared").cpu(), torch.ones(64))


# ---------------------------------------------------------------------------------------------- broken rules

BROKEN = {
    "throw_in_block": "from inside the block",
    "throw_std_in_block": "from std",
    "encoder_off_queue": "encoder: commandEncoder\\(\\) called off the stream's queue",
    "encoder_after_block": "encoder: the encoder was used off the stream's queue",
    "encoder_in_later_block": "encoder: the encoder was used outside of the block",
    "end_encoding": "encoder: an op ended the stream's encoder",
    "encoder_after_commit": "encoder: the encoder was used after a commit",
    "stale_after_commit": "pipeline: a dispatch without setComputePipelineState:",
    "commit_off_queue": "encoder: MPSStream::synchronize\\(\\) called off the stream's queue",
    "commit_and_continue": "encoder: MPSStream::synchronize\\(\\) called by an op with another SyncType",
    "commit": "encoder: an op committed",
    "own_commit_and_continue": "encoder: an op committed",
    "wait": "encoder: an op waited",
    "own_encoder": "encoder: an op opened its own encoder",
    "own_queue": "encoder: an op made its own command queue",
    "end_coalescing": "encoder: endKernelCoalescing",
    "synchronize": "encoder: MPSStream::synchronize\\(\\) called by an op with another SyncType",
    "nested_queue": "deadlock: dispatch_sync inside a block",
    "aten_in_block": "deadlock: aten::add",
    "copy_in_block": "deadlock: aten::copy_",
    "throw_through_plain_sync": "exception: a C\\+\\+ exception left a plain dispatch_sync block",
    "unbalanced_pop": "encoder: popDebugGroup",
    "host_reads_tensor": "host_access: \\[MTLBuffer contents\\] of a tensor",
    "cpu_tensor": "argument: setBuffer with a pointer that is not a live MTLBuffer",
    "bytes_4097": "argument: setBytes of 4097 bytes",
    "bytes_0": "argument: setBytes of 0 bytes",
    "offset_at_end": "argument: setBuffer at offset 256 of a buffer of 256 bytes",
    "index_31": "argument: buffer index 31",
    "unbound": "unbound: argument `value` at index 1 of kernel write_value was never bound",
    "stale": "stale: argument `value` at index 1",
    "stale_from_earlier_op": "stale: argument `out` at index 0",
    "no_pipeline": "pipeline: a dispatch without setComputePipelineState:",
    "empty_grid": "launch: a dispatch with a size of zero",
    "threads_1056": "launch: 1056 threads per threadgroup; the pipeline allows 1024",
    "threads_not_32": "launch: the pipeline was promised",
    "threadgroup_33_kb": "threadgroup_memory: 33792 bytes",
    "threadgroup_17_bytes": "threadgroup_memory: a threadgroup length of 17",
    "handler_off_queue": "encoder: addCompletedHandler: called off the stream's queue",
    "out_of_bounds": "bounds",
    "part_of_a_page": "no_copy: newBufferWithBytesNoCopy: expected whole pages",
    "inside_a_page": "no_copy: newBufferWithBytesNoCopy: expected whole pages",
    "too_long": "no_copy: newBufferWithBytesNoCopy: 9663680512 bytes; maxBufferLength is 9663676416",
    "kernel_writes_read_only_pages": "read_only: argument `out` at index 0 of kernel write_value can be written",
    "pages_unmapped_too_early": "unmapped: argument `out` at index 0 of kernel write_value is over pages",
    "bad_source": "compiler: ",
}


def test_autorelease_without_a_pool_is_detected() -> None:
    found = []

    def work() -> None:  # in its own thread: a pool leaked by an exception in an earlier test would hide it
        with pytest.raises(RuntimeError, match="autorelease called without pool"):
            misuse("autorelease_without_pool")
        found.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_detected(name: str) -> None:
    torch.ops.metal_sim.clear()  # a fresh encoder: nothing is bound yet
    with pytest.raises(RuntimeError, match=BROKEN[name]):
        misuse(name)
    assert misuse("fill").sum().item() == 64 * 3  # and the device works on


def test_a_command_buffer_kept_over_a_commit_is_detected() -> None:
    """An error if the stream makes a new one. With commitAndContinue it continues with the same one."""
    misuse("command_buffer_after_commit")
    with metal_sim.new_command_buffers():
        assert misuse("fill_and_commit").sum().item() == 64 * 3
        misuse("commit_with_handlers")
        torch.mps.synchronize()
        assert torch.ops.metal_sim_misuse.completed() == "4;"  # MTLCommandBufferStatusCompleted
        with pytest.raises(RuntimeError, match="encoder: addCompletedHandler: of a command buffer that is committed"):
            misuse("command_buffer_after_commit")
    misuse("command_buffer_after_commit")


def test_work_that_bypasses_a_proxy_of_the_encoder_is_detected() -> None:
    """A proxy forwards all calls to the encoder, and ends with a commit like the encoder itself."""
    with metal_sim.recording_encoders():
        assert misuse("ordered").sum().item() == 64 * 3  # with memoryBarrierWithScope:
        assert misuse("fill_and_commit").sum().item() == 64 * 3
        for name, selector in (("exact_threads", "dispatchThreads"), ("shared", "setThreadgroupMemoryLength")):
            with pytest.raises(RuntimeError, match=f"capture: an op encodes by a call that .* record: {selector}"):
                misuse(name)
        with pytest.raises(RuntimeError, match="encoder: the encoder was used after a commit"):
            misuse("encoder_after_commit")
    assert misuse("exact_threads").sum().item() == 40 * 3


def test_writes_outside_of_a_buffer_are_detected() -> None:
    x = torch.zeros(64, device="mps")
    misuse("write_after", x)
    with pytest.raises(RuntimeError, match="guard: something wrote after a buffer of 256 bytes"):
        torch.mps.synchronize()
    misuse("mend_after", x)
    torch.mps.synchronize()
    misuse("write_after", x)
    del x
    with pytest.raises(RuntimeError, match="guard: something wrote after a buffer of 256 bytes"):
        torch.mps.synchronize()


@pytest.mark.parametrize(("name", "kind"), [("leak_buffer", "MTLBuffer"), ("leak_library", "MTLLibrary")])
def test_leaked_objects_are_counted(name: str, kind: str) -> None:
    misuse("compile_only")
    before = metal_sim.live_objects()
    misuse("compile_only")
    assert metal_sim.live_objects() == before
    misuse(name)
    assert metal_sim.live_objects()[kind] == before.get(kind, 0) + 1


def test_metal_versions_of_each_macos() -> None:
    misuse("metal_4")
    with metal_sim.playing_macos(15), pytest.raises(RuntimeError, match="does not know Metal 400"):
        misuse("metal_4")


def test_maths_that_a_library_was_compiled_with() -> None:
    for name, safe, precise in (
        ("compile_only", False, False),
        ("math_mode", False, True),
        ("no_fast_math", True, True),
    ):
        before = metal_sim.compiled()
        misuse(name)
        *others, last = metal_sim.compiled()
        assert others == before and (last.safe, last.precise) == (safe, precise), name


def test_compile_options_of_macos_14() -> None:
    with metal_sim.playing_macos(14):
        misuse("no_fast_math")
        last = metal_sim.compiled()[-1]
        assert (last.metal_version, last.safe, last.precise) == (310, True, True)
        with pytest.raises(RuntimeError, match="selector: -\\[MTLCompileOptions setMathMode:\\]"):
            misuse("math_mode")


def test_more_threadgroups() -> None:
    """The kernel of `fill`, launched with two threadgroups of 32 threads, does not ignore a third one."""
    with metal_sim.more_threadgroups(), metal_sim.record() as record:
        misuse("fill", torch.zeros(96, device="mps"))
    assert record.dispatches[0].grid == [3, 1, 1]
    with metal_sim.more_threadgroups(), pytest.raises(RuntimeError, match="bounds"):
        misuse("fill")
    misuse("fill")


def test_a_concurrent_encoder_orders_by_barriers_alone() -> None:
    """The first dispatch needs a barrier, too: PyTorch may have dispatched before it in the same encoder."""
    with metal_sim.concurrent_encoders():
        assert misuse("ordered").sum().item() == 64 * 3
        for name in ("fill", "ordered_among_themselves"):
            with pytest.raises(RuntimeError, match="barrier: a dispatch on a concurrent encoder"):
                misuse(name)
    assert misuse("fill").sum().item() == 64 * 3


# ---------------------------------------------------------------------------------------------- counting


def test_record() -> None:
    x = torch.zeros(64, device="mps")
    misuse("fill", x)
    with metal_sim.record() as record:
        misuse("fill", x)
        misuse("shared", x)
    first, second = record.dispatches
    assert (first.kernel, first.label, first.grid, first.threads) == (
        "write_value",
        "write_value",
        [2, 1, 1],
        [32, 1, 1],
    )
    assert (first.buffer_bytes, first.constant_bytes, first.threadgroup_bytes) == (256, 4, 0)
    assert (second.kernel, second.threadgroup_bytes) == ("shared", 256)
    assert record.kernels == ["write_value", "shared"] and not record.host_syncs
    assert 0 < record.host_seconds < record.seconds
    with metal_sim.record() as record:
        x.sum().item()
        x.cpu()
    assert record.host_syncs == ["aten::_local_scalar_dense", "copy to the CPU"] and not record.dispatches


def test_costs_of_a_dispatch() -> None:
    """With one threadgroup of 64 threads, and with a sample of one of two threadgroups."""
    x = torch.zeros(64, device="mps")
    with metal_sim.record(costs=True) as record:
        misuse("shared", x)
    counts = {f"{space}_{what}": 64 * 4 for space in ("device", "threadgroup") for what in ("loaded", "stored")}
    assert record.dispatches[0].costs == metal_sim.Costs(
        **counts, threadgroup_barriers=1, threadgroups=1, threadgroups_run=1
    )
    x.zero_()
    with metal_sim.record(costs=True, sample=1) as record:
        misuse("fill", x)
    (costs,) = (dispatch.costs for dispatch in record.dispatches)
    assert (costs.constant_loaded, costs.device_stored) == (64 * 4, 64 * 4)
    assert not costs.exact and x.count_nonzero().item() == 32


def test_costs_are_counted_only_if_requested() -> None:
    x = torch.zeros(64, device="mps")
    with metal_sim.record(costs=True, sample=1) as with_costs, metal_sim.host_only():
        misuse("fill", x)
    with metal_sim.record() as without_costs:
        misuse("fill", x)
    assert with_costs.dispatches[0].costs is None and without_costs.dispatches[0].costs is None
    assert x.count_nonzero().item() == 64


def test_commits_are_counted() -> None:
    """A commit through the stream is allowed: later work in the block takes a new encoder."""
    with metal_sim.record() as record:
        x = misuse("fill_and_commit")
        misuse("fill")
    assert (record.commits, len(record.dispatches), record.host_syncs) == (1, 3, [])
    assert x.sum().item() == 64 * 3
    with metal_sim.record() as record:
        misuse("fill")
    assert record.commits == 0


def test_the_hosts_work_is_counted() -> None:
    """Blocks and messages of ops under test, and PyTorch's own ops. Views do no work on the device."""
    x = torch.zeros(64, device="mps")
    with metal_sim.record() as record:
        misuse("fill", x)  # sets pipeline, buffer and bytes, and dispatches
        misuse("fill", x.view(8, 8))
    assert (record.blocks, record.messages, record.aten_ops) == (2, 2 * 4, 0)
    with metal_sim.record() as record:
        x.add_(1)
        x[:4].copy_(x[4:8])
    assert (record.blocks, record.messages, record.aten_ops) == (0, 0, 2)


def test_handlers_of_a_command_buffer() -> None:
    """Each is called once, for the command buffer committed with it."""
    misuse("commit_with_handlers")
    assert torch.ops.metal_sim_misuse.completed() == "4;"  # MTLCommandBufferStatusCompleted
    with metal_sim.failing_commits("a reason"):
        x = misuse("commit_with_handlers")
    assert torch.ops.metal_sim_misuse.completed() == "5a reason;"  # MTLCommandBufferStatusError
    misuse("fill_and_commit", x)
    assert torch.ops.metal_sim_misuse.completed() == "" and x.sum().item() == 64 * 3


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("handler_takes_the_queue", "deadlock: dispatch_sync inside of a handler"),
        ("handler_throws", "from the handler"),
    ],
)
def test_forbidden_calls_in_a_handler(name: str, what: str) -> None:
    misuse(name)
    with pytest.raises(RuntimeError, match=what):
        torch.mps.synchronize()


def test_the_gpu_and_the_macos_being_played() -> None:
    """In a program linked for an older macOS, NSProcessInfo returns 16, and sysctl the kernel's version."""
    machine = torch.ops.metal_sim_misuse.machine
    assert machine() == "Simulated Metal device, family 7 8, macOS 26.0, Darwin 25.0.0"
    with metal_sim.playing_macos(26, 5, for_older_sdk=True), metal_sim.playing_gpu("Apple Paravirtual device", 1005):
        assert machine() == "Apple Paravirtual device, family, macOS 16.5, Darwin 25.5.0"
    for major, darwin in ((14, 23), (15, 24), (27, 27)):
        with metal_sim.playing_macos(major, 1), metal_sim.playing_gpu("Apple M1", 1007):
            assert machine() == f"Apple M1, family 7, macOS {major}.1, Darwin {darwin}.1.0"


def test_host_only_counts_and_does_not_run() -> None:
    x = torch.zeros(64, device="mps")
    with metal_sim.host_only(), metal_sim.record() as record:
        misuse("fill", x)
    assert record.kernels == ["write_value"] and x.sum().item() == 0
    with metal_sim.host_only(), pytest.raises(RuntimeError, match="unbound"):
        torch.ops.metal_sim.clear()
        misuse("unbound", x)


def test_orders_are_checked() -> None:
    with pytest.raises(RuntimeError, match="expected forward, backward or random:SEED, got sideways"):
        metal_sim.set_orders("sideways")
    metal_sim.set_orders("forward", "backward", "random:1")
    assert misuse("shared").sum().item() == 64
    metal_sim.set_orders("forward")


def test_orders_of_the_environment_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as environment:
        environment.setenv("METAL_SIM_ORDERS", "random:7")
        metal_sim.set_orders("forward", "backward")
    with pytest.raises(RuntimeError, match="in order random:7\nto repeat it: METAL_SIM_ORDERS=random:7 python"):
        misuse("out_of_bounds")
    metal_sim.set_orders("forward")


def test_two_threads() -> None:
    failures = []

    def work(value: int) -> None:
        try:
            for _ in range(20):
                x = torch.full((64,), float(value), device="mps")
                misuse("shared", x)
                assert torch.equal(x.cpu(), torch.full((64,), value + 1.0))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
