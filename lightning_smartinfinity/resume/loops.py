"""Makes a resumed fit draw the random numbers of an uninterrupted one, and load with the user's ``weights_only``.

``Strategy.on_train_start`` is Lightning's last call before the first epoch of a fit. From there on, a resumed fit does
the same as the uninterrupted one did after saving, except for differences that :func:`continue_epoch` corrects or warns
of.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

from lightning_smartinfinity.resume.fit_point import Following, is_between_steps
from lightning_smartinfinity.resume.loader_position import begin_epoch, keeps_position

__all__ = [
    "begin_epoch_after_last",
    "begin_next_epoch",
    "continue_epoch",
    "go_on_after_batch",
    "is_stateful",
    "load_loader_states",
    "load_only_own_states",
    "loaders_of",
    "passed_to_run",
    "start_from",
    "warn_of_lost_gradients",
    "warn_of_missing_gradients",
    "warn_of_other_processes",
    "warn_of_repeated_batch",
    "without_positions",
]

_LIGHTNING_WARNING = "You're resuming from a checkpoint that ended before the epoch ended"


def passed_to_run(trainer: Any, name: str) -> Any:
    """Return the ``weights_only`` or ``ckpt_path`` that the user passed to the running ``fit`` or evaluation.

    ``Trainer._run`` has it, but does not pass it to strategies that load after the set-up, as this one does.

    Args:
        trainer: Trainer that is being set up, or is loading a checkpoint.
        name: Name of the argument.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_run" and frame.f_locals.get("self") is trainer:
            return frame.f_locals.get(name)
        frame = frame.f_back
    return None


def start_from(trainer: Any, path: str | None) -> None:
    """Make Lightning load this checkpoint in the run that is being set up; None: it loads nothing.

    Args:
        trainer: The Trainer, which has not begun to load the path that its user passed.
        path: The path.
    """
    connector = trainer._checkpoint_connector
    begin = type(connector).resume_start

    def begin_once(checkpoint_path: Any = None, **options: Any) -> None:
        del connector.resume_start  # restores the class's method
        begin(connector, path, **options)

    connector.resume_start = begin_once


def without_positions(loops: dict[str, Any], trainer: Any) -> dict[str, Any]:
    """Return the saved loops without the positions of plain loaders, which a checkpoint has elsewhere.

    Lightning with another strategy counts the states, and finds those of loaders that have states there, too.

    Args:
        loops: The value of ``"loops"`` in a checkpoint of Lightning.
        trainer: Trainer that saves.
    """
    loader = trainer.fit_loop._combined_loader
    saved = loops.get("fit_loop", {}).get("state_dict", {})
    if loader is None or "combined_loader" not in saved:
        return loops
    stateful = [one for one in loader.flattened if keeps_position(one) or is_stateful(one)]
    states = zip(stateful, saved["combined_loader"], strict=True)
    return _with_loader_states(loops, [state for one, state in states if not keeps_position(one)])


def _with_loader_states(loops: dict[str, Any], states: list[Any]) -> dict[str, Any]:
    fit_loop = loops["fit_loop"]
    rest = {key: value for key, value in fit_loop["state_dict"].items() if key != "combined_loader"}
    own = {"combined_loader": states} if states else {}
    return {**loops, "fit_loop": {**fit_loop, "state_dict": rest | own}}


def load_only_own_states(trainer: Any) -> None:
    """Make Lightning load a checkpoint's loader states into stateful loaders only, and not into plain ones.

    Args:
        trainer: Trainer whose fit is being set up, and either resumes from a checkpoint or does not resume.
    """
    fit_loop = trainer.fit_loop
    load = type(fit_loop)._load_combined_loader_states

    def load_own() -> None:
        states = fit_loop._combined_loader_states_to_load
        loaders = [] if fit_loop._combined_loader is None else list(filter(is_stateful, loaders_of(fit_loop)))
        if fit_loop.restarting and states and len(states) == len(loaders):
            for loader, state in zip(loaders, states, strict=True):
                loader.load_state_dict(state)
            fit_loop._combined_loader_states_to_load = []
        else:
            load(fit_loop)

    fit_loop._load_combined_loader_states = load_own


def load_loader_states(trainer: Any) -> None:
    """Give stateful loaders their saved states if Lightning set the loaders up before it read the checkpoint's loops.

    Reading ``trainer.estimated_stepping_batches`` in ``configure_optimizers`` sets the loaders up. Lightning does so
    only once, and would then train on batches of the epoch that the saved fit has already used.

    Args:
        trainer: Trainer whose fit is about to begin its first epoch, before random states are restored.
    """
    fit_loop = trainer.fit_loop
    if fit_loop.restarting and fit_loop._combined_loader_states_to_load:
        fit_loop._load_combined_loader_states()
        iter(fit_loop._data_fetcher)


