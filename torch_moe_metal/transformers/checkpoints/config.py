"""`MoeMetalConfig`: which weights of a dense model become packed, and how."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

from torch import Tensor, nn
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from ... import reference
from ...all_or_nothing import all_or_nothing
from ...formats import BITS, FORMATS, GROUPS, any_of
from ...packed_layers import Embedding, Linear, TiedLinear, is_packed
from ...packing import WRITTEN
from ..fusing.experts import NAME, is_experts, why_not_packed
from ..fusing.packed_modules import (
    PROJECTIONS,
    Parts,
    columns_of,
    embedding_multiplier,
    is_moe,
    pack,
    replace_tied,
    rows_of,
    tied_head,
)
from .patterns import is_glob, within

logger = logging.get_logger(__name__)

#: Routers, and gates of shared experts: small, and a wrong choice of experts costs more than their bits.
ALWAYS_DENSE = ("router", "gate", "shared_expert_gate", "shared_gate")
#: Bits and group size of the formats for which they are fixed.
FIXED = {row.name: (row.bits, max(row.columns, row.scale_columns)) for row in FORMATS.values() if not row.is_affine}


@dataclass(frozen=True)
class Form:
    """How one weight is packed."""

    format: str
    bits: int
    group_size: int

    @classmethod
    def of(cls, format: str, bits: int, group_size: int) -> "Form":
        return cls(format, *FIXED.get(format, (bits, group_size)))

    @classmethod
    def now(cls, module: nn.Module, weight: str) -> "Form":
        """The form of a packed weight."""
        (data, scale, _), columns, format = module.parts(weight), columns_of(module, weight), module.format_of(weight)
        if format in FIXED:
            return cls(format, *FIXED[format])
        return cls(format, reference.bits_of(data, scale, format, columns), columns // scale.shape[-1])

    def fits(self, columns: int) -> bool:
        return FORMATS[self.format].rows_per_scale > 1 or columns % self.group_size == 0

    @property
    def settings(self) -> dict:
        return {"format": self.format} if self.format in FIXED else asdict(self)


Plan = dict[str, dict[str, Form]]  # by module, then by the full name of each of its weights


class MoeMetalConfig(QuantizationConfigMixin):
    """How `from_pretrained` quantises a dense checkpoint while it loads.

        config = torch_moe_metal.MoeMetalConfig(bits=4, group_size=64, skip=["lm_head"], bits_by_name={"down_proj": 6})
        model = AutoModelForCausalLM.from_pretrained(name, device_map="mps", quantization_config=config)

    Experts, linear layers and the embedding are packed. Routers stay dense, and so do vision and audio towers unless
    `bits_by_name` names them. `format`, `bits` and `group_size` are those of `torch_moe_metal.quantize`.

    `skip` and `bits_by_name` take whole parts of a module's name, or globs: "lm_head", "layers.0",
    "[kvo]_proj", "layers.*.mlp". A leading ! means all other modules: "!experts". Names that the model does not
    have raise. Experts are packed or skipped as a whole; `bits_by_name` may name their weights: "experts.down_proj".

    `layers` overrides this for single modules or weights, by their full names, such as
    {"lm_head": False, "model.layers.0.mlp.experts": {"format": "mxfp4"}}. `save_pretrained` writes it.
    """

    def __init__(
        self,
        format: str = "affine",
        bits: int = 4,
        group_size: int = 64,
        skip: list[str] | None = None,
        bits_by_name: dict[str, int] | None = None,
        layers: dict[str, dict | bool] | None = None,
        **others,
    ):
        if unknown := sorted(others.keys() - {"quant_method"}):
            raise TypeError(
                f"torch_moe_metal.MoeMetalConfig: unknown: {', '.join(unknown)}; its arguments are format, bits, "
                "group_size, skip, bits_by_name and layers"
            )
        self.quant_method = NAME
        self.bits, self.group_size, self.format = bits, group_size, format
        self.skip = [] if skip is None else skip
        self.bits_by_name = {} if bits_by_name is None else bits_by_name
        self.layers = {} if layers is None else layers
        self.post_init()

    def post_init(self) -> None:
        def expect(right: bool, name: str, what: str, got: object) -> None:
            if not right:
                raise ValueError(f"torch_moe_metal.MoeMetalConfig: {name}: expected {what}, got {got!r}")

        def expect_form(where: str, format: object, bits: object, group_size: object, formats=WRITTEN) -> None:
            known = isinstance(format, str) and format in formats
            expect(known, f"{where}format", f"one of {', '.join(formats)}", format)
            expect(type(bits) is int and bits in BITS, f"{where}bits", any_of(BITS), bits)
            right = type(group_size) is int and group_size in GROUPS
            expect(right, f"{where}group_size", any_of(GROUPS), group_size)

        def expect_globs(name: str, patterns: Iterable) -> None:
            for pattern in patterns:
                expect(is_glob(pattern), name, "names of modules or globs, such as 'lm_head' or '!experts'", pattern)

        settings = {"format": self.format, "bits": self.bits, "group_size": self.group_size}
        expect_form("", **settings)
        expect(isinstance(self.skip, list | tuple | set), "skip", "a list of names", self.skip)
        expect(isinstance(self.bits_by_name, Mapping), "bits_by_name", "bits by names", self.bits_by_name)
        expect(isinstance(self.layers, Mapping), "layers", "settings by names", self.layers)
        expect_globs("skip", self.skip)
        expect_globs("bits_by_name", self.bits_by_name)
        self.skip, self.bits_by_name = list(self.skip), dict(self.bits_by_name)
        for name, bits in self.bits_by_name.items():
            expect_form(f"bits_by_name: {name}: ", **settings | {"bits": bits})
        for name, entry in self.layers.items():
            known = entry is False or (isinstance(entry, Mapping) and entry.keys() <= settings.keys())
            expect(known, f"layers: {name}", "False, or a dictionary of format, bits and group_size", entry)
            # A model that was loaded from a GGUF file is saved in formats that `quantize` does not write.
            expect_form(f"layers: {name}: ", **settings | (entry or {}), formats=FORMATS)
        self.layers = dict(self.layers)

    def bits_of(self, name: str) -> int:
        return next((bits for pattern, bits in self.bits_by_name.items() if within(pattern, name)), self.bits)

    def skips(self, name: str) -> bool:
        return any(within(pattern, name) for pattern in (*ALWAYS_DENSE, *self.skip))

    # -------------------------------------------------------------------------------------------- what becomes packed

    def forms(self, model: nn.Module) -> Plan:
        """How to pack the weights of each module, whatever they are now; empty for modules that stay dense."""
        prefix, towers = f"{getattr(model, 'base_model_prefix', '')}.", tower_prefixes(model)
        found = {}
        for name, module in packable(model):
            weights = list(weight_names(name, module).values())
            plain = not self.skips(name) and not self.skips_weights(name, weights)
            if name.startswith(towers):
                plain = plain and any(within(pattern, name) for pattern in self.bits_by_name)
            forms = {weight: self.form(weight, self.entry(prefix, weight, name), plain) for weight in weights}
            if len({form if is_moe(module) else form is None for form in forms.values()}) > 1:
                raise ValueError(f"torch_moe_metal: expected one format for {' and '.join(weights)}, got {forms}")
            found[name] = {weight: form for weight, form in forms.items() if form is not None}
        return found

    def form(self, weight: str, entry: dict | bool | None, plain: bool) -> Form | None:
        """`entry` is its entry in `layers`; without one, `plain` says whether it is packed."""
        if entry is False or (entry is None and not plain):
            return None
        settings = {"format": self.format, "bits": self.bits_of(weight), "group_size": self.group_size}
        return Form.of(**settings | (entry or {}))

    def entry(self, prefix: str, *names: str) -> dict | bool | None:
        """The entry in `layers` of the first of these names that has one, with or without the base model's prefix."""
        for name in names if self.layers else ():
            for known in (name, prefix + name, name.removeprefix(prefix)):
                if known in self.layers:
                    return self.layers[known]
        return None

    def skips_weights(self, name: str, weights: list[str]) -> bool:
        """Whether `skip` names all weights of a module one by one. Raises if it names only some of them."""
        for pattern in self.skip:
            hit = [weight for weight in weights if within(pattern, weight)]
            if hit and len(hit) < len(weights):
                raise ValueError(
                    f"torch_moe_metal: skip: expected names of whole modules, got {pattern!r}: {' and '.join(weights)} "
                    f"are packed together; skip {name.rpartition('.')[2]!r}"
                )
            if hit:
                return True
        return False

    def plan(self, model: nn.Module, absent: Collection[str] = ()) -> Plan:
        """How to pack the dense weights, except in `absent` modules. Raises if experts cannot be packed."""
        modules, tied = dict(packable(model)), tied_head(model)
        found = {
            name: forms
            for name, forms in self.forms(model).items()
            if forms and not is_packed(modules[name]) and name not in absent and can_pack(name, modules[name], forms)
        }
        if tied and not found.keys() >= set(tied):  # the shared weight is packed in both or in neither
            found = {name: forms for name, forms in found.items() if name not in tied}
        return found

    def expect_names(self, model: nn.Module) -> None:
        """Raises if a pattern or name matches no module."""
        modules = {name for name, _ in model.named_modules() if name}
        single = {each for name, part in packable(model) for each in (name, *weight_names(name, part).values())}
        packed = {weight for weight in single if not any(within(pattern, weight) for pattern in ALWAYS_DENSE)}
        prefix = f"{getattr(model, 'base_model_prefix', '')}."

        def expect(argument: str, name: str, right: bool) -> None:
            if not right:
                raise ValueError(
                    f"torch_moe_metal: {argument}: expected names of modules in {type(model).__name__}"
                    f"{'' if argument == 'skip' else ' that can be packed'}, got {name!r}"
                )

        for pattern in self.skip:
            expect("skip", pattern, any(within(pattern.removeprefix("!"), name) for name in modules | single))
        for pattern in self.bits_by_name:
            expect("bits_by_name", pattern, any(within(pattern.removeprefix("!"), name) for name in packed))
        for name in self.layers:
            expect("layers", name, not single.isdisjoint({name, prefix + name, name.removeprefix(prefix)}))


