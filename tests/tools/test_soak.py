"""tools/soak.py: that it ends well where nothing leaks, and notices each thing that may not grow."""

from dataclasses import replace

import pytest
import torch

import soak
from soak import Sample, faults

STEADY = [Sample(float(i), i, 300.0 + i % 3, {"tensor": 27, "MTLBuffer": 1}) for i in range(12)]


def run(device: str, *, minutes: float = 0.03) -> int:
    with pytest.raises(SystemExit) as end:
        soak.main(["--minutes", str(minutes), "--device", device, "--threads", "2"])
    return int(end.value.code)


def test_passes(device: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "LONGEST", {"cpu": 1100, "mps": 8})
    one = torch.ones(1, 1, 1, device=device)
    torch.ops.moe_metal.short_conv_(one, one[0])  # allocates the buffers of absent arguments, which stay
    assert run(device) == 0
    *progress, verdict = capsys.readouterr().out.splitlines()
    assert len(progress) >= 6 and all("MiB in use" in line for line in progress)
    assert verdict.startswith("bounded")
    if device == "mps" and soak.SIMULATED:
        assert "25 tensor" in progress[-1] and "MTLComputePipelineState" in progress[-1]


def test_detects_leaked_tensors(device: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    leaked, generate = [], soak.generate

    def leaking(*args) -> list[int]:
        leaked.append(torch.ones(16 << 18, device=device))  # 16 MiB
        return generate(*args)

    monkeypatch.setattr(soak, "generate", leaking)
    monkeypatch.setattr(soak, "LONGEST", {"cpu": 16, "mps": 2})
    assert run(device) == 1
    output = capsys.readouterr().out
    assert device == "mps" or "memory in use grew from" in output
    assert device == "cpu" or ("live tensor grew from" if soak.SIMULATED else "live bytes of tensors grew") in output


def test_detects_other_tokens(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = iter(range(1000))
    monkeypatch.setattr(soak, "generate", lambda *args: [next(tokens)])
    with pytest.raises(AssertionError, match="other tokens than at first"):
        soak.main(["--minutes", "0", "--threads", "1"])


def test_raises_what_a_thread_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = soak.generate

    def failing(model: torch.nn.Module, length: int, *seed: int) -> list[int]:
        if seed:
            raise RuntimeError("in a thread")
        return generate(model, length)

    monkeypatch.setattr(soak, "generate", failing)
    with pytest.raises(RuntimeError, match="in a thread"):
        soak.main(["--minutes", "0", "--threads", "1"])


def test_verdict() -> None:
    assert faults(STEADY) == []
    assert faults([replace(STEADY[0], memory=900.0, objects={"tensor": 99}), *STEADY[1:]]) == []  # while it starts
    grown = [replace(sample, memory=sample.memory + 10 * i) for i, sample in enumerate(STEADY)]
    assert faults(grown) == ["memory in use grew from 356.0 to 395.5 MiB"]
    one_more = replace(STEADY[-1], objects={"tensor": 27, "MTLBuffer": 1, "MTLLibrary": 1})
    assert faults([*STEADY[:-1], one_more]) == ["live MTLLibrary grew from 0 to 1"]
