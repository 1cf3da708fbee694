"""Metal 4's tensors and matmul2d: products are right in every thread order, and undefined behaviour is an error."""

import numpy as np
import pytest

from metal_sim import engine
from metal_sim.engine import (
    Bytes,
    CompileError,
    Library,
    Violation,
    address_spaces,
    translate,
)

pytestmark = pytest.mark.usefixtures("four_orders")
GOOD = (engine.HERE / "good" / "tensor_products.metal").read_text()


def bfloat(array):
    """The upper half of each float, and its value."""
    bits = np.ascontiguousarray(array).view(np.uint32) & 0xFFFF0000
    return (bits >> 16).astype(np.uint16), bits.view(np.float32)


def operands(m, n, k):
    random = np.random.default_rng(m)
    return [random.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (n, k))]


def of_rows(text, m=45, n=71, k=24, dtype="half", threads=64):
    """-> the kernel's result, and the expected one"""
    kernel = Library(text, 400).kernel(f"product_of_rows_{dtype}")
    given = operands(m, n, k)
    if dtype == "half":
        stored = [array.astype(np.float16) for array in given]
        exact = [array.astype(np.float64) for array in stored]
    else:
        stored, exact = zip(*map(bfloat, given), strict=True)
    out = np.zeros((m, n), np.float32)
    kernel(*stored, out, Bytes(np.array([m, n, k], np.int32)), grid=(-(-n // 32), -(-m // 32)), threads=threads)
    return out, exact[0] @ exact[1].T + 100 * np.arange(m)[:, None] + np.arange(n)


def of_simdgroups(text, m=45, k=96, threads=64):
    kernel = Library(text, 400).kernel("product_of_simdgroups")
    a, b = (array.astype(np.float16) for array in operands(m, 32, k))
    out = np.zeros((m, 32), np.float32)
    kernel(a, b, out, Bytes(np.array([m, 32, k], np.int32)), grid=-(-m // 32), threads=threads)
    return out, a.astype(np.float64) @ b.astype(np.float64).T


@pytest.mark.parametrize("dtype", ["half", "bfloat"])
@pytest.mark.parametrize("k", [8, 200])
def test_product_of_rows(dtype, k):
    got, want = of_rows(GOOD, k=k, dtype=dtype)
    assert np.allclose(got, want, rtol=1e-5, atol=1e-3)


def test_product_of_simdgroups():
    got, want = of_simdgroups(GOOD)
    assert np.allclose(got, want, rtol=1e-5, atol=1e-4)


def changed(right, wrong):
    assert right in GOOD
    return GOOD.replace(right, wrong)


STAGE = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    for (int i"
PLACE = "sums.get_multidimensional_index(0)[0]"
RUN = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    Left left"
VIOLATIONS = {  # which kernel, right, wrong, rule
    "written_while_it_is_read": (of_simdgroups, STAGE, "    for (int i", "race"),
    "read_before_it_is_written": (of_simdgroups, RUN, "    Left left", "uninitialized"),
    "part_is_not_staged": (of_simdgroups, "i += 64) staged", "i += 128) staged", "uninitialized"),
    "some_lanes": (of_simdgroups, "    product.run", "    if (thread_index % 32 < 31) product.run", "simdgroup"),
    "some_threads": (of_rows, "  product.run", f"  if ({PLACE} != 5) product.run", "barrier"),
    "other_k": (of_simdgroups, "(TILE_K, max(0, min(16", "(16, max(0, min(16", "argument"),
    "unequal_k": (of_rows, "(sizes.k, columns)", "(sizes.k - 1, columns)", "argument"),
    "rows_are_not_along_the_first": (
        of_rows,
        "array<int32_t, 2>{1, sizes.k}",
        "array<int32_t, 2>{2, sizes.k}",
        "argument",
    ),
    "rows_overrun": (of_rows, "rows = min(TILE_M, sizes.m - row)", "rows = TILE_M", "bounds"),
    "output_overrun": (of_rows, "(columns, rows), array", "(columns, TILE_M), array", "bounds"),
    "invalid_element": (of_rows, "if (!sums.is_valid_element(i)) continue;", "", "bounds"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violation_is_caught(name):
    run, right, wrong, rule = VIOLATIONS[name]
    with pytest.raises(Violation) as caught:
        run(changed(right, wrong))
    assert caught.value.rule == rule, caught.value


def test_other_simdgroups_than_the_operation_has():
    with pytest.raises(Violation, match="of execution_simdgroups<N> in a threadgroup of other than N"):
        of_rows(GOOD, threads=128)


WRONG = {  # results that are equally wrong in every order
    "each_run_begins_anew": (of_simdgroups, "mode::multiply_accumulate", "mode::multiply"),
    "sums_do_not_begin": (of_simdgroups, "if (sums.is_valid_element(i)) sums[i] = 0;", "{}"),
    "places_from_the_lane": (
        of_rows,
        "sums[i] += 100 * (row + place[1]) + column + place[0]",
        "sums[i] += 100 * (row + i / 32) + column + i % 32",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_results_are_wrong(name):
    run, right, wrong = WRONG[name]
    got, want = run(changed(right, wrong))
    assert not np.allclose(got, want, rtol=1e-2, atol=1e-2)


COMPILE_ERRORS = {
    "rows_of_8": ("matmul2d_descriptor(16,", "matmul2d_descriptor(8,", "M and N of matmul2d are multiples of 16"),
    "k_of_24": ("TILE_N, TILE_K, false", "TILE_N, 24, false", "K of matmul2d is dynamic_extent or a multiple of 16"),
    "other_order": ("product.run(left, right", "product.run(right, left", "in the other order"),
    "const_operand": ("tensor<device T,", "tensor<const device T,", "refuses operands of const elements"),
    "float_into_half": ("Left, Right, float>", "Left, Right, half>", "store converts nothing"),
    "no_combination": ("Operand, Operand, float>", "Operand, Operand, int>", "no such combination of types"),
    "no_include": ("#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n", "", "mpp"),
    "handle": (
        "dextents<int32_t, 2>, tensor_inline>;\n  Operand",
        "dextents<int32_t, 2>>;\n  Operand",
        "tensor_inline",
    ),
}


@pytest.mark.parametrize("name", COMPILE_ERRORS)
def test_refused_by_the_compiler(name):
    right, wrong, message = COMPILE_ERRORS[name]
    with pytest.raises(CompileError, match=message):
        Library(changed(right, wrong), 400)


def test_address_spaces():
    """A tensor in device memory accepts no pointer to threadgroup memory, in any Metal that has tensors."""
    for version in (400, 410):
        with pytest.raises(translate.RefusedError, match="no matching constructor"):
            address_spaces.check(changed("tensor<threadgroup half, extents", "tensor<device half, extents"), version)


def test_metal_3_has_no_tensors():
    assert Library(GOOD, 320).names() == []
    with pytest.raises(CompileError, match="MetalPerformancePrimitives"):
        Library(changed("__METAL_VERSION__ >= 400 && __has_include", "1 || __has_include"), 320)
