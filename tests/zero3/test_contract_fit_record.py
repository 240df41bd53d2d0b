"""Tests the private seams of the installed Lightning and torch that training records rely on."""

from __future__ import annotations

import inspect

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_smartinfinity.common.patches import replaced
from lightning_smartinfinity.integrations.trainer.checkpoint_index import _FIELDS


def quiet() -> pl.Trainer:
    """Return a Trainer of one epoch of three batches."""
    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "barebones"), False
    )
    return pl.Trainer(accelerator="cpu", max_epochs=1, limit_train_batches=3, limit_val_batches=0, **off)


@pytest.mark.seam("going on after a batch")
def test_a_loop_calls_what_we_replace() -> None:
    """_TrainingEpochLoop.run calls on_run_start once, on_advance_end after each batch, and has _Loop._restarting."""
    trainer, calls = quiet(), []
    loop = trainer.fit_loop.epoch_loop
    for name in ("on_run_start", "on_advance_end"):

        def call(fetcher: object, name: str = name) -> None:
            calls.append(name)
            getattr(type(loop), name)(loop, fetcher)

        setattr(loop, name, call)
    trainer.fit(BoringModel())
    assert calls == ["on_run_start", "on_advance_end", "on_advance_end", "on_advance_end"]
    assert trainer.fit_loop._restarting is False and loop.restarting is False


@pytest.mark.seam("training records", "Callbacks see Trainer._logger_connector._callback_metrics.")
def test_a_checkpoint_without_weights() -> None:
    """dump_checkpoint of Trainer._checkpoint_connector asks _get_lightning_module_state_dict and on_save_checkpoint."""
    trainer = quiet()
    trainer.fit(BoringModel())
    weights = replaced(trainer._checkpoint_connector, "_get_lightning_module_state_dict", dict)
    with weights, replaced(trainer.fit_loop, "on_save_checkpoint", lambda: {"asked": True}):
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    assert checkpoint["state_dict"] == {} and checkpoint["loops"]["fit_loop"]["state_dict"] == {"asked": True}
    trainer._logger_connector._callback_metrics.update({"x": torch.ones(())})
    assert "x" in trainer.callback_metrics


@pytest.mark.seam("a resume knows whole ones", "There are _should_remove_checkpoint and _remove_checkpoint.")
def test_the_index_of_a_model_checkpoint() -> None:
    """ModelCheckpoint.state_dict has the index; _last_checkpoint_saved and _last_global_step_saved are attributes."""
    callback = ModelCheckpoint()
    assert {*callback.state_dict()} == {*_FIELDS, "monitor", "dirpath"}
    assert all(callback.state_dict()[name] is getattr(callback, name) for name in _FIELDS)
    assert (callback._last_checkpoint_saved, callback._last_global_step_saved) == ("", 0)
    names = ["trainer", "previous", "current"]
    assert [*inspect.signature(callback._should_remove_checkpoint).parameters] == names
    assert [*inspect.signature(callback._remove_checkpoint).parameters] == ["trainer", "filepath"]
    assert "trainer.strategy.remove_checkpoint(filepath)" in inspect.getsource(ModelCheckpoint._remove_checkpoint)
