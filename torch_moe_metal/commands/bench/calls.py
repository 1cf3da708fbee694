"""The rows of the benchmark: every op, called as in one MoE layer of a model, and the whole block of that layer.

This module does not need the compiled ops, so other tools can use its sizes and inputs too.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ... import arguments
from ...arguments import ARGUMENTS, DTYPES, ROUTERS
from ...random_weights import Packing, packing_of
from ..common.cli import CannotRun
from . import linear_attention
from .linear_attention import LAYERS, Layer, layer_of, of_projections
from .model_sizes import DEFAULT, MANY_EXPERTS, MODELS, Model

GIVEN = {"weighted_sum": ("residual",), "norm": ("weight",)}  # optional arguments that every layer passes
EXPERTS = ("gate_up", "down", "gate_up_bias", "down_bias")  # the experts' weights, shared by all sets of inputs
WHOLE = ("experts", "block")  # the rows that read the experts' weights
OPS = (*(op for op in ARGUMENTS if op != "experts"), *WHOLE)
DECODING = ("linear", *WHOLE)  # products with weights: for few tokens, reading the weights takes most of the time
TOKENS = {True: (1, 4, 32, 512), False: (1, 64, 4096)}  # of DECODING, and of other ops
WORTH_A_LIMIT = 16 << 20  # bytes that a row moves at least to be compared with the bandwidth
QUERY = "query"  # the default of `Call.which` for `linear`
CONTEXTS = ("4096", "32768")  # the minimum number of keys
ROTATED = 256 << 20  # bytes of all sets of inputs, of which there are at most 16


@dataclass(frozen=True)
class Call:
    """One op as a layer of `model` calls it for T tokens. `block` is not an op but the router, the experts and the
    shared expert together. `dequantize` gives the embeddings of T tokens."""

    op: str
    name: str  # of the model
    model: Model
    T: int
    dtype: torch.dtype = torch.bfloat16
    format: str = "dense"  # of the weights
    which: str = (
        ""  # of `linear`, the name of one of the model's `linears`; of `attention`, one of CONTEXTS; and of LAYERS
    )

    def __str__(self) -> str:
        return "-".join([self.op, self.name, f"T{self.T}", DTYPES[self.dtype], *self.variant])

    @property
    def label(self) -> str:
        return " ".join([self.op, *self.variant])

    @property
    def variant(self) -> list[str]:
        """Distinguishes rows with the same op, sizes and dtype."""
        which = self.which or QUERY * (self.op == "linear")
        return [which] * bool(which) + [self.format] * (self.packing is not None)

    @property
    def layer(self) -> Layer | None:
        """Of linear attention."""
        return layer_of(self.op, self.which)

    @property
    def packing(self) -> Packing | None:
        """None for dense weights."""
        return packing_of(self.format, self.dtype)

    @property
    def shapes(self) -> dict[str, str]:
        """The letters of each argument."""
        if self.op == "block":
            return {"x": "TH"}
        if self.layer:
            rule = self.options.get("rule", "delta")
            return arguments.shapes(self.op, self.layer.given, rule=rule) | self.layer.letters
        own = (name for name in self.model.tensors if name != "shared_gate")  # the shared expert's, not in these rows
        sinks = ["sinks"] * self.model.sinks
        norms = dict.fromkeys(("q_norm_weight", "k_norm_weight")) if self.model.head_norms else {}
        transposed = self.op == "experts" and self.model.experts.get("transposed", False)
        found = arguments.shapes(self.op, (*own, *sinks, *norms, *GIVEN.get(self.op, ())), transposed)
        all_heads = {"q_norm_weight": "AD", "k_norm_weight": "JD"} if self.model.head_norms == "all" else {}
        return found | {name: letters for name, letters in all_heads.items() if name in found}

    @property
    def options(self) -> dict:
        if self.op == "block":
            return {}
        if self.layer:
            return self.layer.options
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
        """The size of each letter. glu runs between the experts' products and has a row for every selected expert."""
        m = self.model
        if self.layer:
            return self.layer.dims(self.T) | ({"C": m.H} if self.op == "short_conv_" else {})
        rows = self.T * m.K if self.op == "glu" else self.T
        N, H = m.linears[self.which or QUERY] if self.op == "linear" else (self.T, m.H)
        keys = max(self.T, int(self.which or CONTEXTS[0])) if self.op == "attention" else self.T
        heads = dict(zip("AJDV", m.heads, strict=True)) | {"B": 1, "S": keys, "R": m.angles}
        if self.op == "rope" and m.low_rank:
            heads["D"] = 2 * m.angles  # the other elements of such a key are not a head of the projection
        return {"T": rows, "E": m.E, "K": m.K, "H": H, "I": m.I, "N": N, "U": 1} | heads

    @property
    def letters(self) -> set[str]:
        """The sizes that it depends on."""
        if self.op == "block":
            return set("EKHI")
        found = {
            letter
            for letters in (*self.shapes.values(), *arguments.outputs(self.op, self.shapes))
            for letter in letters
        }
        return found | set("I" if "G" in found else "") | set("K" if self.op == "glu" else "")

    def size(self, letters: str) -> tuple[int, ...]:
        return arguments.size(letters, self.dims)

    def dtype_of(self, argument: str) -> torch.dtype:
        if self.op in ARGUMENTS and ARGUMENTS[self.op][argument].kind == "float32":
            return torch.float32
        return {"ids": torch.int32, "weights": torch.float32}.get(argument, self.dtype)

    @property
    def sets(self) -> int:
        """The number of sets of inputs: enough that caches hold little of the next one."""
        own = sum(self.bytes(name) for name in self.shapes if name not in EXPERTS)
        return min(16, -(-ROTATED // max(1, own)))

    @property
    def weights(self) -> list[str]:
        """The arguments that may be packed."""
        return list(arguments.weights(self.op)) if self.op in ARGUMENTS else []

    def bytes(self, name: str) -> int:
        """The size of an argument; a packed weight consists of several tensors."""
        size = self.size(self.shapes[name])
        if self.packing and name in self.weights:
            return self.packing.bytes(*size)
        return prod(size) * self.dtype_of(name).itemsize

    @property
    def written(self) -> int:
        """Bytes of the outputs."""
        if self.op == "block":
            return prod(self.size("TH")) * self.dtype.itemsize
        in_place = arguments.written(self.op, self.shapes)
        returned = arguments.outputs(self.op, self.shapes)[: -len(in_place) or None]
        size = 4 if self.op in ROUTERS else self.dtype.itemsize
        return sum(prod(self.size(s)) for s in returned) * size + sum(self.bytes(name) for name in in_place)

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products."""
        m = self.model
        if self.layer:
            return 8 * prod(self.size("TADV")) if self.op == "linear_attention_" else 0
        router, experts = 2 * self.T * m.E * m.H, 6 * self.T * m.K * m.H * m.I
        block = router + experts + 6 * self.T * m.H * m.S
        linear = 2 * prod(self.size("TNH"))
        A, T, S, D, V = self.size("ATSDV")
        attention = 2 * A * (T * S - T * (T - 1) // 2) * (D + V)  # only visible keys
        return {"gate": router, "experts": experts, "block": block, "linear": linear, "attention": attention}.get(
            self.op, 0
        )


class RandomTensors:
    """Tensors of normal random numbers. One tile of them is repeated, which takes as long as a copy. Its length is a
    prime number, so that no two rows of a weight are equal."""

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

    def sample_ids(self, T: int, E: int, K: int) -> Tensor:
        """K distinct experts for each token, as a router gives them."""
        scores = torch.rand(T, E, generator=self.random)
        return scores.topk(K).indices.int().to(self.tile.device)

    def argument(self, call: Call, name: str, letters: str) -> Tensor:
        size = call.size(letters)
        if name == "ids":
            return self.sample_ids(*call.size("TEK"))
        if name == "weights":
            return self(*size).float().softmax(-1)
        if name == "router_weight" or name in call.weights:
            return self(*size, scale=size[-1] ** -0.5)
        return self(*size).to(call.dtype_of(name))

    def packed(self, packing: Packing, name: str, *shape: int) -> dict[str, Tensor]:
        """A packed weight with its scales and offsets, by their argument names."""
        parts = packing.weight(*shape, generator=self.random)
        named = zip((name, *arguments.scale_names(name)), parts, strict=True)
        return {part: tensor.to(self.tile.device) for part, tensor in named if tensor is not None}


def halves(call: Call, packed: Tensor) -> dict[str, Tensor]:
    """glu's arguments as in a layer: views of one packed tensor."""
    interleaved = call.model.experts.get("interleaved")
    gate, up = (packed[:, ::2], packed[:, 1::2]) if interleaved else packed.chunk(2, -1)
    return {"gate": gate, "up": up}


def joined_heads(call: Call, noise: Callable[..., Tensor]) -> dict[str, Tensor]:
    """rope's arguments as in a layer: queries and keys are views of one projection, which also contains values."""
    (B, T, A, D), (J,) = call.size("BTAD"), call.size("J")
    heads = noise(B, T, A + 2 * J, D)
    rest = {name: noise(*call.size(letters)) for name, letters in call.shapes.items() if name not in ("q", "k")}
    return {"q": heads[:, :, :A], "k": heads[:, :, A : A + J]} | rest


def inputs(call: Call, noise: RandomTensors) -> dict[str, Tensor]:
    """One set of arguments, without the experts' weights."""
    if call.op == "glu":
        return halves(call, noise(*call.size("TG")))
    if call.op == "rope":
        return joined_heads(call, noise)
    found = of_projections(call, noise) if call.layer else {}
    for name, letters in call.shapes.items():
        if name in EXPERTS or name in found:
            continue
        if call.packing and name in call.weights:
            found |= noise.packed(call.packing, name, *call.size(letters))
        else:
            found[name] = noise.argument(call, name, letters)
    return found


def moved(*tensors: Tensor | None) -> int:
    """The bytes of the tensors' own elements."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


# ------------------------------------------------------------------------------------------------ the selected rows


def wanted_ops(options: Namespace) -> list[str]:
    """Those of --ops. The default is all ops; with --model its block and experts; with --formats the ops of
    DECODING."""
    return options.ops or list(WHOLE if options.model else DECODING if options.formats else OPS)


def wanted_formats(options: Namespace) -> list[str]:
    return options.formats or ["dense"]


def takes_format(op: str, format: str) -> bool:
    return format == "dense" or op == "block" or arguments.takes_formats(op)


def rows_of(op: str, options: Namespace) -> list[tuple[str, str]]:
    """The model and `Call.which` of each row. Only the time of `route` depends on the number of experts alone: without
    --model it also has rows for a model with many experts."""
    if op == "route" and not options.model:
        return [(name, "") for name in (DEFAULT, MANY_EXPERTS)]
    name = options.model or DEFAULT
    return [(name, which) for which in choices(op, name)]


def choices(op: str, name: str) -> tuple[str, ...]:
    """The values of `Call.which` of an op's rows."""
    return {"linear": tuple(MODELS[name].linears), "attention": CONTEXTS, "linear_attention_": tuple(LAYERS)}.get(
        op, ("",)
    )


def tokens_of(op: str, which: str) -> tuple[int, ...]:
    """The default of --tokens. The head gets few tokens even in a prefill, the last one of each sequence; the long
    context is measured for one token."""
    tokens = linear_attention.TOKENS if layer_of(op, which) else TOKENS[op in DECODING]
    return {"head": tokens[:-1], CONTEXTS[-1]: (1,)}.get(which, tokens)


def calls_of(options: Namespace, models: dict[tuple[torch.dtype, str], Model]) -> list[Call]:
    """All rows; `models` has the models of the rows in WHOLE. Rows with the same dtype and format follow each other, so
    that the experts' weights are made once."""
    ops, formats = sorted(wanted_ops(options), key=OPS.index), wanted_formats(options)
    for op in ops:
        if not any(takes_format(op, format) for format in formats):
            raise CannotRun(f"--ops {op}: it takes no packed weights, got --formats {' '.join(formats)}")
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
                multiple = f"a multiple of {call.packing.whole_columns} columns, and {call.name} has {columns}"
                raise CannotRun(f"--formats {call.format}: its weights must have {multiple}")
    return calls
