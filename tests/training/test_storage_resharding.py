"""An interrupted fit goes on from storage on another number of processes, as it does from an ordinary checkpoint."""

from __future__ import annotations

import dataclasses
import random
import shutil
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.errors import CheckpointError, StorageError, StorageFullError
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.storage.jobs.trainings import trainings_in
from lightning_smartinfinity.storage.state import space
from lightning_smartinfinity.storage.state.parts import find_parts
from lightning_smartinfinity.zero3.setup import rank_migration
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.streamed_state import WRITTEN_BACK
from tests.training.storage_worker import CHANGE, StorageRun, end_of, fit, launch, steps_of

# Nothing depends on random numbers, which differ when the number of processes has changed.
STEADY = {"noise": False, "shuffle": False, "dropout": 0.0, "length": 72, "last": 1.0}
WHOLE_BATCH: dict[str, Any] = {
    "module": {"batch": 12, "length": 12, "width": 128},
    "trainer": {"use_distributed_sampler": False},
}
NUM_KILLS = 12


def run_of(folder: Path, **settings: Any) -> StorageRun:
    storage = [str(folder / f"storage{number}") for number in range(settings.pop("folders", 1))]
    settings["transfer"] = {"keep": "on-failure", **settings.get("transfer", {})}
    settings["module"] = {**STEADY, **settings.get("module", {})}
    return StorageRun(out=str(folder), storage=storage, **{"epochs": 1, **settings})


def run(folder: Path, *, ends: int | None = None, **settings: Any) -> tuple[int, str]:
    """Fit in processes of their own."""
    return launch(run_of(folder, **settings), ends=ends)


def stores(folder: Path) -> list[str]:
    """Return the stores in all storage folders, as job and rank."""
    return sorted(f"{path.parents[1].name}/{path.parent.name}" for path in folder.glob("storage*/*/rank-*/state.bin"))


NVME = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}
USUAL: tuple[int, int, dict[str, Any]] = (2, 3, {"options": {"overlap": "forward"}})
OTHERS: list[tuple[int, int, dict[str, Any]]] = [
    (1, 2, {"options": {"overlap": "forward"}, "transfer": WRITTEN_BACK}),
    *(
        (3, devices, {"options": {"overlap": overlap, "state_format": state_format}})
        for state_format in STATE_FORMATS
        for devices, overlap in ((1, "none"), (2, "backward"))
    ),
    (3, 2, {"options": {"zero": NVME}}),
    (
        3,
        1,
        {
            "options": {"zero": {"sub_group_size": 3000}},
            "transfer": {"dram_cache_bytes": 100_000, "durability": "power"},
        },
    ),
    (3, 2, {"transfer": {"keep": True}}),
    (
        1,
        3,
        {"transfer": {**WRITTEN_BACK, "persist_every": 2, "dram_cache_bytes": 30_000}, "options": {"overlap": "none"}},
    ),
    (1, 2, {"options": {"compression": {"ratio": 0.1}}}),  # a residual that begins at zero
]


