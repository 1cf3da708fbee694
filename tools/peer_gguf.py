"""GGUF files of llama.cpp's own converter, loaded packed: `python tools/peer_gguf.py CHECKOUT`.

CHECKOUT is a folder with llama.cpp's sources: `git clone --depth 1 https://github.com/ggml-org/llama.cpp` makes one.
Its convert_hf_to_gguf.py converts a tiny random model of every architecture, whose configuration differs from the
defaults, to a file in float32. llama-cpp-python quantises that, if it is installed; without it the converter itself
writes f16, bf16 and q8_0. Each file is loaded with `from_pretrained(folder, gguf_file=...)` and `import
torch_moe_metal`. Its logits are compared with those of the same model, dense, with the values that the `gguf` package
dequantises from the file, and with those of llama.cpp, if llama-cpp-python is installed. The table has a row per file;
the exit status is 1 if one of them fails.

Errors are relative to the largest logit. llama.cpp rounds activations to 8 bits if weights are quantised, which
sometimes selects another expert: for those files the error is that of the middle token, and the number of tokens with
the same best next token must be large enough.
"""

import argparse
import importlib.util
import json
import logging
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
TOKENS = 24
#: Relative to the largest logit: float32 files, and all others, whose products are summed in another order than those
#: of the dense model.
DENSE_TOLERANCE, PACKED_TOLERANCE = 1e-4, 2e-3
#: Tolerances against llama.cpp. In float32 the largest error of any token was 2e-5, except for the GELU of gemma4,
#: which llama.cpp looks up in a float16 table: 1.3e-4. With activations of 8 bits the middle token's was at most 0.09,
#: and at least 17 tokens of 24 agreed. With q and k in a wrong order, or gate and up exchanged in one layer, the error
#: is at least 0.38, and at most 10 agree.
F32_TOLERANCE, GELU_TOLERANCE, INT8_TOLERANCE, INT8_AGREEING = 1e-4, 1e-3, 0.15, 0.6
#: Correct differences between llama.cpp and transformers: values for which both are equal, or the reason why llama.cpp
#: is not compared.
LLAMA_CPP_DIFFERS: dict[str, dict | str] = {
    "gpt-oss": {"truncate": True},  # llama.cpp always rounds the ends of YaRN's range to whole pairs
    "deepseek2-v2-groups": "it adds the two best experts of a group, where DeepSeek-V2 takes the best one",
    "deepseek2-lite": "it knows models without q_lora_rank by their 27 layers",
}
#: Architectures whose experts become dense, because no experts class of transformers' interface has them.
DENSE_EXPERTS = ("llama4", "llama4-scout")
WRITTEN = ("f32", "f16", "bf16", "q8_0")  # types that the converter itself writes
#: llama.cpp's names of mixtures, as in its llama-quantize, and their numbers in llama.h.
QUANTISED = {
    "q8_0": 7, "q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13,
    "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18, "iq4_nl": 25, "iq4_xs": 30, "mxfp4_moe": 38,
    "f16": 1, "bf16": 32,
}  # fmt: skip
USUAL = ("f32", "q8_0", "q4_k_m", "q3_k_m", "iq4_xs", "q4_0")


class Failed(Exception):
    """The error of one file, for the table."""


# ------------------------------------------------------------------------------------------------ other processes


def convert(checkout: str, *arguments: str) -> None:
    """llama.cpp's converter. It knows tokenizers by a hash, and is made to accept the tiny one as GPT-2's."""
    sys.argv = [str(Path(checkout, "convert_hf_to_gguf.py")), *arguments]
    sys.path.insert(0, checkout)
    import convert_hf_to_gguf
    from conversion.base import TextModel

    def model_class(*args, **kwargs):
        found = chosen(*args, **kwargs)
        found.set_vocab = lambda self: self._set_vocab_gpt2()
        return found

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    chosen, convert_hf_to_gguf.get_model_class = convert_hf_to_gguf.get_model_class, model_class
    convert_hf_to_gguf.main()


def quantise(source: str, target: str, number: str) -> None:
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.nthread, options.ftype = 1, int(number)
    if status := llama_cpp.llama_model_quantize(source.encode(), target.encode(), options):
        sys.exit(f"llama_model_quantize returned {status}")


