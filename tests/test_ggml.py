"""Formats of other projects: GGML's blocks, compared with the `gguf` package, and MLX's mxfp8 and nvfp4."""

import copy

import gguf
import mlx.core as mx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cases import BFLOAT, FLOAT, HALF
from checks import assert_matches, relative, same_bits
from packings import gguf_type
from torch_moe_metal import formats, ggml, nn, quantize, reference
from torch_moe_metal.nn import MoE
from torch_moe_metal.packed_layers import linear_with_grad, slots_with_grad
from torch_moe_metal.random_weights import FORMATS as PACKINGS

ops = torch.ops.moe_metal
BLOCKS = [name for name, row in formats.FORMATS.items() if row.has_own_scales]
FLOATS = ["mxfp8", "nvfp4"]
#: 0, subnormal, small, 1, large, infinite and NaN, with both signs.
FACTORS = [0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x7C00, 0x7C01, 0x7E00]
FACTORS += [factor | 0x8000 for factor in FACTORS]


@pytest.fixture(scope="module", autouse=True)
def _mlx_on_the_cpu():
    mx.set_default_device(mx.cpu)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def blocks_of_all_kinds(format: str) -> Tensor:
    """Rows of three blocks: random bytes with each pair of FACTORS or each power; then all bytes 0, and all 255."""
    row, (_, *places) = formats.FORMATS[format], ggml.DECODERS[format]
    pairs = torch.cartesian_prod(*[torch.tensor(FACTORS, dtype=torch.uint16).view(torch.int16)] * len(places or [0]))
    data = random_bytes(max(len(pairs), 256) + 2, 3, row.bytes)
    for at, factors in zip(places, pairs.view(len(pairs), -1).T.contiguous(), strict=False):
        data[: len(pairs), :, at : at + 2] = factors.view(torch.uint8).view(-1, 1, 2)
    if not places:
        data[:256, :, 0] = torch.arange(256, dtype=torch.uint8).unsqueeze(-1)
    data[-2], data[-1] = 0, 255
    return data.flatten(1)


def by_gguf(data: Tensor, format: str) -> Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(data.numpy(), gguf_type(format)))


def same_numbers(got: Tensor, want: Tensor) -> bool:
    """Bitwise equal, but any NaN equals any other."""
    return same_bits(got.masked_fill(got.isnan(), 0.0), want.masked_fill(want.isnan(), 0.0)) and torch.equal(
        got.isnan(), want.isnan()
    )


# ------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("format", BLOCKS)
def test_reference_equals_gguf(format: str):
    row, data = formats.FORMATS[format], blocks_of_all_kinds(format)
    assert gguf.GGML_QUANT_SIZES[gguf_type(format)] == (row.columns, row.bytes)
    want = by_gguf(data, format)
    got = reference.dequantize(data, format=format, dtype=FLOAT)
    assert same_numbers(got, want) and want.isfinite().any()
    exact = reference.dequantize(data, format=format, dtype=torch.float64)
    assert same_numbers(exact.float(), want)  # products are exact, so only the result is rounded
    assert same_numbers(reference.dequantize(data, format=format, dtype=BFLOAT), want.to(BFLOAT))
    apart = torch.cat([data.new_zeros(len(data), 1), data, data], 1)[:, 1 : 1 + data.shape[1]]  # at odd bytes
    assert same_numbers(reference.dequantize(apart.view(-1, 1, data.shape[1]), format=format, dtype=FLOAT)[:, 0], want)


@pytest.mark.parametrize("format", BLOCKS)
def test_dequantize_equals_gguf(format: str, device: str):
    data = blocks_of_all_kinds(format)
    got = ops.dequantize(data.to(device), format=format, dtype=FLOAT).cpu()
    assert same_numbers(got, by_gguf(data, format))


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0,)])
def test_leading_dimensions(leading: tuple[int, ...]):
    for format in BLOCKS:
        row = formats.FORMATS[format]
        data = random_bytes(*leading, 5, 2 * row.bytes)
        with FakeTensorMode() as mode:
            fake = reference.dequantize(mode.from_tensor(data), format=format, dtype=HALF)
        got = reference.dequantize(data, format=format, dtype=HALF)
        assert got.shape == fake.shape == (*leading, 5, 2 * row.columns) and fake.dtype == HALF


