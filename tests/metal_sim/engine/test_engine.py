"""The engine alone: good kernels give numpy's results in every order, and every mutant is caught by its rule."""

import functools
import os
import subprocess
import sys

import numpy as np
import pytest

from metal_sim import engine
from metal_sim.engine import BACKWARD, FORWARD, At, Bytes, CompileError, Library, Violation, random_order, translate

MUTANTS = engine.HERE / "mutants"
ALL_ORDERS = (FORWARD, BACKWARD, random_order(1), random_order(2))


@pytest.fixture(autouse=True)
def settings():
    engine.set_orders(*ALL_ORDERS)
    engine.set_seconds(60)
    engine.set_races(True)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def ones(*shape):
    return np.ones(shape, np.float32)


def u32(value):
    return Bytes(np.uint32(value))


def mutant(name, version=310):
    return Library((MUTANTS / f"{name}.metal").read_text(encoding="utf-8"), version)


def only_kernel(library):
    (name,) = library.names()
    return library.kernel(name)


# mutant: rule, arguments, launch
VIOLATIONS = {
    "missing_barrier": ("race", [ones(64), zeros(64), u32(64)], dict(grid=1, threads=64, lengths={0: 512})),
    "scratch_overlap": ("race", [ones(40), zeros(40), u32(40)], dict(grid=1, threads=64, lengths={0: 512})),
    "threadgroup_overflow": ("bounds", [zeros(128)], dict(grid=1, threads=128, lengths={0: 256})),
    "static_overflow": ("bounds", [zeros(32)], dict(grid=1, threads=32)),
    "stack_overflow": ("stack", [ones(64), zeros(32), u32(9)], dict(grid=1, threads=32)),
    "fixed_launch": ("race", [ones(512), ones(512), u32(512)], dict(grid=2, threads=256)),
    "lanes_need_a_barrier": ("race", [zeros(32)], dict(grid=1, threads=32)),
    "barrier_orders_nothing": ("race", [zeros(64)], dict(grid=1, threads=64)),
    "device_race": ("race", [zeros(63)], dict(grid=2, threads=32)),
    "device_read_race": ("race", [zeros(64), zeros(64)], dict(grid=2, threads=32)),
    "order_dependent": ("order", [zeros(1, dtype=np.uint32), zeros(64, dtype=np.uint32)], dict(grid=2, threads=32)),
    "plain_and_atomic": ("race", [zeros(1, dtype=np.uint32), zeros(64, dtype=np.uint32)], dict(grid=2, threads=32)),
    "uninitialized": ("uninitialized", [zeros(64)], dict(grid=1, threads=64)),
    "left_over": ("uninitialized", [zeros(64)], dict(grid=2, threads=32)),
    "device_overrun": ("bounds", [ones(60), zeros(64)], dict(grid=2, threads=32)),
    "before_the_start": ("bounds", [At(ones(64), 16), zeros(32)], dict(grid=1, threads=32)),
    "vector_overrun": ("bounds", [ones(30), zeros(32), u32(30)], dict(grid=1, threads=8)),
    "misaligned_vector": ("alignment", [ones(64), zeros(4), u32(5)], dict(grid=1, threads=4)),
    "constant_overrun": ("bounds", [Bytes(ones(16)), zeros(32)], dict(grid=1, threads=32)),
    "small_params": ("argument", [ones(32), Bytes(np.uint32(32), np.float32(2))], dict(grid=1, threads=32)),
    "divergent_barrier": ("barrier", [zeros(64), u32(40)], dict(grid=1, threads=64)),
    "two_barriers": ("barrier", [zeros(64)], dict(grid=1, threads=64)),
    "divergent_simd_sum": ("simdgroup", [ones(40), zeros(1), u32(40)], dict(grid=1, threads=32)),
    "partial_simdgroup": ("simdgroup", [ones(48), zeros(48)], dict(grid=1, threads=48)),
    "different_simd_functions": ("simdgroup", [ones(32), zeros(32)], dict(grid=1, threads=32)),
    "shuffle_out_of_range": ("simdgroup", [zeros(32)], dict(grid=1, threads=32)),
    "barrier_for_some_simd_for_others": ("simdgroup", [zeros(32)], dict(grid=1, threads=32)),
    "divergent_matrix_load": ("simdgroup", [ones(66), zeros(64)], dict(grid=1, threads=32)),
    "matrix_overrun": ("bounds", [ones(8, 20), zeros(8, 24), u32(20)], dict(grid=1, threads=32)),
    "endless": ("time", [zeros(32)], dict(grid=1, threads=32)),
    "endless_together": ("time", [zeros(32)], dict(grid=1, threads=32)),
    "recursion": ("stack", [zeros(32)], dict(grid=1, threads=32)),
    "int_overflow": ("arithmetic", [zeros(64), Bytes(np.int32(1 << 27))], dict(grid=1, threads=32)),
}


@pytest.mark.parametrize("orders", [[FORWARD, BACKWARD], ALL_ORDERS], ids=["two_orders", "all_orders"])
@pytest.mark.parametrize("name", VIOLATIONS)
def test_violation_is_caught(name, orders):
    rule, arguments, launch = VIOLATIONS[name]
    arguments = [copied(a) for a in arguments]
    engine.set_orders(*orders)
    if rule == "time":
        engine.set_seconds(0.2)
    with pytest.raises(Violation) as caught:
        only_kernel(mutant(name))(*arguments, **launch)
    assert caught.value.rule == rule, caught.value


def copied(argument):
    if isinstance(argument, At):
        return At(argument.array.copy(), argument.offset)
    return argument.copy() if isinstance(argument, np.ndarray) else argument


