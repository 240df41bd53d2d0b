"""Universal checkpoints are made from the state of any optimizer."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lightning_smartinfinity.errors import CheckpointError, StorageLockedError
from lightning_smartinfinity.zero3.checkpoints.formats import saved_weights, tensor_file, universal_conversion
from lightning_smartinfinity.zero3.checkpoints.formats.universal_conversion import convert_checkpoint
from tests.helpers.damage import flip_bit_behind
from tests.helpers.universal import save_of_two, tensors

SHAPES = [OrderedDict(a=torch.Size([7, 3]), none=torch.Size([0])), OrderedDict(b=torch.Size([1]))]
WHOLE = {"a": torch.arange(21.0), "none": torch.empty(0), "b": torch.tensor([50.0])}
ARRAYS = {"momentum_buffer": 100.0}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of two processes, of which the second has nothing of ``b``."""
    return save_of_two(tmp_path / "two.ckpt", SHAPES, WHOLE, ARRAYS)


def file_of(checkpoint: Path, rank: int, kind: str = "optim") -> Path:
    return checkpoint / "checkpoint" / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"


def test_arrays_are_put_together_in_windows(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversion joins arrays without padding, under the optimizer's names for them.

    The optimizer state has names and counts, and no arrays.
    """
    for module in (saved_weights, universal_conversion):
        monkeypatch.setattr(module, "WINDOW_NUMEL", 4)
    convert_checkpoint(checkpoint, tmp_path / "new")
    expected = {
        f"{name}/{array}": values + offset
        for name, values in WHOLE.items()
        for array, offset in {"fp32": 0.0, **ARRAYS}.items()
    }
    converted = tensors(tmp_path / "new")
    assert converted.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(converted[name], values), name
    for file in (tmp_path / "new").rglob("*.pt"):
        tensor_file.check_records(file, tensors=True)
    state = torch.load(tmp_path / "new/zero/optimizer_state.pt", weights_only=False)
    assert state["fp32_flat_groups"] == [] and state["ours"] == 0
    for of_group in state["optimizer_state_dict"]["state"].values():
        assert of_group["step"] == 7 and of_group["momentum_buffer"].numel() == 0


def changing(rank: int, edit: Callable[[dict[str, Any]], object], kind: str = "optim") -> Callable[[Path], None]:
    """Return a function that rewrites a file of a checkpoint with changed content."""

    def change(checkpoint: Path) -> None:
        content = torch.load(file_of(checkpoint, rank, kind), weights_only=False)
        edit(content)
        torch.save(content, file_of(checkpoint, rank, kind))

    return change


def optimizer_in(content: dict[str, Any]) -> dict[str, Any]:
    return content["optimizer_state_dict"]["optimizer_state_dict"]  # type: ignore[no-any-return]


def states_in(content: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return optimizer_in(content)["state"]  # type: ignore[no-any-return]


def flip(checkpoint: Path, rank: int) -> None:
    """Flip a bit of the momentum of ``a``."""
    state = states_in(torch.load(file_of(checkpoint, rank), weights_only=False))
    content = state[0]["momentum_buffer"].numpy().tobytes()
    flip_bit_behind(content[:8], file_of(checkpoint, rank))


def elsewhere(content: dict[str, Any]) -> None:
    shapes = content["param_shapes"][0]
    shapes["../elsewhere"] = shapes.pop(next(iter(shapes)))


def array_elsewhere(content: dict[str, Any]) -> None:
    for state in states_in(content).values():
        state["../elsewhere"] = state.pop("momentum_buffer")


def of_weights_only(content: dict[str, Any]) -> None:
    content["optimizer_state_dict"]["smart_infinity"] = {"weights_only": True, "save_id": None}


NO_ARRAY = "'momentum_buffer' is no array in float32 of every element"
WITHOUT_ENTRY = r"rank_0_.*optim_states\.pt.*the file is damaged"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of an array": (lambda c: flip(c, 1), r"rank_1_.*optim_states\.pt is damaged: the checksum"),
    "a file is missing": (lambda c: file_of(c, 1).unlink(), "optimizer states of 1 processes; 2 saved"),
    "model states are missing": (lambda c: file_of(c, 1, "model").unlink(), "model states of 1 processes; 2 saved"),
    "model states are damaged": (
        lambda c: flip_bit_behind(b"of_user", file_of(c, 1, "model")),
        r"rank_1_.*model_states\.pt is damaged",
    ),
    "groups with momentum and without": (changing(0, lambda c: states_in(c)[1].pop("momentum_buffer")), NO_ARRAY),
    "an array is too short": (
        changing(0, lambda c: states_in(c)[0].update(momentum_buffer=torch.zeros(3))),
        "'momentum_buffer' is no array",
    ),
    "a process without arrays": (changing(1, lambda c: states_in(c).clear()), "kept different states"),
    "a parameter elsewhere": (changing(0, elsewhere, "model"), r"names a parameter '\.\./elsewhere'"),
    "an array elsewhere": (changing(0, array_elsewhere), r"arrays of the names \['\.\./elsewhere'\]"),
    "weights only": (changing(0, of_weights_only), "weights only"),
    "of two saves": (changing(1, lambda c: c.update(smart_infinity_save="another"), "model"), "different saves"),
    "no states": (changing(0, lambda c: optimizer_in(c).pop("state")), WITHOUT_ENTRY),
    "no groups": (changing(0, lambda c: optimizer_in(c).pop("param_groups")), WITHOUT_ENTRY),
    "no checkpoint": (lambda c: shutil.rmtree(c / "checkpoint"), "has no folder 'checkpoint'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_cannot_be_converted_is_refused(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """The error names what cannot be converted, and no output is left."""
    damage, named = DAMAGES[name]
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=named) as caught:
        convert_checkpoint(checkpoint, tmp_path / "new")
    assert caught.value.remedy and list(tmp_path.iterdir()) == [checkpoint]


def test_a_folder_that_exists_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    """A folder that exists is left alone unless it is empty, as one looks that a file system only remembers."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file").touch()
    with pytest.raises(CheckpointError, match="exists already"):
        convert_checkpoint(checkpoint, tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]
    (tmp_path / "new" / "file").unlink()
    convert_checkpoint(checkpoint, tmp_path / "new")
    assert (tmp_path / "new" / "zero").is_dir()


