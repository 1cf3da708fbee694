"""Finds the stored tensors that each of a model's tensors is made of, and checks them before any is loaded."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from .checkpoint import Stored

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sources:
    """The stored tensors of one of a model's tensors, by the patterns of the conversion that reads them. A pattern with
    a star is for the tensors of single experts. Without a conversion there is one tensor and no pattern."""

    converter: WeightConverter | None
    by_pattern: dict[str | None, list[Stored]] = field(default_factory=dict)

    def __iter__(self):
        return (stored for group in self.by_pattern.values() for stored in group)

    @property
    def patterns(self) -> list[str | None]:
        """All patterns that the conversion reads, including those without a stored tensor."""
        return [None] if self.converter is None else self.converter.source_patterns

    @property
    def is_checked_by_its_operations(self) -> bool:
        """Whether it is read by operations of ours that know what they take."""
        return self.converter is not None and any(
            getattr(each, "hf_quantizer", 0) for each in self.converter.operations
        )

    def expect(self, shapes: Iterable[Shape], dtypes: tuple[str, ...]) -> None:
        """Raises if they do not make a tensor of one of these shapes. There is one tensor of such a shape, or, for a
        shape [E, N, ...], one per expert."""
        shapes, first = list(shapes), next(iter(self))
        for stored in self:
            stored.expect(stored.dtype in dtypes, f"{', '.join(dtypes)} by the format and the model's configuration")
        if "*" in (self.patterns[0] or ""):
            (experts, rows, *rest), *_ = shapes
            self.expect_experts(experts, [(rows // len(self.patterns), *rest)])
        elif len(self.patterns) == 1:
            first.expect(first.shape in shapes, f"shape {list(shapes[0])}, by the model's configuration")

    def expect_patterns(self, patterns: Iterable[str | None]) -> None:
        for pattern in patterns:
            next(iter(self)).expect(pattern in self.by_pattern, f"{pattern} as well, by the model's configuration")

    def expect_experts(self, experts: int, shapes: list[Shape]) -> None:
        """Raises unless each pattern has one tensor per expert, of one of these shapes."""
        self.expect_patterns(self.patterns)
        for pattern, given in self.by_pattern.items():
            for stored in given:
                stored.expect(stored.shape in shapes, f"shape {list(shapes[0])}, by the model's configuration")
            expect_all_experts(given, pattern, experts)


def expect_all_experts(given: list[Stored], pattern: str, experts: int) -> None:
    """Raises unless these are one tensor per expert, in order."""
    numbers = [expert_of(stored.name) for stored in given]
    missing = sorted(set(range(experts)) - set(numbers))
    got = f"without {', '.join(map(str, missing))}" if missing else f"in turn, of which {len(numbers)} are stored"
    expected = f"{pattern} of the experts 0 to {experts - 1}, by the model's configuration, {got}"
    given[0].expect(numbers == list(range(experts)), expected)


def expert_of(name: str) -> int:
    """The index of the expert that this tensor belongs to."""
    numbers = re.findall(r"\.(\d+)(?=\.)", name)
    return int(numbers[-1]) if numbers else -1


def sources_of(
    model: nn.Module, tensors: Mapping[str, Stored], conversions: list[WeightTransform]
) -> dict[str, Sources]:
    """The sources of each of a model's tensors that has any, by its name, found as transformers does."""
    known = model.state_dict()
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, Sources] = {}
    for name in sorted(tensors, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if key not in known and name in known:
            key, pattern = rename_source_key(name, [], [], model.base_model_prefix, known)
        if key in known:
            sources = found.setdefault(key, Sources(by_pattern.get(pattern)))
            sources.by_pattern.setdefault(pattern, []).append(tensors[name])
    return found
