"""GGUF files in Metal buffers without a copy, and files larger than memory on the CPU."""

import copy
import gc
import hashlib
import io
import os
import re
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import gguf_files
import large_gguf
import metal_sim
from conftest import SIMULATED
from gguf_files import Q4_K_M
from test_huge_pages import flags, needs_linux
from torch_moe_metal.commands.common import mapped_file
from torch_moe_metal.file_pages import is_mapped, mapped_bytes
from torch_moe_metal.gguf import read_ahead, views
from torch_moe_metal.transformers.checkpoints.gguf import quantizer

needs_the_simulated = pytest.mark.skipif(not SIMULATED, reason="it changes limits of the simulated device")
IDS = torch.arange(5)[None]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def said(monkeypatch) -> list[str]:
    found = []
    monkeypatch.setattr(quantizer.logger, "warning", found.append)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return gguf_files.write(gguf_files.model("qwen3moe"), tmp_path / "model.gguf", Q4_K_M)


def load(path: Path, device: str = "mps", dtype: torch.dtype = torch.float32):
    return AutoModelForCausalLM.from_pretrained(path, device_map=device, dtype=dtype)


def packed_of(model) -> list[torch.Tensor]:
    return [buffer for buffer in model.buffers() if buffer.dtype == torch.uint8]


def test_blocks_are_mapped_and_freed(mps: str, path: Path, monkeypatch):
    """The logits are those of a copied model. The file does not change, and each buffer is released."""
    checksum, before = hashlib.sha256(path.read_bytes()).digest(), mapped_bytes()
    model = load(path)
    assert all(map(is_mapped, packed_of(model))) and not any(map(is_mapped, model.parameters()))
    assert 0 < mapped_bytes() - before <= path.stat().st_size + 2 * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setenv(views.VARIABLE, "0")
    copied, ids = load(path), IDS.to(mps)
    assert not any(map(is_mapped, copied.buffers()))
    expected = copied(ids).logits
    assert torch.equal(model(ids).logits, expected)
    assert str(path) in Path("/proc/self/maps").read_text()
    del model
    gc.collect()
    torch.mps.synchronize()
    assert mapped_bytes() == before
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert not SIMULATED or metal_sim.live_objects()["MTLBuffer over pages"] == 0
    assert hashlib.sha256(path.read_bytes()).digest() == checksum


@needs_the_simulated
@pytest.mark.parametrize("limit", [{"local_volumes": False}, {"takes_pages": False}, {"working_set": 1 << 20}])
def test_what_cannot_be_mapped_is_copied(limit: dict, mps: str, path: Path, said: list[str]):
    reason = {"local_volumes": "volume", "takes_pages": "no buffer", "working_set": "working set"}[next(iter(limit))]
    with metal_sim.playing_memory(**limit):
        model = load(path)
    assert not any(map(is_mapped, model.buffers())) and len(said) == 1 and reason in said[0] and str(path) in said[0]


@needs_the_simulated
def test_many_views(mps: str, path: Path):
    """Gate and up of experts, which are read as one weight, are in one view."""
    with metal_sim.playing_memory(max_buffer=700_000):
        model = load(path)
    assert len({tensor.untyped_storage().data_ptr() for tensor in packed_of(model)}) >= 4
    assert all(map(is_mapped, packed_of(model)))
    assert torch.equal(model(IDS.to(mps)).logits, load(path)(IDS.to(mps)).logits)


def test_copies_and_saved_models_have_no_whole_views(mps: str, path: Path, tmp_path: Path):
    model, most = load(path), path.stat().st_size * 1.05
    expected, before = model(IDS.to(mps)).logits, torch.mps.current_allocated_memory()
    copied = copy.deepcopy(model)
    assert torch.equal(copied(IDS.to(mps)).logits, expected)
    assert torch.mps.current_allocated_memory() - before < path.stat().st_size / 20
    file = io.BytesIO()
    torch.save(model.model.layers[0].mlp, file)
    assert len(file.getvalue()) < most / 2
    file = io.BytesIO()
    torch.save(model, file)
    assert len(file.getvalue()) < most
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert {tensor.device.type for tensor in again.buffers()} == {"mps"}
    assert torch.equal(again(IDS.to(mps)).logits, expected)
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").stat().st_size < most


