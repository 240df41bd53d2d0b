"""Chooses where a training starts that resumes if it can: from storage, from a checkpoint, or from step 0."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from lightning_smartinfinity.errors import CheckpointError, StorageCorruptError, StorageError
from lightning_smartinfinity.settings.strategy import STORAGE_OR_NEW, StrategySettings
from lightning_smartinfinity.storage.folders.open_folder import ARCHIVE
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together
from lightning_smartinfinity.zero3.untyped import SavedState

if TYPE_CHECKING:
    from lightning_smartinfinity.zero3.setup.found_training import FoundTraining

__all__ = ["SavedStep", "Source", "Start", "choose_start", "steps_of"]


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


class SavedStep(NamedTuple):
    """The point of a training at which a checkpoint was saved; a later one is larger.

    Args:
        step: Number of optimizer steps before it.
        is_whole: Whether it was saved where a step ends. Within a batch or a step, a training that resumes from it may
            lack gradients, or repeat what changes buffers.
    """

    step: int
    is_whole: bool = True


def steps_of(
    paths: Callable[[], Iterable[str]],
    key: str,
    *,
    settings: StrategySettings,
    needed: Collection[str] = (),
    is_within: Callable[[SavedState], bool] = lambda _: False,
) -> dict[str, SavedStep]:
    """Return the step of each checkpoint that a training can resume from. Collective.

    Args:
        paths: Function that returns the checkpoints that this rank sees.
        key: Key of the number of steps in a checkpoint.
        settings: The training's settings.
        needed: Further keys without which no training can resume from a checkpoint.
        is_within: Returns whether a checkpoint was saved within a batch or a step, by what was saved with the model.

    Raises:
        CheckpointError: A checkpoint's step cannot be read, so that it may be the newest; raised on every rank.
    """
    from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import reading_checkpoint
    from lightning_smartinfinity.zero3.checkpoints.formats.client_state import GRADIENTS_LEFT_OUT
    from lightning_smartinfinity.zero3.checkpoints.formats.found_checkpoint import resumable_states

    steps: dict[str, SavedStep] = {}
    with raising_together(), io_limit(settings.transfer.io_timeout):
        for path in paths():
            with _naming(f"the step of {path} cannot be read"), reading_checkpoint(path):
                states = resumable_states(path, key, needed=needed)
                if states is not None:
                    steps[path] = SavedStep(int(states[key]), not (GRADIENTS_LEFT_OUT in states or is_within(states)))
    return steps


@contextmanager
def _naming(problem: str) -> Iterator[None]:
    """Say in errors about a checkpoint that another one can be chosen."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"{STORAGE_OR_NEW!r} starts from what is newest, and {problem}. {error.problem}",
            f"{error.remedy} Or move it to another folder, or name the checkpoint to resume from.",
        ) from error


