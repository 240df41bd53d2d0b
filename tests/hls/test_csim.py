"""Compares the kernels in C simulation with numpy, bit for bit, and with torch.optim."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from hls.description import ERROR_BITS, STATUS_WORDS
from lightning_smartinfinity.native import DType
from lightning_smartinfinity.pipeline.rules import rule_for
from tests.helpers.compressed import BLOCK, Codes, block_scaled_codes, build
from tests.helpers.golden import DTYPES, STEPS, STEPS_OF_RULES, decode, encode
from tests.helpers.native_testing import crc32c_combine
from tests.hls.simulation import Library
from tests.hls.tasklet import FORMS, Form, Tasklet, make_tasklet

RULES = pytest.mark.parametrize("step", [steps[0] for steps in STEPS_OF_RULES.values()], ids=STEPS_OF_RULES)
LENGTHS = [0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 1000, 1023, 1024, 1025, 2047]

FLOAT32 = DType.FLOAT32
SUMS = {"parameter_written": 2, "array0_written": 4}
"""Checksums in the status, with the bytes of an element."""
SPARSE = Form(FLOAT32, FLOAT32, 0.0)
BLOCK_SCALED = Form(FLOAT32, DType.BFLOAT16, block_scaled=True)
BAD_INDEX, BAD_HEADER, BAD_RANGE, UNKNOWN_FORM, WRONG_COUNTS, BAD_CODE = ERROR_BITS.values()

Spoil = Callable[[Tasklet, list[int]], None]
"""Changes a tasklet, or the scalars of its run, to what a kernel has to refuse."""


@pytest.mark.parametrize("name", STEPS)
def test_every_form_of_every_step(sequential: Library, name: str) -> None:
    """Every form of gradient and parameter gives numpy's bits, with subnormals, infinities and NaNs."""
    for seed, form in enumerate(FORMS):
        make_tasklet(STEPS[name], 1_531, form, seed=seed, special=True).run(sequential)


@RULES
def test_every_length(sequential: Library, step: Any) -> None:
    """Lengths and ranges may end in the middle of a beat, a group of 32 or the padding."""
    for numel, form in itertools.product(LENGTHS, [FORMS[0], FORMS[7], FORMS[16], BLOCK_SCALED]):
        for first in {0, 1, numel // 2, numel}:
            for last in {first, (first + numel + 1) // 2, numel - 1, numel}:
                if first <= last <= numel:
                    make_tasklet(step, numel, form, seed=numel).run(sequential, first, last)


@RULES
@pytest.mark.parametrize(
    "form",
    [Form(DType.FLOAT16, DType.BFLOAT16), Form(DType.FLOAT16, DType.BFLOAT16, 0.02), BLOCK_SCALED],
    ids=["dense", "sparse", "8 bits"],
)
def test_several_runs(sequential: Library, step: Any, form: Form) -> None:
    """Groups of different hyperparameters may meet in a tasklet; runs' checksums combine to those of the arrays."""
    edges = [0, 1, 2, 5, 6, 23, 24, 400, 401, 999, 16_350, 16_384, 49_200, 65_530, 65_531, 70_000, 70_001]
    tasklet = make_tasklet(step, edges[-1], form, seed=7)
    combined = [0] * len(SUMS)
    scalars = {name: getattr(step, name) for name in tasklet.kernel.words}
    for index, (first, last) in enumerate(itertools.pairwise(edges)):
        status = tasklet.run(sequential, first, last, step=type(step)(**{**scalars, "gradient_scale": 1.0 + index}))
        for place, (word, item) in enumerate(SUMS.items()):
            combined[place] = crc32c_combine(combined[place], status[word], (last - first) * item)
    whole = tasklet.run(sequential, active=False)
    assert combined == [whole[word] for word in SUMS]


@RULES
def test_inactive(sequential: Library, step: Any) -> None:
    """An inactive run changes nothing but padding, and writes the parameter."""
    for form in FORMS:
        tasklet = make_tasklet(step, 1_500, form, special=True)
        tasklet.gradient = tasklet.gradient[:0]  # an inactive run needs none
        tasklet.run(sequential, 40, 1_500, active=False)


@RULES
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name.lower())
def test_blocks_of_a_compressed_gradient(sequential: Library, step: Any, dtype: DType) -> None:
    """Blocks may keep none, some or all of their elements; ranges may lie within, at the edges of or across blocks."""
    numel = 3 * BLOCK + 77
    random = np.random.default_rng(11)
    kept = np.concatenate([[0, 5, BLOCK - 1], 2 * BLOCK + np.arange(BLOCK), [3 * BLOCK + 76]])
    payload = build(kept, encode(random.standard_normal(kept.size).astype(np.float32), dtype), numel, dtype)
    ranges = [(0, numel), (BLOCK - 1, BLOCK + 1), (2 * BLOCK, 3 * BLOCK), (BLOCK + 7, BLOCK + 9), (numel - 1, numel)]
    tasklet = make_tasklet(step, numel, Form(dtype, DType.BFLOAT16, 0.0)).hold(payload)
    for first, last in ranges:
        tasklet.run(sequential, first, last)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=["fp16", "bf16"])
