"""Failed and stopped steps: their errors, their rollback and the steps after them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_smartinfinity import TopK
from lightning_smartinfinity.errors import StorageCorruptError, StorageError, StorageFullError
from lightning_smartinfinity.pipeline.step_plan import StepPlan
from tests.helpers.attacks import Attack
from tests.helpers.native_testing import inject
from tests.pipeline.harness import Case, Run, assert_equal, running
from tests.pipeline.wandering import wander

CASES = [
    Case(),
    Case(dtype=torch.bfloat16),
    Case(dtype=torch.float16, num_devices=2),
    Case(staged=True, num_buffers=2),
    Case(staged=True, dtype=torch.bfloat16, num_buffers=2),
    Case(dtype=torch.bfloat16, num_devices=2, compression=TopK(0.05)),
    Case(staged=True, num_buffers=2, compression=TopK(0.05)),
]
IDS = ["fp32", "bf16", "fp16-two-folders", "fp32-staged", "bf16-staged", "bf16-compressed", "fp32-staged-compressed"]


def undisturbed(folder: Path, case: Case, num_steps: int) -> dict[str, torch.Tensor]:
    with running(folder, case) as run:
        run.steps(range(num_steps))
        return run.state()


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("waited", [None, slice(0, 1), slice(None)], ids=["at-once", "after-one", "after-all"])
def test_rollback_restores_every_bit(tmp_path: Path, case: Case, waited: slice | None) -> None:
    """Rolling back a step restores partition, state and step counts, and the step can be repeated."""
    expected = undisturbed(tmp_path / "undisturbed", case, 3)
    with running(tmp_path / "disturbed", case) as run:
        run.steps(range(2))
        before = run.state()
        run.handler.begin_step(run.collect(4))
        if waited is not None:
            run.handler.step.wait(waited)
        run.handler.roll_back()
        assert not run.handler.in_flight
        assert_equal(run.state(), before)
        run.step(2)
        assert_equal(run.state(), expected)


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        ({"fail_write_at": 2, "errno": errno.ENOSPC}, StorageFullError),
        ({"fail_write_at": 3, "errno": errno.EIO}, StorageError),
        ({"fail_read_at": 3, "errno": errno.EIO}, StorageError),
    ],
    ids=["full", "write-error", "read-error"],
)
def test_failed_step_can_be_done_again(
    tmp_path: Path, case: Case, faults: dict[str, int], kind: type[StorageError]
) -> None:
    """The error names path, offset and remedy. After a rollback the same step succeeds with the same bits."""
    expected = undisturbed(tmp_path / "undisturbed", case, 3)
    with running(tmp_path / "disturbed", case) as run:
        run.steps(range(2))
        before, plan = run.state(), run.collect(2)
        inject(run.device.pipeline, seed=1, **faults)
        run.handler.begin_step(plan)
        with pytest.raises(kind, match=r"offset \d+ of /.*state\.bin \(tasklet \d") as caught:
            run.handler.commit()
        assert type(caught.value) is kind
        assert caught.value.remedy
        with pytest.raises(kind):
            run.handler.step.wait()
        assert run.handler.generation == 2
        run.handler.roll_back()
        assert_equal(run.state(), before)
        run.handler.begin_step(plan)
        run.handler.commit()
        assert_equal(run.state(), expected)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    number=st.integers(0, 1 << 30),
    events=st.lists(st.sampled_from(["commit", "stop", "fail read", "fail write"]), min_size=3, max_size=8),
    seed=st.integers(0, 1 << 16),
    position=st.integers(0, 5),
    staged=st.booleans(),
    compressed=st.booleans(),
)
def test_any_order_of_failures(
    tmp_path: Path, number: int, events: list[str], seed: int, position: int, staged: bool, compressed: bool
) -> None:
    """Only committed steps count, under any sequence of failures, stopped steps and moved tasklets."""
    codec = TopK(0.05) if compressed else None
    case = Case(dtype=torch.bfloat16, staged=staged, num_devices=2, compression=codec)
    folder = tmp_path / f"{number}-{seed}-{len(events)}"
    expected = undisturbed(folder / "undisturbed", case, len(events))
    with running(folder / "disturbed", case) as run:
        wander(run, seed=seed)
        for step, event in enumerate(events):
            before, plan = torch.cat(run.partition), run.collect(step)
            faults = {"fail read": {"fail_read_at": position}, "fail write": {"fail_write_at": position}}.get(event, {})
            inject(run.device.pipeline, seed=seed, max_delay_us=300, short_transfer_every=7, **faults)
            if event != "commit":
                begin_and_roll_back(run, plan)
                torch.testing.assert_close(torch.cat(run.partition), before, rtol=0, atol=0)
            finish(run, plan)
        with suppress(StorageError):
            run.state()  # a fault still pending
        assert_equal(run.state(), expected)


def begin_and_roll_back(run: Run, plan: StepPlan) -> None:
    """Begin a step and roll it back, whether it failed or not."""
    run.handler.begin_step(plan)
    with suppress(StorageError):
        run.handler.step.wait(slice(0, 2))
    roll_back(run)


def finish(run: Run, plan: StepPlan) -> None:
    """Commit a step, with a second try if a fault was still pending."""
    run.handler.begin_step(plan)
    try:
        run.handler.commit()
    except StorageError:
        roll_back(run)
        run.handler.begin_step(plan)
        run.handler.commit()


def roll_back(run: Run) -> None:
    try:
        run.handler.roll_back()
    except StorageError:
        run.handler.roll_back()


def test_rollback_that_fails_can_be_tried_again(tmp_path: Path) -> None:
    """A read error during the rollback is reported, and the next try restores the partition."""
    with running(tmp_path, Case()) as run:
        num_reads = run.handler.traffic().read_calls
        run.step(1)
        num_reads = run.handler.traffic().read_calls - num_reads
        before = run.state()
        inject(run.device.pipeline, fail_read_at=num_reads + 1)
        run.handler.begin_step(run.collect(1))
        with pytest.raises(StorageError, match=r"state\.bin"):
            run.handler.roll_back()
        assert run.handler.in_flight
        run.handler.roll_back()
        assert_equal(run.state(), before)


def test_one_place_cannot_roll_back(tmp_path: Path) -> None:
    """With durability none rollback is refused. The error says why and names the alternative."""
    with running(tmp_path, Case(durability="none")) as run:
        assert not run.handler.can_roll_back
        run.handler.begin_step(run.collect(1))
        with pytest.raises(StorageError, match="durability='none'") as caught:
            run.handler.roll_back()
        assert "durability='step'" in caught.value.remedy


def test_commit_record_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the commit record cannot be written, the step rolls back, and succeeds once the disk has recovered."""
    real, calls = os.pwrite, []

    def full_once(descriptor: int, content: bytes, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, content, offset)

    case = Case()
    expected = undisturbed(tmp_path / "undisturbed", case, 2)
    with running(tmp_path / "disturbed", case) as run:
        run.step(0)
        before, plan = run.state(), run.collect(1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full_once)
            run.handler.begin_step(plan)
            with pytest.raises(StorageFullError, match=r"commit\.bin"):
                run.handler.commit()
            run.handler.roll_back()
            assert_equal(run.state(), before)
            run.handler.begin_step(plan)
            run.handler.commit()
        assert_equal(run.state(), expected)


