"""Fuzzes `from_pretrained` with broken checkpoints of every supported kind: a part of `make fuzz`.

    python tests/fuzz_checkpoints.py --cases 5000             # a random seed, which it prints
    python tests/fuzz_checkpoints.py --cases 2000 --of gguf   # GGUF files only
    python tests/fuzz_checkpoints.py --seed 7 --case 123      # repeat one case, with all details

A case changes one thing in a tiny checkpoint: a tensor, a header, an index, a file, or a value of config.json. Then
loading must raise an error that names the file, or report missing or unexpected tensors, or the logits must be right:
those of the unbroken checkpoint, or, if the model's configuration changed, of a dense model with the same change.
"""

import argparse
import contextlib
import copy
import faulthandler
import functools
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import checkpoints
import fuzz
import gguf_files
import mlx_folders
from tiny_models import tiny_model, tokens
from torch_moe_metal import MoeMetalConfig, gguf

SECONDS = 120  # maximum time of a case
WORKER = [sys.executable, "-X", "faulthandler", str(Path(__file__).resolve())]
#: Errors in transformers' own words that should be ours.
OURS = {"quantizer.py", "awq_gptq.py", "awq_gptq_layouts.py", "packed.py"}
OURS |= {"config.py", "config_parts.py", "metadata.py", "architectures.py"}
#: Changes of a quantization_config that no file contradicts.
UNCHECKED = {"checkpoint_format"}
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]
ROUNDED = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
# Both are valid for FP8 weights, so nothing contradicts them.
BYTES = {torch.uint8, torch.float8_e4m3fn}


# ------------------------------------------------------------------------------------------------ whole checkpoints


def ours(folder: Path, **options) -> Path:
    tiny_model("qwen3_moe", moe_intermediate_size=64).save_pretrained(folder / "before")
    load(folder / "before", MoeMetalConfig(**options))[0].save_pretrained(folder / "saved")
    return folder / "saved"


def dense(folder: Path) -> Path:
    tiny_model("qwen3_moe", moe_intermediate_size=64, tie_word_embeddings=False).save_pretrained(folder)
    return folder


def blocks(folder: Path, name: str) -> Path:
    """A GGUF file, as llama.cpp's Q4_K_M."""
    folder.mkdir(parents=True)
    gguf_files.write(gguf_files.model(name), folder / "model.gguf", gguf_files.Q4_K_M)
    return folder


KINDS = {
    "gpt_oss": checkpoints.gpt_oss,
    "fp8": functools.partial(checkpoints.fp8, family="qwen3_moe"),
    "fp8_deepseek": functools.partial(checkpoints.fp8, family="deepseek_v3"),
    "fp8_e8m0": functools.partial(checkpoints.fp8, family="qwen3_moe", scales=torch.float8_e8m0fnu, scale_fmt="ue8m0"),
    "nvfp4": functools.partial(checkpoints.nvfp4, with_activations=True, apart=True),
    "metal": functools.partial(checkpoints.metal, bits=4, group_size=32),
    **{way: functools.partial(checkpoints.integers, way=way) for way in checkpoints.INTEGERS},
    "affine": functools.partial(ours, group_size=32, skip=["lm_head"], bits_by_name={"experts.down_proj": 8}),
    "affine8": functools.partial(ours, bits=8, group_size=16),
    "mxfp4": functools.partial(ours, format="mxfp4"),
    "packed_fp8": functools.partial(ours, format="fp8"),
    "mlx": functools.partial(mlx_folders.convert, family="qwen3_moe"),
    "mlx_deepseek": functools.partial(mlx_folders.convert, family="deepseek_v3"),
    "mlx_nvfp4": functools.partial(mlx_folders.convert, family="qwen3_moe", q_mode="nvfp4"),
    "mlx_mxfp8": functools.partial(mlx_folders.convert, family="deepseek_v3", q_mode="mxfp8"),
    "mlx_gpt_oss": functools.partial(mlx_folders.convert, family="gpt_oss"),
    "dense": dense,
}
GGUF = {name: functools.partial(blocks, name=name) for name in ("qwen3moe", "gpt-oss", "deepseek2-v3", "gemma4")}
KINDS |= GGUF
TARGETS = {"checkpoints": sorted(KINDS), "gguf": sorted(GGUF)}


@dataclass
class Whole:
    """An unbroken checkpoint, a dense one with the same values, and their logits."""

    folder: Path
    twin: Path
    config: MoeMetalConfig | None  # the configuration passed to from_pretrained
    logits: torch.Tensor


