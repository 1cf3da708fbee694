"""mlx-lm folders through `from_pretrained`, compared with mlx-lm itself."""

import functools
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, core_model_loading

import mlx_folders
import torch_moe_metal
from checkpoints import formats, stored
from checks import relative
from conftest import DEVICES
from tiny_models import left_without_need, tokens
from torch_moe_metal.transformers.checkpoints import mlx_quantizer
from torch_moe_metal.transformers.checkpoints.mlx_conversions import Join
from torch_moe_metal.transformers.checkpoints.mlx_quantizer import SEQUENTIAL
from torch_moe_metal.transformers.fusing.packed_modules import packed_modules, packed_names

#: The tolerance of float32 sums in different order; the largest observed error is 2e-6.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """One folder per family."""
    return functools.cache(lambda family: mlx_folders.convert(tmp_path_factory.mktemp(family), family))


def load(folder: Path, device: str = "cpu", **options):
    return AutoModelForCausalLM.from_pretrained(folder, device_map=device, **{"dtype": torch.float32} | options)


#: Weights that are not linear layers in transformers, or run dense: routers, and DeepSeek's attention in mlx-lm's form.
DENSE = r"(gate|router|proj_router|router\.proj|shared_expert_gate|embed_q|unembed_out)$"


def packed_stems(folder: Path) -> set[str]:
    """The weights that mlx-lm packed, by its names."""
    return {name.removesuffix(".scales") for name in stored(folder) if name.endswith(".scales")}


def common_name(name: str) -> str:
    """For a module, or for all three weights of experts, of mlx-lm's or transformers' model."""
    name = re.sub(r"(^|\.)language_model\.", r"\1", name.replace(".block_sparse_moe.", ".mlp."))
    return re.sub(r"\.(switch_mlp|experts)(\..*)?$", ".experts", name)


@pytest.mark.slow_on_mps
@pytest.mark.parametrize("family", mlx_folders.FAMILIES)
def test_families(folder, family, device):
    """All weights that mlx-lm packed stay packed, except routers. The logits equal mlx-lm's."""
    ids = tokens(2, 9)
    model = load(folder(family), device)
    expected = mlx_folders.logits(folder(family), ids)
    packed = {stem for stem in packed_stems(folder(family)) if not re.search(DENSE, stem)}
    assert set(map(common_name, packed)) == set(map(common_name, formats(model)))
    assert relative(model(ids.to(device)).logits.cpu(), expected) <= TOLERANCE
    report = torch_moe_metal.patch(model)
    assert report["fused"] and not left_without_need(report), str(report)
    assert relative(model(ids.to(device)).logits.cpu(), expected) <= TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "mixtral", "gpt_oss", "deepseek_v3", "gemma4"])
def test_saved_models_are_mlx_lm_folders(folder, family, tmp_path):
    """With the same packed bytes; dequantised weights are saved dense. transformers and mlx-lm compute the same logits
    from it."""
    ids = tokens(2, 9)
    model = load(folder(family))
    expected = model(ids).logits
    torch_moe_metal.patch(model)
    model.save_pretrained(tmp_path)
    before, after = stored(folder(family)), stored(tmp_path)
    for name, tensor in before.items():
        stem = name.rpartition(".")[0]
        if stem in packed_stems(tmp_path):
            assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    assert all(re.search(DENSE, stem) for stem in packed_stems(folder(family)) - packed_stems(tmp_path))
    again = load(tmp_path)
    torch_moe_metal.unpatch(model)
    assert formats(again) == formats(model) and again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert relative(again(ids).logits, expected) <= 1e-6  # dense rows may have another alignment
    saved = mlx_folders.with_its_configuration(tmp_path, folder(family))
    assert relative(mlx_folders.logits(saved, ids), expected) <= TOLERANCE


# ------------------------------------------------------------------------------------------------ modes


