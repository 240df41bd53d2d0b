"""Records the trainings of ``transformers.Trainer``, with the loop's state after a step, and resumes from a record."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_smartinfinity.common.patches import replaced, wrapped
from lightning_smartinfinity.errors import CheckpointError, UnsupportedError
from lightning_smartinfinity.integrations.transformers.batches import Batches
from lightning_smartinfinity.integrations.transformers.locked_folder import LockedFolder
from lightning_smartinfinity.integrations.transformers.seams import Trainer
from lightning_smartinfinity.resume.random_states import RNG_KEY, capture, fits, restore
from lightning_smartinfinity.resume.record import FitRecord, loop_in
from lightning_smartinfinity.resume.record_content import TRANSFORMERS_KEYS
from lightning_smartinfinity.resume.schedules import prepare_loads, warn_of_changed_schedule
from lightning_smartinfinity.settings.strategy import StrategySettings
from lightning_smartinfinity.settings.user_calls import CALLS_OF_TRANSFORMERS
from lightning_smartinfinity.zero3.untyped import ClientState

if TYPE_CHECKING:
    from lightning_smartinfinity.zero3.engine.training import SmartInfinityEngine

__all__ = ["RecordedTraining", "TransformersFitRecord"]

# Older versions of transformers lack some of these methods. Their trainings are not recorded.
_METHODS = ("_init_training_state", "_load_rng_state", "_maybe_log_save_evaluate", "_run_epoch")
_STATE = "trainer_state"
_LEFT_OUT = frozenset({"log_history", "stateful_callbacks"})  # the first grows with every step
_RUNNING = ("current_flos", "_globalstep_last_logged")
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class TransformersFitRecord(FitRecord):
    """Records the trainings of a Trainer after each step, before the step's evaluation and save.

    Attributes:
        loop: The loop's part of the record that the next training resumes from; None if it does not.
    """

    loop_keys = TRANSFORMERS_KEYS

    def __init__(self) -> None:
        super().__init__(
            CALLS_OF_TRANSFORMERS,
            gap="several optimizer steps follow one call of on_step_end",
            automatic=True,
        )
        self.loop: ClientState | None = None
        self._last: Trainer | None = None
        self._folder: LockedFolder | None = None

    @property
    @override
    def is_still_interrupted(self) -> bool:
        if self.loop is None or self._last is None:
            return False
        before, now = self.loop[_STATE], self._last.state
        stopped = self._last.control.should_training_stop and now.global_step <= now.max_steps  # here or by a callback
        return now.global_step == before["global_step"] < before["max_steps"] and not stopped

    def ended(self, trainer: Trainer) -> None:
        """Note the Trainer of a training that has ended without an error."""
        self._last = trainer

    def prepare_resume(self, trainer: Trainer, settings: StrategySettings) -> str:
        """Return a folder that the Trainer takes for the checkpoint of the training on storage. Collective.

        It has the files of the loop, which the Trainer reads before the engine exists.

        Raises:
            ConfigError: The settings keep nothing to resume from.
            UnsupportedError: The installed version of transformers has another loop.
            CheckpointError: There is nothing to resume from, or Lightning recorded it; raised on every rank.
            StorageError: The record cannot be read; raised on every rank.
        """
        from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
        from transformers.trainer_callback import TrainerState

        from lightning_smartinfinity.zero3.ranks.collectives import raising_together
        from lightning_smartinfinity.zero3.setup.found_training import next_record

        self.resume_next(settings.transfer, what="train(resume_from_checkpoint='storage')")
        if not _has_loop(trainer):
            raise UnsupportedError(
                "This version of transformers has another training loop, which is not recorded on storage.",
                "Update transformers, or resume from a checkpoint.",
            )
        record = next_record(settings, None)
        with raising_together():
            self.loop = loop_in(record)
            if _STATE not in self.loop:
                raise CheckpointError(
                    "The training on storage is none of transformers' Trainer.",
                    "Resume it where it began, or choose another storage folder or TransferConfig(job=...).",
                )
        self._folder = LockedFolder(TRAINER_STATE_NAME, SCHEDULER_NAME)
        folder = self._folder.path
        TrainerState(**self.loop[_STATE]).save_to_json(str(folder / TRAINER_STATE_NAME))
        torch.save(self.loop["scheduler"], folder / SCHEDULER_NAME)
        return str(folder)

    def end(self) -> None:
        """Record no longer, and forget what the last training resumed from."""
        super().end()
        self.loop, self._last, self.resumes = None, None, False
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the folder of :meth:`prepare_resume` once the Trainer has read it; a later kill would leave it."""
        if self._folder is not None:
            self._folder.remove()