@pytest.mark.parametrize("ratio", [None, 1.0], ids=["dense", "compressed"])
def test_every_16_bit_gradient(sequential: Library, dtype: DType, ratio: float | None) -> None:
    """All 65,536 patterns widen exactly, fp16's subnormals too."""
    patterns = np.arange(65_536, dtype=np.uint16).view(np.int16)
    tasklet = make_tasklet(STEPS["sgd_first"], 65_536, Form(dtype, DType.FLOAT32, ratio))
    if ratio is None:
        tasklet.dense = decode(patterns, dtype)
        tasklet.gradient.view(np.int16)[:] = patterns
    else:
        tasklet.hold(build(np.arange(65_536), patterns, 65_536, dtype))
    tasklet.run(sequential)


def test_every_code(sequential: Library) -> None:
    """All scales times all codes give numpy's bits."""
    codes = Codes(np.arange(1, 249, dtype=np.uint8), np.tile(np.arange(-128, 128, dtype=np.int8), 248))
    codes.codes[::256] = 0  # in place of -128, which is no code
    make_tasklet(STEPS["sgd_first"], codes.codes.size, BLOCK_SCALED).hold(codes.payload(), codes.values).run(sequential)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=["fp16", "bf16"])
def test_every_rounding_of_the_parameter(sequential: Library, dtype: DType) -> None:
    """Each 16-bit number, its neighbours in fp32 and half-way values round to nearest even, as in torch."""
    numbers = decode(np.arange(65_536, dtype=np.uint16).view(np.int16), dtype).view(np.uint32)
    halves = numbers + np.uint32(0x1000 if dtype is DType.FLOAT16 else 0x8000)
    subnormal = ((np.arange(1_025) + 0.5) * 2.0**-24).astype(np.float32).view(np.uint32)  # half-way in fp16
    tiny = np.arange(0, 0x39000000, 0x3FFF, dtype=np.uint32)
    near = [bits + np.uint32(step) for bits in (numbers, halves, subnormal, tiny) for step in (0, 1, 0xFFFFFFFF)]
    masters = np.concatenate(near).view(np.float32)
    tasklet = make_tasklet(STEPS["sgd"], masters.size, Form(DType.FLOAT32, dtype))
    tasklet.arrays[0].view(np.float32)[: masters.size] = masters
    tasklet.run(sequential, active=False)


# ---- refused


def word(index: int, value: int) -> Spoil:
    """Return a function that sets a scalar of the run."""
    return lambda tasklet, words: words.__setitem__(index, value)


def add(tasklet: Tasklet, words: list[int], *, index: int, added: int = 1) -> None:
    """Add to a word of the payload."""
    tasklet.gradient.view(np.uint32)[index] += np.uint32(added)


def count(tasklet: Tasklet, words: list[int], *, change: int) -> None:
    """Change the counts of two blocks, so that their sum wraps if that is possible."""
    found = tasklet.gradient[64:72].view(np.uint32)
    found[:] = [change, int(found.sum()) + 5] if change > 2**31 else [found[0], int(found[1]) + change]


def more_values_than_elements(tasklet: Tasklet, words: list[int]) -> None:
    tasklet.hold(build(np.arange(11) % 10, np.ones(11, np.float32), 10, FLOAT32), tasklet.dense)


