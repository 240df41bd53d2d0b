"""A disk that does not answer hangs no training: it ends in time, also after Ctrl-C and SIGTERM."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.processes import run_module
from tests.helpers.waiting import lenient

# On an idle machine. What is asserted is lenient.
BOUND = 5.0


TIMEOUT = "timeout"
USUAL = [(TIMEOUT, "none", "state"), ("SIGINT", "none", "state"), ("SIGTERM", "none", "all")]
CASES = [
    *(
        (cause, overlap, file)
        for cause in (TIMEOUT, "SIGINT", "SIGTERM")
        for overlap, file in [("none", "state"), ("forward", "state"), ("backward", "state"), ("none", "parameters")]
    ),
    *((cause, overlap, "all") for cause in ("SIGINT", "SIGTERM") for overlap in ("none", "forward")),
]


@pytest.mark.parametrize(("cause", "overlap", "file"), long_but(USUAL, CASES))
def test_a_disk_that_does_not_answer(tmp_path: Path, attack: Attack, cause: str, overlap: str, file: str) -> None:
    """The fit raises an error that names path, offset and seconds; the process ends, too.

    After Ctrl-C or SIGTERM the error is out within seconds, whatever the limit is and however many disks and files do
    not answer. It is Lightning's exit after Ctrl-C, or the disk's error.
    """
    if cause == TIMEOUT:
        attack("a disk stops answering", tries=1, outcome="StorageTimeoutError with path, offset and seconds")
    else:
        what = "Ctrl-C or SIGTERM while a disk does not answer"
        attack(what, tries=1, outcome="training and process end within 5 s")
    done = run_module("tests.reliability.hung_disk_worker", tmp_path, cause, overlap, file)
    finished, path = time.time(), tmp_path / "ended.json"
    assert path.exists(), done.stderr[-4000:]
    assert done.returncode != 0
    told: dict[str, Any] = json.loads(path.read_text())
    assert told["seconds"] < lenient(BOUND), told
    assert finished - path.stat().st_mtime < lenient(2 * BOUND), "the process did not end"
    errors = {"SIGINT": ["SystemExit"], "SIGTERM": ["StorageTimeoutError", "SIGTERMException"]}
    assert told["error"] in errors.get(cause, ["StorageTimeoutError"])
    if cause == TIMEOUT:
        assert str(tmp_path / "storage") in told["message"]
        assert "at offset" in told["message"]
        assert "did not return within 2 s" in told["message"] and "TransferConfig(io_timeout=...)" in told["message"]
