"""The packed weights that a folder of mlx-lm stores, checked against its config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import logging

from ...formats import BITS, GROUPS, any_of
from .checkpoint import SAFETENSORS, SCALES, Stored, stored_tensors
from .config import FIXED
from .mlx_config import MlxConfig

logger = logging.get_logger(__name__)

INDEX = "model.safetensors.index.json"
#: MLX's modes, which have the names of our formats, with their default bits and group size. Only affine weights may
#: have others.
MODES = {"affine": (4, 64)} | {mode: FIXED[mode] for mode in ("mxfp4", "nvfp4", "mxfp8")}


@dataclass(frozen=True)
class Quantised:
    """One packed weight of a folder."""

    weight: Stored
    scales: Stored
    biases: Stored | None
    entry: dict  # the entry of config.json for its path, or the default

    @classmethod
    def of(cls, stem: str, tensors: Mapping[str, Stored], config: MlxConfig) -> "Quantised":
        weight, entry = tensors[f"{stem}.weight"], config.layers.get(stem)
        scales = weight.require_sibling(tensors, f"{stem}.scales")
        weight.expect(weight.dtype == "U32", "U32, which its scales go with")
        weight.expect(entry is not False, "no packed weight, since config.json says false for it")
        entry = {"mode": "affine"} | entry if isinstance(entry, dict) else config.default
        mode = entry["mode"]
        known = isinstance(mode, str) and mode in MODES
        scales.expect(known, f"{', '.join(MODES)}, the supported modes, and not {mode!r}, which config.json says")
        dtypes = ("U8",) if mode != "affine" else SCALES
        scales.expect(scales.dtype in dtypes, f"{', '.join(dtypes)}, the scales of mode {mode}, which config.json says")
        biases = scales.require_sibling(tensors, f"{stem}.biases") if mode == "affine" else None
        if biases:
            biases.expect((biases.dtype, biases.shape) == (scales.dtype, scales.shape), f"what {scales.name} is")
        alone = f"{stem}.global_scale" not in tensors
        scales.expect(alone, f"no {stem}.global_scale: factors of whole matrices do not run here")
        return cls(weight, scales, biases, entry)

    @property
    def format(self) -> str:
        return self.entry["mode"]

    @property
    def configured(self) -> tuple[int, int]:
        """Bits and group size in config.json, or MLX's defaults if they are null or missing."""
        usual = MODES[self.format]
        return tuple(
            default if self.entry.get(name) is None else self.entry[name]
            for name, default in zip(("bits", "group_size"), usual, strict=True)
        )

    def bits_and_group(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """For a weight of this shape. Raises if no op supports them, or if config.json has others."""
        *rows, C = shape
        of_config = ", by the model's configuration"
        for part in (self.weight, self.scales):
            part.expect(len(part.shape) == len(shape) and list(part.shape[:-1]) == rows, f"rows {rows}{of_config}")
        words, groups = self.weight.shape[-1], self.scales.shape[-1]
        self.weight.expect(words * 32 % C == 0, f"{C} columns of as many bits each{of_config}")
        whole = groups > 0 and C % groups == 0
        self.scales.expect(whole, f"{rows} and groups of {C} columns")
        bits, group = words * 32 // C, C // groups
        if self.format in FIXED:
            of_mode = "{} bits in groups of {}, as mode {} has".format(*FIXED[self.format], self.format)
            self.scales.expect((bits, group) == FIXED[self.format], of_mode)
        self.weight.expect(bits in BITS, f"{C} columns of {any_of(BITS)} bits")
        self.scales.expect(group in GROUPS, f"a scale for each {any_of(GROUPS)} of {C} columns")
        wrong = self.weight if bits != self.configured[0] else self.scales
        of_config = "{} bits in groups of {}, as config.json says".format(*self.configured)
        wrong.expect((bits, group) == self.configured, of_config)
        return bits, group

    def parts(self, shape: tuple[int, ...]) -> list[Tensor]:
        """Data, scale and offset of a weight of this shape, on the meta device."""
        bits, group = self.bits_and_group(shape)
        *rows, C = shape
        dtype = SAFETENSORS[self.scales.dtype]
        sizes = [(C * bits // 8, torch.uint8), *[(C // group, dtype)] * (2 if self.biases else 1)]
        return [torch.empty(*rows, columns, dtype=kind, device="meta") for columns, kind in sizes]


def quantised(tensors: Mapping[str, Stored], config: MlxConfig) -> dict[str, Quantised]:
    """All packed weights of a folder, by their paths in mlx-lm's model."""
    found = {}
    for name, stored in tensors.items():
        stem, _, part = name.rpartition(".")
        if part in ("scales", "biases"):
            stored.require_sibling(tensors, f"{stem}.weight")
        if (part == "weight" and stored.dtype == "U32") or part in ("scales", "biases"):
            found[stem] = found.get(stem) or Quantised.of(stem, tensors, config)
    return found


def replace_stale_index_files(files: list[str] | None) -> None:
    """If the folder's index is stale, replace this list's files by all weight files, which are what mlx-lm reads."""
    folder = Path(files[0]).parent if files else None
    if folder is None or not (folder / INDEX).exists():
        return
    there = sorted(folder.glob("model*.safetensors"))
    listed = json.loads((folder / INDEX).read_text()).get("weight_map", {})
    truth = {tensor.name: tensor.file.name for tensor in stored_tensors(there).values()}
    if listed != truth and there:
        logger.warning(
            f"torch_moe_metal: {folder / INDEX} is stale: it does not list the tensors of the folder's files. All of "
            f"{', '.join(file.name for file in there)} are loaded instead"
        )
        files[:] = map(str, there)
