"""The block-scaled codec: exact arithmetic, its error bound, and damaged payloads."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_smartinfinity.native import BlockScaled, DType
from tests.helpers.compressed import block_scaled
from tests.helpers.golden import DTYPES, encode
from tests.helpers.native_testing import InstructionSet
from tests.helpers.update_rules import Floats
from tests.native.compressing import Compressing, decoded

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
def test_error(dtype: DType) -> None:
    """The error is at most half a block's scale. Sent values are exact in bf16, and the rest is exact in fp32."""
    numel = 200_000
    compressing = Compressing(encode(random_gradient(numel), dtype), dtype)
    values = compressing.source.values
    payload = compressing.encode(BlockScaled())
    found = decoded(payload, numel)
    blocks = np.zeros((-(-numel // BLOCK), BLOCK))
    blocks.reshape(-1)[:numel] = values
    bound = np.maximum(np.abs(blocks).max(axis=1) / 127, 2.0**-127).repeat(BLOCK)[:numel]
    finite = np.isfinite(values)
    assert (np.abs(found.astype(np.float64) - values) <= bound)[finite].all()
    np.testing.assert_array_equal(found.view(np.uint32) & 0xFFFF, 0)
    exact = values.astype(np.float64) - found
    np.testing.assert_array_equal((values - found)[finite], exact[finite])


def test_residual_and_what_is_left_out() -> None:
    """Elements that are not sent decode to zero and do not affect their block's scale."""
    numel = 2_000
    gradient, residual = random_gradient(numel, 1), random_gradient(numel, 2)
    gradient[300:500] = residual[1_000:1_100] = 3e38
    compressing = Compressing(
        gradient,
        residual=residual,
        scale=2.0,
        parts=[(10, 300, 0), (300, 500, -1), (500, 1_990, 1)],
        padding=[(1_000, 100)],
    )
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


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        (0, 5, "magic is 5"),
        (1, 2, "version is 2"),
        (2, 1_001, "number of elements is 1001, expected 1000"),
        (3, 5, "number of blocks is 5, expected 4"),
        (4, 128, "elements of a block is 128"),
        (5, 1, "type of values is 1"),
        (6, 2, "beats of exponents is 2, expected 1"),
        (7, 2**32 - 1, "beats of codes is 4294967295"),
    ],
)
def test_bad_header(word: int, value: int, message: str) -> None:
    payload = np.frombuffer(Compressing(random_gradient(1_000)).encode(BlockScaled()), np.uint8).copy()
    payload.view(np.uint32)[word] = value
    with pytest.raises(ValueError, match=message):
        decoded(payload.tobytes(), 1_000)


@pytest.mark.parametrize("nbytes", [0, 63, 64, 128, -1])
def test_truncated(nbytes: int) -> None:
    payload = Compressing(random_gradient(1_000)).encode(BlockScaled())[:nbytes]
    with pytest.raises(ValueError, match=r"has no header|size is \d+, expected 1152"):
        decoded(payload, 1_000)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (64, 0, r"exponent 0 of block 0 is not in \[1, 248\]"),
        (67, 249, "exponent 249 of block 3"),
        (128, 0x80, "no code -128, that of element 0"),
        (128 + 999, 0x80, "no code -128, that of element 999"),
    ],
)
def test_bad_exponent_or_code(at: int, value: int, message: str) -> None:
    payload = np.frombuffer(Compressing(random_gradient(1_000)).encode(BlockScaled()), np.uint8).copy()
    payload[at] = value
    with pytest.raises(ValueError, match=message):
        decoded(payload.tobytes(), 1_000)


def test_random_damage() -> None:
    """A randomly damaged payload is refused or decodes to finite numbers."""
    random, numel = np.random.default_rng(0), 1_000
    whole = np.frombuffer(Compressing(random_gradient(numel)).encode(BlockScaled()), np.uint8)
    outcomes = set()
    for _ in range(400):
        payload = whole.copy()
        end = 128 if random.integers(2) else payload.size
        payload[random.integers(32 if random.integers(2) else 0, end, random.integers(1, 4))] = random.integers(256)
        try:
            assert math.isfinite(decoded(payload.tobytes(), numel).sum())
        except ValueError as error:
            outcomes.add("code" if "code -128" in str(error) else "exponent" if "exponent " in str(error) else "header")
        else:
            outcomes.add("read")
    assert outcomes >= {"read", "exponent", "header"}
