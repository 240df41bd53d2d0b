"""Whatever a disk does, a training raises our error or ends with the same bits: fault, file, engine, overlap."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity import SmartInfinityError
from lightning_smartinfinity.native import io_engines
from lightning_smartinfinity.storage import recover_store
from lightning_smartinfinity.storage.folders.rank_folder import COMMIT_NAME
from lightning_smartinfinity.zero3.checkpoints.formats.universal_conversion import convert_checkpoint
from tests.helpers.assertions import assert_equal
from tests.helpers.attacks import Attack
from tests.helpers.damage import BLOCK_BYTES, flip_bit, lose_block, misplace_block
from tests.helpers.models import Recipe
from tests.helpers.runif import RunIf
from tests.helpers.waiting import LIMIT, lenient
from tests.reliability.faults import CARD, FAULTS, FaultyDisk, Place, trained, undisturbed
from tests.storage.makers import commit_generation, create
from tests.training.worker import Run, train

ENGINES = [name for name, unavailable in io_engines() if not unavailable]
OVERLAPS = ["none", "forward", "backward"]
SAME = "the same bits"

PLACES = [
    *(Place("state", engine, overlap) for engine in (*ENGINES, CARD) for overlap in OVERLAPS),
    *(Place("parameters", engine, overlap) for engine in ENGINES for overlap in OVERLAPS),
    *(
        Place(file, engine, overlap, crowded=True)
        for file in ("state", "parameters")
        for engine in ("io_uring", "threads")
        for overlap in OVERLAPS
    ),
    *(Place("gradients", CARD, overlap) for overlap in OVERLAPS),
]
SHORT = {
    (Place("state", "io_uring", "none"), "flip"),
    (Place("state", "threads", "none"), "block"),
    (Place("state", "plain", "none"), "extent"),
    (Place("state", "threads", "backward"), "lost"),
    (Place("state", "plain", "forward"), "torn write"),
    (Place("state", "threads", "none", crowded=True), "hung write"),
}
"""The cases that `make test` runs: each fault that could be silent, and each engine and overlap of the host once."""


def _case(place: Place, fault: str) -> Any:
    marks = [] if (place, fault) in SHORT else [pytest.mark.long]
    if place.engine == CARD:
        marks.append(RunIf(xrt=True))
    return pytest.param(place, fault, marks=marks, id=f"{place}-{fault}")


# Nothing between a card and its gradient file makes a transfer short: it is one call that goes on until all is moved.
MATRIX = [_case(place, fault) for place in PLACES for fault in FAULTS if (place.file, fault) != ("gradients", "short")]


@pytest.fixture(scope="module")
def quiet_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the trainings whose disk works."""
    return tmp_path_factory.mktemp("undisturbed")


@pytest.mark.parametrize(("place", "fault"), MATRIX)
@pytest.mark.filterwarnings("ignore:.*is small for SmartSSDs")
def test_file_of_a_training(
    tmp_path: Path, quiet_folder: Path, attack: Attack, request: pytest.FixtureRequest, place: Place, fault: str
) -> None:
    """Nothing is silent, nothing hangs, and each fault does happen. Where parameters lie changes no bit either."""
    what = FAULTS[fault]
    if place.engine == CARD:
        place = replace(place, xclbin=request.getfixturevalue("emulated_cards").build.xclbin)
    expected, counts = undisturbed(quiet_folder / str(place), place)
    expected.assert_same(undisturbed(quiet_folder / "first", Place("state", ENGINES[0], "none"))[0])
    of_reads = what.at is None or "read" in what.at
    known = counts.reads if of_reads else counts.writes
    if place.file == "parameters":
        known //= 2  # how many are read ahead when the counting begins differs from run to run
    number = random.Random(f"{place} {fault}").randrange(known)
    disk = FaultyDisk(place, what, number)
    timeout = lenient(1.0) if what.counted is None else 10 * LIMIT
    try:
        trained(tmp_path, disk, place, timeout=timeout).assert_same(expected)
    except SmartInfinityError as error:
        assert not what.harmless, error
        outcome = type(error).__name__
    else:
        outcome = SAME
    assert disk.fired > 0, f"request {number} of {counts.reads} reads and {counts.writes} writes was not the disk's"
    attack(f"{what.name}, of {place.described}", tries=1, outcome=outcome)


