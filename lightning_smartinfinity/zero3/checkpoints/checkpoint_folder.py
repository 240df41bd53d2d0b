"""Finds the folder with the processes' files in a checkpoint, of which every machine may have a part of its own."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from lightning_smartinfinity.checks import shown
from lightning_smartinfinity.errors import CheckpointError, CheckpointNotFoundError, SmartInfinityError
from lightning_smartinfinity.store.in_time import unless_idle
from lightning_smartinfinity.zero3.checkpoints.folder_swap import LATEST, restore_interrupted
from lightning_smartinfinity.zero3.checkpoints.saved_weights import DAMAGE
from lightning_smartinfinity.zero3.collectives import gather, raising_together
from lightning_smartinfinity.zero3.file_systems import REMEMBERED, places_of

if TYPE_CHECKING:
    from lightning_smartinfinity.zero3.engine import PortableEngine

__all__ = [
    "OPTIMIZER_FILES",
    "FoundCheckpoint",
    "await_seen",
    "find_checkpoint",
    "optimizer_files",
    "reading_checkpoint",
    "require_latest",
    "saved_by",
    "tagged_folder",
]

OPTIMIZER_FILES = "*zero_pp_rank_*_mp_rank_*_optim_states.pt"
"""Pattern of the names of the files with optimizer states."""

_MODEL_FILES = "zero_pp_rank_*_mp_rank_*_model_states.pt"
_NAMED = 3
_MAX_TAG_BYTES = 255  # of a name in a file system
_RANK = re.compile(r"zero_pp_rank_([0-9]+)_mp_rank_")
_GLANCE = 0.5
_MERGE = (
    "Start as many processes as saved it, on the same machines in the same order, or copy the parts of all machines "
    "into one folder that all of them see; `smart-infinity scrub` tells whether it is whole."
)


class FoundCheckpoint(NamedTuple):
    """A checkpoint that all ranks can load.

    Args:
        folder: The folder with the files, whose name is DeepSpeed's tag.
        num_saved: Number of processes that saved it.
        in_parts: Whether some rank sees the files of some processes only, its own among them. As many processes as
            there are saved it, then.
    """

    folder: Path
    num_saved: int
    in_parts: bool

    @property
    def is_of_as_many(self) -> bool:
        """Whether as many processes saved it as there are now."""
        return self.num_saved == dist.get_world_size()


class _Seen(NamedTuple):
    """Says of which processes a rank sees optimizer states and model states."""

    folder: Path
    saved: frozenset[int]
    models: frozenset[int]
    has_latest: bool
    host: str


def find_checkpoint(path: str | Path, *, engine: PortableEngine, latest: bool = False) -> FoundCheckpoint:
    """Find the folder with the processes' files in a checkpoint that an engine is to load.

    This is a collective: if one rank finds a fault, every rank raises.

    Args:
        path: The folder that Lightning or DeepSpeed saved, or the folder in it that holds the files.
        engine: DeepSpeed engine that will load the checkpoint.
        latest: Whether the file ``latest``, which is written last, has to be there.

    Raises:
        CheckpointError: There is none, it is not whole, or it was saved in another precision.
    """
    seen: _Seen | None = None
    problem: CheckpointError | None = None
    with raising_together():
        seen, problem = _look(path, engine)
    found = gather(seen, None)
    if None in found and any(found):
        _await(path, [None if each is None else each.folder for each in found])
        tag = next(each.folder.name for each in found if each is not None)
        with raising_together():
            if problem is not None:
                seen, problem = _look(path, engine, tag=tag)
        found = gather(seen, None)
    with raising_together():
        if problem is not None:
            raise _with_others(problem, found)
    whole = [each for each in found if each is not None]
    with raising_together():
        _require_one_tag(path, whole)
        if latest and not any(each.has_latest for each in whole):
            require_latest(whole[0].folder)
    saved = frozenset[int]().union(*(each.saved for each in whole))
    models = frozenset[int]().union(*(each.models for each in whole))
    in_parts = any(each.saved != saved or each.models != models for each in whole)
    own = whole[dist.get_rank()]
    with raising_together():
        if in_parts:
            _require_part(own, saved)
    return FoundCheckpoint(own.folder, len(saved), in_parts)


def _look(
    path: str | Path, engine: PortableEngine, tag: str | None = None
) -> tuple[_Seen | None, CheckpointError | None]:
    """Return what this rank sees of a checkpoint, or why it sees none."""

    def look() -> _Seen:
        folder = tagged_folder(Path(path), tag)
        files = optimizer_files(folder)
        if not files:
            raise CheckpointError(f"{folder} holds no ZeRO-3 optimizer states.", "Pass a ZeRO-3 checkpoint.")
        _check_precision(files, engine)
        models = frozenset(map(saved_by, folder.glob(_MODEL_FILES)))
        return _Seen(folder, frozenset(map(saved_by, files)), models, _has_latest(folder), platform.node())

    try:
        with reading_checkpoint(path):
            return unless_idle(look, doing="Looking at", path=Path(path)), None
    except CheckpointError as error:
        return None, error


def await_seen(path: str | Path) -> None:
    """Return when this rank sees what others see under a path on a file system that it shares with them. Collective.

    A network file system may not show at once what another machine has made. What this rank does not see then is
    for others to tell.
    """
    seen = False
    with raising_together(), reading_checkpoint(path):
        seen = unless_idle(Path(path).exists, doing="Looking at", path=Path(path))
    _await(path, [Path(path) if each else None for each in gather(seen, None)])


def _await(path: str | Path, found: Sequence[Path | None]) -> None:
    """Wait until this rank sees what others have found on its file system; None stands for a rank without."""
    if None not in found or not any(found):
        return
    (place,) = places_of([Path(path)])
    on_same = [number == place.number or not place.is_certain for number in gather(place.number, None)]
    seen = [each for each, same in zip(found, on_same, strict=True) if each is not None and same]
    give_up = time.monotonic() + REMEMBERED
    with raising_together():
        while seen and place.may_be_shared and time.monotonic() < give_up:
            if unless_idle(seen[0].exists, doing="Looking at", path=Path(path)):
                return
            time.sleep(_GLANCE)


def _require_one_tag(path: str | Path, found: Sequence[_Seen]) -> None:
    own = found[dist.get_rank()].folder.name
    other = next((rank for rank, each in enumerate(found) if each.folder.name != own), None)
    if other is not None:
        raise CheckpointError(
            f"{path} names the folder {own!r} on {platform.node()}, and {found[other].folder.name!r} for rank {other}: "
            "the parts on the machines come from different saves.",
            "Use a checkpoint whose parts were saved together.",
        )


def _with_others(problem: CheckpointError, found: Sequence[_Seen | None]) -> CheckpointError:
    """Return why this rank cannot load a checkpoint, with what others see of it."""
    others = [f"{each.host} has the files of the processes {_listed(each.saved)}" for each in found if each is not None]
    if not others:
        return problem
    seen = "; ".join(dict.fromkeys(others))
    return CheckpointError(f"{problem.problem} But {seen}.", _MERGE)


def _require_part(own: _Seen, saved: frozenset[int]) -> None:
    """Check that a rank that may not see all of a checkpoint sees its own files."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for kind, there in (("optim", own.saved), ("model", own.models)):
        if rank not in there:
            raise CheckpointError(
                f"Rank {rank} on {own.host} finds no file '*zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt' in "
                f"{own.folder}, which has those of the processes {_listed(there)}.",
                _MERGE,
            )
    if len(saved) > world_size:
        raise CheckpointError(
            f"{own.folder} on {own.host} has the files of the processes {_listed(own.saved)} only, of {max(saved) + 1} "
            f"that saved it, and {world_size} processes are to load it.",
            _MERGE,
        )


