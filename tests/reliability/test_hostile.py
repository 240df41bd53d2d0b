"""A hostile pickle in any file that a load reads is not executed; what we save ourselves needs no consent."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import callbacks

from lightning_smartinfinity import BlockScaled, CheckpointError, RandomStates, SmartInfinityStrategy
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint
from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from lightning_smartinfinity.zero3.checkpoints.formats.universal_conversion import convert_checkpoint
from tests.fabric.worker import quiet_fabric
from tests.helpers.attacks import Attack
from tests.helpers.hostile import Hostile, assert_plain, executed, files_in
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit, quiet_trainer
from tests.huggingface.trained import arguments, dataset, load, train

RECIPE = Recipe(precision="16-mixed", scheduler="step", frozen=True, validate=True, max_steps=2)
ROW = "hostile pickle in a file of a checkpoint"
OUTCOME = "not executed; CheckpointError with the type's name if the file is read"


class Remembering(LitTiny):
    """A module with hyperparameters and a state of its own."""

    def __init__(self, recipe: Recipe, rate: float = 0.1, names: tuple[str, ...] = ("a", "b")) -> None:
        super().__init__(recipe)
        self.save_hyperparameters("rate", "names")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"numbers": [1, 2.5, None], "set": {1}, "bytes": b"x", "tensor": torch.ones(2)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what a training with everything switched on saved, and what was made of it."""
    root = tmp_path_factory.mktemp("saved")
    kept = callbacks.ModelCheckpoint(root / "kept", every_n_train_steps=1, save_last=True)
    watching = [kept, callbacks.EarlyStopping("val_loss"), callbacks.LearningRateMonitor()]
    strategy = SmartInfinityStrategy(root / "storage", compression=BlockScaled(), transfer={"num_buffers": 2})
    settings = {"precision": RECIPE.precision, "callbacks": watching, "enable_checkpointing": True, "logger": True}
    trainer = fit(Remembering(RECIPE), root, strategy, max_steps=2, val_check_interval=1, **settings)
    trainer.save_checkpoint(root / "ordinary")
    trainer.strategy.close()  # type: ignore[attr-defined]
    convert_checkpoint(root / "ordinary", root / "universal")
    export_checkpoint(root / "ordinary", root / "file", ExportSettings(to="lightning"))
    return root


def test_what_a_trainer_saves_needs_no_consent(saved: Path) -> None:
    """With a dynamic loss scale, residuals, callbacks, schedules, hyperparameters and a state of the user's own."""
    assert_plain([*files_in(saved), saved / "file"], 20)
    (states,) = (saved / "ordinary").rglob("*optim_states.pt")
    state = torch.load(states, weights_only=True)["optimizer_state_dict"]
    assert state["zero_stage"] == 3 and state["loss_scaler"]["dynamic"] is True
    assert "residual" in str(state["smart_infinity"].keys())


# ---- a pickle in the place of each file


def spoilt(file: Path) -> bytes:
    """Put a hostile object into a file, beside what it holds if it holds names, and return the file's old bytes."""
    old = file.read_bytes()
    content = torch.load(file, weights_only=True, map_location="cpu")
    hostile = Hostile(file.parent)
    torch.save({**content, "hostile": hostile} if isinstance(content, dict) else [content, hostile], file)
    return old


def attacked(files: list[Path], door: Callable[[], object]) -> list[str]:
    """Load with each file spoilt in turn, and return the names of those that were refused.

    Args:
        files: The files.
        door: Loads the checkpoint that the files belong to.
    """
    refused = []
    for file in files:
        old = spoilt(file)
        try:
            door()
        except CheckpointError as error:
            assert Hostile.CALLS in str(error), error
            refused.append(file.name)
        finally:
            file.write_bytes(old)
        assert not executed(file.parent), file
    return refused


@pytest.fixture
def checkpoints(saved: Path, tmp_path: Path) -> Path:
    """Return a folder with copies that a test may spoil."""
    for name in ("ordinary", "universal"):
        shutil.copytree(saved / name, tmp_path / name)
    shutil.copy(saved / "file", tmp_path / "file")
    return tmp_path


def few_files_in(checkpoint: Path) -> list[Path]:
    """Return the files of a checkpoint, those of one parameter for all if it is universal."""
    parents = ("model.norm.weight", "zero", "checkpoint", "universal")
    return [file for file in files_in(checkpoint) if file.parent.name in parents]


