"""One MoE block of a named model with random weights, computed by our ops, plain PyTorch, transformers and MLX."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...random_weights import Packing, dequantized, packing_of
from ..common.cli import CannotRun
from .baselines import BASELINES, MAX_COPIED, gate, glu
from .calls import RandomTensors, moved
from .model_sizes import Model, configuration

ops = torch.ops.moe_metal


@dataclass
class Block:
    """The weights of a block, by the argument names of `gate` and `experts`."""

    model: Model
    router: dict[str, Tensor]  # of `gate`
    experts: dict[str, Tensor]  # of `experts`
    shared_gate_up: Tensor | None = None  # [2S, H]
    shared_down: Tensor | None = None  # [H, S]
    shared_gate: Tensor | None = None  # [1, H]
    packing: Packing | None = None  # of the experts

    @classmethod
    def random(cls, model: Model, noise: RandomTensors, packing: Packing | None = None) -> "Block":
        E, H, I, S, given = model.E, model.H, model.I, model.S, model.tensors
        router = {"router_weight": noise(E, H, scale=H**-0.5)}
        small = {
            "norm_weight": (H, 1.0),
            "per_expert_scale": (E, 1.0),
            "router_bias": (E, 0.0),
            "select_bias": (E, 0.0),
        }
        router |= {name: noise(n, scale=0.1) + mean for name, (n, mean) in small.items() if name in given}
        if "select_bias" in router:
            router["select_bias"] = router["select_bias"].float()
        experts = {}
        for name, size in {"gate_up": (E, 2 * I, H), "down": (E, H, I)}.items():
            if packing:
                experts |= noise.packed(packing, name, *size)
            else:
                weight = noise(*size, scale=size[-1] ** -0.5)
                experts[name] = weight.view(E, size[2], size[1]) if model.experts.get("transposed") else weight
        biases = {"gate_up_bias": 2 * I, "down_bias": H}
        experts |= {name: noise(E, n, scale=0.1) for name, n in biases.items() if name in given}
        shared = (noise(2 * S, H, scale=H**-0.5), noise(H, S, scale=S**-0.5)) if S else ()
        shared_gate = noise(1, H, scale=H**-0.5) if "shared_gate" in given else None
        return cls(model, router, experts, *shared, packing=packing, **({"shared_gate": shared_gate} if S else {}))

    def dense(self) -> "Block":
        """The same values as dense weights in the activations' dtype."""
        dtype = self.router["router_weight"].dtype
        return replace(self, experts=dequantized("experts", self.experts, self.packing, dtype), packing=None)

    @property
    def routing(self) -> dict:
        return {"top_k": self.model.K} | self.model.routing

    def __call__(self, x: Tensor) -> Tensor:
        """Our implementation: `gate`, the shared expert, `experts`."""
        weights, ids = ops.gate(x, **self.router, **self.routing)
        return self.experts_only(x, weights, ids, **self.shared(x, ops.glu))

    def experts_only(self, x: Tensor, weights: Tensor, ids: Tensor, **shared: Tensor) -> Tensor:
        """Our op `experts` for these ids."""
        format = self.packing.format if self.packing else "dense"
        return ops.experts(x, weights, ids, **shared, **self.experts, **self.model.experts, format=format)

    def shared(self, x: Tensor, glu: Callable[..., Tensor]) -> dict[str, Tensor]:
        """The shared expert's output and its gate's logit, as arguments of `experts`."""
        if self.shared_down is None:
            return {}
        rows = glu(*F.linear(x, self.shared_gate_up).chunk(2, -1))
        gate = {} if self.shared_gate is None else {"shared_gate": F.linear(x, self.shared_gate).squeeze(-1)}
        return {"shared": F.linear(rows, self.shared_down)} | gate

    def bytes_read(self, ids: Tensor) -> int:
        """Bytes of the selected experts' weights, each counted once."""
        return moved(*self.experts.values()) * ids.unique().numel() // self.model.E

    def other_bytes(self) -> int:
        """Bytes of all other weights."""
        return moved(*self.router.values(), self.shared_gate_up, self.shared_down, self.shared_gate)


def expert_bytes(model: Model, dtype: torch.dtype, format: str = "dense") -> int:
    """Bytes of one expert's weights."""
    packing, H, I = packing_of(format, dtype), model.H, model.I
    return packing.bytes(2 * I, H) + packing.bytes(H, I) if packing else 3 * H * I * dtype.itemsize


SLACK = 2 << 30  # bytes left for outputs, probes and other processes


def fitted(model: Model, dtype: torch.dtype, free: int, T: int, copies: int, format: str = "dense") -> Model:
    """The model, with fewer experts if memory cannot hold all of them. Packed experts need `copies` of their bytes and
    those of dense experts."""
    dense = expert_bytes(model, dtype)
    one = copies * expert_bytes(model, dtype, format) + (0 if format == "dense" else dense)
    others = SLACK + copies * expert_bytes(replace(model, I=model.S), dtype) + max(MAX_COPIED, model.K * dense)
    others += 4 * T * model.K * (model.H + 2 * model.I) * dtype.itemsize
    groups = model.routing.get("n_group", 1)
    experts = max(0, free - others) // one // groups * groups
    if experts >= model.E:
        return model
    if experts < model.fewest:
        need = (model.fewest * one + others) / 2**30
        raise CannotRun(f"not enough memory: {need:.1f} GiB needed, {free / 2**30:.1f} GiB free")
    return replace(model, E=experts)


