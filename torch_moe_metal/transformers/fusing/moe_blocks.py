"""The fused MoE blocks, and the dense MLPs that are their shared experts or in place of them."""

import torch
from torch import Tensor, nn

from ...packed_layers import Linear
from .experts import activation_of, why_not_fused
from .fused import Fused, JoinedProjections
from .projections import FEW_TOKENS, product, project
from .records import Block, Mlp

ops = torch.ops.moe_metal


class FusedMlp(JoinedProjections):
    """A gated dense MLP. For few tokens it is one product for gate and up, `glu`, and another product."""

    record: Mlp
    more_homes = (Linear.__module__, "torch.nn.modules.activation", "transformers.activations")
    borrows_config = False  # whether `patch` gave it the configuration of its model

    @property
    def joined(self) -> tuple[str, ...]:
        return self.record.inputs

    @classmethod
    def why_left(cls, module: nn.Module) -> str | None:
        function = cls.function(module)
        if activation_of(function) is None:
            return f"its activation is {type(function).__name__}"
        return cls.why_replaced(module, (*cls.record.inputs, cls.record.output))

    @classmethod
    def function(cls, module: nn.Module):
        """Its activation."""
        return getattr(module, cls.record.activation) if cls.record.activation else nn.functional.silu

    def forward(self, x: Tensor) -> Tensor:
        activation = activation_of(self.function(self))
        few = not torch.compiler.is_compiling() and x.numel() <= FEW_TOKENS * x.shape[-1]
        ours = few and activation and self.are_unmodified(*self._modules.values())
        if not (ours and self.is_plain_inference(x) and self.still_selected()):
            return super().forward(x)
        outputs = project(x, self.parts(self.record.inputs))
        gate, up = outputs if len(outputs) == 2 else outputs[0].chunk(2, -1)
        return product(ops.glu(gate, up, activation=activation), self._modules[self.record.output])

    def _warmup_call(self, tokens: int, dtype: torch.dtype) -> None:
        width = self.parts(self.record.inputs)[0].in_features
        x = torch.empty(1, tokens, width, dtype=dtype, device="meta")
        self(x)
        for layer in self.parts(self.record.inputs):  # on meta they are not joined
            product(x, layer)


class FusedBlock(Fused):
    """A MoE block: one `gate`, the shared expert if there is one, and one `experts`."""

    record: Block

    @classmethod
    def why_left(cls, module: nn.Module) -> str | None:
        parts, record = module._modules, cls.record
        reason = cls.why_replaced(module, ("experts", record.router)) or why_not_fused(parts["experts"])
        if reason:
            return reason
        routing = record.routing(parts[record.router], module)
        groups, kept = routing.get("n_group", 1), routing.get("topk_group", 1)
        if routing["top_k"] > len(routing["router_weight"]) // groups * kept:
            return "it chooses more experts than its best groups hold"  # transformers then adds experts of other groups
        return None

    def forward(self, hidden_states: Tensor, *args, **kwargs):
        parts = None if args or kwargs else self.parts(hidden_states, self)
        if parts is None:
            return super().forward(hidden_states, *args, **kwargs)
        output, weights = self.moe(hidden_states, parts)
        if self.record.returns == "output, weights":
            return output, weights.flatten(0, -2).to(output.dtype)
        return output

    def _warmup_call(self, tokens: int, dtype: torch.dtype) -> None:
        router = self.record.routing(self._modules[self.record.router], self)["router_weight"]
        self(torch.empty(1, tokens, router.shape[-1], dtype=dtype, device="meta"))

    def parts(self, x: Tensor, caller: Fused, *read: nn.Module) -> tuple[dict, dict] | None:
        """The arguments of `gate` and of `experts` that this block provides, or None if `caller` must run its original
        forward. `caller` is the block, or a layer that also uses the modules `read`.

        This runs for every token in every layer, so its cost matters: the Python code around the ops takes about 40 us
        in a Qwen3 layer on a slow Xeon core, of which this function takes 10. Submodules are read from `_modules` for
        the reason given in `member`.
        """
        modules, record = self._modules, self.record
        router, experts = modules[record.router], modules["experts"]
        inside = router.modules() if router._modules else (router,)
        if (
            not self.are_unmodified(experts, *inside, *read)
            or not caller.is_plain_inference(x)
            or not self.still_selected()
        ):
            return None
        if self.training and getattr(self, "jitter_noise", 0):  # Mixtral's and MiniMax's
            return None
        arguments = self.experts_part(x, experts)
        return None if arguments is None else (record.routing(router, self), arguments)

    def moe(self, x: Tensor, parts: tuple[dict, dict], residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The block's output plus `residual`, both [..., H], and the routing weights [..., K]."""
        routing, arguments = parts
        record = self.record
        weights, ids = ops.gate(x, **routing)
        if record.shared:
            arguments["shared"] = self._modules[record.shared](x)
        if record.shared_gate:
            layer = self._modules[record.shared_gate]
            gate = product(x, layer) if self.are_unmodified(layer) else layer(x)
            arguments["shared_gate"] = gate.squeeze(-1)
        if residual is not None:
            arguments["residual"] = residual
        return ops.experts(x, weights, ids, **arguments), weights


class FusedLlama4Block(FusedBlock):
    """Llama 4: a routing weight multiplies its expert's input, and the block returns the router's logits too."""

    def forward(self, hidden_states: Tensor):
        parts = self.parts(hidden_states, self)
        if parts is None:
            return super().forward(hidden_states)
        routing, arguments = parts
        x = hidden_states.flatten(0, -2)
        logits = nn.functional.linear(x, routing.pop("router_weight"))
        weights, ids = ops.route(logits, **routing)
        inputs = (x.unsqueeze(-2) * weights.unsqueeze(-1)).to(x.dtype)
        ones = torch.ones_like(weights)
        slots = ops.experts(inputs, ones.unsqueeze(-1), ids.unsqueeze(-1), **arguments)
        return ops.weighted_sum(slots, ones, shared=self.shared_expert(x)), logits
