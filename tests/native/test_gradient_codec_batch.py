"""Batches with a codec update every tasklet by the gradient in its payload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_smartinfinity.native import (
    Batch,
    BlockScaled,
    DType,
    GradientCodec,
    Operation,
    TopK,
)
from tests.helpers.compressed import Source, block_scaled, top_k
from tests.helpers.golden import DTYPES, STEPS_OF_RULES, assert_same_bits, encode, random_arrays
from tests.helpers.update_rules import adam_step
from tests.native.compressing import Parts, mask_of
from tests.native.stored import Array, Run, StoredState

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

    The gradient has a residual, padding and elements without a step. Several threads compute.
    """
    steps = [STEPS_OF_RULES[name][0], STEPS_OF_RULES[name][-1]]
    dense, *arrays = random_arrays(steps[0], NUMEL, 2, special=False)
    gradient = encode(dense, dtype)
    residual = np.random.default_rng(5).standard_normal(NUMEL).astype(np.float32)
    before = residual.copy()
    mask = mask_of(NUMEL, PARTS, PADDING)
    threads = {"compute_threads": 3, "num_buffers": 3}
    codecs: list[tuple[GradientCodec, DType, Callable[[Source], bytes]]] = [
        (TopK(ratio=0.03), dtype, lambda source: top_k(source, 0.03)),
        (TopK(ratio=0.03, value_dtype=DType.BFLOAT16), DType.BFLOAT16, lambda s: top_k(s, 0.03, DType.BFLOAT16)),
        (BlockScaled(), DType.FLOAT32, lambda source: block_scaled(source.values)),
    ]
    for number, (codec, value_dtype, by_numpy) in enumerate(codecs):
        found, expected = (np.zeros(NUMEL, np.float32) for _ in range(2))
        folder = tmp_path / str(number)
        options = {"residual_scale": 4.0, "padding": PADDING, "options": threads}
        with (
            compressing_state(folder, codec, residual, arrays, **options) as state,
            compressing_state(folder / "numpy", codec, None, arrays) as other,
        ):
            other.codec = None
            for index, (first, numel) in enumerate(sizes(state)):
                part = slice(first, first + numel)
                source = Source(gradient[part], dtype, mask[part], residual[part], 4.0)
                other.payloads[index] = np.frombuffer(by_numpy(source), np.uint8).copy()
            assert state.work(Operation.UPDATE, runs_of(gradient, dtype, found), steps) is None
            assert other.work(Operation.UPDATE, runs_of(None, value_dtype, expected), steps) is None
            for index, payload in other.payloads.items():
                np.testing.assert_array_equal(state.payloads[index][: payload.size], payload)
            assert_same_bits(found, expected)
            for one, another in zip(state.read(), other.read(), strict=True):
                assert_same_bits(one, another)
    np.testing.assert_array_equal(residual, before)


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
