"""State in host memory, which is written to storage at an interval: its readers meanwhile, and how a training ends."""

from __future__ import annotations

import math
import shutil
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from lightning_smartinfinity.cli.main import main
from lightning_smartinfinity.errors import CheckpointError, StorageError, StorageFullError, StorageTimeoutError
from lightning_smartinfinity.pipeline.layout.free_memory import MemoryLimit
from lightning_smartinfinity.settings import transfer
from lightning_smartinfinity.storage import find_resumable
from lightning_smartinfinity.storage.io.files import LimitedCalls
from lightning_smartinfinity.storage.records.training_record import TrainingRecord
from lightning_smartinfinity.storage.state.capacities import Capacities
from lightning_smartinfinity.storage.state.parts import point_of
from lightning_smartinfinity.storage.state.state_store import StateStore
from lightning_smartinfinity.zero3.optimizer.persistence import Persistence
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.setup import state_in_memory
from lightning_smartinfinity.zero3.setup.reopening import newest_common
from tests.export.models import LitModel, exported, files_of
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.ranks import on_ranks
from tests.helpers.streamed_state import WRITTEN_BACK
from tests.helpers.trainers import fit, quiet_trainer
from tests.training.actions import does, read_state

Read = list[object]


def readings(root: Path, *, overlap: str, transfer: dict[str, Any]) -> Read:
    """Train three steps; return all that can be read after the second one, and copy the folder of the storage then."""
    found: Read = []

    def read(trainer: Any, module: pl.LightningModule) -> None:
        if trainer.global_step != 2:
            return
        shutil.copytree(root / "storage", root / "left")
        found.append(read_state(trainer, module))
        assert bool(trainer.strategy.host_bytes.get("dram_cache")) == bool(transfer)
        trainer.strategy.save_pretrained(root / "live")
        trainer.save_checkpoint(root / "saved.ckpt")

    module = LitModel()
    evaluated = does(on_validation_end=lambda trainer, module: found.append(read_state(trainer, module)))
    fit(
        module,
        root,
        overlap=overlap,
        transfer=transfer,
        callbacks=[does(on_train_batch_end=read), evaluated],
        val_check_interval=2,
    ).strategy.close()  # type: ignore[attr-defined]
    return [*found, files_of(root / "live"), files_of(exported(root / "saved.ckpt", root / "exported"))]


