"""Residuals of compressed gradients go to storage beside the training; what cannot be recorded is told once."""

from __future__ import annotations

import re
import threading
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from deepspeed.runtime.zero import GatheredParameters

from lightning_smartinfinity import ConfigError, SmartInfinityStrategy, StorageError, TopK
from lightning_smartinfinity.pipeline.handler import TransferHandler
from lightning_smartinfinity.storage.records.residual_write import ResidualWrite
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit, quiet_trainer
from tests.helpers.waiting import LIMIT
from tests.reliability.faults import Interrupted, same
from tests.stock.systems import Hook

pytestmark = pytest.mark.filterwarnings("ignore:.*is predicted to bring no gain")

RECIPE = Recipe(depth=1, max_steps=4, precision="32-true")
OVERLAPS = ["none", "forward", "backward"]


def strategy_in(root: Path, overlap: str = "none") -> SmartInfinityStrategy:
    transfer = {"tasklet_bytes": 64 * 1024, "num_buffers": 3}
    return SmartInfinityStrategy(root / "state", compression=TopK(0.05), overlap=overlap, transfer=transfer)


class Broken(Exception):
    """An exception in the user's code."""


@pytest.mark.parametrize("overlap", long_but(["backward"], OVERLAPS))
def test_a_fit_that_is_resumed(tmp_path: Path, overlap: str) -> None:
    """It ends with the residual and the masters of a fit that never stopped."""
    interrupted = Interrupted(tmp_path, RECIPE, overlap=overlap)
    assert same(interrupted.resumed(), interrupted.expected)


@pytest.mark.parametrize(
    ("overlap", "hook"),
    long_but(
        [("none", "on_after_backward"), ("backward", "on_train_batch_start")],
        [("none", "on_after_backward"), ("forward", "on_after_backward"), ("backward", "on_train_batch_start")],
    ),
)
def test_training_goes_on_while_it_is_written(
    tmp_path: Path, overlap: str, hook: str, monkeypatch: pytest.MonkeyPatch
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

    class Letting(LitTiny):
        def on_before_optimizer_step(self, *_: Any) -> None:
            if begun.count("update") < 2:
                go_on.set()

        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step < RECIPE.max_steps:
                go_on.clear()

    monkeypatch.setattr(ResidualWrite, "_write", held)
    noted("begin_step")
    noted("begin_incremental")
    module = Letting(RECIPE)
    setattr(module, hook, lambda *_: go_on.set())
    fit(module, tmp_path, strategy_in(tmp_path, overlap), max_steps=4)
    assert begun.count("update") == 4 and begun.count("written") >= 4


FROZEN = Recipe(frozen=True, depth=1, max_steps=4)
CANNOT = "An interrupted training cannot be resumed from storage here"


class Breaking(LitTiny):
    """A module that notes the warnings before each batch, and raises in its fourth step."""

    def __init__(self, told: list[warnings.WarningMessage]) -> None:
        super().__init__(FROZEN)
        self.told, self.before = told, [""]

    def on_train_batch_start(self, *_: Any) -> None:
        self.before.append(" ".join(str(one.message) for one in self.told))
        if self.trainer.global_step == 3:
            raise Broken


def write_frozen(trainer: Any) -> None:
    """Write to a parameter that is not trained."""
    module = trainer.lightning_module
    frozen = next(parameter for parameter in module.parameters() if not parameter.requires_grad)
    with GatheredParameters([frozen], modifier_rank=0):
        frozen.data.mul_(2.0)


class OddState(pl.Callback):
    """Has a state that is no plain value."""

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [1, object()]}


def no_residual(*_: Any) -> None:
    raise StorageError("Cannot write.", "Look at the disk.")


@pytest.mark.parametrize(
    ("callback", "num_before", "reason"),
    [
        (None, 1, "Cannot write"),
        (OddState(), 0, r"\['checkpoint'\]\['callbacks'\]\['OddState'\]\['kept'\]\[1\] is a object, which"),
        (Hook(2, write_frozen), 2, "a parameter that is not trained was written, and storage holds none of these"),
    ],
    ids=["residual", "state of a callback", "frozen parameter"],
)
def test_a_fit_that_cannot_be_recorded(
    callback: pl.Callback | None, num_before: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state is named before the first batch, a write to a frozen parameter behind its batch; each once.

    So is a disk that takes no residual.
    """
    if callback is None:
        monkeypatch.setattr(ResidualWrite, "_write", no_residual)
    strategy = strategy_in(tmp_path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = Breaking(told)
        with pytest.raises(Broken):
            quiet_trainer(tmp_path, strategy, max_steps=4, callbacks=callback).fit(module)
    strategy.close()
    found = [str(one.message) for one in told if CANNOT in str(one.message)]
    assert len(found) == 1 and re.search(reason, found[0])
    assert [CANNOT in before for before in module.before[1:]] == [number >= num_before for number in range(4)]
    again = quiet_trainer(tmp_path, SmartInfinityStrategy(tmp_path / "state"), max_steps=4)
    with pytest.raises(StorageError, match="There is no optimizer state"):
        again.fit(LitTiny(FROZEN), ckpt_path="storage")


def test_a_state_with_one_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With ``durability="none"`` the fit says once that nothing can be resumed, and resuming is refused."""
    transfer = {"durability": "none"}
    strategy = SmartInfinityStrategy(tmp_path / "state", transfer=transfer)
    quiet_trainer(tmp_path, strategy, max_steps=2).fit(LitTiny(FROZEN))
    told = [record.getMessage() for record in caplog.records if CANNOT in record.getMessage()]
    assert len(told) == 1 and "durability='none' leaves its state half written" in told[0]
    again = quiet_trainer(tmp_path, SmartInfinityStrategy(tmp_path / "state", transfer=transfer), max_steps=2)
    with pytest.raises(ConfigError, match="the settings ask to keep nothing to resume from"):
        again.fit(LitTiny(FROZEN), ckpt_path="storage")