COMPILE_ERRORS = {
    "too_much_threadgroup_memory": "33792 bytes of threadgroup memory",
    "write_to_const": "program_source:5",
    "write_to_constant": "program_source:5",
    "type_error": "undeclared identifier 'missing_name'",
    "uses_double": "'double' is not supported",
    "uses_erf": "'erf'",
    "uses_goto": "'goto' is not supported",
    "uses_std": "'std'",
    "mixed_min": "call to 'min' is ambiguous",
    "bfloat_simd_sum": "simd_sum takes half, float and integers",
    "implicit_bfloat": "program_source:5",
    "vector_conversion": "invalid operands",
    "same_host_name": "two kernels have the host_name 'k'",
    "no_attribute": "kernel parameter 'i' needs an attribute",
    "threadgroup_in_function": "must be declared in a kernel",
    "not_a_template": "does not refer to a function template",
    "not_ascii": "outside ASCII",
    "no_space_on_thread_pointer": "pointer type must have explicit address space qualifier",
    "no_space_on_reference": "reference type must have explicit address space qualifier",
    "uses_lambda": "lambda expressions are not supported",
}


@pytest.mark.parametrize("name", COMPILE_ERRORS)
def test_refused_by_the_compiler(name):
    with pytest.raises(CompileError) as caught:
        mutant(name)
    assert COMPILE_ERRORS[name] in str(caught.value)


def test_every_mutant_is_tested():
    elsewhere = {"scratch_overlap_with_barrier", "tree_of_any_size"}
    names = {path.stem for path in MUTANTS.glob("*.metal") if not path.stem.startswith("space_")}
    assert names == VIOLATIONS.keys() | COMPILE_ERRORS.keys() | elsewhere


# --- results that are equally wrong in every order


def test_scratch_overlap_with_barrier_is_wrong_below_the_threads_only():
    kernel = only_kernel(mutant("scratch_overlap_with_barrier"))
    for count, right in [(64, True), (40, False)]:
        logits = np.linspace(-1, 1, count, dtype=np.float32)
        out = zeros(count)
        kernel(logits, out, u32(count), grid=1, threads=64, lengths={0: 512})
        expected = np.exp(logits) / np.exp(logits).sum()
        assert np.allclose(out, expected, rtol=1e-5) == right


@pytest.mark.parametrize("threads, right", [(128, True), (127, False), (96, False), (60, False)])
def test_tree_of_any_size_drops_elements(threads, right):
    out = zeros(1)
    only_kernel(mutant("tree_of_any_size"))(ones(threads), out, grid=1, threads=threads)
    assert (out[0] == threads) == right


def test_fixed_launch_with_fewer_threads_reads_uninitialised_memory():
    with pytest.raises(Violation) as caught:
        only_kernel(mutant("fixed_launch"))(ones(512), ones(512), u32(512), grid=1, threads=128)
    assert caught.value.rule == "uninitialized"


def test_fixed_launch():
    residual = ones(512)
    only_kernel(mutant("fixed_launch"))(residual, ones(512), u32(512), grid=1, threads=256)
    assert np.allclose(residual, 1)


# --- mistakes of the host

COPY = """
#include <metal_stdlib>
using namespace metal;
kernel void copy(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                 uint i [[thread_position_in_grid]], uint n [[threads_per_grid]]) {
  out[i] = x[i];
}
[[kernel, max_total_threads_per_threadgroup(64)]] void small(device float* out [[buffer(0)]],
                                                            threadgroup float* shared [[threadgroup(0)]],
                                                            uint i [[thread_position_in_grid]]) {
  shared[i] = 1.0f;
  out[i] = shared[i];
}
"""


@pytest.mark.parametrize(
    "rule, arguments, launch",
    [
        ("unbound", [ones(32)], dict(grid=1, threads=32)),
        ("unbound", [None, ones(32)], dict(grid=1, threads=32)),
        ("argument", [ones(32), Bytes(ones(32))], dict(grid=1, threads=32)),
        ("bounds", [At(ones(32), 132), ones(32)], dict(grid=1, threads=32)),
        ("bounds", [At(ones(32), 4), ones(32)], dict(grid=1, threads=32)),
        ("alignment", [At(ones(33), 2), ones(32)], dict(grid=1, threads=32)),
        ("launch", [ones(32), ones(32)], dict(grid=0, threads=32)),
        ("launch", [ones(32), ones(32)], dict(grid=1, threads=0)),
        ("launch", [ones(32), ones(32)], dict(grid=1, threads=1025)),
        ("launch", [ones(32), ones(32)], dict(grid=1, threads=(32, 32, 2))),
        ("launch", [ones(32), ones(32)], dict(grid=(1 << 27), threads=32)),
        ("threadgroup_memory", [ones(32), ones(32)], dict(grid=1, threads=32, lengths={0: 24})),
        ("threadgroup_memory", [ones(32), ones(32)], dict(grid=1, threads=32, lengths={0: 32768, 3: 16})),
    ],
)
def test_host_mistakes(rule, arguments, launch):
    kernel = Library(COPY).kernel("copy")
    with pytest.raises(Violation) as caught:
        kernel(*[copied(a) for a in arguments], **launch)
    assert caught.value.rule == rule, caught.value


def test_one_memory_twice():
    x = ones(32)
    with pytest.raises(Violation) as caught:
        Library(COPY).kernel("copy")(x, x, grid=1, threads=32)
    assert caught.value.rule == "alias"


def test_limits_of_one_kernel():
    small = Library(COPY).kernel("small")
    out = zeros(64)
    small(out, grid=1, threads=64, lengths={0: 256})
    assert (out == 1).all()
    for launch, rule in [(dict(threads=96, lengths={0: 512}), "launch"), (dict(threads=32), "unbound")]:
        with pytest.raises(Violation) as caught:
            small(out, grid=1, **launch)
        assert caught.value.rule == rule


def test_message_names_kernel_argument_line_and_thread():
    with pytest.raises(Violation) as caught:
        only_kernel(mutant("device_overrun"))(ones(60), zeros(64), grid=2, threads=32)
    text = str(caught.value)
    for part in ["kernel 'copy'", "'x' [[buffer(0)]]", "offset 240", "program_source:7:", "thread 28"]:
        assert part in text, text


