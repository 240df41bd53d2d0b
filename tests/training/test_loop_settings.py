"""Settings of loops and evaluations give the results of plain Lightning; a step's traffic; the user's loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig, UnsupportedError
from tests.helpers.assertions import refused
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.plain import RECIPE, Everything, assert_like_plain_lightning
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import fit, quiet_trainer
from tests.stock.systems import Hook

SETTINGS: dict[str, dict[str, Any]] = {
    "fast_dev_run": {"fast_dev_run": 2},
    "overfit_batches": {"overfit_batches": 2, "max_epochs": 2},
    "no training batch": {"limit_train_batches": 0, "max_epochs": 1},
    "half of the training batches": {"limit_train_batches": 0.5, "max_epochs": 2},
    "windows that the limit cuts": {"limit_train_batches": 3, "accumulate_grad_batches": 2, "max_epochs": 2},
    "no validation batch": {"limit_val_batches": 0, "max_epochs": 1},
    "no test and prediction batch": {"limit_test_batches": 0, "limit_predict_batches": 0, "max_epochs": 1},
    "some batches of each": {"limit_val_batches": 0.25, "limit_test_batches": 3, "limit_predict_batches": 1},
    "validation twice an epoch": {"val_check_interval": 0.5, "max_epochs": 2},
    "validation across epochs": {"val_check_interval": 3, "check_val_every_n_epoch": None, "max_steps": 7},
    "no sanity check": {"num_sanity_val_steps": 0, "max_epochs": 1},
    "a whole sanity check": {"num_sanity_val_steps": -1, "max_epochs": 1},
    "anomaly detection, no inference mode": {"detect_anomaly": True, "inference_mode": False, "max_steps": 2},
    "reloaded loaders": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
    "time for nothing": {"max_time": {"seconds": 0}, "max_epochs": 2},
    "at least so many steps": {"min_steps": 6, "max_epochs": 2},
}

USUAL = (
    "fast_dev_run",
    "overfit_batches",
    "no training batch",
    "windows that the limit cuts",
    "some batches of each",
    "validation across epochs",
    "reloaded loaders",
)


class Counting(Everything):
    """A module that counts how often each loader was requested."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = {"train": 0, "val": 0}

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        self.asked["train"] += 1
        return super().train_dataloader()

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        self.asked["val"] += 1
        return super().val_dataloader()

    test_dataloader = predict_dataloader = val_dataloader


@pytest.mark.parametrize("name", long_but(USUAL, SETTINGS))
def test_setting(name: str, tmp_path: Path) -> None:
    """Losses, metrics, predictions, progress and the number of loaders made equal plain Lightning."""

    def scenario(make: Any, root: Path) -> Any:
        trainer, module = make(**{"max_steps": -1, **SETTINGS[name]}), Counting()
        if "max_epochs" not in SETTINGS[name] and "max_steps" not in SETTINGS[name]:
            trainer.fit_loop.max_epochs = 1
        trainer.fit(module)
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        tested = trainer.test(module, verbose=False)
        predicted = trainer.predict(module)
        progress = (trainer.global_step, trainer.current_epoch, trainer.num_training_batches)
        return module.losses, metrics, tested, predicted, progress, module.asked

    assert_like_plain_lightning(scenario, tmp_path)


@pytest.mark.parametrize(("precision", "read"), [("bf16-mixed", 12), ("32-true", 8)])
def test_sixteen_bit_steps_move_twelve_bytes_each_way(precision: Any, read: int, tmp_path: Path) -> None:
    """The kernel's counters and ours show 12 to 12.5 B read and written per parameter and step.

    In fp32 the partition is the master, so that a step reads 8 B.
    """
    strategy, marks = SmartInfinityStrategy(tmp_path / "storage", transfer=TransferConfig(direct_io="on")), []

    def mark(*_: Any) -> None:
        strategy.drain()
        lines = Path("/proc/self/io").read_text().splitlines()
        system = {name: int(value) for name, value in (line.split(": ") for line in lines)}
        ours = strategy.traffic()
        marks.append(
            [system["read_bytes"], ours.shared_read_bytes, system["write_bytes"], ours.shared_write_bytes],
        )

    callback = LambdaCallback(on_train_start=mark, on_train_end=mark)
    module = LitTiny(Recipe(precision=precision, width=256, max_steps=4))
    quiet_trainer(tmp_path, strategy, precision=precision, max_steps=4, callbacks=[callback]).fit(module)
    updates = 4 * strategy.state_numel
    strategy.close()
    moved = [(last - first) / updates for first, last in zip(*marks, strict=True)]
    assert all(read <= figure < read + 0.5 for figure in moved[:2]) and all(12 <= figure < 12.5 for figure in moved[2:])


