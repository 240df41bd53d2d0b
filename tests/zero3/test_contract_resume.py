"""The private seams of the installed Lightning that an exact resume stands on."""

from __future__ import annotations

import inspect

import lightning.pytorch as pl
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from lightning_smartinfinity import resume


def test_epoch_creates_its_iterator_unless_it_resumes() -> None:
    """Clearing the fit loop's flag is what makes the first epoch after a resume create its iterator."""
    assert "return self._resuming_from_checkpoint" in inspect.getsource(_FitLoop.is_resuming.fget)
    source = inspect.getsource(_TrainingEpochLoop.on_run_start)
    assert "current_epoch > 0 and not self.trainer.fit_loop.is_resuming and not self.restarting:" in source
    assert "iter(data_fetcher)" in source


def test_loops_have_what_a_resume_asks_them() -> None:
    """Names of the loops' progress, loaders and fetcher; Lightning's own warning, which ours replaces."""
    fit_loop = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit_loop
    assert fit_loop._data_fetcher is None and fit_loop._combined_loader is None
    assert fit_loop.epoch_loop.batch_progress.is_last_batch is False
    assert fit_loop.epoch_loop.batch_progress.current.ready == 0
    assert fit_loop.epoch_loop.restarted_on_train_batch_end is False
    assert list(inspect.signature(fit_loop.epoch_loop._should_check_val_fx).parameters) == ["data_fetcher"]
    assert _DataFetcher().length is None
    assert resume._LIGHTNINGS_OWN in inspect.getsource(_TrainingEpochLoop.reset)
