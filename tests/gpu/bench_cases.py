"""What is measured on a GPU: the ops of one Qwen3-30B-A3B block (H 2048, I 768, E 128, K 8) at six token counts."""

from dataclasses import replace

from cases import BFLOAT, FLOAT, Case

TOKENS = (1, 4, 16, 64, 512, 4096)
BLOCK = {"E": 128, "K": 8, "H": 2048, "I": 768}
OPS = {  # op: letters, optional arguments, options
    "gate": ("EKH", ("norm_weight",), {"top_k": 8}),
    "route": ("EK", (), {"top_k": 8}),
    "glu": ("I", (), {}),
    "weighted_sum": ("KH", ("residual",), {}),
    "weighted_sum_residual_": ("KH", (), {}),
    "weighted_sum_residual_norm_": ("KH", (), {}),
    "weighted_sum_norm_add": ("KH", (), {}),
    "weighted_sum_dual_norm_add": ("KH", (), {}),
    "norm_add": ("H", (), {}),
    "residual_norm": ("H", (), {}),
    "experts": ("EKHI", ("residual",), {}),
}


def bench_case(op: str, T: int) -> Case:
    letters, given, options = OPS[op]
    dims = {letter: BLOCK[letter] for letter in letters} | {"T": T * 8 if op == "glu" else T}
    return Case(op, f"bench-T{T}", dims, given, options)


BENCH = [
    replace(bench_case(op, T), dtype=dtype)
    for op in OPS
    for T in TOKENS
    for dtype in (BFLOAT, FLOAT)
    if not (op == "experts" and T > 512)
]
