"""Reads the code size, registers and spills of a kernel from a native Apple GPU binary.

`metal-tt` writes a Mach-O file whose section __compute contains another one for each kernel, with its code in the
section __TEXT,__text and a FlatBuffer without a published schema in the segment __GPU_METADATA. In the table that the
root's first field points to, field 0 is the number of registers of a thread and field 14 the bytes that a thread
spills. Several projects found these fields with kernels that hold known numbers of values; compile_shaders.py checks
that they are still valid.
"""

import struct
from dataclasses import dataclass

MAGIC = 0xFEEDFACF
SEGMENT = 0x19
REGISTERS, SPILLED = 0, 14


class BinaryError(RuntimeError):
    pass


@dataclass(frozen=True)
class Figures:
    code: int  # bytes
    registers: int
    spilled: int  # bytes per thread


def sections(data: bytes) -> dict[tuple[str, str], bytes]:
    """The sections of a 64-bit Mach-O file, by segment and name."""
    magic, _, _, _, commands = struct.unpack_from("<5I", data)
    if magic != MAGIC:
        raise BinaryError(f"expected a Mach-O file, got one that begins with {magic:#x}")
    found, at = {}, 32
    for _ in range(commands):
        command, size = struct.unpack_from("<2I", data, at)
        if command == SEGMENT:
            (count,) = struct.unpack_from("<I", data, at + 64)
            for section in range(at + 72, at + 72 + 80 * count, 80):
                name, segment = (text.rstrip(b"\0").decode() for text in struct.unpack_from("<16s16s", data, section))
                length, start = struct.unpack_from("<QI", data, section + 40)
                found[segment, name] = data[start : start + length]
        at += size
    return found


def field(data: bytes, table: int, index: int) -> int | None:
    """The position of a field in a FlatBuffer's table; None if it is absent."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, vtable)
    if 4 + 2 * index >= size:
        return None
    (offset,) = struct.unpack_from("<H", data, vtable + 4 + 2 * index)
    return table + offset if offset else None


def figures(archive: bytes) -> Figures:
    (compute,) = [data for (_, name), data in sections(archive).items() if name == "__compute"]
    kernel = sections(compute)
    (metadata,) = [data for (segment, _), data in kernel.items() if segment == "__GPU_METADATA"]
    try:
        (root,) = struct.unpack_from("<I", metadata)
        reference = field(metadata, root, 0)
        table = reference + struct.unpack_from("<I", metadata, reference)[0]
        places = (field(metadata, table, index) for index in (REGISTERS, SPILLED))
        numbers = [0 if place is None else struct.unpack_from("<I", metadata, place)[0] for place in places]
    except (struct.error, TypeError) as error:
        raise BinaryError(f"the metadata of the GPU's binary cannot be read: {error}") from error
    return Figures(len(kernel["__TEXT", "__text"]), *numbers)
