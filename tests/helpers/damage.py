"""Damages files as disks do."""

from __future__ import annotations

from pathlib import Path


def flip_bit_behind(content: bytes, file: Path) -> None:
    """Flip a bit in the byte that follows some content of a file."""
    changed = bytearray(file.read_bytes())
    changed[changed.index(content) + len(content)] ^= 16
    file.write_bytes(changed)