def test_a_violation_leaves_the_engine_usable():
    for _ in range(3):
        with pytest.raises(Violation):
            only_kernel(mutant("divergent_barrier"))(zeros(64), u32(40), grid=1, threads=64)
        test_fixed_launch()


# --- good kernels

NORM = """
#include <metal_stdlib>
using namespace metal;

struct NormParams {
  uint hidden;
  float eps;
};
constant constexpr uint kSimdgroups = 32;

inline float block_sum(float v, threadgroup float* scratch, uint simdgroup, uint lane, uint simdgroups) {
  v = simd_sum(v);
  if (lane == 0) scratch[simdgroup] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < simdgroups ? scratch[lane] : 0.0);
}

template <typename T>
[[kernel]] void row_norm(device const T* x [[buffer(0)]], device T* out [[buffer(1)]],
                         constant NormParams& params [[buffer(2)]], uint row [[threadgroup_position_in_grid]],
                         uint tid [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scratch[kSimdgroups];
  const device T* in = x + ulong(row) * params.hidden;
  device T* to = &out[ulong(row) * params.hidden];
  float sum = 0;
  for (uint i = tid; i < params.hidden; i += threads) sum += float(in[i]) * float(in[i]);
  sum = block_sum(sum, scratch, simdgroup, lane, simdgroups);
  const float scale = rsqrt(sum / params.hidden + params.eps);
  for (uint i = tid; i < params.hidden; i += threads) to[i] = T(float(in[i]) * scale);
}

#define instantiate_kernel(name, func, ...) \\
  template [[host_name(name)]] [[kernel]] decltype(func<__VA_ARGS__>) func<__VA_ARGS__>;
instantiate_kernel("row_norm_" "float", row_norm, float)
instantiate_kernel("row_norm_half", row_norm, half)
instantiate_kernel("row_norm_bfloat", row_norm, bfloat)
"""


def to_bfloat(x):
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("version", [310, 400])
@pytest.mark.parametrize("rows, hidden", [(1, 1), (3, 70), (5, 2048)])
def test_row_norm(rows, hidden, version):
    library = Library(NORM, version)
    assert library.names() == ["row_norm_bfloat", "row_norm_float", "row_norm_half"]
    x = np.random.default_rng(0).standard_normal((rows, hidden), dtype=np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6)
    params = Bytes(np.uint32(hidden), np.float32(1e-6))
    out = np.empty_like(x)
    library.kernel("row_norm_float")(x, out, params, grid=rows, threads=256)
    assert np.allclose(out, expected, rtol=1e-6, atol=1e-6)
    out = np.empty(x.shape, np.float16)
    library.kernel("row_norm_half")(x.astype(np.float16), out, params, grid=rows, threads=256)
    assert np.allclose(out, expected, rtol=4e-3, atol=1e-3)
    out = np.empty(x.shape, np.uint16)
    library.kernel("row_norm_bfloat")(to_bfloat(x), out, params, grid=rows, threads=256)
    assert np.allclose(from_bfloat(out), expected, rtol=2e-2, atol=1e-3)


def test_reflection():
    kernel = Library(NORM).kernel("row_norm_half")
    assert kernel.static_bytes() == 128
    assert kernel.parameters() == [
        ["x", "device", "0", "1", "0", "2", "2"],
        ["out", "device", "1", "0", "0", "2", "2"],
        ["params", "constant", "2", "1", "1", "8", "4"],
    ]


def test_bfloat_rounds_to_nearest_even():
    source = """
#include <metal_stdlib>
using namespace metal;
kernel void convert(device const float* x [[buffer(0)]], device bfloat* out [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  out[i] = bfloat(x[i]);
}
"""
    bits = np.random.default_rng(1).integers(0, 1 << 32, 4096, dtype=np.uint64).astype(np.uint32)
    bits[:6] = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x3F808001]
    x = bits.view(np.float32)
    bits[np.isnan(x)] = 0x7FC00000
    out = np.empty(x.size, np.uint16)
    Library(source).kernel("convert")(x, out, grid=16, threads=256)
    assert (out == to_bfloat(x)).all()


def kernel_text(name, signature, body):
    return f"""
kernel void {name}({signature}
              uint3 position [[thread_position_in_grid]], uint3 group [[threadgroup_position_in_grid]],
              ushort3 local [[thread_position_in_threadgroup]], uint tid [[thread_index_in_threadgroup]],
              uint3 size [[threads_per_threadgroup]], uint3 groups [[threadgroups_per_grid]],
              uint3 grid [[threads_per_grid]], ushort lane [[thread_index_in_simdgroup]],
              uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]],
              uint width [[threads_per_simdgroup]]) {{
  const uint i = position.x;
  {body}
}}
"""


HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def run(body, *arguments, threads=32, grid=1, signature="", version=310, exact=False, lengths=None):
    """Run a kernel `k` with the given buffers and body."""
    library = Library(HEAD + kernel_text("k", signature, body), version)
    return library.kernel("k")(*arguments, grid=grid, threads=threads, exact=exact, lengths=lengths)


@functools.cache
def library_of(signature, body, expressions):
    """One kernel for each expression, which replaces EXPRESSION in `body`: k0, k1 and so on."""
    kernels = [kernel_text(f"k{n}", signature, body.replace("EXPRESSION", e)) for n, e in enumerate(expressions)]
    return Library(HEAD + "".join(kernels))


def run_expression(expression, table, signature, body, *arguments, threads):
    expressions = tuple(table)
    kernel = library_of(signature, body, expressions).kernel(f"k{expressions.index(expression)}")
    kernel(*arguments, grid=1, threads=threads)


FLOATS = "device const float* x [[buffer(0)]], device float* out [[buffer(1)]],"
UINTS = "device const uint* x [[buffer(0)]], device uint* out [[buffer(1)]],"


