"""Measures the raw disk: how fast it moves a given mix of reads and writes without any part of the transfer path.

Direct reads and writes run from plain threads (``os.preadv``, ``os.pwritev``) or through the native request queue with
io_uring, from memory on huge pages or on pages of 4 KiB. Benchmarks compare with the best of a sweep.
"""

from __future__ import annotations

import mmap
import os
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from lightning_smartinfinity.native import FileQueue, HostBuffer, StateFile, io_engines

MIB = 1 << 20
BLOCKS = (1 * MIB, 4 * MIB, 16 * MIB)
DEPTHS = (2, 4, 8, 16)
PAGES = ("huge", "4 KiB")


@dataclass(frozen=True)
class IoSettings:
    """How the disk is driven.

    Args:
        method: ``"threads"`` or ``"io_uring"``.
        pages: Pages of the memory, one of ``PAGES``.
        block: Bytes of a request.
        depth: Requests in progress at a time.
    """

    method: str
    pages: str
    block: int
    depth: int

    def __str__(self) -> str:
        return f"{self.method}, {self.depth} x {self.block >> 10} KiB, {self.pages} pages"


@dataclass(frozen=True)
class Rate:
    """A measurement: GB/s of reads and writes together, and CPU time of the whole process."""

    gb_per_second: float
    cpu_seconds_per_gib: float


def all_settings(blocks: Sequence[int] = BLOCKS, depths: Sequence[int] = DEPTHS) -> list[IoSettings]:
    """Return the settings of a sweep, including io_uring if the system has it."""
    methods = ["threads"] + [name for name, reason in io_engines() if name == "io_uring" and reason is None]
    return [IoSettings(*values) for values in product(methods, PAGES, blocks, depths)]


