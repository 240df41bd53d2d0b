"""Updates during the next forward or within backward: no reader of the state and no failure changes a bit."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import pytest
import torch

from lightning_smartinfinity import ConfigError, StorageError
from lightning_smartinfinity.pipeline.handler import TransferHandler
from lightning_smartinfinity.pipeline.step import Step
from lightning_smartinfinity.zero3.optimizer.speculation import Speculation
from lightning_smartinfinity.zero3.optimizer.update_in_flight import UpdateInFlight
from tests.fabric import worker as fabric_worker
from tests.fabric.worker import quiet_fabric
from tests.helpers import native_testing as testing
from tests.helpers.assertions import assert_equal
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.training import actions
from tests.training.actions import does, fail_at
from tests.training.test_loop_manual import Manual
from tests.training.worker import Run, prepared, train

# A tasklet holds about two layers, and the ring holds only a few tasklets.
SMALL_RING = {"tasklet_bytes": 64 * 1024, "num_buffers": 2}
BF16 = Recipe(precision="bf16-mixed", depth=1, max_steps=4)
NVME = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}

CASES: dict[str, tuple[Recipe, dict[str, Any]]] = {
    # The parameters are the masters. The recipe has groups and unused, frozen and odd parameters.
    "32-true": (
        Recipe(groups=True, depth=1, skip_side_at=(1,), frozen=True, odd=True, scheduler="step", max_steps=4),
        {},
    ),
    # Windows of two micro-batches and of one, clipping, a step skipped for a NaN, and validation. The masters are
    # stored as the parameters and a remainder.
    "bf16-mixed": (
        dataclasses.replace(
            BF16, accumulate=2, epoch_batches=3, clip=0.3, nan_at=(2,), validate=True, groups=True, max_steps=5
        ),
        {"state_format": "int8_remainder"},
    ),
    # The loss scale makes the first steps overflow and be skipped.
    "16-mixed": (dataclasses.replace(BF16, precision="16-mixed"), {"initial_scale_power": 22, "hysteresis": 1}),
    "nvme": (dataclasses.replace(BF16, tied=False), {"zero": NVME}),
    "cpu": (
        dataclasses.replace(BF16, precision="32-true", frozen=True),
        {"zero": {"offload_param": {"device": "cpu"}}},
    ),
}


def result(
    run: Run, *callbacks: pl.Callback, look: Callable[[Any], object] | None = None
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Train and return losses, validation, recorded figures and masters.

    Args:
        run: What to train.
        *callbacks: Callbacks of the Trainer.
        look: Is called with the strategy before it is closed.
    """
    module, trainer, recorder = train(run, *callbacks)
    if look is not None:
        look(trainer.strategy)
    trainer.strategy.close()  # type: ignore[attr-defined]
    return (module.losses, module.validated, recorder.extra), recorder.masters


def assert_same(ours: tuple[Any, dict[str, torch.Tensor]], theirs: tuple[Any, dict[str, torch.Tensor]]) -> None:
    assert repr(ours[0]) == repr(theirs[0])  # as text, NaNs are equal
    assert_equal(ours[1], theirs[1])


ACCESSES: list[actions.Action] = [
    actions.read_state,
    actions.write_state,
    actions.write_gathered,
    actions.refresh_masters,
    actions.save,
    actions.drain,
]
LOOKS: list[actions.Action] = [actions.read_state, actions.gather, actions.refresh_masters, actions.save, actions.drain]


def test_what_reads_or_writes_from_outside_finishes_the_update(tmp_path: Path) -> None:
    """After each access nothing is in flight, and training continues with the same losses.

    Where the access changes nothing, these are the losses of an undisturbed training.
    """
    seen: list[tuple[str, bool, bool]] = []

    def access(trainer: pl.Trainer, module: Any) -> None:
        handler, action = trainer.strategy.optimizers[0].rank_state.handler, ACCESSES[trainer.global_step - 1]
        before = handler.in_flight
        read = action(trainer, module)
        seen.append((action.__name__, before, handler.in_flight))
        module.losses.append(read)  # type: ignore[arg-type]

    def look(trainer: pl.Trainer, module: Any) -> None:
        LOOKS[trainer.global_step % len(LOOKS)](trainer, module)

    recipe = dataclasses.replace(BF16, precision="32-true", max_steps=len(ACCESSES))
    ours, theirs = (
        result(Run(str(tmp_path / overlap), recipe, options={"overlap": overlap}), does(on_train_batch_end=access))
        for overlap in ("forward", "none")
    )
    assert_same(ours, theirs)
    assert seen == [(action.__name__, busy, False) for busy in (True, False) for action in ACCESSES]
    looked, undisturbed = (
        result(Run(str(tmp_path / name), recipe, options={"overlap": "forward"}), does(**hooks))
        for name, hooks in (("looked", {"on_train_batch_end": look}), ("undisturbed", {}))
    )
    assert looked[0][0] == undisturbed[0][0]
    assert_equal(looked[1], undisturbed[1])


