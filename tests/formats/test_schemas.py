"""The content of a record changes only together with its format version."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import CheckpointError, __version__
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.zero3.checkpoints.formats.format_version import EXTRA_KEY
from lightning_smartinfinity.zero3.checkpoints.formats.found_checkpoint import saved_step
from tests.formats.earlier import extracted
from tests.formats.schemas import ARCHIVED, KIND, NUMBERS, PACKAGES, schemas_of, stored, written
from tests.helpers.trainers import quiet_trainer
from tests.training.small import Small

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
    "newest": lambda path: saved_step(path, "global_step", needed=()),
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
