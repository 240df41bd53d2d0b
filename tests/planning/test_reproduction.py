"""Predictions of the paper's numbers, and the gains of this project's handler over the published one."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from lightning_smartinfinity.planning.paper.fit import FITTED_DEVICES, fit
from lightning_smartinfinity.planning.paper.paper import SCALING, SECONDS
from lightning_smartinfinity.planning.paper.reproduction import (
    headroom,
    mean_error,
    predictions,
    relative_to_one_device,
)
from lightning_smartinfinity.planning.simulator.hardware import FIGURES

# The speed-ups of SU+O+C over the baseline as printed in the paper.
PRINTED = {
    ("GPT-2", 4.0, 6, "A5000"): 1.53,
    ("GPT-2", 4.0, 10, "A5000"): 1.94,
    ("GPT-2", 8.4, 6, "A5000"): 1.42,
    ("GPT-2", 8.4, 10, "A5000"): 1.85,
    ("BERT", 4.0, 10, "A5000"): 1.95,
    ("BERT", 8.3, 10, "A5000"): 1.92,
    ("GPT-2", 4.0, 10, "A100"): 2.11,
}


def test_seconds_give_the_printed_ratios() -> None:
    """Seconds measured from bars agree with the printed ratios to about 1 %, and phases with their sum."""
    for row in SECONDS:
        printed = PRINTED[row.model, row.billions, row.num_devices, row.gpu]
        assert row.baseline / row.compressed == pytest.approx(printed, rel=0.011)
        if row.phases is not None:
            assert sum(row.phases) == pytest.approx(row.baseline, rel=0.01)


def test_scaling_gives_the_seconds() -> None:
    """The figures of scaling and of seconds agree for the same runs at 6 and 10 devices."""
    for row in SECONDS:
        if (row.model, row.billions) == ("GPT-2", 4.0):
            scaling = SCALING[row.gpu]
            column = scaling.num_devices.index(row.num_devices)
            assert scaling.in_seconds(scaling.optimized)[column] == pytest.approx(row.optimized, rel=0.01)
            assert scaling.in_seconds(scaling.compressed)[column] == pytest.approx(row.compressed, rel=0.01)


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
    for gpu, scaling in SCALING.items():
        printed = {
            "ZeRO-Infinity": scaling.baseline[1:],
            "SU+O": scaling.optimized,
            "SU+O+C": scaling.compressed,
        }
        for system, speeds in printed.items():
            of = [one for one in relative if (one.gpu, one.system) == (gpu, system)]
            assert [one.paper for one in of] == pytest.approx(list(speeds))
    (alone,) = [
        one
        for one in found
        if (one.table, one.gpu, one.system, one.num_devices) == ("scaling", "A100", "ZeRO-Infinity", 1)
    ]
    for one in relative:
        if one.gpu == "A100":
            (same,) = [
                other
                for other in found
                if other.table == "scaling"
                and (other.gpu, other.system, other.num_devices) == (one.gpu, one.system, one.num_devices)
            ]
            assert 1 + one.error == pytest.approx((1 + alone.error) / (1 + same.error))


@pytest.mark.parametrize("duplex", [False, True])
def test_every_parameter_has_a_source(duplex: bool) -> None:
    """Parameters of the devices are the paper's, and the others say what they were fitted to."""
    machine = fit(duplex=duplex)
    device = machine.machine(10).device
    for name, figure in FIGURES.items():
        assert getattr(device, name) == figure.value
    assert all(figure.source for figure in machine.parameters.values())
    assert "fitted" in FIGURES["sparse_kernel"].source
    fitted = set(machine.parameters) - set(FIGURES)
    assert fitted == {"channel", "forward", "backward", "receive", "top_k", "a100"}
    assert all("fitted at 6 and 10 devices" in machine.parameters[name].source for name in fitted)


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