class Numbered(DataLoader[Any]):
    """A loader with a state of the user's own."""

    loaded: ClassVar[list[object]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"mine": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)


def test_checkpoints_hold_the_states_of_the_users_loaders_alone(tmp_path: Path) -> None:
    """Positions of plain loaders are elsewhere: a checkpoint has what Lightning alone would have there."""

    class Two(Everything):
        def train_dataloader(self) -> Any:
            batches = list(super().train_dataloader())
            return CombinedLoader([DataLoader(batches, None), Numbered(batches, None)], "min_size")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[0], batch_idx)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            saved.extend(checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"])

    saved: list[object] = []
    save = Hook(1, lambda trainer: trainer.save_checkpoint(tmp_path / "middle.ckpt"))
    quiet_trainer(tmp_path, max_steps=2, callbacks=[save]).fit(Two())
    quiet_trainer(tmp_path, max_steps=3).fit(Two(), ckpt_path=tmp_path / "middle.ckpt")
    assert saved == Numbered.loaded == [{"mine": 1}]


# ---- validate, test and predict during, before and after a fit, and from a checkpoint


def evaluate(trainer: Any, module: Any = None, **options: Any) -> list[Any]:
    """Return the results of validate, test and predict."""
    return [
        trainer.validate(module, verbose=False, **options),
        trainer.test(module, verbose=False, **options),
        torch.cat(trainer.predict(module, **options)),
    ]


def test_before_after_and_between_fits(tmp_path: Path) -> None:
    """Evaluation before, between and after two fits equals plain Lightning, also of another module.

    The fitted module can still be saved then, and hooks run once per forward: an engine leaves none of its own behind.
    """

    def scenario(make: Any, root: Path) -> Any:
        trainer, module, resumed, calls, hooks = make(max_epochs=1), Everything(), Everything(), [], []
        module.model.norm.register_forward_hook(lambda *_: calls.append(1))
        seen = [evaluate(trainer, module)]
        for max_epochs in (1, 2):
            trainer.fit_loop.max_epochs = max_epochs
            trainer.fit(module)
            seen += [evaluate(trainer, module), trainer.validate(Everything(), verbose=False), len(calls)]
            hooks.append(sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in module.modules()))
            trainer.save_checkpoint(root / "last.ckpt")
        make(max_epochs=3).fit(resumed, ckpt_path=root / "last.ckpt")
        assert hooks[0] == hooks[1] and len(resumed.losses) == RECIPE.epoch_batches
        return seen, module.losses, trainer.global_step, trainer.current_epoch

    assert_like_plain_lightning(scenario, tmp_path)


def test_checkpoints_by_path_best_and_last(tmp_path: Path) -> None:
    """ckpt_path= takes a path in a fresh Trainer with an unfitted module, and "best" and "last" after the fit."""

    def scenario(make: Any, root: Path) -> Any:
        keeper = ModelCheckpoint(root / "kept", monitor="val_loss", mode="max", save_last=True, save_top_k=-1)
        trainer, module = make(max_epochs=2, callbacks=[keeper], enable_checkpointing=True), Everything()
        trainer.fit(module)
        # Loading a checkpoint also resets the callback.
        best, last = keeper.best_model_path, keeper.last_model_path
        seen = [evaluate(trainer, ckpt_path=which) for which in ("last", "best", best)]
        return seen + [evaluate(make(), Everything(), ckpt_path=path) for path in (best, last)]

    last, best, path, fresh_best, fresh_last = assert_like_plain_lightning(scenario, tmp_path)
    assert (
        torch.equal(best[2], path[2])
        and torch.equal(best[2], fresh_best[2])
        and torch.equal(last[2], fresh_last[2])
        and not torch.equal(best[2], last[2])
    )


