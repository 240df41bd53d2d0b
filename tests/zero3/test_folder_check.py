"""A checkpoint folder is checked before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import CheckpointError, ConfigError
from lightning_smartinfinity.zero3.checkpoints.formats import found_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import reading_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.found_checkpoint import _require_part, _Seen
from lightning_smartinfinity.zero3.checkpoints.load.folder_check import check_frozen, check_needed


def test_what_a_trainer_needs() -> None:
    """The error names every missing key."""
    check_needed({"loops": 1, "callbacks": 2, "more": 3}, ["loops", "callbacks"], "there")
    with pytest.raises(CheckpointError, match="there lacks 'callbacks', 'loops'"):
        check_needed({"more": 3}, ["loops", "callbacks"], "there")


def test_frozen_parameters_that_were_left_out() -> None:
    """A module without frozen parameters loads a checkpoint that lacks them; for others the error names one."""
    module = torch.nn.Linear(2, 2)
    check_frozen(module, {}, "there")
    module.bias.requires_grad_(False)
    check_frozen(module, {"frozen_param_shapes": {"bias": (2,)}}, "there")
    with pytest.raises(CheckpointError, match="'bias'"):
        check_frozen(module, {"frozen_param_shapes": None}, "there")


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("damaged"), KeyError("module")])
def test_a_damaged_file(error: Exception, tmp_path: Path) -> None:
    """Any error while reading becomes one error that names the folder and the cause."""
    with pytest.raises(CheckpointError, match=f"{tmp_path.name}.*{type(error).__name__}"), reading_checkpoint(tmp_path):
        raise error


def test_our_own_errors_pass() -> None:
    """Our own errors pass unchanged, because they say more."""
    with pytest.raises(ConfigError, match="mine"), reading_checkpoint("there"):
        raise ConfigError("mine", "Do.")


def test_a_rank_without_its_own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the rank, its host, the file and how to put the parts together."""
    monkeypatch.setattr(found_checkpoint.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(found_checkpoint.dist, "get_world_size", lambda: 4)
    own = _Seen(
        Path("a.ckpt/checkpoint"),
        frozenset({2}),
        frozenset({2, 3}),
        has_latest=True,
        host="node1",
        save_id=None,
        saved_at=0.0,
    )
    named = (
        r"Rank 3 on node1 finds no file '\*zero_pp_rank_3_mp_rank_00_optim_states.pt' in a.ckpt/checkpoint, which has "
    )
    with pytest.raises(CheckpointError, match=named + "those of the processes 2") as caught:
        _require_part(own, frozenset({0, 1, 2}))
    assert "copy the parts of all machines into one folder" in caught.value.remedy
    with pytest.raises(CheckpointError, match="model_states"):
        _require_part(own._replace(saved=frozenset({2, 3}), models=frozenset({2})), frozenset(range(4)))
    _require_part(own._replace(saved=frozenset({2, 3})), frozenset(range(4)))
    with pytest.raises(CheckpointError, match="the processes 2, 3 only, of 6 that saved it, and 4 processes"):
        _require_part(own._replace(saved=frozenset({2, 3})), frozenset(range(6)))
