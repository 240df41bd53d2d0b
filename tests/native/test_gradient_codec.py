"""The codecs send the same elements, values and bytes as the numpy reference; damaged payloads are refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lightning_smartinfinity.native import BlockScaled, DType, TopK
from tests.helpers.compressed import BLOCK, block_scaled, expand, top_k
from tests.helpers.golden import DTYPES, Floats, encode
from tests.helpers.native_testing import (
    InstructionSet,
)
from tests.native.codecs import CELL
from tests.native.stored import Array, Compressing, decoded

_SPECIAL = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 1.17549435e-38, 3e38, -3e38, 65520], np.float32)


def normal(numel: int) -> Floats:
    return np.random.default_rng(numel).standard_normal(numel).astype(np.float32)


def ties(numel: int) -> Floats:
    return np.round(normal(numel) * 2) / np.float32(2)


def special(numel: int) -> Floats:
    return np.random.default_rng(numel).choice(_SPECIAL, numel)


def subnormal(numel: int) -> Floats:
    return np.random.default_rng(numel).integers(0, 3000, numel).astype(np.uint32).view(np.float32)


def ascending(numel: int) -> Floats:
    return np.arange(numel, dtype=np.float32)


def in_one_place(numel: int) -> Floats:
    values = np.zeros(numel, np.float32)
    values[numel // 2 : numel // 2 + numel // 16 + 1] = 1 + np.abs(normal(numel // 16 + 1))[: numel - numel // 2]
    return values


PATTERNS: dict[str, Callable[[int], Floats]] = {
    "normal": normal,
    "ties": ties,
    "equal": lambda numel: np.full(numel, -3, np.float32),
    "zero": lambda numel: np.zeros(numel, np.float32),
    "special": special,
    "subnormal": subnormal,
    "ascending": ascending,
    "descending": lambda numel: ascending(numel)[::-1].copy(),
    "in_one_place": in_one_place,
}


@pytest.mark.parametrize("numel", [0, 1, 2, 31, 255, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
def test_sizes(instruction_set: InstructionSet, numel: int) -> None:
    """Payloads equal the reference for ratios from one element to all."""
    compressing = Compressing(ties(numel))
    for ratio in (1 / max(numel, 1), 0.01, 0.05, 0.5, 1.0):
        assert compressing.encode(TopK(ratio=ratio)) == top_k(compressing.source, ratio)


@pytest.mark.parametrize("ratio", [1e-5, 0.001, 0.01, 0.2, 0.9, 1.0])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern: str, ratio: float) -> None:
    """Payloads equal the reference for gradients on which a sample misleads."""
    compressing = Compressing(PATTERNS[pattern](300_007))
    payload = compressing.encode(TopK(ratio=ratio))
    assert payload == top_k(compressing.source, ratio)
    assert ratio == 1 or np.frombuffer(payload, np.uint32, 16)[4] <= math.ceil(ratio * 300_007)


@pytest.mark.parametrize("value_dtype", [None, *DTYPES])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
def test_types(dtype: DType, value_dtype: DType | None, residual: bool) -> None:
    """Values are rounded to nearest even, and values too large for their type become its largest."""
    numel = 30_000
    gradient = normal(numel)
    gradient[::50] = 3.3e38
    gradient[1::50] = -65510
    compressing = Compressing(encode(gradient, dtype), dtype, normal(numel + 1)[1:] if residual else None, 16.0)
    for ratio in (0.03, 0.4, 1.0):
        expected = top_k(compressing.source, ratio, value_dtype)
        payload = compressing.encode(TopK(ratio=ratio, value_dtype=value_dtype))
        assert payload == expected
        if ratio < 1 and (dtype, value_dtype) == (DType.FLOAT32, DType.FLOAT16):
            assert np.abs(expand(payload)).max() == 65504


def test_what_is_left_out() -> None:
    """Elements without a step or a segment, and padding, are never sent."""
    numel = 2 * BLOCK + 500
    gradient = np.full(numel, np.nan, np.float32)
    parts = [(5, 100, 0), (100, 70_000, -1), (70_000, 70_001, 1), (70_010, BLOCK * 2, 0), (BLOCK * 2, numel - 3, 1)]
    padding = [(0, 7), (90, 70_000), (BLOCK * 2 - 4, 8), (numel - 20, 20)]
    compressing = Compressing(gradient, residual=np.full(numel, np.nan, np.float32), parts=parts, padding=padding)
    sent = compressing.source.eligible
    count = int(sent.sum())
    gradient[sent] = normal(count)
    compressing.residual[sent] = normal(count + 1)[1:]
    for ratio in (0.001, 0.05, 0.7, 1.0):
        payload = compressing.encode(TopK(ratio=ratio))
        assert payload == top_k(compressing.source, ratio) and not np.isnan(expand(payload)).any()
    assert np.frombuffer(payload, np.uint32, 16)[4] == count


def test_all_elements_keep_their_bits() -> None:
    """With a ratio of 1, a residual of zeros changes no bit, zeros of either sign included."""
    gradient = special(5_000)
    for residual in (None, np.zeros(5_000, np.float32)):
        payload = Compressing(gradient, residual=residual, scale=4.0).encode(TopK(ratio=1.0))
        np.testing.assert_array_equal(expand(payload).view(np.uint32), gradient.view(np.uint32))


def test_subnormals_count_whatever_the_thread_does() -> None:
    """Subnormals count even on a thread that flushes them, as some libraries set it."""
    compressing = Compressing(subnormal(5_000), residual=subnormal(5_001)[1:])
    expected = top_k(compressing.source, 0.1)
    torch.set_flush_denormal(True)
    try:
        assert compressing.encode(TopK(ratio=0.1)) == expected
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(("ratio", "numel"), [(0.01, 4_000_000), (0.05, 1_000_000), (0.5, 300_000)])
def test_sampled(ratio: float, numel: int) -> None:
    """Sampling sends about as many elements as asked for: all above some magnitude and none below it."""
    gradient = normal(numel) * np.repeat(np.exp(normal(numel // 1_000)), 1_000)
    codec = TopK(ratio=ratio, exact=False)
    payload = Compressing(gradient).encode(codec)
    dense = expand(payload)
    assert abs(np.count_nonzero(dense) - codec.count(numel)) <= codec.count(numel) // 10
    assert np.abs(dense[dense != 0]).min() >= np.abs(gradient[dense == 0]).max()
    np.testing.assert_array_equal(dense[dense != 0], gradient[dense != 0])
    assert payload != Compressing(gradient).encode(TopK(ratio=ratio))


def test_sampled_by_elements_that_mislead() -> None:
    """If all sampled elements are zero, the bound still holds: the first of the other elements are sent."""
    numel, codec = 300_000, TopK(ratio=0.2, exact=False)
    stride = codec.count(numel) // 1600
    number = np.arange(numel // stride, dtype=np.uint64)
    gradient = np.ones(numel, np.float32)
    gradient[number * stride + (number * 0x9E3779B1) % 2**32 % stride] = 0
    dense = decoded(Compressing(gradient).encode(codec), numel)
    np.testing.assert_array_equal(dense, np.where(np.cumsum(gradient) <= 66_000, gradient, 0))


def test_exact_by_elements_that_mislead() -> None:
    """If the sampled elements are the largest, the first guess is too high and is repeated. The result is exact."""
    numel, ratio = 300_007, 0.01
    gradient = normal(numel)
    lines = 128 * numel // (3_001 * 16) + 1
    stride = numel // lines
    number = np.arange(lines, dtype=np.uint64)
    first = number * stride + (number * 0x9E3779B1) % 2**32 % (stride - 16)
    gradient[first[:, None] + np.arange(16, dtype=np.uint64)] *= 1_000
    compressing = Compressing(gradient)
    assert compressing.encode(TopK(ratio=ratio)) == top_k(compressing.source, ratio)
    everywhere = Compressing(np.where(np.arange(numel) % 2 == 0, gradient, 0).astype(np.float32))
    assert everywhere.encode(TopK(ratio=ratio)) == top_k(everywhere.source, ratio)


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.0001, math.nan, math.inf])
def test_no_such_ratio(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"TopK: ratio .* is not in \(0, 1\]"):
        TopK(ratio=ratio)


# ---- 8 bits per element, with a scale for each block of 256


def random_gradient(numel: int, seed: int = 0) -> Floats:
    """Return values of many magnitudes, between blocks and within them."""
    random = np.random.default_rng(seed)
    exponents = np.repeat(random.integers(-130, 100, -(-numel // CELL)), CELL)[:numel]
    return np.ldexp(random.standard_normal(numel), exponents + random.integers(0, 9, numel)).astype(np.float32)


@pytest.mark.parametrize("numel", [0, 1, 63, 255, 256, 257, 4_096, 100_003])
def test_sizes_of_8_bits(instruction_set: InstructionSet, numel: int) -> None:
    gradient = random_gradient(numel, seed=numel)
    payload = Compressing(gradient).encode(BlockScaled())
    assert (payload, len(payload)) == (block_scaled(gradient), BlockScaled().payload_bytes(numel))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_left_out_of_8_bits(dtype: DType) -> None:
    """Elements that are not sent decode to zero and do not affect their block's scale."""
    numel = 2_000
    gradient, residual = random_gradient(numel, 1), random_gradient(numel, 2)
    gradient[300:500] = residual[1_000:1_100] = 3e38
    parts = [(10, 300, 0), (300, 500, -1), (500, 1_990, 1)]
    compressing = Compressing(encode(gradient, dtype), dtype, residual, 2.0, parts, padding=[(1_000, 100)])
    payload = compressing.encode(BlockScaled())
    assert payload == block_scaled(compressing.source.values)
    assert not decoded(payload, numel)[~compressing.source.eligible].any()


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        pytest.param(
            [1, 1, 1, np.inf, -np.inf, np.nan, *[1] * 294],
            [1, 1, 1, 127 / 64, -127 / 64, 127 / 64, *[1] * 294],
            id="what is not finite becomes the largest of its block, whose scale depends on the others only",
        ),
        pytest.param(
            [np.finfo(np.float32).max, -3.39e38, 1e30, 0],
            [127 * 2.0**121, -127 * 2.0**121, 0, 0],
            id="the largest fp32 values stay finite",
        ),
    ],
)
def test_extremes_in_8_bits(gradient: list[float], expected: list[float]) -> None:
    found = decoded(Compressing(np.array(gradient, np.float32)).encode(BlockScaled()), len(gradient))
    np.testing.assert_array_equal(found, np.array(expected, np.float32))


