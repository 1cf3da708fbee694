"""tools/peer_gguf.py with an imitated checkout of llama.cpp, whose converter is tests/gguf_files.py; and that file."""

import functools
import json
import re
import sys
import textwrap
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import gguf_files
import peer_gguf
from tiny_models import tokens

CONVERTER = """
    import sys
    from pathlib import Path

    import gguf_files
    from conversion.base import TextModel
    from transformers import AutoModelForCausalLM


    def get_model_class(name):
        return TextModel


    def main():
        folder, _, type, _, target = sys.argv[1:6]
        vocabulary = get_model_class("any")().set_vocab()
        assert vocabulary == ("gpt2", "gpt-2"), vocabulary
        model = AutoModelForCausalLM.from_pretrained(folder)
        gguf_files.write(model, Path(target), type, **{})
"""
VOCABULARY = """
    class TextModel:
        def set_vocab(self):
            raise NotImplementedError("an unknown tokenizer")

        def get_vocab_base_pre(self, tokenizer):
            raise NotImplementedError("an unknown pre-tokenizer")

        def _set_vocab_gpt2(self):
            return "gpt2", self.get_vocab_base_pre(None)
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Its steps run in this process, which saves starting others."""
    write_checkout(tmp_path / "llama.cpp")
    monkeypatch.setattr(peer_gguf, "in_process", functools.partial(in_this_process, monkeypatch))
    monkeypatch.setattr(peer_gguf, "has_llama_cpp", lambda: False)
    return tmp_path / "llama.cpp"


def write_checkout(folder: Path, options: str = "") -> None:
    (folder / "conversion").mkdir(parents=True, exist_ok=True)
    converter = textwrap.dedent(CONVERTER).replace("**{}", options)
    (folder / "convert_hf_to_gguf.py").write_text(converter)
    (folder / "conversion" / "base.py").write_text(textwrap.dedent(VOCABULARY))


def in_this_process(monkeypatch, step: str, *arguments) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [])
        patch.setattr(sys, "path", list(sys.path))
        for module in ("convert_hf_to_gguf", "conversion", "conversion.base"):
            patch.delitem(sys.modules, module, raising=False)
        peer_gguf.STEPS[step](*map(str, arguments))
        for module in ("convert_hf_to_gguf", "conversion", "conversion.base"):
            sys.modules.pop(module, None)


def tool(monkeypatch, *arguments) -> int:
    monkeypatch.setattr("sys.argv", ["peer_gguf.py", *map(str, arguments)])
    return peer_gguf.main()


def rows_of(said: str) -> dict[tuple[str, str], list[str]]:
    lines = (line.split() for line in said.splitlines() if re.match(r"\w\S+ +\w+ +(ok|FAILED) ", line))
    return {(words[0], words[1]): words[2:] for words in lines}


def test_a_row_for_each_file(checkout, monkeypatch, capsys):
    assert tool(monkeypatch, checkout, "--arch", "llama", "--types", "f32", "q8_0") == 0
    said = capsys.readouterr().out
    rows = rows_of(said)
    assert set(rows) == {("llama", "f32"), ("llama", "q8_0")} and "llama-cpp-python is not installed" in said
    assert {words[0] for words in rows.values()} == {"ok"} and "0 of 2 files fail" in said
    assert float(rows["llama", "f32"][1]) <= 1e-5 and "nothing" in rows["llama", "f32"]
    assert re.search(r"q8_0 14 ", said)  # per layer 4 of attention and 2 of experts, the embedding, the head


@pytest.mark.parametrize(
    "options, said",
    [
        (
            'metadata_changes={"qwen3moe.rope.freq_base": 1e3}',
            r"config\.rope_parameters: expected .*50000.*, got .*1000",
        ),
        ('metadata_changes={"qwen3moe.expert_used_count": 2}', r"config\.num_experts_per_tok: expected 3, got 2"),
        ('metadata_changes={"qwen3moe.attention.head_count": None}', r"from_pretrained: .*head_count"),
    ],
)
def test_a_wrong_value_is_reported(checkout, monkeypatch, capsys, options, said):
    write_checkout(checkout, options)
    assert tool(monkeypatch, checkout, "--arch", "qwen3moe", "--types", "f32") == 1
    found = capsys.readouterr().out
    assert rows_of(found)["qwen3moe", "f32"][0] == "FAILED" and "1 of 1 files fail" in found
    assert re.search(said, found), found


