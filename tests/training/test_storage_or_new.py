"""``ckpt_path="storage-or-new"``: one script that begins a training, and resumes it however often it is interrupted."""

from __future__ import annotations

import ast
import re
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, StepLR

from lightning_smartinfinity import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    SmartInfinityStrategy,
    StorageCorruptError,
    StorageError,
)
from lightning_smartinfinity.integrations.trainer import fit_record
from lightning_smartinfinity.integrations.trainer.checkpoint_index import checkpoints_of
from lightning_smartinfinity.resume.schedules import prepare_loads, warn_of_other_number
from lightning_smartinfinity.settings.options import OF_FABRIC, OF_TRAINER, OF_TRANSFORMERS, refuse_unknown
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.stock.systems import Hook
from tests.storage.makers import left

START = "storage-or-new"
SMALL = Recipe(depth=1, width=8)


def fail(*_: object) -> None:
    raise RuntimeError("an error of the user's")


class AfterStep(Hook):
    """Calls the function after a step, when the next batch begins: the step's update may still run."""

    on_train_batch_start = Hook.on_train_batch_end
    on_train_batch_end = Callback.on_train_batch_end  # type: ignore[assignment]


def try_and_search(trainer: Any, module: Any) -> None:
    """Do what a script may do before its fit: run a few batches, and search the learning rate."""
    strategy = SmartInfinityStrategy(trainer.strategy._settings.storage)
    quiet_trainer(trainer.default_root_dir, strategy, fast_dev_run=2).fit(LitTiny(SMALL))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The script")  # a search resumes nothing of the user's
        Tuner(trainer).lr_find(module, num_training=2, update_attr=False)


class Script:
    """Fits that save every two steps into one folder.

    Attributes:
        trainer: The Trainer of the last fit.
        module: Its module.
    """

    def __init__(self, root: Path, recipe: Recipe = SMALL) -> None:
        self.root, self.saved, self.recipe = root, root / "saved", recipe
        self._kept: list[Any] = []  # as a notebook, or an error that is being handled, keeps what has failed

    def fit(
        self,
        *,
        fails: int = -1,
        start: str | None = START,
        storage: Any = None,
        then: Callable[[Any], None] = fail,
        hook: type[Hook] = Hook,
        transfer: dict[str, Any] | None = None,
        before: Callable[[Any, Any], Any] = lambda trainer, module: None,
        **settings: Any,
    ) -> str | None:
        """Fit as one start of the script does, and return what it resumed from."""
        saves = ModelCheckpoint(self.saved, filename="{step}", every_n_train_steps=2, save_top_k=-1, **settings)
        strategy = SmartInfinityStrategy(storage or self.root / "storage", overlap="forward", transfer=transfer or {})
        callbacks = [saves, hook(fails, then)]
        options = {"enable_checkpointing": True, "max_steps": 6, "precision": "32-true"}
        self.trainer = quiet_trainer(self.root, strategy, callbacks=callbacks, **options)
        self.module = LitTiny(self.recipe)
        self._kept.append(self.trainer)
        before(self.trainer, self.module)
        with pytest.raises(RuntimeError, match="the user's") if fails >= 0 else nullcontext():
            self.trainer.fit(self.module, ckpt_path=start)
        return None if self.trainer.ckpt_path is None else Path(self.trainer.ckpt_path).name


def test_a_trial_gives_its_space_back(tmp_path: Path) -> None:
    """Its state is removed when the next fit begins, though its Trainer lives on."""
    trial = quiet_trainer(tmp_path, fast_dev_run=2)
    trial.fit(LitTiny(SMALL))
    stored: list[Path] = []
    look = Hook(1, lambda _: stored.extend(tmp_path.rglob("state.bin")))
    quiet_trainer(tmp_path, callbacks=[look]).fit(LitTiny(SMALL))
    assert [path.parts[-3] for path in stored] == ["default"] and trial.fast_dev_run  # type: ignore[attr-defined]