@pytest.mark.parametrize(("overlap", "every", "step"), [("forward", 100, None), ("none", 1, 1)])
def test_readers_see_the_state_in_memory(
    overlap: str, every: int, step: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parameters, validations, exports and checkpoints have the newest state; commands read the state on storage."""
    plain = readings(tmp_path / "plain", overlap=overlap, transfer={})
    held = readings(tmp_path / "held", overlap=overlap, transfer={**WRITTEN_BACK, "persist_every": every})
    assert held == plain and len(plain) == 5
    main(["jobs", str(tmp_path / "held/left"), "--verify"])
    told = capsys.readouterr().out
    assert "whole" in told and (f"resumable, step {step}" in told) == ("resumable" in told) == (step is not None)
    assert main(["scrub", str(tmp_path / "held/left")]) == 0


@pytest.mark.parametrize(
    ("how", "transfer", "step", "told"),
    [
        (RuntimeError, {}, 4, ""),
        (KeyboardInterrupt, {"dram_cache_bytes": 100_000}, 4, ""),
        (RuntimeError, {"persist_every": 3, "flush_timeout": 1e-9}, 3, "the training resumes after step 3"),
        (RuntimeError, {"flush_timeout": 1e-9}, None, "cannot be resumed from storage"),
    ],
)
def test_how_an_interrupted_training_ends(
    how: type[BaseException], transfer: dict[str, Any], step: int | None, told: str, tmp_path: Path
) -> None:
    """State in memory is written if that takes at most ``flush_timeout``; else a warning says what is lost."""

    def end(trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_step == 4:
            raise how("by a test")

    trainer = quiet_trainer(
        tmp_path,
        max_steps=6,
        overlap="forward",
        transfer={**WRITTEN_BACK, **transfer},
        callbacks=[does(on_train_batch_start=end)],
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises((RuntimeError, SystemExit)):
            trainer.fit(LitTiny(Recipe(width=128)))
        trainer.strategy.close()  # type: ignore[attr-defined]
    found = list(tmp_path.glob("storage/*/rank-*"))
    if found:
        _, records = find_resumable([tmp_path / "storage"], job="default", rank=0)
        found = [record.step for record in records[:1]]
    assert found == ([] if step is None else [step])
    written = [str(each.message) for each in warned if "could not be written to storage" in str(each.message)]
    assert [told] * len(written) == [told for each in written if told in each] and bool(written) == bool(told)


def test_a_write_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The training goes on, and a warning names what a kill would lose; the next write makes up for it.

    A failed write leaves no record, also if it was the first one.
    """
    caplog.set_level("INFO")
    persist, num_calls, steps, left = StateStore.persist, 0, list[int | None](), list[int]()
    recorded = []

    def fails(store: StateStore, placement: Any, **limit: float) -> None:
        nonlocal num_calls
        num_calls += 1
        persist(store, placement, **limit)
        if num_calls in (1, 3, 4):
            raise StorageFullError("The disk is full.", "Free space.")

    def look(trainer: Any, module: Any) -> None:
        handler = trainer.strategy.optimizers[0].rank_state.handler
        steps.append(handler.stored_step)
        shutil.copytree(tmp_path / "storage", tmp_path / f"left{trainer.global_step}")
        _, records = find_resumable([tmp_path / f"left{trainer.global_step}"], job="default", rank=0)
        left.append(len(records))

    with mock.patch.object(StateStore, "persist", fails), pytest.warns(UserWarning, match="The disk is full") as warned:
        fit(
            LitTiny(Recipe()),
            tmp_path,
            max_steps=7,
            overlap="none",
            transfer={**WRITTEN_BACK, "persist_every": 1},
            callbacks=[
                does(
                    on_train_batch_end=look,
                    on_train_batch_start=lambda trainer, _: recorded.append(is_recorded(trainer)),
                )
            ],
        ).strategy.close()  # type: ignore[attr-defined]
    told = [str(each.message) for each in warned if "could not be written to storage" in str(each.message)]
    assert [each.partition("A kill would lose ")[2] for each in told] == [
        "all of the training.",
        "all steps after step 2.",
    ]
    assert all(recorded), "a failed write gives the generation its number back"
    assert "its share of what is free, except for a quarter" in caplog.text
    assert (steps, left) == ([None, None, 2, 2, 2, 5, 6], [0, 0, 1, 1, 1, 2, 2])


def test_ranks_that_end_at_different_steps() -> None:
    """Ranks that end on their own may write different steps as one generation: they resume from the one before."""
    before, one, other = (
        TrainingRecord(number=number, generation=4, step=step, run=b"", content=b"")
        for number, step in ((1, 2), (2, 4), (2, 5))
    )
    settings = OffloadSettings(storage=(Path("folder"),))
    with pytest.raises(CheckpointError, match="no training record in common"):
        newest_common([{point_of(one)}, {point_of(other)}], settings)
    assert (
        newest_common([{*map(point_of, records)} for records in ((before, one), (before, other))], settings).step == 2
    )


def steps_stored(root: Path) -> list[int | None]:
    """Train on two ranks, of which the last has no memory for state; return the steps that were written last."""
    measure, stored = state_in_memory.measure_memory, list[int | None]()

    def measured(**settings: Any) -> Any:
        memory = measure(**settings)
        full = {"machine": MemoryLimit(1 << 34, 1 << 30)}
        return replace(memory, machine="full", limits=full) if dist.get_rank() else memory

    def look(trainer: Any, module: Any) -> None:
        handler = trainer.strategy.optimizers[0].rank_state.handler
        assert bool(handler.num_resident) == (dist.get_rank() == 0)
        stored.append(handler.stored_step)

    with mock.patch.object(state_in_memory, "measure_memory", measured):
        fit(
            LitTiny(Recipe()),
            root,
            devices=2,
            max_steps=6,
            overlap="forward",
            transfer={**WRITTEN_BACK, "persist_every": 2},
            callbacks=[does(on_train_batch_start=look)],
        )
    return stored


def test_ranks_of_which_one_has_no_memory(tmp_path: Path) -> None:
    """All ranks write after the same steps."""
    assert on_ranks(steps_stored, tmp_path) == [[None, None, None, 2, 2, 4]] * 2


def is_recorded(trainer: Any) -> bool:
    return bool(trainer.strategy.optimizers[0].rank_state.handler.is_recorded)


def test_records_that_end(tmp_path: Path) -> None:
    """When no record can be made any more, the generation on storage keeps its own, and an error leaves both."""

    class Held(pl.Callback):
        held: object = 0

        def state_dict(self) -> dict[str, Any]:
            return {"held": self.held}

        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
            self.held = threading.Lock() if trainer.global_step >= 4 else 0
            if trainer.global_step == 7:
                raise RuntimeError("by a test")

    trainer = quiet_trainer(
        tmp_path,
        max_steps=9,
        overlap="none",
        transfer={**WRITTEN_BACK, "persist_every": 2},
        callbacks=[Held()],
        num_sanity_val_steps=0,
    )
    with (
        pytest.warns(UserWarning, match="a training record cannot hold") as warned,
        pytest.raises(RuntimeError, match="by a test"),
    ):
        trainer.fit(LitTiny(Recipe()))
    told = [str(each.message) for each in warned]
    assert any("the training resumes after step 4: no more training records were made" in each for each in told)
    trainer.strategy.close()  # type: ignore[attr-defined]
    _, records = find_resumable([tmp_path / "storage"], job="default", rank=0)
    assert [record.step for record in records] == [4, 2]


@pytest.mark.parametrize(("interval", "steps"), [(2, [1, 3, 22, 24]), (30.0, [2, 5, 24, 27])])
def test_a_slow_disk_makes_the_interval_longer(
    interval: int | float, steps: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing takes at most its share of the time, also if the interval is in steps; a fast write ends the pause."""
    monkeypatch.setattr(transfer, "INTERVAL_SHARE", 20)
    now, written, seconds = 0.0, list[int](), [0.0, 10.0, 0.0, 0.0]

    def persist(**_: Any) -> None:
        nonlocal now
        now += seconds[len(written)]
        written.append(step)

    handler = mock.Mock(writes_back=True, is_pinned=False, is_stored=False, persist=persist)
    rank_state = mock.Mock(handler=handler, writes_back=False)
    with (
        mock.patch.object(dist, "get_rank", return_value=0),
        mock.patch.object(dist, "get_world_size", return_value=1),
    ):
        persistence = Persistence(rank_state, interval=interval, group=None, clock=lambda: now)
        for step in range(40):  # noqa: B007
            now += 10.0
            persistence.agree(persistence.vote())
            if len(written) < len(seconds):
                persistence.write()
    assert written == steps
    assert (
        caplog.text.count("State in host memory took 10.0 s to be written to storage, so this is done every 190") == 1
    )


def test_a_flush_has_a_limit(tmp_path: Path) -> None:
    """A file that is not flushed by the deadline is given up, though its disk would answer some time."""
    calls = LimitedCalls([], seconds=60.0)
    assert calls.within(math.inf) is calls
    with pytest.raises(StorageTimeoutError, match=r"Flushing .* did not return within 0.2 s"):
        calls.within(0.2)("Flushing", tmp_path / "state.bin", time.sleep, 2)


def test_storage_without_room_for_a_third_place(tmp_path: Path) -> None:
    """Then all state is written in every step, and a warning says so; another failure of the disk ends the set-up."""
    stored = []

    def look(trainer: Any, module: Any) -> None:
        handler = trainer.strategy.optimizers[0].rank_state.handler
        stored.append((handler.num_resident > 0, handler.writes_back, handler.training.step))

    def fit_with(error: Exception) -> None:
        with mock.patch.object(Capacities, "make_room", side_effect=error):
            fit(
                LitTiny(Recipe()),
                tmp_path,
                overlap="none",
                transfer=WRITTEN_BACK,
                callbacks=[does(on_train_batch_start=look)],
            ).strategy.close()  # type: ignore[attr-defined]

    with pytest.warns(UserWarning, match="works as 'step'.* no room for a third place of state. The disk is full"):
        fit_with(StorageFullError("The disk is full.", "Free space."))
    assert stored == [(True, False, step) for step in range(3)]
    with pytest.raises(StorageError, match="The disk is broken"):
        fit_with(StorageError("The disk is broken.", "Mend it."))


def test_no_state_in_memory(tmp_path: Path) -> None:
    """Then all state is written in every step, and a warning says so."""
    with pytest.warns(UserWarning, match="works as 'step'.*: no state is in host memory"):
        fit(LitTiny(Recipe()), tmp_path, transfer={"durability": "interval"})
