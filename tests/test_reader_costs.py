"""The cost of readers of packed weights on Apple's GPUs. On M1 and M2 a shift takes as long as four masks or additions,
in a separate pipe, which limits unpacking."""

import re
import subprocess
from collections.abc import Callable

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


CHUNK = """
kernel void unpack(device const uint* from [[buffer(0)]], device float* to [[buffer(1)]]) {{
  moe_metal::LoadedChunk<Codes> chunk;
  for (uint i = 0; i < Codes::words; ++i) chunk.words.at[i] = from[i];
  chunk.scale = to[0];
  chunk.count = 16;
  moe_metal::spread_nan(chunk);
#pragma unroll
  for (uint i = 0; i < 16; i += 8) {{
    moe_metal::Vectors<2> values;
    moe_metal::chunk_values<Codes, true>(chunk, i, values);
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
    assert instructions(CHUNK, "fp8", "icmp|fcmp") == 1
    assert instructions(CHUNK, "mxfp4", "icmp|fcmp") == 0


@pytest.mark.parametrize(("reader", "most"), [("fp8", 17), ("mxfp8", 17), ("mxfp4", 16), ("nvfp4", 16), ("affine4", 1)])
def test_prefill_multiplies_a_code_once(reader: str, most: int) -> None:
    """By its scale; an offset is added. Factors that are the same for all codes are multiplied once."""
    assert instructions(CHUNK, reader, "fmul") == most


def test_prefill_has_the_activations_once() -> None:
    """And not for each of a lane's elements: five activations sixteen times would be most of the kernel."""
    from embed import FOLDER, shader_text
    from metal_sim.engine import address_spaces

    shader = shader_text(FOLDER / "experts_prefill.metal")
    macros = ["MOE_METAL_PART=tiles16", "MOE_METAL_PART_tiles16=1", "MOE_METAL_DTYPE=0"]
    kernel = compiled(address_spaces.translated(shader, 310, macros), "experts_gate_up_tiles")
    assert 0 < len(re.findall(r"call [^\n]*metal3exp", kernel)) <= 5


def test_staged_rows_are_in_aligned_memory() -> None:
    """Four floats at a time are read from it."""
    from embed import FOLDER

    texts = [(FOLDER / f"{name}.metal").read_text() for name in ("experts_prefill", "linear", "tensor_ops")]
    assert re.findall(r"threadgroup (\w+) memory\[", "".join(texts)) == ["uint4"] * 4


SEVERAL = """
#include <metal_stdlib>
using namespace metal;
{dots}
using Chunk = moe_metal::PackedChunk<moe_metal::formats::{reader}<moe_metal::kPackedColumns>, false>;
kernel void unpack(device const float* x [[buffer(0)]], device const uchar* data [[buffer(1)]],
                   device const uint* offsets [[buffer(2)]], constant moe_metal::WeightParams& params [[buffer(3)]],
                   device float* to [[buffer(4)]]) {{
  moe_metal::DotRows<uint> rows = {{}};
  for (uint r = 0; r < 4; ++r) {{
    rows.data.at[r] = offsets[r];
    rows.scale.at[r] = offsets[4 + r];
    rows.offset.at[r] = offsets[8 + r];
  }}
  moe_metal::SeveralVectors<float, {n}> several = {{x, offsets[12], {{}}}};
  for (uint t = 0; t < {n}; ++t) several.row[t] = offsets[13 + t];
  const moe_metal::Weights<uchar> weights = {{data, data, data}};
  moe_metal::SeveralSums<{n}> sums = {{}};
  Chunk::add_several<false>(rows, several, weights, params, 0, sums);
  for (uint t = 0; t < {n}; ++t) {{
    for (uint r = 0; r < 4; ++r) to[4 * t + r] = sums.of[t].at[r];
  }}
}}
"""


@pytest.mark.parametrize("reader", ["affine4", "mxfp4", "q4_k"])
def test_several_vectors_unpack_once(reader: str) -> None:
    """Only the products and sums of a chunk are repeated for each vector."""
    from embed import FOLDER, shader_text
    from metal_sim.engine import address_spaces

    def unpacking(n: int) -> int:
        text = SEVERAL.format(dots=shader_text(FOLDER / "dots.h"), reader=reader, n=n)
        return len(re.findall(r"= (?:shl|lshr|and|or|xor) ", compiled(address_spaces.translated(text), "unpack")))

    assert 50 < unpacking(1) == unpacking(2) == unpacking(4)


# ------------------------------------------------------------------------------------------------ from ids to weights

BLOCK = re.compile(r"^(?:(\d+):[^\n]*\n)?((?:  [^\n]*\n)+)", re.MULTILINE)
LOAD = re.compile(r"(%\d+) = load [^,]+, ptr addrspace\(1\) (%\d+)")


