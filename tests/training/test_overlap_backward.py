"""Updates that begin during backward change no bit, whether the speculative update is kept or rolled back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_grad

from lightning_smartinfinity import ConfigError, SmartInfinityStrategy, StorageError
from lightning_smartinfinity.pipeline.handler import TransferHandler
from lightning_smartinfinity.pipeline.step import Step
from lightning_smartinfinity.zero3.optimizer.speculation import Speculation
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.training.test_overlap import BF16, CASES, NVME, SMALL_RING, FailAt, assert_same, result
from tests.training.worker import Run, train

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


@pytest.mark.parametrize("name", long_but(["32-true", "bf16-mixed", "nvme"], CASES))
def test_same_bits(name: str, tmp_path: Path) -> None:
    """Accumulation, clipping, skipped steps, unused and offloaded parameters give the same bits as without overlap."""
    recipe, options = CASES[name]
    straight = result(run_of(tmp_path / "straight", recipe, "none", **options))
    assert_same(result(run_of(tmp_path / "overlapped", recipe, "backward", delays=1, **options)), straight)


def guesses(root: Path, recipe: Recipe, **options: Any) -> tuple[int, int]:
    """Return how many speculative updates were kept and how many were wrong."""
    _, trainer, _ = train(run_of(root, recipe, "backward", **options))
    speculation = trainer.strategy.optimizers[0].speculation
    trainer.strategy.close()  # type: ignore[attr-defined]
    return speculation.num_adopted, speculation.num_discarded


@pytest.mark.seam("StorageOptimizer begins updates then", "post_sub_module_backward_function is looked up when called.")
@pytest.mark.parametrize("zero", [{}, NVME], ids=["in memory", "on storage"])
def test_a_plain_loop_is_guessed_right(zero: dict[str, Any], tmp_path: Path) -> None:
    """Every step of a plain loop keeps its speculative update, and none is rolled back."""
    recipe = dataclasses.replace(BF16, accumulate=2, width=64)
    assert guesses(tmp_path, recipe, zero=zero) == (BF16.max_steps, 0)


def test_clipping_that_is_always_active_ends_the_guessing(tmp_path: Path) -> None:
    """Speculation pauses after three wrong updates."""
    assert guesses(tmp_path, dataclasses.replace(BF16, clip=1e-3, max_steps=6)) == (0, 3)


class AfterBackward(pl.Callback):
    """A callback that calls a function with the module between backward and the step."""

    def __init__(self, action: Callable[[Any], None]) -> None:
        self.action = action

    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.action(pl_module)


def look(module: Any) -> None:
    for param in module.parameters():
        safe_get_full_fp32_param(param)


def gather(module: Any) -> None:
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        module.seen = [param.detach().clone() for param in module.parameters()]


def edit_gradient(module: Any) -> None:
    param = module.model.norm.weight
    safe_set_full_grad(param, safe_get_full_grad(param) * 2)


def write(module: Any) -> None:
    module.model.norm.weight.data.mul_(0.5)  # which stays whole after backward


def change_rate(module: Any) -> None:
    for group in module.trainer.strategy.optimizers[0].param_groups:
        group["lr"] *= 0.5


@pytest.mark.parametrize(
    "action",
    long_but([look, edit_gradient, write], [look, gather, edit_gradient, write, change_rate]),
    ids=lambda action: action.__name__,
)
def test_what_happens_between_backward_and_the_step(action: Callable[[Any], None], tmp_path: Path) -> None:
    """Reads see the values before the step, changes take effect, and the speculative update is rolled back."""
    seen = {}
    for overlap in ("none", "backward"):
        strategy = SmartInfinityStrategy(tmp_path / overlap, overlap=overlap, zero=BUCKET)
        module = LitTiny(dataclasses.replace(BF16, precision="32-true"))
        trainer = quiet_trainer(tmp_path, strategy, callbacks=[AfterBackward(action)], precision="32-true", max_steps=3)
        trainer.fit(module)
        seen[overlap] = [module.losses, getattr(module, "seen", [])]
        if overlap == "backward":
            speculation = strategy.optimizers[0].speculation
            assert (speculation.num_adopted, speculation.num_discarded) == (0, 3)
        strategy.close()
    assert seen["none"][0] == seen["backward"][0]
    assert all(torch.equal(a, b) for a, b in zip(seen["none"][1], seen["backward"][1], strict=True))


def test_what_stays_gathered_has_its_values_until_the_step(tmp_path: Path) -> None:
    """Small parameters that stay gathered keep their values after backward, though the update runs."""
    seen: dict[str, list[torch.Tensor]] = {"none": [], "backward": []}

    def read(module: Any) -> None:
        optimizer = module.trainer.strategy.optimizers[0]
        optimizer.rank_state.handler.finish()
        seen[optimizer.overlap.mode].append(module.model.norm.weight.detach().clone())

    for overlap in seen:
        strategy = SmartInfinityStrategy(tmp_path / overlap, overlap=overlap, zero=BUCKET)
        # In a mixed precision the read would take the masters, and the update would begin again.
        settings: dict[str, Any] = {"precision": "bf16-true", "callbacks": [AfterBackward(read)], "max_steps": 4}
        quiet_trainer(tmp_path, strategy, **settings).fit(LitTiny(BF16))
        if overlap == "backward":
            # Before ZeRO-3 knows the order of modules, in the first step, nothing stays gathered: the read gathers it.
            assert strategy.optimizers[0].speculation.num_adopted == 3
        strategy.close()
    assert len(seen["none"][-1]) == 32
    assert all(torch.equal(a, b) for a, b in zip(seen["none"], seen["backward"], strict=True))


def spoil_rate(module: Any) -> None:
    if module.trainer.global_step == 1:
        module.trainer.strategy.optimizers[0].param_groups[0]["lr"] = -1.0


@pytest.mark.parametrize("overlap", long_but(["none", "backward"], ["none", "forward", "backward"]))
def test_a_rate_that_is_out_of_range_takes_no_step(overlap: str, tmp_path: Path) -> None:
    """An invalid learning rate raises at once, and the previous step is the last."""
    strategy = SmartInfinityStrategy(tmp_path / "storage", overlap=overlap, zero=BUCKET)
    trainer = quiet_trainer(tmp_path, strategy, callbacks=[AfterBackward(spoil_rate)], max_steps=3)
    module = LitTiny(BF16)
    with pytest.raises(ConfigError, match="lr"):
        trainer.fit(module)
    assert strategy.optimizers[0].update.drained_handler().generation == 1
    assert len(module.losses) == 2
    strategy.close()


def test_a_failure_within_backward_rolls_the_step_back(tmp_path: Path) -> None:
    """The error is raised by the next step at the latest. The state is that of the step before it."""
    strategy = SmartInfinityStrategy(tmp_path / "storage", overlap="backward", zero=BUCKET)
    fail = FailAt(2, fail_write_at=0)
    trainer = quiet_trainer(tmp_path, strategy, callbacks=[fail], max_steps=5)
    module = LitTiny(BF16)
    with pytest.raises(StorageError, match=r"state\.bin"):
        trainer.fit(module)
    optimizer = strategy.optimizers[0]
    assert optimizer.update.drained_handler().generation == 2
    _, masters = result(Run(out=str(tmp_path / "straight"), recipe=dataclasses.replace(BF16, max_steps=2)))
    for name, param in module.model.named_parameters():
        assert torch.equal(optimizer.get_full_hp_param(param), masters[name]), name
    strategy.close()


# ---- Ctrl-C


def _interrupt_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, after: bool = False) -> None:
    """Raise Ctrl-C in the first call of a method, before or after it does its work."""
    method = getattr(owner, name)

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, method)
        if after:
            method(self, *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


class InterruptAt(pl.Callback):
    """A callback that raises Ctrl-C in the third step, at the method that ``where`` names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str], *, after: bool) -> None:
        self.arm = lambda: _interrupt_once(monkeypatch, *where, after=after)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            self.arm()


