"""tools/other_transformers.py, which runs the tests that depend on transformers with another version."""

from pathlib import Path

import pytest

import other_transformers
from other_transformers import dependent_tests


def test_files_that_depend_on_transformers():
    found = set(dependent_tests())
    assert {f"tests/test_{name}.py" for name in ("transformers", "cache", "serve", "chat", "checkpoints")} <= found
    assert "tests/test_examples.py" in found  # it imports examples that import transformers
    assert not any(name.startswith("tests/tools/") for name in found)
    assert not {"tests/test_ops.py", "tests/test_ggml.py", "tests/test_launch.py"} & found  # long, and independent


def test_imports_of_any_form_and_depth(tmp_path: Path):
    texts = {
        "tests/test_plain.py": "import os\nimport transformers\n",
        "tests/test_part.py": "def test():\n    from transformers.models import x\n",
        "tests/test_program.py": 'PROGRAM = """\nimport transformers\n"""\n',
        "tests/test_through_two.py": "import second\n",
        "tests/tools/test_of_a_tool.py": "import transformers\n",
        "tools/second.py": "from first import model\n",
        "tests/first.py": "from transformers import model\n",
        "tests/test_without.py": '"""Nothing imports transformers."""\nimport torch\nfrom others import transformers\n',
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    names = ["tests/test_part.py", "tests/test_plain.py", "tests/test_program.py", "tests/test_through_two.py"]
    assert dependent_tests(tmp_path) == names


def test_another_version_than_asked_for_ends_the_run(tmp_path: Path, monkeypatch):
    (tmp_path / "transformers.py").write_text('__version__ = "5.98.0"')
    monkeypatch.setattr(other_transformers, "install", lambda version: tmp_path)
    with pytest.raises(SystemExit, match=r"imports transformers 5\.98\.0 instead of 5\.99\.0"):
        other_transformers.main(["5.99.0"])
