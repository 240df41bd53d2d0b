"""If one process cannot write its training records, all processes keep their state, or none does."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.training.storage_worker import StorageRun, end_of, launch, steps_of

EVER = 1000


def run(folder: Path, **settings: Any) -> tuple[int, str]:
    """Fit in two processes of their own."""
    settings = {"epochs": 2, "options": {"overlap": "none"}, **settings}
    return launch(StorageRun(out=str(folder), storage=str(folder / "storage"), devices=2, **settings))


def stores(folder: Path) -> list[str]:
    """Return the stores, as job and rank."""
    return sorted(f"{path.parents[1].name}/{path.parent.name}" for path in folder.glob("storage/*/rank-*/state.bin"))


CASES: list[tuple[str, int, str, bool]] = [
    ("unwritable", 0, "term at batch end", False),
    ("unwritable", 1, "term at batch end", False),
    ("unwritable", 3, "term at batch end", True),  # the others do not know yet, and all have the record before
    ("full", 1, "term at batch end", False),
    ("full", 3, "term at batch end", True),
    ("full", 1, "error at batch end", False),
]


@pytest.mark.parametrize(("how", "first", "end", "stays"), long_but([CASES[0], CASES[4]], CASES))
def test_one_process_fails_to_record(
    how: str, first: int, end: str, stays: bool, tmp_path: Path, attack: Attack
) -> None:
    """The end promises a resume only where there is one, and then it works; and a new fit is never refused."""
    attack("one process cannot write its training records", tries=1, outcome="all keep their state, or none")
    code, output = run(tmp_path, kill_at=end, kill_step=3, fails=[how, 1, first, EVER])
    assert output.count("its state stays in") == stays, output[-4000:]
    assert "cannot be resumed from storage here" in output
    if end.startswith("term"):
        assert len(stores(tmp_path)) == 2 * stays
    code, output = run(tmp_path, resume=stays)
    assert code == 0, output[-4000:]
    assert end_of(tmp_path)["step"] == 6 and stores(tmp_path) == []


@pytest.mark.long
def test_records_that_can_be_written_again(tmp_path: Path) -> None:
    """Once all processes have a record again, the fit can be resumed, to the bit."""
    assert run(tmp_path / "straight")[0] == 0
    killed = tmp_path / "killed"
    assert run(killed, kill_at="kill at batch start", kill_step=5, fails=["full", 1, 2, 3])[0] == -signal.SIGKILL
    code, output = run(killed, resume=True)
    assert code == 0, output[-4000:]
    for rank in range(2):
        assert steps_of(killed, rank) == steps_of(tmp_path / "straight", rank)
        assert end_of(killed, rank) == end_of(tmp_path / "straight", rank)


@pytest.mark.long
def test_a_kill_after_the_records_have_ended(tmp_path: Path) -> None:
    """The error of a resume names the step after which records ended, and the reason; a new fit archives nothing."""
    code, _ = run(tmp_path, kill_at="kill at step", kill_step=5, fails=["unwritable", 1, 2, EVER])
    assert code == -signal.SIGKILL
    code, output = run(tmp_path, resume=True)
    assert code != 0 and "wrote no training records after step" in output, output[-4000:]
    assert "['count'] is a object" in output
    code, output = run(tmp_path)
    assert code == 0 and "aside" not in output and stores(tmp_path) == [], output[-4000:]
