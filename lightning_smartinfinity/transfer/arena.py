"""The gradient arena: one flat host buffer that gradients arrive in."""

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

# Instead of a sum of squares, which is never negative.
_UNKNOWN = -1.0


class GradientArena:
    """This rank's gradients of one accumulation window, in host memory.

    The memory is one huge-paged mapping that forked children do not inherit; with a link it is registered for
    asynchronous copies (best effort).

    Args:
        layout: The partition.
        dtype: Accumulation dtype: float32, bfloat16 or float16.
        link: To the CUDA device that gradients come from; gradients in other memory arrive too, by copies that block.

    Attributes:
        active: bool[num_parameters]: parameters that arrived in this window. Live: copy it to keep it.
        buffer: The flat tensor, ``layout.numel`` elements of ``dtype``. To be read: :meth:`sum_of_squares` does not
            notice what is written to it.
    """

    def __init__(
        self, layout: PartitionLayout, *, dtype: torch.dtype = torch.float32, link: CudaLink | None = None
    ) -> None:
        self.active: NDArray[np.bool_] = np.zeros(len(layout.parameters), np.bool_)
        self._layout = layout
        self._copies = GradientCopies(link) if link is not None else None
        self._memory = link.host_tensor(layout.numel, dtype) if link is not None else HostTensor(layout.numel, dtype)
        self.buffer = self._memory.tensor
        # Of each parameter: the address of its slice, the elements of a gradient that fills it, and the sum of squares
        # of what has arrived, where that is known.
        self._addresses = [
            self.buffer.data_ptr() + each.offset * self.buffer.element_size() for each in layout.parameters
        ]
        self._whole = [each.numel if each.numel == each.real_numel else None for each in layout.parameters]
        self._squares = np.full(len(layout.parameters), _UNKNOWN)

    def arrive(self, parameter: int, gradient: torch.Tensor) -> None:
        """Take this rank's slice of a parameter's gradient: the first one in a window writes, later ones add.

        Args:
            parameter: Parameter index.
            gradient: 1-D, on any device, any floating dtype, ``real_numel`` elements; surplus elements are padding and
                ignored, missing ones are zeros: an empty one makes the parameter active and nothing else. Copies from
                CUDA run on torch's current stream and may still be in flight on return (see :meth:`synchronize`).
        """
        numel = min(gradient.numel(), self._layout.parameters[parameter].real_numel)
        self._squares[parameter] = _UNKNOWN
        if self.active[parameter]:
            self._add(self.gradient(parameter)[:numel], gradient.detach().reshape(-1)[:numel])
        else:
            self.replace(parameter, gradient)

    def replace(self, parameter: int, gradient: torch.Tensor) -> None:
        """As :meth:`arrive`, in place of all that arrived before in this window."""
        numel = min(gradient.numel(), self._layout.parameters[parameter].real_numel)
        gradient = gradient.detach().reshape(-1)[:numel]
        target = self.gradient(parameter)
        target[numel:].zero_()
        self._write(target[:numel], gradient)
        self._squares[parameter] = _UNKNOWN
        self.active[parameter] = True

    @torch.no_grad()
    def arrive_all(self, parameters: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """:meth:`arrive` for each of several parameters; those in host memory in one call and one pass over them.

        Args:
            parameters: Parameter indices, each once.
            gradients: One for each.
        """
        arriving: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient.numel() == self._whole[parameter] and _is_plain(gradient):
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
        """End the window: no parameter is active. Memory is left as it is."""
        self.synchronize()
        self.active[:] = False

    def synchronize(self) -> None:
        """Wait for copies from CUDA. The methods that read the memory, or hand out its address, call it."""
        if self._copies is not None:
            self._copies.wait()

    def sum_of_squares(self) -> float:
        """Sum of the squares of the active gradients, in double; it depends on nothing but them.

        Most are known since their gradient arrived. Not finite if and only if an element of an active gradient is not
        finite.
        """
        self.synchronize()
        dtype = native_dtype(self.buffer.dtype)
        for parameter in np.flatnonzero(self.active & (self._squares == _UNKNOWN)).tolist():
            numel = self._layout.parameters[parameter].numel
            self._squares[parameter] = native.sum_of_squares(self._addresses[parameter], numel, dtype)
        return math.fsum(self._squares[self.active].tolist())

    def view(self, sub_group: int) -> torch.Tensor:
        """The flat gradient of one sub-group."""
        self.synchronize()
        where = self._layout.sub_groups[sub_group]
        return self.buffer[where.offset : where.offset + where.numel]

    def gradient(self, parameter: int) -> torch.Tensor:
        """The gradient slice of one parameter, padding included; its values count only while it is active.

        Copies from CUDA may be in flight.
        """
        where = self._layout.parameters[parameter]
        return self.buffer[where.offset : where.offset + where.numel]

    def flats(self) -> list[Flat]:
        """Address of each sub-group's gradients, for :class:`StepPlan`."""
        self.synchronize()
        dtype, size = native_dtype(self.buffer.dtype), self.buffer.element_size()
        base = self.buffer.data_ptr()
        return [Flat(base + group.offset * size, group.numel, dtype) for group in self._layout.sub_groups]

    def close(self) -> None:
        """Unregister and release the memory; idempotent. Tensors handed out keep it until they are gone."""
        try:
            self.synchronize()
        finally:
            self._memory.close()

    def _active_gradients(self) -> list[torch.Tensor]:
        """The gradients of this window, neighbours of one sub-group as one; their padding is zero."""
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
    """Whether its elements lie in host memory one after the other, as the native core knows them."""
    return gradient.is_cpu and gradient.is_contiguous() and not gradient.is_neg() and is_native_dtype(gradient.dtype)
