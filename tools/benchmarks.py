"""Writes what is generated: BENCHMARKS.md and the README's table of figures from the JSON files in benchmarks/, and the
list of ops in docs/ops.md by ops_page.py. `make benchmarks` runs it.

    python tools/benchmarks.py            # write them
    python tools/benchmarks.py --check    # fail if they differ from the files

Each JSON file is the output of one of our commands with --json, and contains the command, the date and the machine. The
text above its table is the .md file of the same name. benchmarks/losses.md ends the page. benchmarks/notes/ is not
generated.
"""

import argparse
import json
import sys
from pathlib import Path

import ops_page

ROOT = Path(__file__).resolve().parents[1]
FOLDER, PAGE, README = ROOT / "benchmarks", ROOT / "BENCHMARKS.md", ROOT / "README.md"
LAST, OPS = FOLDER / "losses.md", ROOT / "docs" / "ops.md"
HEAD = """# Benchmarks

`make benchmarks` writes this page from the files in [benchmarks/](benchmarks). **None of these is an Apple figure**:
this has not run on a Mac yet. If you own a Mac, please send us what `make report` writes, with the issue form.

| column | meaning |
| --- | --- |
| x PyTorch | the time of PyTorch's or transformers' fastest way over ours, in turns: 2.00 is twice as fast |
| x dense | the same against our own op with bfloat16 weights |
| GB/s | each byte of a row counts once |
| of limit | GB/s over the memory bandwidth that the same run measured, the limit of decode |
"""
# Keys that the heading or the tables show; the others are listed under the heading.
SHOWN = {"command", "date", "machine", "system", "notes", "rows", "ops", "families", "before", "tuning"}
# Keys that the head of the page shows if they have one value in all files.
SHARED = ("machine", "system", "torch_moe_metal", "torch", "threads")


def cells(*values: object) -> str:
    return f"| {' | '.join(map(str, values))} |"


def table(columns: tuple[str, ...], rows: list[tuple]) -> str:
    return "\n".join([cells(*columns), cells(*["---"] * len(columns)), *(cells(*row) for row in rows)])


def without_empty(columns: tuple[str, ...], rows: list[tuple]) -> tuple[tuple[str, ...], list[tuple]]:
    """Omits columns without values."""
    kept = [i for i in range(len(columns)) if any(row[i] != "" for row in rows)]
    return tuple(columns[i] for i in kept), [tuple(row[i] for i in kept) for row in rows]


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def differing(values: list[str]) -> list[str]:
    """The values without the words that all have, or as they are if there is only one."""
    common = set.intersection(*(set(value.split()) for value in values)) if len(values) > 1 else set()
    return [" ".join(word for word in value.split() if word not in common) for value in values]


def rows_of_bench(rows: list[dict]) -> str:
    """What all rows have in common (op, sizes, dtype) is in the text above them."""
    packed = any(map(is_packed, rows))
    columns = ("op", "shape", "dtype", *["format"] * packed, "us", "GB/s", "of limit")
    columns += (*["x dense", "x MLX"] * packed, "x PyTorch", "fastest of PyTorch")
    words = zip(*(differing([row[name] for row in rows]) for name in ("op", "shape", "dtype", "limit")), strict=True)
    lines = [
        (
            *described,
            *[row.get("format", "dense")] * packed,
            number(row["us"], ".1f"),
            number(row["gb_per_s"], ".1f"),
            f"{row['of_limit']:.0%} {limit}".strip() if row["of_limit"] else "",
            *[number(row.get(ratio), ".2f") for ratio in ("x_dense", "x_mlx")] * packed,
            number(row["x_pytorch"], ".2f"),
            (row["fastest_pytorch"] or "").removeprefix("transformers "),
        )
        for row, (*described, limit) in zip(rows, words, strict=True)
    ]
    return table(*without_empty(columns, lines))


def is_packed(row: dict) -> bool:
    """Files that predate packed formats have no key for them."""
    return row.get("format", "dense") != "dense"


