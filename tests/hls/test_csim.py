"""Compares the kernels in C simulation with numpy, bit for bit, and with torch.optim."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from hls.description import ERROR_BITS
from lightning_smartinfinity.native import AdagradStep, AdamStep, DType, RmspropStep, SgdStep
from tests.helpers.compressed import Codes, block_scaled_codes
from tests.helpers.golden import DTYPES, STEPS, STEPS_OF_RULES, decode, encode
from tests.helpers.native_testing import crc32c_combine
from tests.helpers.payload import BLOCK, Payload, build, expand
from tests.helpers.update_rules import Floats, adagrad_step, adam_step, rmsprop_step, sgd_step
from tests.hls.simulation import Library, aligned
from tests.hls.tasklet import FORMS, Form, Tasklet, make_tasklet

RULES = pytest.mark.parametrize("step", [steps[0] for steps in STEPS_OF_RULES.values()], ids=STEPS_OF_RULES)
LENGTHS = [0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 1000, 1023, 1024, 1025, 2047]

FLOAT32 = DType.FLOAT32
SPARSE = Form(FLOAT32, FLOAT32, 0.0)
BLOCK_SCALED = Form(FLOAT32, DType.BFLOAT16, block_scaled=True)
BAD_INDEX, BAD_HEADER, BAD_RANGE, UNKNOWN_FORM, WRONG_COUNTS, BAD_CODE = ERROR_BITS.values()


@pytest.mark.parametrize("name", STEPS)
def test_every_form_of_every_step(sequential: Library, name: str) -> None:
    """Every form of gradient and parameter gives numpy's bits, with subnormals, infinities and NaNs."""
    for seed, form in enumerate(FORMS):
        make_tasklet(STEPS[name], 1_531, form, seed=seed, special=True).run(sequential)


def test_the_caller_keeps_its_subnormals(sequential: Library) -> None:
    """Only the kernels flush subnormals; the thread that calls them keeps its own."""
    make_tasklet(STEPS["sgd"], 100, FORMS[0], seed=0).run(sequential)
    assert np.float32(1e-30) * np.float32(1e-10) > 0


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
    combined = [0, 0]
    for index, (first, last) in enumerate(itertools.pairwise(edges)):
        other = type(step)(**{**_scalars(step), "gradient_scale": 1.0 + index})
        status = tasklet.run(sequential, first, last, step=other)
        for place, (word, item) in enumerate([(9, 2), (10, 4)]):
            combined[place] = crc32c_combine(combined[place], status.words[word], (last - first) * item)
    whole = tasklet.run(sequential, active=False)
    assert combined == [whole.words[9], whole.words[10]]


@RULES
def test_inactive(sequential: Library, step: Any) -> None:
    """An inactive run changes nothing but padding, and writes the parameter."""
    for form in FORMS:
        tasklet = make_tasklet(step, 1_500, form, special=True)
        tasklet.gradient = tasklet.gradient[:0]  # an inactive run needs none
        tasklet.run(sequential, 40, 1_500, active=False)


@RULES
def test_padding_is_zeroed(sequential: Library, step: Any) -> None:
    """Padding is zero, not what lay there or what a rule makes of zeros, which is NaN for Adagrad without eps."""
    tasklet = make_tasklet(step, 1_029, Form(DType.FLOAT32, DType.FLOAT16))
    for array in tasklet.arrays:
        array.view(np.float32)[1_029:] = 0
    tasklet.gradient.view(np.float32)[1_029:] = 0
    for first in (0, 1_028):
        tasklet.run(sequential, first)
        assert all(not array.view(np.float32)[1_029:].any() for array in tasklet.arrays)
        assert not tasklet.parameter.view(np.uint16)[1_029:].any()


