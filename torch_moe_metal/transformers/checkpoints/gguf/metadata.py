"""Typed access to a GGUF file's metadata, and the parameters of the rotary embedding.

A value of a wrong kind raises ValueError with the key, the expected and the given value. A key that an older llama.cpp
did not write gets llama.cpp's own default.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

REQUIRED = object()
MAX_BLOCKS = 512  # llama.cpp's own limit
# Tensors whose values are part of the configuration
ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


class Metadata:
    """Typed access to a file's metadata: a value of a wrong kind raises ValueError that names the key.

    Keys are given without the architecture's prefix. Some values are tensors, which are not part of the metadata: the
    caller adds the values of the tensors ROPE_FREQS, LONG_FACTORS and SHORT_FACTORS, if the file has them, under the
    names of the tensors.
    """

    def __init__(self, metadata: dict, arch: str, tensor_names: tuple[str, ...] = ()):
        self.metadata, self.arch, self.tensor_names = metadata, arch, frozenset(tensor_names)

    def name(self, key: str) -> str:
        whole = key.startswith(("tokenizer.", "rope_f"))
        return key if whole else f"{self.arch}.{key}"

    def has(self, key: str) -> bool:
        return self.name(key) in self.metadata

    def error(self, key: str, expected: str) -> ValueError:
        value = self.metadata.get(self.name(key), REQUIRED)
        given = "no such key" if value is REQUIRED else f"{value!r:.80} ({type(value).__name__})"
        return ValueError(f"{self.name(key)}: expected {expected}, got {given}")

    def value(self, key: str, expected: str, accepts: Callable, default):
        if not self.has(key) and default is not REQUIRED:
            return default
        value = self.metadata.get(self.name(key))
        if not self.has(key) or not accepts(value):
            raise self.error(key, expected)
        return value

    def int(self, key: str, default=REQUIRED, minimum: int = 1, maximum: float = math.inf) -> int:
        end = "" if maximum == math.inf else f" and at most {maximum}"
        return self.value(
            key, f"an integer of at least {minimum}{end}", lambda v: is_int(v) and minimum <= v <= maximum, default
        )

    def float(self, key: str, default=REQUIRED, minimum: float = 0.0) -> float:
        expected = "a finite number" if minimum == -math.inf else f"a finite number above {minimum:g}"
        value = self.value(key, expected, lambda v: is_number(v) and v > minimum, default)
        return value if value is default else shortest(value)

    def bool(self, key: str, default=REQUIRED) -> bool:
        return self.value(key, "a boolean", lambda v: isinstance(v, bool), default)

    def str(self, key: str, default=REQUIRED) -> str:
        return self.value(key, "a string", lambda v: isinstance(v, str), default)

    def numbers(self, key: str, default=REQUIRED) -> list[float]:
        def accepts(values):
            return isinstance(values, list | tuple) and len(values) > 0 and all(map(is_number, values))

        return [*self.value(key, "a list of finite numbers", accepts, default)]

    def per_layer(self, key: str, default=REQUIRED, kind: Callable | None = None, minimum: int = 1) -> list:
        """One value per layer, without MTP layers. The file has one value for all, or one per block."""
        blocks = self.blocks
        kind = kind or (lambda value: is_int(value) and value >= minimum)

        def accepts(value):
            return all(map(kind, value)) and len(value) == blocks if isinstance(value, list | tuple) else kind(value)

        each = "a boolean" if kind is is_flag else f"an integer of at least {minimum}"
        value = self.value(key, f"{each}, or a list of {blocks} such values", accepts, default)
        return [*value][: self.layers] if isinstance(value, list | tuple) else [value] * self.layers

    def uniform(self, key: str, default=REQUIRED) -> int:
        """A number that may be stored per layer, for a model whose layers are all equal."""
        values = self.per_layer(key, default)
        if any(value != values[0] for value in values):
            raise self.error(key, "the same number for all layers")
        return values[0]

    @property
    def blocks(self) -> int:
        return self.int("block_count", maximum=MAX_BLOCKS)

    @property
    def layers(self) -> int:
        """The number of the decoder's layers: all blocks except those for multi-token prediction."""
        return self.blocks - self.int("nextn_predict_layers", 0, minimum=0, maximum=self.blocks - 1)

    @property
    def vocabulary(self) -> int:
        """The number of tokens. The reader replaces a list of strings by its length unless `strings` names it."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list | tuple):
            return len(tokens)
        return self.int("vocab_size" if tokens is None and self.has("vocab_size") else "tokenizer.ggml.tokens")

    def token(self, name: str) -> int | None:
        """The id of a token; None if there is none. As in llama.cpp, an id outside of the vocabulary means none."""
        number = self.int(f"tokenizer.ggml.{name}_token_id", None, minimum=-1)
        return number if number is not None and 0 <= number < self.vocabulary else None

    def gating(self, default: int) -> int:
        """The scoring function of the router. 0 means the architecture's default."""
        return self.int("expert_gating_func", default, minimum=0) or default

    def require(self, key: str, given, expected):
        """Raises if the file has a value that transformers' class of this architecture does not support."""
        if given != expected:
            raise self.error(key, f"{expected!r}, the only value that transformers' model of {self.arch!r} computes")


