"""`torch_moe_metal.gate` and the others: the ops as functions with a signature, types and a docstring."""

import inspect
import re
import subprocess
import sys
import timeit
from pathlib import Path

import pytest
import torch

import torch_moe_metal
from cases import SAMPLES, call
from checks import same_bits
from torch_moe_metal import packing, recurrence, reference
from torch_moe_metal.arguments import ARGUMENTS, DTYPES, outputs, shapes, written
from torch_moe_metal.formats import BITS, FORMATS, GROUPS, any_of

OPS = tuple(ARGUMENTS)
ODD = {case.op: case for case in SAMPLES if case.name == "sample_odd"}


@pytest.mark.parametrize("op", OPS)
def test_schema_table_and_signature_agree(op: str):
    """The schema, the table of arguments and the signature have the same arguments, defaults and outputs."""
    schema = getattr(torch.ops.moe_metal, op).default._schema
    signature = inspect.signature(getattr(reference, op))
    found = [(a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty) for a in schema.arguments]
    assert found == [(p.name, p.default) for p in signature.parameters.values()]
    tensors = [a for a in schema.arguments if "Tensor" in str(a.type)]
    assert [a.name for a in tensors] == list(ARGUMENTS[op])
    optional = [name for name, argument in ARGUMENTS[op].items() if argument.optional]
    assert [a.name for a in tensors if "Optional" in str(a.type)] == optional
    assert tuple(a.name for a in tensors if a.alias_info and a.alias_info.is_write) == written(op)
    assert [a.name for a in schema.arguments if a.kwarg_only] == [
        p.name for p in signature.parameters.values() if p.kind == p.KEYWORD_ONLY
    ]
    assert len(schema.returns) + len(written(op)) == len(outputs(op, shapes(op, ARGUMENTS[op])))


def test_every_op_is_documented_everywhere():
    """Names with a leading underscore are no ops on tensors: the package itself calls them."""
    registered = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()
                  if name.startswith("moe_metal::") and not name.startswith("moe_metal::_")}  # fmt: skip
    assert set(reference.__all__) == set(OPS) == registered <= set(torch_moe_metal.__all__)
    page = (Path(__file__).parents[1] / "docs" / "ops.md").read_text()
    assert sorted(re.findall(r"^`(\w+)\(", page, re.MULTILINE)) == sorted(OPS)
    assert set(DTYPES) == set(reference.TOLERANCES)


def test_formats_are_documented():
    for function, known in ((reference.dequantize, FORMATS), (torch_moe_metal.quantize, packing.WRITTEN)):
        assert all(re.search(rf"\b{name}\b", function.__doc__) for name in known)
        assert f"{any_of(BITS)} bits" in function.__doc__ or f"`bits` {any_of(BITS)}" in function.__doc__
        assert any_of(GROUPS) in " ".join(function.__doc__.split())


@pytest.mark.parametrize(
    ("op", "option", "known"),
    [
        ("route", "scoring", tuple(reference.SCORING)),
        ("route", "renormalize", ("none", "before_scale", "after_scale")),
        ("route", "group_score", ("top2_sum", "max")),
        ("glu", "activation", tuple(reference.ACTIVATIONS)),
        ("linear_attention_", "rule", ("delta", "sum")),
        ("linear_attention_", "decay_kind", ("softplus", "sigmoid")),
        ("linear_attention_", "activation", tuple(recurrence.ACTIVATIONS)),
        ("linear_attention_", "order", ("qkv", "vkq")),
        ("linear_attention_", "gate_activation", tuple(recurrence.ACTIVATIONS)),
        ("short_conv_", "activation", tuple(recurrence.ACTIVATIONS)),
    ],
)
def test_the_op_and_its_reference_have_the_same_values_of_an_option(op: str, option: str, known: tuple[str, ...]):
    """The op's values are an enum in shaders/common.h."""
    with pytest.raises(RuntimeError, match=f"{option}: expected one of {', '.join(known)}; got 'x'"):
        getattr(torch.ops.moe_metal, op)(**ODD[op].arguments(), **ODD[op].options | {option: "x"})
    assert all(re.search(rf"\b{value}\b", getattr(reference, op).__doc__) for value in known)


@pytest.mark.parametrize("op", OPS)
def test_functions_call_the_op_and_have_its_signature(op: str):
    function, specification, case = getattr(torch_moe_metal, op), getattr(reference, op), ODD[op]
    assert inspect.signature(function) == inspect.signature(specification)
    assert function.__doc__ == specification.__doc__ and function.__module__ == "torch_moe_metal"
    got = call(function, op, case.arguments(), case.options)
    want = call(getattr(torch.ops.moe_metal, op), op, case.arguments(), case.options)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_compiled_functions_keep_the_op(op: str):
    """One graph, which contains the op as if it had been called directly."""
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    args = ODD[op].arguments()
    program = torch.compile(getattr(torch_moe_metal, op), fullgraph=True, backend=backend)
    program(**args, **ODD[op].options)
    (calls,) = graphs
    assert [call for call in calls if not call.startswith("<built-in")] == [f"moe_metal.{op}.default"]


def test_function_costs_less_than_a_microsecond():
    """Compared with torch.ops, for the smallest input. They take turns, and the minima are compared, because other
    processes add to the rest."""
    x = torch.ones(1, 1)
    calls = 200
    ways = {name: timeit.Timer(lambda f=f: f(x, x)) for name, f in
            (("op", torch.ops.moe_metal.glu), ("function", torch_moe_metal.glu))}  # fmt: skip
    with torch.no_grad():
        rounds = [{name: way.timeit(calls) / calls for name, way in ways.items()} for _ in range(400)]
    least = {name: min(times[name] for times in rounds) for name in ways}
    assert least["function"] - least["op"] < 1e-6, least


PROGRAM = """
import torch
import torch_moe_metal

x = torch.ones(3, 8)
reveal_type(torch_moe_metal.gate)
reveal_type(torch_moe_metal.patch)
torch_moe_metal.gate(x, x, top_k=2, scoring="sigmoid")
torch_moe_metal.gate(x, x)
torch_moe_metal.glu(x, x, activation=3)
torch_moe_metal.norm_ad(x, x, x)
weights, ids = torch_moe_metal.route(x, top_k=1)
torch_moe_metal.weighted_sum(weights, ids, shared_gates=x)
"""


@pytest.mark.slow
def test_mypy_knows_the_types(tmp_path: Path):
    """Without PyTorch's own types, for which mypy needs half a minute."""
    (tmp_path / "program.py").write_text(PROGRAM)
    package = Path(torch_moe_metal.__file__).parent
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict_optional = true\n[mypy-torch.*]\nfollow_imports = skip\n"
                                       "[mypy-transformers.*]\nfollow_imports = skip\n")  # fmt: skip
    command = [sys.executable, "-m", "mypy", "--config-file", tmp_path / "mypy.ini", tmp_path / "program.py"]
    environment = {"MYPYPATH": str(package.parent), "PATH": "", "MYPY_CACHE_DIR": str(tmp_path / "cache")}
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    found = (line for line in said.splitlines() if line.startswith("program.py:") and "defined in" not in line)
    lines = {int(line.split(":")[1]): line for line in found}
    assert "hidden: Any" in lines[6] and "top_k: int" in lines[6] and "-> tuple[" in lines[6], said
    assert "model: Any" in lines[7] and "Report" in lines[7], said
    assert 'Missing named argument "top_k"' in lines[9] and '"activation"' in lines[10], said
    assert 'no attribute "norm_ad"' in lines[11] and '"shared_gates"' in lines[13], said
    assert set(lines) == {6, 7, 9, 10, 11, 13}, said
