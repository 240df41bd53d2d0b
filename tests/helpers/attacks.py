"""How a test tells the table of docs/reliability.md what it attacked."""

from __future__ import annotations

from typing import Protocol

PROPERTY = "attack"
"""The name of the property by which a test's report carries a row of the table."""


class Attack(Protocol):
    """The fixture ``attack``."""

    def __call__(self, attack: str, *, tries: int, outcome: str, seconds: float = 0.0) -> None:
        """Add a row to the table.

        Args:
            attack: What was done, the same for all tests of a row.
            tries: How often.
            outcome: What was found each time. A test that fails gets ``FAILED`` instead.
            seconds: For how long, if the attack was made at random for some time.
        """
