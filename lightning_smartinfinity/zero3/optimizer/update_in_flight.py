"""The update of a step, which may still run after the step has returned.

With ``overlap="forward"``, ``step()`` returns when the update has begun. A parameter is gathered, and its gradient in
the arena replaced, only after its own tasklets are done. Any other read or write of parameters or state drains the
update first. So every value equals that of ``overlap="none"``, bit for bit.

All ranks agree on which parameters have been requested since the step. The progress of the update differs between
ranks, so no decision depends on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from lightning_smartinfinity.errors import SmartInfinityError
from lightning_smartinfinity.pipeline.handler import TransferHandler
from lightning_smartinfinity.pipeline.step_plan import StepPlan
from lightning_smartinfinity.zero3.optimizer.persistence import Persistence
from lightning_smartinfinity.zero3.optimizer.rank_state import RankState, warn_of_rolled_back_step
from lightning_smartinfinity.zero3.optimizer.speculation import Speculation
from lightning_smartinfinity.zero3.parameters.deepspeed_patches import skip_in_prefetch
from lightning_smartinfinity.zero3.parameters.param_swapper import ParameterSwapper
from lightning_smartinfinity.zero3.parameters.partitioned_parameter import wait_before_gather
from lightning_smartinfinity.zero3.ranks.collectives import failing_together, sum_over_ranks
from lightning_smartinfinity.zero3.untyped import ZeroCoordinator, ZeroParameter

__all__ = ["UpdateInFlight"]


class UpdateInFlight:
    """A rank's update, from :meth:`begin` to :meth:`drain`.

    All ranks agree on a failure in :meth:`drain`, which rolls the step back on each of them and raises. A rank that
    detects a failure earlier, while it waits for a parameter, continues until then with the values in memory: the other
    ranks are about to gather the parameter too, and would wait for this rank forever. A single process raises at once.

    Args:
        rank_state: The partition and its handler.
        speculation: The update that backward may begin before the step does.
        release_gathered: Function that partitions every gathered parameter.
        overlaps: Whether an update may still run after its step has returned, or before the step.
        persistence: Writes committed generations to storage.

    Attributes:
        is_idle: Whether neither a step is in flight nor requests are recorded: no parameter has to be waited for.
        lost: Why an update was rolled back after its step had returned; None if none was. The loop then counts a step
            that the state does not have.
    """

    def __init__(
        self,
        rank_state: RankState,
        speculation: Speculation,
        *,
        release_gathered: Callable[[], None],
        overlaps: bool,
        persistence: Persistence,
    ) -> None:
        self._rank_state = rank_state
        self._partition = rank_state.partition
        self._speculation = speculation
        self._release_gathered = release_gathered
        self._overlaps = overlaps
        self._persistence = persistence
        self.is_idle = not overlaps
        self._lock = threading.RLock()  # autograd's threads gather, too
        self.lost: str | None = None
        self._begun = False
        self._step_returned = False
        self._training_over = False
        self._failure: SmartInfinityError | None = None
        # Why the step in flight is being rolled back; None once the rollback is complete.
        self._roll_back_reason: BaseException | None = None
        # Indices of the parameters that have not been requested, and of those that still have to be waited for.
        self._untouched: set[int] = set()
        self._awaited: set[int] = set()
        self._waits_once = True
        self._uses: dict[int, None] = {}

    @property
    def is_in_flight(self) -> bool:
        """Whether a step is neither committed nor rolled back."""
        return self._begun

    @property
    def is_in_doubt(self) -> bool:
        """Whether the training ended with a step in flight: after an error, other ranks may not join to agree on it."""
        return self._begun and self._training_over

    def training_over(self) -> None:
        """Record that the training has ended, after an error or not, and wait as :meth:`wait` does."""
        self._training_over = True
        self.wait()

    def watch(self, parameters: Iterable[ZeroParameter], coordinator: ZeroCoordinator) -> None:
        """From now on, gather each of these parameters, or read it from storage, only after it is updated.

        DeepSpeed's prefetch skips parameters that are untouched.
        """
        for param in parameters:
            wait_before_gather(param, self.require)
            swapper: ParameterSwapper | None = param.nvme_swapper
            if swapper is not None:
                swapper.before_reading = self.require
                swapper.leaves_for_later = self.is_untouched
        before_use = self._speculation.before_use if self._overlaps else None
        skip_in_prefetch(coordinator, self.is_untouched, before_use=before_use)

    def begin_speculatively(self, plan: StepPlan, *, binds: bool) -> None:
        """Begin an update within backward, unless too many were discarded recently. Collective.

        Args:
            plan: The step as it will be if the update is adopted, with every parameter active.
            binds: Whether the caller promises to adopt or skip the update, so that gradients may be given up.

        Raises:
            ConfigError, StorageError, DeviceError, CudaError: As raised by :meth:`drain`.
        """
        self._speculation.discard()
        if self._speculation.is_worthwhile():
            self.drain()
            self._rank_state.complete_record()
            if self._rank_state.residual is not None:
                sum_over_ranks(0.0, self._partition.group)  # the record is complete on all ranks
            self._speculation.begin(plan, binds=binds)

    def begin(self, plan: StepPlan) -> None:
        """Begin a step and return at once. Only a speculative update of this step may be in flight.

        Raises:
            SmartInfinityError: The step could not begin, in a training of one process.
        """
        self.is_idle = False
        try:
            if not self._speculation.adopt(plan):
                self._rank_state.handler.begin_step(plan)
        except SmartInfinityError as error:
            self._failure = error
        except BaseException as error:
            self.roll_back(error)
            raise
        self._begun, self._training_over = True, False
        self._untouched = set(range(len(self._partition.layout.parameters)))
        self._awaited = set(self._untouched)
        # After a wait, copies to a device may only have started, so every stream that gathers must wait for them.
        self._waits_once = not plan.outputs.waits_per_stream
        self._uses.clear()
        if self._failure is not None:
            self._drain_if_alone()

    def step_returns(self) -> None:
        """Record that the step returns: the loop then counts it, though its update may still be in flight."""
        self._step_returned = self._begun

    def end_alone(self) -> None:
        """Commit the step in flight, if that is possible, and write state in memory: with several ranks, if all do.

        If several ranks have completed a training, this is left to :meth:`StorageOptimizer.close_storage`.
        """
        if dist.get_world_size(self._partition.group) == 1:
            try:
                self._drain()
            except SmartInfinityError as error:
                warn_of_rolled_back_step(error)
        elif self._rank_state.keeping.completed:
            return
        else:
            with self._lock:
                self._rank_state.commit_alone()
                self._end()
        self._rank_state.write()

    def is_untouched(self, param: ZeroParameter) -> bool:
        """Return whether the parameter is in the step in flight and was not requested since; the same on all ranks."""
        if self._speculation.holds(param):
            return True
        return self._begun and self._partition.index.get(param.ds_id) in self._untouched

    def first_uses(self) -> NDArray[np.int64]:
        """Return the order in which parameters were requested since :meth:`begin`: int64[num_parameters]."""
        uses = np.full(len(self._partition.layout.parameters), len(self._uses), np.int64)
        uses[list(self._uses)] = np.arange(len(self._uses))
        return uses

    def require(self, parameters: Iterable[ZeroParameter]) -> None:
        """Wait until the step begun last has updated these parameters and used their gradients.

        Raises:
            StorageError, DeviceError, CudaError: The step failed, in a training of one process, and was rolled back.
        """
        parameters = list(parameters)
        wanted = sorted(self._partition.indices_of(parameters))
        self._uses.update(dict.fromkeys(wanted))
        self._speculation.before_use(parameters)
        if not self._begun and self._roll_back_reason is None:
            return
        with self._lock:
            self._complete_roll_back()
            self._untouched.difference_update(wanted)
            wanted = [parameter for parameter in wanted if parameter in self._awaited]
            if self._begun and wanted and self._failure is None and self._rank_state.is_open:
                self._wait_for(wanted)

    def await_gradients(self, parameters: Sequence[int]) -> None:
        """Wait until an update in flight has used the gradients of these parameters (indices), or has failed.

        Unlike :meth:`require`, this does not count as a use of the parameters, so ranks may differ in calling it.
        """
        with self._lock:
            if not self._begun:
                self._speculation.wait(parameters)
            elif self._failure is None and self._rank_state.is_open:
                self._wait_for(parameters)
            if self._begun and self._failure is not None and self._rank_state.is_open:
                self._rank_state.handler.step.stop()  # it must not touch the memory that is about to be used

    def drain(self) -> None:
        """Wait for the step in flight, if there is one, and commit it on all ranks. Collective.

        A speculative update that no step has adopted is discarded. After Ctrl-C the step is still in flight, and can be
        drained later.

        Raises:
            ConfigError: A hyperparameter was out of range on some rank; no rank took the step.
            StorageError, DeviceError, CudaError: The step failed on some rank, or could not be committed there, and
                was rolled back on all.
        """
        with self._lock:
            if self._drain():
                self._persistence.write()

    def _drain(self) -> bool:
        """Act as :meth:`drain`, but write no state in memory; return whether a step was committed."""
        with self._lock:
            self.wait()
            if not self._begun or not self._rank_state.is_open:
                return False
            try:
                self._commit()
            except SmartInfinityError as error:
                self.roll_back(error)
                raise
            self._end()
            return True

    def drain_for_residual(self) -> None:
        """Drain if compression keeps a residual, computed from gradients that the next ones are about to replace."""
        if self._rank_state.residual is not None:
            self.drain()

    def drained_handler(self) -> TransferHandler:
        """Commit the step in flight, if there is one, and return the handler. Collective.

        Raises:
            ConfigError, StorageError, DeviceError, CudaError: As raised by :meth:`drain`.
            StorageError: The state is closed, or a step could not be rolled back.
        """
        self.drain()
        self._rank_state.complete_record()
        return self._rank_state.handler

    def wait(self) -> None:
        """Wait until no work of the step in flight is in progress. Not collective; never raises StorageError."""
        with self._lock:
            self._speculation.discard()
            self._complete_roll_back()
            if self._begun and self._failure is None and self._rank_state.is_open:
                try:
                    self._rank_state.handler.finish()
                except SmartInfinityError as error:
                    self._failure = error

    def roll_back(self, error: BaseException) -> None:
        """Roll back the step in flight, if there is one, on this rank.

        Args:
            error: Why the step is rolled back.
        """
        self.is_idle, self._roll_back_reason = False, error  # after Ctrl-C, the next call completes the rollback
        if self._step_returned:
            self.lost = str(error)  # the error's traceback would keep the step's memory alive
        self._end()
        # Parameters that are gathered or prefetched may have the step's values.
        self._release_gathered()
        self._partition.release_prefetched()
        self._rank_state.roll_back(error)
        self._roll_back_reason = None
        self.is_idle = not self._overlaps

    def _wait_for(self, wanted: Sequence[int]) -> None:
        try:
            self._rank_state.handler.step.wait(wanted)
        except SmartInfinityError as error:
            self._failure = error
            self._drain_if_alone()
            return
        if self._waits_once:
            self._awaited.difference_update(wanted)

    def _drain_if_alone(self) -> None:
        if dist.get_world_size(self._partition.group) == 1:
            self.drain()

    def _commit(self) -> None:
        """Commit on all ranks. If one fails, ranks that have written their record erase it, and all ranks raise."""
        together = partial(failing_together, self._partition.group)
        if self._failure is None:
            # An interrupt may have hit between an earlier commit and the call of _end.
            if self._rank_state.handler.in_flight:
                self._rank_state.handler.commit(together=together)
            return
        with together():
            raise self._failure

    def _end(self) -> None:
        self._begun, self._step_returned, self._failure = False, False, None
        self._untouched.clear()
        self._awaited.clear()
        self.is_idle = not self._overlaps and self._roll_back_reason is None

    def _complete_roll_back(self) -> None:
        if self._roll_back_reason is not None:
            self.roll_back(self._roll_back_reason)
