"""The content of a record changes only together with its format version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity import CheckpointError, __version__
from lightning_smartinfinity.zero3.checkpoints.formats.optimizer_state import check_extra
from tests.formats.earlier import extracted
from tests.formats.schemas import ARCHIVED, KIND, NUMBERS, PACKAGES, schemas_of, stored, written

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


def test_a_checkpoint_of_a_newer_version_is_refused() -> None:
    """The error names the checkpoint, its format version and the version of the package that reads it."""
    extra, optimizer = {"version": 99, "package": "9.9.9"}, Any
    with pytest.raises(
        CheckpointError, match=r"^a.ckpt was .*, 9\.9\.9, in format version 99\. .* 1 to 2\. Use version 9"
    ):
        check_extra(optimizer, extra, "a.ckpt")  # type: ignore[arg-type]
