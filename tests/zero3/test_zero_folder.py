"""Weights are read from the files of any number of processes, for any other number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_smartinfinity.errors import CheckpointError, ConfigError
from lightning_smartinfinity.zero3.checkpoints.formats import saved_weights, zero_folder
from lightning_smartinfinity.zero3.checkpoints.formats.block_checksums import SavedArray
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import reading_checkpoint, tagged_folder
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import TensorFile
from lightning_smartinfinity.zero3.checkpoints.formats.zero_folder import ZeroFolder
from lightning_smartinfinity.zero3.checkpoints.load.weight_loading import saved_names
from tests.helpers.universal import save_of_two

SHAPES = {"one": torch.Size([1]), "three": torch.Size([3]), "many": torch.Size([5, 7]), "even": torch.Size([2, 6])}
FROZEN = {"base": torch.Size([11])}


def values_of(name: str) -> torch.Tensor:
    shape = {**SHAPES, **FROZEN}[name]
    return torch.arange(shape.numel(), dtype=torch.float32) + 16 * len(name)


def slice_of(name: str, rank: int, world_size: int) -> torch.Tensor:
    """Cut and pad as ZeRO-3 does, stated independently; the padding is NaN and must never be read."""
    values = values_of(name)
    numel = (len(values) + world_size - 1) // world_size
    padded = torch.cat([values, torch.full((numel * world_size - len(values),), torch.nan)])
    return padded[rank * numel : (rank + 1) * numel].clone()


def save(folder: Path, world_size: int) -> None:
    """Write the files of a ZeRO-3 checkpoint with two sub-groups, whose border lies within a parameter."""
    for rank in range(world_size):
        flat = torch.cat([slice_of(name, rank, world_size) for name in SHAPES])
        torch.save(
            {
                "param_shapes": [{n: SHAPES[n] for n in ("one", "three")}, {n: SHAPES[n] for n in ("many", "even")}],
                "frozen_param_shapes": FROZEN,
                "frozen_param_fragments": {name: slice_of(name, rank, world_size).bfloat16() for name in FROZEN},
                "shared_params": {},
                "dp_world_size": world_size,
            },
            folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        )
        state = {"partition_count": world_size, "fp32_flat_groups": [flat[:4].clone(), flat[4:].clone()]}
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def read(folder: Path, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Return the slices of one of so many processes; elements that nobody reads are NaN."""
    wanted, slices = {}, {}
    for name in [*SHAPES, *FROZEN]:
        numel = len(values_of(name))
        per_rank = -(-numel // world_size)
        wanted[name] = range(min(rank * per_rank, numel), min((rank + 1) * per_rank, numel))
        slices[name] = torch.full((len(wanted[name]),), torch.nan)

    def put(name: str, begin: int, values: torch.Tensor) -> None:
        at = begin - wanted[name].start
        assert slices[name][at : at + len(values)].isnan().all(), "read twice"
        slices[name][at : at + len(values)] = values

    weights = ZeroFolder(folder, rank=rank, world_size=world_size)
    weights.require_whole()
    weights.read_masters(wanted, put)
    weights.read_frozen(wanted, put)
    return slices


@pytest.mark.parametrize(("num_saved", "window"), [(1, 3), (2, 1 << 22), (3, 3), (3, 1 << 22), (12, 3)])
def test_all_slices_together_are_the_parameters(
    num_saved: int, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the windows, each element is read once, by the process that keeps it."""
    monkeypatch.setattr(saved_weights, "WINDOW_NUMEL", window)
    save(tmp_path, num_saved)
    for world_size in (1, 2, 3, 5):
        slices = [read(tmp_path, rank, world_size) for rank in range(world_size)]
        for name in [*SHAPES, *FROZEN]:
            assert torch.equal(torch.cat([of_rank[name] for of_rank in slices]), values_of(name)), (name, world_size)


def test_a_process_reads_its_own_file_alone(tmp_path: Path) -> None:
    """If as many processes saved the checkpoint, a process needs nothing of another's file."""
    save(tmp_path, 2)
    (tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt").write_bytes(b"")
    read(tmp_path, 0, 2)


@pytest.mark.parametrize(
    "tag", ["../other", "/tmp", "a/b", "..", ".", "", " \n", "a\0b", "\ud800", "x" * 256], ids=lambda tag: repr(tag[:9])
)
def test_latest_names_no_folder_elsewhere(tag: str, tmp_path: Path) -> None:
    """``latest`` names a folder beside it, or the checkpoint is refused before anything is looked at."""
    (tmp_path / "mine" / "a" / "b").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    save(tmp_path / "other", 1)
    (tmp_path / "mine" / "latest").write_bytes(tag.encode(errors="surrogatepass"))
    with pytest.raises(CheckpointError, match=r"latest names|it is not a ZeRO-3 checkpoint"):
        tagged_folder(tmp_path / "mine")


ARRAYS = {"exp_avg": 0.25, "exp_avg_sq": 0.5}
LARGE = OrderedDict(large=torch.Size([3, 100_001])), OrderedDict(one=torch.Size([1]), small=torch.Size([7]))


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_the_arrays_of_a_training_are_read_in_blocks_and_no_more_than_they_must(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element goes to the process that keeps it; all processes together read the checkpoint about twice.

    They share one pass that verifies it. Then each reads its own elements, rounded up to blocks of 65536.
    """
    monkeypatch.setattr(zero_folder, "WINDOW_NUMEL", 1 << 16)
    monkeypatch.setattr(saved_weights, "WINDOW_NUMEL", 1 << 16)
    reads: list[int] = []
    read_at = TensorFile.read_at

    def counting(self: TensorFile, offset: int, content: memoryview) -> None:
        reads.append(content.nbytes)
        read_at(self, offset, content)

    monkeypatch.setattr(TensorFile, "read_at", counting)
    whole = {
        name: torch.arange(shape.numel(), dtype=torch.float32) + 1000 * len(name)
        for shapes in LARGE
        for name, shape in shapes.items()
    }
    folder = save_of_two(tmp_path / "two.ckpt", LARGE, whole, ARRAYS) / "checkpoint"
    ranks = [ZeroFolder(folder, rank=rank, world_size=world_size) for rank in range(world_size)]
    checksums: dict[SavedArray, Sequence[int]] = {}
    for saved in ranks:
        saved.check_states()
        checksums.update(saved.check_arrays(["fp32", *ARRAYS]))
    nbytes = 4 * sum(values.numel() for values in whole.values()) * (1 + len(ARRAYS))
    assert nbytes <= sum(reads) < 1.01 * nbytes
    for saved in ranks:
        saved.begin_reading(checksums)
    for name, values in whole.items():
        for array, offset in {"fp32": 0.0, **ARRAYS}.items():
            numel = -(-len(values) // world_size)
            parts = [np.empty(max(0, min(numel, len(values) - rank * numel)), np.float32) for rank in range(world_size)]
            for rank, (saved, part) in enumerate(zip(ranks, parts, strict=True)):
                for begin in range(0, len(part), 70_000):  # as windows cut it
                    saved.read(name, array, rank * numel + begin, part[begin : begin + 70_000])
            assert torch.equal(torch.from_numpy(np.concatenate(parts)), values + offset), (name, array)
    rounding = 4 * 2 * 65536 * (1 + len(ARRAYS)) * (1 + world_size)
    assert sum(reads) < 2.01 * nbytes + rounding and max(reads) <= 4 * 65536
    for saved in ranks:
        saved.close()


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("optim", {"fp32_flat_groups": [torch.empty(0)]}, "NVMe: masters are not in it"),
        ("optim", {"fp32_flat_groups": [torch.zeros(9)]}, "holds 9 elements of 1 processes where 51 elements"),
        ("optim", {"fp32_flat_groups": [torch.zeros(51, dtype=torch.float16)]}, "float32"),
        ("optim", {"partition_count": 2}, "51 elements of 2 processes"),
        ("optim", {"smart_infinity": {"save_id": "b"}}, "different saves"),
        ("model", {"param_shapes": [{"one": "1"}]}, "says that 'one' has the shape"),
        ("model", {"frozen_param_shapes": {"base": None}}, "says that 'base' has the shape"),
    ],
)
def test_files_that_do_not_belong_together(kind: str, changes: dict[str, object], named: str, tmp_path: Path) -> None:
    """The error says what is wrong, names the parameter, and gives a remedy."""
    save(tmp_path, 1)
    for file in tmp_path.iterdir():
        content = torch.load(file, weights_only=False)
        if file.name.endswith("model_states.pt"):
            content["smart_infinity_save"] = "a"
        if kind in file.name:
            content.get("optimizer_state_dict", content).update(changes)
        torch.save(content, file)
    with pytest.raises(CheckpointError, match=named) as caught:
        read(tmp_path, 0, 1)
    assert caught.value.remedy.endswith(".")


# ---- what goes wrong while a checkpoint folder is read becomes an error that names it


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("damaged"), KeyError("module")])
def test_a_damaged_file(error: Exception, tmp_path: Path) -> None:
    """Any error while reading becomes one error that names the folder and the cause. Our own say more, and pass."""
    with pytest.raises(CheckpointError, match=f"{tmp_path.name}.*{type(error).__name__}"), reading_checkpoint(tmp_path):
        raise error
    with pytest.raises(ConfigError, match="mine"), reading_checkpoint(tmp_path):
        raise ConfigError("mine", "Do.")


def test_values_that_a_hook_computes() -> None:
    """A hook that computes values is refused, since it gets only names; the error names the parameter and the file."""

    def join(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        state["weight"] = torch.cat([state.pop("first"), state.pop("second")])

    module = torch.nn.Linear(2, 2)
    module.register_load_state_dict_pre_hook(join)
    with pytest.raises(CheckpointError, match=r"Linear computes 'weight' of what there holds"):
        saved_names(module, ["first", "second"], {}, Path("there"))
