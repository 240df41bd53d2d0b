"""Errors about files that another version of this package wrote, and that this version cannot read."""

from __future__ import annotations

from lightning_smartinfinity import __version__

__all__ = ["unreadable"]


def unreadable(what: str, *, version: int, reads: tuple[int, int], writer: str = "") -> tuple[str, str]:
    """Return problem and remedy of an error about an undamaged file whose format version is not read.

    Args:
        what: The file, as the subject of a sentence.
        version: Its format version.
        reads: The oldest and the newest format version that this version of the package reads.
        writer: The version of the package that reads it; empty if it is unknown.
    """
    age = "a newer" if version > reads[1] else "an older"
    numbers = f"{reads[0]} to {reads[1]}" if reads[0] < reads[1] else f"{reads[1]}"
    return (
        f"{what} was written by {age} version of lightning-smartinfinity{f', {writer},' if writer else ''} in format "
        f"version {version}. This is version {__version__}, which reads {numbers}.",
        f"Use {f'version {writer}' if writer else 'the version that wrote it'}",
    )
