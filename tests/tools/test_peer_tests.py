"""tools/peer_tests.py, on a made-up folder of transformers' tests."""

import re
import textwrap
from collections import Counter

import pytest

import peer_tests
from peer_tests import Comparison, Run

OLMOE = """
    import pytest
    import torch
    from transformers import OlmoeConfig, OlmoeModel


    @pytest.fixture
    def model():
        sizes = dict(hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        return OlmoeModel(OlmoeConfig(vocab_size=9, num_experts=4, num_experts_per_tok=2, **sizes)).eval()


    def test_of_both(model, tmp_path):
        model.save_pretrained(tmp_path)
        with torch.no_grad():
            expected = model(torch.arange(4)[None]).last_hidden_state
            output = OlmoeModel.from_pretrained(tmp_path)(torch.arange(4)[None]).last_hidden_state
        torch.testing.assert_close(output, expected)


    def test_of_compilers(model):
        dict(torch.export.default_decompositions())  # asks every op for its overloads
        with torch.no_grad():
            torch.compile(model, backend="eager", fullgraph=True)(torch.arange(4)[None])


    def test_of_stock_alone(model):
        assert "fused" not in repr(model), "I have been fused"


    def test_of_loaded_stock_alone(model, tmp_path):
        model.save_pretrained(tmp_path)
        loaded = OlmoeModel.from_pretrained(tmp_path, output_loading_info=True)[0]
        assert "fused" not in repr(loaded.layers[0].mlp)


    class TestOlmoe:
        def test_tied_weights_keys(self, model):
            assert "fused" not in repr(model)


    def test_of_neither():
        assert False


    @pytest.mark.skip
    def test_of_none():
        pass
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "tests" / "models" / "olmoe"
    folder.mkdir(parents=True)
    (folder / "test_modeling_olmoe.py").write_text(textwrap.dedent(OLMOE))
    return tmp_path


def tool(monkeypatch, *arguments) -> int:
    monkeypatch.setattr("sys.argv", ["peer_tests.py", *map(str, arguments)])
    return peer_tests.main()


def test_failures_only_when_patched_are_reported(checkout, monkeypatch, capsys):
    assert tool(monkeypatch, checkout, "--families", "olmoe", "jamba") == 1
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if line.startswith("olmoe")).split()
    # stock, patched, differ; a block, its layer, attention and the last norm in each of 7 models
    assert row[1:5] == ["5", "2", "3", "28"], said
    assert int(row[6]) >= 2, said  # calls
    assert "::test_of_stock_alone\n    AssertionError: I have been fused" in said
    assert "::test_of_loaded_stock_alone\n" in said and "test_of_neither" not in said
    assert "  by design: test_tied_weights_keys: joined projections" in said
    assert "2 tests pass stock and fail patched" in said and "without tests in this checkout: jamba" in said


def test_runs_that_prove_nothing_are_reported():
    passed, failed, skipped = (Run({"test": outcome}) for outcome in ("passed", "failed", "skipped"))
    died = Run({"test": "passed"}, status=-11)
    assert "stock, pytest ended with 0 and 0 passed" in Comparison(failed, passed, [], []).trouble()
    assert "patched, pytest ended with -11 and 1 passed" in Comparison(passed, died, [], []).trouble()
    assert Comparison(skipped, skipped, [], []).trouble() == "every test is skipped"
    assert Comparison(passed, passed, [], []).trouble() == "patched, no test called our ops"
    assert Comparison(passed, Run({"test": "passed"}, ours=Counter(calls=1)), [], []).trouble() is None


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["tests"], "is no checkout of transformers: it has no folder tests/models"),
        ([".", "--families", "olmo"], "no family that we fuse: olmo; those are .*olmoe"),
        ([".", "--families", "jamba"], "has no tests of jamba"),
    ],
)
def test_wrong_arguments(checkout, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(checkout)
    with pytest.raises(SystemExit):
        tool(monkeypatch, *arguments)
    assert re.search(message, capsys.readouterr().err)
