"""A private name of a library without a contract test is found, and a contract test without a purpose."""

from __future__ import annotations

from pathlib import Path

from tools.seams import page_of


def test_a_private_name_needs_a_contract_test(tmp_path: Path) -> None:
    """The page says what the test's docstring and mark say, and which module uses the name."""
    package, tests = tmp_path / "lightning_smartinfinity/room", tmp_path / "tests/zero3"
    package.mkdir(parents=True)
    tests.mkdir(parents=True)
    (package / "module.py").write_text("import torch\n\ntorch._planted()\n")
    assert page_of(tmp_path)[1] == ["_planted of room/module.py needs a test in tests/zero3/test_contract_*.py"]
    test = '"""Planted."""\n\n\ndef test_it():\n    """Torch has _planted."""\n'
    (tests / "test_contract.py").write_text(test)
    assert page_of(tmp_path)[1] == ["tests/zero3/test_contract.py: test_it needs pytest.mark.seam with its purpose"]
    (tests / "test_contract.py").write_text(test.replace("def", '@pytest.mark.seam("a purpose")\ndef'))
    page, problems = page_of(tmp_path)
    assert "| Torch has `_planted`. | a purpose | `room/module.py` | `zero3/test_contract.py::test_it` |" in page
    assert problems == []
