"""Compares loading and unloading tensors of a model's sizes: this store, DeepSpeed's tuned aio, and the raw disk.

Every system writes all tensors and reads them back, each in a file of its own (aio: one file per tensor, as DeepSpeed
keeps parameters): once with the memory of 64 MiB in progress, as a training has that offloads because memory is short,
and once all at once. aio can only wait for all that it was given. Systems take turns in every round, in another order
each time, since the speed of a shared disk drifts; the table shows medians, and medians of the ratios within a round.
`--stock-io deepspeed` builds its op as it is, which takes minutes; `glue` compiles its I/O files in seconds, behind a
thread. Usage::

    python benchmarks/tensor_store.py [--size 355m] [--folder .] [--rounds 5] [--stock-io glue] [--json figures.json]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import torch
from comparison import write_figures
from gpt2 import GPT2, SIZES
from machine import describe
from raw_disk import IoSettings, RawDisk

from lightning_smartinfinity import native
from lightning_smartinfinity.pipeline.layout.tensors import lent_tensor
from lightning_smartinfinity.storage.tensors.tensor_files import whole_blocks
from lightning_smartinfinity.storage.tensors.tensor_store import TensorStore

LEAST_NUMEL = 2048  # smaller parameters stay in memory
MEMORY = {"64 MiB": 64 << 20, "all": 1 << 62}  # bytes in progress at a time; a larger tensor is alone
# The settings of DeepSpeed's tuned runs (benchmarks/step.py): block_size, queue_depth, single_submit, overlap_events,
# intra_op_parallelism.
TUNED = (8 << 20, 32, False, True, 1)
RAW = IoSettings(method="threads", pages="huge", block=4 << 20, depth=16)


class System(Protocol):
    """Something that keeps tensors on storage."""

    def unload(self, limit: int) -> None:
        """Write all tensors, with at most ``limit`` bytes in progress."""

    def load(self, limit: int) -> None:
        """Read all tensors, with at most ``limit`` bytes in progress."""


class Ours:
    """The tensor store, in memory of its pool."""

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        self.store = TensorStore([folder / "ours"], job="benchmark", direct_io="auto")
        self.tensors = [self.store.add(nbytes) for nbytes in sizes]
        pool = native.MemoryPool()
        self.memory = [lent_tensor(pool, nbytes).random_() for nbytes in sizes]

    def unload(self, limit: int) -> None:
        self._run(self.store.write, limit)

    def load(self, limit: int) -> None:
        self._run(self.store.read, limit)

    def _run(self, begin: Callable[..., int], limit: int) -> None:
        tickets: deque[tuple[int, int]] = deque()
        in_progress = 0
        for tensor, memory in zip(self.tensors, self.memory, strict=True):
            in_progress += memory.numel()
            while tickets and in_progress > limit:
                ticket, nbytes = tickets.popleft()
                self.store.finish(ticket)
                in_progress -= nbytes
            tickets.append((begin(tensor, memory), memory.numel()))
        for ticket, _ in tickets:
            self.store.finish(ticket)


class Aio:
    """DeepSpeed's ``async_io``, with the settings of the tuned runs."""

    def __init__(self, folder: Path, sizes: Sequence[int], handle: Callable[..., Any]) -> None:
        self.handle = handle(*TUNED)
        self.paths = [str(folder / f"{index}.swp") for index in range(len(sizes))]
        self.memory = [
            self.handle.new_cpu_locked_tensor(whole_blocks(n), torch.empty(0, dtype=torch.uint8)).random_()
            for n in sizes
        ]

    def unload(self, limit: int) -> None:
        self._run(self.handle.async_pwrite, limit)

    def load(self, limit: int) -> None:
        self._run(self.handle.async_pread, limit)

    def _run(self, begin: Callable[..., int], limit: int) -> None:
        in_progress = 0
        for memory, path in zip(self.memory, self.paths, strict=True):
            if in_progress and in_progress + memory.numel() > limit:
                self.handle.wait()
                in_progress = 0
            if begin(memory, path) < 0:
                raise SystemExit(f"aio refused {path}")
            in_progress += memory.numel()
        self.handle.wait()


class Raw:
    """The disk alone, in large pieces, 64 MiB at a time."""

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        self.nbytes = sum(map(whole_blocks, sizes))
        path = folder / "raw.bin"
        with path.open("wb") as file:
            for _ in range(self.nbytes // RAW.block + 1):
                file.write(bytes(RAW.block))
        self.disks = [RawDisk(path, self.nbytes, read_fraction=share, settings=[RAW]) for share in (0.0, 1.0)]

    def unload(self, limit: int) -> None:
        self.disks[0].measure(RAW)

    def load(self, limit: int) -> None:
        self.disks[1].measure(RAW)


def aio_handle(stock_io: str) -> Callable[..., Any]:
    """Return DeepSpeed's handle: its own op, or its I/O files behind a thread."""
    if stock_io == "glue":
        from stock_io import QueuedHandle

        return QueuedHandle
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle: Callable[..., Any] = AsyncIOBuilder().load(verbose=False).aio_handle
    return handle


Seconds = dict[str, list[float]]


def measure(systems: dict[str, System], rounds: int) -> dict[str, Seconds]:
    """Return the seconds of each system's load and unload in every round, by memory; the first round is not counted."""
    seconds: dict[str, Seconds] = {memory: {name: [] for name in systems} for memory in MEMORY}
    for number in range(rounds + 1):
        for memory, name in random.sample(list(product(MEMORY, systems)), len(MEMORY) * len(systems)):
            start = time.perf_counter()
            systems[name].unload(MEMORY[memory])
            systems[name].load(MEMORY[memory])
            if number:
                seconds[memory][name].append(time.perf_counter() - start)
    return seconds


def print_table(seconds: dict[str, Seconds], nbytes: int) -> None:
    print("| memory in progress | system | load + unload, s | GB/s | this store is faster by |")
    print("|---" * 5 + "|")
    for memory, by_system in seconds.items():
        for name, taken in by_system.items():
            ratio = statistics.median(other / ours for other, ours in zip(taken, by_system["ours"], strict=True))
            rate = 2 * nbytes / statistics.median(taken) / 1e9
            print(f"| {memory} | {name} | {statistics.median(taken):.3f} | {rate:.2f} | {ratio:.2f} |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="355m")
    parser.add_argument("--folder", type=Path, default=Path(), help="where the files are made, and removed again")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stock-io", choices=("deepspeed", "glue"), default="deepspeed")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    arguments = parser.parse_args()
    with torch.device("meta"):
        numels = [param.numel() for param in GPT2(arguments.size).parameters()]
    sizes = [2 * numel for numel in numels if numel >= LEAST_NUMEL]
    machine = describe()
    print(machine)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="tensor-store-") as name:
        folder = Path(name)
        ours = Ours(folder, sizes)
        systems = {"ours": ours, "aio": Aio(folder, sizes, aio_handle(arguments.stock_io)), "raw": Raw(folder, sizes)}
        seconds = measure(systems, arguments.rounds)
        ours.store.close()
    print_table(seconds, sum(sizes))
    write_figures(arguments.json, machine=machine, size=arguments.size, nbytes=sum(sizes), seconds=seconds)


if __name__ == "__main__":
    main()