def begin_next_epoch(trainer: Any) -> None:
    """Make a resumed fit loop begin an epoch as a loop that never stopped.

    Args:
        trainer: Trainer whose fit is about to begin its first epoch; all epochs of its saved progress are complete.
    """
    fit_loop = trainer.fit_loop
    fit_loop._restarting = fit_loop._resuming_from_checkpoint = False
    fit_loop.epoch_loop.restarting = False
    if fit_loop.epoch_loop.batch_progress.total.ready > 0:  # else the iterators exist already
        for loader in loaders_of(fit_loop):
            begin_epoch(loader)


def warn_of_other_processes(trainer: Any, before: int) -> None:
    """Warn what happens to the rest of an epoch that another number of processes has begun.

    Args:
        trainer: Trainer whose fit is about to continue.
        before: Number of processes of the saved fit.
    """
    progress, epochs = trainer.fit_loop.epoch_loop.batch_progress, trainer.fit_loop.epoch_progress.current
    done, num_batches = progress.current.processed, trainer.num_training_batches
    if done == 0 or progress.is_last_batch or epochs.started == 0 or not trainer.is_global_zero:
        return
    warnings.warn(
        f"The fit was saved within an epoch, in which {_each_of(before)} had taken {done} batches. Now an epoch has "
        f"{num_batches} batches for {_each_of(trainer.world_size)}. Of this epoch, {done} of them "
        f"count as taken, and the other {max(1, num_batches - done)} are the first batches of the present DataLoader, "
        "unless it has state_dict and load_state_dict. So the epoch repeats some samples and leaves out others. The "
        "following epochs are complete.",
        stacklevel=2,
    )


def _each_of(num_processes: int) -> str:
    return "1 process" if num_processes == 1 else f"each of {num_processes} processes"


def warn_of_lost_gradients(trainer: Any) -> None:
    """Warn if a checkpoint is saved while gradients are accumulated for a step; no checkpoint holds gradients.

    Args:
        trainer: Trainer that saves, during its fit or afterwards.
    """
    loop, epoch = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    batch = loop.batch_progress.current
    is_after_batch = batch.ready == batch.processed
    num_lost = batch.processed % trainer.accumulate_grad_batches
    if num_lost == 0 or (is_after_batch and not loop._should_accumulate()) or not trainer.is_global_zero:
        return
    first, last = batch.processed - num_lost, batch.processed - 1
    which = f"batch {first}" if first == last else f"batches {first} to {last}"
    warnings.warn(
        f"A checkpoint is saved between two optimizer steps, and holds no gradients: those of {which} of epoch "
        f"{max(0, epoch.ready - 1)} are not in it. A fit that resumes from it takes its first step without them. To "
        "lose none, save where a step ends, as ModelCheckpoint(every_n_train_steps=...) does, or resume from storage.",
        stacklevel=2,
    )


def warn_of_repeated_batch(trainer: Any, num_steps: int) -> None:
    """Warn if a checkpoint is saved within a batch of which it has a step or statistics: a resumed fit repeats it.

    Args:
        trainer: Trainer that saves, during its fit or afterwards.
        num_steps: Number of optimizer steps since the end of a batch.
    """
    batch = trainer.fit_loop.epoch_loop.batch_progress.current
    if batch.ready == batch.processed or not trainer.is_global_zero:
        return
    if num_steps > 0:
        done, again = "its optimizer step", "takes that step a second time"
    elif batch.started > batch.processed and any(map(_has_statistics, trainer.lightning_module.modules())):
        done, again = "its forward", "adds it to running statistics, as of BatchNorm, a second time"
    else:
        return
    warnings.warn(
        f"A checkpoint is saved within batch {batch.processed} of epoch {trainer.current_epoch}, after {done}. A fit "
        f"that resumes from it repeats the batch, and {again}. Save in on_train_batch_end, or resume from storage.",
        stacklevel=2,
    )


def _has_statistics(module: torch.nn.Module) -> bool:
    return module.training and getattr(module, "running_mean", None) is not None


def warn_of_missing_gradients(trainer: Any, loops: dict[str, Any]) -> None:
    """Warn if a fit resumes from a checkpoint that was saved between the batches of a step.

    Args:
        trainer: Trainer that resumes.
        loops: The value of ``"fit_loop"`` in the loops of the checkpoint.
    """
    num_batches = trainer.accumulate_grad_batches
    num_lost = loops["epoch_loop.batch_progress"]["current"]["processed"] % num_batches
    if num_lost == 0 or not is_between_steps(loops) or not trainer.is_global_zero:
        return
    warnings.warn(
        f"The checkpoint was saved after {num_lost} of the {num_batches} batches of a step, and holds no gradients: "
        "the first step is taken without theirs. To lose none, resume from storage, or from a checkpoint that was "
        "saved where a step ends.",
        stacklevel=2,
    )