def test_the_newest_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of storage and checkpoints the one with more steps; of two with as many, the checkpoint; else nothing.

    If storage has no room for the state of both, or no place, it is storage: the script could never start otherwise.
    It is storage, too, if the checkpoint was saved within a batch. A search, or a few batches, before the fit change
    nothing. A checkpoint that holds weights only is no candidate. One that cannot be read ends the fit: it may be the
    newest. So does a newer training that was moved away.
    """
    script = Script(tmp_path)
    assert script.fit(fails=3, hook=AfterStep, save_on_exception=True) is None
    assert script.fit(fails=5, before=try_and_search) == "storage"  # a record of step 3, as step=3.ckpt
    before = sorted(tmp_path.glob("storage/*/*/*"))
    for kind, told in (("model", "the step of .*step=4.ckpt cannot be read"), ("optim", "step=4.ckpt cannot be resum")):
        file = next((script.saved / "step=4.ckpt").rglob(f"*{kind}_states.pt"))
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CheckpointError, match=f"'storage-or-new' starts from what is newest, and .*{told}"):
            script.fit()
        assert sorted(tmp_path.glob("storage/*/*/*")) == before
        file.write_bytes(whole)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 10))
        assert script.fit(fails=5) == "storage"
    assert "An earlier interrupted training takes" not in caplog.text
    left(script.root / "storage", generations=1, steps=[1], world_size=1, job="default.aside")  # must not be replaced
    assert script.fit(fails=5) == "storage"
    shutil.rmtree(script.root / "storage/default.aside")
    caplog.clear()
    assert script.fit(fails=6) == "step=4.ckpt"  # as many steps as the record
    assert re.search("interrupted training takes .* To remove that, run: .* --remove default.aside", caplog.text)
    module, trainer = LitTiny(SMALL), quiet_trainer(tmp_path / "other", max_steps=2, precision="32-true")
    with monkeypatch.context() as patch:
        patch.setattr(module, "configure_optimizers", fail)
        with pytest.raises(RuntimeError, match="the user's"):
            trainer.fit(module, ckpt_path=START)
    trainer.fit(module, ckpt_path=script.saved / "step=2.ckpt")  # not what the failed run had chosen
    assert Path(trainer.ckpt_path or "").name == "step=2.ckpt"
    shutil.rmtree(script.saved)
    assert script.fit(save_weights_only=True) == "storage"
    with pytest.raises(
        StorageError, match=r"choose to begin at step 0: .* after step 4, was moved to .*'default.aside'"
    ):
        script.fit()  # the fit before was complete
    shutil.rmtree(script.root / "storage/default.aside")
    assert script.fit(fails=4) is None
    for file in tmp_path.glob("storage/default/*/training-?.bin"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(StorageCorruptError, match=r"records of .* are damaged.*from the checkpoint .*step=2.ckpt by"):
        script.fit()


def test_checkpoints_whose_names_have_folders(tmp_path: Path) -> None:
    """A metric's name may have a "/". Deeper checkpoints are another callback's. SLURM's is found."""
    saves = ModelCheckpoint(tmp_path / "saved", filename="{step}-{train/loss:.2f}")
    names = ["hpc_ckpt_1.ckpt", "saved/a.ckpt", "saved/step=4-train/loss=3.91.ckpt"]
    others = ["b.ckpt", "saved/a.ckpt/b.ckpt", "saved/step=4-train/.loss=3.91.ckpt", "saved/other/run/c.ckpt"]
    for name in [*names, *others]:
        (tmp_path / name).mkdir(parents=True)
    trainer = quiet_trainer(tmp_path, enable_checkpointing=True, callbacks=[saves])
    assert checkpoints_of(trainer) == [str(tmp_path / name) for name in names]


class OtherName(ModelCheckpoint):
    """Names its checkpoints otherwise."""

    FILE_EXTENSION = ".pth"


