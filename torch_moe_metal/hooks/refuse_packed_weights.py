"""Make PEFT and transformers raise, before they change anything, where they do not support packed weights.

Both would add values to the bytes of a packed weight, make a dense layer with the size of its data, or silently leave
it out.
"""

import functools

from torch import nn

from ..packed_layers import is_packed

REMEDY = "call dequantize() on the model before"


def refuse_merging() -> None:
    """PEFT calls this hook before it merges an adapter into a layer."""
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer

    stock = BaseTuner._check_merge_allowed

    @functools.wraps(stock)
    def check_merge_allowed(self):
        adapted = ((name, module) for name, module in self.model.named_modules() if isinstance(module, BaseTunerLayer))
        for name, module in adapted:
            if is_packed(base := module.get_base_layer()):
                raise ValueError(
                    f"torch_moe_metal: {name}: expected a dense layer to merge its adapter into, got a packed one "
                    f"({base.format}); {REMEDY}"
                )
        return stock(self)

    BaseTuner._check_merge_allowed = check_merge_allowed


def refuse_adapting_parameters() -> None:
    """PEFT's `target_parameters`. It looks for parameters, so it would adapt nothing where weights are packed."""
    from peft.tuners.tuners_utils import BaseTuner

    stock = BaseTuner.inject_adapter

    @functools.wraps(stock)
    def inject_adapter(self, model, adapter_name, *args, **kwargs):
        targets = getattr(self.peft_config[adapter_name], "target_parameters", None) or ()
        expect_dense(model, set(targets))
        return stock(self, model, adapter_name, *args, **kwargs)

    BaseTuner.inject_adapter = inject_adapter


def expect_dense(model: nn.Module, targets: set[str]) -> None:
    """Raises if one of these names, or ends of names, is that of a packed weight."""
    from ..transformers.fusing.packed_modules import packed_weight_names

    for name, module in packed_weight_names(model) if targets else ():
        if any(f".{name}".endswith(f".{target}") for target in targets):
            raise ValueError(
                f"torch_moe_metal: target_parameters: expected dense weights, got a packed one: {name} "
                f"({module.format}); adapt linear layers with target_modules, which may be packed, or {REMEDY}"
            )


def refuse_resizing() -> None:
    """`resize_token_embeddings`, of the embedding and of the head."""
    from transformers.modeling_utils import PreTrainedModel

    stock = PreTrainedModel._resize_token_embeddings

    @functools.wraps(stock)
    def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None, *args, **kwargs):
        for kind in ("input", "output"):
            layer = getattr(self, f"get_{kind}_embeddings")()
            rows = getattr(layer, "num_embeddings", None) or getattr(layer, "out_features", None)
            if is_packed(layer) and (pad_to_multiple_of is not None or new_num_tokens not in (None, rows)):
                raise ValueError(
                    f"torch_moe_metal: resize_token_embeddings: expected dense embeddings, got packed ones ({kind}, "
                    f"{layer.format}); {REMEDY}"
                )
        return stock(self, new_num_tokens, pad_to_multiple_of, *args, **kwargs)

    PreTrainedModel._resize_token_embeddings = resize_token_embeddings
