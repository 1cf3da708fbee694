"""tools/peer_experts.py: its routes and its table; with llama.cpp, the outputs of both engines."""

import argparse
import importlib.util
import sys

import pytest
import torch

import peer_experts


def calls(T, count, E=16, K=4):
    routes = peer_experts.routes(T, E, K, torch.Generator().manual_seed(0))
    return [next(routes) for _ in range(count)]


def test_consecutive_calls_select_other_experts():
    found = calls(1, 4)
    assert all(ids.shape == (1, 4) and ids.dtype == torch.int32 for ids in found)
    assert torch.cat(found).unique().tolist() == list(range(16))


def test_each_token_of_many_has_distinct_experts():
    (ids,) = calls(32, 1)
    assert ids.shape == (32, 4) and all(len(set(token)) == 4 for token in ids.tolist())


def test_table_has_times_ratios_and_differences():
    each = {"ours": 0.5, "theirs": 1.0, "difference": 0.011}
    line = peer_experts.row({"type": "q4_k", "ours": "avx2", "theirs": "CPU_REPACK", "tokens": {"1": each}})
    assert line.split() == ["q4_k", "0.50", "1.00", "2.00", "1.10%", "CPU_REPACK"]
    above = peer_experts.head([1]).splitlines()[1]
    assert above.index("ratio") + len("ratio") == line.index("2.00") + len("2.00")


def test_difference_is_relative_to_ours():
    assert peer_experts.difference([3.0, 4.0], [3.0, 4.5]) == pytest.approx(0.1)


def test_missing_llama_cpp_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(peer_experts.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["peer_experts.py"])
    assert peer_experts.main() == 2
    assert "pip install llama-cpp-python" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize("type", ["q4_k", "q8_0"])
def test_outputs_agree_with_llama_cpp(type):
    options = argparse.Namespace(model="olmoe", tokens=[1, 3], dtype="float32", rounds=1, threads=1)
    found = peer_experts.compare(options, type)
    for each in found["tokens"].values():
        assert 0 < each["difference"] < 0.03 and each["ours"] > 0 and each["theirs"] > 0


def test_outputs_that_differ_end_the_comparison(monkeypatch):
    class Engine:
        def __init__(self, name, *arguments, script):
            self.row = [1.0, 2.0] if name == "llama.cpp" else [1.0, 1.0]

        def answer(self):
            return {"kind": "", "rows": {"1": self.row}}

        def measure(self):
            return {"1": 1.0}

        def end(self):
            pass

    monkeypatch.setattr(peer_experts, "Process", Engine)
    options = argparse.Namespace(model="olmoe", tokens=[1], dtype="float32", rounds=1, threads=1)
    with pytest.raises(SystemExit, match=r"the outputs differ by 70\.7%"):
        peer_experts.compare(options, "q4_k")
