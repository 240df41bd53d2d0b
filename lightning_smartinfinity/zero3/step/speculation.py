"""Updates that begin within backward, before it is known that the step will be taken.

With ``overlap="backward"`` a tasklet is updated as soon as the gradients of all its parameters are there and no module
computes with them any more. That is a guess: a step is skipped if any gradient is not finite, clipping scales all of
them once the norm is known, another backward may come. Where the guess was wrong the update is undone, bit for bit,
from the places that the step before left alone, and the step is taken as without overlap.

Guesses are right or wrong on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from lightning_smartinfinity.errors import ConfigError, SmartInfinityError
from lightning_smartinfinity.transfer.step_plan import StepPlan

__all__ = ["Hysteresis", "Speculation"]


class Hysteresis:
    """Whether to guess again: not for a while once guessing has lost, and for longer each time.

    A right guess hides one update within backward at most; a wrong one costs at least another. So guessing loses where
    more than half of the guesses are wrong. The count of wrong guesses less right ones, never below zero, rises in the
    long run just then, in whatever order they come.

    Args:
        patience: The count at which a pause begins.
        first_pause: Windows that the first pause takes.
        longest_pause: Windows that any pause takes at most.
    """

    def __init__(self, *, patience: int = 3, first_pause: int = 16, longest_pause: int = 1024) -> None:
        self._patience = patience
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._lost = 0
        self._pause = first_pause
        self._left = 0

    def allows(self) -> bool:
        """Asked once in each window."""
        if self._left > 0:
            self._left -= 1
            return False
        return True

    def was_right(self) -> None:
        """The last guess was."""
        if self._lost > 0:
            self._lost -= 1
        else:
            self._pause = max(self._pause // 2, self._first_pause)

    def was_wrong(self) -> None:
        """The last guess was not."""
        self._lost += 1
        if self._lost >= self._patience:
            # One wrong guess after the pause is enough for the next.
            self._lost = self._patience - 1
            self._left, self._pause = self._pause, min(2 * self._pause, self._longest_pause)


class Speculation:
    """One optimizer's guesses, from backward to the step.

    Args:
        optimizer: A :class:`SmartInfinityOptimizer`.
        enabled: Whether there are any.
    """

    def __init__(self, optimizer: Any, *, enabled: bool) -> None:
        self._optimizer = optimizer
        self._enabled = enabled
        self._hysteresis = Hysteresis()
        self._on = False
        self._failed = False
        # Parameters whose gradient has come in this backward, and those of them that nobody computes with any more.
        self._arrived: dict[int, Any] = {}
        self._complete: set[int] = set()
        # Of each tasklet: how many of its parameters are not complete.
        self._missing: list[int] = []
        self.num_right = 0
        self.num_wrong = 0

    @property
    def on(self) -> bool:
        """An update has begun that the step may take."""
        return self._on

    def backward_begins(self, plan: StepPlan | None) -> None:
        """The engine's backward begins.

        Args:
            plan: The step as it will be unless the guess is wrong, every parameter active; None: it is not the last
                backward of its window, or nothing is known about it.
        """
        self.lose()
        if plan is None or not self._enabled or not self._hysteresis.allows():
            return
        self._optimizer.update.settle()
        self._arrived, self._complete, self._failed = {}, set(), False
        self._missing = self._optimizer.layout.num_parameters_in.tolist()
        self._on = True
        try:
            self._handler.begin_incremental(plan)
        except SmartInfinityError:
            # The other ranks go on with this backward. The step cannot begin, either, and says so to all of them.
            self._failed = True

    def arrived(self, params: Iterable[Any]) -> None:
        """Their gradients, as far as this backward goes, are in the arena."""
        if self._on:
            arrived = {self._optimizer.parameter_index[param.ds_id]: param for param in params}
            self._arrived |= arrived
            self._open(arrived)

    def before_use(self, params: Iterable[Any]) -> None:
        """Somebody is about to read these parameters or to write their gradients: none may have been updated."""
        if self._on and any(self.holds(param) for param in params):
            self.lose()

    def holds(self, param: Any) -> bool:
        """Whether the parameter may have been updated, alike on all ranks."""
        return self._on and self._optimizer.parameter_index.get(param.ds_id) in self._complete

    def open(self) -> None:
        """Begin what can be: called when modules have released parameters."""
        if self._on:
            self._open(self._arrived)

    def _open(self, arrived: Mapping[int, Any]) -> None:
        ready: list[int] = []
        # In one process on a CPU a gathered parameter is its partition.
        free = [(index, param) for index, param in arrived.items() if not param.ds_active_sub_modules]
        for index, param in free:
            _part_from_partition(param)
            del self._arrived[index]
            self._complete.add(index)
            for tasklet in self._optimizer.layout.tasklets_of(slice(index, index + 1)):
                self._missing[tasklet] -= 1
                if self._missing[tasklet] == 0:
                    ready.append(tasklet)
        if ready and not self._failed:
            try:
                self._handler.step.extend(ready)
            except SmartInfinityError:
                # Undone with the guess, or met again by the step, which all ranks take together.
                self._failed = True

    def lose(self) -> None:
        """The guess was wrong, if there was one: undo it. Never raises StorageError.

        After Ctrl-C in the middle of it, call it again.
        """
        if not self._on:
            return
        self._optimizer.rank_state.abandon_step(_WRONG)
        self._on = False
        self._hysteresis.was_wrong()
        self.num_wrong += 1

    def take(self, plan: StepPlan) -> bool:
        """Make the guess the step, if it was right; else undo it.

        Returns:
            Whether the step is in flight.

        Raises:
            ConfigError: A hyperparameter is out of range; nothing is in flight.
        """
        if not self._on:
            return False
        if not self._handler.in_flight:
            self._on = False
            return False
        try:
            right = self._handler.step.complete(plan)
        except ConfigError:
            self.lose()
            raise
        except SmartInfinityError:
            # It has failed, and says so to whoever waits: to the settlement, on all ranks.
            right = True
        if not right:
            self.lose()
            return False
        self._on = False
        self._hysteresis.was_right()
        self.num_right += 1
        return True

    @property
    def _handler(self) -> Any:
        return self._optimizer.rank_state.handler


def _part_from_partition(param: Any) -> None:
    # What ZeRO-3 keeps gathered can be read until the step, and has the values before it.
    if param.ds_status is ZeroParamStatus.AVAILABLE and param.data_ptr() == param.ds_tensor.data_ptr():
        param.data = param.data.clone()


_WRONG = RuntimeError("The step was not taken as it had been begun.")