def test_positions_in_an_uneven_grid():
    out = zeros(7, 5, 3, 4, dtype=np.uint32)
    run(
        """const uint at = (position.z * grid.y + position.y) * grid.x + position.x;
        out[at] = uint4(size.x, size.y, tid, group.x + local.x);""",
        out,
        grid=(3, 5, 7),
        threads=(2, 4, 1),
        exact=True,
        signature="device uint4* out [[buffer(0)]],",
    )
    assert out[0, 0, 2].tolist() == [1, 4, 0, 1]
    assert out[6, 4, 0].tolist() == [2, 1, 0, 0]
    assert out[6, 3, 1].tolist() == [2, 4, 7, 1]


SIMD = {
    "simd_sum(x[i])": lambda x: np.full(32, x.sum()),
    "simd_max(x[i])": lambda x: np.full(32, x.max()),
    "simd_min(x[i])": lambda x: np.full(32, x.min()),
    "simd_product(x[i] * 0.5f)": lambda x: np.full(32, np.prod(x * np.float32(0.5))),
    "simd_shuffle(x[i], ushort(31 - lane))": lambda x: x[::-1],
    "simd_shuffle_xor(x[i], 5)": lambda x: x[np.arange(32) ^ 5],
    "simd_shuffle_up(x[i], 3)": lambda x: np.concatenate([x[:3], x[:-3]]),
    "simd_shuffle_down(x[i], 3)": lambda x: np.concatenate([x[3:], x[-3:]]),
    "simd_shuffle_rotate_up(x[i], 3)": lambda x: np.roll(x, 3),
    "simd_shuffle_rotate_down(x[i], 3)": lambda x: np.roll(x, -3),
    "simd_broadcast(x[i], 7)": lambda x: np.full(32, x[7]),
    "simd_broadcast_first(x[i])": lambda x: np.full(32, x[0]),
    "simd_prefix_exclusive_sum(x[i])": lambda x: np.cumsum(x) - x,
    "simd_prefix_inclusive_sum(x[i])": lambda x: np.cumsum(x),
    "float(simd_any(x[i] > 15.5f))": lambda x: np.full(32, 1.0),
    "float(simd_all(x[i] > 15.5f))": lambda x: np.full(32, 0.0),
    "float(ctz(ulong(simd_vote::vote_t(simd_ballot(x[i] == 4.0f)))))": lambda x: np.full(32, 4.0),
    "float(simd_is_first())": lambda x: np.eye(1, 32)[0],
    "quad_sum(x[i])": lambda x: np.repeat(x.reshape(8, 4).sum(1), 4),
    "float(simd_and(uint(x[i]) | 8u))": lambda x: np.full(32, 8.0),
    "float(simd_or(uint(x[i])))": lambda x: np.full(32, 31.0),
    "float(simd_xor(uint(x[i]) + 1u))": lambda x: np.full(32, 32.0),
    "simd_sum(float4(x[i], 1, 2, 3)).w": lambda x: np.full(32, 96.0),
    "simd_shuffle_and_fill_up(x[i], -x[i], 3)": lambda x: np.concatenate([-x[-3:], x[:-3]]),
    "simd_shuffle_and_fill_down(x[i], -x[i], 3)": lambda x: np.concatenate([x[3:], -x[:3]]),
    "simd_shuffle_and_fill_up(x[i], -x[i], 1, 8)": lambda x: np.concatenate(
        [-x.reshape(4, 8)[:, -1:], x.reshape(4, 8)[:, :-1]], 1
    ).ravel(),
}


@pytest.mark.parametrize("expression", SIMD)
def test_simdgroup_functions(expression):
    x = np.arange(32, dtype=np.float32)
    if "product" in expression:
        x = np.full(32, 2, np.float32) + (np.arange(32, dtype=np.float32) == 3)
    out = zeros(32)
    run_expression(expression, SIMD, FLOATS, "out[i] = EXPRESSION;", x, out, threads=32)
    assert np.allclose(out, SIMD[expression](x)), out


X = np.array(
    [-2.5, -1.5, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 1.5, 2.5, 3.0, 10.0, np.inf, -np.inf, np.nan, 1e-3], np.float32
)
MATH = {
    "abs(v)": np.abs,
    "exp(v)": np.exp,
    "exp2(v)": np.exp2,
    "log(v)": np.log,
    "log2(v)": np.log2,
    "tanh(v)": np.tanh,
    "precise::tanh(v)": np.tanh,
    "fast::exp(v)": np.exp,
    "sqrt(v)": np.sqrt,
    "rsqrt(v)": lambda v: 1 / np.sqrt(v),
    "floor(v)": np.floor,
    "ceil(v)": np.ceil,
    "rint(v)": np.rint,
    "round(v)": lambda v: np.trunc(v + np.copysign(0.5, v)),
    "trunc(v)": np.trunc,
    "float(isnan(v))": np.isnan,
    "float(isinf(v))": np.isinf,
    "float(isfinite(v))": np.isfinite,
    "min(v, 1.0f)": lambda v: np.fmin(v, 1),
    "max(v, 1.0f)": lambda v: np.fmax(v, 1),
    "clamp(v, -1.0f, 1.0f)": lambda v: np.fmin(np.fmax(v, -1), 1),
    "fma(v, 2.0f, 1.0f)": lambda v: v * 2 + 1,
    "pow(v, 2.0f)": lambda v: v**2,
    "select(v, 7.0f, v > 1.0f)": lambda v: np.where(v > 1, 7, v),
    "sign(v)": lambda v: np.where(np.isnan(v), 0, np.sign(v)),
    "as_type<float>(as_type<uint>(v) ^ 0x80000000u)": lambda v: -v,
    "v / (1.0f + exp(-v))": lambda v: v / (1 + np.exp(-v)),
    "numeric_limits<float>::lowest()": lambda v: np.full_like(v, np.finfo(np.float32).min),
    "v > -INFINITY ? v : NAN": lambda v: np.where(v > -np.inf, v, np.nan),
    "2. * v + 1e1": lambda v: 2 * v + 10,
    "fdim(v, 1.0f)": lambda v: np.where(v <= 1, 0, v - 1),
    "nextafter(v, 2.0f)": lambda v: np.nextafter(v, np.float32(2)),
    "ldexp(v, 2)": lambda v: v * 4,
}


