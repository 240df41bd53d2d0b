"""What was saved is on the device when the call returns; a power loss before that leaves what was there, or the new."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint
from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from lightning_smartinfinity.storage import find_resumable
from lightning_smartinfinity.storage.folders.rank_folder import rank_folder_path, read_rank_folder
from lightning_smartinfinity.storage.folders.replacement import flush_tree
from lightning_smartinfinity.storage.records.residual_file import read_residual
from lightning_smartinfinity.storage.records.training_record import residual_of
from lightning_smartinfinity.zero3.checkpoints.formats.universal_conversion import convert_checkpoint
from tests.helpers.assertions import differing
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.power_loss import Disk, RecordedDisk, content, observed
from tests.helpers.trainers import fit
from tests.huggingface.trained import arguments, dataset, load
from tests.pipeline.harness import Case, Run, assert_equal, running, stored
from tests.storage.makers import commit_generation, create, residual_memory
from tests.training.actions import does

MANY = pytest.param(50, marks=pytest.mark.long)
Save = Callable[[Path], None]


def train(root: Path, act: Callable[[int, Save], None], steps: int) -> None:
    """Fit a tiny model, and call a function with the number of each step and the Trainer's save."""

    def act_now(trainer: pl.Trainer, module: Any) -> None:
        act(trainer.global_step, trainer.save_checkpoint)

    fit(LitTiny(Recipe(max_steps=steps)), root, max_steps=steps, callbacks=[does(on_train_batch_end=act_now)])


def found_after_power_loss(disk: Disk, path: Path) -> dict[str, bytes]:
    with disk.after_power_loss() as folder:
        return content(folder / path.relative_to(disk.folder))


@pytest.mark.parametrize("saves", [4, MANY])
def test_saved_checkpoints(disk: Disk, saves: int, tmp_path: Path, attack: Attack) -> None:
    """Each save is found byte for byte, in a new folder below new folders, and in the place of an older save."""
    lost = []

    def save(step: int, write: Save) -> None:
        path = disk.folder / "runs" / "new" / f"{step // 2}.ckpt"
        write(path)
        assert content(path)
        if found_after_power_loss(disk, path) != content(path):
            lost.append(step)

    attack("power loss after a checkpoint was saved", tries=saves, outcome="the checkpoint is whole")
    train(tmp_path / "run", save, saves)
    assert not lost


@pytest.mark.parametrize("seed", long_but([0], range(3)))
def test_a_power_loss_within_a_save(seed: int, tmp_path: Path, attack: Attack) -> None:
    """Before and after every flush and rename, the old save is found whole, or the new one."""
    disk = RecordedDisk(tmp_path, seed=seed)
    path, found, known = disk.folder / "last.ckpt", [], []

    def save(step: int, write: Save) -> None:
        if step == 1:
            write(path)
            known.append(content(path))
            return
        with observed(lambda: found.append(found_after_power_loss(disk, path))):
            write(path)
        known.append(content(path))

    train(tmp_path / "run", save, steps=2)
    disk.close()
    attack("power loss within a save over a checkpoint", tries=len(found), outcome="the old or the new one is whole")
    old, new = known
    assert found[0] == old and found[-1] == new and old != new
    assert [each for each in found if each not in (old, new)] == []


@pytest.mark.parametrize("own", long_but([False], [False, True]))
def test_saves_of_transformers(own: bool, disk: Disk, model_folder: Path, tmp_path: Path, attack: Attack) -> None:
    """A Trainer's checkpoint is whole before older ones are removed for it, also if the Trainer writes the model."""
    found = []
    with SmartInfinityTraining(storage=tmp_path / "storage") as training:
        import transformers

        class Look(transformers.TrainerCallback):
            def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
                path = Path(args.output_dir, f"checkpoint-{state.global_step}")
                found.append(found_after_power_loss(disk, path) == content(path))

        class Own(transformers.Trainer):
            def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
                Path(str(output_dir)).mkdir(parents=True)
                Path(str(output_dir), "model.bin").write_bytes(b"of its own")

        settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "save_total_limit": 1}
        args = arguments(disk.folder / "out", training.config, **settings)
        trainer = Own if own else transformers.Trainer
        trainer(load(model_folder), args, train_dataset=dataset(), callbacks=[Look()]).train()
    attack("power loss after transformers' Trainer saved", tries=len(found), outcome="the checkpoint is whole")
    assert found == [True, True, True]


def test_exports_and_universal_folders(disk: Disk, tmp_path: Path, attack: Attack) -> None:
    """What a command has written is found byte for byte."""
    checkpoint = tmp_path / "saved.ckpt"
    train(tmp_path / "run", lambda step, write: write(checkpoint), steps=1)
    below = disk.folder / "new"
    export_checkpoint(checkpoint, below / "weights", ExportSettings())
    convert_checkpoint(checkpoint, below / "universal")
    export_checkpoint(checkpoint, below / "weights.ckpt", ExportSettings(to="lightning"))
    attack("power loss after an export or a conversion", tries=3, outcome="it is whole")
    assert len(content(below)) > 5
    assert found_after_power_loss(disk, below) == content(below)


