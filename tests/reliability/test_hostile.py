"""A hostile pickle or a pipe in place of any file that a load reads is refused; what we save needs no consent."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import callbacks

from lightning_smartinfinity import BlockScaled, CheckpointError, RandomStates, SmartInfinityStrategy
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint
from lightning_smartinfinity.export.models import described_by
from lightning_smartinfinity.export.pretrained import OriginalWeights
from lightning_smartinfinity.integrations.transformers.resume import checkpoint_to_resume
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import TensorFile
from lightning_smartinfinity.zero3.checkpoints.formats.trust import load_file
from lightning_smartinfinity.zero3.checkpoints.formats.universal_conversion import convert_checkpoint
from tests.fabric.worker import quiet_fabric
from tests.helpers.attacks import Attack
from tests.helpers.hostile import Hostile, assert_plain, executed, files_in
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit, quiet_trainer

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


def attacked(files: list[Path], loader: Callable[[], object]) -> list[str]:
    """Load with each file spoilt in turn, and return the names of those that were refused.

    Args:
        files: The files.
        loader: Loads the checkpoint that the files belong to.
    """
    refused = []
    for file in files:
        old = spoilt(file)
        try:
            loader()
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
BOTH = [MODEL, OPTIMIZER]


def trainer_of(folder: Path, **settings: Any) -> pl.Trainer:
    strategy = SmartInfinityStrategy(folder / "fits", **settings)
    return quiet_trainer(folder, strategy, precision=RECIPE.precision, max_steps=3)


def export(checkpoint: Path, to: str) -> None:
    out = Path(tempfile.mkdtemp(dir=checkpoint.parent)) / "out"
    export_checkpoint(checkpoint, out, ExportSettings(to=to))


WEIGHTS = ["fp32.pt", MODEL]
LOADERS: dict[str, tuple[str, Callable[[Path], object], list[str]]] = {
    "fit": ("ordinary", lambda c: trainer_of(c).fit(Remembering(RECIPE), ckpt_path=c / "ordinary"), BOTH),
    "validate": ("ordinary", lambda c: trainer_of(c).validate(Remembering(RECIPE), ckpt_path=c / "ordinary"), BOTH),
    "fit, universal": (
        "universal",
        lambda c: trainer_of(c).fit(Remembering(RECIPE), ckpt_path=c / "universal"),
        [*ARRAYS, "crc32c.pt", "optimizer_state.pt", MODEL],
    ),
    "validate, universal": (
        "universal",
        lambda c: trainer_of(c).validate(Remembering(RECIPE), ckpt_path=c / "universal"),
        WEIGHTS,
    ),
    "fit, full weights": (
        "file",
        lambda c: trainer_of(c, load_full_weights=True).fit(Remembering(RECIPE), ckpt_path=c / "file"),
        ["file"],
    ),
    "export": ("ordinary", lambda c: export(c / "ordinary", "safetensors"), BOTH),
    "export, universal": ("universal", lambda c: export(c / "universal", "safetensors"), WEIGHTS),
    "export to Lightning": ("ordinary", lambda c: export(c / "ordinary", "lightning"), BOTH),
    "export to Lightning, universal": ("universal", lambda c: export(c / "universal", "lightning"), WEIGHTS),
    "convert": ("ordinary", lambda c: convert_checkpoint(c / "ordinary", c / "new"), BOTH),
}
"""What loads a checkpoint: its kind, how it is loaded, and the files that are read then. Others do not matter."""


@pytest.mark.parametrize("name", long_but([name for name in LOADERS if name != "validate, universal"], LOADERS))
def test_a_door(name: str, checkpoints: Path, attack: Attack) -> None:
    """Every file that is read is refused, and nothing is converted."""
    kind, loader, read = LOADERS[name]
    files = [checkpoints / "file"] if kind == "file" else few_files_in(checkpoints / kind)
    attack(ROW, tries=len(files), outcome=OUTCOME)
    assert sorted(attacked(files, lambda: loader(checkpoints))) == sorted(read)
    assert not (checkpoints / "new").exists()


def scrub(checkpoint: Path) -> None:
    if main(["scrub", str(checkpoint), "--quiet"]):
        raise CheckpointError("It is not whole.", "")


PIPES = {
    **{name: loader for name, loader in LOADERS.items() if name != "fit, full weights"},
    "scrub": ("ordinary", lambda c: scrub(c / "ordinary"), [*BOTH, "latest"]),
    "scrub, universal": ("universal", lambda c: scrub(c / "universal"), LOADERS["fit, universal"][2]),
}


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_in_place_of_a_file(name: str, checkpoints: Path, attack: Attack) -> None:
    """Every reader refuses it by our error, as opening it would wait for ever."""
    kind, loader, read = PIPES[name]
    names = [*read, "latest"] if name == "fit" else read
    files = [file for file in (*few_files_in(checkpoints / kind), checkpoints / kind / "latest") if file.name in names]
    assert len(files) == len(names)
    attack("pipe in place of a file of a checkpoint", tries=len(files), outcome="CheckpointError, and nothing waits")
    for file in files:
        content = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(CheckpointError):
            loader(checkpoints)
        file.unlink()
        file.write_bytes(content)


def test_pipes_that_are_opened_directly(tmp_path: Path) -> None:
    """A pipe among the files of a model is refused, and the error says that it is a pipe."""
    for name in ("file.pt", "config.json", "model.safetensors", "trainer_state.json"):
        os.mkfifo(tmp_path / name)
    readers: list[Callable[[], object]] = [
        lambda: load_file(tmp_path / "file.pt"),
        lambda: TensorFile(tmp_path / "file.pt"),
        lambda: described_by(tmp_path),
        lambda: OriginalWeights(tmp_path, prefix="").spec("weight", torch.Size([1])),
        lambda: checkpoint_to_resume(str(tmp_path), str(tmp_path), warn=False),
    ]
    for read in readers:
        with pytest.raises(CheckpointError, match="is a pipe, and not a regular file"):
            read()


@pytest.mark.parametrize("kind", ["ordinary", "universal"])
def test_an_export_with_consent(kind: str, checkpoints: Path) -> None:
    """Who passes --no-weights-only has the code run."""
    (file,) = (file for file in few_files_in(checkpoints / kind) if file.name == MODEL)
    spoilt(file)
    export_checkpoint(checkpoints / kind, checkpoints / "consented", ExportSettings(weights_only=False))
    assert executed(file.parent)


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[Fabric]:
    fabric = quiet_fabric(tmp_path / "storage", precision=RECIPE.precision)
    yield fabric
    fabric.strategy.close()  # type: ignore[attr-defined]


def test_fabric(fabric: Fabric, tmp_path: Path, attack: Attack) -> None:
    """Ordinary and universal folders are refused with and without the optimizer; plain files by load_raw, too."""
    _, model, optimizer = RECIPE.set_up(fabric)
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
        assert sorted(attacked(ordinary, loading)) == BOTH
        loading = partial(fabric.load, tmp_path / "universal", target)
        assert sorted(attacked(universal, loading)) == sorted(read)
    assert attacked([tmp_path / "raw"], lambda: fabric.load_raw(tmp_path / "raw", model)) == ["raw"]
    fabric.load(tmp_path / "universal", state)


# ---- hyperparameters that name code


def test_code_that_hyperparameters_name(checkpoints: Path, fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """No loader imports or calls it (GHSA-qqmf-gpg7-g8gw); what was exported says it, and Lightning refuses that."""
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
        trainer: Any = trainer_of(checkpoints, load_full_weights=path.is_file())
        trainer.validate(Remembering(RECIPE), ckpt_path=path, verbose=False)
        trainer.fit(Remembering(RECIPE), ckpt_path=path)
        trainer.strategy.close()
    assert torch.load(checkpoints / "lightning", weights_only=True)["hyper_parameters"]["_instantiator"] == "this.s"
    with pytest.raises(ValueError, match=r"'this\.s' from the checkpoint is not in the allowlist"):
        Remembering.load_from_checkpoint(checkpoints / "lightning", recipe=RECIPE)
    assert "this" not in sys.modules
