"""A training saves to, and loads from, a disk that does not answer: it ends in time, and a checkpoint is whole."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.errors import StorageTimeoutError
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.zero3.checkpoints.folders.staged_save import restore_interrupted
from lightning_smartinfinity.zero3.checkpoints.formats import tensor_file
from lightning_smartinfinity.zero3.engine import training as engine
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.silent_disk import ERROR, FILE_CALLS, SilentDisk
from tests.helpers.trainers import quiet_trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Trainer that has made one step and can save."""
    trainer = quiet_trainer(tmp_path_factory.mktemp("trained"), max_steps=1)
    trainer.fit(LitTiny(Recipe(precision="bf16-mixed", frozen=True)))
    yield trainer
    trainer.strategy.close()  # type: ignore[attr-defined]


def names_of_whole(checkpoint: Path) -> list[str]:
    """Return the names of a checkpoint's files, of which none is damaged."""
    restore_interrupted(checkpoint, "checkpoint")
    for file in (checkpoint / "checkpoint").glob("*.pt"):
        tensor_file.check_records(file, tensors=True)
    files = (str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file())
    return sorted(file for file in files if not file.startswith(".saving"))


@pytest.mark.parametrize("long", long_but([False], [False, True]), ids=["last calls", "first and last calls"])
def test_a_save_of_a_training_on_a_disk_that_does_not_answer(
    trained: Any, tmp_path: Path, disk: SilentDisk, attack: Attack, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    """Whichever call hangs, the first or the last of its kind, the save ends in time with path and seconds.

    Only if it is done, and what it has replaced is not removed, it raises nothing. A whole checkpoint is there each
    time, and the next save succeeds.
    """
    monkeypatch.setattr(engine, "io_limit", lambda _: io_limit(1.0))
    path = tmp_path / "a.ckpt"
    trained.save_checkpoint(path)
    (path / "checkpoint" / "notes.txt").write_text("mine")
    counts: Counter[str] = Counter()
    with monkeypatch.context() as patch:
        watching = SilentDisk(patch, tmp_path / "stat")

        def counted(key: str, *_: Any) -> bool:
            counts[key] += 1
            return False

        for module, name in FILE_CALLS:
            watching.hang(module, name, when=partial(counted, f"{module.__name__}.{name}"))
        trained.save_checkpoint(path)
        called = Counter(counts)
        trained.save_checkpoint(tmp_path / "first.ckpt")
        watching.answer()
    before, met = names_of_whole(path), []
    assert all(counts[f"{module.__name__}.{name}"] for module, name in FILE_CALLS), " ".join(sorted(counts))
    for module, name in FILE_CALLS:
        last = called[f"{module.__name__}.{name}"]
        for number in sorted({1, last} if long else {last}) if last else ():
            with monkeypatch.context() as patch:
                hanging, calls = SilentDisk(patch, tmp_path / "stat"), itertools.count(1)
                hanging.hang(module, name, when=lambda *_, calls=calls, number=number: next(calls) == number)
                try:
                    trained.save_checkpoint(path)
                    assert (path / ".saving").exists(), f"call {number} of {name} was waited for"
                    met.append("done")
                except StorageTimeoutError as error:
                    assert re.search(rf"'{tmp_path}.*for 1 s", str(error)), f"call {number} of {name}: {error}"
                    met.append("refused")
                assert hanging.hung, f"{name}, call {number}"
                hanging.answer()
            assert names_of_whole(path) == before, f"{name}, call {number}"
    assert met.count("done") < met.count("refused")
    what = "a disk stops answering while a training is saved"
    attack(what, tries=len(met), outcome=f"{ERROR}; a whole checkpoint is there")
    trained.save_checkpoint(path)
    assert not (path / ".saving").exists()
    assert (path / "checkpoint" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("entry", ["fit", "validate"])
def test_a_load_of_a_checkpoint_waits_for_no_disk_without_a_limit(
    trained: Any, tmp_path: Path, disk: SilentDisk, entry: str
) -> None:
    """Each call on a file of the checkpoint that a Trainer loads would be given up, except one of DeepSpeed's.

    It asks whether a file exists that was opened just before.
    """
    path = tmp_path / "a.ckpt"
    trained.save_checkpoint(path)
    elsewhere = trained.default_root_dir
    trainer = quiet_trainer(Path(elsewhere, entry), max_steps=2)
    for module, name in FILE_CALLS:
        disk.hang(module, name, when=lambda *_: False)
    module, options = LitTiny(Recipe(precision="bf16-mixed", frozen=True)), {"ckpt_path": path}
    if entry == "fit":
        trainer.fit(module, **options)
    else:
        trainer.validate(module, module.recipe.validation_loader(), **options)
    disk.unguarded = [call for call in disk.unguarded if "assert os.path.exists(load_path)" not in call]
    disk.answer()
    trainer.strategy.close()  # type: ignore[attr-defined]
