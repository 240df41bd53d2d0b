"""Docstrings are sentences and begin with no word that only fragments begin with."""

from __future__ import annotations

import ast

import pytest

from tools import house


def test_no_docstring_begins_with_a_fragment() -> None:
    """No docstring begins like "Of each rank." or "What it holds."."""
    found = [
        f"{path}:{node.lineno}"
        for path in house.sources(house.ROOT)
        if path.suffix == ".py"
        for node in house.docstrings(ast.parse(path.read_text()))
        if house.is_fragment(str(node.value))
    ]
    assert found == []


@pytest.mark.parametrize("first", house.FRAGMENTS)
def test_a_fragment_is_found(first: str) -> None:
    """Fragments are found in functions, classes and below attributes."""
    text = f'def f():\n    """{first} it."""\n\n\nclass A:\n    """A sentence."""\n\n    x = 1\n    """{first} x."""\n'
    assert house.python_room(text).fragments == 2
