"""The same block in MLX, as mlx-lm writes it: `gather_mm` over the chosen experts, sorted by expert from 64 choices on.

Its weights are copies, in mlx-lm's layout (gate and up apart, never transposed), made once.
"""

from functools import partial

import mlx.core as mx
from torch import Tensor

from .block import Block, Implementation

SORTED_FROM = 64  # choices, in mlx-lm


def take(tensor: Tensor) -> mx.array:
    """A copy."""
    return mx.array(tensor.detach().cpu().contiguous())


def mlx(block: Block) -> dict[str, Implementation]:
    experts = partial(switch_glu, weights_of(block), activation_of(block.model.experts))
    router = {name: take(tensor) for name, tensor in block.router.items()}
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

    def scheduled(function):
        """Started, and not waited for: whoever measures synchronizes."""

        def run(*args, **named):
            out = function(*args, **named)
            mx.async_eval(out)
            return out

        return run

    by_name = scheduled(lambda x, weights, ids: weighted(x, weights, ids))
    return {"mlx": Implementation(scheduled(whole), by_name, take)}


def weights_of(block: Block) -> dict[str, mx.array]:
    """[E, I, H] for gate and up, [E, H, I] for down, and their biases."""
    options, tensors = block.model.experts, block.experts
    transposed = options.get("transposed", False)
    found = {"down": take(tensors["down"].mT if transposed else tensors["down"])}
    both = {"": tensors["gate_up"].mT if transposed else tensors["gate_up"], "_bias": tensors.get("gate_up_bias")}
    for suffix, rows in both.items():
        if rows is not None:
            halves = (rows[:, ::2], rows[:, 1::2]) if options.get("interleaved") else rows.chunk(2, 1)
            found |= {f"{name}{suffix}": take(half) for name, half in zip(("gate", "up"), halves, strict=True)}
    if "down_bias" in tensors:
        found["down_bias"] = take(tensors["down_bias"])
    mx.eval(found)
    return found


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


def switch_glu(weights: dict[str, mx.array], activation, x, ids):
    """x [T, H], ids [T, K] -> [T, K, H]"""

    def linear(rows, name: str, ids, ordered: bool):
        out = mx.gather_mm(rows, weights[name].swapaxes(-1, -2), rhs_indices=ids, sorted_indices=ordered)
        bias = weights.get(f"{name}_bias")
        return out if bias is None else out + mx.expand_dims(bias[ids], -2)

    ordered = ids.size >= SORTED_FROM
    rows, chosen = mx.expand_dims(x, (-2, -3)), ids
    if ordered:
        order = mx.argsort(ids.flatten())
        rows, chosen = rows.flatten(0, -3)[order // ids.shape[-1]], ids.flatten()[order]
    inner = activation(linear(rows, "gate", chosen, ordered), linear(rows, "up", chosen, ordered))
    slots = linear(inner, "down", chosen, ordered)
    if ordered:
        slots = mx.unflatten(slots[mx.argsort(order)], 0, ids.shape)
    return slots.squeeze(-2)


def shared_expert(block: Block):
    if block.shared_down is None:
        return None
    gate_up, down = take(block.shared_gate_up), take(block.shared_down)
    gate, up = mx.split(gate_up, 2)
    share = None if block.shared_gate is None else take(block.shared_gate)
    activation = activation_of({})

    def run(x):
        out = activation(x @ gate.T, x @ up.T) @ down.T
        return out if share is None else out * mx.sigmoid(x @ share.T)

    return run
