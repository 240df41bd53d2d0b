"""The state store: one rank's optimizer state on storage and its commit record."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import SmartInfinityError, StorageError
from lightning_smartinfinity.settings import IO_TIMEOUT
from lightning_smartinfinity.storage.extents import ExtentMap, blocks_of
from lightning_smartinfinity.storage.folders.direct import open_state_file
from lightning_smartinfinity.storage.folders.manifest import Manifest
from lightning_smartinfinity.storage.folders.rank_folder import COMMIT_NAME, STATE_NAME, RankFolder
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.storage.io.files import LimitedCalls, limited
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.records.record_writes import TrainingRecords
from lightning_smartinfinity.storage.records.residual_write import WriteOptions
from lightning_smartinfinity.storage.records.training_record import RECORD_VERSION, TrainingRecord
from lightning_smartinfinity.storage.spread import Occupied, Placement, next_placement, places_needed
from lightning_smartinfinity.storage.state.capacities import Capacities
from lightning_smartinfinity.storage.state.commit_record import CommitRecord, erase_record, flush_records, write_record
from lightning_smartinfinity.storage.state.pin import Pin

__all__ = ["StateStore", "Together", "Write"]

Write = Callable[[Placement, NDArray[np.intp]], object]
"""Writes the extents of some tasklets from memory to their places in a placement."""

Together = Callable[[], AbstractContextManager[object]]
"""Makes a context that raises on every rank if its body raised on one; ``nullcontext`` for one rank."""


class StateStore:
    """``<storage>/<job>/rank-<n>/`` in every storage folder, owned (locked) by this process.

    Made by :func:`~lightning_smartinfinity.storage.state.opening.create_store` or ``recover_store``.

    Attributes:
        files: State file of each storage folder.
        identity: The identity that every extent carries.
        manifest: The content of manifest.json.
        records: The training records.
        lost: Why the current generation cannot be read any more; None if it can.
    """

    def __init__(
        self,
        folders: Sequence[RankFolder],
        manifest: Manifest,
        record: CommitRecord,
        *,
        direct_io: str,
        io_engine: str = "auto",
        io_timeout: float = IO_TIMEOUT,
    ) -> None:
        self.manifest = manifest
        self.identity = manifest.identity
        self._record = record
        self._stored = self._spilled = record  # the generation on storage; and the one whose extents are there
        self._num_held = 0
        self._previous: CommitRecord | None = None
        self._folders = tuple(folders)
        self._unusable: StorageError | None = None
        self.lost: str | None = None
        self._pins: list[Pin] = []
        self._commit_bytes = 0
        self._assigned = manifest.extents.first_assigned if record.generation < 0 else record.placement.devices
        self._capacities = Capacities(folders, manifest.extents, ranks=manifest.world_size)
        self.files = tuple(open_state_file(folder.inside, STATE_NAME, direct_io) for folder in folders)
        self._io_timeout = io_timeout
        self._in_time = LimitedCalls(self.files, seconds=io_timeout)
        direct = self.files[0].direct
        options = WriteOptions(
            direct=direct,
            io_engine="plain" if io_engine == "auto" and not direct else io_engine,
            io_timeout=io_timeout,
            flush=manifest.durability == "power",
            in_time=self._in_time,
        )
        self.records = TrainingRecords(folders[0], identity=self.identity, options=options)

    @property
    def extents(self) -> ExtentMap:
        """The extents of the tasklets."""
        return self.manifest.extents

    @property
    def storage_bytes(self) -> int:
        """Bytes of all places that the state files have now."""
        return self._capacities.nbytes

    @cached_property
    def blocks(self) -> tuple[native.Blocks | None, ...]:
        """How each tasklet's elements are divided into blocks, for the native core; None: by the grid alone."""
        return blocks_of(self.extents)

    @property
    def control_bytes(self) -> int:
        """Bytes of the commit records, training records and residuals written so far."""
        return self._commit_bytes + self.records.nbytes

    @property
    def generation(self) -> int:
        """Current generation, -1 before the first commit."""
        return self._record.generation

    @property
    def placement(self) -> Placement:
        """The place of each tasklet's extent."""
        return self._record.placement

    @property
    def assigned(self) -> NDArray[np.uint16]:
        """uint16[num_tasklets]: the device that each tasklet is written to if its file has a free place."""
        return self._assigned

    @property
    def counts(self) -> list[int]:
        """Number of tasklets on storage that are assigned to each device."""
        on_storage = self._assigned[self.extents.num_in_memory :]
        return [int((on_storage == device).sum()) for device in range(self.extents.num_devices)]

    @property
    def tasklet_generations(self) -> NDArray[np.int64]:
        """int64[num_tasklets]: generation of each extent; a tasklet without gradient keeps its old one."""
        return self._record.tasklet_generations

    @property
    def steps(self) -> NDArray[np.int64]:
        """int64[num_parameters]: updates of each parameter so far."""
        return self._record.steps

    @property
    def training(self) -> TrainingRecord | None:
        """The training record written or recovered last; None if there is none."""
        return self.records.current

    def next_placement(self) -> Placement:
        """Return the places of the next generation. With two per tasklet, none of them is occupied or pinned.

        Only this function chooses places to write to, so pinned places are not written to. Tasklets that are written
        back keep theirs.
        """
        return self._placement(first=self._num_held or self.extents.num_in_memory)

    def _placement(self, *, first: int) -> Placement:
        pinned = [pin.occupied for pin in self._live_pins()]
        if self.writes_back:
            pinned.append(Occupied(self._stored.placement, np.ones(self.extents.num_tasklets, np.bool_)))
        return next_placement(
            self.placement,
            lying=self.tasklet_generations >= 0,
            assigned=self._assigned,
            capacities=list(self._capacities),
            first=first,
            in_place=self.extents.places_per_tasklet == 1,
            pinned=pinned,
        )

    @property
    def writes_back(self) -> bool:
        """Whether generations are completed on storage only by :meth:`persist`, after :meth:`write_back`."""
        return self._num_held > 0

    @property
    def num_held(self) -> int:
        """Number of tasklets, from the first on, that are written back."""
        return self._num_held

    @property
    def stored_generation(self) -> int:
        """The generation whose commit record is on storage, with all extents that it names."""
        return self._stored.generation

    @property
    def is_recorded(self) -> bool:
        """Whether the training record made last is of the current generation."""
        return self.training is not None and self.training.generation == self.generation

    @property
    def is_pinned(self) -> bool:
        """Whether places of a generation are pinned."""
        return bool(self._live_pins())

    def write_back(self, num_held: int) -> None:
        """From now on, keep generations of these first tasklets in memory, and commit generations there only.

        The generation on storage stays whole until :meth:`persist` replaces it: extend the files so that it has places
        beside those of two more generations of the other tasklets, and of one of these.

        Args:
            num_held: Number of tasklets.

        Raises:
            StorageFullError: The file systems have no room for these places.
            StorageError: A file cannot be extended.
        """
        assert self.extents.places_per_tasklet > 1 and self._stored is self._record
        self._num_held, self._spilled = num_held, self._record
        path = self._folders[0].path / COMMIT_NAME
        try:
            with io_limit(self._io_timeout):
                wanted = self._places_needed(self._assigned)
                limited("Extending", self._folders[0].path / STATE_NAME, self._capacities.make_room, wanted)
            # Otherwise a power loss could leave the first training record without any commit record, as damage does.
            self._in_time("Flushing", path, self._begin_records)
        except BaseException:
            self._num_held = 0
            raise
        self.records.hold()

    def _begin_records(self) -> None:
        """Flush the commit records, and mark the half without one: a kill leaves the mark, a lost record does not."""
        inside = self._folders[0].inside
        if self.generation == 0:
            erase_record(inside, replace(self._record, generation=1), flush=False)
        flush_records(inside)

    def write_through(self) -> None:
        """Undo :meth:`write_back`, before another generation was committed."""
        assert self._record is self._stored
        self._num_held = 0
        self.records.write_at_once()

    def spill(self, write: Write, *, deadline: float = math.inf, together: Together = nullcontext) -> None:
        """Write the current generation's extents to storage, unless they are there, without a commit record.

        Its number may become one higher: the number's parity selects the half of commit.bin, and the other half holds
        the generation that stays until this one is complete.

        Args:
            write: Function that writes the extents of some tasklets from memory to their places in a placement.
            deadline: Time of ``time.monotonic`` by which the extents must be flushed.
            together: Context entered around the writes, unless the extents are there.

        Raises:
            StorageError: They could not be written, or ``together`` raised.
        """
        if self.is_spilled:
            return
        before = self._record
        distance = self.generation - self._stored.generation
        self._record = replace(before, generation=self.generation + (distance + 1) % 2)
        try:
            with together():
                (changed,) = np.nonzero(self.tasklet_generations != self._stored.tasklet_generations)
                changed = changed[changed < self._num_held]
                placement = self.placement.after(self._placement(first=0), changed)
                write(placement, changed)
                self._flush_files(self._in_time.within(deadline - time.monotonic()))
        except BaseException:  # an interrupt as well
            self._record = before
            raise
        self._spilled = replace(self._record, placement=placement)
        self.records.renumber(before.generation, self.generation)

    @property
    def is_spilled(self) -> bool:
        """Whether all extents of the current generation are on storage."""
        return self._spilled.generation == self.generation

    def persist(self, write: Write, *, deadline: float = math.inf, together: Together = nullcontext) -> None:
        """Complete the current generation on storage, so that it survives a power loss, with its training record.

        Args:
            write: As for :meth:`spill`.
            deadline: As for :meth:`spill`.
            together: Context entered around writing the extents, and again around writing the records. Until it has
                been left, the generation before is whole: a kill between two ranks' records leaves that to both.

        Raises:
            StorageError: It could not be written, or ``together`` raised. The generation before stays.
        """
        self.spill(write, deadline=deadline, together=together)
        has_record, before = self.is_recorded, (self._record, self._stored)
        try:
            with together(), self.records.storing(self._is_complete) if has_record else nullcontext():
                self._complete(self._spilled)
        except SmartInfinityError:
            if self._is_complete():  # another rank failed
                self._record, self._stored = before
                self._erase_spilled()
                if has_record:
                    self.records.undo_storing()
            raise
        if not has_record:
            with suppress(StorageError):
                self.records.complete_end()

    def _is_complete(self) -> bool:
        return self._stored is self._spilled

    def _complete(self, record: CommitRecord) -> None:
        try:
            self._commit_bytes += self._write_record(record, flush=True)
            self._record = self._stored = record
        except BaseException:
            if self._stored is not record:
                self._erase_spilled()
            raise

    def _erase_spilled(self) -> None:
        # Should the record stay, it names places that are written to again, and recovery takes the generation before.
        inside, path = self._folders[0].inside, self._folders[0].path / COMMIT_NAME
        with suppress(StorageError):
            self._in_time("Erasing the commit record", path, erase_record, inside, self._spilled, flush=False)

    def pin(self) -> Pin:
        """Keep later generations from the places of this one until they are released. Between generations only.

        Raises:
            StorageError: As for :meth:`make_room_to_pin`.
        """
        assert all(pin.record.generation == self.generation for pin in self._live_pins()), (
            "one generation is pinned at a time"
        )
        self.make_room_to_pin()
        self._pins.append(Pin(self._spilled if self.writes_back else self._record))
        return self._pins[-1]

    def make_room_to_pin(self) -> None:
        """Extend the files to three places per tasklet: a pinned one, and two for the steps meanwhile.

        Raises:
            StorageFullError: The file systems have no room for the third places.
            StorageError: A file cannot be extended.
        """
        assert self.extents.places_per_tasklet > 1 and self.generation >= 0
        if self.writes_back:
            assert self.is_spilled, "the generation is on storage"
            return  # its places stay
        here = np.bincount(self.placement.devices, minlength=self.extents.num_devices)
        wanted = [both + int(pinned) for both, pinned in zip(self._places_needed(self._assigned), here, strict=True)]
        with io_limit(self._io_timeout):
            limited("Extending", self._folders[0].path / STATE_NAME, self._capacities.make_room, wanted)

    def _live_pins(self) -> list[Pin]:
        self._pins = [pin for pin in self._pins if pin.occupied.held.any()]
        return self._pins

    def _places_needed(self, assigned: NDArray[np.uint16]) -> list[int]:
        needed = places_needed(
            self.placement,
            lying=self.tasklet_generations >= 0,
            assigned=assigned,
            num_devices=self.extents.num_devices,
            first=self._num_held or self.extents.num_in_memory,
            in_place=self.extents.places_per_tasklet == 1,
        )
        if not self.writes_back:
            return needed
        also = np.concatenate([self._stored.placement.devices, assigned[: self._num_held]])
        return [int(both) for both in np.bincount(also, minlength=self.extents.num_devices) + needed]

    def restore_places(self) -> None:
        """Reserve places for the next generation, in files that may have been truncated after this one's places."""
        self._capacities.restore([self.extents.places_per_tasklet * count for count in self.counts])

    def spread(self, counts: Sequence[int] | NDArray[np.int64]) -> bool:
        """Change how many tasklets are assigned to each device; extend files as needed. Between generations only.

        Args:
            counts: Number of tasklets of each device; their sum is the number of tasklets on storage.

        Returns:
            Whether assignments have changed. They stay if the file systems have too little room, or while a generation
            is pinned.
        """
        if self._live_pins():
            return False
        assigned = self.extents.assigned(counts)
        wanted = self._places_needed(assigned)
        with io_limit(self._io_timeout):
            if not limited("Extending", self._folders[0].path / STATE_NAME, self._capacities.grow, wanted):
                return False
        self._assigned = assigned
        return True

    def require_usable(self) -> None:
        """Check that a generation may be written.

        Raises:
            StorageError: A record that was rolled back could not be erased.
        """
        if self._unusable is not None:
            raise self._unusable

    def commit(
        self,
        *,
        generation: int,
        placement: Placement,
        tasklet_generations: NDArray[np.int64],
        steps: NDArray[np.int64],
    ) -> None:
        """Make a generation current, whose extents are written. With ``durability="power"``, flush them first.

        Args:
            generation: ``self.generation + 1``.
            placement: Places of its extents.
            tasklet_generations: int64[num_tasklets]: generation of each extent.
            steps: int64[num_parameters]: updates of each parameter so far.

        Raises:
            StorageError: The record could not be written; the previous generation stays current.
        """
        assert generation == self.generation + 1
        self.require_usable()
        flush = self.manifest.durability == "power"
        record = CommitRecord(
            generation=generation,
            placement=placement.copy(),
            tasklet_generations=tasklet_generations.copy(),
            steps=steps.copy(),
        )
        if flush:
            self._flush_files()
        before = self._record
        if self.writes_back:
            self._previous, self._record = before, record
            return
        try:
            self._commit_bytes += self._write_record(record, flush=flush)
            self._previous, self._record, self._stored = before, record, record
        except BaseException:  # an interrupt as well
            if self._record is not record:
                self._forget(record, flush=flush)
            raise

    @property
    def can_revert(self) -> bool:
        """Whether the files have places for the generation before the last commit."""
        return self.extents.places_per_tasklet > 1

    def lose(self, error: BaseException) -> None:
        """Refuse all later generations: a change of state that is written back has failed half-way."""
        self.lost = f"optimizer state in host memory was overwritten by a change that failed. {error}"
        self._unusable = StorageError(self.lost, "Resume from storage; with durability='step' such a change is undone.")

    def revert(self) -> None:
        """Roll the last :meth:`commit` back; nothing may have been written since.

        If the record cannot be erased, :meth:`require_usable` raises from now on.
        """
        assert self._previous is not None and self.can_revert
        reverted, self._record = self._record, self._previous
        self._previous = None
        if self.writes_back:  # nothing was written
            return
        self._stored = self._record
        self._forget(reverted, flush=self.manifest.durability == "power")

    def record_training(
        self,
        *,
        generation: int,
        step: int,
        content: bytes,
        has_steps: bool,
        residual: NDArray[np.float32] | None = None,
        version: int = RECORD_VERSION,
    ) -> None:
        """Write what a training needs, in addition to a generation's state, to resume there; see ``training_record``.

        Args:
            generation: The newest generation, or the next one if its step is in flight.
            step: Optimizer steps of the training so far, for messages.
            content: What the training needs.
            has_steps: Whether the training has taken a step since it began.
            residual: float32 memory of the residual of compressed gradients. ``records`` writes it in the background.
            version: Format version of the content.

        Raises:
            StorageError: The record could not be written. The record before it is intact.
        """
        self.records.write(
            generation=generation,
            step=step,
            content=content,
            has_steps=has_steps,
            residual=residual,
            version=version,
        )
        self.records.write_residual(self.generation)

    def forget_training(self) -> None:
        """Erase the training record if its generation was not committed: another state may get that number.

        Raises:
            StorageError: The record could not be erased.
        """
        self.records.forget_behind(self.generation)

    def keep(self) -> None:
        """Flush the current generation, and mark this store ``keep``, as ``TransferConfig.keep`` does.

        Raises:
            StorageError: The generation could not be flushed, or a manifest could not be written.
        """
        with io_limit(self._io_timeout):
            limited("Flushing", self._folders[0].path / STATE_NAME, self._keep)

    def _keep(self) -> None:
        self._flush_files()
        flush_records(self._folders[0].inside)
        self.manifest = replace(self.manifest, keep=True)
        for device, folder in enumerate(self._folders):
            folder.write_manifest(self.manifest.for_device(device))

    def note_checkpoint(self, path: str, *, step: int) -> None:
        """Note in every folder which checkpoint of the training is the newest one.

        Raises:
            StorageError: A note could not be written.
        """
        with io_limit(self._io_timeout):
            for folder in self._folders:
                limited("Writing", folder.path, folder.note_checkpoint, path, step=step)

    def close(self, *, remove: bool) -> None:
        """Close the files and release the lock; idempotent.

        Args:
            remove: Whether to delete this rank's folders, and the job's folder if it is then empty.
        """
        self.records.finish_residual()  # may take longer than the limit of a call
        if self._folders:
            self._in_time("Closing", self._folders[0].path / STATE_NAME, self.release, remove)

    def release(self, remove: bool) -> None:
        """Close the files and release the lock as :meth:`close` does, without a time limit."""
        for file in self.files:
            file.close()
        if remove:  # of all folders first: what a kill leaves must not look like a part of a training
            for folder in self._folders:
                folder.disown()
        for folder in self._folders:
            folder.close(remove=remove)
        self._folders = ()

    def _flush_files(self, in_time: LimitedCalls | None = None) -> None:
        for file in self.files:
            with storage_errors("Flushing", file.path):
                (in_time or self._in_time)("Flushing", Path(file.path), file.sync)

    def _write_record(self, record: CommitRecord, *, flush: bool) -> int:
        inside, job, path = self._folders[0].inside, self.manifest.job, self._folders[0].path / COMMIT_NAME
        return self._in_time("Writing the commit record", path, write_record, inside, record, job=job, flush=flush)

    def _forget(self, record: CommitRecord, *, flush: bool) -> None:
        # After a crash, recovery could still read this record. Its places are written to again after the rollback, so
        # it must be erased first. If that fails, nothing may be written to them.
        try:
            inside, path = self._folders[0].inside, self._folders[0].path / COMMIT_NAME
            self._in_time("Erasing the commit record", path, erase_record, inside, record, flush=flush)
        except StorageError as error:
            self._unusable = error
