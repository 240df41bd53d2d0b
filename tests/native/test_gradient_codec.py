"""The top-K codec sends the same elements, values and bytes as the numpy reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lightning_smartinfinity.native import DType, TopK
from tests.helpers.compressed import top_k
from tests.helpers.golden import DTYPES, encode
from tests.helpers.native_testing import (
    InstructionSet,
    encode_gradient,
)
from tests.helpers.payload import BLOCK, expand
from tests.helpers.update_rules import Floats
from tests.native.compressing import Compressing, decoded

_SPECIAL = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 1.17549435e-38, 3e38, -3e38, 65520], np.float32)


def normal(numel: int) -> Floats:
    return np.random.default_rng(numel).standard_normal(numel).astype(np.float32)


def ties(numel: int) -> Floats:
    return np.round(normal(numel) * 2) / np.float32(2)


def special(numel: int) -> Floats:
    return np.random.default_rng(numel).choice(_SPECIAL, numel)


def subnormal(numel: int) -> Floats:
    bits = np.random.default_rng(numel).integers(0, 3000, numel).astype(np.uint32)
    return bits.view(np.float32)


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
    assert compressing.residual is not None
    compressing.residual[sent] = normal(count + 1)[1:]
    for ratio in (0.001, 0.05, 0.7, 1.0):
        payload = compressing.encode(TopK(ratio=ratio))
        assert payload == top_k(compressing.source, ratio)
        assert not np.isnan(expand(payload)).any()
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
    count = np.count_nonzero(dense)
    assert abs(count - codec.count(numel)) <= codec.count(numel) // 10
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
    expected = np.where(np.cumsum(gradient) <= 66_000, gradient, 0)
    np.testing.assert_array_equal(dense, expected)


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


def test_count() -> None:
    codec = TopK(ratio=0.01)
    assert [codec.count(numel) for numel in (0, 1, 100, 101, 65_536)] == [0, 1, 1, 2, 656]
    assert codec.exact and codec.ratio == 0.01 and codec.name == "TopK"
    assert codec.value_dtype(DType.FLOAT16) is DType.FLOAT16
    assert TopK(ratio=1.0, value_dtype=DType.FLOAT16).value_dtype(DType.BFLOAT16) is DType.BFLOAT16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, r"tasklet 7: payload_bytes is 255, its gradient may take 256 by TopK"),
        ({"padding": [(5, 10), (14, 2)]}, "padding must be in ascending order"),
        ({"padding": [(90, 11)]}, "padding of 11 elements at 90 leaves its 100 elements"),
        ({"padding": [(101, 0)]}, "padding of 0 elements at 101 leaves"),
        ({"parts": [(0, 101, 0)]}, "a segment of 101 elements at 0 leaves"),
        ({"parts": [(0, 60, 0), (50, 60, 0)]}, "segments must be in ascending order"),
        ({"scale": 0.0}, "residual_scale 0.0+ is not a positive number"),
        ({"scale": math.inf}, "residual_scale inf is not"),
        ({"scale": math.nan}, "residual_scale nan is not"),
    ],
)
def test_what_cannot_be_compressed(change: dict[str, object], message: str) -> None:
    gradient = np.ones(200, np.float32)[:100]
    compressing = Compressing(gradient, residual=np.zeros(100, np.float32), memory=np.zeros(4096, np.uint8))
    for name, value in change.items():
        setattr(compressing, name, value)
    codec = TopK(ratio=0.01)
    tasklet = compressing.tasklet(codec.payload_bytes(100) - (not change))
    with pytest.raises(ValueError, match=message):
        encode_gradient(codec, tasklet, residual_scale=compressing.scale)
    assert not compressing.memory.any()
