"""Situations that users meet, the same for plain Lightning, stock DeepSpeed and smart_infinity.

A situation takes a maker of Trainers and an empty folder, and returns what a user sees.

``python -m tests.stock.situations FOLDER SYSTEM NAME DEVICES`` runs one, also of :mod:`tests.stock.on_nvme`. Rank 0
saves the result or the error to ``FOLDER/outcome.pt``.
"""

from __future__ import annotations

import functools
import os
import resource
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn

from tests.helpers.hard_modules import Case, Penalty, Shapes
from tests.helpers.initialised import WIDTH
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.plain import Everything, Scenario
from tests.helpers.random_fit import seed
from tests.stock.on_nvme import ON_NVME
from tests.stock.systems import Hook, maker, masters
from tests.training.model_runs import CHECKPOINTS
from tests.training.test_configure_model import Built, squares
from tests.training.test_loop_exceptions import Breaking, Broken
from tests.training.test_loop_manual import Manual, SkipsBatches
from tests.training.test_storage_resume_loaders import Module, shuffled

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
    """Train a hard module and return its losses and masters."""
    module = case.module()
    trainer = make(zero=case.zero, max_steps=case.steps, gradient_clip_val=case.clip)
    trainer.fit(module)
    return module.seen, masters(trainer, module)


ON_ONE["checkpointing"] = functools.partial(hard, SHARED_WEIGHTS)
ON_ONE["strided"] = functools.partial(hard, Case(Shapes))
ON_ONE["penalty"] = functools.partial(hard, Case(Penalty))


def fitted(module: Callable[[], Everything], make: Any, root: Path, **settings: Any) -> Any:
    """Fit for two epochs and return the losses, the number of steps, and a validation."""
    trainer, trained = make(max_epochs=2, **settings), module()
    trainer.fit(trained)
    return trained.losses, trainer.global_step, trainer.validate(trained, verbose=False)


class OneBackward(Manual):
    """A module with one manual backward pass per step."""

    num_parts = 1


class OneBackwardClipped(OneBackward):
    """A module that clips by hand."""

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
    """Halve a parameter on rank 0 after the first step and return the losses."""

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
    """A module that draws its layers' weights when all layers exist."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.initialise()

    def initialise(self) -> None:
        """Initialise with ``nn.Module.apply``."""
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)
            module.bias.data.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class InitialisingByItself(Initialising):
    """A module that walks over its modules itself, as transformers does."""

    def initialise(self) -> None:
        for module in self.modules():
            self._init_weights(module)


def built(build: Callable[[], nn.Module], make: Any, root: Path) -> Any:
    """Build a model in configure_model and return its losses."""
    module = Built(build, squares)
    make(max_steps=2).fit(module)
    return module.losses


ON_ONE["init_by_apply"] = functools.partial(built, Initialising)
ON_ONE["init_like_transformers"] = functools.partial(built, InitialisingByItself)


@situation
def random_states(make: Any, root: Path) -> Any:
    """Resume at an epoch's end with other random states and return what both runs draw after it."""
    seen = {}
    for name, resume in {"straight": None, "resumed": root / "epoch end-1"}.items():
        seed(len(seen))
        module = Module(shuffled(), folder=root, points=[("epoch end", 1)][: resume is None])
        make(max_epochs=3, limit_val_batches=0).fit(module, ckpt_path=resume)
        seen[name] = [[*values, *drawn] for _, epoch, _, (values,), drawn in module.seen if epoch]
    return seen


@situation
def unshuffled(make: Any, root: Path) -> Any:
    """Fit a DataLoader with ``shuffle=False``, with the samplers that Lightning chooses."""
    module = Everything()
    make(max_epochs=2, use_distributed_sampler=True).fit(module)
    return module.losses


@situation
def two_fits(make: Any, root: Path) -> Any:
    """Fit twice with one Trainer."""
    trainer, module = make(max_steps=3), Everything()
    trainer.fit(module)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module)
    return module.losses, trainer.global_step


@situation
def fit_after_failed_start(make: Any, root: Path) -> Any:
    """Fit a module in another Trainer after its first fit failed between set-up and training."""

    class Fails(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            raise Broken

    module = Everything()
    with pytest.raises(Broken):
        make(callbacks=[Fails()]).fit(module)
    make(max_steps=3).fit(module)
    return module.losses


@situation
def fit_after_exception(make: Any, root: Path) -> Any:
    """Fit again with the same Trainer after an exception in the middle of a backward pass."""
    trainer, module = make(max_epochs=1), Breaking("backward")
    with pytest.raises(Broken):
        trainer.fit(module)
    module.place = None
    trainer.fit(module)
    return module.losses, trainer.global_step


@situation
def evaluated_checkpoint(make: Any, root: Path) -> Any:
    """Validate a checkpoint in a fresh Trainer with an unfitted module."""
    first = make(max_steps=3)
    first.fit(Everything())
    first.save_checkpoint(root / "a.ckpt")
    return make().validate(Everything(), ckpt_path=root / "a.ckpt", verbose=False)


@situation
def flipped_bit(make: Any, root: Path) -> Any:
    """Flip a bit in the middle of a checkpoint's largest file and return the error of a resume."""
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
    """Save over a checkpoint on a full disk, and then resume from that path."""

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
    """Return the action's error as text, or an empty string."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def own_batches(recipe: Recipe, make: Any, root: Path) -> Any:
    """Return the losses of a run whose ranks have batches of their own."""
    module = LitTiny(recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(max_steps=recipe.max_steps).fit(module)
    return module.losses


for name, recipe in OWN_BATCHES.items():
    ON_TWO[name] = functools.partial(own_batches, recipe)
ON_TWO["checkpointing"] = ON_ONE["checkpointing"]


def main() -> None:
    folder, system, name, devices = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    outcome: dict[str, Any] = {}
    try:
        if name in ON_NVME:
            outcome["result"] = ON_NVME[name](system, folder)
        else:
            situation = (ON_ONE if devices == 1 else ON_TWO)[name]
            outcome["result"] = situation(maker(system, folder, devices), folder)
    except Exception as error:
        traceback.print_exc()
        outcome["error"] = f"{type(error).__name__}: {error}"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        torch.save(outcome, folder / "outcome.pt")


if __name__ == "__main__":
    main()
