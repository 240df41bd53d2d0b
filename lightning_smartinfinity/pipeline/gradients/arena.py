"""The gradient arena: one flat tensor in which gradients arrive."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import CudaError, SmartInfinityError
from lightning_smartinfinity.pipeline.gradients.arriving_gradients import ArrivingGradients
from lightning_smartinfinity.pipeline.gradients.gradient_memory import GradientMemory, GradientWindows
from lightning_smartinfinity.pipeline.layout.batches import spans_of
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.layout.tensors import DTYPES, Flat
from lightning_smartinfinity.pipeline.parameters.cuda import CudaLink

__all__ = ["GradientArena"]

# Stands for a sum of squares that is not known; a known one is never negative.
_UNKNOWN = -1.0

_Arrival = tuple[int, torch.Tensor]  # parameter index and gradient


class GradientArena:
    """This rank's gradients of one accumulation window, in host memory or, beyond a memory budget, on storage.

    Args:
        layout: The partition.
        dtype: Accumulation dtype: float32, bfloat16 or float16.
        link: Link to the CUDA device that gradients come from. Gradients in other memory are copied by blocking calls.
        memory: Memory for the gradients; None means memory that holds all of them.
        num_threads: Number of threads that add gradients from the device.

    Attributes:
        active: bool[num_parameters]: whether each parameter's gradient arrived in this window. The arena changes this
            array in place: copy it to keep it.
        buffer: The flat tensor, ``layout.numel`` elements of ``dtype``. Callers may only read it, and only where it is
            held: :meth:`sum_of_squares` does not notice outside writes.
    """

    def __init__(
        self,
        layout: PartitionLayout,
        *,
        dtype: torch.dtype = torch.float32,
        link: CudaLink | None = None,
        memory: GradientMemory | None = None,
        num_threads: int = 1,
    ) -> None:
        self.active: NDArray[np.bool_] = np.zeros(len(layout.parameters), np.bool_)
        self._layout = layout
        self._memory = GradientMemory(layout.numel, dtype) if memory is None else memory
        self._lost = False
        self.buffer = self._memory.tensor
        self._dtype = DTYPES[dtype]
        # For each parameter: the address of its slice, its number of elements (None if padded), and its gradient's sum
        # of squares (_UNKNOWN if not known).
        self._addresses = [
            self.buffer.data_ptr() + each.offset * self.buffer.element_size() for each in layout.parameters
        ]
        self._unpadded_numels = [each.numel if each.numel == each.real_numel else None for each in layout.parameters]
        self._squares = np.full(len(layout.parameters), _UNKNOWN)
        self._arriving = None
        if link is not None:
            self._arriving = ArrivingGradients(link, nbytes=self.buffer.nbytes, num_threads=num_threads)
            self._memory.arriving = self._arriving
        self._is_last = True

    def arrive(self, parameter: int, gradient: torch.Tensor) -> None:
        """Do the same as :meth:`arrive_all` for one parameter, without the core."""
        self._copy(parameter, gradient, adds=bool(self.active[parameter]))

    def replace(self, parameter: int, gradient: torch.Tensor) -> None:
        """Do the same as :meth:`arrive`, but overwrite what arrived before in this window. The caller keeps the tensor.

        Raises:
            CudaError: An earlier copy of a gradient failed.
        """
        self.synchronize()  # copies in flight would overwrite the gradient
        # Later changes of a tensor on a device would not wait for the copy.
        self._copy(parameter, gradient.clone() if gradient.is_cuda else gradient, adds=False)

    @torch.no_grad()
    def arrive_all(self, parameters: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Add this rank's slices of gradients. The first one of a parameter in a window overwrites the memory instead.

        Plain gradients in host memory are handled in one pass of the core. Gradients on the device may still be on
        their way on return: see :meth:`synchronize` and :meth:`arrived`. Nobody may change them.

        Args:
            parameters: Parameter indices, each once.
            gradients: Gradient of each parameter: 1-D, on any device, any floating dtype, ``real_numel`` elements.
                Surplus elements are padding and are ignored, missing ones count as zeros: an empty gradient makes the
                parameter active.
        """
        arriving: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient.numel() == self._unpadded_numels[parameter] and _is_plain(gradient):
                arriving.setdefault(gradient.dtype, []).append((parameter, gradient))
            else:
                self._copy(parameter, gradient, adds=bool(self.active[parameter]))
        for dtype, pairs in self._held_together(arriving):
            indices = [parameter for parameter, _ in pairs]
            adds = self.active[indices].tolist()
            if any(adds):
                # Gradients from CUDA may still be on their way into the memory.
                self.synchronize()
            self._squares[indices] = native.accumulate(
                [gradient.data_ptr() for _, gradient in pairs],
                [self._addresses[parameter] for parameter in indices],
                [gradient.numel() for _, gradient in pairs],
                adds,
                DTYPES[dtype],
                self._dtype,
            )
            self.active[indices] = True

    def scale(self, factor: float) -> None:
        """Multiply the gradients of this window."""
        self.synchronize()
        self._squares[:] = _UNKNOWN
        for gradients in self._active_gradients():
            gradients.mul_(factor)

    def clamp(self, limit: float) -> None:
        """Clamp the gradients of this window to ``[-limit, limit]``."""
        self.synchronize()
        self._squares[:] = _UNKNOWN
        for gradients in self._active_gradients():
            gradients.clamp_(-limit, limit)

    def reset(self) -> None:
        """End the window: no parameter is active any more. The step in flight keeps its gradients."""
        if self._arriving is not None:
            self._arriving.reset()
        self._squares[:] = _UNKNOWN
        self.active[:] = False
        self._memory.reset()
        self._lost = False

    def step_rolled_back(self) -> None:
        """Record that the step in flight was rolled back. Gradients that it released after use are lost."""
        if self._memory.budget_bytes is not None:
            with suppress(CudaError):  # the step raises it
                self.synchronize()  # nothing may be on its way into memory that is dropped
        if self._memory.step_rolled_back():
            self.reset()
            self._lost = True

    def backward_begins(self, *, binds: bool, is_last: bool = True) -> None:
        """Record that a backward begins. If all earlier gradients were lost, it begins a new window.

        Args:
            binds: Whether the update releases gradients as it uses them, so that few need to be spilled.
            is_last: Whether a step may follow it. If not, squares are summed as gradients arrive only where the core
                sums them in the same pass: the next backward changes the gradients.
        """
        self._is_last = is_last
        self._lost = self._lost and bool(self.active.any())
        self._memory.spills_ahead = not binds

    def synchronize(self) -> None:
        """Wait until the gradients from CUDA are in the memory. Methods that read the memory call it first.

        Raises:
            CudaError: A copy of a gradient of this window failed.
        """
        if self._arriving is not None:
            self._arriving.wait()
            for parameter, squares in self._arriving.take_squares():
                self._squares[parameter] = squares

    def arrived(self) -> list[native.ReadyPoint]:
        """Return the points after which all gradients that were passed so far are in the memory."""
        return [] if self._arriving is None else [self._arriving.point()]

    def sum_of_squares(self) -> float:
        """Return the sum of the squares of the active gradients, in double; it depends on their values only.

        Most sums are computed when a gradient arrives. The result is not finite if and only if an element of an active
        gradient is not finite.

        Raises:
            CudaError: A copy of a gradient failed.
        """
        self.synchronize()
        for parameter in np.flatnonzero(self.active & (self._squares == _UNKNOWN)).tolist():
            self._memory.hold([self._range_of(parameter)], changes=False)
            self._squares[parameter] = self._squares_of(parameter)
        return math.fsum(self._squares[self.active].tolist())

    def view(self, sub_group: int) -> torch.Tensor:
        """Return the flat gradient of one sub-group."""
        self.synchronize()
        where = self._layout.sub_groups[sub_group]
        return self.buffer[where.offset : where.offset + where.numel]

    def gradient(self, parameter: int) -> torch.Tensor:
        """Return the gradient slice of one parameter, padding included. Read it before the next call of any method.

        Its values are valid only while the parameter is active. It may still be on its way from CUDA.
        """
        return self._held(parameter, changes=False)

    def of_step(self, tasklet: int, last_use: bool) -> native.GradientWindow | None:
        """Return the gradient window that the update of a tasklet uses; None if the gradient stays in memory.

        Args:
            tasklet: Index of the tasklet, whose gradient is complete.
            last_use: Whether the update is the last use of the gradient.
        """
        return self._memory.of_step(tasklet, last_use=last_use)

    @property
    def is_lost(self) -> bool:
        """Whether gradients of this window are lost: a step released them and was rolled back, or storage failed."""
        return self._lost or self._memory.is_damaged

    def take_failure(self) -> SmartInfinityError | None:
        """Return and clear the error of a failed spill to storage or read from it; None if there is none."""
        return self._memory.take_failure()

    @property
    def wait_seconds(self) -> float:
        """Time that backward waited because too many gradients were on their way from CUDA."""
        return 0.0 if self._arriving is None else self._arriving.wait_seconds

    @property
    def ring_bytes(self) -> int:
        """Registered host memory through which gradients from CUDA pass."""
        return 0 if self._arriving is None else self._arriving.nbytes

    def counters(self) -> native.Counters | None:
        """Return the cumulative counters of gradients on storage; None if all stay in memory."""
        return self._memory.counters()

    @property
    def memory_bytes(self) -> int:
        """Most bytes of host memory that the gradients use."""
        return self.buffer.nbytes if self._memory.budget_bytes is None else self._memory.budget_bytes

    def flats(self) -> list[Flat]:
        """Return the memory of each sub-group's gradients, for :class:`StepPlan`."""
        base, size = self.buffer.data_ptr(), self.buffer.element_size()
        return [Flat(base + group.offset * size, group.numel, self._dtype) for group in self._layout.sub_groups]

    def close(self) -> None:
        """Unregister and release the memory; idempotent. The memory lives as long as a tensor over it."""
        if self._arriving is not None:
            self._arriving.close()
        self._memory.close()

    @torch.no_grad()
    def _copy(self, parameter: int, gradient: torch.Tensor, *, adds: bool) -> None:
        """Write a gradient into the memory, or add it there. Gradients from CUDA are only sent on their way."""
        arriving = self._arriving
        if arriving is not None and not arriving.takes(gradient):
            arriving = None
            self.synchronize()
        self._squares[parameter] = _UNKNOWN
        gradient = gradient.detach().reshape(-1)[: self._layout.parameters[parameter].real_numel]
        target = self._held(parameter, changes=True)
        copied, rest = target[: gradient.numel()], target[gradient.numel() :]
        if not adds:
            rest.zero_()
            self.active[parameter] = True
        if arriving is not None:
            ticket = arriving.start(parameter, copied, gradient, adds=adds)
            self._memory.arrives(self._range_of(parameter), ticket)
            return
        # Between fp32 and fp16, torch 2.13 loses the sign of a tensor that is negated lazily.
        copied.add_(gradient.cpu()) if adds else copied.copy_(gradient.resolve_neg())
        if self._is_last and self._memory.budget_bytes is not None:
            # The memory may be spilled, or given up, before the norm is needed.
            self._squares[parameter] = self._squares_of(parameter)

    def _squares_of(self, parameter: int) -> float:
        """Return the sum of the squares of a gradient in memory, in double, in a fixed order of summation."""
        return native.sum_of_squares(self._addresses[parameter], self._layout.parameters[parameter].numel, self._dtype)

    def _held(self, parameter: int, *, changes: bool) -> torch.Tensor:
        begin, end = self._range_of(parameter)
        self._memory.hold([(begin, end)], changes=changes)
        return self.buffer[begin:end]

    def _range_of(self, parameter: int) -> tuple[int, int]:
        where = self._layout.parameters[parameter]
        return where.offset, where.offset + where.numel

    def _held_together(
        self, arriving: Mapping[torch.dtype, Sequence[_Arrival]]
    ) -> Iterator[tuple[torch.dtype, Sequence[_Arrival]]]:
        """Yield the arrivals in groups whose memory is held: all of a dtype, or as many as the budget permits."""
        if not isinstance(self._memory, GradientWindows):
            yield from arriving.items()
            return
        for dtype, pairs in arriving.items():
            for group in self._memory.groups([self._range_of(parameter) for parameter, _ in pairs]):
                chosen = [pairs[index] for index in group]
                self._memory.hold([self._range_of(parameter) for parameter, _ in chosen], changes=True)
                yield dtype, chosen

    def _active_gradients(self) -> Iterator[torch.Tensor]:
        """Yield this window's gradients, joining neighbours in one sub-group; their padding is zero."""
        self.synchronize()
        for begin, end, is_active in spans_of(self._layout, self.active.astype(np.int64)):
            for first, last in self._memory.cut(begin, end) if is_active else ():
                self._memory.hold([(first, last)], changes=True)
                yield self.buffer[first:last]


def _is_plain(gradient: torch.Tensor) -> bool:
    """Return whether the native core can read the gradient: contiguous, in host memory, of a dtype that it knows."""
    return gradient.is_cpu and gradient.is_contiguous() and not gradient.is_neg() and gradient.dtype in DTYPES