def test_a_wrong_layout_is_reported(checkout, monkeypatch, capsys):
    """Gate and up of the file exchanged, as if the loader confused them."""
    exchanged = {"ffn_gate_exps": "ffn_up_exps", "ffn_up_exps": "ffn_gate_exps"}
    stored = gguf_files.tensors_of

    def tensors_of(path):
        for name, tensor in stored(path):
            yield re.sub("|".join(exchanged), lambda found: exchanged[found[0]], name), tensor

    monkeypatch.setattr(gguf_files, "tensors_of", tensors_of)
    assert tool(monkeypatch, checkout, "--arch", "olmoe", "--types", "q8_0") == 1
    said = capsys.readouterr().out
    assert re.search(r"the largest error is .*, expected at most 2e-03", said), said
    assert re.search(r"from model\.layers\.0\.mlp\S* on, by ", said), said


def test_experts_that_are_not_packed_are_reported(checkout, monkeypatch, capsys):
    def unpacked(file, device):
        return gguf_files.dense(gguf_files.model("minimax-m2").float(), file)

    monkeypatch.setattr(peer_gguf, "loaded", unpacked)
    assert tool(monkeypatch, checkout, "--arch", "minimax-m2", "--types", "q8_0") == 1
    assert "experts of layer 1: the file has q8_0, q8_0, q8_0, packed are none" in capsys.readouterr().out


@pytest.mark.parametrize(
    "scale, exchanged, kind, fails",
    [(1.0, False, "f32", 0), (1.01, False, "f32", 1), (1.05, False, "q8_0", 0), (1.5, False, "q8_0", 1),
     (1.0, True, "q8_0", 1)],
)  # fmt: skip
def test_llama_cpp_runs(checkout, monkeypatch, capsys, scale, exchanged, kind, fails):
    """Values that are too large, with the same best tokens; or different best tokens."""

    def logits(file: str, ids: str, target: str) -> None:
        with torch.no_grad():
            want = gguf_files.dense(gguf_files.model("qwen2moe"), Path(file))(torch.tensor([json.loads(ids)])).logits[0]
        best = want.topk(2, dim=-1)
        np.save(target, scale * (want.scatter(1, best.indices.flip(-1), best.values) if exchanged else want))

    def quantise(source: str, target: str, number: str) -> None:
        gguf_files.write(gguf_files.model("qwen2moe").float(), Path(target), {"7": "q8_0"}[number])

    monkeypatch.setattr(peer_gguf, "has_llama_cpp", lambda: True)
    monkeypatch.setattr(peer_gguf, "STEPS", peer_gguf.STEPS | {"logits": logits, "quantise": quantise})
    assert tool(monkeypatch, checkout, "--arch", "qwen2moe", "--types", kind) == fails
    said = capsys.readouterr().out
    assert re.search(r"\d of 24 agree", said) and ("    llama.cpp: " in said) == bool(fails), said