def derived(instructions: list[str], values: set[str], kinds: str) -> set[str]:
    """These values, and those that instructions of these kinds make of them."""
    found, before = set(values), set()
    while found != before:
        before = set(found)
        for instruction in instructions:
            made = re.match(rf"(%\d+) = (?:{kinds}) (.*)", instruction)
            if made and found & set(re.findall(r"%\d+", made[2])):
                found.add(made[1])
    return found


def from_ids(kernel: str, ids: str, weights: str) -> tuple[int, int, int]:
    """The instructions from the first one that waits for an id to the first load of weights, on the shortest way; the
    loads among them from addresses that depend on the id; and how many such ways there are. `ids` and `weights` are the
    names of the arguments."""
    blocks = {name or "entry": [line.strip() for line in text.splitlines()] for name, text in BLOCK.findall(kernel)}
    all = [instruction for block in blocks.values() for instruction in block]
    addresses = {which: derived(all, {which}, "getelementptr|phi|select") for which in (ids, weights)}

    def loads(instruction: str, which: str) -> bool:
        return bool((load := LOAD.match(instruction)) and load[2] in addresses[which])

    loaded = {LOAD.match(instruction)[1] for instruction in all if loads(instruction, ids)}
    loaded = derived(all, loaded, "phi|insertelement")  # these do not wait
    ways = []
    for name, block in blocks.items():
        waiting = [i for i, one in enumerate(block) if " = phi " not in one and " = insertelement " not in one]
        waiting = [i for i in waiting if loaded & set(re.findall(r"%\d+", block[i].partition(" = ")[2]))]
        way = shortest(blocks, name, waiting[0], lambda one: loads(one, weights)) if waiting else None
        ways += [way] if way else []
    assert ways
    dependent = derived(all, loaded, r"[\w ]+?")
    chained = [one for way in ways for one in way if (load := LOAD.match(one)) and load[2] in dependent]
    return max(map(len, ways)), len(chained), len(ways)


def shortest(blocks: dict[str, list[str]], name: str, first: int, ends: Callable[[str], bool]) -> list[str] | None:
    """The instructions from one of a block up to one that ends the search."""
    ways, seen = [(blocks[name][first:], [])], set()
    while ways:
        ways.sort(key=lambda way: len(way[1]))
        block, before = ways.pop(0)
        end = next((i for i, instruction in enumerate(block) if ends(instruction)), None)
        if end is not None:
            return before + block[:end]
        for following in set(re.findall(r"label %(\d+)", block[-1])) - seen:
            seen.add(following)
            ways.append((blocks[following], before + block))
    return None


DENSE, PACKED = [], ["MOE_METAL_FORMAT=affine4"]
ROUTES = {  # kernel, macros, the argument with the weights -> the most instructions
    "gate_up": ("gate_up_rows", PACKED, "%2", 52),
    "gate_up_dense": ("gate_up_rows", DENSE, "%2", 65),
    "down": ("down_rows", PACKED, "%3", 54),
    "down_dense": ("down_rows", DENSE, "%3", 58),
}


def route_of(name: str, change: Callable[[str], str] = str) -> tuple[int, int, int]:
    from embed import FOLDER, shader_text
    from metal_sim.engine import address_spaces

    function, format, weights, _ = ROUTES[name]
    macros = ["MOE_METAL_PART=rows_wide", "MOE_METAL_PART_rows_wide=1", "MOE_METAL_DTYPE=2", *format]
    text = change(shader_text(FOLDER / "experts_decode.metal"))
    kernel = compiled(address_spaces.translated(text, 310, macros), f"experts_{function}I")
    return from_ids(kernel, "%1", weights)


@pytest.mark.parametrize("name", ROUTES)
def test_few_instructions_from_ids_to_weights(name: str) -> None:
    """Each token waits for them. What does not need the id is computed while it is loaded."""
    instructions, loads, ways = route_of(name)
    assert 10 < instructions <= ROUTES[name][-1] and loads == 0 and ways == 1


TEST_OF_ID = "const int expert = expert_of(id, params);\n  if (expert < 0) return;\n"
LONGER = {  # a name of ROUTES, the right text, and a wrong one
    "tested before the rows": (
        "gate_up",
        "device const T* vector = x +",
        TEST_OF_ID.replace("int expert", "int early").replace("expert <", "early <") + "  device const T* vector = x +",
    ),
    "next id tested at once": (
        "down",
        "if (i + step < all) next_id = id_of(ids, next_slot, params);",
        "if (i + step < all) next_id = int2(expert_of(ids, next_slot, params), 0);",
    ),
    "found in a table": (
        "gate_up",
        TEST_OF_ID,
        TEST_OF_ID.replace("expert_of(id, params)", "ids[expert_of(id, params)]"),
    ),
}


@pytest.mark.parametrize("fault", LONGER)
def test_longer_routes_are_detected(fault: str) -> None:
    name, right, wrong = LONGER[fault]

    def change(text: str) -> str:
        assert right in text
        return text.replace(right, wrong)

    instructions, loads, ways = route_of(name, change)
    assert instructions > ROUTES[name][-1] or loads > 0 or ways > 1
