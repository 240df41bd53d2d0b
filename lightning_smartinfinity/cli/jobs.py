"""``smart-infinity jobs``: lists, checks and removes the jobs' files in storage folders."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_smartinfinity.cli.option_types import add_quiet, show_of, storage_folder
from lightning_smartinfinity.cli.scrub import Found, calls_of_record, scrub_jobs
from lightning_smartinfinity.errors import SmartInfinityError, StorageError

if TYPE_CHECKING:
    from lightning_smartinfinity.storage.jobs.jobs import Job, JobFolder

__all__ = ["DESCRIPTION", "add_options", "run"]

DESCRIPTION = """\
List the jobs whose optimizer state or parameters are in storage folders: which process uses them, how large they
are, when they were last written, the newest generation that all ranks have, and whether a training can resume from
them. If a storage folder is missing over which the state is spread, it is named, with the newest checkpoint to go on
from. Exit status 1 if --verify finds damage or cannot read all of a dead job's state, if a job cannot be removed, or if
one of several folders cannot be read, or its disk does not answer.
"""
_DEFAULT = "smart_infinity"
_TABLE = "{job:40}  {owner:16}  {size:>11}  {written:>12}  {generation:>10}  {remark}"
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.add_argument(
        "folders",
        nargs="*",
        type=storage_folder,
        metavar="FOLDER",
        help=f"storage folders (default: {_DEFAULT} here, where a Trainer puts it)",
    )
    parser.add_argument("--job", help="show this job alone")
    parser.add_argument("--verify", action="store_true", help="check all state and records that are not in use")
    parser.add_argument(
        "--remove", action="append", default=[], metavar="JOB", help="remove this job from the folders, if it is dead"
    )
    parser.add_argument("--kept", action="store_true", help="with --remove: also remove kept state")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_quiet(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    from lightning_smartinfinity.storage.jobs.jobs import find_jobs, with_lost_parts

    folders = list(dict.fromkeys(options.folders)) or [_default_folder()]
    jobs, unknown = [], False
    for folder in tuple(folders):
        try:
            jobs += [job for job in find_jobs(folder) if options.job in (None, job.name)]
        except StorageError as error:
            if len(folders) == 1:
                raise
            print(f"smart-infinity: {error}", file=sys.stderr)
            folders.remove(folder)
            unknown = True
    jobs = with_lost_parts(jobs[0].storage, jobs, calls_of=calls_of_record) if jobs else jobs
    if options.remove:
        return max(unknown, _remove(jobs, folders, options))
    verified = _verify(jobs, options) if options.verify else {}
    if options.json:
        print(json.dumps([_as_json(job, verified.get(job.storage / job.name)) for job in jobs], indent=2))
    else:
        _print(jobs, folders, verified)
    return 1 if unknown or any(found.damaged or found.unknown for found in verified.values()) else 0


def _default_folder() -> Path:
    folder = Path(_DEFAULT)
    if not folder.is_dir():
        raise StorageError(
            f"There is no folder {_DEFAULT!r} here, in {os.getcwd()!r}.",
            "Name the storage folders of your runs: smart-infinity jobs FOLDER...",
        )
    return folder


def _remove(jobs: Sequence[Job], folders: Sequence[Path], options: argparse.Namespace) -> int:
    from lightning_smartinfinity.storage.jobs.removal import remove_job

    unknown = sorted(set(options.remove) - {job.name for job in jobs})
    if unknown:
        raise StorageError(
            f"There is no job {unknown[0]!r} in {', '.join(map(str, folders))}.", "See `smart-infinity jobs`."
        )
    failed = False
    for job in (job for job in jobs if job.name in options.remove):
        try:
            left = remove_job(job, kept=options.kept)
        except SmartInfinityError as error:
            print(f"smart-infinity: {error}", file=sys.stderr)
            failed = True
            continue
        print(f"Removed {job.storage / job.name}: {_size(job.num_bytes)}")
        for folder in left:
            print(f"{folder} stays: it holds files that this package did not make")
    return 1 if failed else 0


def _verify(jobs: Sequence[Job], options: argparse.Namespace) -> dict[Path, Found]:
    """Scrub all jobs that are not in use; return each job's result by its path."""
    idle = [job for job in jobs if not job.in_use]
    verified = {}
    for name in dict.fromkeys(job.name for job in idle):
        same = [job for job in idle if job.name == name]
        found = scrub_jobs(same, show=show_of(options))
        verified.update({job.storage / job.name: found for job in same})  # a rank's state is in all of them
    return verified


def _as_json(job: Job, found: Found | None) -> dict[str, object]:
    return {
        "storage": str(job.storage),
        "job": job.name,
        "in_use": job.in_use,
        "processes": job.pids,
        "num_bytes": job.num_bytes,
        "written": job.written,
        "generation": job.generation,
        "kept": job.kept,
        "resumable_step": job.resumable_step,
        "problems": job.problems,
        "damaged": None if found is None else found.damaged,
        "unknown": None if found is None else found.unknown,
        "folders": [_folder_as_json(folder) for folder in job.folders],
    }


def _folder_as_json(folder: JobFolder) -> dict[str, object]:
    checkpoint = None if folder.part is None or folder.part.checkpoint is None else folder.part.checkpoint[1]
    plain = {name: value for name, value in vars(folder).items() if name not in ("part", "points")}
    return {**plain, "path": str(folder.path), "resumable_step": folder.resumable_step, "checkpoint": checkpoint}


def _print(jobs: Sequence[Job], folders: Sequence[Path], verified: dict[Path, Found]) -> None:
    if not jobs:
        print(f"There are no jobs in {', '.join(map(str, folders))}.")
        return
    print(_TABLE.format(job="job", owner="process", size="size", written="written", generation="generation", remark=""))
    for job in jobs:
        row = {
            "job": str(job.storage / job.name),
            "owner": _owner(job),
            "size": "-" if job.written is None else _size(job.num_bytes),
            "written": "-" if job.written is None else f"{_age(time.time() - job.written)} ago",
            "generation": "-" if job.generation is None else str(job.generation),
            "remark": _remark(job, verified.get(job.storage / job.name)),
        }
        print(_TABLE.format(**row).rstrip())
    sentences = [problem for job in jobs for problem in job.problems]
    sentences += [sentence for found in verified.values() for sentence in (*found.damaged, *found.unknown)]
    for sentence in dict.fromkeys(sentences):
        print(sentence)


def _owner(job: Job) -> str:
    if job.in_use:
        return f"alive {','.join(map(str, job.pids))}".rstrip()
    return "dead" if job.looked_at else "unknown"


def _remark(job: Job, found: Found | None) -> str:
    remarks = ["kept"] if job.kept else []
    if job.resumable_step is not None:
        remarks.append(f"resumable, step {job.resumable_step}")
    if job.lost:
        remarks.append("incomplete")
    if job.damaged or (found is not None and found.damaged):
        remarks.append("damaged")
    elif any(folder.problem and not folder.lost for folder in job.folders):
        remarks.append("unreadable")
    elif found is not None and not job.lost:
        remarks.append("incomplete" if found.unknown else "whole")
    return ", ".join(remarks)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"


def _age(seconds: float) -> str:
    shown = (f"{seconds / unit:.0f} {name}" for unit, name in _UNITS if seconds >= unit)
    return next(shown, f"{max(seconds, 0):.0f} s")
