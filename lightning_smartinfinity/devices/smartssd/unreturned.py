"""Pipelines that are over while a run of theirs is still out: closed once it has returned.

Until then the run may write into the card's memory. A kernel that XRT still holds at the end of the process would make
an abort of it.
"""

from __future__ import annotations

import atexit
import os

from lightning_smartinfinity import native

__all__ = ["close_or_keep", "close_returned"]

_kept: list[native.Pipeline] = []
_owner = os.getpid()


def close_or_keep(pipeline: native.Pipeline) -> None:
    """Close a pipeline that works no batch now, or, while a run of it is out, keep it until that has returned."""
    _kept.append(pipeline)
    close_returned()


def close_returned() -> None:
    """Close those whose runs have returned by now."""
    for pipeline in tuple(_kept):
        if not pipeline.busy:
            _kept.remove(pipeline)
            pipeline.close()


@atexit.register
def _at_exit() -> None:
    # A forked child runs exit handlers too; its parent's threads are not there.
    if os.getpid() == _owner:
        close_returned()