@pytest.mark.parametrize(("before", "devices", "settings"), long_but([USUAL], [USUAL, *OTHERS]))
def test_another_number_of_processes(before: int, devices: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """A fit goes on with more processes or fewer, with the bits with which its checkpoint goes on, from any home."""
    settings = {**settings, "module": {"width": 128}, "trainer": {"max_steps": 5}}
    folder, other = tmp_path / "storage", tmp_path / "checkpoint"
    code, output = run(folder, devices=before, kill_at="error at batch start", kill_step=3, save_every=3, **settings)
    assert code != 0 and "an error of the user's" in output, output[-4000:]
    for out, resumed in ((folder, {"resume": True}), (other, {"checkpoint": str(folder / "last.ckpt")})):
        _, output = run(out, devices=devices, seed=2, **resumed, **settings, ends=0)
        assert output.count("random states are not restored") == output.count("The fit was saved within an epoch") == 1
    for rank in range(devices):
        ours, theirs = steps_of(folder, rank), steps_of(other, rank)
        assert [ours[step] for step in (4, 5)] == [*theirs.values()]
        assert end_of(folder, rank)["state"] == end_of(other, rank)["state"]
    assert len(stores(folder)) == len(stores(other))


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a fit on two processes in two folders that was interrupted after three steps."""
    folder = tmp_path_factory.mktemp("two") / "run"
    code, output = run(folder, devices=2, folders=2, kill_at="error at batch start", kill_step=3)
    assert code != 0 and len(stores(folder)) == 4, output[-4000:]
    return folder.rename(folder.with_name("elsewhere"))  # manifests name the storage folders, which must not be found


@pytest.fixture
def left(interrupted: Path, tmp_path: Path) -> Path:
    """Return a copy of that folder."""
    return copied(interrupted, tmp_path / "left")


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


FURTHER: dict[str, Any] = {"resume": True, "seed": 9, "folders": 2, "trainer": {"max_steps": 5}}


@pytest.mark.parametrize(
    ("moment", "numbers"),
    [
        ("fill", (2,)),
        *(
            pytest.param(moment, (1, 2, 3), marks=pytest.mark.long)
            for moment in ("way made", "fill", "first record", "removal")
        ),
    ],
)
def test_a_kill_within_the_change(
    moment: str, numbers: Collection[int], left: Path, tmp_path: Path, attack: Attack
) -> None:
    """A fit that is killed while its stores are moved to another number of processes goes on with any number."""
    attack(
        "kill in a change to another number of processes, then ckpt_path='storage'",
        tries=len(numbers),
        outcome="resumed to the bit with the old, the new and another number",
    )
    killed = copied(left, tmp_path / "killed")
    change = {"devices": 3, "kill_at": f"kill at {moment}", "kill_rank": 1}
    run(killed, **FURTHER | change, ends=-signal.SIGKILL)
    assert any("default.aside" in store for store in stores(killed))
    for devices in numbers:
        after, expected = (copied(folder, tmp_path / f"{folder.name}{devices}") for folder in (killed, left))
        for folder in (after, expected):
            run(folder, devices=devices, **FURTHER, ends=0)
            assert stores(folder) == []
        for rank in range(devices):
            assert steps_of(after, rank) == steps_of(expected, rank)
        assert end_of(after)["state"] == end_of(expected)["state"]  # further ranks may have got the first one's buffers


def refused(folder: Path, **settings: Any) -> Exception:
    """Return the error of a fit in this process that resumes on one process, and changes nothing."""
    before = stores(folder)
    with pytest.raises((StorageError, CheckpointError)) as caught:
        fit(run_of(folder, **FURTHER | settings))
    assert stores(folder) == before
    return caught.value


def test_what_is_refused_changes_nothing(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little space, another model and a part that is missing or out of reach: each error says what to do."""
    parts = find_parts([left / "storage0", left / "storage1"], ["default"])
    (training,) = trainings_in(parts, "default")
    seen = [part for part in parts if (part.rank, part.device) != (1, 1)]
    with pytest.raises(StorageError, match=r"Rank 2 cannot reach '.*/storage1/default/rank-00001'") as caught:
        rank_migration._folders_here(training, seen, rank=2)
    assert "Resume with 2 processes, save a checkpoint, and resume from that" in caught.value.remedy
    request = space._request

    def nearly_full(*args: Any, **kwargs: Any) -> Any:
        return dataclasses.replace(request(*args, **kwargs), free_bytes=1000)

    with monkeypatch.context() as patch:
        patch.setattr(space, "_request", nearly_full)
        full = refused(left, transfer={"gradient_bytes": "1GB"})  # a busy machine has little memory for gradients
    assert (
        isinstance(full, StorageFullError)
        and "Resume with 2 processes, save a checkpoint, and resume from that" in full.remedy
        and "its model was" in str(refused(left, module={"turned": True}))
    )
    part = left / "storage1/default/rank-00001"
    part.rename(left / "elsewhere")
    missing = refused(left)
    assert (
        "takes all of its parts, and 'default/rank-00001' in '" in str(missing)
        and "storage1' cannot be found" in str(missing)
        and "copy the part there" in str(missing)
    )
    shutil.copytree(left / "elsewhere", part)
    fit(run_of(left, **FURTHER)).close()
    assert end_of(left)["step"] == 5 and stores(left) == []


@pytest.mark.long
@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_kills_while_the_number_changes(overlap: str, tmp_path: Path, attack: Attack) -> None:
    """A fit that goes on with one process and two in turn, killed again and again, ends as one that never stopped.

    Both processes see the same batch, which is the whole epoch: half of it twice is the same gradient to the bit.
    """
    attack(
        "kill at a random moment of a fit or of a change of its number of processes, then ckpt_path='storage'",
        tries=NUM_KILLS,
        outcome="resumed to the bit",
    )
    settings: dict[str, Any] = {**WHOLE_BATCH, "epochs": 4 * NUM_KILLS, "options": {"overlap": overlap}}
    run(tmp_path / "straight", **settings, ends=0)
    draw, changes, folder = random.Random(overlap), False, tmp_path / "killed"
    for number in range(NUM_KILLS):
        when = draw.choice([*CHANGE] if changes else ["batch start", "step", "batch end"])
        moment = {"kill_at": f"kill at {when}", "kill_step": max([1, *steps_of(folder)]) + draw.randrange(2, 4)}
        code, output = run(folder, devices=1 + number % 2, resume=number > 0, **moment, **settings)
        assert code == -signal.SIGKILL, (number, when, output[-4000:])
        changes = not changes
    run(folder, resume=True, **settings, ends=0)
    assert (
        steps_of(folder) == steps_of(tmp_path / "straight")
        and end_of(folder)["state"] == end_of(tmp_path / "straight")["state"]
        and stores(folder) == []
    )
