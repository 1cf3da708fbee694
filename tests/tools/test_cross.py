"""tools/cross.py, and what setup.py does on a Mac, as it sees it."""

import runpy
import sys
from pathlib import Path

import pytest
import setuptools
import torch
from packaging.tags import cpython_tags
from packaging.utils import parse_wheel_filename

import cross
from cross import CrossError, MachO


def test_every_source_for_a_mac_is_compiled():
    sources = {source for extension in cross.mac_extensions() for source in extension.sources}
    files = [
        str(file.relative_to(cross.ROOT)) for file in (cross.ROOT / "csrc").rglob("*") if file.suffix in (".cpp", ".mm")
    ]
    wanted = {file for file in files if not file.startswith("csrc/cpu/x86/")}
    assert sources == wanted


@pytest.mark.parametrize("version, refused", [("2.13.0", True), ("2.9.1", True), ("2.14.1", False), ("3.0.0", False)])
def test_an_older_torch_is_refused_on_a_mac(version: str, refused: bool, monkeypatch):
    made, minor = [], version.rpartition(".")[0]
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(setuptools, "setup", lambda **keywords: made.append(keywords))
    if not refused:
        runpy.run_path(str(cross.ROOT / "setup.py"))
        assert made[0]["install_requires"] == [f"torch=={minor}.*"]
        return
    with pytest.raises(SystemExit) as raised:
        runpy.run_path(str(cross.ROOT / "setup.py"))
    assert not made
    assert str(raised.value) == (
        f"torch_moe_metal needs torch 2.14 or newer on a Mac; this is {minor}: pip install 'torch>=2.14'"
    )


def test_one_wheel_fits_every_supported_python():
    """The libraries need nothing of Python, as the test below shows, so the tag alone decides."""
    tags = parse_wheel_filename(f"torch_moe_metal-0.1.0+torch2.14-{cross.TAG}.whl")[3]
    mac = ["macosx_14_0_arm64"]
    fits = [minor for minor in range(9, 16) if tags & set(cpython_tags((3, minor), platforms=mac))]
    assert fits == [11, 12, 13, 14, 15]


TORCH = MachO({"__ZN2at5emptyEv", cross.PARALLEL}, set(), True)


@pytest.mark.parametrize(
    "imports, signed, complaint",
    [
        ({"__ZN2at5emptyEv", "_malloc"}, True, None),
        ({"__ZN2at7missingEv"}, True, "no library of this torch exports it"),
        ({"_of_nobody"}, True, "neither libSystem nor torch's own libraries know it"),
        ({"_PyTuple_New"}, True, "needs _PyTuple_New, so it may not fit every Python"),
        ({"_malloc"}, False, "_C.so is not signed"),
    ],
)
def test_symbols_that_would_be_missing(imports: set[str], signed: bool, complaint: str | None, monkeypatch):
    found = {"_C.so": MachO(set(), imports, signed)}
    monkeypatch.setattr(cross, "read_macho", lambda path: found.get(path.name, TORCH))
    monkeypatch.setattr(cross, "libsystem_symbols", lambda: {"_malloc", "_PyTuple_New"})
    if complaint is None:
        cross.check("2.14.1", {"_C": Path("_C.so")}, Path("torch"))
    else:
        with pytest.raises(CrossError, match=complaint):
            cross.check("2.14.1", {"_C": Path("_C.so")}, Path("torch"))
