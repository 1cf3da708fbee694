"""GGUF files of gigabytes, with layers of Qwen3-30B-A3B's sizes in Q4_K_M and random weights, for the tests and
measurements of files that are mapped.

    PYTHONPATH=. python tests/large_gguf.py FOLDER --layers 16 --limit 3    # tokens per second with 3 GB of memory
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

CONFIG = {
    "embedding_length": 2048, "feed_forward_length": 6144, "expert_feed_forward_length": 768, "expert_count": 128,
    "expert_used_count": 8, "attention.head_count": 32, "attention.head_count_kv": 4, "attention.key_length": 128,
    "attention.value_length": 128, "context_length": 4096, "vocab_size": 4096,
}  # fmt: skip
BYTES = {"Q4_K": 144, "Q6_K": 210}  # of a block of 256 columns
EXPERTS, INNER, HIDDEN, VOCABULARY, HEADS, KEYS = 128, 768, 2048, 4096, 4096, 512


def tensors(layers: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type, in the order of llama.cpp's files."""
    yield "token_embd.weight", (VOCABULARY, HIDDEN), "Q4_K"
    for n in range(layers):
        for name, rows in (("k", KEYS), ("q", HEADS), ("v", KEYS)):
            yield f"blk.{n}.attn_{name}.weight", (rows, HIDDEN), "Q6_K" if name == "v" else "Q4_K"
        yield f"blk.{n}.attn_output.weight", (HIDDEN, HEADS), "Q4_K"
        for name, size in (("attn_k_norm", 128), ("attn_q_norm", 128), ("attn_norm", HIDDEN), ("ffn_norm", HIDDEN)):
            yield f"blk.{n}.{name}.weight", (size,), "F32"
        yield f"blk.{n}.ffn_down_exps.weight", (EXPERTS, HIDDEN, INNER), "Q6_K"
        yield f"blk.{n}.ffn_gate_exps.weight", (EXPERTS, INNER, HIDDEN), "Q4_K"
        yield f"blk.{n}.ffn_gate_inp.weight", (EXPERTS, HIDDEN), "F32"
        yield f"blk.{n}.ffn_up_exps.weight", (EXPERTS, INNER, HIDDEN), "Q4_K"
    yield "output_norm.weight", (HIDDEN,), "F32"
    yield "output.weight", (VOCABULARY, HIDDEN), "Q6_K"


def blocks(kind: str, count: int) -> np.ndarray:
    """Blocks with random codes. Their mean is 0, or all tokens would have the same experts. A megabyte is repeated."""
    generator = np.random.default_rng(len(kind))
    found = generator.integers(0, 256, (min(count, 4096 + 1), BYTES[kind]), dtype=np.uint8)
    if kind == "Q4_K":  # scale * code - 7.5 * scale
        found[:, :4] = np.array([1.4e-4, 1.05e-3], np.float16).view(np.uint8)
    else:
        found[:, -2:] = np.array([1.5e-5], np.float16).view(np.uint8)
    return np.resize(found, (count, BYTES[kind]))


def write(path: Path, layers: int) -> Path:
    writer = GGUFWriter(None, "qwen3moe")
    for key, value in (CONFIG | {"block_count": layers}).items():
        writer.add_uint32(f"qwen3moe.{key}", value)
    writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen3moe.rope.freq_base", 1e6)
    kinds = list(tensors(layers))
    for name, shape, kind in kinds:
        count, type = int(np.prod(shape)), GGMLQuantizationType[kind]
        size = count * 4 if kind == "F32" else count // 256 * BYTES[kind]
        stored = shape if kind == "F32" else (*shape[:-1], shape[-1] // 256 * BYTES[kind])
        writer.add_tensor_info(name, stored, np.dtype(np.float32 if kind == "F32" else np.uint8), size,
                               None if kind == "F32" else type)  # fmt: skip
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(0)
    for name, shape, kind in kinds:
        count = int(np.prod(shape))
        if kind == "F32":
            writer.write_tensor_data(values_of(name, shape, generator))
        else:
            writer.write_tensor_data(blocks(kind, count // 256))
    writer.close()
    return path


def values_of(name: str, shape: tuple[int, ...], generator) -> np.ndarray:
    router = generator.standard_normal(shape).astype(np.float32) * 0.05
    return router if "gate_inp" in name else np.ones(shape, np.float32)


# ------------------------------------------------------------------------------------------------ a limit of memory


def groups() -> Path | None:
    """The folder of Linux's control groups for memory in which this process can make one, or None."""
    for home in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        probe = home / f"moe-metal-probe-{os.getpid()}"
        try:
            probe.mkdir()
        except OSError:
            continue
        limited = any((probe / name).exists() for name in ("memory.limit_in_bytes", "memory.max"))
        probe.rmdir()
        if limited:
            return home
    return None


@contextmanager
def limited(bytes: int) -> Iterator[Path]:
    """A group with so much memory, which a process joins by writing its id to cgroup.procs."""
    group = groups() / f"moe-metal-{os.getpid()}"
    group.mkdir()
    old = group / "memory.limit_in_bytes"
    (old if old.exists() else group / "memory.max").write_text(str(bytes))
    try:
        yield group
    finally:
        group.rmdir()


def speed(path: Path, ahead: bool, tokens: int, group: Path | None = None) -> float:
    """Tokens per second of a process that has only read the file's header before, or, without a group, all of it."""
    run = [sys.executable, __file__, "--run", str(path), "--tokens", str(tokens)]
    run += [] if ahead else ["--faults"]
    run += ["--group", str(group)] if group else []
    done = subprocess.run(run, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout.split()[-1])


def decode(path: Path, tokens: int) -> float:
    """Tokens per second, with random ids: what random weights generate would soon be the same experts again."""
    from transformers import AutoModelForCausalLM

    import torch_moe_metal

    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(path, device_map="cpu", dtype=torch.bfloat16)
    torch_moe_metal.patch(model)
    ids = torch.randint(VOCABULARY, (tokens + 2, 1, 1), generator=torch.Generator().manual_seed(0))
    cache = model(ids[0], use_cache=True).past_key_values
    model(ids[1], past_key_values=cache)
    start = time.perf_counter()
    for each in ids[2:]:
        model(each, past_key_values=cache)
    return tokens / (time.perf_counter() - start)


def drop_cache(path: Path) -> None:
    with open(path) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(options: argparse.Namespace) -> None:
    from torch_moe_metal.gguf import read_ahead

    if options.group:
        Path(options.group, "cgroup.procs").write_text(str(os.getpid()))
        drop_cache(options.run)
    if options.faults:
        read_ahead.for_experts = lambda *_: False
    print(decode(options.run, options.tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--limit", type=float, default=3, metavar="GB")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--group")
    options = parser.parse_args()
    if options.run:
        return run(options)
    path = options.folder / f"large-{options.layers}.gguf"
    if not path.exists():
        write(path, options.layers)
    print(f"{path.stat().st_size / 1e9:.2f} GB")
    for ahead in (False, True, False, True):
        with limited(int(options.limit * 1e9)) as group:
            rate = speed(path, ahead, options.tokens, group)
        print(f"{options.limit:g} GB, {'ahead' if ahead else 'faults'}: {rate:.2f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
