"""Calls that the ops must refuse, with the messages of their errors."""

import pytest
import torch
from torch import Tensor

from cases.case import BFLOAT
from each_op import IN_PLACE
from torch_moe_metal import formats


def bad(op: str, message: str, **changes):
    """`changes`: for an argument, a function of the good tensor, or the bad value itself."""
    return pytest.param(op, message, changes, id=f"{op}-{'+'.join(changes)}-{message.split(', got')[0][:50]}")


def cut(tensor: Tensor) -> Tensor:
    return tensor[..., :-1]


def first_token(tensor: Tensor) -> Tensor:
    return tensor[:1]


def no_columns(tensor: Tensor) -> Tensor:
    return tensor[..., :0]


def extra_dim(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0)


# The good arguments are sample_odd's: T 6, E 13, K 3, H 67, I 19, float32.
BAD = [
    bad("gate", "hidden: expected float32, float16 or bfloat16, got float64", hidden=Tensor.double),
    bad("gate", "hidden: expected float32, float16 or bfloat16, got int32", hidden=Tensor.int),
    bad("gate", "hidden: expected float32, float16 or bfloat16, got uint8", hidden=Tensor.byte),
    bad("route", "logits: expected float32, float16 or bfloat16, got complex64", logits=Tensor.cfloat),
    bad("gate", "hidden: expected shape [*, H], got []", hidden=torch.tensor(1.0)),
    bad("gate", "hidden: expected H >= 1, got 0", hidden=no_columns, router_weight=no_columns, norm_weight=no_columns),
    bad("gate", "router_weight: expected shape [E, H] with E = 13, H = 67, got [13, 66]", router_weight=cut),
    bad("gate", "router_weight: expected shape [E, H] with H = 67, got [1, 13, 67]", router_weight=extra_dim),
    bad("gate", "router_weight: expected float32, the dtype of hidden; got float16", router_weight=Tensor.half),
    bad("gate", "norm_weight: expected shape [H] with H = 67, got [66]", norm_weight=cut),
    bad("gate", "router_bias: expected shape [E] with E = 13, got [12]", router_bias=cut),
    bad("gate", "select_bias: expected shape [E] with E = 13, got [12]", select_bias=cut),
    bad("gate", "per_expert_scale: expected float32, the dtype of hidden; got bfloat16",
        per_expert_scale=Tensor.bfloat16),
    bad("gate", "top_k: expected 1 to 13 (E), got 0", top_k=0),
    bad("gate", "top_k: expected 1 to 13 (E), got 14", top_k=14),
    bad("gate", "eps: expected a finite number >= 0, got -1", eps=-1.0),
    bad("gate", "eps: expected a finite number >= 0, got nan", eps=float("nan")),
    bad("gate", "eps: expected a finite number >= 0, got 1e+39, which is inf as float32", eps=1e39),
    bad("gate", "scaling_factor: expected a finite number, got nan", scaling_factor=float("nan")),
    bad("route", "logits: expected float32, float16 or bfloat16, got int64", logits=Tensor.long),
    bad("route", "E: expected 1 to 1024 (the number of experts), got 0", logits=no_columns, select_bias=no_columns,
        per_expert_scale=no_columns),
    bad("route", "E: expected 1 to 1024 (the number of experts), got 1025",
        logits=torch.zeros(2, 1025), select_bias=None,
        per_expert_scale=None),
    bad("route", "select_bias: expected shape [E] with E = 13, got [6, 13]", select_bias=lambda t: t.expand(6, 13)),
    bad("route", "top_k: expected 1 to 13 (E), got -1", top_k=-1),
    bad("route", "n_group: expected 1 to 13 (E), got 0", n_group=0),
    bad("route", "n_group: expected a divisor of E = 13, got 2", n_group=2),
    bad("route", "topk_group: expected 1 to 13 (n_group), got 14", n_group=13, topk_group=14),
    bad("route", "topk_group: expected 1 to 1 (n_group), got 0", topk_group=0),
    bad("route", "top_k: expected 1 to 2 (the experts in topk_group groups), got 3", n_group=13, topk_group=2),
    bad("route", "scoring: expected one of softmax, sigmoid, sqrt_softplus; got 'tanh'", scoring="tanh"),
    bad("route", "renormalize: expected one of none, before_scale, after_scale; got 'yes'", renormalize="yes"),
    bad("route", r"scoring: expected one of softmax, sigmoid, sqrt_softplus; got 'soft\x00max'", scoring="soft\0max"),
    bad("route", "group_score: expected one of top2_sum, max; got ''", group_score=""),
    bad("route", "softcap: expected a finite number >= 0, got -5", softcap=-5.0),
    bad("route", "sum_eps: expected a finite number >= 0, got -1", sum_eps=-1.0),
    bad("route", "softcap: expected a finite number >= 0, got -1e-46, which is -0 as float32", softcap=-1e-46),
    bad("route", "softcap: expected a finite number >= 0, got 1e+39, which is inf as float32", softcap=1e39),
    bad("route", "softcap: expected 0 or a finite number > 0, got 1e-46, which is 0 as float32", softcap=1e-46),
    bad("route", "scaling_factor: expected a finite number, got -inf", scaling_factor=-float("inf")),
    bad("route", "scaling_factor: expected a finite number, got 1e+39, which is inf as float32", scaling_factor=1e39),
    bad("glu", "gate: expected float32, float16 or bfloat16, got bool", gate=Tensor.bool),
    bad("glu", "up: expected float32, the dtype of gate; got float16", up=Tensor.half),
    bad("glu", "up: expected shape [*, I] with * = [6], I = 19, got [6, 18]", up=cut),
    bad("glu", "up: expected shape [*, I] with * = [6], I = 19, got [1, 19]", up=first_token),
    bad("glu", "gate: expected I >= 1, got 0", gate=no_columns, up=no_columns),
    bad(
        "glu",
        "activation: expected one of silu, gelu, gelu_tanh, relu2, swiglu_oai, sigmoid; got 'swish'",
        activation="swish",
    ),
    bad("glu", "limit: expected a number > 0 or None, got 0", limit=0.0),
    bad("glu", "limit: expected a number > 0 or None, got nan", limit=float("nan")),
    bad("glu", "limit: expected a number > 0 or None, got 1e-46, which is 0 as float32", limit=1e-46),
    bad("glu", "alpha: expected a finite number, got nan", alpha=float("nan")),
    bad("glu", "alpha: expected a finite number, got -1e+39, which is -inf as float32", alpha=-1e39),
    bad("experts", "x: expected H >= 1, got 0", x=no_columns),
    bad("experts", "weights: expected shape [*, K] with * = [6], got [1, 3]", weights=first_token),
    bad("experts", "weights: expected float32, the dtype of x; got float16", weights=Tensor.half),
    bad("experts", "ids: expected shape [*, K] with * = [6], K = 3, got [6, 2]", ids=cut),
    bad("experts", "ids: expected int32 or int64, got float32", ids=Tensor.float),
    bad("experts", "ids: expected int32 or int64, got int16", ids=Tensor.short),
    bad("experts", "ids: expected int32 or int64, got int8", ids=Tensor.char),
    bad("experts", "ids: expected K >= 1, got 0", weights=no_columns, ids=no_columns),
    bad("experts", "down: expected shape [E, H, I] with E = 13, H = 67, got [13, 66, 19]", down=lambda t: t[:, :-1]),
    bad("experts", "down: expected shape [E, I, H] with E = 13, I = 67, H = 67, got [13, 67, 19]", transposed=True),
    bad("experts", "down: expected float32, the dtype of x; got bfloat16", down=Tensor.bfloat16),
    bad("experts", "down: expected 1 to 4611686018427387903 (its inner size, I), got 0", down=no_columns),
    bad("experts", "down: expected 1 to 1024 (its number of experts, E), got 0", down=lambda t: t[:0]),
    bad("experts", "gate_up: expected shape [E, 2I, H] with E = 13, 2I = 38, H = 67, got [13, 37, 67]",
        gate_up=lambda t: t[:, :-1]),
    bad("experts", "gate_up: expected shape [E, 2I, H] with E = 13, 2I = 38, H = 67, got [12, 38, 67]",
        gate_up=lambda t: t[:-1]),
    bad("experts", "gate_up_bias: expected shape [E, 2I] with E = 13, 2I = 38, got [13, 37]", gate_up_bias=cut),
    bad("experts", "down_bias: expected shape [E, H] with E = 13, H = 67, got [13, 66]", down_bias=cut),
    bad("experts", "shared: expected shape [*, H] with * = [6], H = 67, got [1, 67]", shared=first_token),
    bad("experts", "shared: expected float32, the dtype of x; got float16", shared=Tensor.half),
    bad("experts", "shared_gate: expected shape [*] with * = [6], got [6, 1]", shared_gate=lambda t: t.unsqueeze(-1)),
    bad("experts", "shared_gate: expected `shared` as well, got none", shared=None),
    bad("experts", "residual: expected shape [*, H] with * = [6], H = 67, got [6, 66]", residual=cut),
    bad("experts", "activation: expected one of silu, gelu, gelu_tanh, relu2, swiglu_oai, sigmoid; got 'relu'",
        activation="relu"),
    bad("experts", "limit: expected a number > 0 or None, got -7", limit=-7.0),
    bad("experts", "alpha: expected a finite number, got inf", alpha=float("inf")),
    bad("weighted_sum", "slots: expected shape [*, K, H], got [67]", slots=lambda t: t[0, 0]),
    bad("weighted_sum", "slots: expected K >= 1, got 0", slots=lambda t: t[:, :0], weights=no_columns),
    bad("weighted_sum", "slots: expected H >= 1, got 0", slots=no_columns),
    bad("weighted_sum", "weights: expected shape [*, K] with * = [6], K = 3, got [6, 2]", weights=cut),
    bad("weighted_sum", "shared: expected shape [*, H] with * = [6], H = 67, got [6, 66]", shared=cut),
    bad("weighted_sum", "shared_gate: expected `shared` as well, got none", shared=None),
    bad("weighted_sum", "shared_gate: expected shape [*] with * = [6], got [5]", shared_gate=cut),
    bad("weighted_sum", "residual: expected float32, the dtype of slots; got float64", residual=Tensor.double),
    bad("weighted_sum_norm_add", "norm_weight: expected shape [H] with H = 67, got [66]", norm_weight=cut),
    bad("weighted_sum_norm_add", "residual: expected shape [*, H] with * = [6], H = 67, got [1, 67]",
        residual=first_token),
    bad("weighted_sum_norm_add", "eps: expected a finite number >= 0, got inf", eps=float("inf")),
    bad("weighted_sum_dual_norm_add", "moe_norm_weight: expected shape [H] with H = 67, got [66]", moe_norm_weight=cut),
    bad("weighted_sum_dual_norm_add", "residual_norm_weight: expected float32, the dtype of slots; got float16",
        residual_norm_weight=Tensor.half),
    bad("weighted_sum_dual_norm_add", "eps: expected a finite number >= 0, got -1", eps=-1.0),
]  # fmt: skip


