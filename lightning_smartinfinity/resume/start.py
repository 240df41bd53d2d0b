"""Chooses where a training starts that resumes if it can: from storage, from a checkpoint, or from step 0."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from lightning_smartinfinity.errors import CheckpointError, StorageCorruptError
from lightning_smartinfinity.settings.strategy import STORAGE_OR_NEW, StrategySettings
from lightning_smartinfinity.storage.folders.open_folder import ARCHIVE
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together

if TYPE_CHECKING:
    from lightning_smartinfinity.zero3.setup.found_training import FoundTraining

__all__ = ["Source", "Start", "choose_start", "steps_of"]


class Source(Enum):
    """Where a training takes its first state from."""

    STORAGE = "storage"
    CHECKPOINT = "checkpoint"
    NEW = "new"


class Start(NamedTuple):
    """Where a training starts.

    Args:
        source: The source of its state.
        reason: A sentence for the user that names the source.
        checkpoint: Path of the checkpoint; None for other sources.
    """

    source: Source
    reason: str
    checkpoint: str | None = None


def steps_of(
    paths: Callable[[], Iterable[str]], key: str, *, settings: StrategySettings, needed: Collection[str] = ()
) -> dict[str, int]:
    """Return the step of each checkpoint that a training can resume from. Collective.

    Args:
        paths: Function that returns the checkpoints that this rank sees.
        key: Key of the number of steps in a checkpoint.
        settings: The training's settings.
        needed: Further keys without which no training can resume from a checkpoint.

    Raises:
        CheckpointError: A checkpoint's step cannot be read, so that it may be the newest; raised on every rank.
    """
    from lightning_smartinfinity.zero3.checkpoints.formats.found_checkpoint import saved_step

    steps: dict[str, int] = {}
    with raising_together(), io_limit(settings.transfer.io_timeout):
        for path in paths():
            try:
                step = saved_step(path, key, needed=needed)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{STORAGE_OR_NEW!r} starts from what is newest, and the step of {path} cannot be read. "
                    f"{error.problem}",
                    f"{error.remedy} Or move it to another folder, or name the checkpoint to resume from.",
                ) from error
            if step is not None:
                steps[path] = step
    return steps


def choose_start(settings: StrategySettings, steps: dict[str, int], *, is_removed: bool) -> Start:
    """Choose the newest of the interrupted training on storage and the checkpoints. Collective.

    Of a training and a checkpoint of the same step, the checkpoint is chosen, if the training can be archived: storage
    has room for a second state, and what was archived before may be replaced. If not, the training is chosen, also if
    the checkpoint is one step newer: a script that is started again and again would fail each time. If it is unknown
    which is newer, because a drive with a part of the training is missing, the training is chosen: resuming it raises
    the reason.

    Args:
        settings: The training's settings.
        steps: For each checkpoint that this rank sees, the number of steps before it was saved.
        is_removed: Whether the state on storage is that of a complete training of this process, which the set-up of the
            next one removes.

    Returns:
        The same on every rank.

    Raises:
        StorageCorruptError: The training on storage is damaged; raised on every rank.
        StorageError: A storage folder cannot be read; raised on every rank.
    """
    from lightning_smartinfinity.zero3.setup.found_training import find_interrupted

    everywhere: dict[str, int] = {}
    for path, step in (item for of_rank in gather(steps, None) for item in of_rank.items()):
        everywhere[path] = min(step, everywhere.get(path, step))  # machines may have different files at one path
    newest = max(everywhere, key=lambda path: (everywhere[path], path), default=None)
    found = None if any(gather(is_removed, None)) else find_interrupted(settings, None)
    where = f"{', '.join(map(str, settings.storage or ()))} (job {settings.transfer.job!r})"
    beside = "" if newest is None else f"; the newest checkpoint is {newest}, of step {everywhere[newest]}"
    if found is not None and found.is_damaged:
        other = (
            "begin at step 0, without resuming" if newest is None else f"resume from the checkpoint {newest} by name"
        )
        raise StorageCorruptError(
            f"The manifest or the training records of an interrupted training in {where} are damaged or missing, so "
            "that its step is unknown, and it may be the newest.",
            f"Examine it with `smart-infinity scrub`. Or {other}: this moves it to the job "
            f"{settings.transfer.job + ARCHIVE!r}.",
        )
    if found is None and newest is None:
        nothing = f"There is no interrupted training in {where}, and no checkpoint."
        return Start(Source.NEW, f"{nothing} The training begins at step 0.")
    if newest is None or (found is not None and _is_newer(found, everywhere[newest])):
        after = "" if found is None or found.step is None else f", after step {found.step}"
        return Start(Source.STORAGE, f"Chooses the state in {where}{after}{beside}.")
    return Start(Source.CHECKPOINT, f"Chooses the checkpoint {newest} of step {everywhere[newest]}.", newest)


def _is_newer(found: FoundTraining, step: int) -> bool:
    """Return whether a training on storage is chosen over a checkpoint of this step."""
    return found.step is None or found.step > step or (not found.has_room and found.step >= step - 1)
