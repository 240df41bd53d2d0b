"""Spreads tasklets over storage folders, and picks free places for the next generation: arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Occupied", "Placement", "apportion", "interleave", "next_placement", "places_needed"]


class Placement(NamedTuple):
    """The places of a generation's extents.

    Args:
        devices: uint16[num_tasklets], index of the storage folder.
        positions: uint32[num_tasklets], index of the place in the folder's file.
    """

    devices: NDArray[np.uint16]
    positions: NDArray[np.uint32]

    def copy(self) -> Placement:
        """Return a placement with copies of the arrays."""
        return Placement(self.devices.copy(), self.positions.copy())

    def after(self, moves: Placement, tasklets: NDArray[np.intp]) -> Placement:
        """Return a copy in which these tasklets have their places of ``moves``."""
        placement = self.copy()
        placement.devices[tasklets] = moves.devices[tasklets]
        placement.positions[tasklets] = moves.positions[tasklets]
        return placement


class Occupied(NamedTuple):
    """Places that are not free.

    Args:
        placement: A place of each tasklet.
        held: bool[num_tasklets]: whether the tasklet's place is occupied.
    """

    placement: Placement
    held: NDArray[np.bool_]


def apportion(weights: Sequence[float], count: int) -> NDArray[np.int64]:
    """Return the number of tasklets of each device, in proportion to its weight.

    Each device gets at least one if there are enough: a device without tasklets would never be measured again.

    Args:
        weights: Weight of each device, above zero.
        count: Number of tasklets.

    Returns:
        int64[num_devices], whose sum is ``count``.
    """
    wanted = np.asarray(weights, np.float64) / np.sum(weights) * count
    counts: NDArray[np.int64] = wanted.astype(np.int64)
    largest_remainders = np.argsort(counts - wanted, kind="stable")
    counts[largest_remainders[: count - counts.sum()]] += 1
    if count >= len(weights):
        for device in np.flatnonzero(counts == 0):
            counts[counts.argmax()] -= 1
            counts[device] = 1
    return counts


def interleave(counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint16]:
    """Assign tasklets to devices so that consecutive tasklets keep all devices busy; round robin if counts are equal.

    Args:
        counts: Number of tasklets of each device.

    Returns:
        uint16[sum(counts)]: the device of each tasklet.
    """
    devices = np.repeat(np.arange(len(counts), dtype=np.uint16), counts)
    # Place each device's tasklets at even distances in [0, 1]; sorting the places mixes the devices.
    moments = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
    return devices[np.lexsort((devices, moments))]


def next_placement(
    current: Placement,
    *,
    lying: NDArray[np.bool_],
    assigned: NDArray[np.uint16],
    capacities: Sequence[int],
    first: int = 0,
    in_place: bool = False,
    pinned: Sequence[Occupied] = (),
) -> Placement:
    """Give every tasklet a free place in the next generation: on its assigned device, or on another if that is full.

    Args:
        current: Places of the current generation.
        lying: bool[num_tasklets]: which tasklets occupy their place; the others have never been written.
        assigned: uint16[num_tasklets], the assigned device of each tasklet.
        capacities: Number of places in each device's file.
        first: Index of the first tasklet on storage.
        in_place: Whether tasklets keep their places and are overwritten there. A tasklet on another device than its
            assigned device still moves to a free place there. ``lying`` is then the same for all tasklets.
        pinned: Other occupied places; only with ``in_place=False``.

    Returns:
        The places. With ``in_place=False``, none of them is currently occupied.
    """
    devices, positions = current.copy()
    on_storage = np.arange(len(assigned)) >= first
    is_there = lying & (devices == assigned)
    moving = on_storage & ~is_there if in_place else on_storage
    free = _free_positions([Occupied(current, on_storage & lying), *pinned], capacities)
    homeless: list[int] = []
    for device, there in enumerate(free):
        (takers,) = np.nonzero(moving & (assigned == device))
        served, left = takers[: len(there)], takers[len(there) :]
        devices[served], positions[served] = device, there[: len(served)]
        free[device] = there[len(served) :]
        homeless += left.tolist()
    for tasklet in homeless:
        if in_place and lying[tasklet]:
            continue  # it stays in its place
        device = max(range(len(free)), key=lambda device: len(free[device]))
        devices[tasklet], positions[tasklet], free[device] = device, free[device][0], free[device][1:]
    return Placement(devices, positions)


def places_needed(
    current: Placement,
    *,
    lying: NDArray[np.bool_],
    assigned: NDArray[np.uint16],
    num_devices: int,
    first: int = 0,
    in_place: bool = False,
) -> list[int]:
    """Return how many places each file needs so that each tasklet always has a free one on its assigned device.

    The arguments are those of :func:`next_placement`.
    """
    on_storage = np.arange(len(assigned)) >= first
    needed = []
    for device in range(num_devices):
        here, there = on_storage & lying & (current.devices == device), on_storage & (assigned == device)
        num_here, num_there, num_either = (int(np.count_nonzero(which)) for which in (here, there, here | there))
        # The current generation occupies num_here places and the next one num_there. Later, both are there.
        needed.append(num_either if in_place else num_there + max(num_here, num_there))
    return needed


def _free_positions(occupied: Sequence[Occupied], capacities: Sequence[int]) -> list[NDArray[np.uint32]]:
    """Return the free positions of each device, ascending."""
    free = []
    for device, capacity in enumerate(capacities):
        is_free = np.ones(capacity, np.bool_)
        for placement, held in occupied:
            is_free[placement.positions[held & (placement.devices == device)]] = False
        free.append(np.flatnonzero(is_free).astype(np.uint32))
    return free