def assert_holds(trainer: pl.Trainer, module: LitTiny, masters: dict[str, torch.Tensor]) -> None:
    """Assert that the masters have these values, and the parameters the rounded ones."""
    for name, param in module.model.named_parameters():
        assert torch.equal(trainer.strategy.optimizers[0].get_full_hp_param(param), masters[name]), name
        with deepspeed.zero.GatheredParameters([param]):
            assert torch.equal(param, masters[name].to(param.dtype)), name


def test_closing_commits_the_step_in_flight(tmp_path: Path) -> None:
    """Closing after the last step of a Fabric loop leaves the parameters of that step in memory."""
    recipe = dataclasses.replace(BF16, precision="32-true", tied=False)
    values: list[list[torch.Tensor]] = []
    for overlap in ("none", "forward"):
        fabric = fabric_worker.quiet_fabric(tmp_path / overlap, options={"overlap": overlap}, precision="32-true")
        module, model, optimizer = recipe.set_up(fabric)
        inner = optimizer.engine.optimizer
        testing.inject(inner.update.drained_handler()._device._pipeline, max_delay_us=20_000)
        fabric_worker._window(fabric, model, recipe, 0)
        optimizer.step()
        handler = inner.rank_state.handler
        assert handler.in_flight == (overlap == "forward")
        fabric.strategy.close()
        assert handler.generation == 1 and not handler.in_flight
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            values.append([param.detach().clone() for param in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))


# ---- updates that begin during backward change no bit, whether the speculative update is kept or rolled back


# Gradients leave during backward, about one layer at a time.
BUCKET = {"reduce_bucket_size": 4000}


def run_of(root: Path, recipe: Recipe, overlap: str, *, delays: int | None = None, **options: Any) -> Run:
    options["zero"] = {**BUCKET, **options.get("zero", {})}
    return Run(
        out=str(root),
        recipe=recipe,
        delays=delays,
        delay_us=500,
        transfer=SMALL_RING,
        options={**options, "overlap": overlap},
    )


@pytest.mark.seam("StorageOptimizer begins updates then", "post_sub_module_backward_function is looked up when called.")
@pytest.mark.parametrize(
    ("settings", "zero", "expected"),
    [({}, {}, (4, 0)), ({}, NVME, (4, 0)), ({"clip": 1e-3, "max_steps": 6}, {}, (0, 3))],
    ids=["in memory", "on storage", "always clipped"],
)
def test_a_plain_loop_is_guessed_right(
    settings: dict[str, Any], zero: dict[str, Any], expected: tuple[int, int], tmp_path: Path
) -> None:
    """Every step of a plain loop keeps its speculative update, and none is rolled back."""
    # Where clipping makes each guess wrong, guessing pauses after three.
    recipe = dataclasses.replace(BF16, accumulate=1 if settings else 2, width=64, **settings)
    _, trainer, _ = train(run_of(tmp_path, recipe, "backward", zero=zero))
    speculation = trainer.strategy.optimizers[0].speculation
    assert (speculation.num_adopted, speculation.num_discarded) == expected


@pytest.mark.parametrize(
    "acts",
    [[actions.read_state, actions.halve_gradients, actions.write_data], [actions.gather, actions.halve_rate]],
    ids=lambda acts: ", ".join(act.__name__ for act in acts),
)
def test_what_happens_between_backward_and_the_step(acts: list[actions.Action], tmp_path: Path) -> None:
    """Reads see the values before the step, changes take effect, and the speculative update is rolled back."""
    seen = {}
    recipe = dataclasses.replace(BF16, precision="32-true", max_steps=len(acts))
    for overlap in ("none", "backward"):
        read: list[object] = []
        note = does(
            on_after_backward=lambda trainer, module, read=read: read.append(acts[trainer.global_step](trainer, module))
        )
        module, trainer, _ = train(run_of(tmp_path / overlap, recipe, overlap), note)
        seen[overlap] = (module.losses, read)
        speculation: Any = trainer.strategy.optimizers[0].speculation
        rolled_back = len(acts) if overlap == "backward" else 0
        assert (speculation.num_adopted, speculation.num_discarded) == (0, rolled_back)
    assert seen["none"] == seen["backward"]


