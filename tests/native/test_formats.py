"""The state formats agree with an independent reference byte for byte."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lightning_smartinfinity.native import BLOCK_BYTES, CELL_NUMEL, TRAILER_BYTES, DType, Identity, Operation
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.pipeline.rules import rule_for
from tests.helpers.golden import Floats, adam, adam_step, assert_all_same_bits, assert_same_bits, random_arrays
from tests.helpers.native_testing import InstructionSet
from tests.native import codecs
from tests.native.codecs import EXP_AVG, EXP_AVG_SQ, Minifloat
from tests.native.stored import JOB, Run, StoredState, align

Bits = npt.NDArray[Any]

BF16, INT8, REMAINDER = 1, 2, 3
FORMATS = {"bf16": BF16, "int8": INT8, "int8_remainder": REMAINDER}
# One element, a whole cell, odd lengths, and borders inside a cell. The last parameter is long.
BORDERS = [1, 256, 300, 301, 302, 511, 512, 1000, 1024, 1300, 1301, 5000]


def stored(folder: Path, numel: int, state_format: int, **options: Any) -> StoredState:
    return StoredState(folder, numel, identity=Identity(job=JOB, rank=3, state_format=state_format), **options)


def regions_of(state_format: int, arrays: list[Floats], borders: list[int], random: Bits | None) -> list[Bits]:
    """Return the regions that store master, exp_avg and exp_avg_sq, rounded stochastically if random bits are given."""
    master, *rest = arrays
    low, high = (None, None) if random is None else (random & 0xFFFF, random >> 16)
    masters = list(codecs.split(master)) if state_format == REMAINDER else [master]
    if state_format == BF16:
        encoded = [
            codecs.bf16_nearest(a) if r is None else codecs.bf16_stochastic(a, r)
            for a, r in zip(rest, (low, high), strict=True)
        ]
        return [array.view(np.uint8) for array in (*masters, *encoded)]
    codes, exponents = [np.empty(len(master), np.uint8) for _ in range(2)], []
    for begin, end in codecs.blocks_of(len(master), borders):
        for index, (code, bits) in enumerate([(EXP_AVG, low), (EXP_AVG_SQ, high)]):
            values = rest[index][begin:end]
            exponents.append(code.exponent_of(values))
            codes[index][begin:end] = code.encode(values, exponents[-1], None if bits is None else bits[begin:end])
    return [array.view(np.uint8) for array in (*masters, *codes, np.array(exponents, np.uint8))]


def wide_state(numel: int, seed: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Return gradient, master and moments over all orders of magnitude, with zeros and subnormals."""
    random = np.random.default_rng(seed)
    g, p, m, v = random_arrays(adam_step(), numel, seed, special=False)
    m = m * np.exp2(random.integers(-30, 3, numel)).astype(np.float32)
    v = v * np.exp2(random.integers(-50, 3, numel)).astype(np.float32)
    for array in (m, v):
        array[random.integers(0, 9, numel) == 0] = 0
        array[random.integers(0, 99, numel) == 0] = 1e-40
    m[random.integers(0, 99, numel) == 0] = -0.0
    m[0] = v[0] = 3.38e38  # which no exponent reaches: it becomes the largest code, alone in its block
    return g, p, m.astype(np.float32), v.astype(np.float32)


@pytest.mark.parametrize("state_format", FORMATS.values(), ids=FORMATS)
def test_written_state(instruction_set: InstructionSet, tmp_path: Path, state_format: int) -> None:
    """Writing rounds fp32 arrays like the reference, and a flipped bit in any region is refused."""
    numel = 12_288 + 700
    _, p, m, v = wide_state(numel, seed=1)
    with stored(tmp_path, numel, state_format, borders=BORDERS) as state:
        state.write(p, m, v)
        assert_all_same_bits(state.regions(), regions_of(state_format, [p, m, v], BORDERS, random=None))
        content, begin = state.paths[0].read_bytes(), state.extent_offset(0, state.place)
        for region, used in enumerate(state.region_bytes_of(0)):
            end = begin + used  # and a flipped bit at the end of any region is refused
            state.paths[0].write_bytes(content[: end - 1] + bytes([content[end - 1] ^ 4]) + content[end:])
            failure = state.work(Operation.READ, [Run(0, numel)])
            assert failure is not None and failure.kind == "checksum"
            assert f"region {region} does not match" in failure.message
            begin += align(used)


