"""Speed of GGUF files, compared with llama.cpp: `python tools/peer_speed.py --types q4_k_m q4_0 q8_0`.

It writes a GGUF file of random blocks with the sizes of a whole model and some of its layers, and starts two processes:
one loads the file with `from_pretrained(folder, gguf_file=...)` and `patch`, the other with llama-cpp-python. They take
turns: each round measures the prefill of a prompt and then decoding, first in one process and then in the other. The
table has the medians over the rounds, the loading times, and the memory of each process without the file's pages. Both
use as many threads as `torch.get_num_threads()`.

llama-cpp-python has to be installed: `pip install llama-cpp-python` builds it for this processor.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
WARM_UP = 4  # tokens


# ------------------------------------------------------------------------------------------------ the file


def types_of(name: str, layers: int) -> dict[str, str]:
    """Types by names and roles of tensors. In mixes, the head, and v_proj and down_proj of every second layer, have
    more bits, as in llama.cpp's own files."""
    from gguf_files import ROLES
    from torch_moe_metal.commands.bench.whole_model import MIXES

    usual, more = MIXES.get(name, (name, name))
    found = dict.fromkeys(ROLES, usual) | {"head": more}
    for layer in range(0, layers, 2):
        found |= {f"blk.{layer}.attn_v.weight": more, f"blk.{layer}.ffn_down_exps.weight": more}
    return found


def write(path: Path, model: str, layers: int, type: str) -> Path:
    """A file of random blocks with about the variance of trained weights."""
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType, GGUFWriter

    import gguf_files
    from torch_moe_metal.commands.bench.whole_model import whole_config
    from torch_moe_metal.random_weights import packing_of

    config = whole_config(model, layers)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        meta = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    arch = gguf_files.ARCHITECTURES[config.model_type]
    writer = GGUFWriter(None, arch)
    for key, value in gguf_files.metadata(config.to_dict(), arch).items():
        gguf_files.add_value(writer, f"{arch}.{key}", value)
    gguf_files.add_tokenizer(writer, config.vocab_size)
    generator, types = torch.Generator().manual_seed(0), types_of(type, layers)
    for name, tensor in gguf_files.layout(meta, meta.state_dict()).items():
        kind = gguf_files.type_of(name, tensor.shape, types)
        if kind == "f32":
            size = 0.25 if name.endswith("norm.weight") else tensor.shape[-1] ** -0.5
            data = torch.randn(tensor.shape, generator=generator) * size + name.endswith("norm.weight")
        else:
            data, *_ = packing_of(kind, torch.float32).weight(*tensor.shape, generator=generator)
        writer.add_tensor(name, np.ascontiguousarray(data.numpy()), raw_dtype=GGMLQuantizationType[kind.upper()])
    return only_on_disk(gguf_files.written(writer, path, 3))


def only_on_disk(path: Path) -> Path:
    """Removes a new file from memory, as after a restart: Linux keeps what a program has written in small pages."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


# ------------------------------------------------------------------------------------------------ the two processes


def anonymous_gb() -> float:
    """Memory of this process without pages of files."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024 / 1e9


class Ours:
    def __init__(self, path: Path, threads: int, prompt: int):
        import torch
        from transformers import AutoModelForCausalLM

        from torch_moe_metal import huge_pages
        from torch_moe_metal.transformers import patch  # before the clock starts: transformers' imports take seconds

        huge_pages.for_tensors()
        torch.set_num_threads(threads)
        self.torch, before, start = torch, anonymous_gb(), time.perf_counter()
        self.model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.bfloat16, device_map="cpu"
        )
        self.loaded = {"load s": time.perf_counter() - start, "memory GB": anonymous_gb() - before}
        patch(self.model)

    def measure(self, ids: list[int], tokens: int) -> dict[str, float]:
        from torch_moe_metal.transformers.versions import cache_of, with_cache

        torch, seconds = self.torch, []
        with torch.no_grad():
            start = time.perf_counter()
            output = self.model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
            prefill = len(ids) / (time.perf_counter() - start)
            for token in ids[:tokens]:
                start = time.perf_counter()
                output = self.model(torch.tensor([[token]]), **with_cache(cache_of(output)))
                seconds.append(time.perf_counter() - start)
        return {"prefill": prefill, "decode": 1 / statistics.median(seconds[WARM_UP:])}


