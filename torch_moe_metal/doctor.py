"""`python -m torch_moe_metal doctor`: what is installed and loaded, and whether every op gives the right answer."""

import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator

import torch
from torch import Tensor

from . import __version__, cpu_isa, reference

T, E, K, H, I = 5, 33, 3, 96, 40  # nothing round: tails and partial groups of lanes are where kernels go wrong
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def sample_arguments(op: str, device: str, dtype: torch.dtype) -> tuple[list[Tensor], dict]:
    """Small arguments for one op, the same on every device."""
    random = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype).to(device)

    def slots_and_weights() -> list[Tensor]:
        return [tensor(T, K, H), tensor(T, K).float()]

    logits = torch.stack([torch.randperm(E, generator=random) for _ in range(T)]) / 8.0
    ids = torch.stack([torch.randperm(E, generator=random)[:K] for _ in range(T)])
    arguments = {
        "gate": lambda: [torch.eye(T, H, dtype=dtype, device=device), tensor(E, H), tensor(H)],
        "route": lambda: [logits.to(dtype).to(device)],
        "glu": lambda: list(tensor(T, 2 * I).chunk(2, -1)),
        "experts": lambda: [tensor(T, H), tensor(T, K).float(), ids.to(device), tensor(E, 2 * I, H), tensor(E, H, I)],
        "weighted_sum": slots_and_weights,
        "weighted_sum_residual_": lambda: [tensor(T, H), *slots_and_weights()],
        "weighted_sum_residual_norm_": lambda: [tensor(T, H), *slots_and_weights(), tensor(H)],
        "weighted_sum_norm_add": lambda: [*slots_and_weights(), tensor(T, H), tensor(H)],
        "weighted_sum_dual_norm_add": lambda: [*slots_and_weights(), tensor(T, H), tensor(H), tensor(H)],
        "norm_add": lambda: [tensor(T, H), tensor(T, H), tensor(H), tensor(1)],
        "residual_norm": lambda: [tensor(T, H), tensor(T, H), tensor(H)],
    }
    return arguments[op](), {"top_k": K} if op in ("gate", "route") else {}


def outputs(result: Tensor | tuple | None, arguments: list[Tensor]) -> list[Tensor]:
    """What an op produced, on the CPU: its results, or its first argument when it works in place."""
    results = [arguments[0]] if result is None else [result] if isinstance(result, Tensor) else list(result)
    return [r.detach().cpu() for r in results]


def check(op: str, device: str, dtype: torch.dtype) -> str | None:
    """None when the op agrees with the reference in float64, else what went wrong."""
    arguments, options = sample_arguments(op, device, dtype)
    exact = [a.cpu().double() if a.is_floating_point() else a.cpu() for a in arguments]
    try:
        with torch.no_grad():
            got = outputs(getattr(torch.ops.moe_metal, op)(*arguments, **options), arguments)
            want = outputs(getattr(reference, op)(*exact, **options), exact)
    except Exception as error:  # whatever it is, the report must go on to the other ops
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for index, (g, w) in enumerate(zip(got, want, strict=True)):
        if not g.is_floating_point():
            if not torch.equal(g, w):
                return f"output {index}: wrong expert ids"
            continue
        error = ((g.double() - w.double()).norm() / w.double().norm()).item()
        if not error <= TOLERANCE[g.dtype]:
            return f"output {index}: relative error {error:.1e}, allowed {TOLERANCE[g.dtype]:.0e}"
    return None


def has_kernel(device: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("moe_metal::gate", device.upper())


def devices() -> Iterator[tuple[str, str | None]]:
    """Each device and, when the ops cannot run on it, what to do about that."""
    yield "cpu", None
    if not torch.backends.mps.is_built():
        yield "mps", "this PyTorch is built without MPS; on a Mac with Apple silicon, install torch from PyPI"
    elif not torch.backends.mps.is_available():
        yield "mps", "PyTorch finds no usable Apple GPU; macOS 14 or newer on Apple silicon is needed"
    elif not has_kernel("mps"):
        yield "mps", "the package was built without its MPS backend; reinstall it on this Mac"
    else:
        yield "mps", None


def installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def run() -> int:
    """Print the report. 0 when every op is right on every device that is there, else 1."""
    system = f"macOS {platform.mac_ver()[0]}" if platform.mac_ver()[0] else platform.platform()
    print(f"torch_moe_metal {__version__}   torch {torch.__version__}   transformers {installed('transformers')}")
    print(f"Python {platform.python_version()}   {system}   {platform.machine()}")
    print(f"CPU kernels: {cpu_isa}, {torch.get_num_threads()} threads")
    failures = 0
    for device, missing in devices():
        if missing:
            print(f"\n{device}: not available: {missing}")
            continue
        print(f"\n{device}: every op against the float64 reference")
        for op in (function.__name__ for function in reference.OPS):
            wrong = {str(d).removeprefix("torch."): w for d in TOLERANCE if (w := check(op, device, d))}
            print(f"  {op:28} {'ok' if not wrong else 'FAILED'}", *(f"\n      {d}: {w}" for d, w in wrong.items()))
            failures += bool(wrong)
    if failures:
        print(
            f"\n{failures} failed. Rebuild against the torch that is installed (`pip install --no-build-isolation "
            "--force-reinstall --no-deps .`) and try again; if it still fails, please report it with this output."
        )
    return 1 if failures else 0
