"""Chooses the overlap of a training: the one that the user set, or the fastest in the first steps.

All of them compute the same bits, so a choice by time changes nothing but time.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

__all__ = ["OverlapChoice"]

_log = logging.getLogger(__name__)

# Steps with each candidate: first one affected by cold caches and the previous candidate, then those that count.
_WARM_UP = 1
_MEASURED = 3
# A less simple candidate must take less than this part of the time.
_GAIN = 0.97
# The candidates of "auto", the simplest first. "none" is not among them: measured from 6 % slower than "forward" to 4 %
# faster (docs/performance.md, 124M), it seldom repays the steps in which it would be tried.
_CANDIDATES = ("forward", "backward")


class OverlapChoice:
    """The overlap of every step, the same on all ranks.

    Args:
        setting: ``"none"``, ``"forward"``, ``"backward"`` or ``"auto"``.
        obstacle: Why no update may begin in backward; None if it may. With an obstacle, ``"backward"`` becomes
            ``"forward"``, and ``"auto"`` does not try it.

    Attributes:
        mode: The overlap of the next step.
    """

    def __init__(self, setting: str, *, obstacle: str | None = None) -> None:
        candidates: tuple[str, ...] = _CANDIDATES if setting == "auto" else (setting,)
        if obstacle is not None and "backward" in candidates:
            _report_obstacle(setting, obstacle)
            candidates = tuple(dict.fromkeys("forward" if name == "backward" else name for name in candidates))
        self._candidates = candidates
        self._tried = 0
        self._last: float | None = None
        self._seconds: list[float] = []
        self._shortest: list[float] = []
        self.mode = self._candidates[0]

    def step_begins(self, now: float, *, sum_over_ranks: Callable[[float], float]) -> None:
        """Record that a step begins. All ranks call this once per step; collective when a candidate is done.

        Args:
            now: Time in seconds.
            sum_over_ranks: Function that returns the sum of a number over all ranks.
        """
        if len(self._candidates) == 1:
            return
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now
        if len(self._seconds) < _WARM_UP + _MEASURED:
            return
        # The shortest, since whatever comes between two steps, such as a validation, makes them longer.
        self._shortest.append(sum_over_ranks(min(self._seconds[_WARM_UP:])))
        self._seconds.clear()
        self._tried += 1
        if self._tried < len(self._candidates):
            self.mode = self._candidates[self._tried]
        else:
            self._choose()

    def _choose(self) -> None:
        best = 0
        for index in range(1, len(self._candidates)):
            if self._shortest[index] < _GAIN * self._shortest[best]:
                best = index
        measured = ", ".join(
            f"{name} {value:.4g} s" for name, value in zip(self._candidates, self._shortest, strict=True)
        )
        self.mode = self._candidates[best]
        self._candidates = (self.mode,)
        _log.info("overlap='auto': %s from now on; steps took, summed over processes: %s.", self.mode, measured)


def _report_obstacle(setting: str, obstacle: str) -> None:
    if setting == "auto":
        _log.info("overlap='auto' does not try 'backward': %s.", obstacle)
    else:
        warnings.warn(f"overlap='backward' works as 'forward': {obstacle}.", stacklevel=3)
