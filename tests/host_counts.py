"""Counts the host's work for one decoded token on the simulated device: `python tests/host_counts.py qwen3_moe gpt_oss`
prints them for a layer, for a model of two layers, and for one of 48."""

import argparse

import torch

import metal_sim
import torch_moe_metal
from torch_moe_metal.commands.bench.host_time import CALLS, VIEWS, counts, dispatcher_calls, prepared
from torch_moe_metal.transformers.fusing.tiny_models import tiny_model, with_layers

STEPS = 16  # tokens over which the device's counts are averaged: today there is a commit after 16 dispatches


@torch.no_grad()
def host_counts(family: str, layers: int, patched: bool = True) -> dict[str, float]:
    """The counts of one token of the family's tiny model in bfloat16, without the work of `generate`.

    calls: of ops from Python, with views; see `dispatcher_calls`. aten_ops: PyTorch's own ops on the device, copies but
    no views. The others are those of our ops. On a Mac, each of PyTorch's ops takes blocks and messages of its own."""
    model = tiny_model(family, "mps", **with_layers(family, layers)).bfloat16()
    if patched:
        torch_moe_metal.patch(model)
    _, step = prepared(model)
    with metal_sim.record() as record:
        for _ in range(STEPS):
            step()
    called = counts(dispatcher_calls(step))
    found = {name: getattr(record, name) / STEPS for name in ("blocks", "aten_ops", "messages", "commits")}
    return {"calls": called[CALLS], "views": called[VIEWS], **found, "dispatches": len(record.dispatches) / STEPS}


def of_a_layer(two: dict[str, float], four: dict[str, float]) -> dict[str, float]:
    """From models of two and of four layers; the average of two layers if their kinds take turns."""
    return {name: (four[name] - two[name]) / 2 for name in two}


def main() -> None:
    import simulated

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=["qwen3_moe", "gpt_oss"], metavar="FAMILY")
    parser.add_argument("--stock", action="store_true", help="without `patch`")
    options = parser.parse_args()
    simulated.load()
    for family in options.families:
        two, four = (host_counts(family, layers, not options.stock) for layers in (2, 4))
        layer = of_a_layer(two, four)
        print(family)
        for what, row in {"a layer": layer, "2 layers": two, "48": {n: two[n] + 46 * layer[n] for n in two}}.items():
            print(f"  {what:9}", "  ".join(f"{name} {count:g}" for name, count in row.items()), flush=True)


if __name__ == "__main__":
    main()
