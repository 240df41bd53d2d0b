"""The table of docs/beside_stock.md matches the tests."""

from __future__ import annotations

import re
from pathlib import Path

from tests.stock.test_situations import EQUAL, JUDGED, ON_NVME, UNLIKE_PLAIN

TESTS = Path(__file__).parents[1]
TABLE = (TESTS.parent / "docs" / "beside_stock.md").read_text()
STOCK = "stock/test_situations.py"
CITED = {
    (STOCK if file == "situations" else file, test) for file, test in re.findall(r"`([\w/.]+)::(test_\w+)`", TABLE)
}


def defined_in(file: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", (TESTS / file).read_text(), re.MULTILINE))


def test_the_table_and_the_tests_name_each_other() -> None:
    """No row names a test that does not exist, and every comparison with stock has a row, whatever its result."""
    assert CITED and [(file, test) for file, test in CITED if test not in defined_in(file)] == []
    in_table = {"test_like_plain_lightning", "test_what_users_rely_on", "test_with_state_on_nvme"}
    others = {(STOCK, test) for test in defined_in(STOCK) - in_table}
    assert (
        others - {(STOCK, "test_stock_fails_in_the_way_that_is_described")} <= CITED
        and set(re.findall(r"nvme\[(\w+)\]", TABLE)) == set(ON_NVME)
        and set(re.findall(r"relied_on\[(\w+)\]", TABLE)) == set(JUDGED)
        and set(re.findall(r"like_plain\[(\w+)\]", TABLE)) == {*EQUAL, *UNLIKE_PLAIN}
    )