@functools.cache
def whole(kind: str) -> Whole:
    home = Path(tempfile.mkdtemp(prefix=f"fuzz_{kind}_"))
    folder, config = KINDS[kind](home / "made"), MoeMetalConfig(group_size=16) if kind == "dense" else None
    model, _ = load(folder, config)
    logits = run(model)
    model.dequantize().save_pretrained(home / "twin")
    shutil.rmtree(folder / "dense", ignore_errors=True)
    return Whole(folder, home / "twin", config, logits)


def load(folder: Path, config: MoeMetalConfig | None = None):
    """The model, and transformers' report about its weights."""
    options = {"quantization_config": copy.deepcopy(config)} if config else {}
    options |= {"dtype": torch.float32, "device_map": "cpu", "output_loading_info": True}
    options |= {"gguf_file": "model.gguf"} if is_gguf(folder) else {}
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def is_gguf(folder: Path) -> bool:
    return (folder / "model.gguf").exists()


@torch.no_grad()
def run(model) -> torch.Tensor:
    return model(tokens(2, 9), use_cache=False).logits.float()


# ------------------------------------------------------------------------------------------------ what is changed


@dataclass
class Change:
    """The change of a case, for reports and for the check."""

    text: str
    rounds: bool = False  # values may have lost precision
    setting: tuple | None = None  # the path of a value in config.json
    read_before: bool = False  # read by transformers before it calls any quantizer


def change_tensor(random: random.Random, folder: Path) -> Change:
    file = random.choice(sorted(folder.glob("*.safetensors")))
    tensors = load_file(file)
    name = random.choice(sorted(tensors))
    tensor, side = tensors[name], random.randrange(tensors[name].dim()) if tensors[name].dim() else None
    ways = [missing, renamed, cast, viewed, other]
    ways += [scalar, flat, cut, repeated, emptied, one_more_side] if side is not None else []
    ways += [turned] if tensor.shape != tensor.shape[::-1] else []
    way = random.choice(ways)
    text = way(random, tensors, name, tensor, side)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    rounds = way is cast and {tensor.dtype, tensors[name].dtype} <= ROUNDED
    return Change(f"{file.name}: {name} {way.__name__} {text or ''}", rounds)


def missing(random, tensors, name, tensor, side) -> None:
    del tensors[name]


def renamed(random, tensors, name, tensor, side) -> str:
    at = random.randrange(len(name))
    to = name[:at] + random.choice("0123456789abcdwx._") + name[at + random.randrange(2) :]
    same = {re.sub("[^0-9a-z]", ".", each) for each in (name, to)}
    if to not in tensors and len(same) > 1:  # in transformers' patterns a dot matches any character
        tensors[to] = tensors.pop(name)
    return to


def cast(random, tensors, name, tensor, side) -> str:
    dtypes = [dtype for dtype in DTYPES if {dtype, tensor.dtype} != BYTES]
    tensors[name] = tensor.to(random.choice(dtypes))
    return str(tensors[name].dtype)


def viewed(random, tensors, name, tensor, side) -> str:
    dtypes = [dtype for dtype in DTYPES if dtype.itemsize == tensor.dtype.itemsize and dtype != torch.bool]
    dtypes = [dtype for dtype in dtypes if not {dtype, tensor.dtype} <= ROUNDED]  # nothing contradicts these
    tensors[name] = tensor.view(random.choice(dtypes))
    return str(tensors[name].dtype)


def other(random, tensors, name, tensor, side) -> str:
    others = [each for each in sorted(tensors) if tensors[each].shape != tensor.shape]
    if others:
        tensors[name] = tensors[random.choice(others)].clone()
    return str(list(tensors[name].shape))


def scalar(random, tensors, name, tensor, side) -> None:
    tensors[name] = tensor.new_zeros(()) if tensor.numel() == 0 else tensor.flatten()[0]


def flat(random, tensors, name, tensor, side) -> None:
    tensors[name] = tensor.flatten()


def cut(random, tensors, name, tensor, side) -> str:
    """Change the number of codes by one: half of the codes of 8 bits are as many as of 4 bits, and a checkpoint may
    have both."""
    half = tensor.shape[side] // 2 if tensor.dtype != torch.int32 else 0
    tensors[name] = tensor.narrow(side, 0, random.choice([half, max(0, tensor.shape[side] - 1)]))
    return str(list(tensors[name].shape))


def repeated(random, tensors, name, tensor, side) -> str:
    tensors[name] = tensor.view(torch.uint8).repeat(2, *[1] * (tensor.dim() - 1)).view(tensor.dtype)
    return str(list(tensors[name].shape))


def emptied(random, tensors, name, tensor, side) -> str:
    tensors[name] = tensor.narrow(side, 0, 0)
    return str(list(tensors[name].shape))


def turned(random, tensors, name, tensor, side) -> str:
    tensors[name] = tensor.permute(*reversed(range(tensor.dim())))
    return str(list(tensors[name].shape))


