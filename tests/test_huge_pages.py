"""Requests for huge pages: Linux shows them as the flag "hg" of a mapping, whether it grants them or not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_moe_metal import gguf, huge_pages

HAS_THEM = Path("/sys/kernel/mm/transparent_hugepage").exists()
needs_linux = pytest.mark.skipif(not HAS_THEM, reason="this system has no transparent huge pages")


def flags(address: int) -> list[str]:
    """Those of the mapping that contains this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *values = line.split()
        if key == "VmFlags:" and inside:
            return values
        if not key.endswith(":"):
            low, high = (int(end, 16) for end in key.split("-"))
            inside = low <= address < high
    raise ValueError(f"{address:x} is not mapped")


@needs_linux
@pytest.mark.parametrize("command", [True, False])
def test_large_tensors_request_huge_pages(command: bool):
    """Those of a command, not those of a program that imports the package. PyTorch reads the setting with its first
    tensor, so this needs a new process."""
    script = """
import sys, torch, torch_moe_metal
from torch_moe_metal.__main__ import main
from test_huge_pages import flags
if sys.argv[1] == "True":
    main([])
small, large = torch.empty(1 << 16, dtype=torch.uint8), torch.empty(1 << 26, dtype=torch.uint8)
print("hg" in flags(small.data_ptr()), "hg" in flags(large.data_ptr() + (1 << 25)))
"""
    env = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    env["PYTHONPATH"] = str(Path(__file__).parent)
    ran = subprocess.run(
        [sys.executable, "-c", script, str(command)], capture_output=True, text=True, env=env, check=False
    )
    assert ran.stdout.split()[-2:] == ["False", str(command)], ran.stderr


def test_the_setting_of_the_user_stays(monkeypatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    huge_pages.for_tensors()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"


@needs_linux
def test_a_mapped_gguf_file_requests_huge_pages(tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(bytes(1 << 22))
    (tmp_path / "empty.gguf").touch()
    assert "hg" in flags(gguf.pages(tmp_path / "model.gguf").data_ptr())
    assert "hg" not in flags(torch.UntypedStorage.from_file(str(tmp_path / "model.gguf"), False, 1 << 22).data_ptr())
    assert gguf.pages(tmp_path / "empty.gguf").nbytes() == 0