# ------------------------------------------------------------------------------------------------ parts of a model


def packable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose weights are packed or can be: experts, `nn.MoE`, linear layers and the embedding. Without
    PEFT's adapters, because they are trained."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    wrapped = tuple(f"{name}." for name, module in model.named_modules() if "base_layer" in module._modules)
    for name, module in model.named_modules():
        if name.startswith(wrapped) and "base_layer" not in name.split("."):
            continue
        known = type(module) in (nn.Linear, Linear, TiedLinear, Embedding) or is_experts(module) or is_moe(module)
        if known or (module is embedding and embedding_multiplier(module) is not None):
            yield name, module


def weight_names(name: str, module: nn.Module) -> dict[str, str]:
    """The full name of each of its weights, by the op's name for it."""
    if is_experts(module):
        return {weight: f"{name}.{projection}" for weight, projection in PROJECTIONS.items()}
    weights = PROJECTIONS if is_moe(module) else ("weight",)
    return {weight: f"{name}.{weight}" for weight in weights}


def tower_prefixes(model: nn.Module) -> tuple[str, ...]:
    """The prefixes of modules in vision and audio towers, in models that also have text."""
    found = set()
    for part in model.modules():
        config = getattr(part, "config", None)
        if hasattr(type(part), "get_encoder") and getattr(config, "text_config", None) is not None:
            found |= {id(part.get_encoder(modality=modality)) for modality in ("image", "audio")} - {id(part)}
    return tuple(f"{name}." for name, part in model.named_modules() if id(part) in found)


