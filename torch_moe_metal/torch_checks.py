"""Operations of PyTorch on Apple GPUs that models rely on and that were wrong in some versions, without an error.

`doctor` and the check at first use make these checks. Each function returns None, or what is wrong.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

BFLOAT, FLOAT = torch.bfloat16, torch.float32
DRAWS, TIMES = 2**24, 8  # of which a few were -0.0: with 99 % chance at least one
VOCABULARY = 152_064
LONG = 32_771  # rows of a product that M1 and M2 added up wrongly


def random(*shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def differs(got: Tensor, want: Tensor, allowed: float) -> bool:
    got, want = got.cpu().double(), want.double()
    return not (got - want).norm() <= allowed * want.norm()


def bias(device: str) -> str | None:
    for shape, dtype in (((1, 1, 256), FLOAT), ((2, 64, 128), BFLOAT), ((80, 1, 2), FLOAT), ((80, 1, 2), BFLOAT)):
        x, weight, added = random(*shape, dtype=dtype), random(7, shape[-1], dtype=dtype), random(7, dtype=dtype)
        want = x.double() @ weight.double().T + added.double()
        if differs(F.linear(*(tensor.to(device) for tensor in (x, weight, added))), want, 1e-2):
            return f"F.linear of {list(shape)} in {str(dtype)[6:]} with a bias"
    return None


def repeated(device: str) -> str | None:
    for shape in ((2, 13, 1024), (1, 33, 2048)):
        x, weight = random(*shape, dtype=BFLOAT), random(64, shape[-1], dtype=BFLOAT)
        on_device = x.to(device), weight.to(device)
        first, second = F.linear(*on_device), F.linear(*on_device)
        if not torch.equal(first, second) or differs(first, x.double() @ weight.double().T, 1e-2):
            return f"F.linear of {list(shape)} in bfloat16, twice"
    return None


def draws(device: str) -> str | None:
    random, memory = torch.Generator(device).manual_seed(0), torch.empty(DRAWS, dtype=FLOAT, device=device)
    if any(bool((memory.exponential_(generator=random) <= 0).any()) for _ in range(TIMES)):
        return "exponential_ draws 0, so that tokens of probability 0 are sampled"
    return None


def attention(device: str) -> str | None:
    """Keys and values are views of larger memory, as in a cache with room; four heads share a key head."""
    for D, S in ((64, 33), (128, 97), (256, 33)):
        T, room, mask = 33, 128, torch.ones(33, S, dtype=torch.bool).tril(S - 33)
        q = random(2, 8, T, D, dtype=BFLOAT)
        k, v = (random(2, 2, room, D + at, dtype=BFLOAT)[..., :D].to(device)[:, :, :S] for at in range(2))
        given = {"is_causal": True} if S == T else {"attn_mask": mask.to(device)}
        got = F.scaled_dot_product_attention(q.to(device), k, v, enable_gqa=True, **given)
        exact = (tensor.cpu().double().repeat_interleave(4, 1) for tensor in (k, v))
        if differs(got, F.scaled_dot_product_attention(q.double(), *exact, attn_mask=mask), 2e-2):
            return f"scaled_dot_product_attention of {T} queries, {S} keys and heads of {D}"
    return None


def long_sums(device: str) -> str | None:
    memory = torch.full((1, 32_832, 16), 1e3, device=device)
    memory[:, :LONG] = 1
    if (torch.ones(1, 16, LONG, device=device) @ memory[:, :LONG] != LONG).any():
        return f"a product with {LONG} columns reads beyond the last one"
    return None


def rows_of_a_cache(device: str) -> str | None:
    for T in (1, 5):
        cache, rows = torch.zeros(2, 3, 64, 40, dtype=BFLOAT, device=device), random(2, 3, T, 40, dtype=BFLOAT)
        cache.narrow(-2, 7, T).copy_(rows.to(device))
        both, parts = torch.zeros(1, 1, 64, 576, dtype=BFLOAT, device=device), random(1, 1, T, 576, dtype=BFLOAT)
        for room, part in zip(both.split([512, 64], -1), parts.split([512, 64], -1), strict=True):
            room[:, :, 7 : 7 + T].copy_(part.to(device))
        for memory, want in ((cache, rows), (both, parts)):
            got = memory.cpu()
            if not torch.equal(got[:, :, 7 : 7 + T], want) or got[:, :, :7].any() or got[:, :, 7 + T :].any():
                return f"copy_ of {T} rows into a cache"
    return None


def largest(device: str) -> str | None:
    logits = random(1, VOCABULARY).masked_fill(torch.arange(VOCABULARY) % 100 > 0, -torch.inf)
    for place in (0, 4096, VOCABULARY - 1):
        given = logits.clone()
        given[0, place] = 9
        on_device = given.to(device)
        if on_device.argmax(-1).item() != place:
            return f"argmax of {VOCABULARY} with the largest at {place}"
        (values, indices), want = on_device.topk(50), given.sort(descending=True)
        if not torch.equal(indices.cpu(), want.indices[:, :50]) or not torch.equal(values.cpu(), want.values[:, :50]):
            return f"topk of {VOCABULARY}"
        if differs(on_device.softmax(-1), given.double().softmax(-1), 1e-5):
            return f"softmax of {VOCABULARY}"
    return None


CHECKS: tuple[Callable[[str], str | None], ...] = (
    bias,
    repeated,
    draws,
    attention,
    long_sums,
    rows_of_a_cache,
    largest,
)


def problem(check: Callable[[str], str | None], device: str) -> str | None:
    """None, or what is wrong. An exception is, whatever it is."""
    try:
        return check(device)
    except Exception as error:
        return f"{check.__name__}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def wrong_operations(device: str) -> list[str]:
    return [line for check in CHECKS if (line := problem(check, device))]
