"""Universal checkpoints, made by DeepSpeed's ``ds_to_universal`` or our command, resume a training.

``test_universal_optimizers.py`` covers Adagrad, SGD and RMSprop, and other numbers of processes.
"""

from __future__ import annotations

import dataclasses
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_smartinfinity import CheckpointError
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.zero3 import prepare_environment
from lightning_smartinfinity.zero3.checkpoints.formats.universal_folder import UniversalFolder
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.helpers.universal import assert_same_tensors, convert, convert_by_command
from tests.training.worker import Run, train

TINY = Recipe(groups=True, frozen=True, max_steps=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an ordinary checkpoint of one process."""
    folder = tmp_path_factory.mktemp("tiny")
    train(Run(out=str(folder), recipe=TINY, save_after_fit=str(folder / "tiny.ckpt")))
    return folder / "tiny.ckpt"


@pytest.fixture(scope="module")
def tiny(saved: Path) -> Path:
    """Return a universal checkpoint of one process, which DeepSpeed's converter wrote."""
    return convert(saved)


@pytest.fixture(scope="module")
def made_by_us(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a universal checkpoint of one process, with checksums, which our command wrote."""
    return convert_by_command(saved, tmp_path_factory.mktemp("ours") / "universal")


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def shorten(file: Path) -> None:
    torch.save(torch.load(file)[:-1].clone(), file)


def lose(file: Path, key: str) -> None:
    content = torch.load(file)
    del content[key]
    torch.save(content, file)


def flip(file: Path) -> None:
    """Flip one bit in the middle of the file's largest tensor."""
    with zipfile.ZipFile(file) as archive:
        records = [info for info in archive.infolist() if "/data/" in info.filename]
    info = max(records, key=lambda info: info.file_size)
    content = bytearray(file.read_bytes())
    name_and_extra = sum(struct.unpack_from("<HH", content, info.header_offset + 26))
    content[info.header_offset + 30 + name_and_extra + info.file_size // 2] ^= 1
    file.write_bytes(content)


MODEL_STATES = "zero_pp_rank_0_mp_rank_00_model_states.pt"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a moment is missing": (lambda u: (u / "zero/model.norm.bias/exp_avg.pt").unlink(), r"norm\.bias/exp_avg\.pt"),
    "a moment is cut short": (lambda u: cut_short(u / "zero/model.norm.bias/exp_avg_sq.pt"), "is damaged"),
    "a master has too few elements": (lambda u: shorten(u / "zero/model.norm.bias/fp32.pt"), "does not hold 32 elem"),
    "it was not converted to the end": (lambda u: (u / "zero/optimizer_state.pt").unlink(), r"optimizer_state\.pt"),
    "it has no model states": (lambda u: (u / MODEL_STATES).unlink(), "model_states"),
    "a bit of a master": (lambda u: flip(u / "zero/model.norm.bias/fp32.pt"), r"norm\.bias/fp32\.pt is damaged"),
    "a bit of a moment": (lambda u: flip(u / "zero/model.norm.bias/exp_avg.pt"), r"bias/exp_avg\.pt is damaged"),
    "no loss scale": (lambda u: lose(u / "zero/optimizer_state.pt", "dynamic_loss_scale"), "no usable 'dynamic_loss"),
    "no number of steps": (lambda u: lose(u / MODEL_STATES, "global_steps"), "no usable 'global_steps'"),
    "a bit of the model's states": (lambda u: flip(u / MODEL_STATES), r"model_states\.pt is damaged"),
}


@pytest.mark.parametrize(
    "name",
    long_but(
        [
            "a moment is missing",
            "a bit of a master",
            "a bit of the model's states",
            "it was not converted to the end",
            "no loss scale",
        ],
        DAMAGES,
    ),
)
def test_damaged_universal_checkpoints_are_refused_and_nothing_is_loaded(
    name: str, tiny: Path, tmp_path: Path, attack: Attack
) -> None:
    """The error names the file, and masters and parameters keep the model's own values."""
    attack("damage in a universal checkpoint", tries=1, outcome="CheckpointError, and nothing is loaded")
    damage, named = DAMAGES[name]
    folder = shutil.copytree(tiny, tmp_path / "copy")
    damage(folder)
    trainer = quiet_trainer(tmp_path, precision="32-true", max_steps=4)
    module = LitTiny(TINY)
    with pytest.raises(CheckpointError, match=named) as caught:
        trainer.fit(module, ckpt_path=folder)
    assert caught.value.remedy
    optimizer = trainer.strategy.model.optimizer
    assert optimizer.update.drained_handler().generation == 0
    expected = dict(TINY.build_model().named_parameters())
    for param_name, param in module.model.named_parameters():
        if param.requires_grad:
            assert torch.equal(optimizer.get_full_hp_param(param), expected[param_name].detach()), param_name
            assert torch.equal(param.ds_tensor, expected[param_name].detach().flatten()), param_name


@pytest.mark.parametrize("array", long_but(["exp_avg"], ["fp32", "exp_avg"]))
def test_a_value_that_is_read_wrongly_when_it_is_loaded(
    array: str, made_by_us: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: Attack
) -> None:
    """What a load reads is compared with checksums, though the whole file was verified before."""
    attack("bit flip in a universal checkpoint between check and load", tries=1, outcome="CheckpointError")
    folder = shutil.copytree(made_by_us, tmp_path / "universal")
    check = UniversalFolder.check_arrays

    def check_and_flip(self: UniversalFolder, names: Any) -> Any:
        found = check(self, names)
        flip(folder / f"zero/model.norm.bias/{array}.pt")
        return found

    monkeypatch.setattr(UniversalFolder, "check_arrays", check_and_flip)
    trainer = quiet_trainer(tmp_path, precision="32-true", max_steps=4)
    with pytest.raises(CheckpointError, match=rf"norm\.bias/{array}\.pt is damaged: the checksum of a block"):
        trainer.fit(LitTiny(TINY), ckpt_path=folder)


def test_a_checksum_that_is_missing(made_by_us: Path, tmp_path: Path) -> None:
    """A folder with checksums has one of every block, or nothing of the array is loaded."""
    folder = shutil.copytree(made_by_us, tmp_path / "universal")
    file = folder / "zero" / "crc32c.pt"
    sums = torch.load(file)
    del sums["model.norm.bias/exp_avg.pt"]
    torch.save(sums, file)
    trainer = quiet_trainer(tmp_path, precision="32-true", max_steps=4)
    with pytest.raises(CheckpointError, match=r"norm\.bias/exp_avg\.pt is damaged: the checksum of a block"):
        trainer.fit(LitTiny(TINY), ckpt_path=folder)


def test_the_file_of_checksums_is_missing(made_by_us: Path, tmp_path: Path) -> None:
    """A folder that was written with checksums is not loaded without them."""
    folder = shutil.copytree(made_by_us, tmp_path / "universal")
    (folder / "zero" / "crc32c.pt").unlink()
    trainer = quiet_trainer(tmp_path, precision="32-true", max_steps=4)
    with pytest.raises(CheckpointError, match=r"has no file .*crc32c\.pt"):
        trainer.fit(LitTiny(TINY), ckpt_path=folder)


def test_a_scrub_of_what_a_training_saved(saved: Path, tiny: Path, made_by_us: Path) -> None:
    """A checkpoint is whole, and so are the universal folders that DeepSpeed's converter and ours make of it."""
    for path in (saved, tiny, made_by_us):
        assert main(["scrub", str(path), "--quiet"]) == 0


def test_weights_of_a_damaged_universal_checkpoint_are_refused(tiny: Path, tmp_path: Path) -> None:
    """Validation reads only the masters, and verifies them."""
    folder = shutil.copytree(tiny, tmp_path / "copy")
    flip(folder / "zero/model.norm.bias/exp_avg.pt")  # not read by validation
    trainer = quiet_trainer(tmp_path, precision="32-true")
    recipe = dataclasses.replace(TINY, validate=True)
    trainer.validate(LitTiny(recipe), ckpt_path=folder, verbose=False)
    flip(folder / "zero/model.norm.bias/fp32.pt")
    with pytest.raises(CheckpointError, match=r"norm\.bias/fp32\.pt is damaged"):
        trainer.validate(LitTiny(recipe), ckpt_path=folder, verbose=False)


def test_a_universal_checkpoint_resumes_with_parameters_on_storage(tiny: Path, tmp_path: Path) -> None:
    """Masters, losses and step counts equal those of a run with its parameters in memory."""
    recipe = dataclasses.replace(TINY, max_steps=4)
    zero = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0, "sub_group_size": 3000}
    outcomes = []
    for name, options in (("memory", {}), ("storage", {"zero": zero})):
        run = Run(out=str(tmp_path / name), recipe=recipe, options=options, resume=str(tiny))
        module, trainer, recorder = train(run)
        strategy: Any = trainer.strategy
        outcomes.append((module.losses, recorder.extra["steps"], recorder.masters))
        assert (strategy.parameter_bytes > 0) == (name == "storage")
        strategy.close()
    (losses, steps, masters), (expected_losses, expected_steps, expected) = outcomes[1], outcomes[0]
    assert losses == expected_losses and len(losses) == 2 and steps == expected_steps
    for master_name, master in expected.items():
        assert torch.equal(masters[master_name], master), master_name


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "another optimizer": ({"optimizer": "Adam"}, "saved with AdamW, the model is configured with Adam"),
    "other parameter groups": ({"groups": False}, "has 2 parameter groups, the optimizer 1"),
    "a parameter more": ({"depth": 3}, "blocks.2.down.bias' is missing there"),
    "a parameter less": ({"depth": 1}, "blocks.1.down.bias' is of shape .* there and missing here"),
    "another shape": ({"width": 16}, "is of shape .* there and of shape .* here"),
    "a frozen parameter": ({"frozen": False}, "positions.weight' is missing there"),
    "another precision": ({"precision": "bf16-true"}, "torch.float32"),
}


