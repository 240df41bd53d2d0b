"""The emulated SmartSSD itself, through XRT's C API, with the kernel of ``probe_kernel.cpp``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.helpers.runif import RunIf
from tests.xrt.api import Buffer, Device, Flags, Run, State, opened
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)

BEATS = 64
BYTES = 64 * BEATS


@dataclass
class Probe:
    """The probe kernel's buffers on one card: ``data += gradient; parameter = data * scale``, by beats."""

    device: Device
    gradient: Buffer = field(init=False)
    data: Buffer = field(init=False)
    parameter: Buffer = field(init=False)
    status: Buffer = field(init=False)

    def __post_init__(self) -> None:
        self.gradient, self.parameter = (Buffer(self.device, BYTES) for _ in range(2))
        self.data = Buffer(self.device, BYTES, Flags.P2P)
        self.status = Buffer(self.device, 64)
        self.runs: list[Run] = []
        _floats(self.gradient)[:] = 2
        _floats(self.data)[:] = 1
        self.gradient.upload()

    def run(self, *, unit: int = 1, first: int = 0, last: int = BEATS, **buffers: Buffer) -> Run:
        """Starts a run; buffers given by name stand in for its own."""
        used = {"gradient": self.gradient, "data_in": self.data, "data_out": self.data}
        used |= {"parameter": self.parameter, "status": self.status} | buffers
        scale = int(np.float32(0.5).view(np.uint32))
        run = Run(self.device, f"probe:{{probe_{unit}}}", [*used.values(), 0, first, last, 0, 0, 0, scale])
        self.runs.append(run)
        run.start()
        return run

    def free(self) -> None:
        for run in self.runs:
            run.close()
        for buffer in (self.gradient, self.data, self.parameter, self.status):
            buffer.free()


@pytest.fixture
def devices(emulated_cards: EmulatedCards) -> Iterator[list[Device]]:
    """Both cards."""
    xclbin = emulated_cards.build.probe_xclbin
    with opened(0, xclbin) as first, opened(1, xclbin) as second:
        yield [first, second]


@pytest.fixture
def probe(emulated_cards: EmulatedCards, devices: list[Device]) -> Iterator[Probe]:
    """Buffers on card 0."""
    probe = Probe(devices[0])
    yield probe
    emulated_cards.reset()
    probe.free()


def test_run_computes_in_the_cards_memory(probe: Probe) -> None:
    """A P2P buffer needs no sync; outputs appear in the host's memory by a sync."""
    assert probe.run().wait() is State.COMPLETED
    probe.parameter.download()
    assert (_floats(probe.data) == 3).all()
    assert (_floats(probe.parameter) == 1.5).all()


def _floats(buffer: Buffer) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return buffer.map().view(np.float32)
