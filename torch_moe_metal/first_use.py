"""The check at first use: before a model runs on a GPU, the kernels that it needs compute small cases.

No machine of ours has every Apple GPU, and Apple's compiler changes with each macOS. So when `patch`, `nn.MoE` or a
loader brings weights to mps, warm-up calls find the kernels that they need, and those without a verdict for this GPU,
macOS, torch and package (verdicts.py) are compared with the CPU. A wrong kernel is refused with a warning, and the next
way computes instead: first another kernel of ours, by a setting of the GPU, then PyTorch (refused.py). The kernels of
that way are checked in the same manner. TORCH_MOE_METAL_CHECK=0 skips all of it.
"""

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from . import gpu_settings, macos, refused, torch_checks, verdicts
from .checked_kernels import HELPERS, Check, Kernel, check_of, kernels_of
from .samples import SAMPLES
from .warmup import TOKENS, new_calls, tensors, warm_up_best_effort

#: An environment variable: 0 skips the check.
SWITCH = "TORCH_MOE_METAL_CHECK"
#: From how many tokens or slots per weight on the matrix units are used, if they are right and `tune` has not chosen.
ROWS_FOR_UNITS = 24

#: Token counts with kernels that those of warm-up do not need.
MORE_TOKENS = (10,)

_MOST = 1 << 30
#: The settings without which a kernel is not used, by the beginning of its function's name; the first one counts.
WAYS: tuple[tuple[str, gpu_settings.Settings], ...] = (
    ("linear_rows4", {"tokens_together": 2}),
    ("linear_rows2", {"tokens_together": 1}),
    ("linear_rows", {"few_tokens": 0}),
    ("linear_tiles16", {"tile32_min_rows": 1}),
    ("linear_tiles32", {"tile32_min_rows": _MOST, "tile64_min_rows": _MOST}),
    ("linear_tiles64", {"tile64_min_rows": _MOST}),
    ("experts_gate_up_rows2", {"gate_up_pairs_percent": 0}),
    ("experts_down_rows2", {"down_pairs_percent": 0}),
    ("experts_gate_up_tiles16", {"tile32_min_rows": 1}),
    ("experts_down_tiles16", {"tile32_min_rows": 1}),
    ("experts_gate_up_tiles32", {"tile32_min_rows": _MOST, "tile64_min_rows": _MOST}),
    ("experts_down_tiles32", {"tile32_min_rows": _MOST, "tile64_min_rows": _MOST}),
    ("experts_gate_up_tiles64", {"tile64_min_rows": _MOST}),
    ("experts_gate_up_", {"decode_max_slots_percent": 0}),
    ("experts_down_", {"decode_max_slots_percent": 0}),
    ("gate_tile", {"gate_min_tiles": _MOST}),
    ("gate_logits_4", {"gate_min_tiles": 0}),
    ("attention_combine", {"attention_keys": _MOST}),
)

_checked: set[tuple] = set()  # signatures of the parts whose kernels were checked
_lock = threading.Lock()  # of what follows
_verdict: verdicts.Verdict | None = None


def weights_arrived(model: nn.Module) -> None:
    """Called when weights of `model` may have come to mps: compiles its kernels in the background, and checks them."""
    warm_up_best_effort(model)
    check(model)


def check(model: nn.Module) -> None:
    """Check the kernels that the parts of `model` on mps need, unless that is done."""
    if os.environ.get(SWITCH) == "0" or not gpu_settings.is_built() or torch.compiler.is_compiling():
        return
    if any(isinstance(tensor, FakeTensor) for _, tensor in tensors(model)):
        return
    try:
        calls = [*new_calls(model, _checked, (*TOKENS, *MORE_TOKENS))]
    except Exception as error:
        warnings.warn(f"torch_moe_metal: {could_not_run(error)}", stacklevel=3)
        return
    if calls:  # in a thread of its own, without the caller's modes: autocast, inference, default device and others
        messages: list[str] = []
        thread = threading.Thread(target=check_calls, args=(calls, messages), name="torch_moe_metal.first_use")
        thread.start()
        thread.join()
        for message in messages:
            warnings.warn(f"torch_moe_metal: {message}", stacklevel=3)


def check_calls(calls: Sequence[Callable[[], object]], messages: list[str]) -> None:
    """Check the kernels of these calls on meta tensors. Warnings are added to the messages."""
    global _verdict
    with _lock, torch.no_grad():
        try:
            _verdict = _verdict or verdicts.load()
            messages += FirstUse(_verdict).check(calls)
        except Exception as error:
            messages.append(could_not_run(error))


def could_not_run(error: Exception) -> str:
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"the check of the GPU's kernels could not run, so nothing is known about them: {why}"