DAMAGES = {
    "bit flip": flip_bit,
    "block that lies elsewhere": misplace_block,
    "block that was never written": lose_block,
}


def changed(
    damage: str,
    content: bytes,
    path: Path,
    generator: random.Random,
    read: Callable[[bytes], bytes] = bytes,
) -> None:
    """Damage a file until what is read of it has changed: two blocks may be equal, or of zeros."""
    for _ in range(1000):
        path.write_bytes(content)
        DAMAGES[damage](path, generator)
        if read(path.read_bytes()) != read(content):
            return
    raise AssertionError(f"{damage} leaves {path} as it is")


@pytest.mark.parametrize("damage", DAMAGES)
def test_commit_record(tmp_path: Path, attack: Attack, damage: str) -> None:
    """Recovery finds the newest generation with all of its numbers, or warns that it goes on from the one before."""
    store = create([tmp_path])
    for generation in range(3):
        commit_generation(store, generation)
    path = Path(store.files[0].path).with_name(COMMIT_NAME)
    store.close(remove=False)
    content = path.read_bytes()
    length = int.from_bytes(content[48:56], "little")

    def newest(content: bytes) -> bytes:
        return content[:length]

    def records(content: bytes) -> bytes:
        return newest(content) + newest(content[BLOCK_BYTES:])

    for number in range(20):
        changed(damage, content, path, random.Random(number), records)
        intact = newest(path.read_bytes()) == newest(content)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            store = recover_store([tmp_path])
        found = store.generation
        assert found == (2 if intact else 1)
        told = [str(warning.message) for warning in warned]
        assert [sentence.endswith(f"Going on from generation {found}.") for sentence in told] == [True]
        assert store.steps.tolist() == [found] * len(store.steps)
        assert store.tasklet_generations.tolist() == [found] * store.extents.num_tasklets
        store.close(remove=False)
        outcome = f"the {'newest' if found == 2 else 'previous'} generation, with a warning"
        attack(f"{damage}, in a commit record", tries=1, outcome=outcome)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint and its universal form."""
    folder = tmp_path_factory.mktemp("checkpoints")
    train(Run(out=str(folder / "a"), recipe=Recipe(max_steps=2), save_after_fit=str(folder / "ordinary")))
    convert_checkpoint(folder / "ordinary", folder / "universal")
    return folder


SAVED_FILES = {
    "ordinary": ("*optim_states.pt", "*model_states.pt", "latest"),
    "universal": ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "optimizer_state.pt", "crc32c.pt", "*model_states.pt"),
}
SHORT_CHECKPOINTS = {("universal", "exp_avg.pt", "bit flip"), ("ordinary", "latest", "bit flip")}


@pytest.mark.parametrize(
    ("kind", "name", "damage"),
    [
        pytest.param(
            *(kind, name, damage), marks=[] if (kind, name, damage) in SHORT_CHECKPOINTS else [pytest.mark.long]
        )
        for kind, names in SAVED_FILES.items()
        for name in names
        for damage in DAMAGES
    ],
)
def test_checkpoint(tmp_path: Path, checkpoints: Path, attack: Attack, kind: str, name: str, damage: str) -> None:
    """A training that resumes from a damaged checkpoint raises our error or ends with the same bits."""
    path = tmp_path / "a.ckpt"
    shutil.copytree(checkpoints / kind, path)
    resumed = Run(out=str(tmp_path / "b"), recipe=Recipe(max_steps=3), resume=str(path))
    expected, _, recorder = train(resumed)
    files = sorted(path.rglob(name))
    for number in range(3):
        generator = random.Random(f"{name} {damage} {number}")
        file = generator.choice(files)
        content = file.read_bytes()
        changed(damage, content, file, generator)
        try:
            module, _, found = train(resumed)
        except SmartInfinityError as error:
            outcome = type(error).__name__
        else:
            outcome = SAME
            assert module.losses == expected.losses
            assert_equal(found.masters, recorder.masters)
        finally:
            file.write_bytes(content)
        what = "a checkpoint" if kind == "ordinary" else "a universal checkpoint"
        attack(f"{damage}, in {what}", tries=1, outcome=outcome)
