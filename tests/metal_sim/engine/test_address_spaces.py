"""What only the front end with Metal's address spaces can refuse, and that it accepts what is right."""

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
