"""Batches update tasklets by the gradients in their payloads, which they may compress themselves."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    feed_back,
)
from tests.helpers.compressed import BLOCK, Payload, Source, block_scaled, build, compress, expand, fed_back, top_k
from tests.helpers.golden import (
    DTYPES,
    STEPS_OF_RULES,
    adam_step,
    assert_all_same_bits,
    assert_same_bits,
    encode,
    random_arrays,
)
from tests.helpers.native_testing import InstructionSet
from tests.native.stored import JOB, Array, Compressing, Parts, Run, StoredState, decoded, mask_of

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
            for index in range(state.num_tasklets):
                part = slice(index * TASKLET, index * TASKLET + state.numel_of(index))
                source = Source(gradient[part], dtype, mask[part], residual[part], 4.0)
                other.payloads[index] = np.frombuffer(by_numpy(source), np.uint8).copy()
            assert state.work(Operation.UPDATE, runs_of(gradient, dtype, found), steps) is None
            assert other.work(Operation.UPDATE, runs_of(None, value_dtype, expected), steps) is None
            for index, payload in other.payloads.items():
                np.testing.assert_array_equal(state.payloads[index][: payload.size], payload)
            assert_same_bits(found, expected)
            assert_all_same_bits(state.read(), other.read())
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
        ({"padding": [(500, 10), (505, 2)]}, "padding must be in ascending order"),
        *(
            ({"residual_scale": scale}, rf"tasklet 0: residual_scale {scale}0* is not")
            for scale in (-1.0, 0.0, math.inf, math.nan)
        ),
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


# ---- payloads that were made elsewhere, as by a card: nothing out of bounds

LENGTH = 70_001  # two blocks, and chunks that end inside them


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
    gradient, *state = random_arrays(step, LENGTH, 0, special=False)
    payload = compress(gradient, 0.05, dtype)
    dense = expand(payload.tobytes())
    results = []
    for folder, payloads in (("sparse", {0: memory_of(payload)}), ("dense", {})):
        (tmp_path / folder).mkdir()
        parameter = np.zeros(LENGTH, np.float32)
        runs = [
            Run(
                first,
                last - first,
                step=number,
                gradient=None if payloads else dense[first:],
                gradient_dtype=dtype if payloads else DType.FLOAT32,
                parameter=parameter[first:],
            )
            for first, last, number in zip(borders, (*borders[1:], LENGTH), (0, -1, 0, 0), strict=True)
        ]
        with StoredState(
            tmp_path / folder, LENGTH, num_arrays=len(state), identity=identity, payloads=payloads
        ) as stored:
            stored.write(*state)
            assert stored.work(Operation.UPDATE, runs, [step]) is None
            results.append((parameter, *stored.read()))
    assert_all_same_bits(*results)


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
        (word(2, LENGTH + 1), "number of elements is 70002, expected 70001"),
        (word(3, 3), "number of blocks is 3, expected 2"),
        (word(4, LENGTH + 1), "more values than there are elements"),
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
    payload = compress(np.ones(LENGTH, np.float32), 0.01, DType.FLOAT32)
    if not isinstance(change, int):
        change(payload)
    memory = memory_of(payload)[: change if isinstance(change, int) else None]
    with stored_with(tmp_path, memory, LENGTH) as stored, pytest.raises(ValueError, match=message):
        stored.work(Operation.UPDATE, [Run(0, LENGTH, step=0)], [adam_step()])


@pytest.mark.parametrize(
    ("positions", "change", "message"),
    [
        ([5, 6], lambda indices, counts: indices.__setitem__(1, 5), "index 5 of block 0 is not above"),
        ([5, 6], lambda indices, counts: indices.__setitem__(1, 4), "index 4 of block 0 is not above"),
        (
            [5, BLOCK],
            lambda indices, counts: indices.__setitem__(1, LENGTH - BLOCK),
            "index 4465 of block 1 is past",
        ),
        ([5, BLOCK], lambda indices, counts: counts.__setitem__(1, 0), "counts do not give the header's sum, 2"),
        ([5, BLOCK], lambda indices, counts: counts.__setitem__(0, 2), "counts do not give the header's sum, 2"),
        ([5, BLOCK], lambda indices, counts: counts.__setitem__(0, 2**32 - 1), "counts do not give"),
    ],
)
def test_bad_index_or_count(
    tmp_path: Path, positions: list[int], change: Callable[[Array, Array], None], message: str
) -> None:
    """A bad index or count fails the batch before anything of the tasklet changes."""
    payload = build(np.array(positions), np.ones(len(positions), np.float32), LENGTH, DType.FLOAT32)
    change(payload.indices.view(np.uint16), payload.counts.view(np.uint32))
    parameter = np.full(LENGTH, 7, np.float32)
    with stored_with(tmp_path, memory_of(payload), LENGTH) as stored:
        failure = stored.work(Operation.UPDATE, [Run(0, LENGTH, step=0, parameter=parameter)], [adam_step()])
        assert failure is not None and failure.kind == "gradient" and message in failure.message
        assert "the compressed gradient of tasklet 0 is refused" in failure.message and np.all(parameter == 7)
        assert stored.pipeline.finished() == [] and np.all(stored.read()[0] == 1)


def test_segments_beside_a_payload(tmp_path: Path) -> None:
    gradient = np.ones(64, np.float32)
    with stored_with(tmp_path, memory_of(compress(gradient, 0.5, DType.FLOAT16)), 64) as stored:
        for operation, run, told in (
            (Operation.UPDATE, Run(0, 64, step=0, gradient=gradient), "gradient address beside the tasklet's payload"),
            (Operation.UPDATE, Run(0, 64, step=0), "another type than the payload's values"),
            (Operation.READ, Run(0, 64), "a payload is for UPDATE only"),
        ):
            with pytest.raises(ValueError, match=told):
                stored.pipeline.submit(Batch(operation, stored.tasklets([run], compressed=True), [adam_step()]))


# ---- after a step the residual holds exactly the eligible gradient that was not sent


FED_BACK = 70_000
FED_PARTS = [(3, 30_000, 0), (30_000, 40_000, -1), (40_001, 65_530, 1), (65_530, FED_BACK - 9, 0)]
FED_PADDING = [(100, 50), (29_990, 20), (FED_BACK - 12, 12)]

CODECS: dict[str, GradientCodec] = {
    "top_k": TopK(ratio=0.02),
    "top_k_bf16": TopK(ratio=0.02, value_dtype=DType.BFLOAT16),
    "sampled": TopK(ratio=0.3, exact=False),
    "all": TopK(ratio=1.0),
    "8_bits": BlockScaled(),
}


def compressing_of(dtype: DType = DType.FLOAT32, seed: int = 0, scale: float = 8.0) -> Compressing:
    gradient, residual = np.random.default_rng(seed).standard_normal((2, FED_BACK)).astype(np.float32)
    gradient[::13] = residual[::11] = 0
    return Compressing(encode(gradient * np.float32(scale), dtype), dtype, residual, scale, FED_PARTS, FED_PADDING)


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
        expected = fed_back(compressing.source, decoded(payload, FED_BACK))
        before = compressing.residual.copy()
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
        assert np.isfinite(compressing.residual).all()


@pytest.mark.parametrize("threads", [1, 2, 5, pytest.param(40, id="more than there is memory for")])
def test_any_number_of_threads(threads: int) -> None:
    """Each tasklet is fed once. If not all threads can be started, those that run do all the work.

    If they did half of it, the next call would feed that half twice.
    """
    compressings = [compressing_of(seed=seed) for seed in range(max(7, threads))]
    pairs = [(one, one.encode(CODECS["top_k"])) for one in compressings]
    expected = [fed_back(one.source, decoded(payload, FED_BACK)) for one, payload in pairs]
    tasklets = [one.tasklet(len(payload)) for one, payload in pairs]
    with _room_for(64 << 20):  # far less than the stacks of forty threads take
        feed_back(tasklets, residual_scale=8.0, threads=threads)
    assert_all_same_bits((one.residual for one in compressings), expected)


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
    expected = fed_back(compressing.source, decoded(payload, FED_BACK))
    for _ in range(2):
        feed(compressing, payload)
        assert_same_bits(compressing.residual, expected)
    feed(compressing, compressing.encode(CODECS[name]))
    assert not np.array_equal(compressing.residual, expected)


@pytest.mark.parametrize("damage", [0, 24, 64, "cut"])
@pytest.mark.parametrize("name", ["top_k", "8_bits"])
def test_a_damaged_payload(name: str, damage: int | str) -> None:
    """A damaged payload changes no residual, not even of earlier tasklets."""
    compressings = [compressing_of(seed=seed) for seed in range(2)]
    lengths = [len(compressing.encode(CODECS[name])) for compressing in compressings]
    before = [one.residual.copy() for one in compressings]
    if isinstance(damage, int):
        compressings[1].memory[damage] = 0xFF
    else:
        lengths[1] -= 1
    tasklets = [one.tasklet(length) for one, length in zip(compressings, lengths, strict=True)]
    with pytest.raises(ValueError, match=r"feed_back: the compressed gradient of tasklet 7 is refused: "):
        feed_back(tasklets, residual_scale=8.0, threads=2)
    assert_all_same_bits((one.residual for one in compressings), before)


def test_bad_arguments() -> None:
    """They are refused by name."""
    compressing = compressing_of()
    tasklet = compressing.tasklet(len(compressing.encode(CODECS["top_k"])))
    compressing.parts = [(0, FED_BACK + 1, 0)]
    for one, options, problem in (
        (tasklet, {"threads": 0}, "threads must be at least 1"),
        (tasklet, {"residual_scale": 0}, r"tasklet 7: residual_scale 0\.0+ is not"),
        (compressing.tasklet(1_000), {}, "tasklet 7: a segment of 70001 elements"),
    ):
        with pytest.raises(ValueError, match=problem):
            feed_back([one], **options)