MODEL, OPTIMIZER = "zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
ARRAYS = ["exp_avg.pt", "exp_avg_sq.pt", "fp32.pt"]


@pytest.mark.parametrize("method", ["fit", "validate"])
def test_a_trainer(method: str, checkpoints: Path, attack: Attack) -> None:
    """Trainer.fit and validate refuse every file that they read."""
    files = files_in(checkpoints / "ordinary")

    def door() -> None:
        trainer = quiet_trainer(checkpoints, precision=RECIPE.precision, max_steps=3)
        getattr(trainer, method)(Remembering(RECIPE), ckpt_path=checkpoints / "ordinary")

    attack(ROW, tries=len(files), outcome=OUTCOME)
    assert sorted(attacked(files, door)) == [MODEL, OPTIMIZER]


@pytest.mark.parametrize("method", ["fit", pytest.param("validate", marks=pytest.mark.long)])
def test_a_trainer_with_a_universal_folder(method: str, checkpoints: Path, attack: Attack) -> None:
    """What an evaluation does not read does not matter to it."""
    files = few_files_in(checkpoints / "universal")

    def door() -> None:
        trainer = quiet_trainer(checkpoints, precision=RECIPE.precision, max_steps=3)
        getattr(trainer, method)(Remembering(RECIPE), ckpt_path=checkpoints / "universal")

    attack(ROW, tries=len(files), outcome=OUTCOME)
    read = [*ARRAYS, "crc32c.pt", "optimizer_state.pt", MODEL] if method == "fit" else ["fp32.pt", MODEL]
    assert sorted(attacked(files, door)) == sorted(read)


def test_a_trainer_with_full_weights(checkpoints: Path, attack: Attack) -> None:
    """A single file of Lightning's is refused, too."""

    def door() -> None:
        strategy = SmartInfinityStrategy(checkpoints / "storage", load_full_weights=True)
        trainer = quiet_trainer(checkpoints, strategy, precision=RECIPE.precision, max_steps=3)
        trainer.fit(Remembering(RECIPE), ckpt_path=checkpoints / "file")

    attack(ROW, tries=1, outcome=OUTCOME)
    assert attacked([checkpoints / "file"], door) == ["file"]


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[Fabric]:
    fabric = quiet_fabric(tmp_path / "storage", precision=RECIPE.precision)
    yield fabric
    fabric.strategy.close()  # type: ignore[attr-defined]


def test_fabric(fabric: Fabric, tmp_path: Path, attack: Attack) -> None:
    """Ordinary and universal folders are refused with and without the optimizer; plain files by load_raw, too."""
    module = RECIPE.build_model()
    model, optimizer = fabric.setup(module, RECIPE.build_optimizer(list(module.named_parameters())))
    state = {"model": model, "optimizer": optimizer, "random": RandomStates(), "step": 1}
    fabric.backward(model(RECIPE.batch(0)))
    optimizer.step()
    fabric.save(tmp_path / "ordinary", state)
    assert_plain(files_in(tmp_path / "ordinary"), 2)
    convert_checkpoint(tmp_path / "ordinary", tmp_path / "universal")
    assert_plain(files_in(tmp_path / "universal"), 4)
    torch.save(RECIPE.build_model().state_dict(), tmp_path / "raw")
    ordinary, universal = files_in(tmp_path / "ordinary"), files_in(tmp_path / "universal" / "zero" / "norm.weight")
    universal += [*(tmp_path / "universal" / "zero").glob("*.pt"), *(tmp_path / "universal").glob("*.pt")]
    attack(ROW, tries=2 * len(ordinary + universal) + 1, outcome=OUTCOME)
    in_training = [*ARRAYS, "crc32c.pt", "optimizer_state.pt", MODEL]
    for target, read in ((state, in_training), ({"model": model}, ["fp32.pt", MODEL])):
        loading = partial(fabric.load, tmp_path / "ordinary", target)
        assert sorted(attacked(ordinary, loading)) == [MODEL, OPTIMIZER]
        loading = partial(fabric.load, tmp_path / "universal", target)
        assert sorted(attacked(universal, loading)) == sorted(read)
    assert attacked([tmp_path / "raw"], lambda: fabric.load_raw(tmp_path / "raw", model)) == ["raw"]
    fabric.load(tmp_path / "universal", state)


