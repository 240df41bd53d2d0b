"""Describes the kernel of ``probe_kernel.cpp`` as those for the card, and provides buffers to run it on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hls.description import SMARTSSD, ComputeUnit, Design, Kernel
from tests.xrt.api import Buffer, Device, Flags, Run

__all__ = ["BEATS", "BYTES", "PROBE", "PROBE_DESIGN", "Probe", "floats"]

PROBE = Kernel("probe", number=9, arrays=("data",), words=("scale",))
PROBE_DESIGN = Design(SMARTSSD.platform, (ComputeUnit(PROBE, "probe_1"), ComputeUnit(PROBE, "probe_2")))

BEATS = 64
"""Length of a probe's buffers."""
BYTES = 64 * BEATS


@dataclass
class Probe:
    """Buffers on one card, and runs on them: ``data += gradient; parameter = data * 0.5``.

    The gradient is 2 and the data are 1 at first. ``data`` is a P2P buffer, the others are synced.
    """

    device: Device
    gradient: Buffer = field(init=False)
    data: Buffer = field(init=False)
    parameter: Buffer = field(init=False)
    status: Buffer = field(init=False)

    def __post_init__(self) -> None:
        self.gradient, self.parameter = (self.device.allocate(BYTES) for _ in range(2))
        self.data = self.device.allocate(BYTES, Flags.P2P)
        self.status = self.device.allocate(64)
        self._runs: list[Run] = []
        self._own = [self.gradient, self.data, self.parameter, self.status]
        floats(self.gradient)[:] = 2
        floats(self.data)[:] = 1
        self.gradient.upload()

    def buffer(self, size: int, flags: Flags = Flags.NORMAL) -> Buffer:
        """Return one more buffer, which is freed with the others."""
        self._own.append(self.device.allocate(size, flags))
        return self._own[-1]

    def prepare(self, *, unit: str = "probe:{probe_1}", last: int = BEATS, **buffers: Buffer) -> Run:
        """Return a run over beats [0, last); ``gradient``, ``data`` and so on replace the probe's own buffers."""
        used = {"gradient": self.gradient, "data": self.data, "parameter": self.parameter, "status": self.status}
        used |= buffers
        pointers = [used["gradient"], used["data"], used["data"], used["parameter"], used["status"]]
        scale = int(np.float32(0.5).view(np.uint32))
        self._runs.append(Run(self.device, unit, [*pointers, 0, 0, last, 0, 0, 0, scale]))
        return self._runs[-1]

    def run(self, *, unit: str = "probe:{probe_1}", last: int = BEATS, **buffers: Buffer) -> Run:
        """Prepare a run as :meth:`prepare` does, and start it."""
        run = self.prepare(unit=unit, last=last, **buffers)
        run.start()
        return run

    def free(self) -> None:
        """Free all that this probe made."""
        for run in self._runs:
            run.close()
        for buffer in self._own:
            buffer.free()


def floats(buffer: Buffer) -> NDArray[np.float32]:
    """Return the host's memory of a buffer."""
    return buffer.map().view(np.float32)
