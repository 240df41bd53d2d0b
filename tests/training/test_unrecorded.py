"""A fit of which storage cannot hold everything says so once, goes on, and leaves nothing to resume from."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from deepspeed.runtime.zero import GatheredParameters

from lightning_smartinfinity import ConfigError, SmartInfinityStrategy, StorageError
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer

RECIPE = Recipe(frozen=True, depth=1, max_steps=4)
CANNOT = "An interrupted training cannot be resumed from storage here"


class Broken(Exception):
    """An exception in the user's code."""


class Breaking(LitTiny):
    """A module that notes the warnings before each batch, and raises in its fourth step."""

    def __init__(self, told: list[warnings.WarningMessage]) -> None:
        super().__init__(RECIPE)
        self.told, self.before = told, [""]

    def on_train_batch_start(self, *_: Any) -> None:
        self.before.append(" ".join(str(one.message) for one in self.told))
        if self.trainer.global_step == 3:
            raise Broken


class WritesFrozen(pl.Callback):
    """Writes to a parameter that is not trained, behind the second step."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            frozen = next(parameter for parameter in module.parameters() if not parameter.requires_grad)
            with GatheredParameters([frozen], modifier_rank=0):
                frozen.data.mul_(2.0)


class OddState(pl.Callback):
    """Has a state that is no plain value."""

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [1, object()]}


@pytest.mark.parametrize(
    ("callback", "num_before", "reason"),
    [
        (OddState(), 0, r"\['checkpoint'\]\['callbacks'\]\['OddState'\]\['kept'\]\[1\] is a object, which"),
        (WritesFrozen(), 2, "a parameter that is not trained was written, and storage holds none of these"),
    ],
    ids=["state of a callback", "frozen parameter"],
)
def test_a_fit_that_cannot_be_recorded(callback: pl.Callback, num_before: int, reason: str, tmp_path: Path) -> None:
    """A state is named before the first batch, a write to a frozen parameter behind its batch; each once."""
    strategy = SmartInfinityStrategy(tmp_path / "state", overlap="none")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = Breaking(told)
        with pytest.raises(Broken):
            quiet_trainer(tmp_path, strategy, max_steps=4, callbacks=[callback]).fit(module)
    strategy.close()
    found = [str(one.message) for one in told if CANNOT in str(one.message)]
    assert len(found) == 1 and re.search(reason, found[0])
    assert [CANNOT in before for before in module.before[1:]] == [number >= num_before for number in range(4)]
    again = quiet_trainer(tmp_path, SmartInfinityStrategy(tmp_path / "state"), max_steps=4)
    with pytest.raises(StorageError, match="There is no optimizer state"):
        again.fit(LitTiny(RECIPE), ckpt_path="storage")


def test_a_state_with_one_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With ``durability="none"`` the fit says once that nothing can be resumed, and resuming is refused."""
    transfer = {"durability": "none"}
    strategy = SmartInfinityStrategy(tmp_path / "state", transfer=transfer)
    quiet_trainer(tmp_path, strategy, max_steps=2).fit(LitTiny(RECIPE))
    told = [record.getMessage() for record in caplog.records if CANNOT in record.getMessage()]
    assert len(told) == 1 and "durability='none' leaves its state half written" in told[0]
    again = quiet_trainer(tmp_path, SmartInfinityStrategy(tmp_path / "state", transfer=transfer), max_steps=2)
    with pytest.raises(ConfigError, match="the settings ask to keep nothing to resume from"):
        again.fit(LitTiny(RECIPE), ckpt_path="storage")