@RULES
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name.lower())
def test_blocks_of_a_compressed_gradient(sequential: Library, step: Any, dtype: DType) -> None:
    """Blocks may keep none, some or all of their elements; ranges may lie within, at the edges of or across blocks."""
    numel = 3 * BLOCK + 77
    random = np.random.default_rng(11)
    kept = np.concatenate([[0, 5, BLOCK - 1], 2 * BLOCK + np.arange(BLOCK), [3 * BLOCK + 76]])
    values = encode(random.standard_normal(kept.size).astype(np.float32), dtype)
    payload = build(kept, values, numel, dtype)
    ranges = [(0, numel), (BLOCK - 1, BLOCK + 1), (2 * BLOCK, 3 * BLOCK), (BLOCK + 7, BLOCK + 9), (numel - 1, numel)]
    tasklet = _with_payload(make_tasklet(step, numel, Form(dtype, DType.BFLOAT16, 0.0)), payload)
    for first, last in ranges:
        tasklet.run(sequential, first, last)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=["fp16", "bf16"])
@pytest.mark.parametrize("ratio", [None, 1.0], ids=["dense", "compressed"])
def test_every_16_bit_gradient(sequential: Library, dtype: DType, ratio: float | None) -> None:
    """All 65,536 patterns widen exactly, fp16's subnormals too."""
    patterns = np.arange(65_536, dtype=np.uint16).view(np.int16)
    tasklet = make_tasklet(STEPS["sgd_first"], 65_536, Form(dtype, DType.FLOAT32, ratio))
    tasklet.dense = decode(patterns, dtype)
    if ratio is None:
        tasklet.gradient.view(np.int16)[:] = patterns
    else:
        _with_payload(tasklet, build(np.arange(65_536), patterns, 65_536, dtype))
    tasklet.run(sequential)


def test_every_code(sequential: Library) -> None:
    """All scales times all codes give numpy's bits."""
    codes = Codes(np.arange(1, 249, dtype=np.uint8), np.tile(np.arange(-128, 128, dtype=np.int8), 248))
    codes.codes[::256] = 0  # in place of -128, which is no code
    _with_codes(make_tasklet(STEPS["sgd_first"], codes.codes.size, BLOCK_SCALED), codes).run(sequential)


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

REFUSED: dict[str, tuple[int, Callable[[list[int]], object]]] = {
    "first behind last": (BAD_RANGE, lambda words: words.__setitem__(1, words[2] + 1)),
    "last behind the end": (BAD_RANGE, lambda words: words.__setitem__(2, words[0] + 1)),
    "more than the card holds": (BAD_RANGE, lambda words: words.__setitem__(0, 2**29 + 1)),
    "an unknown gradient": (UNKNOWN_FORM, lambda words: words.__setitem__(3, 3)),
    "an unknown bit": (UNKNOWN_FORM, lambda words: words.__setitem__(3, 0x400)),
    "8 bits of another type than fp32": (UNKNOWN_FORM, lambda words: words.__setitem__(3, 0x201)),
    "compressed twice": (UNKNOWN_FORM, lambda words: words.__setitem__(3, 0x300)),
    "an unknown parameter": (UNKNOWN_FORM, lambda words: words.__setitem__(4, 3)),
    "both": (BAD_RANGE | UNKNOWN_FORM, lambda words: words.__setitem__(slice(1, 4), [9, 8, 7])),
}


@RULES
@pytest.mark.parametrize("case", REFUSED)
def test_refused_arguments(sequential: Library, step: Any, case: str) -> None:
    """The status says why; nothing else is written, and no checksum is claimed."""
    errors, change = REFUSED[case]
    tasklet = make_tasklet(step, 100, Form())
    words = tasklet.words(0, 100)
    change(words)
    assert _refused(tasklet, sequential, words) == (errors, (0,) * 12)


