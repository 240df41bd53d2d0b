"""The arguments of the kernels of ``hls/`` arrive where they belong on an emulated card.

``tests/hls`` compares their results with references.
"""

from __future__ import annotations

import numpy as np
import pytest

from hls.description import INTERFACE_VERSION, KERNELS, STATUS_MAGIC, Kernel
from tests.helpers.runif import RunIf
from tests.xrt.api import Flags, Run, State, opened
from tests.xrt.cards import EmulatedCards
from tests.xrt.probe import floats

pytestmark = RunIf(xrt=True)

NUMEL = 1024


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernel_updates_its_arrays_in_place(emulated_cards: EmulatedCards, kernel: Kernel) -> None:
    """With all scalars of the step 0 but decay and eps, every rule keeps the master weights and copies them out."""
    with opened(0, emulated_cards.build.xclbin) as card:
        ring = card.allocate(4 * NUMEL * len(kernel.arrays), Flags.P2P)
        arrays = [ring.part(4 * NUMEL, 4 * NUMEL * index) for index in range(len(kernel.arrays))]
        gradient, parameter = card.allocate(4 * NUMEL), card.allocate(4 * NUMEL)
        status = card.allocate(64)
        floats(ring)[:] = 0
        floats(ring)[:NUMEL] = np.arange(NUMEL)
        floats(gradient)[:] = 1
        gradient.upload()
        scalars = {"numel": NUMEL, "last": NUMEL, "active": 1} | {"decay": _bits(1), "eps": _bits(1)}
        words = [scalars.get(argument.name, 0) for argument in kernel.arguments if not argument.is_pointer]
        run = Run(card, kernel.name, [gradient, *arrays, *arrays, parameter, status, *words])
        run.start()
        assert run.wait() is State.COMPLETED, emulated_cards.events("run-end")
        parameter.download()
        status.download()
        version_and_kernel = INTERFACE_VERSION | kernel.number << 16
        assert status.map().view(np.uint32)[:4].tolist() == [STATUS_MAGIC, version_and_kernel, NUMEL, 0]
        assert (floats(parameter) == np.arange(NUMEL)).all()
        run.close()
        for buffer in (*arrays, ring, gradient, parameter, status):
            buffer.free()


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))
