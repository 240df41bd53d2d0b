"""Decides which forwards have hooks, from measured times with hooks and without."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable

import torch

from lightning_smartinfinity.activations.forwards import Forward
from lightning_smartinfinity.activations.store import ActivationStore
from lightning_smartinfinity.activations.tuning.times import MOST_LOST, Times
from lightning_smartinfinity.activations.tuning.tuner import Tuner

__all__ = ["HookChoice"]

_NUM_COMPARED = 2  # steps with hooks, and as many without: the first ones allocate new memory
_MOST_KINDS = 32  # changes of the kind; if kinds change more often, the host waits for the device too often
_SHARE_FREE = 4  # one over the share by which free memory must exceed what is offloaded
_MANY = 1000  # tensors, whose hooks take milliseconds
_NUM_SKIPPED = 31  # forwards without hooks between two with hooks

_log = logging.getLogger(__name__)


class HookChoice:
    """Decides for each kind of forward whether it has hooks. The kind is what is known of the sizes of saved tensors.

    Where offloading must cost no time, times with hooks and without decide, once for each kind:

    - On a processor, these are the times of the forward that keeps everything, with the time of its hooks and without.
    - On a device, these are the times of whole steps, if device memory has room for everything that is offloaded. The
      host runs ahead of the device. If the device needs less time for its work than the host needs to launch it, as
      with small models, each hook makes a step longer, even if its tensor is not offloaded.

    Hooks of a forward that saves many tiny tensors and no entry only cost time. The forwards of that kind that follow
    have no hooks. Some have hooks nevertheless, because equal batches may save tensors of other sizes.

    Args:
        tuner: Decides how much is offloaded.
        store: Store of the entries.
    """

    def __init__(self, tuner: Tuner, store: ActivationStore) -> None:
        self._tuner, self._store = tuner, store
        self._decided: dict[Hashable, bool] = {}
        self._small_kind: Hashable = None  # last kind that saved many tiny tensors and no entry
        self._num_skipped = 0
        # Steps that are compared on devices. A step ends when the next forward begins.
        self._times = Times()
        self._kind: Hashable = None
        self._num_kinds = 0
        self._began: float | None = None  # None if the step is not compared
        self._has_ended = False  # whether the forward has ended without an exception
        self._peaks: dict[torch.device, int] = {}  # most allocated bytes, since others may reset torch's number

    def learn(self, last: Forward) -> None:
        """Decide from a forward that kept everything on a processor, if its backward has run."""
        if last.kind is None or last.limit or not (last.order and last.hook_seconds and self._tuner.follows_rates):
            return
        if self._store.is_on_processor and last.ended is not None:
            self._decide(last.kind, Times([last.seconds], [last.seconds_without_hooks]))

    def begin_forward(self, kind: Hashable) -> bool:
        """Begin a forward, and return whether it has hooks. While steps are compared, this waits for the devices."""
        is_skipped = kind is not None and kind == self._small_kind and self._num_skipped < _NUM_SKIPPED
        if not is_skipped:
            self._small_kind = None
            if kind is not None and kind not in self._decided and self._compares_steps():
                return self._begin_step(kind)
        self._num_skipped += is_skipped
        self._began = None
        return not is_skipped and self._decided.get(kind, True)

    def end_forward(self, last: Forward | None = None, *, num_passed: int = 0) -> None:
        """Note that a forward has ended without an exception. The step of any other forward is not compared.

        Args:
            last: Record of the forward, if it had hooks.
            num_passed: Number of tensors that passed through its hooks.
        """
        self._has_ended = True
        if self._began is not None:
            for device in self._store.devices.names():
                self._peaks[device] = max(self._peaks.get(device, 0), torch.cuda.max_memory_allocated(device))
        # With a budget every forward has hooks, because the budget could not be enforced without.
        if last is not None and not last.sizes and num_passed >= _MANY and not self._tuner.has_budget:
            self._small_kind, self._num_skipped = last.kind, 0

    def _compares_steps(self) -> bool:
        return (
            self._tuner.follows_rates
            and self._tuner.plan.is_chosen
            and not self._store.is_on_processor
            and self._num_kinds <= _MOST_KINDS
            and torch.is_grad_enabled()
            and not torch.cuda.is_current_stream_capturing()
        )

    def _begin_step(self, kind: Hashable) -> bool:
        if kind != self._kind:
            self._kind, self._began, self._times = kind, None, Times()
            self._num_kinds += 1
        self._store.devices.wait()
        now, times = time.perf_counter(), self._times
        if self._began is not None and self._has_ended:
            (times.offloading if len(times.offloading) < _NUM_COMPARED else times.plain).append(now - self._began)
        self._began, self._has_ended = now, False
        if len(times.plain) == _NUM_COMPARED:
            self._decide(kind, times)
        elif len(times.offloading) == _NUM_COMPARED and not times.plain and not self._have_room():
            self._decided[kind] = True
        return self._decided.get(kind, len(times.offloading) < _NUM_COMPARED)

    def _have_room(self) -> bool:
        """Return whether the devices have room for the most bytes that were offloaded at once."""
        offloaded = self._store.eviction.most_evicted
        for device in self._store.devices.names():
            free, _ = torch.cuda.mem_get_info(device)
            idle = torch.cuda.memory_reserved(device) - self._peaks.get(device, 0)
            if free + idle < offloaded + offloaded // _SHARE_FREE:
                return False
        return True

    def _decide(self, kind: Hashable, times: Times) -> None:
        self._decided[kind] = MOST_LOST * times.excess <= 1
        if not self._decided[kind]:
            _log.warning(
                "Offloading what forward saves does not pay: a step takes %.3f s with it and %.3f s without. So "
                "everything stays where it is. Set keep or budget_bytes of ActivationOffload to offload it anyway.",
                min(times.offloading),
                min(times.plain),
            )
