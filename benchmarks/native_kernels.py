"""Measures the speed of the native core's parts on this machine.

Norms, checksums and the compute of a step run in one thread. The compute of a step is measured by the pipeline itself:
verification, update and checksums of tasklets that fit the second-level cache, read from the page cache. The last table
compares a whole step with a raw loop of direct reads and writes of the same extents in the same folder, with the same
number of threads. Usage::

    python benchmarks/native_kernels.py [--folder .] [--state-mib 1536] [--tiny]
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from machine import describe

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_smartinfinity import native
from lightning_smartinfinity.common import update_rules
from lightning_smartinfinity.common.update_rules import RuleDescription
from lightning_smartinfinity.native import (
    Batch,
    DType,
    HostBuffer,
    Identity,
    Operation,
    Pipeline,
    Segment,
    StateFile,
    Tasklet,
    UpdateStep,
    sum_of_squares,
)
from tests.helpers.native_testing import (
    InstructionSet,
    crc32c_by,
    crc32c_widths,
    select_instruction_set,
    supported_instruction_sets,
)

BLOCK = 4096


@dataclass(frozen=True)
class Rule:
    """An update step and the arrays that it updates, including the master weights."""

    name: str
    step: UpdateStep
    num_arrays: int


def _step(rule: RuleDescription) -> UpdateStep:
    """Make a step as trainings usually have it, without the terms that a setting of zero leaves out."""
    unused = {"l2": 0.0, "weight_decay": 0.0, "nesterov_momentum": 0.0}
    step: UpdateStep = getattr(native, rule.step)(**{name: unused.get(name, x) for name, x in rule.scalars.items()})
    return step


RULES = tuple(Rule(rule.optimizers[-1], _step(rule), len(rule.arrays)) for rule in update_rules.RULES)


@dataclass(frozen=True)
class Sizes:
    """The size of the state, and the numbers of buffers and threads."""

    tasklet_numel: int
    num_tasklets: int
    num_buffers: int
    num_threads: int
    num_arrays: int = 3

    @property
    def extent_bytes(self) -> int:
        """Bytes of an extent, a multiple of 4096."""
        return self.num_arrays * (-(-4 * self.tasklet_numel // BLOCK) * BLOCK) + BLOCK


def main() -> None:
    """Print four tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(), help="where the state file is made, and removed again")
    parser.add_argument("--state-mib", type=int, default=1536, help="state of the whole step, each of its two places")
    parser.add_argument("--tiny", action="store_true", help="shows no more than that it works")
    arguments = parser.parse_args()
    repeats = 1 if arguments.tiny else 10
    print(describe())
    norms(100_000, repeats)
    checksums((1 if arguments.tiny else 64) << 20, repeats)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="native-kernels-") as folder:
        path = Path(folder) / "state.bin"
        compute(path, Sizes(12_288, 2 if arguments.tiny else 64, 1, 1), repeats)
        adamw = RULES[0]
        num_tasklets = 2 if arguments.tiny else arguments.state_mib // (4 * adamw.num_arrays)
        whole_step(path, Sizes(1 << (12 if arguments.tiny else 20), max(num_tasklets, 1), 6, 4), adamw, repeats)


def norms(numel: int, repeats: int) -> None:
    """Measure sums of squares by instruction set and type."""
    values = np.random.default_rng(0).standard_normal(numel).astype(np.float32)
    header("sum of squares, G elements/s", [dtype.name for dtype in DType])
    for choice in instruction_sets():
        seconds = [fastest(sum_of_squares, values.ctypes.data, numel, dtype, repeats=repeats) for dtype in DType]
        row(choice.name, [numel / second / 1e9 for second in seconds])


def checksums(memory_bytes: int, repeats: int) -> None:
    """Checksums by the width of registers (0: by a table): what each costs the CPU, and what it saves.

    A step computes each array's checksum twice: of what was read, which lies in memory, and of what it writes, which
    lies in the cache. The last two columns are the mean of the two, and how much less it is than in the row before.
    """
    memory = HostBuffer(memory_bytes)
    memory.memoryview()[:] = bytes(memory.nbytes)  # pages that were never written are all the same one
    cached = min(256 << 10, memory_bytes)
    costs: dict[int, list[tuple[float, float]]] = {width: [] for width in crc32c_widths()}
    for _ in range(3 * repeats):  # in turn: the speed of a shared CPU drifts
        for width, found in costs.items():
            pair = (checksum_cost(memory, cached, width), checksum_cost(memory, memory_bytes, width))
            found.append(pair)
    header("CRC-32C, CPU ms per GB", ["in cache", "in memory", "mean", "saved, %"])
    before = None
    for width, found in costs.items():
        in_cache, in_memory = (statistics.median(column) for column in zip(*found, strict=True))
        mean = (in_cache + in_memory) / 2
        row(f"{width} bits", [in_cache, in_memory, mean, *([] if before is None else [100 * (1 - mean / before)])])
        before = mean


def checksum_cost(memory: HostBuffer, nbytes: int, width: int) -> float:
    """CPU milliseconds per gigabyte, from as many calls as go through all of the memory's size."""
    calls = memory.nbytes // nbytes
    start = time.thread_time()
    for _ in range(calls):
        crc32c_by(memory.address, nbytes, 0, width)
    return 1e3 * (time.thread_time() - start) / (calls * nbytes / 1e9)


def compute(path: Path, sizes: Sizes, repeats: int) -> None:
    """Measure the compute of a step by instruction set and type of gradients and parameters."""
    header("step compute, G parameters/s", [dtype.name for dtype in DType])
    for choice in instruction_sets():
        for rule in RULES:
            rates = [compute_rate(path, sizes, rule, dtype, repeats) for dtype in DType]
            row(f"{rule.name}, {choice.name}", rates)


