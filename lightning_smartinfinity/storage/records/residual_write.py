"""Writes the residual that belongs to a training record, while training goes on."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.storage.extents import BLOCK_BYTES
from lightning_smartinfinity.storage.folders.direct import open_file
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.io.files import LimitedCalls
from lightning_smartinfinity.storage.io.os_errors import failure_error, in_milliseconds, storage_errors
from lightning_smartinfinity.storage.records.residual_file import ResidualOf, part_checksums

__all__ = ["ResidualWrite", "WriteOptions"]

_IO_THREADS = 2
_WHAT = "The residual of compressed gradients"

# The memory of writes that were given up: the kernel may still use it.
_NEVER_FREED: list[object] = []


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """Options for writing residuals.

    Args:
        direct: Whether to use direct I/O.
        io_engine: ``TransferConfig.io_engine``.
        io_timeout: ``TransferConfig.io_timeout``.
        flush: Whether to flush the device.
        in_time: Makes the other calls to the disk, with a time limit.
    """

    direct: bool
    io_engine: str
    io_timeout: float
    flush: bool
    in_time: LimitedCalls


class ResidualWrite:
    """A write of a residual by a thread, from construction to :meth:`finish`. The values must not change meanwhile.

    Args:
        folder: The rank's first folder, which holds the file.
        residual: Which residual.
        values: float32[numel], aligned to blocks.
        options: Options for writing.
    """

    def __init__(
        self, folder: OpenFolder, residual: ResidualOf, values: NDArray[np.float32], options: WriteOptions
    ) -> None:
        assert values.dtype == np.float32 and values.size == residual.numel
        self._folder, self._residual, self._options = folder, residual, options
        self._values: NDArray[np.float32] | None = values
        self._failure: StorageError | None = None
        self._thread = threading.Thread(target=self._run, name="smart-infinity-residual", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be started, as when the interpreter ends
            self._run()

    def finish(self) -> StorageError | None:
        """Wait until the write has ended; return its error, or None if it succeeded."""
        if self._thread.is_alive():
            self._thread.join()
        return self._failure

    def _run(self) -> None:
        values, self._values = self._values, None
        assert values is not None
        try:
            self._write(values)
        except StorageError as error:
            self._failure = error
        except Exception as error:
            self._failure = StorageError(f"{_WHAT} could not be written: {error!r}.", "Free memory.")

    def _write(self, values: NDArray[np.float32]) -> None:
        path, options = self._folder.path / self._residual.name, self._options
        file = options.in_time("Opening", path, self._open)
        try:
            with storage_errors("Starting threads for", path):
                store = native.TensorStore(
                    [file],
                    io_threads=_IO_THREADS,
                    io_engine=options.io_engine,
                    step_bytes=BLOCK_BYTES,
                    timeout_ms=in_milliseconds(options.io_timeout),
                )
            try:
                with storage_errors("Allocating", path):
                    # The file has these bytes already, so it does not grow. It keeps them because the store is closed
                    # while the extent exists: an open store shortens the file when the extent is freed.
                    extent = store.allocate(self._residual.file_bytes)
                self._write_into(extent, store, file, values)
            finally:
                store.close()
        finally:
            file.close()

    def _open(self) -> native.StateFile:
        with storage_errors("Opening", self._folder.path / self._residual.name):
            return open_file(self._folder, self._residual.name, direct=self._options.direct)

    def _write_into(
        self,
        extent: native.TensorExtent,
        store: native.TensorStore,
        file: native.StateFile,
        values: NDArray[np.float32],
    ) -> None:
        residual = self._residual
        whole = values.nbytes // BLOCK_BYTES * BLOCK_BYTES
        data = values.view(np.uint8)
        # The residual's last, incomplete block is written together with the end of the file.
        last = np.frombuffer(native.HostBuffer(residual.file_bytes - whole).memoryview(), np.uint8)
        last[: data.size - whole] = data[whole:]
        started = self._start(store, extent, data[:whole], 0) if whole else None
        checksums = part_checksums(values)  # while the disk writes
        if started is not None:
            self._finish(store, started, file, held=values)
        end = np.frombuffer(residual.end(checksums), np.uint8)
        begin = residual.end_offset - whole
        last[begin : begin + end.size] = end
        self._finish(store, self._start(store, extent, last, whole), file, held=last)

    def _start(self, store: native.TensorStore, extent: native.TensorExtent, data: NDArray[np.uint8], at: int) -> int:
        return store.write(
            extent, offset=at, address=data.ctypes.data, nbytes=data.nbytes, io_class=native.IoClass.WRITE_BEHIND
        )

    def _finish(self, store: native.TensorStore, ticket: int, file: native.StateFile, *, held: object) -> None:
        failure = store.wait(ticket)
        if failure is not None:
            if failure.kind == "timeout":
                _NEVER_FREED.append(held)
            raise failure_error(failure, what=_WHAT)
        if self._options.flush:
            with storage_errors("Flushing", file.path):
                self._options.in_time("Flushing", Path(file.path), file.sync)
