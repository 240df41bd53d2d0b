"""Compares the paper's tables with simulated values, and with this package's handler on the same machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import nan
from statistics import mean

from lightning_smartinfinity.planning.paper.fit import FITTED_DEVICES, PaperMachine, published_workload, seconds_of
from lightning_smartinfinity.planning.paper.paper import SCALING, SECONDS, SPEEDUPS, Row
from lightning_smartinfinity.planning.simulator.handler import Route
from lightning_smartinfinity.planning.simulator.hardware import Machine
from lightning_smartinfinity.planning.simulator.step import Overlap, StepTime, System, simulate_step

__all__ = ["SYSTEMS", "Headroom", "Prediction", "headroom", "mean_error", "predictions", "relative_to_one_device"]

SYSTEMS = {
    "ZeRO-Infinity": (System.ZERO_INFINITY, False),
    "SU": (System.SMART_UPDATE, False),
    "SU+O": (System.PUBLISHED, False),
    "SU+O+C": (System.PUBLISHED, True),
}
"""The simulated system for each of the paper's names, and whether its gradients are compressed."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A number of the paper and its simulated value.

    Args:
        table: ``"seconds"``, ``"speedups"``, ``"scaling"`` or ``"relative"`` (to one device, as scaling is printed).
        model: Family and size of the model.
        gpu: Name of the GPU.
        num_devices: Number of SmartSSDs.
        system: A name in :data:`SYSTEMS`.
        paper: The paper's number: seconds per iteration, or a speed.
        simulated: The simulated number.
        fitted: Whether a parameter was fitted to the paper's number.
    """

    table: str
    model: str
    gpu: str
    num_devices: int
    system: str
    paper: float
    simulated: float
    fitted: bool

    @property
    def error(self) -> float:
        """Relative error of the simulated number."""
        return self.simulated / self.paper - 1


def predictions(machine: PaperMachine) -> list[Prediction]:
    """Simulate every number of the tables.

    Args:
        machine: The fitted machine.
    """
    return [*_seconds(machine), *_speedups(machine), *_scaling(machine)]


def relative_to_one_device(found: Iterable[Prediction]) -> list[Prediction]:
    """Convert scaling to the paper's own unit: speed relative to ZeRO-Infinity on one device.

    Args:
        found: Result of :func:`predictions`.
    """
    scaling = [one for one in found if one.table == "scaling"]
    first = {one.gpu: one for one in scaling if (one.system, one.num_devices) == ("ZeRO-Infinity", 1)}
    return [
        replace(
            one,
            table="relative",
            paper=first[one.gpu].paper / one.paper,
            simulated=first[one.gpu].simulated / one.simulated,
        )
        for one in scaling
        if one is not first[one.gpu]
    ]


def mean_error(found: Iterable[Prediction], system: str, *, fitted: bool | None = None) -> float:
    """Return the mean of the absolute relative errors; NaN if there are none.

    Args:
        found: Result of :func:`predictions`.
        system: A name in :data:`SYSTEMS`.
        fitted: Whether to take fitted numbers or the others; ``None`` means all.
    """
    errors = [abs(one.error) for one in found if one.system == system and fitted in (None, one.fitted)]
    return mean(errors) if errors else nan


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """Gain of this package's handler over the published one if only overlap differs.

    Bytes, devices and backward are the same.

    Args:
        published: The published step (SU+O).
        ours: The step with this package's handler.
        hidden: The step with this package's handler, whose update runs during the next forward.
        published_compressed: The published step with compression (SU+O+C).
        ours_compressed: The compressed step with this package's handler.
        hidden_compressed: The compressed step with this package's handler, whose update runs during the next forward.
    """

    published: StepTime
    ours: StepTime
    hidden: StepTime
    published_compressed: StepTime
    ours_compressed: StepTime
    hidden_compressed: StepTime

    @property
    def ratios(self) -> dict[str, float]:
        """Speedup of each part."""
        return {
            "update": self.published.update / self.ours.update,
            "step": self.published.step / self.ours.step,
            "step, next forward hidden": self.published.step / self.hidden.step,
            "step, compressed": self.published_compressed.step / self.ours_compressed.step,
            "step, compressed, next forward hidden": self.published_compressed.step / self.hidden_compressed.step,
        }


def headroom(machine: Machine, *, billions: float = 8.4) -> Headroom:
    """Simulate the gain from overlap alone.

    Args:
        machine: A machine with SmartSSDs.
        billions: Parameters in 10^9.
    """

    def step(system: System, overlap: Overlap = Overlap.NONE, *, compressed: bool = False) -> StepTime:
        workload = published_workload(billions, compressed=compressed)
        return simulate_step(machine, workload, system, overlap=overlap, route=Route.BACKWARD)

    return Headroom(
        published=step(System.PUBLISHED),
        ours=step(System.CARDS),
        hidden=step(System.CARDS, Overlap.FORWARD),
        published_compressed=step(System.PUBLISHED, compressed=True),
        ours_compressed=step(System.CARDS, compressed=True),
        hidden_compressed=step(System.CARDS, Overlap.FORWARD, compressed=True),
    )


def _seconds(machine: PaperMachine) -> Iterator[Prediction]:
    for row in SECONDS:
        for name, paper in _columns(row).items():
            system, compressed = SYSTEMS[name]
            simulated = seconds_of(machine, system, row.billions, row.num_devices, gpu=row.gpu, compressed=compressed)
            yield Prediction(
                table="seconds",
                model=f"{row.model} {row.billions}B",
                gpu=row.gpu,
                num_devices=row.num_devices,
                system=name,
                paper=paper,
                simulated=simulated,
                fitted=_is_fitted(row, name),
            )


def _columns(row: Row) -> dict[str, float]:
    columns = {"ZeRO-Infinity": row.baseline, "SU": row.su, "SU+O": row.optimized, "SU+O+C": row.compressed}
    return {name: seconds for name, seconds in columns.items() if seconds is not None}


def _is_fitted(row: Row, system: str) -> bool:
    if row.gpu == "A100":
        return system in ("ZeRO-Infinity", "SU+O")
    return row.phases is not None and system != "SU"


def _speedups(machine: PaperMachine) -> Iterator[Prediction]:
    for one in SPEEDUPS:
        baseline = seconds_of(machine, System.ZERO_INFINITY, one.billions, one.num_devices)
        for name, paper in (("SU+O", one.optimized), ("SU+O+C", one.compressed)):
            system, compressed = SYSTEMS[name]
            seconds = seconds_of(machine, system, one.billions, one.num_devices, compressed=compressed)
            yield Prediction(
                table="speedups",
                model=f"GPT-2 {one.billions}B",
                gpu="A5000",
                num_devices=one.num_devices,
                system=name,
                paper=paper,
                simulated=baseline / seconds,
                fitted=False,
            )


def _scaling(machine: PaperMachine) -> Iterator[Prediction]:
    for gpu, scaling in SCALING.items():
        series = {"ZeRO-Infinity": scaling.baseline, "SU+O": scaling.optimized, "SU+O+C": scaling.compressed}
        for name, speeds in series.items():
            system, compressed = SYSTEMS[name]
            for num_devices, paper in zip(scaling.num_devices, scaling.in_seconds(speeds), strict=True):
                yield Prediction(
                    table="scaling",
                    model=f"GPT-2 {scaling.billions}B",
                    gpu=gpu,
                    num_devices=num_devices,
                    system=name,
                    paper=paper,
                    simulated=seconds_of(
                        machine, system, scaling.billions, num_devices, gpu=gpu, compressed=compressed
                    ),
                    fitted=num_devices in FITTED_DEVICES and (gpu == "A5000" or name != "SU+O+C"),
                )