def test_what_stays_gathered_has_its_values_until_the_step(tmp_path: Path) -> None:
    """Small parameters that stay gathered keep their values after backward, though the update runs."""
    seen: dict[str, list[torch.Tensor]] = {"none": [], "backward": []}

    def read(trainer: pl.Trainer, module: Any) -> None:
        optimizer: Any = trainer.strategy.optimizers[0]
        optimizer.rank_state.handler.finish()
        seen[optimizer.overlap.mode].append(module.model.norm.weight.detach().clone())

    # In a mixed precision the read would take the masters, and the update would begin again.
    recipe = dataclasses.replace(BF16, precision="bf16-true")
    for overlap in seen:
        _, trainer, _ = train(run_of(tmp_path / overlap, recipe, overlap), does(on_after_backward=read))
        # Before ZeRO-3 knows the order of modules, in the first step, nothing stays gathered: the read gathers it.
        assert trainer.strategy.optimizers[0].speculation.num_adopted == (3 if overlap == "backward" else 0)
    assert len(seen["none"][-1]) == 32
    assert all(torch.equal(a, b) for a, b in zip(seen["none"], seen["backward"], strict=True))


@pytest.mark.parametrize("overlap", long_but(["none", "backward"], ["none", "forward", "backward"]))
def test_a_rate_that_is_out_of_range_takes_no_step(overlap: str, tmp_path: Path) -> None:
    """An invalid learning rate raises at once, and the previous step is the last."""

    def spoil_rate(trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_step == 1:
            trainer.strategy.optimizers[0].param_groups[0]["lr"] = -1.0

    module, trainer, _ = prepared(run_of(tmp_path, BF16, overlap), does(on_after_backward=spoil_rate))
    with pytest.raises(ConfigError, match="lr"):
        trainer.fit(module)
    assert (trainer.strategy.optimizers[0].update.drained_handler().generation, len(module.losses)) == (1, 2)


# ---- Ctrl-C


def interrupt_at(monkeypatch: pytest.MonkeyPatch, where: tuple[type, str], *, after: bool) -> pl.Callback:
    """Return a callback that raises Ctrl-C in the third step, in a method's first call, before or after its work."""
    owner, name = where
    method = getattr(owner, name)

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, method)
        if after:
            method(self, *args, **kwargs)
        raise KeyboardInterrupt

    def arm(trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_step == 2:
            if name == "commit":
                trainer.strategy.drain()  # type: ignore[attr-defined]  # the second step may be in flight
            monkeypatch.setattr(owner, name, interrupted)

    return does(on_train_batch_start=arm)


INTERRUPTED = {
    "a guess begins": (TransferHandler, "begin_incremental"),
    "a tasklet is opened": (Step, "extend"),
    "a gradient has come": (Speculation, "arrived"),
    "the guess is completed": (Step, "complete"),
    "the guess is rolled back": (Step, "read_back"),
    "the step begins after a wrong guess": (TransferHandler, "begin_step"),
    "a failed step is rolled back": (Step, "read_back"),
    "the update is waited for": (UpdateInFlight, "_wait_for"),
    "the step is committed": (TransferHandler, "commit"),
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, torch.Tensor]]:
    """Return a function that gives the masters after some steps without overlap."""

    @cache
    def masters(clip: float | None = None, num_steps: int = 2) -> dict[str, torch.Tensor]:
        recipe = dataclasses.replace(BF16, clip=clip, max_steps=num_steps)
        return result(run_of(tmp_path_factory.mktemp("straight"), recipe, "none"))[1]

    return masters


