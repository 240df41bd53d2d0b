"""The transfer handler: runs step plans on a storage device and keeps the store's generations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity.devices.base import StorageDevice, Traffic
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.store import StateStore
from lightning_smartinfinity.transfer.balance import Balance
from lightning_smartinfinity.transfer.layout import PartitionLayout
from lightning_smartinfinity.transfer.plan import CudaPartition, Flat, StagedPartition, StepPlan
from lightning_smartinfinity.transfer.rules import UpdateRule
from lightning_smartinfinity.transfer.staging import StagingBuffer
from lightning_smartinfinity.transfer.state_access import StateAccess, Together, committing
from lightning_smartinfinity.transfer.step import Step
from lightning_smartinfinity.transfer.windows import Window

__all__ = ["TransferHandler"]

_log = logging.getLogger(__name__)


class TransferHandler:
    """One rank's optimizer state on storage, stepped tasklet by tasklet.

    A step is ``begin_step`` -> ``wait`` (any number of times) -> ``commit``, or ``rollback`` instead of ``commit`` at
    any time after ``begin_step``. Everything else asks that no step be in flight. Calls come from one thread.

    A failure leaves the current generation alone, on storage and here. Only with one place each (``durability="none"``)
    the state that was being overwritten is lost.

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
        self._rule = rule
        self._access = StateAccess(layout, store, device, names=rule.arrays)
        num_folders = layout.extents.num_devices
        self._balance = Balance(num_folders) if device.moves_tasklets and num_folders > 1 else None
        self._step: Step | None = None
        self._staging: StagingBuffer | None = None
        self._num_steps = 0
        self._numel_updated = 0

    @property
    def generation(self) -> int:
        """Committed generation, -1 before :meth:`initialize`. Every commit adds one."""
        return self._store.generation

    @property
    def steps(self) -> NDArray[np.int64]:
        """int64[num_parameters]: committed number of updates of each parameter; a copy."""
        return self._store.steps.copy()

    @property
    def in_flight(self) -> bool:
        """A step has begun and is neither committed nor rolled back."""
        return self._step is not None

    @property
    def can_roll_back(self) -> bool:
        """Whether a step leaves the current generation alone: not with one place each (``durability="none"``)."""
        return self._layout.extents.num_slots > 1

    @property
    def cache_bytes(self) -> int:
        """Host memory of the tasklets whose state stays there."""
        return self._device.cache_bytes

    @property
    def storage_bytes(self) -> int:
        """Of the state files, free places included."""
        return self._store.storage_bytes

    @property
    def ring_bytes(self) -> int:
        """Host memory of the device's ring and, once they are in use, of its slots or of the staging buffer."""
        return self._device.ring_bytes + (self._staging.nbytes if self._staging is not None else 0)

    def open(self) -> None:
        """Open the device: its threads, ring buffers and memory for resident tasklets.

        Raises:
            StorageError: They cannot be had.
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

    def initialize(
        self, masters: Sequence[Flat] | CudaPartition | StagedPartition, *, first_values: Sequence[float] = ()
    ) -> None:
        """Write the first state and commit it: masters widened from the partition, step counts zero.

        A fresh store becomes generation 0. An initialized store is overwritten as the next generation.

        Args:
            masters: Each sub-group's parameters, of any dtype; as ``StepPlan.outputs``.
            first_values: Of the rule's other arrays, ``UpdateRule.first_values``; none: zeros.

        Raises:
            StorageError: It could not be written; an earlier generation stays current.
        """
        self._require_no_step()
        self._spread()
        if isinstance(masters, Sequence):
            self._access.initialize(masters, first_values)
        elif isinstance(masters, CudaPartition):
            self._access.initialize_from_cuda(masters, first_values)
        else:
            self._access.initialize_staged(masters, self._staging_for(masters), first_values)
        self._measured()

    def begin_step(self, plan: StepPlan) -> None:
        """Start a step and return at once. Memory named in the plan stays untouched until commit or rollback.

        Raises:
            ConfigError: A hyperparameter of an active group is out of range; nothing has begun.
            StorageError: An earlier commit failed beyond repair; nothing has begun.
        """
        self._require_no_step()
        self._store.require_usable()
        self._spread()
        outputs = plan.outputs
        staging = None if isinstance(outputs, (Sequence, CudaPartition)) else self._staging_for(outputs)
        self._step = Step(self._layout, self._store, self._device, rule=self._rule, plan=plan, staging=staging)
        self._step.start()

    def begin_growing(self, plan: StepPlan) -> None:
        """Begin a step before it is known what belongs to it: as :meth:`begin_step`, but nothing is updated yet.

        ``extend`` starts some tasklets; ``complete`` the others and turns it into an ordinary step; ``rollback`` undoes
        it. It is never committed otherwise.

        Args:
            plan: With every parameter active, and parameters in host memory.

        Raises:
            ConfigError, StorageError: As :meth:`begin_step`.
        """
        self._require_no_step()
        self._store.require_usable()
        self._spread()
        assert isinstance(plan.outputs, Sequence) and self.can_roll_back
        self._step = Step(self._layout, self._store, self._device, rule=self._rule, plan=plan, staging=None, grows=True)

    def extend(self, tasklets: Sequence[int]) -> None:
        """Start these tasklets of a growing step, whose gradients are all there; return at once.

        Raises:
            StorageError: As :meth:`wait`.
        """
        self._require_step().open(tasklets)

    def complete(self, plan: StepPlan) -> bool:
        """Turn a growing step into that of this plan, which differs in what is active and in hyperparameters only.

        Returns:
            Whether it could be done; if not, because something was updated otherwise, roll the step back.

        Raises:
            StorageError: As :meth:`wait`.
        """
        return self._require_step().complete(plan)

    @property
    def grows(self) -> bool:
        """A step has begun that can only be completed or rolled back."""
        return self._step is not None and self._step.grows

    def wait(self, parameters: slice | Iterable[int] | None = None) -> None:
        """Return when these parameters are updated in the partition.

        Args:
            parameters: Parameter indices: some, or a slice with step 1; None: all.

        Raises:
            StorageError: The step failed (StorageFullError, StorageCorruptError where those fit); roll it back.
        """
        if parameters is None or isinstance(parameters, slice):
            runs = [parameters or slice(None)]
        else:
            runs = [slice(index, index + 1) for index in parameters]
        self._require_step().wait(runs)

    def drain(self) -> None:
        """Return when the step in flight, if any, has nothing left to read, compute or write.

        Raises:
            StorageError: As :meth:`wait`.
        """
        if self._step is not None:
            self._step.drain()

    def commit(self, *, together: Together = nullcontext) -> None:
        """Make the step in flight the current generation; waits for all its writes.

        Args:
            together: Entered around waiting and committing, and once more where compression has a residual. With
                several ranks it must raise on each of them if its body raised on one; so none keeps a generation that
                another could not commit, and all are told of a residual that one could not keep.

        Raises:
            StorageError: As :meth:`wait`, or the commit record could not be written, or ``together`` raised; the
                previous generation is current: roll back. With one place each that cannot be done, and the generation
                is the one that was written last.
            StorageError: What compression left out cannot be kept, here or elsewhere. The generation is committed;
                here the step stays in flight, and a rollback says the same.
        """
        step = self._require_step()
        with committing(self._store, step.generation, together):
            step.commit()
        with together() if step.has_residual else nullcontext():
            self._finish(step)

    def _finish(self, step: Step) -> None:
        """What follows a commit."""
        step.feed_back()
        self._step = None
        self._measured()
        self._num_steps += 1
        self._numel_updated += step.numel

    def rollback(self) -> None:
        """Abandon the step in flight: its parameters are restored in the partition from the current generation.

        A step that an interrupt found committed already is finished instead.

        Raises:
            StorageError: The state could not be read back (call again, or give up), or the store has one place
                (``durability="none"``) and the step may have overwritten it.
        """
        step = self._require_step()
        step.stop()
        if self.can_roll_back and self._store.generation == step.generation:
            self._finish(step)
            return
        if step.overwrites:
            raise StorageError(
                "A step cannot be rolled back with TransferConfig(durability='none'): it overwrote the state.",
                "Resume from a checkpoint, and use durability='step' to survive such a failure.",
            ) from step.failure
        step.restore()
        self._step = None

    def scan(self, visit: Callable[[Window], object]) -> None:
        """Hand over the whole committed state, window after window in partition order.

        It takes as much host memory as the ring, or two tasklets where that is more.

        Args:
            visit: Called with each window, whose arrays hold the state during the call.

        Raises:
            StorageError: The state could not be read, or is not what was written.
        """
        self._require_no_step()
        self._access.scan(visit)

    def replace(
        self, fill: Callable[[Window], object], *, steps: NDArray[np.int64], together: Together = nullcontext
    ) -> None:
        """Replace the whole state, window after window in partition order, and commit it.

        It takes as much host memory as :meth:`scan`. The partition in memory is the caller's: write the parameters too.
        If ``fill`` or a write raises, here or under ``together`` elsewhere, the previous generation stays current;
        only with one place each (``durability="none"``) the state is lost.

        Args:
            fill: Called with each window, all of whose arrays it fills.
            steps: int64[num_parameters].
            together: Entered around writing and committing. With several ranks it must raise on each of them if its
                body raised on one; so none keeps a generation that another could not commit.

        Raises:
            StorageError: It could not be written.
        """
        self._require_no_step()
        self._access.replace(fill, steps=steps, together=together)

    def read_parameter(self, parameter: int, *, names: Sequence[str] | None = None) -> dict[str, NDArray[np.float32]]:
        """One parameter's committed arrays.

        Args:
            parameter: Parameter index.
            names: Which; None: all of ``rule.arrays``.

        Returns:
            float32[real_numel] by name.

        Raises:
            StorageError: As :meth:`read`.
        """
        self._require_no_step()
        return self._access.read_parameter(parameter, names or self._rule.arrays)

    def modify_parameter(self, parameter: int, values: Mapping[str, NDArray[np.float32]]) -> None:
        """Replace some of one parameter's arrays and commit. See :meth:`modify`."""
        self.modify({parameter: values})

    def modify(
        self, values: Mapping[int, Mapping[str, NDArray[np.float32]]], *, together: Together = nullcontext
    ) -> None:
        """Replace some arrays of some parameters, as one commit.

        The partition in memory is the caller's: after replacing a master, write the parameter too. Every rank calls it
        the same number of times, so that generations stay common to all.

        In a state format that rounds, values are rounded to nearest. Elements that are not replaced keep theirs, unless
        they share a block of 8-bit codes with new ones so large that its exponent no longer reaches down to them.

        Args:
            values: By parameter index, then array name: float32[real_numel].
            together: As for :meth:`replace`.

        Raises:
            StorageError: It could not be written; the previous generation stays current.
        """
        self._require_no_step()
        self._access.modify(values, together=together)

    def read_range(self, begin: int, end: int, *, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Elements ``[begin, end)`` of the flat partition, padding included.

        Args:
            begin: First element.
            end: One past the last.
            names: Which of ``rule.arrays``.

        Returns:
            float32[end - begin] by name.

        Raises:
            StorageError: As :meth:`read`.
        """
        self._require_no_step()
        return self._access.read_range(begin, end, names)

    def modify_range(
        self, begin: int, values: Mapping[str, NDArray[np.float32]], *, together: Together = nullcontext
    ) -> None:
        """Replace some arrays of a run of the flat partition, as one commit. As :meth:`modify` otherwise.

        Args:
            begin: First element.
            values: By array name: contiguous float32, all equally long.
            together: As for :meth:`replace`.

        Raises:
            StorageError: It could not be written; the previous generation stays current.
        """
        self._require_no_step()
        self._access.modify_range(begin, values, together=together)

    def traffic(self) -> Traffic:
        """Cumulative counters since :meth:`open`, of steps and of everything else."""
        moved = self._device.counters()
        control_bytes = moved.control_bytes + self._store.control_bytes
        return replace(moved, control_bytes=control_bytes, steps=self._num_steps, numel=self._numel_updated)

    def close(self, *, remove: bool) -> None:
        """Close the device and the store, abandoning a step in flight; idempotent.

        Args:
            remove: Delete the state on storage.
        """
        if self._step is not None:
            self._step.stop()
            self._step = None
        self._device.close()
        if remove:
            # What is still to be written goes to files without a name.
            self._store.close(remove=True)
        else:
            self._device.when_written(partial(self._store.close, remove=False))

    def _spread(self) -> None:
        """Between two steps: from the next one on tasklets go where bandwidth wants them; that one is measured."""
        if self._balance is None:
            return
        counts = self._balance.better(self._store.counts)
        if counts is not None:
            self._store.spread(counts)
        self._balance.begin(self._device.counters().folders)

    def _measured(self) -> None:
        if self._balance is not None:
            self._balance.end(self._device.counters().folders)

    def _require_step(self) -> Step:
        assert self._step is not None, "no step has begun"
        return self._step

    def _require_no_step(self) -> None:
        assert self._step is None, "a step is in flight: commit it or roll it back"

    def _staging_for(self, partition: StagedPartition) -> StagingBuffer:
        """As large as the ring, and kept: every partition of a handler has one dtype."""
        if self._staging is None:
            self._staging = StagingBuffer(self._layout, dtype=partition.dtype, nbytes=self._device.ring_bytes)
        assert self._staging.dtype == partition.dtype
        return self._staging
