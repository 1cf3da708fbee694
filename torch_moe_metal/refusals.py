"""Make PEFT and transformers raise, before they change anything, where they do not support packed weights.

Both would add values to the bytes of a packed weight, or make a dense layer with the size of its data.
"""

import functools

from .layers import is_packed

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
