"""`MoeMetalConfig` and `quantize_`: which weights of a dense model become packed, and how."""

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..packing import BITS, FORMATS, GROUPS, MXFP4_GROUP, quantize
from .experts import NAME, why_not_packed
from .packed import PROJECTIONS, Parts, embedding_multiplier, named_parts, pack, replace_tied, tied_head, weight_shape
from .patch import is_experts

logger = logging.get_logger(__name__)

#: Routers, and gates of shared experts: small, and a wrong choice of experts costs more than their bits.
ALWAYS_DENSE = ("router", "gate", "shared_expert_gate")


class MoeMetalConfig(QuantizationConfigMixin):
    """How `from_pretrained` quantises a dense checkpoint while it loads.

        config = torch_moe_metal.MoeMetalConfig(bits=4, group_size=64, skip=["lm_head"], bits_by_name={"down_proj": 6})
        model = AutoModelForCausalLM.from_pretrained(name, device_map="mps", quantization_config=config)

    Experts, linear layers and the embedding are packed, routers are not. `format`, `bits` and `group_size` are those of
    `torch_moe_metal.quantize`. `skip` and `bits_by_name` take whole parts of a module's name, or globs for them:
    "lm_head", "layers.0", "self_attn", "experts.down_proj", "[kvo]_proj", "layers.*.mlp". A leading ! means all other
    modules: "!experts".
    """

    def __init__(
        self,
        bits: int = 4,
        group_size: int = 64,
        format: str = "affine",
        skip: list[str] | None = None,
        bits_by_name: dict[str, int] | None = None,
        **kwargs,
    ):
        self.quant_method = NAME
        self.bits, self.group_size, self.format = bits, group_size, format
        self.skip, self.bits_by_name = skip or [], bits_by_name or {}
        self.post_init()

    def post_init(self) -> None:
        def expect(right: bool, name: str, what: str, got: object) -> None:
            if not right:
                raise ValueError(f"torch_moe_metal.MoeMetalConfig: {name}: expected {what}, got {got!r}")

        def glob(name: str, pattern: object) -> str:
            found = as_glob(pattern) if isinstance(pattern, str) else None
            expect(found is not None, name, "names of modules or globs, such as 'lm_head' or '!experts'", pattern)
            return found

        known = isinstance(self.format, str) and self.format in FORMATS
        expect(known, "format", f"one of {', '.join(FORMATS)}", self.format)
        expect(isinstance(self.skip, list | tuple | set), "skip", "a list of names", self.skip)
        expect(isinstance(self.bits_by_name, Mapping), "bits_by_name", "bits by names", self.bits_by_name)
        self.skip = [glob("skip", pattern) for pattern in self.skip]
        self.bits_by_name = {glob("bits_by_name", pattern): bits for pattern, bits in self.bits_by_name.items()}
        for name, bits in [("bits", self.bits), *self.bits_by_name.items()]:
            expect(type(bits) is int and bits in BITS, name, "2, 3, 4, 5, 6 or 8", bits)
        right = type(self.group_size) is int and self.group_size in GROUPS
        expect(right, "group_size", "16, 32, 64 or 128", self.group_size)

    def bits_of(self, name: str) -> int:
        return next((bits for pattern, bits in self.bits_by_name.items() if within(pattern, name)), self.bits)

    def skips(self, name: str) -> bool:
        return any(within(pattern, name) for pattern in (*ALWAYS_DENSE, *self.skip))

    def fits(self, columns: int) -> bool:
        return columns % {"affine": self.group_size, "mxfp4": MXFP4_GROUP, "fp8": 1}[self.format] == 0

    def chosen(self, model: nn.Module) -> dict[str, nn.Module]:
        """The modules of a dense model whose weights become packed, or an error where experts' cannot."""
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
        found = {}
        for name, module in model.named_modules():
            known = is_experts(module) or type(module) is nn.Linear
            known = known or (module is embedding and embedding_multiplier(module) is not None)
            if known and not self.skips(name) and self.packs(name, module):
                found[name] = module
        tied = tied_head(model)
        if tied and not found.keys() >= set(tied):  # one weight cannot be both
            found = {name: module for name, module in found.items() if name not in tied}
        return found

    def pack(self, model: nn.Module, parts: Callable[[str, Tensor], Parts], progress: bool = False) -> None:
        """Pack all that is chosen; `parts` makes each weight's."""
        names, tied = list(self.chosen(model)), tied_head(model)
        if tied and tied[1] in names:
            names.remove(tied[1])
        for name in logging.tqdm(names, desc="Quantising", disable=not progress):
            pack(model, name, self.format, parts)
        if tied and tied[0] in names:
            replace_tied(model, *tied)

    def packs(self, name: str, module: nn.Module) -> bool:
        if not is_experts(module):
            fits = self.fits(module.weight.shape[-1])
            if not fits:
                logger.warning(f"torch_moe_metal: {name} stays dense: its {module.weight.shape[-1]} columns do not fit")
            return fits
        reason = why_not_packed(module)
        if reason:
            logger.warning(f"torch_moe_metal: {name} stays dense: {reason}")
            return False
        for weight, projection in PROJECTIONS.items():
            columns = weight_shape(module, weight)[2]
            if not self.fits(columns):
                raise ValueError(
                    f"torch_moe_metal: {name}.{projection}: its {columns} columns are no multiple of the group, "
                    f"{self.group_size if self.format == 'affine' else MXFP4_GROUP}; choose another, or skip it"
                )
        return True


#: Names and globs, which have nothing of regular expressions but [], * and ?.
GLOB = re.compile(r"!?[\w.*?-]*(?:\[[\w-]+\][\w.*?-]*)*")
#: Saved configurations may have the one regular expression that the documentation named, and names by `re.escape`.
ALL_BUT = re.compile(r"\(\?!\.\*([\w.]+)\)\.\*")
ESCAPED = re.compile(r"(?:\w|\\[.-])+")


def as_glob(pattern: str) -> str | None:
    """A pattern of `skip` or `bits_by_name` as a name or a glob; None for what is neither, regular expressions."""
    if negated := ALL_BUT.fullmatch(pattern):
        return f"!{negated[1]}"
    if ESCAPED.fullmatch(pattern):
        return pattern.replace("\\", "")
    return pattern if pattern.strip("!") and GLOB.fullmatch(pattern) else None


def within(pattern: str, name: str) -> bool:
    """Whether a name or a glob matches whole parts of a module's name; with ! in front, whether it does not. Python's
    globs do not backtrack from one star to the one before, so that no pattern takes long."""
    if pattern.startswith("!"):
        return not within(pattern[1:], name)
    if not {*"*?["} & set(pattern):
        return f".{pattern}." in f".{name}."
    parts = name.split(".")
    ends = range(1, len(parts) + 1)
    return any(fnmatchcase(".".join(parts[first:end]), pattern) for end in ends for first in range(end))


def quantize_(
    model: nn.Module,
    bits: int = 4,
    group_size: int = 64,
    format: str = "affine",
    skip: list[str] | None = None,
    bits_by_name: dict[str, int] | None = None,
) -> nn.Module:
    """Pack the weights of a dense model of transformers, in place, one after the other. The arguments are those of
    `MoeMetalConfig`; saved, it loads as it is. Where something cannot be packed, it raises before anything is."""
    from .quantizer import adopt

    config = MoeMetalConfig(bits, group_size, format, skip, bits_by_name)

    def parts(name: str, dense: Tensor) -> dict[str, Tensor]:
        return named_parts(name.rpartition(".")[2], quantize(dense, format, config.bits_of(name), group_size))

    config.pack(model, parts, progress=True)
    adopt(model, config)
    return model
