"""Tests the private seams of DeepSpeed and torch that checkpoints, also universal ones, rely on."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_smartinfinity.zero3.checkpoints.folders import staged_save
from lightning_smartinfinity.zero3.checkpoints.folders.staged_save import FILES_BESIDE, LATEST
from lightning_smartinfinity.zero3.checkpoints.formats.block_checksums import CHECKSUMMED
from tests.helpers.universal import assert_same_tensors, convert, convert_by_command, save_of_two, tensors


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


@pytest.mark.seam("a file may be larger than memory; we leave room in a file and fill it later")
def test_torch_maps_files_by_this_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.load(mmap=True) maps a file by torch.UntypedStorage.from_file(path, shared, nbytes).

    skip_data(materialize_fake_tensors=True) saves no data; UntypedStorage._checkpoint_offset has its place.
    """
    assert "materialize_fake_tensors" in inspect.signature(torch.serialization.skip_data.__init__).parameters
    assert hasattr(torch.UntypedStorage, "_checkpoint_offset")
    calls: list[tuple[Any, ...]] = []
    original = torch.UntypedStorage.from_file
    monkeypatch.setattr(torch.UntypedStorage, "from_file", lambda *given: (calls.append(given), original(*given))[1])
    torch.save({"a": torch.arange(4)}, tmp_path / "file.pt")
    assert torch.load(tmp_path / "file.pt", mmap=True)["a"].tolist() == [0, 1, 2, 3]
    assert calls == [(str(tmp_path / "file.pt"), False, (tmp_path / "file.pt").stat().st_size)]


SHAPES = [OrderedDict(a=torch.Size([3]), b=torch.Size([2, 2])), OrderedDict(c=torch.Size([1]))]
WHOLE = {"a": torch.arange(3.0), "b": 10 + torch.arange(4.0), "c": torch.tensor([20.0])}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two processes, with numbered sub-groups and slices padded to one length."""
    return save_of_two(tmp_path_factory.mktemp("two") / "two.ckpt", SHAPES, WHOLE, {"exp_avg": 100, "exp_avg_sq": 200})


@pytest.fixture(scope="module")
def universal(checkpoint: Path) -> Path:
    """The universal checkpoint that DeepSpeed's converter makes of it."""
    return convert(checkpoint)


@pytest.mark.seam("convert_checkpoint writes them for optimizers that the converter does not know")
def test_ours_makes_the_same(checkpoint: Path, universal: Path, tmp_path: Path) -> None:
    """``smart-infinity universal`` writes the files and keys that DeepSpeed's converter writes, and checksums."""
    ours = convert_by_command(checkpoint, tmp_path / "ours")
    assert_same_tensors(ours, universal)
    files = [{str(file.relative_to(folder)) for file in folder.rglob("*.pt")} for folder in (ours, universal)]
    assert files[0] == files[1] | {"zero/crc32c.pt"}
    states = [torch.load(folder / "zero/optimizer_state.pt", weights_only=False) for folder in (ours, universal)]
    assert states[0].keys() == states[1].keys() | {CHECKSUMMED}
    assert states[0]["param_groups"] == states[1]["param_groups"]
    kept = [[{*group} for group in state["optimizer_state_dict"]["state"].values()] for state in states]
    assert kept[0] == kept[1]


@pytest.mark.seam("`write_arrays` saves what it reads")
def test_converter_makes_flat_tensors_of_what_our_checkpoints_hold(universal: Path) -> None:
    """ds_to_universal writes one file per parameter and array, without padding."""
    expected = {
        f"{name}/{array}": (torch.float32, (values + offset).tolist())
        for name, values in WHOLE.items()
        for array, offset in {"fp32": 0, "exp_avg": 100, "exp_avg_sq": 200}.items()
    }
    converted = tensors(universal).items()
    assert {name: (values.dtype, values.flatten().tolist()) for name, values in converted} == expected


@pytest.mark.seam("`UniversalFolder` reads universal checkpoints")
def test_converter_keeps_the_states_that_are_read(universal: Path) -> None:
    """deepspeed.checkpoint.ds_to_universal keeps the first rank's optimizer state and every rank's model states."""
    state = torch.load(universal / "zero" / "optimizer_state.pt", weights_only=False)
    assert (state["ours"], state["optimizer_state_dict"]["param_groups"][0]["lr"]) == (0, 0.5)
    assert int(state["optimizer_state_dict"]["state"][0]["step"]) == 7
    for rank in range(2):
        states = torch.load(universal / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", weights_only=False)
        assert (states["of_user"], states["param_shapes"]) == (rank, SHAPES)


@pytest.mark.seam("comparing a checkpoint of another number of processes with the model")
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_get_zero_param_shapes", ["self"]),
        ("_get_zero_frozen_param_attributes", ["self", "attr_func"]),
        ("_get_param_shape_func", ["self", "param"]),
    ],
)
def test_engine_describes_its_parameters(name: str, parameters: list[str]) -> None:
    """DeepSpeedEngine: _get_zero_param_shapes, _get_zero_frozen_param_attributes, _get_param_shape_func."""
    assert list(inspect.signature(getattr(DeepSpeedEngine, name)).parameters) == parameters


@pytest.mark.seam("load_resharded and load_saved_weights load buffers and frozen parameters")
def test_engine_loads_buffers_and_frozen_fragments() -> None:
    """DeepSpeedEngine.load_module_state_dict loads what a checkpoint holds beside masters and moments."""
    module = torch.nn.BatchNorm1d(2)
    weight: Any = module.weight
    weight.requires_grad_(False)
    weight.ds_id, weight.ds_tensor = 0, torch.zeros(2)
    engine = mock.MagicMock(module=module, param_names={weight: "weight"})
    saved = {**module.state_dict(), "running_mean": torch.tensor([3.0, 4.0])}

    class ReadWhenAskedFor:
        def __getitem__(self, name: str) -> torch.Tensor:
            assert name == "weight"
            return torch.tensor([5.0, 6.0])

    checkpoint = {"module": saved, "frozen_param_fragments": ReadWhenAskedFor()}
    DeepSpeedEngine.load_module_state_dict(engine, checkpoint=checkpoint, strict=True)
    assert module.running_mean is not None and module.running_mean.tolist() == [3.0, 4.0]
    assert weight.ds_tensor.tolist() == [5.0, 6.0], "load/resharding.py hands frozen slices over so"
