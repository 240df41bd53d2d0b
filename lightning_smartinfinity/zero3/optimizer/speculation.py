"""Speculative updates: they begin within backward, before it is known whether the step will be taken.

With ``overlap="backward"`` a tasklet is updated as soon as the gradients of all its parameters have arrived and no
module uses the parameters any more. The update is discarded if

- the step is skipped, because a gradient is not finite;
- clipping scales the gradients, once the norm is known;
- another backward follows.

A discarded update is rolled back, bit for bit, from the places of the current generation. The step is then taken as
without overlap. All ranks adopt an update, or all discard it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from lightning_smartinfinity.errors import ConfigError, SmartInfinityError, UnsupportedError
from lightning_smartinfinity.pipeline.step_plan import StepPlan
from lightning_smartinfinity.zero3.optimizer.rank_state import RankState
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["Hysteresis", "Speculation", "gradients_given_up"]


class Hysteresis:
    """Decides whether to speculate: if too many updates are discarded, it pauses, and for longer each time.

    An adopted update hides at most one update within backward; a discarded one costs at least one more. So speculation
    does not pay if more than half of the updates are discarded. In exactly that case the surplus (discarded updates
    minus adopted ones, never below zero) grows in the long run, in whatever order the two occur.

    Args:
        patience: Surplus at which a pause begins.
        first_pause: Number of windows in the first pause.
        longest_pause: Largest number of windows in a pause.
    """

    def __init__(self, *, patience: int = 3, first_pause: int = 16, longest_pause: int = 1024) -> None:
        self._patience = patience
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._surplus = 0
        self._pause = first_pause
        self._windows_left = 0

    def allows(self) -> bool:
        """Return whether to speculate in this window; called once in each."""
        if self._windows_left > 0:
            self._windows_left -= 1
            return False
        return True

    def adopted(self) -> None:
        """Record that the last speculative update was adopted."""
        if self._surplus > 0:
            self._surplus -= 1
        else:
            self._pause = max(self._pause // 2, self._first_pause)

    def discarded(self) -> None:
        """Record that the last speculative update was discarded."""
        self._surplus += 1
        if self._surplus >= self._patience:
            # After the pause, one discarded update is enough to begin the next.
            self._surplus = self._patience - 1
            self._windows_left, self._pause = self._pause, min(2 * self._pause, self._longest_pause)


_RELIABLE = 2  # updates adopted in a row, after which a binding one may begin


class Speculation:
    """The speculative update of a rank, from backward to the step.

    Args:
        rank_state: The rank's partition and its handler.

    Attributes:
        on: Whether an update has begun that the step may adopt.
        used_again: The parameter whose use discarded the last binding update, if one did.
    """

    def __init__(self, rank_state: RankState) -> None:
        self._rank_state = rank_state
        self._partition = rank_state.partition
        self._hysteresis = Hysteresis()
        self.on = False
        self._failed = False
        # Parameters whose gradient has arrived in this backward: those that may be in use, and those no longer used.
        self._arrived: dict[int, ZeroParameter] = {}
        self._complete: set[int] = set()
        # For each tasklet, the number of its parameters that are not complete.
        self._missing: list[int] = []
        self._binds = False
        self._num_in_a_row = 0
        self.used_again: ZeroParameter | None = None
        self.num_adopted = 0
        self.num_binding = 0
        self.num_discarded = 0

    @property
    def binds(self) -> bool:
        """Whether an update has begun that gives gradients up as it uses them."""
        return self.on and self._binds

    def is_worthwhile(self) -> bool:
        """Return whether to begin an update in this window; called once in each."""
        return self._hysteresis.allows()

    def begin(self, plan: StepPlan, *, binds: bool) -> None:
        """Begin an update with no tasklets yet; no step may be in flight.

        Args:
            plan: The step as it will be if the update is adopted, with every parameter active.
            binds: Whether the update may be binding. It then binds once several updates in a row have been adopted.
        """
        self._binds = binds and self._num_in_a_row >= _RELIABLE
        self._arrived, self._complete, self._failed, self.used_again = {}, set(), False, None
        self._missing = self._partition.layout.num_parameters_in.tolist()
        self.on = True
        try:
            self._rank_state.handler.begin_incremental(plan, binds=self._binds)
        except SmartInfinityError:
            # The other ranks continue this backward. The step tries again, and reports a failure to all ranks.
            self._failed = True

    def arrived(self, params: Iterable[ZeroParameter]) -> None:
        """Record that this backward's gradients of these parameters are in the arena."""
        if self.on:
            index = self._partition.index
            arrived = {index[param.ds_id]: param for param in params}
            self._arrived |= arrived
            self._begin_ready(arrived)

    def before_use(self, params: Iterable[ZeroParameter]) -> None:
        """Discard the update if it may have changed one of these parameters, which are about to be read or written."""
        used = min(filter(self.holds, params), key=lambda param: int(param.ds_id), default=None)
        if used is not None:
            self.used_again = used if self._binds else None
            self.discard()

    def holds(self, param: ZeroParameter) -> bool:
        """Return whether the parameter may have been updated; the same on all ranks."""
        return self.on and self._partition.index.get(param.ds_id) in self._complete

    def begin_ready(self) -> None:
        """Begin the tasklets that are ready; call this after modules have released parameters."""
        if self.on:
            self._begin_ready(self._arrived)

    def _begin_ready(self, arrived: Mapping[int, ZeroParameter]) -> None:
        ready: list[int] = []
        # In one process on a CPU a gathered parameter shares memory with its partition.
        free = [(index, param) for index, param in arrived.items() if not param.ds_active_sub_modules]
        for index, param in free:
            _detach_from_partition(param)
            del self._arrived[index]
            self._complete.add(index)
            for tasklet in self._partition.layout.tasklets_of(slice(index, index + 1)):
                self._missing[tasklet] -= 1
                if self._missing[tasklet] == 0:
                    ready.append(tasklet)
        if ready and not self._failed:
            try:
                self._rank_state.handler.step.extend(ready)
            except SmartInfinityError:
                # The update is discarded, or the step adopts it and reports the failure to all ranks.
                self._failed = True

    def wait(self, parameters: Iterable[int]) -> None:
        """Wait until the update, if there is one, has updated these parameters (indices) where ready, or has failed."""
        if self.on and not self._failed:
            try:
                self._rank_state.handler.step.wait(parameters)
            except SmartInfinityError:
                self._failed = True

    def discard(self) -> None:
        """Roll the update back, if there is one. Never raises StorageError.

        After Ctrl-C within this call, call it again.
        """
        if not self.on:
            return
        self._rank_state.roll_back(_DISCARDED)
        self.on = False
        self._hysteresis.discarded()
        self._num_in_a_row = 0
        self.num_discarded += 1

    def adopt(self, plan: StepPlan) -> bool:
        """Make the update the step, if it agrees with the plan; otherwise discard it.

        Returns:
            Whether the step is in flight.

        Raises:
            ConfigError: A hyperparameter is out of range; nothing is in flight.
        """
        if not self.on:
            return False
        if not self._rank_state.handler.in_flight:
            self.on = False
            return False
        try:
            step = self._rank_state.handler.step
            agrees = step.complete(plan)
        except ConfigError:
            self.discard()
            raise
        except SmartInfinityError:
            # The update has failed. Waiting for it or committing it raises the error on all ranks.
            agrees = True
        if not agrees:
            binds = self._binds
            self.discard()
            if binds:
                raise gradients_given_up(step.difference or "an interrupt came")
            return False
        self.on = False
        self._hysteresis.adopted()
        self._num_in_a_row += 1
        self.num_adopted += 1
        self.num_binding += self._binds
        return True


def _detach_from_partition(param: ZeroParameter) -> None:
    # A parameter that ZeRO-3 keeps gathered may be read until the step, and must keep its values from before the step.
    if param.ds_status is ZeroParamStatus.AVAILABLE and param.data_ptr() == param.ds_tensor.data_ptr():
        param.data = param.data.clone()


def gradients_given_up(reason: str) -> UnsupportedError:
    """Return the error of a step whose gradients were given up before it could be taken.

    Args:
        reason: Half a sentence naming the event between backward and step.
    """
    return UnsupportedError(
        f"The step was not taken, since {reason} after its update had begun within backward. With "
        "TransferConfig(gradient_bytes=...) its gradients were given up as they were used.",
        "Change nothing between backward and step, leave gradient_bytes out, or use overlap='forward'.",
    )


_DISCARDED = RuntimeError("The step was not taken as it had been begun.")
