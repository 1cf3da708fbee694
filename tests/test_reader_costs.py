"""The cost of readers of packed weights on Apple's GPUs. On M1 and M2 a shift takes as long as four masks or additions,
in a separate pipe, which limits unpacking."""

import re
import subprocess

import pytest

from conftest import DEVICES, SIMULATED

pytestmark = pytest.mark.skipif(
    not SIMULATED or "mps" not in DEVICES, reason="the simulated Metal's clang says what is left of a shader's text"
)

START = """
#include <metal_stdlib>
using namespace metal;
{weights}
using Codes = moe_metal::formats::{reader}<16>;
"""
EIGHT = """
kernel void unpack(device const uint* from [[buffer(0)]], device float* to [[buffer(1)]]) {{
  moe_metal::Words<Codes::words> words;
  for (uint i = 0; i < Codes::words; ++i) words.at[i] = from[i];
  moe_metal::Vectors<2> codes;
  Codes::eight<false>(words, 0, codes);
  for (uint i = 0; i < 8; ++i) to[i] = codes.at[i / 4][i % 4];
}}
"""


PIECE = """
kernel void unpack(device const uint* from [[buffer(0)]], device float* to [[buffer(1)]]) {{
  moe_metal::PackedPiece<Codes> piece;
  for (uint i = 0; i < Codes::words; ++i) piece.words.at[i] = from[i];
  piece.scale = to[0];
  piece.count = 16;
  moe_metal::spread_nan(piece);
#pragma unroll
  for (uint i = 0; i < 16; i += 8) {{
    moe_metal::Vectors<2> values;
    moe_metal::piece_values<Codes, true>(piece, i, values);
    for (uint n = 0; n < 8; ++n) to[i + n] = values.at[n / 4][n % 4];
  }}
}}
"""


OPTIMIZED = ["-O2", "-fno-slp-vectorize", "-mllvm", "-inline-threshold=100000"]


def compiled(text: str, name: str) -> str:
    """What clang leaves at -O2 of the function whose name contains this."""
    from metal_sim.engine import address_spaces, translate

    command = [translate.find_compiler(), *address_spaces.FLAGS, *OPTIMIZED, "-S", "-emit-llvm", "-o", "-", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return re.search(rf"^define [^\n]*{name}.*?^}}", done.stdout, re.MULTILINE | re.DOTALL)[0]


def instructions(kernel: str, reader: str, kinds: str) -> int:
    """The instructions that clang leaves for a kernel without calls."""
    from embed import FOLDER, shader_text
    from metal_sim.engine import address_spaces

    text = (START + kernel).format(weights=shader_text(FOLDER / "weights.h"), reader=reader)
    return len(re.findall(rf"= (?:{kinds}) ", compiled(address_spaces.translated(text), "unpack")))


@pytest.mark.parametrize(("reader", "most"), [("affine4", 1), ("mxfp4", 5), ("nvfp4", 5), ("fp8", 6), ("mxfp8", 6)])
def test_few_shifts(reader: str, most: int) -> None:
    assert 0 < instructions(EIGHT, reader, "shl|lshr|ashr") <= most


def test_prefill_checks_codes_for_nan_once() -> None:
    """And not once per code, which would need a shift, a mask, a comparison and a select each time."""
    assert instructions(PIECE, "fp8", "icmp|fcmp") == 1
    assert instructions(PIECE, "mxfp4", "icmp|fcmp") == 0


@pytest.mark.parametrize(("reader", "most"), [("fp8", 17), ("mxfp8", 17), ("mxfp4", 16), ("nvfp4", 16), ("affine4", 1)])
def test_prefill_multiplies_a_code_once(reader: str, most: int) -> None:
    """By its scale; an offset is added. Factors that are the same for all codes are multiplied once."""
    assert instructions(PIECE, reader, "fmul") == most


def test_prefill_has_the_activations_once() -> None:
    """And not for each of a lane's elements: five activations sixteen times would be most of the kernel."""
    from embed import FOLDER, shader_text
    from metal_sim.engine import address_spaces

    shader = shader_text(FOLDER / "experts_prefill.metal")
    macros = ["MOE_METAL_PART=tiles16", "MOE_METAL_PART_tiles16=1", "MOE_METAL_DTYPE=0"]
    kernel = compiled(address_spaces.translated(shader, 310, macros), "experts_gate_up_tiles")
    assert 0 < len(re.findall(r"call [^\n]*metal3exp", kernel)) <= 5