def _listed(ranks: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(ranks))) or "nobody"


def saved_by(file: Path) -> int:
    """Return the number of the process that saved a file; -1 if its name has none."""
    match = _RANK.search(file.name)
    return int(match.group(1)) if match else -1


def _has_latest(folder: Path) -> bool:
    return (folder.parent / LATEST).is_file()


def require_latest(folder: Path) -> None:
    """Check that there is a file ``latest`` beside the folder with the processes' files: it is written last.

    Raises:
        CheckpointError: There is none.
    """
    if not _has_latest(folder):
        raise CheckpointError(
            f"{folder.parent} has no file 'latest': the checkpoint is not whole.", "Copy checkpoints as whole folders."
        )


def optimizer_files(folder: Path) -> list[Path]:
    """Return the files of optimizer states of all processes; their order has no meaning."""
    return unless_idle(lambda: sorted(folder.glob(OPTIMIZER_FILES)), doing="Reading", path=folder)


@contextmanager
def reading_checkpoint(path: str | Path) -> Iterator[None]:
    """Turn errors that torch or DeepSpeed raise on a missing or damaged checkpoint into a :class:`CheckpointError`."""
    try:
        yield
    except SmartInfinityError:
        raise
    except DAMAGE as error:
        if isinstance(error, FileNotFoundError) and not os.path.exists(path):
            raise _not_found(path) from error
        raise CheckpointError(
            f"The checkpoint {path} could not be loaded: {type(error).__name__}: {error}.",
            "Use an undamaged checkpoint of the same model and configuration.",
        ) from error


