from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.native.cuda_fixture import fake_cuda
from tests.xrt.api import Device, opened
from tests.xrt.cards import EmulatedCards
from tests.xrt.fixtures import emulated_cards, emulated_cards_of_process, hold, pyxrt
from tests.xrt.probe import Probe

__all__ = ["emulated_cards", "emulated_cards_of_process", "fake_cuda", "hold", "pyxrt"]


@pytest.fixture
def devices(emulated_cards: EmulatedCards) -> Iterator[list[Device]]:
    """Both cards, with the kernel of ``probe_kernel.cpp``."""
    xclbin = emulated_cards.build.probe_xclbin
    with opened(0, xclbin) as first, opened(1, xclbin) as second:
        yield [first, second]


@pytest.fixture
def probes(emulated_cards: EmulatedCards, devices: list[Device]) -> Iterator[list[Probe]]:
    """Buffers on both cards; runs that hang are released at the end."""
    probes = [Probe(device) for device in devices]
    yield probes
    emulated_cards.reset()
    for probe in probes:
        probe.free()


@pytest.fixture
def probe(probes: list[Probe]) -> Probe:
    """Buffers on card 0."""
    return probes[0]