def continue_epoch(trainer: Any) -> None:
    """Restore a resumed fit loop's point in the epoch, from a checkpoint of an earlier version without positions.

    Call it directly after random states have been restored. An epoch's iterator draws from torch's generator when it is
    created, and Lightning has already created one.

    Args:
        trainer: Trainer whose fit is about to begin its first epoch.
    """
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if not fit_loop.restarting:
        # The fit was saved between two epochs. With this flag cleared, Lightning creates a new iterator after the
        # hooks that begin the epoch, as in every epoch.
        fit_loop._resuming_from_checkpoint = False
        return
    lost, remedies = [], ["resume from a checkpoint of an epoch's end or of after a validation"]
    progress = epoch_loop.batch_progress
    begin_epoch_after_last(fit_loop)
    if progress.is_last_batch:
        if epoch_loop.restarted_on_train_batch_end:
            # The fit was saved after the epoch's last batch. Lightning begins the next epoch at once, with this
            # iterator.
            iter(fit_loop._data_fetcher)
    elif progress.current.ready > 0 and not _goes_on_within_an_epoch(fit_loop):
        lost.append(
            "Lightning replays the epoch's batches from the first, since an earlier version saved no position of the "
            "DataLoader"
        )
        warnings.filterwarnings("ignore", message=_LIGHTNING_WARNING)
    elif progress.current.ready > 0 and any(getattr(loader, "num_workers", 0) for loader in loaders_of(fit_loop)):
        lost.append("DataLoader workers draw the rest of the epoch's augmentations, if any, from new seeds")
    if epoch_loop.restarted_on_train_batch_end and _validation_is_due(trainer):
        lost.append("Lightning leaves out the validation that followed the saved batch")
    if lost and trainer.is_global_zero:
        warnings.warn(
            f"The resumed run is not exactly the one that was saved: {' and '.join(lost)}. Weights, optimizer state "
            f"and schedulers are exact. For the rest, {', or '.join(remedies)}.",
            stacklevel=2,
        )


def go_on_after_batch(trainer: Any, *, fetch_ahead: Callable[[], None], follows: Following) -> None:
    """Make a restarted loop continue within an epoch: with the end of a batch, the next batch or the epoch's end.

    Lightning's own restart infers from the saved progress what followed the batch, and would skip a validation or count
    a step twice.

    Args:
        trainer: Trainer whose fit is about to begin its first epoch, directly after random states were restored.
        fetch_ahead: Function to call within the epoch that the loop continues.
        follows: What the loop does next.
    """
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    run_start = type(epoch_loop).on_run_start
    begin_epoch_after_last(fit_loop)

    def start_once(data_fetcher: Any) -> None:
        del epoch_loop.on_run_start  # restores the class's method
        run_start(epoch_loop, data_fetcher)
        fetch_ahead()
        fit_loop._restarting = False
        epoch_loop.restarting = False
        if follows is not Following.BATCH:
            epoch_loop._skip_next_val = follows is Following.VALIDATION_END
            epoch_loop.on_advance_end(data_fetcher)

    epoch_loop.on_run_start = start_once


def begin_epoch_after_last(fit_loop: Any) -> None:
    """Make loaders begin an epoch if the fit was saved after a last batch, as ``limit_train_batches`` may end epochs.

    Args:
        fit_loop: Fit loop that is about to begin its first epoch.
    """
    if fit_loop.epoch_loop.batch_progress.is_last_batch:
        for loader in loaders_of(fit_loop):
            begin_epoch(loader)


def _goes_on_within_an_epoch(fit_loop: Any) -> bool:
    # If the length is unknown, Lightning fetches a batch ahead, which the loader's saved state counts as used.
    return fit_loop._data_fetcher.length is not None and all(map(is_stateful, loaders_of(fit_loop)))


def _validation_is_due(trainer: Any) -> bool:
    fit_loop = trainer.fit_loop
    return any(trainer.num_val_batches) and bool(fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher))


def loaders_of(fit_loop: Any) -> list[Any]:
    """Return the training loaders of a fit loop that has set them up."""
    loaders: list[Any] = fit_loop._combined_loader.flattened
    return loaders


def is_stateful(loader: Any) -> bool:
    """Return whether a loader has its own state, and not only a position of :func:`keeping_position`."""
    if keeps_position(loader):
        return False
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