def one_more_side(random, tensors, name, tensor, side) -> None:
    tensors[name] = tensor.unsqueeze(side)


def change_bytes(random: random.Random, folder: Path) -> Change:
    """Change the header, or the length of the file."""
    file = random.choice(sorted(folder.glob("*.safetensors")))
    content = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    way = random.choice(["header", "header", "header", "length", "cut", "longer"])
    if way in ("header", "length"):
        for _ in range(random.choice([1, 1, 2, 8])):
            at = random.randrange(8, header) if way == "header" else random.randrange(8)
            content[at] = random.choice([random.randrange(256), ord(random.choice('0123456789"[]{},:FBIU'))])
    elif way == "cut":
        del content[random.randrange(len(content)) :]
    else:
        content += bytes(random.choice([1, 8, 4096]))
    file.write_bytes(content)
    return Change(f"{file.name}: other bytes: {way}")


def change_file(random: random.Random, folder: Path) -> Change:
    """Replace a file by something else, or by a file that the index does not expect."""
    file = random.choice(sorted(folder.glob("*.safetensors")))
    way = random.choice(["fifo", "folder", "gone", "empty", "index"])
    if way == "index":
        return change_index(random, folder)
    file.unlink()
    {"fifo": lambda: os.mkfifo(file), "folder": file.mkdir, "gone": int, "empty": file.touch}[way]()
    return Change(f"{file.name}: {way}")


def change_index(random: random.Random, folder: Path) -> Change:
    files = sorted(folder.glob("*.index.json"))
    if not files:
        return Change("no index to change")
    index = json.loads(files[0].read_text())
    text = change_value(random, index, keep=())
    files[0].write_text(json.dumps(index))
    return Change(f"{files[0].name}: {text}", read_before=True)


def change_config(random: random.Random, folder: Path) -> Change:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    quantised = [key for key in ("quantization_config", "quantization") if key in config]
    start = (random.choice(quantised),) if quantised and random.random() < 0.5 else ()
    path, value = change_value(random, config, start)
    file.write_text(json.dumps(config))
    return Change(f"config.json: {'.'.join(map(str, path))} = {value!r}", setting=path, read_before=True)


def change_value(random: random.Random, config: dict, keep: tuple) -> tuple[tuple, object]:
    """Another value somewhere in a dictionary; returns its path."""
    path = list(keep)
    while True:
        inner = functools.reduce(lambda found, key: found[key], path, config)
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner))) if isinstance(inner, list) else []
        if not keys or (len(path) > len(keep) and random.random() < 0.2):
            break
        path.append(random.choice(keys))
    if not path:
        return (), None
    *above, last = path
    home = functools.reduce(lambda found, key: found[key], above, config)
    before = home[last]
    if random.random() < 0.15:
        home.pop(last)
        return tuple(path), "missing"
    values = [None, -1, 0, 1, 2, 3, 8, 16, 64, 0.5, 4.0, "", "x", "(", "([a-z_.0-9]+)+#", [], [None], {}, True, False]
    values += [*(["affine", "mxfp4", "fp8", "float16", "gemm"]), [["x"]], {"x": 1}]
    values += [before + 1, before * 2, before // 2] if type(before) is int else []
    home[last] = random.choice(values)
    return tuple(path), home[last]


def change_gguf(random: random.Random, folder: Path) -> Change:
    """Change the metadata, the table of tensors, or the length of the file."""
    file = folder / "model.gguf"
    content = bytearray(file.read_bytes())
    tensors = gguf.read(file).tensors.values()
    header = min(tensor.begin for tensor in tensors)
    way = random.choice(["byte", "byte", "number", "number", "name", "swapped", "cut", "longer"])
    at = random.randrange(header)
    if way == "byte":
        for _ in range(random.choice([1, 1, 2, 8])):
            content[random.randrange(header)] = random.randrange(256)
    elif way in ("number", "name"):
        name = random.choice([tensor.name for tensor in tensors]).encode()
        at = content.index(len(name).to_bytes(8, "little") + name) + 8
        at += random.randrange(len(name)) if way == "name" else len(name) + 4 * random.randrange(9)
        value = random.choice([0, 1, 2, 33, 100, 256, 2**31, 2**32 - 1, random.randrange(2**32)])
        size = 1 if way == "name" else 4
        content[at : at + size] = (value % 256**size).to_bytes(size, "little")
    elif way == "swapped":
        one, two = sorted(random.sample(range(24, header - 8), 2))
        content[one : one + 8], content[two : two + 8] = content[two : two + 8], content[one : one + 8]
    elif way == "cut":
        del content[random.choice([at, random.randrange(len(content))]) :]
    else:
        content += bytes(random.choice([1, 8, 4096]))
    file.write_bytes(content)
    return Change(f"{file.name}: {way} at {at}", setting=("gguf",))


CHANGES = [change_tensor] * 5 + [change_bytes] * 2 + [change_file] + [change_config] * 4


# ------------------------------------------------------------------------------------------------ how it is judged


def check(target: str, seed: int, number: int) -> tuple[str, str]:
    """The outcome of a case, and its description."""
    drawn = random.Random(f"{seed}-{number}")
    kind = drawn.choice(TARGETS[target])
    original = whole(kind)
    way = change_gguf if is_gguf(original.folder) else drawn.choice(CHANGES)
    with tempfile.TemporaryDirectory(prefix=f"fuzz_{kind}_") as home:
        folder = Path(home) / "broken"
        shutil.copytree(original.folder, folder)
        change = way(drawn, folder)
        text = f"{kind}: {change.text}"
        try:
            return judge(original, folder, change), text
        except Exception as error:
            raise AssertionError(f"{text}\n{type(error).__name__}: {error}") from error


def judge(original: Whole, folder: Path, change: Change) -> str:
    model, found = attempt(lambda: load(folder, original.config))
    if found is not None:
        expect_named(found, folder, change)
        return "refused"
    model, said = model
    if any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        return "refused"  # in transformers' report
    if not any(getattr(module, "packing", None) for module in model.modules()):
        return "refused"  # falls back to transformers
    logits, failed = attempt(lambda: run(model))
    if is_gguf(folder):  # values and metadata may differ, and nothing else contradicts them
        return "refused" if failed else "right"
    expected, tolerance = original.logits, 0.05 if change.rounds else 1e-4
    quantised = change.setting and change.setting[0] in ("quantization_config", "quantization")
    if change.setting and not quantised:
        expected, also = attempt(lambda: run(load(twin_of(original, folder))[0]))
        if failed and also:
            return "refused"
        assert also is None, f"it loads and runs, but a dense model does not: {also}"
    if failed:
        raise failed
    if not (quantised and change.setting[-1] in UNCHECKED):
        difference = relative(logits, expected)
        assert difference <= tolerance, f"it loads in silence, and the logits differ by {difference:.1e}"
    return "right"


def attempt(function) -> tuple[object, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    same = actual.isnan() & expected.isnan()
    actual, expected = (each.masked_fill(same, 0).double() for each in (actual, expected))
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-9))