def test_commit_record_in_doubt_ends_training(tmp_path: Path) -> None:
    """No step may begin after a record that could be neither written nor erased: it may reappear after a crash."""
    with running(tmp_path, Case()) as run:
        before = run.state()
        run.handler.begin_step(run.collect(1))
        commit_path = run.folders[0] / "default" / "rank-00000" / "commit.bin"
        commit_path.unlink()
        with pytest.raises(StorageError, match=r"commit\.bin"):
            run.handler.commit()
        run.handler.roll_back()
        assert_equal(run.state(), before)
        with pytest.raises(StorageError, match=r"commit\.bin"):
            run.handler.begin_step(run.collect(2))


@contextmanager
def failing_elsewhere() -> Iterator[None]:
    """Fail on another rank after this one has committed."""
    yield
    raise StorageFullError("Writing the commit record of another rank failed.", "Free space.")


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_step_that_another_rank_could_not_commit(tmp_path: Path, case: Case) -> None:
    """A step committed here but not on another rank is rolled back, on storage too, and can be repeated."""
    expected = undisturbed(tmp_path / "undisturbed", case, 3)
    with running(tmp_path / "disturbed", case) as run:
        run.steps(range(2))
        before, plan = run.state(), run.collect(2)
        run.handler.begin_step(plan)
        with pytest.raises(StorageFullError, match="another rank"):
            run.handler.commit(together=failing_elsewhere)
        assert run.handler.generation == 2
        run.handler.roll_back()
        assert_equal(run.state(), before)
        run.handler.begin_step(plan)
        run.handler.commit()
        assert_equal(run.state(), expected)
        assert run.handler.traffic().steps == 3
        run.handler.begin_step(run.collect(3))
        with pytest.raises(StorageFullError):
            run.handler.commit(together=failing_elsewhere)
        run.close(remove=False)
        with running(tmp_path / "disturbed", case, recover=True) as again:
            assert again.handler.generation == 3
            again.partition = run.partition
            for name in ("master", "exp_avg", "exp_avg_sq", "steps"):
                assert torch.equal(again.state()[name], expected[name]), name


