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


TIMEOUT, SIGNALS = "timeout", ("SIGINT", "SIGTERM")


def ended_by(root: Path, cause: str, *how: str) -> dict[str, Any]:
    """Train on a disk that stops answering; return what came out of the fit, whose process ends soon after it."""
    done = run_module("tests.reliability.hung_disk_worker", root, cause, *how)
    finished, path = time.time(), root / "ended.json"
    assert path.exists() and done.returncode != 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(path.read_text())
    return {**told, "code": done.returncode, "stderr": done.stderr, "later": finished - path.stat().st_mtime}


@pytest.mark.parametrize(
    ("cause", "overlap"),
    long_but(
        [(cause, "none") for cause in (TIMEOUT, *SIGNALS)],
        [(cause, overlap) for cause in (TIMEOUT, *SIGNALS) for overlap in ("none", "forward", "backward")],
    ),
)
def test_a_disk_that_does_not_answer(tmp_path: Path, attack: Attack, cause: str, overlap: str) -> None:
    """The fit raises an error that names path, offset and seconds; the process ends, too.

    After Ctrl-C or SIGTERM the error is out within seconds, whatever the limit is. It is Lightning's exit after Ctrl-C,
    or the disk's error. :func:`test_a_file_system_that_hangs` has all files, which cannot be closed either.
    """
    if cause == TIMEOUT:
        attack("a disk stops answering", tries=1, outcome="StorageTimeoutError with path, offset and seconds")
    else:
        what = "Ctrl-C or SIGTERM while a disk does not answer"
        attack(what, tries=1, outcome="the training ends within 5 s, its process within 10 s after it")
    told = ended_by(tmp_path, cause, "reads", overlap)
    assert told["seconds"] < lenient(BOUND) and told["later"] < lenient(END_BOUND), told
    errors = {"SIGINT": ["SystemExit"], "SIGTERM": ["StorageTimeoutError", "SIGTERMException"]}
    assert told["error"] in errors.get(cause, ["StorageTimeoutError"])
    if cause == TIMEOUT:
        for said in (str(tmp_path / "storage"), "at offset", "not return within 2 s", "TransferConfig(io_timeout=...)"):
            assert said in told["message"]


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
    *((*at, cause) for cause in SIGNALS for at in SIGNALLED),
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
    told = ended_by(tmp_path, cause, when, at, str(number))
    assert told["code"] == 1 and told["later"] < lenient(END_BOUND), told
    assert "StorageTimeoutError" in told["stderr"] or cause in SIGNALS
    assert not told["gone"], "the error came only when the file system was gone"


@pytest.mark.long
@RunIf(fuse=True)
def test_what_the_kernel_does_not_let_go(tmp_path: Path) -> None:
    """A request that the file system has read keeps a killed process, too. The last line on stderr says so."""
    told = ended_by(tmp_path, TIMEOUT, "save", "FSYNC", "1", "keeps")
    assert told["later"] > fuse.SECONDS / 2
    assert "has calls to storage that have not returned: Flushing" in told["stderr"].splitlines()[-1]
    assert "it waits in the kernel, and no signal ends it" in told["stderr"]
