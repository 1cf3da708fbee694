"""The benchmark rows for packed weights, and for bfloat16 in comparison: sizes, random arguments and bytes read.

record.py records the dispatches of every row, and `python tests/gpu/run.py FOLDER --packed` replays them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_moe_metal.random_weights import Packing, packing_of

BFLOAT = torch.bfloat16
E, K, H, I = 128, 8, 2048, 768  # Qwen3-30B-A3B
Args = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """experts with T tokens, or linear with N rows of weights; without a packing the weights are bfloat16.
    together: how many tokens (linear) or slots of an expert (experts, up to 2) are multiplied together, unless the
    defaults of tuning.h decide. half_shared: each token selects half of the experts of the one before; otherwise routes
    are random."""

    op: str
    packing: Packing | None
    T: int
    N: int = 0
    together: int = 0
    half_shared: bool = False

    def __str__(self) -> str:
        rows = f"-N{self.N}" if self.N else ""
        shared = "-shared" if self.half_shared else ""
        together = f"-by{self.together}" if self.together else ""
        return f"{self.op}-{self.packing or 'bfloat16'}-T{self.T}{rows}{shared}{together}"

    @property
    def settings(self) -> dict[str, int]:
        if not self.together:
            return {}
        pairs = ("gate_up_pairs_percent", "down_pairs_percent")
        return {"tokens_together": self.together} if self.N else dict.fromkeys(pairs, self.together - 1)

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
            parts = {name: data, f"{prefix}scale": scale, f"{prefix}offset": offset}
            args |= {name: part for name, part in parts.items() if part is not None}
        return args

    def inputs(self, generator: torch.Generator) -> Args:
        device = generator.device
        args = {"x": torch.randn(self.T, H, generator=generator, device=device).to(BFLOAT)}
        if self.N:
            return args
        scores = torch.rand(self.T, E, generator=generator, device=device)
        for t in range(1, self.T) if self.half_shared else ():
            before = scores[t - 1].topk(K).indices
            scores[t, before[: K // 2]] = 0
            scores[t, before[K // 2 :]] += 1  # the first ones of this token
        weights, ids = scores.softmax(-1).topk(K)
        return args | {"weights": weights, "ids": ids.int()}

    def bytes(self, args: Args) -> float:
        """The least that must be read: the weights, with `experts` only those of the selected experts."""
        share = args["ids"].unique().numel() / E if "ids" in args else 1
        names = [name for name in args if name.startswith(("gate_up", "down", "weight", "scale", "offset"))]
        return share * sum(args[name].nbytes for name in names if name != "weights")


MEASURED = [None, *(packing_of(name, BFLOAT) for name in ("affine4", "affine8", "mxfp4", "fp8", "q4_k"))]
ROWS = [Row("experts", packing, T) for T in (1, 2, 4, 16, 256) for packing in MEASURED]
# T, and whether two slots of an expert are multiplied together, or each alone.
PAIRS = ((2, 1), (2, 2), (4, 1), (4, 2), (16, 1), (16, 2))
ROWS += [Row("experts", packing, T, 0, by, half) for half in (False, True) for packing in MEASURED for T, by in PAIRS]
ROWS += [Row("experts", packing, 16, half_shared=True) for packing in MEASURED]
# T, and tokens_together: tokens are multiplied by a weight together (the default), or one by one.
TOGETHER = ((1, 0), (2, 0), (2, 1), (4, 0), (4, 1), (8, 0), (8, 1))
ROWS += [Row("linear", packing, T, 4096, by) for packing in MEASURED for T, by in TOGETHER]
ROWS += [Row("linear", packing, 1, 151936) for packing in MEASURED]