@pytest.mark.slow_on_mps
@pytest.mark.parametrize(
    "options",
    [{"q_bits": bits, "q_group_size": group} for bits, group in ((2, 32), (3, 64), (5, 64), (6, 32), (8, 128))]
    + [{"q_mode": "mxfp4"}, {"quant_predicate": "mixed_3_6", "q_group_size": 64}],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_modes(options, tmp_path, device):
    """Widths and groups, mxfp4 with an affine router, and recipes that give layers of one kind different widths."""
    ids = tokens(2, 9)
    folder = mlx_folders.convert(tmp_path, "qwen3_moe", {"moe_intermediate_size": 128}, **options)
    model = load(folder, device)
    assert set(formats(model).values()) == {"mxfp4" if "q_mode" in options else "affine"}
    assert relative(model(ids.to(device)).logits.cpu(), mlx_folders.logits(folder, ids)) <= TOLERANCE


@pytest.mark.slow_on_mps
@pytest.mark.parametrize("family, tied", [("qwen3_moe", True), ("deepseek_v3", False)])
@pytest.mark.parametrize("mode", ["nvfp4", "mxfp8"])
def test_modes_of_the_command(mode, family, tied, tmp_path, device):
    """Experts, linear layers, and embeddings, also a tied one; DeepSeek's latents are dequantised. A saved model is
    the same folder."""
    ids = tokens(2, 9)
    folder = mlx_folders.command(tmp_path / "a", family, "--q-mode", mode, tie_word_embeddings=tied)
    model = load(folder, device)
    assert set(formats(model).values()) == {mode} and "model.embed_tokens" in formats(model)
    assert ("lm_head" in formats(model)) != tied
    expected = mlx_folders.logits(folder, ids)
    assert relative(model(ids.to(device)).logits.cpu(), expected) <= TOLERANCE
    report = torch_moe_metal.patch(model)
    assert report["fused"] and not left_without_need(report), str(report)
    assert relative(model(ids.to(device)).logits.cpu(), expected) <= TOLERANCE
    model.save_pretrained(tmp_path / "b")
    before, after = stored(folder), stored(tmp_path / "b")
    for stem in packed_stems(tmp_path / "b"):
        for name in (f"{stem}.weight", f"{stem}.scales"):
            assert after[name].dtype == before[name].dtype and torch.equal(after[name], before[name]), name
    saved = mlx_folders.with_its_configuration(tmp_path / "b", folder)
    assert formats(load(saved)) == formats(model)
    assert relative(mlx_folders.logits(saved, ids), expected) <= TOLERANCE


@pytest.mark.parametrize("arguments", ["--quant-predicate mixed_3_6", "--quant-predicate mixed_2_6 --q-bits 8", ""])
def test_sizes_that_the_command_leaves_out(arguments, tmp_path):
    """The recipes write null for a missing group size and use MLX's default."""
    ids = tokens(2, 9)
    folder = mlx_folders.command(tmp_path / "a", "qwen3_moe", *arguments.split(), tie_word_embeddings=False)
    entries = json.loads((folder / "config.json").read_text())["quantization"]
    unsaid = [entry for entry in entries.values() if isinstance(entry, dict) and entry["group_size"] is None]
    assert bool(unsaid) == bool(arguments)
    model = load(folder)
    assert relative(model(ids).logits, mlx_folders.logits(folder, ids)) <= TOLERANCE
    model.save_pretrained(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["quantization"] == dense_routers(entries)
    assert torch.equal(load(tmp_path / "b")(ids).logits, model(ids).logits)


def dense_routers(entries: dict) -> dict:
    """The saved formats of a folder's layers: routers are dense."""
    return {name: False if name.endswith("mlp.gate") else entry for name, entry in entries.items()}


def layers_of_its_own(path: str, module) -> bool | dict:
    """One layer's dense attention and embedding, more bits for another layer's experts, dense routers."""
    if re.search(r"layers\.0\.self_attn|embed_tokens|mlp\.gate$", path):
        return False
    if "layers.1.mlp" in path:
        return {"group_size": 32, "bits": 6}
    return {"group_size": 32, "bits": 4, "mode": "mxfp4"} if path == "lm_head" else True


@pytest.mark.parametrize("tied", [False, True])
def test_mixed_formats_of_layers(tmp_path, tied):
    """Different from the defaults in config.json: by layer, dense and mixed with mxfp4."""
    ids = tokens(2, 9)
    changes = {"tie_word_embeddings": tied}
    folder = mlx_folders.convert(tmp_path / "a", "qwen3_moe", changes, quant_predicate=layers_of_its_own)
    model = load(folder)
    packed = formats(model)
    assert packed.get("lm_head") == (None if tied else "mxfp4") and "model.embed_tokens" not in packed
    assert not any(name.startswith("model.layers.0.self_attn") for name in packed)
    experts = [layer.mlp.experts for layer in model.model.layers]
    assert [part.down_proj.shape[-1] * 8 // part.columns["down"] for part in experts] == [4, 6]
    assert relative(model(ids).logits, mlx_folders.logits(folder, ids)) <= TOLERANCE
    model.save_pretrained(tmp_path / "saved")
    assert formats(load(tmp_path / "saved")) == packed


def test_head_tied_to_a_packed_embedding(tmp_path, device):
    """The embedding's weight is stored once."""
    ids = tokens(2, 9)
    folder = mlx_folders.convert(tmp_path, "qwen3_moe", {"tie_word_embeddings": True})
    model = load(folder, device)
    assert model.lm_head.parts("weight")[0] is model.model.embed_tokens.weight
    assert relative(model(ids.to(device)).logits.cpu(), mlx_folders.logits(folder, ids)) <= TOLERANCE


def changed(folder: Path, to: Path, **changes) -> Path:
    """A copy with another config.json; None removes a key."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    config = json.loads((to / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return to


def test_older_folders(folder, tmp_path):
    """They only have the key `quantization`."""
    ids, model = tokens(2, 9), load(folder("qwen3_moe"))
    older = load(changed(folder("qwen3_moe"), tmp_path, quantization_config=None))
    assert formats(older) == formats(model) and torch.equal(older(ids).logits, model(ids).logits)


def test_without_a_prefix(folder):
    """Also a base model."""
    ids = tokens(2, 9)
    model, base = load(folder("qwen3_moe")), AutoModel.from_pretrained(folder("qwen3_moe"), dtype=torch.float32)
    assert {f"model.{name}" for name in formats(base)} == formats(model).keys() - {"lm_head"}
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_in_half_precision(folder):
    """In bfloat16 it is as close to float32 as the dequantised model in bfloat16."""
    ids = tokens(4, 16)
    exact = load(folder("qwen3_moe"))(ids).logits
    model = load(folder("qwen3_moe"), dtype=torch.bfloat16)
    assert model.model.norm.weight.dtype == torch.bfloat16 and model.lm_head.scales.dtype == torch.float32
    ours = relative(model(ids).logits.float(), exact)
    assert ours <= 2 * relative(model.dequantize()(ids).logits.float(), exact)


def test_trained_under_autocast(folder):
    """Like Trainer(bf16=True): dense weights are trained, and their gradients are close to those without autocast."""
    gradients = []
    for autocast in (False, True):
        model = load(folder("qwen3_moe")).train()
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(tokens(2, 9), labels=tokens(2, 9, seed=2)).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    exact, ours = gradients
    assert len(ours) >= 10 and ours.keys() == exact.keys()
    for name, gradient in ours.items():
        assert relative(gradient, exact[name]) <= 0.1, name


@pytest.mark.parametrize("family", ["qwen3_next", "gpt_oss"])
def test_saved_then_dequantised(folder, family, tmp_path):
    """`save_pretrained` writes the dtype of the configuration as a string, which `dequantize` reads."""
    model, ids = load(folder(family)), tokens(2, 9)
    expected = model(ids).logits
    model.save_pretrained(tmp_path / "a")
    model.dequantize().save_pretrained(tmp_path / "b")
    again = load(tmp_path / "b")
    assert not formats(again) and relative(again(ids).logits, expected) <= TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_next", "gpt_oss"])
def test_dequantised_then_saved(folder, family, tmp_path):
    """It is then a dense checkpoint of transformers."""
    ids = tokens(2, 9)
    model = load(folder(family)).dequantize()
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert not formats(again) and not hasattr(again, "hf_quantizer")
    assert relative(again(ids).logits, model(ids).logits) <= 1e-6
    assert relative(load(folder(family))(ids).logits, model(ids).logits) <= TOLERANCE


def test_quantize_packs_what_mlx_left_dense(tmp_path):
    """In memory: packed weights do not change, and a saved model is a checkpoint of ours."""
    ids = tokens(2, 9)
    folder = mlx_folders.convert(tmp_path / "a", "qwen3_next", quant_predicate=lambda path, _: "mlp.switch" in path)
    model = load(folder)
    before, logits = formats(model), model(ids).logits
    experts = model.model.layers[1].mlp.experts
    scale = experts.gate_up_proj_scale.clone()
    torch_moe_metal.quantize_(model, bits=8, group_size=32)
    assert set(before) == {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"}
    assert before.items() < formats(model).items() and "lm_head" in formats(model)
    assert torch.equal(experts.gate_up_proj_scale, scale)
    expected = model(ids).logits
    assert 0 < relative(expected, logits) <= 0.1
    model.save_pretrained(tmp_path / "b")
    assert "quantization" not in json.loads((tmp_path / "b" / "config.json").read_text())
    again = load(tmp_path / "b")
    assert formats(again) == formats(model)
    assert relative(again(ids).logits, expected) <= 1e-6  # dense rows may have another alignment


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports which memory belongs to a file")
def test_bytes_copied_while_loading(folder):
    """On the CPU packed weights are pages of the file, except gates and ups, which are joined."""
    model = load(folder("qwen3_moe"))
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [tuple(int(end, 16) for end in fields[0].split("-")) for fields in maps if "safetensors" in fields[-1]]
    for name, module in packed_modules(model):
        for part in packed_names(module):
            mapped = any(first <= module._buffers[part].data_ptr() < last for first, last in ranges)
            assert mapped != part.startswith("gate_up_proj"), f"{name}.{part}"


@pytest.mark.skipif("mps" not in DEVICES, reason="MOE_METAL_DEVICES leaves mps out; on the CPU nothing is read ahead")
def test_tensors_are_read_layer_by_layer(folder, mps, monkeypatch):
    """On mps tensors are not read before earlier ones are joined: otherwise all of them would be in the GPU's
    memory."""
    read, joined = [], []

    def materialize(*args, stock=core_model_loading._materialize_copy):
        read.append(args)
        return stock(*args)

    def convert(*args, stock=Join.convert, **kwargs):
        joined.append(len(read))
        return stock(*args, **kwargs)

    monkeypatch.setattr(core_model_loading, "_materialize_copy", materialize)
    monkeypatch.setattr(Join, "convert", convert)
    monkeypatch.delenv(SEQUENTIAL, raising=False)
    load(folder("qwen3_moe"), mps)
    assert len(joined) == 6 and joined[2] < len(read) / 2 < joined[3] and SEQUENTIAL not in os.environ


def test_an_interrupted_load_changes_no_setting(folder, monkeypatch):
    """Otherwise a setting of transformers for all models would stay changed."""

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.delenv(SEQUENTIAL, raising=False)
    monkeypatch.setattr(mlx_quantizer, "device_type", lambda place: "mps")
    monkeypatch.setattr(transformers.PreTrainedModel, "_load_pretrained_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(folder("qwen3_moe"))
    assert SEQUENTIAL not in os.environ


def test_sequential_loading_is_equal(folder, monkeypatch):
    """As on mps: transformers starts no threads, and the result is the same."""
    expected = load(folder("qwen3_moe"))

    def threads(*args, **kwargs):
        raise AssertionError("transformers reads ahead")

    monkeypatch.delenv(SEQUENTIAL, raising=False)
    monkeypatch.setattr(mlx_quantizer, "device_type", lambda place: "mps")
    monkeypatch.setattr(core_model_loading, "ThreadPoolExecutor", threads)
    model = load(folder("qwen3_moe"))
    assert model.hf_quantizer.pre_quantized
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.state_dict().items())


# ------------------------------------------------------------------------------------------------ what does not fit


def rewritten(folder: Path, to: Path, change) -> Path:
    """A copy with the tensors modified by `change`."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "mlx"})
    (to / "model.safetensors.index.json").unlink()
    return to


UP, QUERY = "model.layers.1.mlp.switch_mlp.up_proj", "model.layers.0.self_attn.q_proj"


def scale_names(stem: str) -> tuple[str, str]:
    return f"{stem}.scales", f"{stem}.biases"


def cut(columns: int, *names: str):
    return lambda t: t.update({name: t[name][..., :columns].contiguous() for name in names})


def as_dtype(dtype: torch.dtype, *names: str):
    return lambda t: t.update({name: t[name].to(dtype) for name in names})


def without_sides(*names: str):
    return lambda t: t.update({name: t[name].flatten()[0] for name in names})


def repeated(times: int, *names: str):
    return lambda t: t.update({name: t[name].repeat_interleave(times, -1) for name in names})


@pytest.mark.parametrize(
    "said, change",
    [
        (f"{UP}.weight: expected {UP}.scales as well, which is missing", lambda t: t.pop(f"{UP}.scales")),
        (f"{UP}.scales: expected {UP}.biases as well, which is missing", lambda t: t.pop(f"{UP}.biases")),
        (f"{QUERY}.biases: expected {QUERY}.weight as well, which is", lambda t: t.pop(f"{QUERY}.weight")),
        (rf"{QUERY}.scales: expected \[64\] and groups of 128 columns, got", cut(0, *scale_names(QUERY))),
        (rf"{UP}.scales: expected a scale for each 16, 32, 64 or 128 of 128 columns", repeated(8, *scale_names(UP))),
        (rf"{UP}.scales: expected 4 bits in groups of 64, as config.json says", repeated(2, *scale_names(UP))),
        (rf"{UP}.scales: expected 4 bits in groups of 64, as config.json says", cut(1, *scale_names(UP))),
        (
            rf"{UP}.scales: expected F32, F16, BF16, the scales of mode affine",
            as_dtype(torch.float64, *scale_names(UP)),
        ),
        (rf"{UP}.scales: expected F32, F16, BF16, the scales of mode affine", as_dtype(torch.int32, *scale_names(UP))),
        (rf"{QUERY}.weight: expected rows \[64\], by", without_sides(f"{QUERY}.weight")),
        (rf"{QUERY}.scales: expected rows \[64\], by", without_sides(*scale_names(QUERY))),
        (r"model.norm.weight: expected floats, F64, F32, F16 or BF16", as_dtype(torch.int32, "model.norm.weight")),
        (rf"{UP}.biases: expected what {UP}.scales is", repeated(2, f"{UP}.scales")),
        (rf"{QUERY}.weight: expected 128 columns of as many bits each", cut(15, f"{QUERY}.weight")),
        (rf"{QUERY}.weight: expected 128 columns of 2, 3, 4, 5, 6 or 8 bits", cut(4, f"{QUERY}.weight")),
        (rf"{UP}.weight: expected rows \[8, 64\], by", lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"][:4]})),
        ("missing: model.layers.1.mlp.experts.gate_up_proj", None),
        ("missing: model.layers.0.self_attn.q_norm.weight", lambda t: t.pop("model.layers.0.self_attn.q_norm.weight")),
    ],
)
def test_inconsistent_tensors_raise(folder, tmp_path, said, change):
    """The error has the file, the tensor and what was expected, and no model is returned."""

    def without_experts(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.1.mlp.switch_mlp")]:
            del tensors[name]

    broken = rewritten(folder("qwen3_moe"), tmp_path, change or without_experts)
    with pytest.raises(ValueError, match=said) as raised:
        load(broken)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    "entry, said",
    [
        ({QUERY: {"bits": 4, "group_size": 32}}, f"{QUERY}.scales: expected 4 bits in groups of 32, as config.json"),
        ({"bits": 8}, r"\.weight: expected 8 bits in groups of 64, as config.json says"),
        ({"mode": "mxfp4"}, r"\.scales: expected U8, the scales of mode mxfp4, which config.json says"),
        ({"group_size": "64"}, r"config.json: group_size: expected a value of type int, got '64'"),
        ({"mode": None}, r"config.json: mode: expected a value of type str, got None"),
        ({"bits": 3, "group_size": None}, r"\.weight: expected 3 bits in groups of 64, as config.json says"),
        ({QUERY: {"bits": None, "group_size": 32}}, f"{QUERY}.scales: expected 4 bits in groups of 32, as config.json"),
        ({QUERY: {"mode": ["affine"]}}, f"{QUERY}.scales: expected affine, mxfp4, nvfp4, mxfp8, .* not .'affine'."),
        ({QUERY: {"bits": 8, "group_size": 64}}, f"{QUERY}.weight: expected 8 bits in groups of 64, as config.json"),
        ({QUERY: {"bits": 4, "group_size": 64, "mode": "fp5"}}, f"{QUERY}.*: expected affine, .* mxfp8, .* not 'fp5'"),
        ({QUERY: False}, f"{QUERY}.weight: expected no packed weight, since config.json says false for it"),
    ],
)
def test_a_wrong_configuration_raises(folder, tmp_path, entry, said):
    before = json.loads((folder("qwen3_moe") / "config.json").read_text())["quantization"]
    with pytest.raises(ValueError, match=said):
        load(changed(folder("qwen3_moe"), tmp_path, quantization_config=before | entry))


@pytest.fixture(scope="session")
def of_mode(tmp_path_factory):
    """One folder per mode."""
    return functools.cache(
        lambda mode: mlx_folders.command(tmp_path_factory.mktemp(mode), "qwen3_moe", "--q-mode", mode)
    )


@pytest.mark.parametrize(
    "mode, said, change",
    [
        ("nvfp4", f"{UP}.weight: expected {UP}.scales as well, which is missing", lambda t: t.pop(f"{UP}.scales")),
        ("mxfp8", f"{QUERY}.scales: expected {QUERY}.weight as well, wh", lambda t: t.pop(f"{QUERY}.weight")),
        ("nvfp4", f"{UP}.scales: expected U8, the scales of mode nvfp4", as_dtype(torch.float32, f"{UP}.scales")),
        ("mxfp8", f"{UP}.weight: expected U32, which its scales go with", as_dtype(torch.uint8, f"{UP}.weight")),
        ("nvfp4", f"{UP}.scales: expected 4 bits in groups of 16, as mode nvfp4 has", cut(4, f"{UP}.scales")),
        ("mxfp8", f"{UP}.scales: expected 8 bits in groups of 32, as mode mxfp8 has", repeated(2, f"{UP}.scales")),
        ("mxfp8", f"{QUERY}.scales: expected 8 bits in groups of 32, as mode", cut(16, f"{QUERY}.weight")),
        ("mxfp8", rf"{QUERY}.scales: expected \[64\] and groups of 128 columns", cut(3, f"{QUERY}.scales")),
        (
            "nvfp4",
            f"{UP}.scales: expected rows .8, 64., by",
            lambda t: t.update({f"{UP}.scales": t[f"{UP}.scales"][:4]}),
        ),
        (
            "nvfp4",
            f"{UP}.scales: expected no {UP}.global_scale: factors of whole matrices do not run here",
            lambda t: t.update({f"{UP}.global_scale": torch.ones(8)}),
        ),
    ],
)
def test_inconsistent_modes_raise(of_mode, tmp_path, mode, said, change):
    broken = rewritten(of_mode(mode), tmp_path, change)
    with pytest.raises(ValueError, match=said) as raised:
        load(broken)
    assert str(tmp_path) in str(raised.value)


def test_experts_of_unknown_classes_raise(folder, monkeypatch):
    """For example Llama 4's."""
    monkeypatch.setattr(mlx_quantizer, "is_experts", lambda module: False)
    with pytest.raises(
        ValueError, match=r"switch_mlp.\w+_proj.weight: expected experts that are on transformers' interface"
    ):
        load(folder("qwen3_moe"))


def test_layers_that_the_model_does_not_have(folder, tmp_path):
    """They are reported as unexpected, as in transformers."""
    model = load(changed(folder("deepseek_v3"), tmp_path, num_hidden_layers=1))
    assert len(model.model.layers) == 1 and torch.equal(
        model.lm_head.weight, load(folder("deepseek_v3")).lm_head.weight
    )


def test_truncated(folder, tmp_path):
    shutil.copytree(folder("qwen3_moe"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(ValueError, match=rf"{file}: .*expected .* bytes.*, got"):
        load(tmp_path)


def two_files(folder: Path, to: Path) -> Path:
    """The same in two files with a wrong index."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    tensors = load_file(to / "model.safetensors")
    (to / "model.safetensors").unlink()
    for i in range(2):
        part = {name: tensors[name] for name in sorted(tensors)[i::2]}
        save_file(part, to / f"model-{i + 1:05d}-of-00002.safetensors", metadata={"format": "mlx"})
    return to


@pytest.mark.parametrize("listed", ["model-00001-of-00002.safetensors", "model-00001-of-00009.safetensors"])
def test_a_stale_index_warns(folder, tmp_path, caplog, listed):
    """An index with only some of the files, or with others, as if copied from the dense checkpoint."""
    to = two_files(folder("qwen3_moe"), tmp_path)
    index = {"metadata": {}, "weight_map": {"model.norm.weight": listed}}
    (to / "model.safetensors.index.json").write_text(json.dumps(index))
    with caplog.at_level("WARNING"):
        transformers.utils.logging.enable_propagation()
        model = load(to)
        transformers.utils.logging.disable_propagation()
    assert f"{to / 'model.safetensors.index.json'} is stale" in caplog.text
    ids = tokens(2, 9)
    assert relative(model(ids).logits, load(folder("qwen3_moe"))(ids).logits) <= 1e-6


def test_a_valid_index_does_not_warn(folder, caplog):
    with caplog.at_level("WARNING"):
        transformers.utils.logging.enable_propagation()
        load(folder("qwen3_moe"))
        transformers.utils.logging.disable_propagation()
    assert "stale" not in caplog.text