@RULES
@pytest.mark.parametrize("word", range(9))
def test_bad_header(sequential: Library, step: Any, word: int) -> None:
    """A payload is refused if any word of its header is not what the run's arguments make it."""
    tasklet = make_tasklet(step, 70_000, Form(DType.BFLOAT16, DType.BFLOAT16, 0.01))
    tasklet.gradient.view(np.uint32)[word] += 1 if word != 4 else 64
    errors, checksums = _refused(tasklet, sequential, tasklet.words(0, 70_000))
    assert errors == BAD_HEADER and not any(checksums[:9])


@RULES
@pytest.mark.parametrize("word", range(8))
def test_bad_header_of_8_bits(sequential: Library, step: Any, word: int) -> None:
    """A payload of 8 bits is refused if any word of its header that has a meaning is wrong."""
    tasklet = make_tasklet(step, 70_000, BLOCK_SCALED)
    tasklet.gradient.view(np.uint32)[word] += 1
    errors, checksums = _refused(tasklet, sequential, tasklet.words(0, 70_000))
    assert errors == BAD_HEADER and not any(checksums[:9])


@RULES
def test_one_payload_for_the_other(sequential: Library, step: Any) -> None:
    """A sparse gradient is refused as a block-scaled one, and the reverse."""
    sparse, scaled = make_tasklet(step, 100, SPARSE), make_tasklet(step, 100, BLOCK_SCALED)
    sparse.form, scaled.form = scaled.form, sparse.form
    for tasklet in (sparse, scaled):
        assert _refused(tasklet, sequential, tasklet.words(0, 100))[0] == BAD_HEADER


@RULES
def test_more_values_than_elements(sequential: Library, step: Any) -> None:
    """A header may not promise more values than there are elements, even if all the rest fits."""
    tasklet = make_tasklet(step, 10, SPARSE)
    payload = build(np.arange(11) % 10, np.ones(11, np.float32), 10, FLOAT32)
    tasklet.gradient = aligned(len(payload.tobytes()))
    tasklet.gradient[:] = np.frombuffer(payload.tobytes(), np.uint8)
    assert _refused(tasklet, sequential, tasklet.words(0, 10))[0] == BAD_HEADER


@RULES
@pytest.mark.parametrize("change", [1, -1, 2**32 - 5])
def test_wrong_counts(sequential: Library, step: Any, change: int) -> None:
    """Counts that do not sum to the header's are found before anything is written, wrapping sums too."""
    tasklet = make_tasklet(step, 70_000, Form(DType.FLOAT32, DType.BFLOAT16, 0.01))
    counts = tasklet.gradient[64:72].view(np.uint32)
    if change > 2**31:
        counts[:] = [change, int(counts.sum()) + 5]
    else:
        counts[1] = int(counts[1]) + change
    errors, checksums = _refused(tasklet, sequential, tasklet.words(0, 70_000))
    assert errors == WRONG_COUNTS and not any(checksums[:9])


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
    sound = _with_payload(make_tasklet(step, numel, SPARSE), build(positions[good], values[good], numel, FLOAT32))
    sound.run(sequential)

    positions[2:] = BLOCK + np.arange(4)
    broken = _with_payload(make_tasklet(step, numel, SPARSE), build(positions, values, numel, FLOAT32))
    broken.gradient[128:].view(np.uint16)[2:6] = indices
    assert broken.run_words(sequential, broken.words(0, numel)).errors == BAD_INDEX
    for found, wanted in zip(broken.arrays, sound.arrays, strict=True):
        np.testing.assert_array_equal(found, wanted)


NUMEL_OF_CODES = 17_000
NO_EXPONENT = [0, 249, 255]


@RULES
@pytest.mark.parametrize("block", [0, 3, 63, 64, 66])
def test_bad_exponent(sequential: Library, step: Any, block: int) -> None:
    """A bad exponent makes zeros of its block; everything else is updated. Runs over other blocks report nothing."""
    first, last = block * 256, min(block * 256 + 256, NUMEL_OF_CODES)
    for exponent in NO_EXPONENT:
        broken = _bad_codes(sequential, step, 64 + block, exponent, slice(first, last))
        for begin, end in ((0, first), (last, NUMEL_OF_CODES)):
            assert broken.run_words(sequential, broken.words(begin, end)).errors == 0
        assert broken.run_words(sequential, broken.words(last - 1, last)).errors == BAD_CODE