def twin_of(original: Whole, folder: Path) -> Path:
    """A dense model's folder with the same configuration, except its quantisation."""
    twin = folder.parent / "twin"
    shutil.copytree(original.twin, twin)
    config = json.loads((folder / "config.json").read_text())
    for key in ("quantization_config", "quantization"):
        config.pop(key, None)
    (twin / "config.json").write_text(json.dumps(config))
    return twin


def expect_named(error: Exception, folder: Path, change: Change) -> None:
    """The error names a file in one line, or is transformers' own about other files."""
    text = str(error)
    if text.startswith("torch_moe_metal: "):
        assert str(folder) in text and "\n" not in text, f"an error without its file: {text}"
        return
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    ours = {each.name for each in frames if "torch_moe_metal" in each.parts} - {"quantizer_choice.py"}
    if str(folder) in text or not ours & OURS:
        of_transformers = change.read_before or str(folder) in text or "ignore_mismatched_sizes" in text
        assert of_transformers or isinstance(error, OSError), f"an error without a file: {text}"
        return
    raise AssertionError("an error in other words than ours") from error


# ------------------------------------------------------------------------------------------------ child and parent


def work(target: str, seed: int, numbers: list[int]) -> None:
    """Like `fuzz.work`."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity(50)
    transformers.utils.logging.disable_progress_bar()
    for number in numbers:
        print("begin", number, flush=True)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                outcome, text = check(target, seed, number)
            if len(numbers) == 1:
                print(text, file=sys.stderr)
            print(outcome, flush=True)
        except Exception as error:
            cause = "".join(traceback.format_exception(error.__cause__)) if len(numbers) == 1 else ""
            print("failed", f"{error}\n{cause}".replace("\n", "\v"), flush=True)
        faulthandler.cancel_dump_traceback_later()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--of", choices=TARGETS, default="checkpoints", help="default: checkpoints of every kind")
    parser.add_argument("--case", type=int, metavar="NUMBER")
    parser.add_argument("--child", metavar="TARGET", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        work(options.child, options.seed, [int(number) for number in sys.stdin.read().split()])
        return 0
    if options.case is not None:
        work(options.of, options.seed, [options.case])
        return 0
    command = "python tests/fuzz_checkpoints.py --of {target} --seed {seed} --case {number}"
    return int(bool(fuzz.fuzz(options.seed, options.cases, [options.of], WORKER, command).failures))


if __name__ == "__main__":
    sys.exit(main())
