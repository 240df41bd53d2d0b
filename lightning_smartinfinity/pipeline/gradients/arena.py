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
from lightning_smartinfinity.pipeline.gradients.arriving_squares import ArrivingSquares, squares_of
from lightning_smartinfinity.pipeline.gradients.gradient_memory import GradientMemory, GradientWindows
from lightning_smartinfinity.pipeline.layout.batches import spans_of
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.layout.tensors import DTYPES, Flat
from lightning_smartinfinity.pipeline.parameters.cuda import CudaLink, GradientCopies

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
    ) -> None:
        self.active: NDArray[np.bool_] = np.zeros(len(layout.parameters), np.bool_)
        self._layout = layout
        # Memory with a budget is not registered, because registered pages cannot be dropped. Copies into it block.
        self._copies = GradientCopies(link) if link is not None and memory is None else None
        self._memory = GradientMemory(layout.numel, dtype, link=link) if memory is None else memory
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
        self._arriving = None if self._copies is None else ArrivingSquares(layout, self.buffer)
        self._is_last = True

    def arrive(self, parameter: int, gradient: torch.Tensor) -> None:
        """Do the same as :meth:`arrive_all` for one parameter, without the core."""
        self._arrive(parameter, gradient, adds=bool(self.active[parameter]))

    def replace(self, parameter: int, gradient: torch.Tensor) -> None:
        """Do the same as :meth:`arrive`, but overwrite what arrived before in this window.

        Raises:
            CudaError: An earlier copy of a gradient failed.
        """
        self.synchronize()  # copies in flight would overwrite the gradient
        self._arrive(parameter, gradient, adds=False)

    @torch.no_grad()
    def arrive_all(self, parameters: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Add this rank's slices of gradients. The first one of a parameter in a window overwrites the memory instead.

        Plain gradients in host memory are handled in one pass of the core. Copies from CUDA run on torch's current
        stream and may still be in flight on return (see :meth:`synchronize`).

        Args:
            parameters: Parameter indices, each once.
            gradients: Gradient of each parameter: 1-D, on any device, any floating dtype, ``real_numel`` elements.
                Surplus elements are padding and are ignored, missing ones count as zeros: an empty gradient makes the
                parameter active.
        """
        arriving: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
        copied = []
        if self._arriving is not None:
            self._arriving.forget(parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient.numel() == self._unpadded_numels[parameter] and _is_plain(gradient):
                arriving.setdefault(gradient.dtype, []).append((parameter, gradient))
            else:
                self._copy(parameter, gradient, adds=bool(self.active[parameter]))
                copied.append(parameter)
        self._square_behind_copies(copied)
        for dtype, pairs in self._held_together(arriving):
            indices = [parameter for parameter, _ in pairs]
            adds = self.active[indices].tolist()
            if any(adds):
                # The core reads memory that copies from CUDA may still be filling.
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
        self._forget_squares()
        for gradients in self._active_gradients():
            gradients.mul_(factor)

    def clamp(self, limit: float) -> None:
        """Clamp the gradients of this window to ``[-limit, limit]``."""
        self._forget_squares()
        for gradients in self._active_gradients():
            gradients.clamp_(-limit, limit)

    def reset(self) -> None:
        """End the window: no parameter is active any more. The step in flight keeps its gradients."""
        self._forget_squares()
        self.synchronize()
        self.active[:] = False
        self._memory.reset()
        self._lost = False

    def step_rolled_back(self) -> None:
        """Record that the step in flight was rolled back. Gradients that it released after use are lost."""
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
        """Wait for copies from CUDA. Methods that read the memory or return its address call it first."""
        if self._copies is not None:
            self._copies.wait()

    def sum_of_squares(self) -> float:
        """Return the sum of the squares of the active gradients, in double; it depends on their values only.

        Most sums are computed when a gradient arrives: see :class:`ArrivingSquares`. The result is not finite if and
        only if an element of an active gradient is not finite.

        Raises:
            CudaError: A copy of a gradient failed.
        """
        if self._arriving is not None:
            for parameter, squares in self._arriving.take().items():
                self._squares[parameter] = squares
        self.synchronize()
        for parameter in np.flatnonzero(self.active & (self._squares == _UNKNOWN)).tolist():
            self._memory.hold([self._range_of(parameter)], changes=False)
            self._squares[parameter] = squares_of(self._layout, self.buffer, parameter)
        return math.fsum(self._squares[self.active].tolist())

    def view(self, sub_group: int) -> torch.Tensor:
        """Return the flat gradient of one sub-group."""
        self.synchronize()
        where = self._layout.sub_groups[sub_group]
        return self.buffer[where.offset : where.offset + where.numel]

    def gradient(self, parameter: int) -> torch.Tensor:
        """Return the gradient slice of one parameter, padding included. Read it before the next call of any method.

        Its values are valid only while the parameter is active. Copies from CUDA may be in flight.
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

    def counters(self) -> native.Counters | None:
        """Return the cumulative counters of gradients on storage; None if all stay in memory."""
        return self._memory.counters()

    @property
    def memory_bytes(self) -> int:
        """Most bytes of host memory that the gradients use."""
        return self.buffer.nbytes if self._memory.budget_bytes is None else self._memory.budget_bytes

    def flats(self) -> list[Flat]:
        """Return the memory of each sub-group's gradients, for :class:`StepPlan`."""
        self.synchronize()
        base, size = self.buffer.data_ptr(), self.buffer.element_size()
        return [Flat(base + group.offset * size, group.numel, self._dtype) for group in self._layout.sub_groups]

    def close(self) -> None:
        """Unregister and release the memory; idempotent. The memory lives as long as a tensor over it."""
        if self._arriving is not None:
            self._arriving.close()
        with suppress(CudaError):  # a device that has failed copies nothing any more
            self.synchronize()
        self._memory.close()

    @torch.no_grad()
    def _arrive(self, parameter: int, gradient: torch.Tensor, *, adds: bool) -> None:
        if self._arriving is not None:
            self._arriving.forget([parameter])
        self._copy(parameter, gradient, adds=adds)
        self._square_behind_copies([parameter])

    def _copy(self, parameter: int, gradient: torch.Tensor, *, adds: bool) -> None:
        """Write a gradient into the memory, or add it there. Copies from CUDA are only started."""
        self._squares[parameter] = _UNKNOWN
        gradient = gradient.detach().reshape(-1)[: self._layout.parameters[parameter].real_numel]
        target = self._held(parameter, changes=True)
        copied, rest = target[: gradient.numel()], target[gradient.numel() :]
        if adds:
            self._add(copied, gradient)
        else:
            self._write(copied, gradient)
            rest.zero_()
            self.active[parameter] = True
        if self._is_last and self._memory.budget_bytes is not None:
            # The memory may be spilled, or given up, before the norm is needed.
            self._squares[parameter] = squares_of(self._layout, self.buffer, parameter)

    def _square_behind_copies(self, parameters: Sequence[int]) -> None:
        if self._arriving is not None and self._copies is not None and self._is_last and parameters:
            self._arriving.start(parameters, self._copies.point())

    def _forget_squares(self) -> None:
        """Discard all sums, because the gradients are about to change."""
        self._squares[:] = _UNKNOWN
        if self._arriving is not None:
            self._arriving.forget()

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

    def _write(self, target: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._copies is not None and self._copies.takes(gradient):
            self._copies.write(target, gradient)
        else:
            # Between fp32 and fp16, torch 2.13 loses the sign of a tensor that is negated lazily.
            target.copy_(gradient.resolve_neg())

    def _add(self, target: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._copies is not None and self._copies.takes(gradient):
            self._copies.add(target, gradient)
        else:
            self.synchronize()
            target.add_(gradient.cpu())


def _is_plain(gradient: torch.Tensor) -> bool:
    """Return whether the native core can read the gradient: contiguous, in host memory, of a dtype that it knows."""
    return gradient.is_cpu and gradient.is_contiguous() and not gradient.is_neg() and gradient.dtype in DTYPES
