"""The block-scaled codec: exact arithmetic, its error bound, and damaged payloads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lightning_smartinfinity.native import BlockScaled, DType
from tests.helpers.compressed import block_scaled
from tests.helpers.golden import DTYPES, encode
from tests.helpers.native_testing import InstructionSet
from tests.helpers.update_rules import Floats
from tests.native.compressing import Array, Compressing, decoded

BLOCK = 256


def random_gradient(numel: int, seed: int = 0) -> Floats:
    """Return values of many magnitudes, between blocks and within them."""
    random = np.random.default_rng(seed)
    exponents = np.repeat(random.integers(-130, 100, -(-numel // BLOCK)), BLOCK)[:numel]
    return np.ldexp(random.standard_normal(numel), exponents + random.integers(0, 9, numel)).astype(np.float32)


@pytest.mark.parametrize("numel", [0, 1, 63, 255, 256, 257, 4_096, 100_003])
def test_sizes(instruction_set: InstructionSet, numel: int) -> None:
    gradient = random_gradient(numel, seed=numel)
    payload = Compressing(gradient).encode(BlockScaled())
    assert payload == block_scaled(gradient)
    assert len(payload) == BlockScaled().payload_bytes(numel)


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_and_what_is_left_out(dtype: DType) -> None:
    """Elements that are not sent decode to zero and do not affect their block's scale."""
    numel = 2_000
    gradient, residual = random_gradient(numel, 1), random_gradient(numel, 2)
    gradient[300:500] = residual[1_000:1_100] = 3e38
    parts = [(10, 300, 0), (300, 500, -1), (500, 1_990, 1)]
    compressing = Compressing(encode(gradient, dtype), dtype, residual, 2.0, parts, padding=[(1_000, 100)])
    payload = compressing.encode(BlockScaled())
    assert payload == block_scaled(compressing.source.values)
    assert not decoded(payload, numel)[~compressing.source.eligible].any()


def test_not_finite() -> None:
    """Non-finite elements become the largest of their block, whose scale depends on the finite elements only."""
    gradient = np.ones(300, np.float32)
    gradient[[3, 4, 5]] = np.inf, -np.inf, np.nan
    found = decoded(Compressing(gradient).encode(BlockScaled()), 300)
    np.testing.assert_array_equal(found[3:6], np.array([127, -127, 127], np.float32) / 64)
    assert (np.delete(found, [3, 4, 5]) == 1).all()


def test_the_largest_magnitudes() -> None:
    """The largest fp32 values stay finite."""
    gradient = np.array([np.finfo(np.float32).max, -3.39e38, 1e30, 0], np.float32)
    found = decoded(Compressing(gradient).encode(BlockScaled()), 4)
    np.testing.assert_array_equal(found, np.array([127 * 2.0**121, -127 * 2.0**121, 0, 0], np.float32))


def test_any_part_of_it() -> None:
    """Any part of a payload can be decoded."""
    numel = 3_000
    payload = Compressing(random_gradient(numel)).encode(BlockScaled())
    whole = decoded(payload, numel)
    for first, last in ((0, 0), (0, 1), (255, 257), (100, 2_999), (512, 1_024), (3_000, 3_000)):
        np.testing.assert_array_equal(decoded(payload, numel, first, last), whole[first:last])


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
def test_damaged(change: Callable[[Array], object] | int, message: str) -> None:
    """A payload with a bad header, exponent or code, or a part of one, is refused."""
    payload = np.frombuffer(Compressing(random_gradient(1_000)).encode(BlockScaled()), np.uint8).copy()
    if isinstance(change, int):
        payload = payload[:change]
    else:
        change(payload)
    with pytest.raises(ValueError, match=message):
        decoded(payload.tobytes(), 1_000)