def logits(file: str, tokens: str, target: str) -> None:
    """llama.cpp's logits, with keys and values in float32. -1 means the file's YaRN parameters, not llama-cpp-python's
    defaults."""
    import llama_cpp
    import numpy as np

    ids = json.loads(tokens)
    yarn = dict.fromkeys(("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"), -1.0)
    cache = dict.fromkeys(("type_k", "type_v"), llama_cpp.GGML_TYPE_F32)
    llama = llama_cpp.Llama(file, n_ctx=64, logits_all=True, n_threads=1, n_threads_batch=1, **cache, **yarn)
    llama.eval(ids)
    np.save(target, llama.scores[: len(ids)])


STEPS = {"convert": convert, "quantise": quantise, "logits": logits}


def in_process(step: str, *arguments: object) -> None:
    """Runs a step in a new process, because llama.cpp ends its process if it rejects a file."""
    command = [sys.executable, __file__, "--step", step, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{step}: {last_words(done.stderr + done.stdout)}")


def last_words(output: str) -> str:
    """The line of an output that contains the reason for its end."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line or "GGML_ASSERT" in line]
    named = [line for line in telling if "error loading" in line or "GGML_ASSERT" in line]
    return (named or telling[-1:] or lines[-1:] or ["no output"])[0]


def is_unread(name: str) -> bool:
    """By llama.cpp, which then quantises it neither."""
    return name == "deepseek2-lite"


def has_llama_cpp() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


# ------------------------------------------------------------------------------------------------ one file


@dataclass
class Row:
    """The result of one architecture in one type."""

    name: str
    type: str
    packed: str = "-"
    error: float | None = None
    llama_cpp: str = "-"
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        error = "-" if self.error is None else f"{self.error:.1e}"
        said = "FAILED" if self.failures else "ok"
        return f"{said:8}{error:>9}  {self.llama_cpp:26}{self.packed:40}"


HEAD = f"{'architecture':20}{'type':10}{'':8}{'error':>9}  {'llama.cpp':26}{'packed':40}"


def source_folder(name: str, folder: Path):
    """The model, saved with a tokenizer as the converter expects."""
    import gguf_files

    model = gguf_files.model(name).float()
    model.save_pretrained(folder)
    gguf_files.save_tokenizer(folder)
    return model


def file_of(checkout: Path, folder: Path, type: str) -> Path:
    """The converter's file in float32, or its quantised form, in a new folder."""
    target = folder / "gguf" / f"{type}.gguf"
    target.parent.mkdir(exist_ok=True)
    if type == "f32" or not has_llama_cpp() or (type in WRITTEN and is_unread(folder.name)):
        architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
        more = ["--no-mtp"] if "Qwen3Next" in architecture or "Qwen3_5" in architecture else []
        in_process("convert", checkout, folder, "--outtype", type, "--outfile", target, *more)
    else:
        source = target.with_name("f32.gguf")
        if not source.exists():
            file_of(checkout, folder, "f32")
        in_process("quantise", source, target, QUANTISED[type])
    if not target.exists():
        raise Failed(f"the converter wrote no {target.name}")
    return target


def loaded(file: Path, device: str):
    import torch
    from transformers import AutoModelForCausalLM

    import torch_moe_metal  # noqa: F401  makes from_pretrained keep the weights packed

    try:
        return AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, device_map=device
        )
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        raise Failed(f"from_pretrained: {type(error).__name__}: {error} ({place})") from error


def check(checkout: Path, name: str, type: str, folder: Path, device: str) -> Row:
    import torch

    import gguf_files
    from tiny_models import tokens

    row, ids = Row(name, type), tokens(1, TOKENS)
    try:
        model = gguf_files.model(name).float() if (folder / "config.json").exists() else source_folder(name, folder)
        file = file_of(checkout, folder, type)
        dense = gguf_files.dense(model, file)
        with torch.no_grad():
            want = dense(ids).logits[0]
            of_llama_cpp(row, file, ids, model, want)
            packed = loaded(file, device)
            got = packed(ids.to(device)).logits[0].cpu()
        row.error = float((got - want).abs().max() / want.abs().max())
        judge(row, file, dense, packed, ids)
    except Failed as error:
        row.failures.append(str(error))
    return row


