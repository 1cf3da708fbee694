"""Maps GGUF files into Metal buffers. A buffer is a view of a part of the file, cut where a tensor begins, because its
length is limited."""

import itertools
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from . import GgufTensor

#: The largest gap between tensors in one view. More views would slow down each command.
GAP = 64 << 20
#: The variable that turns it off.
VARIABLE = "TORCH_MOE_METAL_MAP_FILES"


def pages_of(part: range) -> int:
    """The bytes of the pages that contain a part of a file."""
    page = mmap.PAGESIZE
    return -(-part.stop // page) * page - part.start // page * page


def bytes_of(tensor: GgufTensor) -> range:
    return range(tensor.begin, tensor.begin + tensor.bytes)


def around(parts: Iterable[range]) -> range:
    parts = list(parts)
    return range(min(part.start for part in parts), max(part.stop for part in parts))


def cut(groups: Sequence[Sequence[range]], most: int) -> list[range]:
    """The views of one file that contain these parts, of at most `most` bytes each. Parts of a group, which will be
    read as one weight, are in one view if that is possible. A part that is too long is in none."""
    spans: list[list[range]] = []  # groups that overlap are one span
    for group in sorted(groups, key=lambda group: around(group).start):
        if spans and around(group).start < around(spans[-1]).stop:
            spans[-1] = [*spans[-1], *group]
        else:
            spans.append(list(group))
    whole = [[around(span)] if pages_of(around(span)) <= most else sorted(span, key=lambda part: part.start)
             for span in spans]  # fmt: skip
    views: list[range] = []
    for part in itertools.chain.from_iterable(whole):
        if views and part.start - views[-1].stop <= GAP and pages_of(around((views[-1], part))) <= most:
            views[-1] = around((views[-1], part))
        elif pages_of(part) <= most:
            views.append(part)
    return views


def mapped(groups: Iterable[Sequence[GgufTensor]], sizes: dict[Path, int]) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors of blocks on mps, by name, in the pages of their files of these sizes. A group are those that become one
    weight. Also the reasons why files are not mapped, a line each."""
    found: dict[str, Tensor] = {}
    said = []
    groups = list(groups)
    for path, size in sizes.items() if os.environ.get(VARIABLE) != "0" else ():
        own = [part for group in groups if (part := [tensor for tensor in group if tensor.file == path])]
        parts = cut([list(map(bytes_of, group)) for group in own], torch.ops.moe_metal._max_buffer_length())
        begins, ends = [part.start for part in parts], [part.stop for part in parts]
        views, reason = torch.ops.moe_metal._map_file(str(path), size, begins, ends) if parts else ([], "")
        if reason:
            said.append(f"{path}: copied to mps, since {reason}")
        for tensor, (part, view) in itertools.product(itertools.chain(*own), zip(parts, views, strict=False)):
            if part.start <= tensor.begin and tensor.begin + tensor.bytes <= part.stop:
                blocks = view.narrow(0, tensor.begin - part.start, tensor.bytes)
                found[tensor.name] = blocks.view(tensor.stored_shape)
    return found, said
