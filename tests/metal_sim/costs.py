"""Counts of what a dispatch did: bytes that instructions move, and operations of simdgroups. A proxy, not a time."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Costs:
    """Counts for a whole grid. If only a sample of its threadgroups ran, the counts are scaled up."""

    device_loaded: int = 0  # bytes, per thread; an atomic that writes counts as a load and a store
    device_stored: int = 0
    constant_loaded: int = 0  # from bound buffers and setBytes; constants in the shader's text are not counted
    threadgroup_loaded: int = 0
    threadgroup_stored: int = 0
    matrix_multiplications: int = 0  # of 8x8 matrices, once per simdgroup, as the next two
    simd_functions: int = 0  # sums, scans, shuffles, votes; quad functions too
    simdgroup_barriers: int = 0
    threadgroup_barriers: int = 0  # once per threadgroup
    threadgroups: int = 0  # of the grid
    threadgroups_run: int = 0

    @classmethod
    def scaled(cls, counted: dict[str, int]) -> "Costs":
        """Scale up the counts of the threadgroups that ran."""
        grid = {name: counted[name] for name in ("threadgroups", "threadgroups_run")}
        return cls(**{name: n * grid["threadgroups"] // grid["threadgroups_run"] for name, n in counted.items()} | grid)

    @property
    def exact(self) -> bool:
        """Whether every threadgroup ran."""
        return self.threadgroups_run == self.threadgroups

    @property
    def device_bytes(self) -> int:
        return self.device_loaded + self.device_stored

    @property
    def threadgroup_bytes(self) -> int:
        return self.threadgroup_loaded + self.threadgroup_stored

    def __add__(self, other: "Costs") -> "Costs":
        return Costs(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Costs)))