@pytest.mark.parametrize("expression", MATH)
@np.errstate(all="ignore")
def test_math(expression):
    out = zeros(16)
    run_expression(expression, MATH, FLOATS, "const float v = x[i]; out[i] = EXPRESSION;", X, out, threads=16)
    expected = MATH[expression](X).astype(np.float32)
    assert np.allclose(out, expected, rtol=1e-6, equal_nan=True), (out, expected)


INTEGERS = {
    "clz(v)": lambda v: 32 - np.array([int(a).bit_length() for a in v]),
    "ctz(v)": lambda v: np.array([32 if a == 0 else (int(a) & -int(a)).bit_length() - 1 for a in v]),
    "popcount(v)": lambda v: np.array([bin(a).count("1") for a in v]),
    "reverse_bits(v)": lambda v: np.array([int(f"{a:032b}"[::-1], 2) for a in v]),
    "uint(ushort(v))": lambda v: v & 0xFFFF,
    "min(v, 9u) + max(v, 3u)": lambda v: np.minimum(v, 9) + np.maximum(v, 3),
    "clamp(v, 2u, 100u)": lambda v: np.clip(v, 2, 100),
    "uint(ulong(v) * v >> 32)": lambda v: (v.astype(np.uint64) * v) >> 32,
    "mulhi(v, v)": lambda v: (v.astype(np.uint64) * v) >> 32,
    "v - 1u": lambda v: v - np.uint32(1),
    "uint(half(float(v % 7)) * 2.0h)": lambda v: v % 7 * 2,
}


@pytest.mark.parametrize("expression", INTEGERS)
def test_integers(expression):
    x = np.array([0, 1, 2, 3, 8, 255, 65535, 65536, 0x80000000, 0xFFFFFFFF, 12345, 77], np.uint32)
    out = zeros(x.size, dtype=np.uint32)
    run_expression(expression, INTEGERS, UINTS, "const uint v = x[i]; out[i] = EXPRESSION;", x, out, threads=12)
    assert (out == INTEGERS[expression](x).astype(np.uint32)).all(), out


VECTORS = {
    "v.wzyx": [4, 3, 2, 1],
    "float4(v.xy, v.zw) + 1.0f": [2, 3, 4, 5],
    "float4(v.x, v.yzw) * v": [1, 4, 9, 16],
    "float4(half4(v) / 2.0h)": [0.5, 1, 1.5, 2],
    "float4(dot(v, v), length(float2(3, 4)), v[2], v.xx.y)": [30, 5, 3, 1],
    "float4(float3(v.xyz), 9)": [1, 2, 3, 9],
    "max(v, 2.5f) - min(v, float4(3))": [1.5, 0.5, 0, 1],
    "select(v, -v, v > 2.0f)": [1, 2, -3, -4],
    "float4(int4(v * 1.5f) << 1)": [2, 6, 8, 12],
    "exp2(v)": [2, 4, 8, 16],
    "float4(all(v > 0.0f), any(v > 3.0f), any(v > 4.0f), 0)": [1, 1, 0, 0],
    "fma(v, 2.0f, float4(1))": [3, 5, 7, 9],
    "as_type<float4>(as_type<uint4>(v))": [1, 2, 3, 4],
    "v.abgr": [4, 3, 2, 1],
    "float4(v.g, v.rb, v.a)": [2, 1, 3, 4],
    "v++ + ++v": [4, 6, 8, 10],
    "float4(packed_float3(v.xyz) * -2.0f, packed_float4(v)[3])": [-2, -4, -6, 4],
    "{4, 3, v.y, v.x}": [4, 3, 2, 1],
    "float4(float2(v.xy > 1.0f && v.zw < 4.0f), float2(!(v.xy > 1.0f) || v.zw < 4.0f))": [0, 0, 1, 0],
}


@pytest.mark.parametrize("expression", VECTORS)
def test_vectors(expression):
    x, out = np.array([1, 2, 3, 4], np.float32), zeros(4)
    body = "float4 v = *(device const float4*)x; *(device float4*)out = EXPRESSION;"
    run_expression(expression, VECTORS, FLOATS, body, x, out, threads=1)
    assert out.tolist() == VECTORS[expression]


def test_swizzles_are_written():
    out = zeros(4)
    run(
        "float4 v(0); v.zx = float2(1, 2); v.yw += 3.0f; v[1] *= 2.0f; ((device float4*)out)[0] = v;",
        out,
        threads=1,
        signature="device float* out [[buffer(0)]],",
    )
    assert out.tolist() == [2, 6, 1, 3]


def test_layout_of_types():
    sizes = ["half", "float", "half2", "half3", "half4", "float2", "float3", "float4", "bfloat", "bfloat4"]
    sizes += ["packed_float3", "packed_half4", "ulong2"]
    out = zeros(2 * len(sizes), dtype=np.uint32)
    body = "".join(f"out[{2 * n}] = sizeof({t}); out[{2 * n + 1}] = alignof({t});" for n, t in enumerate(sizes))
    run(body, out, threads=1, signature="device uint* out [[buffer(0)]],")
    got = dict(zip(sizes, out.reshape(-1, 2).tolist(), strict=True))
    assert got == {
        "half": [2, 2],
        "float": [4, 4],
        "half2": [4, 4],
        "half3": [8, 8],
        "half4": [8, 8],
        "float2": [8, 8],
        "float3": [16, 16],
        "float4": [16, 16],
        "bfloat": [2, 2],
        "bfloat4": [8, 8],
        "packed_float3": [12, 4],
        "packed_half4": [8, 2],
        "ulong2": [16, 16],
    }


