"""tools/soak_server.py: that it passes a server that works, and notices answers that differ and requests that fail."""

import random
from pathlib import Path

import pytest

import served
import soak_server
from torch_moe_metal.commands.common.loading import Source


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--continuous-batching"]], ids=["sequential", "batched"])
def test_a_working_server_passes(arguments: list[str], capsys):
    with pytest.raises(SystemExit) as end:
        soak_server.main(["--minutes", "0.1", *arguments])
    assert not end.value.code, capsys.readouterr().out


@pytest.mark.slow
def test_wrong_answers_and_lost_requests_are_errors(tmp_path: Path, monkeypatch):
    with served.ServerThread(Source.of(str(served.checkpoint(tmp_path))), context=8192) as server:
        client = soak_server.Client(server)
        seed = next(seed for seed in range(99) if random.Random(seed).choice(soak_server.KINDS) == "whole")
        client(seed)
        client(seed)
        assert client.done == {"whole": 2}
        client.answers = dict.fromkeys(client.answers, "another answer")
        with pytest.raises(AssertionError, match="expected 'another answer'"):
            client(seed)
        monkeypatch.setattr(server.models.model, "generate", None)
        with pytest.raises(soak_server.openai.InternalServerError):
            client(seed)