class FirstUse:
    """The check of one model's kernels."""

    def __init__(self, verdict: verdicts.Verdict):
        self.verdict = verdict
        self.steps: dict[Kernel, int] = {}  # how many of its ways round were tried
        self.news: list[str] = []  # what is wrong, for the warning

    def check(self, calls: Sequence[Callable[[], object]]) -> list[str]:
        """-> what to warn about"""
        self.check_torch()
        use_matrix_units()
        known = len(self.verdict.right) + len(self.verdict.errors)
        while True:  # each time a kernel is replaced, others may be needed
            wanted = with_dequantize(kernels_of(calls))
            self.find_errors(wanted)
            wrong = [kernel for kernel in wanted if kernel.key in self.verdict.errors and self.steps.get(kernel, 0) < 3]
            if not wrong:
                break
            for kernel in wrong:
                self.go_round(kernel)
        if unknown := [str(kernel) for kernel in wanted if not self.verdict.knows(kernel.key)]:
            self.news.append(f"not checked: {', '.join(unknown)}")
        if len(self.verdict.right) + len(self.verdict.errors) > known:
            verdicts.save(self.verdict)
        return self.report()

    def find_errors(self, kernels: Sequence[Kernel]) -> None:
        """Give a verdict on each of these kernels that has none."""
        new = [kernel for kernel in kernels if not self.verdict.knows(kernel.key)]
        like = next((kernel for kernel in new if kernel.function.startswith(("experts_", "tensor_"))
                     and kernel.function not in HELPERS), None)  # fmt: skip
        for kernel in sorted(new, key=lambda kernel: kernel.function in HELPERS):
            if not self.verdict.knows(kernel.key) and (found := check_of(kernel, like or kernel)) is not None:
                self.judge(found)

    def judge(self, check: Check) -> None:
        """A right result clears all kernels that computed it. A wrong one accuses those that the sample is for."""
        keys = {kernel.key: kernel.function for kernel in check.kernels}
        errors, error = self.verdict.wrong, None
        try:
            error = check.problem()
        except Exception as raised:
            errors, error = self.verdict.failed, (str(raised).splitlines() or [type(raised).__name__])[0]
        if error is None:
            self.verdict.right |= keys.keys() - self.verdict.errors.keys()
            return
        accused = (key for key, function in keys.items() if function in check.sample.functions)
        errors |= {key: error for key in accused if key not in self.verdict.right}

    def go_round(self, kernel: Kernel) -> None:
        """Refuse a wrong kernel, and take the next way without it."""
        step = self.steps[kernel] = self.steps.get(kernel, 0) + 1
        if step == 1:
            kernel.refuse()
            self.news.append(f"kernel {kernel}: {self.verdict.errors[kernel.key]}")
            with contextlib.suppress(StopIteration):
                way = next(settings for name, settings in WAYS if kernel.function.startswith(name))
                gpu_settings.use(gpu_settings.current() | way)
        elif step == 2:
            refused.refuse(op := op_of(kernel))
            self.news.append(f"PyTorch's ops compute {op}")
        else:
            self.news.append(f"nothing replaces {kernel}, so calls that need it raise an error")

    def check_torch(self) -> None:
        """The operations of PyTorch that models rely on."""
        for check in torch_checks.CHECKS:
            name = f"torch.{check.__name__}"
            if not self.verdict.knows(name):
                error = torch_checks.problem(check, "mps")
                self.verdict.wrong |= {name: error} if error else {}
                self.verdict.right |= set() if error else {name}
            if name in self.verdict.errors:
                self.news.append(f"PyTorch's {self.verdict.errors[name]}")
                if check is torch_checks.attention:
                    refused.refuse(refused.SDPA)

    def report(self) -> list[str]:
        new = [line for line in dict.fromkeys(self.news) if line not in _reported]
        _reported.update(new)
        if not new:
            return []
        system = f"{gpu_settings.gpu()}, macOS {macos.version()} ({macos.build()}), torch {torch.__version__}"
        return [
            f"wrong on {system}: {'; '.join(new)}. Models use another way where there is one, which may be slower. "
            "Please report it with the output of `python -m torch_moe_metal doctor`"
        ]


_reported: set[str] = set()


def with_dequantize(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Also the kernels by which PyTorch's ops read the packed weights of these."""
    packed = {(kernel.format, kernel.dtypes) for kernel in kernels if kernel.format != "dense"}
    return [*dict.fromkeys([*kernels, *(Kernel("dequantize", *each, "256") for each in packed)])]


def op_of(kernel: Kernel) -> str:
    return next(sample.op for sample in SAMPLES if kernel.function in sample.functions)


def use_matrix_units() -> None:
    """Turn on the kernels for the matrix units of M5, which are then checked like all others."""
    if not torch.ops.moe_metal._has_matrix_units() or gpu_settings.is_saved("tensor_ops"):
        return
    current = gpu_settings.current()
    if current["tensor_ops"] == 0:
        gpu_settings.use(current | {"tensor_ops": ROWS_FOR_UNITS})
