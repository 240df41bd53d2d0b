"""Tells how much of what a device was given to do it has not done yet."""

from __future__ import annotations

from collections import deque

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import CudaError

__all__ = ["UnderWay"]


class UnderWay:
    """Work that a device does in order, in bytes.

    Attributes:
        nbytes: Bytes of the work that it was not seen to have done.
    """

    def __init__(self) -> None:
        self._points: deque[tuple[list[native.CudaEvent], int]] = deque()
        self.nbytes = 0

    def add(self, points: list[native.CudaEvent], nbytes: int) -> None:
        """Add work that is done when the device has reached some points."""
        self.nbytes += nbytes  # an interrupt comes behind the next line only
        self._points.append((points, nbytes))

    def reap(self) -> None:
        """Forget the work that is done. Raises CudaError if some has failed."""
        while self._points:
            try:
                if not all(point.done() for point in self._points[0][0]):
                    return
            except CudaError:
                self._forget_first()
                raise
            self._forget_first()

    def wait(self, nbytes: int) -> None:
        """Wait until the device has at most so many bytes of work left. Raises CudaError if some has failed."""
        while self.nbytes > nbytes:
            for point in self._forget_first():
                point.synchronize()

    def _forget_first(self) -> list[native.CudaEvent]:
        points, nbytes = self._points[0]
        self.nbytes -= nbytes  # an interrupt comes behind the next line only
        self._points.popleft()
        return points
