"""The training record: what a training needs, in addition to its optimizer state, to resume from a generation.

A commit record makes a generation current within ``optimizer.step()``. What the loop does afterwards (schedulers,
callbacks, random numbers) belongs to the step, too. So the loop writes its own record when it has finished the step,
and before anything of the next generation is written. A training resumes from the newest generation that has both.

training-0.bin and training-1.bin alternate: record ``n`` goes to file ``n % 2``. A file, little endian::

    8 bytes    magic LSITRN01
    u32        version (4)
    32 bytes   version of the package that wrote the record, ASCII, filled with zeros; since version 4
    u32        rank
    16 bytes   job id, as in the extents
    16 bytes   id of the run: the job id at first, and a new one after each resume; since version 2
    i64        number of the record
    i64        generation that was the newest, or about to be committed, when the record was written; -1 if no more
               records follow, for the reason in the content; -2 if the record in this file was erased
    i64        optimizer steps of the training so far
    u64        number of values of the residual that belongs to the record, in its own file (``residual_file``); since
               version 3
    u64        length of the content in bytes
    bytes      content
    u32        CRC32C of everything before

An erased record is replaced by one of number -1 or -2 without content, whose step is the erased number, since an empty
file means that a record was lost: only beside the first record of a training, or the one that ends the records, the
other file may be empty.

The version also covers the content and the residual: a change of either raises it. Future versions keep magic, version,
version of the package, and the checksum at the end, so that an error can name the version that reads a newer record.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, BinaryIO

from lightning_smartinfinity import __version__, native
from lightning_smartinfinity.common.versions import unreadable
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.folders.rank_folder import TRAINING_NAMES
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.records.residual_file import ResidualOf
from lightning_smartinfinity.storage.records.sealed import RecordFormat, version_in

__all__ = [
    "ENDED",
    "RECORD_VERSION",
    "TrainingRecord",
    "damaged_training_records",
    "erase_training_record",
    "packed",
    "read_training_records",
    "record_name",
    "residual_of",
    "write_training_record",
]

RECORD_VERSION = 4
"""Format version of the records that are written now, and of their content."""

_MAGIC = b"LSITRN01"
_BEGIN_BYTES = 12  # magic and version
_PACKAGE_BYTES = 32
_TYPES = {
    "package": f"{_PACKAGE_BYTES}s",
    "rank": "I",
    "job": "16s",
    "run": "16s",
    "number": "q",
    "generation": "q",
    "step": "q",
    "residual_numel": "Q",
    "length": "Q",
}
_RECORDED = ("run", "number", "generation", "step", "residual_numel")  # fields of a TrainingRecord
# Fields that earlier versions do not have.
_EARLIER = {1: {"package", "run", "residual_numel"}, 2: {"package", "residual_numel"}, 3: {"package"}}
_NAMES = {
    version: tuple(name for name in _TYPES if name not in _EARLIER.get(version, ()))
    for version in range(1, RECORD_VERSION + 1)
}
_FORMATS = {
    version: RecordFormat(_MAGIC, version, "".join(_TYPES[name] for name in names)) for version, names in _NAMES.items()
}
_MOST_BYTES = 1 << 44  # far above what any training has
_MOST_FOREIGN_BYTES = 1 << 30  # of a record of another version, which is read as a whole
ENDED = -1
"""Generation of a record that no more records follow."""
_ERASED = -2  # generation of what replaces an erased record


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
        version: Format version of the record and of its content.
    """

    number: int
    generation: int
    step: int
    run: bytes
    content: bytes
    residual_numel: int = 0
    version: int = RECORD_VERSION

    @property
    def end(self) -> str | None:
        """Why no more records follow, if this record says so: there is then nothing to resume. Else None."""
        return self.content.decode(errors="replace") if self.generation == ENDED else None

    @property
    def has_steps(self) -> bool:
        """Whether the training has taken a step, which would be lost with the record."""
        return self.number > 0


def write_training_record(folder: OpenFolder, record: TrainingRecord, *, identity: native.Identity, flush: bool) -> int:
    """Write a record into its file, and return its size in bytes.

    Raises:
        StorageError: It could not be written.
    """
    name = record_name(record.number)
    with storage_errors("Writing the training record", folder.path / name):
        return folder.overwrite(name, packed(record, identity), flush=flush)


def packed(record: TrainingRecord, identity: native.Identity) -> bytes:
    """Return the content of a record's file."""
    content = record.content
    values = {
        **vars(record),
        "package": __version__.encode()[:_PACKAGE_BYTES],
        "rank": identity.rank,
        "job": identity.job,
        "length": len(content),
    }
    return _FORMATS[record.version].pack(*(values[name] for name in _NAMES[record.version]), body=content)


def erase_training_record(folder: OpenFolder, number: int, *, identity: native.Identity) -> None:
    """Erase the record in the file that a record of this number has; raises as :func:`write_training_record`."""
    lowest = number % len(TRAINING_NAMES) - len(TRAINING_NAMES)
    erased = TrainingRecord(number=lowest, generation=_ERASED, step=number, run=bytes(identity.job), content=b"")
    write_training_record(folder, erased, identity=identity, flush=True)


