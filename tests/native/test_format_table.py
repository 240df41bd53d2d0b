"""The table of state formats agrees with existing stores, with the documents and with the update rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.native import BLOCK_BYTES, CELL_NUMEL, TRAILER_BYTES, DType, StateFormat, UpdateStep
from lightning_smartinfinity.native.formats import STATE_FORMATS, formats_of
from lightning_smartinfinity.pipeline.rules import rule_for

DOCS = Path(__file__).parents[2] / "docs"
# Number; bytes per element of Adam in each region; bytes per block; type of the parameter in the first region.
ON_STORAGE = {
    "fp32": (0, (4, 4, 4), 0, DType.FLOAT32),
    "bf16": (1, (4, 2, 2), 0, DType.FLOAT32),
    "int8": (2, (4, 1, 1), 2, DType.FLOAT32),
    "int8_remainder": (3, (2, 2, 1, 1), 2, DType.BFLOAT16),
}


def rows_of(page: str, *, columns: int) -> dict[str, list[str]]:
    """Return the cells after each format's name in the page's table with this many further columns."""
    rows = re.findall(r"^\| `(\w+)`(?: \(default\))? \|(.*)\|$", (DOCS / page).read_text(), re.MULTILINE)
    cells = {name: [cell.strip() for cell in rest.split(" | ")] for name, rest in rows if name in STATE_FORMATS}
    assert all(len(row) == columns for row in cells.values())
    return cells


def bytes_per_element(form: StateFormat) -> float:
    """Return the bytes per element of Adam in an extent so large that padding does not count, without borders."""
    numel = 1 << 30
    return form.extent_bytes(numel, 3) / numel


def test_numbers_names_and_regions_are_those_on_storage() -> None:
    """Formats keep their numbers, names and region sizes, so that existing stores can be read."""
    found = {name: (form.number, form.item_bytes(3), form.parameter_dtype) for name, form in STATE_FORMATS.items()}
    assert found == {name: (number, items, dtype) for name, (number, items, _, dtype) in ON_STORAGE.items()}
    assert list(STATE_FORMATS) == list(ON_STORAGE)
    assert (BLOCK_BYTES, CELL_NUMEL, TRAILER_BYTES) == (4096, 256, 128)


@pytest.mark.parametrize("name", ON_STORAGE)
@pytest.mark.parametrize(("numel", "borders"), [(1, 0), (1024, 0), (1025, 3), (100_000, 40_000)])
def test_extents_are_padded_regions_and_a_page(name: str, numel: int, borders: int) -> None:
    """Every region begins at a multiple of 4096 bytes, and the trailer has a page of its own at the end."""
    _, items, block_bytes, _ = ON_STORAGE[name]
    used = [item * numel for item in items] + [block_bytes * (-(-numel // 256) + borders)]
    assert STATE_FORMATS[name].extent_bytes(numel, 3, borders) == sum(-(-n // 4096) * 4096 for n in used) + 4096


def test_only_fp32_holds_any_arrays() -> None:
    """fp32 works with every rule, in place and on cards. The other formats hold Adam's arrays only."""
    adam = ("master", "exp_avg", "exp_avg_sq")
    for name, form in STATE_FORMATS.items():
        is_fp32 = name == "fp32"
        assert (form.arrays, form.step) == (() if is_fp32 else adam, None if is_fp32 else "AdamStep")
        assert form.in_place == form.on_cards == is_fp32
        assert form.has_blocks == name.startswith("int8")
        assert form.required_parameters == ("bf16" if name == "int8_remainder" else None)
    assert STATE_FORMATS["fp32"].item_bytes(2) == (4, 4)


def test_rules_take_the_formats_that_serve_their_step() -> None:
    """Adam has all formats, with the arrays that they name. Other rules have fp32."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    adam = rule_for(torch.optim.AdamW([parameter]))
    assert adam.state_formats == tuple(ON_STORAGE)
    assert {STATE_FORMATS[name].arrays for name in adam.state_formats} == {(), adam.arrays}
    assert rule_for(torch.optim.SGD([parameter])).state_formats == ("fp32",)
    steps: tuple[type[UpdateStep], ...] = UpdateStep.__args__
    # The table names a class of the core.
    assert {form.step for form in STATE_FORMATS.values()} - {None} <= {step.__name__ for step in steps}
    assert all("fp32" in formats_of(step) for step in steps)


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
    for name, (*_, place, sixteen_bit, full) in rows.items():
        form = STATE_FORMATS[name]
        items = form.item_bytes(3)
        assert float(place.removesuffix(" B")) == round(bytes_per_element(form), 2), name
        written = sum(items)
        held = {form.parameter_dtype: items[0]}
        read = written - held.get(DType.BFLOAT16, 0)
        assert sixteen_bit.removesuffix(" (bf16 only)") == f"{read} B / {written} B", name
        assert sixteen_bit.endswith("(bf16 only)") == (form.required_parameters == "bf16"), name
        read = written - held.get(DType.FLOAT32, 0)
        assert full == ("–" if form.required_parameters else f"{read} B / {written} B"), name  # noqa: RUF001
