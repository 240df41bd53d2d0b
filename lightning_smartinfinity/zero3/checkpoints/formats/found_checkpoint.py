"""Finds a checkpoint for all ranks to load; each machine may have only its own part of it."""

from __future__ import annotations

import platform
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.settings.user_calls import user_calls
from lightning_smartinfinity.storage.io.files import limited
from lightning_smartinfinity.zero3.checkpoints.folders.divided_save import id_of, time_of
from lightning_smartinfinity.zero3.checkpoints.folders.folder_swap import put_one_in_place
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import (
    has_latest,
    has_universal,
    model_files,
    optimizer_files,
    reading_checkpoint,
    require_latest,
    saved_by,
    tagged_folder,
)
from lightning_smartinfinity.zero3.checkpoints.formats.trust import load_file
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together
from lightning_smartinfinity.zero3.ranks.file_systems import first_seen, places_of
from lightning_smartinfinity.zero3.untyped import SavedState

__all__ = ["FoundCheckpoint", "await_seen", "find_checkpoint", "resumable_states"]

_MERGE = (
    "Start as many processes as saved it, on the same machines in the same order, or copy the parts of all machines "
    "into one folder that all of them see; then check it with `smart-infinity scrub`."
)


class FoundCheckpoint(NamedTuple):
    """A checkpoint that all ranks can load.

    Args:
        folder: The folder with the files, whose name is DeepSpeed's tag.
        num_saved: Number of processes that saved it.
        in_parts: Whether some rank sees only the files of some processes, including its own. Then the number of
            processes is the same as when it was saved.
    """

    folder: Path
    num_saved: int
    in_parts: bool

    @property
    def is_of_as_many(self) -> bool:
        """Whether it was saved by the present number of processes."""
        return self.num_saved == dist.get_world_size()


class _Seen(NamedTuple):
    """The files of a checkpoint that a rank sees: the processes with optimizer states and with model states."""

    folder: Path
    saved: frozenset[int]
    models: frozenset[int]
    has_latest: bool
    host: str
    save_id: str | None
    saved_at: float


def find_checkpoint(path: str | Path, *, bf16: bool | None, latest: bool = False) -> FoundCheckpoint:
    """Find the folder with the processes' files in a checkpoint for an engine to load.

    This is a collective: if one rank finds a fault, every rank raises.

    Args:
        path: The folder that Lightning or DeepSpeed saved, or the folder in it that holds the files.
        bf16: Whether the engine that will load it trains in bf16; None: not known yet.
        latest: Whether to require the file ``latest``, which is written last.

    Raises:
        CheckpointError: There is no checkpoint, it is incomplete, or it was saved in another precision.
    """
    found = _found_by_all(path, bf16)
    rank = dist.get_rank()
    with raising_together():
        _require_one_name(found)
        _require_one_tag(path, found)
    if len({each.save_id for each in found}) > 1:
        folder = found[rank].folder
        put_one_in_place(folder.parent, folder.name)
        found = _found_by_all(folder, bf16)
        with raising_together():
            _require_one_save(found)
    with raising_together():
        if latest and not any(each.has_latest for each in found):
            require_latest(found[0].folder)
    saved = frozenset[int]().union(*(each.saved for each in found))
    models = frozenset[int]().union(*(each.models for each in found))
    in_parts = any(each.saved != saved or each.models != models for each in found)
    with raising_together():
        if in_parts:
            _require_part(found[rank], saved)
    return FoundCheckpoint(found[rank].folder, len(saved), in_parts)


def _found_by_all(path: str | Path, bf16: bool | None) -> list[_Seen]:
    """Return what each rank sees of a checkpoint; if a rank sees nothing of it, every rank raises."""
    found, problem = _look_together(path, bf16)
    if None in found and any(found):
        _await(path, [None if each is None else each.folder for each in found])
        tag = next(each.folder.name for each in found if each is not None)
        found, problem = _look_together(path, bf16, tag)
    with raising_together():
        if problem is not None:
            raise _with_others(problem, found)
    return [each for each in found if each is not None]


def _look_together(
    path: str | Path, bf16: bool | None, tag: str | None = None
) -> tuple[list[_Seen | None], CheckpointError | None]:
    """Return what each rank sees of a checkpoint (None: nothing), and the reason if this rank sees nothing."""
    seen: _Seen | None = None
    problem: CheckpointError | None = None
    with raising_together():
        seen, problem = _look(path, bf16, tag)
    return gather(seen, None), problem


def _look(path: str | Path, bf16: bool | None, tag: str | None) -> tuple[_Seen | None, CheckpointError | None]:
    """Return what this rank sees of a checkpoint, or the reason why it sees nothing."""

    def look() -> _Seen:
        folder = tagged_folder(Path(path), tag)
        files = optimizer_files(folder)
        if not files:
            raise CheckpointError(f"{folder} holds no ZeRO-3 optimizer states.", "Pass a ZeRO-3 checkpoint.")
        if bf16 is not None:
            _check_precision(files, bf16)
        models = frozenset(map(saved_by, model_files(folder)))
        return _Seen(
            folder=folder,
            saved=frozenset(map(saved_by, files)),
            models=models,
            has_latest=has_latest(folder),
            host=platform.node(),
            save_id=id_of(folder),
            saved_at=time_of(folder),
        )

    try:
        with reading_checkpoint(path):
            return limited("Looking at", path, look), None
    except CheckpointError as error:
        return None, error