@pytest.mark.parametrize(
    ("name", "after"),
    [
        pytest.param(name, after, id=f"{name}, {when}", marks=[pytest.mark.long] * (index % 2 == after))
        for index, name in enumerate(INTERRUPTED)
        for after, when in enumerate(("before", "after"))
    ],
)
def test_an_interrupt_within_a_guess(
    name: str, after: int, straight: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters and masters are those of the last step and can be saved. A step whose commit began stays."""
    clip = 1e-3 if "wrong" in name or "guess is rolled back" in name else None
    faults = [fail_at(2, fail_write_at=0)] if "failed" in name else []
    run = run_of(tmp_path, dataclasses.replace(BF16, max_steps=5, clip=clip), "backward")
    module, trainer, _ = prepared(run, interrupt_at(monkeypatch, INTERRUPTED[name], after=bool(after)), *faults)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(module)
    optimizer: Any = trainer.strategy.optimizers[0]
    handler = optimizer.rank_state.handler
    assert not handler.in_flight or handler.step.is_complete
    actions.save(trainer, module)
    num_steps = 3 if "committed" in name else 2
    assert optimizer.update.drained_handler().generation == num_steps
    assert_holds(trainer, module, straight(clip, num_steps))


def test_closing_within_a_guess(straight: Callable[..., Any], tmp_path: Path) -> None:
    """The speculative update is rolled back, and the step raises because the storage is closed."""

    def close(trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_step == 2:
            assert trainer.strategy.optimizers[0].speculation.on
            trainer.strategy.close()  # type: ignore[attr-defined]

    module, trainer, _ = prepared(run_of(tmp_path, BF16, "backward"), does(on_after_backward=close))
    with pytest.raises(StorageError, match="gradient arena of this training has been closed"):
        trainer.fit(module)
    for name, param in module.model.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            assert torch.equal(param, straight()[name].bfloat16()), name


# ---- where nobody tells before a backward that a step follows it, no update begins within backward


RECIPE = Recipe(precision="bf16-mixed", depth=1, max_steps=9)


@dataclasses.dataclass
class Trained:
    """The modes of a training's steps, its losses, its masters, the number of its guesses, and its warnings."""

    modes: list[str]
    losses: list[float]
    masters: list[Any]
    num_adopted: int
    warned: list[str]


def in_fabric(root: Path, overlap: str, *, tells: bool = False) -> Trained:
    """Train in a loop of Fabric; ``tells`` is whether it tells of each step before its backward."""
    fabric: Any = quiet_fabric(root, precision=RECIPE.precision, options={"overlap": overlap})
    module, model, optimizer = RECIPE.set_up(fabric)
    trained = optimizer.engine.optimizer
    modes, losses = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(RECIPE.max_steps):
            loss = model(RECIPE.batch(step))
            losses.append(float(loss.detach()))
            if tells:
                optimizer.engine.set_gradient_accumulation_boundary(True)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            modes.append(trained.overlap.mode)
    return ended(fabric.strategy, trained, module, modes, losses, caught)


def by_hand(root: Path, overlap: str) -> Trained:
    """Train in a Trainer, in manual optimization."""
    module = Manual()
    modes: list[str] = []
    module.on_train_batch_end = lambda *_: modes.append(trainer.strategy.optimizers[0].overlap.mode)  # type: ignore[method-assign]
    trainer = quiet_trainer(root, overlap=overlap, max_steps=RECIPE.max_steps, limit_val_batches=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    return ended(trainer.strategy, trainer.strategy.optimizers[0], module, modes, module.losses, caught)


def ended(strategy: Any, optimizer: Any, module: Any, modes: list[str], losses: list[float], caught: Any) -> Trained:
    masters = [optimizer.get_full_hp_param(param).tolist() for param in module.parameters()]
    warned = [str(warning.message) for warning in caught if "overlap=" in str(warning.message)]
    num_adopted = optimizer.speculation.num_adopted
    strategy.close()
    return Trained(modes, losses, masters, num_adopted, warned)


@pytest.mark.parametrize("train", [in_fabric, by_hand])
def test_backward(train: Any, tmp_path: Path) -> None:
    """A warning says once why no update begins within backward. The bits are the same. ``auto`` tries nothing."""
    auto, trained = train(tmp_path / "auto", "auto"), train(tmp_path / "backward", "backward")
    assert set(auto.modes) == {"forward"}
    (warning,) = trained.warned
    assert (
        "works as 'forward': no caller announces before a backward that a step follows it" in warning
        and trained.num_adopted == 0
        and (trained.losses, trained.masters) == (auto.losses, auto.masters)
    )


def test_a_loop_in_fabric_that_tells(tmp_path: Path) -> None:
    """With DeepSpeed's call before each backward ``auto`` tries it, and updates begin within backward."""
    auto = in_fabric(tmp_path / "auto", "auto", tells=True)
    assert auto.modes[4:8] == 4 * ["backward"] and auto.num_adopted >= 3
    backward = in_fabric(tmp_path / "backward", "backward", tells=True)
    assert (backward.num_adopted, backward.warned) == (RECIPE.max_steps, []) and (auto.losses, auto.masters) == (
        backward.losses,
        backward.masters,
    )
