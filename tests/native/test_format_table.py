"""The table of state formats agrees with existing stores, with the documents and with the update rules."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from lightning_smartinfinity.native import BLOCK_BYTES, CELL_NUMEL, TRAILER_BYTES, DType
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.pipeline.rules import rule_for

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
    numel = 1 << 30  # so many that padding does not count
    for name, (*_, place, sixteen_bit, full) in rows.items():
        form = STATE_FORMATS[name]
        first, written = form.item_bytes(3)[0], sum(form.item_bytes(3))
        assert float(place.removesuffix(" B")) == round(form.extent_bytes(numel, 3) / numel, 2), name
        bf16_only = form.parameter_dtype is DType.BFLOAT16
        read = written - first if bf16_only else written
        assert sixteen_bit == f"{read} B / {written} B" + " (bf16 only)" * bf16_only, name
        assert full == ("–" if bf16_only else f"{written - first} B / {written} B"), name  # noqa: RUF001