def test_half_rounds_after_every_operation():
    x = np.array([0.1, 0.3, 1.7], np.float16)
    out = np.zeros(1, np.float16)
    run(
        "out[0] = x[0] * x[1] + x[2];",
        x,
        out,
        threads=1,
        signature="device const half* x [[buffer(0)]], device half* out [[buffer(1)]],",
    )
    assert out[0] == x[0] * x[1] + x[2]


ATOMICS = """
  #define relaxed memory_order_relaxed
  threadgroup atomic_uint counts[8];
  threadgroup atomic_int largest;
  if (tid < 8) atomic_store_explicit(&counts[tid], 0u, relaxed);
  if (tid == 0) atomic_store_explicit(&largest, -1, relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&counts[x[i] % 8], 1u, relaxed);
  atomic_fetch_max_explicit(&largest, int(x[i]), relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid < 8) atomic_fetch_add_explicit(out + tid, atomic_load_explicit(counts + tid, relaxed), relaxed);
  if (tid == 8) atomic_fetch_max_explicit(&out[8], uint(atomic_load_explicit(&largest, relaxed)), relaxed);
  uint expected = 0u;
  if (tid == 9) atomic_compare_exchange_weak_explicit(&out[9], &expected, 5u, relaxed, relaxed);
"""


def test_atomics():
    x = np.random.default_rng(2).integers(0, 1000, 4 * 64).astype(np.uint32)
    out = zeros(10, dtype=np.uint32)
    signature = "device const uint* x [[buffer(0)]], device atomic_uint* out [[buffer(1)]],"
    run(ATOMICS, x, out, grid=4, threads=64, signature=signature)
    assert out[:8].tolist() == np.bincount(x % 8, minlength=8).tolist()
    assert out[8] == x.max() and out[9] == 5


def test_atomics_of_64_bits():
    out = np.array([5, 5], np.uint64)
    body = "atomic_max_explicit(out, ulong(i) << 33, memory_order_relaxed); "
    body += "atomic_min_explicit(&out[1], ulong(i) + 2, memory_order_relaxed);"
    run(body, out, signature="device atomic_ulong* out [[buffer(0)]],")
    assert out.tolist() == [31 << 33, 2]


def test_a_product_of_matrices():
    x = np.random.default_rng(6).standard_normal((8, 8), dtype=np.float32)
    out = zeros(8, 8)
    run("simdgroup_float8x8 m; simdgroup_load(m, x, 8); simdgroup_store(m * m, out, 8);", x, out, signature=FLOATS)
    assert np.allclose(out, x @ x, atol=1e-5)


MATRIX = """
  threadgroup {T} tile[64];
  simdgroup_matrix<{T}, 8, 8> a, b;
  simdgroup_matrix<float, 8, 8> c = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint k = 0; k < 16; k += 8) {{
    simdgroup_load(a, x, 16, ulong2(k, 0));
    simdgroup_load(b, y + k, 16, ulong2(0, 0), true);
    simdgroup_multiply_accumulate(c, a, b, c);
  }}
  simdgroup_store(a, tile, 8);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  c.thread_elements()[0] += float(tile[0]) * 0.0f;
  simdgroup_store(c, out, 8);
"""


@pytest.mark.parametrize("kind, dtype", [("half", np.float16), ("float", np.float32)])
def test_simdgroup_matrix(kind, dtype):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((8, 16)).astype(dtype)
    y = rng.standard_normal((8, 16)).astype(dtype)
    out = zeros(8, 8)
    signature = f"device const {kind}* x [[buffer(0)]], device const {kind}* y [[buffer(1)]],"
    signature += "device float* out [[buffer(2)]],"
    run(MATRIX.format(T=kind), x, y, out, signature=signature)
    assert np.allclose(out, x.astype(np.float64) @ y.astype(np.float64).T, rtol=1e-5, atol=1e-5)


def test_lanes_of_a_matrix():
    """Lanes 0 and 1 have row 0, columns 0 to 3; lanes 8 and 9 the rest of that row; lane 16 starts row 4."""
    x, out = np.arange(64, dtype=np.float32), zeros(32, 2)
    body = """
    simdgroup_float8x8 m;
    simdgroup_load(m, x, 8);
    *(device float2*)&out[2 * lane] = m.thread_elements();
    """
    run(body, x, out, signature=FLOATS)
    assert out[[0, 1, 2, 8, 9, 16, 31]].tolist() == [[0, 1], [2, 3], [8, 9], [4, 5], [6, 7], [32, 33], [62, 63]]