HEADS = "B = 2, J = 2, S = 21"
# sample_odd of attention: B 2, A 6, J 2, T 6, S 21, D 19, V 23.
BAD += [
    bad("attention", "q: expected float32, float16 or bfloat16, got float64", q=Tensor.double),
    bad("attention", "q: expected shape [B, A, T, D], got [6, 6, 19]", q=lambda t: t[0]),
    bad("attention", "q: expected A >= 1, got 0", q=lambda t: t[:, :0]),
    bad("attention", "q: expected D >= 1, got 0", q=no_columns, k=no_columns),
    bad("attention", f"k: expected shape [B, J, S, D] with {HEADS}, D = 19, got [2, 2, 21, 18]", k=cut),
    bad("attention", "k: expected shape [B, J, S, D] with B = 2, D = 19, got [1, 2, 21, 19]", k=first_token),
    bad("attention", "k: expected float32, the dtype of q; got bfloat16", k=Tensor.bfloat16),
    bad("attention", "k: expected J >= 1, got 0", k=lambda t: t[:, :0]),
    bad("attention", "k: expected J to be a divisor of A = 6, got 4", k=lambda t: t.repeat(1, 2, 1, 1)),
    bad("attention", f"v: expected shape [B, J, S, V] with {HEADS}, got [2, 1, 21, 23]", v=lambda t: t[:, :1]),
    bad("attention", f"v: expected shape [B, J, S, V] with {HEADS}, got [2, 2, 20, 23]", v=lambda t: t[:, :, 1:]),
    bad("attention", "v: expected float32, the dtype of q; got float16", v=Tensor.half),
    bad("attention", "v: expected V >= 1, got 0", v=no_columns),
    bad("attention", "mask: expected shape [B, A, T, S] with B = 2, A = 6, T = 6, S = 21, and 1 for B or A; got "
        "[2, 6, 6, 20]", mask=cut),
    bad("attention", "mask: expected shape [B, A, T, S] with B = 2, A = 6, T = 6, S = 21, and 1 for B or A; got "
        "[2, 2, 6, 21]", mask=lambda t: t[:, :2]),
    bad("attention", "mask: expected shape [B, A, T, S] with B = 2, A = 6, T = 6, S = 21, and 1 for B or A; got "
        "[1, 1, 1, 21]", mask=lambda t: t[:1, :1, :1]),
    bad("attention", "mask: expected shape [B, A, T, S] with B = 2, A = 6, T = 6, S = 21, and 1 for B or A; got "
        "[6, 21]", mask=lambda t: t[0, 0]),
    bad("attention", "mask: expected bool or float32, the dtype of q; got float16", mask=Tensor.half),
    bad("attention", "mask: expected bool or float32, the dtype of q; got int64", mask=Tensor.long),
    bad("attention", "mask: expected bool, float32 or float16, the dtype of q; got bfloat16", mask=Tensor.bfloat16,
        **dict.fromkeys("qkv", Tensor.half)),
    bad("attention", "sinks: expected shape [A] with A = 6, got [5]", sinks=cut),
    bad("attention", "sinks: expected float32, the dtype of q; got float64", sinks=Tensor.double),
    bad("attention", "scale: expected a finite number, got nan", scale=float("nan")),
    bad("attention", "scale: expected a finite number, got 1e+39, which is inf as float32", scale=1e39),
    bad("attention", "window: expected a number >= 0, got -1", window=-1),
    bad("attention", "window: expected 0 where causal is False, got 9", causal=False),
    bad("attention", "softcap: expected a finite number >= 0, got -5", softcap=-5.0),
    bad("attention", "softcap: expected 0 or a finite number > 0, got 1e-46, which is 0 as float32", softcap=1e-46),
]  # fmt: skip


