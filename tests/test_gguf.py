"""GGUF files through `from_pretrained`: packed in pages of the file, compared with a dense model of the same values."""

import copy
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.gguf import dequant, kernels
from transformers.integrations.gguf.utils import GgufEmbedding, GgufExperts, GgufLinear

import gguf_files
import torch_moe_metal
from checkpoints import formats
from checks import relative
from gguf_files import Q4_K_M
from test_transformers import generated
from tiny_models import left_without_need, tokens
from torch_moe_metal import gguf
from torch_moe_metal.formats import FORMATS
from torch_moe_metal.gguf import hub
from torch_moe_metal.transformers.checkpoints.gguf import architectures
from torch_moe_metal.transformers.fusing.packed_modules import PackedExperts

#: The tolerance of float32 sums in different order; the largest observed error is 1.3e-5.
TOLERANCE = 5e-5
BLOCKS = [format for format, row in FORMATS.items() if row.has_own_scales]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def type_of(format: str) -> str:
    return format.removeprefix("ggml_")


def load(path: Path, device: str = "cpu", **options):
    options = {"dtype": torch.float32, "device_map": device} | options
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)


def check(path: Path, source: nn.Module, device: str = "cpu") -> nn.Module:
    """The logits equal those of a dense model, before and after `patch`. Returns the patched model."""
    ids = tokens(2, 9)
    expected = gguf_files.dense(source, path)(ids).logits
    model = load(path, device)
    assert relative(model(ids.to(device)).logits.cpu(), expected) <= TOLERANCE
    report = torch_moe_metal.patch(model)
    assert not left_without_need(report), str(report)
    assert relative(model(ids.to(device)).logits.cpu(), expected) <= TOLERANCE
    return model


@pytest.mark.slow_on_mps
@pytest.mark.parametrize("name", gguf_files.MODELS)
def test_architectures(name: str, device: str, tmp_path: Path):
    source = gguf_files.model(name)
    path = gguf_files.write(source, tmp_path / "model.gguf", Q4_K_M)
    model = check(path, source, device)
    assert "q4_k" in formats(model).values()
    assert any(isinstance(module, PackedExperts) for module in model.modules()) or name.startswith("llama4")


@pytest.mark.slow_on_mps
@pytest.mark.parametrize("format", BLOCKS)
def test_formats(format: str, device: str, tmp_path: Path):
    """All weights in one format. Each architecture has biases of experts or not, so gpt-oss has them here."""
    source = gguf_files.model("gpt-oss")
    model = check(gguf_files.write(source, tmp_path / "model.gguf", type_of(format)), source, device)
    assert format in formats(model).values()


def test_a_mix_on_every_device(device: str, tmp_path: Path):
    source = gguf_files.model("qwen3moe")
    check(gguf_files.write(source, tmp_path / "model.gguf", "q8_0"), source, device)


def test_weights_are_pages_of_the_file(tmp_path: Path):
    """Including gate and up of experts, which are two tensors in the file."""
    path = gguf_files.write(gguf_files.model("qwen3moe"), tmp_path / "model.gguf", Q4_K_M)
    model = load(path)
    file = gguf.read(path)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()] if Path("/proc").exists() else []
    places = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps if line[-1] == str(path)]
    for name, module in model.named_modules():
        for weight in getattr(module, "packing", {}):
            data = module.parts(weight)[0]
            begin, size = data.data_ptr(), data.untyped_storage().nbytes()
            assert not places or any(low <= begin < high for low, high in places), name
            assert size < path.stat().st_size, name
    experts = model.model.layers[0].mlp.experts
    for half, name in enumerate(("gate", "up")):
        stored = file.tensors[f"blk.0.ffn_{name}_exps.weight"].mapped()
        assert torch.equal(experts.gate_up_proj[:, half], stored)


