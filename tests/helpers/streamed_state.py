"""Makes trainings of the tests keep no state in memory, unless they ask for it.

By default, the state of small models is in memory as a whole, and never read. Most tests are about reads, too.
"""

from __future__ import annotations

from typing import Any

from lightning_smartinfinity import TransferConfig
from lightning_smartinfinity.settings import transfer

_STREAMED: dict[str, Any] = {"dram_cache_bytes": 0}
DEFAULTS: dict[str, Any] = {"dram_cache_bytes": None}
"""The defaults of users, for ``TransferConfig(**DEFAULTS)``."""

WRITTEN_BACK: dict[str, Any] = {**DEFAULTS, "durability": "interval"}
"""State in memory that is written to storage at an interval."""


def stream_state() -> None:
    """Change the defaults of ``TransferConfig`` in this process, and let no write of state in memory wait."""
    init: Any = TransferConfig.__init__
    given = init.__wrapped__.__kwdefaults__
    assert {name: given[name] for name in DEFAULTS} in (DEFAULTS, _STREAMED)
    given.update(_STREAMED)
    transfer.INTERVAL_SHARE = 1  # a test's steps are shorter than a write of its state