def test_places_of_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other endings are found. A link to nothing ends a fit that would begin anew. A logger's own folder is told."""
    told: list[str] = []
    monkeypatch.setattr(fit_record, "rank_zero_info", told.append)
    saves = OtherName(tmp_path / "saved", every_n_train_steps=2, save_last="link")
    options: Any = {"enable_checkpointing": True, "callbacks": [saves]}
    quiet_trainer(tmp_path, **options, max_steps=2).fit(LitTiny(SMALL), ckpt_path=START)
    assert f"and no checkpoint in {tmp_path / 'saved'}." in told[0]
    trainer = quiet_trainer(tmp_path, **options, max_steps=3)
    trainer.fit(LitTiny(SMALL), ckpt_path=START)
    assert Path(trainer.ckpt_path or "").name == "last.pth"
    shutil.rmtree(tmp_path / "saved/epoch=0-step=2.pth")
    with pytest.raises(CheckpointError, match=r"last.*.pth is a link to the checkpoint 'epoch=0-step=2.pth', which is"):
        quiet_trainer(tmp_path, **options).fit(LitTiny(SMALL), ckpt_path=START)
    logged: Any = {**options, "logger": CSVLogger(tmp_path), "callbacks": [], "max_steps": 1}
    with pytest.warns(UserWarning, match=r"logger names the folder of checkpoints, .*version_0.checkpoints. If it"):
        quiet_trainer(tmp_path, **logged).fit(LitTiny(SMALL), ckpt_path=START)


def test_wrong_uses(tmp_path: Path) -> None:
    """Settings that keep nothing are refused, and so are evaluations; a misspelled word is guessed."""
    for settings, told in (
        ({"transfer": {"keep": False}}, r"fit\(ckpt_path='storage-or-new'\) resumes from storage, but the settings"),
        ({"callbacks": [LearningRateFinder()]}, r"LearningRateFinder would first .* fit: Tuner\(trainer\).lr_find"),
    ):
        with pytest.raises(ConfigError, match=told):
            quiet_trainer(tmp_path, **settings).fit(LitTiny(SMALL), ckpt_path=START)  # type: ignore[arg-type]
    for start in (START, "storage"):
        with pytest.raises(ConfigError, match=rf"validate\(ckpt_path='{start}'\) cannot work: only fit goes on"):
            quiet_trainer(tmp_path).validate(LitTiny(replace(SMALL, validate=True)), ckpt_path=start)
    with pytest.raises(CheckpointNotFoundError, match="Did you mean 'storage-or-new'"):
        quiet_trainer(tmp_path).fit(LitTiny(SMALL), ckpt_path="storage_or_new")
    for remedies, told in ((OF_TRAINER, "fit"), (OF_FABRIC, "resume"), (OF_TRANSFORMERS, "train")):
        with pytest.raises(ConfigError, match=f"{told}.*storage-or-new"):
            refuse_unknown("Strategy", {"resume_from_checkpoint": START}, remedies=remedies)


class Scheduled(LitTiny):
    """Trains with a schedule that halves the rate every second step, and notes the values of each step."""

    def __init__(self, recipe: Recipe, factor: float = 0.5) -> None:
        super().__init__(recipe)
        self.factor = factor
        self.values = list[tuple[float, float]]()

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": StepLR(optimizer, 2, self.factor), "interval": "step"},
        }

    def on_train_batch_start(self, *_: Any) -> None:
        group = self.trainer.optimizers[0].param_groups[0]
        self.values.append((group["lr"], group["weight_decay"]))


