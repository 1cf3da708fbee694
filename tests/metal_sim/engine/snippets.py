"""Small kernels, each with one feature that Apple's compiler accepts or refuses, and the expected result of the checks.

They are in snippets/*.metal, each below a line `//: name | Apple | found | reason`:

    name    of the snippet; name_{a b} makes two of it, in which NAME is a or b
    Apple   ok, refuses, or ? if it is not known; `refuses <4.0` and `refuses >=4.1` apply to some languages only
    found   the check that must refuse it: a rule of metal_rules.py, translation (translate.py), newer_language or
            address_spaces (address_spaces.py), engine (shim/); or accepted; omitted if Apple says ok
    reason  why `found` differs from Apple's behaviour, or what is special about it

`python snippets.py` prints the table, with the current results; `python snippets.py FOLDER` does so for the .metal
files in a folder. All snippets are compiled together, each in its own namespace, in one run of clang.
"""

import itertools
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import address_spaces  # noqa: E402
import metal_rules  # noqa: E402, F401
import translate  # noqa: E402
from metal_tokens import RefusedError  # noqa: E402

ENGINE = [
    f"@{HERE / 'shim' / 'compile_flags.txt'}",
    "-x",
    "c++",
    f"-I{HERE / 'shim'}",
    "-fsyntax-only",
    "-ferror-limit=0",
]
ENGINE += ["-fno-caret-diagnostics", "-"]
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
KERNEL = "kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]])"


@dataclass
class Snippet:
    source: str
    apple: str
    found: str
    reason: str

    def is_refused(self, version):
        """Whether the checks must refuse it in this version of Metal."""
        if self.found == "accepted":
            return False
        limit = re.search(r"(<|>=)(\d)\.(\d)", self.apple)
        if limit:
            below = version < int(limit[2]) * 100 + int(limit[3]) * 10
            return below == (limit[1] == "<")
        return True


def read():
    """All snippets by name."""
    found = {}
    for path in sorted((HERE / "snippets").glob("*.metal")):
        for part in re.split("^//: ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            line, text = part.split("\n", 1)
            names, apple, by, reason, *_ = [*(cell.strip() for cell in line.split(" | ")), "", "", ""]
            text = text.replace("KERNEL", KERNEL)
            text = text if "#include <" in text or names.startswith("lib_no_include") else HEAD + text
            for name, word in expanded(names):
                assert name not in found, name
                found[name] = Snippet(text.replace("NAME", word), apple, by or "accepted", reason)
    return found


def expanded(names):
    match = re.fullmatch(r"(.*)\{(.*)\}", names)
    return [(match[1] + word, word) for word in match[2].split()] if match else [(names, "")]


def refusals(sources, version):
    """{name: {check: message}} of refused snippets; a check is a rule's name, "address_spaces" or "engine"."""
    found = {name: {} for name in sources}
    with ThreadPoolExecutor(2) as pool:
        both = pool.map(lambda name: translations(sources[name], version, found[name]), sources)
        texts = dict(zip(sources, both, strict=True))
        batches = [pool.submit(check, texts, version) for check in (check_address_spaces, check_engine)]
        for name, check, message in itertools.chain.from_iterable(batch.result() for batch in batches):
            found[name].setdefault(check, message)
    return found


def alone(source, version):
    """The refusals of a single snippet."""
    return refusals({"alone": source}, version)["alone"]


def translations(source, version, refused):
    """The two translations of a shader; None for one that is refused."""
    texts = []
    for front_end in (address_spaces.translated, translate.translate):
        try:
            texts.append(front_end(source, version))
        except RefusedError as error:
            refused[getattr(error, "rule", "translation")] = str(error)
            texts.append(None)
    return texts


def check_address_spaces(texts, version):
    text = together({name: both[0] for name, both in texts.items() if both[0]})
    command = [translate.find_compiler(), *address_spaces.FLAGS, "-fsyntax-only", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    newer = address_spaces.newer_language(done.stderr, version)
    messages = address_spaces.without_temporaries(address_spaces.without_warnings(done.stderr))
    yield from by_name(address_spaces.in_metal_words(messages), "address_spaces")
    yield from by_name(newer, "newer_language")


def check_engine(texts, version, flags=()):
    """Repeated without refused snippets until all are accepted: clang only reports the first use of a template."""
    include = '#include "metal.h"\n'
    left = {name: both[1].removeprefix(include) for name, both in texts.items() if both[1]}
    command = [translate.find_compiler(), *flags, *ENGINE]
    while True:
        done = subprocess.run(command, input=include + together(left), capture_output=True, text=True)
        found = list(by_name(done.stderr, "engine"))
        if not found:
            return
        yield from found
        left = {name: text for name, text in left.items() if name not in {name for name, _, _ in found}}


def together(texts):
    parts = (
        f"namespace of_{name} {{\n{text.replace('program_source', f'of_{name}')}\n}}\n" for name, text in texts.items()
    )
    return "".join(parts)


def by_name(messages, check):
    """Every error with the name of its shader: the first one that the error or one of its notes mentions."""
    name = None
    starts = r"^(?=(?:In file included from .*\n)*.*\berror: )"
    for group in re.split(starts, messages, flags=re.MULTILINE):
        # An error at the same place of the same template as the one before has no notes.
        name = next(iter(re.findall(r"^of_(\w+):\d+", group, re.MULTILINE)), name)
        if "error: " in group:
            yield name, check, next(line for line in group.splitlines() if "error: " in line)


def shown(found):
    return ", ".join(found) or "accepted"


def print_table(rows):
    """rows: (name, Apple's behaviour, {version: the checks that refuse it}, reason)"""
    for name, apple, found, reason in rows:
        by = [shown(found[version]) for version in address_spaces.VERSIONS]
        now = by[0] if len(set(by)) == 1 else " | ".join(by)
        print(f"{name:36} {apple:14} {now}{reason and f'  ({reason})'}")


def main():
    if sys.argv[1:]:
        files = {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(sys.argv[1]).glob("*.metal"))}
        snippets = {name: Snippet(text, text.splitlines()[0][3:17], "", "") for name, text in files.items()}
    else:
        snippets = read()
    sources = {name: snippet.source for name, snippet in snippets.items()}
    found = {version: refusals(sources, version) for version in address_spaces.VERSIONS}
    print(f"{'snippet':36} {'Apple':14} refused by, as Metal 3.1 | 3.2 | 4.0 | 4.1 where they differ")
    print_table((name, s.apple, {v: found[v][name] for v in found}, s.reason) for name, s in snippets.items())


if __name__ == "__main__":
    main()
