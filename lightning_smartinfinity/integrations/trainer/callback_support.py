"""Refuses Lightning callbacks that cannot work with the strategy, and patches others so that they work."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType, SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers, _MockOptimizer
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner import tuning
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_smartinfinity.common.patches import Shared, wrapped
from lightning_smartinfinity.common.update_rules import optimizer_names
from lightning_smartinfinity.errors import ConfigError, UnsupportedError
from lightning_smartinfinity.integrations.session import TrainingSession

__all__ = [
    "REFUSED_CALLBACKS",
    "Refusal",
    "accumulates",
    "adapt_callbacks",
    "admit_batch_size_search",
    "averages_weights",
    "configured_optimizer",
    "copy_around_training",
    "is_trial",
    "refuse_search",
    "synchronize_layers",
    "warn_of_changed_weights",
]


# Key of the average in a checkpoint. Lightning uses "state_dict", where DeepSpeed's checkpoints have no weights.
_AVERAGE = "averaging_state"


@dataclass(frozen=True)
class Refusal:
    """A class of callbacks, subclasses included, that the strategy refuses.

    Args:
        callback: The class.
        reason: Why it cannot work; the text completes "it ...".
        remedy: Alternative for the user.
    """

    callback: type[Callback]
    reason: str
    remedy: str


REFUSED_CALLBACKS = (
    Refusal(
        StochasticWeightAveraging,
        "copies whole weights, which no rank has",
        "Save checkpoints with ModelCheckpoint(save_top_k=...) and average their weights after training.",
    ),
    Refusal(
        BaseFinetuning,
        "adds parameters to the optimizer in mid-training, which have no place on storage",
        "Pass all parameters to the optimizer in configure_optimizers, freeze those that are to be trained later in "
        "on_fit_start by requires_grad_(False), and thaw them in on_train_epoch_start by requires_grad_(True).",
    ),
    Refusal(
        ModelPruning,
        "masks weights in memory, while the step computes them from the masters on storage",
        "Prune the weights before fit or after it.",
    ),
)


_SEARCH = (
    "Run it in a fit of Trainer(devices=1), or try sizes by the command smart-infinity plan --batch, which says what a "
    "training of any number of processes takes."
)


def adapt_callbacks(trainer: pl.Trainer) -> None:
    """Refuse callbacks of the Trainer that cannot work, and patch others, before any of them is set up.

    Raises:
        UnsupportedError: A callback cannot work; the error names the first one.
    """
    for callback in _callbacks(trainer):
        for refusal in REFUSED_CALLBACKS:
            if isinstance(callback, refusal.callback):
                raise _error(callback, refusal)
        if isinstance(callback, GradientAccumulationScheduler):
            _admit(callback, "on_train_start")
        if isinstance(callback, BatchSizeFinder):
            _require_one_fit(callback, trainer)
            _admit(callback, "setup")
        if isinstance(callback, WeightAveraging):
            _admit_average(callback, trainer)


def averages_weights(trainer: pl.Trainer) -> bool:
    """Return whether a callback of the Trainer keeps an average of the weights, which no training record holds."""
    return any(isinstance(callback, WeightAveraging) for callback in _callbacks(trainer))


def copy_around_training(trainer: pl.Trainer) -> None:
    """Make deep copies of callbacks share the module and the strategy, which cannot be copied after their set-up.

    Progress bars refer to their Trainer. Every callback refers to the module through ``log`` and ``log_dict``, which
    are the module's bound methods: deepcopy of a bound method copies its object, deepcopy of a function copies nothing.
    """
    trainer.__deepcopy__ = MethodType(_copied, trainer)  # type: ignore[attr-defined]
    for callback in _callbacks(trainer):
        for name in ("log", "log_dict"):
            setattr(callback, name, _as_function(getattr(callback, name)))


def _copied(trainer: pl.Trainer, memo: dict[int, object]) -> pl.Trainer:
    # A profiler refers to the module through a proxy; deepcopy would copy the module behind it.
    for shared in (trainer.strategy, trainer.lightning_module, trainer.profiler):  # type: ignore[attr-defined]
        memo[id(shared)] = shared
    copied = memo[id(trainer)] = copy.copy(trainer)
    vars(copied).update(copy.deepcopy(vars(copied), memo))
    return copied


def _as_function(method: Callable[..., None]) -> Callable[..., None]:
    @wraps(method)
    def log(*args: Any, **kwargs: Any) -> None:
        method(*args, **kwargs)

    return log


def accumulates(trainer: pl.Trainer) -> bool:
    """Return whether a step may consist of several micro-batches."""
    if not trainer.lightning_module.automatic_optimization or trainer.accumulate_grad_batches > 1:
        return True
    schedulers = (c for c in _callbacks(trainer) if isinstance(c, GradientAccumulationScheduler))
    return any(scheduler.going_to_accumulate_grad_batches() for scheduler in schedulers)


def configured_optimizer(module: pl.LightningModule) -> tuple[Optimizer, LRSchedulerConfig | None]:
    """Return the optimizer of ``configure_optimizers`` and its scheduler.

    Raises:
        UnsupportedError: configure_optimizers returned no optimizer, several optimizers or several schedulers.
    """
    try:
        optimizers, schedulers = _init_optimizers_and_lr_schedulers(module)
    except RuntimeError as error:
        if "multiple optimizers" in str(error):  # Lightning's own refusal in automatic optimization
            raise _several_optimizers("several optimizers") from error
        raise
    if len(optimizers) != 1 or len(schedulers) > 1:
        raise _several_optimizers(f"{len(optimizers)} optimizers and {len(schedulers)} schedulers")
    if isinstance(optimizers[0], _MockOptimizer):  # Lightning's replacement for None
        raise UnsupportedError(
            f"{type(module).__name__}.configure_optimizers returned None.",
            f"Return one of torch.optim's {optimizer_names()}; without one, call validate, test or predict.",
        )
    return optimizers[0], schedulers[0] if schedulers else None


def _several_optimizers(found: str) -> UnsupportedError:
    return UnsupportedError(
        f"configure_optimizers returned {found}.",
        "The smart_infinity strategy trains with one optimizer and at most one scheduler; use parameter groups.",
    )


def warn_of_changed_weights(
    module: pl.LightningModule, checkpoint: Mapping[str, Any], *, excludes_frozen: bool
) -> None:
    """Warn if ``on_save_checkpoint`` changed the set of weights in a checkpoint: DeepSpeed saves its own partitions.

    Args:
        module: The module.
        checkpoint: The dictionary that Lightning saves.
        excludes_frozen: Whether parameters that are not trained are left out.
    """
    if "state_dict" not in checkpoint:
        return
    saved, names = set(module.state_dict()), set(checkpoint["state_dict"])
    if excludes_frozen:
        parameters = module.named_parameters(remove_duplicate=False)
        saved -= {name for name, parameter in parameters if not parameter.requires_grad} - names
    changed = sorted(saved ^ names)
    if changed:
        rank_zero_warn(
            f"on_save_checkpoint has added or removed {changed[0]!r} and {len(changed) - 1} more in "
            "checkpoint['state_dict']. The checkpoint has the module's own weights all the same. To leave out those "
            "that are not trained, pass SmartInfinityStrategy(exclude_frozen_parameters=True); to add values, use "
            "a key of their own beside 'state_dict'."
        )


def _callbacks(trainer: pl.Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]  # set outside Trainer's own code


def _error(callback: Callback, refusal: Refusal) -> UnsupportedError:
    name, known = type(callback).__name__, refusal.callback.__name__
    kind = "" if name == known else f" (a {known})"
    return UnsupportedError(
        f"{name}{kind} does not work with the smart_infinity strategy: it {refusal.reason}.", refusal.remedy
    )


class _AnyStrategy:
    """A Trainer that hides its strategy, and that Lightning treats as not distributed."""

    strategy = None
    _accelerator_connector = SimpleNamespace(is_distributed=False)

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def _admit(callback: Callback, hook: str) -> None:
    """Allow a hook that refuses every DeepSpeedStrategy, for reasons that do not apply to ours."""
    setattr(callback, hook, partial(_run_admitted, callback, hook))


def _run_admitted(callback: Callback, hook: str, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
    # Only the hook's check of the strategy must not run; its other checks must. Deleting this patch restores the
    # method, since the callback may serve another Trainer next.
    delattr(callback, hook)
    getattr(callback, hook)(_AnyStrategy(trainer), *args, **kwargs)


def _require_one_fit(finder: BatchSizeFinder, trainer: pl.Trainer) -> None:
    if trainer.num_devices * trainer.num_nodes > 1:
        raise _error(finder, Refusal(BatchSizeFinder, "ends when memory runs out, on one rank alone", _SEARCH))
    if trainer.state.fn is not TrainerFn.FITTING:
        raise _error(finder, Refusal(BatchSizeFinder, "saves a checkpoint, and an evaluation has no training", _SEARCH))


_SEARCHING = Shared(lambda: wrapped(tuning, "_check_scale_batch_size_configuration", _check_search))


def admit_batch_size_search(strategy: TrainingSession) -> Callable[[], object]:
    """Allow ``Tuner.scale_batch_size`` to begin its fit, in which :func:`adapt_callbacks` checks the callback.

    Args:
        strategy: A strategy whose Trainer may search.

    Returns:
        Function that ends the permission. It also ends when the strategy is garbage-collected.
    """
    _SEARCHING.begin()
    return weakref.finalize(strategy, _SEARCHING.end)


def is_trial(trainer: pl.Trainer) -> bool:
    """Return whether a Trainer runs a ``Tuner``'s search, or a few batches, before the fit that the user wants."""
    finders = [one for one in vars(trainer)["callbacks"] if isinstance(one, (LearningRateFinder, BatchSizeFinder))]
    return bool(vars(trainer)["fast_dev_run"]) or any(finder._early_exit for finder in finders)


