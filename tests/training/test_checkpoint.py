"""Checkpoints use DeepSpeed's own format, and an error names what does not fit."""

from __future__ import annotations

import dataclasses
import shutil
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


def test_saving_leaves_training_undisturbed(tmp_path: Path) -> None:
    """A run that saves at every step equals one that never saves."""
    recipe = Recipe(precision="bf16-mixed", max_steps=4)
    saving, _, first = train(Run(out=str(tmp_path / "a"), recipe=recipe, save_at=(1, 2, 3)))
    quiet, _, second = train(Run(out=str(tmp_path / "b"), recipe=recipe))
    assert saving.losses == quiet.losses
    assert all(torch.equal(first.masters[name], second.masters[name]) for name in second.masters)


def test_resume_survives_another_sub_group_size(tmp_path: Path) -> None:
    """A checkpoint loads with another size of DeepSpeed's sub-groups and buckets."""
    recipe = Recipe(max_steps=4, groups=True)
    straight, _, a = train(Run(out=str(tmp_path / "a"), recipe=recipe, save_at=(2,)))
    again = Run(
        out=str(tmp_path / "b"),
        recipe=recipe,
        resume=str(tmp_path / "a" / "step-2.ckpt"),
        options={"zero": {"sub_group_size": 3000, "reduce_bucket_size": 2000}},
    )
    resumed, _, b = train(again)
    assert resumed.losses == straight.losses[2:]
    assert all(torch.equal(a.masters[name], b.masters[name]) for name in a.masters)


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
}


@pytest.mark.parametrize("name", MISFITS)
def test_checkpoints_that_do_not_fit_are_refused(name: str, saved: Path, tmp_path: Path) -> None:
    """The error names the first difference."""
    changes, named = MISFITS[name]
    other = dataclasses.replace(TWO_STEPS, max_steps=4, **changes)
    with pytest.raises(CheckpointError, match=named) as caught:
        train(Run(out=str(tmp_path), recipe=other, resume=str(saved)))
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["optim_states", "model_states"])
def test_a_flipped_bit_in_a_checkpoint_is_reported(name: str, saved: Path, tmp_path: Path, attack: Attack) -> None:
    """A single flipped bit in the middle of a file raises an error that names the file."""
    attack("bit flip in a file of a checkpoint", tries=1, outcome="CheckpointError with the file's name")
    path = shutil.copytree(saved, tmp_path / "a.ckpt")
    (file,) = path.rglob(f"*{name}.pt")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=file.name) as caught:
        train(Run(out=str(tmp_path / "b"), recipe=TWO_STEPS, resume=str(path)))
    assert caught.value.remedy
