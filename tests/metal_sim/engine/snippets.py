"""Small kernels, each with one thing that Apple's compiler accepts or refuses, and what the checks here say of them.

`python snippets.py` prints the table of all in snippets/; `python snippets.py FOLDER` that of the .metal files in a folder.
All are compiled together, each in a namespace of its own, so that one run of clang serves hundreds.
"""

import itertools
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import address_spaces  # noqa: E402
import translate  # noqa: E402
from metal_tokens import RefusedError  # noqa: E402

ENGINE = [f"@{HERE / 'shim' / 'compile_flags.txt'}", "-x", "c++", f"-I{HERE / 'shim'}", "-fsyntax-only", "-ferror-limit=0"]
ENGINE += ["-fno-caret-diagnostics", "-"]


def refusals(sources, version):
    """{name: {check: message}} of what is refused; a check is a rule's name, "address_spaces" or "engine"."""
    found = {name: {} for name in sources}
    with ThreadPoolExecutor(2) as pool:
        texts = dict(zip(sources, pool.map(lambda name: translations(sources[name], version, found[name]), sources)))
        batches = [pool.submit(check, texts, version) for check in (check_address_spaces, check_engine)]
        for name, check, message in itertools.chain.from_iterable(batch.result() for batch in batches):
            found[name].setdefault(check, message)
    return found


def translations(source, version, refused):
    """The two translations of a shader; one that is refused is None."""
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
    messages = address_spaces.without_warnings(done.stderr)
    yield from by_name(address_spaces.in_metal_words(messages), "address_spaces")
    yield from by_name(newer, "newer_language")


def check_engine(texts, version):
    include = '#include "metal.h"\n'
    text = together({name: both[1].removeprefix(include) for name, both in texts.items() if both[1]})
    done = subprocess.run([translate.find_compiler(), *ENGINE], input=include + text, capture_output=True, text=True)
    yield from by_name(done.stderr, "engine")


def together(texts):
    parts = (f"namespace of_{name} {{\n{text.replace('program_source', f'of_{name}')}\n}}\n" for name, text in texts.items())
    return "".join(parts)


def by_name(messages, check):
    """Every error with the name of its shader: the first that it, or a note to it, mentions."""
    name = None
    starts = r"^(?=(?:In file included from .*\n)*.*\berror: )"
    for group in re.split(starts, messages, flags=re.MULTILINE):
        # An error in the same place of the same template as the one before has no notes.
        name = next(iter(re.findall(r"^of_(\w+):\d+", group, re.MULTILINE)), name)
        if "error: " in group:
            yield name, check, next(line for line in group.splitlines() if "error: " in line)


def main():
    folder = Path(sys.argv[1])
    sources = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.metal"))}
    found = {version: refusals(sources, version) for version in address_spaces.VERSIONS}
    for name, source in sources.items():
        by = [",".join(found[v][name]) or "accept" for v in address_spaces.VERSIONS]
        shown = by[0] if len(set(by)) == 1 else " | ".join(by)
        print(f"{name:34} {source.splitlines()[0][3:70]:67} {shown}")


if __name__ == "__main__":
    main()
