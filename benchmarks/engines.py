"""Compares the I/O engines: bandwidth, system calls and CPU time for the same bytes.

Every engine moves the same mix of reads and writes, in large pieces, between one file and memory on huge pages or on
pages of 4 KiB; then it reads small pieces at random. CPU time is that of the whole process, including kernel threads
that work for it. Engines take turns, since the speed of a shared disk drifts. Usage::

    python benchmarks/engines.py [--folder .] [--mib 2048] [--runs 5] [--json figures.json] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from machine import describe
from raw_disk import cpu_seconds

from lightning_smartinfinity.native import FileQueue, HostBuffer, StateFile, io_engines

BLOCK = 4096
PIECE = 32 << 20  # bytes of a request, which the queue cuts into parts of 4 MiB
IN_FLIGHT = 2
SMALL = (4 << 10, 16 << 10, 64 << 10)


@dataclass(frozen=True)
class Figures:
    """Figures of an engine with one kind of pages; medians over the runs."""

    engine: str
    pages: str
    registered: bool
    gb_per_second: float
    calls_per_gib: float
    cpu_seconds_per_gib: float
    small_reads_per_second: dict[int, float]


class Memory:
    """Page-aligned memory on huge or small pages."""

    def __init__(self, nbytes: int, pages: str) -> None:
        self.host = HostBuffer(nbytes) if pages == "huge" else None
        self.small = None if self.host else mmap.mmap(-1, nbytes)
        if self.small is not None:
            self.small.madvise(mmap.MADV_NOHUGEPAGE)
        values = np.frombuffer(self.host.memoryview() if self.host else self.small, np.uint8)
        values[:] = np.arange(nbytes, dtype=np.uint32).astype(np.uint8)
        self.address = values.ctypes.data
        self._values = values


class Bench:
    """An engine, its memory and the file."""

    def __init__(self, engine: str, pages: str, path: Path, nbytes: int) -> None:
        self.engine, self.pages, self.path, self.nbytes = engine, pages, path, nbytes
        self.memory = Memory(2 * IN_FLIGHT * PIECE, pages)
        self.file = StateFile(str(path), direct=engine != "plain")
        self.queue = FileQueue(io_engine=engine, memory=self.memory.host)
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.calls: list[int] = []
        self.small: dict[int, list[float]] = {size: [] for size in SMALL}

    def run(self) -> None:
        drop_cached(self.path)
        before = self.queue.counters().system_calls
        with timed(self.seconds, self.cpu):
            self.mix()
        self.calls.append(self.queue.counters().system_calls - before)
        for size in SMALL:
            self.small[size].append(self.small_reads(size))

    def mix(self) -> None:
        """Read one half of the file while writing the other."""
        half, open_tickets = self.nbytes // 2, []
        for index, offset in enumerate(range(0, half, PIECE)):
            row = index % IN_FLIGHT
            if len(open_tickets) > row and index >= IN_FLIGHT:
                finish(self.queue, open_tickets.pop(0))
            address = self.memory.address + 2 * row * PIECE
            read = self.queue.read(self.file, offset=offset, address=address, nbytes=PIECE)
            write = self.queue.write(self.file, offset=half + offset, address=address + PIECE, nbytes=PIECE)
            open_tickets.append((read, write))
        for tickets in open_tickets:
            finish(self.queue, tickets)

    def small_reads(self, size: int, *, number: int = 2000) -> float:
        """Return reads per second, with 32 in progress at a time."""
        number = min(number, self.nbytes // size)
        offsets = np.random.default_rng(0).integers(0, self.nbytes // size, number) * size
        start, tickets = time.perf_counter(), []
        for index, offset in enumerate(offsets.tolist()):
            if index >= 32:
                self.queue.wait(tickets[index - 32])
            address = self.memory.address + (index % 32) * size
            tickets.append(self.queue.read(self.file, offset=offset, address=address, nbytes=size))
        for ticket in tickets[-32:]:
            self.queue.wait(ticket)
        return number / (time.perf_counter() - start)

    def figures(self) -> Figures:
        gib = self.nbytes / 2**30
        return Figures(
            engine=self.engine,
            pages=self.pages,
            registered=self.queue.counters().registered_bytes > 0,
            gb_per_second=self.nbytes / statistics.median(self.seconds) / 1e9,
            calls_per_gib=statistics.median(self.calls) / gib,
            cpu_seconds_per_gib=statistics.median(self.cpu) / gib,
            small_reads_per_second={size: statistics.median(rates) for size, rates in self.small.items()},
        )


def drop_cached(path: Path) -> None:
    """Empty the page cache, since a direct transfer would otherwise have to evict what the plain engine left there."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def finish(queue: FileQueue, tickets: tuple[int, int]) -> None:
    for ticket in tickets:
        failure = queue.wait(ticket)
        if failure is not None:
            raise SystemExit(failure.message)


@contextmanager
def timed(seconds: list[float], cpu: list[float]) -> Iterator[None]:
    """Append the time and the CPU time of the body."""
    start, used = time.perf_counter(), cpu_seconds()
    yield
    seconds.append(time.perf_counter() - start)
    cpu.append(cpu_seconds() - used)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(), help="where the file is made, and removed again")
    parser.add_argument("--mib", type=int, default=2048, help="moved in each run, half of it read")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--tiny", action="store_true", help="shows no more than that it works")
    arguments = parser.parse_args()
    nbytes = 4 * PIECE if arguments.tiny else arguments.mib << 20
    nbytes -= nbytes % (2 * PIECE)
    machine = describe()
    print(machine)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="engines-") as folder:
        figures = measure(Path(folder) / "file.bin", nbytes, 1 if arguments.tiny else arguments.runs)
    print_table(figures)
    if arguments.json:
        rows = [asdict(row) for row in figures]
        arguments.json.write_text(json.dumps({"machine": machine, "nbytes": nbytes, "engines": rows}, indent=1) + "\n")


def measure(path: Path, nbytes: int, runs: int) -> list[Figures]:
    """Measure every available engine with both kinds of pages."""
    with path.open("wb") as file:
        for _ in range(nbytes // PIECE):
            file.write(os.urandom(PIECE))
        os.fsync(file.fileno())
    names = [name for name, reason in io_engines() if reason is None]
    benches = [Bench(name, pages, path, nbytes) for name in names for pages in ("huge", "4 KiB")]
    for _ in range(runs):
        for bench in benches:
            bench.run()
    return [bench.figures() for bench in benches]


def print_table(figures: list[Figures]) -> None:
    sizes = " | ".join(f"{size >> 10} KiB reads/s" for size in SMALL)
    print(f"| engine | pages | registered | GB/s | calls per GiB | CPU s per GiB | {sizes} |")
    print("|---" * (6 + len(SMALL)) + "|")
    for row in figures:
        small = " | ".join(f"{row.small_reads_per_second[size]:.0f}" for size in SMALL)
        print(
            f"| {row.engine} | {row.pages} | {'yes' if row.registered else 'no'} | {row.gb_per_second:.2f} |"
            f" {row.calls_per_gib:.0f} | {row.cpu_seconds_per_gib:.4f} | {small} |"
        )


if __name__ == "__main__":
    main()
