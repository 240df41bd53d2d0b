"""The pages on simulation show the simulator's results."""

from __future__ import annotations

import re
import sys
from dataclasses import astuple
from pathlib import Path

import pytest

from lightning_smartinfinity import TopK
from lightning_smartinfinity import planning as plan
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.planning.cost import CompressionResources, gain_of
from lightning_smartinfinity.planning.paper.fit import FITTED_DEVICES, fit
from lightning_smartinfinity.planning.paper.paper import SCALING
from lightning_smartinfinity.planning.paper.reproduction import (
    headroom,
    mean_error,
    predictions,
    relative_to_one_device,
)
from lightning_smartinfinity.planning.simulator.gradients import Dense
from lightning_smartinfinity.planning.simulator.handler import Route
from lightning_smartinfinity.planning.simulator.workload import Workload

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "simulation.md").read_text()
REPRODUCTION = (ROOT / "docs" / "reproduction.md").read_text()


@pytest.mark.long  # the tests below have the figures of the paper
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


@pytest.mark.parametrize("duplex", [False, True])
def test_mean_errors(duplex: bool) -> None:
    """Mean errors of the baseline and SU+O are at most 7 % for numbers that no parameter was fitted to."""
    found = predictions(fit(duplex=duplex))
    for system in ("ZeRO-Infinity", "SU+O"):
        assert mean_error(found, system, fitted=False) <= 0.07
    assert {one.num_devices for one in found if one.fitted} == set(FITTED_DEVICES)
    predicted = {(one.table, one.gpu, one.num_devices) for one in found if not one.fitted and one.system == "SU+O"}
    assert {("scaling", gpu, number) for gpu in SCALING for number in (1, 2, 4, 8)} < predicted


def test_scaling_in_the_unit_of_the_paper() -> None:
    """The speeds equal the printed ones, and an error on one device affects all relative speeds."""
    found = predictions(fit(duplex=False))
    relative = relative_to_one_device(found)
    scaled = {(one.gpu, one.system, one.num_devices): one for one in found if one.table == "scaling"}
    for gpu, scaling in SCALING.items():
        printed = {"ZeRO-Infinity": scaling.baseline[1:], "SU+O": scaling.optimized, "SU+O+C": scaling.compressed}
        for system, speeds in printed.items():
            of = [one for one in relative if (one.gpu, one.system) == (gpu, system)]
            assert [one.paper for one in of] == pytest.approx(list(speeds))
    for one in relative:
        same, alone = scaled[one.gpu, one.system, one.num_devices], scaled[one.gpu, "ZeRO-Infinity", 1]
        assert 1 + one.error == pytest.approx((1 + alone.error) / (1 + same.error))


BARS = {  # with SSD time shared, and duplex
    "update": (1.5, 2.4),
    "step": (1.25, 1.5),
    "step, next forward hidden": (1.3, 1.6),
    "step, compressed": (1.3, 1.55),
}


@pytest.mark.parametrize("duplex", [False, True])
def test_headroom_over_the_published_handler(duplex: bool) -> None:
    """With ten devices and 8.4B parameters overlap alone gains at least these factors with the same bytes."""
    found = headroom(fit(duplex=duplex).machine(10))
    for name, bars in BARS.items():
        assert found.ratios[name] >= bars[duplex], name
    for ours, published in (
        (found.ours, found.published),
        (found.hidden, found.published),
        (found.ours_compressed, found.published_compressed),
        (found.hidden_compressed, found.published_compressed),
    ):
        assert astuple(ours.traffic) == pytest.approx(astuple(published.traffic), rel=1e-6)
        # The simulated device has one of the last tasklets.
        assert ours.backward == pytest.approx(published.backward, rel=0.003)
        assert ours.forward == published.forward