def test_a_failed_step_is_reported(tmp_path):
    with pytest.raises(peer_gguf.Failed, match=r"convert: ModuleNotFoundError: No module named 'convert_hf_to_gguf'"):
        peer_gguf.in_process("convert", tmp_path, "folder")
    assert (
        peer_gguf.last_words("a\nx.c:3: GGML_ASSERT(n > 0) failed\nError: later\n")
        == "x.c:3: GGML_ASSERT(n > 0) failed"
    )
    assert peer_gguf.last_words("") == "no output"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["conversion"], "is no checkout of llama.cpp: it has no convert_hf_to_gguf.py"),
        ([".", "--arch", "lama"], "unknown architecture: lama; expected some of qwen3moe,.*llama"),
        ([".", "--types", "q9"], "unknown type: q9; expected some of f32, .*q4_k_m"),
        ([".", "--types", "q8_0", "q4_k_m"], "q4_k_m: only llama-cpp-python writes them, and it is not installed"),
    ],
)
def test_wrong_arguments(checkout, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(checkout)
    with pytest.raises(SystemExit):
        tool(monkeypatch, *arguments)
    assert re.search(message, capsys.readouterr().err)


# ------------------------------------------------------------------------------------------------ tests/gguf_files.py


def test_every_type_of_models_is_tried():
    assert {gguf_files.ARCHITECTURES[family] for family, _ in gguf_files.MODELS.values()} == {
        *gguf_files.ARCHITECTURES.values()
    }
    assert set(peer_gguf.LLAMA_CPP_DIFFERS) | set(peer_gguf.DENSE_EXPERTS) <= set(gguf_files.MODELS)


@pytest.mark.parametrize("name", gguf_files.MODELS)
def test_dense_equals_the_original_model(name, tmp_path):
    """Every value returns to its position; adding and subtracting 1 of a norm changes one bit."""
    model = gguf_files.model(name).float()
    back = gguf_files.dense(torch_zeros(model), gguf_files.write(model, tmp_path / "model.gguf"))
    for (key, want), got in zip(model.state_dict().items(), back.state_dict().values(), strict=True):
        assert (got - want).abs().max() <= 2e-7 * max(1.0, float(want.abs().max())), key


def torch_zeros(model):
    empty = gguf_files.copy.deepcopy(model)
    for tensor in empty.state_dict().values():
        tensor.zero_()
    return empty


OPTIONS = {
    "shuffled": ("qwen3moe", {"shuffle": True}),
    "parts": ("qwen3moe", {"tensors_per_file": 12}),
    "version 2": ("qwen3moe", {"version": 2}),
    "big endian": ("qwen3moe", {"big_endian": True}),
    "fused experts": ("qwen35moe", {"fuse": ["ffn_gate_up_exps"]}),
    "fused attention": ("qwen2moe", {"fuse": ["attn_qkv"]}),
    "whole kv_b": ("deepseek2-v3", {"whole_kv_b": True}),
    "second token": ("glm4moe", {"second_token": True}),
    "more tensors": ("qwen3moe", {"extra": {"unknown.weight": np.ones(3, dtype=np.float32)}}),
}


@pytest.mark.parametrize("name, options", OPTIONS.values(), ids=OPTIONS)
def test_options_change_the_file_but_no_value(name, options, tmp_path):
    model = gguf_files.model(name).float()
    plain, other = (gguf_files.write(model, tmp_path / f"{len(o)}.gguf", **o) for o in ({}, options))
    assert [file.read_bytes() for file in gguf_files.files_of(other)] != [plain.read_bytes()]
    back = gguf_files.dense(torch_zeros(model), other)
    for (key, want), got in zip(model.state_dict().items(), back.state_dict().values(), strict=True):
        assert (got - want).abs().max() <= 2e-7 * max(1.0, float(want.abs().max())), key


def test_files_in_parts(tmp_path):
    path = gguf_files.write(gguf_files.model("qwen3moe").float(), tmp_path / "m.gguf", tensors_per_file=12)
    files = gguf_files.files_of(path)
    assert [file.name for file in files] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    fields = [gguf.GGUFReader(file).fields for file in files]
    keys = ("split.no", "split.count", "split.tensors.count")
    assert [[part[key].contents() for key in keys] for part in fields] == [[i, 3, 27] for i in range(3)]


@pytest.mark.parametrize("type", [*gguf_files.FACTORS, "q4_0", "q5_1", "mxfp4", "tq1_0", "bf16"])
def test_types(type, tmp_path):
    """The requested type, with values of a plausible size; a narrower one if rows are too short for it."""
    model = gguf_files.model("deepseek2-v2").float()
    path = gguf_files.write(
        model, tmp_path / "m.gguf", {"gate_up": type, "blk.1.attn_k_b.weight": type, "head": "q6_k"}
    )
    types = gguf_files.types_of(path)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type.upper()]][0]
    assert types["blk.1.ffn_gate_exps.weight"] == type and types["output.weight"] == "q6_k"
    assert types["blk.1.ffn_down_exps.weight"] == types["blk.1.ffn_norm.weight"] == "f32"
    assert types["blk.1.attn_k_b.weight"] == (gguf_files.NARROW.get(type, "f16") if size == 256 else type)
    dense = gguf_files.dense(model, path)
    assert 0.05 < float(dense.state_dict()["model.layers.1.mlp.experts.gate_up_proj"].std()) < 0.25
    with torch.no_grad():
        assert 1 < float(dense(tokens(1, 8)).logits.abs().max()) < 100


def test_one_type_for_all_matrices_except_routers(tmp_path):
    types = gguf_files.types_of(gguf_files.write(gguf_files.model("qwen35moe").float(), tmp_path / "m.gguf", "q8_0"))
    kept = {re.sub(r"blk\.\d+\.", "", name) for name, type in types.items() if type == "f32"}
    norms = {"attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "ssm_norm", "output_norm"}
    others = {"ssm_a", "ssm_dt.bias", "ssm_conv1d.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight"}
    assert kept == {f"{norm}.weight" for norm in norms} | others and set(types.values()) == {"f32", "q8_0"}


def test_the_tokenizer_round_trips(tmp_path):
    from transformers import AutoTokenizer

    path = gguf_files.write(gguf_files.model("qwen3moe").float(), tmp_path / "m.gguf")
    fields = gguf.GGUFReader(path).fields
    gguf_files.save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens_of_file = fields["tokenizer.ggml.tokens"].contents()
    assert tokenizer.convert_ids_to_tokens(range(99)) == tokens_of_file and len(set(tokens_of_file)) == 99
    text = "the thin man, in a hat"
    assert tokenizer.decode(tokenizer.encode(text)) == text and len(tokenizer.encode(text)) < len(text)
    assert tokenizer.chat_template == fields["tokenizer.chat_template"].contents() == gguf_files.TEMPLATE
