"""Measures how long the compression of gradients and the update of residuals take, and how small gradients become.

A whole partition of gradients lies in memory, as in a step on the host: normal numbers with a different scale in each
row, and a residual of the same length. Every tasklet is compressed as the compute threads of a step do it; then the
residual is updated. Usage::

    python benchmarks/compression.py [--parameters 124e6] [--tasklet 4e6] [--threads 2] [--tiny]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from machine import describe

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_smartinfinity.native import (
    BlockScaled,
    DType,
    GradientCodec,
    HostBuffer,
    Segment,
    Tasklet,
    TopK,
    feed_back,
)
from tests.helpers.native_testing import encode_gradient

ITEM_BYTES = {DType.FLOAT32: 4, DType.FLOAT16: 2, DType.BFLOAT16: 2}
ROW = 768


@dataclass(frozen=True)
class Case:
    """A codec, the type of the gradients, and whether there is a residual."""

    name: str
    codec: GradientCodec
    dtype: DType = DType.FLOAT32
    has_residual: bool = True


CASES = (
    Case("top 1 %", TopK(ratio=0.01)),
    Case("top 1 %, no residual", TopK(ratio=0.01), has_residual=False),
    Case("top 1 %, bf16 values", TopK(ratio=0.01, value_dtype=DType.BFLOAT16)),
    Case("top 1 %, bf16 gradients", TopK(ratio=0.01), DType.BFLOAT16),
    Case("top 1 %, sampled", TopK(ratio=0.01, exact=False)),
    Case("top 0.1 %", TopK(ratio=0.001)),
    Case("top 5 %", TopK(ratio=0.05)),
    Case("top 30 %", TopK(ratio=0.3)),
    Case("all", TopK(ratio=1.0)),
    Case("8 bits", BlockScaled()),
)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=124e6)
    parser.add_argument("--tasklet", type=float, default=4e6, help="elements of a tasklet")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="shows no more than that it works")
    arguments = parser.parse_args()
    numel, tasklet = (20_000, 7_000) if arguments.tiny else (int(arguments.parameters), int(arguments.tasklet))
    print(describe())
    print(f"{numel:,} parameters in tasklets of {tasklet:,}, {arguments.threads} threads; medians of 5")
    print(f"{'':<26}{'compress, s':>14}{'feed back, s':>14}{'sum, s':>10}{'B/parameter':>14}")
    memory = Memory(numel)
    for case in CASES:
        compress, feed, nbytes = measure(case, memory, tasklet, arguments.threads)
        print(f"{case.name:<26}{compress:>14.3f}{feed:>14.3f}{compress + feed:>10.3f}{nbytes / numel:>14.4f}")


class Memory:
    """Gradients as fp32 and as bf16, and a residual."""

    def __init__(self, numel: int) -> None:
        random = np.random.default_rng(0)
        self.numel = numel
        self._buffers = [HostBuffer(size * numel + (1 << 20)) for size in (4, 2, 4, 7)]
        self.fp32, self.residual = (self._array(index, np.float32) for index in (0, 2))
        self.bf16 = self._array(1, np.uint16)
        random.standard_normal(out=self.fp32, dtype=np.float32)
        rows = self.fp32[: numel // ROW * ROW].reshape(-1, ROW)
        rows *= np.exp(random.standard_normal((len(rows), 1), np.float32))
        self.bf16[:] = self.fp32.view(np.uint32) >> 16
        self.refill()

    def _array(self, index: int, dtype: type) -> npt.NDArray[Any]:
        return np.frombuffer(self._buffers[index].memoryview(), dtype, self.numel)

    def refill(self) -> None:
        """Reset the residual to the values with which each case starts."""
        np.multiply(self.fp32[::-1], np.float32(0.5), out=self.residual)

    def tasklets(self, case: Case, numel: int) -> Iterator[Tasklet]:
        """Yield every tasklet, with consecutive payloads, none of which takes more than 7 bytes per element."""
        gradient = self._buffers[0 if case.dtype is DType.FLOAT32 else 1].address
        payload = self._buffers[3].address
        for index, first in enumerate(range(0, self.numel, numel)):
            count = min(numel, self.numel - first)
            capacity = case.codec.payload_bytes(count, case.dtype)
            yield Tasklet(
                index=index,
                numel=count,
                num_arrays=3,
                extent_bytes=0,
                read_file=0,
                read_offset=0,
                read_generation=0,
                write_file=0,
                write_offset=0,
                write_generation=0,
                segments=[
                    Segment(
                        offset=0,
                        numel=count,
                        step=0,
                        gradient=gradient + ITEM_BYTES[case.dtype] * first,
                        gradient_dtype=case.dtype,
                    )
                ],
                payload=payload,
                payload_bytes=capacity,
                residual=self._buffers[2].address + 4 * first if case.has_residual else 0,
            )
            payload += capacity


def measure(case: Case, memory: Memory, tasklet: int, threads: int) -> tuple[float, float, int]:
    """Return the seconds to compress and to update residuals, and the bytes of all payloads."""
    tasklets = list(memory.tasklets(case, tasklet))
    compress, feed, nbytes = [], [], 0
    memory.refill()
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            begin = time.perf_counter()
            nbytes = sum(pool.map(lambda one: encode_gradient(case.codec, one), tasklets))
            encoded = time.perf_counter()
            feed_back(tasklets, threads=threads)
            compress.append(encoded - begin)
            feed.append(time.perf_counter() - encoded)
    return statistics.median(compress), statistics.median(feed), nbytes


if __name__ == "__main__":
    main()
