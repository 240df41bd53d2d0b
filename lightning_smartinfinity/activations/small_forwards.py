"""Tells which forwards save nothing that could be offloaded, so that hooks would only take time."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["SmallForwards"]

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