@pytest.mark.parametrize("change, got", [
    (lambda path: os.truncate(path, 100_000), "got a changed file of 100000 bytes"), (os.unlink, "got no file"),
])  # fmt: skip
@pytest.mark.parametrize("place", ["cpu", "mps"])
def test_a_file_that_changes_while_it_is_loaded(change, got: str, place: str, mps: str, path: Path, monkeypatch):
    stock = quantizer.pack_all

    def pack_all(*args):
        stock(*args)
        change(path)

    monkeypatch.setattr(quantizer, "pack_all", pack_all)
    size = path.stat().st_size
    said = rf"^torch_moe_metal: {path}: [\w.]+: expected \d+ bytes from byte \d+ on, of {size} when .* {got}"
    with pytest.raises(ValueError, match=said):
        load(path, place)


def test_the_op_checks_the_file_again(mps: str, path: Path, tmp_path: Path):
    size, op = path.stat().st_size, torch.ops.moe_metal._map_file
    with pytest.raises(ValueError, match=f"{path}: expected the {size + 1} bytes .* got {size}"):
        op(str(path), size + 1, [0], [10])
    with pytest.raises(ValueError, match=f"{path}: expected bytes within its {size}, got 0 to {size + 1}"):
        op(str(path), size, [0], [size + 1])
    with pytest.raises(ValueError, match="none: expected a file of 10 bytes, got none"):
        op(str(tmp_path / "none"), 10, [0], [10])


def test_generate_raises_if_a_mapped_file_has_changed(mps: str, path: Path):
    model, ids = load(path), IDS.to(mps)
    moved = copy.deepcopy(model).to("cpu")
    os.utime(path, ns=(1, 1))
    with pytest.raises(ValueError, match=f"^torch_moe_metal: {path}: expected the file as it was"):
        model.generate(ids, max_new_tokens=1, do_sample=False)
    moved.generate(IDS, max_new_tokens=1, do_sample=False)


def test_views_are_cut_between_tensors():
    page, gap = os.sysconf("SC_PAGE_SIZE"), views.GAP
    parts = [[range(100, 200)], [range(5 * page, 6 * page)], [range(6 * page + gap + 1, 7 * page + gap + 2)]]
    assert views.cut(parts, 1 << 40) == [range(100, 6 * page), parts[2][0]]
    assert views.cut(parts, page) == [part[0] for part in parts[:2]]  # the last one is in two pages
    apart = [[range(0, 10), range(3 * page, 4 * page)], [range(page, 2 * page)]]  # a group around another one
    assert views.cut(apart, 4 * page) == [range(4 * page)]
    assert views.cut(apart, 2 * page) == [range(2 * page), range(3 * page, 4 * page)]


def test_doctor_reads_a_mapped_file(mps: str):
    right, line = mapped_file.report()
    assert right and re.search(r"[1-9]\d* bytes: ok$", line), line


# ------------------------------------------------------------------------------------------------ larger than memory


@needs_linux
@pytest.mark.parametrize("fits", [True, False])
def test_experts_of_larger_files_are_read_ahead(fits: bool, path: Path, monkeypatch):
    """Without huge pages. The ops tell the system about the chosen experts alone: the others stay on the disk."""
    monkeypatch.setattr(read_ahead, "memory_left", lambda: path.stat().st_size - (not fits))
    added, stock = [], torch.ops.moe_metal._read_experts_ahead
    monkeypatch.setattr(torch.ops.moe_metal, "_read_experts_ahead", lambda data: (added.append(data), stock(data)))
    model = load(path, "cpu")
    assert len(added) == (0 if fits else 4)
    weight = model.model.layers[0].mlp.experts.down_proj
    assert ("hg" in flags(weight.data_ptr())) == fits
    assert model(IDS).logits.isfinite().all()


