"""Finds and loads the model of a command, and reports its memory.

transformers is imported only when a model is loaded, so that `--help` and wrong arguments respond immediately.
"""

import json
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import TYPE_CHECKING

import torch

from ...formats import BITS
from ...packing import WRITTEN
from .cli import CannotRun, positive, reason_of
from .devices import add_device, check_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: OWNER/NAME, optionally with @REVISION
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
MODEL = "a folder, a GGUF file, or a name on Hugging Face's hub: OWNER/NAME, OWNER/NAME@REVISION, OWNER/NAME:FILE.gguf"
DTYPES = ("auto", "bfloat16", "float16", "float32")
DEFAULT_CONTEXT = 32768  # if the model's configuration has no limit


@dataclass(frozen=True)
class Source:
    """The location of a model, for `from_pretrained`."""

    name: str  # as given by the user
    path: str
    revision: str | None = None
    gguf_file: str | None = None

    @classmethod
    def of(cls, name: str, gguf: str | None = None) -> "Source":
        """The source that MODEL and --gguf name. Raises `CannotRun` with the reason if there is none."""
        path, full_name = Path(name), name if gguf is None else f"{name}:{gguf}"
        if path.suffix == ".gguf" and path.is_file():
            if gguf is not None:
                raise CannotRun(f"--gguf: expected MODEL to be a folder or a name on the hub, got the file {name}")
            return cls(name, str(path.parent), gguf_file=path.name)
        if path.is_dir():
            if gguf is not None and not (path / gguf).is_file():
                raise CannotRun(f"--gguf: no such file: {path / gguf}")
            if gguf is None and not (path / "config.json").is_file():
                files = sorted(file.name for file in path.glob("*.gguf"))
                reason = f"choose a file with --gguf: {', '.join(files)}" if files else "it has no config.json"
                raise CannotRun(f"no checkpoint: {name}: {reason}")
            return cls(full_name, name, gguf_file=gguf)
        repository, _, file = name.partition(":")
        if path.suffix == ".gguf" and not file and gguf is None:
            raise CannotRun(f"no such file: {name}")
        if not HUB_NAME.fullmatch(repository) or (file and not file.endswith(".gguf")):
            raise CannotRun(f"no such file, folder or name on the hub: {name}")
        repository, _, revision = repository.partition("@")
        return cls(full_name, repository, revision or None, gguf or file or None)

    @property
    def where(self) -> dict[str, str]:
        """The keyword arguments of `from_pretrained`."""
        given = {"revision": self.revision, "gguf_file": self.gguf_file}
        return {name: value for name, value in given.items() if value is not None}


def add_model(parser: ArgumentParser) -> None:
    """Add the arguments for the model, its device and its format."""
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument("--gguf", metavar="FILE", help="a GGUF file in that folder or repository")
    add_device(parser)
    parser.add_argument("--bits", type=int, choices=BITS, help="quantise a dense checkpoint to so many bits on loading")
    parser.add_argument("--format", choices=WRITTEN, help="quantise a dense checkpoint to this format on loading")
    dtype = "of activations (default: auto, which is the checkpoint's own, or bfloat16 for a GGUF file)"
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help=dtype)
    context = "maximum tokens of a prompt and its answer together (default: the model's own limit)"
    parser.add_argument("--context", type=positive, metavar="N", help=context)


def check_model(options: Namespace) -> Source:
    """The source that the arguments of `add_model` name. Raises `CannotRun` if they contradict each other."""
    check_device(options.device)
    if options.format not in (None, "affine") and options.bits is not None:
        raise CannotRun(f"--bits: only the format affine has a choice of bits, got --format {options.format}")
    return Source.of(options.model, options.gguf)


def quantization(options: Namespace):
    """The `MoeMetalConfig` of --bits and --format, or None."""
    if options.bits is None and options.format is None:
        return None
    from ...transformers import MoeMetalConfig

    return MoeMetalConfig(format=options.format or "affine", bits=options.bits or 4)