def test_new_hyperparameters(tmp_path: Path) -> None:
    """A resumed fit keeps what it began with, and says so; by a call it takes what the script sets, at its step."""

    def values(
        lr: float,
        *,
        fails: int = -1,
        resume: str | None = "storage",
        new: bool = False,
        decay: float,
        factor: float = 0.5,
    ) -> Any:
        strategy = SmartInfinityStrategy(tmp_path / "storage")
        if new:
            strategy.use_new_hyperparameters()
        module = Scheduled(replace(SMALL, lr=lr, weight_decay=decay), factor)
        trainer = quiet_trainer(tmp_path, strategy, callbacks=[Hook(fails, fail)], max_steps=6, precision="32-true")
        with pytest.raises(RuntimeError) if fails >= 0 else nullcontext():
            trainer.fit(module, ckpt_path=resume)
        if resume is None:
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
        return module.values

    old = values(0.04, fails=3, resume=None, decay=0.1)
    told = (
        r"The script sets lr=0.08, weight_decay=0.2, but the training that it resumes began with lr=0.04, "
        r"weight_decay=0.1, and keeps that. To .* values, call strategy.use_new_hyperparameters\(\) before trainer.fit"
    )
    schedule = (
        r"sets gamma=0.1 in its StepLR, but the .* resumes has gamma=0.5, and keeps that. To .* value, call strategy"
    )
    for step in (4, 5):  # the second time, too
        with pytest.warns(UserWarning, match=told), pytest.warns(UserWarning, match=schedule):
            old += values(0.08, fails=step, decay=0.2, factor=0.1)[: 1 if step == 4 else 2]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The script sets")
        new = values(0.08, new=True, decay=0.2)
        from_checkpoint = values(0.08, new=True, decay=0.2, resume=str(tmp_path / "saved.ckpt"))
    told = r"sets lr=0.08, but the .* resumes began with lr=0.04, and keeps that\. To"
    with pytest.warns(UserWarning, match=told), pytest.warns(UserWarning, match=schedule):
        assert values(0.08, decay=0.1, factor=0.1, resume=str(tmp_path / "saved.ckpt"))[0][0] == 0.02
    assert (
        [round(lr, 9) for lr, _ in old] == [0.04, 0.04, 0.02, 0.02, 0.02, 0.01]
        and {decay for _, decay in old} == {0.1}
        and new == [(0.02, 0.2), (0.02, 0.2)]
        and from_checkpoint == [(0.04, 0.2), *new]
    )


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 5], 0.1),
    "function": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 9, eta_min=1e-5),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "cycles": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 1e-3, optimizer.defaults["lr"], 2),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 3 * optimizer.defaults["lr"], total_steps=9),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(optimizer, 0.9)]),
    "one after the other": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_take_the_position_alone(name: str) -> None:
    """A scheduler with a new rate goes on as if it had had that rate from its first step. Its position is no change."""

    def made(lr: float, steps: int) -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=lr)
        scheduler = SCHEDULES[name](optimizer)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return optimizer, scheduler

    saved = made(0.1, 4)[1].state_dict()
    optimizer, scheduler = made(0.02, 0)
    prepare_loads([scheduler, object()], new_settings=True)
    scheduler.load_state_dict(saved)
    for steps in (4, 5, 6):
        assert optimizer.param_groups[0]["lr"] == made(0.02, steps)[0].param_groups[0]["lr"]
        scheduler.step()
    same = made(0.1, 0)[1]
    prepare_loads([same], new_settings=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same.load_state_dict(saved)
    assert "load_state_dict" not in vars(same)


class Warming(lr_scheduler.CosineAnnealingLR):
    """A scheduler of a user's, which counts its steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, warmup: int) -> None:
        self.warmup, self.count = warmup, 0
        super().__init__(optimizer, 9)

    def step(self, epoch: int | None = None) -> None:
        self.count += 1
        super().step(epoch)


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (
            lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 5], 0.1),
            lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 7, 7], 0.2),
            r"milestones=\[3, 7, 7\], gamma=0.2 in its MultiStepLR, .* has milestones=\[3, 5\], gamma=0.1, .* values, ",
        ),
        (
            SCHEDULES["one after the other"],
            lambda optimizer: lr_scheduler.SequentialLR(
                optimizer, [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.8)], [3]
            ),
            "sets gamma=0.8 in its SequentialLR, .* has gamma=0.9, ",
        ),
        (
            lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
            lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=2),
            "sets patience=2 in its ReduceLROnPlateau, .* has patience=1, ",
        ),
        (
            lambda optimizer: Warming(optimizer, 3),
            lambda optimizer: Warming(optimizer, 4),
            "sets warmup=4 .* warmup=3, ",
        ),
    ],
)
def test_a_changed_schedule_is_reported(before: Any, now: Any, told: str) -> None:
    """One warning has the settings that differ, and nothing else; the saved ones are kept."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    old, new = before(optimizer), now(optimizer)
    optimizer.step()
    old.step(**({"metrics": 1.0} if "patience" in told else {}))
    prepare_loads([new], new_settings=False)
    with pytest.warns(UserWarning, match=told) as caught:
        new.load_state_dict(old.state_dict())
    assert len(caught) == 1 and new.state_dict() == old.state_dict()


def test_another_scheduler_is_reported() -> None:
    """Its class has other settings, or there is none any more, or none was there before."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    new = SCHEDULES["cosine"](optimizer)
    prepare_loads([new], new_settings=False)
    with pytest.warns(UserWarning, match="by a CosineAnnealingLR, but .* another scheduler, without T_max") as caught:
        new.load_state_dict(StepLR(optimizer, 2).state_dict())
    assert len(caught) == 1
    for now, before, told in ((0, 1, "has no learning rate scheduler, but"), (1, 0, "had none")):
        with pytest.warns(UserWarning, match=told):
            warn_of_other_number(now, before, new_settings=False)


def test_a_plateau_keeps_its_counters() -> None:
    """What it has seen of its metric stays; the rate is the new one."""
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr) for lr in (0.1, 0.02)]
    before, now = (lr_scheduler.ReduceLROnPlateau(optimizer, patience=1) for optimizer in optimizers)
    for metric in (1.0, 2.0):
        before.step(metric)
    prepare_loads([now], new_settings=True)
    now.load_state_dict(before.state_dict())
    assert (now.best, now.num_bad_epochs, optimizers[1].param_groups[0]["lr"]) == (1.0, 1, 0.02)
    now.step(2.0)
    assert optimizers[1].param_groups[0]["lr"] == pytest.approx(0.002)


def test_a_fit_goes_on_without_a_lost_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error names the folder and the newest checkpoint. What it advises trains on, and what is left resumes later.

    A scheduler that starts the same command again gets the same error, and needs to remove nothing. What no fit can
    resume from is not advised. Another training, whose drive is mounted at the folder, is not resumed but moved, too.
    """

    def save_and_fail(trainer: Any) -> None:
        trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
        trainer.strategy._training_engine.save_checkpoint(tmp_path / "engine.ckpt")
        fail()

    script, folders = Script(tmp_path, Recipe()), [tmp_path / name for name in "abc"]
    script.fit(fails=5, start=None, storage=folders, then=save_and_fail)
    folders[1].rename(tmp_path / "unmounted")
    for _ in range(2):
        with pytest.raises(StorageError, match=f"'{folders[1]}' lacks its part") as caught:
            script.fit(start="storage", storage=folders)
    ((path, storage),) = re.findall(r"ckpt_path='(.*?)'.*storage=(\[.*?\])", caught.value.remedy)
    assert path == str(tmp_path / "saved/step=4.ckpt")
    left(tmp_path / "other", generations=1, steps=[9], world_size=1)  # of another training; its drive is mounted there
    (tmp_path / "other").rename(folders[1])
    assert script.fit(storage=folders) == "step=4.ckpt"  # as many steps as the record
    (told,) = [record.getMessage() for record in caplog.records if "cannot be found" in record.getMessage()]
    assert f"whose part in '{folders[1]}'" in told and "moved to the job 'default.aside'" in told
    assert f"It removes the training in '{folders[1]}" in told
    script.trainer.strategy.close()
    folders[1].rename(tmp_path / "other")
    script.fit(start=path, storage=ast.literal_eval(storage))
    assert len(script.module.losses) == 2
    (tmp_path / "unmounted").rename(folders[1])
    script.fit(start="storage", storage=folders, transfer={"job": "default.aside"})
    assert len(script.module.losses) in (1, 2)  # it may repeat the last step
