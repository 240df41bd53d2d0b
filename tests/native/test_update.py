from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, strategies as st

from lightning_smartinfinity.native import DType, Operation, UpdateStep, accumulate, crc32c, sum_of_squares
from tests.helpers.golden import (
    ARRAYS,
    DTYPES,
    STEPS,
    Bits,
    Floats,
    assert_all_same_bits,
    assert_same_bits,
    decode,
    encode,
    expected_state,
    random_arrays,
)
from tests.helpers.native_testing import (
    InstructionSet,
    crc32c_by,
    crc32c_combine,
    crc32c_widths,
    select_instruction_set,
    supported_instruction_sets,
)
from tests.native.stored import Run, StoredState

ONE_OF_EACH = ["adam_half", "adagrad_decayed", "sgd_nesterov", "rmsprop"]


def stored(folder: Path, step: UpdateStep, numel: int) -> StoredState:
    """Return the state of a partition with the arrays of the step's rule."""
    return StoredState(folder, numel, num_arrays=len(ARRAYS[type(step)]))


def update(
    folder: Path,
    step: UpdateStep,
    arrays: tuple[Floats, ...],
    *,
    dtypes: tuple[DType, DType] = (DType.FLOAT32, DType.FLOAT32),
) -> tuple[Bits, ...]:
    """Return the parameter, the master and the rule's other arrays after one step of the pipeline."""
    gradient = encode(arrays[0], dtypes[0])
    parameter = encode(np.full_like(arrays[0], -7), dtypes[1])
    with stored(folder, step, len(gradient)) as state:
        state.write(*arrays[1:])
        run = Run(0, len(gradient), 0, gradient, dtypes[0], parameter, dtypes[1])
        assert state.work(Operation.UPDATE, [run], [step]) is None
        return (parameter, *state.read())


@pytest.mark.parametrize(
    ("name", "gradient_dtype", "dtype"),
    [
        *((name, DType.FLOAT32, DType.FLOAT32) for name in STEPS),
        *((name, *pair) for name in ["adamw", *ONE_OF_EACH] for pair in itertools.product(DTYPES, DTYPES)),
    ],
)
def test_numpy_reference(
    instruction_set: InstructionSet, tmp_path: Path, name: str, gradient_dtype: DType, dtype: DType
) -> None:
    """Every instruction set gives numpy's fp32 bits, with subnormals flushed, and NaN and infinity included.

    A 16-bit gradient is widened exactly. A 16-bit parameter is the master rounded as in torch.
    """
    for special in (False, True):
        arrays = random_arrays(STEPS[name], 20_011, seed=1, special=special)
        parameter, *state = update(tmp_path, STEPS[name], arrays, dtypes=(gradient_dtype, dtype))
        assert_all_same_bits(state, expected_state(STEPS[name], arrays, gradient_dtype))
        assert_same_bits(decode(parameter, dtype), decode(encode(state[0], dtype), dtype))


@pytest.mark.parametrize("name", ["adam", "adagrad_decayed", "sgd_dampened"])
@pytest.mark.parametrize("numel", [1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 65, 127, 1023, 12287, 12288, 12289])
def test_lengths(tmp_path: Path, numel: int, name: str) -> None:
    """For any length, even shorter than a register, all instruction sets give numpy's bits."""
    arrays = random_arrays(STEPS[name], numel, seed=numel, special=True)
    expected = expected_state(STEPS[name], arrays)
    for choice in supported_instruction_sets():
        select_instruction_set(choice)
        _, *state = update(tmp_path, STEPS[name], arrays)
        assert_all_same_bits(state, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["adamw", *ONE_OF_EACH])
def test_unaligned_segments(instruction_set: InstructionSet, tmp_path: Path, dtype: DType, name: str) -> None:
    """Segments may begin at any element and their memory at any item. Nothing beside them is written."""
    numel, shift = 1_000, 3
    arrays = random_arrays(STEPS[name], numel, seed=3, special=False)
    gradient = encode(np.concatenate([np.zeros(shift, np.float32), arrays[0]]), dtype)
    parameter = encode(np.full(numel + 2 * shift, -7, np.float32), dtype)
    untouched = parameter[0]
    runs = [
        Run(first, last - first, 0, gradient[shift + first :], dtype, parameter[shift + first :], dtype)
        for first, last in itertools.pairwise([0, 1, 2, 5, 6, 23, 24, 400, 401, 999, 1000])
    ]
    with stored(tmp_path, STEPS[name], numel) as state:
        state.write(*arrays[1:])
        assert state.work(Operation.UPDATE, runs, [STEPS[name]]) is None
        found = state.read()
    expected = expected_state(STEPS[name], arrays, dtype)
    assert_all_same_bits(found, expected)
    assert_same_bits(parameter[shift:-shift], encode(expected[0], dtype))
    assert (parameter[:shift] == untouched).all() and (parameter[-shift:] == untouched).all()


