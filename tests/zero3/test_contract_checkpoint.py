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


@pytest.mark.seam("SmartInfinityCheckpointEngine and SmartInfinityEngine write and read checkpoints in windows")
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
    """save_checkpoint, _configure_checkpointing, _copy_recovery_script, ``makedirs``, ``load``, ``save`` match ours."""
    assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters)


@pytest.mark.seam("SmartInfinityEngine, put_common_in_place: failures reach all ranks, a dead disk is given up")
def test_deepspeed_writes_these_files_beside_the_subfolder(tmp_path: Path) -> None:
    """DeepSpeedEngine._copy_recovery_script; save_checkpoint writes only ``latest``, unless ``save_latest=False``."""
    engine = SimpleNamespace(_change_recovery_script_permissions=lambda _: None)
    DeepSpeedEngine._copy_recovery_script(engine, str(tmp_path))
    scripts = {file.name for file in tmp_path.iterdir()}
    assert scripts == set(FILES_BESIDE) - {LATEST}, "a folder of such a name would not be refused before a save"
    source = inspect.getsource(DeepSpeedEngine.save_checkpoint)
    assert source.count("open(") == 1 and f"'{LATEST}'" in source, "a dead disk would keep a save for ever"


@pytest.mark.seam("put_save_in_place replaces DeepSpeed's files and keeps the user's")
def test_names_of_deepspeeds_files_have_the_rank_of_the_model(tmp_path: Path) -> None:
    """_get_rank_zero_ckpt_name, _get_zero_ckpt_prefix and _get_ckpt_name tell DeepSpeed's files from the user's."""
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


@pytest.mark.seam("we leave room in a file and fill it later")
def test_torch_can_save_without_data() -> None:
    """skip_data(materialize_fake_tensors=True) saves no data; UntypedStorage._checkpoint_offset has its place."""
    assert "materialize_fake_tensors" in inspect.signature(torch.serialization.skip_data.__init__).parameters
    assert hasattr(torch.UntypedStorage, "_checkpoint_offset")


@pytest.mark.seam("save_in_turn, SmartInfinityStrategy: it goes on before its checkpoints are whole")
def test_model_checkpoint_looks_at_its_checkpoints_in_these_methods_only() -> None:
    """ModelCheckpoint uses no more than _save_checkpoint, file_exists, _link_checkpoint, Strategy.remove_checkpoint."""
    saving = [name for name in vars(ModelCheckpoint) if name.startswith(("_save", "_update", "_get_metric"))]
    assert "_save_checkpoint" in saving and "_save_last_checkpoint" in saving
    for name in saving:
        source = inspect.getsource(getattr(ModelCheckpoint, name))
        assert not any(used in source for used in ("self._fs", "os.path.exists", "shutil", ".is_file(", "os.remove"))
    assert "self._link_checkpoint(" in inspect.getsource(ModelCheckpoint._save_last_checkpoint)
    assert "trainer.strategy.remove_checkpoint(" in inspect.getsource(ModelCheckpoint._remove_checkpoint)
    assert "self._fs.exists(" in inspect.getsource(ModelCheckpoint.file_exists)


@pytest.mark.seam("a file may be larger than memory")
def test_torch_maps_files_by_this_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.load(mmap=True) maps a file by torch.UntypedStorage.from_file(path, shared, nbytes)."""
    calls: list[tuple[Any, ...]] = []
    original = torch.UntypedStorage.from_file
    monkeypatch.setattr(torch.UntypedStorage, "from_file", lambda *given: (calls.append(given), original(*given))[1])
    torch.save({"a": torch.arange(4)}, tmp_path / "file.pt")
    assert torch.load(tmp_path / "file.pt", mmap=True)["a"].tolist() == [0, 1, 2, 3]
    assert calls == [(str(tmp_path / "file.pt"), False, (tmp_path / "file.pt").stat().st_size)]
