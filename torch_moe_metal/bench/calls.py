"""What is measured: every op, called as one MoE layer of a model calls it, and the layer's whole block.

Nothing here needs the compiled ops, so that other tools can take their sizes and inputs from here too.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .. import arguments
from ..arguments import ARGUMENTS, DTYPES, ROUTERS
from ..models import DEFAULT, MANY_EXPERTS, MODELS, Model
from .packed import Packing, packing_of

GIVEN = {"weighted_sum": ("residual",), "norm": ("weight",)}  # optional arguments that every layer gives
EXPERTS = ("gate_up", "down", "gate_up_bias", "down_bias")  # the experts' weights: all input sets share them
WHOLE = ("experts", "block")  # what reads the experts' weights
OPS = (*(op for op in ARGUMENTS if op != "experts"), *WHOLE)
DECODING = ("linear", *WHOLE)  # what a model does with a weight: with few tokens, its bytes are the time
TOKENS = {True: (1, 4, 32, 512), False: (1, 64, 4096)}  # of those, and of the other ops
WORTH_A_LIMIT = 32 << 20  # bytes a row moves at least to be held against memory's speed: smaller ones stay in caches
QUERY = "query"  # what `linear` multiplies with, unless `Call.which` says another
CONTEXTS = ("4096", "32768")  # keys that a token sees of those before it, the least
ROTATED = 256 << 20  # bytes of inputs to walk through, where 16 sets are enough for it


@dataclass(frozen=True)
class Call:
    """One op as a layer of `model` calls it on T tokens. `block` is no op: it is the router, the experts and the shared
    expert together. `dequantize` gives the embeddings of T tokens."""

    op: str
    name: str  # of the model
    model: Model
    T: int
    dtype: torch.dtype = torch.bfloat16
    format: str = "dense"  # of the weights
    which: str = ""  # of `linear`, the name of one of the model's `linears`; of `attention`, one of CONTEXTS

    def __str__(self) -> str:
        return "-".join([self.op, self.name, f"T{self.T}", DTYPES[self.dtype], *self.variant])

    @property
    def label(self) -> str:
        return " ".join([self.op, *self.variant])

    @property
    def variant(self) -> list[str]:
        """What tells rows of one op, size and dtype apart."""
        which = self.which or QUERY * (self.op == "linear")
        return [which] * bool(which) + [self.format] * (self.packing is not None)

    @property
    def packing(self) -> Packing | None:
        """None of dense weights."""
        return packing_of(self.format, self.dtype)

    @property
    def shapes(self) -> dict[str, str]:
        """The letters of each argument."""
        if self.op == "block":
            return {"x": "TH"}
        own = (name for name in self.model.tensors if name != "shared_gate")  # the shared expert's, not in these rows
        sinks = ["sinks"] * self.model.sinks
        norms = dict.fromkeys(("q_norm_weight", "k_norm_weight")) if self.model.head_norms else {}
        transposed = self.op == "experts" and self.model.experts.get("transposed", False)
        found = arguments.shapes(self.op, (*own, *sinks, *norms, *GIVEN.get(self.op, ())), transposed)
        all_heads = {"q_norm_weight": "AD", "k_norm_weight": "JD"} if self.model.head_norms == "all" else {}
        return found | {name: letters for name, letters in all_heads.items() if name in found}

    @property
    def of_mlx(self) -> bool:
        """Whether MLX is measured beside it."""
        return self.op in WHOLE or self.packing is not None

    @property
    def options(self) -> dict:
        if self.op == "block":
            return {}
        if self.op == "rope":
            return {"interleaved": self.model.low_rank}
        packing = self.packing
        weights = {"format": packing.format, "bits": packing.bits} if packing else {"format": "dense"}
        weights["dtype"] = self.dtype
        return arguments.options(
            self.op, {"top_k": self.model.K, "causal": True} | self.model.routing | self.model.experts | weights
        )

    @property
    def dims(self) -> dict[str, int]:
        """glu comes between the experts' products, where every choice of an expert has a row."""
        m = self.model
        rows = self.T * m.K if self.op == "glu" else self.T
        N, H = m.linears[self.which or QUERY] if self.op == "linear" else (self.T, m.H)
        keys = max(self.T, int(self.which or CONTEXTS[0])) if self.op == "attention" else self.T
        heads = dict(zip("AJDV", m.heads, strict=True)) | {"B": 1, "S": keys, "R": m.angles}
        if self.op == "rope" and m.low_rank:
            heads["D"] = 2 * m.angles  # the rest of such a key does not come out of a projection of its own
        return {"T": rows, "E": m.E, "K": m.K, "H": H, "I": m.I, "N": N, "U": 1} | heads

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
        own = sum(self.bytes(name) for name in self.shapes if name not in EXPERTS)
        return min(16, -(-ROTATED // max(1, own)))

    @property
    def weights(self) -> list[str]:
        """The arguments that may be packed."""
        return list(arguments.weights(self.op)) if self.op in ARGUMENTS else []

    def bytes(self, name: str) -> int:
        """Of an argument, which as a packed weight is more than one tensor."""
        size = self.size(self.shapes[name])
        if self.packing and name in self.weights:
            return self.packing.bytes(*size)
        return prod(size) * self.dtype_of(name).itemsize

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
        linear = 2 * prod(self.size("TNH"))
        A, T, S, D, V = self.size("ATSDV")
        attention = 2 * A * (T * S - T * (T - 1) // 2) * (D + V)  # of the keys that are seen
        return {"gate": router, "experts": experts, "block": block, "linear": linear, "attention": attention}.get(
            self.op, 0
        )


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
        if name == "router_weight" or name in call.weights:
            return self(*size, scale=size[-1] ** -0.5)
        return self(*size)

    def packed(self, packing: Packing, name: str, *shape: int) -> dict[str, Tensor]:
        """A packed weight and what stands beside it, by the names that an op has for them."""
        parts = packing.weight(*shape, generator=self.random)
        named = zip((name, *arguments.scale_names(name)), parts, strict=True)
        return {part: tensor.to(self.tile.device) for part, tensor in named if tensor is not None}


def halves(call: Call, packed: Tensor) -> dict[str, Tensor]:
    """glu's arguments as the layer has them: views of one packed tensor."""
    interleaved = call.model.experts.get("interleaved")
    gate, up = (packed[:, ::2], packed[:, 1::2]) if interleaved else packed.chunk(2, -1)
    return {"gate": gate, "up": up}


def joined_heads(call: Call, noise: Callable[..., Tensor]) -> dict[str, Tensor]:
    """rope's arguments as the layer has them: queries and keys are views of one projection, which has values, too."""
    (B, T, A, D), (J,) = call.size("BTAD"), call.size("J")
    heads = noise(B, T, A + 2 * J, D)
    rest = {name: noise(*call.size(letters)) for name, letters in call.shapes.items() if name not in ("q", "k")}
    return {"q": heads[:, :, :A], "k": heads[:, :, A : A + J]} | rest


def inputs(call: Call, noise: Noise) -> dict[str, Tensor]:
    """One set of arguments, without the experts' weights."""
    if call.op == "glu":
        return halves(call, noise(*call.size("TG")))
    if call.op == "rope":
        return joined_heads(call, noise)
    found = {}
    for name, letters in call.shapes.items():
        if name in EXPERTS:
            continue
        if call.packing and name in call.weights:
            found |= noise.packed(call.packing, name, *call.size(letters))
        else:
            found[name] = noise.argument(call, name, letters)
    return found


def moved(*tensors: Tensor | None) -> int:
    """The bytes of the tensors' own elements."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


# ------------------------------------------------------------------------------------------------ what was asked for


class Unfit(Exception):
    """It cannot be done here; the message says why."""


def wanted_ops(options: Namespace) -> list[str]:
    """Without a choice: all of them, or a named model's block and experts, or what decodes with given formats."""
    return options.ops or list(WHOLE if options.model else DECODING if options.formats else OPS)


def wanted_formats(options: Namespace) -> list[str]:
    return options.formats or ["dense"]


def takes_format(op: str, format: str) -> bool:
    return format == "dense" or op == "block" or arguments.takes_formats(op)


def rows_of(op: str, options: Namespace) -> list[tuple[str, str]]:
    """Whose sizes a row has, and `Call.which`. Of the ops, only `route` takes a time that goes by the number of
    experts: without a named model it has rows for many, too."""
    if op == "route" and not options.model:
        return [(name, "") for name in (DEFAULT, MANY_EXPERTS)]
    name = options.model or DEFAULT
    return [(name, which) for which in choices(op, name)]


def choices(op: str, name: str) -> tuple[str, ...]:
    """The values of `Call.which` that an op has rows for."""
    return {"linear": tuple(MODELS[name].linears), "attention": CONTEXTS}.get(op, ("",))


def tokens_of(op: str, which: str) -> tuple[int, ...]:
    """Without --tokens. The head has few tokens even in a prefill: of a sequence, the last. A long context is for a
    token."""
    tokens = TOKENS[op in DECODING]
    return {"head": tokens[:-1], CONTEXTS[-1]: (1,)}.get(which, tokens)


def calls_of(options: Namespace, models: dict[tuple[torch.dtype, str], Model]) -> list[Call]:
    """The rows, with these models for what reads the experts' weights: that stands together in each dtype and format,
    so that they are made once."""
    ops, formats = sorted(wanted_ops(options), key=OPS.index), wanted_formats(options)
    for op in ops:
        if not any(takes_format(op, format) for format in formats):
            raise Unfit(f"--ops {op}: it has no row in --formats {' '.join(formats)}, since it takes no packed weights")
    calls = [
        Call(op, name, models[dtype, format] if op in WHOLE else MODELS[name], T, dtype, format, which)
        for dtype in options.dtypes
        for format in formats
        for op in ops
        if takes_format(op, format)
        for name, which in rows_of(op, options)
        for T in options.tokens or tokens_of(op, which)
    ]
    for call in calls:
        for columns in call.size("HI" if call.op in WHOLE else "H") if call.packing else ():
            if columns % call.packing.whole_columns:
                told = f"{call.packing.whole_columns} columns, and {call.name} has {columns}"
                raise Unfit(f"--formats {call.format}: its weights have a multiple of {told}")
    return calls