def rows_of_model(rows: dict[str, dict[str, float]]) -> str:
    """In the order of the file, with its columns."""
    stock = rows["stock"]

    def cell(key: str, value: float) -> str:
        if key == "weights GB":
            return f"{value:.1f} GB"
        if key in ("ops per token", "replayed layers"):
            return f"{value:.0f}"
        return f"{value:.1f} ({value / stock[key]:.2f} x)"

    columns = ("", *(key.removesuffix(" GB") for key in stock))
    return table(columns, [(name, *(cell(key, row[key]) for key in stock)) for name, row in rows.items()])


def with_commits(columns: tuple[str, ...], lines: list[tuple], rows: dict[str, dict]) -> str:
    """A table with one more column if commits were counted."""
    if all("commits" in row for row in rows.values()):
        columns += ("commits",)
        lines = [(*line, f"{row['commits']:.2f}") for line, row in zip(lines, rows.values(), strict=True)]
    return table(columns, lines)


def rows_of_dispatches(found: dict, ops: bool = True) -> str:
    """One token of a model, one layer of each family, and if `ops` each op alone."""
    decoding = with_commits(
        (
            f"one token, {found['layers']} layers",
            "ops",
            "of ours",
            "their dispatches",
            "a block alone: ops",
            "dispatches",
        ),
        [
            (name, row["ops"], row["ours"], row["dispatches"], row["block_ops"], row["block_dispatches"])
            for name, row in found["rows"].items()
        ],
        found["rows"],
    )
    families = table(
        ("one token, one layer", "transformers' ops", "ops", "of ours", "their dispatches"),
        [(name, row["stock"], row["ops"], row["ours"], row["dispatches"]) for name, row in found["families"].items()],
    )
    return "\n\n".join([decoding, families, *[rows_of_ops(found)] * ops])


def rows_of_ops(found: dict) -> str:
    return with_commits(
        ("op, T = 1", "dispatches", "MB bound", "host us", "times `torch.add`"),
        [
            (name, row["dispatches"], f"{row['mb_bound']:.2f}", f"{row['host_us']:.1f}", f"{row['x_add']:.1f}")
            for name, row in found["ops"].items()
        ],
        found["ops"],
    )


#: Columns of a row of costs: heading and number format.
COSTS = {
    "device_mb_loaded": ("device MB loaded", ",.1f"),
    "device_mb_stored": ("stored", ",.1f"),
    "threadgroup_bytes_per_matrix": ("threadgroup bytes per matrix", ",.0f"),
    "matrices": ("matrices", ",.0f"),
    "barriers": ("barriers", ",.0f"),
    "simd_functions": ("simd functions", ",.0f"),
    "useful_rows": ("useful rows", ".0%"),
}


def rows_of_costs(found: dict, kernels: bool = False) -> str:
    """One line per call, with the counts of `before` in parentheses, and below it one per kernel if `kernels`."""
    before = {key_of_costs(row): row for row in found.get("before", [])}
    lines = []
    for row in found["rows"]:
        key = key_of_costs(row)
        lines.append((*key, *[""] * kernels, *cost_cells(row, before.get(key, {}))))
        if kernels:
            lines += [("", "", "", f"`{kernel['kernel']}`", *cost_cells(kernel, {})) for kernel in row["kernels"]]
    return table(("model", "weights", "T", *["kernel"] * kernels, *(head for head, _ in COSTS.values())), lines)


def key_of_costs(row: dict) -> tuple:
    return row["model"], row["format"], row["T"]


def cost_cells(row: dict, before: dict) -> list[str]:
    def cell(name: str, form: str) -> str:
        was = number(before.get(name), form)
        return number(row.get(name), form) + (f" ({was})" if was else "")

    return [cell(name, form) for name, (_, form) in COSTS.items()]