def is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value) -> bool:
    return (is_int(value) or isinstance(value, float)) and math.isfinite(value)


def is_flag(value) -> bool:
    return isinstance(value, bool) or (is_int(value) and value in (0, 1))


def shortest(value: float) -> float:
    """The shortest decimal number with the same float32: 1e-06, not 9.999999974752427e-07."""
    single = np.float32(value)
    return float(str(single)) if float(single) == value else float(value)


def rope(file: Metadata, rotary: int) -> dict:
    """`rope_parameters`. `rotary` is the number of rotated dimensions."""
    theta = file.float("rope.freq_base", 10000.0)
    kind = file.str("rope.scaling.type", "linear")
    factor = file.float("rope.scaling.factor", file.float("rope.scale_linear", 0.0, minimum=-math.inf), -math.inf)
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise file.error("rope.scaling.type", "'none', 'linear', 'yarn' or 'longrope'")
    if ROPE_FREQS in file.tensor_names:
        if not file.has(ROPE_FREQS):
            raise ValueError(f"{ROPE_FREQS}: expected the tensor's values among the metadata, got no such key")
        return llama3(file, theta, rotary)
    if kind == "longrope":
        return longrope(file, theta)
    if kind == "none" or factor in (0.0, 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if factor < 0:
        raise file.error("rope.scaling.factor", "a finite number above 0")
    scaled = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    return scaled | (yarn(file, factor) if kind == "yarn" else {})


def yarn(file: Metadata, factor: float) -> dict:
    prefix = "rope.scaling"
    parameters = {
        "original_max_position_embeddings": file.int(f"{prefix}.original_context_length", file.int("context_length")),
        "beta_fast": file.float(f"{prefix}.yarn_beta_fast", 32.0),
        "beta_slow": file.float(f"{prefix}.yarn_beta_slow", 1.0),
    }
    if file.has(f"{prefix}.yarn_attn_factor"):
        parameters["attention_factor"] = file.float(f"{prefix}.yarn_attn_factor")
    elif file.has(f"{prefix}.attn_factor"):  # an additional factor on top of YaRN's own
        own = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        parameters["attention_factor"] = own * file.float(f"{prefix}.attn_factor")
    return parameters


def longrope(file: Metadata, theta: float) -> dict:
    original = file.int("rope.scaling.original_context_length", file.int("context_length"))
    parameters = {
        "rope_type": "longrope",
        "rope_theta": theta,
        "long_factor": file.numbers(LONG_FACTORS),
        "short_factor": file.numbers(SHORT_FACTORS),
        "original_max_position_embeddings": original,
        "factor": file.int("context_length") / original,
    }
    if file.has("rope.scaling.attn_factor"):
        parameters["attention_factor"] = file.float("rope.scaling.attn_factor")
    return parameters


def llama3(file: Metadata, theta: float, rotary: int) -> dict:
    """Llama 3's scaling, from the divisors of the frequencies.

    Frequencies f above one limit do not change, those below another are divided by `factor`, and in between the inverse
    of the divisor is linear in f: slope * f - offset is 0 at the lower limit and 1 at the upper one.
    """
    divisors = np.array(file.numbers(ROPE_FREQS), dtype=np.float64)
    if len(divisors) != rotary // 2 or (divisors < 1).any():
        raise file.error(ROPE_FREQS, f"{rotary // 2} numbers of at least 1")
    factor = float(divisors.max())
    if factor == 1:
        return {"rope_type": "default", "rope_theta": theta}
    frequencies = theta ** (-np.arange(0, rotary, 2) / rotary) / (2 * math.pi)
    mixture = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    slope, offset = ramp(frequencies, mixture)
    original = file.int("rope.scaling.original_context_length", 8192)
    low = offset / slope * original
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": rounded(factor),
        "low_freq_factor": rounded(low),
        "high_freq_factor": rounded(low + original / slope),
        "original_max_position_embeddings": original,
    }


def ramp(frequencies: np.ndarray, mixture: np.ndarray) -> tuple[float, float]:
    """The line through the frequencies between the limits; it may be as steep as a step."""
    between = np.flatnonzero((mixture > 1e-6) & (mixture < 1 - 1e-6))
    if len(between) > 1:
        slope, minus_offset = np.polyfit(frequencies[between], mixture[between], 1)
        return float(slope), float(-minus_offset)
    kept = frequencies[mixture >= 1 - 1e-6].min(initial=math.inf)
    divided = frequencies[mixture <= 1e-6].max(initial=0.0)
    if len(between) == 0:
        border = divided * 1.001 if math.isinf(kept) else math.sqrt(kept * max(divided, kept / 4))
        slope = 1e9 / border
        return slope, slope * border
    at, value = frequencies[between[0]], mixture[between[0]]
    slope = 2 * max(value / (at - divided), (1 - value) / (kept - at))
    return slope, slope * at - value


def rounded(value: float) -> float:
    """A number as it was written before it was stored in float32."""
    return float(round(value)) if abs(value - round(value)) < 1e-3 else float(value)
