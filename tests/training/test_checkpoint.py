"""Checkpoints use DeepSpeed's own format, and an error names what does not fit."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import CheckpointError
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import Recipe
from tests.training.worker import Run, launch, train


# That of one process is in test_evaluation_load.py.
@pytest.mark.parametrize("devices", long_but([2], [1, 2]))
def test_zero_to_fp32_reads_our_checkpoints(devices: int, tmp_path: Path) -> None:
    """DeepSpeed's converter returns the masters of a saved folder bit for bit, including tied and frozen parameters."""
    recipe = Recipe(precision="bf16-mixed", groups=True, frozen=True, max_steps=3)
    path = tmp_path / "last.ckpt"
    (outcome,) = launch(Run(out=str(tmp_path / "run"), recipe=recipe, devices=devices, save_after_fit=str(path)))
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    converted = get_fp32_state_dict_from_zero_checkpoint(str(path))
    for name, master in outcome.masters.items():
        assert torch.equal(converted["model." + name], master), name
    assert torch.equal(converted["model.head.weight"], outcome.masters["tokens.weight"])
    assert converted["model.positions.weight"].shape == (16, 32)


TWO_STEPS = Recipe(max_steps=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of two steps."""
    folder = tmp_path_factory.mktemp("saved")
    train(Run(out=str(folder), recipe=TWO_STEPS, save_after_fit=str(folder / "a.ckpt")))
    return folder / "a.ckpt"


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "another optimizer": ({"optimizer": "Adam"}, "Adam"),
    "other parameter groups": ({"groups": True}, "parameter"),
    "another precision": ({"precision": "bf16-mixed"}, "bf16"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_checkpoints_that_do_not_fit_are_refused(name: str, saved: Path, tmp_path: Path) -> None:
    """The error names the first difference."""
    changes, named = MISFITS[name]
    refused(saved, tmp_path, named, dataclasses.replace(TWO_STEPS, max_steps=4, **changes))


def refused(checkpoint: Path, root: Path, named: str, recipe: Recipe = TWO_STEPS) -> None:
    with pytest.raises(CheckpointError, match=named) as caught:
        train(Run(out=str(root / "refused"), recipe=recipe, resume=str(checkpoint)))
    assert caught.value.remedy.endswith(".")


def changing(change: Callable[[bytes], bytes], name: str = "optim_states") -> Callable[[Path], None]:
    """Return what changes the bytes of a file of a checkpoint."""

    def damage(checkpoint: Path) -> None:
        (file,) = checkpoint.rglob(f"*{name}.pt")
        file.write_bytes(change(file.read_bytes()))

    return damage


def flip(content: bytes) -> bytes:
    """Flip one bit in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :]


@pytest.mark.parametrize("name", ["optim_states", "model_states"])
def test_a_flipped_bit_in_a_checkpoint_is_reported(name: str, saved: Path, tmp_path: Path, attack: Attack) -> None:
    """A single flipped bit in the middle of a file raises an error that names the file."""
    attack("bit flip in a file of a checkpoint", tries=1, outcome="CheckpointError with the file's name")
    changing(flip, name)(shutil.copytree(saved, tmp_path / "a.ckpt"))
    refused(tmp_path / "a.ckpt", tmp_path, rf"{name}\.pt")


def lose_file(checkpoint: Path) -> None:
    (file,) = checkpoint.rglob("*optim_states.pt")
    file.unlink()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": changing(lambda content: content[: len(content) // 2]),
    "overwritten": changing(lambda content: content[:64] + bytes(448) + content[512:]),
    "a file is missing": lose_file,
    "no tag": lambda checkpoint: (checkpoint / "latest").unlink(),
    "not there": shutil.rmtree,
    "a plain file": lambda checkpoint: (shutil.rmtree(checkpoint), checkpoint.write_bytes(b"not a folder")),
}


@pytest.mark.parametrize("name", long_but(["overwritten", "a file is missing", "not there", "a plain file"], DAMAGES))
def test_damaged_checkpoints_are_refused(name: str, saved: Path, tmp_path: Path) -> None:
    """What is not whole, or not a checkpoint, raises an error with its name and a remedy."""
    DAMAGES[name](shutil.copytree(saved, tmp_path / "a.ckpt"))
    refused(tmp_path / "a.ckpt", tmp_path, r"a\.ckpt")
