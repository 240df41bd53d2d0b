"""Updates that begin within backward, before it is known that the step will be taken.

With ``overlap="backward"`` a tasklet is updated as soon as the gradients of all its parameters are there and no module
computes with them any more. That is a guess: a step is skipped if any gradient is not finite, clipping scales all of
them once the norm is known, another backward may come. Where the guess was wrong the update is rolled back, bit for
bit, from the places that the step before left alone, and the step is taken as without overlap.

Guesses are right or wrong on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from lightning_smartinfinity.errors import ConfigError, SmartInfinityError
from lightning_smartinfinity.transfer.handler import TransferHandler
from lightning_smartinfinity.transfer.step_plan import StepPlan
from lightning_smartinfinity.zero3.step.rank_state import RankState
from lightning_smartinfinity.zero3.untyped import ZeroParameter

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
        """Returns whether to guess in this window; asked once in each."""
        if self._left > 0:
            self._left -= 1
            return False
        return True

    def was_right(self) -> None:
        """Records that the last speculative update was adopted."""
        if self._lost > 0:
            self._lost -= 1
        else:
            self._pause = max(self._pause // 2, self._first_pause)

    def was_wrong(self) -> None:
        """Records that the last speculative update was discarded."""
        self._lost += 1
        if self._lost >= self._patience:
            # One wrong guess after the pause is enough for the next.
            self._lost = self._patience - 1
            self._left, self._pause = self._pause, min(2 * self._pause, self._longest_pause)


class Speculation:
    """The speculative update of a rank, from backward to the step.

    Args:
        rank_state: Its layout, its handler and the index of each parameter.
    """

    def __init__(self, rank_state: RankState) -> None:
        self._rank_state = rank_state
        self._hysteresis = Hysteresis()
        self._on = False
        self._failed = False
        # Parameters whose gradient has come in this backward, and those of them that nobody computes with any more.
        self._arrived: dict[int, ZeroParameter] = {}
        self._complete: set[int] = set()
        # For each tasklet, the number of its parameters that are not complete.
        self._missing: list[int] = []
        self.num_right = 0
        self.num_wrong = 0

    @property
    def on(self) -> bool:
        """Whether an update has begun that the step may adopt."""
        return self._on

    def is_worthwhile(self) -> bool:
        """Whether to begin one in this window; asked once in each."""
        return self._hysteresis.allows()

    def begin(self, plan: StepPlan) -> None:
        """Begin an update with no tasklets yet; no step is in flight.

        Args:
            plan: The step as it will be unless the guess is wrong, every parameter active.
        """
        self._arrived, self._complete, self._failed = {}, set(), False
        self._missing = self._rank_state.layout.num_parameters_in.tolist()
        self._on = True
        try:
            self._handler.begin_incremental(plan)
        except SmartInfinityError:
            # The other ranks go on with this backward. The step cannot begin, either, and says so to all of them.
            self._failed = True

    def arrived(self, params: Iterable[ZeroParameter]) -> None:
        """Take note that the gradients of these parameters, as far as this backward goes, are in the arena."""
        if self._on:
            index = self._rank_state.partition.index
            arrived = {index[param.ds_id]: param for param in params}
            self._arrived |= arrived
            self._begin_ready(arrived)

    def before_use(self, params: Iterable[ZeroParameter]) -> None:
        """Discard the update if it may have changed one of these parameters, which are about to be read or written."""
        if self._on and any(self.holds(param) for param in params):
            self.discard()

    def holds(self, param: ZeroParameter) -> bool:
        """Whether the parameter may have been updated, alike on all ranks."""
        return self._on and self._rank_state.partition.index.get(param.ds_id) in self._complete

    def begin_ready(self) -> None:
        """Begin the tasklets that can begin; called when modules have released parameters."""
        if self._on:
            self._begin_ready(self._arrived)

    def _begin_ready(self, arrived: Mapping[int, ZeroParameter]) -> None:
        ready: list[int] = []
        # In one process on a CPU a gathered parameter is its partition.
        free = [(index, param) for index, param in arrived.items() if not param.ds_active_sub_modules]
        for index, param in free:
            _part_from_partition(param)
            del self._arrived[index]
            self._complete.add(index)
            for tasklet in self._rank_state.layout.tasklets_of(slice(index, index + 1)):
                self._missing[tasklet] -= 1
                if self._missing[tasklet] == 0:
                    ready.append(tasklet)
        if ready and not self._failed:
            try:
                self._handler.step.extend(ready)
            except SmartInfinityError:
                # It is rolled back with the guess, or met again by the step, which all ranks take together.
                self._failed = True

    def discard(self) -> None:
        """Roll the update back, if there is one: the guess was wrong. Never raises StorageError.

        After Ctrl-C in the middle of it, call it again.
        """
        if not self._on:
            return
        self._rank_state.roll_back(_WRONG)
        self._on = False
        self._hysteresis.was_wrong()
        self.num_wrong += 1

    def adopt(self, plan: StepPlan) -> bool:
        """Make the update the step, if the guess was right; else discard it.

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
            self.discard()
            raise
        except SmartInfinityError:
            # It has failed, and says so to whoever waits: to the commit, on all ranks.
            right = True
        if not right:
            self.discard()
            return False
        self._on = False
        self._hysteresis.was_right()
        self.num_right += 1
        return True

    @property
    def _handler(self) -> TransferHandler:
        return self._rank_state.handler


def _part_from_partition(param: ZeroParameter) -> None:
    # What ZeRO-3 keeps gathered can be read until the step, and has the values before it.
    if param.ds_status is ZeroParamStatus.AVAILABLE and param.data_ptr() == param.ds_tensor.data_ptr():
        param.data = param.data.clone()


_WRONG = RuntimeError("The step was not taken as it had been begun.")
