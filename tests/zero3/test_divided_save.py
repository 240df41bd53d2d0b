"""Which save machines go to that have parts of two saves in place."""

from __future__ import annotations

import pytest

from lightning_smartinfinity.zero3.checkpoints.folders.divided_save import PartsHere, common_save


def machine(in_place: str | None, beside: str | None = None, *, newer: bool = False) -> PartsHere:
    return PartsHere(in_place, beside, newer)


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ([machine("a", "b"), machine("a")], None),
        ([machine("b", "a"), machine("a", "b", newer=True)], "b"),
        ([machine("a", "b", newer=True), machine("b", "a")], "b"),
        ([machine("b", "a"), machine("a")], "a"),
        ([machine("b"), machine("a", "b", newer=True), machine("b", "a")], "b"),
        ([machine("b"), machine("a")], None),
        ([machine("a", "c", newer=True), machine("b", "c", newer=True)], None),
        ([machine("b"), machine(None, "b", newer=True)], "b"),
        ([machine("b"), machine(None)], None),
    ],
    ids=[
        "an interrupted save that nobody has in place",
        "both are whole, the first machine has the new one",
        "both are whole, the first machine has the old one",
        "the new one is not whole",
        "three machines",
        "nothing in common",
        "a save of which nobody knows that it is whole",
        "an older version made the old one",
        "an older version, and the new one is not whole",
    ],
)
def test_the_save_that_machines_go_to(machines: list[PartsHere], expected: str | None) -> None:
    """It is the newest that all of them have and one has in place; None where all agree, or have none in common."""
    assert common_save(machines) == expected