@pytest.mark.parametrize("format", FLOATS)
def test_dequantize_equals_mlx(format: str, device: str):
    """Bitwise equal, for every byte and every finite scale whose products float32 can represent."""
    data, bits = random_bytes(3, 64, 160), formats.FORMATS[format].bits
    columns = 160 * 8 // bits
    scales = torch.arange(3 * 64 * columns // formats.FORMATS[format].scale_columns)
    scale = scales.remainder({"mxfp8": 240, "nvfp4": 256}[format]).to(torch.uint8).view(3, 64, -1)
    if format == "nvfp4":
        scale = torch.where(scale & 127 == 127, scale - 1, scale)
    words = mx.array(data.numpy().view(np.uint32))
    want = torch.from_numpy(np.array(mx.dequantize(words, mx.array(scale.numpy()), mode=format, dtype=mx.float32)))
    assert same_numbers(reference.dequantize(data, scale, format=format, dtype=FLOAT), want)
    assert same_numbers(ops.dequantize(data.to(device), scale.to(device), format=format, dtype=FLOAT).cpu(), want)


def test_every_scale_of_mxfp8_and_nvfp4(device: str):
    """Including NaN, and for nvfp4 the factor of compressed-tensors: scale * factor is rounded first."""
    scale, factor = torch.arange(256, dtype=torch.uint8), torch.tensor([[0.1], [-3.0], [1e-30], [float("inf")]])
    for format in FLOATS:
        data = random_bytes(4, 2, 256 * formats.FORMATS[format].scale_columns * formats.FORMATS[format].bits // 8)
        scales, offset = scale.expand(4, 2, 256).contiguous(), factor if format == "nvfp4" else None
        want = reference.dequantize(data, scales, offset, format=format, dtype=FLOAT)
        parts = [None if part is None else part.to(device) for part in (data, scales, offset)]
        assert same_numbers(ops.dequantize(*parts, format=format, dtype=FLOAT).cpu(), want)
    of_groups = scales.view(torch.float8_e4m3fn).float() * factor.unsqueeze(-1)
    values = torch.tensor(reference.E2M1)[reference.unpack(data, 4).int()]
    assert same_numbers(want, values * of_groups.repeat_interleave(16, -1))
    floats = reference.dequantize(data, scales.view(torch.float8_e4m3fn), factor, format="nvfp4", dtype=FLOAT)
    assert same_bits(floats, want)


# ------------------------------------------------------------------------------------------------ quantize


def weight_of_all_kinds() -> Tensor:
    """[96, 512]: rows from 1e-9 to 1e3, all zero, all equal, of one sign, with two equal maxima; some in bfloat16; and
    maxima that are 448 times a power of two, or next to it."""
    weight = random(96, 512) * torch.logspace(-9, 3, 96).unsqueeze(-1)
    weight[3], weight[4, :64], weight[5], weight[6] = 0, 1.5, weight[5].abs(), -weight[6].abs()
    weight[7, :64] = torch.tensor([1.0, -1.0]).repeat(16).repeat(2) * torch.tensor([1.0, -1.0]).repeat_interleave(32)
    weight[8:40] = weight[8:40].to(BFLOAT).float()
    largest = weight[60:90].abs().amax(-1, keepdim=True)
    weight[60:90] *= 448 * 2.0 ** torch.arange(-24, 6).unsqueeze(-1) / largest
    weight[70, :5] = torch.tensor([0.25, 0.75, 1.25, 1.75, 6.0])
    return weight


@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT], ids=str)
def test_quantize_equals_mlx_bitwise(format: str, dtype: torch.dtype, device: str):
    """Weights of 16 bits are converted to float32, as by MLX on the GPU; on the CPU MLX rounds quotients to 16 bits."""
    weight = weight_of_all_kinds().to(dtype)
    data, scale, offset = quantize(weight.to(device), format)
    theirs, scales = mx.quantize(mx.array(weight.float().numpy()), mode=format)
    assert offset is None and same_bits(scale, torch.from_numpy(np.array(scales)))
    assert same_bits(data, torch.from_numpy(np.array(theirs).view(np.uint8)))


