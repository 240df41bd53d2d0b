"""Builds the kernels for ``smart-infinity card-report`` with v++, through ``hls/Makefile``."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning_smartinfinity
from lightning_smartinfinity.cli.report_archive import end_of

__all__ = ["CHECKOUT", "compare_csynth", "compile_smallest", "link", "logs_in", "unable", "xclbin_in"]

CHECKOUT = Path(lightning_smartinfinity.__file__).parents[1]
_SMALLEST = "sgd_update"
_TOLD_LINES = 40
_MOST_LOGS = 100


def unable() -> str:
    """Return why this machine cannot build kernels; empty if it can."""
    if not (CHECKOUT / "hls/Makefile").exists():
        return (
            "the kernels' sources are not in the installed package: run the command from an editable installation of a"
            " checkout or source distribution"
        )
    if missing := next((tool for tool in ("v++", "make") if not shutil.which(tool)), None):
        return f"there is no {missing} on PATH: source the settings64.sh of Vitis, and install make"
    return ""


def xclbin_in(work: Path) -> Path:
    """Return where the linked kernels of a work folder lie."""
    return work / "card/smart_infinity.xclbin"


def logs_in(work: Path) -> dict[str, Path]:
    """Return the logs of make and v++ and the reports of Vitis HLS, the newest first, by their names below a folder."""
    found = [path for pattern in ("*.log", "*csynth.xml") for path in work.rglob(pattern) if path.is_file()]
    newest = sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)[:_MOST_LOGS]
    return {str(path.relative_to(work)): path for path in newest}


def compile_smallest(work: Path) -> dict[str, Any]:
    """Compile the kernel with the least code; a result that failed holds what v++ said last."""
    built, log = work / f"card/{_SMALLEST}.xo", work / "xo.log"
    with open(log, "w") as output:
        made = subprocess.run(_make(work, str(built)), env=_environment(), stdout=output, stderr=output)
    if made.returncode:
        return {"status": "failed", "reason": "v++ did not compile the kernel", "output": _last(end_of(log))}
    return {"status": "done", "kernel": _SMALLEST, "xo_bytes": built.stat().st_size}


def compare_csynth(work: Path) -> dict[str, Any]:
    """Set the figures of Vitis HLS's report on the smallest kernel beside the computed ones."""
    folder = work / "card/temp" / _SMALLEST
    reports = sorted(folder.rglob(f"{_SMALLEST}_csynth.xml")) or sorted(folder.rglob("csynth.xml"))
    if not reports:
        return {"status": "failed", "reason": f"v++ left no csynth.xml below {folder}"}
    command = [sys.executable, "-m", "hls.generate", "csynth", str(reports[0]), "--kernel", _SMALLEST]
    read = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    if read.returncode:
        return {"status": "failed", "reason": "the report cannot be read", "output": _last(read.stderr)}
    return {"status": "done", "kernel": _SMALLEST, "figures": json.loads(read.stdout)}


def link(work: Path, *, begun: bool) -> dict[str, Any]:
    """Start linking in the background, or tell how far it is.

    Args:
        work: Work folder; the file ``link.lock`` in it is locked as long as a link runs.
        begun: Whether the last result was that it runs.
    """
    log, ended = work / "link.log", work / "link.status"
    with open(work / "link.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return {"status": "running", "reason": "linking takes hours: run the command again later"}
        if begun and ended.exists() and ended.read_text().strip() == "0":
            return {"status": "done", "xclbin_bytes": xclbin_in(work).stat().st_size}
        if begun:
            reason = "linking ended without an xclbin; the next run begins it again"
            return {"status": "failed", "reason": reason, "output": _last(end_of(log))}
        ended.unlink(missing_ok=True)
        with open(log, "w") as output:
            # The processes inherit the lock, which ends with the last of them, however that ends.
            subprocess.Popen(
                ["sh", "-c", '"$@"; echo $? > "$0"', str(ended), *_make(work, "link")],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[lock.fileno()],
                start_new_session=True,
            )
    return {"status": "running", "reason": "linking has begun and takes hours: run the command again later"}


def _make(work: Path, target: str) -> list[str]:
    return ["make", "-C", str(CHECKOUT / "hls"), f"CARD={work / 'card'}", target]


def _environment() -> dict[str, str]:
    """Return an environment in which the Makefile's ``python`` is this one."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}


def _last(output: str) -> list[str]:
    return output.splitlines()[-_TOLD_LINES:]