def test_threadgroup_memory_of_both_kinds():
    out = zeros(128)
    body = """
    threadgroup float grid_of[4][33];
    threadgroup float2 pair;
    threadgroup float total, unused[2];
    grid_of[tid / 32][lane] = float(tid);
    shared[tid] = half(1);
    if (tid == 0) {
      pair = float2(2, 3);
      total = 10.0f;
      unused[1] = 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup const half* end = shared + 128;
    out[tid] = grid_of[3 - tid / 32][lane] + float(*(end - 1)) + pair.y + total;
    """
    signature = "device float* out [[buffer(0)]], threadgroup half* shared [[threadgroup(1)]],"
    run(body, out, threads=128, lengths={1: 256}, signature=signature)
    t = np.arange(128)
    assert (out == (3 - t // 32) * 32 + t % 32 + 14).all()


STRUCTS = """
#include <metal_stdlib>
using namespace metal;
namespace tools {
struct Best {
  float value;
  uint index;
};
inline Best better(Best a, Best b) {
  return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}
template <uint N>
struct Tournament {
  threadgroup Best* entries;
  Best winner(uint tid) {
    for (uint step = N / 2; step > 0; step /= 2) {
      if (tid < step) entries[tid] = better(entries[tid], entries[tid + step]);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    return entries[0];
  }
};
template <uint N>
[[kernel]] void argmax(device const float* x [[buffer(0)]], device Best* out [[buffer(1)]],
                       uint tid [[thread_index_in_threadgroup]], uint row [[threadgroup_position_in_grid]]) {
  threadgroup Best entries[N];
  entries[tid] = {x[row * N + tid], tid};
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Tournament<N> tournament{entries};
  const Best best = tournament.winner(tid);
  device Best& mine = out[row];
  if (tid == 0) mine = best;
}
}  // namespace tools
template [[host_name("argmax64")]] [[kernel]] decltype(tools::argmax<64>) tools::argmax<64>;
"""


def test_structs_templates_and_namespaces():
    x = np.random.default_rng(4).standard_normal((9, 64)).astype(np.float32)
    out = np.zeros(9, dtype=[("value", np.float32), ("index", np.uint32)])
    Library(STRUCTS).kernel("argmax64")(x, out, grid=9, threads=64)
    assert (out["index"] == x.argmax(1)).all() and (out["value"] == x.max(1)).all()


def test_simd_barrier_orders_lanes():
    out = zeros(64)
    body = """
    threadgroup float x[64];
    x[tid] = float(tid);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    out[tid] = x[tid ^ 1];
    """
    run(body, out, threads=64, signature="device float* out [[buffer(0)]],")
    assert (out == np.arange(64) ^ 1).all()


def test_device_memory_between_barriers():
    out = zeros(64)
    body = """
    out[tid] = float(tid);
    threadgroup_barrier(mem_flags::mem_device);
    const float other = out[63 - tid];
    threadgroup_barrier(mem_flags::mem_device);
    out[tid] += other;
    """
    run(body, out, threads=64, signature="device float* out [[buffer(0)]],")
    assert (out == 63).all()


def test_results_are_those_of_one_run_not_of_four():
    x = ones(32)
    run("x[i] += 1.0f;", x, signature="device float* x [[buffer(0)]],")
    assert (x == 2).all()


def test_offsets_above_32_bits_are_kept():
    """In a huge buffer with only two resident pages."""
    big = np.zeros((1 << 32) + 4096, np.uint8)
    out = zeros(1, dtype=np.uint32)
    big[(1 << 32) + 5] = 77
    body = "out[0] = x[(ulong(1) << 32) + 5];"
    run(body, big, out, threads=1, signature="device const uchar* x [[buffer(0)]], device uint* out [[buffer(1)]],")
    assert out[0] == 77


def test_preprocessor_knows_the_version():
    for version in (310, 400):
        out = zeros(1, dtype=np.uint32)
        body = "\n#if __METAL_VERSION__ >= 400\nout[0] = 400;\n#else\nout[0] = 310;\n#endif\n"
        run(body, out, threads=1, version=version, signature="device uint* out [[buffer(0)]],")
        assert out[0] == version


def test_preprocessor_knows_the_macros_of_the_host():
    source = HEAD + "kernel void k(device T* x [[buffer(0)]]) { x[0] = T(1); }\n"
    assert "device_ptr<half>" in translate.translate(source, 310, ["T=half"])


def test_zeros_of_a_threadgroup_variable_are_not_written():
    """As on Apple's GPUs, although the compiler accepts them."""
    with pytest.raises(Violation) as caught:
        run("threadgroup float t[32] = {0}; out[i] = t[i];", zeros(32), signature="device float* out [[buffer(0)]],")
    assert caught.value.rule == "uninitialized"


def in_a_new_process(code, **environment):
    """Settings are read from the environment once, so each gets a process."""
    path = os.pathsep.join([str(engine.HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**os.environ, **environment, "PYTHONPATH": path}, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def run_mutant(name, **environment):
    code = f"""
from metal_sim.engine import test_engine
rule, arguments, launch = test_engine.VIOLATIONS["{name}"]
test_engine.only_kernel(test_engine.mutant("{name}"))(*arguments, **launch)
"""
    return in_a_new_process(code, **environment)


@pytest.mark.parametrize(
    "orders, message",
    [
        ("forward", None),
        ("forward,backward", "differs between the orders forward and backward"),
        ("random:3,forward", "differs between the orders random:3 and forward"),
        ("sideways", "'sideways' is not forward, backward or random:SEED"),
    ],
)
def test_orders_from_the_environment(orders, message):
    status, output = run_mutant("order_dependent", METAL_SIM_ORDERS=orders)
    assert (status == 0) == (message is None), output
    assert message is None or message in output


@pytest.mark.parametrize(
    "name, orders, again",
    [
        ("order_dependent", "backward,random:2,forward", "backward,random:2"),  # the first two that differ
        ("missing_barrier", "random:5,forward", "random:5"),
    ],
)
def test_a_violation_says_how_to_see_it_again(name, orders, again):
    test = "tests/test_x.py::test_y[a b]"
    _, output = run_mutant(name, METAL_SIM_ORDERS=orders, PYTEST_CURRENT_TEST=f"{test} (call)")
    assert output.endswith(f'\nto repeat it: METAL_SIM_ORDERS={again} python -m pytest "{test}"\n')
    _, output = run_mutant(name, METAL_SIM_ORDERS=again, PYTEST_CURRENT_TEST="")
    assert output.endswith(f"\nto repeat it: METAL_SIM_ORDERS={again} <the same command>\n")


def test_needs_no_pytorch():
    status, output = in_a_new_process("import sys; from metal_sim import engine; assert 'torch' not in sys.modules")
    assert status == 0, output


def test_the_engine_finds_its_translator():
    """The way in which a compiler writes __FILE__ must not matter."""
    code = (
        "import os; from metal_sim import engine; assert os.path.exists(os.environ['METAL_SIM_HOME'] + '/translate.py')"
    )
    status, output = in_a_new_process(code)
    assert status == 0, output


def test_a_shader_is_compiled_once(tmp_path):
    code = "from metal_sim.engine import Library, test_engine; Library(test_engine.COPY)"
    made = []
    for _ in range(2):
        status, output = in_a_new_process(code, METAL_SIM_CACHE=str(tmp_path))
        assert status == 0, output
        (library,) = tmp_path.glob("*.so")
        made.append(library.stat().st_mtime_ns)
    assert made[0] == made[1]


# --- costs: what is counted, per thread (32 threads are a simdgroup, and one threadgroup here)

PARAMS = "device float* out [[buffer(0)]], constant float4& scales [[buffer(1)]],"
COUNTED = {
    "device": ("out[i] = x[i];", FLOATS, dict(device_loaded=4, device_stored=4)),
    "vectors": (
        "out[i] = float4(x[i]);",
        "device const half4* x [[buffer(0)]], device float4* out [[buffer(1)]],",
        dict(device_loaded=8, device_stored=16),
    ),
    "read_and_written": ("out[i] += 1.0f;", FLOATS, dict(device_loaded=4, device_stored=4)),
    "constant": ("out[i] = scales.z;", PARAMS, dict(constant_loaded=4, device_stored=4)),
    "threadgroup": (
        """threadgroup half sent[32];
        sent[tid] = half(i);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = float(sent[31 - tid]);""",
        FLOATS,
        dict(threadgroup_stored=2, threadgroup_loaded=2, device_stored=4, threadgroup_barriers=1 / 32),
    ),
    "thread": (
        "float own[4]; for (uint n = 0; n < 4; ++n) own[(n + i) % 4] = n; out[i] = own[i % 3];",
        FLOATS,
        dict(device_stored=4),
    ),
    "matrices": (
        """threadgroup float tile[64];
        simdgroup_float8x8 a, b;
        simdgroup_load(a, x, 8);
        simdgroup_store(a, tile, 8);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_load(b, tile, 8);
        simdgroup_multiply(a, a, b);
        simdgroup_multiply_accumulate(a, b, b, a);
        simdgroup_store(a, out + 64 * group.x, 8);""",
        FLOATS,
        dict(device_loaded=8, threadgroup_stored=8, threadgroup_loaded=8, device_stored=8)
        | dict(matrix_multiplications=2 / 32, simdgroup_barriers=1 / 32),
    ),
    "simd_functions": (
        """float sum = simd_sum(float(lane)) + simd_prefix_inclusive_sum(1.0f) + simd_shuffle_xor(1.0f, 3);
        out[i] = quad_max(sum) + float(simd_any(lane == 4)) + simd_broadcast_first(sum);""",
        FLOATS,
        dict(simd_functions=6 / 32, device_stored=4),
    ),
    "atomics": (
        """atomic_fetch_add_explicit(out + lane, 1u, memory_order_relaxed);
        threadgroup atomic_uint counts[32];
        atomic_store_explicit(&counts[lane], 0u, memory_order_relaxed);
        if (atomic_load_explicit(&counts[lane], memory_order_relaxed)) return;""",
        "device atomic_uint* out [[buffer(0)]],",
        dict(device_loaded=4, device_stored=4, threadgroup_loaded=8, threadgroup_stored=4),
    ),
}  # fmt: skip


def costs_of(body, signature, grid, sample=0):
    """`x`, if there is one, and `out` at its index have room for a float4 per thread."""
    arrays = [ones(grid * 128) for _ in range(2)]
    engine.set_costs(True, sample)
    try:
        return run(body, *arrays[: signature.count("[[buffer")], grid=grid, signature=signature)
    finally:
        engine.set_costs(False)


def by_thread(counts, threads, **groups):
    return engine.Costs(**{name: int(n * threads) for name, n in counts.items()}, **groups)


@pytest.mark.parametrize("name", COUNTED)
def test_costs(name):
    """Counted only in the first of several orders."""
    body, signature, counts = COUNTED[name]
    costs = costs_of(body, signature, grid=3)
    assert costs == by_thread(counts, 96, threadgroups=3, threadgroups_run=3)
    assert costs.exact


def test_costs_of_a_sample_are_those_of_the_grid():
    body, signature, counts = COUNTED["matrices"]
    costs = costs_of(body, signature, grid=1000, sample=7)
    assert costs == by_thread(counts, 32000, threadgroups=1000, threadgroups_run=7)
    assert not costs.exact
    assert [costs_of(body, signature, grid=grid, sample=7).exact for grid in (7, 8)] == [True, False]


@pytest.mark.parametrize("some", ["group.x < 100", "group.x >= 100", "group.x % 2 == 0"])
def test_a_sample_is_spread_over_the_grid(some):
    costs = costs_of(f"if ({some}) out[i] = 1.0f;", FLOATS, grid=200, sample=100)
    assert costs.device_stored == pytest.approx(100 * 32 * 4, rel=0.15)


def test_a_sample_of_a_grid_of_three_dimensions():
    """The output of the threadgroups that do not run keeps its content."""
    engine.set_costs(True, 6)
    out = zeros(4, 3, 5)
    body = "if (tid == 0) out[(group.z * 3 + group.y) * 5 + group.x] = 1.0f;"
    costs = run(body, out, grid=(5, 3, 4), signature="device float* out [[buffer(0)]],")
    engine.set_costs(False)
    assert out.sum() == 6 and (out.sum((1, 2)) > 0).all()
    assert (costs.device_stored, costs.threadgroups) == (4 * 60, 60)


def test_counting_ends_with_the_dispatch():
    """A shader that is loaded again is the same library, whose own code is also instrumented."""
    engine.set_orders(FORWARD)
    body, signature, counts = COUNTED["device"]
    for _ in range(2):
        assert costs_of(body, signature, grid=1) == by_thread(counts, 32, threadgroups=1, threadgroups_run=1)
    with pytest.raises(Violation):
        costs_of("out[i + 4096] = 1.0f;", FLOATS, grid=1)
    with pytest.raises(Violation):
        run("out[i + 4096] = 1.0f;", ones(32), zeros(32), signature=FLOATS)


def test_nothing_is_counted_by_default():
    assert run("out[i] = x[i];", ones(32), zeros(32), signature=FLOATS) is None


def test_costs_add_up():
    one, two = engine.Costs(device_loaded=4, threadgroups=2, threadgroups_run=2), engine.Costs(device_loaded=8)
    assert one + two == engine.Costs(device_loaded=12, threadgroups=2, threadgroups_run=2)
