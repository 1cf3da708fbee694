"""Makes transformers read metadata of GGUF files through our reader, which checks them and supports split files, and
makes Auto classes accept the path of a GGUF file."""

import functools
import itertools
import re
import sys
from collections.abc import Callable, Container
from pathlib import Path

from ..gguf import STAMPS, architecture_of
from ..gguf.hub import read
from ..transformers_support import packed_checkpoints

#: Tensors whose values are part of the configuration.
VALUES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
#: The metadata key for the file's name, used in messages.
PATH = "torch_moe_metal.path"


def read_gguf_metadata(stock, path: str, string_arrays: Container[str] = ()) -> tuple[dict, tuple[str, ...]]:
    """Replaces transformers' function of this name. The values of the tensors in VALUES, which scale the rotation, are
    added to the metadata."""
    if not packed_checkpoints():
        return stock(path, string_arrays)
    file = read(path, string_arrays)
    values = {name: file.tensors[name] for name in VALUES if name in file.tensors and not file.tensors[name].is_packed}
    known = {name: tensor.mapped().flatten().tolist() for name, tensor in values.items()}
    own = {"general.architecture": architecture_of(file), PATH: path}
    return file.metadata | known | own, tuple(file.tensors)


def read_known_metadata(stock, path: str) -> tuple[dict, tuple[str, ...]]:
    """The same, when the metadata are used for a model: raises if the architecture is not supported."""
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    found = read_gguf_metadata(stock, path)
    name = found[0]["general.architecture"]
    others = {re.sub(r"\W|_", "", each) for each in GGUF_SUPPORTED_ARCHITECTURES}  # transformers' spelling
    if name not in GGUF_CONFIG_ARCHS and re.sub(r"\W|_", "", name) not in others:
        known = ", ".join(sorted({*GGUF_CONFIG_ARCHS, *GGUF_CONFIG_ARCHS.ours}))
        raise ValueError(
            f"torch_moe_metal: {path}: general.architecture: expected {known}, or one that transformers dequantises, "
            f"got {name!r}"
        )
    return found


class Architectures(dict):
    """transformers' table of configurations, plus ours while packed checkpoints are enabled."""

    @functools.cached_property
    def ours(self) -> dict:
        from ..transformers.checkpoints.gguf.config import CONFIGS

        return {name: of_file(config) for name, config in CONFIGS.items() if name not in self.keys()}

    def __contains__(self, name) -> bool:
        return super().__contains__(name) or (packed_checkpoints() and name in self.ours)

    def __missing__(self, name):
        return self.ours[name]


def of_file(config):
    """Wraps a function that makes a configuration, so that its errors name the file."""

    def named(metadata: dict, tensor_names: tuple[str, ...]) -> dict:
        try:
            return config(metadata, tensor_names)
        except ValueError as error:
            raise ValueError(f"torch_moe_metal: {metadata.get(PATH)}: {error}") from None

    return named


def take_paths(name: str) -> None:
    """Make `from_pretrained` of this module's Auto classes also accept just the path of a GGUF file."""
    for cls in list(vars(sys.modules[name]).values()):
        if isinstance(cls, type) and cls.__module__ == name and "from_pretrained" in vars(cls):
            stock = vars(cls)["from_pretrained"].__func__
            cls.from_pretrained = by_path(naming_file(stock) if cls.__name__ == "AutoTokenizer" else stock)


def naming_file(stock: Callable) -> Callable:
    """Makes errors about a file's tokenizer name the file: those of libraries are about lists and keys."""

    @functools.wraps(stock)
    def from_pretrained(cls, name, *args, **kwargs):
        try:
            return stock(cls, name, *args, **kwargs)
        except (ImportError, OSError):  # a package or a file is missing
            raise
        except Exception as error:
            file = kwargs.get("gguf_file")
            if file is None or not packed_checkpoints() or file in str(error):
                raise
            said = f"{type(error).__name__}: {error}"
            raise ValueError(f"torch_moe_metal: {Path(name) / file}: its tokenizer cannot be read: {said}") from error

    return from_pretrained


def by_path(stock: Callable) -> classmethod:
    @functools.wraps(stock)
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        path = Path(str(pretrained_model_name_or_path))
        if path.suffix == ".gguf" and not path.is_dir() and kwargs.get("gguf_file") is None and packed_checkpoints():
            if not path.is_file():  # a name on the hub does not end like this
                raise FileNotFoundError(f"torch_moe_metal: no such file: {path}")
            pretrained_model_name_or_path, kwargs["gguf_file"] = str(path.parent), path.name
        return stock(cls, pretrained_model_name_or_path, *args, **kwargs)

    return classmethod(from_pretrained)


def check_files_in_generate() -> None:
    """Make `generate` raise if a file has changed whose pages are the model's weights. Otherwise the model would change
    silently, or, if the file is shorter, the process would end with SIGBUS."""
    mixin = sys.modules["transformers.generation.utils"].GenerationMixin
    stock = mixin.generate

    @functools.wraps(stock)
    def generate(self, *args, **kwargs):
        for stamp in vars(self).get(STAMPS, ()):
            stamp.expect_unchanged(itertools.chain(self.parameters(), self.buffers()))
        return stock(self, *args, **kwargs)

    mixin.generate = generate


def register() -> None:
    """Make transformers read GGUF files through our reader."""
    from transformers.integrations import gguf as home
    from transformers.integrations.gguf import gguf_config_mapping, reader

    table = Architectures(gguf_config_mapping.GGUF_CONFIG_ARCHS)
    gguf_config_mapping.GGUF_CONFIG_ARCHS = home.GGUF_CONFIG_ARCHS = table
    stock = reader.read_gguf_metadata
    reader.read_gguf_metadata = functools.partial(read_gguf_metadata, stock)
    home.read_gguf_metadata = functools.partial(read_known_metadata, stock)
