"""Refuses Lightning callbacks that cannot work with the strategy, and lets others do what they do with any strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any, NoReturn

import lightning.pytorch as pl
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
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers, _MockOptimizer, do_nothing_closure
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.update_rules import optimizer_names

__all__ = [
    "REFUSED_CALLBACKS",
    "OptimizerList",
    "Refusal",
    "accumulates",
    "adapt_callbacks",
    "configured_optimizer",
    "copy_around_training",
    "refuse_closure",
    "warn_of_changed_weights",
]


@dataclass(frozen=True)
class Refusal:
    """A class of callbacks, subclasses included, that the strategy refuses.

    Args:
        callback: The class.
        reason: What it does that cannot work; the text completes "it ...".
        remedy: What the user can do instead.
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
        WeightAveraging,
        "copies whole weights, which no rank has",
        "Save checkpoints with ModelCheckpoint(save_top_k=...) and average their weights after training.",
    ),
    Refusal(
        BatchSizeFinder,
        "fits again and again with other batch sizes, until memory runs out on one rank alone",
        "Remove the callback or the call of Tuner.scale_batch_size, and set the batch size by hand.",
    ),
    Refusal(
        LearningRateFinder,
        "wraps the optimizer in a scheduler of torch's, which takes no optimizer of DeepSpeed's",
        "Remove the callback or the call of Tuner.lr_find; find the rate with a smaller model under "
        "Trainer(strategy='auto').",
    ),
    Refusal(
        BaseFinetuning,
        "adds parameters to the optimizer in mid-training, which have no place on storage",
        "Pass all parameters to the optimizer before fit; freeze those that are to be trained later in on_fit_start.",
    ),
    Refusal(
        ModelPruning,
        "masks weights in memory, while the step computes them from the masters on storage",
        "Prune the weights before fit or after it.",
    ),
)


def adapt_callbacks(trainer: pl.Trainer) -> None:
    """Refuse the Trainer's callbacks that cannot work, before any of them is set up.

    Raises:
        UnsupportedError: A callback cannot work; the error names the first one.
    """
    for callback in _callbacks(trainer):
        for refusal in REFUSED_CALLBACKS:
            if isinstance(callback, refusal.callback):
                raise _error(callback, refusal)
        if isinstance(callback, GradientAccumulationScheduler):
            _admit(callback)


def copy_around_training(trainer: pl.Trainer) -> None:
    """Make deep copies of callbacks share the module and the strategy, which cannot be copied once they are set up.

    Progress bars refer to their Trainer. Every callback refers to the module by ``log`` and ``log_dict``, which are the
    module's own methods: a copy of a method copies its object, and a copy of a function nothing.
    """
    trainer.__deepcopy__ = MethodType(_copied, trainer)  # type: ignore[attr-defined]
    for callback in _callbacks(trainer):
        for name in ("log", "log_dict"):
            setattr(callback, name, _as_function(getattr(callback, name)))


def _copied(trainer: pl.Trainer, memo: dict[int, object]) -> pl.Trainer:
    # A profiler refers to the module by a proxy, of which copy would copy the module.
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
        UnsupportedError: There is none, or there are several.
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


def refuse_closure(closure: object) -> None:
    """Refuse a closure that a module passes to ``optimizer.step``."""
    if closure is not do_nothing_closure:
        raise UnsupportedError(
            "optimizer.step(closure=...) does not work with the smart_infinity strategy.",
            "Run forward and backward first, then call optimizer.step().",
        )


def warn_of_changed_weights(
    module: pl.LightningModule, checkpoint: Mapping[str, Any], *, excludes_frozen: bool
) -> None:
    """Warn if an ``on_save_checkpoint`` has changed which weights a checkpoint names: DeepSpeed saves its partitions.

    Args:
        module: The module.
        checkpoint: What Lightning saves.
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


class OptimizerList(list[Any]):
    """A Trainer's optimizers; the list raises if it is used like the one optimizer that it holds.

    ``self.optimizers(use_pl_optimizer=False)`` returns it, since DeepSpeed's optimizer is no ``torch.optim.Optimizer``.
    """

    def __getattr__(self, name: str) -> NoReturn:
        if name not in _OPTIMIZER_NAMES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise UnsupportedError(
            f"self.optimizers(use_pl_optimizer=False).{name}: with the smart_infinity strategy this is the list of "
            "DeepSpeed's optimizer.",
            f"Use self.optimizers().{name}.",
        )


_OPTIMIZER_NAMES = (
    "add_param_group",
    "defaults",
    "load_state_dict",
    "param_groups",
    "state",
    "state_dict",
    "step",
    "zero_grad",
)


class _AnyStrategy:
    """A Trainer that hides its strategy."""

    strategy = None

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def _admit(scheduler: GradientAccumulationScheduler) -> None:
    """Let the scheduler run although the strategy is a DeepSpeedStrategy: ours counts windows by Lightning's loop."""
    scheduler.on_train_start = partial(_check_schedule, scheduler)  # type: ignore[method-assign]


def _check_schedule(scheduler: Any, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    # That method makes several checks, of which the one of the strategy must not run. Deleting this patch restores the
    # method, since the scheduler may serve another Trainer next.
    del scheduler.on_train_start
    scheduler.on_train_start(_AnyStrategy(trainer), pl_module)