class Stepping(Everything):
    """A module that counts its steps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.seen += 1
        return super().training_step(batch, batch_idx)


def test_what_was_loaded_for_evaluation_is_what_is_saved(tmp_path: Path) -> None:
    """A checkpoint saved after validate(ckpt_path=...) holds the loaded weights and buffers, as in plain Lightning.

    A fit after it begins with them, and may load the checkpoint of a whole epoch once more.
    """

    def scenario(make: Any, root: Path) -> Any:
        trainer, module, fresh = make(max_epochs=1), Stepping(), Stepping()
        trainer.fit(module)
        trainer.save_checkpoint(root / "early.ckpt")
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module)
        early = trainer.validate(module, ckpt_path=root / "early.ckpt", verbose=False)
        trainer.save_checkpoint(root / "saved.ckpt")
        again = make(max_epochs=1)
        saved = again.validate(fresh, ckpt_path=root / "saved.ckpt", verbose=False)
        again.fit(fresh)
        again.fit_loop.max_epochs = 2
        again.fit(fresh, ckpt_path=root / "early.ckpt")
        return early, saved, fresh.seen, fresh.losses, again.global_step

    early, saved, *_ = assert_like_plain_lightning(scenario, tmp_path)
    assert saved == early


def test_another_precision_for_the_same_module_is_refused(tmp_path: Path) -> None:
    """A module that bf16-mixed partitioned cannot be used in fp32, but it can in bf16-true."""
    module = Everything()
    fit(module, tmp_path / "a")
    trainer = quiet_trainer(tmp_path / "b", precision="32-true")
    for run in (trainer.fit, trainer.validate):
        with refused(UnsupportedError, match="bfloat16"):
            run(module)
    assert not (tmp_path / "b" / "storage").exists()
    fit(module, tmp_path / "c", precision="bf16-true")


class SameOnEveryRank(Everything):
    """A module that trains every rank on the first batch, so that the weights do not depend on the number of ranks."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(self.recipe.batch(0))  # type: ignore[no-any-return]


class WithoutParameters(pl.LightningModule):
    """A module that computes its loss from the data alone, like a baseline to compare with."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", batch.float().mean())

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return 2 * batch

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return RECIPE.validation_loader()

    predict_dataloader = val_dataloader


def predict_around_a_fit(trainer: pl.Trainer, checkpoint: Path) -> list[torch.Tensor]:
    """Return this rank's predictions.

    They are those before and after a fit, of a module without parameters, and from a checkpoint.
    """

    def predict(module: pl.LightningModule, path: Path | None = None) -> torch.Tensor:
        return torch.cat(trainer.predict(module, ckpt_path=path))  # type: ignore[arg-type]

    module = SameOnEveryRank()
    before = predict(module)
    trainer.fit(module)
    return [before, predict(module), predict(WithoutParameters()), predict(SameOnEveryRank(), checkpoint)]


def predict_on_ranks(root: Path) -> list[torch.Tensor]:
    trainer = quiet_trainer(root / "two", devices=2, precision="32-true", max_steps=1)
    return predict_around_a_fit(trainer, root / "one.ckpt")


def test_two_processes_predict_what_one_does(tmp_path: Path) -> None:
    """The predictions of two ranks together equal those of one process.

    They do so before and after a fit, without weights, and from a checkpoint that one process has saved.
    """
    saving, trainer = (quiet_trainer(tmp_path / name, precision="32-true", max_steps=1) for name in ("saving", "one"))
    saving.fit(Everything())
    saving.save_checkpoint(tmp_path / "one.ckpt")
    expected = predict_around_a_fit(trainer, tmp_path / "one.ckpt")
    for one, *of_ranks in zip(expected, *on_ranks(predict_on_ranks, tmp_path), strict=True):
        torch.testing.assert_close(torch.stack(of_ranks, 1).flatten(0, 1), one, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_module_without_parameters(precision: Any, tmp_path: Path) -> None:
    """It is evaluated as in plain Lightning, and has no parameters afterwards either."""

    def scenario(make: Any, root: Path) -> Any:
        module, trainer = WithoutParameters(), make(precision=precision)
        validated = trainer.validate(module, verbose=False)
        assert not list(module.parameters())
        return validated, torch.cat(trainer.predict(module))

    assert_like_plain_lightning(scenario, tmp_path)
