"""The table of formats in which a weight may be: csrc/formats.h, which has one row per format and width."""

from dataclasses import dataclass

import torch

from .library import format_rows


@dataclass(frozen=True)
class Format:
    """What a packed weight [..., N, C] looks like. Its rows are runs of blocks. `library` is what `--formats` calls it;
    `scale` and `offset` say what stands beside the data, as ScaleType and OffsetType in csrc/formats.h do.
    `scale_columns` and `scale_rows` share a scale, 0: as the shapes say."""

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
        """Bits, and the columns that share a scale, follow from the shapes."""
        return self.is_packed and self.scale != "none" and self.scale_columns == 0

    @property
    def has_own_scales(self) -> bool:
        """They lie within the blocks, as GGML has them."""
        return self.is_packed and self.scale == "none"

    @property
    def parts(self) -> tuple[str, ...]:
        """What stands beside the data: scale, perhaps an offset."""
        if not self.is_packed or self.has_own_scales:
            return ()
        return ("scale",) if self.offset == "none" else ("scale", "offset")

    @property
    def rows_per_scale(self) -> int:
        """Of a packed weight. Where it is more than one, a matrix may end within a block of such rows and columns."""
        return max(1, self.scale_rows)

    @property
    def whole_columns(self) -> int:
        """A packed weight has a multiple of so many columns; an affine one of its group."""
        return 1 if self.rows_per_scale > 1 else max(self.columns, self.scale_columns)

    @property
    def scale_dtype(self) -> torch.dtype | None:
        """Where no choice is left."""
        return {"float32_or_bfloat16": torch.float32, "e8m0": torch.uint8, "e4m3": torch.uint8}.get(self.scale)


ROWS = tuple(Format(**row) for row in format_rows)
#: By `library`: one for each width.
LIBRARIES = {row.library: row for row in ROWS}
#: The packed formats by name. Of affine the row of 4 bits, which stands for the others.
FORMATS = {row.name: row for row in ROWS if row.is_packed and (not row.is_affine or row.bits == 4)}
#: The bits of affine numbers, and how many columns may share their scale and offset.
BITS = tuple(row.bits for row in ROWS if row.is_affine)
GROUPS = (16, 32, 64, 128)
