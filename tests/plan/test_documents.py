"""The tables of docs/simulation.md are those of benchmarks/paper_tables.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_smartinfinity.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "simulation.md").read_text()


def test_tables_are_as_simulated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every row that the quick benchmark prints stands there."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", ["paper_tables.py", "--quick"])
    import paper_tables

    paper_tables.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) > 80
    assert [row for row in rows if row not in PAGE.splitlines()] == []


def test_the_example_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """To the letter."""
    arguments, printed = PAGE.partition("```console\n$ smart-infinity ")[2].partition("\n```")[0].split("\n", 1)
    assert main(arguments.split()) == 0
    assert capsys.readouterr().out == printed + "\n"