class LlamaCpp:
    def __init__(self, path: Path, threads: int, prompt: int):
        import llama_cpp

        before, start = anonymous_gb(), time.perf_counter()
        self.llama = llama_cpp.Llama(
            str(path), n_ctx=2 * prompt, n_batch=prompt, n_ubatch=512, n_threads=threads, n_threads_batch=threads,
            verbose=False,
        )  # fmt: skip
        self.loaded = {"load s": time.perf_counter() - start, "memory GB": anonymous_gb() - before}

    def measure(self, ids: list[int], tokens: int) -> dict[str, float]:
        self.llama.reset()
        start, seconds = time.perf_counter(), []
        self.llama.eval(ids)
        prefill = len(ids) / (time.perf_counter() - start)
        for token in ids[:tokens]:
            start = time.perf_counter()
            self.llama.eval([token])
            seconds.append(time.perf_counter() - start)
        return {"prefill": prefill, "decode": 1 / statistics.median(seconds[WARM_UP:])}


ENGINES = {"torch_moe_metal": Ours, "llama.cpp": LlamaCpp}


def serve(engine: str, path: str, threads: str, prompt: str, tokens: str) -> None:
    """Prints a line on the standard output for each line on the standard input."""
    loaded = ENGINES[engine](Path(path), int(threads), int(prompt))
    print(json.dumps(loaded.loaded), flush=True)
    ids = [7 * i % 4096 for i in range(int(prompt))]
    for _ in sys.stdin:
        print(json.dumps(loaded.measure(ids, int(tokens))), flush=True)


class Process:
    """One engine, served by a script."""

    def __init__(self, engine: str, *arguments: object, script: str = __file__):
        command = [sys.executable, script, "--serve", engine, *map(str, arguments)]
        self.engine = engine
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self) -> dict[str, float]:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.engine} ended with status {self.process.wait()}")
        return json.loads(line)

    def measure(self) -> dict[str, float]:
        print(file=self.process.stdin, flush=True)
        return self.answer()

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


# ------------------------------------------------------------------------------------------------ the table


def compare(options: argparse.Namespace, folder: Path, type: str) -> dict[str, dict[str, float]]:
    path = folder / f"{options.model}-{type}.gguf"
    write(path, options.model, options.layers, type)
    arguments = path, options.threads, options.prompt, options.tokens
    found, processes = {}, []
    for engine in ENGINES:
        processes.append(Process(engine, *arguments))
        found[engine] = processes[-1].answer()
    rounds = [[process.measure() for process in processes] for _ in range(options.rounds + 1)][1:]
    for i, process in enumerate(processes):
        process.end()
        found[process.engine] |= {key: statistics.median(each[i][key] for each in rounds) for key in rounds[0][i]}
    path.unlink()
    return found


def row(type: str, found: dict[str, dict[str, float]]) -> str:
    ours, theirs = found.values()
    rates = [f"{ours[key]:9.1f}{theirs[key]:9.1f}{ours[key] / theirs[key]:7.2f}" for key in ("decode", "prefill")]
    rest = [f"{ours[key]:8.2f}{theirs[key]:8.2f}" for key in ("load s", "memory GB")]
    return f"{type:10}" + "   ".join(rates + rest)


HEAD = (
    f"{'':10}{'decode, tokens/s':25}   {'prefill, tokens/s':25}   {'load, s':16}   {'memory, GB':16}\n"
    f"{'type':10}" + 2 * f"{'ours':>9}{'theirs':>9}{'ratio':>7}   " + 2 * f"{'ours':>8}{'theirs':>8}   "
)


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
        return 0
    import torch

    from torch_moe_metal.commands.bench.measure import machine
    from torch_moe_metal.commands.bench.whole_model import WHOLE

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WHOLE, default="qwen3-30b-a3b", help="default: qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4, help="of all its layers (default: 4)")
    parser.add_argument("--types", nargs="+", default=["q4_k_m", "q4_0", "q8_0", "q6_k"], metavar="TYPE")
    parser.add_argument("--prompt", type=int, default=512, help="tokens (default: 512)")
    parser.add_argument("--tokens", type=int, default=32, help="decoded in each round (default: 32)")
    parser.add_argument("--rounds", type=int, default=5, help="after one that does not count (default: 5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: PyTorch's")
    parser.add_argument("--folder", type=Path, help="for the file, which has 2 to 4 GB (default: a temporary one)")
    options = parser.parse_args()
    if importlib.util.find_spec("llama_cpp") is None:
        print("llama-cpp-python is not installed: `pip install llama-cpp-python`", file=sys.stderr)
        return 2
    print(
        f"{machine()}\n{options.layers} layers of {options.model}, {options.prompt} tokens, {options.threads} threads"
    )
    print(HEAD)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for type in options.types:
            print(row(type, compare(options, Path(folder), type)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
