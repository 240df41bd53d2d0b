"""One optimizer step in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lightning_smartinfinity.devices.base import StorageDevice
from lightning_smartinfinity.errors import SmartInfinityError, StorageError
from lightning_smartinfinity.store import StateStore
from lightning_smartinfinity.transfer.layout import PartitionLayout
from lightning_smartinfinity.transfer.partitions import StagingMaker
from lightning_smartinfinity.transfer.rules import UpdateRule
from lightning_smartinfinity.transfer.state_access import commit_next, places_of
from lightning_smartinfinity.transfer.step_batches import StepBatches
from lightning_smartinfinity.transfer.step_plan import StepPlan
from lightning_smartinfinity.transfer.submissions import Assignment, BatchMaker
from lightning_smartinfinity.transfer.work import Updates, choose_updates

__all__ = ["Step"]


class Step:
    """What a plan asks for, from :meth:`start` to :meth:`commit` or :meth:`restore`.

    An incremental step starts without tasklets: :meth:`extend` adds some at a time as if every parameter were active,
    and :meth:`complete` the others, once it is known which are.

    Args:
        layout: The partition.
        store: Its state.
        device: Open and free.
        rule: The optimizer's update rule.
        plan: The step; hyperparameters and ``active`` are read here, once.
        staging: Returns the buffer for parameters that travel through host memory of ours.
        incremental: Whether the step is incremental; then parameters are in host memory.

    Attributes:
        is_complete: Whether it is known which tasklets belong to the step; only then it can be committed.
        batches: Makes what the device is given.
        failure: The error that ended the step; None: there is none so far.

    Raises:
        ConfigError: A hyperparameter of an active group is out of range.
    """

    def __init__(
        self,
        layout: PartitionLayout,
        store: StateStore,
        device: StorageDevice,
        *,
        rule: UpdateRule,
        plan: StepPlan,
        staging: StagingMaker,
        incremental: bool = False,
    ) -> None:
        self._layout = layout
        self._store = store
        self._device = device
        self._rule = rule
        self.is_complete = not incremental
        self.generation = store.generation + 1
        self._outputs = plan.outputs
        self._staging = staging
        # Once: an incremental step must not change its mind.
        self._places = places_of(store)
        self.batches = StepBatches(
            layout,
            self._places,
            plan,
            self._updates_of(plan),
            master_dtype=self._layout.extents.format.parameter_dtype if device.updates_from_parameters else None,
        )
        self._tasklets = [] if incremental else self._all_tasklets(plan)
        self._submission = plan.outputs.submission(self._assignment(self.batches.update), staging)
        self.failure: SmartInfinityError | None = None
        # False as well where an interrupt came while the device was given something
        self._is_handed_out = incremental

    def _updates_of(self, plan: StepPlan) -> Updates:
        return choose_updates(
            self._layout,
            self._rule,
            plan.groups,
            active=plan.active,
            steps=self._store.steps,
            gradient_scale=plan.gradient_scale,
        )

    def _all_tasklets(self, plan: StepPlan) -> list[int]:
        tasklets = self.batches.tasklets
        return tasklets if plan.first_uses is None else self._layout.in_order_of_use(tasklets, plan.first_uses)

    def _assignment(self, make_batch: BatchMaker) -> Assignment:
        return Assignment(
            device=self._device,
            layout=self._layout,
            make_batch=make_batch,
            tasklets=self._tasklets,
            pieces=self.batches.pieces,
        )

    @property
    def overwrites(self) -> bool:
        """Whether it writes where the current generation lies."""
        return bool(self._tasklets) and self._layout.extents.num_slots == 1

    def start(self) -> None:
        """Starts the step and returns at once."""
        self._guarded(self._submission.start)
        self._is_handed_out = True

    def extend(self, tasklets: Sequence[int]) -> None:
        """Starts these tasklets of an incremental step, whose gradients are all there, and returns at once.

        Raises:
            StorageError: As :meth:`wait`.
        """
        assert not self.is_complete
        self._is_handed_out = False
        self._extend(tasklets)
        self._is_handed_out = True

    def complete(self, plan: StepPlan) -> bool:
        """Turns an incremental step into that of this plan and starts the tasklets that are missing.

        Args:
            plan: Differs from that of the step's beginning in what is active and in hyperparameters only.

        Returns:
            Whether that could be done. If not, because something was updated otherwise or an interrupt came while
            tasklets were given to the device, nothing else happens: roll the step back.

        Raises:
            StorageError: As :meth:`wait`.
        """
        if not self._is_handed_out and self.failure is None:
            return False
        updates = self._updates_of(plan)
        begun = set(self._tasklets)
        if not updates.agrees(self.batches.updates, self._layout.parameters_in(begun)):
            return False
        self.batches.choose(updates)
        self._is_handed_out = False
        self.is_complete = True
        tasklets = self._all_tasklets(plan)
        self._extend([tasklet for tasklet in tasklets if tasklet not in begun])
        if self._tasklets:
            # Those of the last layers came first; the first layers are needed first.
            self._guarded(lambda: self._submission.prefer(tasklets))
        self._is_handed_out = True
        return True

    def _extend(self, tasklets: Sequence[int]) -> None:
        if tasklets:
            self._tasklets += tasklets
            self._guarded(lambda: self._submission.extend(tasklets))

    def wait(self, parameters: slice | Iterable[int] | None = None) -> None:
        """Returns when these parameters are updated in the partition.

        Args:
            parameters: Parameter indices: some, or a slice with step 1; None: all.

        Raises:
            StorageError: The step failed (StorageFullError, StorageCorruptError where those fit); roll it back. It is
                raised at every call from then on.
            CudaError: The same, copying parameters from or to a CUDA device.
        """
        if parameters is None or isinstance(parameters, slice):
            slices = [parameters or slice(None)]
        else:
            slices = [slice(index, index + 1) for index in parameters]
        wanted = sorted({tasklet for part in slices for tasklet in self._layout.tasklets_of(part)})
        self._require_handed_out()
        self._guarded(lambda: self._submission.wait(wanted))

    def drain(self) -> None:
        """Returns when nothing is left to do. Raises as :meth:`wait`."""
        self._require_handed_out()
        self._guarded(self._submission.drain)

    def _require_handed_out(self) -> None:
        if not self._is_handed_out and self.failure is None:
            self.failure = StorageError("An interrupt came while the step began.", "Undo it.")

    def commit(self) -> None:
        """Drains the step and makes it the current generation. Raises as :meth:`wait`."""
        assert self.is_complete
        self.drain()
        # An interrupt may have come when it was done but for our knowing.
        if self._store.generation < self.generation:
            steps = self.batches.updates.counts_after(self._store.steps)
            self._guarded(lambda: commit_next(self._store, self._places, self._tasklets, steps))

    def stop(self) -> None:
        """Abandons what has not started; returns when nothing is in flight. The step cannot be committed any more."""
        self.failure = self.failure or StorageError("The step was abandoned.", "Undo it.")
        self._submission.stop()

    def restore(self) -> None:
        """After :meth:`stop`: reads the current generation's parameters back into the partition.

        Raises:
            StorageError: They could not be read; it may be tried again.
            CudaError: They could not be copied; the same.
        """
        self._submission = self._outputs.submission(self._assignment(self.batches.restore), self._staging)
        try:
            self._submission.start()
            self._submission.drain()
        except BaseException:  # an interrupt as well
            self._submission.stop()
            raise

    def _guarded(self, action: Callable[[], None]) -> None:
        if self.failure is not None:
            raise self.failure
        try:
            action()
        except SmartInfinityError as error:
            self.failure = error
            raise