INTERRUPTED = {
    "a guess begins": (TransferHandler, "begin_incremental"),
    "a tasklet is opened": (Step, "extend"),
    "a gradient has come": (Speculation, "arrived"),
    "the guess is completed": (Step, "complete"),
    "the guess is rolled back": (Step, "read_back"),
    "the step begins after a wrong guess": (TransferHandler, "begin_step"),
    "a failed step is rolled back": (Step, "read_back"),
}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float | None], dict[str, torch.Tensor]]:
    """Return a function that gives the masters after two steps without overlap."""
    known: dict[float | None, dict[str, torch.Tensor]] = {}

    def masters(clip: float | None) -> dict[str, torch.Tensor]:
        if clip not in known:
            recipe = dataclasses.replace(BF16, clip=clip, max_steps=2)
            _, known[clip] = result(run_of(tmp_path_factory.mktemp("two"), recipe, "none"))
        return known[clip]

    return masters


def assert_holds(trainer: pl.Trainer, module: LitTiny, masters: dict[str, torch.Tensor]) -> None:
    """Assert that the masters have these values, and the parameters the rounded ones."""
    for name, param in module.model.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            assert torch.equal(param, masters[name].bfloat16()), name
        assert torch.equal(trainer.strategy.optimizers[0].get_full_hp_param(param), masters[name]), name


@pytest.mark.parametrize(
    ("name", "after"),
    [
        pytest.param(name, after, id=f"{name}, {when}", marks=[pytest.mark.long] * (index % 2 == after))
        for index, name in enumerate(INTERRUPTED)
        for after, when in enumerate(("before", "after"))
    ],
)
def test_an_interrupt_within_a_guess(
    name: str, after: int, two_steps: Callable[[float | None], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters and masters are those of the last step and can be saved."""
    clip = 1e-3 if "wrong" in name or "guess is rolled back" in name else None
    faults = [FailAt(2, fail_write_at=0)] if "failed" in name else []
    strategy = SmartInfinityStrategy(tmp_path / "storage", overlap="backward", zero=BUCKET)
    interrupt = InterruptAt(monkeypatch, INTERRUPTED[name], after=bool(after))
    trainer = quiet_trainer(tmp_path, strategy, callbacks=[interrupt, *faults], max_steps=5, gradient_clip_val=clip)
    module = LitTiny(BF16)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(module)
    handler = strategy.optimizers[0].rank_state.handler
    assert not handler.in_flight or handler.step.is_complete
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    assert strategy.optimizers[0].update.drained_handler().generation == 2
    assert_holds(trainer, module, two_steps(clip))
    strategy.close()


def test_closing_within_a_guess(two_steps: Callable[[float | None], Any], tmp_path: Path) -> None:
    """The speculative update is rolled back, and the step raises because the storage is closed."""

    def close(module: Any) -> None:
        if module.trainer.global_step == 2:
            assert strategy.optimizers[0].speculation.on
            strategy.close()

    strategy = SmartInfinityStrategy(tmp_path / "storage", overlap="backward", zero=BUCKET)
    trainer = quiet_trainer(tmp_path, strategy, callbacks=[AfterBackward(close)], max_steps=5)
    module = LitTiny(BF16)
    with pytest.raises(StorageError, match="gradient arena of this training has been closed"):
        trainer.fit(module)
    for name, param in module.model.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            assert torch.equal(param, two_steps(None)[name].bfloat16()), name