# sample_odd of rope: B 2, A 6, J 2, T 6, D 19, R 7.
ANGLES = "expected shape [B, T, R] with B = 2, T = 6"
BAD += [
    bad("rope", "q: expected float32, float16 or bfloat16, got float64", q=Tensor.double),
    bad("rope", "q: expected shape [B, T, A, D], got [6, 6, 19]", q=lambda t: t[0]),
    bad("rope", "q: expected A >= 1, got 0", q=lambda t: t[:, :, :0]),
    bad("rope", "q: expected 2 to 9223372036854775807 (its size of a head, D), got 1", q=lambda t: t[..., :1]),
    bad("rope", "k: expected shape [B, T, J, D] with B = 2, T = 6, J = 2, D = 19, got [2, 6, 2, 18]", k=cut),
    bad("rope", "k: expected shape [B, T, J, D] with B = 2, T = 6, D = 19, got [1, 6, 2, 19]", k=first_token),
    bad("rope", "k: expected shape [B, T, J, D] with B = 2, T = 6, D = 19, got [2, 5, 2, 19]", k=lambda t: t[:, 1:]),
    bad("rope", "k: expected float32, the dtype of q; got float16", k=Tensor.half),
    bad("rope", "k: expected J >= 1, got 0", k=lambda t: t[:, :, :0]),
    bad("rope", f"cos: {ANGLES}, and 1 for B; got [6, 7]", cos=lambda t: t[0]),
    bad("rope", f"cos: {ANGLES}, and 1 for B; got [2, 1, 7]", cos=lambda t: t[:, :1]),
    bad("rope", f"cos: {ANGLES}, and 1 for B; got [4, 6, 7]", cos=lambda t: t.repeat(2, 1, 1)),
    bad("rope", "cos: expected float32, the dtype of q; got bfloat16", cos=Tensor.bfloat16),
    bad("rope", f"sin: {ANGLES}, R = 7, and 1 for B; got [2, 6, 6]", sin=cut),
    bad("rope", f"sin: {ANGLES}, R = 7, and 1 for B; got [0, 6, 7]", sin=lambda t: t[:0]),
    bad("rope", "sin: expected float32, the dtype of q; got int64", sin=Tensor.long),
    bad("rope", "cos: expected 1 to 9 (the pairs of a head, R), got 14",
        **dict.fromkeys(("cos", "sin"), lambda t: torch.cat([t, t], -1))),
    bad("rope", "cos: expected 1 to 9 (the pairs of a head, R), got 0", cos=no_columns, sin=no_columns),
    bad("rope", "q_norm_weight: expected shape [D] with D = 19, got [18]", q_norm_weight=cut),
    bad("rope", "q_norm_weight: expected shape [A, D] with A = 6, D = 19, got [2, 19]",
        q_norm_weight=lambda t: t.expand(2, 19)),
    bad("rope", "k_norm_weight: expected shape [J, D] with J = 2, D = 19, got [6, 19]",
        k_norm_weight=lambda t: t.expand(6, 19)),
    bad("rope", "k_norm_weight: expected shape [D] with D = 19, got [1, 2, 19]",
        k_norm_weight=lambda t: t.expand(1, 2, 19)),
    bad("rope", "k_norm_weight: expected float32, the dtype of q; got float64", k_norm_weight=Tensor.double),
    bad("rope", "eps: expected a finite number >= 0, got -1", eps=-1.0),
    bad("norm", "input: expected float32, float16 or bfloat16, got float64", input=Tensor.double),
    bad("norm", "input: expected shape [*, H], got []", input=torch.tensor(1.0)),
    bad("norm", "input: expected H >= 1, got 0", input=no_columns, weight=None),
    bad("norm", "weight: expected shape [H] with H = 67, got [66]", weight=cut),
    bad("norm", "weight: expected float32, the dtype of input; got float16", weight=Tensor.half),
    bad("norm", "eps: expected a finite number >= 0, got -0.001", eps=-0.001),
    bad("norm", "eps: expected a finite number >= 0, got 1e+39, which is inf as float32", eps=1e39),
]  # fmt: skip


