"""Of checkpoints of transformers, the last complete one is resumed, and ranks agree."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers

from lightning_smartinfinity import CheckpointError, CheckpointNotFoundError
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.common.progress import hidden
from lightning_smartinfinity.integrations import session
from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from lightning_smartinfinity.integrations.transformers.resume import (
    begin_checkpoint,
    begin_state,
    checkpoint_to_resume,
    end_state,
    require_undamaged,
    steps_of_checkpoints,
)
from lightning_smartinfinity.resume.start import SavedStep, choose_start
from lightning_smartinfinity.settings.strategy import StrategySettings
from lightning_smartinfinity.zero3.checkpoints.formats.file_checksums import FILE_CHECKSUMS_NAME, read_file_checksums
from lightning_smartinfinity.zero3.checkpoints.formats.scrub import scrub_checkpoint
from tests.helpers.attacks import Attack
from tests.helpers.damage import flip_bit
from tests.helpers.ranks import on_ranks
from tests.helpers.waiting import await_that, lenient
from tests.huggingface.trained import arguments, dataset, load, train


def checkpoint(folder: Path, state: str | None = "{}", *, engine: bool = True) -> str:
    """Make a folder with what decides whether it can be resumed, and return its path."""
    (folder / "global_step1").mkdir(parents=True) if engine else folder.mkdir(parents=True)
    if state is not None:
        (folder / "trainer_state.json").write_text(state)
    return str(folder)


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_other_ranks_are_watched(
    evaluates: bool, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training, and an evaluation without one, begin the watch with the user's limit before an engine is built."""
    watched: list[float | None] = []
    monkeypatch.setattr(session, "begin_watch", lambda silence, join_limit: watched.append(silence))
    with SmartInfinityTraining(tmp_path / "storage", watchdog_timeout=7) as training:
        trainer = transformers.Trainer(
            model=load(model_folder),
            args=arguments(tmp_path, training.config, max_steps=1),
            train_dataset=dataset(1),
            eval_dataset=dataset(1),
        )
        trainer.evaluate() if evaluates else trainer.train()
    assert watched == [7]


@pytest.mark.parametrize("state", [None, "", '{"global_step": '])
def test_a_checkpoint_without_its_last_file_is_passed_over(state: str | None, tmp_path: Path) -> None:
    """A file of the Trainer's state that is missing or cut off says that the save did not end; damage is an error."""
    kept = checkpoint(tmp_path / "checkpoint-9")
    checkpoint(tmp_path / "checkpoint-10", state)
    with pytest.warns(match=r"Resuming from .*checkpoint-9'.*checkpoint-10 is passed over.*not completed"):
        assert checkpoint_to_resume(True, str(tmp_path), warn=True) == kept
    Path(tmp_path, "checkpoint-10", "trainer_state.json").write_bytes(b'{"global_step": 1\xff}\n')
    with pytest.raises(CheckpointError, match=r"checkpoint-10.*trainer_state.json is damaged .* may be the newest"):
        checkpoint_to_resume(True, str(tmp_path), warn=True)


def test_models_without_optimizer_state_are_not_resumed(tmp_path: Path) -> None:
    """``save_only_model=True`` leaves nothing to go on from."""
    model = checkpoint(tmp_path / "checkpoint-2", engine=False)
    with pytest.raises(CheckpointError, match=r"No checkpoint .* can be resumed: checkpoint-2 .*save_only_model"):
        checkpoint_to_resume(True, str(tmp_path), warn=True)
    with pytest.raises(CheckpointError, match="save_only_model"):
        checkpoint_to_resume(model, str(tmp_path), warn=True)


def test_a_checkpoint_that_does_not_exist(tmp_path: Path) -> None:
    """The error names the folder that was given; without any checkpoint, transformers' own error says so."""
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        checkpoint_to_resume(str(tmp_path / "nowhere"), str(tmp_path), warn=True)
    assert (
        checkpoint_to_resume(True, str(tmp_path / "nothing"), warn=True) is True
        and checkpoint_to_resume(None, str(tmp_path), warn=True) is None
    )


