"""Batches with a codec update every tasklet by the gradient in its payload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_smartinfinity.native import (
    Batch,
    BlockScaled,
    DType,
    GradientCodec,
    Identity,
    Operation,
    TopK,
)
from tests.helpers.compressed import Source, top_k
from tests.helpers.golden import DTYPES, STEPS_OF_RULES, assert_same_bits, encode, random_arrays
from tests.helpers.update_rules import adam_step
from tests.native.compressing import Parts, decoded, mask_of
from tests.native.stored import JOB, Array, Run, StoredState

NUMEL = 40_000
TASKLET = 66 * 256
PARTS: Parts = [(10, 16_000, 0), (16_000, 25_000, -1), (25_001, 39_000, 1), (39_000, NUMEL, 0)]
MEMORY = np.zeros(NUMEL, np.float32)
PADDING = [(500, 100), (TASKLET, 5), (38_000, 200)]


def runs_of(gradient: Array | None, dtype: DType, parameter: Array) -> list[Run]:
    return [
        Run(
            first,
            last - first,
            step=step,
            gradient=None if gradient is None else gradient[first:],
            gradient_dtype=dtype,
            parameter=parameter[first:],
        )
        for first, last, step in PARTS
    ]


def compressing_state(
    folder: Path, codec: GradientCodec, residual: Array | None, arrays: Sequence[Array], **options: Any
) -> StoredState:
    """Return a written state with memory for payloads of fp32 values."""
    folder.mkdir()
    state = StoredState(
        folder, NUMEL, tasklet_numel=TASKLET, num_arrays=len(arrays), codec=codec, residual=residual, **options
    )
    state.write(*arrays)
    for index in range(state.num_tasklets):
        state.payloads[index] = np.zeros(codec.payload_bytes(state.numel_of(index)), np.uint8)
    return state


def sizes(state: StoredState) -> list[tuple[int, int]]:
    return [(index * TASKLET, state.numel_of(index)) for index in range(state.num_tasklets)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name.lower())
@pytest.mark.parametrize("name", STEPS_OF_RULES)
def test_as_with_payloads_by_numpy(tmp_path: Path, name: str, dtype: DType) -> None:
    """Compressing in the batch gives the bits of payloads made by numpy, and leaves the residual as it was.

    The gradient has a residual, padding and elements without a step. Values are sent in two types.
    """
    steps = [STEPS_OF_RULES[name][0], STEPS_OF_RULES[name][-1]]
    dense, *arrays = random_arrays(steps[0], NUMEL, 2, special=False)
    gradient = encode(dense, dtype)
    residual = np.random.default_rng(5).standard_normal(NUMEL).astype(np.float32)
    before = residual.copy()
    mask = mask_of(NUMEL, PARTS, PADDING)
    for value_dtype in (None, DType.BFLOAT16):
        found, expected = (np.zeros(NUMEL, np.float32) for _ in range(2))
        folder = tmp_path / str(value_dtype)
        codec = TopK(ratio=0.03, value_dtype=value_dtype)
        with (
            compressing_state(folder, codec, residual, arrays, residual_scale=4.0, padding=PADDING) as state,
            compressing_state(folder / "numpy", codec, None, arrays) as other,
        ):
            other.codec = None
            for index, (first, numel) in enumerate(sizes(state)):
                part = slice(first, first + numel)
                source = Source(gradient[part], dtype, mask[part], residual[part], 4.0)
                other.payloads[index] = np.frombuffer(top_k(source, 0.03, value_dtype), np.uint8).copy()
            assert state.work(Operation.UPDATE, runs_of(gradient, dtype, found), steps) is None
            assert other.work(Operation.UPDATE, runs_of(None, value_dtype or dtype, expected), steps) is None
            for index, payload in other.payloads.items():
                np.testing.assert_array_equal(state.payloads[index][: payload.size], payload)
            assert_same_bits(found, expected)
            for one, another in zip(state.read(), other.read(), strict=True):
                assert_same_bits(one, another)
    np.testing.assert_array_equal(residual, before)


@pytest.mark.parametrize("state_format", [0, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name.lower())
def test_all_elements_are_no_compression(tmp_path: Path, dtype: DType, state_format: int) -> None:
    """With a ratio of 1, two steps give the bits of the dense update, with a residual of zeros or without one."""
    step = adam_step(seed=3)
    dense, *arrays = random_arrays(step, NUMEL, 3, special=False)
    dense[::5], dense[1::5] = 0.0, -0.0
    gradient = encode(dense, dtype)
    results = []
    for codec, residual in ((None, None), (TopK(ratio=1.0), None), (TopK(ratio=1.0), np.zeros(NUMEL, np.float32))):
        folder = tmp_path / str(len(results))
        identity = Identity(job=JOB, rank=0, state_format=state_format)
        parameter = np.zeros(NUMEL, np.float32)
        with compressing_state(folder, TopK(ratio=1.0), residual, arrays, identity=identity) as state:
            if codec is None:
                state.codec, state.payloads = None, {}
            for _ in range(2):
                run = Run(0, NUMEL, 0, gradient, dtype, parameter)
                assert state.work(Operation.UPDATE, [run], [step]) is None
            results.append((parameter, *state.read()))
    for other in results[1:]:
        for found, expected in zip(other, results[0], strict=True):
            assert_same_bits(found, expected)


def test_8_bits(tmp_path: Path) -> None:
    """A block-scaled update gives the bits of the dense update with the decoded gradient."""
    step = adam_step()
    gradient, *arrays = random_arrays(step, NUMEL, 4, special=False)
    found, expected = (np.zeros(NUMEL, np.float32) for _ in range(2))
    residual = np.full(NUMEL, 0.25, np.float32)
    with compressing_state(tmp_path / "codec", BlockScaled(), residual, arrays, padding=PADDING) as state:
        assert state.work(Operation.UPDATE, runs_of(gradient, DType.FLOAT32, found), [step] * 2) is None
        parts = [decoded(state.payloads[index].tobytes(), numel) for index, (_, numel) in enumerate(sizes(state))]
        stored = state.read()
    with compressing_state(tmp_path / "dense", BlockScaled(), None, arrays) as other:
        other.codec, other.payloads = None, {}
        dense = np.concatenate(parts)
        assert other.work(Operation.UPDATE, runs_of(dense, DType.FLOAT32, expected), [step] * 2) is None
        for one, another in zip(stored, other.read(), strict=True):
            assert_same_bits(one, another)
    assert_same_bits(found, expected)
    assert np.abs(dense[10:500] - gradient[10:500] - 0.25).max() < 0.05


def test_any_number_of_threads_in_any_order(tmp_path: Path) -> None:
    step = adam_step()
    gradient, *arrays = random_arrays(step, NUMEL, 6, special=False)
    results = []
    for threads in (1, 3):
        parameter = np.zeros(NUMEL, np.float32)
        options = {"options": {"compute_threads": threads, "num_buffers": 3}}
        with compressing_state(tmp_path / str(threads), TopK(ratio=0.01), None, arrays, **options) as state:
            batch = state.update_batch(runs_of(gradient, DType.FLOAT32, parameter), [step, step])
            tasklets = list(batch.tasklets)[:: 1 if threads == 1 else -1]
            state.pipeline.submit(Batch(Operation.UPDATE, tasklets, [step, step], codec=state.codec))
            assert state.finish() is None
            results.append((parameter, *state.payloads.values(), *state.read()))
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"operation": Operation.READ, "runs": [Run(0, NUMEL)]}, "gradients are compressed for UPDATE only"),
        (
            {"runs": [Run(0, 100, 0, MEMORY), Run(100, 100, 0, MEMORY, DType.BFLOAT16)]},
            "gradients to compress together are of one type",
        ),
        ({"payloads": {}}, "tasklet 0: a payload address is needed"),
        ({"payloads": {0: np.zeros(100, np.uint8)}}, "payload_bytes is 100, its gradient may take 3200 by TopK"),
        ({"padding": [(16_000, 2_000)]}, "tasklet 0: padding of 2000 elements at 16000 leaves its 16896"),
        ({"residual_scale": -1.0}, "tasklet 0: residual_scale -1.0+ is not"),
        ({"codec": None, "residual": None}, "a gradient address beside the tasklet's payload|no header|magic is 0"),
        ({"codec": None, "payloads": {}}, "residual and padding are for a batch with a codec"),
        ({"codec": None, "residual": None, "payloads": {}, "padding": [(1, 1)]}, "residual and padding are for"),
    ],
)
def test_what_cannot_be_compressed(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    step = adam_step()
    gradient, *arrays = random_arrays(step, NUMEL, 6, special=False)
    runs = runs_of(gradient, DType.FLOAT32, np.zeros(NUMEL, np.float32))
    with compressing_state(tmp_path / "state", TopK(ratio=0.03), np.zeros(NUMEL, np.float32), arrays) as state:
        for name, value in change.items():
            setattr(state, name, value)
        tasklets = state.tasklets(change.get("runs", runs), compressed=True)
        options = {"codec": state.codec, "residual_scale": state.residual_scale}
        with pytest.raises(ValueError, match=message):
            state.pipeline.submit(Batch(change.get("operation", Operation.UPDATE), tasklets, [step, step], **options))
        assert np.all(state.read()[0] == arrays[0])
