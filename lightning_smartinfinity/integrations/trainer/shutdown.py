"""How a Trainer's run ends after SIGTERM or an error: on all ranks, and soon if a disk does not answer."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_smartinfinity.errors import RankLostError, StorageTimeoutError
from lightning_smartinfinity.native import ask_to_end
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
    "end_by",
    "end_together_after_sigterm",
    "give_up_soon_after_sigterm",
]


def end_together_after_sigterm(trainer: pl.Trainer) -> None:
    """Let all ranks end after the same batch if one of them receives SIGTERM.

    Lightning's own handler broadcasts as soon as the signal comes, whatever the other ranks do then, and hangs. The
    ranks agree at the start of each batch, where Lightning's loop tells all of them what rank 0 knows.
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


def give_up_soon_after_sigterm() -> None:
    """Let SIGTERM end a wait for a disk that does not answer, and tell the other ranks of it at once.

    Lightning's own handler, which has to be registered by now, only takes a note of it.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and callable(handler):

        def ask_and_handle(signum: int, frame: FrameType | None) -> Any:
            ask_to_end()
            return handler(signum, frame)

        signal.signal(signal.SIGTERM, ask_and_handle)
    hear_sigterm()


class EndsEvaluations(Strategy):
    """A strategy's hooks of evaluations: they begin when the last step is done, and SIGTERM ends them."""

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
        if not _is_in_fit(self.lightning_module):  # a fit hears SIGTERM already
            give_up_soon_after_sigterm()


def _begin_batch(module: pl.LightningModule | None) -> None:
    """End an evaluation if any rank received SIGTERM; within a fit, leave that to its next batch.

    The ranks need not agree, since nothing is to be saved: one that waits for another learns why that one has ended.

    Raises:
        SIGTERMException: A rank received SIGTERM.
    """
    if not _is_in_fit(module) and is_asked_to_end():
        raise SIGTERMException
    note_batch()


def _is_in_fit(module: pl.LightningModule | None) -> bool:
    assert module is not None
    return module.trainer.state.fn == TrainerFn.FITTING


def end_by(exception: BaseException, module: pl.LightningModule | None) -> None:
    """Tell the other ranks of the exception that ends a run, unless it only shows that one of them is missing.

    Args:
        exception: What ends the run, which Lightning raises afterwards.
        module: The module of the run, if it has come so far.

    Raises:
        RankLostError: Another rank is missing. A collective's error, which Lightning would raise, does not say which.
    """
    # Ctrl-C, the end that SIGTERM asks for, or a disk that has had its time and is to be closed.
    if not isinstance(exception, Exception) or isinstance(exception, StorageTimeoutError):
        ask_to_end()
    lost = lost_rank_behind(exception)
    if lost is None:
        if not isinstance(exception, (SIGTERMException, RankLostError)):  # which all ranks know of
            tell_failure(exception)
        return
    assert module is not None
    for logger in module.trainer.loggers:  # as Lightning does after this hook, unless it raises
        logger.finalize("failed")
    module.trainer._teardown()
    raise lost from exception