@contextmanager
def loading(name: str, device: str) -> Iterator[None]:
    """Print that the model is loading, and raise `CannotRun` for every error: transformers raises a dozen kinds."""
    say(f"Loading {name} on {device} ...")
    try:
        yield
    except Exception as error:
        raise CannotRun(f"cannot load {name}: {reason_of(error)}") from error


def load_tokenizer(source: Source):
    """The model's processor, which for most models is just a tokenizer."""
    from transformers import AutoProcessor, AutoTokenizer

    cls = AutoProcessor if source.gguf_file is None else AutoTokenizer
    try:
        found = cls.from_pretrained(source.path, **source.where)
    except Exception as error:  # transformers raises a dozen kinds, and hides those of tokenizers
        if any(package in str(error).lower() for package in ("torchvision", "pillow")):
            needed = "its processor needs torchvision and Pillow, even for text"
            raise ImportError(f"{needed}: pip install 'torch-moe-metal[vision]'") from error
        if (reason := broken_tokenizer(Path(source.path))) is not None:
            raise ValueError(reason) from error
        raise
    tokenizer = getattr(found, "tokenizer", found)
    if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):  # without files transformers makes an empty one
        raise ValueError("no tokenizer: expected tokenizer.json or other tokenizer files in the same folder")
    return found


def broken_tokenizer(folder: Path) -> str | None:
    """Which of a folder's tokenizer files cannot be read, and why; None if there is none."""
    from tokenizers import Tokenizer

    def read_settings(file: Path) -> None:
        if not isinstance(found := json.loads(file.read_text()), dict):
            raise ValueError(f"expected an object, got {type(found).__name__}")

    readers = {"tokenizer_config.json": read_settings, "tokenizer.json": lambda file: Tokenizer.from_file(str(file))}
    for name, read in readers.items():
        try:
            if (folder / name).exists():
                read(folder / name)
        except Exception as error:  # tokenizers raises Exception itself
            return f"{name}: {reason_of(error)}"
    return None


def load_model(source: Source, options: Namespace) -> "PreTrainedModel":
    """The model, not yet patched."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    import torch_moe_metal  # noqa: F401  enables loading of packed checkpoints in transformers

    model_type = AutoConfig.from_pretrained(source.path, **source.where).model_type
    cls = AutoModelForMultimodalLM if model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES else AutoModelForCausalLM
    dtype = "bfloat16" if options.dtype == "auto" and source.gguf_file else options.dtype
    arguments = {"dtype": dtype, "device_map": options.device, **source.where}
    if (packing := quantization(options)) is not None:
        arguments["quantization_config"] = packing
    return cls.from_pretrained(source.path, **arguments).eval()


def context_of(model: "PreTrainedModel", wanted: int | None) -> int:
    """The maximum number of tokens of a prompt and its answer together."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if wanted is not None and limit is not None and wanted > limit:
        raise CannotRun(f"--context: expected at most {limit}, the model's own limit, got {wanted}")
    return wanted or limit or DEFAULT_CONTEXT


def memory(model: "PreTrainedModel") -> str:
    """The size of the weights, and the memory used by the process."""
    weights = f"{weights_gb(model):.1f} GB of weights"
    if model.device.type == "mps" and torch.backends.mps.is_built():
        return f"{weights}, {torch.mps.driver_allocated_memory() / 1e9:.1f} GB of the GPU's memory in use"
    unit = 1 if sys.platform == "darwin" else 1024
    return f"{weights}, at most {getrusage(RUSAGE_SELF).ru_maxrss * unit / 1e9:.1f} GB of memory in use so far"


def weights_gb(model: torch.nn.Module) -> float:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) / 1e9


def say(message: object) -> None:
    """Print progress to stderr, so that it does not mix with results."""
    print(message, file=sys.stderr, flush=True)
