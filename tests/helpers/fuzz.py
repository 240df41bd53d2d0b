"""Damages bytes and values at random, and looks for errors that are not this package's."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, MutableMapping, MutableSequence
from random import Random
from typing import Any

from lightning_smartinfinity.errors import SmartInfinityError

__all__ = ["changed_value", "damaged", "fuzz"]

_EXTREMES = (0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 7, 1 << 31, 1 << 63, 1 << 64, 10**400, 0.5, -1e308, float("nan"), float("inf")),
    *("", "..", "../x", "a\0b", "\ud800", "x" * 10_000, b"x", [], {}, [0] * 1000, [[[[[[[[[[]]]]]]]]]]),
)


def fuzz(attempt: Callable[[Random], object], *, seconds: float, seed: str) -> int:
    """Call a function again and again, and return how often.

    Args:
        attempt: Reads something damaged. It draws all that is random from its argument.
        seconds: How long to go on; at least once.
        seed: Every call has a generator of its own, made of this, of ``seconds`` and of the call's number.

    Raises:
        AssertionError: A call raised an error that is not this package's.
    """
    end, tries = time.monotonic() + seconds, 0
    while tries == 0 or time.monotonic() < end:
        try:
            attempt(Random(f"{seed} {seconds} {tries}"))
        except SmartInfinityError as error:
            assert error.problem and error.remedy
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise AssertionError(f"try {tries} of seed {seed!r} for {seconds} s: {what}") from error
        tries += 1
    return tries


def damaged(content: bytes, random: Random) -> bytes:
    """Return bytes in which something was overwritten, lost, repeated or moved, as disks and strangers do."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 4, 16))):
        _DAMAGES[random.randrange(len(_DAMAGES))](changed, random)
    return bytes(changed)


def changed_value(tree: Any, random: Random, *, odd: tuple[Any, ...] = ()) -> Any:
    """Return a copy of nested dictionaries and lists in which values were replaced, lost or repeated.

    Args:
        tree: The dictionary or list.
        random: Chooses what happens where.
        odd: Values to put in, beside those of this module.
    """
    tree = copy.deepcopy(tree)
    for _ in range(random.choice((1, 1, 2, 5))):
        _change_one(tree, random, (*_ODD, *odd))
    return tree


def _change_one(tree: Any, random: Random, odd: tuple[Any, ...]) -> None:
    node = tree
    while isinstance(node, (MutableMapping, MutableSequence)) and len(node):
        key = random.choice(list(node) if isinstance(node, MutableMapping) else range(len(node)))
        below = node[key]
        if isinstance(below, (MutableMapping, MutableSequence)) and len(below) and random.random() < 0.8:
            node = below
            continue
        what = random.random()
        if what < 0.15:
            del node[key]
        elif what < 0.25 and isinstance(node, MutableSequence):
            node.append(copy.deepcopy(below))
        elif what < 0.35 and isinstance(below, int):
            node[key] = below + random.choice((-1, 1))
        else:
            node[key] = copy.deepcopy(random.choice(odd))
        return


def _flip(content: bytearray, random: Random) -> None:
    if content:
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)


def _set_byte(content: bytearray, random: Random) -> None:
    if content:
        content[random.randrange(len(content))] = random.randrange(256)


def _set_number(content: bytearray, random: Random) -> None:
    size = random.choice((2, 4, 8))
    at = random.randrange(len(content) + 1) & -random.choice((1, size))
    content[at : at + size] = (random.choice(_EXTREMES) & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def _cut(content: bytearray, random: Random) -> None:
    del content[random.randrange(len(content) + 1) :]


def _lose(content: bytearray, random: Random) -> None:
    del content[_range(content, random)]


def _repeat(content: bytearray, random: Random) -> None:
    part = content[_range(content, random)]
    at = random.randrange(len(content) + 1)
    content[at:at] = part


def _move(content: bytearray, random: Random) -> None:
    part = content[_range(content, random)]
    at = random.randrange(len(content) + 1)
    content[at : at + len(part)] = part


def _range(content: bytearray, random: Random) -> slice:
    begin = random.randrange(len(content) + 1)
    return slice(begin, begin + random.choice((1, 4, 16, 512, 4096)))


_DAMAGES = (_flip, _set_byte, _set_number, _cut, _lose, _repeat, _move)