@pytest.mark.parametrize(
    "name", long_but(["another optimizer", "a parameter more", "another shape", "a frozen parameter"], MISFITS)
)
def test_universal_checkpoints_that_do_not_fit_are_refused(name: str, tiny: Path, tmp_path: Path) -> None:
    """The error names the first difference."""
    changes, named = MISFITS[name]
    with pytest.raises(CheckpointError, match=named) as caught:
        train(Run(out=str(tmp_path), recipe=dataclasses.replace(TINY, max_steps=4, **changes), resume=str(tiny)))
    assert caught.value.remedy


def test_a_buffer_that_a_universal_checkpoint_lacks(tiny: Path, tmp_path: Path) -> None:
    """The error names the missing buffer."""

    class More(LitTiny):
        def __init__(self, recipe: Recipe) -> None:
            super().__init__(recipe)
            self.register_buffer("more", torch.zeros(1))

    with pytest.raises(CheckpointError, match="'more' is missing there"):
        quiet_trainer(tmp_path, precision="32-true", max_steps=4).fit(More(TINY), ckpt_path=tiny)


def test_validation_of_a_universal_checkpoint_uses_its_weights(tiny: Path, tmp_path: Path) -> None:
    """Validation in a fresh Trainer gives the metric of the ordinary checkpoint, with tied and frozen weights."""
    recipe = dataclasses.replace(TINY, validate=True)
    metrics = [
        quiet_trainer(tmp_path / name, precision="32-true").validate(LitTiny(recipe), ckpt_path=path, verbose=False)
        for name, path in (("a", tiny), ("b", tiny.with_suffix(".ckpt")))
    ]
    assert metrics[0] == metrics[1]
    fresh = quiet_trainer(tmp_path / "c", precision="32-true").validate(LitTiny(recipe), verbose=False)
    assert metrics[0] != fresh


