"""Kernels in the style of MLX and PyTorch: accepted in every version of Metal, and right in every thread order."""

import numpy as np
import pytest

from metal_sim import engine
from metal_sim.engine import Bytes, Library, Violation, address_spaces

pytestmark = pytest.mark.usefixtures("four_orders")
GOOD = engine.HERE / "good"


def source(name):
    return (GOOD / f"{name}.metal").read_text()


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(dtype)


@pytest.mark.parametrize("version", address_spaces.VERSIONS)
@pytest.mark.parametrize("name", sorted(path.stem for path in GOOD.glob("*.metal")))
def test_accepted(name, version):
    address_spaces.check(source(name), version)


@pytest.mark.parametrize("size", [1, 130, 512])
def test_rms_norm(size):
    x, w = normal(3, size, dtype=np.float16), normal(size, dtype=np.float16, seed=1)
    out = np.empty_like(x)
    threads = (size + 127) // 128 * 32
    kernel = Library(source("rms_norm")).kernel("rms_norm_float16")
    kernel(x, w, out, Bytes(np.float32(1e-5)), Bytes(np.uint32(size)), grid=3, threads=threads)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * w
    assert np.allclose(out, expected, rtol=4e-3, atol=1e-3)


@pytest.mark.parametrize("size, threads", [(1, 32), (100, 64), (700, 256)])
def test_softmax(size, threads):
    x, out = 20 * normal(2, size), np.empty((2, size), np.float32)
    Library(source("softmax")).kernel("softmax_float")(x, out, Bytes(np.int32(size)), grid=2, threads=threads)
    expected = np.exp((x - x.max(1, keepdims=True)).astype(np.float64))
    assert np.allclose(out, expected / expected.sum(1, keepdims=True), rtol=1e-4, atol=1e-7)


SHAPE = np.dtype(
    [("heads_per_kv", "i4"), ("N", "i4"), ("position", "i4"), ("k_stride", "u8"), ("scale", "f4")], align=True
)