def _not_found(path: str | Path) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"The checkpoint {path} does not exist.", "Check the path.")


def tagged_folder(path: Path, tag: str | None = None) -> Path:
    """Return the folder that holds the processes' files: a subfolder of ``path``, or ``path`` itself.

    Args:
        path: The folder that was saved, or the folder in it that holds the files.
        tag: Name of the subfolder if it is known; else ``latest`` names it.

    Raises:
        CheckpointNotFoundError: There is nothing at ``path``.
        CheckpointError: There is no such folder.
    """
    if not path.exists():
        raise _not_found(path)
    if not path.is_dir():
        raise CheckpointError(
            f"The checkpoint {path} is a file; the smart_infinity strategy saves folders.",
            "Load a plain checkpoint's weights with LightningModule.load_from_checkpoint before fit.",
        )
    if optimizer_files(path):  # one of several saves that lie in the same folder
        return path
    if tag is None:
        latest = path / LATEST
        tag = _tag_in(latest) if latest.is_file() else "checkpoint"
    restore_interrupted(path, tag)
    if not (path / tag).is_dir():
        raise CheckpointError(
            f"{path} has no folder {tag!r}: it is not a ZeRO-3 checkpoint.",
            _where_else(path),
        )
    return path / tag


def _tag_in(latest: Path) -> str:
    """Return the name of the subfolder that ``latest`` names, which lies directly in the checkpoint."""
    with latest.open("rb") as file:
        content = file.read(_MAX_TAG_BYTES + 1)
    tag = content.decode(errors="replace").strip()
    if len(content) > _MAX_TAG_BYTES or tag in ("", ".", "..") or set(tag) & {"/", "\0"}:
        raise CheckpointError(
            f"{latest} names {shown(tag)}, which is not the name of a folder beside it.",
            "Write the name of the subfolder with the processes' files into it, or use another checkpoint.",
        )
    return tag


def _where_else(path: Path) -> str:
    """Say where checkpoints are if a folder that holds some was passed, such as lightning_logs."""
    found = [folder for levels in range(4) for folder in sorted(path.glob("*/" * levels + "*.ckpt")) if folder.is_dir()]
    if not found:
        return "Check the path, or pass the folder in it that holds the files of the processes."
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"Pass a checkpoint in it: {', '.join(map(str, found[:_NAMED]))}{more}."


def _check_precision(files: list[Path], engine: PortableEngine) -> None:
    saved, wanted = files[0].name.startswith("bf16_"), bool(engine.bfloat16_enabled())
    if saved != wanted:
        raise CheckpointError(
            f"{files[0].parent} was saved {'in' if saved else 'without'} bf16, this run is "
            f"{'in' if wanted else 'without'} it.",
            "Use the precision that it was saved with.",
        )
