"""The slow tests break the CPU's code one line at a time. Here: each of those lines exists, exactly once."""

import pytest

import test_mutated_cpu_readers
import test_mutated_linear_attention
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
