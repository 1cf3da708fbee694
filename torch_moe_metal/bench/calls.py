"""What is measured: every op, called as one MoE layer of a model calls it, and the layer's whole block.

Nothing here needs the compiled ops, so that other tools can take their sizes and inputs from here too.
"""

from argparse import Namespace
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .. import arguments
from ..arguments import ARGUMENTS, DTYPES, ROUTERS
from ..models import DEFAULT, MANY_EXPERTS, MODELS, Model

GIVEN = {"weighted_sum": ("residual",)}  # optional arguments that every layer gives
EXPERTS = ("gate_up", "down", "gate_up_bias", "down_bias")  # the experts' weights: all input sets share them
WHOLE = ("experts", "block")  # what reads the experts' weights
OPS = (*(op for op in ARGUMENTS if op != "experts"), *WHOLE)
TOKENS = {True: (1, 4, 32, 512), False: (1, 64, 4096)}  # of those, and of the other ops
WORTH_A_LIMIT = 32 << 20  # bytes a row moves at least to be held against memory's speed: smaller ones stay in caches
ROTATED = 256 << 20  # bytes of inputs to walk through, where 16 sets are enough for it


@dataclass(frozen=True)
class Call:
    """One op as a layer of `model` calls it on T tokens. `block` is no op: it is the router, the experts and the shared
    expert together."""

    op: str
    name: str  # of the model
    model: Model
    T: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.op}-{self.name}-T{self.T}-{DTYPES[self.dtype]}"

    @property
    def shapes(self) -> dict[str, str]:
        """The letters of each argument."""
        if self.op == "block":
            return {"x": "TH"}
        own = (name for name in self.model.tensors if name != "shared_gate")  # the shared expert's, not in these rows
        transposed = self.op == "experts" and self.model.experts.get("transposed", False)
        return arguments.shapes(self.op, (*own, *GIVEN.get(self.op, ())), transposed)

    @property
    def options(self) -> dict:
        if self.op == "block":
            return {}
        weights = {"format": "dense", "dtype": self.dtype}
        return arguments.options(self.op, {"top_k": self.model.K} | self.model.routing | self.model.experts | weights)

    @property
    def dims(self) -> dict[str, int]:
        """glu comes between the experts' products, where every choice of an expert has a row."""
        m = self.model
        rows = self.T * m.K if self.op == "glu" else self.T
        return {"T": rows, "E": m.E, "K": m.K, "H": m.H, "I": m.I, "N": m.H, "S": 1}

    @property
    def letters(self) -> set[str]:
        """The sizes that it depends on."""
        if self.op == "block":
            return set("EKHI")
        found = {letter for letters in (*self.shapes.values(), *arguments.outputs(self.op)) for letter in letters}
        return found | set("I" if "G" in found else "") | set("K" if self.op == "glu" else "")

    def size(self, letters: str) -> tuple[int, ...]:
        return arguments.size(letters, self.dims)

    def dtype_of(self, argument: str) -> torch.dtype:
        return {"ids": torch.int32, "weights": torch.float32}.get(argument, self.dtype)

    @property
    def sets(self) -> int:
        """How many sets of inputs are walked through, so that caches hold little of the next one."""
        own = sum(prod(self.size(s)) for name, s in self.shapes.items() if name not in EXPERTS) * self.dtype.itemsize
        return max(2, min(16, ROTATED // max(1, own)))

    @property
    def written(self) -> int:
        """Bytes of the outputs."""
        letters = ["TH"] if self.op == "block" else arguments.outputs(self.op)
        return sum(prod(self.size(s)) for s in letters) * (4 if self.op in ROUTERS else self.dtype.itemsize)

    @property
    def flops(self) -> int:
        """Of the matrix products."""
        m = self.model
        router, experts = 2 * self.T * m.E * m.H, 6 * self.T * m.K * m.H * m.I
        block = router + experts + 6 * self.T * m.H * m.S
        return {"gate": router, "experts": experts, "block": block}.get(self.op, 0)


class Noise:
    """Tensors of normal random numbers: one tile of them again and again, which is as quick as a copy. Its length is
    prime, so that no two rows of a weight are alike."""

    TILE = 1_000_003

    def __init__(self, device: str, dtype: torch.dtype):
        self.random = torch.Generator().manual_seed(0)
        tile = torch.randn(self.TILE, generator=self.random)
        self.tile, self.at = torch.cat([tile, tile]).to(device, dtype), 0

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        flat = self.tile.new_empty(prod(shape))
        tile = self.tile if scale == 1 else self.tile * scale
        for part in flat.split(self.TILE):
            part.copy_(tile[self.at : self.at + len(part)])
        self.at = (self.at + len(flat)) % self.TILE
        return flat.view(shape)

    def chosen(self, T: int, E: int, K: int) -> Tensor:
        """K distinct experts for each token, as a router gives them."""
        scores = torch.rand(T, E, generator=self.random)
        return scores.topk(K).indices.int().to(self.tile.device)

    def argument(self, call: Call, name: str, letters: str) -> Tensor:
        size = call.size(letters)
        if name == "ids":
            return self.chosen(*call.size("TEK"))
        if name == "weights":
            return self(*size).float().softmax(-1)
        if name in ("router_weight", "gate_up", "down"):
            return self(*size, scale=size[-1] ** -0.5)
        return self(*size)


def halves(call: Call, packed: Tensor) -> dict[str, Tensor]:
    """glu's arguments as the layer has them: views of one packed tensor."""
    interleaved = call.model.experts.get("interleaved")
    gate, up = (packed[:, ::2], packed[:, 1::2]) if interleaved else packed.chunk(2, -1)
    return {"gate": gate, "up": up}


def inputs(call: Call, noise: Noise) -> dict[str, Tensor]:
    """One set of arguments, without the experts' weights."""
    if call.op == "glu":
        return halves(call, noise(*call.size("TG")))
    return {name: noise.argument(call, name, s) for name, s in call.shapes.items() if name not in EXPERTS}


def moved(*tensors: Tensor | None) -> int:
    """The bytes of the tensors' own elements."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


# ------------------------------------------------------------------------------------------------ what was asked for


class Unfit(Exception):
    """It cannot be done here; the message says why."""


def wanted_ops(options: Namespace) -> list[str]:
    """Without a choice: all of them, or a named model's block and experts."""
    return options.ops or list(WHOLE if options.model else OPS)


def calls_of(options: Namespace, models: dict[torch.dtype, Model]) -> list[Call]:
    """The rows. What reads the experts' weights stands together in each dtype, so that they are made once. Of the ops,
    only `route` takes a time that goes by the number of experts: without a named model it has rows for many, too."""
    named = [options.model or DEFAULT]
    return [
        Call(op, name, models[dtype] if op in WHOLE else MODELS[name], T, dtype)
        for dtype in options.dtypes
        for op in sorted(wanted_ops(options), key=OPS.index)
        for name in (named if options.model or op != "route" else [*named, MANY_EXPERTS])
        for T in options.tokens or TOKENS[op in WHOLE]
    ]