@pytest.mark.parametrize("kind", ["q4_k", "codebooks"])
def test_formats_without_a_reader_become_dense(kind: str, tmp_path: Path, capsys, monkeypatch):
    """One warning lists tensors that become dense, and the memory they need."""
    said = []
    monkeypatch.setattr(transformers.utils.logging.get_logger("torch_moe_metal"), "warning", said.append)
    from torch_moe_metal.transformers.checkpoints.gguf import quantizer as gguf_quantizer

    monkeypatch.setattr(gguf_quantizer.logger, "warning", said.append)
    source = gguf_files.model("qwen3moe")
    types = Q4_K_M if kind == "q4_k" else Q4_K_M | {"gate_up": "iq2_xs", "attention": "iq3_s"}
    model = check(gguf_files.write(source, tmp_path / "model.gguf", types), source)
    found = [text for text in said if "become dense" in text]
    if kind == "q4_k":
        assert not found
        return
    assert len(found) == 1 and "iq2_xs, iq3_s" in found[0] and "blk.*.ffn_up_exps.weight" in found[0]
    assert "down" not in found[0].replace("ffn_down_exps", "") and "lm_head" in formats(model)


def test_gate_and_up_of_two_formats_become_dense(tmp_path: Path):
    source = gguf_files.model("qwen3moe")
    types = Q4_K_M | {"blk.0.ffn_up_exps.weight": "q5_k"}
    model = check(gguf_files.write(source, tmp_path / "model.gguf", types), source)
    kinds = [isinstance(layer.mlp.experts, PackedExperts) for layer in model.model.layers]
    assert kinds == [False, True]


WAYS = {
    "shuffled": {"shuffle": True},
    "version 2": {"version": 2},
    "in parts": {"tensors_per_file": 7},
}


@pytest.mark.parametrize("way", WAYS)
def test_files_of_other_kinds(way: str, tmp_path: Path):
    source = gguf_files.model("qwen3moe")
    path = gguf_files.write(source, tmp_path / "model.gguf", Q4_K_M, **WAYS[way])
    check(path, source)


def test_extra_tensors_are_ignored(tmp_path: Path):
    import numpy as np

    source = gguf_files.model("qwen3moe")
    extra = {"blk.0.unheard_of.weight": np.ones((2, 3), np.float32)}
    check(gguf_files.write(source, tmp_path / "model.gguf", Q4_K_M, extra=extra), source)


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "deepseek2-v3"])
def test_saved_models_load_again(name: str, tmp_path: Path):
    """With the same bytes, like a model of `MoeMetalConfig`."""
    source = gguf_files.model(name)
    model = load(gguf_files.write(source, tmp_path / "model.gguf", Q4_K_M))
    expected = model(tokens(2, 9)).logits
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", device_map="cpu")
    assert formats(again) == formats(model) and again.config.quantization_config.quant_method == "moe_metal"
    assert relative(again(tokens(2, 9)).logits, expected) <= TOLERANCE
    assert relative(again.dequantize()(tokens(2, 9)).logits, expected) <= TOLERANCE


def test_permuted_columns_are_not_saved(tmp_path: Path):
    """The file stores Qwen3.5's values in another order, which only the file says."""
    model = load(gguf_files.write(gguf_files.model("qwen35moe"), tmp_path / "model.gguf", Q4_K_M))
    with pytest.raises(ValueError, match=r"save_pretrained: model\.layers\.0\.linear_attn\.out_proj: "):
        model.save_pretrained(tmp_path / "saved")


def test_a_file_without_blocks_is_a_dense_model(tmp_path: Path):
    source = gguf_files.model("qwen3moe")
    path = gguf_files.write(source, tmp_path / "model.gguf", "bf16")
    model = load(path, dtype=None)
    assert model.dtype == torch.bfloat16 and not getattr(model, "is_quantized", False)
    assert not hasattr(model.config, "quantization_config")
    expected = gguf_files.dense(source, path)(tokens(2, 9)).logits
    assert relative(load(path)(tokens(2, 9)).logits, expected) <= TOLERANCE


