"""Pairwise grids: rows of a table in which any two values of any two columns occur together."""

import zlib
from collections.abc import Callable, Iterator
from itertools import combinations, product

from cases.case import BFLOAT, FLOAT, HALF, Case


def pairwise(fits: Callable[..., bool], **factors: tuple) -> list[dict]:
    """Rows in which any two values of any two factors occur together at least once, if a row that `fits` allows it."""
    pairs = {((a, x), (b, y)) for a, b in combinations(factors, 2) for x in factors[a] for y in factors[b]}
    order = [((a, x), (b, y)) for a, b in combinations(factors, 2) for x in factors[a] for y in factors[b]]
    smallest = {name: values[0] for name, values in factors.items()}
    rows = []
    for pair in order:
        if pair not in pairs:
            continue
        row = dict(pair)
        for name, values in factors.items():
            if name not in row:
                turn = len(rows) % len(values)  # equally good values take turns
                fitting = [v for v in values[turn:] + values[:turn] if fits(**(smallest | row | {name: v}))]
                if fitting:
                    row[name] = max(
                        fitting, key=lambda v: sum(_pair(factors, name, v, other) in pairs for other in row.items())
                    )
        row = {name: row.get(name, smallest[name]) for name in factors}
        if fits(**row):
            rows.append(row)
            pairs.difference_update(combinations(row.items(), 2))
    return rows


def _pair(factors: dict, name: str, value, other: tuple) -> tuple:
    first = list(factors).index(name) < list(factors).index(other[0])
    return ((name, value), other) if first else (other, (name, value))


def crossed(**factors: tuple) -> Iterator[tuple]:
    """Every combination of the values, and whether it is only in the full grid. In the fast set any two values occur
    together at least once, which finds faults of one value or of two together."""
    fast = {tuple(row.values()) for row in pairwise(lambda **_: True, **factors)}
    for values in product(*factors.values()):
        yield *values, values not in fast


E_GRID = (
    1, 2, 6, 7, 8, 16, 31, 32, 33, 40, 48, 60, 63, 64, 65, 71, 96, 127, 128, 129, 160, 256, 257, 288, 384, 512, 1024,
)  # fmt: skip
K_GRID = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 22, 32, 64, "E")
T_GRID = (0, 1, 2, 3, 5, 7, 8, 17, 31, 32, 33, 64, 129, 512, 4097)
H_GRID = (1, 3, 17, 64, 96, 511, 512, 555, 704, 768, 1408, 2048, 2816, 2880, 4096, 7168)
PAIRS = ((FLOAT, None), (HALF, None), (BFLOAT, None), (HALF, FLOAT), (BFLOAT, FLOAT))


def grid_case(op: str, row: dict, given: tuple[str, ...], options: dict, prepare=None) -> Case:
    dims = {letter: row[letter] for letter in "TEKHIU" if letter in row}
    name = "grid-" + "-".join(f"{letter}{size}" for letter, size in dims.items())
    extras = [v for v in options.values() if v is not None and v not in (False, 1, 1.0, 0.0) and v != row.get("K")]
    name += "".join(f"-{extra}" for extra in (*extras, *given)) + ("" if prepare is None else f"-{prepare.__name__}")
    dtype, parameters = row["dtypes"]
    name += "-p32" if parameters else ""
    one_in_four = zlib.crc32(name.encode()) % 4 == 0
    return Case(op, name, dims, given, options, dtype, parameters, prepare, full_grid=not one_in_four)


def resolve_top_k(K, E: int) -> int:
    return E if K == "E" else K
