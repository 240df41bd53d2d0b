"""A disk that does not answer hangs no training: it ends in time, also after Ctrl-C and SIGTERM."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.attacks import Attack
from tests.helpers.processes import run_module
from tests.helpers.waiting import lenient

# On an idle machine. What is asserted is lenient.
BOUND = 5.0


def ended(folder: Path, cause: str, overlap: str, file: str = "state") -> dict[str, Any]:
    """Train until the disk does not answer, and return what came out of the fit; the process ends, too."""
    done = run_module("tests.reliability.hung_disk_worker", folder, cause, overlap, file)
    finished = time.time()
    path = folder / "ended.json"
    assert path.exists(), done.stderr[-4000:]
    assert done.returncode != 0
    told: dict[str, Any] = json.loads(path.read_text())
    assert told["seconds"] < lenient(BOUND), told
    assert finished - path.stat().st_mtime < lenient(2 * BOUND), "the process did not end"
    return told


@pytest.mark.parametrize(
    ("overlap", "file"),
    [
        pytest.param("none", "state"),
        pytest.param("forward", "state", marks=pytest.mark.long),
        pytest.param("backward", "state", marks=pytest.mark.long),
        pytest.param("none", "parameters", marks=pytest.mark.long),
        pytest.param("none", "commit", marks=pytest.mark.long),
    ],
)
def test_no_answer_within_the_limit(tmp_path: Path, attack: Attack, overlap: str, file: str) -> None:
    """The fit raises the error that names path, offset and seconds."""
    attack("a disk stops answering", tries=1, outcome="StorageTimeoutError with path, offset and seconds")
    told = ended(tmp_path, "timeout", overlap, file)
    assert told["error"] == "StorageTimeoutError"
    assert str(tmp_path / "storage") in told["message"]
    assert file == "commit" or "at offset" in told["message"]
    assert "did not return within 2 s" in told["message"] and "TransferConfig(io_timeout=...)" in told["message"]


@pytest.mark.parametrize(
    ("cause", "overlap", "file"),
    [
        pytest.param("SIGINT", "none", "state"),
        pytest.param("SIGTERM", "none", "all"),
        pytest.param("SIGTERM", "none", "state", marks=pytest.mark.long),
        pytest.param("SIGINT", "none", "all", marks=pytest.mark.long),
        *[
            pytest.param(cause, overlap, file, marks=pytest.mark.long)
            for cause in ("SIGINT", "SIGTERM")
            for overlap, file in (
                ("forward", "state"),
                ("backward", "state"),
                ("forward", "all"),
                ("none", "parameters"),
                ("none", "commit"),
            )
        ],
    ],
)
def test_asked_to_end_while_the_disk_does_not_answer(
    tmp_path: Path, attack: Attack, cause: str, overlap: str, file: str
) -> None:
    """The error is out within seconds, whatever the limit is and however many disks and files do not answer.

    It is Lightning's exit after Ctrl-C, or the disk's error.
    """
    attack("Ctrl-C or SIGTERM while a disk does not answer", tries=1, outcome="training and process end within 5 s")
    told = ended(tmp_path, cause, overlap, file)
    assert told["error"] in ({"SIGINT": ("SystemExit",), "SIGTERM": ("StorageTimeoutError", "SIGTERMException")}[cause])