def choose_start(
    settings: StrategySettings, steps: Mapping[str, SavedStep], *, is_removed: bool, places: Collection[str] = ()
) -> Start:
    """Choose the newest of the interrupted training on storage and the checkpoints. Collective.

    Of a training and a checkpoint of the same step, the checkpoint is chosen, if it was saved where a step ends and the
    training can be archived: storage has room for a second state, and what was archived before may be replaced. If not,
    the training is chosen. If it cannot be archived, it is chosen also if the checkpoint is one step newer: a script
    that is started again and again would fail each time. If it is unknown which is newer, because a drive with a part
    of the training is missing, the training is chosen: resuming it raises the reason.

    The files of a checkpoint are checked before it is chosen, since the training is then archived.

    Args:
        settings: The training's settings.
        steps: For each checkpoint that this rank sees, where it was saved.
        is_removed: Whether the state on storage is that of a complete training of this process, which the set-up of the
            next one removes.
        places: Where checkpoints were looked for, for the user.

    Returns:
        The same on every rank.

    Raises:
        StorageCorruptError: The training on storage is damaged; raised on every rank.
        StorageError: A storage folder cannot be read, or a training that was archived is newer than what would be
            chosen; raised on every rank.
        CheckpointError: The checkpoint to choose is incomplete or damaged; raised on every rank.
    """
    from lightning_smartinfinity.zero3.setup.found_training import archived_step, find_interrupted

    everywhere: dict[str, SavedStep] = {}
    for path, saved in (item for of_rank in gather(dict(steps), None) for item in of_rank.items()):
        everywhere[path] = min(saved, everywhere.get(path, saved))  # machines may have different files at one path
    newest = max(everywhere, key=lambda path: (everywhere[path], path), default=None)
    found = None if any(gather(is_removed, None)) else find_interrupted(settings, None)
    where = f"{', '.join(map(str, settings.storage or ()))} (job {settings.transfer.job!r})"
    if found is not None and found.is_damaged:
        raise _damaged(settings, where, newest)
    named: dict[Source, tuple[str, int | None]] = {}
    if found is not None:
        after = "" if found.step is None else f", after step {found.step}"
        named[Source.STORAGE] = f"the state in {where}{after}", found.step
    if newest is not None:
        within = "" if everywhere[newest].is_whole else ", saved within a batch or a step"
        named[Source.CHECKPOINT] = (
            f"the checkpoint {newest} of step {everywhere[newest].step}{within}",
            everywhere[newest].step,
        )
    if not named:
        none = f"no checkpoint{' in ' if places else ''}{', '.join(places)}"
        begin = f"to begin at step 0: there is no record of an interrupted training in {where}, and {none}"
        named[Source.NEW] = begin, 0
    source = next(iter(named))
    if found is not None and newest is not None and not _is_newer(found, everywhere[newest]):
        source = Source.CHECKPOINT
    chosen, step = named.pop(source)
    archived = archived_step(settings, None)
    if archived is not None and step is not None and archived > step:
        raise _archived_is_newer(settings, archived, chosen)
    reason = ", and not ".join([f"Chooses {chosen}", *(name for name, _ in named.values())])
    if source is not Source.CHECKPOINT:
        return Start(source, f"{reason}.")
    assert newest is not None
    _check_files(newest, settings)
    return Start(source, f"{reason}.", newest)


def _damaged(settings: StrategySettings, where: str, newest: str | None) -> StorageCorruptError:
    other = "begin at step 0, without resuming" if newest is None else f"resume from the checkpoint {newest} by name"
    return StorageCorruptError(
        f"The manifest or the training records of an interrupted training in {where} are damaged or missing, so "
        "that its step is unknown, and it may be the newest.",
        f"Examine it with `smart-infinity scrub`. Or {other}: this moves it to the job "
        f"{settings.transfer.job + ARCHIVE!r}.",
    )


def _archived_is_newer(settings: StrategySettings, step: int, chosen: str) -> StorageError:
    """Return the error for a training that was archived after more steps than what would be chosen has."""
    folders, archive = " ".join(map(str, settings.storage or ())), settings.transfer.job + ARCHIVE
    return StorageError(
        f"{STORAGE_OR_NEW!r} would choose {chosen}. But a newer training, interrupted after step {step}, was moved to "
        f"the job {archive!r}.",
        f"To go on from it, pass transfer={{'job': {archive!r}}}. To leave it, remove it: smart-infinity jobs "
        f"{folders} --remove {archive}. If the script trains several times, give each training a job of its own.",
    )


def _check_files(checkpoint: str, settings: StrategySettings) -> None:
    from lightning_smartinfinity.zero3.checkpoints.load.folder_check import check_files

    with _naming(f"{checkpoint} cannot be resumed"), io_limit(settings.transfer.io_timeout):
        check_files(checkpoint)


def _is_newer(found: FoundTraining, saved: SavedStep) -> bool:
    """Return whether a training on storage, which goes on where a step ended, is chosen over a checkpoint."""
    return found.step is None or (found.step, True) > saved or (not found.has_room and found.step >= saved.step - 1)