@pytest.mark.parametrize(
    ("numel", "offset"),
    [(12_288 + 700, 0), (2_049, 1 << 32), (300, (1 << 40) + 256), *((numel, 0) for numel in (1, 2, 7, 17, 63, 255))],
)
@pytest.mark.parametrize("state_format", FORMATS.values(), ids=FORMATS)
def test_update(instruction_set: InstructionSet, tmp_path: Path, state_format: int, numel: int, offset: int) -> None:
    """An update applies the fp32 formula to the stored values and rounds with the reference's random bits."""
    g, p, m, v = wide_state(numel, seed=2)
    step = adam_step(seed=7)
    parameter = np.zeros(numel, np.uint16)
    with stored(tmp_path, numel, state_format, borders=BORDERS) as state:
        state.write(p, m, v)
        before = state.read()
        state.offset = offset
        run = Run(0, numel, 0, g, parameter=parameter, parameter_dtype=DType.BFLOAT16)
        assert state.work(Operation.UPDATE, [run], [step]) is None
        expected = [np.ascontiguousarray(array) for array in adam(step, g, before)]  # type: ignore[arg-type]
        random = codecs.random_bits(7, offset + np.arange(numel, dtype=np.uint64))
        assert_all_same_bits(state.regions(), regions_of(state_format, expected, BORDERS, random))
    np.testing.assert_array_equal(parameter, codecs.bf16_nearest(expected[0]))


@pytest.mark.parametrize("code", [EXP_AVG, EXP_AVG_SQ], ids=["exp_avg", "exp_avg_sq"])
def test_every_code(tmp_path: Path, code: Minifloat) -> None:
    """Every 8-bit code at every exponent is stored as itself and read as its value."""
    codes = np.arange(256, dtype=np.uint8)
    codes[(codes & (0x7F if code.signed else 0xFF)) == code.nan] = 0
    exponents = range(code.exponents + 2, 255)
    values = np.concatenate([code.decode(codes, exponent) for exponent in exponents])
    index = 1 if code is EXP_AVG else 2
    arrays: list[Floats | None] = [None, None, None]
    arrays[index] = values
    with stored(tmp_path, len(values), INT8) as state:
        state.write(*arrays)
        regions = state.regions()
        np.testing.assert_array_equal(regions[index], np.tile(codes, len(exponents)))
        np.testing.assert_array_equal(regions[3][index - 1 :: 2], np.array(exponents))
        assert_same_bits(state.read()[index], values)


