"""Situations that users get into, the same for plain Lightning, for stock DeepSpeed and for smart_infinity.

A situation takes a maker of Trainers and an empty folder; what it returns is what a user sees.
"""

from __future__ import annotations

import functools
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn

from tests.helpers.hard_models import Case
from tests.helpers.hard_structures import Penalty, Shapes
from tests.helpers.initialised import WIDTH
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.plain import Everything, Scenario
from tests.helpers.random_fit import LitRandom, SaveAt, seed
from tests.stock.systems import Hook, masters
from tests.training.configure_model_worker import Built, squares
from tests.training.model_cases import CHECKPOINTS
from tests.training.test_loop_exceptions import Breaking, Broken
from tests.training.test_loop_manual import Manual, SkipsBatches

ON_ONE: dict[str, Scenario] = {}
ON_TWO: dict[str, Scenario] = {}
SHARED_WEIGHTS = CHECKPOINTS["reentrant, small buckets"]
OWN_BATCHES = {
    "own_batches": Recipe(max_steps=4),
    "not_finite_on_one_rank": Recipe(max_steps=4, nan_at=(1,), nan_rank=1),
}


def situation(scenario: Scenario) -> Scenario:
    ON_ONE[scenario.__name__] = scenario  # type: ignore[attr-defined]
    return scenario


def hard(case: Case, make: Any, root: Path) -> Any:
    """Losses and final masters of a hard module."""
    module = case.module()
    trainer = make(zero=case.zero, max_steps=case.steps, gradient_clip_val=case.clip)
    trainer.fit(module)
    return module.seen, masters(trainer, module)


ON_ONE["checkpointing"] = functools.partial(hard, SHARED_WEIGHTS)
ON_ONE["strided"] = functools.partial(hard, Case(Shapes))
ON_ONE["penalty"] = functools.partial(hard, Case(Penalty))


def fitted(module: Callable[[], Everything], make: Any, root: Path, **settings: Any) -> Any:
    """Losses of two epochs, the number of steps, and what is validated afterwards."""
    trainer, trained = make(max_epochs=2, **settings), module()
    trainer.fit(trained)
    return trained.losses, trainer.global_step, trainer.validate(trained, verbose=False)


class OneBackward(Manual):
    """One backward pass a step."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.model(batch)
        self.losses.append(float(loss.detach()))
        self.manual_backward(loss)
        self.finish(optimizer)


class OneBackwardClipped(OneBackward):
    """Clips by hand."""

    def finish(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        super().finish(optimizer)


for name, kind in {
    "automatic": Everything,
    "manual": OneBackward,
    "manual_clipping": OneBackwardClipped,
    "several_backwards": Manual,
    "skipped_batch": SkipsBatches,
}.items():
    ON_ONE[name] = functools.partial(fitted, kind)
ON_ONE["clipped_windows"] = functools.partial(fitted, Everything, accumulate_grad_batches=2, gradient_clip_val=0.3)
ON_ONE["incomplete_windows"] = functools.partial(fitted, Everything, accumulate_grad_batches=3)
ON_ONE["clipping_by_value"] = functools.partial(
    fitted, Everything, gradient_clip_val=0.02, gradient_clip_algorithm="value"
)


@situation
def scheduled_accumulation(make: Any, root: Path) -> Any:
    return fitted(Everything, make, root, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])


@situation
def gathered_writes(make: Any, root: Path) -> Any:
    """Halves a parameter on rank 0 after the first step."""

    def halve(trainer: pl.Trainer) -> None:
        import deepspeed

        tokens: Any = trainer.lightning_module.model.tokens.weight  # type: ignore[union-attr]
        with deepspeed.zero.GatheredParameters(tokens, modifier_rank=0), torch.no_grad():
            if trainer.is_global_zero:
                tokens.mul_(0.5)

    module = Everything()
    make(max_steps=4, callbacks=[Hook(1, halve)]).fit(module)
    return module.losses


class Initialising(nn.Module):
    """Draws its layers' weights when all of them are there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.initialise()

    def initialise(self) -> None:
        """By ``nn.Module.apply``."""
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)
            module.bias.data.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class InitialisingByItself(Initialising):
    """Walks over its modules itself, as transformers does."""

    def initialise(self) -> None:
        for module in self.modules():
            self._init_weights(module)


