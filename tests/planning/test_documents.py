"""The pages on simulation show the simulator's results."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lightning_smartinfinity import TopK
from lightning_smartinfinity import planning as plan
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.planning.cost import CompressionResources, gain_of
from lightning_smartinfinity.planning.simulator.gradients import Dense
from lightning_smartinfinity.planning.simulator.handler import Route
from lightning_smartinfinity.planning.simulator.workload import Workload

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "simulation.md").read_text()
REPRODUCTION = (ROOT / "docs" / "reproduction.md").read_text()


@pytest.mark.long  # tests/planning/test_reproduction.py has the figures of the paper
def test_tables_are_as_simulated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/reproduction.md has every title and table that the benchmark prints."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", ["paper_tables.py"])
    import paper_tables

    monkeypatch.setattr(paper_tables, "describe", lambda *packages: "")
    paper_tables.main()
    titles_and_tables = capsys.readouterr().out.strip().split("\n\n")
    printed = list(zip(titles_and_tables[::2], titles_and_tables[1::2], strict=True))
    assert len(printed) > 12
    assert [title for title, table in printed if f"\n{title}\n\n{table}\n" not in REPRODUCTION] == []


def test_the_example_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints exactly the example's output."""
    arguments, printed = PAGE.partition("```console\n$ smart-infinity ")[2].partition("\n```")[0].split("\n", 1)
    assert main(arguments.split()) == 0
    assert capsys.readouterr().out == printed + "\n"


def test_the_library_prints_what_its_example_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """The example prints exactly what the page shows, and uses public names."""
    code, printed = PAGE.partition("```python\n")[2].partition("\n```")[0::2]
    exec(compile(code, "docs/simulation.md", "exec"), {})
    assert capsys.readouterr().out == printed.partition("\n```\n")[2].partition("```")[0]
    imported = re.findall(r"^from lightning_smartinfinity.planning import (.*)$", code, re.MULTILINE)
    assert set(imported[0].split(", ")) <= set(plan.__all__)
    assert all(getattr(plan, name) is not None for name in plan.__all__)
    assert len(set(plan.__all__)) == len(plan.__all__) > 20


def test_gains_are_as_predicted() -> None:
    """The table of gains for the top percent equals the cost model."""
    head, _, *rows = (line.strip("| ").split(" | ") for line in PAGE.rpartition("64 cores:\n\n")[2].splitlines())
    assert len(rows) == 12
    for route, bits, error_feedback, *gains in rows:
        gradient, parameter = (int(text) // 8 for text in bits.split(", "))
        dense = Workload(numel=1, gradients=Dense(gradient), parameter_bytes=parameter)
        codec = TopK(0.01, error_feedback=error_feedback == "yes")
        for num_cards, gain in zip(head[3:], gains, strict=True):
            setting = CompressionResources(
                num_cards=int(num_cards), num_cores=64, num_threads=8, route=Route(route.strip("`"))
            )
            assert gain == f"{gain_of(codec, dense, setting).ratio:.2f}"
