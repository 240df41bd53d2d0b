"""Bad input on one of two processes makes both raise and end by themselves, and leaves nothing behind."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.storage.folders.lock import FolderLock
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from tests.training.rank_worker import CASES
from tests.training.worker import each_rank

EXPECTED = {
    "file-in-the-way": ("StorageError", "rank-00001"),
    "locked": ("StorageLockedError", str(os.getpid())),
    "no-space-on-one": ("StorageFullError", "0.01 MiB are free"),
    "no-space-for-both": ("StorageFullError", "2.00 MiB are free"),
    "full-at-allocation": ("StorageFullError", "rank-00001"),
    "unsupported-optimizer": ("UnsupportedError", "NAdam"),
}


# The files of each case before, what each rank found, and the files after.
Attempted = tuple[dict[str, set[str]], list[dict[str, Any]], dict[str, set[str]]]


def _tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def attempted(tmp_path_factory: pytest.TempPathFactory) -> Attempted:
    """Try every case in one pair of processes."""
    root = tmp_path_factory.mktemp("two")
    for case in CASES:
        (root / case / "storage").mkdir(parents=True)
    in_the_way = root / "file-in-the-way" / "storage" / "default" / "rank-00001"
    in_the_way.parent.mkdir()
    in_the_way.write_text("the user's")
    locked = root / "locked" / "storage" / "default" / "rank-00001"
    locked.mkdir(parents=True)
    lock = FolderLock(OpenFolder(locked))
    before = {case: _tree(root / case / "storage") for case in CASES}
    found = each_rank("bad_input", root)
    lock.release(remove=False)
    return before, found, {case: _tree(root / case / "storage") for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_raises_our_own_error(case: str, attempted: Attempted) -> None:
    """Both ranks raise the same class, with value and remedy, and leave storage as before; then they train together."""
    before, found, after = attempted
    for outcome in (rank[case] for rank in found):
        if case == "nothing-wrong":
            assert outcome["error"] is None and len(outcome["losses"]) == 1
            continue
        error, named = EXPECTED[case]
        assert outcome["error"] == error, outcome
        assert named in outcome["message"]
        assert outcome["remedy"].endswith(".")
        if case == "no-space-for-both":  # each rank's state alone would fit
            needed, free = map(float, re.findall(r"([\d.]+) MiB", outcome["message"]))
            assert needed / 2 < free < needed
    assert after[case] == before[case]
