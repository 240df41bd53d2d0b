"""A disk that does not answer hangs no training: it ends in time, also after Ctrl-C and SIGTERM."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import fuse
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.processes import run_module
from tests.helpers.runif import RunIf
from tests.helpers.waiting import lenient

# On an idle machine. What is asserted is lenient.
BOUND, END_BOUND = 5.0, 10.0


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
        attack(what, tries=1, outcome="the training ends within 5 s, its process within 10 s after it")
    done = run_module("tests.reliability.hung_disk_worker", tmp_path, cause, overlap, file)
    finished, path = time.time(), tmp_path / "ended.json"
    assert path.exists(), done.stderr[-4000:]
    assert done.returncode != 0
    told: dict[str, Any] = json.loads(path.read_text())
    assert told["seconds"] < lenient(BOUND), told
    assert finished - path.stat().st_mtime < lenient(END_BOUND), "the process did not end"
    errors = {"SIGINT": ["SystemExit"], "SIGTERM": ["StorageTimeoutError", "SIGTERMException"]}
    assert told["error"] in errors.get(cause, ["StorageTimeoutError"])
    if cause == TIMEOUT:
        assert str(tmp_path / "storage") in told["message"]
        assert "at offset" in told["message"]
        assert "did not return within 2 s" in told["message"] and "TransferConfig(io_timeout=...)" in told["message"]


# When in a training, the request from which on the file system hangs, its number, and what ends the training.
STEPS = [("READ", 1), ("READ", 2), ("READ", 3), ("READ", 5), ("WRITE", 1), ("WRITE", 2), ("WRITE", 3), ("LOOKUP", 1)]
SETUPS = [("MKDIR", 1), ("MKDIR", 2), ("CREATE", 1), ("CREATE", 2), ("CREATE", 3), ("FALLOCATE", 1), ("WRITE", 1)]
SETUPS += [("WRITE", 3), ("FSYNC", 1), ("STATFS", 1)]
SAVES = [("MKDIR", 1), ("MKDIR", 2), ("CREATE", 1), ("CREATE", 2), ("CREATE", 3), ("FSYNC", 1), ("FSYNC", 2)]
SAVES += [("UNLINK", 1), ("RELEASE", 1), ("RELEASE", 3), ("SETATTR", 1), ("WRITE", 2), ("WRITE", 10), ("WRITE", 20)]
SAVES += [("OPENDIR", 1), ("RMDIR", 1)]
BESIDE = [("WRITE", 10), ("WRITE", 30), ("FSYNC", 3), ("MKDIR", 1), ("CREATE", 3)]
MOMENTS = {"step": STEPS, "setup": SETUPS, "save": SAVES, "beside": BESIDE, "parameters": STEPS[:5]}
SIGNALLED = [("step", "READ", 2), ("step", "WRITE", 1), ("save", "WRITE", 5), ("parameters", "WRITE", 2)]
HANGS = [
    *((when, *at, TIMEOUT) for when, requests in MOMENTS.items() for at in requests),
    *((*at, cause) for cause in ("SIGINT", "SIGTERM") for at in SIGNALLED),
    ("setup", "CREATE", 2, "SIGINT"),
    *(("step", "WRITE", 1, "default"), ("step", "READ", 2, "default"), ("parameters", "WRITE", 2, "default")),
]
USUAL_HANGS = [("step", "WRITE", 2, TIMEOUT), ("save", "FSYNC", 1, TIMEOUT), ("setup", "CREATE", 2, "SIGINT")]


@RunIf(fuse=True)
@pytest.mark.parametrize(("when", "at", "number", "cause"), long_but(USUAL_HANGS, HANGS))
def test_a_file_system_that_hangs(tmp_path: Path, attack: Attack, when: str, at: str, number: int, cause: str) -> None:
    """The process raises the error and ends, before the disk is gone."""
    attack(
        "a mounted file system stops answering", tries=1, outcome="the error is out, and the process ends within 10 s"
    )
    done = run_module("tests.reliability.hung_mount_worker", tmp_path, when, at, str(number), cause)
    finished, ended = time.time(), tmp_path / "ended"
    assert done.returncode == 1, done.stderr[-4000:]
    assert finished - ended.stat().st_mtime < lenient(END_BOUND), "the process did not end"
    assert "StorageTimeoutError" in done.stderr or cause.startswith("SIG")
    assert ended.read_text() != "gone", "the error came only when the file system was gone"


@pytest.mark.long
@RunIf(fuse=True)
def test_what_the_kernel_does_not_let_go(tmp_path: Path) -> None:
    """A request that the file system has read keeps a killed process, too. The last line on stderr says so."""
    done = run_module("tests.reliability.hung_mount_worker", tmp_path, "save", "FSYNC", "1", TIMEOUT, "keeps")
    assert time.time() - (tmp_path / "ended").stat().st_mtime > fuse.SECONDS / 2
    assert "has calls to storage that have not returned: Flushing" in done.stderr.splitlines()[-1]
    assert "it waits in the kernel, and no signal ends it" in done.stderr
