"""The training record: what a training needs, in addition to its optimizer state, to resume from a generation.

A commit record makes a generation current within ``optimizer.step()``. What the loop does afterwards (schedulers,
callbacks, random numbers) belongs to the step, too. So the loop writes its own record when it has finished the step,
and before anything of the next generation is written. A training resumes from the newest generation that has both.

training-0.bin and training-1.bin alternate: record ``n`` goes to file ``n % 2``. A file, little endian::

    8 bytes    magic LSITRN01
    u32        version (3)
    u32        rank
    16 bytes   job id, as in the extents
    16 bytes   id of the run: the job id at first, and a new one after each resume
    i64        number of the record
    i64        generation that was the newest, or about to be committed, when the record was written; -1 if no more
               records follow, for the reason in the content
    i64        optimizer steps of the training so far
    u64        number of values of the residual that belongs to the record, in its own file (``residual_file``)
    u64        length of the content in bytes
    bytes      content
    u32        CRC32C of everything before
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.folders.rank_folder import RESIDUAL_NAMES, TRAINING_NAMES, RankFolder
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.records.residual_file import ResidualOf, read_residual
from lightning_smartinfinity.storage.records.residual_write import ResidualWrite, WriteOptions
from lightning_smartinfinity.storage.records.sealed import RecordFormat

__all__ = ["TrainingRecord", "TrainingRecords", "damaged_training_records", "read_training_records", "residual_of"]

_FORMAT = RecordFormat(b"LSITRN01", 3, "I16s16sqqqQQ")
_MOST_BYTES = 1 << 44  # far above what any training has
_ENDED = -1  # generation of a record that no more records follow


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """A record of a training.

    Args:
        number: Number of the record, 0 before the training's first step. The newer of two has the higher one.
        generation: Generation of the optimizer state that it belongs to.
        step: Optimizer steps of the training so far, for messages.
        run: 16 bytes common to all ranks of a training since its start or last resume. Copies of a store from which
            trainings resumed separately differ in it.
        content: Content that the training wrote.
        residual_numel: Number of values of the residual of compressed gradients that belongs to it; 0 if there is none.
    """

    number: int
    generation: int
    step: int
    run: bytes
    content: bytes
    residual_numel: int = 0

    @property
    def end(self) -> str | None:
        """Why no more records follow, if this record says so: there is then nothing to resume. Else None."""
        return self.content.decode(errors="replace") if self.generation == _ENDED else None

    @property
    def has_steps(self) -> bool:
        """Whether the training has taken a step, which would be lost with the record."""
        return self.number > 0


class TrainingRecords:
    """The training records of a store that this process owns.

    Args:
        folder: The rank's first folder. Writing the first record creates both files.
        identity: Identity of the store, as in its extents.
        options: Options for writing residuals; records are flushed and limited in time likewise.

    Attributes:
        current: The record written or resumed from last; None if there is none.
        run: ``TrainingRecord.run`` of the records to write.
        residual_failure: Error of the last finished write of a residual, or None.
        nbytes: Bytes of the records and residuals written so far.
    """

    def __init__(self, folder: RankFolder, *, identity: native.Identity, options: WriteOptions) -> None:
        self.current: TrainingRecord | None = None
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
        self._residual: NDArray[np.float32] | None = None  # that of the current record, until its write begins
        self._residual_write: ResidualWrite | None = None

    def write(
        self, *, generation: int, step: int, content: bytes, has_steps: bool, residual: NDArray[np.float32] | None
    ) -> None:
        """Write a record over the last but one, and make it the current one.

        Args:
            generation: The newest generation, or the next one if its step is in flight.
            step: Optimizer steps of the training so far, for messages.
            content: What the training needs.
            has_steps: Whether the training has taken a step.
            residual: float32 memory that holds the generation's residual once the generation is committed, for
                :meth:`write_residual`; None if there is none.

        Raises:
            StorageError: The record could not be written. The one before it is intact.
        """
        # A record that fails uses up its number, too: ranks resume from a number that all of them have.
        self._last_number = int(has_steps) if self._last_number is None else self._last_number + 1
        self._last_generation = generation
        record = TrainingRecord(
            number=self._last_number,
            generation=generation,
            step=step,
            run=self.run,
            content=content,
            residual_numel=0 if residual is None else residual.size,
        )
        self.nbytes += self._in_time("Writing the training record", self._path, self._write, record)
        self._before, self.current, self._residual = self.current, record, residual

    def rewrite(self, content: bytes) -> None:
        """Replace only the content of the current record. A kill leaves the old content or the new one.

        Args:
            content: The new content.

        Raises:
            StorageError: It could not be written. The record is unchanged.
        """
        assert self.current is not None
        record = replace(self.current, content=content)
        name, packed = _name_of(record.number), _packed(record, self._identity)
        replacing, path = self._folder.replace, self._folder.path / name
        self._in_time("Writing the training record", path, replacing, name, packed, flush=self._options.flush)
        self.current, self.nbytes = record, self.nbytes + len(packed)

    def _write(self, record: TrainingRecord) -> int:
        if self.current is None:
            self._folder.allocate_missing(*TRAINING_NAMES)
        residual = residual_of(record, self._identity)
        if residual is not None:
            # Allocate both files at once, so that a full disk raises before the first one is written.
            self._folder.allocate_missing(*RESIDUAL_NAMES, num_bytes=residual.file_bytes)
        return _write(self._folder.inside, record, identity=self._identity, flush=self._options.flush)

    def write_residual(self, generation: int) -> None:
        """Start to write the residual that belongs to the current record, if the record is of this generation.

        Until :meth:`finish_residual` has returned, the residual must not change, and the places of the generation
        before must not be written to: otherwise, after a kill, a training could resume from neither generation.

        Args:
            generation: The newest generation; its residual is in memory.
        """
        record, values = self.current, self._residual
        if values is None or record is None or record.generation != generation:
            return
        self.finish_residual()
        self._residual = None
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
            self._residual = None
            self._in_time("Erasing the training record", self._path, _erase, self._folder.inside, record.number)
            self.current, self._before = self._before, None
        if self._last_number is not None and self._last_generation > generation:
            # Skip a number: the next record then replaces the erased one, and not the one before, which is now needed.
            self._last_number += 1
            self._last_generation = generation

    def end(self, reason: str) -> None:
        """Replace all records by one that states that no more follow.

        Args:
            reason: The reason, which the error of a training that resumes contains.

        Raises:
            StorageError: It could not be written.
        """
        record = TrainingRecord(
            number=0,
            generation=_ENDED,
            step=0 if self.current is None else self.current.step,
            run=self.run,
            content=reason.encode(),
        )
        self.current = self._residual = None
        self._in_time("Ending the training records in", self._path, self._end, record)

    def _end(self, record: TrainingRecord) -> None:
        self._folder.allocate_missing(*TRAINING_NAMES)
        _erase(self._folder.inside, record.number + 1)
        _write(self._folder.inside, record, identity=self._identity, flush=self._options.flush)

    def resume_from(self, number: int, *, run: bytes) -> None:
        """Make the record of this number current, and erase a newer one, whose generation will be another state.

        Args:
            number: Number of the record.
            run: Id of the run that begins now.

        Raises:
            StorageError: A file cannot be read or emptied.
        """
        for record in read_training_records(self._folder.inside, identity=self._identity):
            if record.number > number:
                _erase(self._folder.inside, record.number)
            elif record.number == number:
                self.current = record
        self.run, self._last_number = run, number
        assert self.current is not None


def _write(folder: OpenFolder, record: TrainingRecord, *, identity: native.Identity, flush: bool) -> int:
    name = _name_of(record.number)
    with storage_errors("Writing the training record", folder.path / name):
        return folder.overwrite(name, _packed(record, identity), flush=flush)


def _packed(record: TrainingRecord, identity: native.Identity) -> bytes:
    return _FORMAT.pack(
        identity.rank,
        identity.job,
        record.run,
        record.number,
        record.generation,
        record.step,
        record.residual_numel,
        len(record.content),
        body=record.content,
    )


def _erase(folder: OpenFolder, number: int) -> None:
    name = _name_of(number)
    with storage_errors("Erasing the training record", folder.path / name):
        folder.overwrite(name, b"", flush=True)


def read_training_records(folder: OpenFolder, *, identity: native.Identity) -> list[TrainingRecord]:
    """Return the intact records of a store, newest first: at most two, and none for a store of an older version.

    Raises:
        StorageError: A file cannot be read.
    """
    found = (_read(folder, number, identity) for number in range(len(TRAINING_NAMES)))
    return sorted(filter(None, found), key=lambda record: record.number, reverse=True)


def damaged_training_records(folder: OpenFolder, *, identity: native.Identity) -> list[str]:
    """Return the names of the files that are not empty, but hold no intact record.

    Raises:
        StorageError: A file cannot be read.
    """
    found = []
    for number, name in enumerate(TRAINING_NAMES):
        status = folder.status(name)
        if status is not None and status.st_size > 0 and _read(folder, number, identity) is None:
            found.append(name)
    return found


def _read(folder: OpenFolder, number: int, identity: native.Identity) -> TrainingRecord | None:
    """Return the record in a file, or None if there is none, or if it is incomplete, damaged or of another store."""
    name = _name_of(number)
    with storage_errors("Reading the training record", folder.path / name):
        status = folder.status(name)
        if status is None or not _FORMAT.empty_bytes <= status.st_size <= _MOST_BYTES:
            return None
        with folder.reader(name) as file:
            header = file.read(_FORMAT.header_bytes)
            # Compare the length, the last field, first: a damaged file may be larger than this machine's memory.
            if int.from_bytes(header[-8:], "little") != status.st_size - _FORMAT.empty_bytes:
                return None
            fields, content = _FORMAT.unpack(header + file.read())
    if fields[:2] != (identity.rank, identity.job) or fields[3] % len(TRAINING_NAMES) != number:
        return None
    run, record, generation, step, numel, _ = fields[2:]
    return TrainingRecord(
        number=record, generation=generation, step=step, run=run, content=content, residual_numel=numel
    )


def residual_of(record: TrainingRecord, identity: native.Identity) -> ResidualOf | None:
    """Return which residual belongs to a record of the store with this identity; None if there is none."""
    if record.residual_numel == 0:
        return None
    return ResidualOf(identity=identity, run=record.run, number=record.number, numel=record.residual_numel)


def _name_of(number: int) -> str:
    return TRAINING_NAMES[number % len(TRAINING_NAMES)]