class RecordedTraining:
    """A training of a Trainer that is recorded after each step, and that may resume from a record.

    A resumed training first repeats the logs, the evaluation and the save that followed the recorded step. Then it
    continues with the next batch.

    Args:
        trainer: The Trainer, which is about to train.
        record: The record.
        settings: The training's settings.
        engine: Function that returns the engine, once the Trainer has made it.
    """

    def __init__(
        self,
        trainer: Trainer,
        record: TransformersFitRecord,
        settings: StrategySettings,
        engine: Callable[[], SmartInfinityEngine],
    ) -> None:
        self._trainer, self._record, self._settings, self._engine = trainer, record, settings, engine
        self._loop = record.loop
        self._same_ranks = self._loop is not None and fits(
            self._loop[RNG_KEY], world_size=trainer.args.world_size, warn=trainer.is_world_process_zero()
        )
        self._batches: Batches | None = None
        self._has_begun = False
        self._recorded_step = -1

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the training within this context."""
        import transformers

        with ExitStack() as patches:
            if _has_loop(self._trainer):
                patches.enter_context(wrapped(self._trainer, "_init_training_state", self._init))
                patches.enter_context(wrapped(self._trainer, "_run_epoch", self._run))
                patches.enter_context(wrapped(self._trainer, "_load_rng_state", self._load_random))
                patches.enter_context(wrapped(self._trainer, "_maybe_log_save_evaluate", self._end_step))
                patches.enter_context(wrapped(transformers.trainer, "deepspeed_load_checkpoint", self._load_engine))
                patches.enter_context(wrapped(transformers.trainer, "skip_first_batches", self._skip))
            yield
            self._record.ended(self._trainer)

    # ---- in the order in which the Trainer calls them

    def _init(self, original: Callable[..., tuple[int, int]], *args: Any) -> tuple[int, int]:
        epoch, num_batches = original(*args)
        trainer = self._trainer
        if self._loop is None:
            _warn_of_callbacks(trainer)
            return epoch, num_batches
        _restore_callbacks(_exportable(trainer), self._loop["callbacks"])
        states = type(trainer.state)(stateful_callbacks=[*_exportable(trainer), trainer.control])
        trainer.state.stateful_callbacks = states.stateful_callbacks  # saves replace the states of these names
        return (self._loop["epoch"], num_batches) if self._same_ranks else (epoch, num_batches)

    def _load_engine(self, original: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
        self._prepare_scheduler(Path(args[0]), new_settings=engine.optimizer.own_hyperparameters)
        if self._loop is None:
            original(engine, *args, **kwargs)
            return
        before, self._loop = self._loop, self._record.restore(engine)
        if before[_STATE] != self._loop[_STATE]:
            raise CheckpointError(
                "The training on storage changed while it was being resumed.", "Run the script again."
            )

    def _prepare_scheduler(self, folder: Path, *, new_settings: bool) -> None:
        from transformers.trainer import SCHEDULER_NAME

        scheduler = self._trainer.lr_scheduler
        if new_settings:
            prepare_loads([scheduler], new_settings=True)
        elif (folder / SCHEDULER_NAME).exists():  # compared here: the Trainer drops warnings of the load
            warn_of_changed_schedule(scheduler, torch.load(folder / SCHEDULER_NAME, weights_only=True))

    def _run(self, original: Callable[..., None], **epoch: Any) -> None:
        self._batches = Batches(epoch["train_dataloader"])
        if not self._has_begun:
            self._has_begun = True
            self._record.remove_folder()
            self._record.begin(
                self._engine(), self._settings.transfer, says=bool(self._trainer.is_world_process_zero())
            )
            if self._loop is not None:
                self._go_on(self._loop, epoch)
            elif epoch["resume_from_checkpoint"] is None:  # else the position in the data is not known yet
                self._write(epoch["epoch"], pending=None)
        args = self._trainer.args
        with replaced(args, "ignore_data_skip", args.ignore_data_skip and self._loop is None):
            original(**epoch)
        self._loop = None

    def _skip(self, original: Callable[..., Any], loader: Any, num_batches: int = 0) -> Any:
        """Leave out the batches already used, if the loader does not continue from its position."""
        if self._continues:
            return loader
        rest = original(loader, num_batches)
        self._batches = Batches(rest, num_skipped=num_batches)
        return rest

    def _load_random(self, original: Callable[..., None], checkpoint: str | None) -> None:
        if self._loop is None:
            original(checkpoint)
        elif self._same_ranks and not self._continues:
            restore(self._loop[RNG_KEY], self._trainer.args.device)

    def _end_step(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        step, pending = self._trainer.state.global_step, None if self._loop is None else self._loop["pending"]
        if step != self._recorded_step:
            _, grad_norm, _, _, epoch = args[:5]
            norm = grad_norm.item() if isinstance(grad_norm, torch.Tensor) else grad_norm
            self._write(epoch, pending={"grad_norm": norm, "learning_rate": kwargs["learning_rate"]})
        elif pending is not None and self._loop is not None and step == self._loop[_STATE]["global_step"]:
            # No step was taken yet. If the epoch ends here, the logs at its end have the values of the recorded step.
            args = (args[0], pending["grad_norm"], *args[2:])
            kwargs["learning_rate"] = pending["learning_rate"]
        original(*args, **kwargs)

    # ---- the record

    def _write(self, epoch: int, *, pending: ClientState | None) -> None:
        """Write a record.

        Args:
            epoch: Number of the epoch.
            pending: Arguments of ``_maybe_log_save_evaluate`` that follows; None before the first step.
        """
        trainer = self._trainer
        self._recorded_step = trainer.state.global_step
        if not self._record.is_on:
            return
        assert self._batches is not None
        names = (field.name for field in fields(trainer.state) if field.name not in _LEFT_OUT)
        loop = {
            _STATE: {name: getattr(trainer.state, name) for name in names},
            "callbacks": [[type(each).__name__, dict(each.state()["attributes"])] for each in _exportable(trainer)],
            "control": {name: getattr(trainer.control, name) for name in _FLAGS},
            "running": {name: getattr(trainer, name) for name in _RUNNING},
            "tr_loss": trainer._tr_loss.detach(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            RNG_KEY: capture(trainer.args.device, world_size=trainer.args.world_size),
            "batches": self._batches.state(),
            "epoch": epoch,
            "fraction": trainer.state.epoch - epoch if pending else 0.0,
            "pending": pending,
        }
        self._record.record(loop, step=trainer.state.global_step)

    def _go_on(self, loop: ClientState, epoch: dict[str, Any]) -> None:
        """Continue the loop at the point where it resumes: repeat what followed the step, and end the epoch if it ends.

        Args:
            loop: The loop's part of the record.
            epoch: Arguments of ``_run_epoch``; changed in place.
        """
        trainer = self._trainer
        for name, value in loop["running"].items():
            setattr(trainer, name, value)
        trainer._tr_loss = loop["tr_loss"].to(trainer.args.device)
        trainer._total_loss_scalar = -trainer._tr_loss.item()  # the result's mean is that of this call's steps
        for name, value in loop["control"].items():
            setattr(trainer.control, name, value)
        state = loop[_STATE]
        if state["global_step"] >= min(state["max_steps"], trainer.state.max_steps):  # it may have more steps now
            trainer.control.should_training_stop = state["global_step"] >= trainer.state.max_steps
        if self._same_ranks:
            restore(loop[RNG_KEY], trainer.args.device)
        trainer.state.train_batch_size = trainer.args.train_batch_size  # the state has that of the record
        self._recorded_step = trainer.state.global_step  # its record stays valid until the next step
        if loop["pending"] is not None:
            passed = (epoch[name] for name in ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time"))
            pending = loop["pending"]
            trainer._maybe_log_save_evaluate(
                trainer._tr_loss, pending["grad_norm"], *passed, learning_rate=pending["learning_rate"]
            )
        if self._same_ranks:
            loop[RNG_KEY] = capture(trainer.args.device, world_size=trainer.args.world_size)
            self._find_batch(loop, epoch)

    def _find_batch(self, loop: ClientState, epoch: dict[str, Any]) -> None:
        """Make the epoch continue after the batches already used, or end at once if the recorded one ends here."""
        trainer, steps = self._trainer, epoch["steps_in_epoch"]
        used, window = round(loop["fraction"] * steps), trainer.args.gradient_accumulation_steps
        stops = trainer.control.should_epoch_stop or trainer.control.should_training_stop
        if not stops and loop["fraction"] < 1:
            used = self._used_of_other_data(loop, used, steps)
        is_over = stops or used >= steps
        if is_over:
            used = epoch["num_update_steps_per_epoch"] * window
        elif used % window:
            loop["batches"] = None  # the position is within a window: the Trainer skips the batches before the window
            warnings.warn(
                f"The interrupted training stopped after {used} batches of its epoch, and "
                f"gradient_accumulation_steps={window} does not divide them. The last {used % window} are used again.",
                stacklevel=2,
            )
            used -= used % window
        epoch["steps_trained_in_current_epoch"] = used
        if self._continues:
            assert self._batches is not None
            restore_now = partial(restore, loop[RNG_KEY], trainer.args.device)
            self._batches.load(loop["batches"], is_over=is_over, when_fetched=restore_now)
        if used > 0 and not is_over and getattr(epoch["train_dataloader"], "num_workers", 0):
            warnings.warn(
                "The resumed run is not exactly the one that was interrupted: DataLoader workers draw their random "
                "numbers, if any, from new seeds.",
                stacklevel=2,
            )

    def _used_of_other_data(self, loop: ClientState, used: int, steps: int) -> int:
        """Move the position to the same sample if the batch size or the data changed; return the used batches."""
        args, now = self._trainer.args, self._trainer.args.train_batch_size
        sizes = (loop[_STATE].get("train_batch_size") or now, now)
        if not self._continues:
            return used
        assert self._batches is not None
        window = args.gradient_accumulation_steps
        moved = self._batches.moved(loop["batches"], sizes=sizes, window=window, steps=steps)
        if moved is None:
            return used
        loop["batches"], told = moved
        if self._trainer.is_world_process_zero():
            told += f"The training ends at max_steps={self._trainer.state.max_steps}, which counts the earlier steps: "
            told += "the last epoch may end early. To go on exactly, pass the same data and "
            warnings.warn(f"{told}per_device_train_batch_size={sizes[0]}.", stacklevel=2)
        return int(loop["batches"]["state"]["num_fetched"])

    @property
    def _continues(self) -> bool:
        """Whether the loader continues from its recorded position in the epoch that resumes."""
        has_position = self._batches is not None and self._batches.has_position
        return self._loop is not None and self._loop["batches"] is not None and has_position and self._same_ranks


def _has_loop(trainer: Trainer) -> bool:
    return all(hasattr(trainer, name) for name in _METHODS)


def _restore_callbacks(callbacks: list[Any], saved: list[list[Any]]) -> None:
    """Give callbacks the saved states of their classes, as transformers does; several of one class in their order."""
    rest = saved
    for callback in callbacks:
        state = next((state for state in rest if state[0] == type(callback).__name__), None)
        if state is not None:
            vars(callback).update(state[1])
            rest = [other for other in rest if other is not state]
    if rest:
        warnings.warn(
            f"The training that is resumed had callbacks that this one has not: {', '.join(name for name, _ in rest)}. "
            "Their states are left out.",
            stacklevel=2,
        )


def _warn_of_callbacks(trainer: Trainer) -> None:
    """Warn of callbacks whose states are in the checkpoint that is resumed, and are not restored."""
    saved, own = (
        state.stateful_callbacks
        for state in (trainer.state, type(trainer.state)(stateful_callbacks=_exportable(trainer)))
    )
    left = sorted(name for name in saved.keys() & own.keys() if saved[name] != own[name])
    if left and not trainer.args.restore_callback_states_from_checkpoint and trainer.is_world_process_zero():
        warnings.warn(
            f"The checkpoint has states of callbacks that are not restored: {', '.join(left)}. To restore them, pass "
            "TrainingArguments(restore_callback_states_from_checkpoint=True).",
            stacklevel=2,
        )


def _exportable(trainer: Trainer) -> list[Any]:
    from transformers.trainer_callback import ExportableState

    return [each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)]