def shared(found: list[dict]) -> dict[str, object]:
    """What of SHARED is the same in all files that have it."""
    values = {key: {one[key] for one in found if key in one} for key in SHARED}
    return {key: one.pop() for key, one in values.items() if len(one) == 1}


def section(file: Path, known: dict[str, object]) -> str:
    found = {key: value for key, value in json.loads(file.read_text()).items() if key not in known}
    words = file.with_suffix(".md")
    rows = found["rows"]
    if "ops" in found:
        body = rows_of_dispatches(found, ops=False)
    else:
        body = rows_of_bench(rows) if isinstance(rows, list) else rows_of_model(rows)
    about = ", ".join(
        f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}"
        for key, value in found.items()
        if key not in SHOWN
    )
    title, _, text = (words.read_text() if words.exists() else f"{file.stem}\n").partition("\n")
    parts = [
        f"## {title.lstrip('# ')}",
        text.strip().replace("](../", "]("),  # the page is in the parent folder
        " · ".join([f"`{found['command']}`", *(found[key] for key in ("date", "machine", "system") if key in found)])
        + f"  \n{about}",
        "\n".join(f"- {note}" for note in found.get("notes", [])),
        body,
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def files() -> list[Path]:
    return sorted(FOLDER.glob("*.json"), key=lambda file: int(file.stem.partition("-")[0]))


def page() -> str:
    known = shared([json.loads(file.read_text()) for file in files()])
    values = (value if key in ("machine", "system") else f"{key} {value}" for key, value in known.items())
    where = f"All tables: {', '.join(values)}.\n"
    sections = (section(file, known) for file in files())
    return "\n".join([HEAD, where, *sections, LAST.read_text().replace("](../", "](")])


def figures() -> str:
    """The README's table: a block and a whole model, compared with transformers."""
    bench = json.loads((FOLDER / "1-block.json").read_text())
    model = json.loads((FOLDER / "4-model.json").read_text())["rows"]
    blocks = [row for row in bench["rows"] if row["op"] == "block" and row["dtype"] == "bf16" and row["T"] != 4]
    rows = []
    for row in (row for row in blocks if not is_packed(row)):
        best, ours = row["us"] * row["x_pytorch"] / 1e3, row["us"] / 1e3
        tokens = f"{row['T']} token{'s' * (row['T'] > 1)}"
        rows.append((f"MoE block, {tokens}", f"{best:.1f} ms", f"{ours:.1f} ms", f"{row['x_pytorch']:.1f}"))
    for key in (key for key in model["stock"] if "tokens/s" in key):
        what, _, context = key.partition(" tokens/s")
        behind = f" at a context of {int(context.removeprefix(' at ')):,}" if context else ""
        best = max(row[key] for name, row in model.items() if name.startswith("stock"))
        ours = model["patch"][key]
        rows.append((f"4 layers, {what}{behind}", f"{best:.1f} tokens/s", f"{ours:.1f} tokens/s", f"{ours / best:.1f}"))
    return table(("Qwen3-30B-A3B, bf16", "transformers' best", "torch_moe_metal", "ratio"), rows) + "\n"


def with_part(page: Path, name: str, part: str) -> str:
    """The page with a new part between the comments that name its beginning and its end."""
    before, begin, rest = page.read_text().partition(f"<!-- {name}:")
    comment, close, old = rest.partition(" -->\n")
    return before + begin + comment + close + part + "".join(old.partition(f"<!-- end of {name} -->")[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    options = parser.parse_args()
    pages = {
        PAGE: page(),
        README: with_part(README, "figures", figures()),
        OPS: with_part(OPS, "ops", ops_page.text()),
    }
    old = []
    for file, text in pages.items():
        if file.exists() and file.read_text() == text:
            continue
        old.append(file.name)
        if not options.check:
            file.write_text(text)
    if options.check and old:
        print(f"{' and '.join(old)}: out of date; run `make benchmarks`", file=sys.stderr)
        return 1
    print(f"{', '.join(old) or 'nothing'} written" if not options.check else "up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
