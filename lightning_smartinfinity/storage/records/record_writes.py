"""Writes the training records of a store that this process owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.storage.folders.rank_folder import RESIDUAL_NAMES, TRAINING_NAMES, RankFolder
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.records.residual_file import read_residual
from lightning_smartinfinity.storage.records.residual_write import ResidualWrite, WriteOptions
from lightning_smartinfinity.storage.records.training_record import (
    ENDED,
    RECORD_VERSION,
    TrainingRecord,
    erase_training_record,
    packed,
    read_training_records,
    record_name,
    residual_of,
    write_training_record,
)

__all__ = ["TrainingRecords"]


class TrainingRecords:
    """The training records of a store that this process owns.

    Args:
        folder: The rank's first folder. Writing the first record creates both files.
        identity: Identity of the store, as in its extents.
        options: Options for writing residuals; records are flushed and limited in time likewise.

    Attributes:
        current: The record made or resumed from last; None if there is none.
        stored: The record written or resumed from last; None if there is none.
        holds: Whether :meth:`write` only keeps the record in memory, until :meth:`storing` writes and flushes it.
        run: ``TrainingRecord.run`` of the records to write.
        residual_failure: Error of the last finished write of a residual, or None.
        nbytes: Bytes of the records and residuals written so far.
    """

    def __init__(self, folder: RankFolder, *, identity: native.Identity, options: WriteOptions) -> None:
        self.current: TrainingRecord | None = None
        self.stored: TrainingRecord | None = None
        self.holds = False
        self.run = bytes(identity.job)
        self.residual_failure: StorageError | None = None
        self.nbytes = 0
        self._folder = folder
        self._path = folder.path / TRAINING_NAMES[0]
        self._identity = identity
        self._options = options
        self._in_time = options.in_time
        # Of the last call of write(), even if it failed.
        self._last_number: int | None = None
        self._last_generation = -1
        self._before: TrainingRecord | None = None  # the one before the current one
        self._ended: TrainingRecord | None = None  # that end() has put off
        self._residual: NDArray[np.float32] | None = None  # that of the current record, until its write begins
        self._num_made = 0
        # That storing() replaced, and the current one before it.
        self._replaced: tuple[TrainingRecord | None, TrainingRecord | None] = None, None
        self._residual_write: ResidualWrite | None = None

    @property
    def num_made(self) -> int:
        """Number of records made, whether they were written or not."""
        return self._num_made

    def hold(self) -> None:
        """Let :meth:`write` only keep records in memory from now on, and flush those that :meth:`storing` writes."""
        self.holds, self._options = True, replace(self._options, flush=True)

    def write_at_once(self) -> None:
        """Undo :meth:`hold`, before a record was made."""
        self.holds, self._options = False, replace(self._options, flush=False)

    def write(
        self,
        *,
        generation: int,
        step: int,
        content: bytes,
        has_steps: bool,
        residual: NDArray[np.float32] | None,
        version: int = RECORD_VERSION,
    ) -> None:
        """Write a record over the last but one, and make it the current one.

        Args:
            generation: The newest generation, or the next one if its step is in flight.
            step: Optimizer steps of the training so far, for messages.
            content: What the training needs.
            has_steps: Whether the training has taken a step.
            residual: float32 memory that holds the generation's residual once the generation is committed, for
                :meth:`write_residual`; None if there is none.
            version: Format version of the content, and so of the record.

        Raises:
            StorageError: The record could not be written. The one before it is intact.
        """
        # A record that fails uses up its number, too: ranks resume from a number that all of them have.
        number = int(has_steps) if self._last_number is None else self._last_number + 1
        record = TrainingRecord(
            number=number,
            generation=generation,
            step=step,
            run=self.run,
            content=content,
            residual_numel=0 if residual is None else residual.size,
            version=version,
        )
        if not self.holds:
            self._last_number, self._last_generation = number, generation
            self.nbytes += self._in_time("Writing the training record", self._path, self._write, record)
            self.stored = record
        self._before, self.current, self._residual = self.current, record, residual
        self._num_made += 1

    @contextmanager
    def storing(self, is_committed: Callable[[], bool]) -> Iterator[None]:
        """Write the current record, which was held, and its residual, which is in memory; undo that if the body raises.

        Args:
            is_committed: Function that returns whether the generation was committed, after which nothing is undone.

        Raises:
            StorageError: They could not be written. The record before is intact.
        """
        assert self.holds and self.current is not None
        held = self.current
        number = held.number if self._last_number is None else self._last_number + 1
        self._last_number, self._last_generation = number, held.generation
        self._replaced = self.stored, held
        try:
            self._store(replace(held, number=number))
            yield
        except BaseException:
            if is_committed():  # an interrupt
                raise
            self.undo_storing()
            raise

    def undo_storing(self) -> None:
        """Erase the record that :meth:`storing` has written last: its generation is not the one on storage."""
        number = self._last_number
        assert number is not None
        self.stored, self.current = self._replaced
        # The next record replaces this one: a number is skipped, unless there is no record in the other file.
        self._last_number = None if self.stored is None else number + 1
        with suppress(StorageError):
            self._in_time("Erasing the training record", self._path, self._erase, number)

    def renumber(self, before: int, generation: int) -> None:
        """Give the generation of the current record, if it is that before, another number; none of it was written."""
        if self.current is not None and self.current.generation == before:
            self.current = replace(self.current, generation=generation)

    def _store(self, record: TrainingRecord) -> None:
        self.nbytes += self._in_time("Writing the training record", self._path, self._write, record)
        self.current = record
        if record.residual_numel:
            assert self._residual is not None
            self._begin_residual(record, self._residual)
            self.finish_residual()
            failure, self.residual_failure = self.residual_failure, None  # the next write may succeed
            if failure is not None:
                raise failure
        self.stored = record

    def rewrite(self, changed: Callable[[TrainingRecord], bytes]) -> None:
        """Replace only the content of records after a step. A kill leaves the old content or the new one.

        Args:
            changed: Function that returns a record's new content, of the present format version.

        Raises:
            StorageError: It could not be written. The record is unchanged.
        """
        held = self.current if self.current is not self.stored else None
        if held is not None and held.has_steps:
            self.current = replace(held, content=changed(held), version=RECORD_VERSION)
        if self.stored is None or not self.stored.has_steps:
            return
        record = replace(self.stored, content=changed(self.stored), version=RECORD_VERSION)
        name, written = record_name(record.number), packed(record, self._identity)
        replacing, path = self._folder.replace, self._folder.path / name
        self._in_time("Writing the training record", path, replacing, name, written, flush=self._options.flush)
        self.stored = record
        if held is None:
            self.current = record
        self.nbytes += len(written)

    def _write(self, record: TrainingRecord) -> int:
        residual = residual_of(record, self._identity)
        if residual is not None:
            # Allocate both files at once, so that a full disk raises before the first one is written.
            self._folder.allocate_missing(*RESIDUAL_NAMES, num_bytes=residual.file_bytes)
        return self._put(record)

    def _put(self, record: TrainingRecord) -> int:
        """Write a record, and return its size in bytes.

        The other file is made afterwards, so that a kill never leaves two empty files, which are damaged.
        """
        if self.stored is None:
            self._folder.allocate_missing(record_name(record.number))
        nbytes = write_training_record(self._folder.inside, record, identity=self._identity, flush=self._options.flush)
        if self.stored is None:
            self._folder.allocate_missing(*TRAINING_NAMES)
        return nbytes

    def write_residual(self, generation: int) -> None:
        """Start to write the residual that belongs to the current record, if the record is of this generation.

        If records are held, :meth:`storing` writes it.

        Until :meth:`finish_residual` has returned, the residual must not change, and the places of the generation
        before must not be written to: otherwise, after a kill, a training could resume from neither generation.

        Args:
            generation: The newest generation; its residual is in memory.
        """
        record, values = self.current, self._residual
        if self.holds or values is None or record is None or record.generation != generation:
            return
        self._residual = None
        self._begin_residual(record, values)

    def _begin_residual(self, record: TrainingRecord, values: NDArray[np.float32]) -> None:
        self.finish_residual()
        residual = residual_of(record, self._identity)
        assert residual is not None
        self._residual_write = ResidualWrite(self._folder.inside, residual, values, self._options)
        self.nbytes += residual.file_bytes

    def finish_residual(self) -> None:
        """Wait until no residual is being written. Its error is stored in ``residual_failure``."""
        if self._residual_write is not None:
            self.residual_failure = self._residual_write.finish()
            self._residual_write = None

    def read_residual(self, into: NDArray[np.float32]) -> None:
        """Read the residual that belongs to the current record.

        Args:
            into: float32[residual_numel] for the values.

        Raises:
            StorageCorruptError: The residual is damaged.
            StorageError: The file cannot be read.
        """
        residual = None if self.current is None else residual_of(self.current, self._identity)
        assert residual is not None
        read_residual(self._folder.inside, residual, into)

    def forget_behind(self, generation: int) -> None:
        """Erase the current record if its generation is newer than this one, and make the record before it current.

        The erased record's generation was not committed, and another state may be committed under its number.

        Raises:
            StorageError: It could not be erased.
        """
        record = self.current
        if record is not None and record.generation > generation:
            if record is not self.stored:  # held: all records then have the same memory of the residual
                self.current, self._before = self._before, None
                return
            self._residual = None
            self._in_time("Erasing the training record", self._path, self._erase, record.number)
            self.current, self._before = self._before, None
            self.stored = self.current
        # While records are held, none is written before its generation is committed.
        if not self.holds and self._last_number is not None and self._last_generation > generation:
            # Skip a number: the next record then replaces the erased one, and not the one before, which is now needed.
            self._last_number += 1
            self._last_generation = generation

    def end(self, reason: str) -> None:
        """Replace all records by one that states that no more follow; if they are held, at :meth:`complete_end`.

        Args:
            reason: The reason, which the error of a training that resumes contains.

        Raises:
            StorageError: It could not be written.
        """
        record = TrainingRecord(
            number=0,
            generation=ENDED,
            step=0 if self.current is None else self.current.step,
            run=self.run,
            content=reason.encode(),
        )
        self.current = self._residual = None
        self._ended = record
        if not self.holds or self.stored is None:
            self.complete_end()

    def complete_end(self) -> None:
        """Write the record of :meth:`end` if it was put off, since the generation on storage is another one now.

        Raises:
            StorageError: It could not be written.
        """
        record, self._ended = self._ended, None
        if record is not None:
            self.stored = None
            self._in_time("Ending the training records in", self._path, self._end, record)

    def _end(self, record: TrainingRecord) -> None:
        self._put(record)
        name = record_name(record.number + 1)
        with storage_errors("Erasing the training record", self._folder.path / name):
            self._folder.inside.overwrite(name, b"", flush=True)  # takes no space, which may have run out

    def _erase(self, number: int) -> None:
        erase_training_record(self._folder.inside, number, identity=self._identity)

    def resume_from(self, number: int, *, run: bytes) -> None:
        """Make the record of this number current, and erase the other one unless it is an older record.

        The generation of a newer one will be another state. A missing file is made anew.

        Args:
            number: Number of the record.
            run: Id of the run that begins now.

        Raises:
            StorageError: A file cannot be read, made or erased.
        """
        records = read_training_records(self._folder.inside, identity=self._identity)
        if records[-1].number >= number:
            self._folder.allocate_missing(*TRAINING_NAMES)
            self._erase(number + 1)
        (self.current,) = (record for record in records if record.number == number)
        self.stored = self.current
        self.run, self._last_number = run, number