@pytest.mark.parametrize("format", ["q4_0", "q8_0"])
@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT], ids=str)
def test_quantize_equals_gguf_bitwise(format: str, dtype: torch.dtype, device: str):
    weight = weight_of_all_kinds().to(dtype)
    data, scale, offset = quantize(weight.to(device), format)
    want = gguf.quants.quantize(weight.float().numpy(), gguf_type(format))
    assert scale is None and offset is None and same_bits(data, torch.from_numpy(want))


WRITTEN = "affine, mxfp4, fp8, mxfp8, nvfp4, q4_0, q8_0"


@pytest.mark.parametrize(
    "format, why",
    [("q4_k", ", which is read, but not written"), ("iq4_xs", ", which is read, but not written")]
    + [(name, ", a codebook, which is not supported") for name in ("iq1_s", "iq1_m", "IQ2_XXS", "iq3_s", "tq1_0")]
    + [("q4_K_M", "")],
)
def test_formats_that_quantize_cannot_write_raise(format: str, why: str):
    with pytest.raises(ValueError) as raised:
        quantize(torch.ones(4, 256), format)
    said = f"torch_moe_metal.quantize: format: expected one of {WRITTEN}, got {format!r}{why}"
    assert str(raised.value) == said


# ------------------------------------------------------------------------------------------------ products and layers


def columns_of(format: str) -> int:
    return 2 * max(formats.FORMATS[format].whole_columns, 32)


