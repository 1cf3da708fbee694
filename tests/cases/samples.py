"""Samples: small cases of each op and of each format with all optional arguments, which the slower tests run too."""

from cases.case import BFLOAT, FLOAT, HALF, OPTIONAL, Case
from cases.experts import OAI
from cases.linear_attention import FORGETTING, SUMMING
from cases.packed import PACKED_OPS
from torch_moe_metal import arguments
from torch_moe_metal.arguments import ARGUMENTS

# format, bits, group, H, I, N, dtypes of activations, parameters and scales, options
PACKED_SAMPLES = {
    "affine4": ("affine", 4, 32, 96, 32, 37, FLOAT, None, FLOAT, {}),
    "affine3": ("affine", 3, 16, 80, 48, 19, BFLOAT, FLOAT, HALF,
                {"activation": "gelu_tanh", "limit": 2.0, "group_size": 16}),
    "mxfp4": ("mxfp4", 4, 32, 160, 96, 33, BFLOAT, None, None, OAI | {"interleaved": True}),
    "fp8": ("fp8", 8, 128, 130, 70, 200, HALF, FLOAT, BFLOAT, {"interleaved": True, "group_size": 128}),
    "nvfp4": ("nvfp4", 4, 16, 112, 48, 35, HALF, None, None, {"activation": "gelu", "group_size": 16}),
    "q4_k": ("q4_k", 4, 32, 256, 256, 34, BFLOAT, None, None, {"down_format": "q6_k"}),
}  # fmt: skip


def samples() -> list[Case]:
    """All optional arguments with odd sizes; then aligned sizes in bfloat16; then float16."""
    routing = [
        {"top_k": 3},
        {"top_k": 4, "scoring": "sigmoid", "n_group": 4, "topk_group": 2, "scaling_factor": 2.5},
        {"top_k": 8, "scoring": "sqrt_softplus", "renormalize": "after_scale", "softcap": 20.0},
    ]
    activation = [{}, OAI | {"interleaved": True}, {"activation": "gelu_tanh", "transposed": True}]
    dims = [
        {"T": 6, "E": 13, "K": 3, "H": 67, "I": 19, "N": 37, "U": 1},
        {"T": 6, "E": 16, "K": 4, "H": 64, "I": 96, "N": 64, "U": 64},
        {"T": 6, "E": 40, "K": 8, "H": 130, "I": 33, "N": 5, "U": 1},
    ]
    heads = [
        {"B": 2, "A": 6, "J": 2, "S": 21, "D": 19, "V": 23, "R": 7},
        {"B": 1, "A": 8, "J": 1, "S": 80, "D": 64, "V": 64, "R": 32},
        {"B": 3, "A": 3, "J": 3, "S": 33, "D": 72, "V": 40, "R": 20},
    ]
    seeing = [{"causal": True, "window": 9, "scale": 0.3}, {"causal": True}, {}]
    dtypes = [(FLOAT, None), (BFLOAT, FLOAT), (HALF, None)]
    # Sizes and options of layers that keep rows: R is the number of those here.
    rows = [{"W": 4, "R": 5, "L": 5}, {"W": 3, "R": 2, "L": 6}, {"W": 5, "R": 9, "L": 3}]
    linear = [{"beta_scale": 2.0, "tiled": True}, FORGETTING | {"replay": 2}, SUMMING | {"replay": 1}]
    cases = []
    for op in ARGUMENTS:
        keeps_rows = "kept" in ARGUMENTS[op]
        for i, name in enumerate(("odd", "even", "half")):
            sizes = dims[i] | heads[i] | (rows[i] if keeps_rows else {})
            own = routing[i] | seeing[i] | (linear[i] if keeps_rows else activation[i])
            options = arguments.options(op, own | {"format": "dense", "dtype": dtypes[i][0]})
            cases.append(Case(op, f"sample_{name}", sizes, OPTIONAL[op], options, *dtypes[i], sample=True))
    return cases + [packed_sample(op, name) for op in PACKED_OPS for name in PACKED_SAMPLES]


def packed_sample(op: str, name: str) -> Case:
    format, bits, group, H, I, N, dtype, parameters, scales, options = PACKED_SAMPLES[name]
    dims = {"T": 6, "E": 7, "K": 3, "H": H, "I": I, "N": N}
    options = arguments.options(op, options | {"format": format, "bits": bits, "dtype": dtype})
    return Case(
        op, f"sample_{name}", dims, OPTIONAL[op], options, dtype, parameters, None, bits, group, scales, sample=True
    )