def refuse_search(trainer: pl.Trainer, start: str) -> None:
    """Refuse a fit that may resume from storage, and whose callbacks search first: the search would take steps on it.

    Raises:
        ConfigError: The Trainer has such a callback.
    """
    for one in vars(trainer)["callbacks"]:
        if isinstance(one, (LearningRateFinder, BatchSizeFinder)):
            search = "lr_find" if isinstance(one, LearningRateFinder) else "scale_batch_size"
            raise ConfigError(
                f"fit(ckpt_path={start!r}) may resume a training, and {type(one).__name__} would first change its "
                "state on storage.",
                f"Leave the callback out, and search before the fit: Tuner(trainer).{search}(module).",
            )


def _check_search(check: Callable[..., None], trainer: pl.Trainer) -> None:
    check(_AnyStrategy(trainer) if isinstance(trainer.strategy, TrainingSession) else trainer)


def _admit_average(callback: Any, trainer: pl.Trainer) -> None:
    """Allow WeightAveraging, report the memory of its average, and save the average under a key of its own."""
    callback.setup = partial(_set_up_average, callback)
    callback.on_save_checkpoint = partial(_save_average, callback)
    callback.on_load_checkpoint = partial(_load_average, callback)


def _set_up_average(callback: Any, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
    type(callback).setup(callback, trainer, module, stage)
    if callback._average_model is not None:
        tensors = itertools.chain(callback._average_model.parameters(), callback._average_model.buffers())
        held = [getattr(tensor, "ds_tensor", tensor) for tensor in tensors]  # this rank's part, if partitioned
        gigabytes = sum(tensor.numel() * tensor.element_size() for tensor in held) / 1e9
        name = type(callback).__name__
        rank_zero_info(f"{name} adds its average to the memory of the training: {gigabytes:.2f} GB per process.")


def _save_average(callback: Any, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
    # Imported here, since it loads DeepSpeed.
    from lightning_smartinfinity.zero3.parameters.unrounded import is_rounded

    if callback._average_model is not None:
        state = callback._average_model.state_dict()
        # The average of configure_model's layers has partitioned 16-bit parameters; fp32 saves their exact values.
        checkpoint[_AVERAGE] = {
            name: value.detach().float() if is_rounded(value.dtype) else value.detach().clone()
            for name, value in state.items()
        }


def _load_average(callback: Any, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
    if callback._average_model is None:
        return
    if _AVERAGE in checkpoint:
        callback._average_model.load_state_dict(checkpoint[_AVERAGE])
    else:
        rank_zero_warn("The checkpoint has no average of WeightAveraging; it begins with the checkpoint's weights.")
        callback._average_model.module.load_state_dict(module.state_dict())


def synchronize_layers(module: Module, layer_sync: LayerSync | None, *, device: torch.device, ranks: int) -> Module:
    """Convert a module by ``Trainer(sync_batchnorm=True)`` or the user's plugin, as Lightning's DDP does.

    Args:
        module: The module, before ZeRO-3 partitions it.
        layer_sync: The Trainer's plugin; None for no conversion.
        device: The training device.
        ranks: Number of processes.

    Raises:
        UnsupportedError: torch cannot synchronize batch norms on the device.
    """
    if layer_sync is None or (isinstance(layer_sync, TorchSyncBatchNorm) and ranks == 1):
        return module
    if type(layer_sync) is TorchSyncBatchNorm and device.type == "cpu":
        norms = (name for name, child in module.named_modules() if isinstance(child, _BatchNorm))
        name = next(norms, None)
        if name is not None:
            raise UnsupportedError(
                f"Trainer(sync_batchnorm=True) cannot synchronize {name!r}: torch's SyncBatchNorm needs a GPU.",
                "Train on GPUs, leave sync_batchnorm out, or pass a LayerSync plugin of your own.",
            )
    return layer_sync.apply(module)
