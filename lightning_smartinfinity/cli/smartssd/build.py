"""Builds the kernels for ``smart-infinity card-report`` with v++, through ``hls/Makefile``."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import lightning_smartinfinity
from lightning_smartinfinity.cli.smartssd.archive import end_of
from lightning_smartinfinity.common.update_rules import RULES

__all__ = ["CHECKOUT", "compare_csynth", "compile_smallest", "link", "logs_in", "unable", "xclbin_in", "xo_in"]

CHECKOUT = Path(lightning_smartinfinity.__file__).parents[1]
_SMALLEST = "sgd_update"
_TOLD_LINES = 40
_MOST_LOGS = 100
_FOR_MAKE = re.compile(r"[\w./+@,~-]+")


def unable(work: Path) -> str:
    """Return why this machine cannot build kernels in a work folder, or an empty string if it can."""
    if not (CHECKOUT / "hls/Makefile").exists():
        return (
            "the kernels' sources are not in the installed package: run the command from an editable installation of a"
            " checkout or source distribution"
        )
    if missing := next((tool for tool in ("v++", "make") if not shutil.which(tool)), None):
        return f"there is no {missing} on PATH: source the settings64.sh of Vitis, and install make"
    if odd := next((str(path) for path in (CHECKOUT, work) if not _FOR_MAKE.fullmatch(str(path))), None):
        return f"make cannot build in {odd!r}: use a path of letters, digits and . _ - + @ , ~ only"
    return ""


def xo_in(work: Path) -> Path:
    """Return the path of the smallest kernel in a work folder."""
    return work / f"card/{_SMALLEST}.xo"


def xclbin_in(work: Path) -> Path:
    """Return the path of the linked kernels in a work folder."""
    return work / "card/smart_infinity.xclbin"


def logs_in(work: Path) -> dict[str, Path]:
    """Return the newest logs of make and v++ and reports of Vitis HLS, newest first, by their relative paths."""
    walked = (Path(folder, name) for folder, _, names in os.walk(work) for name in names)
    changed = {}
    for path in walked:
        with suppress(FileNotFoundError):  # v++ may be linking, and remove files
            if path.name.endswith((".log", "csynth.xml")) and stat.S_ISREG((status := path.stat()).st_mode):
                changed[path] = status.st_mtime_ns
    newest = sorted(changed, key=lambda path: changed[path], reverse=True)[:_MOST_LOGS]
    return {str(path.relative_to(work)): path for path in newest}


def compile_smallest(work: Path, lock: int) -> dict[str, Any]:
    """Compile the kernel with the least code; a failed result includes the last lines of v++'s output.

    Args:
        work: Work folder.
        lock: Descriptor of the lock, which the processes inherit: the folder stays locked while one of them runs.
    """
    built, log = xo_in(work), work / "xo.log"
    with open(log, "w") as output:
        make = _begun(_make(work, str(built)), output=output, lock=lock)
        try:
            failed = make.wait()
        except BaseException:
            os.killpg(make.pid, signal.SIGKILL)  # a hanging v++ may ignore Ctrl-C
            make.wait()
            raise
    if failed:
        reason = f"v++ did not compile the kernel: see {log}"
        return {"status": "failed", "reason": reason, "output": _last(end_of(log))}
    if not zipfile.is_zipfile(built):
        built.unlink()  # else make would keep it
        return {"status": "failed", "reason": "v++ left a .xo that is not whole", "output": _last(end_of(log))}
    return {"status": "done", "kernel": _SMALLEST, "xo_bytes": built.stat().st_size}


def compare_csynth(work: Path) -> dict[str, Any]:
    """Return the figures of Vitis HLS's report on the smallest kernel together with the computed ones."""
    folder = work / "card/temp" / _SMALLEST
    # <kernel>_csynth.xml has no loops: Vitis HLS moves each process with its loops into a module of csynth.xml.
    reports = sorted(folder.rglob("csynth.xml")) or sorted(folder.rglob(f"{_SMALLEST}_csynth.xml"))
    if not reports:
        return {"status": "failed", "reason": f"v++ left no csynth.xml below {folder}"}
    command = [sys.executable, "-m", "hls.generate", "csynth", str(reports[0]), "--kernel", _SMALLEST]
    read = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    if read.returncode:
        return {"status": "failed", "reason": "the report cannot be read", "output": _last(read.stderr)}
    return {"status": "done", "kernel": _SMALLEST, "figures": json.loads(read.stdout)}


def link(work: Path, *, begun: bool) -> dict[str, Any]:
    """Start linking in the background, or return the state of the running link.

    Args:
        work: Work folder; its file ``link.lock`` is locked while a link runs.
        begun: Whether the last result was that a link is running.
    """
    log, ended = work / "link.log", work / "link.status"
    with open(work / "link.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return {"status": "running", "reason": "linking takes hours: run the command again later"}
        if begun and ended.exists() and ended.read_text().strip() == "0" and xclbin_in(work).exists():
            return {"status": "done", "xclbin_bytes": xclbin_in(work).stat().st_size}
        if begun:
            reason = f"linking ended without an xclbin: see {log}; the next run begins it again"
            return {"status": "failed", "reason": reason, "output": _last(end_of(log))}
        ended.unlink(missing_ok=True)
        with open(log, "w") as output:
            linked = ["sh", "-c", '"$@"; echo $? > "$0"', str(ended), *_make(work, "link")]
            _begun(linked, output=output, lock=lock.fileno())
    return {"status": "running", "reason": "linking has begun and takes hours: run the command again later"}


def _begun(command: list[str], *, output: IO[str], lock: int) -> subprocess.Popen[bytes]:
    """Start a command whose processes inherit a lock: it is released when the last of them ends, even by a kill."""
    return subprocess.Popen(
        command,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[lock],
        start_new_session=True,
    )


def _make(work: Path, target: str) -> list[str]:
    """Return make's command line. It sets all variables that make would otherwise read from the environment."""
    named = [f"CARD={work / 'card'}", "TARGET=hw", f"OPTIMIZER={RULES[0].name}"]
    return ["make", "-C", str(CHECKOUT / "hls"), *named, target]


def _environment() -> dict[str, str]:
    """Return an environment in which the Makefile's ``python`` is this interpreter."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}


def _last(output: str) -> list[str]:
    return output.splitlines()[-_TOLD_LINES:]
