"""DeepSpeed's ``async_io`` op for benchmarks: its own C++ files, compiled in seconds, behind a thread as in the op.

The op's pybind11 layer, which takes minutes to compile, hands each request to a thread and returns; this one does, too.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tests.stock.async_io import AioHandle, install as install_handle


class QueuedHandle(AioHandle):
    """Runs requests one after the other in a thread of its own, as DeepSpeed does with a ``thread_count`` of 1."""

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__(*settings, **named)
        if self.get_intra_op_parallelism() != 1:
            raise SystemExit("stock's I/O is measured with a thread_count of 1")
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._open: list[Future[int]] = []

    def wait(self) -> int:
        for request in self._open:
            request.result()
        self._open.clear()
        return super().wait()

    def _run(self, buffer: torch.Tensor, path: str, offset: int, *, read: bool) -> int:
        self._open.append(self._thread.submit(super()._run, buffer, path, offset, read=read))
        return 0


def install() -> None:
    """Make DeepSpeed's swappers find this op instead of compiling their own."""
    install_handle(QueuedHandle)
