"""Damages files as disks do."""

from __future__ import annotations

import random
from pathlib import Path

BLOCK_BYTES = 4096


def flip_bit_behind(content: bytes, file: Path) -> None:
    """Flip a bit in the byte that follows some content of a file."""
    changed = bytearray(file.read_bytes())
    changed[changed.index(content) + len(content)] ^= 16
    file.write_bytes(changed)


def flip_bit(file: Path, generator: random.Random) -> None:
    """Flip any bit of a file."""
    changed = bytearray(file.read_bytes())
    changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    file.write_bytes(changed)


def misplace_block(file: Path, generator: random.Random) -> None:
    """Write another part of a file over any block of it, as a disk does that mistakes the address.

    In a file of less than two blocks the part is half of it.
    """
    content = file.read_bytes()
    size = min(BLOCK_BYTES, len(content) // 2)
    first, other = (generator.randrange(len(content) - size + 1) for _ in range(2))
    block = content[other : other + size]
    file.write_bytes(content[:first] + block + content[first + size :])


def lose_block(file: Path, generator: random.Random) -> None:
    """Fill any block of a file with zeros, as if it had never been written."""
    content = file.read_bytes()
    first = generator.randrange(-(-len(content) // BLOCK_BYTES)) * BLOCK_BYTES
    block = bytes(len(content[first : first + BLOCK_BYTES]))
    file.write_bytes(content[:first] + block + content[first + len(block) :])
