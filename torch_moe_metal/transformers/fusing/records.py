"""What the records in `families.py` consist of: the classes of a family, and what is special about each.

A kind of class that is fused in another way has a record of its own here, and a fused class in `factory.BASES`. Strings
are names of classes and attributes in transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from .attention_options import always, plain_weight
from .linear_options import mamba2, mamba2_parameters, mamba2_sizes, softplus_decay


@dataclass(frozen=True)
class Record:
    """A class of transformers that `patch` fuses."""

    name: str


@dataclass(frozen=True)
class Block(Record):
    """A MoE block."""

    routing: Callable[[nn.Module, nn.Module], dict]  # a function of routing.py
    router: str = "gate"
    shared: str | None = None  # the shared expert
    shared_gate: str | None = None  # the linear layer that computes the shared expert's gate
    returns: str = "output"  # or "output, weights" (gpt-oss)


@dataclass(frozen=True)
class Llama4Block(Block):
    """A block whose routing weights multiply the experts' inputs. It also returns the router's logits."""


@dataclass(frozen=True)
class Mlp(Record):
    """A dense MLP or shared expert: down(act(gate(x)) * up(x))."""

    inputs: tuple[str, ...] = ("gate_proj", "up_proj")  # or one layer that computes both, the gate first
    output: str = "down_proj"
    activation: str | None = "act_fn"  # None: silu


@dataclass(frozen=True)
class Attention(Record):
    """Attention with q_proj, k_proj and v_proj. Norms, sinks, g_proj (an output gate), v_head_dim and v_scale
    are used if the module has them."""

    window: str = ""  # the object with the attribute `sliding_window`: "module" or "config"
    angles: str = "twice"  # cos and sin contain each angle "twice", for both halves of a head, or "once"; or "complex"
    rotates: Callable[[nn.Module], bool] = always  # some layers have no rope
    norms: tuple[str, ...] = ("q_norm", "k_norm")
    norm_weight: Callable[[nn.Module], Tensor | None] = plain_weight
    norms_first: bool = True  # before the rotation
    output: str = "o_proj"
    gate: Callable[[Tensor], Tensor] | None = None  # of the output; without g_proj, q_proj computes it after each head
    temperature: Callable[..., Tensor | None] | None = None  # a factor for [B, A, T, D] queries


@dataclass(frozen=True)
class Gemma4Attention(Attention):
    """Attention that also normalises values. Some layers have no v_proj, or use another layer's keys and values."""

    norms: tuple[str, ...] = ("q_norm", "k_norm", "v_norm")


@dataclass(frozen=True)
class LatentAttention(Attention):
    """Attention whose keys and values are cached as latents (MLA), with the corresponding projections."""

    norms: tuple[str, ...] = ("q_a_layernorm", "kv_a_layernorm")


@dataclass(frozen=True)
class LinearAttention(Record):
    """A mixer that keeps a recurrent state instead of keys and values: a short convolution (`conv1d`), the gated delta
    rule, and a gated norm. The functions are those of linear_options.py."""

    projections: tuple[str, ...]  # of its input, in the order in which `split` gets their results
    sizes: Callable[[nn.Module], tuple[int, int, int, int]]
    split: Callable[..., tuple[Tensor | None, ...]]
    parameters: Callable[[nn.Module], tuple[Tensor | None, ...]]
    decay: Callable[[nn.Module], dict] = softplus_decay  # options of the op
    norm: str = "norm"
    output: str = "out_proj"
    read: tuple[str, ...] = ("conv1d",)  # the submodules whose forward is not called, besides projections and norm
    by_channel: bool = False  # whether each channel of the keys has a decay


@dataclass(frozen=True)
class Mamba2(LinearAttention):
    """Mamba 2's sum, whose state is transposed in the cache, and whose norm is one of groups of heads."""

    projections: tuple[str, ...] = ("in_proj",)
    sizes: Callable[[nn.Module], tuple[int, int, int, int]] = mamba2_sizes
    split: Callable[..., tuple[Tensor | None, ...]] = mamba2
    parameters: Callable[[nn.Module], tuple[Tensor | None, ...]] = mamba2_parameters


@dataclass(frozen=True)
class ShortConv(Record):
    """LFM2's mixer: a short convolution between two gates."""

    output: str = "out_proj"
    read: tuple[str, ...] = ("conv",)


@dataclass(frozen=True)
class Layer(Record):
    """A decoder layer that computes x + mixer(norm(x)), then x + mlp(norm(x)), with RMS norms."""

    mixers: tuple[str, ...] = ("self_attn",)  # it has one of these
    mlp: str = "mlp"
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    norm_weight: Callable[[nn.Module], Tensor] = plain_weight
    multiplier: str = ""  # the attribute by which the outputs of mixer and MLP are multiplied
    shared: str = ""  # a dense MLP that is added to the MoE block


@dataclass(frozen=True)
class Gemma4Layer(Record):
    """A decoder layer with norms after attention, MLP and experts too."""


@dataclass(frozen=True)
class Norm(Record):
    """An RMS norm, as the norm after the last layer. Other norms are part of the fused layers."""

    norm_weight: Callable[[nn.Module], Tensor] = plain_weight


@dataclass(frozen=True)
class Experts(Record):
    """Experts whose gate is not `act(gate) * up`. They are not fused alone: `experts.py` runs those of every model."""

    activation: str | None = None  # None: the module's act_fn
    alpha: str | None = None  # attributes
    limit: str | None = None

    @property
    def gate(self) -> tuple[str | None, str | None, str | None]:
        return self.activation, self.alpha, self.limit


@dataclass(frozen=True)
class Family:
    """A family of models: the classes in one Python module of transformers. A class without a record stays as it is.

    Some layers have a mixer in place of attention: `linear` is its record, or it is in `left`.
    """

    block: Block | None = None
    attention: Attention | None = None
    linear: LinearAttention | ShortConv | None = None
    layer: Layer | Gemma4Layer | None = None
    mlp: Mlp | None = None
    last_norm: Norm | None = None
    experts: Experts | None = None
    left: Mapping[str, str] = field(default_factory=dict)  # attention that is not fused, and the reason
    tiny: Mapping[str, object] | None = None  # its tiny model: the differences from tiny_models.COMMON
    folder: str = ""  # in transformers.models, if it is not the family's name

    @property
    def fused(self) -> list[Record]:
        """The classes that `patch` fuses."""
        found = self.block, self.attention, self.linear, self.layer, self.mlp, self.last_norm
        return [each for each in found if each is not None]