@dataclass
class Implementation:
    """Another implementation of a block. `convert` makes an input of one of our tensors."""

    block: Callable[..., object]  # x -> output
    experts: Callable[..., object]  # x, weights, ids -> output
    convert: Callable[[Tensor], object] = field(default=lambda tensor: tensor)


# ------------------------------------------------------------------------------------------------ plain PyTorch


def plain(block: Block) -> dict[str, Implementation]:
    def whole(way: Callable[..., Tensor], x: Tensor) -> Tensor:
        weights, ids = gate(x, **block.router, **block.routing)
        out = way(x, weights.to(x.dtype), ids)
        shared = block.shared(x, glu)
        if "shared_gate" in shared:
            return out.addcmul_(shared["shared"], shared["shared_gate"].sigmoid().unsqueeze(-1))
        return out.add_(shared["shared"]) if shared else out

    ways = {name: partial(way, **block.experts, **block.model.experts) for name, way in BASELINES["experts"].items()}
    return {f"plain {name}": Implementation(partial(whole, way), way) for name, way in ways.items()}


# ------------------------------------------------------------------------------------------------ transformers

# Our names of the parameters of transformers' blocks.
NAMES = {
    "gate.weight": "router_weight",
    "router.weight": "router_weight",
    "router.proj.weight": "router_weight",
    "router.scale": "norm_weight",
    "router.per_expert_scale": "per_expert_scale",
    "router.bias": "router_bias",
    "gate.e_score_correction_bias": "select_bias",
    "e_score_correction_bias": "select_bias",
    "experts.gate_up_proj": "gate_up",
    "experts.gate_up_proj_bias": "gate_up_bias",
    "experts.down_proj": "down",
    "experts.down_proj_bias": "down_bias",
}


def transformers(block: Block) -> dict[str, Implementation]:
    """transformers' block with each of its experts implementations. It shares our weights without copies."""
    theirs = empty_block(block.model)
    ours = block.router | block.experts
    if block.shared_down is not None:
        ours |= dict(zip(("gate_proj", "up_proj"), block.shared_gate_up.chunk(2), strict=True))
        ours |= {"down_proj": block.shared_down, "shared_gate": block.shared_gate}
    if "norm_weight" in ours:  # transformers divides it by this root at every call
        ours["norm_weight"] = ours["norm_weight"] * block.model.H**0.5
    for name in [name for name, _ in (*theirs.named_parameters(), *theirs.named_buffers())]:
        place(theirs, name, ours[NAMES.get(name) or shared_name(name)])

    def with_implementation(implementation: str, function: Callable[..., Tensor], **args: Tensor) -> Tensor:
        theirs.experts.config._experts_implementation = implementation
        return function(**args)

    def whole(x: Tensor) -> Tensor:
        out = theirs(x.unsqueeze(0))
        return (out[0] if isinstance(out, tuple) else out).view(x.shape)

    def experts(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return theirs.experts(x, ids, weights)

    return {
        f"transformers {name}": Implementation(
            partial(with_implementation, name, whole), partial(with_implementation, name, experts)
        )
        for name in ("eager", "batched_mm", "grouped_mm")
    }


def shared_name(name: str) -> str:
    """Our name for a parameter of the shared expert."""
    return "shared_gate" if name == "shared_expert_gate.weight" else name.split(".")[-2]


def place(module: torch.nn.Module, name: str, tensor: Tensor) -> None:
    """Replaces the parameter or buffer of this name by a tensor."""
    path, _, leaf = name.rpartition(".")
    module = module.get_submodule(path)
    old = getattr(module, leaf)
    assert old.shape == tensor.shape, f"{name}: expected shape {tuple(old.shape)}, got {tuple(tensor.shape)}"
    if isinstance(old, torch.nn.Parameter):
        setattr(module, leaf, torch.nn.Parameter(tensor, requires_grad=False))
    else:
        module._buffers[leaf] = tensor


def empty_block(model: Model) -> torch.nn.Module:
    """transformers' block of these sizes on the meta device."""
    from importlib import import_module

    from transformers import AutoConfig

    config = AutoConfig.for_model(model.config, **configuration(model))
    folder = model.config.removesuffix("_text")
    modeling = import_module(f"transformers.models.{folder}.modeling_{folder}")
    with torch.device("meta"):
        if folder == "gemma4":
            block = gemma4(modeling.Gemma4TextRouter(config), modeling.Gemma4TextExperts(config))
        else:
            block = getattr(modeling, model.block)(config)
    return block.eval()


def gemma4(router: torch.nn.Module, experts: torch.nn.Module) -> torch.nn.Module:
    """Gemma 4 has no module for the block: its decoder layer calls router and experts."""

    class RouterAndExperts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = router, experts

        def forward(self, x: Tensor) -> Tensor:
            rows = x.flatten(0, -2)
            _, weights, ids = self.router(rows)
            return self.experts(rows, ids, weights).view(x.shape)

    return RouterAndExperts()
