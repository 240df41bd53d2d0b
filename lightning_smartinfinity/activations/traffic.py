"""Counts what happens to what forward saves for backward."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ActivationTraffic"]


@dataclass(kw_only=True)
class ActivationTraffic:
    """Cumulative counters of one process, in bytes of entries unless they say otherwise.

    An entry is what several saved tensors share: one storage, or a compact copy of one tensor.

    Args:
        saved_bytes: Entries that could be offloaded.
        offloaded_bytes: Entries that were copied into the pool, to rest there or to be written.
        written_bytes: All bytes written to storage, in whole blocks.
        read_bytes: All bytes read from storage, in whole blocks.
        forwarded_bytes: Entries that backward wanted before they had left, whose writes were cancelled.
        kept_bytes: Entries that stayed in memory because they are among the newest.
        kept_for_room_bytes: Entries that stayed because the pool or storage had no room when forward ended.
        kept_elsewhere_bytes: Entries that stayed because somebody else still held them at this place of the forward
            before.
        freed_nothing_bytes: Entries that left although somebody else held them until forward ended.
        deduplicated: Number of saved tensors that were stored as a part of an entry that was there already.
        waited_seconds: Time for which backward waited for storage.
        held_up_seconds: Time for which forward waited for storage to stay below the budget.
    """

    saved_bytes: int = 0
    offloaded_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    forwarded_bytes: int = 0
    kept_bytes: int = 0
    kept_for_room_bytes: int = 0
    kept_elsewhere_bytes: int = 0
    freed_nothing_bytes: int = 0
    deduplicated: int = 0
    waited_seconds: float = 0.0
    held_up_seconds: float = 0.0
