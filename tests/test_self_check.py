"""transformers in versions that are newer than our tests: families and loaders are compared before they are ours."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import torch_moe_metal
from checks import relative
from tiny_models import CONFIGS, eager, tiny_model, tokens
from torch_moe_metal import transformers_support
from torch_moe_metal.grad import warned
from torch_moe_metal.transformers.checkpoints import fp8, loader_check, tiny
from torch_moe_metal.transformers.checkpoints.loader_check import differs_packed
from torch_moe_metal.transformers.fusing import family_check
from torch_moe_metal.transformers.fusing.family_check import differs, family_in
from torch_moe_metal.transformers.fusing.fused import Fused
from torch_moe_metal.transformers.self_check import REMEDY
from torch_moe_metal.transformers.versions import CACHE

ROOT = Path(__file__).parents[1]
KNOWN = [family for family in CONFIGS if family.removesuffix("_thinker") in CONFIG_MAPPING]
#: MiniMax's mask for a padded batch is wrong in transformers: it has one key.
FAST = ("qwen3_moe", "minimax")


@pytest.fixture
def untested(monkeypatch):
    """The installed version counts as newer than our tests; nothing has been compared yet."""
    for check in (family_check, loader_check):
        monkeypatch.setattr(check, "is_untested", lambda: True)
    for function in (differs, differs_packed):
        function.cache_clear()
    warned.clear()
    yield
    for function in (differs, differs_packed):
        function.cache_clear()


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each in FAST else pytest.mark.slow) for each in KNOWN]
)
def test_families_are_the_same_fused(family: str):
    assert differs(family) is None


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_checkpoints_are_the_same_packed(kind: str):
    assert differs_packed(kind) is None


def test_the_comparison_changes_nothing_outside(untested):
    """Not the random numbers of the caller, nor the default dtype and device that it uses for new tensors."""
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"), torch.inference_mode():
            assert differs("qwen3_moe") is None and differs_packed("moe_metal") is None
            assert torch.empty(1).is_meta and torch.empty(1).dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.rand(4), expected)


COPY = """
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import torch_moe_metal
    from torch_moe_metal.transformers.fusing.tiny_models import tiny_model
    for family in ("qwen3_moe", "mixtral"):
        for _ in range(2):
            report = torch_moe_metal.patch(tiny_model(family))
        print(family, len(report["fused"]), len(report["left"]))
print(*(warning.message for warning in said if "torch_moe_metal" in str(warning.message)), sep="\\n")
"""


def with_another_name(text: str) -> str:
    """Qwen3-MoE's code with another name for the cache in its layers and its attention."""
    start, end = text.index("class Qwen3MoeAttention("), text.index("class Qwen3MoePreTrainedModel(")
    model, call = text[end:].split("decoder_layer(", 1)
    inside = re.sub(rf"\b{CACHE}\b", "kv", text[start:end])
    return text[:start] + inside + model + "decoder_layer(" + call.replace(f"{CACHE}={CACHE}", f"kv={CACHE}", 1)


def test_a_copy_of_transformers_with_another_name(tmp_path):
    """A newer version that gives the cache to layers under another name: that family stays stock, and a line names it.
    Another family, which has not changed, is fused."""
    there = Path(transformers.__file__).parent
    shutil.copytree(there, tmp_path / "transformers", copy_function=os.symlink)
    version = importlib.metadata.version("transformers")
    init, changed = "__init__.py", "models/qwen3_moe/modeling_qwen3_moe.py"
    for name, edited in (
        (init, (there / init).read_text().replace(f'__version__ = "{version}"', '__version__ = "5.99.0"')),
        (changed, with_another_name((there / changed).read_text())),
    ):
        (tmp_path / "transformers" / name).unlink()
        (tmp_path / "transformers" / name).write_text(edited)
    info = tmp_path / "transformers-5.99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.99.0\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run([sys.executable, "-c", COPY], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    stays, fused, *lines = ran.stdout.splitlines()
    assert stays == "qwen3_moe 0 8" and fused == "mixtral 7 0"  # in each layer: itself, attention, block, experts
    newer = "torch_moe_metal: in transformers 5.99.0, which is newer than our tests, "
    assert lines[0].startswith(f"{newer}qwen3_moe gave other ") and lines[0].endswith(REMEDY)
    assert lines[1:] == [f"{newer}a tiny mixtral model gives the same tokens fused as without us"]


def test_a_family_that_differs_stays_stock(untested, monkeypatch):
    model, ids = eager(tiny_model("mixtral")), tokens(2, 9)
    expected = model(ids).logits
    monkeypatch.setattr(family_check, "differs", lambda family: f"raised TypeError: {family}")
    with pytest.warns(UserWarning, match="mixtral raised TypeError: mixtral; pip install"):
        report = torch_moe_metal.patch(model)
    assert not report["fused"] and len(report["left"]) == len(report.rows) > 0
    assert not any(isinstance(module, Fused) for module in model.modules())
    assert torch.equal(model(ids).logits, expected)


def test_families_without_a_tiny_model_stay_stock(untested):
    assert family_in("glm5_next") is None
    assert "glm5_next could not be compared" in family_check.why_not_patched(["glm5_next"])


def test_a_loader_that_differs_leaves_the_checkpoint_to_transformers(untested, monkeypatch, tmp_path):
    """If a newer version merges experts in another way, for example: without our conversion, FP8's bytes are wrong."""
    tiny.fp8(tmp_path, "qwen3_moe")
    monkeypatch.setattr(fp8.Fp8, "conversions", lambda self, conversions, model: conversions)
    with pytest.warns(UserWarning, match="a tiny fp8 checkpoint .*; pip install"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu", dtype=torch.bfloat16)
    assert not any(getattr(module, "packing", None) for module in model.modules())
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / tiny.DENSE, dtype=torch.float32)
    with torch.no_grad():
        assert relative(model(tokens(1, 9)).logits.float(), dense(tokens(1, 9)).logits) <= 0.1


def test_a_loader_without_a_fallback_raises(untested, monkeypatch, tmp_path):
    tiny.moe_metal(tmp_path)
    monkeypatch.setattr(loader_check, "differs_packed", lambda kind: "raised TypeError")
    with pytest.raises(ValueError, match="a tiny moe_metal checkpoint raised TypeError; pip install"):
        AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu")


def test_which_versions_of_transformers_are_supported(monkeypatch):
    for version in ("5.23.0", "5.23.1.dev0", "5.24.0", "5.25.0", "6.0.0.dev0"):
        assert transformers_support.why_unsupported(version) is None
    for version in ("4.57.6", "5.0.0", "5.20.2", "5.22.2"):
        assert f"does nothing in {version}" in transformers_support.why_unsupported(version)
    for version, newer in {"5.23.4": False, "5.24.9": False, "5.25.0.dev0": True, "6.0.0": True}.items():
        monkeypatch.setattr(transformers_support, "installed_version", lambda version=version: version)
        assert transformers_support.is_untested.__wrapped__() == newer


def test_other_files_name_the_same_versions():
    assert f'"transformers>={transformers_support.OLDEST}"' in (ROOT / "pyproject.toml").read_text()
    assert f"transformers=={transformers_support.NEWEST}.0" in (ROOT / "tools" / "requirements.txt").read_text()
