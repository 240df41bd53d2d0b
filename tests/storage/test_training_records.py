"""Training records around a step that is rolled back."""

from __future__ import annotations

from pathlib import Path

from lightning_smartinfinity.storage import StateStore
from lightning_smartinfinity.storage.records.training_record import TrainingRecord, read_training_records
from tests.storage.makers import commit_generation, create


def record(store: StateStore, generation: int, content: bytes) -> None:
    store.record_training(generation=generation, step=generation, content=content, has_steps=True)


def found(store: StateStore) -> list[TrainingRecord]:
    """Return what a kill at this moment would leave to resume from, newest first."""
    records = read_training_records(store._folders[0].inside, identity=store.records._identity)
    return [record for record in records if record.generation <= store.generation]


def rolled_back(folder: Path) -> StateStore:
    """Return a store whose third step was recorded while it was in flight, and then rolled back."""
    store = create([folder], world_size=1)
    for generation in (0, 1):
        commit_generation(store, generation)
        record(store, generation, b"good")
    record(store, 2, b"failed")
    store.forget_training()
    store.forget_training()  # a rollback may be repeated
    return store


def test_the_next_record_leaves_the_last_good_one(tmp_path: Path) -> None:
    """A loop that goes on after the error can be killed before its next step is committed, and resumes one back."""
    store = rolled_back(tmp_path)
    (newest, *_) = found(store)
    assert (newest.generation, newest.content) == (1, b"good")
    record(store, 2, b"again")
    assert (newest.number, b"good") in {(one.number, one.content) for one in found(store)}
    commit_generation(store, 2)
    assert [one.content for one in found(store)] == [b"again", b"good"]
    # Another rank may not have forgotten the record that failed: the new one is told from it.
    assert found(store)[0].number == newest.number + 3
    record(store, 3, b"after")
    commit_generation(store, 3)
    assert [one.content for one in found(store)] == [b"after", b"again"]
    store.close(remove=True)


def test_a_record_that_is_written_again_is_the_last_good_one(tmp_path: Path) -> None:
    """What was recorded for the step that was rolled back does not come back beside another step's state."""
    store = rolled_back(tmp_path)
    store.records.rewrite(b"good, again")
    commit_generation(store, 2)
    newest = found(store)[0]
    assert (newest.generation, newest.content) == (1, b"good, again")
    store.close(remove=True)
