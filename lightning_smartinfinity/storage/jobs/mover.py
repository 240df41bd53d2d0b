"""Carries out a plan that moves and deletes parts of trainings."""

from __future__ import annotations

import os
from contextlib import ExitStack

from lightning_smartinfinity.errors import StorageError, StorageLockedError
from lightning_smartinfinity.storage.folders.rank_folder import RankFolder
from lightning_smartinfinity.storage.jobs.archiving import Plan
from lightning_smartinfinity.storage.state.parts import Part, look_at

__all__ = ["Mover"]


class Mover:
    """Carries out a rank's share of a plan. All ranks call each method, and go on only if none has raised.

    Args:
        plan: The plan, the same on all ranks.
        rank: Rank of this process.
    """

    def __init__(self, plan: Plan, *, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._locked = ExitStack()
        self._moved: list[RankFolder] = []
        self._deleted: list[RankFolder] = []

    def claim(self) -> None:
        """Lock the parts, and make the job's folders that they are moved into.

        Raises:
            StorageLockedError: A process uses a part, or has changed it since the plan was made.
            StorageError: A folder cannot be used or made.
        """
        deleted = sorted(self._plan.deleted_by(self._rank), key=lambda part: part.device)  # see trainings._is_gone
        self._deleted = [self._claimed(part) for part in deleted]
        self._moved = [self._claimed(part) for part in self._plan.moved_by(self._rank)]
        for folder in self._moved:
            folder.make_job(self._plan.job)

    def _claimed(self, part: Part) -> RankFolder:
        folder = RankFolder(part.path, create=False)
        self._locked.callback(folder.discard)
        if look_at(folder.inside) != part:
            raise StorageLockedError(
                f"Another process has used {str(part.path)!r} meanwhile.",
                "Wait for that job, or give this one its own TransferConfig(job=...) or storage folder.",
            )
        return folder

    def disown(self) -> None:
        """Delete the manifests of the parts to delete, so that a kill leaves nothing that may hold steps.

        Raises:
            StorageError: The lock of a part cannot be written.
        """
        for folder in self._deleted:
            folder.mark_archived()  # so that after a kill the rest can be replaced, too
        for folder in self._deleted:
            folder.disown()

    def make_room(self) -> None:
        """Delete the parts to delete, and check that nothing is in the way of the parts to move.

        Raises:
            StorageError: A file cannot be deleted, or something that this package did not make is in the way.
        """
        for folder in self._deleted:
            folder.destroy()
        for folder in self._moved:
            target = folder.path.parents[1] / self._plan.job / folder.path.name
            if os.path.lexists(target):
                raise StorageError(
                    f"{str(folder.path)!r} cannot be moved: {str(target)!r} is in the way.",
                    "Remove it if it is no longer needed, or choose another TransferConfig(job=...).",
                )

    def move(self) -> None:
        """Move the parts.

        Raises:
            StorageError: A part could not be moved. The next start moves those that are left.
        """
        for folder in self._moved:
            if self._plan.archives:
                folder.mark_archived(successor=self._plan.successor)
            folder.move(self._plan.job)

    def close(self) -> None:
        """Unlock what was not moved; idempotent. Never raises."""
        self._locked.close()