def weight_in(format: str, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return PACKINGS[format].weight(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("T, C, dtype", [(1, 256, FLOAT), (40, 256, FLOAT), (3, 224, BFLOAT), (40, 256, BFLOAT)])
@pytest.mark.parametrize("format", FLOATS)
def test_linear_equals_mlx_quantized_matmul(format: str, T: int, C: int, dtype: torch.dtype):
    """The CPU multiplies few tokens by 64 or 128 columns at a time; 224 leave a part."""
    data, scale, _ = quantize(random(70, C), format)
    x = random(T, C, seed=1).to(dtype)
    words = mx.array(data.numpy().view(np.uint32))
    want = mx.quantized_matmul(
        mx.array(x.float().numpy()), words, mx.array(scale.numpy()), transpose=True, mode=format,
        group_size=formats.FORMATS[format].scale_columns, bits=formats.FORMATS[format].bits,
    )  # fmt: skip
    got = ops.linear(x, data, scale, format=format)
    assert relative(got.double(), torch.from_numpy(np.array(want)).double()) <= max(1e-5, reference.tolerance(dtype))


@pytest.mark.parametrize("T", [1, 3, 40])
@pytest.mark.parametrize("format", BLOCKS)
def test_linear_equals_gguf(format: str, T: int):
    """Every format; the fast set of the table has only some. There are enough rows for tiles of 16 rows with bfloat16
    tokens, and the last tile is not full."""
    data, *_ = weight_in(format, 70, columns_of(format))
    for dtype in (FLOAT, BFLOAT):
        x = random(T, columns_of(format), seed=2).to(dtype)
        want = x.double() @ by_gguf(data, format).double().T
        assert_matches([ops.linear(x, data, format=format)], [want], columns_of(format))


# The fast set has layers on mps in these formats; every format has its own readers there, which other tests check.
LAYERS_ON_MPS = ("nvfp4", "q4_k", "q8_0")
LAYERS = [
    pytest.param(format, marks=[] if format in LAYERS_ON_MPS else pytest.mark.slow_on_mps)
    for format in (*BLOCKS, *FLOATS)
]


@pytest.mark.parametrize("format", LAYERS)
def test_layers_of_parts(format: str, device: str):
    """A file's weight as a linear layer and as an embedding, with and without a gradient."""
    C = columns_of(format)
    parts = [part for part in weight_in(format, 37, C) if part is not None]
    numbers = reference.dequantize(*parts, format=format, dtype=torch.float64)
    named = dict(zip(("data", "scale", "offset"), parts, strict=False))
    linear = nn.Linear.from_parts(named, C, format).to(device)
    assert set(linear.state_dict()) == set(named) and linear.out_features == 37
    x = random(3, C, seed=1)
    with torch.no_grad():
        assert_matches([linear(x.to(device))], [x.double() @ numbers.T], C)
    leaf = x.to(device, copy=True).requires_grad_()
    linear(leaf).square().sum().backward()
    assert relative(leaf.grad.cpu(), (2 * (x.double() @ numbers.T) @ numbers).float()) <= 1e-5
    embedding = nn.Embedding.from_parts(named, C, format, FLOAT).to(device)
    ids = torch.tensor([[3, 36, 0], [0, 3, 5]])
    assert_matches([embedding(ids.to(device))], [numbers[ids]])
    assert linear.half().data.dtype == torch.uint8 and embedding.to(BFLOAT)(ids.to(device)).dtype == BFLOAT


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "q4_0", "q8_0"])
def test_layers_are_quantised(format: str, device: str):
    torch.manual_seed(0)
    dense = torch.nn.Linear(128, 40)
    layer = nn.Linear.from_module(copy.deepcopy(dense), format).to(device)
    data, scale, offset = layer.parts("weight")
    assert offset is None and (scale is None) == formats.FORMATS[format].has_own_scales
    x, weight = random(3, 128), reference.dequantize(*(p if p is None else p.cpu() for p in (data, scale, offset)),
                                                      format=format, dtype=FLOAT)  # fmt: skip
    assert relative(weight, dense.weight.detach()) < (0.2 if formats.FORMATS[format].bits == 4 else 0.05)
    with torch.no_grad():
        assert_matches([layer(x.to(device))], [F.linear(x.double(), weight.double(), dense.bias.double())], 128)
    moe = MoE(128, 64, num_experts=5, top_k=2)
    quantised = MoE.from_block(copy.deepcopy(moe)).quantize_(format).to(device)
    assert quantised.format == format
    with torch.no_grad():
        got = MoE.from_block(quantised)(x.to(device)).cpu()
        assert relative(got, moe(x)) < 0.3
    with_grad = quantised(x.to(device, copy=True).requires_grad_())
    assert relative(got, with_grad.detach().cpu()) < 1e-5


@pytest.mark.parametrize(
    "first, second", [("q4_k", "q6_k"), ("affine4", "dense"), ("dense", "q8_0"), ("nvfp4", "q8_0")]
)
def test_gradients_of_two_formats(first: str, second: str):
    """`down_format` in the PyTorch fallback of `experts`."""
    E, H, I = 3, 256, 256
    arguments: dict = {"format": PACKINGS[first].format if PACKINGS[first] else "dense"}
    arguments["down_format"] = PACKINGS[second].format if PACKINGS[second] else "dense"
    for name, format, shape in (("gate_up", first, (E, 2 * I, H)), ("down", second, (E, H, I))):
        dense = random(*shape, seed=5) * shape[-1] ** -0.5, None, None
        parts = weight_in(format, *shape) if PACKINGS[format] else dense
        names = (name, f"{name}_scale", f"{name}_offset")
        arguments |= {n: part for n, part in zip(names, parts, strict=True) if part is not None}
    x, ids = random(4, H), torch.tensor([[0, 2], [1, 0], [2, 1], [1, 2]])
    weights = torch.rand(4, 2, generator=torch.Generator().manual_seed(6))
    leaf = x.clone().requires_grad_()
    slots = slots_with_grad(leaf, ids, arguments)
    got = (slots * weights.unsqueeze(-1)).sum(-2)
    want = reference.experts(x.double(), weights.double(), ids, **{
        name: part.double() if isinstance(part, Tensor) and part.is_floating_point() else part
        for name, part in arguments.items()
    })  # fmt: skip
    assert relative(got, want) < 1e-5
    got.sum().backward()
    assert leaf.grad.abs().sum() > 0
    with torch.no_grad():
        assert_matches([ops.experts(x, weights, ids.int(), **arguments)], [want], H)


