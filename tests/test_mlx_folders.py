"""Folders of mlx-lm by `from_pretrained`, against mlx-lm itself."""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import mlx_folders
import torch_moe_metal
from checkpoints import formats, stored
from test_transformers import relative
from tiny_models import tokens


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Made once for each family."""
    return functools.cache(lambda family: mlx_folders.convert(tmp_path_factory.mktemp(family), family))


def load(folder: Path, device: str = "cpu", **options):
    return AutoModelForCausalLM.from_pretrained(folder, device_map=device, **{"dtype": torch.float32} | options)


@pytest.mark.parametrize("family", mlx_folders.FAMILIES)
def test_families(folder, family, device):
    """Everything that mlx-lm packed and that transformers runs as a linear layer, an embedding or experts stays packed.
    The logits are mlx-lm's: both sum in float32, in another order."""
    ids = tokens(2, 9)
    model = load(folder(family), device)
    expected = mlx_folders.logits(folder(family), ids)
    packed = formats(model)
    assert any(name.endswith("experts") for name in packed)
    assert relative(model(ids.to(device)).logits.cpu(), expected) <= 2e-5
    report = torch_moe_metal.patch(model)
    assert report["fused"] and not report["left"], str(report)
    assert relative(model(ids.to(device)).logits.cpu(), expected) <= 2e-5