SPARSE_BF16 = Form(DType.BFLOAT16, DType.BFLOAT16, 0.01)
COUNTED = Form(FLOAT32, DType.BFLOAT16, 0.01)
REFUSED: dict[str, tuple[int, Form, int, Spoil]] = {
    "first behind last": (BAD_RANGE, Form(), 100, word(1, 101)),
    "last behind the end": (BAD_RANGE, Form(), 100, word(2, 101)),
    "more than the card holds": (BAD_RANGE, Form(), 100, word(0, 2**29 + 1)),
    "an unknown gradient": (UNKNOWN_FORM, Form(), 100, word(3, 3)),
    "an unknown bit": (UNKNOWN_FORM, Form(), 100, word(3, 0x400)),
    "8 bits of another type than fp32": (UNKNOWN_FORM, Form(), 100, word(3, 0x201)),
    "compressed twice": (UNKNOWN_FORM, Form(), 100, word(3, 0x300)),
    "an unknown parameter": (UNKNOWN_FORM, Form(), 100, word(4, 3)),
    "both": (BAD_RANGE | UNKNOWN_FORM, Form(), 100, lambda tasklet, words: words.__setitem__(slice(1, 4), [9, 8, 7])),
    # Any word of a header that has a meaning, and is not what the run's arguments make it.
    **{
        f"sparse {index}": (BAD_HEADER, SPARSE_BF16, 70_000, partial(add, index=index, added=64 if index == 4 else 1))
        for index in range(9)
    },
    **{f"8 bits {index}": (BAD_HEADER, BLOCK_SCALED, 70_000, partial(add, index=index)) for index in range(8)},
    "sparse for 8 bits": (BAD_HEADER, SPARSE, 100, word(3, BLOCK_SCALED.gradient_word)),
    "8 bits for sparse": (BAD_HEADER, BLOCK_SCALED, 100, word(3, SPARSE.gradient_word)),
    # A header may not promise more values than there are elements, even if all the rest fits.
    "more values than elements": (BAD_HEADER, SPARSE, 10, more_values_than_elements),
    # Counts that do not sum to the header's are found before anything is written, wrapping sums too.
    **{
        f"counts {change}": (WRONG_COUNTS, COUNTED, 70_000, partial(count, change=change))
        for change in (1, -1, 2**32 - 5)
    },
}


@RULES
@pytest.mark.parametrize("case", REFUSED)
def test_refused(sequential: Library, step: Any, case: str) -> None:
    """The status says why; nothing else is written, and no checksum of state is claimed."""
    errors, form, numel, spoil = REFUSED[case]
    tasklet = make_tasklet(step, numel, form)
    words = tasklet.words(0, numel)
    spoil(tasklet, words)
    memory = [tasklet.gradient, *tasklet.arrays, tasklet.parameter]
    before = [buffer.copy() for buffer in memory]
    status = tasklet.run_words(sequential, words)
    assert all(map(np.array_equal, memory, before)) and status["errors"] == errors
    sums = [status[word] for word in STATUS_WORDS[4:]]
    assert not any(sums[:9] if form.is_compressed else sums)


BAD_INDICES = {
    # In the second block, of 1,000 elements: indices, and which of them are dropped.
    "descending": ([3, 9, 7, 10], [2]),
    "twice the same": ([3, 9, 9, 10], [2]),
    "behind the end": ([3, 999, 1000, 65_535], [2, 3]),
    "behind the end and back": ([3, 1000, 4, 5], [1]),
    "all but the first": ([900, 899, 898, 897], [1, 2, 3]),
}


@RULES
@pytest.mark.parametrize("case", BAD_INDICES)
def test_bad_indices(sequential: Library, step: Any, case: str) -> None:
    """Bad indices are reported and dropped, one by one; everything else is updated."""
    indices, dropped = BAD_INDICES[case]
    numel, values = BLOCK + 1_000, np.arange(1, 7, dtype=np.float32)
    positions = np.array([1, 2, *(BLOCK + index for index in indices)])
    good = [number for number in range(6) if number - 2 not in dropped]
    sound, broken = (make_tasklet(step, numel, SPARSE) for _ in range(2))
    sound.hold(build(positions[good], values[good], numel, FLOAT32)).run(sequential)

    positions[2:] = BLOCK + np.arange(4)
    broken.hold(build(positions, values, numel, FLOAT32)).gradient[128:].view(np.uint16)[2:6] = indices
    assert broken.run_words(sequential, broken.words(0, numel))["errors"] == BAD_INDEX
    np.testing.assert_array_equal(broken.arrays, sound.arrays)


