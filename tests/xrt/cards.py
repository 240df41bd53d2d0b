"""Lets tests control and observe emulated SmartSSDs in the process that uses them through XRT."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from tests.helpers.waiting import await_that
from tests.xrt.builds import EmulatorBuild

ALL = -1
"""Stands for every card where a card's number is expected."""

_DEFAULTS = {
    "dram_mib": 4096,
    "p2p": 1,
    "latency_us": 0,
    "dma_mib_per_s": 0,
    "channel_mib_per_s": 0,
    "kernel_mib_per_s": 0,
}


@dataclass(frozen=True)
class Event:
    """An event on a card.

    ======================  ============================================================
    name                    fields
    ======================  ============================================================
    alloc, free             address on the card, bytes
    to-begin, to-end        of a sync to the card: address, bytes
    from-begin, from-end    of a sync from the card: address, bytes
    run-queued, run-begin   number of the run on this card, compute unit
    run-hung                number of the run
    sync-stalled            address
    turn                    of a sync in the shared channel: its begin and end, in nanoseconds
    run-end                 number of the run, compute unit, completed | error | abort, the reason in words
    corrupt                 address
    ======================  ============================================================
    """

    card: int
    name: str
    fields: tuple[str, ...]

    @classmethod
    def parse(cls, line: str) -> Event:
        card, name, *fields = line.split()
        return cls(int(card), name, tuple(fields))


class EmulatedCards:
    """The emulated cards of this process.

    Constructing it sets the environment that makes XRT find them, so it comes before the process's first use of XRT.
    """

    def __init__(self, build: EmulatorBuild) -> None:
        self.build = build
        os.environ.update(build.environment)
        # This is the library that XRT opens, by another name.
        self._calls = calls = ctypes.CDLL(str(build.driver))
        number, name, signed, unsigned = ctypes.c_int, ctypes.c_char_p, ctypes.c_int64, ctypes.c_uint64
        signatures = {
            "set": [number, name, signed],
            "inject": [number, name, signed, unsigned, unsigned],
            "lose": [number],
            "release": [number],
            "reset": [number],
            "counter": [number, name, ctypes.POINTER(signed)],
            "events": [],
        }
        for call, arguments in signatures.items():
            function = getattr(calls, f"smart_infinity_card_{call}")
            function.restype, function.argtypes = name, arguments

    def reset(self, count: int = 2) -> None:
        """Restore all settings, cancel faults, release what hangs, zero the counters and clear the events.

        Allocations stay, and a hung run that this releases may still end.

        Args:
            count: Number of cards in the machine.
        """
        self._calls.smart_infinity_card_set_count(count)
        self._call("reset", ALL)
        for setting, value in _DEFAULTS.items():
            self.set(setting, value)
        self._calls.smart_infinity_card_clear_events()

    def set(self, setting: str, value: int, *, card: int = ALL) -> None:
        """Change a setting from now on.

        Args:
            setting: ``dram_mib``, ``p2p`` (0 or 1), ``latency_us`` of a run, ``dma_mib_per_s`` of syncs in each
                direction, ``channel_mib_per_s`` of those of all cards together, both directions, or
                ``kernel_mib_per_s`` of the buffers that a run is given; speeds of 0 are without limit.
            value: Its new value.
            card: Which card.
        """
        self._call("set", card, setting.encode(), value)

    def inject(self, kind: str, *, card: int = 0, skipped: int = 0, pointer: int = 0, bit: int = 0) -> None:
        """Make something go wrong once.

        Args:
            kind: ``hang`` (a run computes only when it is released), ``error`` or ``abort`` (how a run ends, with
                outputs of no use), ``corrupt`` (one bit of a run's memory is wrong at its end), ``lost`` (the card is
                gone when a run begins), ``stall`` (a sync moves only when it is released), ``submit``, ``sync`` or
                ``alloc`` (that call fails).
            card: Which card.
            skipped: Number of runs, syncs or allocations that pass first.
            pointer: For ``corrupt``: which of the kernel's pointers, in the order of its arguments.
            bit: For ``corrupt``: which bit of its buffer.
        """
        self._call("inject", card, kind.encode(), skipped, pointer, bit)

    def lose(self, card: int) -> None:
        """Take the card away until :meth:`reset`: runs are aborted, all other calls fail."""
        self._call("lose", card)

    def release(self, card: int = ALL) -> None:
        """Let what hangs go on: runs compute and syncs move data now, and complete late.

        Slowed operations take no longer than they have to.
        """
        self._call("release", card)

    def counter(self, name: str, card: int = 0) -> int:
        """Return one of a card's counters since :meth:`reset`.

        Args:
            name: ``runs_begun``, ``runs_completed``, ``runs_failed``, ``syncs_to``, ``syncs_from``, ``bytes_to``,
                ``bytes_from``, ``bytes_copied``, ``peak_bytes`` of card memory; and the present ``num_buffers`` and
                ``card_bytes``.
            card: Which card.
        """
        value = ctypes.c_int64()
        self._call("counter", card, name.encode(), ctypes.byref(value))
        return value.value

    def events(self, *names: str, card: int | None = None) -> list[Event]:
        """Return the events of all cards since :meth:`reset`, in one order; of these names only, if any are given."""
        return [
            event
            for event in map(Event.parse, self._calls.smart_infinity_card_events().decode().splitlines())
            if event.name in (names or (event.name,)) and card in (None, event.card)
        ]

    def wait_for(self, name: str, *, card: int | None = None, count: int = 1) -> None:
        """Return once an event has happened so often.

        Raises:
            AssertionError: It has not happened so often in time.
        """
        await_that(
            lambda: len(self.events(name, card=card)) >= count,
            told=lambda: f"{count} events {name!r}: {self.events()}",
        )

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(self._calls, f"smart_infinity_card_{name}")(*arguments)
        if error is not None:
            raise ValueError(error.decode())
