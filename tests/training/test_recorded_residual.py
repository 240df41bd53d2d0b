"""The residual of compressed gradients goes to storage beside the training, whole before the next update begins."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import SmartInfinityStrategy, StorageError, StorageFullError, TopK
from lightning_smartinfinity.pipeline.handler import TransferHandler
from lightning_smartinfinity.storage import StateStore, recover_store
from lightning_smartinfinity.storage.records.residual_file import residual_bytes
from lightning_smartinfinity.storage.records.residual_write import ResidualWrite
from lightning_smartinfinity.zero3.setup import reopening
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit, quiet_trainer
from tests.helpers.waiting import LIMIT

pytestmark = pytest.mark.filterwarnings("ignore:.*is predicted to bring no gain")

RECIPE = Recipe(depth=1, max_steps=4, precision="32-true")
OVERLAPS = ["none", "forward", "backward"]


def strategy_in(root: Path, overlap: str = "none") -> SmartInfinityStrategy:
    transfer = {"tasklet_bytes": 64 * 1024, "num_buffers": 3}
    return SmartInfinityStrategy(root / "state", compression=TopK(0.05), overlap=overlap, transfer=transfer)


def state_of(strategy: Any) -> list[torch.Tensor]:
    """Return the residual and all masters."""
    strategy.drain()
    rank_state, masters = strategy._training_optimizer.rank_state, []
    rank_state.handler.state.scan(lambda window: masters.append(torch.from_numpy(window.arrays[0].copy())))
    return [rank_state.residual.clone(), *masters]


class Broken(Exception):
    """An exception in the user's code."""


class Breaking(LitTiny):
    """A module that raises within its third step, or calls a function at the moments of a batch."""

    breaks = True

    def at(self, moment: str) -> None:
        """Take notice of a moment."""

    def on_train_batch_start(self, *args: Any) -> None:
        self.at("batch start")

    def on_after_backward(self) -> None:
        self.at("backward end")
        if self.breaks and self.trainer.global_step == 2:
            raise Broken


@pytest.mark.parametrize("overlap", long_but(["none", "backward"], OVERLAPS))
def test_a_fit_that_is_resumed(tmp_path: Path, overlap: str) -> None:
    """It ends with the residual and the masters of a fit that never stopped."""
    straight = strategy_in(tmp_path / "straight", overlap)
    fit(LitTiny(RECIPE), tmp_path, straight, max_steps=4)
    module, broken = Breaking(RECIPE), strategy_in(tmp_path, overlap)
    with pytest.raises(Broken):
        fit(module, tmp_path, broken, max_steps=4)
    broken.close()
    resumed = strategy_in(tmp_path, overlap)
    quiet_trainer(tmp_path, resumed, max_steps=4).fit(LitTiny(RECIPE), ckpt_path="storage")
    for found, expected in zip(state_of(resumed), state_of(straight), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("overlap", "moment"), [("none", "backward end"), ("forward", "backward end"), ("backward", "batch start")]
)
def test_training_goes_on_while_it_is_written(
    tmp_path: Path, overlap: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk answers only late in the next batch. No update begins before it has, and no batch waits earlier."""
    go_on, write, begun = threading.Event(), ResidualWrite._write, []
    go_on.set()  # for the record of the fit's beginning

    def held(self: Any, values: Any) -> None:
        assert go_on.wait(LIMIT)
        write(self, values)
        begun.append("written")

    def noted(name: str) -> None:
        begin = getattr(TransferHandler, name)

        def beginning(self: Any, plan: Any, **settings: Any) -> None:
            begin(self, plan, **settings)
            assert self._store.records._residual_write is None
            begun.append("update")

        monkeypatch.setattr(TransferHandler, name, beginning)

    class Letting(Breaking):
        breaks = False

        def at(self, now: str) -> None:
            if now == moment:
                go_on.set()

        def on_before_optimizer_step(self, *_: Any) -> None:
            if begun.count("update") < 2:
                go_on.set()

        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step < RECIPE.max_steps:
                go_on.clear()

    monkeypatch.setattr(ResidualWrite, "_write", held)
    noted("begin_step")
    noted("begin_incremental")
    fit(Letting(RECIPE), tmp_path, strategy_in(tmp_path, overlap), max_steps=4)
    assert begun.count("update") == 4 and begun.count("written") >= 4


def test_a_disk_that_takes_no_residual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on, a warning says that nothing can be resumed, once, and nothing stays."""

    def fail(*_: Any) -> None:
        raise StorageError("Cannot write.", "Look at the disk.")

    monkeypatch.setattr(ResidualWrite, "_write", fail)
    strategy, module = strategy_in(tmp_path), Breaking(RECIPE)
    with (
        pytest.warns(UserWarning, match=r"cannot be resumed from storage here.*Cannot write") as told,
        pytest.raises(Broken),
    ):
        fit(module, tmp_path, strategy, max_steps=4)
    assert sum("cannot be resumed" in str(warning.message) for warning in told) == 1
    strategy.close()
    assert not list((tmp_path / "state").iterdir())


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set-up asks for the space of both residuals, and says how to do without."""
    strategy = strategy_in(tmp_path)
    fit(LitTiny(RECIPE), tmp_path, strategy, max_steps=1)
    both, state = residual_bytes(strategy.state_numel), strategy.state_bytes
    strategy.close()
    real = os.statvfs

    def short(path: Any) -> os.statvfs_result:
        values = list(real(path))
        values[4] = (state + both) // values[1]  # without the small files of the state
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", short)
    with pytest.raises(StorageFullError, match=r"optimizer state and the residuals of compressed.*keep=False"):
        fit(LitTiny(RECIPE), tmp_path, strategy_in(tmp_path), max_steps=1)
    assert not (tmp_path / "state").exists() or not list((tmp_path / "state").iterdir())


def test_damage_on_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit that flips after the residual was looked at ends the resume with our own error, and the state stays."""
    module, broken = Breaking(RECIPE), strategy_in(tmp_path)
    with pytest.raises(Broken):
        fit(module, tmp_path, broken, max_steps=4)
    broken.close()
    newest = max(tmp_path.rglob("residual-*.bin"), key=lambda path: path.stat().st_mtime_ns)

    def damaging(*args: Any, **settings: Any) -> StateStore:
        with newest.open("r+b") as file:
            (byte,) = file.read(1)
            file.seek(0)
            file.write(bytes([byte ^ 1]))
        return recover_store(*args, **settings)

    monkeypatch.setattr(reopening, "recover_store", damaging)
    with pytest.raises(StorageError, match=f"offset 0 of '{newest}' is damaged"):
        quiet_trainer(tmp_path, strategy_in(tmp_path), max_steps=4).fit(LitTiny(RECIPE), ckpt_path="storage")
    assert newest.exists()
