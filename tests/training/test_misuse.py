"""Impossible calls, options and modules raise our own error; several fits in a row, and calls after a fit."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from lightning_smartinfinity import (
    CheckpointError,
    CheckpointNotFoundError,
    SmartInfinityStrategy,
    StorageError,
    UnsupportedError,
)
from tests.helpers import native_testing as testing
from tests.helpers.assertions import assert_helpful, refused
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.plain import Everything
from tests.helpers.trainers import fit, quiet_trainer
from tests.stock.systems import Hook
from tests.training.actions import does

RECIPE = Recipe(precision="bf16-mixed", depth=1)


@pytest.mark.seam(
    "SmartInfinityStrategy reports if `configure_optimizers` returned None", "_MockOptimizer of Lightning."
)
def test_saving_after_a_fit_that_failed_in_set_up(tmp_path: Path) -> None:
    """There is nothing to save, and nothing is written."""
    trainer, module = quiet_trainer(tmp_path), LitTiny(RECIPE)
    module.configure_optimizers = lambda: None  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match=r"LitTiny\.configure_optimizers returned None"):
        trainer.fit(module)
    evaluating = quiet_trainer(tmp_path)  # which trains nothing either
    evaluating.validate(LitTiny(Recipe(validate=True)), verbose=False)
    for each in (trainer, evaluating):
        with refused(UnsupportedError, "save_checkpoint", "trained nothing"):
            each.save_checkpoint(tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()


@pytest.mark.parametrize("path", long_but([".", None, "a\0b"], ["", ".", Path(), None, 7, "a\0b"]))
def test_saving_into_no_folder_of_its_own(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error names the path, and an empty path does not mean the current folder."""
    monkeypatch.chdir(tmp_path)
    trainer = fit(LitTiny(RECIPE), tmp_path, max_steps=1)
    for save in (trainer.save_checkpoint, trainer.strategy.model.save_checkpoint):
        with refused(CheckpointError, repr(path)):
            save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["storage"]


def test_another_strategy_after_ours(tmp_path: Path) -> None:
    """A partitioned module can be evaluated but not trained by another strategy. A new module can be trained."""
    module = LitTiny(RECIPE)
    fit(module, tmp_path, precision="32-true")
    plain = quiet_trainer(tmp_path, "auto", precision="32-true")
    plain.validate(module, LitTiny(RECIPE).recipe.validation_loader(), verbose=False)
    with refused(UnsupportedError, "AdamW", "partitioned", "(64, 32)"):
        plain.fit(module)
    assert fit(LitTiny(RECIPE), tmp_path, "auto", precision="32-true").global_step == 3


def test_an_optimizer_used_for_a_second_fit(tmp_path: Path) -> None:
    """The first fit took its parameters. The error says so, and the first fit's state stays."""
    module = LitTiny(RECIPE)
    optimizer = RECIPE.build_optimizer(list(module.model.named_parameters()))
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    trainer = fit(module, tmp_path, max_steps=1)
    trainer.fit_loop.epoch_loop.max_steps = 2
    with refused(UnsupportedError, "AdamW", "earlier training", "new optimizer"):
        trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "after.ckpt")


@pytest.mark.parametrize(
    ("run", "full_weights"), [("fit", False), ("fit", True), ("validate", True), ("predict", False)]
)
def test_a_checkpoint_that_is_missing(run: str, full_weights: bool, tmp_path: Path) -> None:
    """The error is ours and a FileNotFoundError, as with other strategies, and names the path."""
    missing = tmp_path / "missing.ckpt"
    strategy = SmartInfinityStrategy(tmp_path / "storage", load_full_weights=full_weights)
    trainer = quiet_trainer(tmp_path, strategy, max_steps=1)
    with pytest.raises(FileNotFoundError) as caught:
        getattr(trainer, run)(Everything(), ckpt_path=missing)
    assert isinstance(caught.value, CheckpointNotFoundError)
    assert_helpful(caught.value, str(missing), "does not exist")


