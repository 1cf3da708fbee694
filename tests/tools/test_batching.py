"""tools/batching.py, batching_steps.py and speculation.py with a tiny model."""

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import batching
import batching_steps
import speculation
from tiny_models import tiny_model

LAYERS, EXPERTS, HIDDEN, INNER = 2, 16, 64, 64


@pytest.fixture(autouse=True)
def tiny(monkeypatch) -> None:
    def model(_name: str, layers: int, _device: str):
        sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "vocab_size": 1000}
        made = tiny_model("qwen3_moe", **sizes, num_hidden_layers=layers, num_experts_per_tok=2)
        made.generation_config.eos_token_id = None
        return made.to(torch.bfloat16)

    for tool in (batching, speculation):
        monkeypatch.setattr(tool, "random_model", model)


SIZES = ["--layers", str(LAYERS), "--requests", "4", "--prompt", "4", "--tokens", "8"]


def test_batching_prints_the_limit(capsys):
    batching.main([*SIZES, "--rounds", "1"])
    out = capsys.readouterr().out
    rows = re.findall(r"^  (one sequence|4 requests) +([\d.]+) experts +([\d.]+) MB +([\d.]+) ms$", out, re.M)
    (_, one, small, _), (_, four, large, _) = rows
    assert float(one) == 2 and 2 < float(four) <= 8
    expert = (
        3 * HIDDEN * INNER * (4 + 2 * 16 / 64) / 8
    )  # bytes: three matrices, with a scale and an offset in bf16 per 64
    assert float(large) - float(small) == pytest.approx(LAYERS * (float(four) - 2) * expert / 1e6, abs=0.06 * 2)


def test_batching_steps_prints_the_parts_of_a_step(capsys):
    batching_steps.main([*SIZES, "--ops"])
    out = capsys.readouterr().out
    assert "one after the other" in out and "together" in out
    parts = dict(re.findall(r"^  (\D+?) +[\d.]+ ms +([\d.]+)%$", out, re.M))
    assert set(batching_steps.PARTS) < set(parts) and sum(map(float, parts.values())) == pytest.approx(100, abs=1)
    assert all(float(share) > 0 for share in parts.values())


def test_bytes_of_the_weights():
    """The embedding is not read as a whole, and of the experts only the chosen ones."""
    model = batching.random_model("", LAYERS, "cpu")
    everything = sum(parameter.nbytes for parameter in model.parameters())
    embedding = model.get_input_embeddings().weight.nbytes
    experts = LAYERS * EXPERTS * 3 * HIDDEN * INNER * 2
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    assert batching.bytes_of(model, EXPERTS) == everything - embedding
    assert batching.bytes_of(model, 4) == everything - embedding - experts * 3 / 4
    model.lm_head.weight = model.get_input_embeddings().weight
    assert batching.bytes_of(model, EXPERTS) == everything - embedding  # now it is the head


def test_speculation_prints_the_table_of_the_documentation(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["speculation.py", "--rounds", "1", "--tokens", "8", "--drafts", "2", "6"])
    speculation.main()
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    page = Path(__file__).resolve().parents[2] / "docs" / "running.md"
    assert "\n".join(table[:2]) in page.read_text()
    assert [re.fullmatch(r"\| (\d) \|( \d+\.\d\d \|){3}", line)[1] for line in table[2:]] == ["2", "6"]
