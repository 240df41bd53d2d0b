"""Tests the private seams of DeepSpeed and torch that checkpoints rely on."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_smartinfinity.zero3.checkpoints.folders import staged_save
from lightning_smartinfinity.zero3.checkpoints.folders.staged_save import FILES_BESIDE, LATEST
from lightning_smartinfinity.zero3.checkpoints.save.checkpoint_engine import SmartInfinityCheckpointEngine
from lightning_smartinfinity.zero3.engine.training import SmartInfinityEngine


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (DeepSpeedEngine.save_checkpoint, SmartInfinityEngine.save_checkpoint),
        (DeepSpeedEngine._configure_checkpointing, SmartInfinityEngine._configure_checkpointing),
        (DeepSpeedEngine._copy_recovery_script, SmartInfinityEngine._copy_recovery_script),
        (TorchCheckpointEngine.makedirs, SmartInfinityCheckpointEngine.makedirs),
        (TorchCheckpointEngine.save, SmartInfinityCheckpointEngine.save),
        (TorchCheckpointEngine.load, SmartInfinityCheckpointEngine.load),
    ],
)
def test_overridden_methods_take_what_the_base_passes(theirs: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """Every override has the parameters of the method it replaces, in name and order."""
    assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters)


def test_deepspeed_writes_these_files_beside_the_subfolder(tmp_path: Path) -> None:
    """_copy_recovery_script copies the scripts that we replace in a save, and the engine writes the tag to latest."""
    engine = SimpleNamespace(_change_recovery_script_permissions=lambda _: None)
    DeepSpeedEngine._copy_recovery_script(engine, str(tmp_path))
    scripts = {file.name for file in tmp_path.iterdir()}
    assert scripts == set(FILES_BESIDE) - {LATEST}, "a folder of such a name would not be refused before a save"
    source = inspect.getsource(DeepSpeedEngine.save_checkpoint)
    assert source.count("open(") == 1 and f"'{LATEST}'" in source, "a dead disk would keep a save for ever"


def test_names_of_deepspeeds_files_have_the_rank_of_the_model(tmp_path: Path) -> None:
    """The files that a save under the same tag replaces are told from the user's own by their names."""
    engine = SimpleNamespace(
        checkpoint_mp_rank=0,
        zero_optimization_partition_weights=lambda: True,
        optimizer=SimpleNamespace(dp_process_group=None),
        _get_zero_ckpt_prefix=partial(DeepSpeedEngine._get_zero_ckpt_prefix, None),
    )
    names = [
        DeepSpeedEngine._get_rank_zero_ckpt_name(engine, "folder", "tag", 0, 7, bf16_mode)
        for bf16_mode in (True, False)
    ]
    names.append(DeepSpeedEngine._get_ckpt_name(engine, "folder", "tag", pp_placeholder="7"))
    for name in names:
        assert any(fnmatch(Path(name).name, pattern) for pattern in staged_save.OF_DEEPSPEED), name


def test_torch_can_save_without_data() -> None:
    """Torch can save tensors without their data; tests/zero3/test_tensor_file.py tests the rest of torch's format."""
    assert "materialize_fake_tensors" in inspect.signature(torch.serialization.skip_data.__init__).parameters
    assert hasattr(torch.UntypedStorage, "_checkpoint_offset")


def test_model_checkpoint_looks_at_its_checkpoints_in_these_methods_only() -> None:
    """While it saves, it asks for a file in ``file_exists`` and touches one in ``_link_checkpoint`` only."""
    saving = [name for name in vars(ModelCheckpoint) if name.startswith(("_save", "_update", "_get_metric"))]
    assert "_save_checkpoint" in saving and "_save_last_checkpoint" in saving
    for name in saving:
        source = inspect.getsource(getattr(ModelCheckpoint, name))
        assert not any(used in source for used in ("self._fs", "os.path.exists", "shutil", ".is_file(", "os.remove"))
    assert "self._link_checkpoint(" in inspect.getsource(ModelCheckpoint._save_last_checkpoint)
    assert "trainer.strategy.remove_checkpoint(" in inspect.getsource(ModelCheckpoint._remove_checkpoint)
    assert "self._fs.exists(" in inspect.getsource(ModelCheckpoint.file_exists)


def test_torch_maps_files_by_this_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.load(mmap=True) maps a file by torch.UntypedStorage.from_file, with path, sharing and size."""
    calls: list[tuple[Any, ...]] = []
    original = torch.UntypedStorage.from_file
    monkeypatch.setattr(torch.UntypedStorage, "from_file", lambda *given: (calls.append(given), original(*given))[1])
    torch.save({"a": torch.arange(4)}, tmp_path / "file.pt")
    assert torch.load(tmp_path / "file.pt", mmap=True)["a"].tolist() == [0, 1, 2, 3]
    assert calls == [(str(tmp_path / "file.pt"), False, (tmp_path / "file.pt").stat().st_size)]
