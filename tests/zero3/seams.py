"""Reads the rows of docs/seams.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Seam", "read_seams"]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Seam:
    """A row: what of a library is used, where, for what, and which test (``file::name`` below ``tests/``) covers it."""

    theirs: str
    used_in: str
    purpose: str
    test: str

    def __str__(self) -> str:
        return f"{self.used_in} stands on {self.theirs} for: {self.purpose}."


def read_seams() -> list[Seam]:
    """Return all rows of all tables, without the header rows."""
    lines = (ROOT / "docs" / "seams.md").read_text().splitlines()
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("| ")]
    return [Seam(*row[:3], row[3].strip("`")) for row in rows if row[0] != "theirs"]
