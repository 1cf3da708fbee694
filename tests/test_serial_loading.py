"""Loading on mps runs in one thread, and on the CPU in transformers' own threads."""

import os
import threading
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, core_model_loading

import gguf_files
from gguf_files import Q4_K_M
from torch_moe_metal.hooks.serial_loading import VARIABLE, is_mps


class Spy(TorchDispatchMode):
    """The threads in which an op returns a tensor on mps."""

    def __init__(self):
        super().__init__()
        self.threads = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "mps":
            self.threads.add(threading.current_thread())
        return result


@pytest.fixture
def loading_threads(monkeypatch) -> dict:
    """The threads that copy and convert tensors for transformers' loader, and those whose results are on mps. Modes
    belong to a thread, so each gets its own."""
    found: dict[str, set] = {"all": set(), "mps": set()}
    stock = core_model_loading._materialize_copy

    def copy(*args):
        with Spy() as spy:
            result = stock(*args)
        found["all"].add(threading.current_thread())
        found["mps"] |= spy.threads
        return result

    monkeypatch.setattr(core_model_loading, "_materialize_copy", copy)
    return found


@pytest.mark.parametrize("kind", ["gguf", "state dict"])
def test_tensors_on_mps_are_made_by_one_thread(kind: str, device: str, tmp_path: Path, loading_threads, monkeypatch):
    """In bfloat16: the norms, which are float32, are converted on the device."""
    monkeypatch.setenv(VARIABLE, "0")
    source, options = gguf_files.model("qwen3moe"), {"device_map": device, "dtype": torch.bfloat16}
    if kind == "gguf":
        path = gguf_files.write(source, tmp_path / "model.gguf", Q4_K_M)
        model = AutoModelForCausalLM.from_pretrained(path, **options)
    else:  # as from a file of safetensors, whose reader for mps needs a Mac
        model = type(source).from_pretrained(None, config=source.config, state_dict=source.state_dict(), **options)
    assert {parameter.device.type for parameter in model.parameters()} == {device}
    main = threading.main_thread()
    if device == "mps":
        assert loading_threads["all"] == {main} and loading_threads["mps"] == {main}
    else:
        assert main not in loading_threads["all"] and not loading_threads["mps"]
    assert os.environ[VARIABLE] == "0"


def test_places_of_a_device_map(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert all(map(is_mps, ("mps", "mps:0", torch.device("mps", 0), 0)))
    assert not any(map(is_mps, ("cpu", "disk", torch.device("cpu"))))
