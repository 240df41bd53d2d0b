"""The share of a card's memory that each of several processes takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_smartinfinity import DeviceError
from lightning_smartinfinity.devices.smartssd import CardRing, CardSetup, ring_within, share_of_memory
from tests.helpers.card_runs import setup_of

RING = CardRing(num_buffers=16, gradient_buffer_bytes=4096, parameter_bytes=4096)


def shared(sharers: int, memory_bytes: int | None) -> CardSetup:
    setup = setup_of(1, Path("kernels.xclbin"), sharers=sharers)
    return replace(setup, xclbin=setup.xclbin._replace(memory_bytes=memory_bytes))


@pytest.mark.parametrize("sharers", [2, 3])
def test_even_shares_of_seven_eighths(sharers: int) -> None:
    """Processes share seven eighths of the memory evenly, and the ring shrinks to the buffers that fit.

    The remaining eighth is left to the shell and XRT. A buffer has three parts in whole blocks.
    """
    assert share_of_memory(shared(sharers, sharers * 80_000)) == 70_000
    exact = shared(sharers, sharers * 8 * 5 * 16_384)
    assert share_of_memory(exact) == 7 * 5 * 16_384
    assert ring_within(exact, replace(RING, num_buffers=64), extent_bytes=8192).num_buffers == 35


@pytest.mark.parametrize("memory_bytes", [None, 80_000])
def test_a_card_of_ones_own(memory_bytes: int | None) -> None:
    """A process with a card of its own may take all the memory, even if its size is unknown."""
    assert share_of_memory(shared(1, memory_bytes)) is None
    assert ring_within(shared(1, memory_bytes), RING, extent_bytes=8192) == RING


def test_a_share_of_nobody_knows_what() -> None:
    """Several processes cannot share a card whose memory size is unknown: each would take all of it."""
    for use in (share_of_memory, lambda setup: ring_within(setup, RING, extent_bytes=8192)):
        with pytest.raises(DeviceError, match=r"2 processes share a card, .*kernels\.xclbin.*cards of its own"):
            use(shared(2, None))
