"""The storage device that updates on the host CPU, over any block device."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.base import StorageDevice, Traffic
from lightning_smartinfinity.errors import (
    CudaError,
    SmartInfinityError,
    StorageCorruptError,
    StorageError,
    StorageTimeoutError,
)
from lightning_smartinfinity.settings import IO_TIMEOUT
from lightning_smartinfinity.storage.extents import BLOCK_BYTES
from lightning_smartinfinity.storage.folders.direct import UNNAMED
from lightning_smartinfinity.storage.io.os_errors import (
    failure_error,
    in_milliseconds,
    require_io_engine,
    storage_errors,
)

__all__ = ["HostDevice"]

_IO_THREADS_PER_FILE = 4
_SMALLEST_EXTENT = 2 * BLOCK_BYTES  # an empty partition has no extents but still has a ring
_CORRUPT_REMEDIES = {
    "gradient": "A compressed gradient does not describe its tasklet: check the memory, and resume from a checkpoint.",
    "checksum": "The device returned other bytes than were written: check its health and resume from a checkpoint.",
    "foreign": "Another job wrote there: give each its own storage folder and resume from a checkpoint.",
    "generation": "A write was lost or the file was replaced: check the device and resume from a checkpoint.",
    "format": "Use the version of the package that wrote it, or resume from a checkpoint.",
}


class HostDevice(StorageDevice):
    """Updates on the host CPU; all state crosses the shared channel.

    Args:
        num_buffers: Number of ring buffers (``TransferConfig.num_buffers``).
        io_threads: Number of threads that read and write; ``None`` means four for each file.
        compute_threads: Number of threads that update (``TransferConfig.compute_threads``).
        resident_memory: Memory that whole extents of resident tasklets fill in this order; if there is none, the device
            allocates it.
        io_engine: Engine for reads and writes (``TransferConfig.io_engine``).
        io_timeout: Seconds after which a read or write is abandoned (``TransferConfig.io_timeout``).

    Raises:
        ConfigError: The I/O engine is unavailable on this machine.
    """

    def __init__(
        self,
        *,
        num_buffers: int,
        io_threads: int | None = None,
        compute_threads: int = 1,
        resident_memory: Sequence[native.HostBuffer] = (),
        io_engine: str = "auto",
        io_timeout: float = IO_TIMEOUT,
    ) -> None:
        self._num_buffers = num_buffers
        self._io_threads = io_threads
        self._compute_threads = compute_threads
        self._resident_memory = resident_memory
        require_io_engine(io_engine)
        self._io_engine = io_engine
        self._timeout_ms = in_milliseconds(io_timeout)
        self._pipeline: native.Pipeline | None = None
        self._num_given = 0  # tasklets of the batch
        self._path = ""
        self._closed = False
        self._leaves_writes = False  # whether abandoned writes were still in progress at the end
        self._buffered: list[str] = []

    @property
    def pipeline(self) -> native.Pipeline:
        """The open device's pipeline."""
        assert self._pipeline is not None, "the device is not open"
        return self._pipeline

    @property
    def moves_tasklets(self) -> bool:
        return True

    @property
    def updates_from_parameters(self) -> bool:
        return True

    @property
    def description(self) -> str:
        cached = f", {self.cache_bytes / 2**20:.2f} MiB of it in host memory" if self.cache_bytes else ""
        return f"Optimizer state: updated on the host, I/O by {self._engine_in_words()}{cached}."

    def _engine_in_words(self) -> str:
        engine = self.pipeline.io_engine
        if engine.startswith("io_uring"):
            return f"{engine}, {_registration_in_words(self.pipeline)}"
        if engine == "plain" and self._io_engine == "auto":
            return f"{engine} for all folders, since these have no direct I/O: {', '.join(self._buffered)}"
        refused = dict(native.io_engines())["io_uring"]
        return f"{engine} ({refused})" if engine == "threads" and refused else engine

    @property
    def ring_bytes(self) -> int:
        return self.pipeline.ring_bytes

    @property
    def cache_bytes(self) -> int:
        return self.pipeline.cache_bytes

    def open(
        self,
        *,
        files: Sequence[native.StateFile],
        identity: native.Identity,
        buffer_bytes: int,
        resident_bytes: Sequence[int] = (),
        written_through: bool = True,
    ) -> None:
        assert self._pipeline is None, "the device is open"
        with storage_errors("Allocating buffers for", files[0].path):
            self._path = files[0].path
            self._buffered = [str(Path(file.path).parent) for file in files if not file.direct]
            self._pipeline = native.Pipeline(
                files=list(files),
                identity=identity,
                num_buffers=self._num_buffers,
                buffer_bytes=max(_SMALLEST_EXTENT, buffer_bytes),
                io_threads=self._io_threads or _IO_THREADS_PER_FILE * len(files),
                compute_threads=self._compute_threads,
                io_engine=self._io_engine,
                resident_bytes=list(resident_bytes),
                resident_through=written_through,
                resident_memory=list(self._resident_memory),
                timeout_ms=self._timeout_ms,
            )
        self._resident_memory = ()  # the pipeline frees it when it is closed

    def submit(self, batch: native.Batch) -> None:
        self._require_answer(batch)
        self._num_given = len(batch.tasklets)
        # The first batch with parameters on a CUDA device allocates their slots.
        with storage_errors("Allocating buffers for", self._path):
            self.pipeline.submit(batch)

    def _require_answer(self, batch: native.Batch) -> None:
        if not self.pipeline.accepts(batch):
            raise StorageTimeoutError(
                f"Optimizer state: {self._path!r} has not answered an earlier request.", StorageTimeoutError.REMEDY
            )

    def extend(self, more: native.Batch) -> None:
        self._require_answer(more)
        self._num_given += len(more.tasklets)
        self.pipeline.extend(more)

    def prefer(self, positions: Sequence[int]) -> None:
        self.pipeline.prefer(positions)

    def wait(self, positions: Sequence[int] | None = None) -> None:
        _raise_failure(self.pipeline.wait() if positions is None else self.pipeline.wait_for(positions))

    def finish(self) -> None:
        _raise_failure(self.pipeline.finish())
        # The pipeline reports a failure only once, and an interrupt may have discarded that report.
        if len(self.pipeline.finished()) < self._num_given:
            raise StorageError("Optimizer state was not moved, and an interrupt hid why.", "Do it again.")

    def stop(self) -> None:
        self.pipeline.stop()
        self._num_given = 0

    def counters(self) -> Traffic:
        return Traffic.over_shared_channel(self.pipeline.counters())

    def close(self) -> None:
        if self._pipeline is not None and not self._closed:
            self._closed = True
            try:
                self._pipeline.stop()
            finally:  # stop() raises an interrupt only after it is done
                self._leaves_writes = bool(self._pipeline.writes_out())
                self._pipeline.close()

    def when_written(self, then: Callable[[], object]) -> None:
        # Abandoned writes may still reach the files at any time, so they must stay with this process: never call
        # then().
        if not self._leaves_writes:
            then()


def _registration_in_words(pipeline: native.Pipeline) -> str:
    counters = pipeline.counters()
    if counters.registered_bytes:
        return "with registered buffers"
    reason = os.strerror(counters.registration_errno)
    if counters.registration_errno == errno.ENOMEM:
        # ENOMEM means the limit on lockable memory, which counts all registered memory of a user's processes.
        ring = f"the ring of {pipeline.ring_bytes / 2**20:.2f} MiB"
        reason = f"{ring} does not fit below the limit on lockable memory; raise it: ulimit -l"
    return f"without registered buffers ({reason})"


def _raise_failure(failure: native.Failure | None) -> None:
    if failure is not None:
        raise _error_of(failure)


def _error_of(failure: native.Failure) -> SmartInfinityError:
    # Only gradients are in an unnamed file; an update reads them in addition to the state.
    what = "Gradients" if failure.path.endswith(UNNAMED) else "Optimizer state"
    if failure.kind in ("io", "short", "timeout"):
        return failure_error(failure, what=what)
    problem = f"{what}: {failure.message}."
    if failure.kind == "cuda":
        return CudaError(problem, CudaError.REMEDY)
    return StorageCorruptError(problem, _CORRUPT_REMEDIES[failure.kind])
