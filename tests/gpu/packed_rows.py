"""What is measured of weights in packed formats, beside those in bfloat16: sizes, random arguments and bytes read.

record.py writes the dispatches of every row down, and run.py replays them: `python tests/gpu/run.py FOLDER --packed`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from packed import AFFINE, FP8, MXFP4, Packing

BFLOAT = torch.bfloat16
E, K, H, I = 128, 8, 2048, 768  # Qwen3-30B-A3B
Args = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """experts with T tokens, or linear, whose N is the number of rows; without a packing the weights are bfloat16."""

    op: str
    packing: Packing | None
    T: int
    N: int = 0

    def __str__(self) -> str:
        return f"{self.op}-{self.packing or 'bfloat16'}-T{self.T}" + (f"-N{self.N}" if self.N else "")

    @property
    def options(self) -> dict[str, str]:
        return {"format": self.packing.format if self.packing else "dense"}

    def weights(self, generator: torch.Generator, experts: int = E) -> Args:
        shapes = {"weight": (self.N, H)} if self.N else {"gate_up": (experts, 2 * I, H), "down": (experts, H, I)}
        args = {}
        for name, shape in shapes.items():
            prefix = "" if self.N else f"{name}_"
            if self.packing is None:
                noise = torch.randn(shape, generator=generator, device=generator.device, dtype=BFLOAT)
                args[name] = noise * shape[-1] ** -0.5
                continue
            data, scale, offset = self.packing.weight(*shape, generator=generator)
            args |= {name: data, f"{prefix}scale": scale} | ({} if offset is None else {f"{prefix}offset": offset})
        return args

    def inputs(self, generator: torch.Generator) -> Args:
        device = generator.device
        args = {"x": torch.randn(self.T, H, generator=generator, device=device).to(BFLOAT)}
        if self.N:
            return args
        scores = torch.rand(self.T, E, generator=generator, device=device)
        weights, ids = scores.softmax(-1).topk(K)
        return args | {"weights": weights, "ids": ids.int()}

    def bytes(self, args: Args) -> float:
        """What is read at least: the weights, of the experts those that are chosen."""
        share = args["ids"].unique().numel() / E if "ids" in args else 1
        names = [name for name in args if name.startswith(("gate_up", "down", "weight", "scale", "offset"))]
        return share * sum(args[name].nbytes for name in names if name != "weights")


SCALES = [replace(packing, scale=BFLOAT) for packing in (AFFINE[4], AFFINE[8])]
MEASURED = [None, *SCALES, MXFP4, FP8]
ROWS = [Row("experts", packing, T) for T in (1, 4, 16) for packing in MEASURED]
ROWS += [Row("linear", packing, 1, N) for N in (4096, 151936) for packing in MEASURED]
