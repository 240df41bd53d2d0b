"""The paper's machine: its published figures, and unknown ones fitted to the seconds at 6 and 10 devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import numpy as np

from lightning_smartinfinity.planning.paper.paper import SCALING, SECONDS, Row
from lightning_smartinfinity.planning.simulator.gradients import Dense, Pairs
from lightning_smartinfinity.planning.simulator.hardware import FIGURES, Channel, Device, Figure, Gpu, Host, Machine
from lightning_smartinfinity.planning.simulator.step import System, simulate_step
from lightning_smartinfinity.planning.simulator.workload import Workload
from lightning_smartinfinity.settings.rules import check, one_of

__all__ = ["FITTED_DEVICES", "PaperMachine", "fit", "published_workload", "seconds_of"]

FITTED_DEVICES = (6, 10)
"""Numbers of devices whose seconds are used for fitting; the seconds of all others are predicted."""

_BILLION = 10**9
_VOLUME = 0.02
_GRADIENT_BYTES = 4
_UPDATE_BYTES = 28  # bytes per parameter of the baseline's update: 16 read, 12 written


@dataclass(frozen=True, kw_only=True)
class PaperMachine:
    """The fitted figures; seconds are per parameter of the model.

    Args:
        duplex: Whether an SSD reads and writes at the same time; if not, both share its time.
        channel: Bytes per second of the shared channel, both directions together.
        forward: Seconds of forward on an A5000.
        backward: Seconds of backward on an A5000, without storing gradients.
        receive: Seconds of the host to receive an updated parameter.
        top_k: Seconds of compression on an A5000.
        a100: Seconds of an A100 divided by those of an A5000.
        sparse_kernel: Bytes per second of the kernels with compressed gradients.
    """

    duplex: bool
    channel: float
    forward: float = 0.0
    backward: float = 0.0
    receive: float = 0.0
    top_k: float = 0.0
    a100: float = 0.0
    sparse_kernel: float = FIGURES["sparse_kernel"].value

    def machine(self, num_devices: int, gpu: str = "A5000") -> Machine:
        """Return the machine with this number of SmartSSDs.

        Args:
            num_devices: Number of SmartSSDs.
            gpu: ``"A5000"`` or ``"A100"``.
        """
        check("PaperMachine.machine", "gpu", gpu, one_of("A5000", "A100"))
        pace = self.a100 if gpu == "A100" else 1.0
        return Machine(
            device=replace(Device.published(duplex=self.duplex), sparse_kernel=self.sparse_kernel),
            num_devices=num_devices,
            channel=Channel(down=self.channel, up=self.channel, together=self.channel),
            gpu=Gpu(forward=pace * self.forward, backward=pace * self.backward, top_k=pace * self.top_k),
            host=Host(receive=self.receive),
        )

    @cached_property
    def parameters(self) -> dict[str, Figure]:
        """All figures of the machine, with their sources."""
        at = " and ".join(map(str, FITTED_DEVICES))
        fitted = {
            "channel": (self.channel, "B/s", "the baseline's update of 28 B per parameter, GPT-2 4.0B and 8.4B"),
            "forward": (self.forward * _BILLION, "s per 10^9", "the baseline's forward"),
            "backward": (
                self.backward * _BILLION,
                "s per 10^9",
                "the baseline's backward, less 4 B through the channel",
            ),
            "receive": (self.receive * _BILLION, "s per 10^9", "what SU+O takes beyond all of this"),
            "top_k": (self.top_k * _BILLION, "s per 10^9", "what SU+O+C takes beyond all of this"),
            "a100": (self.a100, "of A5000", "baseline and SU+O of GPT-2 4.0B on an A100"),
        }
        return dict(FIGURES) | {
            name: Figure(value, unit, f"fitted at {at} devices: {source}")
            for name, (value, unit, source) in fitted.items()
        }


def published_workload(billions: float, *, compressed: bool = False) -> Workload:
    """Return the paper's workload: gradients and parameters in fp32, compressed gradients as pairs of 4 + 4 bytes.

    Args:
        billions: Parameters in 10^9.
        compressed: Whether gradients are compressed to 2 % of the volume.
    """
    gradients = Pairs(_VOLUME) if compressed else Dense(_GRADIENT_BYTES)
    return Workload(numel=round(billions * _BILLION), gradients=gradients, parameter_bytes=4)


def seconds_of(
    machine: PaperMachine,
    system: System,
    billions: float,
    num_devices: int,
    *,
    gpu: str = "A5000",
    compressed: bool = False,
) -> float:
    """Return the seconds of a simulated step of the paper's workload.

    Args:
        machine: The fitted machine.
        system: One of the published systems.
        billions: Parameters in 10^9.
        num_devices: Number of SmartSSDs.
        gpu: ``"A5000"`` or ``"A100"``.
        compressed: Whether gradients are compressed to 2 % of the volume.
    """
    workload = published_workload(billions, compressed=compressed)
    return simulate_step(machine.machine(num_devices, gpu), workload, system).step


@cache
def fit(*, duplex: bool, sparse_kernel: float = FIGURES["sparse_kernel"].value) -> PaperMachine:
    """Fit the unknown figures of the paper's machine one after the other, by least squares of the relative errors.

    Args:
        duplex: Whether an SSD reads and writes at the same time.
        sparse_kernel: Bytes per second of the kernels with compressed gradients.
    """
    phases = [(row, row.phases) for row in SECONDS if row.phases is not None and row.num_devices in FITTED_DEVICES]
    rows = [row for row, _ in phases]
    channel = 1 / _fit((p[2], _UPDATE_BYTES * _numel(row)) for row, p in phases)
    found = PaperMachine(duplex=duplex, channel=channel, sparse_kernel=sparse_kernel)
    forward = _fit((p[0], _numel(row)) for row, p in phases)
    stored = replace(found, backward=0.0)
    backward = _fit((p[1] - _backward(stored, row), _numel(row), p[1]) for row, p in phases)
    found = replace(found, forward=forward, backward=backward)
    published = [(row.optimized, System.PUBLISHED, row, False) for row in rows]
    found = replace(found, receive=_fit(map(partial(_unexplained, found), published)))
    compressed = [(row.compressed, System.PUBLISHED, row, True) for row in rows]
    found = replace(found, top_k=_fit(map(partial(_unexplained, found), compressed)))
    return replace(found, a100=_fit(_a100(found)))


def _fit(points: Iterable[tuple[float, ...]]) -> float:
    """Return the factor, at least 0, whose products with the units are closest to the seconds.

    Args:
        points: Seconds, units and, optionally, the value to which errors are relative; by default the seconds.
    """
    scaled = np.array([(seconds, units, *(whole or (seconds,))) for seconds, units, *whole in points])
    seconds, units = scaled[:, 0] / scaled[:, 2], scaled[:, 1] / scaled[:, 2]
    return max(0.0, float(seconds @ units / (units @ units)))


def _numel(row: Row) -> float:
    return row.billions * _BILLION


def _backward(machine: PaperMachine, row: Row) -> float:
    """Return the simulated seconds of the baseline's backward."""
    return simulate_step(
        machine.machine(row.num_devices), published_workload(row.billions), System.ZERO_INFINITY
    ).backward


def _unexplained(machine: PaperMachine, point: tuple[float, System, Row, bool]) -> tuple[float, float, float]:
    """Return the point to fit: the seconds of a row that the simulation does not yet explain."""
    seconds, system, row, compressed = point
    simulated = seconds_of(machine, system, row.billions, row.num_devices, compressed=compressed)
    return seconds - simulated, _numel(row), seconds


def _a100(machine: PaperMachine) -> Iterator[tuple[float, float, float]]:
    """Yield the points to fit for an A100: seconds left for the GPU, and the seconds of an A5000."""
    scaling = SCALING["A100"]
    for system, speeds in ((System.ZERO_INFINITY, scaling.baseline), (System.PUBLISHED, scaling.optimized)):
        for num_devices, seconds in zip(scaling.num_devices, scaling.in_seconds(speeds), strict=True):
            if num_devices in FITTED_DEVICES:
                without = seconds_of(replace(machine, a100=0.0), system, scaling.billions, num_devices, gpu="A100")
                gpu = (machine.forward + machine.backward) * scaling.billions * _BILLION
                yield seconds - without, gpu, seconds
