"""What is measured: every op, called as one MoE layer of a model calls it, and the layer's whole block.

Nothing here needs the compiled ops, so that other tools can take their sizes and inputs from here too.
"""

from argparse import Namespace
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .models import DEFAULT, MANY_EXPERTS, MODELS, Model

SHORT = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}

# The arguments that are given. Letters: T tokens, E experts, K experts per token, H hidden, I inner; G = 2I, R = TK.
SHAPES = {
    "gate": {"hidden": "TH", "router_weight": "EH"},
    "route": {"logits": "TE"},
    "glu": {"gate": "RI", "up": "RI"},
    "weighted_sum": {"slots": "TKH", "weights": "TK", "residual": "TH"},
    "weighted_sum_residual_": {"residual": "TH", "slots": "TKH", "weights": "TK"},
    "weighted_sum_residual_norm_": {"residual": "TH", "slots": "TKH", "weights": "TK", "norm_weight": "H"},
    "weighted_sum_norm_add": {"slots": "TKH", "weights": "TK", "residual": "TH", "norm_weight": "H"},
    "weighted_sum_dual_norm_add": {"slots": "TKH", "weights": "TK", "residual": "TH"}
    | {"residual_norm_weight": "H", "moe_norm_weight": "H"},
    "norm_add": {"residual": "TH", "input": "TH", "weight": "H"},
    "residual_norm": {"residual": "TH", "input": "TH", "weight": "H"},
    "experts": {"x": "TH", "weights": "TK", "ids": "TK", "gate_up": "EGH", "down": "EHI"},
    "block": {"x": "TH"},
}
ROUTER = {"norm_weight": "H", "router_bias": "E", "select_bias": "E", "per_expert_scale": "E"}
OPTIONAL = {  # given where the model has them
    "gate": ROUTER,
    "route": {name: ROUTER[name] for name in ("select_bias", "per_expert_scale")},
    "experts": {"gate_up_bias": "EG", "down_bias": "EH"},
}
EXPERTS = ("gate_up", "down", "gate_up_bias", "down_bias")  # the experts' weights: all input sets share them
WHOLE = ("experts", "block")  # what reads the experts' weights
OPS = tuple(SHAPES)
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
        return f"{self.op}-{self.name}-T{self.T}-{SHORT[self.dtype]}"

    @property
    def shapes(self) -> dict[str, str]:
        """The letters of each argument."""
        given = {name: letters for name, letters in OPTIONAL.get(self.op, {}).items() if name in self.model.tensors}
        shapes = SHAPES[self.op] | given
        if self.op == "experts" and self.model.experts.get("transposed"):
            shapes |= {"gate_up": "EHG", "down": "EIH"}
        return shapes

    @property
    def options(self) -> dict:
        if self.op in ("gate", "route"):
            return {"top_k": self.model.K} | self.model.routing
        layout = ("interleaved", "transposed") if self.op == "glu" else ()
        given = self.model.experts if self.op in ("glu", "experts") else {}
        return {name: value for name, value in given.items() if name not in layout}

    @property
    def dims(self) -> dict[str, int]:
        m = self.model
        return {"T": self.T, "E": m.E, "K": m.K, "H": m.H, "I": m.I, "G": 2 * m.I, "R": self.T * m.K}

    def size(self, letters: str) -> tuple[int, ...]:
        return tuple(self.dims[letter] for letter in letters)

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
        if self.op in ("gate", "route"):
            return self.T * self.model.K * 8
        outputs = 2 if self.op in ("weighted_sum_residual_norm_", "residual_norm") else 1
        return outputs * prod(self.size("RI" if self.op == "glu" else "TH")) * self.dtype.itemsize

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
        return halves(call, noise(*call.size("RG")))
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