def built(build: Callable[[], nn.Module], make: Any, root: Path) -> Any:
    """Losses of a model built in configure_model."""
    module = Built(build, squares)
    make(max_steps=2).fit(module)
    return module.losses


ON_ONE["init_by_apply"] = functools.partial(built, Initialising)
ON_ONE["init_like_transformers"] = functools.partial(built, InitialisingByItself)


@situation
def random_states(make: Any, root: Path) -> Any:
    """A resume at an epoch's end, in a process that drew other numbers."""
    losses = []
    for number, resume in enumerate((None, root / "epoch-0-4.ckpt")):
        seed(number)
        module = LitRandom()
        callbacks = [SaveAt(root, "epoch-0-4")] if resume is None else []
        make(max_epochs=3, callbacks=callbacks).fit(module, ckpt_path=resume)
        losses.append([loss for epoch, _, loss in module.losses if epoch])
    straight, resumed = losses
    return {"straight": straight, "resumed": resumed}


@situation
def two_fits(make: Any, root: Path) -> Any:
    """With one Trainer."""
    trainer, module = make(max_steps=3), Everything()
    trainer.fit(module)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module)
    return module.losses, trainer.global_step


@situation
def fit_after_failed_start(make: Any, root: Path) -> Any:
    """A module whose first fit failed between set-up and training goes into another Trainer."""

    class Fails(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            raise Broken

    module = Everything()
    broken(make(callbacks=[Fails()]), module)
    make(max_steps=3).fit(module)
    return module.losses


@situation
def fit_after_exception(make: Any, root: Path) -> Any:
    """An exception in the middle of a backward pass, and a second fit by the same Trainer."""
    trainer, module = make(max_epochs=1), Breaking("backward")
    broken(trainer, module)
    module.place = None
    trainer.fit(module)
    return module.losses, trainer.global_step


def broken(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    try:
        trainer.fit(module)
    except Broken:
        return
    raise AssertionError("the fit was not broken off")


@situation
def evaluated_checkpoint(make: Any, root: Path) -> Any:
    """By a fresh Trainer, with a module never fitted."""
    first = make(max_steps=3)
    first.fit(Everything())
    first.save_checkpoint(root / "a.ckpt")
    return make().validate(Everything(), ckpt_path=root / "a.ckpt", verbose=False)


@situation
def flipped_bit(make: Any, root: Path) -> Any:
    """In the middle of a checkpoint's largest file."""
    path, trainer = root / "a.ckpt", make(max_steps=2)
    trainer.fit(Everything())
    trainer.save_checkpoint(path)
    file = max((file for file in (path, *path.rglob("*")) if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    return {"noticed": error_of(lambda: make(max_steps=3).fit(Everything(), ckpt_path=path))}


@situation
def failed_save(make: Any, root: Path) -> Any:
    """The disk is full when a second checkpoint is saved to one path; then a resume from there."""

    def save(trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(root / "a.ckpt")

    def save_on_full_disk(trainer: pl.Trainer) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
        errors.append(error_of(lambda: save(trainer)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    errors: list[str] = []
    recipe = Recipe(max_steps=4)
    straight, resumed = LitTiny(recipe), LitTiny(recipe)
    make(max_steps=4, callbacks=[Hook(1, save), Hook(2, save_on_full_disk)]).fit(straight)
    errors.append(error_of(lambda: make(max_steps=4).fit(resumed, ckpt_path=root / "a.ckpt")))
    return {"saving": errors[0], "resuming": errors[1], "straight": straight.losses, "resumed": resumed.losses}


def error_of(action: Callable[[], object]) -> str:
    """Empty where there is none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def own_batches(recipe: Recipe, make: Any, root: Path) -> Any:
    """Losses where every rank has batches of its own."""
    module = LitTiny(recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(max_steps=recipe.max_steps).fit(module)
    return module.losses


for name, recipe in OWN_BATCHES.items():
    ON_TWO[name] = functools.partial(own_batches, recipe)
ON_TWO["checkpointing"] = ON_ONE["checkpointing"]