class RawDisk:
    """Reads parts of a file while writing other parts.

    Args:
        path: The file, every block of which was written before; the caller keeps it.
        nbytes: Most bytes of one measurement.
        read_fraction: Share of all bytes that are read: 0 .. 1.
        settings: Settings that :meth:`sweep` tries.

    Attributes:
        read_at: Offset in the file, in bytes, where reading starts.
        write_at: Offset in the file, in bytes, where writing starts.
    """

    def __init__(self, path: Path, nbytes: int, *, read_fraction: float, settings: Sequence[IoSettings]) -> None:
        self.nbytes, self.read_fraction, self.settings = nbytes, read_fraction, settings
        self.read_at = self.write_at = 0
        self._path = path
        self.direct = _takes_direct(self._path)
        room = max(setting.block * setting.depth for setting in settings)
        self._memory = {pages: _Memory(room, pages) for pages in {setting.pages for setting in settings}}

    @classmethod
    @contextmanager
    def with_file(
        cls, folder: Path, nbytes: int, *, read_fraction: float, settings: Sequence[IoSettings]
    ) -> Iterator[RawDisk]:
        """Yield a disk with a temporary file, whose lower part is read and whose upper part is written."""
        largest = max(setting.block for setting in settings)
        split = (int(nbytes * read_fraction) // largest + 1) * largest
        path = folder / "raw-disk.bin"
        try:
            _fill(path, split + (int(nbytes * (1 - read_fraction)) // largest + 1) * largest, largest)
            disk = cls(path, nbytes, read_fraction=read_fraction, settings=settings)
            disk.write_at = split
            yield disk
        finally:
            path.unlink(missing_ok=True)

    def sweep(self, nbytes: int, *, keep: int = 3) -> list[IoSettings]:
        """Return the fastest settings, best first, after trying each with this many bytes."""
        rates = {setting: self.measure(setting, nbytes).gb_per_second for setting in self.settings}
        return sorted(self.settings, key=lambda setting: -rates[setting])[:keep]

    def measure(self, setting: IoSettings, nbytes: int | None = None) -> Rate:
        """Run the mix once.

        Args:
            setting: One of ``settings``.
            nbytes: Bytes to move; None means all.
        """
        pieces = self._pieces(setting.block, min(nbytes or self.nbytes, self.nbytes))
        run = self._run_threads if setting.method == "threads" else self._run_queue
        seconds, cpu = run(setting, pieces)
        moved = len(pieces) * setting.block
        return Rate(gb_per_second=moved / seconds / 1e9, cpu_seconds_per_gib=cpu / moved * 2**30)

    def _pieces(self, block: int, nbytes: int) -> list[tuple[bool, int]]:
        """Return for each request whether it reads, and its offset; reads are spread evenly among writes."""
        pieces, reads = [], 0
        for index in range(max(1, nbytes // block)):
            if int((index + 1) * self.read_fraction + 1e-9) > reads:
                pieces.append((True, self.read_at + reads * block))
                reads += 1
            else:
                pieces.append((False, self.write_at + (index - reads) * block))
        return pieces

    def _run_threads(self, setting: IoSettings, pieces: list[tuple[bool, int]]) -> tuple[float, float]:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0))
        memory, left, failures = self._memory[setting.pages].view, iter(pieces), []
        lock = threading.Lock()

        def work(number: int) -> None:
            buffer = memory[number * setting.block : (number + 1) * setting.block]
            while True:
                with lock:
                    piece = next(left, None)
                if piece is None:
                    return
                reads, offset = piece
                try:
                    moved = (os.preadv if reads else os.pwritev)(descriptor, [buffer], offset)
                except OSError as error:
                    failures.append(str(error))
                    return
                if moved != setting.block:
                    failures.append(f"{moved} of {setting.block} bytes at {offset}")
                    return

        threads = [threading.Thread(target=work, args=(number,)) for number in range(setting.depth)]
        start, used = time.perf_counter(), cpu_seconds()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken = time.perf_counter() - start, cpu_seconds() - used
        os.close(descriptor)
        if failures:
            raise SystemExit(f"raw disk, {setting}: {failures[0]}")
        return taken

    def _run_queue(self, setting: IoSettings, pieces: list[tuple[bool, int]]) -> tuple[float, float]:
        memory = self._memory[setting.pages]
        file = StateFile(str(self._path), direct=self.direct)
        queue = FileQueue(io_engine=setting.method, memory=memory.host)
        tickets: list[int] = []
        start, used = time.perf_counter(), cpu_seconds()
        for index, (reads, offset) in enumerate(pieces):
            if index >= setting.depth:
                _finish(queue, tickets[index - setting.depth])
            address = memory.address + index % setting.depth * setting.block
            submit = queue.read if reads else queue.write
            tickets.append(submit(file, offset=offset, address=address, nbytes=setting.block))
        for ticket in tickets[-setting.depth :]:
            _finish(queue, ticket)
        taken = time.perf_counter() - start, cpu_seconds() - used
        queue.close()
        file.close()
        return taken


class _Memory:
    """Page-aligned memory that was written once: unwritten pages would all be the same physical page."""

    def __init__(self, nbytes: int, pages: str) -> None:
        self.host = HostBuffer(nbytes) if pages == "huge" else None
        small = None if self.host else mmap.mmap(-1, nbytes)
        if small is not None:
            small.madvise(mmap.MADV_NOHUGEPAGE)
        values = np.frombuffer(self.host.memoryview() if self.host else small, np.uint8)  # type: ignore[arg-type]
        values[:] = np.resize(np.frombuffer(os.urandom(4096), np.uint8), nbytes)
        self.view, self.address = memoryview(values), values.ctypes.data


def cpu_seconds() -> float:
    """Return the CPU time of this process so far, including kernel threads that work for it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _fill(path: Path, nbytes: int, piece: int) -> None:
    """Write every block, because reads of unwritten blocks would not reach the disk."""
    values = os.urandom(piece)
    with path.open("wb") as file:
        for _ in range(nbytes // piece):
            file.write(values)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _takes_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


def _finish(queue: FileQueue, ticket: int) -> None:
    failure = queue.wait(ticket)
    if failure is not None:
        raise SystemExit(failure.message)
