"""``smart-infinity scrub``: reads all of a store or checkpoint, and tells what is damaged."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_smartinfinity.cli.option_types import storage_folder
from lightning_smartinfinity.errors import SmartInfinityError, StorageError
from lightning_smartinfinity.progress import Show, showing_progress

if TYPE_CHECKING:
    from lightning_smartinfinity.store.jobs import Job
    from lightning_smartinfinity.store.scrub import ScrubbedRank

__all__ = ["add_to", "scrub_jobs"]

_DESCRIPTION = """\
Read every byte that has a checksum, and name what is damaged: the newest state of all jobs in storage folders, or a
checkpoint, universal or not. Nothing is changed. Exit status 0 if all is whole, 1 if something is damaged, 2 if it
could not be told.
"""
_UNTOLD = 2


def add_to(commands: Any) -> None:
    """Add the command to the subparsers of ``ArgumentParser.add_subparsers``."""
    parser = commands.add_parser("scrub", help="whether state or a checkpoint is whole", description=_DESCRIPTION)
    parser.add_argument(
        "paths",
        nargs="+",
        type=storage_folder,
        metavar="PATH",
        help="a checkpoint, or storage folders: all those over which the state is spread",
    )
    parser.add_argument("--job", help="check the state of this job alone")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    show = partial(showing_progress, shown=not options.quiet)
    try:
        damaged = _scrub(options.paths, options.job, show)
    except SmartInfinityError as error:
        print(f"smart-infinity: {error}", file=sys.stderr)
        return _UNTOLD
    for sentence in damaged:
        print(sentence)
    print(f"{len(damaged)} damaged." if damaged else "Whole.")
    return 1 if damaged else 0


def _scrub(paths: Sequence[Path], name: str | None, show: Show) -> list[str]:
    jobs = [job for path in paths for job in _jobs_at(path) if name in (None, job.name)]
    if jobs:
        damaged = [problem for job in jobs for problem in job.problems]
        for scrubbed in scrub_jobs([job for job in jobs if not job.problems], show=show):
            folders = ", ".join(map(str, scrubbed.folders))
            print(f"{folders}: {scrubbed.num_extents} extents of generation {scrubbed.generation} read")
            damaged += scrubbed.damaged
        return damaged
    if name is not None or len(paths) != 1:
        raise StorageError(
            f"There is no optimizer state{'' if name is None else f' of the job {name!r}'} in "
            f"{', '.join(map(str, paths))}.",
            "Name a checkpoint alone, or the storage folders of a job.",
        )
    return _scrub_checkpoint(paths[0], show)


def _jobs_at(path: Path) -> list[Job]:
    """Return the jobs in a storage folder, or the one whose folder, or rank's folder, this is."""
    from lightning_smartinfinity.store.jobs import find_jobs, is_rank_folder

    folder = Path(os.path.abspath(path))
    folder = folder.parent if is_rank_folder(folder) else folder
    return find_jobs(folder) or [job for job in find_jobs(folder.parent) if job.name == folder.name]


def scrub_jobs(jobs: Sequence[Job], *, show: Show) -> Iterator[ScrubbedRank]:
    """Read the state of every rank of jobs, joined over the storage folders.

    Raises:
        StorageLockedError: A process uses it.
        StorageError: It cannot be read.
    """
    from lightning_smartinfinity.store.scrub import scrub_rank

    ranks: dict[tuple[str, int], list[Path]] = {}
    for job in jobs:
        for folder in job.folders:
            if folder.holds == "state":
                ranks.setdefault((job.name, folder.rank), []).append(folder.path)
    for (_, rank), folders in sorted(ranks.items()):
        yield scrub_rank(folders, rank=rank, show=show)


def _scrub_checkpoint(path: Path, show: Show) -> list[str]:
    from lightning_smartinfinity.zero3 import prepare_environment  # imports DeepSpeed, which is slow

    prepare_environment("cpu", local_world_size=1)
    from lightning_smartinfinity.zero3.checkpoints.scrub import scrub_checkpoint

    scrubbed = scrub_checkpoint(path, show=show)
    print(f"{path}: {scrubbed.num_files} files read")
    return list(scrubbed.damaged)
