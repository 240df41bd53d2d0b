"""``smart-infinity scrub``: reads all of a store or checkpoint, and reports damage."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_smartinfinity.cli.option_types import add_quiet, add_weights_only, show_of, storage_folder
from lightning_smartinfinity.common.progress import Show
from lightning_smartinfinity.errors import SmartInfinityError, StorageError

if TYPE_CHECKING:
    from lightning_smartinfinity.settings.user_calls import UserCalls
    from lightning_smartinfinity.storage.jobs.jobs import Job
    from lightning_smartinfinity.storage.records.training_record import TrainingRecord
    from lightning_smartinfinity.storage.state.scrub import ScrubbedRank

__all__ = ["DESCRIPTION", "Found", "add_options", "calls_of_record", "run", "scrub_jobs"]

DESCRIPTION = """\
Read every byte that has a checksum, and name what is damaged: the newest state of all jobs in storage folders with
their training records, a checkpoint, universal or not, or an export. Nothing is changed, except that a save which was
interrupted while it replaced another is put back. Exit status 0 if all is whole, 1 if something is damaged, 2 if it
could not be told.
"""
_UNKNOWN = 2


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of a scrub: sentences about damage, and sentences about files that could not be read."""

    damaged: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.add_argument(
        "paths",
        nargs="+",
        type=storage_folder,
        metavar="PATH",
        help="a checkpoint, an export or one file of it, or storage folders: all those over which the state is spread",
    )
    parser.add_argument("--job", help="check the state of this job alone")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_weights_only(parser)
    add_quiet(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    say = _nothing if options.json else print
    try:
        found = _scrub(options, show_of(options), say)
    except SmartInfinityError as error:
        found = Found(unknown=[str(error)])
    if options.json:
        print(json.dumps(vars(found), indent=2))
    else:
        _print(found)
    return 1 if found.damaged else _UNKNOWN if found.unknown else 0


def _print(found: Found) -> None:
    for sentence in found.damaged:
        print(sentence)
    for sentence in found.unknown:
        print(f"smart-infinity: {sentence}", file=sys.stderr)
    if found.damaged:
        print(f"{len(found.damaged)} damaged.")
    elif not found.unknown:
        print("Whole.")


def _nothing(sentence: str) -> None:
    """Ignore a sentence."""


def _scrub(options: argparse.Namespace, show: Show, say: Callable[[str], None]) -> Found:
    from lightning_smartinfinity.storage.io.files import limited

    paths, name = options.paths, options.job
    if name is None and len(paths) == 1 and limited("Looking at", paths[0], _may_be_export, paths[0]):
        return _scrub_checkpoint(paths[0], options.weights_only, show, say)
    jobs, unread = limited("Looking at", paths[0], _found_at, paths)
    jobs = [job for job in jobs if name in (None, job.name)]
    if jobs:
        found = scrub_jobs(jobs, show=show, say=say)
        found.unknown.extend(unread)
        return found
    if name is not None or len(paths) != 1:
        raise StorageError(
            f"There is no optimizer state{'' if name is None else f' of the job {name!r}'} in "
            f"{', '.join(map(str, paths))}.",
            "Name a checkpoint alone, or the storage folders of a job.",
        )
    return _scrub_checkpoint(paths[0], options.weights_only, show, say)


def scrub_jobs(jobs: Sequence[Job], *, show: Show, say: Callable[[str], None] = _nothing) -> Found:
    """Read the state of all ranks of jobs.

    Args:
        jobs: The jobs; if a job's state is spread over several storage folders, the job in each of them.
        show: Function that shows the progress.
        say: Function that gets a sentence about each rank that was read.
    """
    from lightning_smartinfinity.storage.jobs.jobs import absent_state, records_apart, with_lost_parts

    found = Found()
    jobs = with_lost_parts(jobs[0].storage, jobs, calls_of=calls_of_record) if jobs else jobs
    for folder in (folder for job in jobs for folder in job.folders if folder.problem is not None):
        sentences = found.damaged if folder.damaged else found.unknown
        if folder.problem not in sentences:  # of a lost part, each of the others says so
            sentences.append(str(folder.problem))
    found.unknown.extend(folder.doubt for job in jobs for folder in job.folders if folder.doubt is not None)
    for sentence in dict.fromkeys(folder.places for job in jobs for folder in job.folders if folder.places):
        say(sentence)
    for scrubbed in _scrubbed(jobs, show):
        if scrubbed.num_extents:
            folders = ", ".join(map(str, scrubbed.folders))
            say(f"{folders}: {scrubbed.num_extents} extents of generation {scrubbed.generation} read")
        found.damaged.extend(scrubbed.damaged)
        found.unknown.extend(scrubbed.unknown)
    for name in dict.fromkeys(job.name for job in jobs):
        same = [job for job in jobs if job.name == name]
        absent, apart = absent_state(same), records_apart(same)
        found.unknown.extend([] if absent is None else [absent])
        found.damaged.extend([] if apart is None else [apart])
    return found


def _found_at(paths: Sequence[Path]) -> tuple[list[Job], list[str]]:
    """Return the jobs at several paths, and why some of the paths cannot be read; if there is only one, raise that."""
    jobs: list[Job] = []
    unread: list[str] = []
    for path in paths:
        try:
            jobs += _jobs_at(path)
        except StorageError as error:
            if len(paths) == 1:
                raise
            unread.append(str(error))
    return jobs, unread


def _jobs_at(path: Path) -> list[Job]:
    """Return all jobs in a storage folder, or the one job to which a job's or rank's folder belongs."""
    from lightning_smartinfinity.storage.jobs.jobs import find_job, find_jobs, is_rank_folder

    folder = Path(os.path.abspath(path))
    folder = folder.parent if is_rank_folder(folder) else folder
    try:
        jobs = find_jobs(folder)
    except StorageError as error:
        job = find_job(folder.parent, folder.name) if isinstance(error.__cause__, PermissionError) else None
        if job is None:
            raise
        return [job]  # with a problem, which names the owner
    job = None if jobs else find_job(folder.parent, folder.name)
    return jobs if job is None else [job]


def _scrubbed(jobs: Sequence[Job], show: Show) -> Iterator[ScrubbedRank]:
    """Read the state of every rank of jobs, joined over the storage folders.

    Yields a rank that cannot be read, with the reason. Skips ranks whose folders have a known problem.
    """
    from lightning_smartinfinity.storage.jobs.jobs import UNKNOWN_RANK, common_points
    from lightning_smartinfinity.storage.state.scrub import ScrubbedRank, scrub_rank

    known = {(job.name, folder.rank) for job in jobs for folder in job.folders if folder.problem is not None}
    points = {name: common_points([job for job in jobs if job.name == name]) for name in {job.name for job in jobs}}
    ranks: dict[tuple[str, int], list[Path]] = {}
    for job in jobs:
        for folder in job.folders:
            if folder.rank != UNKNOWN_RANK:
                ranks.setdefault((job.name, folder.rank), []).append(folder.path)
    for (name, rank), folders in sorted(ranks.items()):
        if known & {(name, rank), (name, UNKNOWN_RANK)}:
            continue
        common = None if (shared := points[name]) is None else {point.number for point in shared}
        try:
            yield scrub_rank(folders, rank=rank, show=show, check=_check_record, common=common)
        except StorageError as error:  # in use, or owned by another user
            yield ScrubbedRank(folders=tuple(folders), unknown=(str(error),))


def _check_record(record: TrainingRecord) -> None:
    from lightning_smartinfinity.resume.record_content import read_content  # imports torch, which is slow

    read_content(record)


def calls_of_record(record: TrainingRecord) -> UserCalls | None:
    """Return the calls of the entry point whose training wrote a record; None if its content cannot be read."""
    from lightning_smartinfinity.resume.record_content import calls_of  # imports torch, which is slow

    return calls_of(record)


def _may_be_export(path: Path) -> bool:
    return os.path.isfile(path) or (os.path.isdir(path) and any(path.glob("*.safetensors*")))


def _scrub_checkpoint(path: Path, weights_only: bool, show: Show, say: Callable[[str], None]) -> Found:
    from lightning_smartinfinity.zero3 import prepare_environment  # imports DeepSpeed, which is slow

    prepare_environment("cpu", local_world_size=1)
    from lightning_smartinfinity.export.scrub import is_export, scrub_export
    from lightning_smartinfinity.zero3.checkpoints.formats.scrub import scrub_checkpoint

    scrubbed = [scrub_export(path, show=show)] if is_export(path) else []
    if not scrubbed or (path / "latest").exists():  # a checkpoint of transformers' Trainer holds an export, too
        scrubbed.append(scrub_checkpoint(path, weights_only=weights_only, show=show))
    say(f"{path}: {sum(len(each.files) for each in scrubbed)} files read")
    return Found(
        damaged=[sentence for each in scrubbed for sentence in each.damaged],
        unknown=[sentence for each in scrubbed for sentence in each.unknown],
    )
