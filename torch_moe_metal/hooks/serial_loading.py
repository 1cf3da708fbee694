"""Makes transformers load a model on mps in the thread that asks for it. transformers copies and converts tensors in
four threads, and PyTorch's operations on mps are not safe there: the process may crash (transformers#48029)."""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator

import torch

#: transformers' variable, which its loader reads when it starts. The environment belongs to all threads of the process.
VARIABLE = "HF_DEACTIVATE_ASYNC_LOAD"
_one_at_a_time = threading.RLock()


def is_mps(place) -> bool:
    """Whether an entry of a device map is mps: a device, its name, or its number."""
    if isinstance(place, int):
        place = torch.accelerator.current_accelerator()
    return str(place).partition(":")[0] == "mps"


@contextlib.contextmanager
def serially() -> Iterator[None]:
    with _one_at_a_time:
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = "1"
        try:
            yield
        finally:
            del os.environ[VARIABLE]
            if before is not None:
                os.environ[VARIABLE] = before


def load_serially_on_mps(name: str) -> None:
    """Change the loader in one module of transformers that has imported it."""
    module = sys.modules[name]
    stock = getattr(module, "convert_and_load_state_dict_in_model", None)
    if stock is None:  # modeling_layers of older versions
        return

    @functools.wraps(stock)
    def load(model, state_dict, load_config, *args, **kwargs):
        on_mps = any(map(is_mps, (load_config.device_map or {}).values()))
        with serially() if on_mps else contextlib.nullcontext():
            return stock(model, state_dict, load_config, *args, **kwargs)

    module.convert_and_load_state_dict_in_model = load
