"""Sums the squares of gradients in a thread, each as soon as its copy from a CUDA device has ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import CudaError, SmartInfinityError
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.layout.tensors import native_dtype

__all__ = ["ArrivingSquares", "squares_of"]


class ArrivingSquares:
    """Sums the squares of gradients beside backward, so that the step only waits for the last ones.

    Each parameter has a sum of its own, with the bits of :func:`squares_of`: no bit depends on the order in which
    gradients arrive, or on the thread. The thread starts with the first gradient and ends in :meth:`close`. All methods
    are called by one thread at a time.

    Args:
        layout: The partition.
        buffer: The flat tensor that the gradients are copied into.
    """

    def __init__(self, layout: PartitionLayout, buffer: torch.Tensor) -> None:
        self._layout, self._buffer = layout, buffer
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: dict[int, _Job] = {}  # by parameter

    def start(self, parameters: Sequence[int], copied: native.CudaEvent) -> None:
        """Sum the squares of these parameters' gradients once they are copied.

        Args:
            parameters: Parameter indices. No other sum of theirs is in progress.
            copied: Point after all of their copies.
        """
        job = _Job(self._layout, self._buffer, parameters)
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="smart-infinity-squares")
        try:
            job.ended = self._pool.submit(job.run, copied)
        except RuntimeError:  # no thread can be started, as when the interpreter ends: the step sums
            job.forget(parameters)
        else:
            self._jobs.update(dict.fromkeys(parameters, job))

    def forget(self, parameters: Iterable[int] | None = None) -> None:
        """Discard the sums of these parameters, or of all. The gradients are not read any more when this returns.

        Never waits for the device.
        """
        for parameter in list(self._jobs) if parameters is None else parameters:
            if parameter in self._jobs:
                self._jobs[parameter].forget([parameter])
                del self._jobs[parameter]

    def take(self) -> dict[int, float]:
        """Wait until all sums are computed; return those that were not discarded, by parameter, and forget them.

        Raises:
            CudaError: A copy or a sum failed. The thread has ended.
        """
        squares: dict[int, float] = {}
        try:
            for job in dict.fromkeys(self._jobs.values()):
                job.ended.result()
                squares |= job.squares
        except SmartInfinityError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise CudaError(f"The squares of gradients could not be summed: {error!r}.", CudaError.REMEDY) from error
        self._jobs.clear()
        return squares

    def close(self) -> None:
        """Discard all sums and end the thread, after the copies that it waits for; idempotent."""
        self.forget()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


class _Job:
    """The sums of gradients that arrived together, by parameter in ``squares`` after ``ended``."""

    ended: Future[None]

    def __init__(self, layout: PartitionLayout, buffer: torch.Tensor, parameters: Sequence[int]) -> None:
        self._layout, self._buffer, self._parameters = layout, buffer, tuple(parameters)
        self._forgotten: set[int] = set()
        self._lock = Lock()  # held while a gradient is read, but not while the device is waited for
        self.squares: dict[int, float] = {}

    def run(self, copied: native.CudaEvent) -> None:
        copied.synchronize()
        for parameter in self._parameters:
            with self._lock:
                if parameter not in self._forgotten:
                    self.squares[parameter] = squares_of(self._layout, self._buffer, parameter)

    def forget(self, parameters: Iterable[int]) -> None:
        with self._lock:
            for parameter in parameters:
                self._forgotten.add(parameter)
                self.squares.pop(parameter, None)


def squares_of(layout: PartitionLayout, buffer: torch.Tensor, parameter: int) -> float:
    """Return the sum of the squares of a parameter's gradient, in double, in a fixed order of summation.

    Args:
        layout: The partition.
        buffer: The gradients of the partition; those of the parameter are in memory.
        parameter: Parameter index.
    """
    where = layout.parameters[parameter]
    address = buffer.data_ptr() + where.offset * buffer.element_size()
    return native.sum_of_squares(address, where.numel, native_dtype(buffer.dtype))
