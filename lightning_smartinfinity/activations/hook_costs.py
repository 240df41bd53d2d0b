"""Finds out whether the hooks themselves take too much time."""

from __future__ import annotations

import logging
from collections.abc import Hashable

import torch

from lightning_smartinfinity.activations.cuda.steps import DeviceSteps
from lightning_smartinfinity.activations.forwards import Forward
from lightning_smartinfinity.activations.lessons import MOST_LOST, Lessons
from lightning_smartinfinity.activations.store import ActivationStore

__all__ = ["HookCosts"]

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
