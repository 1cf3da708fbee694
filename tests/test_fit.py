"""`python -m torch_moe_metal fit`: the computed bytes equal those of loaded models."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import checkpoints
import gguf_files
import mlx_folders
import torch_moe_metal
from tiny_models import FAMILIES, tiny_model
from torch_moe_metal import MoeMetalConfig
from torch_moe_metal.commands import fit, model_memory
from torch_moe_metal.commands.bench.model_sizes import MODELS
from torch_moe_metal.commands.command_line import main
from torch_moe_metal.commands.common.loading import Source
from torch_moe_metal.formats import LIBRARIES
from torch_moe_metal.packing import WRITTEN
from torch_moe_metal.transformers.versions import with_cache

WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}  # multiples of every format's block
LOADED = [name for name, row in LIBRARIES.items() if row.name in WRITTEN or name == "dense"]
IN_FILES = [name for name, row in LIBRARIES.items() if row.has_own_scales]
#: Billions of parameters, as published.
NUMBERS = {
    "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.1, "qwen3-next-80b-a3b": 79.7, "qwen3.5-35b-a3b": 34.7,
    "mixtral-8x7b": 46.7, "olmoe": 6.9, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8, "deepseek-v3": 671.0,
    "glm-4.5-air": 106.9, "glm-4.7-flash": 29.9, "minimax-m2": 228.7,
}  # fmt: skip


def state_of(model) -> int:
    """The bytes of its checkpoint."""
    return sum(
        tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}.values()
    )


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    tiny_model("qwen3_moe", **WIDE, dtype=torch.bfloat16).bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("library", LOADED)
def test_weights_of_each_format(dense: Path, library: str):
    row, how = LIBRARIES[library], {}
    if library != "dense":
        how["quantization_config"] = MoeMetalConfig(format=row.name, bits=row.bits if row.is_affine else 4)
    model = AutoModelForCausalLM.from_pretrained(dense, **how)
    assert model.dtype == torch.bfloat16
    assert model_memory.weights(AutoConfig.from_pretrained(dense), torch.bfloat16, library) == model_memory.bytes_of(
        model
    )


@pytest.mark.parametrize("library", IN_FILES)
def test_weights_of_gguf_files(tmp_path: Path, library: str):
    """From the file, and from the configuration for a file with only this format. Both without the rotary angles."""
    made = gguf_files.model("qwen3moe", **WIDE)
    path = gguf_files.write(made, tmp_path / "model.gguf", library.removeprefix("ggml_"))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    formats, size = model_memory.gguf_weights(str(path), torch.bfloat16)
    assert (formats, size) == (library, state_of(model))
    angles = model_memory.bytes_of(model) - state_of(model)
    assert model_memory.weights(AutoConfig.from_pretrained(path), torch.bfloat16, library) == size + angles


def test_a_gguf_file_that_becomes_dense(tmp_path: Path):
    path = gguf_files.write(gguf_files.model("qwen3moe"), tmp_path / "model.gguf", "iq2_s")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    assert model_memory.gguf_weights(str(path), torch.bfloat16) == ("iq2_s", state_of(model))


def test_weights_of_gpt_oss(tmp_path: Path):
    """From its files and from its configuration; and with all other weights packed."""
    folder = checkpoints.gpt_oss(tmp_path, hidden_size=64)
    model, config = AutoModelForCausalLM.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    assert model_memory.packed_weights(Source.of(str(folder)), config, torch.bfloat16) == ("mxfp4", state_of(model))
    assert model_memory.packed_weights(None, config, torch.bfloat16) == ("mxfp4", model_memory.bytes_of(model))
    torch_moe_metal.quantize_(model, bits=8)
    assert model_memory.bytes_of(model_memory.gpt_oss(config, torch.bfloat16, bits=8)) == model_memory.bytes_of(model)


def test_weights_of_folders_that_are_packed(tmp_path: Path):
    fp8 = checkpoints.fp8(tmp_path / "fp8", "qwen3_moe")
    method, size = model_memory.packed_weights(Source.of(str(fp8)), AutoConfig.from_pretrained(fp8), torch.bfloat16)
    assert (method, size) == ("fp8", state_of(AutoModelForCausalLM.from_pretrained(fp8, dtype="auto")))
    mlx = mlx_folders.convert(tmp_path, "qwen3_moe")
    method, size = model_memory.packed_weights(Source.of(str(mlx)), AutoConfig.from_pretrained(mlx), torch.bfloat16)
    loaded = state_of(AutoModelForCausalLM.from_pretrained(mlx))
    assert method == "affine" and size == pytest.approx(loaded, rel=0.05)  # its routers become dense


@pytest.mark.parametrize("tokens", [5, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache(family: str, tokens: int):
    """Within sliding windows and beyond; and the room for growth is at most what is printed."""
    model = tiny_model(family)
    torch_moe_metal.patch(model)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for ids in torch.randint(2, 89, (1, tokens)).split([tokens - 3, 1, 1, 1], 1):
        model(ids, **with_cache(cache), use_cache=True)
    config = model.config
    layers = model_memory.cache_layers(
        model_memory.empty_model(config, torch.float32) if family not in OF_PARTS else meta(model), config
    )
    assert [layer.bytes(tokens) for layer in layers] == [bytes_in(layer, tokens) for layer in cache.layers]
    for layer, found in zip(layers, cache.layers, strict=True):
        room = getattr(found, "room", None)
        assert room is None or sum(memory.nbytes for memory in room.memory()) <= layer.most(tokens)


OF_PARTS = ("qwen3_omni_moe_thinker",)  # no Auto class makes it


def meta(model):
    with torch.device("meta"):
        return type(model)(model.config).eval()


def bytes_in(layer, tokens: int) -> int:
    states = [layer.keys, layer.values] if hasattr(layer, "keys") else []
    states += [state for name in ("conv_states", "recurrent_states") for state in getattr(layer, name, {}).values()]
    return sum(state.nbytes for state in states)


def test_working_memory_matches_a_forward():
    """The same count for a real forward on the CPU, where attention of few tokens is the same op."""
    model = tiny_model("gpt_oss")
    torch_moe_metal.patch(model)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), model_memory.Living([*model.parameters(), *model.buffers()]) as living:
        model(torch.randint(2, 89, (1, 12)), **with_cache(cache), use_cache=True, logits_to_keep=1)
        kept = living.now
    empty = model_memory.empty_model(model.config, torch.float32)
    torch_moe_metal.patch(empty)
    found = model_memory.working_memory(empty, model.config, 12)
    assert found == pytest.approx(living.most - kept, rel=0.1) and found > 12 * 64 * 4
    assert model_memory.working_memory(empty, model.config, 24) > 1.5 * found


@pytest.mark.parametrize("name", model_memory.PUBLISHED)
def test_known_models(name: str):
    config = model_memory.published(name)
    model = model_memory.empty_model(config, torch.bfloat16)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 1) == NUMBERS[name]
    assert len(model.model.layers) == config.num_hidden_layers


def test_the_longest_context():
    layers = [
        model_memory.CacheLayer(token=10),
        model_memory.CacheLayer(token=10, window=100),
        model_memory.CacheLayer(once=1000),
    ]
    assert fit.takes(layers, 50) == 1000 + 2 * 10 * (50 + 12 + 256)
    assert fit.takes(layers, 8000) == 1000 + 10 * (8000 + 2000 + 256) + 10 * (99 + 24 + 256)
    assert fit.longest(fit.takes(layers, 8000), layers, 8000) == 8000
    assert fit.longest(fit.takes(layers, 8000) - 1, layers, 8000) == 7900
    assert fit.longest(fit.takes(layers, 999), layers, 8000) == 0
    rooms = [fit.takes(layers, tokens) for tokens in (500, 2000, 8000)]
    assert fit.verdict(rooms[:1] * 2, layers, 8000) == "doesn't fit"
    assert fit.verdict([-1, rooms[1]], layers, 8000) == "with 3/4: fits with a context up to 2,000"
    assert fit.verdict([rooms[1], rooms[2]], layers, 8000) == "fits with a context up to 2,000 (3/4: all)"
    assert fit.verdict([rooms[2]], layers, 8000) == "fits"


# ------------------------------------------------------------------------------------------------ the command


def table(capsys) -> dict[str, list[str]]:
    """The cells after each format."""
    rows = (re.split(" {2,}", line) for line in capsys.readouterr().out.splitlines())
    return {row[0]: row[1:] for row in rows if len(row) > 1}


def test_a_known_name_needs_no_network(capsys, monkeypatch):
    def refused(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(AutoConfig, "from_pretrained", refused)
    assert main(["fit", "gpt-oss-20b", "--memory", "16", "32"]) == 0
    said = table(capsys)
    assert said["format"] == ["weights", "16 GB", "32 GB"]
    assert said["mxfp4, unchanged"] == ["13.8 GB", "doesn't fit", "fits"]
    monkeypatch.setitem(MODELS, "olmoe", replace(MODELS["olmoe"], layers=1))
    assert main(["fit", "allenai/OLMoE", "--limit", "4000", "--formats", "dense", "q4_k"]) == 0
    assert list(table(capsys)) == ["format", "bfloat16", "q4_k, as a GGUF file"]
    assert main(["fit", "some/other"]) == 2
    assert capsys.readouterr().err == "fit: cannot read the configuration of some/other: no network\n"


def test_folders_and_files(dense: Path, tmp_path: Path, capsys):
    assert main(["fit", str(dense), "--limit", "100", "--prompt", "64"]) == 0
    assert table(capsys)["bfloat16"][1] == "fits"
    assert main(["fit", str(dense), "--limit", "1"]) == 0
    assert table(capsys)["bfloat16"][1] == "doesn't fit"
    path = gguf_files.write(gguf_files.model("qwen3moe"), tmp_path / "model.gguf", gguf_files.Q4_K_M)
    assert main(["fit", str(path)]) == 0
    assert "q4_k, q6_k, unchanged" in table(capsys)
    assert main(["fit", "missing"]) == 2
    assert capsys.readouterr().err == "fit: no such file, folder or name on the hub: missing\n"


def test_columns_that_fit_no_block(dense: Path, tmp_path: Path, capsys):
    config = json.loads((dense / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 96}))
    assert main(["fit", str(tmp_path), "--limit", "100", "--prompt", "64", "--formats", "affine4", "mxfp4"]) == 0
    said = table(capsys)
    assert (
        said["affine, --bits 4"][0] == "-"
        and "96 columns are no multiple of the group, 64" in said["affine, --bits 4"][1]
    )
    assert said["mxfp4, --format mxfp4"][1] == "fits"