@pytest.mark.parametrize(
    "zero",
    [
        {"zero_quantized_gradients": False},
        {"elastic_checkpoint": False},
        {"load_from_fp32_weights": True},
        {"zero_hpz_partition_size": 1},
        {"zenflow": None},
    ],
)
def test_refused_features_may_be_switched_off_explicitly(zero: dict[str, Any]) -> None:
    """A configuration that sets a refused feature to its harmless value is accepted."""
    SmartInfinityStrategy(zero=zero)


def computing(module: LitTiny, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let each step return something else than its loss."""
    step = module.training_step
    module.training_step = lambda *batch: change(step(*batch))  # type: ignore[method-assign]


def embedding_sparsely(module: LitTiny) -> None:
    ones, table = torch.ones(2, dtype=torch.long), module.model.tokens.weight
    computing(module, lambda _: functional.embedding(ones, table, sparse=True).sum())


IN_TRAINING: dict[str, tuple[Callable[[LitTiny], object], tuple[str, ...]]] = {
    "a loss without a graph": (lambda m: computing(m, torch.Tensor.detach), ("has no graph", "no_grad", "outputs")),
    "another loss": (lambda m: computing(m, lambda _: torch.tensor(1.0)), ("has no graph", "no_grad", "outputs")),
    "the optimizer's state": (
        lambda m: computing(m, lambda _: m.optimizers().state_dict()),  # type: ignore[union-attr, arg-type, return-value]
        ("state_dict", "trainer.save_checkpoint"),
    ),
    "sparse gradients at run time": (embedding_sparsely, ("tokens.weight", "sparse=False")),
}


@pytest.mark.parametrize("name", IN_TRAINING)
def test_models_that_cannot_be_trained_are_refused(name: str, tmp_path: Path) -> None:
    """The error names what is wrong, and close() removes what was written before the first step."""
    spoil, named = IN_TRAINING[name]
    strategy, module = SmartInfinityStrategy(tmp_path / "s"), LitTiny(Recipe(tied=False))
    spoil(module)
    with refused(UnsupportedError, *named):
        fit(module, tmp_path, strategy, precision="32-true")
    assert (tmp_path / "s").exists()
    strategy.close()
    assert not list((tmp_path / "s").rglob("*.bin"))


def test_calls_that_would_move_or_extend_the_state_are_refused(tmp_path: Path) -> None:
    """offload_states, reload_states and add_param_group raise, and training goes on as without them."""
    called: list[int] = []

    def call_all(trainer: Any, *_: Any) -> None:
        engine = trainer.strategy.model
        calls: dict[Callable[[], object], str] = {
            engine.offload_states: "offload_states",
            engine.reload_states: "reload_states",
            engine.optimizer.offload_states: "offload_states",
            lambda: engine.optimizer.reload_states(non_blocking=True): "reload_states",
            lambda: trainer.optimizers[0].add_param_group({"params": []}): "add_param_group",
        }
        for call, name in calls.items():
            with refused(UnsupportedError, name):
                call()
        called.append(trainer.global_step)

    module, undisturbed = LitTiny(RECIPE), LitTiny(RECIPE)
    fit(module, tmp_path, callbacks=[does(on_train_batch_end=call_all)])
    fit(undisturbed, tmp_path / "undisturbed")
    assert called == [1, 2, 3] and module.losses == undisturbed.losses


def test_a_forked_child_leaves_the_state_alone(tmp_path: Path) -> None:
    """After os.fork() a child that exits normally leaves the parent's state on storage."""

    def fork(trainer: Any) -> None:
        closer = trainer.strategy.optimizers[0].rank_state.closer()
        child = os.fork()
        if child == 0:
            closer()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    module, quiet = LitTiny(RECIPE), LitTiny(RECIPE)
    fit(module, tmp_path, callbacks=[Hook(2, fork)])
    fit(quiet, tmp_path / "quiet")
    assert module.losses == quiet.losses


def test_unfreezing_in_mid_training_is_refused(tmp_path: Path) -> None:
    """A parameter that was frozen when the fit began has no state. torch would train it."""
    module = LitTiny(RECIPE)
    module.model.positions.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    thaw = Hook(2, lambda _: module.model.positions.weight.requires_grad_(True))
    with pytest.raises(UnsupportedError, match="positions"):
        fit(module, tmp_path, callbacks=[thaw])


def test_skipped_steps_are_reported_once(tmp_path: Path) -> None:
    """One warning says that the steps are skipped, and no step is committed."""
    with pytest.warns(UserWarning, match="NaN or infinite") as caught:
        trainer = fit(LitTiny(dataclasses.replace(RECIPE, nan_at=tuple(range(4)))), tmp_path)
    assert (
        sum("NaN or infinite" in str(warning.message) for warning in caught) == 1
        and trainer.strategy.optimizers[0].update.drained_handler().generation == 0
    )


# ---- several fits in a row, and validation and checkpoints after a fit


THREE = Recipe(precision="bf16-mixed", max_steps=3)


def test_with_one_place_a_failed_step_loses_the_state_and_says_so(tmp_path: Path) -> None:
    """With durability="none" a failed step raises, and saving afterwards raises instead of saving mixed steps."""

    def fail(trainer: Any) -> None:
        testing.inject(trainer.strategy.optimizers[0].update.drained_handler()._device._pipeline, fail_write_at=0)

    trainer = quiet_trainer(tmp_path, transfer={"durability": "none"}, callbacks=[Hook(1, fail)])
    with pytest.raises(StorageError):
        trainer.fit(LitTiny(THREE))
    with pytest.raises(StorageError, match="durability"):
        trainer.save_checkpoint(tmp_path / "lost.ckpt")


def test_a_module_in_a_fit_is_not_given_to_another_trainer(tmp_path: Path) -> None:
    """The other Trainer raises an error, and the module's own fit can still be saved and loses nothing."""
    module, taker, whole = Everything(THREE), quiet_trainer(tmp_path / "other", max_steps=1), Everything(THREE)
    trainer = quiet_trainer(tmp_path, callbacks=[Hook(2, lambda _: taker.fit(module))])
    with pytest.raises(UnsupportedError, match="is being fitted by another Trainer"):
        trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    resumed = Everything(THREE)
    quiet_trainer(tmp_path / "resumed").fit(resumed, ckpt_path=tmp_path / "saved.ckpt")
    fit(whole, tmp_path / "whole")
    assert module.losses + resumed.losses == whole.losses


def test_the_process_group_was_destroyed(tmp_path: Path) -> None:
    """Nothing can gather a module's parameters any more, and the error says to build it anew, which then trains."""
    losses = []
    for run in ("fit", "validate"):
        module = Everything(THREE)
        fit(module, tmp_path)
        losses.append(module.losses)
        torch.distributed.destroy_process_group()
        with refused(UnsupportedError, "Everything", "destroyed"):
            getattr(quiet_trainer(tmp_path / "again", max_steps=1), run)(module)
    assert losses[0] == losses[1] and len(losses[0]) == 3


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("folder", r"a training of LitTiny that began at [\d:]{8} took its storage '.*/storage' \(job 'default'\)\."),
        ("module", r"a training of Everything that began at [\d:]{8} took its module\."),
        ("closed", r"close\(\) was called\. Start a new fit"),
    ],
)
def test_why_a_training_was_closed(how: str, told: str, tmp_path: Path) -> None:
    """The error names a later fit on its folder or of its module, or says that close() was called before."""
    module = Everything(THREE)
    first = fit(module, tmp_path, max_steps=1)
    if how == "closed":
        first.strategy.close()  # type: ignore[attr-defined]
    if how == "module":
        fit(module, tmp_path / "other", max_steps=1)
    else:
        fit(LitTiny(THREE), tmp_path, max_steps=1)
    with pytest.raises(StorageError, match=f"has been closed, since {told}"):
        first.save_checkpoint(tmp_path / "first.ckpt")
    assert not (tmp_path / "first.ckpt").exists()
