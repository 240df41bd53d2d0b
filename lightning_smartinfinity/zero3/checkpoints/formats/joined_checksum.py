"""Checksums of what several processes hold, without bringing it together."""

from __future__ import annotations

from functools import cache

__all__ = ["crc32c_of_both"]

_POLYNOMIAL = 0x82F63B78  # Castagnoli's; the lowest bit belongs to the highest power, as in all numbers below
_ONE = 1 << 31
_AFTER_A_BYTE = 1 << 23  # x to the power of 8


def crc32c_of_both(first: int, second: int, nbytes: int) -> int:
    """Return the CRC32C of two pieces of data, one after the other.

    Args:
        first: CRC32C of the first piece.
        second: CRC32C of the second piece.
        nbytes: Bytes of the second piece.
    """
    return _product(_power(nbytes), first) ^ second


@cache
def _power(nbytes: int) -> int:
    """Return what so many further bytes multiply a CRC by."""
    power, square = _ONE, _AFTER_A_BYTE
    while nbytes:
        if nbytes & 1:
            power = _product(power, square)
        square, nbytes = _product(square, square), nbytes >> 1
    return power


def _product(first: int, second: int) -> int:
    """Return the product of two polynomials over GF(2), modulo the one of CRC32C."""
    product = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= second
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
    return product
