"""Finds out whether the hooks themselves take too much time."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable

import torch

from lightning_smartinfinity.activations.forwards import Forward
from lightning_smartinfinity.activations.lessons import MOST_LOST, Lessons
from lightning_smartinfinity.activations.store import ActivationStore

__all__ = ["HookCosts"]

_NUM_COMPARED = 2  # steps with hooks, and as many without: the first ones take new memory
_MOST_KINDS = 32
_SHARE_FREE = 4  # one over the share by which more memory must be free than what is offloaded takes

_log = logging.getLogger(__name__)


class HookCosts:
    """Finds out for each kind of forward whether it is to have hooks, where offloading is to cost no time.

    On a processor their time is taken in the forward that keeps everything, and in its backward.

    A device computes while the host is ahead of it. If its work takes less time than the host needs to give it that
    work, as with small models, each hook makes a step longer, whether its tensor leaves or stays. So steps are timed
    with hooks and without, from the begin of a forward to that of the next one, if the device's memory has room for all
    that would be offloaded.

    Args:
        lessons: What has chosen how much is offloaded.
        store: Where it goes.
    """

    def __init__(self, lessons: Lessons, store: ActivationStore) -> None:
        self._lessons, self._store = lessons, store
        self._decided: dict[Hashable, bool] = {}
        self._kind: Hashable = None
        self._seconds: list[float] = []
        self._began: float | None = None
        self._has_ended = False
        self._num_kinds = 0
        self._peaks: dict[torch.device, int] = {}  # bytes that were lent at once, which others may reset

    def learn(self, last: Forward) -> None:
        """Learn from a forward that kept everything on a processor, if its backward has come."""
        if last.kind is None or last.limit or not (last.order and last.hook_seconds and self._lessons.follows_rates):
            return
        if self._store.is_on_processor and last.ended is not None:
            self._compare(last.kind, last.seconds, last.seconds - last.hook_seconds)

    def want_hooks(self, kind: Hashable) -> bool:
        """Return whether a forward that begins now is to have hooks.

        While steps are timed, the host waits for the device here.

        Args:
            kind: What determines the sizes of saved tensors, as far as that is known.
        """
        has_ended, self._has_ended = self._has_ended, False
        if kind in self._decided:
            self._began = None
            return self._decided[kind]
        if not self._lessons.follows_rates or self._store.is_on_processor or not self._lessons.plan.is_chosen:
            return True
        if self._num_kinds > _MOST_KINDS:  # they follow each other too fast
            return True
        if not torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing():
            self._began = None
            return True
        if kind != self._kind:
            self._kind, self._began = kind, None
            self._seconds.clear()
            self._num_kinds += 1
        self._store.wait_for_devices()
        now = time.perf_counter()
        if self._began is not None and has_ended:
            self._seconds.append(now - self._began)
        self._began = now
        if len(self._seconds) == _NUM_COMPARED and not self._has_room():
            return self._decide(kind, wants_hooks=True)
        if len(self._seconds) < 2 * _NUM_COMPARED:
            return len(self._seconds) < _NUM_COMPARED
        return self._compare(kind, min(self._seconds[:_NUM_COMPARED]), min(self._seconds[_NUM_COMPARED:]))

    def _compare(self, kind: Hashable, with_hooks: float, without: float) -> bool:
        wants_hooks = MOST_LOST * (with_hooks - without) <= without
        if not wants_hooks:
            _log.warning(
                "Offloading what forward saves does not pay: a step takes %.3f s with it and %.3f s without. So "
                "everything stays where it is. Set keep or budget_bytes of ActivationOffload to offload it anyway.",
                with_hooks,
                without,
            )
        return self._decide(kind, wants_hooks=wants_hooks)

    def end(self) -> None:
        """Note that the forward has ended without an exception. Otherwise its step is not counted."""
        self._has_ended = True
        if self._began is not None:
            for device in self._store.devices:
                self._peaks[device] = max(self._peaks.get(device, 0), torch.cuda.max_memory_allocated(device))

    def _decide(self, kind: Hashable, *, wants_hooks: bool) -> bool:
        self._decided[kind] = wants_hooks
        return wants_hooks

    def _has_room(self) -> bool:
        """Return whether each device has room for what was offloaded so far, beside the most that it ever held."""
        offloaded = self._store.most_away_bytes
        for device in self._store.devices:
            free, _ = torch.cuda.mem_get_info(device)
            idle = torch.cuda.memory_reserved(device) - self._peaks.get(device, 0)
            if free + idle < offloaded + offloaded // _SHARE_FREE:
                return False
        return True
