"""Two cards share one commit record, which is written once the storage of each has flushed what its card wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import StorageError
from lightning_smartinfinity.native import StateFile
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.folders.rank_folder import COMMIT_NAME
from lightning_smartinfinity.storage.state import commit_record as record
from lightning_smartinfinity.storage.state import state_store
from tests.helpers.card_runs import beside_host, cards
from tests.helpers.runif import RunIf
from tests.pipeline.harness import Case, Run, assert_equal, running
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)

CASE = Case(dtype=torch.bfloat16, num_devices=2, durability="power")


class Watched:
    """A state file that notes its flushes among the record's events, and whether they came too early."""

    def __init__(self, file: StateFile, number: int, run: Run, events: list[str]) -> None:
        self.path, self.close = file.path, file.close
        self.fails = False
        self._file, self._number, self._run, self._events = file, number, run, events
        self._before = run.handler.traffic()

    def sync(self) -> None:
        assigned, extents = self._run.store.assigned, self._run.layout.extents.extents
        expected = sum(
            extent.nbytes for extent, device in zip(extents, assigned, strict=True) if device == self._number
        )
        written = (self._run.handler.traffic() - self._before).folders[self._number].write_bytes
        self._events.append(f"flush {self._number}" + ("" if written == expected else " too early"))
        if self.fails:
            raise OSError(5, "Input/output error", self.path)
        self._file.sync()


def watch(run: Run, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Watched], list[str]]:
    """Watch the run's state files and the record; return the files and the list of coming events."""
    events: list[str] = []
    watched = [Watched(file, number, run, events) for number, file in enumerate(run.store.files)]
    run.store.files = tuple(watched)  # type: ignore[assignment]

    def write(folder: OpenFolder, *arguments: object, **options: object) -> int:
        events.append(f"record in {folder.path.parts[-3]}" + (", flushed" if options["flush"] else ""))
        return record.write_record(folder, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(state_store, "write_record", write)
    return watched, events


def test_one_record_after_every_flush(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is flushed when all of its extents are written; then the one record is written and flushed."""
    with running(tmp_path, CASE, device=cards(emulated_cards.build.xclbin)) as run:
        _, events = watch(run, monkeypatch)
        plan = run.collect(1)
        plan.active[:] = True  # every tasklet is written
        run.handler.begin_step(plan)
        run.handler.commit()
        assert events == ["flush 0", "flush 1", "record in disk0, flushed"]
        assert [path.parts[-4] for path in tmp_path.rglob(COMMIT_NAME)] == ["disk0"]


def test_a_flush_that_fails(tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose flush fails is not committed; the step before stays current, also after a crash."""
    with beside_host(tmp_path, CASE, emulated_cards.build.xclbin) as (run, host):
        run.step(0)
        files, events = watch(run, monkeypatch)
        before, generation, content = run.state(), run.store.generation, commit_record(run)
        files[1].fails = True
        run.handler.begin_step(run.collect(1))
        with pytest.raises(StorageError, match=r"disk1.*state\.bin"):
            run.handler.commit()
        assert not [event for event in events if event.startswith("record")]
        assert run.store.generation == generation and commit_record(run) == content
        run.handler.roll_back()
        assert_equal(run.state(), before)
        files[1].fails = False
        run.step(1)
        host.steps([0, 1])
        assert run.store.generation == generation + 1 and commit_record(run) != content


def commit_record(run: Run) -> bytes:
    (path,) = run.folders[0].rglob(COMMIT_NAME)
    return path.read_bytes()
