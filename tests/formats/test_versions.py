"""What earlier versions have written is read, and the content of a record changes only together with its version."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightning_smartinfinity import CheckpointError, __version__
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.resume.typed_json import decode, encode
from lightning_smartinfinity.storage.folders.manifest import read_manifest
from lightning_smartinfinity.storage.folders.rank_folder import open_rank_folder
from lightning_smartinfinity.storage.jobs.jobs import find_jobs
from lightning_smartinfinity.storage.records.training_record import packed, read_training_records, record_name
from lightning_smartinfinity.zero3.checkpoints.formats.format_version import EXTRA_KEY
from lightning_smartinfinity.zero3.checkpoints.formats.found_checkpoint import resumable_states
from tests.formats.earlier import ARCHIVES, SOURCES, STEPS, extracted, run
from tests.formats.schemas import ARCHIVED, KIND, NUMBERS, PACKAGES, schemas_of, stored, written
from tests.helpers import power_loss
from tests.helpers.assertions import differing
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.processes import run_module
from tests.helpers.trainers import quiet_trainer
from tests.training.small import Small

WRITTEN = [(archive, kind) for archive, kinds in ARCHIVES.items() for kind in kinds]
USUAL = [case for case in WRITTEN if case != ("2026-11-25-evening", "compressed")]
WITHOUT_RECORDS = "2026-11-23"
EVERY = ["storage", "checkpoint", "universal"]
POSITIONS = {"2026-11-29": [], "0.1.0.dev5": EVERY, "0.1.0.dev6": EVERY}
"""Of which of its sources an archive holds the position of the data, if not of storage alone."""


@pytest.fixture
def folder(archive: str, kind: str, tmp_path: Path) -> Path:
    """A folder with what a training of an earlier version has written."""
    return extracted(archive, tmp_path) / kind


def content(storage: Path) -> dict[str, bytes]:
    """Return every file below a storage folder but the locks, which hold the last owner's process."""
    return {name: data for name, data in power_loss.content(storage).items() if not name.endswith("lock")}


@pytest.mark.parametrize(("archive", "kind"), long_but(USUAL, WRITTEN))
def test_a_fit_goes_on_from_it(archive: str, kind: str, folder: Path, attack: Attack) -> None:
    """Parameters and the optimizer's state begin as they were when they were written, bit for bit.

    From storage, and later from checkpoints, the batches are those that followed then. ``jobs`` lists the step that the
    fit goes on from, and a scrub finds all whole.
    """
    storage = folder / "run" / "storage"
    sources = SOURCES.get(kind, EVERY)[archive == WITHOUT_RECORDS :]
    (job,) = find_jobs(storage)
    assert job.resumable_step == (STEPS if "storage" in sources else None)
    assert not any(main(["scrub", str(path), "--quiet"]) for path in (storage, *folder.glob("checkpoint")))
    run("read", kind, folder, *sources)
    for source in sources:
        expected, found = torch.load(folder / "values.pt"), torch.load(folder / f"{source}.pt")
        assert found.pop("step") == expected.pop("step") == STEPS
        assert differing(found, expected) == [], source
    for source in filter(POSITIONS.get(archive, ["storage"]).__contains__, sources):
        assert torch.load(folder / f"{source} batches.pt") == torch.load(folder / "batches.pt")[STEPS:], source
    attack("upgrade, then a resume from storage or a checkpoint", tries=len(sources), outcome="resumed to the bit")


@pytest.mark.parametrize(("archive", "kind"), [("2026-11-24", "plain")])
def test_two_processes_go_on_from_the_state_of_one(archive: str, kind: str, folder: Path) -> None:
    """The state of an earlier version moves to another number of processes with the same values."""
    assert run_module("tests.formats.earlier", "read", "two processes", folder, "storage", ranks=2).returncode == 0
    expected, found = torch.load(folder / "values.pt"), torch.load(folder / "storage.pt")
    assert all(torch.equal(found[name], expected[name]) for name in expected.keys() - {"step"})


