"""Times steps on a device with hooks and without."""

from __future__ import annotations

import time
from collections.abc import Hashable

import torch

from lightning_smartinfinity.activations.store import ActivationStore

__all__ = ["DeviceSteps"]

_NUM_COMPARED = 2  # steps with hooks, and as many without: the first ones take new memory
_SHARE_FREE = 4  # one over the share by which more memory must be free than what is offloaded takes


class DeviceSteps:
    """The steps that are compared: those with hooks, and then as many without, with batches of one kind.

    A step is from the begin of a forward to that of the next one. The host waits for the device there.

    Args:
        store: What knows the devices.

    Attributes:
        num_kinds: Number of times that the kind was another one than before.
    """

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        self._kind: Hashable = None
        self._seconds: list[float] = []
        self._began: float | None = None
        self._has_ended = False
        self._peaks: dict[torch.device, int] = {}  # bytes that were lent at once, which others may reset
        self.num_kinds = 0

    def begin(self, kind: Hashable) -> None:
        """Begin a step, and count the one before if its forward has ended."""
        if kind != self._kind:
            self._kind, self._began = kind, None
            self._seconds.clear()
            self.num_kinds += 1
        self._store.wait_for_devices()
        now = time.perf_counter()
        if self._began is not None and self._has_ended:
            self._seconds.append(now - self._began)
        self._began, self._has_ended = now, False

    def skip(self) -> None:
        """Count neither the step before nor the one that begins now."""
        self._began = None

    def end_forward(self) -> None:
        """Note that the step's forward has ended without an exception. Otherwise it is not counted."""
        self._has_ended = True
        if self._began is not None:
            for device in self._store.devices:
                self._peaks[device] = max(self._peaks.get(device, 0), torch.cuda.max_memory_allocated(device))

    @property
    def have_hooks(self) -> bool:
        """Whether the step that has begun is one of those with hooks."""
        return len(self._seconds) < _NUM_COMPARED

    @property
    def may_be_without(self) -> bool:
        """Whether the devices have room for what was offloaded so far. It is asked before the first step without."""
        return len(self._seconds) != _NUM_COMPARED or self._have_room()

    @property
    def seconds(self) -> tuple[float, float] | None:
        """Time of the fastest step with hooks, and of the fastest without; None until all were timed."""
        if len(self._seconds) < 2 * _NUM_COMPARED:
            return None
        return min(self._seconds[:_NUM_COMPARED]), min(self._seconds[_NUM_COMPARED:])

    def _have_room(self) -> bool:
        offloaded = self._store.most_away_bytes
        for device in self._store.devices:
            free, _ = torch.cuda.mem_get_info(device)
            idle = torch.cuda.memory_reserved(device) - self._peaks.get(device, 0)
            if free + idle < offloaded + offloaded // _SHARE_FREE:
                return False
        return True