def test_memory_that_is_left(tmp_path: Path, monkeypatch):
    """Of both versions of control groups: what the group's files take can be used."""
    stat = "inactive_file 30\nactive_file 5\nanon 7\n"
    for folder, values in (("memory/a", ("limit_in_bytes", "usage_in_bytes")), ("b", ("max", "current"))):
        (tmp_path / folder).mkdir(parents=True)
        for name, value in zip((*values, "stat"), ("1000", "600", stat), strict=True):
            (tmp_path / folder / f"memory.{name}").write_text(value)
    monkeypatch.setattr(read_ahead, "ROOT", tmp_path)
    monkeypatch.setattr(read_ahead, "GROUPS", tmp_path / "groups")
    for line in ("4:memory:/a/inner", "0::/b"):
        (tmp_path / "groups").write_text(f"{line}\n1:cpu:/\n")
        assert list(read_ahead.of_groups()) == [435] and read_ahead.memory_left() == 435
    (tmp_path / "b" / "memory.max").write_text("max\n")
    assert list(read_ahead.of_groups()) == [] and read_ahead.memory_left() == read_ahead.of_machine() > 435


# ------------------------------------------------------------------------------------------------ large files


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.slow
@needs_the_simulated
def test_a_file_of_4_gb(mps: str, tmp_path: Path, monkeypatch):
    path = large_gguf.write(tmp_path / "large.gguf", layers=10)
    size = path.stat().st_size
    assert size > 4e9
    checksum = hashlib.file_digest(path.open("rb"), "sha256").digest()  # it also reads the file into memory
    load(path, dtype=torch.bfloat16)  # imports transformers' model
    gc.collect()
    before, allocated, made = anonymous(), torch.mps.current_allocated_memory(), metal_sim.made_objects()
    start = time.perf_counter()
    model = load(path, dtype=torch.bfloat16)
    took = time.perf_counter() - start
    count = metal_sim.made_objects()["MTLBuffer over pages"] - made["MTLBuffer over pages"]
    print(f"{size / 1e9:.2f} GB in {took:.2f} s, {(anonymous() - before) / 1e6:.0f} MB of anonymous memory")
    assert took <= 2 and count <= 4
    assert anonymous() - before <= size / 10 and torch.mps.current_allocated_memory() - allocated <= size / 10
    found = model(IDS[:, :2].to(mps)).logits
    with metal_sim.playing_memory(max_buffer=256 << 20):
        many = load(path, dtype=torch.bfloat16)
    assert len({tensor.untyped_storage().data_ptr() for tensor in packed_of(many)}) >= 16
    assert torch.equal(many(IDS[:, :2].to(mps)).logits, found)
    del many
    monkeypatch.setenv(views.VARIABLE, "0")
    assert torch.equal(load(path, dtype=torch.bfloat16)(IDS[:, :2].to(mps)).logits, found)
    del model
    gc.collect()
    torch.mps.synchronize()
    assert (
        metal_sim.live_objects()["MTLBuffer over pages"] == 0 and str(path) not in Path("/proc/self/maps").read_text()
    )
    assert hashlib.file_digest(path.open("rb"), "sha256").digest() == checksum


@pytest.mark.slow
@needs_linux
def test_speed_of_a_file_larger_than_memory(tmp_path: Path):
    """16 layers of Qwen3-30B-A3B's sizes with 3 GB of memory."""
    if large_gguf.groups() is None:
        pytest.skip("this process cannot make a control group with a limit of memory")
    path = large_gguf.write(tmp_path / "large.gguf", layers=16)
    with large_gguf.limited(3 * 10**9) as group:
        faults, ahead = (large_gguf.speed(path, way, 24, group) for way in (False, True))
    assert ahead >= 1.8 * faults, f"{ahead:.2f} tokens/s, by page faults {faults:.2f}"