def every_second(tensor: Tensor) -> Tensor:
    """The same values, two elements apart."""
    return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]


def floats(tensor: Tensor) -> Tensor:
    return tensor.float()


WIDTHS = "bits 2, 3, 4, 5, 6 or 8"
GROUPS = "group 16, 32, 64 or 128"
FORMATS = f"format: expected one of {', '.join(dict.fromkeys(row.name for row in formats.ROWS))}; got "
# sample_affine4: T 6, E 7, K 3, H 96, I 32, N 37, groups of 32, float32; sample_mxfp4: H 160, I 96, N 33, bfloat16;
# sample_fp8: H 130, I 70, N 200, float16; sample_nvfp4: H 112, I 48, N 35, float16; sample_q4_k: H 256, I 256, N 34,
# bfloat16, and down in q6_k.
BAD += [
    bad("linear", FORMATS + "'int4'", format="int4"),
    bad("linear", "x: expected H >= 1, got 0", x=no_columns, weight=no_columns),
    bad("linear", "weight: expected shape [N, H] with N = 37, H = 67, got [37, 66]", weight=cut),
    bad("linear", "weight: expected shape [N, H] with H = 67, got [1, 37, 67]", weight=extra_dim),
    bad("linear", "weight: expected N >= 1, got 0", weight=lambda t: t[:0], bias=None),
    bad("linear", "weight: expected float32, the dtype of x; got float16", weight=Tensor.half),
    bad("linear", "weight: expected float32, float16 or bfloat16 in format dense, got uint8", weight=Tensor.byte),
    bad("linear", "bias: expected shape [N] with N = 37, got [36]", bias=cut),
    bad("linear", "bias: expected float32, the dtype of x; got float16", bias=Tensor.half),
    bad("linear", "scale: expected none with format dense, got a tensor", scale=torch.ones(1)),
    bad("linear", "offset: expected none with format dense, got a tensor", offset=torch.ones(1)),
    bad("linear", "group_size: expected 0 with format dense, got 32", group_size=32),
    bad("experts", "group_size: expected 0 with format dense, got -1", group_size=-1),
    bad("dequantize", FORMATS + "''", format=""),
    bad("dequantize", "weight: expected shape [*, N, C], got [67]", weight=lambda t: t[0]),
    bad("dequantize", "dtype: expected float32, float16 or bfloat16, got int32", dtype=torch.int32),
    bad("experts", "gate_up_scale: expected none with format dense, got a tensor", gate_up_scale=torch.ones(1)),
    bad("experts", "down_offset: expected none with format dense, got a tensor", down_offset=torch.ones(1)),
]
for _sample, _data, _letters in (("linear affine4", "weight", "[N"), ("experts affine4", "gate_up", "[E, 2I")):
    _beside = {"weight": ""}.get(_data, f"{_data}_")
    _rows, _sizes = ("37", "N = 37, ") if _data == "weight" else ("7, 64", "E = 7, 2I = 64, ")
    _scale, _offset = f"{_beside}scale", f"{_beside}offset"
    BAD += [
        bad(_sample, f"{_data}: expected shape {_letters}, H * bits / 8] with {_sizes}H = 96, and {WIDTHS}; got "
            f"[{_rows}, 47]", **{_data: cut}),
        bad(_sample, f"{_data}: expected shape {_letters}, H * bits / 8] with {_sizes}H = 96, and {WIDTHS}; got "
            f"[{_rows}, 12]", **{_data: lambda t: t[..., :12]}),
        bad(_sample, f"{_data}: expected shape {_letters}, H * bits / 8] with {_sizes}H = 96, and {WIDTHS}; got "
            f"[{_rows}, 84]", **{_data: lambda t: t.repeat_interleave(2, -1)[..., :84]}),
        bad(_sample, f"{_data}: expected shape {_letters}, H * bits / 8] with {_sizes}H = 96, and {WIDTHS}; got "
            f"[{_rows}, 0]", **{_data: no_columns}),
        bad(_sample, f"{_data}: expected shape {_letters}, H * bits / 32] with {_sizes}H = 96, and {WIDTHS}; got "
            f"[{_rows}, 11]", **{_data: lambda t: t.view(torch.int32)[..., :-1]}),
        bad(_sample, f"{_data}: expected int32, uint32 or uint8 in format affine, got float32", **{_data: floats}),
        bad(_sample, f"{_data}: expected int32, uint32 or uint8 in format affine, got int8",
            **{_data: lambda t: t.view(torch.int8)}),
        bad(_sample, f"{_scale}: expected a tensor with format affine, got none", **{_scale: None}),
        bad(_sample, f"{_offset}: expected a tensor with format affine, got none", **{_offset: None}),
        bad(_sample, f"{_scale}: expected shape {_letters}, H / group] with {_sizes}H = 96, and {GROUPS}; got "
            f"[{_rows}, 2]", **{_scale: cut}),
        bad(_sample, f"{_scale}: expected shape {_letters}, H / group] with {_sizes}H = 96, and {GROUPS}; got "
            f"[{_rows}, 12]", **{_scale: lambda t: t.repeat_interleave(4, -1)}),
        bad(_sample, f"{_scale}: expected shape {_letters}, H / group] with {_sizes}H = 96, and {GROUPS}; got "
            f"[{_rows}, 0]", **{_scale: no_columns}),
        bad(_sample, f"{_scale}: expected float32, float16 or bfloat16 in format affine, got float64",
            **{_scale: Tensor.double}),
        bad(_sample, f"{_offset}: expected float32, the dtype of {_scale}; got float16", **{_offset: Tensor.half}),
        bad(_sample, f"{_offset}: expected shape [{_rows}, 3], the shape of {_scale}; got [{_rows}, 2]",
            **{_offset: cut}),
    ]  # fmt: skip
