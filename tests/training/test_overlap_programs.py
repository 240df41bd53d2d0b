"""Random trainings with random interference, delays and failures give the same bits with and without overlap."""

from __future__ import annotations

import dataclasses
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import pytest
import torch

from lightning_smartinfinity import SmartInfinityStrategy, StorageError, TransferConfig
from lightning_smartinfinity.pipeline import handler as handler_module
from lightning_smartinfinity.zero3.optimizer import overlap_choice
from lightning_smartinfinity.zero3.optimizer.gradient_path import GradientPath
from tests.helpers import native_testing as testing
from tests.helpers.assertions import assert_equal
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.pipeline.wandering import Wandering
from tests.training import actions
from tests.training.actions import Action
from tests.training.test_overlap import NVME

# Five programs from this one on cover every overlap, speculative updates kept and rolled back, both gradient paths, one
# and two folders, both budgets, and some of every other kind. OVERLAP_PROGRAMS=200 makes a longer search.
FIRST_PROGRAM = 1459
NUM_PROGRAMS = int(os.environ.get("OVERLAP_PROGRAMS", "5"))
NUM_FAILURES = int(os.environ.get("OVERLAP_PROGRAMS", "3"))

# Bytes of gradients, of which the model with budgets has 226,000 in 16 bit and twice as many otherwise.
BUDGETS = (164_000, 200_000, 260_000)

# Two programs from this one on bind, one of them with parameters on storage.
FIRST_BINDING = 4
NUM_BINDING = 2

HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end")


# May happen at any hook.
ACTIONS: tuple[Action, ...] = (
    actions.read_state,
    actions.gather,
    actions.halve_gradients,
    actions.write_state,
    actions.write_gathered,
    actions.halve_rate,
    actions.zero_grad,
    actions.forward,
    actions.save,
)


@dataclass(frozen=True)
class Program:
    """A training: its recipe, its storage, and the actions at given calls of hooks."""

    recipe: Recipe
    state_format: str
    zero: dict[str, Any]
    transfer: dict[str, Any]
    bypasses_buckets: bool
    actions: dict[tuple[str, int], Action]
    # The numbers of a micro-batch without a loss and of a window without a step; 0 means none.
    lossless: int
    stepless: int
    overlap: str = "none"
    num_folders: int = 1


def formats(precision: str) -> list[str]:
    return ["fp32", "bf16", "int8"] + ["int8_remainder"] * precision.startswith("bf16")


def random_actions(choose: random.Random) -> dict[tuple[str, int], Action]:
    drawn = {(choose.choice(HOOKS), choose.randrange(4)): choose.choice(ACTIONS) for _ in range(choose.randrange(4))}
    # This hook is called between forward and backward, where torch refuses a weight that was changed in place.
    return {
        at: action for at, action in drawn.items() if (at[0], action) != ("on_before_zero_grad", actions.write_gathered)
    }