@RULES
@pytest.mark.parametrize("element", [0, 63, 64, 5_003, 16_384, NUMEL_OF_CODES - 1])
def test_bad_code(sequential: Library, step: Any, element: int) -> None:
    """The code -128, which does not exist, is taken for zero. Runs over its neighbours in the beat report nothing."""
    broken = _bad_codes(sequential, step, 192 + element, 0x80, slice(element, element + 1))
    for begin, end in ((0, element), (element + 1, NUMEL_OF_CODES)):
        assert broken.run_words(sequential, broken.words(begin, end)).errors == 0
    assert broken.run_words(sequential, broken.words(element, element + 1)).errors == BAD_CODE


def _bad_codes(sequential: Library, step: Any, byte: int, value: int, zeros: slice) -> Tasklet:
    """Update all with a byte of the payload changed, compare with zeros there, and return the tasklet."""
    codes = block_scaled_codes(make_tasklet(step, NUMEL_OF_CODES, Form(), seed=3).dense)
    broken = _with_codes(make_tasklet(step, NUMEL_OF_CODES, BLOCK_SCALED), codes)
    broken.gradient[byte] = value
    assert broken.run_words(sequential, broken.words(0, NUMEL_OF_CODES)).errors == BAD_CODE
    codes.codes[zeros] = 0
    sound = _with_codes(make_tasklet(step, NUMEL_OF_CODES, BLOCK_SCALED), codes)
    sound.run(sequential)
    for found, wanted in zip(broken.arrays, sound.arrays, strict=True):
        np.testing.assert_array_equal(found, wanted)
    return broken


@RULES
def test_padding_of_codes_is_not_looked_at(sequential: Library, step: Any) -> None:
    """Padding of codes affects nothing but checksums."""
    tasklet = make_tasklet(step, 1_000, BLOCK_SCALED)
    tasklet.gradient[64 + 4 : 128] = 0
    tasklet.gradient[128 + 1_000 :] = 0x80
    assert tasklet.run_words(sequential, tasklet.words(0, 1_000)).errors == 0


# ---- torch.optim

LR, DECAY, START = 1e-2, 0.1, 0.3
Optimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def _adam(number: int, **changes: float) -> AdamStep:
    return adam_step(
        one_minus_beta1=0.1,
        beta2=0.99,
        one_minus_beta2=0.01,
        step_size=LR / (1 - 0.9**number),
        inverse_sqrt_bias_correction2=(1 - 0.99**number) ** -0.5,
        **changes,
    )


def _adagrad(number: int) -> AdagradStep:
    return adagrad_step(weight_decay=DECAY, step_size=LR / (1 + (number - 1) * 0.05))


def _sgd(number: int, **changes: float) -> SgdStep:
    first = {"buffer_coefficient": 0.0, "gradient_coefficient": 1.0} if number == 1 else {}
    return sgd_step(lr=LR, weight_decay=DECAY, **{**changes, **first})


def _rmsprop(number: int, *, momentum: float, centered: bool) -> RmspropStep:
    scale = -1.0 if centered else 1.0
    return rmsprop_step(lr=LR, momentum=momentum, centered=float(centered), weight_decay=DECAY, gradient_scale=scale)


