"""`python -m torch_moe_metal bench` with MLX, if it is installed, as one more implementation.

A block is written as in mlx-lm: `gather_mm`, or `gather_qmm` for packed weights, over the selected experts; from 64
expert ids on they are sorted by expert.

The weights are copies in mlx-lm's layout (separate gate and up, never transposed), made once. Packed weights are the
same bytes, because our affine, mxfp4 and mxfp8 are MLX's formats. MLX has no nvfp4 with a factor, no fp8 with scales
for blocks of 128 x 128, and none of GGML's formats. (On the CPU, affine products of bfloat16 with 2048 columns are 5 %
off in MLX 0.32, so they are rejected.)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

try:
    import mlx.core as mx
except ImportError:
    mx = None

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from torch_moe_metal import huge_pages
from torch_moe_metal.commands import bench
from torch_moe_metal.commands.bench.block import Block, Implementation
from torch_moe_metal.commands.bench.calls import WHOLE, Call
from torch_moe_metal.commands.bench.device_bench import DeviceBench, next_of
from torch_moe_metal.commands.bench.report import MLX
from torch_moe_metal.random_weights import Packing

SORTED_FROM = 64  # expert ids, as in mlx-lm


class WithMlx(DeviceBench):
    has_mlx = True

    def other_blocks(self) -> dict[str, Implementation]:
        return super().other_blocks() | mlx(self.block)

    def functions_of(self, call: Call, sets: list[dict[str, Tensor]]) -> dict[str, Callable[[], object]]:
        functions = super().functions_of(call, sets)
        if call.op not in WHOLE and call.packing and has_format(call.packing):
            functions[MLX] = next_of([packed_op(call, s) for s in sets])
        return functions


def to_mlx(tensor: Tensor) -> mx.array:
    """A copy."""
    return mx.array(tensor.detach().cpu().contiguous())


def has_format(packing: Packing | None) -> bool:
    return packing is None or packing.format in ("affine", "mxfp4", "mxfp8")


def options_of(packing: Packing) -> dict[str, object]:
    return {"mode": packing.format, "bits": packing.bits, "group_size": packing.group}


def packed_op(call: Call, given: Mapping[str, Tensor]) -> Callable[[], mx.array]:
    """An op with a packed weight, bound to its arguments."""
    arrays, options = {name: to_mlx(tensor) for name, tensor in given.items()}, options_of(call.packing)
    weight = arrays["weight"].view(mx.uint32), arrays["scale"], arrays.get("offset")
    if call.op == "linear":
        return scheduled(partial(mx.quantized_matmul, arrays["x"], *weight, **options))
    return scheduled(partial(mx.dequantize, *weight, **options, dtype=getattr(mx, str(call.dtype)[6:])))


def scheduled(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Starts the computation without waiting for it: the benchmark synchronizes."""

    def run(*args, **named):
        out = function(*args, **named)
        mx.async_eval(out)
        return out

    return run


def mlx(block: Block) -> dict[str, Implementation]:
    if not has_format(block.packing):
        return {}
    experts = partial(switch_glu, product_of(block), activation_of(block.model.experts))
    router = {name: to_mlx(tensor) for name, tensor in block.router.items()}
    choose = mx.compile(partial(route, **block.routing))
    shared = shared_expert(block)

    def weighted(x, weights, ids):
        return (experts(x, ids) * weights.astype(x.dtype)[..., None]).sum(-2)

    def whole(x):
        rows = mx.fast.rms_norm(x, router["norm_weight"], 1e-6) if "norm_weight" in router else x
        logits = rows @ router["router_weight"].T
        if "router_bias" in router:
            logits = logits + router["router_bias"]
        weights, ids = choose(logits, router.get("select_bias"), router.get("per_expert_scale"))
        out = weighted(x, weights, ids)
        return out if shared is None else out + shared(x)

    by_name = scheduled(lambda x, weights, ids: weighted(x, weights, ids))
    return {MLX: Implementation(scheduled(whole), by_name, to_mlx)}


def weights_of(block: Block) -> dict[str, mx.array]:
    """[E, I, H] for gate and up, [E, H, I] for down, and their scales, offsets and biases."""
    options, found = block.model.experts, {}
    for name, tensor in block.experts.items():
        rows = tensor.mT if options.get("transposed") and name in ("gate_up", "down") else tensor
        if not name.startswith("gate_up"):
            found[name] = to_mlx(rows)
            continue
        part = name.removeprefix("gate_up")
        gate, up = (rows[:, ::2], rows[:, 1::2]) if options.get("interleaved") else rows.chunk(2, 1)
        found |= {f"gate{part}": to_mlx(gate), f"up{part}": to_mlx(up)}
    mx.eval(found)
    return found


