"""What a dispatch did, counted. A proxy: bytes that instructions move and things that are met for, no time."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Costs:
    """Of a whole grid: counts of those threadgroups that ran, scaled up where only a sample of it ran."""

    device_loaded: int = 0  # bytes that each thread asked for; an atomic that writes loads and stores
    device_stored: int = 0
    constant_loaded: int = 0  # of bound buffers and setBytes; what a shader's text holds is not counted
    threadgroup_loaded: int = 0
    threadgroup_stored: int = 0
    matrix_multiplications: int = 0  # of 8x8 matrices, once for a simdgroup, as are those below it
    simd_functions: int = 0  # sums, scans, shuffles, votes; quad functions too
    simdgroup_barriers: int = 0
    threadgroup_barriers: int = 0  # once for a threadgroup
    threadgroups: int = 0  # of the grid
    threadgroups_run: int = 0

    @classmethod
    def scaled(cls, counted: dict[str, int]) -> "Costs":
        """From what the threadgroups that ran were counted to do."""
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
