"""After a kill beside a ModelCheckpoint's save, a resumed fit knows the checkpoints that are whole, and no others."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_smartinfinity.cli import main
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.training.storage_worker import StorageRun, end_of, launch

BEST: dict[str, Any] = {"monitor": "loss", "save_top_k": 1, "every_n_train_steps": 1, "filename": "{step}"}
KEPT: dict[str, dict[str, Any]] = {
    "best and last": {**BEST, "save_last": True},
    "newest": {"every_n_train_steps": 2, "filename": "{step}"},
    "linked": {"every_n_train_steps": 2, "filename": "{step}", "save_last": "link"},
    "worst": {**BEST, "mode": "max", "save_top_k": 2, "save_last": "link"},
    "each epoch": {"filename": "{epoch}", "monitor": "val_loss", "save_top_k": 2, "save_last": True},
}
NUM_LONG = 25


def run(folder: Path, kept: str, **settings: Any) -> tuple[int, str]:
    """Fit in processes of their own, and evaluate the best checkpoint."""
    settings = {"options": {"overlap": "none"}, "module": {"width": 128}, "epochs": 2, **settings}
    return launch(StorageRun(out=str(folder), storage=str(folder / "storage"), checkpoints=[KEPT[kept]], **settings))


def assert_agree(folder: Path) -> None:
    """Assert that the index of an ended fit names all checkpoints that there are, and that these are whole."""
    named = {path for path in end_of(folder)["index"][0] if path}
    assert named == {str(path) for path in (folder / "saved").iterdir()}
    assert not list(folder.rglob(".saving*"))
    for path in named:
        assert main(["scrub", path, "--quiet"]) == 0


@pytest.mark.parametrize(
    ("kept", "save", "devices"),
    long_but(
        [("newest", 2, 2)],
        [(kept, save, devices) for kept in KEPT for save in (1, 2, 3) for devices in (1, 2)],
    ),
)
def test_a_kill_within_a_copy(kept: str, save: int, devices: int, tmp_path: Path, attack: Attack) -> None:
    """The older checkpoint stays in the index and on disk, and parts of the newer one go, whether it is saved again."""
    attack("kill within the copy of a ModelCheckpoint's save", tries=1, outcome="its index and its folder agree")
    moment = {"kill_at": "kill at copy", "kill_step": save, "kill_rank": devices - 1}
    code, output = run(tmp_path, kept, devices=devices, **moment)
    # Nothing else kills it. With several ranks, another one may have removed what was written before it ended.
    assert code == -signal.SIGKILL, output[-4000:]
    code, output = run(tmp_path, kept, devices=devices, resume=True, seed=9)
    assert code == 0, output[-4000:]
    assert_agree(tmp_path)


@pytest.mark.parametrize("compressed", long_but([True], [False, True]))
def test_a_kill_between_a_save_and_the_next_record(compressed: bool, tmp_path: Path, attack: Attack) -> None:
    """The checkpoint is in the index, with the residual of compressed gradients, too."""
    attack(
        "kill between a ModelCheckpoint's save and the next record", tries=1, outcome="its index and its folder agree"
    )
    settings: dict[str, Any] = {"transfer": {"asynchronous": False}, "trainer": {"precision": "32-true"}}
    if compressed:
        settings["options"] = {"overlap": "none", "compression": {"ratio": 0.05}}
    code, output = run(tmp_path, "newest", kill_at="kill at saved batch end", kill_step=4, **settings)
    assert code == -signal.SIGKILL, output[-4000:]
    assert (tmp_path / "saved/step=4.ckpt").exists() and not list(tmp_path.rglob(".saving*"))
    code, output = run(tmp_path, "newest", resume=True, seed=9, **settings)
    assert code == 0, output[-4000:]
    assert_agree(tmp_path)


@pytest.mark.parametrize("devices", long_but([1], [1, 2]))
def test_a_kill_before_the_last_link(devices: int, tmp_path: Path, attack: Attack) -> None:
    """The link leads to the newest checkpoint, though that is not saved again."""
    attack("kill before a ModelCheckpoint links its last save", tries=1, outcome="its index and its folder agree")
    number = 6 // devices  # of the last step's link
    code, output = run(tmp_path, "linked", devices=devices, kill_at="kill at link", kill_step=number)
    assert code == -signal.SIGKILL, output[-4000:]
    code, output = run(tmp_path, "linked", devices=devices, resume=True, seed=9)
    assert code == 0, output[-4000:]
    assert_agree(tmp_path)
    assert (tmp_path / "saved/last.ckpt").resolve().name == f"step={12 // devices}.ckpt"


class Denser(ModelCheckpoint):
    """A ModelCheckpoint that saves more often from the second step on, which changes the key of its state."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self._every_n_train_steps = 1


def test_a_callback_whose_settings_change(tmp_path: Path) -> None:
    """The training goes on, and the index names what is there."""
    saving = Denser(tmp_path / "saved", every_n_train_steps=2, filename="{step}")
    trainer = quiet_trainer(tmp_path, max_steps=4, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(LitTiny(Recipe()))
    trainer.strategy.close()  # type: ignore[attr-defined]
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step=4.ckpt"]
    assert saving.best_model_path == str(tmp_path / "saved" / "step=4.ckpt")


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kept", KEPT)
def test_kills_at_random(kept: str, devices: int, tmp_path: Path, attack: Attack) -> None:
    """Whenever kills come, the resumed fit ends with the checkpoints of one that never stopped, if none was lost."""
    attack("kill beside a ModelCheckpoint's saves", tries=NUM_LONG, outcome="its index and its folder agree")
    draw, killed, chains = random.Random(f"{kept} {devices}"), 0, 0
    while killed < NUM_LONG:
        folder, code, kills = tmp_path / f"{chains}", -signal.SIGKILL, 0
        chains += 1
        while code == -signal.SIGKILL:
            moment = {
                "kill_at": "kill at batch start" if kills < 5 else "",
                "kill_step": 1 + 2 * kills,
                "kill_after": draw.uniform(0.001, 0.2),
                "kill_rank": draw.randrange(devices),
            }
            code, output = run(folder, kept, devices=devices, resume=kills > 0, seed=9 if kills else 1, **moment)
            kills += code == -signal.SIGKILL
        assert code == 0, output[-4000:]
        assert chains < 4 * NUM_LONG
        killed += kills
        assert_agree(folder)