def product_of(block: Block) -> Callable[..., mx.array]:
    """A function: rows, name of a weight, ids, whether they are sorted -> rows @ the weight of each id's expert +
    bias"""
    weights, packing = weights_of(block), block.packing

    def product(rows, name: str, ids, ordered: bool):
        weight, selected = weights[name], {"rhs_indices": ids, "sorted_indices": ordered}
        if packing is None:
            out = mx.gather_mm(rows, weight.swapaxes(-1, -2), **selected)
        else:
            scales = weights[f"{name}_scale"], weights.get(f"{name}_offset")
            out = mx.gather_qmm(rows, weight.view(mx.uint32), *scales, **selected, **options_of(packing))
        bias = weights.get(f"{name}_bias")
        return out if bias is None else out + mx.expand_dims(bias[ids], -2)

    return product


def route(
    logits, select_bias, per_expert_scale, *,
    top_k, scoring="softmax", renormalize="before_scale", n_group=1, topk_group=1, scaling_factor=1.0,
):  # fmt: skip
    scores = mx.sigmoid(logits.astype(mx.float32)) if scoring == "sigmoid" else mx.softmax(logits, -1, precise=True)
    choice = scores if select_bias is None else scores + select_bias
    if n_group > 1:
        groups = mx.unflatten(choice, -1, (n_group, -1))
        totals = mx.topk(groups, 2, axis=-1).sum(-1, keepdims=True)
        dropped = n_group - topk_group
        worst = mx.argpartition(totals, kth=dropped - 1, axis=-2)[..., :dropped, :]
        choice = mx.put_along_axis(groups, worst, mx.array(float("-inf")), axis=-2).flatten(-2, -1)
    ids = mx.argpartition(choice, kth=-top_k, axis=-1)[..., -top_k:]
    weights = mx.take_along_axis(scores, ids, axis=-1)
    if renormalize != "none":
        weights = weights / weights.sum(-1, keepdims=True)
    if per_expert_scale is not None:
        weights = weights * per_expert_scale[ids]
    return weights * scaling_factor, ids


def gelu_tanh(x):
    return 0.5 * x * (1 + mx.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def activation_of(options: dict):
    """act(gate) * up, compiled to one kernel."""
    limit = options.get("limit")

    def glu(gate, up):
        if limit is not None:
            gate, up = mx.minimum(gate, limit), mx.clip(up, -limit, limit)
        if options.get("activation") == "swiglu_oai":
            return gate * mx.sigmoid(1.702 * gate) * (up + 1)
        return (gelu_tanh(gate) if options.get("activation") == "gelu_tanh" else gate * mx.sigmoid(gate)) * up

    return mx.compile(glu, shapeless=True)


def switch_glu(product, activation, x, ids):
    """x [T, H], ids [T, K] -> [T, K, H]"""
    ordered = ids.size >= SORTED_FROM
    rows, sorted_ids = mx.expand_dims(x, (-2, -3)), ids
    if ordered:
        order = mx.argsort(ids.flatten())
        rows, sorted_ids = rows.flatten(0, -3)[order // ids.shape[-1]], ids.flatten()[order]
    inner = activation(product(rows, "gate", sorted_ids, ordered), product(rows, "up", sorted_ids, ordered))
    slots = product(inner, "down", sorted_ids, ordered)
    if ordered:
        slots = mx.unflatten(slots[mx.argsort(order)], 0, ids.shape)
    return slots.squeeze(-2)


def shared_expert(block: Block):
    if block.shared_down is None:
        return None
    gate_up, down = to_mlx(block.shared_gate_up), to_mlx(block.shared_down)
    gate, up = mx.split(gate_up, 2)
    share = None if block.shared_gate is None else to_mlx(block.shared_gate)
    activation = activation_of({})

    def run(x):
        out = activation(x @ gate.T, x @ up.T) @ down.T
        return out if share is None else out * mx.sigmoid(x @ share.T)

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    bench.add_arguments(parser)
    if mx is None:
        print("MLX is not installed: not measured", file=sys.stderr)
    huge_pages.for_tensors()
    return bench.run(parser.parse_args(), DeviceBench if mx is None else WithMlx)


if __name__ == "__main__":
    sys.exit(main())
