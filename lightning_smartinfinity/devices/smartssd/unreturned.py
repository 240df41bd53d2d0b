"""Pipelines and queues that are over while something of theirs is still out: closed once it has returned.

Until then a run may write into the card's memory, and a transfer into that or into its file. A kernel that XRT still
holds at the end of the process would make an abort of it.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable
from typing import Protocol

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.smartssd.cards import Card
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
    """Close what does nothing now, or, while something of it is out, keep it until that has returned.

    Args:
        worker: To close.
        card: That it uses.
    """
    _kept.append((worker, card))
    close_returned()


def close_returned() -> bool:
    """Close those of which all has returned by now, and call what waits for writes that have.

    Returns:
        Whether none is left.
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
    """Call something once no write of pipelines that are over is out: now, or from :func:`close_returned`.

    Args:
        pipelines: Those given to :func:`close_or_keep`.
        then: What to call.
    """
    _waiting.append((tuple(pipelines), then))
    close_returned()


def require_returned(card: Card) -> None:
    """Raise if something of an earlier pipeline is still out on this card.

    Raises:
        DeviceError: It would be waited for in vain: until it returns the card does nothing else.
    """
    close_returned()
    if any(kept.address == card.address for _, kept in _kept):
        raise DeviceError(
            f"The {card.label} has not returned from a run or transfer that this process gave up.",
            "Use update_device='host', or end this process; if a new one cannot use the card either, reset it.",
        )


@atexit.register
def _at_exit() -> None:
    # A forked child runs exit handlers too; its parent's threads are not there.
    if os.getpid() == _owner:
        close_returned()
