"""Records the fits of a Trainer, with the loop's state after a batch, and resumes a restarted fit from the record."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_smartinfinity.checkpoint_hint import LIGHTNING_KEY
from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.integrations.trainer.callback_support import refuse_search
from lightning_smartinfinity.integrations.trainer.checkpoint_index import (
    CheckpointIndex,
    checkpoints_of,
    folders_of,
    require_no_lost_link,
    warn_of_moving_folders,
)
from lightning_smartinfinity.integrations.trainer.recorded_loop import INDEX, loop_state, restore_index, watch_steps
from lightning_smartinfinity.resume.fit_loaders import FitLoaders
from lightning_smartinfinity.resume.fit_point import Following, following, is_at_end, is_within_step, settle
from lightning_smartinfinity.resume.loops import (
    begin_next_epoch,
    continue_epoch,
    go_on_after_batch,
    load_loader_states,
    passed_to_run,
    start_from,
    warn_of_lost_gradients,
    warn_of_missing_gradients,
    warn_of_other_processes,
    warn_of_repeated_batch,
    without_positions,
)
from lightning_smartinfinity.resume.random_states import RNG_KEY, capture, fits, restore
from lightning_smartinfinity.resume.record import FitRecord
from lightning_smartinfinity.resume.record_content import TRAINER_KEYS
from lightning_smartinfinity.resume.start import Source, choose_start, steps_of
from lightning_smartinfinity.settings import TransferConfig
from lightning_smartinfinity.settings.strategy import STORAGE, STORAGE_OR_NEW, StrategySettings
from lightning_smartinfinity.settings.user_calls import CALLS_OF_TRAINER
from lightning_smartinfinity.zero3.ranks.collectives import raising_together
from lightning_smartinfinity.zero3.untyped import ClientState

if TYPE_CHECKING:
    from lightning_smartinfinity.zero3.engine.training import SmartInfinityEngine

__all__ = ["RESUMED_FROM", "TrainerFitRecord"]

RESUMED_FROM = (LIGHTNING_KEY, "loops", "lr_schedulers")
"""Keys of a checkpoint without which no fit can resume from it."""

_POINT = "point"  # a key beside the random states in checkpoints


class TrainerFitRecord(FitRecord):
    """Records the fits of a Trainer, and resumes them from a record, or with the random states of a checkpoint.

    Attributes:
        was_interrupted: Whether an error or a signal ended the run.
    """

    loop_keys = TRAINER_KEYS
    ends_on_sigterm = False  # Lightning ends the fit after the batch

    def __init__(self) -> None:
        super().__init__(
            CALLS_OF_TRAINER,
            gap="training_step takes several optimizer steps, and a record is written at the end of a batch only",
            automatic=True,
        )
        self.was_interrupted = False
        self._index: CheckpointIndex | None = None
        self._random_state: dict[str, Any] | None = None
        self._other_processes: int | None = None  # that saved, if their number was another
        self._follows: Following | None = None
        self._loaders: FitLoaders | None = None
        self._saved_loaders: dict[str, Any] | None = None
        self._at_end: dict[str, Any] | None = None
        self._num_steps = 0  # of the engine, at the end of the last batch
        self._resumed_at: int | None = None  # number of the Trainer's steps

    def begin_run(self, trainer: pl.Trainer, settings: StrategySettings, *, settle: Callable[[], bool]) -> None:
        """Reset for a new run, and decide whether it resumes from storage. Collective.

        Args:
            trainer: The Trainer.
            settings: The strategy's settings.
            settle: Commits the last step of an earlier fit of this process, and returns whether the set-up removes its
                state because it was complete.

        Raises:
            ConfigError: It resumes, but the settings keep nothing to resume from, or the run is not a fit, or one with
                ``fast_dev_run`` or a callback that searches first.
            CheckpointError, StorageError: It resumes from what is newest, which cannot be told.
        """
        self.end()
        vars(trainer._checkpoint_connector).pop("resume_start", None)  # of a run whose set-up failed
        self._random_state = self._saved_loaders = self._follows = self._other_processes = self._resumed_at = None
        if trainer.state.fn == TrainerFn.FITTING:  # else a checkpoint may still be saved of the fit before
            self._trainer, self._loaders, self._at_end = trainer, FitLoaders(trainer), None
        self.resumes = False
        doing, given = trainer.state.fn, passed_to_run(trainer, "ckpt_path")
        if doing is None or given not in (STORAGE, STORAGE_OR_NEW):
            return
        if doing != TrainerFn.FITTING and not os.path.exists(given):
            raise ConfigError(
                f"{doing.value}(ckpt_path={given!r}) cannot work: only fit goes on from an interrupted training.",
                f"Pass the path of a checkpoint, or 'best' or 'last'; or call fit(ckpt_path={given!r}) before.",
            )
        if doing == TrainerFn.FITTING:
            self.resume_next(settings.transfer, what=f"fit(ckpt_path={given!r})")
            refuse_search(trainer, given)
            if given == STORAGE_OR_NEW:
                self._choose_start(trainer, settings, settle=settle)
            if self.resumes and trainer.fast_dev_run:  # type: ignore[attr-defined]
                raise ConfigError(
                    f"fit(ckpt_path={given!r}) would resume the interrupted training in a Trainer with fast_dev_run, "
                    "which ends it after a few batches.",
                    "Leave fast_dev_run out; or try the script with another storage folder or TransferConfig(job=...).",
                )

    def _choose_start(self, trainer: pl.Trainer, settings: StrategySettings, *, settle: Callable[[], bool]) -> None:
        """Resume from the newest of storage and checkpoints, or begin at step 0. Collective."""
        from lightning_smartinfinity.zero3.checkpoints.formats.trust import loading_policy

        weights_only = passed_to_run(trainer, "weights_only")
        with loading_policy(weights_only, consent="weights_only=False to Trainer.fit"):
            paths = partial(checkpoints_of, trainer)
            steps = steps_of(paths, "global_step", settings=settings, needed=RESUMED_FROM, is_within=is_within_step)
            start = choose_start(settings, steps, is_removed=settle(), places=folders_of(trainer))
        if start.source is Source.NEW:
            with raising_together():
                require_no_lost_link(trainer)
        warn_of_moving_folders(trainer)
        self.resumes = start.source is Source.STORAGE
        start_from(trainer, STORAGE if self.resumes else start.checkpoint)
        rank_zero_info(f"fit(ckpt_path={STORAGE_OR_NEW!r}): {start.reason}")

    def watch(self, trainer: pl.Trainer, index: CheckpointIndex | None) -> None:
        """Write a record after each step of a fit that is being set up; :meth:`begin_fit` switches this on.

        Args:
            trainer: The Trainer.
            index: Index of the Trainer's ModelCheckpoints; None if nothing is trained.
        """
        self._index = index
        watch_steps(
            trainer, partial(self._record_loop, trainer, Following.BATCH), before=self._record_before_validation
        )

    def keeps_order(self) -> bool:
        """Return whether DataLoaders that are set up now keep their own order."""
        is_fit = self._loaders is not None and self._trainer.state.fn == TrainerFn.FITTING
        return not is_fit or self._loaders is None or self._loaders.keep_order

    def add_point(self, checkpoint: ClientState, random: dict[str, Any]) -> None:
        """Add to a checkpoint of Lightning the point of the fit, and random states.

        Args:
            checkpoint: The checkpoint; changed in place.
            random: The present random states.
        """
        point = random
        if "loops" in checkpoint and self._loaders is not None:
            point = self._at_end or self._point(random)
            warn_of_lost_gradients(self._trainer)
            warn_of_repeated_batch(self._trainer, self._engine_steps() - self._num_steps)
            checkpoint["loops"] = without_positions(checkpoint["loops"], self._trainer)
        checkpoint[RNG_KEY] = point

    def _engine_steps(self) -> int:
        engine: Any = self._trainer.strategy.model
        return int(engine.global_steps)

    def note_end(self) -> None:
        """Keep the point at which a fit ends, for checkpoints that are saved afterwards."""
        if self._loaders is not None and self._at_end is None:
            self._at_end = self._point(self._random_now())

    def _random_now(self) -> dict[str, Any]:
        return capture(self._trainer.strategy.root_device, world_size=self._trainer.world_size)

    def _point(self, random: dict[str, Any]) -> dict[str, Any]:
        trainer, loaders = self._trainer, self._loaders
        assert loaders is not None
        follows = following(trainer.fit_loop, is_ending_batch=trainer.validating)
        position, before = loaders.state_at_any_time(in_new_epoch=follows is Following.EPOCH)
        connector = trainer._logger_connector
        is_running = (trainer.training or trainer.validating) and trainer.state.status == TrainerStatus.RUNNING
        metrics = connector.callback_metrics if is_running else connector._callback_metrics
        values = {name: value.detach().cpu() for name, value in metrics.items()}
        return {**(before or random), _POINT: {"follows": follows.value, "loaders": position, "metrics": values}}

    def take_point(self, trainer: pl.Trainer, client_state: ClientState) -> None:
        """Remove the random states and the fit's point from a checkpoint, and keep them if this run uses them.

        On another number of processes a fit uses the point, but not the random states.
        """
        state = client_state.pop(RNG_KEY, None)
        if state is None or trainer.state.fn != TrainerFn.FITTING:
            return
        assert self._loaders is not None
        point, has_random = state.get(_POINT), self._take_random(trainer, state)
        if point is None:
            if has_random:
                self._loaders.expect(None)
            return
        self._follows, self._saved_loaders = Following(point["follows"]), point["loaders"]
        trainer._logger_connector._callback_metrics.update(point["metrics"])
        settle(client_state["loops"]["fit_loop"], self._follows)
        if self._follows is not Following.EPOCH:
            warn_of_missing_gradients(trainer, client_state["loops"]["fit_loop"])
        if has_random and self._saved_loaders is not None:
            self._loaders.expect(self._saved_loaders)

    def _take_random(self, trainer: pl.Trainer, state: dict[str, Any]) -> bool:
        if not fits(state, world_size=trainer.world_size, warn=trainer.is_global_zero):
            self._other_processes = state["world_size"]
            return False
        self._random_state = state
        return True

    def restore_fit(self, trainer: pl.Trainer, engine: SmartInfinityEngine) -> ClientState:
        """Restore the engine from the training record; return the checkpoint dictionary for Lightning. Collective.

        Raises:
            StorageCorruptError, CheckpointError: As for :meth:`restore`.
        """
        loop = self.restore(engine)
        trainer._logger_connector._callback_metrics.update(loop["metrics"])
        checkpoint: ClientState = loop["checkpoint"]
        self._resumed_at = checkpoint["global_step"]
        if self._index is not None:
            restore_index(trainer, self._index, engine.saves, loop, checkpoint.get("callbacks", {}))
        follows = loop.get("follows", Following.BATCH.value if loop["after_batch"] else None)
        self._follows, self._saved_loaders = None if follows is None else Following(follows), loop["loaders"]
        if self._take_random(trainer, loop[RNG_KEY]):
            assert self._loaders is not None
            self._loaders.expect(loop["loaders"])
        return checkpoint

    @property
    @override
    def is_still_interrupted(self) -> bool:
        return (
            self._resumed_at is not None
            and self._resumed_at == self._trainer.global_step
            and not is_at_end(self._trainer)
        )

    def begin_fit(self, trainer: pl.Trainer, engine: SmartInfinityEngine, transfer: TransferConfig) -> None:
        """Continue the fit at the point where it resumes, and begin to record it; the first batch comes next."""
        assert self._loaders is not None
        state, self._random_state = self._random_state, None
        if self._saved_loaders is None:
            load_loader_states(trainer)
        else:
            # Positions of plain loaders hold random states, too, so they are usable only if the fit's own random states
            # are.
            self._loaders.load(self._saved_loaders, own_only=state is None)
            self._saved_loaders = None
        if self._other_processes is not None:
            warn_of_other_processes(trainer, self._other_processes)
        if state is not None:
            restore(state, trainer.strategy.root_device)
        if self._follows is Following.EPOCH:
            begin_next_epoch(trainer)
        elif self._follows is not None:
            go_on_after_batch(trainer, fetch_ahead=self._loaders.fetch_ahead, follows=self._follows)
        elif state is not None:
            continue_epoch(trainer)
        self._num_steps = self._engine_steps()
        self.begin(engine, transfer, says=trainer.is_global_zero)
        if not self.resumes:  # else the record that the fit resumes from stays valid until the next step
            self._record_loop(trainer, self._follows)

    def _record_loop(self, trainer: pl.Trainer, follows: Following | None) -> None:
        """Write a training record.

        Args:
            trainer: The Trainer.
            follows: What the loop does next; None if Lightning infers it from the progress.
        """
        self._num_steps = self._engine_steps()
        if self.is_on:
            self.record(self._described_loop(follows), step=trainer.global_step)

    def _described_loop(self, follows: Following | None) -> ClientState:
        assert self._loaders is not None
        random, checkpoint = self._random_now(), loop_state(self._trainer)
        if follows is Following.BATCH_END:
            settle(checkpoint["loops"]["fit_loop"], follows)
        return {
            "after_batch": follows not in (None, Following.EPOCH),
            "follows": None if follows is None else follows.value,
            RNG_KEY: random,
            "loaders": self._loaders.state(),
            "checkpoint": checkpoint,
            "metrics": dict(self._trainer.callback_metrics),
            **self._described_index(),
        }

    def _record_before_validation(self) -> None:
        """Make a record after a batch, before its validation, if no earlier state could be resumed from."""
        if self.awaits_record:
            self.record(self._described_loop(Following.BATCH_END), step=self._trainer.global_step)

    def record_index(self) -> None:
        """Rewrite records with the present index, before a save."""
        if self.is_on:
            self.rewrite(lambda loop: {**loop, **self._described_index()})

    def _described_index(self) -> ClientState:
        return {} if self._index is None else {INDEX: self._index.describe()}
