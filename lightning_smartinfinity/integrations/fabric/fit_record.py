"""Records a Fabric loop, and decides where a loop starts that resumes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lightning.fabric.utilities import rank_zero_info

from lightning_smartinfinity.errors import ConfigError, UnsupportedError
from lightning_smartinfinity.resume.record import FitRecord
from lightning_smartinfinity.resume.start import Source, Start, choose_start, steps_of
from lightning_smartinfinity.settings.folders import names_file
from lightning_smartinfinity.settings.rules import Rule, check, instance, one_of, optional
from lightning_smartinfinity.settings.strategy import STORAGE, STORAGE_OR_NEW, StrategySettings
from lightning_smartinfinity.settings.user_calls import CALLS_OF_FABRIC

__all__ = ["FabricFitRecord"]

_PATHS = Rule(
    "Pass the path of a checkpoint, or a list of paths",
    lambda paths: all(map(names_file, paths)),
    "is not a list of paths",
)


class FabricFitRecord(FitRecord):
    """Records a user-written loop, and resumes it if :meth:`ask` was called before its set-up.

    Attributes:
        awaits_load: Whether a resumed set-up still waits for ``fabric.load``.
        checkpoint: The checkpoint that the loop resumes from; None: it resumes from storage, or begins at step 0.
    """

    def __init__(self) -> None:
        super().__init__(
            CALLS_OF_FABRIC,
            gap="fabric.strategy.record() follows not every step",
            automatic=False,
        )
        self.awaits_load = False
        self.checkpoint: str | None = None
        self._word = STORAGE
        self._checkpoints: tuple[str, ...] = ()
        self._weights_only: bool | None = None

    def ask(
        self,
        start: str,
        checkpoints: str | Path | Sequence[str | Path],
        settings: StrategySettings,
        *,
        weights_only: bool | None = None,
    ) -> None:
        """Make the next set-up resume; the arguments are those of ``fabric.strategy.resume``.

        Raises:
            ConfigError: The settings keep nothing to resume from, or an argument is wrong.
        """
        check("fabric.strategy.resume", "start", start, one_of(STORAGE, STORAGE_OR_NEW))
        check("fabric.strategy.resume", "weights_only", weights_only, optional(instance(bool)))
        paths = (checkpoints,) if isinstance(checkpoints, (str, os.PathLike)) else tuple(checkpoints)
        check("fabric.strategy.resume", "checkpoints", paths, _PATHS)
        if paths and start == STORAGE:
            raise ConfigError(
                "fabric.strategy.resume(checkpoints=...) chooses among them only with 'storage-or-new'.",
                "Pass 'storage-or-new' first, or leave checkpoints out.",
            )
        passed = "" if start == STORAGE else repr(start)
        self.resume_next(settings.transfer, what=f"fabric.strategy.resume({passed})")
        self._word, self._checkpoints, self._weights_only = start, tuple(map(str, paths)), weights_only

    def choose(self, settings: StrategySettings, *, settle: Callable[[], bool]) -> None:
        """Decide where the training starts that is about to be set up. Collective.

        Args:
            settings: The strategy's settings.
            settle: Commits the last step of an earlier loop of this process, and returns whether the set-up removes its
                state because it was complete.
        """
        if not self.resumes or self._word == STORAGE:
            return
        from lightning_smartinfinity.zero3.checkpoints.formats.trust import loading_policy

        paths = partial(filter, os.path.exists, self._checkpoints)
        with loading_policy(self._weights_only, consent="weights_only=False to fabric.strategy.resume"):
            steps = steps_of(paths, "global_steps", settings=settings)
            start: Start = choose_start(settings, steps, is_removed=settle(), places=self._checkpoints)
        self.resumes, self.checkpoint = start.source is Source.STORAGE, start.checkpoint
        rank_zero_info(f"fabric.strategy.resume({STORAGE_OR_NEW!r}): {start.reason}")

    def begin_set_up(self) -> None:
        """Note that the training is set up; ``fabric.load`` comes next if it resumes."""
        self.end()
        self.awaits_load = self.resumes or self.checkpoint is not None

    def is_asked_for(self, path: str | Path) -> bool:
        """Return whether ``fabric.load(path, state)`` asks for what the set-up chose; both words do."""
        return str(path) in (STORAGE, STORAGE_OR_NEW) and (self.awaits_load or self._word == STORAGE_OR_NEW)

    def has_loaded(self) -> None:
        """Note that the loop has got its state."""
        self.resumes = self.awaits_load = False
        self.checkpoint, self._word = None, STORAGE

    def require_loaded(self) -> None:
        """Check that the loop has loaded its state, if it resumes.

        Raises:
            UnsupportedError: It has not.
        """
        if self.awaits_load:
            raise UnsupportedError(
                "A training that resumes lacks the state of its loop.",
                f"Call fabric.load({self._word!r}, state) after fabric.setup, with the state that was recorded.",
            )

    def close(self) -> None:
        """Record no longer, and take :meth:`ask` back."""
        self.end()
        self.has_loaded()