ONE_RUN = "expected rows of contiguous bytes, got strides "
BAD += [
    bad("linear affine4", "weight: " + ONE_RUN + "[96, 2]", weight=every_second),
    bad("linear affine4", "weight: " + ONE_RUN + "[1, 37]", weight=lambda t: t.t().contiguous().t()),
    bad("linear affine4", "weight: " + ONE_RUN + "[48, 0]", weight=lambda t: t[:, :1].expand(-1, 48)),
    bad("linear affine4", "weight: expected shape [N, H * bits / 8], got [1, 37, 48]", weight=extra_dim),
    bad("linear affine4", "weight: expected shape [N, H * bits / 8], got []", weight=lambda t: t[0, 0]),
    bad("linear affine4", "scale: expected shape [N, H / group] with N = 37, got [36, 3]", scale=lambda t: t[1:]),
    bad("linear affine4", "scale: expected shape [N, H / group] with N = 37, got []", scale=torch.tensor(1.0)),
    bad("linear affine4", "scale: expected uint8 in format mxfp4, got float32", format="mxfp4"),
    bad("linear affine4", "bias: expected shape [N] with N = 37, got [36]", bias=cut),
    bad("linear affine4", "group_size: expected 0, 16, 32, 64 or 128 with format affine, got 48", group_size=48),
    bad("linear affine4", "scale: expected shape [N, H / group] with N = 37, H = 96, and group 64; got [37, 3]",
        group_size=64),
    # The same bytes with half and with twice the bits.
    bad("linear affine4", "scale: expected shape [N, H / group] with N = 37, H = 192, and group 32; got [37, 3]",
        x=lambda t: torch.cat([t, t], 1), group_size=32),
    bad("linear affine4", "scale: expected shape [N, H / group] with N = 37, H = 48, and group 32; got [37, 3]",
        x=lambda t: t[:, :48], group_size=32),
    bad("experts affine4", "down_scale: expected shape [E, H, I / group] with E = 7, H = 96, I = 16, and group 32; got "
        "[7, 96, 1]", group_size=32, gate_up_bias=lambda t: t[:, ::2],
        **dict.fromkeys(("gate_up", "gate_up_scale", "gate_up_offset"), lambda t: t[:, ::2])),
    bad("experts affine4", "transposed: expected False with format affine, got True", transposed=True),
    bad("experts affine4", "gate_up: expected an even number of rows, 2I; got 63", gate_up=lambda t: t[:, 1:],
        gate_up_scale=lambda t: t[:, 1:], gate_up_offset=lambda t: t[:, 1:]),
    bad("experts affine4", "down: expected shape [E, H, I * bits / 8] with E = 7, H = 96, I = 32, and " + WIDTHS
        + "; got [7, 96, 15]", down=cut),
    bad("experts affine4", "down: expected shape [E, H, I * bits / 8] with E = 7, H = 96, got [6, 96, 16]",
        down=lambda t: t[1:]),
    bad("experts affine4", "down_scale: expected shape [E, H, I / group] with E = 7, H = 96, I = 32, and " + GROUPS
        + "; got [7, 96, 4]", down_scale=lambda t: t.repeat_interleave(4, -1)),
    bad("experts affine4", "down_scale: expected shape [E, H, I / group] with E = 7, H = 96, got [7, 95, 1]",
        down_scale=lambda t: t[:, 1:]),
    bad("experts affine4", "down_offset: expected shape [7, 96, 1], the shape of down_scale; got [7, 95, 1]",
        down_offset=lambda t: t[:, 1:]),
    bad("dequantize affine4", "bits: expected 2, 3, 4, 5, 6 or 8, got 7", bits=7),
    bad("dequantize affine4", "bits: expected 2, 3, 4, 5, 6 or 8, got 0", bits=0),
    bad("dequantize affine4", "scale: expected shape [*, N, C / group] with * = [], N = 37, C = 128, and " + GROUPS
        + "; got [37, 3]", bits=3),
    bad("dequantize affine4", "dtype: expected float32, float16 or bfloat16, got float64", dtype=torch.float64),
    bad("dequantize affine4", "scale: expected shape [*, N, C / group] with * = [], N = 37, got [7, 37, 3]",
        scale=lambda t: t.expand(7, -1, -1)),
    bad("linear mxfp4", "weight: expected shape [N, H / 2] with N = 33, H = 160, got [33, 79]", weight=cut),
    bad("linear mxfp4", "weight: expected shape [N, H / 32, 16] with N = 33, H = 160, got [33, 5, 15]",
        weight=lambda t: t.unflatten(-1, (5, 16))[..., 1:]),
    bad("linear mxfp4", "weight: expected shape [N, H / 32, 16] with N = 33, H = 160, got [33, 4, 16]",
        weight=lambda t: t.unflatten(-1, (5, 16))[:, 1:]),
    bad("linear mxfp4", "weight: expected shape [N, H / 32, 16] with N = 33, H = 160, got [33, 10, 8]",
        weight=lambda t: t.unflatten(-1, (10, 8))),
    bad("linear mxfp4", "weight: " + ONE_RUN + "[80, 1, 5]", weight=lambda t: t.unflatten(-1, (16, 5)).mT),
    bad("linear mxfp4", "weight: expected uint8 in format mxfp4, got int32", weight=lambda t: t.view(torch.int32)),
    bad("linear mxfp4", "scale: expected a tensor with format mxfp4, got none", scale=None),
    bad("linear mxfp4", "scale: expected uint8 in format mxfp4, got bfloat16", scale=Tensor.bfloat16),
    bad("linear mxfp4", "scale: expected shape [N, H / 32] with N = 33, H = 160, got [33, 4]", scale=cut),
    bad("linear mxfp4", "scale: expected shape [N, H / 32] with N = 33, H = 160, got [33, 10]",
        scale=lambda t: t.repeat_interleave(2, -1)),
    bad("linear mxfp4", "offset: expected none with format mxfp4, got a tensor", offset=torch.ones(1)),
    bad("linear mxfp4", "group_size: expected 0 or 32 with format mxfp4, got 64", group_size=64),
    bad("linear mxfp4", "weight: expected H to be a multiple of 32 in format mxfp4, got 144", x=lambda t: t[:, 16:],
        weight=lambda t: t[:, 8:]),
    bad("experts mxfp4", "down: expected shape [E, H, I / 2] with E = 7, H = 160, I = 96, got [7, 160, 47]", down=cut),
    bad("experts mxfp4", "down_scale: expected shape [E, H, I / 32] with E = 7, H = 160, I = 96, got [7, 160, 2]",
        down_scale=cut),
    bad("experts mxfp4", "gate_up_offset: expected none with format mxfp4, got a tensor",
        gate_up_offset=torch.ones(1)),
    bad("dequantize mxfp4", "weight: expected shape [*, N, C / 32, 16], got [16]", weight=lambda t: t[0, :16],
        scale=torch.tensor(1, dtype=torch.uint8)),
    bad("linear fp8", "weight: expected shape [N, H] with N = 200, H = 130, got [200, 129]", weight=cut),
    bad("linear fp8", "weight: expected float8_e4m3fn or uint8 in format fp8, got int32", weight=Tensor.int),
    bad("linear fp8", "weight: expected float8_e4m3fn or uint8 in format fp8, got float8_e5m2",
        weight=lambda t: t.view(torch.float8_e5m2)),
    bad("linear fp8", "scale: expected a tensor with format fp8, got none", scale=None),
    bad("linear fp8", "scale: expected float32 or bfloat16 in format fp8, got float16", scale=Tensor.half),
    bad("linear fp8", "scale: expected shape [2, 2], a scale for each 128 x 128 block of weight; got [2, 1]",
        scale=cut),
    bad("linear fp8", "offset: expected none with format fp8, got a tensor", offset=torch.ones(1)),
    bad("linear fp8", "group_size: expected 0 or 128 with format fp8, got 32", group_size=32),
    bad("experts fp8", "down_scale: expected shape [7, 2, 1], a scale for each 128 x 128 block of down; got [7, 1, 1]",
        down_scale=lambda t: t[:, 1:]),
    bad("linear nvfp4", "scale: expected a tensor with format nvfp4, got none", scale=None),
    bad("linear nvfp4", "scale: expected float8_e4m3fn or uint8 in format nvfp4, got float32", scale=Tensor.float),
    bad("linear nvfp4", "scale: expected shape [N, H / 16] with N = 35, H = 112, got [35, 6]", scale=cut),
    bad("linear nvfp4", "offset: expected float32 in format nvfp4, got float16", offset=Tensor.half),
    bad("linear nvfp4", "offset: expected shape [1], a factor for each matrix of weight; got [2]",
        offset=lambda t: t.expand(2)),
    bad("linear nvfp4", "offset: expected shape [1], a factor for each matrix of weight; got []",
        offset=lambda t: t[0]),
    bad("linear nvfp4", "group_size: expected 0 or 16 with format nvfp4, got 32", group_size=32),
    bad("linear nvfp4", "weight: expected H to be a multiple of 16 in format nvfp4, got 104", x=lambda t: t[:, 8:],
        weight=lambda t: t[:, 4:]),
    bad("experts nvfp4", "gate_up_offset: expected shape [7, 1], a factor for each matrix of gate_up; got [7]",
        gate_up_offset=lambda t: t[:, 0]),
    bad("experts nvfp4", "down_offset: expected shape [7, 1], a factor for each matrix of down; got [6, 1]",
        down_offset=lambda t: t[1:]),
    bad("dequantize nvfp4", "offset: expected shape [1], a factor for each matrix of weight; got [35, 1]",
        offset=lambda t: t.expand(35, 1)),
    bad("linear q4_k", FORMATS + "'iq2_xs'", format="iq2_xs"),
    bad("linear q4_k", "scale: expected none with format q4_k, got a tensor", scale=torch.ones(1)),
    bad("linear q4_k", "offset: expected none with format q4_k, got a tensor", offset=torch.ones(1)),
    bad("linear q4_k", "scale: expected a tensor with format mxfp8, got none", format="mxfp8",
        weight=lambda t: t.repeat(1, 2)[:, :256]),
    bad("linear q4_k", "weight: expected shape [N, H / 256 * 144] with N = 34, H = 256, got [34, 143]", weight=cut),
    bad("linear q4_k", "weight: expected uint8 in format q4_k, got int32", weight=lambda t: t.view(torch.int32)),
    bad("linear q4_k", "weight: expected H to be a multiple of 256 in format q4_k, got 128", x=lambda t: t[:, 128:],
        weight=lambda t: t[:, 72:]),
    bad("linear q4_k", "weight: " + ONE_RUN + "[288, 2]", weight=every_second),
    bad("linear q4_k", "group_size: expected 0 or 32 with format q4_k, got 64", group_size=64),
    bad("experts q4_k", "down_" + FORMATS + "'iq2_xs'", down_format="iq2_xs"),
    bad("experts q4_k", "down: expected shape [E, H, I / 256 * 144] with E = 7, H = 256, I = 256, got [7, 256, 210]",
        down_format=None),
    bad("experts q4_k", "down_scale: expected none with format q6_k, got a tensor", down_scale=torch.ones(1)),
    bad("experts q4_k", "group_size: expected 0 or 16 with format q6_k, got 32", group_size=32),
    bad("experts q4_k", "transposed: expected False with format q6_k, got True", transposed=True, format="dense",
        gate_up=torch.ones(7, 256, 512, dtype=BFLOAT)),
    bad("dequantize q4_k", "weight: expected shape [*, N, C / 256 * 144] with * = [], N = 34, C = 254, got [34, 143]",
        weight=cut),
]  # fmt: skip

