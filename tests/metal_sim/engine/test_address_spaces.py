"""Errors that only the front end with Metal's address spaces can detect; correct code must be accepted."""

import pytest

from metal_sim import engine
from metal_sim.engine import address_spaces, test_engine
from metal_sim.engine.address_spaces import RefusedError

REFUSED = {
    "space_threadgroup_as_thread": "no matching function for call to 'first'",
    "space_device_to_threadgroup": "'device float *' to 'threadgroup float *'",
    "space_program_scope_variable": "program scope variable must reside in constant address space",
    "space_in_template": "cannot initialize",
    "space_finite_recursion": "recursion is not supported",
}


def source(name):
    return (engine.HERE / "mutants" / f"{name}.metal").read_text()


def test_every_mutant_is_tested():
    assert {path.stem for path in (engine.HERE / "mutants").glob("space_*.metal")} == REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with pytest.raises(RefusedError, match="program_source") as caught:
        address_spaces.check(source(name))
    assert REFUSED[name] in str(caught.value)


@pytest.mark.parametrize("name", test_engine.VIOLATIONS)
def test_mutants_of_other_rules_are_accepted(name):
    if name != "recursion":
        address_spaces.check(source(name))


@pytest.mark.parametrize("version", address_spaces.VERSIONS)
@pytest.mark.parametrize("text", [test_engine.NORM, test_engine.STRUCTS], ids=["norm", "structs"])
def test_right_kernels_are_accepted(text, version):
    address_spaces.check(text, version)


TEMPORARIES = (
    test_engine.HEAD
    + """
struct Line {
  float a;
  float at(float x) const { return a * x; }
  void steepen() { twice(a); }
  static void twice(thread float& v) { v *= 2; }
};
inline Line line_of(float a) { return {a}; }
inline float slope(thread const Line& l) { return l.a; }
inline float first(constant float* p) { return *p; }
inline float again(float v) { return v > 0 ? again(v - 1) : 0; }
kernel void k(device float* x [[buffer(0)]]) {
  Line line = line_of(2);
  line.steepen();
  x[0] = slope(line_of(1)) + line_of(3).at(x[0]) + slope(line) EXPRESSION;
}
"""
)


@pytest.mark.parametrize("version", address_spaces.VERSIONS[:3])
def test_temporaries_are_in_thread_memory(version):
    right = TEMPORARIES.replace("EXPRESSION", "").replace("again(v - 1)", "v - 1")
    address_spaces.check(right, version)


@pytest.mark.parametrize("expression, message", [("+ first(x)", "address space"), ("+ again(x[0])", "recursion")])
def test_expressions_with_temporaries_are_checked(expression, message):
    with pytest.raises(RefusedError, match=message):
        address_spaces.check(TEMPORARIES.replace("EXPRESSION", expression))
