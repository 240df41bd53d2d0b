"""A rank's open state during a fit: optimizer state on storage, and memory for gradients."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread, current_thread
from typing import NoReturn

import torch
from torch.distributed import ProcessGroup

from lightning_smartinfinity.activations import ActivationTraffic, OffloadedActivations
from lightning_smartinfinity.common.interrupts import HeldSignals
from lightning_smartinfinity.common.last_error import last_error
from lightning_smartinfinity.devices.base import Traffic
from lightning_smartinfinity.errors import SmartInfinityError, StorageError
from lightning_smartinfinity.pipeline.gradients.arena import GradientArena
from lightning_smartinfinity.pipeline.gradients.compressed_gradients import CompressedGradients
from lightning_smartinfinity.pipeline.handler import TransferHandler
from lightning_smartinfinity.settings.user_calls import user_calls
from lightning_smartinfinity.zero3.parameters.partition import Partition
from lightning_smartinfinity.zero3.ranks.background_jobs import BackgroundJobs
from lightning_smartinfinity.zero3.ranks.collectives import gather

__all__ = ["Keeping", "RankState", "warn_of_rolled_back_step"]


@dataclass
class Keeping:
    """Whether the state stays on storage when it is closed.

    Args:
        setting: ``TransferConfig.keep``.
        flush_timeout: ``TransferConfig.flush_timeout``.
        resumable: Whether a training can resume from the state: as far as this rank knows, all ranks have written a
            training record after a step. :meth:`agree` makes sure of it.
        failed: Whether this rank could not write its last record. The other ranks do not know yet.
        off: Why this rank writes no more records, None if it does. The other ranks may not know yet.
        suspended: Whether some rank failed to write a record, and the ranks have not agreed since that all have one.
        completed: Whether the training has ended normally.
        says_end: Whether the caller sets ``completed`` at the end. If not, the training counts as completed when the
            process ends without an error or drops the training.
        saved: Whether a checkpoint or an export was made since the last step.
        gave_up: Whether :meth:`write` has failed, after which nothing more is written.
        all_come: Function that returns whether all ranks call it within some seconds, with the same number. None: there
            is one rank, or all have completed the training.
        told: Function to call after the state was kept for another training to resume from.
    """

    setting: bool | str
    flush_timeout: float = math.inf
    resumable: bool = False
    failed: bool = False
    off: str | None = None
    suspended: bool = False
    completed: bool = False
    says_end: bool = True
    saved: bool = False
    gave_up: bool = False
    all_come: Callable[[int], bool] | None = None
    told: Callable[[], None] | None = None

    @property
    def stays(self) -> bool:
        """Whether the state would stay on storage if it were closed now."""
        on_failure = self.setting == "on-failure" and self.resumable and not self.completed
        return self.setting is True or on_failure

    def recorded(self, *, has_steps: bool) -> None:
        """Note that this rank has written a record; ``has_steps``: after at least one step."""
        self.failed = False
        self.resumable = has_steps and not self.suspended

    def agree(self, *, has_record: bool, num_failed: float, num_off: float) -> None:
        """Decide from all ranks' reports whether a training can resume: every rank must have the last record.

        Args:
            has_record: Whether this rank has written a record after a step.
            num_failed: Number of ranks that could not write the last record.
            num_off: Number of ranks that write no more records.
        """
        self.suspended = num_failed + num_off > 0
        self.resumable = has_record and not self.suspended

    def end(self, *, completed: bool) -> None:
        """Note that the training has ended on this rank, and if it is ``completed``, in the same state on all."""
        self.completed = completed
        if completed:
            self.all_come = None

    def script_failed(self, error: BaseException) -> None:
        """Note that an error ended the script, perhaps after the training: the state stays unless it was saved.

        ``sys.exit()`` with status 0 is no failure: after a complete training, it ends the script normally.
        """
        if not self.saved and not (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.completed = False

    def leave(self, handler: TransferHandler) -> None:
        """Close the handler, and remove the state on storage unless it stays."""
        self.write(handler)
        handler.close(remove=not self.stays)
        if self.told is not None and self.resumable and not self.completed:
            self.told()

    def write(self, handler: TransferHandler, *, lost: str | None = None) -> None:
        """Complete the newest generation on storage if the state stays, or warn that its steps are lost.

        Args:
            handler: The handler; no step that could still be committed is in flight.
            lost: Why the newest generation cannot be written; None if it can.
        """
        if self.stays and not self.gave_up and handler.writes_back and (lost is not None or not handler.is_stored):
            reason = lost or self._obstacle_to_write(handler)
            # Where the ranks have different generations, none could be resumed from: keep the one that all have.
            if self.all_come is not None and not self.all_come(-1 if reason else handler.point):
                reason = reason or "not all processes have ended after the same step."
            if reason is None:
                reason = _flush(handler, seconds=math.inf if self.completed else self.flush_timeout)
            if reason is not None:
                self.gave_up = True
                _warn_of_lost_steps(handler, reason)
        self.resumable = self.resumable and handler.is_resumable

    def _obstacle_to_write(self, handler: TransferHandler) -> str | None:
        if handler.lost is not None:
            return handler.lost
        if handler.lacks_step:
            return "its last step could not begin."
        if not handler.may_persist:
            return "a step or a save of a checkpoint was still in progress."
        if self.off is not None and self.resumable and not self.completed:
            return f"no more training records were made: {self.off}"
        if handler.is_recorded or handler.training is None or self.completed:
            return None
        return "the training ended after a step or another change of the state, and before its training record."


def _flush(handler: TransferHandler, *, seconds: float) -> str | None:
    """Complete the newest generation on storage; return the error if that fails."""
    try:
        handler.persist(deadline=time.monotonic() + seconds)
    except SmartInfinityError as error:
        return str(error)
    return None


def _warn_of_lost_steps(handler: TransferHandler, reason: str) -> None:
    step = handler.stored_step
    goes_on = "cannot be resumed from storage" if step is None else f"resumes after step {step}"
    warnings.warn(
        f"State in host memory could not be written to storage, so the training {goes_on}: {reason}", stacklevel=4
    )


class RankState:
    """The transfer handler and the gradient arena of a rank, from set-up to :meth:`close`.

    Args:
        keep: ``TransferConfig.keep``: whether to leave the state on storage at :meth:`close`.
        flush_timeout: ``TransferConfig.flush_timeout``.

    Attributes:
        partition: This rank's slices of the parameters, from the set-up on.
        arena: The gradient arena, from the set-up to :meth:`close`; StorageError after that.
        compressed: Compressed gradients; None: gradients are not compressed.
        activations: The offloaded activations; None: they stay in memory.
        in_fit: Whether a Trainer's fit with this state is in progress.
        held_signals: Holds Ctrl-C back from a step that changes state in memory until the record of that step.
        background: Jobs that read the state during the training; closing the state waits for them.
        keeping: Whether the state stays on storage.
    """

    partition: Partition
    arena: GradientArena

    def __init__(self, *, keep: bool | str, flush_timeout: float = math.inf) -> None:
        self.keeping = Keeping(keep, flush_timeout)
        self._handler: TransferHandler | None = None
        self._unusable_reason: str | None = None
        self._closed_since = ""
        self.compressed: CompressedGradients | None = None
        self.activations: OffloadedActivations | None = None
        self.in_fit = False
        self._records_ended = False
        self.held_signals = HeldSignals()
        self.background = BackgroundJobs()

    def hold_handler(self, handler: TransferHandler) -> None:
        """Adopt an open, initialized handler."""
        self._handler = handler

    @property
    def is_open(self) -> bool:
        """Whether there is state on storage that belongs to this rank's training."""
        # The exit handler of a collected strategy closes only the handler.
        return self._handler is not None and not self._handler.is_closed

    @property
    def writes_back(self) -> bool:
        """Whether generations are completed on storage at an interval only."""
        return self._handler is not None and not self._handler.is_closed and self._handler.writes_back

    @property
    def is_usable(self) -> bool:
        """Whether the state is open and can be read and written; false after a step that could not be rolled back."""
        return self.is_open and self._obstacle is None

    @property
    def handler(self) -> TransferHandler:
        """The open transfer handler.

        Raises:
            StorageError: The storage was closed, or a step failed that could not be rolled back.
        """
        if self._handler is None or self._handler.is_closed:
            raise self._closed("optimizer state")
        if self._obstacle is not None:
            raise StorageError(f"The optimizer state of this training is lost: {self._obstacle}", self._remedy())
        return self._handler

    @property
    def _obstacle(self) -> str | None:
        """Why the state cannot be read or written; None if it can."""
        return self._unusable_reason or (None if self._handler is None else self._handler.lost)

    def _remedy(self) -> str:
        step = self._handler.stored_step if self.writes_back and self._handler is not None else None
        if step is None:
            return "Resume from a checkpoint; use TransferConfig(durability='step') on a sound disk."
        return f"Storage has the state after step {step}. To go on from there, {user_calls().resumes}."

    def __getattr__(self, name: str) -> NoReturn:
        """Raise StorageError for the arena of a closed training: Python calls this where an attribute is missing."""
        if name == "arena":
            raise self._closed("gradient arena")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def _has_arena(self) -> bool:
        return "arena" in vars(self)

    def _closed(self, what: str) -> StorageError:
        return StorageError(
            f"The {what} of this training has been closed{self._closed_since}.",
            "Start a new fit, or set the model up again.",
        )

    def complete_record(self) -> None:
        """Wait until all data that the training record refers to is on storage; see ``TransferHandler``."""
        if self._handler is not None:
            self._handler.complete_record()

    @property
    def is_recorded(self) -> bool:
        """Whether a record follows each step, as far as this rank knows."""
        return self.keeping.off is None and self._handler is not None and self._handler.training is not None

    def record_faults(self) -> tuple[bool, bool]:
        """Return whether this rank failed to write its last training record, and whether it has stopped writing any."""
        if self._handler is not None and self._handler.residual_failure is not None and self.keeping.off is None:
            self.keeping.off = f"a part of a training record could not be written. {self._handler.residual_failure}"
        return self.keeping.failed, self.keeping.off is not None

    def agree_on_records(self, num_failed: float, num_off: float, *, group: ProcessGroup | None) -> None:
        """Agree with all ranks whether a training can resume from their records. Collective.

        If one rank has stopped writing records, all ranks stop, and the records state why.

        Args:
            num_failed: Sum over the ranks of the first result of :meth:`record_faults`.
            num_off: Sum over the ranks of its second result.
            group: Process group of all ranks.
        """
        record = None if self._handler is None else self._handler.training
        has_record = record is not None and record.has_steps
        self.keeping.agree(has_record=has_record, num_failed=num_failed, num_off=num_off)
        if num_off and self.writes_back:  # the generation on storage has its record, until the next one is there
            self.keeping.resumable = self.handler.is_resumable
        if num_off and self._handler is not None and not self._records_ended:
            self._records_ended = True
            self.keeping.off = next(filter(None, gather(self.keeping.off, group)))
            with suppress(StorageError):  # the reason is then missing from the records
                self._handler.end_records(self.keeping.off)

    def roll_back(self, error: BaseException) -> None:
        """Roll back the step in flight, if there is one, or record that it cannot be rolled back.

        After Ctrl-C the step is still in flight, and can be rolled back later.

        Args:
            error: Why the step is rolled back.
        """
        handler = self._handler
        if handler is None or self._unusable_reason is not None:
            return
        if not handler.in_flight:
            self._forget_step(handler)
            return
        if not handler.can_roll_back:
            self._unusable_reason = f"with {handler.unsafe} a failed step cannot be rolled back. {error}"
            return
        try:
            handler.roll_back()
        except SmartInfinityError as second:
            self._unusable_reason = f"a failed step could not be rolled back. {second}"
        if self._has_arena:
            self.arena.step_rolled_back()

    def _forget_step(self, handler: TransferHandler) -> None:
        try:
            handler.forget_step()
        except SmartInfinityError as error:
            self._unusable_reason = f"a step that could not begin could not be rolled back. {error}"

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for a step."""
        return self._has_arena and bool(self.arena.active.any())

    def warn_of_gradients_left_out(self, path: str | Path) -> None:
        """Warn if a checkpoint is saved while gradients wait for a step; no checkpoint holds gradients."""
        if self.has_gradients:
            warnings.warn(
                f"The checkpoint {path} is saved between backward and step, and holds no gradients: a training that "
                "resumes from it takes its first step without those that wait for the step. Save after the step.",
                stacklevel=4,
            )

    @property
    def residual(self) -> torch.Tensor | None:
        """The part of the gradients that compression dropped, kept for the next step; None if nothing is kept."""
        return None if self.compressed is None else self.compressed.residual

    @property
    def storage_bytes(self) -> int:
        """Bytes of all places on storage; once closed, their initial size."""
        if self._handler is not None:
            return self._handler.storage_bytes
        extents = self.partition.layout.extents
        return sum(extents.file_bytes(device) for device in range(extents.num_devices))

    @property
    def host_bytes(self) -> dict[str, int]:
        """Host memory held by the update, by purpose, in bytes; empty once closed."""
        if not self._has_arena or self._handler is None:
            return {}
        held = {"ring": self._handler.ring_bytes, "gradient_arena": self.arena.memory_bytes}
        if self.arena.ring_bytes:
            held["gradient_ring"] = self.arena.ring_bytes
        if self.compressed is not None:
            held["payloads"] = self.compressed.payload_bytes
            if self.compressed.residual_bytes:
                held["residual"] = self.compressed.residual_bytes
        if self.activations is not None:
            held["activations"] = self.activations.host_bytes
        cached = self._handler.cache_bytes
        return {**held, "dram_cache": cached} if cached else held

    def traffic(self) -> Traffic:
        """Return the counters since the storage was opened; zero once it is closed."""
        if self._handler is None:
            return Traffic()
        counters = self.arena.counters() if self._has_arena else None
        traffic = self._handler.traffic()
        if self._has_arena:
            traffic += Traffic(gradient_wait_seconds=self.arena.wait_seconds)
        if counters is not None:
            traffic += replace(Traffic.over_shared_channel(counters), folders=())
        return traffic if self.activations is None else traffic + _traffic_of(self.activations.traffic())

    def close(self, *, since: str = "") -> None:
        """Close the handler and the arena, and remove the state on storage unless it stays. Idempotent.

        A step that is still in flight is committed first, if this rank can, so that all parameters in memory belong to
        one step. Not collective: no rank resumes from a step that another rank could not commit.

        Args:
            since: Half a sentence giving the reason, for the errors of later uses.
        """
        if since and self._handler is not None:
            self._closed_since = f", since {since}"
        self.background.join()
        # Close each before dropping its reference, so that this can be called again after an interrupt.
        if self._handler is not None:
            self.commit_alone()
            self.write()
            self.keeping.leave(self._handler)
            self._handler = None
        if self._has_arena:
            self.arena.close()
            del self.arena
        self.compressed = None
        self.close_activations()

    def write(self) -> None:
        """Complete the newest generation on storage if the state stays, or warn of what is lost. Not collective."""
        if self._handler is not None and not self._handler.is_closed:
            self.keeping.write(self._handler, lost=self._unusable_reason)

    def close_activations(self) -> None:
        """Remove offloaded activations from storage. Idempotent. A later backward through an existing graph raises."""
        if self.activations is not None:
            self.activations.close()
            self.activations = None

    def closer(self) -> Callable[[], None]:
        """Return a function for an exit handler; it closes the store and holds no reference to arena or optimizer.

        The garbage collector may call it in any thread. In a daemon thread it starts a new thread that closes the
        store, because closing may wait for that daemon thread.
        """
        handler, keeping, background, owner = self.handler, self.keeping, self.background, os.getpid()

        def close_here() -> None:
            if handler.is_closed:
                return
            background.join()
            error = last_error()
            if not keeping.says_end:
                keeping.end(completed=error is None)
            elif error is not None:
                keeping.script_failed(error)
            if keeping.stays and handler.in_flight:
                with suppress(SmartInfinityError):  # the previous generation stays current
                    if handler.step.is_complete:
                        handler.commit()
                    elif handler.writes_back and handler.can_roll_back:
                        handler.roll_back()
            keeping.leave(handler)

        def close() -> None:
            # A forked child runs exit handlers too; the state is its parent's.
            if os.getpid() != owner:
                return
            if current_thread().daemon:
                Thread(target=close_here, name="smart-infinity-close", daemon=False).start()
            else:
                close_here()

        return close

    def commit_alone(self) -> None:
        """Commit the step in flight on this rank, if there is one and that is possible; else roll it back."""
        if self._handler is not None and self._obstacle is None:
            self._commit_or_roll_back(self._handler)

    def _commit_or_roll_back(self, handler: TransferHandler) -> None:
        if not handler.in_flight:
            return
        if not handler.step.is_complete:
            self.roll_back(StorageError("The training ended within a backward.", "Train on."))
            return
        try:
            handler.commit()
        except SmartInfinityError as error:
            self.roll_back(error)
            warn_of_rolled_back_step(error)


def _traffic_of(activations: ActivationTraffic) -> Traffic:
    return Traffic(
        activation_read_bytes=activations.read_bytes,
        activation_write_bytes=activations.written_bytes,
        activation_wait_seconds=activations.waited_seconds + activations.held_up_seconds,
        storage_write_bytes=activations.written_bytes,
    )


def warn_of_rolled_back_step(error: SmartInfinityError) -> None:
    """Warn that the last step of a training failed and was rolled back."""
    warnings.warn(f"The last step of the training was rolled back: {error}", stacklevel=3)
