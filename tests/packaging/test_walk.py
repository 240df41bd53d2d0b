"""The figures of tools/walk.py."""

from __future__ import annotations

from tools.walk import PACKAGE, circles, file_of, graph_figures


def test_circles() -> None:
    """Modules that reach each other are one circle; one that only leads there is none."""
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}, "e": set()}
    assert sorted(map(sorted, circles(imports))) == [["b", "c"], ["d"]]


def test_the_package_has_figures() -> None:
    """Every module of the graph has a file, and each figure counts something."""
    assert file_of(f"{PACKAGE}.errors") is not None and file_of(f"{PACKAGE}.native._core") is None
    figures = graph_figures()
    assert len(figures) == 5 and figures["rooms"] > 5 and figures["arrows between rooms"] > figures["rooms"]
