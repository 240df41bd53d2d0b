"""Writes training records, from which an interrupted training resumes, and reads the one it resumes from."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lightning_smartinfinity.common.interrupts import dies_of_sigterm, end_on_sigterm
from lightning_smartinfinity.common.last_error import notice_exit
from lightning_smartinfinity.errors import ConfigError, StorageError
from lightning_smartinfinity.resume.record_content import content_of, read_content
from lightning_smartinfinity.resume.typed_json import UnwritableError
from lightning_smartinfinity.settings import TransferConfig
from lightning_smartinfinity.settings.strategy import StrategySettings
from lightning_smartinfinity.settings.user_calls import UserCalls, advise
from lightning_smartinfinity.zero3.untyped import ClientState

if TYPE_CHECKING:
    from lightning_smartinfinity.storage.records.training_record import TrainingRecord
    from lightning_smartinfinity.zero3.engine.training import SmartInfinityEngine
    from lightning_smartinfinity.zero3.optimizer.rank_state import RankState

__all__ = ["FitRecord", "RecordWriter", "loop_in"]

_log = logging.getLogger(__name__)

_INSTEAD = "Save checkpoints to resume from, or pass TransferConfig(keep=False) to write no training records."


class RecordWriter:
    """Writes a rank's training records from the beginning of a training on.

    Args:
        engine: The engine that trains.
        gap: Half a sentence that says why several steps may come between two records.
    """

    def __init__(self, engine: SmartInfinityEngine, *, gap: str) -> None:
        from lightning_smartinfinity.zero3.engine.record import frozen_checksum

        self._engine, self._gap = engine, gap
        self._frozen = frozen_checksum(engine.module)
        self._warned = False
        self._recorded: TrainingRecord | None = None
        engine.optimizer.outside_writes.unrecorded = None

    def record(self, loop: ClientState, *, step: int) -> None:
        """Make a record, between two batches, and write it unless it is written at an interval.

        A record that cannot be written is no reason to end the training: it warns, once.

        Args:
            loop: What the loop needs to go on.
            step: Optimizer steps of the training so far.
        """
        from lightning_smartinfinity.zero3.engine.record import describe_engine

        optimizer = self._engine.optimizer
        if not self._is_on:
            return
        handler, residual = optimizer.rank_state.handler, optimizer.rank_state.residual
        keeping = optimizer.rank_state.keeping
        if optimizer.outside_writes.unrecorded is not None:
            self._turn_off(optimizer.outside_writes.unrecorded)
            return
        try:
            content = content_of({**describe_engine(self._engine), "frozen": self._frozen}, loop)
        except UnwritableError as error:
            self._turn_off(
                f"the training's state{error.where} is a {error.type_name}, which a training record cannot hold"
            )
            return
        try:
            handler.record_training(step=step, content=content, residual=None if residual is None else residual.numpy())
            record = handler.training
            assert record is not None
            keeping.recorded(has_steps=record.has_steps)
            if not handler.writes_back:
                self._warn_of_gap(record)
        except StorageError as error:
            keeping.failed = True
            self._warn(f"a training record could not be written. {error}")

    def rewrite(self, change: Callable[[ClientState], ClientState]) -> None:
        """Change what records hold for the loop, of those that a training could resume from.

        Args:
            change: Function that returns the changed part of the loop.
        """

        def changed(record: TrainingRecord) -> bytes:
            of_engine, loop = read_content(record)
            return content_of(of_engine, change(loop))

        rank_state = self._engine.optimizer.rank_state
        if not self._is_on or rank_state.keeping.failed:
            return
        try:
            rank_state.handler.rewrite_records(changed)
        except StorageError as error:
            rank_state.keeping.failed = True
            self._warn(f"a training record could not be written. {error}")

    @property
    def awaits_record(self) -> bool:
        """Whether state that is written back is newer than the last record."""
        return self._is_on and self._engine.optimizer.rank_state.handler.awaits_record

    def release_signals(self) -> None:
        """Handle Ctrl-C or SIGTERM that came since the step; this may raise KeyboardInterrupt or SystemExit."""
        self._engine.optimizer.rank_state.held_signals.release()

    def persist(self) -> None:
        """Write the state that belongs to the record, if that is due and no update of it is in flight."""
        self._engine.optimizer.persistence.write()

    @property
    def _is_on(self) -> bool:
        """Whether records are written. If one cannot, the ranks agree on that in the next step."""
        rank_state = self._engine.optimizer.rank_state
        if not rank_state.is_usable:
            return False
        rank_state.record_faults()
        if rank_state.keeping.off is not None:
            self._turn_off(rank_state.keeping.off)
        return rank_state.keeping.off is None

    def _warn_of_gap(self, record: TrainingRecord) -> None:
        before, self._recorded = self._recorded, record
        if before is None or record.generation <= before.generation + 1:
            return
        if record.step > before.step + 1:
            self._warn(f"{self._gap}. A kill between these steps leaves nothing to resume from.")
        else:
            self._warn(
                "something writes parameters or optimizer state between the steps, such as a callback that uses "
                "GatheredParameters. A kill between such a write and the end of the next batch may leave nothing to "
                "resume from."
            )

    def _turn_off(self, reason: str) -> None:
        self._engine.optimizer.rank_state.keeping.off = reason
        self._warn(f"{reason.removesuffix('.')}.")

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"An interrupted training cannot be resumed from storage here: {reason} {_INSTEAD}", stacklevel=4
            )


class FitRecord:
    """Makes a strategy's trainings resumable from storage, and outlives them.

    Args:
        calls: The user's calls, which messages name.
        gap: Half a sentence that says why several steps may come between two records.
        automatic: Whether records are written without a call by the user.

    Attributes:
        loop_keys: Keys that the loop's part of a record needs.
        ends_on_sigterm: Whether SIGTERM ends the training like an error, so that state in memory is written; if not,
            the loop does so itself.
        calls, automatic: As passed.
        resumes: Whether the training that is being set up resumes from the state that an interrupted one has left.
    """

    loop_keys: frozenset[str] = frozenset()
    ends_on_sigterm = True

    def __init__(self, calls: UserCalls, *, gap: str, automatic: bool) -> None:
        self.calls, self._gap, self.automatic = calls, gap, automatic
        self.resumes = False
        self._writer: RecordWriter | None = None

    def name_calls(self) -> None:
        """Make errors and warnings of this process name this entry point's calls from now on."""
        advise(self.calls)

    @property
    def is_on(self) -> bool:
        """Whether records of a training are being written."""
        return self._writer is not None

    @staticmethod
    def require_keeping(transfer: TransferConfig, *, what: str) -> None:
        """Check that the settings keep the state of an interrupted training; arguments as for :meth:`resume_next`.

        Raises:
            ConfigError: They do not.
        """
        if not transfer.is_resumable:
            raise ConfigError(
                f"{what} resumes from storage, but the settings ask to keep nothing to resume from.",
                "Leave keep=False and durability='none' out of the transfer settings, as in the first run.",
            )

    def resume_next(self, transfer: TransferConfig, *, what: str) -> None:
        """Make the next training that is set up resume from storage.

        Args:
            transfer: The transfer settings.
            what: The user's call that requests it, for the error.

        Raises:
            ConfigError: The settings ask to keep nothing.
        """
        self.require_keeping(transfer, what=what)
        self.resumes = True

    def begin(self, engine: SmartInfinityEngine, transfer: TransferConfig, *, says: bool) -> None:
        """Begin to record a training, unless the settings ask to keep nothing.

        Args:
            engine: The engine that trains.
            transfer: The transfer settings.
            says: Whether this process says that an interrupted training cannot be resumed, if that is not obvious.
        """
        if transfer.is_resumable:
            notice_exit()
            self._writer = RecordWriter(engine, gap=self._gap)
            from lightning_smartinfinity.zero3.ranks.watchdog import hear_sigterm

            if self.ends_on_sigterm and engine.optimizer.rank_state.writes_back:
                end_on_sigterm()
                hear_sigterm()
        elif says and transfer.keep is not False:
            _log.warning(
                "An interrupted training cannot be resumed from storage here: durability=%r leaves its state half "
                "written. %s",
                transfer.durability,
                _INSTEAD,
            )

    def record(self, loop: ClientState, *, step: int) -> None:
        """Write a record, as :meth:`RecordWriter.record` does; :meth:`begin` has been called."""
        assert self._writer is not None
        self._writer.record(loop, step=step)
        self._writer.release_signals()
        self._writer.persist()

    def persist(self) -> None:
        """Write state in memory to storage, if a training is recorded, that is due and no update is in flight."""
        if self._writer is not None:
            self._writer.persist()

    @property
    def awaits_record(self) -> bool:
        """Whether a training is recorded, and its state in memory is newer than its last record."""
        return self._writer is not None and self._writer.awaits_record

    def rewrite(self, change: Callable[[ClientState], ClientState]) -> None:
        """Change records, as :meth:`RecordWriter.rewrite` does; :meth:`begin` has been called."""
        assert self._writer is not None
        self._writer.rewrite(change)

    @property
    def is_still_interrupted(self) -> bool:
        """Whether a training resumed from storage and ended before its first step, although it was not complete."""
        return False

    def say_how_to_resume(self, settings: StrategySettings) -> None:
        """Log where an interrupted training's state stays, and how to resume or remove it."""
        event = "The training was interrupted"
        if self.is_still_interrupted:
            event = "No optimizer step was taken, so the training that was resumed is still interrupted"
        self._say(settings, event, f"To go on where it stopped, {self.calls.resumes}")

    def how_to_save(self, settings: StrategySettings) -> Callable[[], None]:
        """Return a function that logs where the state of a complete training stays if its model is not saved.

        The function holds no reference to the training, so that the training can be freed before.
        """
        return partial(
            self._say,
            settings,
            "The training was complete, but an error ended the script before the model was saved",
            f"To save the model, {self.calls.resumes}: the fit ends at once. Then call {self.calls.saves}",
        )

    @staticmethod
    def _say(settings: StrategySettings, event: str, remedy: str) -> None:
        from lightning_smartinfinity.zero3.setup.found_training import archived_bytes

        folders, job = " ".join(map(str, settings.storage or ())), settings.transfer.job
        archive, num_bytes = archived_bytes(settings)
        removes = f"run: smart-infinity jobs {folders} --remove"
        earlier = f". An earlier interrupted training takes {num_bytes / 2**20:.2f} MiB in the job {archive!r}"
        earlier += f". To remove that, {removes} {archive}"
        _log.warning(
            "%s, and its state stays in %s (job %r). %s. To remove the state, %s %s%s",
            event,
            folders,
            job,
            remedy,
            removes,
            job,
            earlier if num_bytes else "",
        )

    def end_fit(self, settings: StrategySettings, rank_state: RankState | None, *, completed: bool, says: bool) -> None:
        """Stop recording, and log how to resume if the training was interrupted and its state is kept.

        Args:
            settings: The training's settings.
            rank_state: The rank's open storage and state; None if nothing was trained.
            completed: Whether the training came to its end. A later error may leave its state, too.
            says: Whether this process logs the message.
        """
        if self.is_still_interrupted and rank_state is not None:
            rank_state.keeping.completed = completed = False
        if (self.is_on or self.is_still_interrupted) and says and rank_state is not None:
            if completed:
                rank_state.keeping.told = self.how_to_save(settings)
            elif rank_state.keeping.stays:
                self.say_how_to_resume(settings)
        self.end()

    @property
    def check(self) -> Callable[[TrainingRecord], object]:
        """Raises StorageCorruptError if :meth:`restore` cannot read a record; refers to no training."""
        return partial(read_content, loop_keys=self.loop_keys)

    def restore(self, engine: SmartInfinityEngine) -> ClientState:
        """Continue an engine with the training record that its storage was opened at; return the loop's part.

        Collective.

        Raises:
            StorageCorruptError: The record, or its residual, cannot be read; raised on every rank.
            CheckpointError: It belongs to another model; raised on every rank.
        """
        from lightning_smartinfinity.zero3.engine.record import frozen_checksum
        from lightning_smartinfinity.zero3.optimizer.hyperparameters import warn_of_changes
        from lightning_smartinfinity.zero3.ranks.collectives import raising_together

        loop: ClientState = {}
        frozen, own = frozen_checksum(engine.module), engine.optimizer.configured
        with raising_together():
            loop = _restore(engine, frozen=frozen)
        warn_of_changes(engine.optimizer.configured, own)
        return loop

    def end(self) -> None:
        """Record no longer."""
        self._writer = None
        if self.ends_on_sigterm:
            dies_of_sigterm()


def _restore(engine: SmartInfinityEngine, *, frozen: int) -> ClientState:
    from lightning_smartinfinity.zero3.engine.record import restore_engine

    record = engine.optimizer.rank_state.handler.training
    assert record is not None
    of_engine, loop = read_content(record)
    restore_engine(engine, of_engine, frozen=frozen)
    return loop


def loop_in(record: TrainingRecord) -> ClientState:
    """Return the loop's part of a training record.

    Raises:
        StorageCorruptError: The record cannot be read.
    """
    return read_content(record)[1]