def judge(row: Row, file: Path, dense, packed, ids) -> None:
    formats = {name: formats_of(module) for name, module in packed.named_modules() if hasattr(module, "packing")}
    counts = Counter(format for those in formats.values() for format in those)
    row.packed = ", ".join(f"{format} {count}" for format, count in sorted(counts.items())) or "nothing"
    if row.name not in DENSE_EXPERTS:
        row.failures += unpacked(formats, file, packed.config.get_text_config().num_hidden_layers)
    tolerance = DENSE_TOLERANCE if row.type == "f32" else PACKED_TOLERANCE
    if not row.error <= tolerance:
        row.failures.append(f"the largest error is {row.error:.2e}, expected at most {tolerance:.0e}")
        row.failures += differences(dense, packed, ids)


def formats_of(module) -> list[str]:
    return [module.format_of(weight) for weight in module.packing]


def unpacked(formats: dict[str, list[str]], file: Path, layers: int) -> list[str]:
    """Layers whose experts are stored in blocks with a reader, but are packed differently or not at all."""
    import gguf_files
    from torch_moe_metal.formats import FORMATS

    stored: dict[str, dict[str, str]] = {}
    for name, kind in gguf_files.types_of(file).items():
        if expert := re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|gate_up|down)_exps\.weight", name):
            stored.setdefault(expert[1], {})[expert[2]] = {"mxfp4": "ggml_mxfp4"}.get(kind, kind)
    packed = {
        re.search(r"layers\.(\d+)\.", name)[1]: those for name, those in formats.items() if name[-7:] == "experts"
    }
    return [
        f"experts of layer {layer}: the file has {', '.join(kinds.values())}, packed are {packed.get(layer, 'none')}"
        for layer, kinds in stored.items()
        if int(layer) < layers and {kind for kind in kinds.values() if kind in FORMATS} != set(packed.get(layer, ()))
    ]


def of_llama_cpp(row: Row, file: Path, ids, model, want) -> None:
    """Compares llama.cpp's logits with those of the dense model."""
    import numpy as np
    import torch

    import gguf_files

    differs = LLAMA_CPP_DIFFERS.get(row.name)
    if not has_llama_cpp() or isinstance(differs, str):
        row.llama_cpp = "not run"
        return  # LLAMA_CPP_DIFFERS has the reason
    if differs:
        rope = model.config.rope_parameters | differs
        want = gguf_files.dense(gguf_files.model(row.name, rope_parameters=rope).float(), file)(ids).logits[0]
    target = file.with_suffix(".npy")
    in_process("logits", file, ids[0].tolist(), target)
    got = torch.from_numpy(np.load(target))
    errors = (got - want).abs().amax(-1) / want.abs().max()
    agreeing = float((got.argmax(-1) == want.argmax(-1)).float().mean())
    exact = row.type == "f32"
    error = float(errors.max() if exact else errors.median())
    tolerance = (GELU_TOLERANCE if row.name == "gemma4" else F32_TOLERANCE) if exact else INT8_TOLERANCE
    row.llama_cpp = f"{error:.1e}, {round(agreeing * TOKENS)} of {TOKENS} agree"
    if not (error <= tolerance and agreeing >= (1.0 if exact else INT8_AGREEING)):
        least = TOKENS if exact else round(INT8_AGREEING * TOKENS)
        row.failures.append(f"llama.cpp: {row.llama_cpp}, expected at most {tolerance:.0e}, and {least} that agree")


# ------------------------------------------------------------------------------------------------ why

#: Values of a configuration that no file contains and no logit depends on.
OF_NO_MATTER = {
    "_name_or_path", "architectures", "dtype", "transformers_version", "quantization_config", "initializer_range",
    "output_router_logits", "router_aux_loss_coef", "use_cache", "attention_dropout", "pretraining_tp", "model_type",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "eod_token_id", "scoring_func", "aux_loss_alpha",
}  # fmt: skip


def differences(dense, packed, ids) -> list[str]:
    """Different values of the configuration, different dense tensors, and the first module inside the layers with a
    different output."""
    ours, theirs = (model.config.get_text_config().to_dict() for model in (packed, dense))
    found = [
        f"config.{key}: expected {theirs.get(key)!r}, got {ours.get(key)!r}"
        for key in sorted(set(ours) | set(theirs))
        if key not in OF_NO_MATTER and ours.get(key) != theirs.get(key)
    ]
    tensors, wanted = (dict(model.named_buffers()) | model.state_dict() for model in (packed, dense))
    for error, name in different(tensors, wanted, 1e-6):
        found.append(f"{name} differs by {error:.1e}")
    for error, name in different(outputs_of(packed, ids), outputs_of(dense, ids), PACKED_TOLERANCE)[:1]:
        found.append(f"from {name} on, by {error:.1e}")
    return found


