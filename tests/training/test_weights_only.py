"""save_weights_only=True saves the masters alone, for evaluation and for a new start."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_smartinfinity import CheckpointError
from lightning_smartinfinity.cli import main
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer

RECIPE = Recipe(precision="bf16-mixed", max_steps=3, validate=True)


def test_weights_only_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint has a third of the size.

    It evaluates and converts to one file, but a fit refuses to resume from it.
    """
    callback = ModelCheckpoint(
        tmp_path / "checkpoints", filename="{step}", every_n_train_steps=3, save_weights_only=True, save_top_k=-1
    )
    module = LitTiny(RECIPE)
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
    (metrics,) = quiet_trainer(tmp_path / "b").validate(LitTiny(RECIPE), ckpt_path=path, verbose=False)
    assert metrics == expected

    with pytest.raises(CheckpointError, match="weights only") as caught:
        quiet_trainer(tmp_path / "c", max_steps=4).fit(LitTiny(RECIPE), ckpt_path=path)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(caught.value.remedy.split("`")[1])[1:]) == 0
    exported = LitTiny.load_from_checkpoint("weights.ckpt", recipe=RECIPE, weights_only=True)
    for name, param in exported.model.named_parameters():
        assert torch.equal(param, masters[name]), name
