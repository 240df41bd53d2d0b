"""Bad input on one of two processes makes both raise and end by themselves, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.storage.folders.lock import FolderLock
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from tests.helpers.processes import run_module
from tests.training.bad_input_worker import CASES

EXPECTED = {
    "file-in-the-way": ("StorageError", "rank-00001"),
    "locked": ("StorageLockedError", str(os.getpid())),
    "no-space-on-one": ("StorageFullError", "0.01 MiB are free"),
    "no-space-for-both": ("StorageFullError", "2.00 MiB are free"),
    "full-at-allocation": ("StorageFullError", "rank-00001"),
    "unsupported-optimizer": ("UnsupportedError", "NAdam"),
}


def _tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def attempted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Try every case in one pair of processes; ``before.json`` lists the files that were on storage before."""
    root = tmp_path_factory.mktemp("two")
    for case in CASES:
        (root / case / "storage").mkdir(parents=True)
    in_the_way = root / "file-in-the-way" / "storage" / "default" / "rank-00001"
    in_the_way.parent.mkdir()
    in_the_way.write_text("the user's")
    locked = root / "locked" / "storage" / "default" / "rank-00001"
    locked.mkdir(parents=True)
    lock = FolderLock(OpenFolder(locked))
    before = {case: sorted(_tree(root / case / "storage")) for case in CASES}
    (root / "before.json").write_text(json.dumps(before))
    done = run_module("tests.training.bad_input_worker", root, ranks=2)
    lock.release(remove=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return root


def _outcomes(root: Path, case: str) -> list[dict[str, Any]]:
    return [json.loads((root / f"{case}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", EXPECTED)
def test_every_rank_raises_our_own_error(case: str, attempted: Path) -> None:
    """Both ranks raise the same class, which names the value at fault and ends in a remedy."""
    error, named = EXPECTED[case]
    for outcome in _outcomes(attempted, case):
        assert outcome["error"] == error, outcome
        assert named in outcome["message"]
        assert outcome["remedy"].endswith(".")


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_left_on_storage(case: str, attempted: Path) -> None:
    """Storage holds the same files as before, the user's own files included."""
    before = json.loads((attempted / "before.json").read_text())[case]
    assert sorted(_tree(attempted / case / "storage")) == before


def test_space_is_summed_over_ranks(attempted: Path) -> None:
    """The check adds up the state of both ranks: each alone would fit."""
    for outcome in _outcomes(attempted, "no-space-for-both"):
        needed, free = map(float, re.findall(r"([\d.]+) MiB", outcome["message"]))
        assert needed / 2 < free < needed


def test_the_same_processes_train_afterwards(attempted: Path) -> None:
    """After six refused fits the two processes still work together, and the seventh fit trains."""
    for outcome in _outcomes(attempted, "nothing-wrong"):
        assert outcome["error"] is None
        assert len(outcome["losses"]) == 1