@pytest.mark.parametrize("has_mask, causal", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("kind, dtype, dim, length", [("float", np.float32, 64, 21), ("half", np.float16, 128, 5)])
def test_attention_vector(kind, dtype, dim, length, has_mask, causal):
    q, k, v = normal(4, dim, dtype=dtype), normal(2, length, dim, dtype=dtype, seed=1), normal(2, length, dim, seed=2)
    v = v.astype(dtype)
    mask = np.random.default_rng(3).random(length) < 0.7
    shape = np.array((2, length, length // 2, length * dim, dim**-0.5), SHAPE)
    out = np.empty_like(q)
    constants = {20: has_mask, 21: causal}
    kernel = Library(source("attention_vector"), constants=constants).kernel(f"attention_vector_{kind}_{dim}")
    kernel(q, k, v, out, Bytes(shape), mask, grid=4, threads=256)
    keys, values = k.repeat(2, 0).astype(np.float64), v.repeat(2, 0).astype(np.float64)
    scores = np.einsum("hd,hnd->hn", q.astype(np.float64), keys) * dim**-0.5
    used = np.ones(length, bool) & (mask if has_mask else True) & (np.arange(length) <= length // 2 if causal else True)
    weights = np.where(used, np.exp(scores - scores[:, used].max(1, keepdims=True)), 0)
    expected = np.einsum("hn,hnd->hd", weights / weights.sum(1, keepdims=True), values)
    assert np.allclose(out, expected, rtol=1e-4 if dtype is np.float32 else 4e-3, atol=1e-3)


@pytest.mark.parametrize("rows, columns", [(32, 256), (19, 133), (3, 7)])
def test_gemv(rows, columns):
    a, x, out = normal(rows, columns), normal(columns, seed=1), np.empty(rows, np.float32)
    sizes = [Bytes(np.int32(columns)), Bytes(np.int32(rows))]
    kernel = Library(source("gemv")).kernel("gemv_float")
    kernel(a, x, out, *sizes, grid=(rows + 15) // 16, threads=128)
    assert np.allclose(out, a.astype(np.float64) @ x, rtol=1e-4, atol=1e-4)


def product(m, n, k, constants, dtype=np.float32, kind="float"):
    a, b, bias = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype, seed=1), normal(n, dtype=dtype, seed=2)
    out = np.empty((m, n), dtype)
    kernel = Library(source("matrix_product"), constants=constants).kernel(f"matrix_product_{kind}")
    grid = ((n + 31) // 32, (m + 31) // 32)
    kernel(a, b, out, bias, Bytes(np.array([m, n, k], np.int32)), grid=grid, threads=128)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    return out, expected + bias if constants[100] else expected


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("m, n, k", [(64, 32, 48), (33, 40, 32), (7, 5, 19)])
def test_matrix_product(m, n, k, has_bias):
    constants = {100: has_bias, 200: m % 32 == 0 and n % 32 == 0, 201: k % 16 == 0}
    out, expected = product(m, n, k, constants)
    assert np.allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_matrix_product_in_half():
    out, expected = product(32, 64, 32, {100: True, 200: True, 201: True}, np.float16, "half")
    assert np.allclose(out, expected, rtol=4e-3, atol=2e-2)


def test_function_constants_matter_and_must_be_there():
    with pytest.raises(Violation, match="bounds"):
        product(33, 32, 16, {100: False, 200: True, 201: True})  # not aligned
    with pytest.raises(Violation, match=r"function constant 'align_MN' .* has no value"):
        product(32, 32, 16, {100: False, 201: True})


def threefry(keys, counts):
    """Threefry 2x32 of 20 rounds over numpy integers."""
    rotations = [[13, 15, 26, 6], [17, 29, 16, 24]]
    ks = [keys[0], keys[1], keys[0] ^ keys[1] ^ 0x1BD11BDA]
    x, y = (counts[0] + ks[0]) & 0xFFFFFFFF, (counts[1] + ks[1]) & 0xFFFFFFFF
    for i in range(5):
        for r in rotations[i % 2]:
            x = (x + y) & 0xFFFFFFFF
            y = (y << r | y >> (32 - r)) & 0xFFFFFFFF ^ x
        x, y = (x + ks[(i + 1) % 3]) & 0xFFFFFFFF, (y + ks[(i + 2) % 3] + i + 1) & 0xFFFFFFFF
    return x, y


def test_threefry_of_this_file_is_right():
    """Test vectors of the paper's own implementation."""
    ones = 0xFFFFFFFF
    assert threefry((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)
    assert threefry((ones, ones), (ones, ones)) == (0x1CB996FC, 0xBB002BE7)


@pytest.mark.parametrize("words", [8, 7])
def test_threefry(words):
    keys = np.random.default_rng(4).integers(0, 1 << 32, (3, 2), dtype=np.uint64).astype(np.uint32)
    out = np.zeros((3, words), np.uint32)
    half, odd = (words + 1) // 2, words % 2
    kernel = Library(source("threefry")).kernel("threefry_bits")
    arguments = [Bytes(np.bool_(odd)), Bytes(np.uint32(4 * words))]
    kernel(keys, out, *arguments, grid=(3, half), threads=(3, half), exact=True)
    for row, key in zip(out, keys.tolist(), strict=True):
        pairs = [threefry(key, (i, 0 if odd and i == half - 1 else i + half)) for i in range(half)]
        assert row.tolist() == ([a for a, _ in pairs] + [b for _, b in pairs])[:words]


@pytest.mark.parametrize("size", [1, 128, 777])
@pytest.mark.parametrize("name", ["cumsum_inclusive", "cumsum_exclusive", "cumprod_inclusive"])
def test_scan(name, size):
    x = normal(2, size)
    if "exclusive" in name:
        x = np.random.default_rng(5).integers(-9, 9, (2, size), dtype=np.int32)
    x = 1 + x / 100 if "prod" in name else x
    out = np.empty_like(x)
    Library(source("scan")).kernel(name)(x, out, Bytes(np.uint64(size)), grid=2, threads=64)
    wide = x.astype(np.float64)
    expected = wide.cumprod(1) if "prod" in name else wide.cumsum(1)
    expected = expected - wide if "exclusive" in name else expected
    assert np.allclose(out, expected, rtol=1e-4, atol=1e-3)
