"""Compiles in the background the kernels that a model's first calls need.

A warm-up call is a forward of a module on the meta device, where tensors have no memory. The MPS kernels of the ops run
up to `launch`, which compiles the Metal kernels that it would encode, and stops. So no list of kernels is needed.
"""

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from .arguments import DTYPES

#: Token counts of the warm-up calls. For most models these lengths reach every choice that depends on the length of a
#: prompt, such as the size of tiles. A model's first call is a prompt, and its next ones are single tokens. A batch or
#: a draft has two or four tokens, for which `linear` has its own kernels.
TOKENS = (512, 1, 2048, 128, 32, 4, 2)
#: Threads that compile. Each library is compiled by one thread, and most ops need one or two libraries.
THREADS = 4
#: An environment variable: 0 disables warm-up, except explicit calls of `warm_up`.
SWITCH = "MOE_METAL_WARM_UP"
MPS = torch._C.DispatchKeySet(torch._C.DispatchKey.MPS)


class _Local(threading.local):
    is_warmup = False


_local = _Local()
_known: set[tuple] = set()  # signatures of the parts that were warmed up or are queued
_known_lock = threading.Lock()
_threads: list[threading.Thread] = []


@contextlib.contextmanager
def as_warmup() -> Iterator[None]:
    """Calls of this thread on meta tensors are warm-up calls."""
    _local.is_warmup = True
    try:
        with torch.no_grad():
            yield
    finally:
        _local.is_warmup = False


def is_warmup() -> bool:
    """Whether this thread is making a warm-up call."""
    return _local.is_warmup


def warm_up(model: nn.Module, wait: bool = False) -> None:
    """Compile the kernels that `model` will launch on mps, in the background, or `wait` for them.

    Without it a kernel is compiled at its first launch, and the first calls wait about 0.1 s for each kind of kernel.
    `patch` and `nn.MoE` warm up automatically if the model is on mps or is moved there; MOE_METAL_WARM_UP=0 disables
    this. A model with `experts_implementation="moe_metal"` and without `patch` needs an explicit call. A kernel that
    does not compile raises when an op needs it, not here. Kernels without a verdict for this GPU and macOS are also
    checked, which waits for them (first_use.py). An op that needs a kernel which is not ready waits for that
    kernel only.
    """
    from . import first_use

    calls = deque(new_calls(model, _known))
    _threads[:] = [thread for thread in _threads if thread.is_alive()]
    for _ in range(min(THREADS, len(calls))):
        _threads.append(threading.Thread(target=work, args=(calls,), name="torch_moe_metal.warm_up"))
        _threads[-1].start()
    if wait:
        wait_for_all()
    first_use.check(model)


def wait_for_all() -> None:
    """Wait for all background compilation."""
    while _threads:
        _threads.pop().join()


def warm_up_best_effort(model: nn.Module) -> None:
    """Automatic `warm_up`: failures are ignored."""
    if os.environ.get(SWITCH) != "0":
        with contextlib.suppress(Exception):
            warm_up(model)


def new_calls(model: nn.Module, known: set[tuple], counts: tuple[int, ...] = TOKENS) -> Iterator[Callable[[], object]]:
    """The warm-up calls of the model's parts on mps, without parts that equal one that is known. Then they are."""
    parts = {signature(part): part for part in parts_of(model) if on_mps(part)}
    # Activations have the dtype of the first weight that is not packed.
    held = (tensor.dtype for name, tensor in tensors(model) if "scale" not in name)
    dtype = next((dtype for dtype in held if dtype in DTYPES), None)
    with _known_lock:
        new = [meta_copy(part) for key, part in parts.items() if (key, dtype) not in known]
        known.update((key, dtype) for key in parts)
    for tokens in counts:
        for part in new:
            yield lambda part=part, tokens=tokens: warmup_call(part, tokens, dtype)


def parts_of(model: nn.Module) -> Iterator[nn.Module]:
    """Our modules, and transformers' experts that use our op without one of our modules around them."""
    ours = [part for part in model.modules() if hasattr(part, "_warmup_call")]
    yield from ours
    inside = {id(module) for part in ours for module in part.modules()}
    yield from (module for module in model.modules() if id(module) not in inside and uses_our_op(module))


def uses_our_op(module: nn.Module) -> bool:
    """Whether these are experts of transformers whose configuration selects our op."""
    experts = imported_experts()
    config = module.__dict__.get("config")
    return bool(experts and "has_gate" in module.__dict__ and config._experts_implementation == experts.NAME)


def imported_experts() -> object | None:
    """The module torch_moe_metal.transformers.fusing.experts, if it is imported already: it needs transformers."""
    return sys.modules.get(f"{__package__}.transformers.fusing.experts")


#: The names of the number of experts per token in transformers' configurations; it can change which kernels are used.
TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")


def warmup_call(part: nn.Module, tokens: int, dtype: torch.dtype) -> None:
    if hasattr(part, "_warmup_call"):
        part._warmup_call(tokens, dtype)
        return
    arguments, _ = imported_experts().expert_arguments(part)
    width = arguments["down"].shape[2 if arguments.get("transposed") else 1]
    top_k = next((getattr(part.config, name) for name in TOP_K if hasattr(part.config, name)), 1)
    x, weights = (torch.empty(tokens, size, dtype=dtype, device="meta") for size in (width, top_k))
    part(x, weights.long(), weights)


def work(calls: deque[Callable[[], object]]) -> None:
    """Make all calls, or stop early when the main thread ends, because Python waits for this thread at exit.

    Errors are ignored: the real call will raise them."""
    with as_warmup():
        while threading.main_thread().is_alive():
            try:
                call = calls.popleft()
            except IndexError:
                return
            with contextlib.suppress(Exception):
                call()


# ------------------------------------------------------------------------------------------------ copies on meta


def tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def on_mps(module: nn.Module) -> bool:
    devices = {tensor.device.type for _, tensor in tensors(module)}
    return devices == {"mps"}


def signature(module: nn.Module) -> tuple:
    """Equal for modules whose calls launch the same kernels."""
    parts = [
        (name, tensor.shape, tensor.stride(), tensor.storage_offset() * tensor.element_size() % 16, tensor.dtype)
        for name, tensor in tensors(module)
    ]
    return type(module), module.extra_repr(), *parts


def meta(tensor: Tensor) -> Tensor:
    """A tensor of the same sizes, strides, offset and dtype, without memory."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    empty = torch.empty(elements, dtype=tensor.dtype, device="meta")
    empty = empty.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def meta_copy(module: nn.Module) -> nn.Module:
    """The same module on the meta device, without hooks. It shares everything except tensors and modules."""
    copy = object.__new__(type(module))
    fresh = nn.Module()
    copy.__dict__ |= {name: value for name, value in module.__dict__.items() if name != "forward"}
    copy.__dict__ |= {name: value for name, value in fresh.__dict__.items() if "hooks" in name}
    for name, make in (("_parameters", meta), ("_buffers", meta), ("_modules", meta_copy)):
        parts = module.__dict__[name].items()
        copy.__dict__[name] = {part: None if value is None else make(value) for part, value in parts}
    return copy
