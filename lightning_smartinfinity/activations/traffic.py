"""Counters of the tensors that forward saves for backward."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ActivationTraffic"]


@dataclass(kw_only=True)
class ActivationTraffic:
    """Cumulative counters of one process, in bytes of entries unless stated otherwise.

    An entry holds the bytes that saved tensors share: one storage, or a compact copy of one tensor.

    Args:
        saved_bytes: Entries that could be offloaded.
        offloaded_bytes: Entries that were copied into the pool, to stay cached there or to be written.
        written_bytes: All bytes written to storage, in whole blocks.
        read_bytes: All bytes read from storage, in whole blocks.
        forwarded_bytes: Entries that backward used before they were written, whose writes were cancelled.
        kept_bytes: Entries that were kept in memory because they are among the newest.
        kept_for_room_bytes: Entries that were kept because the pool or storage had no room when forward ended.
        kept_elsewhere_bytes: Entries that were kept because in the forward before, something else still held the
            entries with their numbers.
        freed_nothing_bytes: Entries that were evicted although something else held their storage until forward ended.
        deduplicated: Number of saved tensors that share an existing entry.
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
