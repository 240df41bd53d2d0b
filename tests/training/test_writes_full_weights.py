"""Whole weights of one file reach partitioned models and their masters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

from lightning_smartinfinity import CheckpointError, ConfigError, SmartInfinityStrategy, UnsupportedError
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.training.writes_worker import Loaded

RECIPE = Recipe(precision="bf16-mixed", odd=True, frozen=True, max_steps=2)


class Evaluated(LitTiny):
    """A module that can be validated and has a buffer."""

    def __init__(self, recipe: Recipe = RECIPE) -> None:
        super().__init__(recipe)
        self.register_buffer("seen", torch.zeros(3))

    def val_dataloader(self) -> Any:
        return self.recipe.validation_loader()


def trainer(root: Path, *callbacks: pl.Callback, load_full_weights: bool = True, **settings: Any) -> pl.Trainer:
    """Return a quiet Trainer with ``load_full_weights``."""
    strategy = SmartInfinityStrategy(root / "storage", load_full_weights=load_full_weights)
    return quiet_trainer(
        root, strategy, **{"callbacks": list(callbacks), "max_steps": 3, "num_sanity_val_steps": 0, **settings}
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """Return one file with the fp32 weights of a fitted model, from Lightning's converter, and its validation loss."""
    root = tmp_path_factory.mktemp("saved")
    module = Evaluated()
    fitted = trainer(root, load_full_weights=False, max_steps=2)
    module.seen += 7
    fitted.fit(module)
    fitted.save_checkpoint(root / "folder.ckpt")
    convert_zero_checkpoint_to_fp32_state_dict(root / "folder.ckpt", root / "full.ckpt")
    return root / "full.ckpt", fitted.validate(module, verbose=False)[0]["val_loss"]


def test_full_weights_reach_masters_and_parameters(saved: tuple[Path, float], tmp_path: Path) -> None:
    """fit(ckpt_path=file) loads the file's fp32 values into masters, rounds them for parameters, and zeroes moments."""
    path, _ = saved
    loaded, module = Loaded(), Evaluated()
    fitting = trainer(tmp_path, loaded)
    fitting.fit(module, ckpt_path=str(path))
    weights = torch.load(path, weights_only=False)["state_dict"]
    trained = {name: value for name, value in loaded.masters.items() if value is not None}
    assert len(trained) > 20 and set(loaded.masters) - set(trained) == {"model.positions.weight"}
    for name, value in trained.items():
        assert torch.equal(value, weights[name]), name
    for name, value in loaded.params.items():
        assert torch.equal(value, weights[name].bfloat16()), name
    assert all(bool((value == 0).all()) for value in loaded.moments.values())
    assert fitting.global_step == 3 and len(module.losses) == 1
    assert torch.equal(module.seen.float(), torch.full((3,), 7.0))


def test_full_weights_are_validated(saved: tuple[Path, float], tmp_path: Path) -> None:
    """validate(ckpt_path=file) in a fresh Trainer gives the fitted model's loss."""
    path, loss = saved
    (result,) = trainer(tmp_path).validate(Evaluated(), ckpt_path=str(path), verbose=False)
    assert result["val_loss"] == pytest.approx(loss, abs=1e-6)


def _without(checkpoint: dict[str, Any]) -> None:
    del checkpoint["state_dict"]["model.norm.weight"]


def _with_another_shape(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["model.norm.weight"] = torch.zeros(5)


def _with_more(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["model.extra.weight"] = torch.zeros(5)


def _without_weights(checkpoint: dict[str, Any]) -> None:
    del checkpoint["state_dict"]


MISFITS = {
    _without: r"model\.norm\.weight",
    _with_another_shape: r"model\.norm\.weight",
    _with_more: r"model\.extra\.weight",
    _without_weights: "state_dict",
}


@pytest.mark.parametrize("change", MISFITS, ids=lambda change: change.__name__.strip("_"))
def test_full_weights_that_do_not_fit_are_refused(
    change: Callable[[dict[str, Any]], None], saved: tuple[Path, float], tmp_path: Path
) -> None:
    """Missing, misshapen, extra or no weights raise an error. Stock loads what fits without a message."""
    checkpoint = torch.load(saved[0], weights_only=False)
    change(checkpoint)
    torch.save(checkpoint, tmp_path / "misfit.ckpt")
    with pytest.raises(CheckpointError, match=MISFITS[change]) as caught:
        trainer(tmp_path).validate(Evaluated(), ckpt_path=str(tmp_path / "misfit.ckpt"), verbose=False)
    assert caught.value.remedy.endswith(".")


def test_keys_may_differ_where_loading_is_not_strict(saved: tuple[Path, float], tmp_path: Path) -> None:
    """strict_loading=False ignores a key that the model lacks."""
    checkpoint = torch.load(saved[0], weights_only=False)
    _with_more(checkpoint)
    torch.save(checkpoint, tmp_path / "more.ckpt")
    module = Evaluated()
    module.strict_loading = False
    (result,) = trainer(tmp_path).validate(module, ckpt_path=str(tmp_path / "more.ckpt"), verbose=False)
    assert result["val_loss"] == pytest.approx(saved[1], abs=1e-6)


class Misuse(pl.Callback):
    """A callback that makes calls that must fail during training, and then one that works."""

    def __init__(self) -> None:
        self.refused: dict[str, Exception] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        from deepspeed.utils import (
            safe_get_full_optimizer_state,
            safe_get_local_fp32_param,
            safe_set_full_fp32_param,
            safe_set_full_grad,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
        )

        model = pl_module.model
        norm, weights = model.norm.weight, {"weight": torch.full((32,), 0.25), "bias": torch.full((32,), 0.5)}
        misuses: dict[str, Callable[[], Any]] = {
            "too few": lambda: safe_set_full_fp32_param(norm, torch.zeros(3)),
            "too few here": lambda: safe_set_local_fp32_param(norm, torch.zeros(3)),
            "integers": lambda: safe_set_full_fp32_param(norm, torch.zeros(32, dtype=torch.int64)),
            "no tensor": lambda: safe_set_full_grad(norm, [0.0] * 32),
            "unknown state": lambda: safe_get_full_optimizer_state(norm, "momentum_buffer"),
            "unknown state to set": lambda: safe_set_full_optimizer_state(norm, torch.zeros(32), "step"),
        }
        for name, misuse in misuses.items():
            with pytest.raises((ConfigError, UnsupportedError)) as caught:
                misuse()
            self.refused[name] = caught.value
        model.norm.load_state_dict(weights)
        for name, param in model.norm.named_parameters():
            assert torch.equal(safe_get_local_fp32_param(param), weights[name])


def test_misuse_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """Wrong sizes, dtypes and names each raise our own error; plain load_state_dict reaches the masters."""
    misuse = Misuse()
    quiet_trainer(tmp_path, callbacks=[misuse], max_steps=1, precision="32-true").fit(LitTiny(RECIPE))
    assert len(misuse.refused) == 6
    assert "'exp_avg'" in str(misuse.refused["unknown state"])
