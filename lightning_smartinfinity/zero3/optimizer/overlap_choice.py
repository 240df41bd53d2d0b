"""Chooses the overlap of a training: the user's setting, or the one that is fastest in the first steps.

All overlaps compute the same bits, so choosing by time changes no results.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

__all__ = ["OverlapChoice"]

_log = logging.getLogger(__name__)

# Steps with each candidate: first one affected by cold caches and the previous candidate, then the measured ones.
_WARM_UP = 1
_MEASURED = 3
# A candidate replaces a simpler one only if it takes less than this fraction of the simpler one's time.
_GAIN = 0.97
# The candidates of "auto", the simplest first. "none" is left out: it measured between 6 % slower and 4 % faster than
# "forward" (docs/performance.md, 124M), so it seldom repays the steps needed to try it.
_CANDIDATES = ("forward", "backward")
# After this many steps without an announcement before their backward, none is expected. One such step proves nothing: a
# loop that announces steps calls no backward for the last micro-batch of a window if it has no loss.
_PATIENCE = 2
_NOBODY_TELLS = (
    "no caller announces before a backward that a step follows it. Manual optimization cannot; in Fabric call "
    "optimizer.engine.set_gradient_accumulation_boundary(True) before the last backward of each step"
)


class OverlapChoice:
    """The overlap of every step, the same on all ranks.

    Args:
        setting: ``"none"``, ``"forward"``, ``"backward"`` or ``"auto"``.
        obstacle: Why no update may begin in backward; None if it may. With an obstacle, ``"backward"`` becomes
            ``"forward"``, and ``"auto"`` does not try ``"backward"``. The first steps also reveal an obstacle if no
            caller announces that a step follows a backward.
        unmeasured: Number of first steps that are not measured, because another setting is being chosen in them.

    Attributes:
        mode: The overlap of the next step.
    """

    def __init__(self, setting: str, *, obstacle: str | None = None, unmeasured: int = 0) -> None:
        self._setting = setting
        self._unmeasured = unmeasured
        self._candidates: tuple[str, ...] = _CANDIDATES if setting == "auto" else (setting,)
        # Whether a caller has ever announced that a step follows. Until then: False in a window with a backward, None
        # in a window without one.
        self._told: bool | None = None
        self._num_untold = 0
        self._tried = 0
        self._last: float | None = None
        self._seconds: list[float] = []
        self._shortest: list[float] = []
        self.mode = self._candidates[0]
        if obstacle is not None:
            self._rule_backward_out(obstacle)

    @property
    def is_announced(self) -> bool:
        """Whether a caller has ever announced that a step follows a backward."""
        return bool(self._told)

    def backward_begins(self, *, step_follows: bool) -> bool:
        """Record that a backward begins, and return whether the update of a step may begin within it.

        Args:
            step_follows: Whether the caller announced that a step follows this backward; the same on all ranks.
        """
        self._told = self._told or step_follows
        return step_follows and self.mode == "backward"

    def step_begins(self, now: float, *, sum_over_ranks: Callable[[float], float]) -> None:
        """Record that a step begins. All ranks call this once per step; collective when a candidate is done.

        Args:
            now: Time in seconds.
            sum_over_ranks: Function that returns the sum of a number over all ranks.
        """
        if self._told is False:
            self._told = None
            self._num_untold += 1
            if self._num_untold == _PATIENCE:
                self._rule_backward_out(_NOBODY_TELLS)
        if len(self._candidates) == 1:
            return
        if self._unmeasured:
            self._unmeasured -= 1
            return
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now
        if len(self._seconds) < _WARM_UP + _MEASURED:
            return
        # The shortest, because other work between two steps, such as a validation, makes them longer.
        self._shortest.append(sum_over_ranks(min(self._seconds[_WARM_UP:])))
        self._seconds.clear()
        self._tried += 1
        if self._tried < len(self._candidates):
            self.mode = self._candidates[self._tried]
        else:
            self._choose()

    def _rule_backward_out(self, obstacle: str) -> None:
        if "backward" not in self._candidates:
            return
        if self._setting == "auto":
            _log.info("overlap='auto' does not try 'backward': %s.", obstacle)
        else:
            warnings.warn(f"overlap='backward' works as 'forward': {obstacle}.", stacklevel=4)
        self._candidates = ("forward",)
        self.mode = "forward"

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