def different(got: dict, wanted: dict, tolerance: float) -> list[tuple[float, str]]:
    """Whether tensors of the same shape differ by more than this, relative to the largest value."""
    pairs = [(name, got[name], want) for name, want in wanted.items() if name in got and got[name].shape == want.shape]
    found = [
        (float((have.cpu().float() - want).abs().max() / want.abs().max().clamp(min=1e-30)), name)
        for name, have, want in pairs
        if want.is_floating_point() and have.is_floating_point() and want.numel()
    ]
    return [(error, name) for error, name in found if not error <= tolerance]


def outputs_of(model, ids) -> dict:
    """The outputs of the modules inside the layers, in the order of execution."""
    import torch

    outputs: dict = {}

    def keep(name: str, output) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(output, torch.Tensor):
            outputs.setdefault(name, output.detach())

    hooks = [
        module.register_forward_hook(lambda module, args, output, name=name: keep(name, output))
        for name, module in model.named_modules()
        if ".layers." in name
    ]
    with torch.no_grad():
        model(ids.to(model.device))
    for hook in hooks:
        hook.remove()
    return outputs


# ------------------------------------------------------------------------------------------------ the command


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    import gguf_files

    parser.add_argument("checkout", type=Path, help="a folder with llama.cpp's sources")
    known = ", ".join(gguf_files.MODELS)
    parser.add_argument("--arch", nargs="+", metavar="NAME", help=f"of {known} (default: all)")
    kinds = ", ".join(dict.fromkeys((*WRITTEN, *QUANTISED)))
    parser.add_argument("--types", nargs="+", metavar="TYPE", help=f"of {kinds} (default: {', '.join(USUAL)})")
    parser.add_argument("--device", default="cpu", choices=["cpu", "mps"], help="of the loaded model (default: cpu)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where files stay (default: nowhere)")
    options = parser.parse_args()
    options.checkout = options.checkout.resolve()
    if not (options.checkout / "convert_hf_to_gguf.py").is_file():
        parser.error(f"{options.checkout} is no checkout of llama.cpp: it has no convert_hf_to_gguf.py")
    usual = USUAL if has_llama_cpp() else ("f32", "bf16", "q8_0")
    options.arch, options.types = options.arch or list(gguf_files.MODELS), options.types or list(usual)
    if unknown := [name for name in options.arch if name not in gguf_files.MODELS]:
        parser.error(f"unknown architecture: {', '.join(unknown)}; expected some of {known}")
    if unknown := [kind for kind in options.types if kind not in (*WRITTEN, *QUANTISED)]:
        parser.error(f"unknown type: {', '.join(unknown)}; expected some of {kinds}")
    if not has_llama_cpp() and (unwritten := [kind for kind in options.types if kind not in WRITTEN]):
        parser.error(f"{', '.join(unwritten)}: only llama-cpp-python writes them, and it is not installed")
    return options


def quiet() -> None:
    """Messages of transformers and our loader about each file are not printed."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("torch_moe_metal").setLevel(logging.ERROR)


def main() -> int:
    if sys.argv[1:2] == ["--step"]:
        STEPS[sys.argv[2]](*sys.argv[3:])
        return 0
    options = arguments()
    quiet()
    compared = (
        "compared with llama-cpp-python"
        if has_llama_cpp()
        else "llama-cpp-python is not installed: nothing else is compared"
    )
    print(f"{compared}\n{HEAD}   seconds", flush=True)
    rows, failed = [(name, kind) for name in options.arch for kind in options.types], 0
    with tempfile.TemporaryDirectory() as scratch:
        for name, kind in rows:
            print(f"{name:20}{kind:10}", end="", flush=True)
            if kind not in WRITTEN and is_unread(name):
                print(f"not quantised: {LLAMA_CPP_DIFFERS[name]}", flush=True)
                continue
            folder, start = (options.keep or Path(scratch)) / name, time.monotonic()
            folder.mkdir(parents=True, exist_ok=True)
            row = check(options.checkout, name, kind, folder, options.device)
            print(f"{row}{time.monotonic() - start:8.0f}", *row.failures, sep="\n    ", flush=True)
            failed += bool(row.failures)
    print(f"{failed} of {len(rows)} files fail")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
