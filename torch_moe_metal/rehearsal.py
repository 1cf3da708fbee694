"""Compiling in the background what a model's first calls would wait for.

A rehearsal is a forward of a module on the meta device, where nothing has memory. The ops' part for mps runs in it as
ever, up to `launch`, which compiles the kernels that it would encode, and stops. So nobody keeps a list of kernels.
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

#: Tokens of the calls that are rehearsed. What a prompt's length decides, such as the size of tiles, decides it with
#: these lengths too, for most models. A prompt is a model's first call, and single tokens are its next. Two and four
#: are those of a batch or a draft, for which `linear` has kernels of its own.
TOKENS = (512, 1, 2048, 128, 32, 4, 2)
#: Threads that compile. A library is compiled by one of them, and most ops need one or two libraries.
THREADS = 4
#: 0 leaves everything to the first calls, unless `warm_up` itself is called.
SWITCH = "MOE_METAL_WARM_UP"
MPS = torch._C.DispatchKeySet(torch._C.DispatchKey.MPS)


class _Local(threading.local):
    rehearses = False


_local = _Local()
_known: set[tuple] = set()  # what has been rehearsed in this process, or soon will be
_known_lock = threading.Lock()
_threads: list[threading.Thread] = []


def rehearses() -> bool:
    """Whether what this thread does is a rehearsal."""
    return _local.rehearses


def warm_up(model: nn.Module, wait: bool = False) -> None:
    """Compile the kernels that `model` will launch on mps, in the background, or `wait` for them.

    Without it they are compiled at their first launch, which the first calls wait for: some 0.1 s for each kind of
    them. `patch` does this for a model on mps, and so do `nn.MoE` and the `.to("mps")` of either; MOE_METAL_WARM_UP=0
    stops that. A model whose experts alone are ours, by `experts_implementation`, is warmed up by this call. A kernel
    that does not compile raises when an op needs it, and not here. A call that needs one that is not ready waits for
    that one alone.
    """
    calls = deque(new_calls(model))
    _threads[:] = [thread for thread in _threads if thread.is_alive()]
    for _ in range(min(THREADS, len(calls))):
        _threads.append(threading.Thread(target=work, args=(calls,), name="torch_moe_metal.warm_up"))
        _threads[-1].start()
    if wait:
        wait_for_all()


def wait_for_all() -> None:
    """Wait for what is still compiled in the background."""
    while _threads:
        _threads.pop().join()


def warm_up_unasked(model: nn.Module) -> None:
    """`warm_up` where nobody called for it, and which nobody shall notice if it fails."""
    if os.environ.get(SWITCH) != "0":
        with contextlib.suppress(Exception):
            warm_up(model)


def new_calls(model: nn.Module) -> Iterator[Callable[[], object]]:
    """The calls of the model's parts on mps, for those of which there has been no equal one."""
    parts = {signature(part): part for part in parts_of(model) if on_mps(part)}
    # That of its activations is that of the first weight which is not packed.
    held = (tensor.dtype for name, tensor in tensors(model) if "scale" not in name)
    dtype = next((dtype for dtype in held if dtype in DTYPES), None)
    with _known_lock:
        new = [twin(part) for key, part in parts.items() if (key, dtype) not in _known]
        _known.update((key, dtype) for key in parts)
    for tokens in TOKENS:
        for part in new:
            yield lambda part=part, tokens=tokens: rehearse(part, tokens, dtype)


def parts_of(model: nn.Module) -> Iterator[nn.Module]:
    """Our modules, and experts of transformers that our op serves without one around them."""
    ours = [part for part in model.modules() if hasattr(part, "_rehearse")]
    yield from ours
    inside = {id(module) for part in ours for module in part.modules()}
    yield from (module for module in model.modules() if id(module) not in inside and is_served(module))


def is_served(module: nn.Module) -> bool:
    """Whether these are experts of transformers whose configuration selects our op."""
    served = integrated()
    config = module.__dict__.get("config")
    return bool(served and "has_gate" in module.__dict__ and config._experts_implementation == served.NAME)


def integrated() -> object | None:
    """torch_moe_metal.transformers.fusing.experts, if somebody has imported it: it needs transformers."""
    return sys.modules.get(f"{__package__}.transformers.fusing.experts")


#: What configurations of transformers call the experts of a token. Another number may decide for other kernels.
TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")


def rehearse(part: nn.Module, tokens: int, dtype: torch.dtype) -> None:
    if hasattr(part, "_rehearse"):
        part._rehearse(tokens, dtype)
        return
    arguments, _ = integrated().expert_arguments(part)
    width = arguments["down"].shape[2 if arguments.get("transposed") else 1]
    top_k = next((getattr(part.config, name) for name in TOP_K if hasattr(part.config, name)), 1)
    x, weights = (torch.empty(tokens, size, dtype=dtype, device="meta") for size in (width, top_k))
    part(x, weights.long(), weights)


def work(calls: deque[Callable[[], object]]) -> None:
    """Make the calls, until there are no more or Python comes to its end: it waits for this thread.

    What one of them raises, the real call will raise."""
    _local.rehearses = True
    with torch.no_grad():
        while threading.main_thread().is_alive():
            try:
                call = calls.popleft()
            except IndexError:
                return
            with contextlib.suppress(Exception):
                call()


# ------------------------------------------------------------------------------------------------ twins on meta


def tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def on_mps(module: nn.Module) -> bool:
    devices = {tensor.device.type for _, tensor in tensors(module)}
    return devices == {"mps"}


def signature(module: nn.Module) -> tuple:
    """What is equal for modules whose calls launch the same kernels."""
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


def twin(module: nn.Module) -> nn.Module:
    """The same module on meta, with nobody's hooks. All that is no tensor or module in it is the module's own."""
    copy = object.__new__(type(module))
    fresh = nn.Module()
    copy.__dict__ |= {name: value for name, value in module.__dict__.items() if name != "forward"}
    copy.__dict__ |= {name: value for name, value in fresh.__dict__.items() if "hooks" in name}
    for name, make in (("_parameters", meta), ("_buffers", meta), ("_modules", twin)):
        parts = module.__dict__[name].items()
        copy.__dict__[name] = {part: None if value is None else make(value) for part, value in parts}
    return copy
