"""Measures whether hooks take longer than they save, and skips those of forwards too small to offload."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable

import torch

from lightning_smartinfinity.activations.forwards import Forward
from lightning_smartinfinity.activations.store import ActivationStore
from lightning_smartinfinity.activations.tuning.learning import MOST_LOST, Lessons

__all__ = [
    "DeviceSteps",
    "HookCosts",
    "SmallForwards",
]


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


_MOST_KINDS = 32

_log = logging.getLogger(__name__)


class HookCosts:
    """Finds out for each kind of forward whether it is to have hooks, where offloading is to cost no time.

    On a processor their time is taken in the forward that keeps everything, and in its backward.

    A device computes while the host is ahead of it. If its work takes less time than the host needs to give it that
    work, as with small models, each hook makes a step longer, whether its tensor leaves or stays. So steps with hooks
    are compared with steps without, if the device's memory has room for all that would be offloaded.

    Args:
        lessons: What has chosen how much is offloaded.
        store: Where it goes.
    """

    def __init__(self, lessons: Lessons, store: ActivationStore) -> None:
        self._lessons, self._store = lessons, store
        self._decided: dict[Hashable, bool] = {}
        self._steps = DeviceSteps(store)

    def learn(self, last: Forward) -> None:
        """Learn from a forward that kept everything on a processor, if its backward has come."""
        if last.kind is None or last.limit or not (last.order and last.hook_seconds and self._lessons.follows_rates):
            return
        if self._store.is_on_processor and last.ended is not None:
            self._decide(last.kind, last.seconds, last.seconds - last.hook_seconds)

    def begin_forward(self, kind: Hashable) -> bool:
        """Begin a forward, and return whether it is to have hooks.

        While steps are timed, the host waits for the device here.

        Args:
            kind: What determines the sizes of saved tensors, as far as that is known.
        """
        if kind in self._decided or not self._compares_steps():
            self._steps.skip()
            return self._decided.get(kind, True)
        self._steps.begin(kind)
        if not self._steps.may_be_without:
            self._decided[kind] = True
        elif (seconds := self._steps.seconds) is not None:
            self._decide(kind, *seconds)
        return self._decided.get(kind, self._steps.have_hooks)

    def end_forward(self) -> None:
        """Note that the forward has ended without an exception. Otherwise its step is not counted."""
        self._steps.end_forward()

    def _compares_steps(self) -> bool:
        """Return whether the step that begins now may be compared with others."""
        return (
            self._lessons.follows_rates
            and self._lessons.plan.is_chosen
            and not self._store.is_on_processor
            and self._steps.num_kinds <= _MOST_KINDS  # otherwise they follow each other too fast
            and torch.is_grad_enabled()
            and not torch.cuda.is_current_stream_capturing()
        )

    def _decide(self, kind: Hashable, with_hooks: float, without: float) -> None:
        self._decided[kind] = MOST_LOST * (with_hooks - without) <= without
        if not self._decided[kind]:
            _log.warning(
                "Offloading what forward saves does not pay: a step takes %.3f s with it and %.3f s without. So "
                "everything stays where it is. Set keep or budget_bytes of ActivationOffload to offload it anyway.",
                with_hooks,
                without,
            )


_MANY = 1000  # tensors, whose hooks take milliseconds
_NUM_UNSEEN = 31  # forwards without hooks between two with hooks


class SmallForwards:
    """Remembers the last kind of forward that saved many tensors and no entry.

    Hooks of Python take longer than the operation that saves a tiny tensor. Without hooks autograd keeps its tensors
    itself, and looks for changes itself. Equal batches may save tensors of other sizes, if what a model does depends on
    values, so that some forwards have hooks nevertheless.

    Args:
        skips: Whether hooks may be left out at all. With a budget they may not, since nothing would be held to it.
    """

    def __init__(self, *, skips: bool) -> None:
        self._skips = skips
        self._kind: Hashable = None
        self._num_unseen = 0

    def begin_forward(self, kind: Hashable) -> bool:
        """Begin a forward, and return whether it needs hooks.

        Args:
            kind: What determines the sizes of saved tensors, as far as that is known.
        """
        if kind != self._kind or self._num_unseen == _NUM_UNSEEN:
            self._kind = None
            return True
        self._num_unseen += 1
        return False

    def learn(self, kind: Hashable, *, num_passed: int) -> None:
        """Learn from a forward with hooks that has saved no entry.

        Args:
            kind: Its kind.
            num_passed: Number of tensors that passed through.
        """
        if self._skips and num_passed >= _MANY:
            self._kind, self._num_unseen = kind, 0
