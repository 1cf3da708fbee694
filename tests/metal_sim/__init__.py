"""A simulated Metal, in two parts. README.md in this folder says what is simulated and what is checked.

from metal_sim import engine            # shaders alone, with numpy arrays as buffers

import metal_sim                        # torch.device("mps") on Linux
metal_sim.load(metal_sim.Project(...))  # builds what changed, registers the device and the project's ops
with metal_sim.record() as record:      # counts what the ops inside do
    ...
print(record.dispatches, record.host_syncs, record.host_seconds)
"""

import importlib
import os
from pathlib import Path

# Otherwise the engine uses __FILE__, which a compiler cache may have made a relative path.
os.environ.setdefault("METAL_SIM_HOME", str(Path(__file__).resolve().parent / "engine"))

DEVICE = (
    *("Compiled", "Costs", "Dispatch", "Project", "Record"),
    *(
        "compiled",
        "concurrent_encoders",
        "failing_commits",
        "host_only",
        "last_threadgroups",
        "live_objects",
        "load",
        "made_objects",
        "more_threadgroups",
        "new_command_buffers",
        "playing_gpu",
        "playing_macos",
        "playing_memory",
        "record",
        "recording_encoders",
    ),
    *("set_orders", "synchronize"),
)


def __getattr__(name: str):
    """The device's names are imported lazily, since the engine alone does not need PyTorch."""
    if name in DEVICE:
        return getattr(importlib.import_module(".device", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
