"""After a step the residual holds exactly the eligible gradient that was not sent."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from lightning_smartinfinity.native import BlockScaled, DType, GradientCodec, TopK, feed_back
from tests.helpers.compressed import fed_back
from tests.helpers.golden import DTYPES, assert_same_bits, encode
from tests.helpers.native_testing import InstructionSet
from tests.native.compressing import Compressing, decoded

NUMEL = 70_000
PARTS = [(3, 30_000, 0), (30_000, 40_000, -1), (40_001, 65_530, 1), (65_530, NUMEL - 9, 0)]
PADDING = [(100, 50), (29_990, 20), (NUMEL - 12, 12)]

CODECS: dict[str, GradientCodec] = {
    "top_k": TopK(ratio=0.02),
    "top_k_bf16": TopK(ratio=0.02, value_dtype=DType.BFLOAT16),
    "sampled": TopK(ratio=0.3, exact=False),
    "all": TopK(ratio=1.0),
    "8_bits": BlockScaled(),
}


def compressing_of(dtype: DType = DType.FLOAT32, seed: int = 0, scale: float = 8.0) -> Compressing:
    gradient, residual = np.random.default_rng(seed).standard_normal((2, NUMEL)).astype(np.float32)
    gradient[::13] = residual[::11] = 0
    return Compressing(encode(gradient * np.float32(scale), dtype), dtype, residual, scale, PARTS, PADDING)


def feed(compressing: Compressing, payload: bytes) -> None:
    feed_back([compressing.tasklet(len(payload))], residual_scale=compressing.scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODECS)
def test_what_was_not_sent(instruction_set: InstructionSet, name: str, dtype: DType) -> None:
    """The residual becomes what was not sent. Padding and elements without a step keep theirs.

    The residual is divided by the scale, also if that is no power of two.
    """
    for scale in (8.0, 3.0):
        compressing = compressing_of(dtype, scale=scale)
        payload = compressing.encode(CODECS[name])
        expected = fed_back(compressing.source, decoded(payload, NUMEL))
        before = compressing.residual
        assert before is not None
        compressing.residual = before.copy()
        feed(compressing, payload)
        assert_same_bits(compressing.residual, expected)
        assert (compressing.residual != before).any()


@pytest.mark.parametrize("name", CODECS)
def test_sums_beyond_fp32(name: str, instruction_set: InstructionSet) -> None:
    """With gradients of 3e38 in every step, the payload and the residual stay finite."""
    gradient = np.full(1000, 3e38, np.float32)
    gradient[::2] *= -1
    compressing = Compressing(gradient, DType.FLOAT32, np.zeros(1000, np.float32), 1.0)
    for _ in range(4):
        payload = compressing.encode(CODECS[name])
        assert np.isfinite(decoded(payload, 1000)).all()
        feed(compressing, payload)
        assert compressing.residual is not None and np.isfinite(compressing.residual).all()


@pytest.mark.parametrize("threads", [1, 2, 5, pytest.param(40, id="more than there is memory for")])
def test_any_number_of_threads(threads: int) -> None:
    """Each tasklet is fed once. If not all threads can be started, those that run do all the work.

    If they did half of it, the next call would feed that half twice.
    """
    compressings = [compressing_of(seed=seed) for seed in range(max(7, threads))]
    pairs = [(one, one.encode(CODECS["top_k"])) for one in compressings]
    expected = [fed_back(one.source, decoded(payload, NUMEL)) for one, payload in pairs]
    tasklets = [one.tasklet(len(payload)) for one, payload in pairs]
    with _room_for(64 << 20):  # far less than the stacks of forty threads take
        feed_back(tasklets, residual_scale=8.0, threads=threads)
    for compressing, residual in zip(compressings, expected, strict=True):
        assert compressing.residual is not None
        assert_same_bits(compressing.residual, residual)


@contextmanager
def _room_for(nbytes: int) -> Iterator[None]:
    """Limit the process's address space to this many bytes more than it uses."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", ["top_k", "8_bits"])
def test_twice(name: str) -> None:
    """Feeding the same payload twice counts once, as after an interrupt. The next step's payload counts again."""
    compressing = compressing_of()
    payload = compressing.encode(CODECS[name])
    expected = fed_back(compressing.source, decoded(payload, NUMEL))
    for _ in range(2):
        feed(compressing, payload)
        assert compressing.residual is not None
        assert_same_bits(compressing.residual, expected)
    feed(compressing, compressing.encode(CODECS[name]))
    assert not np.array_equal(compressing.residual, expected)


@pytest.mark.parametrize("damage", [0, 24, 64, "cut"])
@pytest.mark.parametrize("name", ["top_k", "8_bits"])
def test_a_damaged_payload(name: str, damage: int | str) -> None:
    """A damaged payload changes no residual, not even of earlier tasklets."""
    compressings = [compressing_of(seed=seed) for seed in range(2)]
    lengths = [len(compressing.encode(CODECS[name])) for compressing in compressings]
    before = [one.residual.copy() for one in compressings if one.residual is not None]
    if isinstance(damage, int):
        compressings[1].memory[damage] = 0xFF
    else:
        lengths[1] -= 1
    tasklets = [one.tasklet(length) for one, length in zip(compressings, lengths, strict=True)]
    with pytest.raises(ValueError, match=r"feed_back: the compressed gradient of tasklet 7 is refused: "):
        feed_back(tasklets, residual_scale=8.0, threads=2)
    for compressing, residual in zip(compressings, before, strict=True):
        assert compressing.residual is not None
        assert_same_bits(compressing.residual, residual)


def test_bad_arguments() -> None:
    """They are refused by name."""
    compressing = compressing_of()
    tasklet = compressing.tasklet(len(compressing.encode(CODECS["top_k"])))
    compressing.parts = [(0, NUMEL + 1, 0)]
    too_long = compressing.tasklet(1_000)
    for one, options, problem in (
        (tasklet, {"threads": 0}, "threads must be at least 1"),
        (tasklet, {"residual_scale": 0}, r"tasklet 7: residual_scale 0\.0+ is not"),
        (too_long, {}, "tasklet 7: a segment of 70001 elements"),
    ):
        with pytest.raises(ValueError, match=problem):
            feed_back([one], **options)