@pytest.mark.parametrize("state_format", FORMATS.values(), ids=FORMATS)
def test_what_is_not_finite(instruction_set: InstructionSet, tmp_path: Path, state_format: int) -> None:
    """Infinity and NaN stay non-finite when written and updated, and their neighbours keep finite values."""
    numel = 300
    g, p, m, v = random_arrays(adam_step(), numel, seed=5, special=False)
    m[7], m[8], v[9], v[10], p[11] = np.inf, np.nan, np.inf, np.nan, np.nan
    with stored(tmp_path, numel, state_format) as state:
        state.write(p, m, v)
        first = state.read()
        assert not np.isfinite(first[1][7:9]).any() and not np.isfinite(first[2][9:11]).any() and np.isnan(first[0][11])
        assert [int((~np.isfinite(array)).sum()) for array in first] == [1, 2, 2]
        if state_format == BF16:
            assert first[1][7] == first[2][9] == np.inf
        g[20] = np.nan
        parameter = np.zeros(numel, np.uint16)
        run = Run(0, numel, 0, g, parameter=parameter, parameter_dtype=DType.BFLOAT16)
        assert state.work(Operation.UPDATE, [run], [adam_step(seed=1)]) is None
        second = state.read()
        assert [bool(np.isnan(array[20])) for array in second] == [True] * 3
        master = (parameter.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(np.isnan(master), np.isnan(second[0]))
        assert np.isfinite(np.delete(np.stack(second), [7, 8, 9, 10, 11, 20], axis=1)).all()


def test_remainders(tmp_path: Path) -> None:
    """Masters survive exactly, except those half-way above an even bf16, which change by one unit of fp32."""
    bits = np.random.default_rng(6).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    bits[::3] = (bits[::3] & 0xFFFF0000) | 0x8000
    bits[:4] = [0x7F7FFFFF, 0xFF7FFFFF, 0x00008000, 0x80018000]
    masters = bits.view(np.float32)
    expected = bits - ((bits & 0x1FFFF) == 0x8000).astype(np.uint32)
    with stored(tmp_path, len(masters), REMAINDER) as state:
        state.write(masters)
        (found, *_) = state.read()
        number = ~np.isnan(masters)
        np.testing.assert_array_equal(found.view(np.uint32)[number], expected[number])
        assert np.isnan(found[~number]).all()
        parameter = np.zeros(len(masters), np.uint16)
        run = Run(0, len(masters), parameter=parameter, parameter_dtype=DType.BFLOAT16)
        assert state.work(Operation.READ, [run]) is None
    np.testing.assert_array_equal(parameter[number], codecs.bf16_nearest(masters)[number])
    assert np.isnan((parameter[~number].astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.parametrize("state_format", FORMATS.values(), ids=FORMATS)
def test_masters_in_parameters_are_not_read(tmp_path: Path, state_format: int) -> None:
    """With the master in the parameter, the stored master is ignored and overwritten."""
    numel = 5000
    g, p, m, v = wide_state(numel, seed=10)
    with stored(tmp_path, numel, state_format, borders=BORDERS) as state:
        state.write(p, m, v)
        before = state.read()
        sixteen = state_format == REMAINDER
        parameter: Bits = codecs.split(p)[0] if sixteen else p.copy()
        dtype = DType.BFLOAT16 if sixteen else DType.FLOAT32
        with open(state.paths[0], "r+b") as file:
            file.seek(state.extent_offset(0, state.place))
            file.write(bytes(state.region_bytes_of(0)[0]))
        runs = [
            Run(0, 1, parameter=parameter, parameter_dtype=dtype),
            Run(1, numel - 1, 0, g[1:], parameter=parameter[1:], parameter_dtype=dtype),
        ]
        step = adam_step(seed=2)
        failure = state.work(Operation.UPDATE, runs, [step], master_in_parameter=True)
        assert failure is None, failure
        after = state.read()
    expected = adam(step, g, before)[0]  # type: ignore[arg-type]
    assert_same_bits(after[0][:1], before[0][:1])
    wanted = codecs.join(*codecs.split(np.ascontiguousarray(expected))) if sixteen else expected
    assert_same_bits(after[0][1:], wanted[1:])
    found = (parameter.astype(np.uint32) << 16).view(np.float32) if sixteen else parameter
    rounded = (codecs.bf16_nearest(after[0]).astype(np.uint32) << 16).view(np.float32) if sixteen else after[0]
    assert_same_bits(found, rounded)


@pytest.mark.parametrize(
    ("state_format", "span", "in_parameter", "offset", "told"),
    [
        *((INT8, span, False, 0, "ends inside a block") for span in [(0, 100), (100, 256), (256, 299)]),
        (INT8, (0, 1000), True, 0, "needs the address of fp32 parameters"),
        (INT8, (0, 1000), False, 100, "offset 100 is not a multiple of 256"),
        (REMAINDER, (0, 1000), True, 0, "address of bf16 parameters"),
    ],
)
def test_refused_batches(
    tmp_path: Path, state_format: int, span: tuple[int, int], in_parameter: bool, offset: int, told: str
) -> None:
    """A batch that ends inside a block, or lacks the parameters that its format needs, is refused."""
    (begin, end), zeros = span, np.zeros(1000, np.float32)
    run = Run(begin, end - begin, 0, zeros, parameter=zeros if state_format == REMAINDER else None)
    with (
        stored(tmp_path, 1000, state_format, borders=[300], offset=offset) as state,
        pytest.raises(ValueError, match=told),
    ):
        state.start(Operation.UPDATE, [run], [adam_step()], master_in_parameter=in_parameter)


# ---- the table of formats agrees with existing stores, with the documents and with the update rules


DOCS = Path(__file__).parents[2] / "docs"
# Number; bytes per element of Adam in each region; type of the parameter in the first region.
ON_STORAGE = {
    "fp32": (0, (4, 4, 4), DType.FLOAT32),
    "bf16": (1, (4, 2, 2), DType.FLOAT32),
    "int8": (2, (4, 1, 1), DType.FLOAT32),
    "int8_remainder": (3, (2, 2, 1, 1), DType.BFLOAT16),
}


def rows_of(page: str, *, columns: int) -> dict[str, list[str]]:
    """Return the cells after each format's name in the page's table with this many further columns."""
    rows = re.findall(r"^\| `(\w+)`(?: \(default\))? \|(.*)\|$", (DOCS / page).read_text(), re.MULTILINE)
    cells = {name: [cell.strip() for cell in rest.split(" | ")] for name, rest in rows if name in STATE_FORMATS}
    assert all(len(row) == columns for row in cells.values())
    return cells


def test_numbers_names_and_regions_are_those_on_storage() -> None:
    """Formats keep their numbers, names and region sizes, so that existing stores can be read."""
    found = {name: (form.number, form.item_bytes(3), form.parameter_dtype) for name, form in STATE_FORMATS.items()}
    assert found == ON_STORAGE and list(found) == list(ON_STORAGE)
    assert (BLOCK_BYTES, CELL_NUMEL, TRAILER_BYTES) == (4096, 256, 128)


def test_other_rules_than_adam_have_fp32_only() -> None:
    """Adam has all formats. The others would round what other rules need."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert rule_for(torch.optim.AdamW([parameter])).state_formats == tuple(ON_STORAGE)
    assert rule_for(torch.optim.SGD([parameter])).state_formats == ("fp32",)


def test_storage_page_tabulates_the_regions() -> None:
    """The page on bytes on storage documents each format's number and the bytes of its regions.

    The table gives bytes per element (`n`) and per block (`b`).
    """
    rows = rows_of("bytes_on_storage.md", columns=2)
    assert list(rows) == list(STATE_FORMATS)
    for name, (number, regions) in rows.items():
        form = STATE_FORMATS[name]
        items = tuple(int(factor or 1) for factor, unit in re.findall(r"`(?:(\d) )?([nb])`", regions) if unit == "n")
        if "times" in regions:
            items *= 3
        assert (int(number), items) == (form.number, form.item_bytes(3)), name
        assert form.has_blocks == ("`2 b`" in regions), name


def test_users_page_tells_what_a_step_moves() -> None:
    """The users' page gives the bytes on storage and the bytes that a step reads and writes."""
    rows = rows_of("state_formats.md", columns=5)
    assert list(rows) == list(STATE_FORMATS)
    numel = 1 << 30  # so large that padding is negligible
    for name, (*_, place, sixteen_bit, full) in rows.items():
        form = STATE_FORMATS[name]
        first, written = form.item_bytes(3)[0], sum(form.item_bytes(3))
        assert float(place.removesuffix(" B")) == round(form.extent_bytes(numel, 3) / numel, 2), name
        bf16_only = form.parameter_dtype is DType.BFLOAT16
        read = written - first if bf16_only else written
        assert sixteen_bit == f"{read} B / {written} B" + " (bf16 only)" * bf16_only, name
        assert full == ("–" if bf16_only else f"{written - first} B / {written} B"), name  # noqa: RUF001
