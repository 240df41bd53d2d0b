"""Labelled text comes from installed packages or a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Example = Callable[[str], ModuleType]


def test_documentation_of_installed_packages(example: Example) -> None:
    """Every package has as many passages, no text gives its package away, and nothing learnt is held out."""
    documentation = example("documentation")
    learnt, held_out = documentation.documentation(6)
    for passages, number in ((learnt, 6), (held_out, 2)):
        assert Counter(label for _, label in passages) == dict.fromkeys(documentation.PACKAGES, number)
    for text, _ in learnt + held_out:
        assert 60 <= len(text) <= 300  # a masked name is shorter than the name
        assert not any(package in text.lower() for package in documentation.PACKAGES)
    assert not set(learnt) & set(held_out)
    assert documentation.documentation(6) == (learnt, held_out)


def test_passages_of_a_file(example: Example, tmp_path: Path) -> None:
    """Docstrings of modules, classes and functions are passages without their examples, if they are long enough."""
    file = tmp_path / "module.py"
    file.write_text(
        f'"""Torch {"a" * 100}."""\nclass A:\n    """Short."""\n    def f(self):\n        """{"b" * 400}\n\n'
        f'        >>> 1"""\n'
    )
    assert list(example("documentation").passages_of(file)) == [f"it {'a' * 100}.", "b" * 300]
    file.write_text("def")
    assert list(example("documentation").passages_of(file)) == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}'], r"labelled\.jsonl:1 is not"),
        (['{"text": "a", "label": 1}', "a"], r"labelled\.jsonl:2 is not"),
        (['{"text": "a", "label": 1}'] * 3, r"holds 3 passages: at least 4"),
    ],
)
def test_file_that_is_not_labelled(example: Example, tmp_path: Path, lines: list[str], message: str) -> None:
    """The error names the file and the line."""
    path = tmp_path / "labelled.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        example("documentation").read_labelled(path)


def test_no_file(example: Example, tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(ValueError, match=r"nowhere is not a file"):
        example("documentation").read_labelled(tmp_path / "nowhere")
