"""The slow tests break the code of the CPU one line at a time, and the shaders. Here: what they break exists."""

import pytest

import test_mutated_cpu_readers
import test_mutated_linear_attention
import test_mutated_readers
import test_mutated_x86

FAULTS = [
    fault
    for tests in (test_mutated_cpu_readers, test_mutated_linear_attention, test_mutated_x86)
    for fault in tests.FAULTS
]


def test_each_line_exists_once():
    folder = test_mutated_cpu_readers.ROOT / "csrc" / "cpu"
    if not (folder / "x86").exists():
        pytest.skip("this checkout is without csrc/cpu/x86")
    assert not [fault.name for fault in FAULTS if (folder / fault.file).read_text().count(fault.line) != 1]


def test_what_is_broken_in_the_shaders_exists():
    folder = test_mutated_cpu_readers.ROOT / "shaders"
    text = "".join(file.read_text() for file in folder.rglob("*") if file.suffix in (".h", ".metal"))
    assert not [name for name, mutant in test_mutated_readers.MUTANTS.items() if mutant.right not in text]