CASES = {
    "two folders": Case(num_devices=2, durability="power", keep=True),
    "int8, some in memory": Case(state_format="int8", durability="power", cache_bytes=200_000, keep=True),
    "at intervals": Case(num_devices=2, durability="interval", cache_bytes=200_000, keep=True),
}


@pytest.mark.parametrize("steps", [5, MANY])
@pytest.mark.parametrize("name", CASES)
def test_committed_states(disk: Disk, name: str, steps: int, attack: Attack) -> None:
    """The state of the first step and of every later one that was written whole is found until the next one is."""
    case, folder = CASES[name], disk.folder / "below" / "new"
    attack(f"power loss after a step, durability={case.durability!r}", tries=steps, outcome="a step's state is whole")
    with running(folder, case) as run:
        if case.durability == "power":
            assert_found(disk, folder, case, stored(run))
        for number in range(steps):
            run.step(number)
            if case.durability == "power" or number % 3 == 0:
                persist(run)
                expected = stored(run)
            assert_found(disk, folder, case, expected)


@pytest.mark.parametrize("seed", long_but([0], range(10)))
def test_a_power_loss_while_state_in_memory_is_written(seed: int, tmp_path: Path, attack: Attack) -> None:
    """Before and after every flush, the generation written before is found whole, or the new one.

    Without a chance that anything was written before it was flushed, the new one is found after the last flush only.
    Before the first training record there is a commit record.
    """
    disk, case, found = RecordedDisk(tmp_path, seed=seed), CASES["at intervals"], list[dict[str, torch.Tensor]]()
    folder = disk.folder / "new"
    with running(folder, case) as run:
        with disk.after_power_loss() as left:
            assert seed or any(next(left.rglob("commit.bin")).read_bytes())
        known = []
        for number in range(2):
            run.step(number)
            with observed(lambda: found.append(found_state(disk, folder, case))) if known else nullcontext():
                persist(run)
            known.append(stored(run))
    disk.close()
    attack("power loss while state in memory is written", tries=len(found), outcome="the old or the new one is whole")
    which = [next(n for n, state in enumerate(known) if not differing(each, state)) for each in found]
    assert which[-1] == 1 and (seed or which == [0] * 5 + [1])


@pytest.mark.parametrize("steps", [3, MANY])
def test_recorded_residuals(disk: Disk, steps: int, attack: Attack) -> None:
    """With durability="power" a training record is found with its residual before the next generation is written.

    While the residual is on its way, it is the record or the one before.
    """
    folder, residuals = disk.folder / "below" / "new", []
    attack(
        'power loss while a residual is written, durability="power"', tries=2 * steps, outcome="it or the one before"
    )
    store = create([folder], world_size=1, durability="power")
    commit_generation(store, 0)
    for generation in range(steps):
        residuals.append(residual_memory(generation))
        store.record_training(
            generation=generation, step=generation, content=b"", has_steps=True, residual=residuals[-1]
        )
        assert recorded_after_power_loss(disk, folder, residuals) in (generation - 1, generation)
        store.records.finish_residual()
        assert recorded_after_power_loss(disk, folder, residuals) == generation
        commit_generation(store, generation + 1)
    store.close(remove=True)


def recorded_after_power_loss(disk: Disk, folder: Path, residuals: list[NDArray[np.float32]]) -> int:
    """Return the step of the newest training record, whose residual is as it was; -1 without a record."""
    with disk.after_power_loss() as root:
        storage = root / folder.relative_to(disk.folder)
        manifest, records = find_resumable([storage], job="default", rank=0)
        if not records:
            return -1
        residual = residual_of(records[0], manifest.identity)
        assert residual is not None
        found = np.empty(residual.numel, np.float32)
        with read_rank_folder(rank_folder_path(storage, job="default", rank=0)) as opened:
            read_residual(opened, residual, found)
        assert found.tobytes() == residuals[records[0].step].tobytes()
        return records[0].step


def persist(run: Run) -> None:
    """Write what is in memory only; nothing is with durability="power"."""
    if run.handler.writes_back:
        run.handler.persist()


def found_state(disk: Disk, folder: Path, case: Case) -> dict[str, torch.Tensor]:
    with (
        disk.after_power_loss() as found,
        running(found / folder.relative_to(disk.folder), case, recover=True) as run,
    ):
        return stored(run)


def assert_found(disk: Disk, folder: Path, case: Case, expected: dict[str, torch.Tensor]) -> None:
    assert_equal(found_state(disk, folder, case), expected)


def test_the_disks_lose_what_is_not_flushed(disk: Disk) -> None:
    """These tests can fail: a file without a flush is lost, and so is one whose folder was not flushed."""
    kept, lost = disk.folder / "kept", disk.folder / "lost"
    kept.mkdir()
    (kept / "file").write_bytes(b"kept")
    flush_tree(kept)
    flush_tree(disk.folder)
    lost.mkdir()
    (lost / "file").write_bytes(b"lost")
    with disk.after_power_loss() as folder:
        assert content(folder) == {"kept/file": b"kept"}