def test_from_pretrained_takes_a_path(tmp_path: Path):
    path = gguf_files.write(gguf_files.model("qwen3moe"), tmp_path / "model.gguf", Q4_K_M)
    model = AutoModelForCausalLM.from_pretrained(str(path), device_map="cpu")
    assert formats(model) and AutoConfig.from_pretrained(str(path)).num_experts == model.config.num_experts
    tokenizer = AutoTokenizer.from_pretrained(str(path))
    assert tokenizer.decode(tokenizer("hello")["input_ids"]) == "hello" and tokenizer.chat_template


def test_parts_come_from_the_hub(tmp_path: Path, monkeypatch):
    """transformers downloads only the named part; the others come from the same commit."""
    source = gguf_files.model("qwen3moe")
    (tmp_path / "made").mkdir()
    first = gguf_files.write(source, tmp_path / "made" / "model.gguf", Q4_K_M, tensors_per_file=9)
    commit = "0123456789abcdef0123456789abcdef01234567"
    there = tmp_path / "hub" / "models--some--model" / "snapshots" / commit / "Q4"
    there.mkdir(parents=True)
    (there / first.name).symlink_to(first)
    asked = []

    def hf_hub_download(repository, filename, revision, cache_dir):
        asked.append((repository, filename, revision, cache_dir))
        (there / Path(filename).name).symlink_to(first.parent / Path(filename).name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    file = hub.read(str(there / first.name))
    assert file.tensors.keys() == gguf.read(first).tensors.keys()
    others = sorted(part.name for part in first.parent.glob("*.gguf") if part != first)
    assert asked == [("some/model", f"Q4/{name}", commit, str(tmp_path / "hub")) for name in others]


def test_transformers_reads_the_architectures_it_knows(tmp_path: Path):
    """With `packed_checkpoints(False)`, and on other devices."""
    source = gguf_files.model("qwen35moe")
    path = gguf_files.write(source, tmp_path / "model.gguf", "q4_k")
    torch_moe_metal.packed_checkpoints(False)
    try:
        model = load(path)
        with pytest.raises(ValueError, match=r"general\.architecture: expected .*qwen35moe.* got 'glm4moe'"):
            gguf_files.write(gguf_files.model("glm4moe"), tmp_path / "other.gguf", "q4_k")
            load(tmp_path / "other.gguf")
    finally:
        torch_moe_metal.packed_checkpoints(True)
    assert not formats(model)
    assert relative(model(tokens(2, 9)).logits, gguf_files.dense(source, path)(tokens(2, 9)).logits) <= TOLERANCE


# ------------------------------------------------------------------------------------------------ the hub's kernels


class Kernel:
    """The function of the hub's kernels, by transformers' own dequantisation."""

    GEMV_TYPES = frozenset(dequant.GGML_BLOCK)

    @staticmethod
    def dequantize(blocks, type, rows, cols, dtype):
        return dequant.dequantize(blocks, type, dtype).reshape(rows, cols)

    @classmethod
    def get_rows(cls, blocks, indices, type, cols, dtype):
        return cls.dequantize(blocks[indices], type, len(indices), cols, dtype)

    @classmethod
    def mul_mat_vec(cls, blocks, x, type, rows):
        return x @ cls.dequantize(blocks, type, rows, x.shape[-1], x.dtype).T

    @classmethod
    def mul_mat_id(cls, blocks, x, ids, type, rows):
        x = x.unsqueeze(1).expand(*ids.shape, -1)
        weights = [[cls.dequantize(blocks[e], type, rows, x.shape[-1], x.dtype) for e in row] for row in ids.tolist()]
        return torch.stack([torch.stack([w @ v for w, v in zip(*each)]) for each in zip(weights, x)])  # noqa: B905


def test_patch_takes_transformers_own_modules(tmp_path: Path, monkeypatch):
    """Where the hub's kernels run, transformers loads the file; `patch` runs its blocks by our ops, and `unpatch` puts
    its modules back."""
    source = gguf_files.model("qwen35moe")
    path = gguf_files.write(source, tmp_path / "model.gguf", Q4_K_M)
    expected = gguf_files.dense(source, path)(tokens(2, 9)).logits
    monkeypatch.setattr(kernels, "_gguf_kernel", kernels.GgufKernel(Kernel))
    model = load(path, device_map=None)  # mps if it is available
    ids = tokens(2, 9).to(model.device)
    before = {name: module for name, module in model.named_modules() if type(module).__name__.startswith("Gguf")}
    assert {type(module) for module in before.values()} == {GgufEmbedding, GgufExperts, GgufLinear}
    assert relative(model(ids).logits.cpu(), expected) <= TOLERANCE
    monkeypatch.setattr(Kernel, "dequantize", None)  # it must not be called from here on
    monkeypatch.setattr(kernels, "_gguf_kernel", None)
    report = torch_moe_metal.patch(model)
    assert not left_without_need(report) and "model.layers.0.mlp" in report["fused"], str(report)
    assert not any(isinstance(module, GgufLinear | GgufExperts | GgufEmbedding) for module in model.modules())
    assert relative(model(ids).logits.cpu(), expected) <= TOLERANCE
    torch_moe_metal.unpatch(model)
    assert {name: module for name, module in model.named_modules() if name in before} == before


# ------------------------------------------------------------------------------------------------ broken files

MAGIC, VERSION, TENSORS, VALUES = 0, 4, 8, 16


def changed(path: Path, at: int, content: bytes) -> Path:
    data = bytearray(path.read_bytes())
    data[at : at + len(content)] = content
    path.write_bytes(data)
    return path


def place_of(path: Path, name: str) -> int:
    """The position of the number of dimensions in the entry of a tensor."""
    return path.read_bytes().index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


NAME = "blk.0.ffn_down_exps.weight"
BROKEN = {
    "magic": (lambda path: changed(path, MAGIC, b"GGML"), "expected the magic bytes GGUF, got b'GGML'"),
    "version": (lambda path: changed(path, VERSION, struct.pack("<I", 1)), "version: expected 2 or 3, got 1"),
    "no header": (lambda path: path.write_bytes(b"GGUF"), "expected a header of 24 bytes, got 4"),
    "tensors": (lambda path: changed(path, TENSORS, b"\xff" * 8), "number of tensors: expected as many as"),
    "values": (lambda path: changed(path, VALUES, b"\xff" * 8), "number of metadata: expected as many as"),
    "dimensions": (
        lambda path: changed(path, place_of(path, NAME), struct.pack("<I", 9)),
        f"{NAME}: expected 1 to 4 dimensions, got 9",
    ),
    "sizes that overflow": (
        lambda path: changed(path, place_of(path, NAME) + 4, struct.pack("<3Q", 1 << 62, 1 << 62, 1 << 62)),
        f"{NAME}: expected [0-9]+ bytes from byte [0-9]+ on",
    ),
    "rows of no whole blocks": (
        lambda path: changed(path, place_of(path, NAME) + 4, struct.pack("<Q", 100)),
        f"{NAME}: expected rows of a multiple of 256 in q6_k, got 100",
    ),
    "type": (
        lambda path: changed(path, place_of(path, NAME) + 28, struct.pack("<I", 77)),
        f"{NAME}: expected a type that GGML has, got 77",
    ),
    "outside of the file": (
        lambda path: changed(path, place_of(path, NAME) + 32, struct.pack("<Q", 1 << 40)),
        f"{NAME}: expected [0-9]+ bytes from byte 1099511627776 on, of those of all tensors, got",
    ),
    "not aligned": (
        lambda path: changed(path, place_of(path, NAME) + 32, struct.pack("<Q", 33)),
        f"{NAME}: expected a place that is a multiple of 32, got 33",
    ),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-100_000]), "expected [0-9]+ bytes from byte"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:300]), "expected as many as the file has room for"),
    "not UTF-8": (
        lambda path: changed(path, path.read_bytes().index(b"qwen3moe.block_count"), b"\xff"),
        "a key of the metadata: expected UTF-8, got",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_raise(what: str, tmp_path: Path):
    """Before anything is in memory, in all three functions that read it."""
    path = gguf_files.write(gguf_files.model("qwen3moe"), tmp_path / "model.gguf", Q4_K_M)
    change, message = BROKEN[what]
    change(path)
    expected = rf"^torch_moe_metal: {path}: .*{message}"
    for reads in (AutoConfig, AutoTokenizer, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=expected):
            reads.from_pretrained(tmp_path, gguf_file=path.name)


def test_generate_raises_if_the_file_has_changed(tmp_path: Path):
    """Its pages are the weights on the CPU: of a shorter file they would end the process. A copy has its own memory,
    and a file that is replaced keeps its pages."""
    path = gguf_files.write(gguf_files.model("qwen3moe"), tmp_path / "model.gguf", Q4_K_M, tensors_per_file=20)
    model, ids = load(path), tokens(1, 5)
    expected, copied = generated(model, ids), copy.deepcopy(model)
    for part in sorted(tmp_path.glob("*.gguf")):
        os.replace(shutil.copy(part, tmp_path / "other"), part)
        assert generated(model, ids) == expected
    model = load(path)
    assert generated(model, ids) == expected
    last = max(tmp_path.glob("*.gguf"))
    for change in (lambda: changed(last, last.stat().st_size - 9, b"\xff"), lambda: os.truncate(last, 100)):
        change()
        with pytest.raises(ValueError, match=f"^torch_moe_metal: {last}: expected the file as it was .* load"):
            generated(model, ids)
        assert generated(copied, ids) == expected


def test_big_endian_files_raise(tmp_path: Path):
    path = gguf_files.write(gguf_files.model("qwen3moe"), tmp_path / "model.gguf", Q4_K_M, big_endian=True)
    with pytest.raises(ValueError, match=rf"{path}: expected numbers with their lowest byte first"):
        load(path)


WRONG_METADATA = {
    "missing": ({"qwen3moe.embedding_length": None}, r"qwen3moe\.embedding_length: expected an integer"),
    "a string": ({"qwen3moe.expert_count": "many"}, r"qwen3moe\.expert_count: expected an integer.* got 'many'"),
    "another width": ({"qwen3moe.expert_feed_forward_length": 512}, r"ffn_(gate|down)_exps\.weight: expected shape"),
    "another vocabulary": ({"qwen3moe.embedding_length": 128}, r"expected shape"),
    "more layers": ({"qwen3moe.block_count": 3}, r"missing: model\.layers\.2\.input_layernorm\.weight"),
}


@pytest.mark.parametrize("what", WRONG_METADATA)
def test_wrong_metadata(what: str, tmp_path: Path):
    changes, message = WRONG_METADATA[what]
    source = gguf_files.model("qwen3moe")
    path = gguf_files.write(source, tmp_path / "model.gguf", Q4_K_M, metadata_changes=changes)
    with pytest.raises(ValueError, match=rf"^torch_moe_metal: {path}: .*{message}"):
        load(path)


def test_an_unknown_architecture(tmp_path: Path):
    changes = {"general.architecture": "unheard_of"}
    path = gguf_files.write(gguf_files.model("qwen3moe"), tmp_path / "model.gguf", Q4_K_M, metadata_changes=changes)
    with pytest.raises(
        ValueError, match=rf"^torch_moe_metal: {path}: general.architecture: expected .*qwen3moe.* got 'unheard_of'"
    ):
        load(path)


def test_a_missing_part(tmp_path: Path):
    path = gguf_files.write(gguf_files.model("qwen3moe"), tmp_path / "model.gguf", Q4_K_M, tensors_per_file=9)
    missing = sorted(tmp_path.glob("*.gguf"))[1]
    missing.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{path}: expected {missing.name} in the same folder"):
        load(path)


def test_all_architectures_are_tested():
    """Those that this package adds, and transformers' own MoE models."""
    written = {gguf_files.ARCHITECTURES[family] for family, _ in gguf_files.MODELS.values()}
    ours = {"mixtral" if name == "llama" else name for name in written} - {"qwen35moe"}
    assert ours == architectures.CONVERSIONS.keys()