@pytest.mark.parametrize("kind", ["ordinary", "universal"])
def test_exports(kind: str, checkpoints: Path, attack: Attack) -> None:
    """Nothing is written; who passes --no-weights-only has the code run."""
    files = few_files_in(checkpoints / kind)
    attack(ROW, tries=2 * len(files), outcome=OUTCOME)
    read = [MODEL, OPTIMIZER] if kind == "ordinary" else ["fp32.pt", MODEL]
    for to in ("safetensors", "lightning"):
        outs = (checkpoints / f"{to}-{number}" for number in itertools.count())
        settings = ExportSettings(to=to)
        assert sorted(attacked(files, partial(_export, checkpoints / kind, outs, settings))) == read
    spoilt(next(file for file in files if file.name == MODEL))
    export_checkpoint(checkpoints / kind, checkpoints / "consented", ExportSettings(weights_only=False))
    assert executed(next(file for file in files if file.name == MODEL).parent)


def _export(checkpoint: Path, outs: Iterator[Path], settings: ExportSettings) -> None:
    export_checkpoint(checkpoint, next(outs), settings)


def test_conversion(checkpoints: Path, attack: Attack) -> None:
    """Nothing is converted; the command takes --no-weights-only."""
    files = files_in(checkpoints / "ordinary")
    attack(ROW, tries=len(files), outcome=OUTCOME)
    into = checkpoints / "new"
    assert sorted(attacked(files, lambda: convert_checkpoint(checkpoints / "ordinary", into))) == [MODEL, OPTIMIZER]
    assert not into.exists()


# ---- hyperparameters that name code


def test_code_that_hyperparameters_name(checkpoints: Path, fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """No door imports or calls it (GHSA-qqmf-gpg7-g8gw); what was exported says it, and Lightning refuses that."""
    monkeypatch.delitem(sys.modules, "this", raising=False)
    ordinary = checkpoints / "ordinary"
    (model_file,) = ordinary.rglob(MODEL)
    states = torch.load(model_file, weights_only=True)
    states["hyper_parameters"] |= {"_instantiator": "this.s", "_class_path": "this.d"}
    torch.save(states, model_file)

    module = Remembering(RECIPE)
    model, _ = fabric.setup(module, RECIPE.build_optimizer(list(module.named_parameters())))
    fabric.load(ordinary, {"model": model})
    convert_checkpoint(ordinary, checkpoints / "converted")
    for to in ("safetensors", "lightning"):
        export_checkpoint(checkpoints / "converted", checkpoints / to, ExportSettings(to=to))
    assert main(["scrub", str(ordinary)]) == 0
    for path in (ordinary, checkpoints / "lightning"):
        strategy = SmartInfinityStrategy(checkpoints / "fits", load_full_weights=path.is_file())
        trainer = quiet_trainer(checkpoints, strategy, precision=RECIPE.precision, max_steps=3)
        trainer.validate(Remembering(RECIPE), ckpt_path=path, verbose=False)
        trainer.fit(Remembering(RECIPE), ckpt_path=path)
        strategy.close()
    assert torch.load(checkpoints / "lightning", weights_only=True)["hyper_parameters"]["_instantiator"] == "this.s"
    with pytest.raises(ValueError, match=r"'this\.s' from the checkpoint is not in the allowlist"):
        Remembering.load_from_checkpoint(checkpoints / "lightning", recipe=RECIPE)
    assert "this" not in sys.modules


@pytest.mark.long
def test_transformers(model_folder: Path, tmp_path: Path, attack: Attack) -> None:
    """What a Trainer of transformers saves through us needs no consent, and nothing that it loads is executed."""
    train(model_folder, tmp_path / "out", max_steps=1, save_strategy="steps", save_steps=1)
    checkpoint = tmp_path / "out" / "checkpoint-1"
    files = files_in(checkpoint / "global_step1")  # transformers writes the others
    assert_plain(files, 2)

    def door() -> None:
        with SmartInfinityTraining(storage=tmp_path / "storage") as training:
            import transformers

            args = arguments(tmp_path / "resumed", training.config, max_steps=2)
            trainer = transformers.Trainer(load(model_folder), args, train_dataset=dataset())
            trainer.train(resume_from_checkpoint=str(checkpoint))

    attack(ROW, tries=len(files), outcome=OUTCOME)
    assert sorted(attacked(files, door)) == [MODEL, OPTIMIZER]
