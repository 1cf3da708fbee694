"""The ops that only patched models use: `rope` and `attention` over the rows of a cache, and a product of each head."""

import pytest
import torch
from torch import Tensor

from checks import assert_matches
from torch_moe_metal import quantize, reference
from torch_moe_metal.rounding import normed

ops = torch.ops.moe_metal
Room = torch.classes.moe_metal.Room
B, A, D, R, EPS = 2, 4, 10, 3, 1e-5
NORMS = ("q_norm_weight", "k_norm_weight")
LATENTS = {"norms_v": True, "given": ("v_norm_weight", "q_first")}

#: Options of `_rope_into`; the other arguments that are given; whether there are angles.
OPTIONS = {
    "plain": {},
    "norms": {"given": NORMS},
    "norms_last": {"given": NORMS, "norms_last": True},
    "one_norm_last": {"given": NORMS[:1], "norms_last": True, "v_scale": 0.7},
    "pairs_stay": {"interleaved": True, "pairs_stay": True, "given": NORMS},
    "values_normed": {"norms_v": True, "given": NORMS},
    "no_angles": {"angles": False, "v_scale": 0.7},
    "no_angles_norms": {"angles": False, "given": NORMS},
    "latents": LATENTS | {"interleaved": True},
    "latents_pairs_stay": LATENTS | {"interleaved": True, "pairs_stay": True},
    "latents_no_angles": LATENTS | {"angles": False},
}


class Call:
    """A call of `_rope_into`. Queries, keys and values are views of one projection, and the cache has three rows."""

    def __init__(self, device: str, dtype: torch.dtype, angles: bool = True, given: tuple = (), **options):
        self.random = torch.Generator().manual_seed(5)
        self.options, self.latents = options, "q_first" in given
        J, V = (1, 12) if self.latents else (2, 6)
        sizes = {"q": (A, D), "k": (J, D), "v": (J, V), "q_first": (A, V)}
        self.args = {name: part for name, part in self.heads(dtype, sizes).items() if name != "q_first" or self.latents}
        self.args |= dict.fromkeys(("cos", "sin"))
        if angles:
            self.args |= {name: self.draw(torch.float32, 1, 1, R) for name in ("cos", "sin")}
        widths = {"q_norm_weight": D, "k_norm_weight": D, "v_norm_weight": V}
        self.args |= {name: self.draw(torch.float32, widths[name]) for name in given if name in widths}
        self.stored = [self.draw(dtype, B, J, 3, width) for width in ((V, D) if self.latents else (D, V))]
        self.room = Room(*(each.to(device) for each in self.stored), self.latents, -1)
        self.device = device

    def draw(self, dtype: torch.dtype, *size: int) -> Tensor:
        return torch.randn(size, generator=self.random).to(dtype)

    def heads(self, dtype: torch.dtype, sizes: dict) -> dict[str, Tensor]:
        widths = [heads * width for heads, width in sizes.values()]
        parts = self.draw(dtype, B, 1, sum(widths)).split(widths, -1)
        return {name: part.view(B, 1, *size) for (name, size), part in zip(sizes.items(), parts, strict=True)}

    def __call__(self) -> Tensor:
        args = {name: None if x is None else x.to(self.device) for name, x in self.args.items()}
        return ops._rope_into(**args, room=self.room, eps=EPS, **self.options)

    def expected(self) -> list[Tensor]:
        """In float64: the output, and the stored keys and values."""
        args = {name: None if x is None else x.double() for name, x in self.args.items()}
        v = args["v"] * self.options.get("v_scale", 1.0)
        if self.options.get("norms_v"):
            v = normed(v, EPS) * args.get("v_norm_weight", 1.0)
        q, k = (self.turned(args[name], args, args.get(f"{name}_norm_weight")) for name in "qk")
        if self.latents:
            q, k, v = torch.cat([args["q_first"], q], -1), v, k
        new = (x.transpose(1, 2) for x in (k, v))
        return [q.transpose(1, 2), *(torch.cat([a.double(), b], 2) for a, b in zip(self.stored, new, strict=True))]

    def turned(self, x: Tensor, args: dict, weight: Tensor | None) -> Tensor:
        last = self.options.get("norms_last", False)
        x = normed(x, EPS) * weight if weight is not None and not last else x
        if args["cos"] is not None:
            x = reference.rotated(x, args["cos"], args["sin"], None, EPS, self.options.get("interleaved", False))
            if self.options.get("pairs_stay"):
                pairs = x[..., : 2 * R].unflatten(-1, (2, R)).transpose(-1, -2).flatten(-2)
                x = torch.cat([pairs, x[..., 2 * R :]], -1)
        return normed(x, EPS) * weight if weight is not None and last else x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("options", OPTIONS)