class StockOnCpu(DeepSpeedStrategy):
    """Lightning's strategy with the changes that it needs to start on a CPU."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", self.local_rank)

    def setup_environment(self) -> None:
        prepare_environment("cpu", local_world_size=1)
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


def test_stock_checkpoint_resumes_through_a_universal_one(tmp_path: Path) -> None:
    """Masters, moments and step counts equal stock's, and training continues with stock's losses."""
    recipe = Recipe(precision="bf16-mixed", scheduler="step", frozen=True, max_steps=5)
    stock = StockOnCpu(stage=3, sub_group_size=4000, reduce_bucket_size=4000, zero_allow_untested_optimizer=True)
    stock.config["gradient_clipping"] = 0.0
    straight = LitTiny(recipe)
    saving = SaveAtStep(3, tmp_path / "stock.ckpt")
    quiet_trainer(tmp_path, stock, max_steps=recipe.max_steps, callbacks=[saving]).fit(straight)
    universal = convert(tmp_path / "stock.ckpt")
    stop, ours = dataclasses.replace(recipe, max_steps=3), tmp_path / "ours.ckpt"
    # The objects that stock saves. Some versions of Python pickle members of enumerations by getattr.
    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, getattr]):
        train(Run(out=str(tmp_path / "a"), recipe=stop, resume=str(universal), save_after_fit=str(ours)))
        assert_same_tensors(universal, convert(ours))
        module, trainer, recorder = train(Run(out=str(tmp_path / "b"), recipe=recipe, resume=str(universal)))
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(straight.losses[3:]), atol=2e-3, rtol=0)
    assert set(recorder.extra["steps"]) == {5}
    assert trainer.global_step == 5


class SaveAtStep(pl.Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