def can_pack(name: str, module: nn.Module, forms: dict[str, Form]) -> bool:
    """Whether a module's dense weights can be packed in these forms. Warns if they stay dense; raises for experts whose
    columns do not fit."""
    reason = why_not_packed(module) if is_experts(module) else None
    if reason is not None:
        logger.warning(f"torch_moe_metal: {name} stays dense: {reason}")
        return False
    for (weight, form), rows in zip(forms.items(), rows_of(module).values(), strict=True):
        if form.fits(rows.shape[-1]):
            continue
        if isinstance(module, nn.Linear | nn.Embedding):
            logger.warning(f"torch_moe_metal: {name} stays dense: its {rows.shape[-1]} columns do not fit")
            return False
        raise ValueError(
            f"torch_moe_metal: {weight}: its {rows.shape[-1]} columns are no multiple of the group, {form.group_size}; "
            "choose another, or skip it"
        )
    return True


# ------------------------------------------------------------------------------------------------ packing


def pack_all(model: nn.Module, plan: Plan, parts: Callable[[str, Tensor, Form], Parts], progress: bool = False) -> None:
    """Pack the planned modules one after the other; an exception leaves each of them either dense or packed. `parts`
    makes the parts of each weight."""
    tied = tied_head(model)
    embedding, head = tied if tied and tied[0] in plan else (None, None)
    names = [name for name in plan if name != head]
    for name in logging.tqdm(names, desc="Quantising", disable=not progress):
        forms, module = plan[name], model.get_submodule(name)
        form, last = next(iter(forms.values())), next(reversed(forms.values()))
        with all_or_nothing(model if name == embedding else model.get_submodule(name.rpartition(".")[0])):
            if is_moe(module):
                module.quantize_(**asdict(form))
            else:
                of_form = lambda weight, dense, forms=forms: parts(weight, dense, forms[weight])  # noqa: E731
                pack(model, name, form.format, of_form, last.format)
            if name == embedding:
                replace_tied(model, embedding, head)


def alike(names: Iterable[str]) -> list[str]:
    """These names with layer numbers replaced by a star, without duplicates."""
    return list(dict.fromkeys(re.sub(r"\d+(?=\.)", "*", name) for name in names))


def described(model: nn.Module, config: MoeMetalConfig) -> MoeMetalConfig:
    """The same configuration, with `layers` that describe how this model is packed."""
    plain = MoeMetalConfig(config.format, config.bits, config.group_size, config.skip, config.bits_by_name)
    modules, layers = dict(packable(model)), {}
    for name, forms in plain.forms(model).items():
        found = forms_now(name, modules[name])
        if forms and not found:
            layers[name] = False
        layers |= {weight: form.settings for weight, form in found.items() if forms.get(weight) != form}
    plain.layers = layers
    return plain


def forms_now(name: str, module: nn.Module) -> dict[str, Form]:
    """How the weights of a module are packed; empty for a dense module."""
    if isinstance(module, TiedLinear):
        return {f"{name}.weight": Form.now(module.embedding[0], "weight")}
    names = weight_names(name, module)
    return {names[weight]: Form.now(module, weight) for weight in getattr(module, "packing", None) or {}}
