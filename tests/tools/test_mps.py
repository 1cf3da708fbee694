"""tools/mps.py, and macOS's version in its output and in reports."""

import platform
import subprocess
from pathlib import Path

import pytest
import torch

import mps
from torch_moe_metal import macos
from torch_moe_metal.commands.bench import measure


@pytest.fixture
def darwin(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A Mac on which Python was linked for an older SDK, so that macOS 26 and newer report 16."""
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("16.0", ("", "", ""), "arm64"))
    return monkeypatch


@pytest.mark.parametrize(
    ("release", "version"),
    [("23.6.0", "14.6"), ("24.0.0", "15.0"), ("25.5.0", "26.5"), ("27.1.0", "27.1")],
)
def test_the_version_of_macos(release: str, version: str, darwin: pytest.MonkeyPatch) -> None:
    darwin.setattr(platform, "release", lambda: release)
    darwin.setattr(mps.sys, "platform", "darwin")
    darwin.setattr(mps.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": "Apple M4\n"}))
    assert macos.version() == version and measure.system() == f"macOS {version}"
    assert mps.machine() == f"Apple M4, macOS {version}, torch {torch.__version__}"


def test_no_macos_version_elsewhere() -> None:
    assert macos.version() == "" or platform.system() == "Darwin"


@pytest.mark.parametrize(("name", "usable"), [("Apple M4", True), ("Apple Paravirtual device", False)])
def test_a_virtual_gpu_is_not_used(
    name: str, usable: bool, mps_like: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is reported, and the next steps of a GitHub job do not run on it."""
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: name)
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "output"))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    monkeypatch.setattr("sys.argv", ["mps.py", "--needed"])
    assert mps.main() == (0 if usable else 1)
    assert (tmp_path / "output").read_text() == f"mps={str(usable).lower()}\n"
    summary = (tmp_path / "summary").read_text()
    assert ("NOT RUN ON mps" in summary and name in summary) != usable


@pytest.mark.parametrize(
    ("says", "fails"),
    [
        ("every op is right", ""),
        ("every op is right; exit 3", "Error 3"),
        ("Invalid device load at offset 64", "Error 1"),
    ],
)
def test_make_validate(says: str, fails: str, tmp_path: Path) -> None:
    """Doctor under Metal's own validation fails if that finds something, whatever the results are."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $MTL_DEBUG_LAYER $MTL_SHADER_VALIDATION $*\necho {says} >&2\n")
    python.chmod(0o755)
    (tmp_path / "Makefile").write_text((Path(__file__).parents[2] / "Makefile").read_text())
    command = ["make", "validate", f"BIN={tmp_path}", "BUILT="]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "1 1 -m torch_moe_metal doctor" in done.stdout
    assert (fails in done.stderr and done.returncode != 0) if fails else done.returncode == 0


@pytest.fixture
def mps_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that computes: the CPU in place of mps."""
    ones = torch.ones
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", lambda *size, device: ones(*size))
