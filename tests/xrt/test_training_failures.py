"""Cards that fail at any point of a fit, with or without their SSD, leave the host's bits or a clear error."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity import (
    DeviceError,
    SmartInfinityStrategy,
)
from lightning_smartinfinity.devices.smartssd import worker
from tests.helpers.long_cases import long_but
from tests.helpers.models import Recipe
from tests.helpers.native_testing import Hold
from tests.helpers.runif import RunIf
from tests.helpers.trainers import quiet_trainer
from tests.helpers.waiting import LIMIT, lenient
from tests.xrt.cards import EmulatedCards
from tests.xrt.fits import Reporting, arrays_of, assert_same, on_cards, on_host, same_arrays

pytestmark = [
    RunIf(xrt=True),
    pytest.mark.filterwarnings("ignore:.*is small for SmartSSDs"),
]

RECIPE = Recipe(precision="bf16-mixed", depth=1, groups=True, scheduler="step", validate=True, max_steps=4)


class Failing(Reporting):
    """Calls ``fail`` at one moment of its training, and keeps its final state."""

    def __init__(self, moment: str, fail: Any, folder: Path) -> None:
        super().__init__(RECIPE)
        self.moment, self.fail, self.folder = moment, fail, folder
        self.resumed = folder / "half.ckpt" if moment == "resumed" else None

    def at(self, moment: str) -> None:
        if moment == self.moment:
            self.fail(self.trainer)

    def on_train_start(self) -> None:
        self.at("first step")

    def on_train_batch_start(self, *_: Any) -> None:
        if self.trainer.global_step == RECIPE.max_steps - 1:
            self.at("last step")

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.at("validation")

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.at("save")

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2:
            self.trainer.save_checkpoint(self.folder / "half.ckpt")

    def on_train_end(self) -> None:
        super().on_train_end()
        self.at("end")


def fitted(root: Path, strategy: SmartInfinityStrategy, module: Failing, **settings: Any) -> Failing:
    settings = {"max_steps": RECIPE.max_steps, "val_check_interval": 2, **settings}
    quiet_trainer(root, strategy, **settings).fit(module, ckpt_path=module.resumed)
    strategy.close()
    return module


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Failing:
    """The module that the host trained."""
    folder = tmp_path_factory.mktemp("host")
    return fitted(folder, on_host(folder), Failing("never", None, folder))


MOMENTS = ("first step", "save", "validation", "last step", "end")


@pytest.mark.parametrize(
    ("kind", "overlap", "moments"),
    long_but(
        [("lost", "backward", ("save", "end"))],
        [
            ("lost", "backward", ("save", "end")),
            *itertools.product(("lost", "hang", "error"), ("none", "forward", "backward"), [MOMENTS]),
        ],
    ),
)
def test_at_every_moment(
    emulated_cards: EmulatedCards,
    tmp_path: Path,
    expected: Failing,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    overlap: str,
    moments: tuple[str, ...],
) -> None:
    """A failure at any moment leaves the host's bits, also in a training resumed from its checkpoint."""
    for moment in moments:
        emulated_cards.reset()
        caplog.clear()

        def fail(trainer: Any) -> None:
            if kind == "lost":
                emulated_cards.lose(1)
            else:
                emulated_cards.inject(kind, card=1)

        root = tmp_path / moment
        config = {"timeout": lenient() if kind == "hang" else LIMIT}
        with caplog.at_level(logging.WARNING):
            strategy = on_cards(emulated_cards, root, overlap=overlap, config=config)
            module = fitted(root, strategy, Failing(moment, fail, root))
        happened = "emulated card 1 failed: " in caplog.text and "The host updates its" in caplog.text
        assert happened == (moment != "end"), moment  # after the end nothing is asked of a card
        assert module.validated == expected.validated, moment
        assert_same(module, expected)
    emulated_cards.reset()
    root = tmp_path / "save"
    assert same_arrays(fitted(root, on_host(root), Failing("resumed", None, root)).arrays, expected.arrays)


@pytest.mark.parametrize("overlap", long_but(["forward"], ["none", "forward"]))
def test_a_write_that_does_not_return(
    emulated_cards: EmulatedCards, tmp_path: Path, expected: Failing, monkeypatch: pytest.MonkeyPatch, overlap: str
) -> None:
    """The fit ends with a DeviceError. Until the write returns, the step before can be read and saved."""
    monkeypatch.setattr(worker, "_RECOVERY", 0.0)
    late: list[tuple[Any, Hold]] = []

    def fail(trainer: Any) -> None:
        trainer.strategy.drain()
        device = trainer.strategy._training_optimizer.rank_state.handler._device
        late.append((device._workers[1].pipeline, Hold(device._workers[1].pipeline, write_at=0)))

    strategy = on_cards(emulated_cards, tmp_path, overlap=overlap, config={"timeout": lenient()})
    trainer = quiet_trainer(tmp_path, strategy, max_steps=RECIPE.max_steps, val_check_interval=2)
    module = Failing("last step", fail, tmp_path)
    with pytest.raises(DeviceError, match=r"card 1 has not returned from writing .*step before is whole"):
        trainer.fit(module)
    ((pipeline, hold),) = late
    trainer.save_checkpoint(tmp_path / "late.ckpt")
    found = arrays_of(trainer)
    assert pipeline.busy and pipeline.writes_out() and hold.count == 1
    assert strategy._training_optimizer.update.drained_handler().generation == RECIPE.max_steps - 1
    hold.release()
    strategy.close()
    shorter = Failing("never", None, tmp_path)
    fitted(tmp_path, on_host(tmp_path / "host"), shorter, max_steps=RECIPE.max_steps - 1)
    assert same_arrays(found, shorter.arrays) and not same_arrays(found, expected.arrays)
    # With overlap Lightning has already counted the step that was rolled back.
    assert trainer.global_step == RECIPE.max_steps - (overlap == "none")
    again = on_cards(emulated_cards, tmp_path / "again", overlap=overlap)
    resumed = quiet_trainer(tmp_path / "again", again, max_steps=RECIPE.max_steps, val_check_interval=2)
    resumed.fit(Failing("never", None, tmp_path), ckpt_path=tmp_path / "late.ckpt")
    assert same_arrays(arrays_of(resumed), expected.arrays if overlap == "none" else found)
    again.close()