SHARED_MEMORY = (
    "residual: expected a tensor whose elements have memory of their own, got one in which some share theirs; pass "
    "residual.clone()"
)
for _op in (op for op in IN_PLACE if op.startswith("weighted_sum")):
    BAD += [
        bad(_op, "residual: expected float32, float16 or bfloat16, got float64", residual=Tensor.double),
        bad(_op, "residual: expected shape [*, H], got []", residual=torch.tensor(1.0)),
        bad(_op, "slots: expected shape [*, K, H] with * = [6], K = 3, H = 67, got [6, 3, 66]", slots=cut),
        bad(_op, "slots: expected float32, the dtype of residual; got float16", slots=Tensor.half),
        bad(_op, "weights: expected shape [*, K] with * = [6], K = 3, got [6, 2]", weights=cut),
        bad(_op, SHARED_MEMORY, residual=lambda t: t[:1].expand(6, 67)),
        bad(_op, SHARED_MEMORY, residual=lambda t: t.as_strided((6, 67), (1, 1))),
        bad(_op, SHARED_MEMORY, residual=lambda t: t.as_strided((6, 67), (2, 3))),
    ]  # fmt: skip
BAD.append(bad("weighted_sum_residual_norm_", "norm_weight: expected shape [H] with H = 67, got [66]", norm_weight=cut))
BAD.append(bad("weighted_sum_residual_norm_", "eps: expected a finite number >= 0, got -1", eps=-1.0))
for _op in ("norm_add", "residual_norm"):
    BAD += [
        bad(_op, "residual: expected float32, float16 or bfloat16, got float64", residual=Tensor.double),
        bad(_op, "residual: expected H >= 1, got 0", residual=no_columns),
        bad(_op, "input: expected shape [*, H] with * = [6], H = 67, got [6, 66]", input=cut),
        bad(_op, "input: expected float32, the dtype of residual; got bfloat16", input=Tensor.bfloat16),
        bad(_op, "weight: expected shape [H] with H = 67, got [66]", weight=cut),
        bad(_op, "scalar: expected shape [H] with H = 67, got [2]", scalar=lambda t: t.repeat(2)),
        bad(_op, "scalar: expected shape [H] with H = 67, got []", scalar=torch.tensor(1.0)),
        bad(_op, "scalar: expected float32, the dtype of residual; got float16", scalar=Tensor.half),
        bad(_op, "eps: expected a finite number >= 0, got -0.001", eps=-0.001),
        bad(_op, "eps: expected a finite number >= 0, got 1e+39, which is inf as float32", eps=1e39),
    ]
