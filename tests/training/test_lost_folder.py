"""A storage folder is lost: the error says how to go on, and that works."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_smartinfinity import SmartInfinityStrategy, StorageError, TransferConfig
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.training.actions import does


def fit(root: Path, storage: list[Path], *, ckpt_path: str | None = None, fails: bool = False, **transfer: Any) -> int:
    """Train up to step 6, with a checkpoint at steps 2 and 4, or fail after step 5; return the number of steps.

    Before it fails, it saves twice what no fit can resume from.
    """

    def fail(trainer: Any, *_: Any) -> None:
        if fails and trainer.global_step == 5:
            trainer.save_checkpoint(root / "weights.ckpt", weights_only=True)
            trainer.strategy._training_engine.save_checkpoint(root / "engine.ckpt")
            raise ZeroDivisionError

    saving = ModelCheckpoint(root / "saved", filename="{step}", every_n_train_steps=2, save_top_k=-1)
    strategy = SmartInfinityStrategy(storage, transfer=TransferConfig(**transfer))
    failing = does(on_train_batch_end=fail)
    trainer = quiet_trainer(root, strategy, max_steps=6, callbacks=[saving, failing], enable_checkpointing=True)
    module = LitTiny(Recipe())
    trainer.fit(module, ckpt_path=ckpt_path)
    assert trainer.global_step == 6
    return len(module.losses)


def test_a_fit_goes_on_without_a_lost_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error names the folder and the newest checkpoint. What it advises trains on, and what is left resumes later.

    A scheduler that starts the same command again gets the same error, and needs to remove nothing.
    """
    folders = [tmp_path / name for name in "abc"]
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, folders, fails=True)
    folders[1].rename(tmp_path / "unmounted")
    for _ in range(2):
        with pytest.raises(StorageError, match=f"'{folders[1]}' lacks its part") as caught:
            fit(tmp_path, folders, ckpt_path="storage")
    (path,) = re.findall(r"ckpt_path='(.*?)'", caught.value.remedy)
    (storage,) = re.findall(r"storage=(\[.*?\])", caught.value.remedy)
    assert path == str(tmp_path / "saved/step=4.ckpt")
    assert fit(tmp_path, ast.literal_eval(storage), ckpt_path=path) == 2
    (told,) = [record.getMessage() for record in caplog.records if "cannot be found" in record.getMessage()]
    assert f"whose part in '{folders[1]}'" in told and "moved to the job 'default.aside'" in told
    (tmp_path / "unmounted").rename(folders[1])
    assert fit(tmp_path, folders, ckpt_path="storage", job="default.aside") in (1, 2)  # it may repeat the last step
