"""The state formats in numpy, after their definition: tables of values and their fractions, in double precision.

An 8-bit code is relative to its block's exponent, a biased fp32 exponent. Its value is that of a small floating-point
number times ``2**(exponent - 127)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.helpers.golden import Floats, flush

__all__ = [
    "CELL",
    "EXP_AVG",
    "EXP_AVG_SQ",
    "Minifloat",
    "bf16_nearest",
    "bf16_stochastic",
    "blocks_of",
    "join",
    "random_bits",
    "split",
]

Bits = npt.NDArray[Any]

CELL = 256


@dataclass(frozen=True)
class Minifloat:
    """An 8-bit floating-point format with three bits of mantissa whose last code is NaN.

    Args:
        exponents: Number of exponents.
        signed: Whether bit 7 is a sign. Without a sign only zero becomes zero.
    """

    exponents: int
    signed: bool

    @property
    def nan(self) -> int:
        return 8 * self.exponents - 1

    @property
    def table(self) -> npt.NDArray[np.float64]:
        """Return every magnitude but NaN's, relative to the block's exponent."""
        codes = np.arange(self.nan)
        exponent, mantissa = codes // 8, codes % 8
        fraction = np.where(exponent > 0, 1 + mantissa / 8, mantissa / 8)
        return np.ldexp(fraction, np.maximum(exponent, 1) - (self.exponents - 1))

    def exponent_of(self, values: Floats) -> int:
        """Return the smallest exponent within bounds whose largest code reaches every finite value."""
        finite = np.abs(values[np.isfinite(values)]).astype(np.float64)
        largest = finite.max(initial=0.0)
        return next((e for e in range(self.exponents + 2, 255) if np.ldexp(1.75, e - 127) >= largest), 254)

    def decode(self, codes: Bits, exponent: int) -> Floats:
        magnitudes = np.append(np.ldexp(self.table, exponent - 127), np.nan).astype(np.float32)
        if not self.signed:
            return magnitudes[codes]
        return np.where(codes & 0x80, -magnitudes[codes & 0x7F], magnitudes[codes & 0x7F]).astype(np.float32)

    def encode(self, values: Floats, exponent: int, random: Bits | None = None) -> Bits:
        """Round to the nearest code, ties to even. With 16 random bits each, round stochastically."""
        table = np.ldexp(self.table, exponent - 127)
        magnitude = np.where(np.isfinite(values), np.abs(flush(values)), 0).astype(np.float64)
        low = np.minimum(np.searchsorted(table, magnitude, side="right") - 1, len(table) - 1)
        gap = np.diff(table, append=np.inf)[low]
        # fp32 has 2**20 steps between two codes, and fewer for values below the normal codes.
        place = np.rint(np.minimum(1.0, (magnitude - table[low]) / gap) * 2**20).astype(np.int64)
        if random is None:
            up = (place > 2**19) | ((place == 2**19) & (low % 2 == 1))
        else:
            up = place + (random.astype(np.int64) * 16 + 8) >= 2**20
        codes = np.minimum(low + up, len(table) - 1)
        if not self.signed:
            codes = np.where((magnitude > 0) & (codes == 0), 1, codes)
        codes = np.where(np.isfinite(values), codes, self.nan)
        return (codes | (np.signbit(values) * 0x80 if self.signed else 0)).astype(np.uint8)


EXP_AVG = Minifloat(exponents=16, signed=True)
EXP_AVG_SQ = Minifloat(exponents=32, signed=False)


def blocks_of(numel: int, borders: list[int]) -> list[tuple[int, int]]:
    """Return [begin, end) of each block: elements are cut at multiples of 256 and where parameters begin."""
    return list(pairwise(sorted({0, *range(0, numel, CELL), *(border for border in borders if border < numel), numel})))


def random_bits(seed: int, elements: Bits) -> Bits:
    """Return the random uint32 of elements of the partition for an update's seed."""
    with np.errstate(over="ignore"):
        elements = elements.astype(np.uint64)
        cell = elements // np.uint64(CELL)
        x = cell * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed) * np.uint64(0xD1B54A32D192ED03)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        y = (x >> np.uint64(32)).astype(np.uint32) + (elements % np.uint64(CELL)).astype(np.uint32)
        y = (y ^ (y >> np.uint32(16))) * np.uint32(0x7FEB352D)
        y = (y ^ (y >> np.uint32(15))) * np.uint32(0x846CA68B)
        return np.asarray(y ^ (y >> np.uint32(16)))


def bf16_nearest(values: Floats) -> Bits:
    """Round to the nearest bf16, ties to even. NaNs become quiet."""
    import torch

    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def bf16_stochastic(values: Floats, random: Bits) -> Bits:
    """Round to bf16 stochastically with 16 random bits each. Infinity and NaN stay."""
    bits = values.view(np.uint32).astype(np.uint64)
    low, fraction = bits >> 16, bits & 0xFFFF
    return np.where(np.isfinite(values), low + (fraction + random >= 1 << 16), bf16_nearest(values)).astype(np.uint16)


def split(values: Floats) -> tuple[Bits, Bits]:
    """Return the nearest bf16 and the number to add to its bits. 2**15 does not fit and becomes one less."""
    parameter = bf16_nearest(values)
    rest = values.view(np.int32).astype(np.int64) - (parameter.view(np.int16).astype(np.int64) << 16)
    rest = np.where(np.isnan(values), 0, np.minimum(rest, 2**15 - 1))
    return parameter, rest.astype(np.int16).view(np.uint16)


def join(parameter: Bits, remainder: Bits) -> Floats:
    bits = (parameter.view(np.int16).astype(np.int64) << 16) + remainder.view(np.int16)
    return bits.astype(np.int32).view(np.float32)
