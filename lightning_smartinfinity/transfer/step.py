"""One optimizer step in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.base import StorageDevice
from lightning_smartinfinity.errors import SmartInfinityError, StorageError
from lightning_smartinfinity.store import StateStore
from lightning_smartinfinity.transfer.batches import FlatMemory, Memory, cut, spans_of, tasklets_in
from lightning_smartinfinity.transfer.layout import PartitionLayout
from lightning_smartinfinity.transfer.plan import CudaPartition, StepPlan
from lightning_smartinfinity.transfer.rules import UpdateRule
from lightning_smartinfinity.transfer.runs import BatchMaker, DirectRun, Run, StagedRun
from lightning_smartinfinity.transfer.staging import StagingBuffer
from lightning_smartinfinity.transfer.state_access import commit_next, places_of
from lightning_smartinfinity.transfer.work import Updates, choose_updates, restore_batch, update_batch

__all__ = ["Step"]


class Step:
    """What a plan asks for, from :meth:`start` to :meth:`commit` or :meth:`restore`.

    A step that grows starts without tasklets: :meth:`open` adds some at a time as if every parameter were active, and
    :meth:`complete` the others, once it is known which are.

    Args:
        layout: The partition.
        store: Its state.
        device: Open and free.
        rule: The optimizer's update rule.
        plan: The step; hyperparameters and ``active`` are read here, once.
        staging: The buffer for a plan whose outputs are a ``StagedPartition``; None for other plans.
        grows: Whether the step grows; then parameters are in host memory.

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
        staging: StagingBuffer | None,
        grows: bool = False,
    ) -> None:
        self._layout = layout
        self._store = store
        self._device = device
        self._rule = rule
        self._gradients = plan.gradients
        self.grows = grows
        self.generation = store.generation + 1
        self._outputs = plan.outputs
        self._compressed = plan.compressed
        self._loss_scale = plan.loss_scale
        # By index: what an interrupt broke off is made twice.
        self._sent: dict[int, native.Tasklet] = {}
        self._staging = staging
        # Once: a step that grows must not change its mind.
        self._places = places_of(store)
        self._choose(plan, self._updates_of(plan))
        self._tasklets = [] if grows else self._all_tasklets(plan)
        self._run = self._make_run(self._updating(FlatMemory(layout, plan.gradients)))
        self._failure: SmartInfinityError | None = None
        self._is_handed_out = grows  # False as well where an interrupt came while the device was given something

    def _updates_of(self, plan: StepPlan) -> Updates:
        return choose_updates(
            self._layout,
            self._rule,
            plan.groups,
            active=plan.active,
            steps=self._store.steps,
            gradient_scale=plan.gradient_scale,
        )

    def _choose(self, plan: StepPlan, updates: Updates) -> None:
        self._updates = updates
        self._pieces = cut(self._layout, spans_of(self._layout, updates.keys))

    def _all_tasklets(self, plan: StepPlan) -> list[int]:
        tasklets = tasklets_in(piece for piece in self._pieces if piece.key >= 0)
        return tasklets if plan.first_uses is None else self._layout.in_order_of_use(tasklets, plan.first_uses)

    def open(self, tasklets: Sequence[int]) -> None:
        """Start tasklets of a step that grows, all of whose parameters are active; return at once."""
        assert self.grows
        self._is_handed_out = False
        self._extend(tasklets)
        self._is_handed_out = True

    def complete(self, plan: StepPlan) -> bool:
        """Make a step that grows the one of this plan: start what it has beyond what is open, and grow no more.

        Returns:
            False, and nothing else happens, if the plan would have updated a parameter of an open tasklet otherwise, or
            if an interrupt came while tasklets were opened.
        """
        if not self._is_handed_out and self._failure is None:
            return False
        updates = self._updates_of(plan)
        opened = set(self._tasklets)
        if not updates.agrees(self._updates, self._layout.parameters_in(opened)):
            return False
        self._choose(plan, updates)
        self._is_handed_out = False
        self.grows = False
        tasklets = self._all_tasklets(plan)
        self._extend([tasklet for tasklet in tasklets if tasklet not in opened])
        if self._tasklets:
            # Those of the last layers came first; the first layers are needed first.
            self._guarded(lambda: self._direct_run.prefer(tasklets))
        self._is_handed_out = True
        return True

    def _extend(self, tasklets: Sequence[int]) -> None:
        assert isinstance(self._outputs, Sequence)
        if not tasklets:
            return
        parts = self._updating(FlatMemory(self._layout, self._gradients))(
            tasklets, FlatMemory(self._layout, self._outputs)
        )
        self._tasklets += tasklets
        self._guarded(lambda: self._direct_run.extend(parts, tasklets))

    @property
    def _direct_run(self) -> DirectRun:
        """Of a step that grows."""
        assert isinstance(self._run, DirectRun)
        return self._run

    @property
    def numel(self) -> int:
        """Elements it updates."""
        return sum(piece.end - piece.begin for piece in self._pieces if piece.key >= 0)

    @property
    def overwrites(self) -> bool:
        """Whether it writes where the current generation lies."""
        return bool(self._tasklets) and self._layout.extents.num_slots == 1

    @property
    def failure(self) -> SmartInfinityError | None:
        """What went wrong so far."""
        return self._failure

    def start(self) -> None:
        """Start; return at once."""
        self._guarded(self._run.start)
        self._is_handed_out = True

    def wait(self, parameters: Iterable[slice]) -> None:
        """Return when these parameters are in the partition. Raises StorageError or CudaError, again and again,
        once it failed.
        """
        wanted = sorted({tasklet for run in parameters for tasklet in self._layout.tasklets_of(run)})
        self._require_handed_out()
        self._guarded(lambda: self._run.wait(wanted))

    def drain(self) -> None:
        """Return when nothing is left to do. Raises as :meth:`wait`."""
        self._require_handed_out()
        self._guarded(self._run.drain)

    def _require_handed_out(self) -> None:
        if not self._is_handed_out and self._failure is None:
            self._failure = StorageError("An interrupt came while the step began.", "Undo it.")

    def commit(self) -> None:
        """Drain and make it the current generation. Raises as :meth:`wait`."""
        assert not self.grows
        self.drain()
        # An interrupt may have come when it was done but for our knowing.
        if self._store.generation < self.generation:
            steps = self._updates.counts_after(self._store.steps)
            self._guarded(lambda: commit_next(self._store, self._places, self._tasklets, steps))

    @property
    def has_residual(self) -> bool:
        """Whether :meth:`feed_back` has anything to do: alike on all ranks."""
        return self._compressed is not None and self._compressed.residual is not None

    def feed_back(self) -> None:
        """After :meth:`commit`, on all ranks: keep what compression left out of the gradients.

        Raises:
            StorageError: It cannot be kept; no residual has changed.
        """
        if self._compressed is not None:
            self._compressed.feed_back(list(self._sent.values()), scale=self._loss_scale)

    def stop(self) -> None:
        """Abandon what has not begun; return when nothing is in flight. The step cannot be committed any more."""
        self._failure = self._failure or StorageError("The step was abandoned.", "Undo it.")
        self._run.stop()

    def restore(self) -> None:
        """After :meth:`stop`: put the current generation's parameters back into the partition.

        Raises:
            StorageError: They could not be read; it may be tried again.
            CudaError: They could not be copied; the same.
        """
        self._run = self._make_run(self._restoring())
        try:
            self._run.start()
            self._run.drain()
        except BaseException:  # an interrupt as well
            self._run.stop()
            raise

    def _guarded(self, action: Callable[[], None]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            action()
        except SmartInfinityError as error:
            self._failure = error
            raise

    def _updating(self, gradients: Memory) -> BatchMaker:
        def make_batch(tasklets: Sequence[int], outputs: Memory) -> Iterable[native.Batch]:
            batch = update_batch(
                self._layout,
                self._pieces,
                tasklets,
                self._places,
                updates=self._updates,
                gradients=gradients,
                outputs=outputs,
                # Parameters in memory that are the masters, or half of them; a staging buffer only passes them on.
                master_in_parameter=self._device.updates_from_parameters
                and isinstance(outputs, FlatMemory)
                and outputs.dtype == self._layout.extents.format.parameter_dtype,
                compressed=self._compressed,
                loss_scale=self._loss_scale,
            )
            if self._compressed is None:
                return [batch]
            if self._compressed.residual is not None:
                self._sent |= {tasklet.index: tasklet for tasklet in batch.tasklets}
            return self._compressed.encoded(batch)

        return make_batch

    def _restoring(self) -> BatchMaker:
        def make_batch(tasklets: Sequence[int], outputs: Memory) -> Iterable[native.Batch]:
            return [restore_batch(self._layout, self._pieces, tasklets, self._places, outputs=outputs)]

        return make_batch

    def _make_run(self, make_batch: BatchMaker) -> Run:
        if isinstance(self._outputs, CudaPartition):
            outputs = FlatMemory(self._layout, self._outputs.flats, stream=self._outputs.stream)
            return DirectRun(self._device, make_batch(self._tasklets, outputs), self._tasklets, partition=self._outputs)
        if isinstance(self._outputs, Sequence):
            outputs = FlatMemory(self._layout, self._outputs)
            return DirectRun(self._device, make_batch(self._tasklets, outputs), self._tasklets)
        assert self._staging is not None
        return StagedRun(
            self._device,
            make_batch,
            self._tasklets,
            self._pieces,
            partition=self._outputs,
            staging=self._staging,
            layout=self._layout,
        )
