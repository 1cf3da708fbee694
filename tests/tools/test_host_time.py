"""`python -m torch_moe_metal bench-host`: the host's time and the dispatcher calls per token."""

import json

import pytest
import torch
from torch import nn

import torch_moe_metal
from torch_moe_metal.commands.bench import host_time
from torch_moe_metal.commands.bench.host_time import ANSWERS, CALLS, FORWARD, GENERATE, VIEWS
from torch_moe_metal.commands.command_line import main
from torch_moe_metal.transformers.fusing.tiny_models import CONFIGS, build, with_layers

COMMAND = ["bench-host", "--device", "cpu", "--layers", "2", "--tokens", "2", "--rounds", "1"]

#: Lists with an item for each layer.
LISTS = {
    "qwen3_moe": [],
    "llama4_text": ["no_rope_layers"],
    "unlimited_ocr": ["layer_types", "mlp_layer_types"],
    "lara_mini": ["layer_types"],
}


@pytest.fixture
def short(monkeypatch) -> None:
    monkeypatch.setattr(host_time, "SHORT", 2)
    monkeypatch.setattr(host_time, "STEPS", 2)


def test_json_and_tables(short, capsys):
    families = ["qwen3_moe", "mellum"]
    threads = torch.get_num_threads()
    assert main([*COMMAND, "--families", *families, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["families"]) == families and torch.get_num_threads() == threads
    for rows in found["families"].values():
        assert list(rows) == [GENERATE, FORWARD, ANSWERS, CALLS, VIEWS]
        assert all(rows[key][name] > 0 for key in (FORWARD, ANSWERS, VIEWS) for name in ("stock", "patched"))
        assert rows[CALLS]["ratio"] == rows[CALLS]["patched"] / rows[CALLS]["stock"] < 0.5
    assert main([*COMMAND, "--families", "qwen3_moe", "--dtype", "bf16"]) == 0
    head, _, family, *lines = capsys.readouterr().out.splitlines()
    assert "dtype bfloat16   layers 2   tokens 2   rounds 1" in head
    assert family.split() == ["qwen3_moe", "stock", "patched", "ratio"] and len(lines) == 5
    calls = found["families"]["qwen3_moe"][CALLS]
    assert lines[3].split()[-3:-1] == [str(calls["stock"]), str(calls["patched"])]


def test_times_are_those_of_the_tokens(monkeypatch):
    """With a clock of one microsecond per forward: no answer ends early, and what a prompt takes is subtracted."""
    now = [0.0]

    def forward(*_) -> None:
        assert torch.get_num_threads() == 1
        now[0] += 1e-6

    def with_a_clock(*args) -> dict[str, nn.Module]:
        made = models(*args)
        for model in made.values():
            assert model.dtype == torch.bfloat16
            model.register_forward_hook(forward)
        return made

    models = host_time.models
    monkeypatch.setattr(host_time, "models", with_a_clock)
    monkeypatch.setattr(host_time.time, "thread_time", lambda: now[0])
    monkeypatch.setattr(host_time, "table", lambda _, found: rows.append(found) or "")
    rows: list[dict] = []
    assert main([*COMMAND, "--families", "gpt_oss", "--dtype", "bf16"]) == 0
    for name in ("stock", "patched"):
        assert [rows[0][key][name] for key in (GENERATE, FORWARD, ANSWERS)] == pytest.approx([1, 1, 16])


def test_ratio_of_rounds():
    """A slow phase of the machine affects both models, so it does not change the ratio."""
    rows = {"stock": [{"us": 10}, {"us": 100}, {"us": 10}], "patched": [{"us": 5}, {"us": 50}, {"us": 9}]}
    assert host_time.ratio(rows, "us") == 0.5


def test_dispatcher_calls(device: str):
    """`linear` and `glu` call other ops, which are not counted. There is no dispatch mode, which our code may see."""
    x, weight = torch.ones(1, 64, device=device), torch.ones(8, 64, device=device)
    modes = []

    def function() -> None:
        modes.append(torch._C._len_torch_dispatch_stack())
        torch_moe_metal.glu(nn.functional.linear(x, weight), x[:, :8] + 1)

    function()
    found = host_time.dispatcher_calls(function)
    assert found == {"aten::linear": 1, "aten::slice": 1, "aten::add": 1, "moe_metal::glu": 1}
    assert host_time.counts(found) == {CALLS: 4, VIEWS: 1} and modes == [0, 0]


@pytest.mark.parametrize("family", LISTS)
def test_models_with_more_layers(family: str):
    with torch.device("meta"):
        config = build(family, **with_layers(family, 5)).config.get_text_config()
    assert config.num_hidden_layers == 5
    for name in LISTS[family]:
        short, long = CONFIGS[family][name], getattr(config, name)
        assert len(long) == 5 and long[: len(short)] == short


def test_wrong_arguments(capsys):
    assert main([*COMMAND, "--families", "qwen3_moe", "bert"]) == 2
    assert capsys.readouterr().err.startswith("bench-host: --families bert: expected some of qwen2_moe qwen3_moe ")
    with pytest.raises(SystemExit):
        main(["bench-host", "--layers", "0"])
    assert "must be 1 or more, got 0" in capsys.readouterr().err


def test_without_transformers(monkeypatch, capsys):
    monkeypatch.setattr(host_time, "has_transformers", lambda: False)
    assert main(COMMAND) == 2
    assert "transformers is not installed" in capsys.readouterr().err
