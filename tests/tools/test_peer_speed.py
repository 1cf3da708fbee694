"""tools/peer_speed.py without llama.cpp: the types in its files, and its message if llama.cpp is missing."""

import sys

import peer_speed


def test_a_mix_has_more_bits_in_every_second_layer():
    types = peer_speed.types_of("q4_k_m", 3)
    assert types["gate_up"] == types["down"] == types["attention"] == "q4_k" and types["head"] == "q6_k"
    more = {name for name, type in types.items() if name.startswith("blk.") and type == "q6_k"}
    assert more == {f"blk.{layer}.{name}.weight" for layer in (0, 2) for name in ("attn_v", "ffn_down_exps")}


def test_one_type_is_in_all_layers():
    assert set(peer_speed.types_of("q8_0", 3).values()) == {"q8_0"}


def test_missing_llama_cpp_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(peer_speed.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["peer_speed.py"])
    assert peer_speed.main() == 2
    assert "pip install llama-cpp-python" in capsys.readouterr().err