def word(number: int, value: int) -> Callable[[Array], object]:
    return lambda payload: payload.view(np.uint32).__setitem__(number, value)


def byte(at: int, value: int) -> Callable[[Array], object]:
    return lambda payload: payload.__setitem__(at, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (word(0, 5), "magic is 5"),
        (word(1, 2), "version is 2"),
        (word(2, 1_001), "number of elements is 1001, expected 1000"),
        (word(3, 5), "number of blocks is 5, expected 4"),
        (word(4, 128), "elements of a block is 128"),
        (word(5, 1), "type of values is 1"),
        (word(6, 2), "beats of exponents is 2, expected 1"),
        (word(7, 2**32 - 1), "beats of codes is 4294967295"),
        (byte(64, 0), r"exponent 0 of block 0 is not in \[1, 248\]"),
        (byte(67, 249), "exponent 249 of block 3"),
        (byte(128, 0x80), "no code -128, that of element 0"),
        (byte(128 + 999, 0x80), "no code -128, that of element 999"),
        *((nbytes, r"has no header|size is \d+, expected 1152") for nbytes in (0, 63, 64, 128, -1)),
    ],
)
def test_damaged_8_bits(change: Callable[[Array], object] | int, message: str) -> None:
    """A payload with a bad header, exponent or code, or a part of one, is refused."""
    payload = np.frombuffer(Compressing(random_gradient(1_000)).encode(BlockScaled()), np.uint8).copy()
    if isinstance(change, int):
        payload = payload[:change]
    else:
        change(payload)
    with pytest.raises(ValueError, match=message):
        decoded(payload.tobytes(), 1_000)