def test_words_are_the_scalars_in_the_order_of_a_kernel() -> None:
    """``words`` holds a kernel's scalars in its order, as the bits of their fp32."""
    orders = {
        "adamw": "gradient_scale one_minus_beta1 beta2 one_minus_beta2 decay l2 step_size "
        "inverse_sqrt_bias_correction2 eps",
        "adagrad_decayed": "gradient_scale weight_decay step_size eps",
        "sgd_nesterov": "gradient_scale weight_decay buffer_coefficient gradient_coefficient nesterov_momentum lr",
        "rmsprop": "gradient_scale weight_decay alpha one_minus_alpha eps momentum centered lr",
    }
    for name, order in orders.items():
        scalars = np.array([getattr(STEPS[name], field) for field in order.split()], np.float32)
        assert STEPS[name].words == scalars.view(np.uint32).tolist()


# ---- conversions of 16-bit types are exact on compute threads, although these flush subnormals

TORCH = {DType.FLOAT32: torch.float32, DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}
EVERY_16_BIT_VALUE = np.arange(1 << 16, dtype=np.uint16)


def float_patterns() -> npt.NDArray[np.float32]:
    """Return random bit patterns, and every boundary of 16-bit rounding with its neighbours."""
    # Values around all fp16 and bf16 values and around the halves between them.
    with np.errstate(all="ignore"):
        half = EVERY_16_BIT_VALUE.view(np.float16).astype(np.float32).view(np.uint32)
    patterns = [
        np.random.default_rng(0).integers(0, 1 << 32, 300_000, dtype=np.uint32),
        *(half + np.uint32(delta & 0xFFFFFFFF) for delta in (-1, 0, 1, (1 << 12) - 1, 1 << 12, (1 << 12) + 1)),
        *((EVERY_16_BIT_VALUE.astype(np.uint32) << np.uint32(16)) + np.uint32(d) for d in (0x7FFF, 0x8000, 0x8001)),
    ]
    return np.concatenate(patterns).view(np.float32)


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_conversions_of_16_bits(instruction_set: InstructionSet, tmp_path: Path, dtype: DType) -> None:
    """All 65536 patterns are widened exactly, and fp32 is rounded like in torch: subnormals are kept, NaN stays NaN."""
    with StoredState(tmp_path, len(EVERY_16_BIT_VALUE), tasklet_numel=20_000, num_arrays=1) as state:
        run = Run(0, len(EVERY_16_BIT_VALUE), parameter=EVERY_16_BIT_VALUE, parameter_dtype=dtype)
        assert state.work(Operation.WRITE, [run]) is None
        (found,) = state.read()
    assert_same_bits(found, torch.from_numpy(EVERY_16_BIT_VALUE.view(np.int16)).view(TORCH[dtype]).float().numpy())
    values = float_patterns()
    parameter = np.zeros(len(values), np.int16)
    with StoredState(tmp_path, len(values), tasklet_numel=20_000, num_arrays=1) as state:
        state.write(values)
        run = Run(0, len(values), parameter=parameter, parameter_dtype=dtype)
        assert state.work(Operation.READ, [run]) is None
    assert same_bits(torch.from_numpy(parameter).view(TORCH[dtype]), torch.from_numpy(values).to(TORCH[dtype]))


# ---- sums of gradients and of their squares: the bits of torch, and the same bits by every instruction set


# Lengths around the width of the registers and around the number of elements squared at a time.
NUMELS = [0, 1, 31, 32, 33, 1023, 1024, 1025, 5_000]
# Values whose sums overflow or become subnormal, subnormals and signed zeros.
EDGES = [0.0, -0.0, 1e-40, -3e-39, 6e-8, 6e-5, 65_504.0, 65_520.0, 3.3e38, -3.3e38]


