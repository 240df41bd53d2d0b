"""A pipe in the place of any file of a checkpoint is refused: who opened it would wait for ever."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import CheckpointError
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint
from lightning_smartinfinity.export.models import described_by
from lightning_smartinfinity.export.pretrained import OriginalWeights
from lightning_smartinfinity.integrations.transformers.resume import checkpoint_to_resume
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import TensorFile
from lightning_smartinfinity.zero3.checkpoints.formats.trust import load_file
from lightning_smartinfinity.zero3.checkpoints.formats.universal_conversion import convert_checkpoint
from tests.helpers.attacks import Attack
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.training.worker import Run, train

RECIPE = Recipe(max_steps=1, validate=True)
MODEL, OPTIMIZER = "zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
FILES = {
    "ordinary": [f"checkpoint/{MODEL}", f"checkpoint/{OPTIMIZER}", "latest"],
    "universal": [MODEL, *(f"zero/{name}.pt" for name in ("optimizer_state", "crc32c", "model.norm.bias/fp32"))],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint and its universal form."""
    root = tmp_path_factory.mktemp("saved")
    train(Run(out=str(root / "run"), recipe=RECIPE, save_after_fit=str(root / "ordinary")))
    convert_checkpoint(root / "ordinary", root / "universal")
    return root


def scrub(checkpoint: Path) -> None:
    if main(["scrub", str(checkpoint), "--quiet"]):
        raise CheckpointError("It is not whole.", "")


def fit(checkpoint: Path) -> None:
    quiet_trainer(checkpoint.parent, precision="32-true", max_steps=2).fit(LitTiny(RECIPE), ckpt_path=checkpoint)


def validate(checkpoint: Path) -> None:
    quiet_trainer(checkpoint.parent, precision="32-true").validate(LitTiny(RECIPE), ckpt_path=checkpoint)


def convert(checkpoint: Path) -> None:
    convert_checkpoint(checkpoint, checkpoint.parent / "converted")


def export(checkpoint: Path) -> None:
    export_checkpoint(checkpoint, checkpoint.parent / "exported", ExportSettings(to="lightning"))


DOORS: dict[str, tuple[Callable[[Path], None], dict[str, list[str]]]] = {
    "scrub": (scrub, FILES),
    "fit": (fit, FILES),
    "validate": (validate, {"ordinary": FILES["ordinary"][:2], "universal": [MODEL, "zero/model.norm.bias/fp32.pt"]}),
    "convert": (convert, {"ordinary": FILES["ordinary"][:2]}),
    "export": (export, {"ordinary": FILES["ordinary"][:2], "universal": [MODEL, "zero/model.norm.bias/fp32.pt"]}),
}
CASES = [(door, kind, file) for door, (_, kinds) in DOORS.items() for kind, files in kinds.items() for file in files]


@pytest.mark.parametrize(("door", "kind", "file"), CASES)
def test_a_pipe_in_place_of_a_file(
    door: str, kind: str, file: str, saved: Path, tmp_path: Path, attack: Attack
) -> None:
    """Every door refuses it by our error."""
    attack("pipe in place of a file of a checkpoint", tries=1, outcome="CheckpointError, and nothing waits")
    checkpoint = Path(shutil.copytree(saved / kind, tmp_path / kind))
    (checkpoint / file).unlink()
    os.mkfifo(checkpoint / file)
    with pytest.raises(CheckpointError):
        DOORS[door][0](checkpoint)


def test_pipes_that_are_opened_directly(tmp_path: Path) -> None:
    """So are pipes among the files of a model, and the error says what lies there."""
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