NUMEL_OF_CODES = 17_000
# Where a byte is in the payload, what it becomes, and the elements that it concerns: an exponent is of a block.
BAD_CODES = [
    *(
        (64 + block, exponent, block * 256, min(block * 256 + 256, NUMEL_OF_CODES))
        for block, exponent in itertools.product([0, 3, 63, 64, 66], [0, 249, 255])
    ),
    *((192 + element, 0x80, element, element + 1) for element in (0, 63, 64, 5_003, 16_384, NUMEL_OF_CODES - 1)),
]


@RULES
@pytest.mark.parametrize(("byte", "value", "first", "last"), BAD_CODES)
def test_bad_codes(sequential: Library, step: Any, byte: int, value: int, first: int, last: int) -> None:
    """A bad exponent makes zeros of its block; the code -128, which does not exist, is taken for zero.

    Everything else is updated. Runs over other elements report nothing.
    """
    codes = block_scaled_codes(make_tasklet(step, NUMEL_OF_CODES, Form(), seed=3).dense)
    sound, broken = (make_tasklet(step, NUMEL_OF_CODES, BLOCK_SCALED) for _ in range(2))
    broken.hold(codes.payload(), codes.values).gradient[byte] = value
    assert broken.run_words(sequential, broken.words(0, NUMEL_OF_CODES))["errors"] == BAD_CODE
    codes.codes[first:last] = 0
    sound.hold(codes.payload(), codes.values).run(sequential)
    np.testing.assert_array_equal(broken.arrays, sound.arrays)
    for begin, end, errors in ((0, first, 0), (last, NUMEL_OF_CODES, 0), (last - 1, last, BAD_CODE)):
        assert broken.run_words(sequential, broken.words(begin, end))["errors"] == errors


@RULES
def test_padding_of_codes_is_not_looked_at(sequential: Library, step: Any) -> None:
    """Padding of codes affects nothing but checksums."""
    tasklet = make_tasklet(step, 1_000, BLOCK_SCALED)
    tasklet.gradient[64 + 4 : 128] = 0
    tasklet.gradient[128 + 1_000 :] = 0x80
    assert tasklet.run_words(sequential, tasklet.words(0, 1_000))["errors"] == 0


# ---- torch.optim

START = 0.3
SGD = partial(torch.optim.SGD, lr=1e-2, weight_decay=0.1)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, maximize=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2, lr_decay=0.05, weight_decay=0.1, initial_accumulator_value=START),
    "SGD": partial(SGD, momentum=0.9, dampening=0.2),
    "SGD with Nesterov momentum": partial(SGD, momentum=0.9, nesterov=True),
    "SGD without momentum": SGD,
    **{
        f"RMSprop with momentum {momentum}, centered {centered}": partial(
            torch.optim.RMSprop, lr=1e-2, momentum=momentum, centered=centered, weight_decay=0.1, maximize=centered
        )
        for momentum in (0.0, 0.9)
        for centered in (False, True)
    },
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_optimizers(sequential: Library, name: str) -> None:
    """Fifty steps stay within rounding of torch.optim, and equal numpy's bit for bit all the way."""
    expected = torch.nn.Parameter(torch.zeros(3_001))
    optimizer = OPTIMIZERS[name]([expected])
    rule = rule_for(optimizer)

    def step_of(number: int) -> Any:
        return rule.scalars(rule.snapshot(optimizer.param_groups[0]), step=number, gradient_scale=1.0)

    tasklet = make_tasklet(step_of(1), 3_001, Form())
    master, *others = (array.view(np.float32)[: tasklet.numel] for array in tasklet.arrays)
    for array in others:
        array[:] = START if name == "Adagrad" else 0
    expected.data = torch.from_numpy(master.copy())
    random = np.random.default_rng(5)
    for number in range(1, 51):
        tasklet.dense = random.standard_normal(tasklet.numel).astype(np.float32)
        tasklet.gradient[: tasklet.dense.nbytes] = tasklet.dense.view(np.uint8)
        expected.grad = torch.from_numpy(tasklet.dense.copy())
        optimizer.step()
        tasklet.run(sequential, step=step_of(number))
    np.testing.assert_allclose(master, expected.detach().numpy(), rtol=2e-5, atol=2e-6)