def test_rope_into_and_attention_over(options: str, dtype: torch.dtype, device):
    call = Call(device, dtype, **OPTIONS[options])
    q = call()
    assert_matches([q, *call.room.shown()], call.expected())
    q, keys, values = q.cpu().double(), *(x.cpu().double() for x in call.room.shown())
    keys, values = (torch.cat([keys, values], -1), keys) if call.latents else (keys, values)
    expected = reference.attention(q, keys, values, scale=0.3)
    assert_matches([ops._attention_over(q.to(device, dtype), call.room, scale=0.3)], [expected])


@pytest.mark.parametrize("options", ["norms_last", "pairs_stay", "values_normed", "latents"])
def test_rope_into_of_values_that_are_not_finite(options: str, device):
    """They stay in their head."""
    call = Call(device, torch.float32, **OPTIONS[options])
    call.args["q"][0, 0, 1, -1], call.args["k"][1, 0, 0, 0] = torch.nan, torch.inf
    call.args["v"][1, 0, 0, 2] = -torch.inf
    assert_matches([call(), *call.room.shown()], call.expected())


BAD = {
    "q_first: expected a tensor with this room": {"given": ()} | {"latents": True},
    "q_first: expected none with this room": {"given": ("q_first",)} | {"latents": False},
    "pairs_stay: expected False where interleaved is False": {"pairs_stay": True},
    "norms_last: expected False with interleaved pairs": {"norms_last": True, "interleaved": True},
    "v_norm_weight: expected none without norms_v": {"given": ("v_norm_weight",)},
    "v_scale: expected a finite number": {"v_scale": torch.inf},
}


@pytest.mark.parametrize("message", BAD)
def test_rope_into_refuses(message: str, device):
    options = dict(BAD[message])
    latents = options.pop("latents", None)
    call = Call(device, torch.float32, **options)
    if latents is not None:
        other = Call(device, torch.float32, **(LATENTS if latents else {}))
        call.room = other.room
    with pytest.raises(RuntimeError, match=message):
        call()
    assert call.room.rows() == 3


WEIGHTS = {"dense": (), "affine": (4, 32), "q8_0": (), "nvfp4": (), "fp8": ()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("format", WEIGHTS)
def test_linear_of_heads(format: str, dtype: torch.dtype, device):
    """Of views: a part of each row of x, and of each head's rows of a weight."""
    random = torch.Generator().manual_seed(6)
    heads, H, rows = 3, 128, 128 if format == "fp8" else 5
    whole = torch.randn(heads * 2 * rows, H, generator=random) * H**-0.5
    parts = [whole.to(dtype)] if format == "dense" else quantize(whole, format, *WEIGHTS[format])
    halves = [None if part is None else part.unflatten(0, (heads, -1)).chunk(2, 1)[1] for part in parts]
    weight = reference.dequantize(*halves, format=format, dtype=torch.float64)
    named = {n: x.to(device) for n, x in zip(("weight", "scale", "offset"), halves, strict=False) if x is not None}
    for tokens in (1, 5):
        x = torch.randn(tokens, heads, H + 4, generator=random).to(dtype)[..., 4:]
        found = ops._linear_of_heads(x.to(device), **named, format=format)
        assert_matches([found], [torch.einsum("tah,anh->tan", x.double(), weight)])


def test_linear_of_heads_refuses(device):
    with pytest.raises(RuntimeError, match=r"weight: expected shape \[A, N, H\] with A = 2, H = 4"):
        ops._linear_of_heads(torch.zeros(1, 2, 4, device=device), torch.zeros(3, 5, 4, device=device))