def test_only_checkpoints_lose_their_last_file(tmp_path: Path) -> None:
    """``Trainer.save_state`` writes a file of this name into ``output_dir``, which stays."""
    own, other = checkpoint(tmp_path / "checkpoint-2"), checkpoint(tmp_path / "finetuned")
    begin_checkpoint(own, resumable=True)
    begin_checkpoint(other, resumable=True)
    assert (
        not Path(own, "trainer_state.json").exists()
        and Path(other, "trainer_state.json").exists()
        and Path(own, "optimizer.pt").is_file()
        and not Path(other, "optimizer.pt").exists()
    )


FILES = ["optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json", "training_args.bin"]


@pytest.mark.parametrize("tries", [3, pytest.param(40, marks=pytest.mark.long)])
def test_flipped_bits(
    tries: int, model_folder: Path, tmp_path: Path, attack: Attack, capsys: pytest.CaptureFixture[str]
) -> None:
    """In each file of transformers' that a resume reads, and in their checksums: a resume and a scrub name the file.

    A checkpoint without the checksums, which an earlier version saved, is resumed, and a scrub reports it as unknown.
    """
    train(model_folder, tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    folder = tmp_path / "checkpoint-1"
    checksums = read_file_checksums(folder)
    assert checksums is not None and list(checksums.files) == FILES
    attack("bit flip in a file that transformers stores in a checkpoint", tries=tries * 6, outcome="CheckpointError")
    for number, name in enumerate([*FILES, FILE_CHECKSUMS_NAME] * tries):
        whole, generator = (folder / name).read_bytes(), random.Random(number)
        flip_bit(folder / name, generator)
        while name == FILE_CHECKSUMS_NAME and (folder / name).read_bytes().split() == whole.split():  # other spaces
            flip_bit(folder / name, generator)
        for given in (True, str(folder)):
            with pytest.raises(CheckpointError, match=rf"{name} is damaged"):
                checkpoint_to_resume(given, str(tmp_path), warn=True)
        assert any(f"{name} is damaged" in each for each in scrub_checkpoint(folder, show=hidden).damaged)
        (folder / name).write_bytes(whole)
    assert main(["scrub", str(folder), "--quiet"]) == 0
    (folder / FILE_CHECKSUMS_NAME).unlink()
    assert (
        checkpoint_to_resume(True, str(tmp_path), warn=True) == str(folder)
        and main(["scrub", str(folder), "--quiet"]) == 2
        and FILE_CHECKSUMS_NAME in capsys.readouterr().err
    )


def recording(flush: Callable[[int], None], folder: Path, rank: int) -> Callable[[int], None]:
    """Return an ``os.fsync`` that leaves a file with the rank and the name of each file that was flushed."""

    def flushing(descriptor: int) -> None:
        flush(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        (folder / f"flushed-{rank}-{path.name}").write_text(str(path.stat().st_size))

    return flushing


def late(save: Callable[..., None], rotated: Path) -> Callable[..., None]:
    """Return a ``torch.save`` that lets rank 0 go first if it can."""

    def saving(*args: Any) -> None:
        with suppress(AssertionError):
            await_that(rotated.exists, seconds=lenient(2.0))
        save(*args)

    return saving


def save_on_rank(folder: Path, rank: int) -> Any:
    """Save a checkpoint as one rank of transformers' Trainer; return what was flushed, and what is whole.

    It does without a model: on CPUs accelerate and DeepSpeed train in one process only. Rank 1 is late to save its
    random states: it waits for rank 0 to remove older checkpoints, and gives up after some seconds. What was flushed is
    what rank 0 finds as it does so.
    """
    seen = folder / "seen.json"
    del os.environ["WORLD_SIZE"]  # which SmartInfinityTraining refuses

    def rotate(*_: object, **__: object) -> None:
        found = {file.name: file.read_text() for file in folder.glob("flushed-?-rng_state_?.pth")}
        whole = {file.name: str(file.stat().st_size) for file in (folder / "checkpoint-7").glob("rng_state_*")}
        checksums = read_file_checksums(folder / "checkpoint-7")
        seen.write_text(json.dumps([found, whole, checksums and list(checksums.files)]))

    trainer = mock.MagicMock(hp_search_backend=None)
    trainer.args.save_only_model = trainer.args.push_to_hub = False
    trainer.args.world_size, trainer.args.process_index, trainer.args.should_save = 2, rank, rank == 0
    trainer._get_output_dir.return_value, trainer.state.global_step = str(folder), 7
    trainer.state.best_global_step = None
    with (
        mock.patch.object(transformers.trainer, "rotate_checkpoints", rotate),
        mock.patch.object(os, "fsync", recording(os.fsync, folder, rank)),
        mock.patch.object(torch, "save", late(torch.save, seen) if rank else torch.save),
        SmartInfinityTraining(storage=folder / "storage") as training,
    ):
        trainer.save_model = lambda into, _internal_call: training._save_model(trainer, into, True, lambda: None)
        trainer._save_rng_state = partial(transformers.Trainer._save_rng_state, trainer)
        transformers.Trainer._save_checkpoint(trainer, mock.MagicMock(), None)
    return json.loads(seen.read_text()) if rank == 0 else None


def save_state_on_rank(folder: Path, rank: int) -> list[str]:
    """Save a state as one rank of Accelerate, and return the files with checksums."""
    state = folder / "state"
    state.mkdir(exist_ok=True)
    begin_state(str(state))
    (state / f"random_states_{rank}.pkl").write_bytes(bytes(rank + 9))
    end_state(str(state), rank, rank == 0)
    require_undamaged(str(state))
    checksums = read_file_checksums(state)
    return [] if checksums is None else list(checksums.files)


def start_on_rank(folder: Path, rank: int) -> Any:
    """Return what a rank chooses of checkpoints that differ between the ranks, and what it finds in two folders."""
    settings = StrategySettings(storage=(folder / "storage",))
    with pytest.raises(CheckpointError) as absent:
        choose_start(settings, {"first": SavedStep(9 * rank + 3), "second": SavedStep(4)}, is_removed=False)
    found = steps_of_checkpoints(str(folder / f"cut-{rank}"), warn=False)
    with pytest.raises(CheckpointError) as damaged:
        steps_of_checkpoints(str(folder / f"damaged-{rank}"), warn=False)
    return str(absent.value), found, str(damaged.value)


def on_each_rank(folder: Path) -> Any:
    """Start, and save."""
    dist.init_process_group("gloo")
    found = [do(folder, dist.get_rank()) for do in (start_on_rank, save_on_rank, save_state_on_rank)]
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what two ranks have found as they started, and as they saved."""
    folder = tmp_path_factory.mktemp("ranks")
    checkpoint(folder / "cut-1/checkpoint-2", "{")
    checkpoint(folder / "damaged-1/checkpoint-2", "{]}")
    return on_ranks(on_each_rank, folder)


def test_ranks_start_together(of_ranks: Any) -> None:
    """Of one path the smallest step counts; each rank has the fault of the one that finds it."""
    for (chosen, (steps, fault), damaged), *_ in of_ranks:
        assert (
            "newest, and second cannot be resumed" in chosen
            and steps == {}
            and "checkpoint-2 is passed over" in str(fault)
            and "trainer_state.json is damaged" in damaged
        )


def test_a_state_has_checksums_of_the_files_of_all_ranks(of_ranks: Any) -> None:
    """The rank that writes them waits for the others; when the save ends on a rank, the checksums exist."""
    for *_, with_checksums in of_ranks:
        assert with_checksums == ["random_states_0.pkl", "random_states_1.pkl"]


def test_random_states_of_all_ranks_are_flushed_before_older_checkpoints_are_removed(of_ranks: Any) -> None:
    """Each rank writes a file of its own, which may take longer than all that rank 0 writes."""
    flushed, whole, with_checksums = of_ranks[0][1]
    assert whole.keys() == {"rng_state_0.pth", "rng_state_1.pth"} <= set(with_checksums)
    for rank in (0, 1):  # whose files may lie on other machines
        assert flushed[f"flushed-{rank}-rng_state_{rank}.pth"] == whole[f"rng_state_{rank}.pth"]


def test_a_folder_that_a_mount_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is begun in a folder that another machine has removed a moment ago."""
    mkdir, calls = Path.mkdir, list[Path]()

    def remembering(path: Path, *args: Any, **kwargs: Any) -> None:
        calls.append(path)
        if len(calls) > 1:  # the first call finds the folder
            mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", remembering)
    begin_checkpoint(str(tmp_path / "checkpoint-1"), resumable=True)
    assert [file.name for file in (tmp_path / "checkpoint-1").iterdir()] == ["optimizer.pt"]