def test_a_gradient_of_unknown_dtypes():
    """Dtypes that the ops do not support are computed by the specification."""
    data, *_ = weight_in("q6_k", 7, 256)
    x = random(2, 256).double().requires_grad_()
    linear_with_grad(x, data, None, None, None, "q6_k").sum().backward()
    numbers = reference.dequantize(data, format="q6_k", dtype=torch.float64)
    assert relative(x.grad, numbers.sum(0).expand(2, -1)) < 1e-12


def gate_and_up_apart(gate_up: Tensor) -> Tensor:
    """A gate_up [E, 2I, ...] as two tensors in a file: [E, 2, I, ...], with other tensors in between and around."""
    E, rows, width = gate_up.shape
    I, element = rows // 2, gate_up.element_size()
    between, before = 1664 // element, 64 // element  # the alignment of tensors in files
    size = E * I * width
    file = torch.empty(before + 2 * size + between, dtype=gate_up.dtype, device=gate_up.device)
    file.fill_(0x5A if gate_up.dtype == torch.uint8 else float("nan"))
    view = file.as_strided((E, 2, I, width), (I * width, size + between, width, 1), before)
    view.copy_(gate_up.view(E, 2, I, width))
    return view


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("format, dtype", [("q4_k", FLOAT), ("q8_0", BFLOAT), ("dense", BFLOAT), ("dense", FLOAT)])
def test_gate_and_up_may_be_separate(format: str, dtype: torch.dtype, tokens: int, device: str):
    """Bitwise equal to one joined tensor; `interleaved` then only concerns the bias."""
    E, H, I = 4, 256, 256
    parts = {name: weight_in(format, *shape)[0] if format != "dense" else random(*shape, seed=2).to(dtype) / 16
             for name, shape in (("gate_up", (E, 2 * I, H)), ("down", (E, H, I)))}  # fmt: skip
    moved = {name: part.to(device) for name, part in parts.items()}
    x = random(tokens, H).to(dtype).to(device)
    weights, ids = torch.rand(tokens, 2, device=device), torch.arange(2 * tokens, device=device).view(-1, 2) % E
    bias = random(E, 2, I, seed=3).to(dtype).to(device)
    options = {"format": format}
    joined = ops.experts(x, weights, ids, **moved, gate_up_bias=bias.flatten(1), **options)
    apart = moved | {"gate_up": gate_and_up_apart(moved["gate_up"])}
    assert same_bits(ops.experts(x, weights, ids, **apart, gate_up_bias=bias.flatten(1), **options), joined)
    in_turn = {"gate_up_bias": bias.transpose(1, 2).flatten(1), "interleaved": True} | options
    assert same_bits(ops.experts(x, weights, ids, **apart, **in_turn), joined)
    if device == "cpu" and tokens == 5:
        leaf = x.float().clone().requires_grad_()
        numbers = {n: p.float() if p.is_floating_point() else p for n, p in apart.items()}
        slots = slots_with_grad(leaf, ids, numbers | in_turn | {"gate_up_bias": in_turn["gate_up_bias"].float()})
        assert relative((slots * weights.unsqueeze(-1)).sum(-2), joined.float()) < (1e-5 if dtype == FLOAT else 1e-2)
    for wrong in (apart["gate_up"][:, :1], apart["gate_up"][:, :, :-1]):
        with pytest.raises(RuntimeError, match=r"experts: (gate_up|down|gate_up_bias): expected"):
            ops.experts(x, weights, ids, **apart | {"gate_up": wrong}, gate_up_bias=bias.flatten(1), **options)
