"""The transfer handler: runs step plans on a storage device and keeps the store's generations."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.common.progress import Show, hidden
from lightning_smartinfinity.devices.base import StorageDevice, Traffic
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.pipeline.layout.balance import Balance
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.parameters.partitions import ParameterMemory
from lightning_smartinfinity.pipeline.parameters.staging_buffer import StagingBuffer
from lightning_smartinfinity.pipeline.rules import UpdateRule
from lightning_smartinfinity.pipeline.state.pinned_state import PinnedState
from lightning_smartinfinity.pipeline.state.state_access import StateAccess, committing
from lightning_smartinfinity.pipeline.step import Step
from lightning_smartinfinity.pipeline.step_plan import StepPlan
from lightning_smartinfinity.storage import StateStore
from lightning_smartinfinity.storage.records.training_record import TrainingRecord
from lightning_smartinfinity.storage.state.state_store import Together

__all__ = ["TransferHandler"]

_log = logging.getLogger(__name__)


class TransferHandler:
    """Updates one rank's optimizer state on storage, tasklet by tasklet.

    A step is ``begin_step`` -> ``step.wait`` (any number of times) -> ``commit``, or ``roll_back`` instead at any time
    after ``begin_step``. Between steps ``state`` reads and replaces the state on storage. All calls come from one
    thread.

    A failure leaves the current generation intact, on storage and here, unless a tasklet has only one place
    (``durability="none"``): then the state that was being overwritten is lost.

    Args:
        layout: The partition; its extents are those of ``store``.
        store: A created or recovered store; the handler owns it from now on.
        device: A closed device; the handler opens and owns it.
        rule: The optimizer's update rule.
    """

    def __init__(self, layout: PartitionLayout, store: StateStore, device: StorageDevice, *, rule: UpdateRule) -> None:
        assert layout.extents == store.extents and len(store.steps) == len(layout.parameters)
        assert len(rule.arrays) == layout.extents.num_arrays
        self._layout = layout
        self._store = store
        self._device = device
        self._new_step = partial(Step, layout, store, device, rule=rule)
        self._access = StateAccess(layout, store, device, names=rule.arrays)
        num_folders = layout.extents.num_devices
        self._balance = Balance(num_folders) if device.moves_tasklets and num_folders > 1 else None
        self._step: Step | None = None
        self._lacks_step = False  # whether the step begun last could not begin, and was not rolled back
        self._staging: StagingBuffer | None = None
        self._num_steps = 0
        self._numel_updated = 0
        self._background_read_bytes = 0
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._is_closed

    @property
    def generation(self) -> int:
        """Committed generation, -1 before :meth:`initialize`. Every commit adds 1."""
        return self._store.generation

    @property
    def steps(self) -> NDArray[np.int64]:
        """int64[num_parameters]: committed number of updates of each parameter; a copy."""
        return self._store.steps.copy()

    @property
    def in_flight(self) -> bool:
        """Whether a step has begun and is neither committed nor rolled back."""
        return self._step is not None

    @property
    def step(self) -> Step:
        """The step in flight."""
        assert self._step is not None, "no step has begun"
        return self._step

    @property
    def state(self) -> StateAccess:
        """The committed state on storage, to be read and replaced while no step is in flight."""
        self._require_no_step()
        self.complete_record()
        return self._access

    def pin(self) -> PinnedState:
        """Pin the committed state, so that it can be read during later steps. No step may be in flight now.

        Raises:
            StorageError: As :meth:`make_room_to_pin`.
        """
        self._require_no_step()
        return PinnedState(self._layout, self._store, self._store.pin(), count_read=self._count_background_read)

    def make_room_to_pin(self) -> None:
        """Extend the state files by a third place for each tasklet, for :meth:`pin`. No step may be in flight now.

        Raises:
            StorageFullError: The file systems have no room for the third places.
            StorageError: A state file cannot be extended.
        """
        self._require_no_step()
        self._store.make_room_to_pin()

    def _count_background_read(self, nbytes: int) -> None:
        self._background_read_bytes += nbytes  # needs no lock: saves run one after the other

    @property
    def can_roll_back(self) -> bool:
        """Whether the step in flight, or any step, keeps the current generation.

        It does not with one place per tasklet (``durability="none"``), nor once it changes state that is in memory only
        (``durability="interval"``).
        """
        if self._step is None or self._is_committed(self._step):
            return self._layout.extents.places_per_tasklet > 1
        return not self._step.overwrites

    @property
    def unsafe(self) -> str:
        """The setting with which a failed step cannot be rolled back."""
        return f"durability={'interval' if self.writes_back else 'none'!r}"

    def _is_committed(self, step: Step) -> bool:
        return self._store.generation == step.generation and self._layout.extents.places_per_tasklet > 1

    @property
    def lost(self) -> str | None:
        """Why the current generation cannot be read any more, after a change that failed half-way; None if it can."""
        return self._store.lost

    @property
    def writes_back(self) -> bool:
        """Whether generations, and the state of resident tasklets, are written to storage only by :meth:`persist`."""
        return self._store.writes_back

    def write_back(self) -> None:
        """From now on, write resident tasklets to storage only by :meth:`persist`.

        Raises:
            StorageFullError: The file systems have no room for the places that this needs.
            StorageError: A state file cannot be extended.
        """
        self._require_no_step()
        self._store.write_back(self._layout.num_resident)

    def write_through(self) -> None:
        """Undo :meth:`write_back`, before the first step."""
        self._store.write_through()

    @property
    def is_stored(self) -> bool:
        """Whether the current generation is complete on storage."""
        return not self.writes_back or self._store.stored_generation == self.generation

    @property
    def num_steps(self) -> int:
        """Number of steps committed since the handler was made."""
        return self._num_steps

    @property
    def num_resident(self) -> int:
        """Number of tasklets whose state stays in host memory."""
        return self._layout.num_resident

    @property
    def stored_step(self) -> int | None:
        """Optimizer steps of the training from which it would resume from storage now; None if it would not."""
        stored = self._store.records.stored
        return stored.step if stored is not None and self.is_resumable else None

    @property
    def may_persist(self) -> bool:
        """Whether :meth:`persist` may be called: no step is in flight, and no other generation is pinned."""
        return self._step is None and (not self._store.is_pinned or self._store.is_spilled)

    @property
    def is_spilled(self) -> bool:
        """Whether the state of the current generation is on storage, be it complete there or not."""
        return self._store.is_spilled

    @property
    def may_spill(self) -> bool:
        """Whether :meth:`spill` may be called: as :attr:`may_persist`, and all state is in memory.

        State on storage has no place for a third generation.
        """
        return self.may_persist and self._layout.num_resident == self._layout.extents.num_tasklets

    @property
    def is_recorded(self) -> bool:
        """Whether the training record made last is of the current generation."""
        return self._store.is_recorded

    @property
    def point(self) -> int:
        """A number that is the same on all ranks whose generations and last training records belong together."""
        return (self._store.records.num_made << 32) + self.generation

    def persist(self, *, deadline: float = math.inf, together: Together = nullcontext) -> None:
        """Complete the current generation on storage, with its training record, if that was made.

        Args:
            deadline: Time of ``time.monotonic`` by which writing must be done.
            together: As for :meth:`commit`. Without it, another rank may complete the generation alone.

        Raises:
            StorageTimeoutError: It would take until after the deadline.
            StorageError: It could not be written. The generation before stays on storage, and state in memory is
                unchanged.
        """
        self._require_no_step()
        write = partial(self._access.write_resident, deadline=deadline)
        self._store.persist(write, deadline=deadline, together=together)

    def spill(self, *, together: Together = nullcontext) -> None:
        """Write state in memory to storage, for :meth:`pin`; the complete generation there stays.

        Args:
            together: As for :meth:`commit`.

        Raises:
            StorageError: It could not be written.
        """
        self._require_no_step()
        self._store.spill(self._access.write_resident, together=together)

    @property
    def has_direct_io(self) -> bool:
        """Whether all state files are read and written with direct I/O, past the page cache."""
        return all(file.direct for file in self._store.files)

    @property
    def cache_bytes(self) -> int:
        """Host memory of the resident tasklets, whose state stays in memory."""
        return self._device.cache_bytes

    @property
    def storage_bytes(self) -> int:
        """Bytes of the state files, free places included."""
        return self._store.storage_bytes

    @property
    def ring_bytes(self) -> int:
        """Host memory of the device's ring and, once in use, of its slots or the staging buffer."""
        return self._device.ring_bytes + (self._staging.nbytes if self._staging is not None else 0)

    def open(self) -> None:
        """Open the device: its threads, ring buffers and memory for resident tasklets.

        Raises:
            StorageError: Threads or memory are unavailable.
        """
        extents = self._layout.extents
        sizes = [extent.nbytes for extent in extents.extents]
        self._device.open(
            files=self._store.files,
            identity=self._store.identity,
            buffer_bytes=max(sizes, default=0),
            resident_bytes=sizes[: self._layout.num_resident],
            written_through=extents.num_in_memory == 0,
        )
        _log.info("%s", self._device.description)

    def initialize(self, masters: ParameterMemory, *, first_values: Sequence[float] = (), show: Show = hidden) -> None:
        """Write the first state and commit it: masters widened from the partition, step counts zero.

        A fresh store becomes generation 0. An initialized store is overwritten as the next generation.

        Args:
            masters: The parameters, of any dtype.
            first_values: ``UpdateRule.first_values`` for the rule's other arrays; empty means zeros.
            show: Shows the progress.

        Raises:
            StorageError: The state could not be written; an earlier generation stays current.
        """
        self._require_no_step()
        self._rebalance()
        self._access.initialize(masters, first_values, self._staging_for, show=show)
        self._end_measurement()

    def begin_step(self, plan: StepPlan) -> None:
        """Start a step and return at once. The caller must not touch the plan's memory until commit or rollback.

        Raises:
            ConfigError: A hyperparameter of an active group is out of range; no step has begun.
            StorageError: After a failed commit, no generation can be written any more; no step has begun.
        """
        self._lacks_step = True
        self._prepare()
        self._step = self._new_step(plan=plan, staging=self._staging_for)
        self._lacks_step = False
        self._step.start()

    def begin_incremental(self, plan: StepPlan, *, binds: bool = False) -> None:
        """Begin a step before its tasklets are known: like :meth:`begin_step`, but no tasklet starts yet.

        ``step.extend`` starts some tasklets. ``step.complete`` starts the others and turns the step into an ordinary
        one, which can be committed. ``roll_back`` may be called at any time.

        Args:
            plan: The step's plan: every parameter is active, and the native core can reach the parameters' memory.
            binds: Whether the caller promises to complete the step unchanged or to skip it, so that gradients are
                released as they are used.

        Raises:
            ConfigError, StorageError: As :meth:`begin_step`.
        """
        assert self.can_roll_back
        self._prepare()
        self._step = self._new_step(plan=plan, staging=self._staging_for, incremental=True, binds=binds)

    def finish(self) -> None:
        """Wait until the step in flight has finished all reads, updates and writes; without a step, return at once.

        Raises:
            StorageError: As ``step.wait``.
        """
        if self._step is not None:
            self._step.finish()

    def commit(self, *, together: Together = nullcontext) -> None:
        """Wait for all writes of the step in flight and make it the current generation.

        Args:
            together: Context entered around waiting and committing, and again around storing the residual of
                compression. With several ranks it must raise on every rank if its body raised on one. Then no rank
                keeps a generation that another could not commit, and every rank learns that one could not store its
                residual.

        Raises:
            StorageError: As ``step.wait``, or the commit record could not be written, or ``together`` raised. The
                previous generation is current: roll back. With one place per tasklet, rollback is impossible and the
                generation written last is current.
            StorageError: A residual could not be stored, here or on another rank. The generation is committed. The
                step of the rank that failed stays in flight, and its rollback raises the same error.
        """
        step = self.step
        with committing(self._store, step.generation, together, overwritten=lambda: step.overwrites):
            step.commit()
        with together() if step.batches.has_residual else nullcontext():
            self._after_commit(step)

    def _after_commit(self, step: Step) -> None:
        """Store the residual and update measurements and counters after a commit."""
        step.batches.feed_back()
        self._store.records.write_residual(self._store.generation)
        self._step = None
        self._end_measurement()
        self._num_steps += 1
        self._numel_updated += step.batches.numel

    @property
    def training(self) -> TrainingRecord | None:
        """The training record written last, or the one from which the training resumed."""
        return self._store.training

    @property
    def is_resumable(self) -> bool:
        """Whether the training record, its residual and its generation are complete on storage.

        The record's generation is on storage if at most one generation has been committed since.
        """
        if self.writes_back:
            stored = self._store.records.stored
            return stored is not None and stored.generation == self._store.stored_generation
        record = self._store.training
        self.complete_record()
        if record is None:
            return False
        lasts = record.generation >= self._store.generation - 1
        # If the residual is missing, the previous record and its residual are complete: no later step has begun.
        return lasts and (self.residual_failure is None or record.number > 1)

    @property
    def residual_failure(self) -> StorageError | None:
        """The error that kept the training record's residual from being written, or None."""
        return self._store.records.residual_failure

    @property
    def awaits_record(self) -> bool:
        """Whether state in memory, or the step in flight, is newer than the training record made last."""
        record = self._store.training
        return self.writes_back and record is not None and record.generation < self._recorded_next

    @property
    def _recorded_next(self) -> int:
        """The generation that a record made now belongs to."""
        return self._store.generation + (self._lacks_step or (self._step is not None and self._step.is_complete))

    @property
    def lacks_step(self) -> bool:
        """Whether the step begun last could not begin on this rank: its record is of no generation here."""
        return self._lacks_step

    def forget_step(self) -> None:
        """Roll back a step that could not begin, if there is one: erase its training record, if that was made.

        Raises:
            StorageError: The record could not be erased.
        """
        if self._lacks_step:
            self._store.forget_training()
            self._lacks_step = False

    def record_training(self, *, step: int, content: bytes, residual: NDArray[np.float32] | None) -> None:
        """Write what the training needs, besides the optimizer state, to resume after the step begun last.

        The record takes effect when that step is committed. It must be written before the next step begins.

        Args:
            step: Number of optimizer steps of the training so far, for messages.
            content: The serialized state of the training.
            residual: Memory of the residual of compressed gradients; None means there is none. A thread writes it after
                the step's commit, while the training continues; :meth:`complete_record` waits for it.

        Raises:
            StorageError: The record could not be written. The previous record is intact.
        """
        generation = self._recorded_next
        self._store.record_training(
            generation=generation,
            step=step,
            content=content,
            has_steps=generation > self._store.generation or self._num_steps > 0,
            residual=residual,
        )

    def rewrite_records(self, changed: Callable[[TrainingRecord], bytes]) -> None:
        """Replace the content of training records after a step. Raises as :meth:`record_training`.

        Args:
            changed: Function that returns a record's new content.
        """
        self._store.records.rewrite(changed)

    def end_records(self, reason: str) -> None:
        """Mark the training as not resumable, since no more records follow.

        Args:
            reason: The reason, reported by an attempt to resume.

        Raises:
            StorageError: The mark could not be written.
        """
        self._store.records.end(reason)

    def note_checkpoint(self, path: str, *, step: int) -> None:
        """Note a checkpoint as :meth:`StateStore.note_checkpoint` does."""
        self._store.note_checkpoint(path, step=step)

    def complete_record(self) -> None:
        """Wait until the training record's residual is on storage or its write has failed.

        The next generation overwrites the places of the previous one. With several ranks, its writes may begin only
        after this call has returned on every rank.
        """
        self._store.records.finish_residual()

    def read_residual(self, into: NDArray[np.float32]) -> None:
        """Read the residual that belongs to the training record.

        Args:
            into: float32[residual_numel of the record], which is filled.

        Raises:
            StorageCorruptError: The residual is damaged.
            StorageError: The residual cannot be read.
        """
        self._store.records.read_residual(into)

    def roll_back(self) -> None:
        """Roll the step in flight back, and read its parameters back from the current generation.

        If an interrupt came after the step's commit, finish the step instead.

        Raises:
            StorageError: The state could not be read back (the call may be repeated), or each tasklet has one place
                (``durability="none"``) and the step may have overwritten it.
        """
        step = self.step
        step.stop()
        if self._is_committed(step):
            self._after_commit(step)
            return
        if step.overwrites:
            raise StorageError(
                f"A step cannot be rolled back with TransferConfig({self.unsafe}): it overwrote the state.",
                "Resume from a checkpoint, and use durability='step' to survive such a failure.",
            ) from step.failure
        step.read_back()
        self._store.forget_training()
        self._step = None

    def traffic(self) -> Traffic:
        """Return the cumulative counters since :meth:`open`, of steps and of all other traffic."""
        moved = self._device.counters()
        control_bytes = moved.control_bytes + self._store.control_bytes
        return replace(
            moved,
            control_bytes=control_bytes,
            steps=self._num_steps,
            numel=self._numel_updated,
            background_read_bytes=self._background_read_bytes,
        )

    def close(self, *, remove: bool) -> None:
        """Stop a step in flight, and close the device and the store; idempotent.

        Args:
            remove: Whether to delete the state on storage.
        """
        self._is_closed = True
        if self._step is not None:
            self._step.stop()
            self._step = None
        self._device.close()
        if remove:
            # Writes that are still in progress go to deleted files.
            self._store.close(remove=True)
        else:
            self._device.when_written(partial(self._store.close, remove=False))

    def _prepare(self) -> None:
        """Check that a step may begin, and adapt the tasklets' assigned folders to measured bandwidth."""
        self._require_no_step()
        self.complete_record()
        self._store.require_usable()
        self._rebalance()

    def _rebalance(self) -> None:
        """Spread later writes in proportion to measured bandwidth, and start to measure the next step."""
        if self._balance is None:
            return
        counts = self._balance.better(self._store.counts)
        if counts is not None:
            self._store.spread(counts)
        self._balance.begin(self._device.counters().folders)

    def _end_measurement(self) -> None:
        if self._balance is not None:
            self._balance.end(self._device.counters().folders)

    def _require_no_step(self) -> None:
        assert self._step is None, "a step is in flight: commit it or roll it back"

    def _staging_for(self, dtype: native.DType) -> StagingBuffer:
        """Return the staging buffer, as large as the ring. All partitions of a handler share it and its dtype."""
        if self._staging is None:
            self._staging = StagingBuffer(self._layout, dtype=dtype, nbytes=self._device.ring_bytes)
        assert self._staging.dtype == dtype
        return self._staging