OPTIMIZERS: dict[str, tuple[Optimizer, Callable[[int], Any]]] = {
    "AdamW": (
        lambda params: torch.optim.AdamW(params, lr=LR, betas=(0.9, 0.99), weight_decay=DECAY),
        lambda number: _adam(number, decay=1 - LR * DECAY, l2=0.0),
    ),
    "Adam": (
        lambda params: torch.optim.Adam(params, lr=LR, betas=(0.9, 0.99), weight_decay=DECAY, maximize=True),
        lambda number: _adam(number, decay=1.0, l2=DECAY, gradient_scale=-1.0),
    ),
    "Adagrad": (
        lambda params: torch.optim.Adagrad(
            params, lr=LR, lr_decay=0.05, weight_decay=DECAY, initial_accumulator_value=START
        ),
        _adagrad,
    ),
    "SGD": (
        lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9, dampening=0.2, weight_decay=DECAY),
        lambda number: _sgd(number, gradient_coefficient=1 - 0.2),
    ),
    "SGD with Nesterov momentum": (
        lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9, nesterov=True, weight_decay=DECAY),
        lambda number: _sgd(number, nesterov_momentum=0.9),
    ),
    "SGD without momentum": (
        lambda params: torch.optim.SGD(params, lr=LR, weight_decay=DECAY),
        lambda number: _sgd(number, buffer_coefficient=0.0),
    ),
    **{
        f"RMSprop with momentum {momentum}, centered {centered}": (
            partial(
                torch.optim.RMSprop, lr=LR, momentum=momentum, centered=centered, weight_decay=DECAY, maximize=centered
            ),
            partial(_rmsprop, momentum=momentum, centered=centered),
        )
        for momentum in (0.0, 0.9)
        for centered in (False, True)
    },
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_optimizers(sequential: Library, name: str) -> None:
    """Fifty steps stay within rounding of torch.optim, and equal numpy's bit for bit all the way."""
    make_optimizer, step_of = OPTIMIZERS[name]
    tasklet = make_tasklet(step_of(1), 3_001, Form())
    master, *others = (array.view(np.float32)[: tasklet.numel] for array in tasklet.arrays)
    for array in others:
        array[:] = START if name == "Adagrad" else 0
    expected = torch.nn.Parameter(torch.from_numpy(master.copy()))
    optimizer = make_optimizer([expected])
    random = np.random.default_rng(5)
    for number in range(1, 51):
        tasklet.dense = random.standard_normal(tasklet.numel).astype(np.float32)
        tasklet.gradient[: tasklet.dense.nbytes] = tasklet.dense.view(np.uint8)
        expected.grad = torch.from_numpy(tasklet.dense.copy())
        optimizer.step()
        tasklet.run(sequential, step=step_of(number))
    np.testing.assert_allclose(master, expected.detach().numpy(), rtol=2e-5, atol=2e-6)


def _scalars(step: Any) -> dict[str, float]:
    names = [name for name in dir(step) if isinstance(getattr(step, name), (int, float)) and not name.startswith("_")]
    return {name: getattr(step, name) for name in names}


def _with_codes(tasklet: Tasklet, codes: Codes) -> Tasklet:
    return _with_content(tasklet, codes.payload(), codes.values)


def _with_payload(tasklet: Tasklet, payload: Payload) -> Tasklet:
    return _with_content(tasklet, payload, expand(payload.tobytes()))


def _with_content(tasklet: Tasklet, payload: Payload, dense: Floats) -> Tasklet:
    content = payload.tobytes()
    tasklet.payload, tasklet.dense = payload, dense
    tasklet.gradient = aligned(len(content))
    tasklet.gradient[:] = np.frombuffer(content, np.uint8)
    return tasklet


def _refused(tasklet: Tasklet, simulation: Library, words: list[int]) -> tuple[int, tuple[int, ...]]:
    """Return error bits and checksums of a run that must leave everything but the status as it is."""
    memory = [tasklet.gradient, *tasklet.arrays, tasklet.parameter]
    before = [buffer.copy() for buffer in memory]
    status = tasklet.run_words(simulation, words)
    for buffer, content in zip(memory, before, strict=True):
        np.testing.assert_array_equal(buffer, content)
    return status.errors, status.checksums