def test_step_whose_agreement_was_interrupted(tmp_path: Path) -> None:
    """An interrupted agreement leaves the step in flight.

    If another rank then fails, the step is rolled back although its record was written.
    """

    @contextmanager
    def interrupted() -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    with running(tmp_path, Case()) as run:
        run.step(1)
        before = run.state()
        run.handler.begin_step(run.collect(2))
        with pytest.raises(KeyboardInterrupt):
            run.handler.commit(together=interrupted)
        assert run.handler.in_flight and run.handler.generation == 2
        with pytest.raises(StorageFullError, match="another rank"):
            run.handler.commit(together=failing_elsewhere)
        run.handler.roll_back()
        assert run.handler.generation == 1
        assert_equal(run.state(), before)


def test_modification_that_another_rank_could_not_commit(tmp_path: Path) -> None:
    """A modification that another rank could not commit is rolled back as well."""
    with running(tmp_path, Case()) as run:
        run.step(1)
        before = run.state()
        ones = {"exp_avg": np.ones(12_000, np.float32)}
        with pytest.raises(StorageFullError, match="another rank"):
            run.handler.state.modify({1: ones}, together=failing_elsewhere)
        with pytest.raises(StorageFullError, match="another rank"):
            run.handler.state.replace(lambda _: None, steps=run.handler.steps + 7, together=failing_elsewhere)
        assert run.handler.generation == 1
        assert_equal(run.state(), before)
        run.handler.state.modify({1: ones})
        assert run.handler.generation == 2


def test_one_place_cannot_roll_back_what_it_committed(tmp_path: Path) -> None:
    """With durability none a committed step cannot be rolled back, even if another rank failed."""
    with running(tmp_path, Case(durability="none")) as run:
        run.handler.begin_step(run.collect(1))
        with pytest.raises(StorageFullError, match="another rank"):
            run.handler.commit(together=failing_elsewhere)
        with pytest.raises(StorageError, match="durability='none'"):
            run.handler.roll_back()


@pytest.mark.parametrize("offset_in_extent", [100, 16_384 + 9, 32_768 + 4_000, 49_152 + 4_095])
def test_flipped_bit_is_found(tmp_path: Path, offset_in_extent: int, attack: Attack) -> None:
    """A flipped bit of master, exp_avg, exp_avg_sq or trailer is reported with path and remedy."""
    attack("bit flip in state on storage", tries=1, outcome="StorageCorruptError with path and offset")
    with running(tmp_path, Case()) as run:
        run.step(1)
        extents = run.layout.extents
        offset = extents.place_offset(int(run.store.placement.positions[2])) + offset_in_extent
        path = Path(run.store.files[0].path)
        flip_bit(path, offset)
        with pytest.raises(StorageCorruptError, match=r"tasklet 2 at offset \d+ of /.*state\.bin is refused") as caught:
            run.state()
        assert "checkpoint" in caught.value.remedy
        run.handler.begin_step(run.collect(3))
        if offset_in_extent == 100:  # a 32-true step reads the partition instead of the master
            run.handler.commit()
            return
        with pytest.raises(StorageCorruptError, match=r"tasklet 2 at offset \d+ of /.*state\.bin is refused"):
            run.handler.step.wait()


def test_extents_of_another_job(tmp_path: Path) -> None:
    """State copied from another job's store is refused."""
    foreign = Case(job_id=b"of sixteen bytes")
    with running(tmp_path / "mine", Case()) as run, running(tmp_path / "theirs", foreign) as other:
        Path(run.store.files[0].path).write_bytes(Path(other.store.files[0].path).read_bytes())
        with pytest.raises(StorageCorruptError, match="another job"):
            run.state()


def test_lost_write(tmp_path: Path) -> None:
    """An extent of an older generation at the current place, from a write that was lost, is refused."""
    with running(tmp_path, Case()) as run:
        run.steps([1])
        path = Path(run.store.files[0].path)
        content = bytearray(path.read_bytes())
        run.steps([2])
        current = bytearray(path.read_bytes())
        begin = run.layout.extents.place_offset(int(run.store.placement.positions[0]))
        end = begin + run.layout.extents.place_bytes
        current[begin:end] = content[begin:end]
        path.write_bytes(current)
        with pytest.raises(StorageCorruptError, match="generation"):
            run.state()


def test_truncated_file(tmp_path: Path) -> None:
    """A truncated state file raises a StorageError that names it."""
    with running(tmp_path, Case()) as run:
        os.truncate(run.store.files[0].path, 8192)
        with pytest.raises(StorageError, match=r"state\.bin"):
            run.state()


def test_modification_that_fails_changes_nothing(tmp_path: Path) -> None:
    """A failed modification changes nothing, because it writes to the other place."""
    with running(tmp_path, Case()) as run:
        run.step(1)
        before = run.state()
        inject(run.device.pipeline, fail_write_at=0)
        with pytest.raises(StorageError, match=r"state\.bin"):
            run.handler.state.modify({1: {"exp_avg": np.ones(12_000, np.float32)}})
        assert_equal(run.state(), before)
        assert run.handler.generation == 1


def flip_bit(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
