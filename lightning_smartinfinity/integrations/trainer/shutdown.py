"""Ends a Trainer's run after SIGTERM or an error: on all ranks, and soon even if a disk does not answer."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed import ProcessGroup
from typing_extensions import override

from lightning_smartinfinity.errors import RankLostError, StorageTimeoutError
from lightning_smartinfinity.native import ask_to_end
from lightning_smartinfinity.settings.user_calls import user_calls
from lightning_smartinfinity.zero3.ranks.collectives import all_come, ending_group
from lightning_smartinfinity.zero3.ranks.watchdog import (
    agree_to_end,
    hear_sigterm,
    is_asked_to_end,
    is_watching,
    lost_rank_behind,
    note_batch,
    tell_failure,
    tell_sigterm,
)

__all__ = [
    "EndsEvaluations",
    "SavesAfterError",
    "end_by",
    "end_together_after_sigterm",
    "abandon_soon_after_sigterm",
]

_SILENT_DISK = "because a disk does not answer, and a save would wait for it again"


def end_together_after_sigterm(trainer: pl.Trainer) -> None:
    """Make all ranks end after the same batch if one of them receives SIGTERM.

    Lightning's own handler broadcasts inside the signal handler, whatever the other ranks are doing, and hangs. Here
    the ranks agree at the start of each batch, where Lightning's loop broadcasts rank 0's flag.
    """
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    notify, broadcast = type(connector)._sigterm_notifier_fn, type(loop)._broadcast_sigterm_tensor

    def take_note(signum: int, frame: FrameType | None) -> None:
        if not is_watching():
            notify(connector, signum, frame)  # type: ignore[arg-type]
        else:
            tell_sigterm()

    def end_if_asked() -> None:
        note_batch()
        if trainer.is_global_zero and is_asked_to_end():
            connector.received_sigterm = True
        try:
            broadcast(loop)
        except SIGTERMException:
            agree_to_end()
            raise

    connector._sigterm_notifier_fn = take_note  # type: ignore[method-assign,assignment]
    loop._broadcast_sigterm_tensor = end_if_asked  # type: ignore[method-assign]


def abandon_soon_after_sigterm() -> None:
    """Make SIGTERM end a wait for a disk that does not answer, and inform the other ranks at once.

    Lightning's own handler must be registered already; it then only records the signal.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and callable(handler):

        def ask_and_handle(signum: int, frame: FrameType | None) -> Any:
            ask_to_end()
            return handler(signum, frame)

        signal.signal(signal.SIGTERM, ask_and_handle)
    hear_sigterm()


