"""Keeps pipelines and queues whose abandoned calls have not returned, and closes them once the calls return.

Until then a run may write to the card's memory, and a transfer to that memory or its file. XRT would abort the process
if a kernel were still open when the process ends.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable
from typing import Protocol

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.smartssd.discovery.cards import Card
from lightning_smartinfinity.errors import DeviceError

__all__ = ["close_or_keep", "close_returned", "require_returned", "when_written"]


class _Closable(Protocol):
    @property
    def busy(self) -> bool: ...
    def close(self) -> None: ...


_kept: list[tuple[_Closable, Card]] = []
_waiting: list[tuple[tuple[native.Pipeline, ...], Callable[[], object]]] = []
_owner = os.getpid()


def close_or_keep(worker: native.Pipeline | native.FileQueue, card: Card) -> None:
    """Close a pipeline or queue if it is idle; otherwise keep it open until its calls have returned.

    Args:
        worker: Pipeline or queue to close.
        card: Card that it uses.
    """
    _kept.append((worker, card))
    close_returned()


def close_returned() -> bool:
    """Close pipelines and queues whose calls have returned, and make the due calls of :func:`when_written`.

    Returns:
        Whether no pipeline or queue is left.
    """
    for kept in tuple(_kept):
        worker, _ = kept
        if not worker.busy:
            _kept.remove(kept)
            worker.close()
    for waiting in tuple(_waiting):
        pipelines, then = waiting
        workers = [worker for worker, _ in _kept]
        if not any(pipeline.writes_out() for pipeline in pipelines if pipeline in workers):
            _waiting.remove(waiting)
            then()
    return not _kept


def when_written(pipelines: Iterable[native.Pipeline], then: Callable[[], object]) -> None:
    """Call ``then`` once no abandoned write of these pipelines is in progress: now, or in :func:`close_returned`.

    Args:
        pipelines: Pipelines that were given to :func:`close_or_keep`.
        then: Function to call.
    """
    _waiting.append((tuple(pipelines), then))
    close_returned()


def require_returned(card: Card) -> None:
    """Raise if a call of an earlier pipeline or queue has not returned from this card.

    Raises:
        DeviceError: Such a call is in progress; this process must not use the card until it returns.
    """
    close_returned()
    if any(kept.address == card.address for _, kept in _kept):
        raise DeviceError(
            f"The {card.label} has not returned from a run or transfer that this process abandoned.",
            "Use update_device='host', or end this process; if a new one cannot use the card either, reset it.",
        )


@atexit.register
def _at_exit() -> None:
    # A forked child runs exit handlers too, but does not have its parent's threads.
    if os.getpid() == _owner:
        close_returned()