def compute_rate(path: Path, sizes: Sizes, rule: Rule, dtype: DType, repeats: int) -> float:
    """Return parameters per nanosecond."""
    state = State(path, sizes, rule, dtype, direct=False)
    seconds = []
    for _ in range(repeats):
        before = state.pipeline.counters().compute_seconds
        state.work(Operation.UPDATE)
        seconds.append(state.pipeline.counters().compute_seconds - before)
    state.pipeline.close()
    return sizes.tasklet_numel * sizes.num_tasklets / min(seconds) / 1e9


def whole_step(path: Path, sizes: Sizes, rule: Rule, repeats: int) -> None:
    """Measure a step of bf16 training against the disk."""
    direct = takes_direct(path.parent)
    state = State(path, sizes, rule, DType.BFLOAT16, direct=direct)
    steps, raws = [], []
    for _ in range(repeats):  # they take turns, since the speed of a shared disk drifts
        steps.append(elapsed(lambda: state.work(Operation.UPDATE)))
        raws.append(elapsed(lambda: raw_loop(path, sizes, direct=direct)))
    state.pipeline.close()
    header("whole step" + ("" if direct else " (no direct I/O here)"), ["GB/s", "s (median)"])
    nbytes = 2 * sizes.num_tasklets * sizes.extent_bytes
    for name, seconds in (("pipeline", steps), ("raw reads and writes", raws)):
        row(name, [nbytes / statistics.median(seconds) / 1e9, statistics.median(seconds)])


class State:
    """A state file with two places per tasklet, gradients and parameters in memory, and the pipeline over them."""

    def __init__(self, path: Path, sizes: Sizes, rule: Rule, dtype: DType, *, direct: bool) -> None:
        self.sizes, self.rule, self.dtype, self.generation = replace(sizes, num_arrays=rule.num_arrays), rule, dtype, 0
        self.gradient = HostBuffer(4 * sizes.tasklet_numel * sizes.num_tasklets)
        self.parameter = HostBuffer(4 * sizes.tasklet_numel * sizes.num_tasklets)
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 2 * sizes.num_tasklets * self.sizes.extent_bytes)
        self.pipeline = Pipeline(
            files=[StateFile(str(path), direct=direct)],
            identity=Identity(job=bytes(16), rank=0, state_format=0),
            num_buffers=sizes.num_buffers,
            buffer_bytes=self.sizes.extent_bytes,
            io_threads=sizes.num_threads,
        )
        self.work(Operation.WRITE)

    def work(self, operation: Operation) -> None:
        """Work every tasklet, from its current place to the other."""
        tasklets = [self.tasklet(index) for index in range(self.sizes.num_tasklets)]
        self.pipeline.submit(Batch(operation, tasklets, [self.rule.step]))
        failure = self.pipeline.finish()
        if failure is not None:
            raise SystemExit(failure.message)
        self.generation += 1

    def tasklet(self, index: int) -> Tasklet:
        """Make a tasklet with one segment over all of its elements."""
        numel, nbytes = self.sizes.tasklet_numel, self.sizes.extent_bytes
        place = self.generation % 2
        segment = Segment(
            offset=0,
            numel=numel,
            step=0,
            gradient=self.gradient.address + 4 * numel * index,
            gradient_dtype=self.dtype,
            parameter=self.parameter.address + 4 * numel * index,
            parameter_dtype=self.dtype,
        )
        return Tasklet(
            index=index,
            read_file=0,
            write_file=0,
            numel=numel,
            num_arrays=self.rule.num_arrays,
            extent_bytes=nbytes,
            read_offset=(2 * index + place) * nbytes,
            read_generation=self.generation,
            write_offset=(2 * index + 1 - place) * nbytes,
            write_generation=self.generation + 1,
            segments=[segment],
        )


def raw_loop(path: Path, sizes: Sizes, *, direct: bool) -> None:
    """Read every extent and write it back to the same place, so that the state stays valid for the pipeline."""
    ring = HostBuffer(sizes.num_threads * sizes.extent_bytes)
    descriptor = os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))
    offsets: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(sizes.num_tasklets):
        offsets.put(2 * index * sizes.extent_bytes)

    def work(number: int) -> None:
        buffer = ring.memoryview()[number * sizes.extent_bytes : (number + 1) * sizes.extent_bytes]
        while not offsets.empty():
            try:
                offset = offsets.get_nowait()
            except queue.Empty:
                return
            moved = os.preadv(descriptor, [buffer], offset) + os.pwritev(descriptor, [buffer], offset)
            assert moved == 2 * sizes.extent_bytes

    threads = [threading.Thread(target=work, args=(number,)) for number in range(sizes.num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(descriptor)


def takes_direct(folder: Path) -> bool:
    """Return whether the folder's file system supports direct I/O."""
    try:
        os.close(os.open(folder / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    return True


def instruction_sets() -> Iterator[InstructionSet]:
    """Select each instruction set of this CPU in turn, and the best at the end."""
    for choice in supported_instruction_sets():
        yield select_instruction_set(choice)
    select_instruction_set(None)


def fastest(function: Callable[..., object], *arguments: object, repeats: int) -> float:
    """Return the seconds of the fastest of many calls."""
    return min(elapsed(lambda: function(*arguments)) for _ in range(5 * repeats))


def elapsed(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def header(title: str, columns: list[str]) -> None:
    """Print the head of a table."""
    print(f"\n{title:<32}" + "".join(f"{column:>12}" for column in columns))


def row(name: str, values: list[float]) -> None:
    """Print one row of a table."""
    print(f"{name:<32}" + "".join(f"{value:>12.2f}" for value in values))


if __name__ == "__main__":
    main()