class EndsEvaluations(Strategy):
    """Evaluation hooks of a strategy: evaluations begin after the last step is done, and end on SIGTERM."""

    def drain(self) -> None:
        """Wait until the last step is done."""
        raise NotImplementedError

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        _begin_batch(self.lightning_module)
        return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        _begin_batch(self.lightning_module)
        return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        _begin_batch(self.lightning_module)
        return super().predict_step(*args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        self._begin_evaluation()
        super().on_validation_start()

    @override
    def on_test_start(self) -> None:
        self._begin_evaluation()
        super().on_test_start()

    @override
    def on_predict_start(self) -> None:
        self._begin_evaluation()
        super().on_predict_start()

    def _begin_evaluation(self) -> None:
        self.drain()
        if not _is_in_fit(self.lightning_module):  # a fit's handler is installed already
            abandon_soon_after_sigterm()


def _begin_batch(module: pl.LightningModule | None) -> None:
    """End an evaluation if any rank received SIGTERM; within a fit, leave that to the fit's next batch.

    The ranks need not agree on a batch, since nothing is saved: a rank that waits for another learns why the other
    ended.

    Raises:
        SIGTERMException: A rank received SIGTERM.
    """
    if not _is_in_fit(module) and is_asked_to_end():
        raise SIGTERMException
    note_batch()


def _is_in_fit(module: pl.LightningModule | None) -> bool:
    assert module is not None
    return module.trainer.state.fn == TrainerFn.FITTING


class SavesAfterError:
    """Decides whether callbacks save a checkpoint after an error: only if all ranks have failed after the same step.

    A rank that fails alone leaves the others in collectives, with which those of a save would be matched. Nothing is
    saved after the error of a disk that does not answer: the save would wait for it once more. Each run has its own.
    """

    def __init__(self) -> None:
        self._group: ProcessGroup | None = None
        self._allowed: bool | None = None

    def begin_run(self, trainer: pl.Trainer) -> None:
        """Prepare for a run. Collective."""
        if trainer.world_size > 1 and any(map(_may_save, vars(trainer)["callbacks"])):
            self._group = ending_group()

    def allowed(self, trainer: pl.Trainer) -> bool:
        """Return whether callbacks may save after the error that is being handled; the first call is collective."""
        if self._allowed is None:
            self._allow_unless(self._reason_against(trainer, sys.exc_info()[1]), trainer)
        return bool(self._allowed)

    def note_failed_save(self, trainer: pl.Trainer, error: BaseException) -> None:
        """Let no other callback save after the same error if a disk did not answer this save."""
        if self._allowed and _is_of_silent_disk(error):
            self._allow_unless(_SILENT_DISK, trainer)

    def _allow_unless(self, reason: str, trainer: pl.Trainer) -> None:
        self._allowed = not reason
        if reason:
            warnings.warn(
                f"No checkpoint is saved on rank {trainer.global_rank} after the error, {reason}. To resume, pass "
                f"{user_calls().from_storage} or an earlier checkpoint.",
                stacklevel=5,
            )

    def _reason_against(self, trainer: pl.Trainer, error: BaseException | None) -> str:
        if _is_of_silent_disk(error):
            return _SILENT_DISK
        if trainer.world_size == 1 or self._all_failed(trainer, error):
            return ""
        step = trainer.global_step
        return f"because all ranks save a checkpoint together, and not all have failed after step {step}"

    def _all_failed(self, trainer: pl.Trainer, error: BaseException | None) -> bool:
        if isinstance(error, SIGTERMException) and trainer.state.fn == TrainerFn.FITTING:
            return True  # they have agreed to end after the same batch
        if error is None or self._group is None or isinstance(error, RankLostError):
            return False
        return lost_rank_behind(error) is None and all_come(trainer.global_step, self._group)


def _is_of_silent_disk(error: BaseException | None) -> bool:
    """Return whether a disk that does not answer caused an error, or one before it, or one of its group."""
    left, seen = [error], set()
    while left:
        each = left.pop()
        if isinstance(each, StorageTimeoutError):
            return True
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            group = getattr(each, "exceptions", ())  # of an ExceptionGroup, which Python 3.10 does not have
            left += [each.__cause__, each.__context__, *(group if isinstance(group, tuple) else ())]
    return False


def _may_save(callback: pl.Callback) -> bool:
    """Return whether a callback may save a checkpoint after an error."""
    return is_overridden("on_exception", callback, pl.Callback) and getattr(callback, "save_on_exception", True)


def end_by(exception: BaseException, module: pl.LightningModule | None) -> None:
    """Inform the other ranks of the exception that ends a run, unless a missing rank caused it.

    Args:
        exception: Exception that ends the run; Lightning raises it afterwards.
        module: The run's module; None if the run has none yet.

    Raises:
        RankLostError: Another rank is missing. Lightning would raise the collective's error, which does not name it.
    """
    # KeyboardInterrupt, the exit after SIGTERM, or a disk over its time limit: closing must not wait for the disk
    # again.
    if not isinstance(exception, Exception) or _is_of_silent_disk(exception):
        ask_to_end()
    lost = lost_rank_behind(exception)
    if lost is None:
        if not isinstance(exception, (SIGTERMException, RankLostError)):  # all ranks know of these already
            tell_failure(exception)
        return
    assert module is not None
    for logger in module.trainer.loggers:  # Lightning does the same after this hook, unless the hook raises
        logger.finalize("failed")
    module.trainer._teardown()
    raise lost from exception