def program(seed: int) -> Program:
    """Return a random program."""
    choose = random.Random(str(seed))  # small integer seeds begin alike
    precision = choose.choice(["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
    recipe = Recipe(
        precision=precision,
        depth=1,
        max_steps=choose.choice([4, 6]),
        accumulate=choose.choice([1, 1, 2]),
        epoch_batches=choose.choice([5, 32]),
        clip=choose.choice([None, None, 1e-3, 0.6, 1.0]),
        groups=choose.random() < 0.5,
        scheduler=choose.choice([None, "step", "epoch"]),
        tied=choose.random() < 0.5,
        frozen=choose.random() < 0.3,
        odd=choose.random() < 0.4,
        skip_side_at=(1, 2) if choose.random() < 0.5 else (),
        nan_at=(choose.randrange(5),) if choose.random() < 0.4 else (),
        validate=choose.random() < 0.3,
    )
    zero: dict[str, Any] = {"reduce_bucket_size": 4000}
    if choose.random() < 0.5:
        zero["stage3_param_persistence_threshold"] = 0
    if choose.random() < 0.4:
        zero["offload_param"] = {"device": choose.choice(["cpu", "nvme"])}
    transfer: dict[str, Any] = {"tasklet_bytes": 64 * 1024, "num_buffers": choose.choice([2, 3, 5])}
    if choose.random() < 0.3:
        transfer["dram_cache_bytes"] = choose.choice([100_000, 10**7])
    drawn = Program(
        recipe,
        choose.choice(formats(precision)),
        zero,
        transfer,
        bypasses_buckets=choose.random() < 0.6,
        actions=random_actions(choose),
        lossless=choose.choice([0, 0, 0, 2]),
        stepless=choose.choice([0, 0, 0, 2]),
        overlap=choose.choice(["forward", "backward", "backward", "auto"]),
        num_folders=choose.choice([1, 2]),
    )
    drawn.transfer["durability"] = choose.choice(["step", "step", "power", "none"])
    drawn.transfer["compute_threads"] = choose.choice([1, 2])
    return with_budgets(drawn, choose.choice(BUDGETS)) if choose.random() < 0.4 else drawn


def with_budgets(program: Program, gradient_bytes: int) -> Program:
    """Return the program with a larger model, a budget of gradients, and one of parameters if they lie on storage."""
    zero, budgets = dict(program.zero), {"gradient_bytes": gradient_bytes}
    if zero.get("offload_param") == {"device": "nvme"}:
        budgets["parameter_bytes"] = 200_000
        zero.pop("stage3_param_persistence_threshold", None)  # the budget decides what stays gathered
    recipe = dataclasses.replace(program.recipe, width=64, depth=2)
    return dataclasses.replace(program, recipe=recipe, zero=zero, transfer={**program.transfer, **budgets})


def binding_program(seed: int) -> Program:
    """Return a random program in which nothing comes between backward and step, so that gradients are given up."""
    drawn = program(seed)
    recipe = dataclasses.replace(drawn.recipe, clip=None, max_steps=8)
    bare = dataclasses.replace(drawn, recipe=recipe, actions={}, stepless=0, overlap="backward")
    return with_budgets(bare, random.Random(str(seed)).choice(BUDGETS))


def straight_of(program: Program) -> Program:
    """Return the same training with the simplest storage and no overlap."""
    plain = {"tasklet_bytes": 64 * 1024, "num_buffers": 2}
    return dataclasses.replace(program, transfer=plain, overlap="none", num_folders=1)


def interference(program: Program) -> list[pl.Callback]:
    """Return a callback that calls the actions of a program, if it has some."""
    calls = Counter[str]()

    def called(hook: str, trainer: pl.Trainer, module: Any) -> None:
        action = program.actions.get((hook, calls[hook]))
        calls[hook] += 1
        if action is not None:
            module.seen.append(action(trainer, module))

    # Hooks that a callback has decide what a training may do.
    return [actions.does(**{hook: partial(called, hook) for hook in HOOKS})] if program.actions else []


class Faulty(pl.Callback):
    """A callback that delays, shortens and reorders transfers and can make one fail."""

    def __init__(self, **faults: int) -> None:
        self.faults = faults

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pipeline = trainer.strategy.optimizers[0].rank_state.handler._device._pipeline
        testing.inject(pipeline, max_delay_us=800, short_transfer_every=3, **self.faults)


class Programmed(LitTiny):
    """A module that trains a program."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.recipe)
        self.program = program
        self.seen: list[Any] = []
        self.num_batches = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.num_batches += 1
        return None if self.num_batches == self.program.lossless else loss


class Stepless(Programmed):
    """A module that takes no step in one window of its program."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.num_batches + 1 == self.program.stepless:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


@dataclass
class Left:
    """The results of a training."""

    observed: str
    generation: int
    tensors: dict[str, torch.Tensor]
    guesses: tuple[int, int]
    num_binding: int
    spilled_bytes: int


def train(program: Program, root: Path, *callbacks: pl.Callback, accelerator: str = "cpu") -> Left:
    recipe = program.recipe
    scaled = {"initial_scale_power": 22, "hysteresis": 1} if recipe.precision.startswith("16") else {}
    strategy = SmartInfinityStrategy(
        [root / f"disk{index}" for index in range(program.num_folders)],
        overlap=program.overlap,
        transfer=TransferConfig(**program.transfer),
        zero=program.zero,
        state_format=program.state_format,
        **scaled,
    )
    trainer = quiet_trainer(
        root,
        strategy,
        accelerator=accelerator,
        callbacks=[*interference(program), *callbacks],
        precision=recipe.precision,
        max_steps=recipe.max_steps,
        accumulate_grad_batches=recipe.accumulate,
        gradient_clip_val=recipe.clip,
    )
    module = Stepless(program) if program.stepless else Programmed(program)
    failed = False
    try:
        trainer.fit(module)
    except StorageError:
        failed = True
    optimizer = strategy.optimizers[0]
    handler = optimizer.update.drained_handler()
    tensors = {}
    for name, param in module.named_parameters():
        if param.requires_grad:
            tensors[f"master {name}"] = optimizer.get_full_hp_param(param).clone()
        with deepspeed.zero.GatheredParameters([param]):
            tensors[name] = param.detach().clone()
    rates = [group["lr"] for group in optimizer.param_groups]
    trained = (module.losses, module.validated, module.seen, rates, float(optimizer.loss_scale))
    spills = optimizer.rank_state.arena.counters()
    left = Left(
        repr((handler.steps.tolist(), None if failed else trained)),
        handler.generation,
        tensors,
        (optimizer.speculation.num_adopted, optimizer.speculation.num_discarded),
        optimizer.speculation.num_binding,
        0 if spills is None else spills.written_bytes,
    )
    strategy.close()
    return left


def assert_same(ours: Left, theirs: Left) -> None:
    assert ours.observed == theirs.observed and ours.generation == theirs.generation
    assert_equal(ours.tensors, theirs.tensors)


Trained = Callable[[Callable[[int], Program], Iterable[int]], list[Left]]


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """A function that trains the programs of some seeds as drawn and straight, and compares all bits."""
    # Each candidate of "auto" gets one step, and tasklets change folders in each.
    monkeypatch.setattr(overlap_choice, "_WARM_UP", 0)
    monkeypatch.setattr(overlap_choice, "_MEASURED", 1)
    monkeypatch.setattr(handler_module, "Balance", Wandering)

    def train_both(draw: Callable[[int], Program], seeds: Iterable[int]) -> list[Left]:
        left = []
        for seed in seeds:
            drawn = draw(seed)
            with monkeypatch.context() as patch:
                if not drawn.bypasses_buckets:
                    patch.setattr(GradientPath, "bypasses_buckets", False)
                straight = train(straight_of(drawn), tmp_path / f"{seed} straight")
                left.append(train(drawn, tmp_path / f"{seed}", Faulty(seed=seed)))
            assert_same(left[-1], straight)
        return left

    return train_both


@pytest.mark.parametrize(
    ("first", "number"), long_but([(FIRST_PROGRAM, NUM_PROGRAMS)], [(FIRST_PROGRAM, NUM_PROGRAMS), (2000, 30)])
)
def test_any_program_gives_the_same_bits(first: int, number: int, trained: Trained) -> None:
    """Losses, reads in hooks, validation, rates, loss scale, masters and parameters stay the same.

    Some speculative updates are kept, some are rolled back, and some gradients go to storage.
    """
    left = trained(program, range(first, first + number))
    assert (
        sum(each.guesses[0] for each in left) > 1
        and sum(each.guesses[1] for each in left) > 1
        and any(each.spilled_bytes for each in left)
    )


@pytest.mark.parametrize(
    ("first", "number"), long_but([(FIRST_BINDING, NUM_BINDING)], [(FIRST_BINDING, NUM_BINDING), (3000, 20)])
)
def test_any_program_whose_updates_bind(first: int, number: int, trained: Trained) -> None:
    """Bits stay the same, too, where gradients are given up within backward."""
    left = trained(binding_program, range(first, first + number))
    assert sum(each.num_binding for each in left) > 0 and any(each.spilled_bytes for each in left)


def test_a_failure_anywhere_leaves_the_step_before(tmp_path: Path) -> None:
    """A failed transfer during a speculative update, its rollback or forward leaves the last whole step."""
    failures = 0
    for seed in range(NUM_FAILURES):
        choose = random.Random(seed)
        recipe = Recipe(precision="bf16-mixed", depth=1, max_steps=4, clip=choose.choice([None, 0.6]), accumulate=2)
        where = {choose.choice(["fail_read_at", "fail_write_at"]): choose.randrange(20)}
        failing = Program(
            recipe,
            zero={"reduce_bucket_size": 4000, **choose.choice([{}, NVME])},
            transfer={"tasklet_bytes": 2**16, "num_buffers": 3},
            bypasses_buckets=True,
            actions={},
            lossless=0,
            stepless=0,
            overlap=choose.choice(["forward", "backward"]),
            state_format=choose.choice(formats(recipe.precision)),
        )
        failed = train(failing, tmp_path / f"{seed}", Faulty(seed=seed, **where))
        failures += failed.generation < recipe.max_steps
        steps = dataclasses.replace(recipe, max_steps=failed.generation)
        straight = train(straight_of(dataclasses.replace(failing, recipe=steps)), tmp_path / f"{seed} straight")
        assert_equal(failed.tensors, straight.tensors)
    assert failures > 1
