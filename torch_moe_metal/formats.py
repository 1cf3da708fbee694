"""The table of weight formats, read from csrc/formats.h, which has one row per format and width."""

from dataclasses import dataclass

import torch

from .extension import format_tables


@dataclass(frozen=True)
class Format:
    """A packed format of a weight [..., N, C]. Each row of the weight is a sequence of blocks. `library` is its name
    in `--formats`; `scale` and `offset` are the names of ScaleType and OffsetType in csrc/formats.h. `scale_columns`
    and `scale_rows` share one scale; 0 means that the shapes decide."""

    name: str
    library: str
    bits: int
    columns: int
    bytes: int
    scale: str
    scale_columns: int
    scale_rows: int
    offset: str

    @property
    def is_packed(self) -> bool:
        return self.name != "dense"

    @property
    def is_affine(self) -> bool:
        """Its bits and its group size follow from the shapes."""
        return self.is_packed and self.scale != "none" and self.scale_columns == 0

    @property
    def has_own_scales(self) -> bool:
        """The scales are inside the blocks, as in GGML's formats."""
        return self.is_packed and self.scale == "none"

    @property
    def parts(self) -> tuple[str, ...]:
        """The tensors next to the data: the scale, and the offset if there is one."""
        if not self.is_packed or self.has_own_scales:
            return ()
        return ("scale",) if self.offset == "none" else ("scale", "offset")

    @property
    def rows_per_scale(self) -> int:
        """Rows that share a scale. If it is more than 1, a matrix may end inside of such a block of rows and
        columns."""
        return max(1, self.scale_rows)

    @property
    def whole_columns(self) -> int:
        """The number of columns must be a multiple of this. (For affine it must be a multiple of the group size.)"""
        return 1 if self.rows_per_scale > 1 else max(self.columns, self.scale_columns)

    @property
    def scale_dtype(self) -> torch.dtype | None:
        """The dtype of scales; None if there is a choice."""
        return {"float32_or_bfloat16": torch.float32, "e8m0": torch.uint8, "e4m3": torch.uint8}.get(self.scale)


ROWS = tuple(Format(**row) for row in format_tables["rows"])
#: By `library`, one for each width.
LIBRARIES = {row.library: row for row in ROWS}
#: The packed formats by name. For affine this is the row of 4 bits.
FORMATS = {row.name: row for row in ROWS if row.is_packed and (not row.is_affine or row.bits == 4)}
#: The bits of affine weights, and their group sizes.
BITS = tuple(row.bits for row in ROWS if row.is_affine)
GROUPS: tuple[int, ...] = tuple(format_tables["affine_groups"])


def any_of(values: tuple[int, ...]) -> str:
    """For error messages, such as "16, 32, 64 or 128"."""
    return f"{', '.join(map(str, values[:-1]))} or {values[-1]}"
