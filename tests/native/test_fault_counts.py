"""Injected faults are counted where they had an effect, so that a test knows whether its fault happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.native_testing import FaultCounts, inject
from tests.native.test_tensor_store import BLOCK, Setup

FAULTS = ("failed", "shortened", "delayed", "flipped", "misread", "lost")


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    setup = Setup(tmp_path)
    yield setup
    setup.store.close()


def counted(setup: Setup, *, seeds: tuple[int, int] = (1, 2), **faults: int) -> FaultCounts:
    """Write and read two tensors of two blocks over others, and return the counts of faults in that."""
    extents = [setup.written(2 * BLOCK, seed=seed)[0] for seed in (1, 2)]
    counts = inject(setup.store, **faults)
    for extent, seed in zip(extents, seeds, strict=True):
        memory, _ = setup.content(2 * BLOCK, seed=seed)
        setup.store.wait(setup.write(extent, memory))
    for extent in extents:
        setup.found(extent)
    return counts


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("failed", {"fail_read_at": 1}),
        ("failed", {"fail_write_at": 0}),
        ("delayed", {"delay_us": 1}),
        ("flipped", {"flip_read_at": 0}),
        ("misread", {"misread_at": 1}),
        ("lost", {"lose_write_at": 1}),
    ],
)
def test_a_fault_is_counted_where_it_happened(setup: Setup, name: str, faults: dict[str, int]) -> None:
    """Only this fault is counted, once, or for each request if it is in each."""
    counts = counted(setup, seeds=(3, 4), **faults)
    assert (counts.reads, counts.writes) == (2, 2)
    assert {fault: getattr(counts, fault) for fault in FAULTS} == {
        fault: {True: 4 if name == "delayed" else 1, False: 0}[fault == name] for fault in FAULTS
    }


def test_short_transfers_are_counted(setup: Setup) -> None:
    """The rest of a request is a request of its own."""
    counts = counted(setup, short_transfer_every=2)
    assert counts.shortened > 0 and counts.reads + counts.writes == 4 + counts.shortened


@pytest.mark.parametrize("faults", [{}, {"flip_read_at": 2}, {"lose_write_at": 2}, {"fail_read_at": 2}])
def test_a_fault_that_no_request_met_is_not_counted(setup: Setup, faults: dict[str, int]) -> None:
    """There are two reads and two writes, so number 2 never comes."""
    counts = counted(setup, **faults)
    assert (counts.reads, counts.writes) == (2, 2)
    assert not any(getattr(counts, fault) for fault in FAULTS)


def test_a_fault_that_changes_no_byte_is_not_counted(setup: Setup) -> None:
    """A lost write of what lies there already, and a read of an equal block elsewhere, are no faults."""
    assert counted(setup, lose_write_at=0).lost == 0
    extent, (memory, _) = setup.store.allocate(2 * BLOCK), setup.content(2 * BLOCK)
    setup.store.wait(setup.write(extent, memory))
    counts = inject(setup.store, misread_at=0)
    memory, _ = setup.content(BLOCK)
    assert setup.wait_for(setup.read(extent, memory)) is None
    assert (counts.reads, counts.misread) == (1, 0)
