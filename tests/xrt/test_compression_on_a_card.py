"""A card gets only payloads of the gradients that the host compresses, and computes the host's bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from lightning_smartinfinity.native import BlockScaled, DType, GradientCodec, Operation, TopK
from tests.helpers.golden import DTYPES, STEPS, encode, random_arrays
from tests.helpers.runif import RunIf
from tests.native.stored import Array, Run
from tests.xrt.card_state import CardCase, CardState, card_state
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)

NUMEL, TASKLET = 70_000 + 5_000, 70_000
STEPS_OF_IT = [STEPS["adamw"], STEPS["adam_near_end"]]
GRADIENT, *ARRAYS = random_arrays(STEPS_OF_IT[0], NUMEL, 5, special=False)
RESIDUAL = np.random.default_rng(6).standard_normal(NUMEL).astype(np.float32)
PADDING = [(50, 10), (69_000, 1_000), (74_990, 10)]
CASE = CardCase(tasklet_numel=TASKLET)
CODECS = {
    "top": TopK(ratio=0.03),
    "top, bf16": TopK(ratio=0.03, value_dtype=DType.BFLOAT16),
    "8 bits": BlockScaled(),
    "all": TopK(ratio=1.0),  # its payload is larger than the gradient
}


def runs_of(parameter: Array, gradient: Array, dtype: DType) -> list[Run]:
    ranges = [(10, 30_000, 0), (30_000, 30_001, -1), (40_000, 66_000, 1), (66_000, NUMEL, 0)]
    return [
        Run(first, last - first, number, gradient[first:], dtype, parameter[first:]) for first, last, number in ranges
    ]


@contextmanager
def compressing(folder: Path, cards: EmulatedCards, codec: GradientCodec, case: CardCase = CASE) -> Iterator[CardState]:
    with card_state(folder, cards, STEPS_OF_IT[0], NUMEL, case) as state:
        state.write(*ARRAYS)
        for side in (state.stored, state.host):
            side.codec, side.padding = codec, PADDING
            side.residual, side.residual_scale = RESIDUAL.copy(), 4.0
            side.payloads = {index: np.zeros(codec.payload_bytes(side.numel_of(index)), np.uint8) for index in range(2)}
        yield state


def assert_same(state: CardState, runs: list[Run], on_card: Array, on_host: Array) -> None:
    """Update on the host, too, and assert equal parameters, storage and payloads, and unchanged residuals."""
    assert state.host.work(Operation.UPDATE, runs, STEPS_OF_IT) is None
    np.testing.assert_array_equal(on_card, on_host)
    state.assert_same()
    for index, payload in state.stored.payloads.items():
        np.testing.assert_array_equal(payload, state.host.payloads[index])
        assert payload.any()
    for side in (state.stored, state.host):
        np.testing.assert_array_equal(side.residual, RESIDUAL)


def payload_sizes(state: CardState) -> list[int]:
    """Return the payloads' sizes in bytes, as their headers give them."""
    return [int(64 * (1 + payload.view(np.uint32)[6:9].sum())) for payload in state.stored.payloads.values()]


F32, F16, BF16 = DTYPES


@pytest.mark.parametrize(
    ("name", "dtype", "route"),
    [
        ("top", F32, "host"),
        ("top", BF16, "storage"),
        ("top, bf16", F16, "host"),
        ("top, bf16", F32, "storage"),
        ("8 bits", BF16, "host"),
        ("8 bits", F16, "storage"),
        ("all", F32, "host"),
    ],
)
def test_as_on_the_host(tmp_path: Path, emulated_cards: EmulatedCards, dtype: DType, name: str, route: str) -> None:
    """In two steps only payloads go to the card, into memory that is too small for the gradient."""
    codec = CODECS[name]
    case = CardCase(
        tasklet_numel=TASKLET, gradient_buffer_bytes=codec.payload_bytes(TASKLET), through_file=route == "storage"
    )
    gradient = encode(GRADIENT, dtype)
    with compressing(tmp_path, emulated_cards, codec, case) as state:
        for _ in range(2):
            on_card, on_host = np.zeros(NUMEL, np.float32), np.zeros(NUMEL, np.float32)
            failure = state.update(runs_of(on_card, gradient, dtype), STEPS_OF_IT)
            assert failure is None, failure
            assert_same(state, runs_of(on_host, gradient, dtype), on_card, on_host)
        counters = state.pipeline.counters()
        sent = 2 * sum(payload_sizes(state))
    assert counters.shared_write_bytes == sent < {"8 bits": 1.02, "all": 6.1}.get(name, 0.25) * 2 * NUMEL
    assert counters.internal_read_bytes == 2 * 12 * NUMEL + (sent if route == "storage" else 0)


@pytest.mark.parametrize("name", ["top, bf16", "8 bits"])
def test_redone_by_the_host(tmp_path: Path, emulated_cards: EmulatedCards, name: str) -> None:
    """The host compresses again what a failed card left undone, to the same bits."""
    on_card, on_host = np.zeros(NUMEL, np.float32), np.zeros(NUMEL, np.float32)
    with compressing(tmp_path, emulated_cards, CODECS[name]) as state:
        emulated_cards.inject("error", skipped=2)
        failure = state.update(runs_of(on_card, GRADIENT, DType.FLOAT32), STEPS_OF_IT)
        assert failure is not None and failure.kind == "device"
        state.redo(runs_of(on_card, GRADIENT, DType.FLOAT32), STEPS_OF_IT)
        assert_same(state, runs_of(on_host, GRADIENT, DType.FLOAT32), on_card, on_host)


def test_what_does_not_fit(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """A payload that is too large for the card's buffer is refused."""
    codec = CODECS["top, bf16"]
    nbytes = codec.payload_bytes(TASKLET) // 4096 * 4096
    case = CardCase(tasklet_numel=TASKLET, gradient_buffer_bytes=nbytes)
    with compressing(tmp_path, emulated_cards, codec, case) as state:
        runs = runs_of(np.zeros(NUMEL, np.float32), GRADIENT, DType.FLOAT32)
        with pytest.raises(ValueError, match="tasklet 0: its payload does not fit gradient_buffer_bytes"):
            state.submit(runs, STEPS_OF_IT)
        assert state.stored.work(Operation.UPDATE, runs, STEPS_OF_IT) is None  # the host can update it
