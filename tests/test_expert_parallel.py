"""Two processes give the results of one: expert parallelism, where each has half of the experts, and tensor and
pipeline parallelism.

As a script, run by torchrun, this file is one of the two processes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from test_transformers import generated
from tiny_models import tiny_model, tokens

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
WAYS = ("all_reduce", "all_to_all")
OTHERS = {"tensor": {"tp_size": 2}, "pipeline": {"pp_size": 2}}


@pytest.mark.slow
def test_two_processes(tmp_path):
    """all_reduce replaces ids of the other process's experts by one that must be skipped; all_to_all moves tokens."""
    for family in FAMILIES:
        model = tiny_model(family, tie_word_embeddings=False)
        model.save_pretrained(tmp_path / family)
        with torch.no_grad():
            torch.save(model(tokens(2, 9)).logits, tmp_path / f"{family}.pt")
            torch.save(generated(model, tokens(2, 9)), tmp_path / f"{family}.tokens.pt")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        __file__,
        str(tmp_path),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path])),
    }
    done = subprocess.run(launch, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        results = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert results.pop("others") == {f"{way} {patched=}": True for way in OTHERS for patched in (False, True)}
        assert len(results) == len(FAMILIES) * len(WAYS) * 2
        for name, result in results.items():
            assert result["error"] <= 1e-5 and result["calls"] == result["layers"], (rank, name, result)


def one_process(folder: Path) -> None:
    import torch.distributed
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import torch_moe_metal
    from checks import relative
    from test_transformers import counted

    results = {}
    for family in FAMILIES:
        expected = torch.load(folder / f"{family}.pt")
        for way in WAYS:
            model = AutoModelForCausalLM.from_pretrained(
                folder / family,
                experts_implementation="moe_metal",
                distributed_config=DistributedConfig(tp_size=2, ep_size=2, ep_implementation=way),
            )
            layers = sum(hasattr(module, "_is_expert_parallel") for module in model.modules())
            for patched in (False, True):
                if patched:
                    assert len(torch_moe_metal.patch(model)["experts only"]) == layers
                with torch.no_grad(), counted() as calls:
                    error = relative(model(tokens(2, 9)).logits, expected)
                results[f"{family} {way} {patched=}"] = {"error": error, "calls": calls["experts"], "layers": layers}
    results["others"] = {}
    for way, sizes in OTHERS.items():
        config, path = DistributedConfig(**sizes), folder / FAMILIES[0]
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
        for patched in (False, True):
            if patched:
                assert torch_moe_metal.patch(model)["fused"]
            with torch.no_grad():
                equal = generated(model, tokens(2, 9)) == torch.load(f"{path}.tokens.pt")
            results["others"][f"{way} {patched=}"] = equal
    rank = torch.distributed.get_rank()
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    one_process(Path(sys.argv[1]))