def resumable_states(path: str | Path, key: str, *, needed: Collection[str]) -> SavedState | None:
    """Return the model states of a checkpoint, mapped; None if no training can resume from it.

    Args:
        path: The checkpoint, or this machine's part of it.
        key: Key of the number of steps after which it was saved.
        needed: Keys without which no training can resume, as with ``save_weights_only=True``.

    Raises:
        CheckpointError: The checkpoint is damaged, or it is no folder of ZeRO-3.
    """
    with reading_checkpoint(path):
        folder = Path(path) if has_universal(Path(path)) else tagged_folder(Path(path))
        files = model_files(folder)
        if not files:
            raise CheckpointError(f"{folder} holds no model states.", "Pass a ZeRO-3 checkpoint.")
        states: SavedState = load_file(min(files), map_location="cpu", mmap=True)
        if not isinstance(states, Mapping) or not isinstance(states.get(key, 0), int):
            raise CheckpointError(f"{min(files)} does not hold the states of a process.", "Use another checkpoint.")
        return states if {key, *needed} <= states.keys() else None


def await_seen(path: str | Path) -> None:
    """Wait until this rank sees a path that other ranks see on the same file system. Collective.

    A network file system may not show new files of another machine at once. If the path does not appear, this returns
    without an error, and later checks report what is missing.
    """
    seen = False
    with raising_together(), reading_checkpoint(path):
        seen = limited("Looking at", path, Path(path).exists)
    _await(path, [Path(path) if each else None for each in gather(seen, None)])


def _await(path: str | Path, found: Sequence[Path | None]) -> None:
    """Wait until this rank sees the paths that others found on its file system; None: the rank found none."""
    if None not in found or not any(found):
        return
    (place,) = places_of([Path(path)])
    on_same = [number == place.number or not place.is_certain for number in gather(place.number, None)]
    seen = [each for each, same in zip(found, on_same, strict=True) if each is not None and same]
    with raising_together():
        if seen:
            first_seen(seen[:1], shared=place.may_be_shared)


def _require_one_name(found: Sequence[_Seen]) -> None:
    own = found[dist.get_rank()].folder
    other = next((rank for rank, each in enumerate(found) if each.folder.parent.name != own.parent.name), None)
    if other is not None:
        raise CheckpointError(
            f"Rank {dist.get_rank()} loads {own.parent}, and rank {other} loads {found[other].folder.parent}.",
            "Name the same checkpoint on all ranks. If it is the 'best' one, log the value that ModelCheckpoint "
            "monitors with sync_dist=True: otherwise each rank compares its own.",
        )


def _require_one_tag(path: str | Path, found: Sequence[_Seen]) -> None:
    own = found[dist.get_rank()].folder.name
    other = next((rank for rank, each in enumerate(found) if each.folder.name != own), None)
    if other is not None:
        raise CheckpointError(
            f"{path} names the folder {own!r} on {platform.node()}, and {found[other].folder.name!r} for rank {other}: "
            "the parts on the machines come from different saves.",
            "Pass the path of a subfolder that all machines have, or use another checkpoint.",
        )


def _require_one_save(found: Sequence[_Seen]) -> None:
    if len({each.save_id for each in found} - {None}) > 1:
        parts = dict.fromkeys(f"{each.host} has that of {time.ctime(each.saved_at)} ({each.save_id})" for each in found)
        raise CheckpointError(
            f"{found[dist.get_rank()].folder} has parts of different saves, and none is whole on all machines: "
            f"{', '.join(parts)}.",
            f"Use another checkpoint, or resume from storage ({user_calls().from_storage}).",
        )


def _with_others(problem: CheckpointError, found: Sequence[_Seen | None]) -> CheckpointError:
    """Return why this rank cannot load a checkpoint, together with the files that other ranks see."""
    others = [f"{each.host} has the files of {_listed(each.saved)}" for each in found if each is not None]
    if not others:
        return problem
    seen = "; ".join(dict.fromkeys(others))
    return CheckpointError(f"{problem.problem} But {seen}.", _MERGE)


def _require_part(own: _Seen, saved: frozenset[int]) -> None:
    """Check that a rank that may see only a part of a checkpoint sees its own files."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for kind, there in (("optim", own.saved), ("model", own.models)):
        if rank not in there:
            raise CheckpointError(
                f"Rank {rank} on {own.host} finds no file '*zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt' in "
                f"{own.folder}, which has those of {_listed(there)}.",
                _MERGE,
            )
    if len(saved) > world_size:
        raise CheckpointError(
            f"{own.folder} on {own.host} has the files of {_listed(own.saved)} only, of {max(saved) + 1} "
            f"that saved it, and {world_size} processes are to load it.",
            _MERGE,
        )


def _listed(ranks: frozenset[int]) -> str:
    return f"the processes {', '.join(map(str, sorted(ranks)))}" if ranks else "no process"


def _check_precision(files: list[Path], bf16: bool) -> None:
    saved, wanted = files[0].name.startswith("bf16_"), bf16
    if saved != wanted:
        raise CheckpointError(
            f"{files[0].parent} was saved {'in' if saved else 'without'} bf16, this run is "
            f"{'in' if wanted else 'without'} it.",
            "Use the precision that it was saved with.",
        )
