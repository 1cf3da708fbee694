"""The options for prefixes on disk. transformers is imported only when a model is loaded."""

import hashlib
import json
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from .cli import CannotRun, at_least_0
from .loading import Source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .prefix_folder import PrefixFolder


def add_prefix_cache(parser: ArgumentParser) -> None:
    folder = "keep the caches of earlier prompts in this folder as well, so that they outlive the process"
    parser.add_argument("--prefix-cache", type=Path, metavar="FOLDER", help=folder)
    disk = "limit of that folder; what was not used for the longest time is deleted (default: 20)"
    parser.add_argument("--prefix-disk", type=at_least_0, default=20.0, metavar="GB", help=disk)


def check_prefix_cache(options: Namespace) -> None:
    """Make the folder. Raises `CannotRun` if no file can be written there."""
    folder = options.prefix_cache
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"1")
            file.flush()
    except OSError as error:
        raise CannotRun(f"--prefix-cache: cannot write to {folder}: {error.strerror}") from error


def open_prefix_cache(
    options: Namespace, source: Source, model: "PreTrainedModel", template: str | None
) -> "PrefixFolder | None":
    if options.prefix_cache is None:
        return None
    from .prefix_folder import PrefixFolder

    return PrefixFolder(options.prefix_cache, options.prefix_disk * 1e9, identity(options, source, model, template))


def identity(options: Namespace, source: Source, model: "PreTrainedModel", template: str | None) -> str:
    """A hash of all that the cache of a prompt depends on."""
    import transformers

    from ... import __version__

    path, commit = Path(source.path), getattr(model.config, "_commit_hash", None)
    found: list[tuple] = [(source.path, source.gguf_file, commit)]
    if path.is_dir():
        files = [path / source.gguf_file] if source.gguf_file else sorted(path.iterdir())
        found = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    how = [str(model.device), str(model.dtype), options.bits, options.format]
    versions = [__version__, transformers.__version__]
    return hashlib.sha256(json.dumps([found, how, versions, template]).encode()).hexdigest()
