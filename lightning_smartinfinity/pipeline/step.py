"""One optimizer step in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lightning_smartinfinity.devices.base import StorageDevice
from lightning_smartinfinity.errors import SmartInfinityError, StorageError
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.parameters.partitions import StagingMaker
from lightning_smartinfinity.pipeline.parameters.submissions import Assignment, BatchMaker
from lightning_smartinfinity.pipeline.rules import UpdateRule
from lightning_smartinfinity.pipeline.state.state_access import commit_next, places_of
from lightning_smartinfinity.pipeline.state.work import Updates, choose_updates
from lightning_smartinfinity.pipeline.step_batches import StepBatches
from lightning_smartinfinity.pipeline.step_plan import StepPlan
from lightning_smartinfinity.storage import StateStore

__all__ = ["Step"]


class Step:
    """Runs a plan, from :meth:`start` to :meth:`commit` or :meth:`read_back`.

    An incremental step starts without tasklets. :meth:`extend` adds some, assuming that every parameter is active.
    :meth:`complete` adds the others once the active parameters are known.

    Args:
        layout: The partition.
        store: The store that holds its state.
        device: The device, open and free.
        rule: The optimizer's update rule.
        plan: The step's plan; hyperparameters and ``active`` are read here, once.
        staging: Returns the staging buffer, for parameters that the native core cannot reach.
        incremental: Whether the step is incremental. The native core must then reach the parameters' memory.
        binds: Whether an incremental step will either complete unchanged or be skipped, so that gradients are released
            as they are used.

    Attributes:
        is_complete: Whether all of the step's tasklets are known. Only a complete step can be committed.
        batches: Makes the batches for the device.
        difference: How the plan passed to :meth:`complete` differed from the first one; None if it did not.
        failure: The error that ended the step; None means there is none so far.

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
        binds: bool = False,
    ) -> None:
        self._layout = layout
        self._store = store
        self._device = device
        self._rule = rule
        self.is_complete = not incremental
        self.generation = store.generation + 1
        self._outputs = plan.outputs
        self._staging = staging
        # Computed once: all parts of an incremental step must use the same places.
        self._places = places_of(store)
        if plan.link is not None:
            # Here the current stream is the one that uses parameters. Later, within backward, it may be the one that
            # copies gradients.
            plan.link.notice()
        self.batches = StepBatches(
            layout,
            self._places,
            plan,
            self._updates_of(plan),
            master_dtype=self._layout.extents.format.parameter_dtype if device.updates_from_parameters else None,
            last_use=binds or not incremental,
        )
        self._tasklets = [] if incremental else self._all_tasklets(plan)
        self.batches.take_gradients(self._tasklets)
        self._submission = plan.outputs.submission(self._assignment(self.batches.update), staging)
        self.failure: SmartInfinityError | None = None
        self.difference: str | None = None
        # An interrupt while tasklets are being submitted leaves this False.
        self._is_submitted = incremental

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
            pieces=lambda: self.batches.pieces,
        )

    @property
    def overwrites(self) -> bool:
        """Whether the step changes what it would be rolled back to: places of the current generation, or memory."""
        in_memory = self._store.num_held and any(tasklet < self._store.num_held for tasklet in self._tasklets)
        return bool(self._tasklets) and (self._layout.extents.places_per_tasklet == 1 or bool(in_memory))

    def start(self) -> None:
        """Start the step and return at once."""
        self._guarded(self._submission.start)
        self._is_submitted = True

    def extend(self, tasklets: Sequence[int]) -> None:
        """Start these tasklets of an incremental step and return at once. All of their gradients must have arrived.

        Tasklets whose state is in memory only could not be rolled back; :meth:`complete` starts them.

        Raises:
            StorageError: As :meth:`wait`.
        """
        assert not self.is_complete
        self._is_submitted = False
        self._extend([tasklet for tasklet in tasklets if tasklet >= self._store.num_held])
        self._is_submitted = True

    def complete(self, plan: StepPlan) -> bool:
        """Complete an incremental step according to this plan, and start the missing tasklets.

        Args:
            plan: The final plan; it differs from the first one in active parameters and hyperparameters only.

        Returns:
            Whether the step now executes the plan. If a parameter was already updated with other scalars, or an
            interrupt came while tasklets were being submitted, return False and start nothing: roll the step back.

        Raises:
            StorageError: As :meth:`wait`.
        """
        if not self._is_submitted and self.failure is None:
            return False
        updates = self._updates_of(plan)
        begun = set(self._tasklets)
        self.difference = self.batches.updates.difference_to(updates, self._layout.parameters_in(begun))
        if self.difference is not None:
            return False
        self.batches.choose(updates)
        self.batches.last_use = True
        self._is_submitted = False
        self.is_complete = True
        tasklets = self._all_tasklets(plan)
        self._extend([tasklet for tasklet in tasklets if tasklet not in begun])
        if self._tasklets:
            # Backward completes the last layers first, but forward needs the first layers first.
            self._guarded(lambda: self._submission.prefer(tasklets))
        self._is_submitted = True
        return True

    def _extend(self, tasklets: Sequence[int]) -> None:
        if tasklets:
            self.batches.take_gradients(tasklets)
            self._tasklets += tasklets
            self._guarded(lambda: self._submission.extend(tasklets))

    def wait(self, parameters: slice | Iterable[int] | None = None) -> None:
        """Wait until these parameters are updated in the partition.

        Args:
            parameters: Parameter indices, or a slice of them with step 1; None means all.

        Raises:
            StorageError: The step failed (StorageFullError if storage is full, StorageCorruptError if state is
                damaged); roll it back. Every later call raises the same error.
            CudaError: Copying parameters from or to a CUDA device failed; the same applies.
        """
        if parameters is None or isinstance(parameters, slice):
            slices = [parameters or slice(None)]
        else:
            slices = [slice(index, index + 1) for index in parameters]
        wanted = sorted({tasklet for part in slices for tasklet in self._layout.tasklets_of(part)})
        self._require_submitted()
        self._guarded(lambda: self._submission.wait(wanted))

    def finish(self) -> None:
        """Wait until all submitted work is done. Raises as :meth:`wait`."""
        self._require_submitted()
        self._guarded(self._submission.finish)

    def _require_submitted(self) -> None:
        if not self._is_submitted and self.failure is None:
            self.failure = StorageError("An interrupt came while the step began.", "Roll it back.")

    def commit(self) -> None:
        """Finish the step and make it the current generation. Raises as :meth:`wait`."""
        assert self.is_complete
        self.finish()
        # An interrupted earlier call may have committed the step already.
        if self._store.generation < self.generation:
            steps = self.batches.updates.counts_after(self._store.steps)
            self._guarded(lambda: commit_next(self._store, self._places, self._tasklets, steps))

    def stop(self) -> None:
        """Start no more tasklets, and wait until none is in flight. The step cannot be committed any more."""
        self.failure = self.failure or StorageError("The step was stopped.", "Roll it back.")
        self._submission.stop()

    def read_back(self) -> None:
        """Read the current generation's parameters back into the partition, after :meth:`stop`.

        Raises:
            StorageError: The parameters could not be read; the call may be repeated.
            CudaError: The parameters could not be copied; the call may be repeated.
        """
        self._submission = self._outputs.submission(self._assignment(self.batches.read_back), self._staging)
        try:
            self._submission.start()
            self._submission.finish()
        except BaseException:  # including an interrupt
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
