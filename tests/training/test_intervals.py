"""State in host memory, which is written to storage at an interval: its readers meanwhile, and how a training ends."""

from __future__ import annotations

import math
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

from lightning_smartinfinity import TransferConfig
from lightning_smartinfinity.cli.main import main
from lightning_smartinfinity.common import interrupts
from lightning_smartinfinity.errors import CheckpointError, StorageError, StorageFullError, StorageTimeoutError
from lightning_smartinfinity.settings import transfer
from lightning_smartinfinity.storage import find_resumable
from lightning_smartinfinity.storage.io.files import LimitedCalls
from lightning_smartinfinity.storage.state import state_store
from lightning_smartinfinity.storage.state.capacities import Capacities
from lightning_smartinfinity.storage.state.state_store import StateStore
from lightning_smartinfinity.zero3.optimizer import persistence
from lightning_smartinfinity.zero3.optimizer.persistence import Persistence, begin_write_back
from tests.export.models import LitModel, exported, files_of
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.native_testing import Hold
from tests.helpers.streamed_state import WRITTEN_BACK
from tests.helpers.trainers import fit, quiet_trainer
from tests.helpers.waiting import lenient
from tests.training.actions import does, fail_at, read_state
from tests.training.asynchronous_worker import save_beside

Read = list[object]

SOME = {"dram_cache_bytes": 100_000, "tasklet_bytes": 65_536}
"""Settings of transfers with which one tasklet's state is in memory, and others are on storage."""


def readings(root: Path, *, overlap: str, transfer: dict[str, Any]) -> Read:
    """Train three steps; return all that can be read after the second one, and copy the folder of the storage then.

    A checkpoint of the first state is saved beside the training.
    """
    found: Read = []

    def save_first(trainer: Any, module: pl.LightningModule) -> None:
        if trainer.global_step == 0:
            save_beside(trainer, root / "first.ckpt")

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
        callbacks=[does(on_train_batch_start=save_first, on_train_batch_end=read), evaluated],
        val_check_interval=2,
    ).strategy.close()  # type: ignore[attr-defined]
    saved = [files_of(exported(root / f"{name}.ckpt", root / name)) for name in ("first", "saved")]
    return [*found, files_of(root / "live"), *saved]


