"""The content of a record changes only together with its format version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity import CheckpointError
from lightning_smartinfinity.storage.folders.manifest import FORMAT_VERSION
from lightning_smartinfinity.storage.records.training_record import RECORD_VERSION
from lightning_smartinfinity.zero3.checkpoints.formats.optimizer_state import CHECKPOINT_VERSION, check_extra
from tests.formats.earlier import extracted
from tests.formats.schemas import KIND, RELEASED, schemas_of, stored, written

RULE = (
    "The content of a record has changed. If its format version has been released or archived in tests/formats, raise "
    "the version and keep reading the one before. Then run: python -m tests.formats.schemas"
)


@pytest.mark.parametrize("archive", ["now", RELEASED])
def test_contents_are_those_of_their_versions(archive: str, tmp_path: Path) -> None:
    """Names and types in manifests, training records, checkpoints and universal folders are as stored here."""
    if archive == "now":
        found = schemas_of(written(tmp_path))
        versions = {"manifest": FORMAT_VERSION, "training record": RECORD_VERSION, "checkpoint": CHECKPOINT_VERSION}
        assert {kind: [str(version)] for kind, version in versions.items()} == {kind: [*found[kind]] for kind in found}
    else:
        found = schemas_of(extracted(archive, tmp_path) / KIND)
    expected = stored()
    for kind, schemas in found.items():
        for version, schema in schemas.items():
            assert schema == expected[kind][version], f"{kind}, version {version}: {RULE}"


def test_a_checkpoint_of_a_newer_version_is_refused() -> None:
    """The error names the checkpoint, its format version and the version of the package that reads it."""
    extra, optimizer = {"version": 99, "package": "9.9.9"}, Any
    with pytest.raises(
        CheckpointError, match=r"^a.ckpt was .*, 9\.9\.9, in format version 99\. .* 1 to 2\. Use version 9"
    ):
        check_extra(optimizer, extra, "a.ckpt")  # type: ignore[arg-type]