def values(numel: int, dtype: DType, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(numel, generator=generator)
    edges = torch.tensor(EDGES)[torch.randint(len(EDGES), (numel,), generator=generator)]
    return torch.where(torch.rand(numel, generator=generator) < 0.2, edges, drawn).to(TORCH[dtype])


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether the bits are equal. All NaNs count as equal."""
    whole = {2: torch.int16, 4: torch.int32}[left.element_size()]
    return bool(((left.view(whole) == right.view(whole)) | (left.isnan() & right.isnan())).all())


def squares(values: torch.Tensor, dtype: DType) -> float:
    return sum_of_squares(values.data_ptr(), values.numel(), dtype)


@pytest.mark.parametrize(("gradient_dtype", "dtype"), list(itertools.product(TORCH, TORCH)))
def test_sums_are_torchs(instruction_set: InstructionSet, gradient_dtype: DType, dtype: DType) -> None:
    """Writing or adding many gradients in one call gives torch's bits, and the squares of a separate pass."""
    gradients = [values(numel, gradient_dtype, numel) for numel in NUMELS * 2]
    sums = [values(numel, dtype, numel + 1) for numel in NUMELS * 2]
    adds = [False] * len(NUMELS) + [True] * len(NUMELS)
    expected = [sum_.clone() for sum_ in sums]
    for gradient, target, add in zip(gradients, expected, adds, strict=True):
        target.add_(gradient) if add else target.copy_(gradient)
    found = accumulate(
        [gradient.data_ptr() for gradient in gradients],
        [sum_.data_ptr() for sum_ in sums],
        [gradient.numel() for gradient in gradients],
        adds,
        gradient_dtype,
        dtype,
    )
    for sum_, target, square in zip(sums, expected, found, strict=True):
        assert same_bits(sum_, target) and repr(square) == repr(squares(target, dtype))


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("scale", ["one", "largest", "smallest"])
def test_squares_do_not_depend_on_the_instruction_set(dtype: DType, scale: str) -> None:
    """The sum is within rounding of the exact one: the largest values do not overflow, and subnormals count."""
    info = torch.finfo(TORCH[dtype])
    factor = {"one": 1.0, "largest": info.max, "smallest": info.smallest_normal / 8}[scale]
    for numel in (0, 1, 31, 32, 33, 1000, 100_003):
        drawn = np.random.default_rng(numel).uniform(-1, 1, numel) * factor
        content, sums = torch.from_numpy(drawn).to(TORCH[dtype]), set()
        for choice in supported_instruction_sets():
            select_instruction_set(choice)
            sums.add(squares(content, dtype))
        assert [*sums] == [pytest.approx(math.fsum(x * x for x in content.tolist()), rel=1e-14, abs=0)]


@pytest.mark.parametrize("dtype", TORCH)
def test_one_element_that_is_not_finite(instruction_set: InstructionSet, dtype: DType) -> None:
    """One non-finite element anywhere makes the sum of squares non-finite."""
    for poison, index in itertools.product((math.inf, -math.inf, math.nan), (0, 17, 511, 512, 530)):
        content = torch.ones(531, dtype=TORCH[dtype])
        content[index] = poison
        assert not math.isfinite(squares(content, dtype))


@pytest.mark.parametrize("lengths", [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)])
def test_lists_of_different_lengths_are_refused(lengths: tuple[int, int, int, int]) -> None:
    """Lists of different lengths are refused."""
    lists = ([value] * length for value, length in zip((0, 0, 1, False), lengths, strict=True))
    with pytest.raises(ValueError, match="as many"):
        accumulate(*lists, DType.FLOAT32, DType.FLOAT32)


# ---- checksums


DATA = np.random.default_rng(3).integers(0, 256, 70_000, dtype=np.uint8)
WIDTHS = crc32c_widths()


def checksum(data: bytes, value: int = 0) -> int:
    return crc32c(np.frombuffer(data, np.uint8).ctypes.data, len(data), value)


def part(first: int, last: int, value: int, width: int) -> int:
    """Return the checksum of a part of ``DATA``."""
    return crc32c_by(DATA.ctypes.data + first, last - first, value, width)


def bitwise(data: bytes) -> int:
    """Return the checksum by its definition, one bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_against_the_definition(instruction_set: InstructionSet) -> None:
    """The check value, and lengths and offsets around the sizes of the loops, whole and in two pieces, are right."""
    assert (checksum(b""), checksum(b"123456789")) == (0, 0xE3069283)
    data = np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8).tobytes()
    for offset in (0, 1, 3, 7):
        for numel in (1, 7, 8, 9, 255, 767, 768, 769, 3000, 12_287, 12_288, 12_289, 13_100):
            piece, cut = data[offset : offset + numel], numel // 3
            assert checksum(piece) == checksum(piece[cut:], checksum(piece[:cut])) == bitwise(piece)


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_each_length(width: int) -> None:
    """Every width agrees with the table for each length and alignment."""
    for numel in [*range(1200), *range(1200, 4000, 37)]:
        first = numel % 64
        assert part(first, first + numel, numel, width) == part(first, first + numel, numel, 0)


@pytest.mark.parametrize("width", WIDTHS[1:])
@given(cuts=st.lists(st.integers(0, len(DATA)), max_size=6), value=st.integers(0, 2**32 - 1))
def test_any_pieces(width: int, cuts: list[int], value: int) -> None:
    """Every width agrees with the table however the data is cut, and for any initial value."""
    borders = sorted([*cuts, 0, len(DATA)])
    crc = value
    for first, last in itertools.pairwise(borders):
        crc = part(first, last, crc, width)
    assert crc == part(0, len(DATA), value, 0)


@given(sizes=st.lists(st.integers(0, 20_000), min_size=1, max_size=4))
def test_pieces_combine(sizes: list[int]) -> None:
    """The checksums of pieces, some of them empty, combine to that of the whole."""
    ends = list(itertools.accumulate(sizes, initial=0))
    combined = 0
    for first, last in itertools.pairwise(ends):
        combined = crc32c_combine(combined, part(first, last, 0, 0), last - first)
    assert combined == part(0, ends[-1], 0, 0)
