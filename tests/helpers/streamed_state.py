"""Makes trainings of the tests stream all state and write it in every step, unless they ask for something else.

By default, the state of small models is in memory, and seldom written. Most tests are about what happens on storage.
"""

from __future__ import annotations

from typing import Any

from lightning_smartinfinity import TransferConfig
from lightning_smartinfinity.settings import transfer

_STREAMED: dict[str, Any] = {"durability": "step", "dram_cache_bytes": 0}
DEFAULTS: dict[str, Any] = {"durability": "interval", "dram_cache_bytes": None}
"""The defaults of users, for ``TransferConfig(**DEFAULTS)``."""

WRITTEN_BACK = DEFAULTS
"""State in memory that is written to storage at an interval."""


def stream_state() -> None:
    """Change the defaults of ``TransferConfig`` in this process, and let no write of state in memory wait."""
    init: Any = TransferConfig.__init__
    given = init.__wrapped__.__kwdefaults__
    assert {name: given[name] for name in DEFAULTS} in (DEFAULTS, _STREAMED)
    given.update(_STREAMED)
    transfer.INTERVAL_SHARE = 1  # a test's steps are shorter than a write of its state
