"""Reads GGUF files of Hugging Face's hub, of which the cache may have one part only."""

import re
from collections.abc import Container
from pathlib import Path

from . import SPLIT, GgufFile, parts_of
from . import read as read_file

#: A file in the hub's cache: the cache, the repository, its commit, and the name of the file in it.
IN_CACHE = re.compile(r"(.*)/models--([^/]+)/snapshots/([0-9a-f]{40})/(.+)")


def read(path: str, strings: Container[str] = ()) -> GgufFile:
    """Read a file. All parts of a split file are downloaded first, because transformers downloads only one."""
    found, cached = SPLIT.fullmatch(Path(path).name), IN_CACHE.fullmatch(Path(path).as_posix())
    if found and cached:
        from huggingface_hub import hf_hub_download

        cache, repository, commit, name = cached.groups()
        for part in parts_of(Path(path), int(found[3])):
            if not part.is_file():
                there = (Path(name).parent / part.name).as_posix()
                hf_hub_download(repository.replace("--", "/"), there, revision=commit, cache_dir=cache)
    return read_file(path, strings)