@pytest.mark.parametrize(("archive", "kind"), [("2026-11-29", "plain")])
def test_a_record_that_cannot_be_read_moves_nothing(archive: str, kind: str, folder: Path) -> None:
    """Two processes that resume the training of one refuse it by its content before they move the state.

    A scrub reports it, too, and also a record in which only one value of the Trainer is missing.
    """
    storage = folder / "run" / "storage"
    rank_folder = storage / "default" / "rank-00000"
    with closing(open_rank_folder(rank_folder)) as opened:
        identity = read_manifest(opened).identity
        for record in read_training_records(opened, identity=identity):
            saved = decode(record.content)
            del saved["loop"]["metrics"]
            for other in (saved, {"engine": {}, "loop": {}}):
                other = replace(record, content=encode(other))
                (rank_folder / record_name(record.number)).write_bytes(packed(other, identity))
                assert main(["scrub", str(storage), "--quiet"]) == 1
    before = content(storage)
    done = run_module("tests.formats.earlier", "read", "two processes", folder, "storage", ranks=2)
    assert done.returncode != 0 and done.stderr.count("StorageCorruptError: The training record of step 3 is not") >= 2
    assert content(storage) == before


@pytest.mark.parametrize(("archive", "kind"), [case for case in WRITTEN if case[1] not in SOURCES])
def test_it_is_exported(archive: str, kind: str, folder: Path) -> None:
    """A checkpoint's weights are exported as they were then. Exports of then that have checksums are whole."""
    assert main(["export", str(folder / "checkpoint"), str(folder / "now")]) == 0
    for export in ("export", "export.ckpt"):
        if (folder / "export.ckpt").exists():
            assert main(["scrub", str(folder / export), "--quiet"]) == 0
    expected, found = (load_file(folder / name / "model.safetensors") for name in ("export", "now"))
    assert differing(found, expected) == []


# ---- the content of a record changes only together with its format version


RULE = (
    "The content of a record has changed. If its format version has been released or archived in tests/formats, raise "
    "that version and __version__, and keep reading the one before. Then run: python -m tests.formats.schemas"
)


@pytest.mark.parametrize("archive", ["now", ARCHIVED])
def test_contents_are_those_of_their_versions(archive: str, tmp_path: Path) -> None:
    """Names and types in manifests, training records, checkpoints and universal folders are as stored here."""
    if archive == "now":
        found = schemas_of(written(tmp_path))
        assert {kind: [*schemas] for kind, schemas in found.items()} == {kind: [str(NUMBERS[kind])] for kind in found}
    else:
        found = schemas_of(extracted(archive, tmp_path) / KIND)
    expected = stored()
    for kind, schemas in found.items():
        for version, schema in schemas.items():
            assert schema == expected[kind][version], f"{kind}, version {version}: {RULE}"


def test_a_version_of_the_package_writes_one_version_of_each_format() -> None:
    """An error about a newer file names a version of the package; that version must read the file."""
    assert stored()[PACKAGES].get(__version__) == NUMBERS, (
        "A format version has changed. Give lightning_smartinfinity/__init__.py a new __version__, run make setup, "
        "and then: python -m tests.formats.schemas"
    )


READERS: dict[str, Callable[[Path], object]] = {
    "resume": lambda path: quiet_trainer(path.parent, precision="32-true").fit(Small(), ckpt_path=path),
    "validate": lambda path: quiet_trainer(path.parent, precision="32-true").validate(Small(), ckpt_path=path),
    "newest": lambda path: resumable_states(path, "global_step", needed=()),
    "scrub": lambda path: main(["scrub", str(path), "--quiet"]),
    "export": lambda path: main(["export", str(path), str(path.parent / "out"), "--to", "lightning"]),
    "universal": lambda path: main(["universal", str(path), "--into", str(path.parent / "out"), "--quiet"]),
}


@pytest.mark.parametrize(("name", "file"), [("checkpoint", "*optim_states.pt"), ("universal", "optimizer_state.pt")])
def test_a_checkpoint_of_a_newer_version_is_refused(
    name: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each reader names the file, its format version and the version of the package that reads it."""
    path = extracted(ARCHIVED, tmp_path) / "plain" / name
    (found,) = path.rglob(file)
    saved = torch.load(found, weights_only=True)
    (saved if EXTRA_KEY in saved else saved["optimizer_state_dict"])[EXTRA_KEY].update(version=99, package="9.9.9")
    torch.save(saved, found)
    for reader, read in READERS.items():
        if (name, reader) == ("universal", "universal"):  # it is no checkpoint to convert
            continue
        try:
            assert read(path) == (2 if reader == "scrub" else 1), reader
            words = capsys.readouterr().err
        except CheckpointError as error:
            words = f"smart-infinity: {error}"
        expected = rf"smart-infinity: {found} was .*, 9\.9\.9, in format version 99\. .* 1 to 2\. Use version 9\.9\.9\."
        assert re.search(expected, words), (reader, words)
    assert not (path.parent / "out").exists()