def read_training_records(folder: OpenFolder, *, identity: native.Identity | None) -> list[TrainingRecord]:
    """Return the intact records of a store, newest first: at most two, and none for a store of an older version.

    Args:
        folder: The rank's first folder.
        identity: Identity of the store; None if it is unknown, because the manifest is missing.

    Raises:
        StorageError: A file cannot be read, or another version of this package wrote it in a format that is not read.
    """
    read = (_read(folder, number, identity) for number in range(len(TRAINING_NAMES)))
    found = (record for record in read if record is not None and record.generation != _ERASED)
    return sorted(found, key=lambda record: record.number, reverse=True)


def damaged_training_records(
    folder: OpenFolder,
    *,
    identity: native.Identity | None,
    has_steps: bool = False,
    committed: Collection[int] = (),
) -> list[str]:
    """Return the names of the files that hold no intact record, although one was written.

    Such a file may also be empty or missing: where the other record is not the first one, both were written.

    Args:
        folder: The rank's first folder.
        identity: As for :func:`read_training_records`.
        has_steps: Whether the training may have taken a step. Then a file that is missing beside a record, and two
            empty ones, are damaged, too: the second file is made after the first record was written.
        committed: Generations on storage. If they are written at an interval, each has a record that is written before.

    Raises:
        StorageError: As for :func:`read_training_records`.
    """
    sizes = [None if (status := folder.status(name)) is None else status.st_size for name in TRAINING_NAMES]
    if has_steps and not any(size != 0 for size in sizes):
        return list(TRAINING_NAMES)
    read = [_read(folder, number, identity) for number in range(len(TRAINING_NAMES))]
    missing = [has_steps and size is None and bool(sizes[1 - number]) for number, size in enumerate(sizes)]
    return [
        name
        for number, name in enumerate(TRAINING_NAMES)
        if read[number] is None
        and (sizes[number] or missing[number] or _was_written_beside(read[1 - number], committed))
    ]


def _was_written_beside(record: TrainingRecord | None, committed: Collection[int]) -> bool:
    """Return whether there was a record in the other file when this one was written, or one was written since."""
    if record is None:
        return False
    is_an_interval_old = record.generation in committed and max(committed) > record.generation + 1
    return is_an_interval_old or (record.step if record.generation == _ERASED else record.number) not in (0, 1)


def _read(folder: OpenFolder, number: int, identity: native.Identity | None) -> TrainingRecord | None:
    """Return the record in a file, or None if there is none, or if it is incomplete, damaged or of another store."""
    name = record_name(number)
    with storage_errors("Reading the training record", folder.path / name):
        status = folder.status(name)
        if status is None or not _BEGIN_BYTES < status.st_size <= _MOST_BYTES:
            return None
        with folder.reader(name) as file:
            begin = file.read(_BEGIN_BYTES)
            version = int.from_bytes(begin[len(_MAGIC) :], "little")
            if version in _FORMATS:
                found, content = _unpacked(file, begin, version, num_bytes=status.st_size)
            elif begin.startswith(_MAGIC) and status.st_size <= _MOST_FOREIGN_BYTES:
                _refuse_foreign(folder, name, begin + file.read())
                return None
            else:
                return None
    if not found or record_name(found["number"]) != name:
        return None
    if identity is not None and (found["rank"], found["job"]) != (identity.rank, identity.job):
        return None
    known = {field: value for field, value in found.items() if field in _RECORDED}
    return TrainingRecord(**{"run": found["job"], **known}, content=content, version=version)


def _unpacked(file: BinaryIO, begin: bytes, version: int, *, num_bytes: int) -> tuple[dict[str, Any], bytes]:
    """Return the fields and the content of the record in an open file; no fields if it is damaged.

    Args:
        file: The file, after its beginning was read.
        begin: Its beginning.
        version: Its format version, one that is read.
        num_bytes: Its size.
    """
    form = _FORMATS[version]
    # Compare the length, the last field, first: a damaged file may be larger than this machine's memory.
    header = begin + file.read(form.header_bytes - len(begin))
    if int.from_bytes(header[-8:], "little") != num_bytes - form.empty_bytes:
        return {}, b""
    fields, content = form.unpack(header + file.read())
    return dict(zip(_NAMES[version], fields, strict=False)), content


def _refuse_foreign(folder: OpenFolder, name: str, content: bytes) -> None:
    """Raise StorageError if the content of a file is an intact record of a version that is not read."""
    version = version_in(content, _MAGIC)
    if version is None:
        return
    named = content[_BEGIN_BYTES : _BEGIN_BYTES + _PACKAGE_BYTES] if version > RECORD_VERSION else b""
    writer = named.rstrip(b"\0").decode("ascii", "replace")
    problem, remedy = unreadable(
        f"The training record {str(folder.path / name)!r}",
        version=version,
        reads=(min(_FORMATS), RECORD_VERSION),
        writer=writer,
    )
    job, storage = folder.path.parent.name, folder.path.parents[1]
    raise StorageError(
        problem,
        f"{remedy} to resume this training, or choose another TransferConfig(job=...). To remove it, run: "
        f"smart-infinity jobs {storage} --remove {job}",
    )


def residual_of(record: TrainingRecord, identity: native.Identity) -> ResidualOf | None:
    """Return which residual belongs to a record of the store with this identity; None if there is none."""
    if record.residual_numel == 0:
        return None
    return ResidualOf(identity=identity, run=record.run, number=record.number, numel=record.residual_numel)


def record_name(number: int) -> str:
    """Return the name of the file that holds the record of a number."""
    return TRAINING_NAMES[number % len(TRAINING_NAMES)]
