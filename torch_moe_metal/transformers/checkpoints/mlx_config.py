"""mlx-lm's entry about quantisation in config.json."""

from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "moe_metal_mlx"


class MlxConfig(QuantizationConfigMixin):
    """mlx-lm's entry in config.json: bits, group size and mode of all layers, and by path those of single layers, or
    false for a dense layer."""

    def __init__(self, bits: int | None = None, group_size: int | None = None, mode: str = "affine", **layers):
        self.quant_method = METHOD
        layers.pop("quant_method", None)
        for name, value, kind in (("bits", bits, int), ("group_size", group_size, int), ("mode", mode, str)):
            if type(value) is not kind and (value is not None or kind is str):
                raise ValueError(f"{name}: expected a value of type {kind.__name__}, got {value!r}")
        self.bits, self.group_size, self.mode, self.layers = bits, group_size, mode, layers

    @property
    def default(self) -> dict:
        """For layers without an entry of their own."""
        return {"bits": self.bits, "group_size": self.group_size, "mode": self.mode}

    def to_dict(self) -> dict:
        """As mlx-lm writes it, without a `quant_method`."""
        return self.default | self.layers

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        return cls(**config_dict)


def is_of_mlx(found: dict) -> bool:
    """Whether a quantization_config is mlx-lm's, which names no method."""
    return "quant_method" not in found and {"bits", "group_size"} <= found.keys()