@pytest.mark.parametrize(("overlap", "every", "step"), [("forward", 100, None), ("none", 1, 1)])
def test_readers_see_the_state_in_memory(
    overlap: str, every: int, step: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parameters, validations, exports and checkpoints have the newest state; commands read the state on storage."""
    plain = readings(tmp_path / "plain", overlap=overlap, transfer={})
    held = readings(tmp_path / "held", overlap=overlap, transfer={**WRITTEN_BACK, "persist_every": every})
    assert held == plain and len(plain) == 6
    main(["jobs", str(tmp_path / "held/left"), "--verify"])
    told = capsys.readouterr().out
    assert "whole" in told and (f"resumable, step {step}" in told) == ("resumable" in told) == (step is not None)
    assert main(["scrub", str(tmp_path / "held/left")]) == 0
    if step is None:
        (tmp_path / "held/left").rename(tmp_path / "storage")
        with pytest.raises(CheckpointError, match=r"or, .* before state in host memory was first written"):
            quiet_trainer(tmp_path, overlap=overlap, transfer=WRITTEN_BACK).fit(LitModel(), ckpt_path="storage")


@pytest.mark.parametrize(
    ("how", "transfer", "step", "told"),
    [
        (RuntimeError, {}, 4, ""),
        (KeyboardInterrupt, SOME, 4, ""),
        (RuntimeError, {"persist_every": 3, "flush_timeout": 1e-9}, 3, "the training resumes after step 3"),
        (RuntimeError, {"flush_timeout": 1e-9}, None, "cannot be resumed from storage"),
        (None, {"keep": True}, 6, ""),
    ],
)
def test_how_a_training_ends(
    how: type[BaseException] | None, transfer: dict[str, Any], step: int | None, told: str, tmp_path: Path
) -> None:
    """State in memory is written if that takes at most ``flush_timeout``; else a warning says what is lost.

    With ``keep=True`` it is written as soon as a fit is complete.
    """

    def end(trainer: pl.Trainer, module: Any) -> None:
        if how is not None and trainer.global_step == 4:
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
        with pytest.raises((RuntimeError, SystemExit)) if how else nullcontext():
            trainer.fit(LitTiny(Recipe(width=128)))
        left = shutil.copytree(tmp_path / "storage", tmp_path / "left")
        trainer.strategy.close()  # type: ignore[attr-defined]
    _, records = find_resumable([left], job="default", rank=0)
    assert [record.step for record in records[:1]] == ([] if step is None else [step])
    assert bool(list(tmp_path.glob("storage/*/rank-*"))) == bool(records)
    written = [str(each.message) for each in warned if "could not be written to storage" in str(each.message)]
    assert [told] * len(written) == [told for each in written if told in each] and bool(written) == bool(told)


def test_a_write_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The training goes on, and a warning names what a kill would lose; the next write makes up for it.

    A failed write leaves no record, also if it was the first one.
    """
    caplog.set_level("INFO")
    write, num_calls, steps, left = StateStore._write_record, 0, list[int | None](), list[int]()
    recorded, full = [], StorageFullError("The disk is full.", "Free space.")
    errors = {1: full, 3: StorageError("The file system is read-only.", "Mount it to be written."), 4: full}

    def fails(store: StateStore, record: Any, *, flush: bool) -> int:
        nonlocal num_calls
        num_calls += store.writes_back
        written = write(store, record, flush=flush)
        if store.writes_back and num_calls in errors:
            raise errors[num_calls]
        return written

    def look(trainer: Any, module: Any) -> None:
        handler = trainer.strategy.optimizers[0].rank_state.handler
        steps.append(handler.stored_step)
        shutil.copytree(tmp_path / "storage", tmp_path / f"left{trainer.global_step}")
        _, records = find_resumable([tmp_path / f"left{trainer.global_step}"], job="default", rank=0)
        left.append(len(records))

    with (
        mock.patch.object(StateStore, "_write_record", fails),
        pytest.warns(UserWarning, match="The disk is full") as warned,
    ):
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
    assert [each.partition("to storage: ")[2] for each in told] == [
        "The disk is full. Free space. The training goes on. A kill would lose all of the training.",
        "The file system is read-only. Mount it to be written. The training goes on. A kill would lose all steps after "
        "step 2.",
    ]
    assert all(recorded), "a failed write gives the generation its number back"
    assert "its share of what is free, except for a quarter" in caplog.text
    assert (steps, left) == ([None, None, 2, 2, 2, 5, 6], [0, 0, 1, 1, 1, 2, 2])


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


@pytest.mark.parametrize(
    ("interval", "steps"),
    [(2, [1, 3, 22, 24]), (30.0, [2, 5, 24, 27]), (0.1, [0, 1, 20, 21])],  # the last: every step
)
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

    handler = mock.Mock(is_stored=False, persist=persist)
    with seen_by_rank(0, of=1):
        alone = Persistence(mock.Mock(handler=handler), interval=interval, group=None, clock=lambda: now)
    for step in range(40):
        now += 10.0
        handler.num_steps = step + 1
        if len(written) < len(seconds):
            with seen_by_rank(0, of=1):
                alone.write()
    assert written == steps
    assert (
        caplog.text.count("State in host memory took 10 s to be written to storage, so this is done every 190 s") == 1
    )


@pytest.mark.parametrize("ends", ["by its release", "by itself", "by another"])
def test_ctrl_c_is_held_back_for_a_moment(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if nothing follows the step that held it; a signal that was dropped does not come later."""
    monkeypatch.setattr(interrupts, "_LONGEST", 0.05)
    before, held = signal.signal(signal.SIGINT, signal.default_int_handler), interrupts.HeldSignals()
    end: Callable[[], object] = {
        "by its release": held.release,
        "by itself": lambda: time.sleep(60),
        "by another": lambda: signal.raise_signal(signal.SIGINT),
    }[ends]
    try:
        for _ in range(2):
            held.hold()
            signal.raise_signal(signal.SIGINT)
            held.drop()
        held.hold()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            end()
        time.sleep(0.1)
        held.release()
    finally:
        held.drop()
        signal.signal(signal.SIGINT, before)


def test_a_flush_has_a_limit(tmp_path: Path) -> None:
    """A file that is not flushed by the deadline is given up, though its disk would answer some time."""
    calls = LimitedCalls([], seconds=60.0)
    assert calls.within(math.inf) is calls
    with pytest.raises(StorageTimeoutError, match=r"Flushing .* did not return within 0.2 s"):
        calls.within(0.2)("Flushing", tmp_path / "state.bin", time.sleep, 2)


@pytest.mark.parametrize(("where", "name"), [(Capacities, "make_room"), (state_store, "flush_records")])
def test_storage_without_room_for_a_third_place(where: Any, name: str, tmp_path: Path) -> None:
    """Then all state is written in every step, and a warning says so; another failure of the disk ends the set-up."""
    stored = []

    def look(trainer: Any, module: Any) -> None:
        handler = trainer.strategy.optimizers[0].rank_state.handler
        stored.append((handler.num_resident > 0, handler.writes_back, handler.training.step))

    def fit_with(error: Exception) -> None:
        with mock.patch.object(where, name, side_effect=error):
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


def test_no_state_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    """All state is written in every step then, and the log says so; also if this is so on another rank."""
    caplog.set_level("INFO")
    for num_resident, others, where in ((0, 0, ""), (5, 1, " of some rank")):
        handler = mock.Mock(num_resident=num_resident)
        with (
            seen_by_rank(0, of=1 + others),
            mock.patch.object(persistence, "sum_over_ranks", return_value=others or 1),
        ):
            begin_write_back(handler, TransferConfig(durability="interval"), None)
        assert f"which writes all optimizer state in every step: no state is in host memory{where}." in caplog.text
        handler.write_back.assert_not_called()


def test_another_rank_has_no_room() -> None:
    """Then no rank writes back, and rank 0 says so."""
    handler = mock.Mock(num_resident=5)
    agreed = {"sum_over_ranks": lambda own, _: own, "gather": lambda own, _: [own, "It is full."]}
    with (
        seen_by_rank(0, of=2),
        mock.patch.multiple(persistence, **agreed, raising_together=lambda _: nullcontext()),
        pytest.warns(UserWarning, match="works as 'step'.* no room for a third place of state. It is full"),
    ):
        begin_write_back(handler, TransferConfig(durability="interval"), None)
    assert [call[0] for call in handler.method_calls] == ["write_back", "write_through"]


def test_rank_zero_decides() -> None:
    """Other ranks write when it says so, whatever their clocks say, and only if all can."""
    for rank in range(2):
        handler = mock.Mock(is_stored=False)
        with seen_by_rank(rank, of=2), mock.patch.object(persistence, "sum_over_ranks", lambda own, _: own):
            decides = Persistence(mock.Mock(handler=handler), interval=3, group=None)
            heard = []
            for step in range(8):
                handler.num_steps = step
                heard.append(decides.announce())
                decides.hear(announced=step in (3, 4, 6))
                handler.may_persist = step != 3
                handler.num_steps = step + 1
                decides.write()
                assert handler.persist.call_count == sum(step >= written for written in (4, 6)), step
            decides._rank_state = mock.Mock(is_usable=False, handler=None)
            assert not decides.announce()  # it has lost its state: its next step raises that, on all ranks
        assert heard == ([step in (2, 3, 4) for step in range(8)] if rank == 0 else [False] * 8)


def seen_by_rank(rank: int, *, of: int) -> Any:
    """Return a context in which this process is a rank of several."""
    return mock.patch.multiple(dist, get_world_size=lambda group: of, get_rank=lambda group: rank)


@pytest.mark.parametrize("how", ["step", "change"])
def test_a_change_that_fails_half_way(how: str, tmp_path: Path) -> None:
    """Once state in memory has changed, nothing can be read or saved; the error names what stays on storage."""

    def change(trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_step == 3:
            with mock.patch.object(StateStore, "commit", side_effect=StorageError("The disk is broken.", "Mend it.")):
                first = next(module.parameters())
                safe_set_full_fp32_param(first, safe_get_full_fp32_param(first))

    module, path = LitTiny(Recipe(width=128)), tmp_path / "saved.ckpt"
    trainer = quiet_trainer(
        tmp_path,
        max_steps=5,
        overlap="none",
        transfer={**WRITTEN_BACK, **SOME, "persist_every": 2},
        callbacks=[fail_at(3, fail_write_at=0) if how == "step" else does(on_train_batch_start=change)],
    )
    with pytest.warns(UserWarning, match="the training resumes after step 2: "), pytest.raises(StorageError):
        trainer.fit(module)
    reads: list[Callable[[], object]] = [
        lambda: read_state(trainer, module),
        lambda: trainer.save_checkpoint(path),
        lambda: trainer.save_checkpoint(path, weights_only=True),
        lambda: trainer.strategy.save_pretrained(tmp_path / "exported"),  # type: ignore[attr-defined]
    ]
    for read in reads:
        with pytest.raises(StorageError, match=r"Storage has the state after step 2\. .* ckpt_path='storage'\)"):
            read()
    trainer.strategy.close()  # type: ignore[attr-defined]
    assert not path.exists() and not (tmp_path / "exported").exists()
    _, records = find_resumable([tmp_path / "storage"], job="default", rank=0)
    assert records[0].step == 2


def test_a_disk_that_hangs_while_state_is_written(tmp_path: Path) -> None:
    """The training goes on in memory, and a warning names what a kill would lose; the next checkpoint raises."""
    held = []

    def hang(trainer: Any, module: Any) -> None:
        if trainer.global_step == 2:
            held.append(Hold(trainer.strategy.optimizers[0].rank_state.handler._device.pipeline, write_at=0))

    def save(trainer: Any, module: Any) -> None:
        if trainer.global_step == 6:
            with pytest.raises(StorageTimeoutError, match="has not answered an earlier request"):
                trainer.save_checkpoint(tmp_path / "saved.ckpt")
            held[0].release()

    with pytest.warns(UserWarning, match="did not return within .* A kill would lose all steps after step 2") as warned:
        fit(
            LitTiny(Recipe()),
            tmp_path,
            max_steps=7,
            overlap="none",
            transfer={**WRITTEN_BACK, "persist_every": 2, "io_timeout": lenient()},
            callbacks=[does(on_train_batch_start=hang, on_train_batch_end=save)],
        ).strategy.close()  # type: ignore[attr-defined]
    assert sum("could not be written to storage" in str(each.message) for each in warned) == 1


def test_a_write_that_is_due_within_a_validation(tmp_path: Path) -> None:
    """It does not wait for the validation's end."""
    stored = []

    def pass_time(trainer: Any, module: Any) -> None:
        trainer.strategy.optimizers[0].persistence._since -= 10_000.0

    def look(trainer: Any, module: Any) -> None:
        stored.append(trainer.strategy.optimizers[0].rank_state.handler.stored_step)

    fit(
        LitModel(),
        tmp_path,
        transfer={**WRITTEN_BACK, "persist_every": "2h"},
        callbacks=[does(on_validation_batch_start=pass_time, on_validation_batch_end=look)],
        val_check_interval=2,
        num_sanity_val_steps=0,
    )
    assert stored[0] == 2
