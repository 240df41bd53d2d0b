"""The gradient arena: one flat host buffer in which gradients arrive."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.transfer.batches import spans_of
from lightning_smartinfinity.transfer.cuda import CudaLink, GradientCopies
from lightning_smartinfinity.transfer.layout import PartitionLayout
from lightning_smartinfinity.transfer.tensors import Flat, HostTensor, is_native_dtype, native_dtype

__all__ = ["GradientArena"]

# Stands for a sum of squares that is not known; a known one is never negative.
_UNKNOWN = -1.0


class GradientArena:
    """This rank's gradients of one accumulation window, in host memory.

    The memory is one mapping in huge pages that forked children do not inherit; with a link it is registered for
    asynchronous copies (best effort).

    Args:
        layout: The partition.
        dtype: Accumulation dtype: float32, bfloat16 or float16.
        link: Link to the CUDA device that gradients come from; gradients in other memory are copied by blocking calls.

    Attributes:
        active: bool[num_parameters]: whether each parameter's gradient arrived in this window. It changes: copy it to
            keep it.
        buffer: The flat tensor, ``layout.numel`` elements of ``dtype``. Only read it: :meth:`sum_of_squares` does not
            see what others write to it.
    """

    def __init__(
        self, layout: PartitionLayout, *, dtype: torch.dtype = torch.float32, link: CudaLink | None = None
    ) -> None:
        self.active: NDArray[np.bool_] = np.zeros(len(layout.parameters), np.bool_)
        self._layout = layout
        self._copies = GradientCopies(link) if link is not None else None
        self._memory = link.host_tensor(layout.numel, dtype) if link is not None else HostTensor(layout.numel, dtype)
        self.buffer = self._memory.tensor
        # For each parameter: the address of its slice, its elements if it has no padding, and the sum of squares of
        # its gradient, if that is known.
        self._addresses = [
            self.buffer.data_ptr() + each.offset * self.buffer.element_size() for each in layout.parameters
        ]
        self._unpadded_numels = [each.numel if each.numel == each.real_numel else None for each in layout.parameters]
        self._squares = np.full(len(layout.parameters), _UNKNOWN)

    def arrive(self, parameter: int, gradient: torch.Tensor) -> None:
        """Add this rank's slice of a parameter's gradient; the first one in a window overwrites instead.

        Args:
            parameter: Parameter index.
            gradient: 1-D, on any device, any floating dtype, ``real_numel`` elements. Surplus elements are padding and
                are ignored, missing ones count as zeros: an empty gradient makes the parameter active. Copies from
                CUDA run on torch's current stream and may still be in flight on return (see :meth:`synchronize`).
        """
        numel = min(gradient.numel(), self._layout.parameters[parameter].real_numel)
        self._squares[parameter] = _UNKNOWN
        if self.active[parameter]:
            self._add(self.gradient(parameter)[:numel], gradient.detach().reshape(-1)[:numel])
        else:
            self.replace(parameter, gradient)

    def replace(self, parameter: int, gradient: torch.Tensor) -> None:
        """Do the same as :meth:`arrive`, but overwrite what arrived before in this window."""
        numel = min(gradient.numel(), self._layout.parameters[parameter].real_numel)
        gradient = gradient.detach().reshape(-1)[:numel]
        target = self.gradient(parameter)
        target[numel:].zero_()
        self._write(target[:numel], gradient)
        self._squares[parameter] = _UNKNOWN
        self.active[parameter] = True

    @torch.no_grad()
    def arrive_all(self, parameters: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Do :meth:`arrive` for several parameters; one call and one pass handle the gradients in host memory.

        Args:
            parameters: Parameter indices, each once.
            gradients: Gradient of each parameter.
        """
        arriving: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient.numel() == self._unpadded_numels[parameter] and _is_plain(gradient):
                arriving.setdefault(gradient.dtype, []).append((parameter, gradient))
            else:
                self.arrive(parameter, gradient)
        for dtype, pairs in arriving.items():
            indices = [parameter for parameter, _ in pairs]
            adds = self.active[indices].tolist()
            if any(adds):
                self.synchronize()
            self._squares[indices] = native.accumulate(
                [gradient.data_ptr() for _, gradient in pairs],
                [self._addresses[parameter] for parameter in indices],
                [gradient.numel() for _, gradient in pairs],
                adds,
                native_dtype(dtype),
                native_dtype(self.buffer.dtype),
            )
            self.active[indices] = True

    def scale(self, factor: float) -> None:
        """Multiply the gradients of this window."""
        self._squares[:] = _UNKNOWN
        for gradients in self._active_gradients():
            gradients.mul_(factor)

    def clamp(self, limit: float) -> None:
        """Clamp the gradients of this window to ``[-limit, limit]``."""
        self._squares[:] = _UNKNOWN
        for gradients in self._active_gradients():
            gradients.clamp_(-limit, limit)

    def reset(self) -> None:
        """End the window: no parameter is active any more. The memory keeps its content."""
        self.synchronize()
        self.active[:] = False

    def synchronize(self) -> None:
        """Wait for copies from CUDA. Methods that read the memory or return its address call this first."""
        if self._copies is not None:
            self._copies.wait()

    def sum_of_squares(self) -> float:
        """Return the sum of the squares of the active gradients, in double; it depends on their values only.

        Most squares were summed when the gradient arrived. The result is not finite if and only if an element of an
        active gradient is not finite.
        """
        self.synchronize()
        dtype = native_dtype(self.buffer.dtype)
        for parameter in np.flatnonzero(self.active & (self._squares == _UNKNOWN)).tolist():
            numel = self._layout.parameters[parameter].numel
            self._squares[parameter] = native.sum_of_squares(self._addresses[parameter], numel, dtype)
        return math.fsum(self._squares[self.active].tolist())

    def view(self, sub_group: int) -> torch.Tensor:
        """Return the flat gradient of one sub-group."""
        self.synchronize()
        where = self._layout.sub_groups[sub_group]
        return self.buffer[where.offset : where.offset + where.numel]

    def gradient(self, parameter: int) -> torch.Tensor:
        """Return the gradient slice of one parameter, padding included; its values are valid only while it is active.

        Copies from CUDA may be in flight.
        """
        where = self._layout.parameters[parameter]
        return self.buffer[where.offset : where.offset + where.numel]

    def flats(self) -> list[Flat]:
        """Return the memory of each sub-group's gradients, for :class:`StepPlan`."""
        self.synchronize()
        dtype, size = native_dtype(self.buffer.dtype), self.buffer.element_size()
        base = self.buffer.data_ptr()
        return [Flat(base + group.offset * size, group.numel, dtype) for group in self._layout.sub_groups]

    def close(self) -> None:
        """Unregister and release the memory; idempotent. The memory lives as long as a tensor over it."""
        try:
            self.synchronize()
        finally:
            self._memory.close()

    def _active_gradients(self) -> list[torch.Tensor]:
        """Return this window's gradients, with neighbours in one sub-group joined; their padding is zero."""
        self.synchronize()
        spans = spans_of(self._layout, self.active.astype(np.int64))
        return [self.buffer[begin:end] for begin, end, is_active in spans if is_active]

    def _write(self, target: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._copies is not None and self._copies.takes(gradient):
            self._copies.write(target, gradient)
        else:
            target.copy_(gradient)

    def _add(self, target: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._copies is not None and self._copies.takes(gradient):
            self._copies.add(target, gradient)
        else:
            self.synchronize()
            target.add_(gradient.cpu())


def _is_plain(gradient: torch.Tensor) -> bool:
    """Return whether the native core can read the gradient: contiguous, in host memory, of a dtype that it knows."""
    return gradient.is_cpu and gradient.is_contiguous() and not gradient.is_neg() and is_native_dtype(gradient.dtype)
