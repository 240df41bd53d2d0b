"""Compressed gradients on the host: same results as the dense gradient, and nothing out of bounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_smartinfinity.native import Batch, DType, Identity, Operation
from tests.helpers.golden import DTYPES, STEPS_OF_RULES, assert_same_bits, random_arrays
from tests.helpers.payload import BEAT_BYTES, BLOCK, Payload, build, compress, expand
from tests.helpers.update_rules import adam_step
from tests.native.stored import JOB, Array, Run, StoredState

NUMEL = 70_001  # two blocks, and chunks that end inside them


def memory_of(payload: Payload) -> Array:
    return np.frombuffer(payload.tobytes(), np.uint8).copy()


@pytest.mark.parametrize(
    ("name", "dtype", "state_format"),
    [
        *((name, dtype, 0) for name in STEPS_OF_RULES for dtype in DTYPES),
        *(("adamw", DType.BFLOAT16, state_format) for state_format in (1, 2, 3)),
    ],
)
def test_as_its_dense_form(tmp_path: Path, name: str, dtype: DType, state_format: int) -> None:
    """A compressed gradient updates like its dense form, with segments of any borders, with and without a step.

    Formats that round whole blocks take segments that end with a block.
    """
    step = STEPS_OF_RULES[name][0]
    identity = Identity(job=JOB, rank=0, state_format=state_format)
    borders = (0, 12_288, 20_480, 65_536) if state_format else (3, 12_289, 20_500, 65_537)
    gradient, *state = random_arrays(step, NUMEL, 0, special=False)
    payload = compress(gradient, 0.05, dtype)
    dense = expand(payload.tobytes())
    results = []
    for folder, payloads in (("sparse", {0: memory_of(payload)}), ("dense", {})):
        (tmp_path / folder).mkdir()
        parameter = np.zeros(NUMEL, np.float32)
        runs = [
            Run(
                first,
                last - first,
                step=number,
                gradient=None if payloads else dense[first:],
                gradient_dtype=dtype if payloads else DType.FLOAT32,
                parameter=parameter[first:],
            )
            for first, last, number in zip(borders, (*borders[1:], NUMEL), (0, -1, 0, 0), strict=True)
        ]
        with StoredState(
            tmp_path / folder, NUMEL, num_arrays=len(state), identity=identity, payloads=payloads
        ) as stored:
            stored.write(*state)
            assert stored.work(Operation.UPDATE, runs, [step]) is None
            results.append((parameter, *stored.read()))
    for found, expected in zip(*results, strict=True):
        assert_same_bits(found, expected)


def stored_with(folder: Path, payload: Array, numel: int) -> StoredState:
    stored = StoredState(folder, numel, payloads={0: payload})
    stored.write(*(np.ones(numel, np.float32) for _ in range(3)))
    return stored


def word(number: int, value: int) -> Callable[[Payload], None]:
    def change(payload: Payload) -> None:
        payload.header.view(np.uint32)[number] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (word(0, 1), "magic is 1"),
        (word(1, 2), "version is 2"),
        (word(2, NUMEL + 1), "number of elements is 70002, expected 70001"),
        (word(3, 3), "number of blocks is 3, expected 2"),
        (word(4, NUMEL + 1), "more values than there are elements"),
        (word(4, 2**32 - 1), "more values than there are elements"),
        (word(5, 3), "no type of values 3"),
        (word(6, 2), "beats of counts is 2, expected 1"),
        (word(7, 0), "beats of indices is 0"),
        (word(8, 2**31), "beats of values is 2147483648"),
        *((nbytes, r"no header|size is \d+") for nbytes in (1, 63, 64, -64, -1)),
    ],
)
def test_bad_header(tmp_path: Path, change: Callable[[Payload], None] | int, message: str) -> None:
    """A payload with a wrong number in its header, or a part of one, is refused."""
    payload = compress(np.ones(NUMEL, np.float32), 0.01, DType.FLOAT32)
    if not isinstance(change, int):
        change(payload)
    memory = memory_of(payload)[: change if isinstance(change, int) else None]
    with stored_with(tmp_path, memory, NUMEL) as stored, pytest.raises(ValueError, match=message):
        stored.work(Operation.UPDATE, [Run(0, NUMEL, step=0)], [adam_step()])


@pytest.mark.parametrize(
    ("positions", "change", "message"),
    [
        ([5, 6], lambda indices, counts: indices.__setitem__(1, 5), "index 5 of block 0 is not above"),
        ([5, 6], lambda indices, counts: indices.__setitem__(1, 4), "index 4 of block 0 is not above"),
        ([5, BLOCK], lambda indices, counts: indices.__setitem__(1, NUMEL - BLOCK), "index 4465 of block 1 is past"),
        ([5, BLOCK], lambda indices, counts: counts.__setitem__(1, 0), "counts do not give the header's sum, 2"),
        ([5, BLOCK], lambda indices, counts: counts.__setitem__(0, 2), "counts do not give the header's sum, 2"),
        ([5, BLOCK], lambda indices, counts: counts.__setitem__(0, 2**32 - 1), "counts do not give"),
    ],
)
def test_bad_index_or_count(
    tmp_path: Path, positions: list[int], change: Callable[[Array, Array], None], message: str
) -> None:
    """A bad index or count fails the batch before anything of the tasklet changes."""
    payload = build(np.array(positions), np.ones(len(positions), np.float32), NUMEL, DType.FLOAT32)
    change(payload.indices.view(np.uint16), payload.counts.view(np.uint32))
    parameter = np.full(NUMEL, 7, np.float32)
    with stored_with(tmp_path, memory_of(payload), NUMEL) as stored:
        failure = stored.work(Operation.UPDATE, [Run(0, NUMEL, step=0, parameter=parameter)], [adam_step()])
        assert failure is not None and failure.kind == "gradient" and message in failure.message
        assert "the compressed gradient of tasklet 0 is refused" in failure.message
        assert np.all(parameter == 7)
        assert stored.pipeline.finished() == []
        assert np.all(stored.read()[0] == 1)


def test_segments_beside_a_payload(tmp_path: Path) -> None:
    gradient = np.ones(64, np.float32)
    payload = memory_of(compress(gradient, 0.5, DType.FLOAT16))
    with stored_with(tmp_path, payload, 64) as stored:
        with pytest.raises(ValueError, match="gradient address beside the tasklet's payload"):
            stored.work(Operation.UPDATE, [Run(0, 64, step=0, gradient=gradient)], [adam_step()])
        with pytest.raises(ValueError, match="another type than the payload's values"):
            stored.work(Operation.UPDATE, [Run(0, 64, step=0)], [adam_step()])
        with pytest.raises(ValueError, match="a payload is for UPDATE only"):
            stored.pipeline.submit(Batch(Operation.READ, stored.tasklets([Run(0, 64)], compressed=True)))


def test_random_damage(tmp_path: Path) -> None:
    """A randomly damaged payload is refused or read as another gradient."""
    random = np.random.default_rng(0)
    numel, outcomes = BLOCK + 500, set()
    gradient = random.standard_normal(numel).astype(np.float32)
    whole = compress(gradient, 0.002, DType.FLOAT32)
    payload = memory_of(whole)
    undamaged = payload.copy()
    with stored_with(tmp_path, payload, numel) as stored:
        for _ in range(150):
            payload[:] = undamaged
            # Damage mostly bytes that are not values, because damaged values are harmless.
            end = payload.size if random.integers(8) == 0 else payload.size - whole.values.size
            for position in random.integers(BEAT_BYTES if random.integers(2) else 0, end, random.integers(1, 4)):
                payload[position] = random.integers(256)
            try:
                failure = stored.work(Operation.UPDATE, [Run(0, numel, step=0)], [adam_step()])
            except ValueError:
                outcomes.add("header")
            else:
                outcomes.add(failure.kind if failure else "none")
    assert outcomes == {"header", "gradient", "none"}
