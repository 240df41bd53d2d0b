"""Whole weights of one file reach partitioned models and their masters."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
)
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

from lightning_smartinfinity import CheckpointError, ConfigError, SmartInfinityStrategy, UnsupportedError
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint
from tests.helpers.damage import flip_bit_behind
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import quiet_trainer

RECIPE = Recipe(precision="bf16-mixed", odd=True, frozen=True, max_steps=2)


class Evaluated(LitTiny):
    """A module that can be validated and has a buffer."""

    def __init__(self, recipe: Recipe = RECIPE) -> None:
        super().__init__(recipe)
        self.register_buffer("seen", torch.zeros(3))

    def val_dataloader(self) -> Any:
        return self.recipe.validation_loader()


def trainer(root: Path, *, load_full_weights: bool = True, **settings: Any) -> pl.Trainer:
    """Return a quiet Trainer with ``load_full_weights``."""
    strategy = SmartInfinityStrategy(root / "storage", load_full_weights=load_full_weights)
    return quiet_trainer(root, strategy, **{"max_steps": 3, "num_sanity_val_steps": 0, **settings})


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


def test_full_weights_are_validated_and_trained(saved: tuple[Path, float], tmp_path: Path) -> None:
    """validate(ckpt_path=file) in a fresh Trainer gives the fitted model's loss, and fit goes on from its step.

    Both refuse a file with a flipped bit, from Lightning's converter and from ``smart-infinity export``.
    """
    path, loss = saved
    module, trained = Evaluated(), Evaluated()
    (result,) = trainer(tmp_path).validate(module, ckpt_path=str(path), verbose=False)
    assert result["val_loss"] == pytest.approx(loss, abs=1e-6)
    assert torch.equal(module.seen.float(), torch.full((3,), 7.0))
    fitting = trainer(tmp_path)
    fitting.fit(trained, ckpt_path=str(path))
    assert fitting.global_step == 3 and len(trained.losses) == 1
    assert torch.equal(trained.seen.float(), torch.full((3,), 7.0))
    weight = torch.load(path)["state_dict"]["model.norm.weight"]
    files = [Path(shutil.copy(path, tmp_path / "converted.ckpt")), tmp_path / "exported.ckpt"]
    export_checkpoint(path.with_name("folder.ckpt"), files[1], ExportSettings(to="lightning"))
    trainer(tmp_path).fit(Evaluated(), ckpt_path=str(files[1]))
    for damaged in files:
        flip_bit_behind(weight.numpy().tobytes()[:16], damaged)
        for run in (trainer(tmp_path).validate, trainer(tmp_path).fit):
            with pytest.raises(CheckpointError, match=rf"{damaged.name} is damaged: .*CRC"):
                run(Evaluated(), ckpt_path=str(damaged))


MISUSES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda norm: safe_set_full_fp32_param(norm, torch.zeros(3)), r"\(3,\)"),
    (lambda norm: safe_set_local_fp32_param(norm, torch.zeros(3)), r"\(3,\)"),
    (lambda norm: safe_set_full_fp32_param(norm, torch.zeros(32, dtype=torch.int64)), "int64"),
    (lambda norm: safe_set_full_grad(norm, [0.0] * 32), "list"),
    (lambda norm: safe_get_full_optimizer_state(norm, "momentum_buffer"), "'exp_avg'"),
    (lambda norm: safe_set_full_optimizer_state(norm, torch.zeros(32), "step"), "'step'"),
    # A wrong size on rank 1 alone.
    (lambda norm: safe_set_full_fp32_param(norm, torch.zeros(32 + torch.distributed.get_rank())), r"\(33,\)"),
]


def load_full(out: Path) -> dict[str, Any]:
    """Load full fp32 weights on two processes, and make mistakes.

    Returns:
        The file's weights, masters, parameters and moments when training starts, and the steps with mistakes.
    """
    module, path = LitTiny(RECIPE), out / "full.ckpt"
    weights = {name: value * 1.2345 for name, value in module.state_dict().items()}
    seen: dict[str, Any] = {"weights": weights, "masters": {}, "params": {}, "moments": {}, "misused": []}

    def note(*_: Any) -> None:
        for name, param in module.named_parameters():
            seen["masters"][name] = safe_get_full_fp32_param(param)
            if param.requires_grad:
                seen["moments"][name] = safe_get_full_optimizer_state(param, "exp_avg")
            with deepspeed.zero.GatheredParameters(param):
                seen["params"][name] = param.detach().clone()

    def misuse(trainer: pl.Trainer, *_: Any) -> None:
        for call, named in MISUSES:
            with pytest.raises((ConfigError, UnsupportedError), match=named):
                call(module.model.norm.weight)
        seen["misused"].append(trainer.global_step)

    callback = LambdaCallback(on_train_start=note, on_train_batch_start=misuse)
    strategy = SmartInfinityStrategy(out / "storage", load_full_weights=True)
    trainer = quiet_trainer(out, strategy, devices=2, max_steps=1, callbacks=[callback])
    if trainer.global_rank == 0:
        counts = {"epoch": 0, "global_step": 0, "lr_schedulers": []}
        torch.save({"state_dict": weights, "pytorch-lightning_version": pl.__version__, **counts}, path)
    trainer.fit(module, ckpt_path=str(path))
    strategy.close()
    return seen


def test_full_weights_reach_every_rank(tmp_path: Path) -> None:
    """On two ranks masters equal the file's fp32 values bit for bit, parameters the rounded values; moments are zero.

    Wrong sizes, dtypes and names raise our own error on both ranks, also where rank 1 alone passes one.
    """
    for seen in on_ranks(load_full, tmp_path):
        for name, value in seen["params"].items():
            weight = seen["weights"][name]
            assert torch.equal(value, weight.bfloat16()), name
            assert seen["masters"][name] is None or torch.equal(seen["masters"][name], weight), name
        assert [name for name, master in seen["masters"].items() if master is None] == ["model.positions.weight"]
        assert all(bool((value == 0).all()) for value in seen["moments"].values())
        assert seen["misused"] == [0]


def with_more(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["model.extra.weight"] = torch.zeros(5)


MISFITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "without": (lambda checkpoint: checkpoint["state_dict"].pop("model.norm.weight"), r"model\.norm\.weight"),
    "with another shape": (
        lambda checkpoint: checkpoint["state_dict"].update({"model.norm.weight": torch.zeros(5)}),
        r"model\.norm\.weight",
    ),
    "with more": (with_more, r"model\.extra\.weight"),
    "without weights": (lambda checkpoint: checkpoint.pop("state_dict"), "state_dict"),
}


def validated(saved: Path, change: Callable[[dict[str, Any]], object], root: Path, *, strict: bool = True) -> Any:
    """Return what a validation of a changed checkpoint logs."""
    checkpoint, module = torch.load(saved, weights_only=False), Evaluated()
    change(checkpoint)
    torch.save(checkpoint, root / "changed.ckpt")
    module.strict_loading = strict
    return trainer(root).validate(module, ckpt_path=str(root / "changed.ckpt"), verbose=False)[0]


@pytest.mark.parametrize("name", MISFITS)
def test_full_weights_that_do_not_fit_are_refused(name: str, saved: tuple[Path, float], tmp_path: Path) -> None:
    """Missing, misshapen, extra or no weights raise an error. Stock loads what fits without a message."""
    change, named = MISFITS[name]
    with pytest.raises(CheckpointError, match=named) as caught:
        validated(saved[0], change, tmp_path)
    assert caught.value.remedy.endswith(".")


def test_keys_may_differ_where_loading_is_not_strict(saved: tuple[Path, float], tmp_path: Path) -> None:
    """strict_loading=False ignores a key that the model lacks."""
    assert validated(saved[0], with_more, tmp_path, strict=False)["val_loss"] == pytest.approx(saved[1], abs=1e-6)


# ---- save_weights_only=True saves the masters alone, for evaluation and for a new start


VALIDATED = Recipe(precision="bf16-mixed", max_steps=3, validate=True)


def test_weights_only_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint has a third of the size.

    It evaluates and converts to one file, but a fit refuses to resume from it.
    """
    callback = ModelCheckpoint(
        tmp_path / "checkpoints", filename="{step}", every_n_train_steps=3, save_weights_only=True, save_top_k=-1
    )
    module = LitTiny(VALIDATED)
    trainer = quiet_trainer(tmp_path, enable_checkpointing=True, callbacks=[callback])
    trainer.fit(module)
    path = tmp_path / "checkpoints" / "step=3.ckpt"
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    masters = {
        name: trainer.strategy.optimizers[0].get_full_hp_param(param).clone()  # type: ignore[attr-defined]
        for name, param in module.model.named_parameters()
    }
    numel = sum(master.numel() for master in masters.values())
    (small,), (whole,) = (folder.rglob("*optim_states.pt") for folder in (path, tmp_path / "whole.ckpt"))
    assert small.stat().st_size < 5 * numel < 12 * numel < whole.stat().st_size

    (expected,) = quiet_trainer(tmp_path / "a").validate(module, ckpt_path=tmp_path / "whole.ckpt", verbose=False)
    (metrics,) = quiet_trainer(tmp_path / "b").validate(LitTiny(VALIDATED), ckpt_path=path, verbose=False)
    assert metrics == expected

    with pytest.raises(CheckpointError, match="weights only") as caught:
        quiet_trainer(tmp_path / "c", max_steps=4).fit(LitTiny(VALIDATED), ckpt_path=path)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(caught.value.remedy.split("`")[1])[1:]) == 0
    exported = LitTiny.load_from_checkpoint("weights.ckpt", recipe=VALIDATED, weights_only=True)
    for name, param in exported.model.named_parameters():
        assert torch.equal(param, masters[name]), name
