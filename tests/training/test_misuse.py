"""Calls that make no sense with the strategy raise our own error, which says what to call instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity import CheckpointError, CheckpointNotFoundError, SmartInfinityStrategy, UnsupportedError
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.plain import Everything
from tests.helpers.trainers import fit, quiet_trainer
from tests.training.test_bad_input import assert_helpful

RECIPE = Recipe(depth=1)


@pytest.mark.seam("SmartInfinityStrategy says if `configure_optimizers` returned None", "_MockOptimizer of Lightning.")
def test_saving_after_a_fit_that_failed_in_set_up(tmp_path: Path) -> None:
    """There is nothing to save, and nothing is written."""
    trainer, module = quiet_trainer(tmp_path), LitTiny(RECIPE)
    module.configure_optimizers = lambda: None  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match=r"LitTiny\.configure_optimizers returned None"):
        trainer.fit(module)
    with pytest.raises(UnsupportedError) as caught:
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert_helpful(caught.value, "save_checkpoint", "trained nothing")
    assert not (tmp_path / "x.ckpt").exists()


@pytest.mark.parametrize("path", long_but([".", None, "a\0b"], ["", ".", Path(), None, 7, "a\0b"]))
def test_saving_into_no_folder_of_its_own(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error names the path, and an empty path does not mean the current folder."""
    monkeypatch.chdir(tmp_path)
    trainer = fit(LitTiny(RECIPE), tmp_path, max_steps=1)
    for save in (trainer.save_checkpoint, trainer.strategy.model.save_checkpoint):
        with pytest.raises(CheckpointError) as caught:
            save(path)
        assert_helpful(caught.value, repr(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["storage"]


def test_another_strategy_after_ours(tmp_path: Path) -> None:
    """A partitioned module can be evaluated but not trained by another strategy. A new module can be trained."""
    module = LitTiny(RECIPE)
    fit(module, tmp_path, precision="32-true")
    plain = quiet_trainer(tmp_path, "auto", precision="32-true")
    plain.validate(module, LitTiny(RECIPE).recipe.validation_loader(), verbose=False)
    with pytest.raises(UnsupportedError) as caught:
        plain.fit(module)
    assert_helpful(caught.value, "AdamW", "partitioned", "(64, 32)")
    assert fit(LitTiny(RECIPE), tmp_path, "auto", precision="32-true").global_step == 3


def test_an_optimizer_used_for_a_second_fit(tmp_path: Path) -> None:
    """The first fit took its parameters. The error says so, and the first fit's state stays."""
    module = LitTiny(RECIPE)
    optimizer = RECIPE.build_optimizer(list(module.model.named_parameters()))
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    trainer = fit(module, tmp_path, max_steps=1)
    trainer.fit_loop.epoch_loop.max_steps = 2
    with pytest.raises(UnsupportedError) as caught:
        trainer.fit(module)
    assert_helpful(caught.value, "AdamW", "earlier training", "new optimizer")
    trainer.save_checkpoint(tmp_path / "after.ckpt")


@pytest.mark.parametrize(
    ("run", "full_weights"), [("fit", False), ("fit", True), ("validate", True), ("test", False), ("predict", False)]
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