@pytest.mark.parametrize(
    ("call", "error", "told", "remedy"),
    [
        ("write_all", OSError(28, "No space left on device"), r"new could not be written: .*No space", "Free space"),
        ("read_at", OSError(5, "Input/output error"), r"two\.ckpt/checkpoint could not be loaded: .*Input/output", ""),
    ],
)
def test_a_disk_that_fails(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: OSError, told: str, remedy: str
) -> None:
    """The error names the folder that could not be written or read; partial output is removed."""
    monkeypatch.setattr(tensor_file.TensorFile, call, Mock(side_effect=error))
    with pytest.raises(CheckpointError, match=told) as caught:
        convert_checkpoint(checkpoint, tmp_path / "new")
    assert remedy in caught.value.remedy and list(tmp_path.iterdir()) == [checkpoint]


def test_two_conversions_to_one_path(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one writes, another is refused with the path. The next one removes what a killed one left, and is whole."""

    def meanwhile(state: Any, file: Path) -> None:
        with pytest.raises(StorageLockedError, match=f"Another process is writing to {tmp_path / 'new'} now"):
            convert_checkpoint(checkpoint, tmp_path / "new")
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr("lightning_smartinfinity.storage.folders.staging_folder._remove_tree", lambda _: None)
        patched.setattr(universal_conversion, "save_flushed", meanwhile)
        with pytest.raises(CheckpointError, match="killed"):
            convert_checkpoint(checkpoint, tmp_path / "new")
    assert len(list(tmp_path.iterdir())) == 2
    convert_checkpoint(checkpoint, tmp_path / "new")
    for file in (tmp_path / "new").rglob("*.pt"):
        tensor_file.check_records(file, tensors=True)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "new", checkpoint]
